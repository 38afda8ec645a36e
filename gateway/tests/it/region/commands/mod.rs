//! `gw-gateway region` and `gw-gateway doctor` with a region on a real PostgreSQL.

mod doctor;
mod transfer;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::support::processes::postgres::Postgres;
use crate::support::processes::process::{config_text, gw_gateway};
use crate::support::programs;

/// Exit code and output of a command.
struct Ended {
    code: i32,
    out: String,
    err: String,
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

/// A node: its configuration, key and data in one folder.
struct Node(tempfile::TempDir);

impl Node {
    fn new(store: &str) -> Self {
        let node = Self(tempfile::tempdir().unwrap());
        node.configure(store, "");
        node
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

    /// Runs a command that must fail with `code`; returns its message.
    fn refused(&self, line: &str, code: i32) -> String {
        let Ended {
            code: ended,
            out,
            err,
        } = self.region(line);
        assert_eq!((ended, out.as_str()), (code, ""), "{line}: {err}");
        err
    }

    fn succeed(&self, line: &str) -> String {
        let Ended { code, out, err } = self.region(line);
        assert_eq!((code, err.as_str()), (0, ""), "{line}: {out}");
        out
    }

    fn status(&self) -> Value {
        serde_json::from_str(&self.succeed("status --json")).unwrap()
    }

    fn copy_key_from(&self, other: &Self) {
        fs::copy(other.path("region.key"), self.path("region.key")).unwrap();
    }
}

#[test]
fn a_region_is_created_once_with_its_key() {
    if !programs::usable(&["postgresql"]) {
        return;
    }
    let server = Postgres::start();
    let node = Node::new(&server.url());
    for command in ["status", "import folder", "export folder"] {
        node.refused(command, 1);
    }
    assert!(
        node.refused("status", 1)
            .contains("holds no region: create one with `gw-gateway region init`")
    );
    assert_eq!(node.region("join").code, 1);

    let out = node.succeed("init");
    let key = node.path("region.key");
    assert!(
        out.starts_with("Created the region eu1.gw.localhost in postgres://gw@"),
        "{out}"
    );
    assert!(
        out.contains(&format!(
            "{} (created with mode 0600)\nNext:\n",
            key.display()
        )),
        "{out}"
    );
    let text = fs::read_to_string(&key).unwrap();
    assert!(text.len() == 65 && text.trim_end().bytes().all(|byte| byte.is_ascii_hexdigit()));
    assert_eq!(
        fs::metadata(&key).unwrap().permissions().mode() & 0o777,
        0o600
    );
    let out = node.succeed("join");
    assert!(
        out.contains("ok       region key") && out.contains("\nThis node can join. Start it: "),
        "{out}"
    );

    let again = node.refused("init", 1);
    assert!(
        again.contains(
            "holds the region eu1.gw.localhost already (revision 0); nothing was changed"
        ),
        "{again}"
    );
    assert_eq!(
        fs::read_to_string(&key).unwrap(),
        text,
        "the key is never replaced"
    );

    another_node_needs_the_key(&server, &node);
}

fn another_node_needs_the_key(server: &Postgres, node: &Node) {
    let second = Node::new(&server.url());
    let missing = second.refused("init", 1);
    assert!(
        missing.contains("region.key: No such file")
            && missing.contains("copy its key from another"),
        "{missing}"
    );
    assert!(!second.path("region.key").exists());
    fs::write(second.path("region.key"), "5a".repeat(32)).unwrap();
    fs::set_permissions(second.path("region.key"), fs::Permissions::from_mode(0o600)).unwrap();
    let other = second.refused("init", 1);
    assert!(
        other.contains("the region key differs from the key of the other nodes"),
        "{other}"
    );
    let Ended { code, out, .. } = second.region("join");
    assert!(
        code == 1
            && out.contains("FAILED   region key")
            && out.contains("copy the key from a node"),
        "{out}"
    );
    second.copy_key_from(node);
    second.succeed("join");
}

#[test]
fn a_region_that_cannot_be_created_says_why() {
    let node = Node::new("sqlite");
    let sqlite = node.refused("init", 2);
    assert!(
        sqlite.contains("store: it is \"sqlite\"; a region needs PostgreSQL"),
        "{sqlite}"
    );
    node.configure("postgres://gw@127.0.0.1:1/gw", "");
    for command in ["init", "status", "import folder", "export folder"] {
        fs::write(node.path("region.key"), "5a".repeat(32)).unwrap();
        fs::set_permissions(node.path("region.key"), fs::Permissions::from_mode(0o600)).unwrap();
        let away = node.refused(command, 1);
        assert!(
            away.contains("PostgreSQL does not answer: 127.0.0.1:") && away.contains("refused"),
            "{away}"
        );
    }
    if !programs::usable(&["postgresql"]) {
        return;
    }
    let server = Postgres::start();
    node.configure(&server.url(), "");
    fs::remove_file(node.path("region.key")).unwrap();
    let text = fs::read_to_string(node.config())
        .unwrap()
        .replace("region.key", "none/region.key");
    fs::write(node.config(), text).unwrap();
    let missing = node.refused("init", 1);
    assert!(
        missing.contains("none/region.key: No such file or directory"),
        "{missing}"
    );
    assert_eq!(
        server.sql("SELECT to_regclass('gw.region') IS NULL"),
        "t",
        "no region without a key"
    );
}

#[test]
fn the_status_names_engine_region_records_and_the_last_change() {
    if !programs::usable(&["postgresql"]) {
        return;
    }
    let server = Postgres::start();
    let node = Node::new(&server.url());
    node.succeed("init");
    let empty = node.status();
    assert_eq!(
        (&empty["region"]["revision"], &empty["last_change"]),
        (&0.into(), &Value::Null)
    );
    assert_eq!(
        (&empty["key_problem"], &empty["engine"]["is_primary"]),
        (&Value::Null, &true.into())
    );
    assert_eq!(empty["engine"]["replication"], "none");

    server.sql(
        "BEGIN; UPDATE gw.region SET revision = 7;
         INSERT INTO gw.records VALUES ('account', 'acme', '{}', 7, ''),
             ('account', 'b', '{1}', 7, ''),
             ('agent', 'x', '', 7, '');
         INSERT INTO gw.audit VALUES (7, 1795234532, 'admin', 'account.create', NULL, 'acme', '{}');
         INSERT INTO gw.changes VALUES (7, gen_random_uuid(), 'node1', now(), '', ''); COMMIT",
    );
    let status = node.status();
    let count = |kind: &str| {
        let records = status["records"].as_array().unwrap().iter();
        let of_kind = records
            .clone()
            .find(|of_kind| of_kind["kind"] == kind)
            .unwrap();
        (
            of_kind["count"].as_i64().unwrap(),
            of_kind["bytes"].as_i64().unwrap(),
        )
    };
    assert_eq!(
        (count("account"), count("agent"), count("audit")),
        ((2, 5), (1, 0), (1, 2))
    );
    let out = node.succeed("status");
    let words = out.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "standby none ",
        "region eu1.gw.localhost region id ",
        "region key of this node equal revision 7 ",
        "last change 2026-11-21T04:15:32Z by admin on node1, account.create schema 5 feature level \
         1 ",
        "KIND COUNT BYTES account 2 5 agent 1 0 audit 1 2",
    ] {
        assert!(words.contains(part), "{part}: {out}");
    }
    fs::remove_file(node.path("region.key")).unwrap();
    assert!(
        node.status()["key_problem"]
            .as_str()
            .unwrap()
            .contains("No such file"),
        "the key is not needed"
    );
}
