//! Nodes that share their records in PostgreSQL.

use std::fs;
use std::path::{Path, PathBuf};

use gw_control_plane::control::changes::audit;
use gw_control_plane::control::records::{account, caller_secret};
use gw_control_plane::control::{Actor, CallerSecretChanges, NewAccount};
use gw_gateway::Gateway;
use gw_gateway::demo::About;
use gw_shared::id::KeyId;

use crate::support::peers::caller;
use crate::support::peers::caller::connect_to;
use crate::support::peers::held_backend::HeldBackend;
use crate::support::peers::http1_peer::Response;
use crate::support::processes::postgres::Postgres;
use crate::support::processes::prepared::administer_at;
use crate::support::processes::process;
use crate::support::processes::process::Running;
use crate::support::processes::successor::admin;
use crate::support::{eventually, setup};

/// A node in this process, with a data folder of its own.
pub(crate) struct Node {
    pub(crate) gateway: Gateway,
    pub(crate) data_dir: PathBuf,
}

impl Node {
    pub(crate) fn start(postgres: &Postgres, folder: &Path, name: &str) -> Self {
        let data_dir = folder.join(name);
        Self {
            gateway: Gateway::start(&postgres.config(&data_dir)).unwrap(),
            data_dir,
        }
    }

    /// Response to a request with this key at this node.
    pub(crate) fn response(&self, key: &str) -> Response {
        let base_url = format!("https://eu1.gw.localhost:{}", self.gateway.address().port());
        let about = About {
            base_url,
            tenant_url: String::new(),
            account: "demo",
            service: "echo",
            client_id: String::new(),
            client_secret: String::new(),
            service_key: key.to_owned(),
            ca_file: self.data_dir.join("dev-ca.crt"),
            admin_url: String::new(),
            console_url: String::new(),
            admin_token: String::new(),
            backend: None,
        };
        let mut caller = connect_to(&about, caller::HOST, &[b"http/1.1"], None);
        let host = caller::HOST;
        caller.send(format!(
            "GET / HTTP/1.1\r\nHost: {host}\r\nX-Gw-Service-Key: {key}\r\n\r\n"
        ));
        caller.response()
    }

    fn wait_for(&self, other: &Self) {
        eventually("the node has followed", || {
            (self.gateway.control().revision() >= other.gateway.control().revision()).then_some(())
        });
    }

    /// Enrolls an agent at this node and starts it in front of `backend`.
    pub(crate) fn agent(&self, folder: &Path, backend: &str) -> Running {
        let control = self.gateway.control();
        let port = self.gateway.address().port();
        let ca = self.data_dir.join("dev-ca.crt");
        let state = folder.join(format!("agent-{port}"));
        setup::agent(control, "demo", &["echo"], port, &ca, &state);
        let mut command = process::gw_agent();
        command
            .arg("run")
            .arg("--state-dir")
            .arg(state)
            .args(["--backend", backend]);
        Running::new(command.stderr(std::process::Stdio::null()).spawn().unwrap())
    }

    pub(crate) fn metric(&self, name: &str) -> f64 {
        let (_, text) = admin(self.gateway.admin_address(), "/metrics");
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .expect("the metric exists");
        line.trim().parse().unwrap()
    }
}

#[test]
fn a_change_at_one_node_applies_at_all_nodes() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let first = Node::start(&postgres, folder.path(), "a");
    let second = Node::start(&postgres, folder.path(), "b");
    for file in [
        "admin.token",
        "agent-ca.crt",
        "agent-ca.key",
        "dev-ca.crt",
        "dev-ca.key",
    ] {
        let read = |node: &Node| fs::read(node.data_dir.join(file)).unwrap();
        assert_eq!(read(&first), read(&second), "{file}");
    }
    // A backup of a node would lack the records.
    let token = fs::read_to_string(first.data_dir.join("admin.token")).unwrap();
    assert_eq!(
        administer_at(
            first.gateway.admin_address(),
            token.trim(),
            "GET",
            "/backup",
            ""
        )
        .0,
        409
    );
    let backend = HeldBackend::start();
    setup::service(first.gateway.control(), "demo", "echo");
    let (key_id, key) = setup::service_key(first.gateway.control(), "demo", &["echo"]);
    second.wait_for(&first);
    let _agent = second.agent(folder.path(), &backend.url);
    eventually("a request is relayed", || {
        (second.response(&key).status == 200).then_some(())
    });
    let disabled = CallerSecretChanges {
        enabled: Some(false),
        ..CallerSecretChanges::default()
    };
    caller_secret::change::<KeyId>(
        first.gateway.control(),
        &Actor::Admin,
        "demo",
        &key_id,
        &disabled,
    )
    .unwrap();
    eventually("the key is refused", || {
        let response = second.response(&key);
        (response.status != 200).then(|| assert_eq!(response.code(), "GW_SERVICE_KEY_INVALID"))
    });
    first.wait_for(&second);
    assert_eq!(
        first.metric("gw_store_revision "),
        second.metric("gw_store_revision ")
    );
    let audit = |node: &Node| {
        let query = gw_store::AuditQuery {
            account: None,
            before: None,
            limit: 100,
        };
        format!("{:?}", audit::list(node.gateway.control(), &query).unwrap())
    };
    assert_eq!(audit(&first), audit(&second));
}

#[test]
fn nodes_change_the_same_records_at_the_same_time() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let nodes = [
        Node::start(&postgres, folder.path(), "a"),
        Node::start(&postgres, folder.path(), "b"),
    ];
    std::thread::scope(|scope| {
        for node in &nodes {
            scope.spawn(|| {
                for n in 0..50 {
                    let new = NewAccount {
                        id: format!("acme{n}"),
                        capture_allowed: None,
                        domains_max: None,
                        managed_by: None,
                    };
                    account::create(node.gateway.control(), &Actor::Admin, &new).unwrap();
                }
            });
        }
    });
    nodes[0].wait_for(&nodes[1]);
    nodes[1].wait_for(&nodes[0]);
    for node in &nodes {
        assert_eq!(node.gateway.control().records().accounts.len(), 50);
    }
    // Each account was created once: the other node found it.
    assert_eq!(
        postgres.sql("SELECT count(*) FROM gw.audit WHERE action = 'account.create'"),
        "50"
    );
}

/// Creates an account; returns status and `Retry-After` of the answer.
fn create_account(node: &Node, token: &str) -> (u16, Option<String>) {
    let address = node.gateway.admin_address();
    administer_at(
        address,
        token.trim(),
        "POST",
        "/accounts",
        r#"{"id":"later"}"#,
    )
}

#[test]
fn relaying_goes_on_while_postgresql_is_away() {
    let Some(mut postgres) = Postgres::with_region() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let backend = HeldBackend::start();
    let node = Node::start(&postgres, folder.path(), "a");
    setup::service(node.gateway.control(), "demo", "echo");
    let (_, key) = setup::service_key(node.gateway.control(), "demo", &["echo"]);
    let _agent = node.agent(folder.path(), &backend.url);
    eventually("a request is relayed", || {
        (node.response(&key).status == 200).then_some(())
    });
    let port = node.gateway.address().port();
    let copy = node.data_dir.join("records.sealed");
    let before = node.gateway.control().revision();
    eventually("the copy is written", || copy.exists().then_some(()));
    // A copy is at most some seconds old; the next one has all records.
    let written = || fs::metadata(&copy).unwrap().modified().unwrap();
    let first = written();
    setup::service(node.gateway.control(), "demo", "other");
    eventually("a later copy is written", || {
        (written() > first).then_some(())
    });
    assert!(node.gateway.control().revision() > before);

    postgres.stop();
    eventually("the node notices", || {
        (node.metric("gw_store_away_seconds ") > 0.0).then_some(())
    });
    assert_eq!(node.response(&key).status, 200);
    assert_eq!(admin(node.gateway.admin_address(), "/readyz").0, 200);
    let token = fs::read_to_string(node.data_dir.join("admin.token")).unwrap();
    let create = || create_account(&node, &token);
    assert_eq!(
        create(),
        (503, Some("1".to_owned())),
        "a change is refused, with Retry-After"
    );

    // A restart in the meantime serves from the copy, and the agent comes back.
    let _port = process::hold(node.gateway.address());
    node.gateway.drain();
    let mut config = postgres.config(&node.data_dir);
    config.listen.set_port(port);
    let node = Node {
        gateway: Gateway::start(&config).unwrap(),
        data_dir: node.data_dir,
    };
    eventually("a request is relayed after the restart", || {
        (node.response(&key).status == 200).then_some(())
    });

    postgres.resume();
    let create = || create_account(&node, &token);
    eventually("a change is made", || (create().0 == 201).then_some(()));
    eventually("the node notices", || {
        (node.metric("gw_store_away_seconds ") == 0.0).then_some(())
    });
}

#[test]
fn a_successor_takes_over_with_postgresql() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gateway.toml");
    fs::write(&path, postgres.config_text(&folder.path().join("data"))).unwrap();
    let served = process::serve(&mut process::serve_command(&path));
    let successor = crate::support::processes::successor::replace(served.process.id(), &served.log);
    let token = fs::read_to_string(folder.path().join("data/admin.token")).unwrap();
    let other = Node::start(&postgres, folder.path(), "b");
    let new = NewAccount {
        id: "acme".to_owned(),
        capture_allowed: None,
        domains_max: None,
        managed_by: None,
    };
    account::create(other.gateway.control(), &Actor::Admin, &new).unwrap();
    eventually("the successor follows", || {
        (administer_at(
            served.admin_address,
            token.trim(),
            "GET",
            "/accounts/acme",
            "",
        )
        .0 == 200)
            .then_some(())
    });
    successor.stop();
}
