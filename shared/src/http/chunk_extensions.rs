//! Extensions of a chunk (RFC 9112 §7.1.1). They are checked and dropped: other parsers may end the
//! line of a chunk elsewhere if its extensions are malformed.

use super::upgrade::is_token_byte;

/// Whether `text`, the rest of a chunk-size line after the size, is `*( BWS ";" BWS name [ BWS "="
/// BWS value ] )`. White space at the end belongs to no extension and is refused.
pub(super) fn are_valid(mut text: &[u8]) -> bool {
    while !text.is_empty() {
        let Some(extension) = after(text, b';') else {
            return false;
        };
        let Some(rest) = after_token(skip_space(extension)) else {
            return false;
        };
        text = rest;
        if let Some(value) = after(text, b'=') {
            let value = skip_space(value);
            let rest = value
                .strip_prefix(b"\"")
                .map_or_else(|| after_token(value), after_quoted);
            let Some(rest) = rest else { return false };
            text = rest;
        }
    }
    true
}

/// Skips white space and `mark`; `None` if something else follows.
fn after(text: &[u8], mark: u8) -> Option<&[u8]> {
    skip_space(text).strip_prefix(&[mark])
}

fn skip_space(text: &[u8]) -> &[u8] {
    let length = text
        .iter()
        .take_while(|byte| matches!(byte, b' ' | b'\t'))
        .count();
    &text[length..]
}

/// Skips a token (RFC 9110 §5.6.2).
fn after_token(text: &[u8]) -> Option<&[u8]> {
    let length = text.iter().take_while(|byte| is_token_byte(**byte)).count();
    (length > 0).then(|| &text[length..])
}

/// Skips the rest of a quoted string (RFC 9110 §5.6.4) whose opening quote was read.
fn after_quoted(mut text: &[u8]) -> Option<&[u8]> {
    loop {
        let (first, rest) = text.split_first()?;
        text = match first {
            b'"' => return Some(rest),
            b'\\' => rest.split_first().filter(|(byte, _)| is_text(**byte))?.1,
            byte if is_text(*byte) => rest,
            _ => return None,
        };
    }
}

/// Whether a quoted string may contain `byte`: HTAB, SP, visible ASCII and obs-text.
fn is_text(byte: u8) -> bool {
    matches!(byte, b'\t' | b' '..=b'~' | 0x80..)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_of_the_grammar_are_accepted() {
        for text in [
            &b""[..],
            b";a",
            b";a;b;c",
            b";a=b",
            b";a=b;c;d=e",
            b" ; a",
            b"\t \t;\t a \t=\t b \t; c",
            b";a ;b",
            b";!#$%&'*+-.^_`|~09azAZ=!#$%&'*+-.^_`|~09azAZ",
            b";a=\"\"",
            b";a=\"b\";c",
            b";a = \"b c\t;=,\"",
            b";a=\"\\\"\"",
            b";a=\"\\\\\"",
            b";a=\"\\ \\\t\\~\"",
            b";a=\"\x80\xff\\\xe9\"",
        ] {
            assert!(are_valid(text), "{}", text.escape_ascii());
        }
    }

    #[test]
    fn other_extensions_are_refused() {
        for text in [
            &b";"[..],
            b" ",
            b"a",
            b" a",
            b"=a",
            b";;",
            b";a;",
            b";a; ",
            b"; ;a",
            b";=",
            b";=b",
            b";a=",
            b";a= ",
            b";a=;b",
            b";a==b",
            b";a=b=c",
            b";a b",
            b";a=b c",
            b";a=b ",
            b";a ",
            b";a\t",
            b";a,b",
            b";a(b)",
            b";a=b\"c\"",
            b";\"a\"",
            b";\"a\"=b",
            b";a=\"",
            b";a=\"b",
            b";a=\"b\\",
            b";a=\"b\\\"",
            b";a=\"b\"c",
            b";a=\"b\"\"c\"",
            b";a=\"b\" ",
            b";a='b c'",
            b";a=\"\0\"",
            b";a=\"\x01\"",
            b";a=\"\x0b\"",
            b";a=\"\x1f\"",
            b";a=\"\x7f\"",
            b";a=\"\r\"",
            b";a=\"\n\"",
            b";a=\"\\\0\"",
            b";a=\"\\\r\"",
            b";a=\"\\\x7f\"",
            b";a\0",
            b";\0",
            b";a\r",
            b";a\n",
            b";a\x0b",
            b"\x0b;a",
            b"\x0c;a",
            b"\r;a",
            b"\0;a",
            b";\xe9",
            b";a=\xe9",
            b";a\x7f",
            b"\xa0;a",
        ] {
            assert!(!are_valid(text), "{}", text.escape_ascii());
        }
    }
}
