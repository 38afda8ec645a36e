//! The format of a backup: a tar archive, compressed with zstd and its checksum. Reading it is
//! bounded: known names of regular files, each once and up to a size.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::{BackupError, DATABASE, FORMAT, MANIFEST, Manifest};
use crate::control::SHARED_SECRETS;

/// Level of compression: fast, and the database becomes some five times smaller.
const LEVEL: i32 = 3;
/// Largest file in an archive except for the database, in bytes.
const SMALL_MAX: u64 = 64 * 1024;
/// Largest database, in bytes.
const DATABASE_MAX: u64 = 64 << 30;
/// Bytes after the last file: two empty blocks, and more for programs that write larger units.
const END_MAX: u64 = 64 * 1024;
/// Most memory of the decoder: a window of 16 MiB, as a power of two.
const WINDOW_LOG_MAX: u32 = 24;

/// Writes an archive.
pub(super) struct ArchiveWriter<W: Write> {
    tar: tar::Builder<zstd::Encoder<'static, W>>,
    /// Time of all files, seconds since the Unix epoch.
    time: u64,
}

impl<W: Write> ArchiveWriter<W> {
    pub(super) fn begin(out: W, time: u64) -> io::Result<Self> {
        let mut encoder = zstd::Encoder::new(out, LEVEL)?;
        encoder.include_checksum(true)?;
        Ok(Self {
            tar: tar::Builder::new(encoder),
            time,
        })
    }

    pub(super) fn add(&mut self, name: &str, size: u64, contents: impl Read) -> io::Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Regular);
        header.set_mode(0o600);
        header.set_size(size);
        header.set_mtime(self.time);
        self.tar.append_data(&mut header, name, contents.take(size))
    }

    pub(super) fn finish(self) -> io::Result<()> {
        self.tar.into_inner()?.finish()?.flush()
    }
}

/// Unpacks an archive into `folder`, which is empty, and returns its manifest. Writes files of mode
/// 0600 with known names and nothing else.
pub(super) fn unpack(input: impl Read, folder: &Path) -> Result<Manifest, BackupError> {
    let mut decoder = zstd::Decoder::new(input).map_err(BackupError::Damaged)?;
    decoder
        .window_log_max(WINDOW_LOG_MAX)
        .map_err(BackupError::Damaged)?;
    let mut archive = tar::Archive::new(&mut decoder);
    let mut manifest = None;
    let mut names = BTreeSet::new();
    // Raw: without the extensions for long names, which would be read into memory.
    for entry in archive.entries().map_err(BackupError::Damaged)?.raw(true) {
        let mut entry = entry.map_err(BackupError::Damaged)?;
        let name = checked_name(&entry)?;
        if !names.insert(name.clone()) {
            return Err(BackupError::Refused(format!("it has {name} twice")));
        }
        if manifest.is_none() {
            if name != MANIFEST {
                return Err(BackupError::Refused(format!(
                    "its first file is {name}, not {MANIFEST}"
                )));
            }
            manifest = Some(read_manifest(&mut entry)?);
        } else {
            write_file(&mut entry, &folder.join(&name))?;
        }
    }
    // Up to the checksum at the end.
    let rest =
        io::copy(&mut decoder.take(END_MAX), &mut io::sink()).map_err(BackupError::Damaged)?;
    if rest == END_MAX {
        return Err(BackupError::Refused(
            "more data follows the last file".to_owned(),
        ));
    }
    let missing = [DATABASE, "agent-ca.crt", "agent-ca.key"]
        .into_iter()
        .find(|name| !names.contains(*name));
    match (manifest, missing) {
        (Some(manifest), None) => Ok(manifest),
        (None, _) => Err(BackupError::Refused(format!("it has no {MANIFEST}"))),
        (_, Some(missing)) => Err(BackupError::Refused(format!("it has no {missing}"))),
    }
}

/// The name of a regular file that an archive may have, of a permitted size.
fn checked_name(entry: &tar::Entry<'_, impl Read>) -> Result<String, BackupError> {
    let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
    let is_secret = || {
        SHARED_SECRETS
            .iter()
            .any(|secret| secret.files.contains(&name.as_str()))
    };
    if entry.header().entry_type() != tar::EntryType::Regular {
        return Err(BackupError::Refused(format!(
            "{name:?} is not a regular file"
        )));
    }
    let most = match name.as_str() {
        DATABASE => DATABASE_MAX,
        name if name == MANIFEST || is_secret() => SMALL_MAX,
        _ => {
            return Err(BackupError::Refused(format!(
                "{name:?} is not a file of a backup"
            )));
        }
    };
    match entry.size() {
        size if size > most => Err(BackupError::Refused(format!(
            "{name} has {size} bytes, more than {most}"
        ))),
        _ => Ok(name),
    }
}

fn read_manifest(entry: &mut impl Read) -> Result<Manifest, BackupError> {
    let mut text = Vec::new();
    entry.read_to_end(&mut text).map_err(BackupError::Damaged)?;
    let manifest: Manifest = serde_json::from_slice(&text)
        .map_err(|error| BackupError::Refused(format!("{MANIFEST}: {error}")))?;
    if manifest.format != FORMAT {
        let Manifest {
            format, program, ..
        } = manifest;
        let refused = format!(
            "it has format {format}, of gw-gateway {program}; restore it with that version"
        );
        return Err(BackupError::Refused(refused));
    }
    Ok(manifest)
}

/// Copies a file. Errors of the archive differ from those of the disk.
fn write_file(entry: &mut impl Read, path: &Path) -> Result<(), BackupError> {
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path);
    let mut file: File = file.map_err(BackupError::file(path))?;
    let mut chunk = vec![0; 64 * 1024];
    loop {
        let read = entry.read(&mut chunk).map_err(BackupError::Damaged)?;
        if read == 0 {
            return file.sync_all().map_err(BackupError::file(path));
        }
        file.write_all(&chunk[..read])
            .map_err(BackupError::file(path))?;
    }
}
