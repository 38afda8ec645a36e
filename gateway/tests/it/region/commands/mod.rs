//! `gw-gateway region` and `gw-gateway doctor` with a region on a real PostgreSQL.

mod doctor;
mod status;
mod transfer;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::support::processes::postgres::Postgres;
use crate::support::processes::process::{config_text, gw_gateway};
use crate::support::processes::region::Region;
use crate::support::programs;

/// Exit code and output of a command.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) code: i32,
    pub(super) out: String,
    pub(super) err: String,
}

fn end(command: &mut Command) -> Ended {
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ended {
        code: output.status.code().unwrap(),
        out: text(output.stdout),
        err: text(output.stderr),
    }
}

/// Asserts that `text` contains each of `parts`.
#[track_caller]
fn assert_says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
}

impl Ended {
    /// The output of a command that succeeds.
    #[track_caller]
    pub(super) fn done(self) -> String {
        assert_eq!((self.code, self.err.as_str()), (0, ""), "{self:?}");
        self.out
    }

    /// Asserts that the command failed with this exit code and without output, and that its message
    /// contains each of `parts`.
    #[track_caller]
    pub(super) fn assert_failed(&self, code: i32, parts: &[&str]) {
        assert_eq!((self.code, self.out.as_str()), (code, ""), "{self:?}");
        assert_says(&self.err, parts);
    }
}

/// `gw-gateway region` with these arguments, and the configuration of a node that runs.
pub(super) fn run(region: &Region, node: usize, arguments: &[&str]) -> Ended {
    let admin_address = region.node(node).admin_address.to_string();
    let mut command = gw_gateway();
    command.arg("region").args(arguments).arg("--config");
    end(command
        .arg(region.config(node))
        .env("GW_ADMIN_LISTEN", admin_address))
}

/// What `region status` says as JSON, with the configuration of a node that runs.
pub(super) fn stored_status(region: &Region, node: usize) -> Value {
    serde_json::from_str(&run(region, node, &["status", "--json"]).done()).unwrap()
}

/// A node that does not run: its configuration, key and data in one folder.
struct Node(tempfile::TempDir);

impl Node {
    fn new(store: &str) -> Self {
        let node = Self(tempfile::tempdir().unwrap());
        node.configure(store, "");
        node
    }

    /// A server with an empty database, and a node on it; `None` if PostgreSQL is not installed and
    /// may be missing.
    fn with_database() -> Option<(Postgres, Self)> {
        if !programs::usable(&["postgresql"]) {
            return None;
        }
        let server = Postgres::start();
        let node = Self::new(&server.url());
        Some((server, node))
    }

    /// As [`Self::with_database`]; the node has created a region.
    fn with_region() -> Option<(Postgres, Self)> {
        let (server, node) = Self::with_database()?;
        node.succeed("init");
        Some((server, node))
    }

    fn configure(&self, store: &str, more: &str) {
        let text = format!(
            "{}store = \"{store}\"\nregion_key = \"{}\"\n{more}",
            config_text(&self.path("data"), 0),
            self.path("region.key").display()
        );
        fs::write(self.config(), text).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn config(&self) -> PathBuf {
        self.path("gateway.toml")
    }

    /// `gw-gateway region` with the words of `line` and this configuration.
    fn region(&self, line: &str) -> Ended {
        end(gw_gateway()
            .arg("region")
            .args(line.split(' '))
            .arg("--config")
            .arg(self.config()))
    }

    fn with_folder(&self, command: &str, folder: &Path) -> Ended {
        end(gw_gateway()
            .args(["region", command])
            .arg(folder)
            .arg("--config")
            .arg(self.config()))
    }

    #[track_caller]
    fn succeed(&self, line: &str) -> String {
        self.region(line).done()
    }

    #[track_caller]
    fn status(&self) -> Value {
        serde_json::from_str(&self.succeed("status --json")).unwrap()
    }

    /// Replaces text of the configuration.
    fn edit(&self, from: &str, to: &str) {
        let text = fs::read_to_string(self.config()).unwrap();
        assert!(text.contains(from), "{text}");
        fs::write(self.config(), text.replace(from, to)).unwrap();
    }

    fn copy_key_from(&self, other: &Self) {
        fs::copy(other.path("region.key"), self.path("region.key")).unwrap();
    }

    /// Writes a key that is not the key of the region.
    fn write_another_key(&self) {
        let key = self.path("region.key");
        fs::write(&key, "5a".repeat(32)).unwrap();
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    }
}

#[test]
fn a_database_without_a_region_is_named() {
    let Some((_server, node)) = Node::with_database() else {
        return;
    };
    node.write_another_key();
    let advice = "holds no region: create one with `gw-gateway region init`";
    for command in ["status", "import folder", "export folder"] {
        node.region(command).assert_failed(1, &[advice]);
    }
    assert_eq!(node.region("join").code, 1);
}

#[test]
fn a_region_is_created_once_with_its_key() {
    let Some((_server, node)) = Node::with_database() else {
        return;
    };
    let out = node.succeed("init");
    let key = node.path("region.key");
    let created = "Created the region eu1.gw.localhost in postgres://gw@";
    assert!(out.starts_with(created), "{out}");
    let made = format!("{} (created with mode 0600)\nNext:\n", key.display());
    assert_says(&out, &[&made]);
    let text = fs::read_to_string(&key).unwrap();
    assert!(text.len() == 65 && text.trim_end().bytes().all(|byte| byte.is_ascii_hexdigit()));
    let mode = fs::metadata(&key).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let out = node.succeed("join");
    let joins = "\nThis node can join. Start it: ";
    assert_says(&out, &["ok       region key", joins]);

    let exists = "holds the region eu1.gw.localhost already (revision 0); nothing was changed";
    node.region("init").assert_failed(1, &[exists]);
    let unchanged = fs::read_to_string(&key).unwrap();
    assert_eq!(unchanged, text, "the key is never replaced");
}

#[test]
fn another_node_needs_the_key_of_the_region() {
    let Some((server, node)) = Node::with_region() else {
        return;
    };
    let second = Node::new(&server.url());
    let missing = ["region.key: No such file", "copy its key from another"];
    second.region("init").assert_failed(1, &missing);
    assert!(!second.path("region.key").exists());
    second.write_another_key();
    let differs = "the region key differs from the key of the other nodes";
    second.region("init").assert_failed(1, &[differs]);
    let Ended { code, out, .. } = second.region("join");
    assert_eq!(code, 1, "{out}");
    assert_says(&out, &["FAILED   region key", "copy the key from a node"]);
    second.copy_key_from(&node);
    second.succeed("join");
}

#[test]
fn a_region_that_cannot_be_created_says_why() {
    let node = Node::new("sqlite");
    let sqlite = "store: it is \"sqlite\"; a region needs PostgreSQL";
    node.region("init").assert_failed(2, &[sqlite]);
    node.configure("postgres://gw@127.0.0.1:1/gw", "");
    node.write_another_key();
    let away = ["PostgreSQL does not answer: 127.0.0.1:", "refused"];
    for command in ["init", "status", "import folder", "export folder"] {
        node.region(command).assert_failed(1, &away);
    }
}

#[test]
fn a_region_whose_key_cannot_be_written_is_not_created() {
    let Some((server, node)) = Node::with_database() else {
        return;
    };
    node.edit("region.key", "none/region.key");
    let missing = "none/region.key: No such file or directory";
    node.region("init").assert_failed(1, &[missing]);
    let is_missing = server.sql("SELECT to_regclass('gw.region') IS NULL");
    assert_eq!(is_missing, "t", "no region without a key");
}
