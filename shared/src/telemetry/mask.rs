//! Masking of the gateway's secrets in text that is stored or sent on. A client may put a secret
//! anywhere, such as in a path.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use memchr::memmem::{self, Finder};

use crate::identity::secret::Secret;

/// Prefixes of the gateway's secrets.
const CLIENT_SECRET: &[u8] = b"gw_cs_";
const ENROLLMENT_SECRET: &[u8] = b"gw_es_";
const SERVICE_KEY: &[u8] = b"gw_sk_";
const ENROLLMENT_TOKEN: &[u8] = b"gw_et_";
/// `{"` in base64url, with which header and claims of a JSON Web Token begin (RFC 7519 §3.1).
const JSON: &[u8] = b"eyJ";
const MASK: &[u8] = b"***";
/// Mask of a known secret. [`is_masked`] recognises it by the full stop.
const MASKED_KNOWN: &[u8] = b"gw_admin.***";
/// Shortest known secret to search for, in bytes: shorter ones would match ordinary text.
const KNOWN_MIN: usize = 8;

/// Masks secrets that it recognises by their form, and secrets whose values it knows.
#[derive(Clone, Default)]
pub struct Masker {
    known: Vec<Finder<'static>>,
}

impl fmt::Debug for Masker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Masker")
            .field("known", &self.known.len())
            .finish()
    }
}

impl Masker {
    /// Creates a masker of `known` secrets and of secrets recognised by their form.
    pub fn new<'a>(known: impl IntoIterator<Item = &'a Secret>) -> Self {
        let known = known.into_iter().map(|secret| secret.reveal().as_bytes());
        let known = known.filter(|secret| secret.len() >= KNOWN_MIN);
        Self {
            known: known
                .map(|secret| Finder::new(secret).into_owned())
                .collect(),
        }
    }

    /// Masks the secrets in `text`; `None` if there are none.
    ///
    /// `***` replaces the secrets of service keys and enrollment tokens (`gw_sk_<id>.<secret>`,
    /// `gw_et_…`), of clients and enrollments (`gw_cs_<secret>`, `gw_es_…`), and the signatures of
    /// JSON Web Tokens; `gw_admin.***` replaces known secrets. Also finds secrets with
    /// percent-encoded characters, even if encoded several times. The time is proportional to the
    /// length of `text`.
    pub fn mask(&self, text: &[u8]) -> Option<Vec<u8>> {
        let decoded = Decoded::of(text);
        let mut found = secrets_by_form(&decoded.bytes);
        for known in &self.known {
            let length = known.needle().len();
            found.extend(
                known
                    .find_iter(&decoded.bytes)
                    .map(|at| (at..at + length, MASKED_KNOWN)),
            );
        }
        if found.is_empty() {
            return None;
        }
        found.sort_by_key(|(secret, _)| secret.start);
        let mut masked = Vec::with_capacity(text.len());
        let mut copied = 0;
        let mut masked_to = 0;
        for (secret, mask) in found {
            let source = decoded.source(&secret, text.len());
            // A known secret may be part of another secret.
            if secret.start >= masked_to {
                masked.extend_from_slice(&text[copied..source.start]);
                masked.extend_from_slice(mask);
            }
            masked_to = masked_to.max(secret.end);
            copied = copied.max(source.end);
        }
        masked.extend_from_slice(&text[copied..]);
        Some(masked)
    }
}

/// Masks secrets recognised by their form; see [`Masker::mask`].
pub fn mask(text: &[u8]) -> Option<Vec<u8>> {
    Masker::default().mask(text)
}

/// Whether `text` contains a mask, or text that looks like one.
pub fn is_masked(text: &[u8]) -> bool {
    if memmem::find(text, MASK).is_none() {
        return false;
    }
    let decoded = Decoded::of(text);
    memmem::find_iter(&decoded.bytes, MASK).any(|at| {
        let before = &decoded.bytes[..at];
        [CLIENT_SECRET, ENROLLMENT_SECRET, b"."]
            .iter()
            .any(|prefix| before.ends_with(prefix))
    })
}

/// Finds secrets by their form, in order.
fn secrets_by_form(text: &[u8]) -> Vec<(Range<usize>, &'static [u8])> {
    let mut found = Vec::new();
    if memmem::find(text, b"gw_").is_none() && memmem::find(text, JSON).is_none() {
        return found;
    }
    let none: (&[u8], &[u8]) = (b"", b"");
    let (mut before_last, mut last) = none;
    let mut at = 0;
    while at < text.len() {
        let end = at + word(&text[at..]);
        let this = &text[at..end];
        if let Some(secret) = secret_in(this, last, before_last) {
            found.push((at + secret.start..at + secret.end, MASK));
        }
        (before_last, last) = if text.get(end) == Some(&b'.') {
            (last, this)
        } else {
            none
        };
        at = end + 1;
    }
    found
}

/// Finds the secret in a word. `last` and `before_last` are the words before it, if full stops
/// separate them.
fn secret_in(this: &[u8], last: &[u8], before_last: &[u8]) -> Option<Range<usize>> {
    let has = |word: &[u8], mark: &[u8]| memmem::find(word, mark).is_some();
    let is_secret = has(last, SERVICE_KEY) || has(last, ENROLLMENT_TOKEN);
    let is_signature = has(before_last, JSON) && last.starts_with(JSON);
    let after = |prefix: &[u8]| memmem::find(this, prefix).map(|at| at + prefix.len());
    let start = if is_secret || is_signature {
        0
    } else {
        [after(CLIENT_SECRET), after(ENROLLMENT_SECRET)]
            .into_iter()
            .flatten()
            .min()?
    };
    (start < this.len()).then_some(start..this.len())
}

/// Length of the word of letters, digits, `-` and `_` at the start of `text`.
fn word(text: &[u8]) -> usize {
    let outside = |byte: &u8| !(byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'));
    text.iter().position(outside).unwrap_or(text.len())
}

/// Text after removal of percent-encoding (RFC 3986 §2.1).
struct Decoded<'a> {
    bytes: Cow<'a, [u8]>,
    /// Position of each byte in the source; `None` if the text has no escapes.
    starts: Option<Vec<usize>>,
}

impl<'a> Decoded<'a> {
    /// Decodes until no escape is left: `%2567` becomes `%67` and then `g`. Each step removes two
    /// bytes, so the time is proportional to the length.
    fn of(text: &'a [u8]) -> Self {
        if !memchr::memchr_iter(b'%', text).any(|at| escaped(&text[at..]).is_some()) {
            return Self {
                bytes: Cow::Borrowed(text),
                starts: None,
            };
        }
        let mut bytes = Vec::with_capacity(text.len());
        let mut starts = Vec::with_capacity(text.len());
        for (at, byte) in text.iter().enumerate() {
            bytes.push(*byte);
            starts.push(at);
            while let Some(from) = bytes.len().checked_sub(3)
                && let Some(byte) = escaped(&bytes[from..])
            {
                bytes.truncate(from);
                starts.truncate(from + 1);
                bytes.push(byte);
            }
        }
        Self {
            bytes: Cow::Owned(bytes),
            starts: Some(starts),
        }
    }

    /// Converts a range of the decoded text into a range of the source, which has `length` bytes.
    fn source(&self, range: &Range<usize>, length: usize) -> Range<usize> {
        match &self.starts {
            None => range.clone(),
            Some(starts) => starts[range.start]..starts.get(range.end).copied().unwrap_or(length),
        }
    }
}

/// Decodes the escape at the start of `text`.
fn escaped(text: &[u8]) -> Option<u8> {
    let [b'%', high, low, ..] = text else {
        return None;
    };
    let digit = |byte: u8| char::from(byte).to_digit(16);
    u8::try_from(digit(*high)? << 4 | digit(*low)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn masked(text: &str) -> Option<String> {
        mask(text.as_bytes()).map(|text| String::from_utf8(text).unwrap())
    }

    #[test]
    fn only_secrets_are_masked() {
        for (text, expected) in [
            ("/a?key=gw_sk_abc.secret", "/a?key=gw_sk_abc.***"),
            (
                "/a?key=gw_sk_abc.secret&b=gw_cs_123/gw_et_x%2Eyy z",
                "/a?key=gw_sk_abc.***&b=gw_cs_***/gw_et_x%2E*** z",
            ),
            ("gw_sk_a.b.c", "gw_sk_a.***.c"),
            ("gw_cs_gw_sk_a.b", "gw_cs_***.***"),
            (
                "?access_token=eyJhbGc.eyJpc3M.c2ln-_x&a=b",
                "?access_token=eyJhbGc.eyJpc3M.***&a=b",
            ),
            ("%20eyJhbGc%2EeyJpc3M%2ec2ln", "%20eyJhbGc%2EeyJpc3M%2e***"),
            ("/enroll?x=gw_es_abc&y", "/enroll?x=gw_es_***&y"),
            // Any character may be encoded, in upper or lower case, and several times.
            ("?k=gw%5Fsk_abc.secret&b", "?k=gw%5Fsk_abc.***&b"),
            ("?k=%67w%5fcs_%73ecret%74+b", "?k=%67w%5fcs_***+b"),
            (
                "?k=Bearer+%65%79J%61.%65%79J%62.%63%64",
                "?k=Bearer+%65%79J%61.%65%79J%62.***",
            ),
            (
                "?k=gw%255Fsk%25255Fabc%252Es%2565cret%26b",
                "?k=gw%255Fsk%25255Fabc%252E***%26b",
            ),
            ("?k=gw_sk_abc.s%65cr%20et", "?k=gw_sk_abc.***%20et"),
        ] {
            assert_eq!(masked(text).as_deref(), Some(expected), "{text}");
            assert!(is_masked(expected.as_bytes()), "{text}");
            assert!(!is_masked(text.as_bytes()), "{text}");
        }
    }

    #[test]
    fn other_text_is_not_masked() {
        let keys = [
            "gw_sk",
            "gw_sk_",
            "gw_sk_abc",
            "gw_sk_abc.",
            "gw_ci_abc.def",
        ];
        for text in ["", "/a?b=c", "gw_", "gw_cs_"].into_iter().chain(keys) {
            assert_eq!(masked(text), None, "{text}");
        }
        for text in [
            "eyJ",
            "eyJa.eyJb",
            "eyJa.eyJb.",
            "eyJa.b.c",
            "a.eyJb.c",
            "eyJa..c",
            "eyJa/eyJb.c",
            "***",
            "a***b",
        ] {
            assert_eq!(masked(text), None, "{text}");
            assert!(!is_masked(text.as_bytes()), "{text}");
        }
    }

    #[test]
    fn known_secrets_are_masked_also_when_encoded() {
        let masker = Masker::new([
            &Secret::new("0123456789abcXYZ".to_owned()),
            &Secret::new("short".to_owned()),
        ]);
        for (text, expected) in [
            ("?t=0123456789abcXYZ&b", Some("?t=gw_admin.***&b")),
            ("Bearer+%30123456789abcX%59Z", Some("Bearer+gw_admin.***")),
            (
                "x0123456789abcXYZ0123456789abcXYZ",
                Some("xgw_admin.***gw_admin.***"),
            ),
            ("gw_cs_a0123456789abcXYZ/", Some("gw_cs_***/")),
            ("0123456789abcxyz short", None),
        ] {
            let masked = masker.mask(text.as_bytes());
            let masked = masked.map(|text| String::from_utf8(text).unwrap());
            assert_eq!(masked.as_deref(), expected, "{text}");
            let is_masked = is_masked(masked.unwrap_or_default().as_bytes());
            assert_eq!(is_masked, expected.is_some(), "{text}");
        }
    }

    /// A scan in quadratic time would take hours for these texts.
    #[test]
    fn nested_escapes_are_decoded_in_one_pass() {
        let escapes = ["%25", "%", "%2", "%67", "%2525252567"];
        for unit in ["gw%5Fsk%5F%2E", ".", "eyJ."].into_iter().chain(escapes) {
            let text = unit.repeat(2 << 20 >> 3);
            let decoded = Decoded::of(text.as_bytes());
            assert!(decoded.bytes.len() <= text.len());
            if let Some(starts) = &decoded.starts {
                assert_eq!(starts.len(), decoded.bytes.len(), "{unit}");
            }
            let length = masked(&text).map_or(0, |masked| masked.len());
            assert!(length <= 2 * text.len(), "{unit}");
        }
    }

    proptest::proptest! {
        /// A second pass finds no further secret.
        #[test]
        fn masked_text_has_nothing_to_mask(
            text in "(gw_sk_|gw_et_|gw_cs_|gw_es_|eyJ|\\.|%2E|%25|2|5|%|a|-|/| ){0,60}",
        ) {
            if let Some(once) = masked(&text) {
                let stars = |text: &str| text.matches("***").count();
                let again = masked(&once).unwrap_or_else(|| once.clone());
                proptest::prop_assert_eq!(stars(&again), stars(&once), "{} -> {}", once, again);
            }
        }
    }

    proptest::proptest! {
        /// No part of an encoded secret is left.
        #[test]
        fn an_encoded_secret_is_masked(how in proptest::collection::vec(0..4u8, 64)) {
            let secret = "gw_sk_abcdef.SECRETsecret0123456789";
            let encoded: String = secret.bytes().zip(how).map(|(byte, how)| match how {
                0 => char::from(byte).to_string(),
                1 => format!("%{byte:02x}"),
                2 => format!("%{byte:02X}"),
                _ => format!("%25{byte:02x}"),
            }).collect();
            let masked = masked(&format!("/a?k={encoded}+b")).unwrap();
            let decoded =
                String::from_utf8(Decoded::of(masked.as_bytes()).bytes.into_owned()).unwrap();
            proptest::prop_assert_eq!(decoded, "/a?k=gw_sk_abcdef.***+b");
            proptest::prop_assert!(is_masked(masked.as_bytes()));
        }
    }
}
