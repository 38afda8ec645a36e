//! Takes secrets of ours out of what is kept: a caller may have put one where it does not belong.

use std::sync::LazyLock;

use memchr::memmem::Finder;

static MARK: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("gw_"));

/// `text` with the secrets of service keys, enrollment tokens (`gw_sk_<id>.<secret>`, `gw_et_…`) and clients
/// (`gw_cs_<secret>`) replaced by `***`; `None` if there are none. Also finds them with the full stop percent-encoded.
pub(super) fn mask(text: &[u8]) -> Option<Vec<u8>> {
    let mut masked = Vec::new();
    let mut copied = 0;
    for found in MARK.find_iter(text) {
        let Some(secret) = secret_at(text, found) else { continue };
        if secret.start < copied {
            continue;
        }
        masked.extend_from_slice(&text[copied..secret.start]);
        masked.extend_from_slice(b"***");
        copied = secret.end;
    }
    if copied == 0 {
        return None;
    }
    masked.extend_from_slice(&text[copied..]);
    Some(masked)
}

/// Where the secret is in what begins at `start` with `gw_`.
fn secret_at(text: &[u8], start: usize) -> Option<std::ops::Range<usize>> {
    let kind_end = start + b"gw_xx_".len();
    let begin = match text.get(start..kind_end)? {
        b"gw_cs_" => kind_end,
        b"gw_sk_" | b"gw_et_" => {
            let id_end = kind_end + word(&text[kind_end..]);
            match &text[id_end..] {
                [b'.', ..] => id_end + 1,
                [b'%', b'2', b'E' | b'e', ..] => id_end + 3,
                _ => return None,
            }
        }
        _ => return None,
    };
    let length = word(&text[begin..]);
    (length > 0).then_some(begin..begin + length)
}

/// Length of the letters, digits, `-` and `_` at the start of `text`.
fn word(text: &[u8]) -> usize {
    let outside = |byte: &u8| !(byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'));
    text.iter().position(outside).unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_masked_and_nothing_else_is() {
        let masked = |text: &str| mask(text.as_bytes()).map(|text| String::from_utf8(text).unwrap());
        for (text, expected) in [
            ("/a?key=gw_sk_abc.secret", "/a?key=gw_sk_abc.***"),
            ("/a?key=gw_sk_abc.secret&b=gw_cs_123/gw_et_x%2Eyy z", "/a?key=gw_sk_abc.***&b=gw_cs_***/gw_et_x%2E*** z"),
            ("gw_sk_a.b.c", "gw_sk_a.***.c"),
            ("gw_cs_gw_sk_a.b", "gw_cs_***.***"),
        ] {
            assert_eq!(masked(text).as_deref(), Some(expected), "{text}");
        }
        for text in ["", "/a?b=c", "gw_", "gw_sk", "gw_sk_", "gw_sk_abc", "gw_sk_abc.", "gw_ci_abc.def", "gw_cs_"] {
            assert_eq!(masked(text), None, "{text}");
        }
    }
}
