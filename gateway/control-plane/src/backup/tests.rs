//! Hostile archives, and what a backup refuses.

use std::io::{Cursor, Write};
use std::path::PathBuf;

use gw_base::service::hostname::Region;
use gw_base::tls::pki::Authority;
use gw_interface::config::{Config, StoreSettings};
use gw_store::{PostgresSettings, SqliteStore};

use super::archive::ArchiveWriter;
use super::*;

/// Names and contents.
type Files = Vec<(String, Vec<u8>)>;
/// A change of an archive.
type Change<'a> = &'a dyn Fn(&mut Files);

/// A data folder with a database and an authority.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        drop(SqliteStore::open(&folder.0.path().join(DATABASE)).unwrap());
        Authority::load_or_create(folder.0.path(), "agent-ca", "CA").unwrap();
        std::fs::write(folder.0.path().join("admin.token"), "token\n").unwrap();
        folder
    }

    fn config(&self) -> Config {
        Config::new(Region::new("eu1", "example.com"), self.0.path().to_owned())
    }

    fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.0.path().join(name)).unwrap()
    }

    /// All files of a backup in their order.
    fn files(&self) -> Files {
        let manifest = Manifest {
            format: FORMAT,
            program: "0".into(),
            region: "eu1.example.com".into(),
            created_at: "2026-01-01T00:00:00Z".into(),
            revision: 0,
            audit_head: None,
        };
        let manifest = (MANIFEST.to_owned(), serde_json::to_vec(&manifest).unwrap());
        let others = ["agent-ca.key", "agent-ca.crt", DATABASE]
            .map(|name| (name.to_owned(), self.read(name)));
        std::iter::once(manifest).chain(others).collect()
    }
}

fn archive(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = ArchiveWriter::begin(&mut bytes, 0).unwrap();
    for (name, contents) in files {
        writer
            .add(name, contents.len() as u64, &contents[..])
            .unwrap();
    }
    writer.finish().unwrap();
    bytes
}

/// The error of a restore. Nothing is left of it.
fn refusal(bytes: &[u8]) -> String {
    let parent = tempfile::tempdir().unwrap();
    let config = Config::new(
        Region::new("eu1", "example.com"),
        parent.path().join("data"),
    );
    let error = restore(&config, Cursor::new(bytes), &|| false)
        .unwrap_err()
        .to_string();
    assert_eq!(
        std::fs::read_dir(parent.path()).unwrap().count(),
        0,
        "{error}"
    );
    error
}

#[test]
fn a_backup_of_a_folder_is_restored() {
    let folder = Folder::new();
    let parent = tempfile::tempdir().unwrap();
    let mut bytes = Vec::new();
    of_folder(&folder.config(), &mut bytes, &|| false).unwrap();
    assert!(!folder.0.path().join("backup.partial").exists());
    // A new file system has a folder of its own.
    std::fs::create_dir(parent.path().join("lost+found")).unwrap();
    let config = Config::new(Region::new("eu1", "example.com"), parent.path().to_owned());
    let restored = restore(&config, Cursor::new(&bytes), &|| false).unwrap();
    assert_eq!((restored.manifest.revision, restored.records), (0, 0));
    for name in ["agent-ca.key", "agent-ca.crt", "admin.token"] {
        assert_eq!(
            std::fs::read(parent.path().join(name)).unwrap(),
            folder.read(name)
        );
    }
    assert!(matches!(
        restore(&config, Cursor::new(&bytes), &|| false),
        Err(BackupError::NotEmpty { .. })
    ));
}

#[test]
fn a_cancelled_backup_or_restore_leaves_nothing() {
    let folder = Folder::new();
    let parent = tempfile::tempdir().unwrap();
    let mut bytes = Vec::new();
    let names = |folder: &std::path::Path| std::fs::read_dir(folder).unwrap().count();
    let before = names(folder.0.path());
    let cancelled = of_folder(&folder.config(), &mut bytes, &|| true).unwrap_err();
    assert!(
        matches!(cancelled, BackupError::Cancelled) && bytes.is_empty(),
        "{cancelled}"
    );
    assert_eq!(names(folder.0.path()), before);

    of_folder(&folder.config(), &mut bytes, &|| false).unwrap();
    let config = Config::new(
        Region::new("eu1", "example.com"),
        parent.path().join("data"),
    );
    let cancelled = restore(&config, Cursor::new(&bytes), &|| true).unwrap_err();
    assert!(matches!(cancelled, BackupError::Cancelled), "{cancelled}");
    assert_eq!(names(parent.path()), 0);
}

#[test]
fn a_backup_never_migrates_the_database() {
    let folder = Folder::new();
    let path = folder.0.path().join(DATABASE);
    let version = |to: Option<u32>| {
        let connection = rusqlite::Connection::open(&path).unwrap();
        if let Some(to) = to {
            connection.pragma_update(None, "user_version", to).unwrap();
        }
        connection
            .pragma_query_value(None, "user_version", |row| row.get::<_, u32>(0))
            .unwrap()
    };
    let known = version(None);
    for (found, expected) in [
        (known - 1, "use the program of the version that ran with it"),
        (999, "too new for this program"),
    ] {
        version(Some(found));
        let mut bytes = Vec::new();
        let error = of_folder(&folder.config(), &mut bytes, &|| false)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(&format!("schema {found}")) && error.contains(expected),
            "{error}"
        );
        assert_eq!((version(None), bytes.len()), (found, 0));
    }
}

#[test]
fn archives_with_other_contents_are_refused() {
    let folder = Folder::new();
    let files = folder.files();
    let with = |change: Change<'_>| {
        let mut files = files.clone();
        change(&mut files);
        refusal(&archive(&files))
    };
    let other = Folder::new();
    let cases: [(&str, Change<'_>); 13] = [
        ("it has no agent-ca.key", &|files| drop(files.remove(1))),
        ("it has no gw.sqlite", &|files| drop(files.pop())),
        ("its first file is agent-ca.key", &|files| {
            drop(files.remove(0));
        }),
        ("it has agent-ca.crt twice", &|files| {
            files.push(files[2].clone());
        }),
        ("\"passwd\" is not a file of a backup", &|files| {
            files.push(("passwd".into(), Vec::new()));
        }),
        ("\"requests/x\" is not a file", &|files| {
            files.push(("requests/x".into(), Vec::new()));
        }),
        ("admin.token has 65537 bytes", &|files| {
            files.push(("admin.token".into(), vec![b'x'; 65_537]));
        }),
        ("backup.json: ", &|files| files[0].1 = b"{}".to_vec()),
        ("agent-ca.crt and agent-ca.key: does not match", &|files| {
            files[1].1 = other.read("agent-ca.key");
        }),
        ("file is not a database", &|files| {
            files[3].1 = vec![b'x'; 4096];
        }),
        ("it has format 2", &|files| {
            files[0].1 = String::from_utf8(files[0].1.clone())
                .unwrap()
                .replacen('1', "2", 1)
                .into();
        }),
        ("ends with change 0, and it should with 7", &|files| {
            files[0].1 = String::from_utf8(files[0].1.clone())
                .unwrap()
                .replace("\"revision\":0", "\"revision\":7")
                .into();
        }),
        ("does not end with the entry 7:5a5a", &|files| {
            let head = format!("\"audit_head\":\"7:{}\"", "5a".repeat(32));
            files[0].1 = String::from_utf8(files[0].1.clone())
                .unwrap()
                .replace("\"audit_head\":null", &head)
                .into();
        }),
    ];
    for (expected, change) in cases {
        let error = with(change);
        assert!(error.contains(expected), "{expected} in {error}");
    }
}

/// An archive with one entry that the writer of backups does not make.
fn with_entry(kind: tar::EntryType, name: &str) -> Vec<u8> {
    let mut header = tar::Header::new_gnu();
    header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
    header.set_entry_type(kind);
    header.set_link_name("/etc/passwd").unwrap();
    header.set_size(0);
    header.set_cksum();
    let mut out = zstd::Encoder::new(Vec::new(), 1).unwrap();
    out.write_all(header.as_bytes()).unwrap();
    out.write_all(&[0; 1024]).unwrap();
    out.finish().unwrap()
}

#[test]
fn links_devices_and_foreign_paths_are_refused() {
    use tar::EntryType::{
        Block, Char, Directory, Fifo, GNULongName, GNUSparse, Link, Symlink, XHeader,
    };
    for kind in [
        Symlink,
        Link,
        Char,
        Block,
        Fifo,
        Directory,
        GNULongName,
        GNUSparse,
        XHeader,
    ] {
        let error = refusal(&with_entry(kind, MANIFEST));
        assert!(error.contains("is not a regular file"), "{kind:?}: {error}");
    }
    for name in [
        "/etc/passwd",
        "../backup.json",
        "./backup.json",
        "x/../backup.json",
        "backup.json/",
    ] {
        let error = refusal(&with_entry(tar::EntryType::Regular, name));
        assert!(
            error.contains("is not a file of a backup"),
            "{name}: {error}"
        );
    }
}

#[test]
fn a_bomb_is_cut_at_the_end_of_the_archive() {
    let files = Folder::new().files();
    let tar = zstd::decode_all(Cursor::new(archive(&files))).unwrap();
    let mut out = zstd::Encoder::new(Vec::new(), 1).unwrap();
    out.write_all(&tar).unwrap();
    for _ in 0..64 {
        out.write_all(&[0; 65_536]).unwrap();
    }
    let error = refusal(&out.finish().unwrap());
    assert!(error.contains("more data follows"), "{error}");
}

#[test]
fn a_database_with_triggers_or_damaged_pages_is_refused() {
    let folder = Folder::new();
    let path: PathBuf = folder.0.path().join(DATABASE);
    let connection = rusqlite::Connection::open(&path).unwrap();
    connection
        .execute_batch(
            "CREATE TRIGGER t AFTER INSERT ON audit BEGIN DELETE FROM records; END; PRAGMA \
             journal_mode = DELETE",
        )
        .unwrap_or_default();
    drop(connection);
    let error = refusal(&archive(&folder.files()));
    assert!(error.contains("trigger"), "{error}");

    let folder = Folder::new();
    let mut files = folder.files();
    files[3].1[4096..].fill(0xff);
    let error = refusal(&archive(&files));
    assert!(
        error.contains("malformed") || error.contains("damaged"),
        "{error}"
    );
}

#[test]
fn a_region_on_postgresql_is_not_backed_up_here() {
    let folder = Folder::new();
    let settings = PostgresSettings::new("postgres://gw@localhost/gw", None, None).unwrap();
    let config = Config {
        store: StoreSettings::Postgres(settings),
        ..folder.config()
    };
    for error in [
        of_folder(&config, Vec::new(), &|| false).unwrap_err(),
        restore(&config, Cursor::new([]), &|| false)
            .map(drop)
            .unwrap_err(),
    ] {
        assert!(error.to_string().contains("pg_dump"), "{error}");
    }
}
