//! Marker in the file of an agent program: its version and the release keys that it is built with.
//! It is read from the file, so that a program is known without being executed.

use super::program::{ReleaseKey, TARGET_MAX};
use crate::version::Version;

/// Beginning of the marker. Its last bytes are random, so that no other text is taken for it.
const BEGIN: &[u8] = b"gw-agent-program \xb3\x1e\xf0\x07\x9c\x5a\xe4\x82";
/// Longest text of a marker: a version, and two release keys of 44 characters.
const TEXT_MAX: usize = 128;
const MARKER_BYTES: usize = BEGIN.len() + TEXT_MAX;
/// Length of the header of an ELF file up to the machine, in bytes.
const HEADER: usize = 20;

/// The marker as it is in the memory of the program and in its file.
#[derive(Debug)]
pub struct ProgramMarker([u8; MARKER_BYTES]);

/// What the file of a program says about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MarkedProgram {
    /// Architecture, from the ELF header; at most [`TARGET_MAX`] bytes.
    pub target: &'static str,
    pub version: Version,
    /// Release keys that the program is built with; empty if it takes them from its configuration.
    pub keys: Vec<ReleaseKey>,
}

/// Why a file is not taken for an agent program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotAProgram {
    #[error("it is not a program (no ELF header)")]
    NoElf,
    #[error("it is a program for another machine than x86_64 and aarch64 with 64 bits")]
    Machine,
    #[error(
        "it is no gw-agent: it has no marker with version and release keys, which every gw-agent \
         since 0.2 has"
    )]
    NoMarker,
    #[error("it has several different markers of a gw-agent; sign the file of one program")]
    Ambiguous,
}

impl ProgramMarker {
    /// `keys` are release keys in base64 with commas between them, or empty.
    ///
    /// # Panics
    ///
    /// If the text is too long: while the program is compiled, for a constant.
    pub const fn new(version: &str, keys: &str) -> Self {
        let mut marker = [0; MARKER_BYTES];
        let end = append(&mut marker, 0, BEGIN);
        let end = append(&mut marker, end, version.as_bytes());
        let end = append(&mut marker, end, b" ");
        let end = append(&mut marker, end, keys.as_bytes());
        assert!(end < MARKER_BYTES, "version and release keys are too long");
        Self(marker)
    }

    /// The release keys that the program is built with, as text; `None` if there are none.
    pub fn keys(&self) -> Option<&str> {
        // Read from memory, so that the marker is in the file.
        let marker = std::hint::black_box(self);
        let (_, keys) = text(&marker.0[BEGIN.len()..])?.split_once(' ')?;
        (!keys.is_empty()).then_some(keys)
    }
}

const fn append(marker: &mut [u8; MARKER_BYTES], at: usize, bytes: &[u8]) -> usize {
    let mut index = 0;
    while index < bytes.len() {
        marker[at + index] = bytes[index];
        index += 1;
    }
    at + index
}

/// The text of a marker: visible ASCII and spaces up to a NUL.
fn text(bytes: &[u8]) -> Option<&str> {
    let bytes = &bytes[..bytes.len().min(TEXT_MAX)];
    let end = bytes.iter().position(|byte| *byte == 0)?;
    std::str::from_utf8(&bytes[..end]).ok()
}

impl MarkedProgram {
    /// Reads the content of a file. Executes nothing.
    pub fn read(content: &[u8]) -> Result<Self, NotAProgram> {
        let target = target(content)?;
        let mut marked = markers(content);
        let (version, keys) = marked.next().ok_or(NotAProgram::NoMarker)?;
        if marked.any(|other| other != (version, keys.clone())) {
            return Err(NotAProgram::Ambiguous);
        }
        Ok(Self {
            target,
            version,
            keys,
        })
    }
}

/// The valid markers of a file.
fn markers(content: &[u8]) -> impl Iterator<Item = (Version, Vec<ReleaseKey>)> {
    let starts = content
        .windows(BEGIN.len())
        .enumerate()
        .filter(|(_, window)| *window == BEGIN);
    starts.filter_map(|(at, _)| {
        let (version, keys) = text(&content[at + BEGIN.len()..])?.split_once(' ')?;
        let keys = keys
            .split(',')
            .filter(|key| !key.is_empty())
            .map(|key| key.parse().ok());
        Some((version.parse().ok()?, keys.collect::<Option<_>>()?))
    })
}

/// The architecture in the header of a file (elf(5)).
fn target(content: &[u8]) -> Result<&'static str, NotAProgram> {
    const WIDTH_64: u8 = 2;
    const LITTLE_ENDIAN: u8 = 1;
    const _: () = assert!("aarch64".len() <= TARGET_MAX);
    let header = content
        .get(..HEADER)
        .filter(|header| header.starts_with(b"\x7fELF"))
        .ok_or(NotAProgram::NoElf)?;
    let machine = u16::from_le_bytes([header[18], header[19]]);
    match (header[4], header[5], machine) {
        (WIDTH_64, LITTLE_ENDIAN, 62) => Ok("x86_64"),
        (WIDTH_64, LITTLE_ENDIAN, 183) => Ok("aarch64"),
        _ => Err(NotAProgram::Machine),
    }
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::signature::Ed25519KeyPair;

    use super::*;

    fn file(machine: u16, markers: &[&ProgramMarker]) -> Vec<u8> {
        let mut content = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0".to_vec();
        content.extend(machine.to_le_bytes());
        for marker in markers {
            content.extend(b"other data");
            content.extend(&marker.0);
        }
        content
    }

    #[test]
    fn a_program_says_machine_version_and_keys() {
        let key = ReleaseKey::of(&Ed25519KeyPair::generate().unwrap());
        let with_key = ProgramMarker::new("1.20.3", &key.to_string());
        assert_eq!(with_key.keys(), Some(&*key.to_string()));
        let read = MarkedProgram::read(&file(183, &[&with_key, &with_key])).unwrap();
        let expected = MarkedProgram {
            target: "aarch64",
            version: "1.20.3".parse().unwrap(),
            keys: vec![key],
        };
        assert_eq!(read, expected);
        let without = ProgramMarker::new("1.20.3", "");
        assert_eq!(without.keys(), None);
        let read = MarkedProgram::read(&file(62, &[&without])).unwrap();
        assert_eq!((read.target, read.keys), ("x86_64", vec![]));
        let two = format!("{key},{key}");
        assert!(ProgramMarker::new("65535.65535.65535", &two).keys() == Some(&*two));
    }

    #[test]
    fn other_files_are_refused() {
        let marker = ProgramMarker::new("1.2.3", "");
        let newer = ProgramMarker::new("1.2.4", "");
        let mut of_32_bits = file(62, &[&marker]);
        of_32_bits[4] = 1;
        let mut cut = file(62, &[&marker]);
        cut.truncate(cut.len() - TEXT_MAX + 3);
        let short = ProgramMarker::new("1.2", "");
        let without_key = ProgramMarker::new("1.2.3", "no key");
        for (content, error) in [
            (b"#!/bin/sh\n".to_vec(), NotAProgram::NoElf),
            (b"\x7fELF".to_vec(), NotAProgram::NoElf),
            (of_32_bits, NotAProgram::Machine),
            (file(40, &[&marker]), NotAProgram::Machine),
            (file(62, &[]), NotAProgram::NoMarker),
            (cut, NotAProgram::NoMarker),
            (file(62, &[&short]), NotAProgram::NoMarker),
            (file(62, &[&without_key]), NotAProgram::NoMarker),
            (file(62, &[&marker, &newer]), NotAProgram::Ambiguous),
        ] {
            assert_eq!(MarkedProgram::read(&content), Err(error));
        }
    }
}
