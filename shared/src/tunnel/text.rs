//! Text from the other end that is shown to people: in errors, logs and pages.

use std::fmt::Display;

/// `bytes` as one line of at most `most` bytes. Characters that control a terminal, a line or the direction of text
/// become spaces, as do invisible ones; bytes that are not UTF-8 become U+FFFD.
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

/// Bytes of an error in a log line: some quote what a peer sent.
const ERROR_MAX: usize = 300;

/// `error` as one short line, for errors that may quote what a peer sent.
pub fn error_line(error: &impl Display) -> String {
    printable(error.to_string().as_bytes(), ERROR_MAX)
}

/// Controls (Unicode category Cc), line separators, and format characters that reorder or hide text.
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
    fn text_becomes_one_harmless_line() {
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
        // An invalid byte is one byte, and three when it is shown.
        assert_eq!(printable(&[0xff; 10], 7), "\u{fffd}\u{fffd}");
    }
}
