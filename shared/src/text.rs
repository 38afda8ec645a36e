//! Text from a peer, made safe for errors, logs and pages.

use std::fmt::Display;

/// Converts `bytes` into one line of at most `most` bytes. Control characters, invisible characters and characters that
/// change the direction of text become spaces; bytes that are not UTF-8 become U+FFFD.
pub fn printable(bytes: &[u8], most: usize) -> String {
    let mut line = String::new();
    for character in String::from_utf8_lossy(bytes).chars() {
        let shown = if is_hidden(character) { ' ' } else { character };
        if line.len() + shown.len_utf8() > most {
            break;
        }
        line.push(shown);
    }
    line
}

/// Longest error in a log line, in bytes.
const ERROR_MAX: usize = 300;

/// Converts `error`, which may quote a peer, into one short line.
pub fn error_line(error: &impl Display) -> String {
    printable(error.to_string().as_bytes(), ERROR_MAX)
}

/// Whether `character` is a control (Unicode category Cc), a line separator, or a format character that reorders or
/// hides text.
fn is_hidden(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_and_invisible_characters_become_spaces() {
        assert_eq!(printable("Grüße, 世界".as_bytes(), 100), "Grüße, 世界");
        assert_eq!(printable(b"a\r\nb\x1b[2J\0\x7f\xff", 100), "a  b [2J  \u{fffd}");
        assert_eq!(printable("x\u{202e}y\u{2028}z\u{85}\u{feff}".as_bytes(), 100), "x y z  ");
    }

    #[test]
    fn errors_that_quote_a_peer_become_one_short_line() {
        let line = error_line(&format!("unknown variant `x\nWARN forged{}`", "y".repeat(1000)));
        assert!(line.starts_with("unknown variant `x WARN forgedyyy") && line.len() == ERROR_MAX, "{line}");
    }

    #[test]
    fn text_is_cut_between_characters() {
        assert_eq!(printable("ééé".as_bytes(), 5), "éé");
        // U+FFFD, which replaces an invalid byte, has three bytes.
        assert_eq!(printable(&[0xff; 10], 7), "\u{fffd}\u{fffd}");
    }
}
