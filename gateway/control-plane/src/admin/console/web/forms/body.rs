//! Captured bodies as text: decoded, then shown as text, as indented JSON, or as a hex dump. Never
//! rendered by their content type.

use std::fmt::Write;
use std::io::Read;

use brotli_decompressor::Decompressor;
use flate2::read::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};
use gw_telemetry::request_log::BodyView;
use serde::de::IgnoredAny;

/// Longest decoded body that is shown, in bytes.
const SHOWN_MAX: usize = 1024 * 1024;
/// Longest binary body that is shown, in bytes; a dump has more than four characters for each byte.
const DUMPED_MAX: usize = 4 * 1024;
/// Longest indented JSON, in bytes: at a depth of twenty, a value of one character becomes a line
/// of 41.
const LINES_MAX: usize = 2 * SHOWN_MAX;
/// Largest zstd window, as a power of two (RFC 9659 allows content codings 8 MiB).
const ZSTD_WINDOW_LOG_MAX: u32 = 23;

/// A body as a page shows it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ShownBody {
    pub(crate) kind: BodyKind,
    pub(crate) text: String,
    /// Remarks such as truncation.
    pub(crate) notes: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BodyKind {
    Empty,
    Text,
    Json,
    Bytes,
}

impl BodyKind {
    pub(crate) fn in_words(self) -> &'static str {
        match self {
            Self::Empty => "no body",
            Self::Text => "text",
            Self::Json => "JSON",
            Self::Bytes => "binary",
        }
    }
}

pub(crate) fn show(body: &BodyView) -> ShownBody {
    let mut notes = Vec::new();
    if body.truncated {
        notes.push(match body.truncated_by {
            None => "Incomplete: only the beginning was captured.".to_owned(),
            Some(reason) => format!("Only the beginning was captured: {}.", reason.in_words()),
        });
    }
    let decoded = decode(
        &body.bytes,
        body.content_encoding.as_deref().unwrap_or_default(),
    );
    let (bytes, whole) = match &decoded {
        Ok((bytes, whole)) => (bytes.as_slice(), *whole),
        Err(coding) => {
            notes.push(format!("Not decoded: {coding}"));
            (body.bytes.as_slice(), true)
        }
    };
    if !whole && !body.truncated {
        notes.push(
            "The content coding is broken. Only the part that could be decoded is shown."
                .to_owned(),
        );
    }
    let (bytes, cut) = bytes.split_at(bytes.len().min(SHOWN_MAX));
    if !cut.is_empty() {
        notes.push("Only the first MiB is shown.".to_owned());
    }
    let is_cut = body.truncated || !whole || !cut.is_empty();
    let (kind, text) = if bytes.is_empty() {
        (BodyKind::Empty, String::new())
    } else if let Some(text) = as_text(bytes, is_cut) {
        let is_json = text.trim_start().starts_with(['{', '['])
            && serde_json::from_str::<IgnoredAny>(text).is_ok();
        let lines = is_json.then(|| in_lines(text));
        if lines == Some(None) {
            notes.push("JSON, shown without indentation because it would be too long.".to_owned());
        }
        lines.flatten().map_or_else(
            || (BodyKind::Text, text.to_owned()),
            |lines| (BodyKind::Json, lines),
        )
    } else {
        if bytes.len() > DUMPED_MAX {
            notes.push("Only the first 4 KiB are shown. The download is complete.".to_owned());
        }
        (BodyKind::Bytes, dump(&bytes[..bytes.len().min(DUMPED_MAX)]))
    };
    ShownBody { kind, text, notes }
}

/// Undoes the content codings, the last one first (RFC 9110 §8.4); the flag says whether decoding
/// was complete. Decodes one byte more than is shown, to detect longer bodies.
fn decode(bytes: &[u8], codings: &str) -> Result<(Vec<u8>, bool), String> {
    let codings: Vec<String> = codings
        .split(',')
        .map(|coding| coding.trim().to_ascii_lowercase())
        .collect();
    let mut bytes = bytes.to_vec();
    let mut whole = true;
    // More than two codings are not used in practice.
    for coding in codings
        .iter()
        .rev()
        .filter(|coding| !coding.is_empty() && *coding != "identity")
        .take(2)
    {
        let source = bytes.as_slice();
        let mut decoded = Vec::new();
        let limit = SHOWN_MAX as u64 + 1;
        let read = match coding.as_str() {
            "gzip" | "x-gzip" => MultiGzDecoder::new(source)
                .take(limit)
                .read_to_end(&mut decoded),
            // The standard requires a zlib header, but some servers omit it.
            "deflate" if source.first().is_some_and(|first| first & 0x0f == 8) => {
                ZlibDecoder::new(source)
                    .take(limit)
                    .read_to_end(&mut decoded)
            }
            "deflate" => DeflateDecoder::new(source)
                .take(limit)
                .read_to_end(&mut decoded),
            "br" => Decompressor::new(source, 4096)
                .take(limit)
                .read_to_end(&mut decoded),
            "zstd" => zstd::stream::read::Decoder::with_buffer(source).and_then(|mut decoder| {
                decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
                decoder.take(limit).read_to_end(&mut decoded)
            }),
            other => return Err(format!("unknown content coding {other:?}")),
        };
        whole &= read.is_ok();
        bytes = decoded;
    }
    Ok((bytes, whole))
}

/// The bytes as readable text. A cut body may end within a character.
fn as_text(bytes: &[u8], is_cut: bool) -> Option<&str> {
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) if is_cut && error.error_len().is_none() => {
            std::str::from_utf8(&bytes[..error.valid_up_to()]).ok()?
        }
        Err(_) => return None,
    };
    let readable = |c: char| !c.is_control() || matches!(c, '\n' | '\r' | '\t' | '\x1b' | '\x0c');
    text.chars().all(readable).then_some(text)
}

/// Indents valid JSON with one value on each line, unless the result is too long. Changes only the
/// space between values: numbers and the order of members stay as they are.
fn in_lines(json: &str) -> Option<String> {
    let mut lines = String::with_capacity((json.len() * 2).min(LINES_MAX));
    let mut depth = 0usize;
    let mut in_string = false;
    let mut escaped = false;
    let mut characters = json.chars().peekable();
    while let Some(character) = characters.next() {
        if lines.len() > LINES_MAX {
            return None;
        }
        if in_string {
            lines.push(character);
            in_string = escaped || character != '"';
            escaped = character == '\\' && !escaped;
            continue;
        }
        match character {
            ' ' | '\t' | '\r' | '\n' => {}
            '{' | '[' => {
                while characters
                    .next_if(|next| next.is_ascii_whitespace())
                    .is_some()
                {}
                lines.push(character);
                // Empty objects and arrays stay on one line.
                if let Some(end) = characters.next_if(|next| matches!(next, '}' | ']')) {
                    lines.push(end);
                } else {
                    depth += 1;
                    new_line(&mut lines, depth);
                }
            }
            '}' | ']' => {
                depth = depth.saturating_sub(1);
                new_line(&mut lines, depth);
                lines.push(character);
            }
            ',' => {
                lines.push(',');
                new_line(&mut lines, depth);
            }
            ':' => lines.push_str(": "),
            '"' => {
                in_string = true;
                lines.push('"');
            }
            other => lines.push(other),
        }
    }
    Some(lines)
}

/// Limits the indent, because the indent of deeply nested JSON would take megabytes.
fn new_line(lines: &mut String, depth: usize) {
    lines.push('\n');
    lines.extend(std::iter::repeat_n("  ", depth.min(20)));
}

/// A hex dump with sixteen bytes on each line: offset, bytes, ASCII.
fn dump(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 5);
    for (line, sixteen) in bytes.chunks(16).enumerate() {
        // Writing to a String cannot fail.
        let _ = write!(text, "{:08x} ", line * 16);
        for index in 0..16 {
            let gap = if index == 8 { "  " } else { " " };
            let _ = match sixteen.get(index) {
                Some(byte) => write!(text, "{gap}{byte:02x}"),
                None => write!(text, "{gap}  "),
            };
        }
        text.push_str("  ");
        let visible = |byte: &u8| {
            if byte.is_ascii_graphic() || *byte == b' ' {
                char::from(*byte)
            } else {
                '.'
            }
        };
        text.extend(sixteen.iter().map(visible));
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use flate2::Compression;
    use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
    use zstd::bulk::Compressor;
    use zstd::zstd_safe::CParameter;

    use super::*;

    fn body(bytes: impl Into<Vec<u8>>, encoding: &str) -> BodyView {
        let content_encoding = Some(encoding.to_owned()).filter(|encoding| !encoding.is_empty());
        BodyView {
            content_type: None,
            content_encoding,
            truncated: false,
            truncated_by: None,
            bytes: bytes.into(),
        }
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn zstd_of(bytes: &[u8]) -> Vec<u8> {
        zstd::bulk::compress(bytes, 1).unwrap()
    }

    #[test]
    fn every_known_content_coding_is_decoded() {
        let text = "hello hello hello hello\n";
        let mut zlib = ZlibEncoder::new(Vec::new(), Compression::default());
        zlib.write_all(text.as_bytes()).unwrap();
        let mut deflate = DeflateEncoder::new(Vec::new(), Compression::default());
        deflate.write_all(text.as_bytes()).unwrap();
        // Encoded by Node's zlib and by the program `zstd`.
        let brotli = [
            0x1b, 0x17, 0x00, 0xf8, 0x8d, 0x94, 0x6e, 0xde, 0x44, 0x55, 0x86, 0xd6, 0x0a, 0x20,
            0x6c, 0x6f, 0x4a, 0x11, 0x79, 0xe2, 0x80, 0xae, 0x16,
        ];
        let zstd = [
            0x28, 0xb5, 0x2f, 0xfd, 0x00, 0x68, 0x6d, 0x00, 0x00, 0x38, 0x68, 0x65, 0x6c, 0x6c,
            0x6f, 0x20, 0x0a, 0x01, 0x00, 0x99, 0x4b, 0x11,
        ];
        for (encoding, bytes) in [
            ("", text.as_bytes().to_vec()),
            ("identity", text.as_bytes().to_vec()),
            ("gzip", gzip(text.as_bytes())),
            ("X-GZIP", gzip(text.as_bytes())),
            ("deflate", zlib.finish().unwrap()),
            ("deflate", deflate.finish().unwrap()),
            ("br", brotli.to_vec()),
            ("zstd", zstd.to_vec()),
            // Several frames in one body.
            (
                "zstd",
                [zstd_of(b"hello hello "), zstd_of(b"hello hello\n")].concat(),
            ),
            ("gzip, gzip", gzip(&gzip(text.as_bytes()))),
        ] {
            let shown = show(&body(bytes, encoding));
            assert_eq!(
                (shown.text.as_str(), shown.kind, shown.notes.len()),
                (text, BodyKind::Text, 0),
                "{encoding}"
            );
        }
        assert!(show(&body("x", "rot13")).notes[0].contains("rot13"));
    }

    #[test]
    fn decoding_is_bounded_and_broken_codings_are_shown_in_part() {
        let shown = show(&body(gzip(&vec![b'a'; 64 << 20]), "gzip"));
        assert_eq!((shown.text.len(), shown.notes.len()), (SHOWN_MAX, 1));
        // The largest window that is accepted, and a larger one.
        for (window_log, length) in [
            (ZSTD_WINDOW_LOG_MAX, SHOWN_MAX),
            (ZSTD_WINDOW_LOG_MAX + 1, 0),
        ] {
            let mut compressor = Compressor::new(1).unwrap();
            compressor
                .set_parameter(CParameter::WindowLog(window_log))
                .unwrap();
            let shown = show(&body(
                compressor.compress(&vec![b'a'; 32 << 20]).unwrap(),
                "zstd",
            ));
            assert_eq!(
                (shown.text.len(), shown.notes.len()),
                (length, 1),
                "{:?}",
                shown.notes
            );
        }
        let mut cut = gzip(
            &(0..100_000u64)
                .map(|n| b'a' + (n * n / 7 % 23) as u8)
                .collect::<Vec<u8>>(),
        );
        cut.truncate(cut.len() / 2);
        let shown = show(&body(cut.clone(), "gzip"));
        assert!(
            shown.text.len() > 100 && shown.notes[0].contains("broken"),
            "{:?}",
            shown.notes
        );
        let shown = show(&BodyView {
            truncated: true,
            ..body(cut, "gzip")
        });
        assert!(
            shown.text.len() > 100 && shown.notes.len() == 1,
            "{:?}",
            shown.notes
        );
    }

    #[test]
    fn indented_json_keeps_numbers_and_order() {
        let shown = show(&body(
            r#"{"b":1.0e400,"a":[1,{}, []],"s":"{\"x\": [1]}\\","n":12345678901234567890123}"#,
            "",
        ));
        assert_eq!(shown.kind, BodyKind::Json);
        let expected = "{\n  \"b\": 1.0e400,\n  \"a\": [\n    1,\n    {},\n    []\n  ],\n  \"s\": \
                        \"{\\\"x\\\": [1]}\\\\\",\n  \"n\": 12345678901234567890123\n}";
        assert_eq!(shown.text, expected);
        assert_eq!(show(&body(r#"{"a":"#, "")).kind, BodyKind::Text);
        // Indented, each value would be twenty times as long.
        let deep = format!(
            "{}{}1{}",
            "[".repeat(20),
            "1,".repeat(SHOWN_MAX / 4),
            "]".repeat(20)
        );
        let shown = show(&body(deep.as_str(), ""));
        assert_eq!(
            (shown.text, shown.kind, shown.notes.len()),
            (deep, BodyKind::Text, 1)
        );
    }

    #[test]
    fn binary_is_dumped_and_text_may_end_within_a_character() {
        let shown = show(&body(b"\x00\x01PNG-and-more-than-16".to_vec(), ""));
        assert_eq!(shown.kind, BodyKind::Bytes);
        let line = "00000000  00 01 50 4e 47 2d 61 6e  64 2d 6d 6f 72 65 2d 74  ..PNG-and-more-t\n";
        assert!(shown.text.starts_with(line), "{}", shown.text);
        let cut = BodyView {
            truncated: true,
            ..body("gr\u{fc}n \u{20ac}".as_bytes()[..7].to_vec(), "")
        };
        assert_eq!(
            (show(&cut).kind, show(&cut).text.as_str()),
            (BodyKind::Text, "gr\u{fc}n ")
        );
        assert_eq!(show(&body("", "gzip")).kind, BodyKind::Empty);
    }
}
