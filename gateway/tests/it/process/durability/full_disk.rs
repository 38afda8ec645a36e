//! A full disk: changes that take access away are in force within a second, and changes that give
//! access are refused.
//!
//! [`SmallDisk::fill`] leaves nothing before each revocation, so that each has only what the
//! reserve gives.

mod quota;

use std::fs;
use std::path::Path;

use rusqlite::Connection;
use serde_json::{Value, json};

use super::power_cuts::check_databases;
use crate::support::admin_api::Api;
use crate::support::agents::in_process;
use crate::support::apex::APEX;
use crate::support::doctor::examine;
use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::peers::caller::{HOST, connect_to};
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::{self, gw_gateway};
use crate::support::processes::region::Region;
use crate::support::processes::successor::replace;
use crate::support::scene::About;
use crate::support::small_disk::SmallDisk;
use crate::support::stopwatch::within_a_second;

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// The administration API of one process, and the nodes that its changes are in force at.
struct World {
    api: Api,
    nodes: Vec<About>,
}

/// A request of the administration API that takes access away.
struct Revocation {
    what: &'static str,
    method: &'static str,
    path: String,
    body: Value,
    /// A request of a caller that is let in before, and refused after it.
    request: Option<String>,
}

impl Revocation {
    fn new(what: &'static str, method: &'static str, path: &str, body: Value) -> Self {
        Self {
            what,
            method,
            path: path.to_owned(),
            body,
            request: None,
        }
    }

    fn delete(what: &'static str, path: &str) -> Self {
        Self::new(what, "DELETE", path, Value::Null)
    }

    fn patch(what: &'static str, path: &str, body: Value) -> Self {
        Self::new(what, "PATCH", path, body)
    }

    fn post(what: &'static str, path: &str, body: Value) -> Self {
        Self::new(what, "POST", path, body)
    }

    /// Adds a request that is let in before the revocation, and refused after it.
    fn refuses(self, request: String) -> Self {
        Self {
            request: Some(request),
            ..self
        }
    }
}

impl World {
    fn create(&self, path: &str, body: &Value) -> Value {
        let created = self.api.ask("POST", path, body);
        assert_eq!(created.status, 201, "{path}: {created:?}");
        created.body
    }

    /// Whether each node passes this request on.
    fn lets_in(&self, request: &str) -> Vec<bool> {
        let host = |node: &About| {
            let mut caller = connect_to(node, HOST, &[b"http/1.1"], None);
            caller.send(request);
            caller.response().status == 200
        };
        self.nodes.iter().map(host).collect()
    }

    fn all(&self, is_let_in: bool) -> Vec<bool> {
        vec![is_let_in; self.nodes.len()]
    }

    /// Makes the change. Within a second, each node refuses what it took away.
    fn revoke(&self, disk: &SmallDisk, revocation: &Revocation) {
        let Revocation {
            what,
            method,
            path,
            body,
            request,
        } = revocation;
        disk.fill();
        within_a_second(what, || {
            let reply = self.api.ask(method, path, body);
            assert!((200..300).contains(&reply.status), "{what}: {reply:?}");
            assert_eq!(reply.pending_nodes, "", "{what}");
            if let Some(request) = request {
                assert_eq!(self.lets_in(request), self.all(false), "{what}");
            }
        });
    }

    /// A request with the secret of a new service key for two services, and the path of the key.
    fn key(&self) -> (String, String) {
        let (id, key) = self.api.create_service_key("demo", &["echo", "second"]);
        (
            get(&format!("X-Gw-Service-Key: {key}")),
            format!("/accounts/demo/service-keys/{id}"),
        )
    }

    /// A request with an access token of a new credential, and the path of the credential.
    fn credential(&self) -> (String, String) {
        let (id, secret) = self.api.create_credential("demo", &["echo", "second"]);
        let body = json!({
            "grant_type": "client_credentials",
            "client_id": id,
            "client_secret": secret,
            "scope": "account:demo service:echo",
        })
        .to_string();
        let request = format!(
            "POST /oauth/token HTTP/1.1\r\nHost: {APEX}\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let response = connect_to(&self.nodes[0], APEX, &[b"http/1.1"], None).ask(request);
        assert_eq!(response.status, 200, "{}", response.json());
        let token = response.json()["access_token"].as_str().unwrap().to_owned();
        (
            get(&format!("X-Gw-Authorization: Bearer {token}")),
            format!("/accounts/demo/credentials/{id}"),
        )
    }

    /// The path of a new agent.
    fn agent(&self, state: &Path) -> String {
        let token = self
            .api
            .create_enrollment_token("demo", &["echo", "second"]);
        let node = &self.nodes[0];
        let id = in_process::enroll_with(token, &node.base_url, &node.ca_file, state);
        format!("/accounts/demo/agents/{id}")
    }

    /// New records, and a revocation of each kind. `round` is part of their names.
    fn prepare(&self, round: usize, states: &Path) -> Vec<Revocation> {
        let all: Vec<Revocation> = [
            self.prepare_secrets(),
            self.prepare_services(round),
            self.prepare_agents(round, states),
            self.prepare_others(round),
        ]
        .into_iter()
        .flatten()
        .collect();
        for revocation in &all {
            if let Some(request) = &revocation.request {
                let what = revocation.what;
                assert_eq!(self.lets_in(request), self.all(true), "before the {what}");
            }
        }
        all
    }

    fn prepare_secrets(&self) -> Vec<Revocation> {
        let mut all = Vec::new();
        for is_key in [true, false] {
            let new = |()| match is_key {
                true => self.key(),
                false => self.credential(),
            };
            let [deleted, disabled, narrowed, rotated] = [(); 4].map(new);
            let off = json!({ "enabled": false });
            let fewer = json!({ "allowed_services": ["second"] });
            let rotation = format!("{}/rotate-secret", rotated.1);
            let rotation = Revocation::post("replacement of a secret", &rotation, json!({}));
            all.extend([
                Revocation::delete("deletion of a secret", &deleted.1).refuses(deleted.0),
                Revocation::patch("disabling of a secret", &disabled.1, off).refuses(disabled.0),
                Revocation::patch("a smaller list of services", &narrowed.1, fewer)
                    .refuses(narrowed.0),
                // Access tokens of before stay valid until they expire.
                if is_key {
                    rotation.refuses(rotated.0)
                } else {
                    rotation
                },
            ]);
        }
        all
    }

    fn prepare_services(&self, round: usize) -> Vec<Revocation> {
        let off = json!({ "enabled": false });
        let modes = json!({ "modes": ["jwt"] });
        let no_records = json!({ "request_logging": false });
        [
            ("disabling of a service", "PATCH", off.clone()),
            ("fewer modes of a service", "PATCH", modes),
            ("no records of a service", "PATCH", no_records),
            ("deletion of a service", "DELETE", Value::Null),
        ]
        .map(|(what, method, body)| {
            let id = format!("s{round}-{}", id_of(what));
            self.create("/accounts/demo/services", &json!({ "id": id }));
            // A key that is off lists the service, too.
            let (key, _) = self.api.create_service_key("demo", &[&id, "echo"]);
            let path = format!("/accounts/demo/service-keys/{key}");
            self.api.patch(&path, &off);
            let service = format!("/accounts/demo/services/{id}");
            Revocation::new(what, method, &service, body)
        })
        .into()
    }

    fn prepare_agents(&self, round: usize, states: &Path) -> Vec<Revocation> {
        let state = |name: &str| states.join(format!("{name}{round}"));
        let [revoked, deleted, narrowed] =
            ["revoked", "deleted", "narrowed"].map(|name| self.agent(&state(name)));
        let revocation = format!("{revoked}/revoke");
        let services = json!({ "services": ["second"] });
        let tokens = "/accounts/demo/enrollment-tokens";
        let token = self.create(tokens, &json!({ "services": ["echo"] }));
        let path = format!("{tokens}/{}", token["id"].as_str().unwrap());
        vec![
            Revocation::post("revocation of an agent", &revocation, json!({})),
            Revocation::delete("deletion of an agent", &deleted),
            Revocation::patch("fewer services of an agent", &narrowed, services),
            Revocation::delete("deletion of an enrollment token", &path),
        ]
    }

    /// A domain, an account, and the signing key.
    fn prepare_others(&self, round: usize) -> Vec<Revocation> {
        let name = json!({ "name": format!("d{round}.example.net") });
        self.create("/accounts/demo/services/second/domains", &name);
        let domain = format!("/accounts/demo/domains/d{round}.example.net");
        let account = format!("/accounts/gone{round}");
        self.api.create_account(&format!("gone{round}"));
        for number in 0..50 {
            let service = json!({ "id": format!("s{number}") });
            self.create(&format!("{account}/services"), &service);
        }
        let no_captures = json!({ "capture_allowed": false });
        let cascade = format!("{account}?cascade=true");
        let now = json!({ "immediately": true });
        vec![
            Revocation::delete("removal of a domain", &domain),
            Revocation::patch("no captures of an account", &account, no_captures),
            Revocation::delete("deletion of an account", &cascade),
            Revocation::post("another signing key", "/signing-keys/rotate", now),
        ]
    }

    /// Deletes the keys that do not sign any more.
    fn delete_signing_keys(&self, disk: &SmallDisk) {
        let keys = eventually("a key does not sign any more", || {
            let mut keys = self.api.list("/signing-keys");
            keys.retain(|key| key["status"] == "retired");
            (!keys.is_empty()).then_some(keys)
        });
        for key in keys {
            let path = format!("/signing-keys/{}", key["kid"].as_str().unwrap());
            let deletion = Revocation::delete("deletion of a signing key", &path);
            self.revoke(disk, &deletion);
        }
    }

    /// Changes that give access are refused. The answer says why, and what to do.
    fn assert_adds_nothing(&self, disk: &SmallDisk) {
        let changes = [
            ("POST", "/accounts", "id"),
            ("POST", "/accounts/other/services", "id"),
            ("PATCH", "/accounts/other/services/api", "burst"),
        ];
        for (method, path, member) in changes {
            // A file that another part of the gateway deletes meanwhile makes room for some
            // changes.
            let mut numbers = 1..;
            let problem = eventually("the change is refused", || {
                disk.fill();
                let number = numbers.next()?;
                let value = match member {
                    "burst" => json!(number),
                    _ => json!(format!("new{number}")),
                };
                let reply = self.api.ask(method, path, &json!({ member: value }));
                (reply.status == 507).then_some(reply.body)
            });
            let detail = problem["detail"].as_str().unwrap();
            let parts = [
                "the disk is full; nothing was changed",
                "free space",
                "data/reserve",
            ];
            assert!(parts.iter().all(|part| detail.contains(part)), "{detail}");
        }
    }

    /// The audit log is valid, and a key is still enabled.
    fn assert_is_whole(&self, kept: &str) {
        let verified = self.api.get("/audit-log/verification").body;
        assert_eq!(verified["valid"], true, "{verified}");
        let path = format!("/accounts/other/service-keys/{kept}");
        assert_eq!(self.api.get(&path).done()["enabled"], true);
    }
}

fn get(field: &str) -> String {
    format!("GET / HTTP/1.1\r\nHost: {HOST}\r\n{field}\r\n\r\n")
}

/// A text as a part of the id of a service.
fn id_of(text: &str) -> String {
    text.replace(' ', "-")
}

/// Starts the gateway of a prepared data folder, and its agent.
fn start(prepared: &Prepared) -> (process::Served, process::Running, World) {
    let (served, agent) = prepared.start(&backend::answering(OK));
    let world = World {
        api: prepared.api(served.admin_address),
        nodes: vec![prepared.about(served.address)],
    };
    (served, agent, world)
}

fn stop(served: &mut process::Served) {
    served.process.stop();
}

#[test]
fn each_revocation_is_in_force_within_a_second_on_a_full_disk() {
    for disk in SmallDisk::of_each_kind() {
        let prepared = Prepared::new();
        let reserve = prepared.path("data/reserve");
        // The existing reserve was made for a large disk.
        fs::remove_file(&reserve).unwrap();
        disk.take(&prepared.path("data"));
        let (mut served, agent, world) = start(&prepared);
        world.create("/accounts/demo/services", &json!({ "id": "second" }));
        world.api.create_service("other", "api");
        let (kept, _) = world.api.create_service_key("other", &["api"]);
        let states = tempfile::tempdir().unwrap();
        let rounds = [0, 1, 2].map(|round| world.prepare(round, states.path()));
        let last = [world.key(), world.key()];
        let whole = fs::metadata(&reserve).unwrap().len();
        assert!(whole > 8_000_000, "{whole}");
        stop(&mut served);
        drop(agent);
        // The write-ahead log begins again, without blocks of its own.
        let database = Connection::open(prepared.path("data/gw.sqlite")).unwrap();
        let checkpoint = "PRAGMA wal_checkpoint(TRUNCATE)";
        database.query_row(checkpoint, [], |_| Ok(())).unwrap();
        drop(database);
        disk.fill();
        let (mut served, agent, world) = start(&prepared);

        for revocation in rounds[..2].iter().flatten() {
            world.revoke(&disk, revocation);
        }
        let left = fs::metadata(&reserve).unwrap().len();
        assert!(left < whole, "the reserve was not used");
        world.assert_adds_nothing(&disk);
        world.delete_signing_keys(&disk);
        drop(agent);
        stop(&mut served);
        disk.fill();
        let (served, agent, world) = start(&prepared);
        for revocation in &rounds[2] {
            world.revoke(&disk, revocation);
        }
        world.assert_adds_nothing(&disk);
        let [crashed, replaced] = last
            .map(|(request, path)| Revocation::delete("deletion of a key", &path).refuses(request));
        drop((served, agent));
        disk.fill();
        let (mut served, agent, world) = start(&prepared);
        world.revoke(&disk, &crashed);
        let _port = process::hold(served.address);
        let successor = replace(served.process.id(), &served.log);
        drop(agent);
        served.process.exit_code();
        world.revoke(&disk, &replaced);

        // The remedy for a stolen authority is last: agents cannot get other certificates before
        // there is room.
        let now = json!({ "immediately": true });
        let authority = Revocation::post("replacement of the authority", "/agent-ca/replace", now);
        world.revoke(&disk, &authority);
        world.assert_adds_nothing(&disk);

        disk.make_room();
        world.create("/accounts", &json!({ "id": "room" }));
        assert_eq!(fs::metadata(&reserve).unwrap().len(), whole);
        world.assert_is_whole(&kept);
        successor.stop();
        check_databases(&prepared.path("data"));
    }
}

#[test]
fn doctor_says_that_the_reserve_is_missing() {
    let prepared = Prepared::new();
    fs::write(prepared.path("gateway.toml"), prepared.config()).unwrap();
    let mut doctor = gw_gateway();
    doctor
        .args(["doctor", "--config"])
        .arg(prepared.path("gateway.toml"));
    let mut check = || examine(&mut doctor);
    check().assert_complaints(&[("certificate", "warning")]);
    fs::remove_file(prepared.path("data/reserve")).unwrap();
    let found = check();
    found.assert_complaints(&[("reserve", "warning"), ("certificate", "warning")]);
    let advice = &found.of("reserve").advice;
    assert!(advice.contains("free space"), "{advice}");
    drop(prepared.serve(0));
    check().assert_complaints(&[("certificate", "warning")]);
}

/// The API of node 1, whose changes are in force at both nodes.
fn region_world(region: &Region) -> World {
    World {
        api: region.api(1),
        nodes: vec![region.about(1), region.about(0)],
    }
}

/// A node whose journal is on a full disk.
#[test]
fn a_node_with_a_full_disk_acknowledges_each_revocation_within_a_second() {
    for disk in SmallDisk::of_each_kind() {
        let Some(mut region) = Region::start(2) else {
            return;
        };
        region.kill(0);
        disk.take(&region.data(0));
        region.restart(0);
        region.wait_for_members(2);
        let _agent = region.run_agent(&backend::answering(OK));
        region.owner();
        let mut world = region_world(&region);
        world.create("/accounts/demo/services", &json!({ "id": "second" }));
        let states = tempfile::tempdir().unwrap();
        let rounds = [0, 1].map(|round| world.prepare(round, states.path()));
        let [after_addition, after_restart, at_the_node, last, kept] =
            [(); 5].map(|()| world.key());
        let deletion = |(request, path): &(String, String)| {
            Revocation::delete("deletion of a key", path).refuses(request.clone())
        };
        let slot = region.status(0)["node"].to_string();

        for revocation in rounds.iter().flatten() {
            world.revoke(&disk, revocation);
        }
        // A change that gives access is made, and the node says that it cannot keep it.
        disk.fill();
        let add = |number: usize| {
            let new = json!({ "id": format!("new{number}") });
            let reply = world.api.ask("POST", "/accounts", &new);
            assert_eq!(reply.status, 201);
            Some(reply.pending_nodes).filter(|nodes| !nodes.is_empty())
        };
        // The last block of the journal has room for some: a block of 4 KiB, and a record takes
        // over 100 bytes.
        assert_eq!((0..40).find_map(add), Some(slot));
        world.revoke(&disk, &deletion(&after_addition));

        region.kill(0);
        disk.fill();
        region.restart(0);
        region.wait_for_members(2);
        world = region_world(&region);
        world.revoke(&disk, &deletion(&after_restart));
        world.api = region.api(0);
        world.revoke(&disk, &deletion(&at_the_node));
        world.revoke(&disk, &deletion(&last));

        // The node refuses the keys without PostgreSQL.
        region.postgres.stop();
        region.kill(0);
        region.restart(0);
        world = region_world(&region);
        world.nodes.remove(0);
        let is_unknown_key = |request: &str| {
            let mut caller = connect_to(&world.nodes[0], HOST, &[b"http/1.1"], None);
            let response = caller.ask(request);
            String::from_utf8_lossy(&response.body).contains("GW_SERVICE_KEY_INVALID")
        };
        for (request, _) in [&after_addition, &after_restart, &at_the_node, &last] {
            assert!(is_unknown_key(request));
        }
        assert!(!is_unknown_key(&kept.0));
        region.postgres.resume();
        disk.make_room();
        eventually("the records are written", || {
            (region.metric(0, "gw_store_copy_failing") == 0.0).then_some(())
        });
    }
}
