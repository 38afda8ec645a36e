//! Takes secrets of the gateway out of text that is kept or sent on: a caller may have put one where it does not belong.

use std::ops::Range;

use memchr::memmem;

/// What the gateway's own secrets are found by.
const CLIENT_SECRET: &[u8] = b"gw_cs_";
const SERVICE_KEY: &[u8] = b"gw_sk_";
const ENROLLMENT_TOKEN: &[u8] = b"gw_et_";
/// `{"` in base64url: how header and claims of a JSON Web Token begin (RFC 7519 §3.1).
const JSON: &[u8] = b"eyJ";
const MASK: &[u8] = b"***";

/// `text` with the secrets of service keys and enrollment tokens (`gw_sk_<id>.<secret>`, `gw_et_…`), of clients
/// (`gw_cs_<secret>`) and the signatures of JSON Web Tokens replaced by `***`; `None` if there are none. Also finds them
/// with the full stops percent-encoded. Takes time in proportion to the length, whatever is in it.
pub fn mask(text: &[u8]) -> Option<Vec<u8>> {
    if memmem::find(text, b"gw_").is_none() && memmem::find(text, JSON).is_none() {
        return None;
    }
    let mut masked = Vec::new();
    let mut copied = 0;
    let none: (&[u8], &[u8]) = (b"", b"");
    let (mut before_last, mut last) = none;
    let mut at = 0;
    while at < text.len() {
        let end = at + word(&text[at..]);
        let this = &text[at..end];
        if let Some(secret) = secret_in(this, last, before_last) {
            masked.extend_from_slice(&text[copied..at + secret.start]);
            masked.extend_from_slice(MASK);
            copied = at + secret.end;
        }
        let stop = stop(&text[end..]);
        (before_last, last) = if stop > 0 { (last, this) } else { none };
        at = end + stop.max(1);
    }
    if copied == 0 {
        return None;
    }
    masked.extend_from_slice(&text[copied..]);
    Some(masked)
}

/// Whether something in `text` was replaced by [`mask`]. Also true of text that looks as if it were.
pub fn is_masked(text: &[u8]) -> bool {
    memmem::find_iter(text, MASK).any(|at| {
        let before = &text[..at];
        let stops = [&b"."[..], b"%2E", b"%2e"];
        before.ends_with(CLIENT_SECRET) || stops.iter().any(|stop| before.ends_with(stop))
    })
}

/// Where the secret is in a word that follows two others, each after a full stop.
fn secret_in(this: &[u8], last: &[u8], before_last: &[u8]) -> Option<Range<usize>> {
    let has = |word: &[u8], mark: &[u8]| memmem::find(word, mark).is_some();
    let is_secret = has(last, SERVICE_KEY) || has(last, ENROLLMENT_TOKEN);
    let is_signature = has(before_last, JSON) && last.starts_with(JSON);
    let start = if is_secret || is_signature { 0 } else { memmem::find(this, CLIENT_SECRET)? + CLIENT_SECRET.len() };
    (start < this.len()).then_some(start..this.len())
}

/// Length of the letters, digits, `-` and `_` at the start of `text`.
fn word(text: &[u8]) -> usize {
    let outside = |byte: &u8| !(byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'));
    text.iter().position(outside).unwrap_or(text.len())
}

/// Length of the full stop at the start of `text`, plain or percent-encoded.
fn stop(text: &[u8]) -> usize {
    match text {
        [b'.', ..] => 1,
        [b'%', b'2', b'E' | b'e', ..] => 3,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn masked(text: &str) -> Option<String> {
        mask(text.as_bytes()).map(|text| String::from_utf8(text).unwrap())
    }

    #[test]
    fn secrets_are_masked_and_nothing_else_is() {
        for (text, expected) in [
            ("/a?key=gw_sk_abc.secret", "/a?key=gw_sk_abc.***"),
            ("/a?key=gw_sk_abc.secret&b=gw_cs_123/gw_et_x%2Eyy z", "/a?key=gw_sk_abc.***&b=gw_cs_***/gw_et_x%2E*** z"),
            ("gw_sk_a.b.c", "gw_sk_a.***.c"),
            ("gw_cs_gw_sk_a.b", "gw_cs_***.***"),
            ("?access_token=eyJhbGc.eyJpc3M.c2ln-_x&a=b", "?access_token=eyJhbGc.eyJpc3M.***&a=b"),
            ("%20eyJhbGc%2EeyJpc3M%2ec2ln", "%20eyJhbGc%2EeyJpc3M%2e***"),
        ] {
            assert_eq!(masked(text).as_deref(), Some(expected), "{text}");
            assert!(is_masked(expected.as_bytes()) && !is_masked(text.as_bytes()), "{text}");
        }
        for text in ["", "/a?b=c", "gw_", "gw_sk", "gw_sk_", "gw_sk_abc", "gw_sk_abc.", "gw_ci_abc.def", "gw_cs_"] {
            assert_eq!(masked(text), None, "{text}");
        }
        for text in ["eyJ", "eyJa.eyJb", "eyJa.eyJb.", "eyJa.b.c", "a.eyJb.c", "eyJa..c", "eyJa/eyJb.c", "***", "a***b"]
        {
            assert_eq!(masked(text), None, "{text}");
            assert!(!is_masked(text.as_bytes()), "{text}");
        }
    }

    proptest::proptest! {
        /// Each word is looked at once, so nothing that is masked is left, and masking once is enough.
        #[test]
        fn what_is_masked_has_nothing_to_mask(
            text in "(gw_sk_|gw_et_|gw_cs_|eyJ|\\.|%2E|%|a|-|/| ){0,60}",
        ) {
            if let Some(once) = masked(&text) {
                let stars = |text: &str| text.matches("***").count();
                let again = masked(&once).unwrap_or_else(|| once.clone());
                proptest::prop_assert_eq!(stars(&again), stars(&once), "{} -> {}", once, again);
            }
        }
    }
}
