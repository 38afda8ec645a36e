//! Text from outside, made safe for terminals, logs and pages.
//!
//! Names, paths, messages and records may come from any client, agent, gateway or database. A
//! terminal obeys some characters in them, and a line end begins a line that another program seems
//! to have written. What the programs print and log passes through this module: one set of
//! characters, one way to show them, `\u{1b}`.

pub mod documentation;

use std::borrow::Cow;
use std::fmt::{self, Display, Write};

/// Escapes the hidden characters of `text`. Escaped text stays as it is.
pub fn escaped(text: &str) -> Cow<'_, str> {
    replaced(text, |_| false, escape_into)
}

/// Escapes like [`escaped`], but keeps line ends that an indented line follows: those of a list in
/// a message. No other text can begin a line.
pub fn escaped_message(text: &str) -> Cow<'_, str> {
    if !text.contains("\n  ") {
        return escaped(text);
    }
    text.split("\n  ")
        .map(escaped)
        .collect::<Vec<_>>()
        .join("\n  ")
        .into()
}

/// Escapes hidden characters of a JSON text, which stays valid and means the same. Line ends
/// between values stay.
pub fn escaped_json(json: &str) -> Cow<'_, str> {
    // Inside a string, serializers escape these already.
    let is_white_space = |character| matches!(character, '\n' | '\r' | '\t');
    replaced(
        json,
        |character| character == '\n',
        |character, out| {
            if is_white_space(character) {
                out.push(' ');
                return;
            }
            for unit in character.encode_utf16(&mut [0; 2]) {
                let _ = write!(out, "\\u{unit:04x}");
            }
        },
    )
}

/// Converts `bytes` into one line of at most `most` bytes, escaped like [`escaped`]; bytes that are
/// not UTF-8 become U+FFFD.
pub fn printable(bytes: &[u8], most: usize) -> String {
    let mut line = String::new();
    for character in String::from_utf8_lossy(bytes).chars() {
        let end = line.len();
        if is_hidden(character) {
            escape_into(character, &mut line);
        } else {
            line.push(character);
        }
        if line.len() > most {
            line.truncate(end);
            break;
        }
    }
    line
}

/// Longest error in a log line, in bytes.
const ERROR_MAX: usize = 300;

/// Converts `error`, which may quote a peer, into one short line.
pub fn error_line(error: &impl Display) -> String {
    printable(error.to_string().as_bytes(), ERROR_MAX)
}

/// Escapes what is written through it like [`escaped`].
pub struct Escaping<W>(pub W);

impl<W: Write> Write for Escaping<W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.write_str(&escaped(text))
    }
}

/// Whether `character` is a control (Unicode category Cc), a line separator, or a format character
/// that reorders or hides text. The joiners U+200C and U+200D are not: scripts and emoji need them.
pub fn is_hidden(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}' | '\u{200e}' | '\u{200f}'
                | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}'
        )
}

/// Whether `character` shows nothing or only space, so that texts that differ in it look alike: a
/// [hidden](is_hidden) one, another format character (Unicode category Cf) or one of
/// Default_Ignorable_Code_Point, a space (Zs) but U+0020, or a letter, sign or filler without ink.
/// The joiners, variation selectors and spaces have uses in texts, where they stay.
pub fn is_invisible(character: char) -> bool {
    is_hidden(character)
        || matches!(
            character,
            '\u{a0}' | '\u{34f}' | '\u{600}'..='\u{605}' | '\u{6dd}' | '\u{70f}' | '\u{890}'
                | '\u{891}' | '\u{8e2}' | '\u{115f}' | '\u{1160}' | '\u{1680}' | '\u{17b4}'
                | '\u{17b5}' | '\u{180b}'..='\u{180f}' | '\u{2000}'..='\u{200f}' | '\u{202f}'
                | '\u{205f}' | '\u{2800}' | '\u{3000}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}'
                | '\u{ffa0}' | '\u{fff0}'..='\u{fff8}' | '\u{110bd}' | '\u{110cd}'
                | '\u{13430}'..='\u{13442}' | '\u{16fe4}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d159}'
                | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}'
        )
}

fn escape_into(character: char, out: &mut String) {
    out.extend(character.escape_unicode());
}

/// Replaces the hidden characters of `text` that are not `kept` by what `replace` writes.
fn replaced(
    text: &str,
    kept: impl Fn(char) -> bool,
    replace: impl Fn(char, &mut String),
) -> Cow<'_, str> {
    let is_replaced = |character| is_hidden(character) && !kept(character);
    // Most text has printable ASCII only, which is quick to see.
    if text.bytes().all(|byte| matches!(byte, b' '..=b'~')) || !text.contains(is_replaced) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        if is_replaced(character) {
            replace(character, &mut shown);
        } else {
            shown.push(character);
        }
    }
    Cow::Owned(shown)
}

/// Two lower-case digits for each byte.
pub fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut digits, byte| {
        // Writing to a string does not fail.
        let _ = write!(digits, "{byte:02x}");
        digits
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// C0, DEL, C1, line and paragraph separators, controls of direction.
    const HIDDEN: [char; 14] = [
        '\0', '\n', '\r', '\t', '\x1b', '\x7f', '\u{85}', '\u{9b}', '\u{2028}', '\u{2029}',
        '\u{200e}', '\u{202e}', '\u{2066}', '\u{2069}',
    ];

    #[test]
    fn hidden_characters_are_escaped_and_others_stay() {
        let shown = "Grüße, 世界 \\u{1b} \u{200d}";
        assert_eq!(escaped(shown), shown);
        let expected = "a\\u{d}\\u{a}b\\u{1b}[2J\\u{9b}";
        assert_eq!(escaped("a\r\nb\x1b[2J\u{9b}"), expected);
        for hidden in HIDDEN {
            let text = format!("x{hidden}y");
            let expected = format!("x\\u{{{:x}}}y", u32::from(hidden));
            assert_eq!(escaped(&text), expected);
            assert_eq!(escaped(&expected), expected);
            assert_eq!(printable(text.as_bytes(), 100), expected);
            let mut written = String::new();
            write!(Escaping(&mut written), "{text}").unwrap();
            assert_eq!(written, expected);
        }
    }

    #[test]
    fn only_indented_lines_follow_the_first_line_of_a_message() {
        let message = "gateway.toml:\n  burst: 0\n  \x1b[2J\nWARN forged\n forged\r\n  rest";
        let expected =
            "gateway.toml:\n  burst: 0\n  \\u{1b}[2J\\u{a}WARN forged\\u{a} forged\\u{d}\n  rest";
        assert_eq!(escaped_message(message), expected);
        assert_eq!(escaped_message("one line\n"), "one line\\u{a}");
    }

    #[test]
    fn escaped_json_means_the_same() {
        for hidden in HIDDEN.into_iter().chain(['\u{e0041}']) {
            let value = serde_json::json!({
                "a": [format!("x{hidden}\"y\\"), 1],
                format!("k{hidden}"): null,
            });
            for json in [
                value.to_string(),
                serde_json::to_string_pretty(&value).unwrap(),
            ] {
                let shown = escaped_json(&json);
                let is_forbidden = |character| is_hidden(character) && character != '\n';
                assert!(!shown.contains(is_forbidden), "{shown}");
                let read: serde_json::Value = serde_json::from_str(&shown).unwrap();
                assert_eq!(read, value);
            }
        }
        assert_eq!(escaped_json("{\t\"a\":\r\n1}"), "{ \"a\": \n1}");
    }

    #[test]
    fn errors_that_quote_a_peer_become_one_short_line() {
        let long = "y".repeat(1000);
        let line = error_line(&format!("unknown variant `x\nWARN forged{long}`"));
        assert!(
            line.starts_with("unknown variant `x\\u{a}WARN forgedyyy"),
            "{line}"
        );
        assert_eq!(line.len(), ERROR_MAX);
    }

    #[test]
    fn text_is_cut_between_characters() {
        assert_eq!(printable("ééé".as_bytes(), 5), "éé");
        assert_eq!(printable(b"a\nb", 5), "a");
        assert_eq!(printable(b"a\nb", 6), "a\\u{a}");
        // U+FFFD, which replaces an invalid byte, has three bytes.
        assert_eq!(printable(&[0xff; 10], 7), "\u{fffd}\u{fffd}");
    }
}
