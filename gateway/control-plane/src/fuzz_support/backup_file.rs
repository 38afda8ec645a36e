//! Backup files.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Cursor, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::LazyLock;

use gw_base::service::hostname::Region;
use gw_base::tls::pki::Authority;
use gw_interface::config::Config;
use gw_store::SqliteStore;

use super::memory_folder;
use crate::backup::{DATABASE, FORMAT, MANIFEST, Manifest, restore};
use crate::control::SHARED_SECRETS;

/// First bytes of data that zstd has compressed (RFC 8878 §3.1.1).
const ZSTD_MAGIC: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// An archive: compressed, or as files, each on a line: name, type of the entry, size, content. The
/// size `-` is that of the content. The content `@` is that of a valid file of this name; `@
/// 100=255` replaces the byte at 100. A backup that is restored leaves files of a data folder that
/// only their owner can read; another one leaves nothing.
pub fn backup_file(data: &[u8]) {
    let parent = memory_folder();
    let folder = parent.path().join("data");
    let config = Config::new(region(), folder.clone());
    let compressed;
    let archive = if data.starts_with(ZSTD_MAGIC) {
        data
    } else {
        compressed = archive(data);
        &compressed
    };
    match restore(&config, Cursor::new(archive), &|| false) {
        Ok(_) => assert_files(&folder),
        Err(error) => assert_eq!(names(parent.path()).len(), 0, "{error}"),
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let name = |entry: std::io::Result<fs::DirEntry>| {
        let name = entry.expect("an entry").file_name();
        name.to_string_lossy().into_owned()
    };
    entries.map(name).collect()
}

fn assert_files(folder: &Path) {
    let names = names(folder);
    let needed = [DATABASE, "agent-ca.crt", "agent-ca.key"];
    assert!(needed.iter().all(|name| names.iter().any(|it| it == name)));
    for name in &names {
        let is_secret = SHARED_SECRETS
            .iter()
            .any(|secret| secret.files.contains(&name.as_str()));
        assert!(is_secret || name == DATABASE, "{name}");
        let file = fs::symlink_metadata(folder.join(name)).expect("a file");
        assert!(file.is_file() && file.mode() & 0o077 == 0, "{name}");
    }
}

fn region() -> Region {
    Region::new("eu1", "example.com")
}

/// Contents of the files of a backup.
static VALID: LazyLock<BTreeMap<&'static str, Vec<u8>>> = LazyLock::new(|| {
    let folder = memory_folder();
    let path = folder.path();
    drop(SqliteStore::open(&path.join(DATABASE)).expect("a database"));
    Authority::load_or_create(path, "agent-ca", "CA").expect("an authority");
    let manifest = Manifest {
        format: FORMAT,
        program: "0".into(),
        region: region().apex().to_owned(),
        created_at: "2026-01-01T00:00:00Z".into(),
        revision: 0,
        audit_head: None,
    };
    let read = |name: &'static str| (name, fs::read(path.join(name)).expect("a file"));
    let mut files = BTreeMap::from(["agent-ca.crt", "agent-ca.key", DATABASE].map(read));
    files.insert("admin.token", b"token\n".to_vec());
    files.insert(MANIFEST, serde_json::to_vec(&manifest).expect("JSON"));
    files
});

/// Builds the archive that `lines` describe.
fn archive(lines: &[u8]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for line in lines
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
    {
        let mut words = line.splitn(4, |byte| *byte == b' ');
        let mut word = || words.next().unwrap_or_default();
        let (name, kind, size, text) = (word(), word(), word(), word());
        let content = content(name, text);
        let size = std::str::from_utf8(size)
            .ok()
            .and_then(|size| size.parse().ok());
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::new(kind.first().copied().unwrap_or(b'0')));
        header.set_mode(0o600);
        header.set_size(size.unwrap_or(content.len() as u64));
        let field = &mut header.as_old_mut().name;
        let length = name.len().min(field.len());
        field[..length].copy_from_slice(&name[..length]);
        header.set_cksum();
        tar.append(&header, &content[..]).expect("a file in memory");
    }
    let tar = tar.into_inner().expect("an archive in memory");
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).expect("an encoder");
    encoder.write_all(&tar).expect("memory");
    encoder.finish().expect("memory")
}

fn content(name: &[u8], text: &[u8]) -> Vec<u8> {
    let Some(changes) = text.strip_prefix(b"@") else {
        return text.to_vec();
    };
    let valid = std::str::from_utf8(name)
        .ok()
        .and_then(|name| VALID.get(name));
    let mut content = valid.cloned().unwrap_or_default();
    let changes = String::from_utf8_lossy(changes);
    for (at, byte) in changes
        .split(' ')
        .filter_map(|change| change.split_once('='))
    {
        let place = at.parse().ok().and_then(|at: usize| content.get_mut(at));
        if let (Some(place), Ok(byte)) = (place, byte.parse()) {
            *place = byte;
        }
    }
    content
}
