//! The authority of agents and nodes is replaced while they run.

use std::collections::VecDeque;
use std::fs;
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use gw_shared::files;
use gw_shared::tunnel::{self, handshake};
use http::Method;
use serde_json::{Value, json};

use crate::support::admin_api::Api;
use crate::support::agents::in_process::{self, Identity};
use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::peers::caller::{HOST, connect_to};
use crate::support::peers::gate::Passage;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::{Served, gw_gateway};
use crate::support::processes::region::Region;
use crate::support::processes::successor;
use crate::support::scene::About;

const ANSWER: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
const PAUSE: Duration = Duration::from_millis(10);

/// The authority of agents, by the administration API of one process.
struct AgentCa(Api);

impl AgentCa {
    fn new(address: SocketAddr, data_dir: &Path) -> Self {
        let token = fs::read_to_string(data_dir.join("admin.token")).unwrap();
        Self(Api::at(address, &token))
    }

    fn ask(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let reply = self.0.ask(method, path, body);
        (reply.status, reply.body)
    }

    fn status(&self) -> Value {
        self.0.get("/agent-ca").done()
    }

    fn replace(&self) -> Value {
        self.0.post("/agent-ca/replace", &json!({}))
    }

    fn finish(&self, force: bool) -> (u16, Value) {
        self.ask("POST", "/agent-ca/finish", &json!({ "force": force }))
    }

    /// Waits until this number of agents, and no tunnel and no node, uses the earlier authority.
    fn wait_until_left(&self, agents: u64) {
        eventually(
            "agents, tunnels and nodes use the issuing authority",
            || {
                let view = self.status();
                let nodes = ["nodes_left", "missing_nodes"]
                    .into_iter()
                    .any(|nodes| !view[nodes].is_null());
                (view["agents_left"] == agents && view["tunnels_left"] == 0 && !nodes).then_some(())
            },
        );
    }

    fn actions(&self) -> Vec<String> {
        let entries = self.0.list("/audit-log?limit=200");
        entries
            .iter()
            .map(|entry| entry["action"].as_str().unwrap().to_owned())
            .collect()
    }
}

/// The id of the authority with this role.
fn id(view: &Value, role: &str) -> String {
    let authorities = view["authorities"].as_array().unwrap();
    let with_role = authorities
        .iter()
        .find(|authority| authority["role"] == role);
    with_role.map_or_else(String::new, |authority| {
        authority["id"].as_str().unwrap().to_owned()
    })
}

/// Requests without a pause, of which none may fail.
struct Callers {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<usize>>,
}

impl Callers {
    fn start(gateways: Vec<About>) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let run = |about: About| {
            let stop = Arc::clone(&stop);
            thread::spawn(move || {
                let mut answered = 0;
                while !stop.load(Ordering::Relaxed) {
                    let mut caller = connect_to(&about, HOST, &[b"http/1.1"], None);
                    for _ in 0..10 {
                        let key = &about.service_key;
                        caller.send(format!(
                            "GET / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n\r\n"
                        ));
                        let response = caller.response();
                        assert_eq!(response.status, 200, "{response:?}");
                        answered += 1;
                        thread::sleep(PAUSE);
                        if response.header("connection") == "close" {
                            break;
                        }
                    }
                }
                answered
            })
        };
        Self {
            threads: gateways.into_iter().map(run).collect(),
            stop,
        }
    }

    fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        assert!(
            self.threads
                .into_iter()
                .all(|thread| thread.join().unwrap() > 0)
        );
    }
}

/// Whether the gateway accepts this identity for a tunnel.
fn is_accepted(about: &About, (certificate, key): &Identity) -> Result<(), String> {
    let identity = (certificate.clone(), key.clone_key());
    let mut peer = connect_to(about, HOST, &[tunnel::ALPN], Some(identity));
    let sent = peer.stream.write_all(&handshake::request(HOST, None));
    let answered = sent
        .and_then(|()| peer.response_head(&Method::GET))
        .map_err(|error| error.to_string())?;
    assert_eq!(answered.status, 101);
    Ok(())
}

#[test]
fn the_authority_is_replaced_while_an_agent_serves_requests() {
    let prepared = Prepared::with_agents(&["agent", "late"]);
    let (served, _agent) = prepared.start(&backend::answering(ANSWER));
    let api = AgentCa::new(served.admin_address, &prepared.path("data"));
    let about = prepared.about(served.address);
    let first = id(&api.status(), "issuing");
    assert_eq!(api.finish(false).0, 409, "nothing is replaced");
    let before = in_process::identity(&prepared.path("agent"));
    let enrolled = |name: &str| {
        let state: Value =
            serde_json::from_slice(&fs::read(prepared.path(name).join("agent.json")).unwrap())
                .unwrap();
        state["agent_id"].as_str().unwrap().to_owned()
    };
    let ids = ["agent", "late"].map(enrolled);
    let enrollments = api.actions();
    let callers = Callers::start(vec![
        prepared.about(served.address),
        prepared.about(served.address),
    ]);

    let view = api.replace();
    let issuing = id(&view, "issuing");
    assert_eq!(
        (&first, issuing == first),
        (&id(&view, "earlier"), false),
        "{view}"
    );
    assert_eq!(
        api.ask("POST", "/agent-ca/replace", &json!({})).0,
        409,
        "one replacement at a time"
    );
    // The agent that does not run has a certificate of the earlier authority.
    api.wait_until_left(1);
    let (status, problem) = api.finish(false);
    assert_eq!(status, 409, "{problem}");
    assert!(
        problem["detail"].as_str().unwrap().contains("1 agents"),
        "{problem}"
    );
    is_accepted(&about, &before).unwrap();
    // A process that takes over has both authorities, and the one that drains still follows.
    let _successor = successor::replace(served.process.id(), &served.log);

    let _late = prepared.run_agent_of("late", served.address.port(), &backend::answering(ANSWER));
    api.wait_until_left(0);
    let (status, view) = api.finish(false);
    assert_eq!(status, 200, "{view}");
    assert_eq!(
        (id(&view, "issuing"), id(&view, "ended")),
        (issuing.clone(), first)
    );
    thread::sleep(PAUSE * 20);
    callers.stop();

    // Certificates of the earlier authority have ended, with their keys known to the gateway or
    // not.
    let refused = is_accepted(&about, &before).unwrap_err();
    assert!(refused.to_lowercase().contains("expired"), "{refused}");
    assert_eq!(["agent", "late"].map(enrolled), ids);
    let actions = api.actions();
    only_the_replacement_is_logged(&actions[..actions.len() - enrollments.len()]);

    prepared.wait_for_tunnel(served.address);
}

fn only_the_replacement_is_logged(new: &[String]) {
    assert!(
        !new.iter().any(|action| action.contains("enroll")),
        "{new:?}"
    );
    let replacement: Vec<_> = new
        .iter()
        .rev()
        .filter(|action| action.starts_with("agent_ca"))
        .collect();
    assert_eq!(
        replacement,
        ["agent_ca.add", "agent_ca.switch", "agent_ca.end"]
    );
}

#[test]
fn an_agent_that_missed_the_replacement_comes_back_without_an_enrollment() {
    let prepared = Prepared::new();
    let seal_key = prepared.path("seal.key");
    files::write_private(&seal_key, &[7; 32]).unwrap();
    let config = format!("seal_key = {seal_key:?}\n{}", prepared.config());
    // Later it is sealed too.
    let token = fs::read_to_string(prepared.path("data/admin.token")).unwrap();
    let served = prepared.serve_with(&config);
    let api_of = |served: &Served| AgentCa(Api::at(served.admin_address, &token));
    let api = api_of(&served);
    let identity = || in_process::identity(&prepared.path("agent"));
    let before = identity();
    let issuing = id(&api.replace(), "issuing");
    assert_eq!(api.finish(false).0, 409);
    assert_eq!(api.finish(true).0, 200);
    assert!(is_accepted(&prepared.about(served.address), &before).is_err());
    let agent = prepared.run_agent(served.address.port(), &backend::answering(ANSWER));
    prepared.wait_for_tunnel(served.address);
    let after = identity();
    assert_ne!(after.0, before.0);
    assert_eq!(
        after.1.secret_der(),
        before.1.secret_der(),
        "its key was the proof"
    );
    assert_eq!(id(&api.status(), "issuing"), issuing);
    assert_eq!(api.status()["agents_left"], 0);

    // A stolen key. A process of an agent asks for one certificate in three minutes.
    drop(agent);
    let _agent = prepared.run_agent(served.address.port(), &backend::answering(ANSWER));
    prepared.wait_for_tunnel(served.address);
    let (status, view) = api.ask("POST", "/agent-ca/replace", &json!({ "immediately": true }));
    assert_eq!((status, id(&view, "ended")), (200, issuing), "{view}");
    assert!(is_accepted(&prepared.about(served.address), &after).is_err());
    eventually("the agent has a certificate of the new authority", || {
        (identity().0 != after.0).then_some(())
    });
    prepared.wait_for_tunnel(served.address);

    // The records have the authority, and no private key as it is.
    for file in ["gw.sqlite", "gw.sqlite-wal"] {
        let bytes = fs::read(prepared.path("data").join(file)).unwrap();
        assert!(
            !bytes.windows(11).any(|bytes| bytes == b"PRIVATE KEY"),
            "{file}"
        );
    }
    let view = api.status();
    drop(served);
    let served = prepared.serve_with(&config);
    assert_eq!(api_of(&served).status()["authorities"], view["authorities"]);
}

#[test]
fn an_agent_recovers_after_two_immediate_replacements() {
    let prepared = Prepared::new();
    let served = prepared.serve_with(&prepared.config());
    let api = AgentCa::new(served.admin_address, &prepared.path("data"));
    let about = prepared.about(served.address);
    let before = in_process::identity(&prepared.path("agent"));
    let ended = |view: &Value| {
        let authorities = view["authorities"].as_array().unwrap();
        let ended = authorities
            .iter()
            .filter(|authority| authority["role"] == "ended");
        ended
            .map(|authority| authority["id"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let first = id(&api.status(), "issuing");
    for count in [1, 2] {
        let (status, view) = api.ask("POST", "/agent-ca/replace", &json!({ "immediately": true }));
        assert_eq!(
            (status, ended(&view).len(), ended(&view).contains(&first)),
            (200, count, true),
            "{view}"
        );
        let refused = is_accepted(&about, &before).unwrap_err();
        assert!(refused.to_lowercase().contains("expired"), "{refused}");
    }
    let _agent = prepared.run_agent(served.address.port(), &backend::answering(ANSWER));
    prepared.wait_for_tunnel(served.address);

    // No agent has a certificate of those authorities any more.
    let issuing = id(&api.status(), "issuing");
    let (status, view) = api.ask("POST", "/agent-ca/replace", &json!({ "immediately": true }));
    assert_eq!((status, ended(&view)), (200, vec![issuing]), "{view}");
}

#[test]
fn an_agent_that_lost_its_renewed_certificate_is_asked_again() {
    let prepared = Prepared::new();
    let (served, agent) = prepared.start(&backend::answering(ANSWER));
    let api = AgentCa::new(served.admin_address, &prepared.path("data"));
    let file = prepared.path("agent/identity.pem");
    let before = fs::read(&file).unwrap();
    api.replace();
    api.wait_until_left(0);
    drop(agent);
    let renewed = fs::read(&file).unwrap();
    assert_ne!(renewed, before);
    files::write_private(&file, &before).unwrap();
    let _agent = prepared.run_agent(served.address.port(), &backend::answering(ANSWER));
    eventually("the agent has renewed its certificate again", || {
        let now = fs::read(&file).unwrap();
        (now != before && now != renewed).then_some(())
    });
}

/// Runs `agent-ca replace --wait` at node 1, as [`ended`].
fn replace_within(region: &Region, seconds: &str) -> (Option<i32>, Value, String) {
    let mut command = gw_gateway();
    command
        .env("GW_ADMIN_TOKEN", region.admin_token().trim())
        .args(["agent-ca", "replace", "--json", "--wait", seconds])
        .args([
            "--admin-url",
            &format!("http://{}", region.node(1).admin_address),
        ]);
    ended(&mut command)
}

/// Runs a command. Returns its exit code, the authorities, and what it says.
fn ended(command: &mut Command) -> (Option<i32>, Value, String) {
    let ended = command.output().unwrap();
    let view = serde_json::from_slice(&ended.stdout).unwrap_or(Value::Null);
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    (ended.status.code(), view, said)
}

#[test]
fn the_nodes_of_a_region_trust_the_next_authority_before_it_issues() {
    let Some(mut region) = Region::start_gated(3) else {
        return;
    };
    let _agent = region.run_agent(&backend::answering(ANSWER));
    region.owner();
    let api = |region: &Region, node: usize| {
        AgentCa::new(region.node(node).admin_address, &region.data(0))
    };
    let callers = Callers::start((0..3).map(|node| region.about(node)).collect());
    let first = id(&api(&region, 0).status(), "issuing");

    // A node that cannot be reached does not know the next authority yet.
    for gates in [&region.engine_gates, &region.peer_gates] {
        gates[2].set(Passage::Stalled);
    }
    let (code, view, said) = replace_within(&region, "1");
    let waits = view["waits_for_nodes"].as_array();
    let waits = waits.unwrap_or_else(|| panic!("{code:?}: {said}"));
    let named = format!("nodes {} do not say that they trust it", waits[0]);
    assert!(code == Some(1) && said.contains(&named), "{code:?}: {said}");
    assert_eq!(
        (
            waits.len(),
            id(&view, "issuing") == first,
            id(&view, "next").is_empty()
        ),
        (1, true, false),
        "{view}"
    );
    assert_eq!(api(&region, 0).finish(false).0, 409);
    for gates in [&region.engine_gates, &region.peer_gates] {
        gates[2].set(Passage::Open);
    }
    let (code, now, said) = replace_within(&region, "60");
    assert_eq!(code, Some(0), "{said}");
    let issuing = id(&now, "issuing");
    assert_eq!(issuing, id(&view, "next"));
    api(&region, 2).wait_until_left(0);
    let (status, view) = api(&region, 2).finish(false);
    assert_eq!(status, 200, "{view}");
    thread::sleep(PAUSE * 20);
    callers.stop();
    for node in 0..3 {
        assert_eq!(region.request(node), "200");
    }

    // A node that starts from the copy of the records has the authority too.
    eventually("the node has a copy of the records", || {
        (region.metric(0, "gw_store_revision") == region.metric(1, "gw_store_revision"))
            .then_some(())
    });
    region.kill(1);
    region.engine_gates[1].set(Passage::Stalled);
    region.restart(1);
    assert_eq!(id(&api(&region, 1).status(), "issuing"), issuing);
}

/// Runs `agent-ca replace --wait` at an administration API that gives these answers. Each must be
/// to a request with its method.
fn replace_at(answers: Vec<(Method, u16, Value)>) -> (Option<i32>, Value, String) {
    let answers = Arc::new(Mutex::new(VecDeque::from(answers)));
    let left = Arc::clone(&answers);
    let url = backend::start(move |mut peer| {
        while let Ok((head, ..)) = peer.request() {
            let (method, status, body) = answers.lock().unwrap().pop_front().unwrap();
            assert_eq!(head.method, method);
            let body = body.to_string();
            let kind = match status {
                200 => "json",
                _ => "problem+json",
            };
            let length = body.len();
            peer.send(format!(
                "HTTP/1.1 {status} X\r\nContent-Type: application/{kind}\r\n\
                 Content-Length: {length}\r\n\r\n{body}"
            ));
        }
    });
    let mut command = gw_gateway();
    command.env("GW_ADMIN_TOKEN", "token").args([
        "agent-ca",
        "replace",
        "--json",
        "--wait",
        "600",
        "--admin-url",
        &url,
    ]);
    let ended = ended(&mut command);
    assert!(left.lock().unwrap().is_empty(), "{ended:?}");
    ended
}

#[test]
fn a_wait_for_the_next_authority_ends_once_another_command_has_decided() {
    let view = |roles: &[&str], waits: &[u16]| {
        let of_role = |role: &&str| {
            json!({
                "id": "6260b688f21b54a0e9914ccf2156a587bed9a9b9",
                "role": role,
                "certificate": "",
            })
        };
        let authorities: Vec<_> = roles.iter().map(of_role).collect();
        json!({
            "authorities": authorities,
            "waits_for_nodes": waits,
            "agents": 0,
            "agents_left": 0,
            "left": [],
            "tunnels_left": 0,
        })
    };
    let waits = || (Method::POST, 200, view(&["issuing", "next"], &[3]));
    let is_next = || (Method::GET, 200, view(&["issuing", "next"], &[]));
    let issues = view(&["issuing", "earlier"], &[]);
    let has_switched = || (Method::GET, 200, issues.clone());
    let problem = json!({ "type": "about:blank", "title": "Conflict", "status": 409, "detail": "is \
        being replaced" });
    let refused = (Method::POST, 409, problem);
    for answers in [
        vec![waits(), is_next(), waits(), has_switched()],
        // Between the two requests.
        vec![waits(), is_next(), refused, has_switched()],
    ] {
        let (code, shown, said) = replace_at(answers);
        let is_said = said.contains("another command has decided about the next authority");
        assert!(code == Some(0) && is_said, "{code:?}: {said}");
        assert_eq!(shown, issues);
    }

    let ended = (Method::GET, 200, view(&["issuing", "ended"], &[]));
    let (code, _, said) = replace_at(vec![waits(), ended]);
    let is_said = said.contains("there is no next authority any more: another command has");
    assert!(code == Some(1) && is_said, "{code:?}: {said}");
}

#[test]
fn a_region_forgets_authorities_that_have_replaced_the_first_one() {
    let Some(mut region) = Region::start(1) else {
        return;
    };
    let issuing = |region: &Region| {
        let view = AgentCa::new(region.node(0).admin_address, &region.data(0)).status();
        (
            id(&view, "issuing"),
            view["authorities"].as_array().unwrap().len(),
        )
    };
    let first = issuing(&region).0;
    AgentCa::new(region.node(0).admin_address, &region.data(0)).replace();
    let (replacing, authorities) = issuing(&region);
    assert_eq!((replacing == first, authorities), (false, 2));
    region.kill(0);
    let forget = ["region", "forget", "--config"];
    let ended = gw_gateway()
        .args(forget)
        .arg(region.config(0))
        .arg("agent-ca")
        .output()
        .unwrap();
    assert!(ended.status.success(), "{ended:?}");
    for file in ["agent-ca.crt", "agent-ca.key"] {
        fs::remove_file(region.data(0).join(file)).unwrap();
    }
    region.restart(0);
    let (new, authorities) = issuing(&region);
    assert_eq!(
        (new == first, new == replacing, authorities),
        (false, false, 1)
    );
}
