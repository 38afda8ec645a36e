//! Nodes that share their records in PostgreSQL.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::config_file;
use crate::support::admin_api::Api;
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::peers::caller::{HOST, connect_to};
use crate::support::peers::held_backend::HeldBackend;
use crate::support::peers::http1_peer::Response;
use crate::support::processes::postgres::Postgres;
use crate::support::processes::prepared::about;
use crate::support::processes::process::{self, Running};
use crate::support::processes::successor::{admin, replace};
use crate::support::scene::About;

/// A node in this process, with a data folder of its own.
pub(crate) struct Node {
    pub(crate) gateway: Gateway,
}

impl Node {
    pub(crate) fn start(postgres: &Postgres, folder: &Path, name: &str) -> Self {
        Self::with(&postgres.config(&folder.join(name)))
    }

    fn with(configuration: &str) -> Self {
        Self {
            gateway: Gateway::start(configuration),
        }
    }

    /// Starts the node again, at the same port.
    pub(crate) fn restart(self, postgres: &Postgres) -> Self {
        let config = postgres.config_at(self.gateway.data_dir(), self.gateway.port());
        let _port = process::hold(self.gateway.address());
        self.gateway.drain();
        Self::with(&config)
    }

    /// A file of the data folder.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.gateway.data_dir().join(name)
    }

    pub(crate) fn about(&self) -> About {
        about(self.gateway.address(), "", self.gateway.ca_file())
    }

    /// Response to a request with this key at this node.
    pub(crate) fn response(&self, key: &str) -> Response {
        self.response_to(&format!("X-Gw-Service-Key: {key}"))
    }

    /// Response to a request with this field at this node.
    pub(crate) fn response_to(&self, field: &str) -> Response {
        let mut caller = connect_to(&self.about(), HOST, &[b"http/1.1"], None);
        caller.send(format!("GET / HTTP/1.1\r\nHost: {HOST}\r\n{field}\r\n\r\n"));
        caller.response()
    }

    /// Waits until a request with this key is relayed.
    pub(crate) fn wait_until_relayed(&self, key: &str) {
        eventually("a request is relayed", || {
            (self.response(key).status == 200).then_some(())
        });
    }

    pub(crate) fn wait_for(&self, other: &Self) {
        eventually("the node has followed", || {
            (self.revision() >= other.revision()).then_some(())
        });
    }

    /// Enrolls an agent at this node and starts it in front of `backend`.
    pub(crate) fn agent(&self, folder: &Path, backend: &str) -> Running {
        let state = folder.join(format!("agent-{}", self.gateway.port()));
        self.gateway.enroll("demo", &["echo"], &state);
        let mut command = process::gw_agent();
        command
            .arg("run")
            .arg("--state-dir")
            .arg(state)
            .args(["--backend", backend]);
        Running::new(command.stderr(std::process::Stdio::null()).spawn().unwrap())
    }

    pub(crate) fn metric(&self, name: &str) -> f64 {
        self.gateway.metrics().sum(name)
    }

    /// Revision of the records that the node uses.
    pub(crate) fn revision(&self) -> u64 {
        self.gateway.metrics().count("gw_store_revision")
    }
}

#[test]
fn a_change_at_one_node_applies_at_all_nodes() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let [first, second] = ["a", "b"].map(|name| Node::start(&postgres, folder.path(), name));
    let api = first.gateway.api();
    let backend = HeldBackend::start();
    api.create_service("demo", "echo");
    let (key_id, key) = api.create_service_key("demo", &["echo"]);
    second.wait_for(&first);
    let _agent = second.agent(folder.path(), &backend.url);
    second.wait_until_relayed(&key);
    let path = format!("/accounts/demo/service-keys/{key_id}");
    api.patch(&path, &json!({ "enabled": false }));
    eventually("the key is refused", || {
        let response = second.response(&key);
        (response.status != 200).then(|| assert_eq!(response.code(), "GW_SERVICE_KEY_INVALID"))
    });
    first.wait_for(&second);
    assert_eq!(first.revision(), second.revision());
    let audit = |node: &Node| node.gateway.api().list("/audit-log?limit=100");
    assert_eq!(audit(&first), audit(&second));
}

#[test]
fn a_later_node_has_the_files_of_the_first() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let [first, later] = ["a", "b"].map(|name| Node::start(&postgres, folder.path(), name));
    for file in [
        "admin.token",
        "agent-ca.crt",
        "agent-ca.key",
        "dev-ca.crt",
        "dev-ca.key",
    ] {
        let read = |node: &Node| fs::read(node.file(file)).unwrap();
        assert_eq!(read(&first), read(&later), "{file}");
    }
}

/// It would lack the records.
#[test]
fn a_node_of_a_region_gives_no_backup() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(&postgres, folder.path(), "a");
    assert_eq!(node.gateway.api().get("/backup").status, 409);
}

#[test]
fn nodes_change_the_same_records_at_the_same_time() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let nodes = ["a", "b"].map(|name| Node::start(&postgres, folder.path(), name));
    std::thread::scope(|scope| {
        for node in &nodes {
            scope.spawn(|| {
                let api = node.gateway.api();
                (0..50).for_each(|n| api.create_account(&format!("acme{n}")));
            });
        }
    });
    nodes[0].wait_for(&nodes[1]);
    nodes[1].wait_for(&nodes[0]);
    for node in &nodes {
        let accounts = node.gateway.api().list("/accounts?limit=100");
        assert_eq!(accounts.len(), 50);
    }
    // Each account was created once: the other node found it.
    let created = "SELECT count(*) FROM gw.audit WHERE action = 'account.create'";
    assert_eq!(postgres.sql(created), "50");
}

/// Creates an account; returns status and `Retry-After` of the answer.
fn create_account(api: &Api) -> (u16, String) {
    let reply = api.ask("POST", "/accounts", &json!({ "id": "later" }));
    (reply.status, reply.retry_after)
}

#[test]
fn relaying_goes_on_while_postgresql_is_away() {
    let Some(mut postgres) = Postgres::with_region() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let backend = HeldBackend::start();
    let node = Node::start(&postgres, folder.path(), "a");
    let api = node.gateway.api();
    api.create_service("demo", "echo");
    let (_, key) = api.create_service_key("demo", &["echo"]);
    let _agent = node.agent(folder.path(), &backend.url);
    node.wait_until_relayed(&key);
    let copy = node.file("records.sealed");
    eventually("the copy is written", || copy.exists().then_some(()));

    postgres.stop();
    eventually("the node notices", || {
        (node.metric("gw_store_away_seconds") > 0.0).then_some(())
    });
    assert_eq!(node.response(&key).status, 200);
    assert_eq!(admin(node.gateway.admin_address(), "/readyz").0, 200);
    let refused = (503, "1".to_owned());
    assert_eq!(create_account(&api), refused, "status and Retry-After");

    // A restart in the meantime serves from the copy, and the agent comes back.
    let node = node.restart(&postgres);
    node.wait_until_relayed(&key);

    postgres.resume();
    let api = node.gateway.api();
    eventually("a change is made", || {
        (create_account(&api).0 == 201).then_some(())
    });
    eventually("the node notices", || {
        (node.metric("gw_store_away_seconds") == 0.0).then_some(())
    });
}

/// A copy is at most some seconds old.
#[test]
fn the_copy_of_the_records_is_written_again_after_a_change() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(&postgres, folder.path(), "a");
    let copy = node.file("records.sealed");
    let written = || fs::metadata(&copy).and_then(|file| file.modified()).ok();
    let first = eventually("the copy is written", written);
    let before = node.revision();
    node.gateway.api().create_service("demo", "other");
    eventually("a later copy is written", || {
        written().filter(|later| *later > first)
    });
    assert!(node.revision() > before);
}

#[test]
fn a_successor_takes_over_with_postgresql() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let path = config_file(&postgres, &folder.path().join("data"));
    let served = process::serve(&mut process::serve_command(&path));
    let successor = replace(served.process.id(), &served.log);
    let token = fs::read_to_string(folder.path().join("data/admin.token")).unwrap();
    let api = Api::at(served.admin_address, &token);
    let other = Node::start(&postgres, folder.path(), "b");
    other.gateway.api().create_account("acme");
    eventually("the successor follows", || {
        (api.get("/accounts/acme").status == 200).then_some(())
    });
    successor.stop();
}
