//! A restore that is still running: other programs that use the data folder, and signals.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::mpsc;

use super::{backup, backup_of_stopped, config, names, of_stopped, restore, run};
use crate::support::peers::backend;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::{
    Running, config_text, gw_gateway, send_signal, serve_command,
};
use crate::support::{SOON, eventually, programs};

/// A backup, and a restore of it that has begun and waits for the archive on its standard input.
struct Restoring {
    prepared: Prepared,
    /// Configuration whose data folder is restored.
    target: PathBuf,
    archive: Vec<u8>,
    process: Child,
}

impl Restoring {
    /// Restores into a missing folder.
    fn begin() -> Self {
        Self::begin_with(|_| ())
    }

    /// `prepare` makes the folder.
    fn begin_with(prepare: impl FnOnce(&Path)) -> Self {
        let prepared = Prepared::new();
        let file = backup_of_stopped(&prepared);
        let target = config(&prepared, "target");
        prepare(&prepared.path("target"));
        let mut command = gw_gateway();
        command.args(["restore", "-", "--config"]).arg(&target);
        let process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let restoring = Self {
            target,
            archive: fs::read(file).unwrap(),
            process,
            prepared,
        };
        eventually("the restore has begun", || {
            restoring.is_locked().then_some(())
        });
        restoring
    }

    fn folder(&self) -> PathBuf {
        self.prepared.path("target")
    }

    /// Whether the process has locked the folder of unchecked files. It creates the folder shortly
    /// before.
    fn is_locked(&self) -> bool {
        let locks = fs::read_to_string("/proc/locks").unwrap();
        fs::metadata(self.folder().join("restore.partial"))
            .is_ok_and(|folder| locks.contains(&format!(":{} ", folder.ino())))
    }

    /// Gives the restore the whole archive; its exit code and messages.
    fn finish(mut self) -> (Option<i32>, String, Prepared) {
        // Fails if the restore has ended already.
        let _ = self.process.stdin.take().unwrap().write_all(&self.archive);
        let output = self.process.wait_with_output().unwrap();
        (
            output.status.code(),
            String::from_utf8(output.stderr).unwrap(),
            self.prepared,
        )
    }
}

#[test]
fn no_gateway_starts_during_a_restore() {
    let restoring = Restoring::begin();
    let target = restoring.target.clone();
    let folder = restoring.folder();
    let (code, _, message) = run(&mut serve_command(&target));
    assert!(
        code == 1
            && message.contains("target: a restore of a backup is running or was interrupted"),
        "{message}"
    );
    assert_eq!(names(&folder), ["restore.partial"]);
    let (code, message, prepared) = restoring.finish();
    assert_eq!(code, Some(0), "{message}");
    prepared.serve_with(&config_text(&folder, 0));
}

#[test]
fn no_other_restore_into_the_folder_runs_during_a_restore() {
    let restoring = Restoring::begin();
    let file = restoring.prepared.path("backup.tar.zst");
    let (code, _, message) = restore(&restoring.target, &file);
    assert!(
        code == 1 && message.contains("another restore into this folder is running"),
        "{message}"
    );
    let (code, message, _prepared) = restoring.finish();
    assert_eq!(code, Some(0), "{message}");
}

#[test]
fn files_of_a_gateway_that_started_before_a_restore_are_kept() {
    for made in ["gw.sqlite", "agent-ca.key", "rate-limits.json"] {
        let restoring = Restoring::begin();
        let folder = restoring.folder();
        fs::write(folder.join(made), "of a gateway").unwrap();
        let (code, message, _prepared) = restoring.finish();
        assert!(
            code == Some(2) && message.contains(&format!("is not empty: it has {made}")),
            "{message}"
        );
        assert_eq!(names(&folder), [made]);
        assert_eq!(
            fs::read_to_string(folder.join(made)).unwrap(),
            "of a gateway"
        );
    }
}

#[test]
fn a_restore_after_one_that_was_killed_begins_again() {
    let restoring = Restoring::begin();
    let folder = restoring.folder();
    let file = folder.join("restore.partial/agent-ca.key");
    fs::write(file, "half a file").unwrap();
    let Restoring {
        prepared,
        target,
        process,
        ..
    } = restoring;
    drop(Running::new(process));
    assert_eq!(names(&folder), ["restore.partial"]);
    let (code, _, message) = run(&mut serve_command(&target));
    assert!(
        code == 1 && message.contains("empty the folder and restore the backup again"),
        "{message}"
    );
    let (code, _, message) = restore(&target, &prepared.path("backup.tar.zst"));
    assert_eq!(code, 0, "{message}");
    assert!(!folder.join("restore.partial").exists());
    prepared.serve_with(&config_text(&folder, 0));
}

/// A user that owns a data folder. It needs no entry in /etc/passwd.
const OWNER: u32 = 23_456;

fn owned_folder(path: &Path) {
    // The owner has to reach the folder.
    fs::set_permissions(path.parent().unwrap(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir_all(path).unwrap();
    chown(path, Some(OWNER), Some(OWNER)).unwrap();
}

#[test]
fn root_restores_with_the_rights_of_the_owner_of_the_folder() {
    if !programs::is_root() {
        return;
    }
    let restoring = Restoring::begin_with(owned_folder);
    let staging = restoring.folder().join("restore.partial");
    assert_eq!(fs::metadata(&staging).unwrap().uid(), OWNER);
    let (code, message, prepared) = restoring.finish();
    assert_eq!(code, Some(0), "{message}");
    let folder = prepared.path("target");
    assert!(
        names(&folder)
            .iter()
            .all(|name| fs::metadata(folder.join(name)).unwrap().uid() == OWNER)
    );
}

/// The owner of a data folder can replace the folder of unchecked files.
#[test]
fn a_link_in_a_folder_that_root_restores_leads_only_where_its_owner_can_go() {
    if !programs::is_root() {
        return;
    }
    let restoring = Restoring::begin_with(owned_folder);
    let folder = restoring.folder();
    let secret = restoring.prepared.path("of-root");
    fs::create_dir(&secret).unwrap();
    fs::write(secret.join("admin.token"), "of root").unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o700)).unwrap();
    fs::rename(folder.join("restore.partial"), folder.join("aside")).unwrap();
    symlink(&secret, folder.join("restore.partial")).unwrap();
    let (code, message, prepared) = restoring.finish();
    assert!(
        code == Some(1) && message.contains("Permission denied"),
        "{message}"
    );
    let secret = prepared.path("of-root");
    assert_eq!(names(&secret), ["admin.token"]);
    assert_eq!(fs::metadata(secret.join("admin.token")).unwrap().uid(), 0);
}

#[test]
fn root_backs_up_with_the_rights_of_the_owner_of_the_folder() {
    if !programs::is_root() {
        return;
    }
    let (code, message, prepared) = Restoring::begin_with(owned_folder).finish();
    assert_eq!(code, Some(0), "{message}");
    // A folder that the owner cannot write.
    let file = prepared.path("of-root.tar.zst");
    let target = config(&prepared, "target");
    let (code, _, message) = run(&mut backup(&of_stopped(&target), &file));
    assert_eq!(code, 0, "{message}");
    assert_eq!(fs::metadata(&file).unwrap().uid(), 0);
}

/// The token is sent to the gateway of the owner of the data folder.
#[test]
fn a_link_in_place_of_the_token_shows_root_no_other_file() {
    if !programs::is_root() {
        return;
    }
    let (code, message, prepared) = Restoring::begin_with(owned_folder).finish();
    assert_eq!(code, Some(0), "{message}");
    let token = prepared.path("target/admin.token");
    let secret = prepared.path("of-root");
    fs::write(&secret, "secret-of-root\n").unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    fs::remove_file(&token).unwrap();
    symlink(&secret, &token).unwrap();
    let target = config(&prepared, "target");
    let file = prepared.path("other.tar.zst");
    let (code, _, message) = run(&mut backup(&of_stopped(&target), &file));
    assert!(
        code == 2 && message.contains("admin.token: Permission denied"),
        "{message}"
    );
}

#[test]
fn a_signal_ends_a_restore_and_leaves_nothing() {
    for signal in ["INT", "TERM", "HUP"] {
        let mut restoring = Restoring::begin();
        let mut input = restoring.process.stdin.take().unwrap();
        let half = restoring.archive.len() / 2;
        input.write_all(&restoring.archive[..half]).unwrap();
        assert!(send_signal(restoring.process.id(), signal));
        let output = restoring.process.wait_with_output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        let expected = "gw-gateway: interrupted by a signal; nothing was restored\n";
        assert_eq!(
            (output.status.code(), message.as_str()),
            (Some(1), expected)
        );
        assert!(!restoring.prepared.path("target").exists());
    }
}

#[test]
fn a_signal_ends_a_backup_and_leaves_no_file() {
    let prepared = Prepared::new();
    let token = prepared.path("token");
    let folder = prepared.path("backups");
    fs::write(&token, "t0ken").unwrap();
    fs::create_dir(&folder).unwrap();
    // A gateway that sends a part of a response, and then nothing more until the caller closes the
    // connection.
    let parts = [
        "",
        "HTTP/1.1 200 X\r\nContent-Type: application/zstd\r\nContent-Length: 100\r\n\r\nhalf",
    ];
    for part in parts {
        let (asked, is_asked) = mpsc::channel();
        let url = backend::start(move |mut peer| {
            peer.request().unwrap();
            peer.send(part);
            asked.send(()).unwrap();
            drop(peer.request());
        });
        let connection = [
            "--admin-url",
            &url,
            "--admin-token-file",
            token.to_str().unwrap(),
        ];
        let mut command = backup(&connection, &folder.join("file"));
        let process = command.stderr(Stdio::piped()).spawn().unwrap();
        is_asked.recv_timeout(SOON).unwrap();
        assert_eq!(names(&folder).len(), 1);
        assert!(send_signal(process.id(), "INT"));
        let output = process.wait_with_output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        let expected = "gw-gateway: interrupted by a signal; no backup was made\n";
        assert_eq!(
            (output.status.code(), message.as_str()),
            (Some(1), expected)
        );
        assert!(names(&folder).is_empty());
    }
}
