//! The `traceparent` field (W3C Trace Context, level 2). No clock, no randomness.

use std::fmt;

use http::HeaderValue;
use http::header::HeaderName;

use crate::http::Fields;

pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
pub const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Trace id, span id and flags of a request. Neither id is all zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceContext {
    pub trace_id: [u8; 16],
    pub span_id: [u8; 8],
    /// The caller records the trace and asks the next hops to record it too.
    pub sampled: bool,
    /// The trace id is random according to its originator. Passed on; never set for traces that
    /// begin here.
    pub random: bool,
}

/// Length in bytes of a `traceparent` of version 00.
const LENGTH: usize = 55;
const SAMPLED: u8 = 1;
const RANDOM: u8 = 2;

impl TraceContext {
    /// Reads `traceparent` from `headers`; `None` if it is absent, invalid, or there are several.
    pub fn of(headers: &Fields) -> Option<Self> {
        let mut values = headers.get_all(TRACEPARENT);
        match (values.next(), values.next()) {
            (Some(value), None) => Self::parse(value.as_bytes()),
            _ => None,
        }
    }

    /// Parses `version "-" trace-id "-" parent-id "-" trace-flags`. Of a later version, the bytes
    /// after these four members are ignored (§3.2.4).
    pub fn parse(value: &[u8]) -> Option<Self> {
        let (known, rest) = value.split_at_checked(LENGTH)?;
        let [version] = hexadecimal(&known[0..2])?;
        let is_whole = match version {
            0 => rest.is_empty(),
            0xff => false,
            _ => rest.first().is_none_or(|byte| *byte == b'-'),
        };
        let dashes = [known[2], known[35], known[52]];
        if !is_whole || dashes != *b"---" {
            return None;
        }
        let trace_id = hexadecimal(&known[3..35])?;
        let span_id = hexadecimal(&known[36..52])?;
        let [flags] = hexadecimal(&known[53..55])?;
        if trace_id == [0; 16] || span_id == [0; 8] {
            return None;
        }
        Some(Self {
            trace_id,
            span_id,
            sampled: flags & SAMPLED != 0,
            random: flags & RANDOM != 0,
        })
    }

    /// Begins a new trace, with ids made from `random`.
    pub fn root(random: [u64; 3], sampled: bool) -> Self {
        let trace_id = u128::from(random[0]) << 64 | u128::from(random[1]);
        let trace_id = trace_id.max(1).to_be_bytes();
        let span_id = random[2].max(1).to_be_bytes();
        Self {
            trace_id,
            span_id,
            sampled,
            random: false,
        }
    }

    /// Returns the context of a child span in the same trace.
    #[must_use]
    pub fn child(self, random: u64) -> Self {
        Self {
            span_id: random.max(1).to_be_bytes(),
            ..self
        }
    }

    /// Formats the value of `traceparent`. It is marked sensitive, so that HPACK does not put it
    /// into the dynamic table: every value differs and would evict useful entries.
    pub fn to_value(self) -> HeaderValue {
        let mut text = *b"00-................................-................-00";
        write_hexadecimal(&self.trace_id, &mut text[3..35]);
        write_hexadecimal(&self.span_id, &mut text[36..52]);
        text[54] += u8::from(self.sampled) * SAMPLED + u8::from(self.random) * RANDOM;
        // Digits, letters and dashes are a valid field value.
        let mut value =
            HeaderValue::from_bytes(&text).unwrap_or_else(|_| HeaderValue::from_static(""));
        value.set_sensitive(true);
        value
    }

    /// Trace id for display.
    pub fn trace(self) -> TraceId {
        TraceId(self.trace_id)
    }
}

/// Trace id, displayed as 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TraceId([u8; 16]);

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Decodes hexadecimal digits. Lower case only, as the specification requires.
fn hexadecimal<const N: usize>(text: &[u8]) -> Option<[u8; N]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

fn write_hexadecimal(bytes: &[u8], text: &mut [u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for (byte, pair) in bytes.iter().zip(text.chunks_exact_mut(2)) {
        pair[0] = DIGITS[usize::from(byte >> 4)];
        pair[1] = DIGITS[usize::from(byte & 15)];
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Example of the specification.
    const EXAMPLE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn example() -> TraceContext {
        TraceContext::parse(EXAMPLE.as_bytes()).unwrap()
    }

    #[test]
    fn parses_and_formats_the_example_of_the_specification() {
        let context = example();
        let trace = context.trace().to_string();
        assert_eq!(trace, "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!(context.span_id, 0x00f0_67aa_0ba9_02b7_u64.to_be_bytes());
        assert_eq!((context.sampled, context.random), (true, false));
        assert_eq!(context.to_value(), EXAMPLE);
        assert!(context.to_value().is_sensitive());
    }

    #[test]
    fn known_flags_are_passed_on_and_unknown_flags_are_cleared() {
        for (text, sampled, random, out) in [
            ("00", false, false, "00"),
            ("02", false, true, "02"),
            ("03", true, true, "03"),
            ("fd", true, false, "01"),
        ] {
            let received = EXAMPLE.replace("-01", &format!("-{text}"));
            let context = TraceContext::parse(received.as_bytes()).unwrap();
            let found = (context.sampled, context.random);
            assert_eq!(found, (sampled, random), "{text}");
            let sent = context.to_value();
            assert!(sent.to_str().unwrap().ends_with(out), "{text}");
        }
    }

    #[test]
    fn parses_the_known_members_of_later_versions() {
        for more in ["", "-", "-and more"] {
            let text = format!("cc{}{more}", &EXAMPLE[2..]);
            let parsed = TraceContext::parse(text.as_bytes());
            assert_eq!(parsed, Some(example()), "{text}");
        }
    }

    #[test]
    fn invalid_values_are_ignored() {
        let trace = &EXAMPLE[3..35];
        let bad = [
            String::new(),
            EXAMPLE[..54].to_owned(),
            format!("{EXAMPLE}-"),
            format!("{EXAMPLE}-01"),
            format!("{EXAMPLE} "),
            format!("cc{}x", &EXAMPLE[2..]),
            format!("ff{}", &EXAMPLE[2..]),
            format!("0x{}", &EXAMPLE[2..]),
            EXAMPLE.to_uppercase(),
            EXAMPLE.replace('-', "_"),
            EXAMPLE.replace(trace, &"0".repeat(32)),
            EXAMPLE.replace("00f067aa0ba902b7", &"0".repeat(16)),
            EXAMPLE.replace('f', "g"),
            EXAMPLE.replace("-01", "-0A"),
        ];
        for bad in bad {
            assert_eq!(TraceContext::parse(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn several_fields_are_ignored() {
        let mut headers = Fields::new();
        assert_eq!(TraceContext::of(&headers), None);
        headers.append(TRACEPARENT, HeaderValue::from_static(EXAMPLE));
        assert_eq!(TraceContext::of(&headers), Some(example()));
        headers.append(TRACEPARENT, HeaderValue::from_static(EXAMPLE));
        assert_eq!(TraceContext::of(&headers), None);
    }

    #[test]
    fn ids_are_never_zero() {
        let root = TraceContext::root([0; 3], true);
        for context in [root, root.child(0)] {
            let value = context.to_value();
            assert_eq!(TraceContext::parse(value.as_bytes()), Some(context));
        }
    }

    proptest! {
        #[test]
        fn formatted_values_parse(random: [u64; 3], child: u64, sampled: bool, random_flag: bool) {
            let root = TraceContext { random: random_flag, ..TraceContext::root(random, sampled) };
            prop_assert_eq!(TraceContext::parse(root.to_value().as_bytes()), Some(root));
            let child = root.child(child);
            prop_assert_eq!(
                (child.trace_id, child.sampled, child.random),
                (root.trace_id, sampled, random_flag)
            );
        }

        #[test]
        fn accepted_values_are_canonical(
            text in "[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}.{0,3}",
        ) {
            if let Some(context) = TraceContext::parse(text.as_bytes()) {
                let value = context.to_value();
                prop_assert_eq!(&value.as_bytes()[2..52], &text.as_bytes()[2..52]);
            }
        }

        #[test]
        fn parsing_never_panics(bytes: Vec<u8>) {
            let _ = TraceContext::parse(&bytes);
        }
    }
}
