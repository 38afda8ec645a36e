//! The authority of agents and nodes is replaced while they run.

use std::collections::VecDeque;
use std::fs;
use std::io::Write;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use gw_shared::files;
use gw_shared::tunnel::{self, handshake};
use http::Method;
use serde_json::{Value, json};

use crate::support::admin_api::{Api, Reply};
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

/// The authority of agents, by the administration API of a node.
fn at_node(region: &Region, node: usize) -> AgentCa {
    AgentCa(region.api(node))
}

impl AgentCa {
    fn status(&self) -> Value {
        self.0.get("/agent-ca").done()
    }

    fn replace(&self) -> Value {
        self.0.post("/agent-ca/replace", &json!({}))
    }

    fn replace_immediately(&self) -> Value {
        let body = json!({ "immediately": true });
        self.0.post("/agent-ca/replace", &body)
    }

    fn finish(&self, force: bool) -> Reply {
        let body = json!({ "force": force });
        self.0.ask("POST", "/agent-ca/finish", &body)
    }

    /// Waits until this number of agents, and no tunnel and no node, uses the earlier authority.
    fn wait_until_left(&self, agents: u64) {
        eventually("all that is left uses the issuing authority", || {
            let view = self.status();
            let nodes = [&view["nodes_left"], &view["missing_nodes"]];
            let is_done = view["agents_left"] == agents && view["tunnels_left"] == 0;
            (is_done && nodes == [&Value::Null; 2]).then_some(())
        });
    }

    fn actions(&self) -> Vec<String> {
        let entries = self.0.list("/audit-log?limit=200");
        let actions = entries.iter().map(|entry| entry["action"].as_str());
        actions.map(|action| action.unwrap().to_owned()).collect()
    }
}

/// Ids of the authorities with this role.
fn ids(view: &Value, role: &str) -> Vec<String> {
    let authorities = view["authorities"].as_array().unwrap().iter();
    authorities
        .filter(|authority| authority["role"] == role)
        .map(|authority| authority["id"].as_str().unwrap().to_owned())
        .collect()
}

/// The id of the authority with this role; empty without one.
fn id(view: &Value, role: &str) -> String {
    ids(view, role).into_iter().next().unwrap_or_default()
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
        for thread in self.threads {
            assert!(thread.join().unwrap() > 0);
        }
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

#[track_caller]
fn assert_expired(about: &About, identity: &Identity) {
    let refused = is_accepted(about, identity).unwrap_err().to_lowercase();
    assert!(refused.contains("expired"), "{refused}");
}

#[test]
fn the_authority_is_replaced_while_an_agent_serves_requests() {
    let prepared = Prepared::with_agents(&["agent", "late"]);
    let (served, _agent) = prepared.start(&backend::answering(ANSWER));
    let api = AgentCa(prepared.api(served.admin_address));
    let about = prepared.about(served.address);
    let first = id(&api.status(), "issuing");
    assert_eq!(api.finish(false).status, 409, "nothing is replaced");
    let before = in_process::identity(&prepared.path("agent"));
    let enrolled = |name: &str| {
        let state = fs::read(prepared.path(name).join("agent.json")).unwrap();
        let state: Value = serde_json::from_slice(&state).unwrap();
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
    assert_eq!(id(&view, "earlier"), first, "{view}");
    assert_ne!(issuing, first, "{view}");
    let second = api.0.ask("POST", "/agent-ca/replace", &json!({}));
    assert_eq!(second.status, 409, "one replacement at a time");
    // The agent that does not run has a certificate of the earlier authority.
    api.wait_until_left(1);
    let problem = api.finish(false);
    assert_eq!(problem.status, 409, "{problem:?}");
    let detail = problem.body["detail"].as_str().unwrap();
    assert!(detail.contains("1 agents"), "{detail}");
    is_accepted(&about, &before).unwrap();
    // A process that takes over has both authorities, and the one that drains still follows.
    let _successor = successor::replace(served.process.id(), &served.log);

    let _late = prepared.run_agent_of("late", served.address.port(), &backend::answering(ANSWER));
    api.wait_until_left(0);
    let view = api.finish(false).done();
    assert_eq!(id(&view, "issuing"), issuing);
    assert_eq!(id(&view, "ended"), first);
    thread::sleep(PAUSE * 20);
    callers.stop();

    // Certificates of the earlier authority are refused.
    assert_expired(&about, &before);
    assert_eq!(["agent", "late"].map(enrolled), ids);
    let actions = api.actions();
    only_the_replacement_is_logged(&actions[..actions.len() - enrollments.len()]);

    prepared.wait_for_tunnel(served.address);
}

fn only_the_replacement_is_logged(new: &[String]) {
    let of = |part: &str| -> Vec<_> { new.iter().filter(|it| it.contains(part)).collect() };
    assert_eq!(of("enroll"), [""; 0]);
    let replacement = ["agent_ca.end", "agent_ca.switch", "agent_ca.add"];
    assert_eq!(of("agent_ca"), replacement);
}

/// A gateway whose records are sealed.
fn serve_sealed(prepared: &Prepared) -> Served {
    let seal_key = prepared.path("seal.key");
    if !seal_key.exists() {
        files::write_private(&seal_key, &[7; 32]).unwrap();
    }
    prepared.serve_with(&format!("seal_key = {seal_key:?}\n{}", prepared.config()))
}

#[test]
fn an_agent_that_missed_the_replacement_comes_back_without_an_enrollment() {
    let prepared = Prepared::new();
    // The gateway seals this file, too.
    let token = fs::read_to_string(prepared.path("data/admin.token")).unwrap();
    let served = serve_sealed(&prepared);
    let api_of = |served: &Served| AgentCa(Api::at(served.admin_address, &token));
    let api = api_of(&served);
    let about = prepared.about(served.address);
    let identity = || in_process::identity(&prepared.path("agent"));
    let before = identity();
    let issuing = id(&api.replace(), "issuing");
    assert_eq!(api.finish(false).status, 409);
    api.finish(true).done();
    assert!(is_accepted(&about, &before).is_err());
    let agent = prepared.run_agent(served.address.port(), &backend::answering(ANSWER));
    prepared.wait_for_tunnel(served.address);
    let after = identity();
    assert_ne!(after.0, before.0);
    let secrets = [&after, &before].map(|(_, key)| key.secret_der());
    assert_eq!(secrets[0], secrets[1], "its key was the proof");
    assert_eq!(id(&api.status(), "issuing"), issuing);
    assert_eq!(api.status()["agents_left"], 0);

    // The key was stolen. The agent is started again, because a process asks for one certificate in
    // three minutes.
    drop(agent);
    let _agent = prepared.run_agent(served.address.port(), &backend::answering(ANSWER));
    prepared.wait_for_tunnel(served.address);
    let view = api.replace_immediately();
    assert_eq!(id(&view, "ended"), issuing, "{view}");
    assert!(is_accepted(&about, &after).is_err());
    eventually("the agent has a certificate of the new authority", || {
        (identity().0 != after.0).then_some(())
    });
    prepared.wait_for_tunnel(served.address);

    // The records have the authority, but no private key in plain text.
    for file in ["gw.sqlite", "gw.sqlite-wal"] {
        let bytes = fs::read(prepared.path("data").join(file)).unwrap();
        let has_key = bytes.windows(11).any(|bytes| bytes == b"PRIVATE KEY");
        assert!(!has_key, "{file}");
    }
    let view = api.status();
    drop(served);
    let served = serve_sealed(&prepared);
    assert_eq!(api_of(&served).status()["authorities"], view["authorities"]);
}

#[test]
fn an_agent_recovers_after_two_immediate_replacements() {
    let prepared = Prepared::new();
    let served = prepared.serve_with(&prepared.config());
    let api = AgentCa(prepared.api(served.admin_address));
    let about = prepared.about(served.address);
    let before = in_process::identity(&prepared.path("agent"));
    let first = id(&api.status(), "issuing");
    for count in [1, 2] {
        let view = api.replace_immediately();
        let ended = ids(&view, "ended");
        assert_eq!(ended.len(), count, "{view}");
        assert!(ended.contains(&first), "{view}");
        assert_expired(&about, &before);
    }
    let _agent = prepared.run_agent(served.address.port(), &backend::answering(ANSWER));
    prepared.wait_for_tunnel(served.address);

    // No agent has a certificate of those authorities any more.
    let issuing = id(&api.status(), "issuing");
    let view = api.replace_immediately();
    assert_eq!(ids(&view, "ended"), [issuing], "{view}");
}

#[test]
fn an_agent_that_lost_its_renewed_certificate_is_asked_again() {
    let prepared = Prepared::new();
    let (served, agent) = prepared.start(&backend::answering(ANSWER));
    let api = AgentCa(prepared.api(served.admin_address));
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
    let url = format!("http://{}", region.node(1).admin_address);
    let arguments = ["agent-ca", "replace", "--json", "--wait", seconds];
    let mut command = gw_gateway();
    command
        .env("GW_ADMIN_TOKEN", region.admin_token().trim())
        .args(arguments)
        .args(["--admin-url", &url]);
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
    let callers = Callers::start((0..3).map(|node| region.about(node)).collect());
    let first = id(&at_node(&region, 0).status(), "issuing");

    // A node that cannot be reached does not know the next authority yet.
    for gates in [&region.engine_gates, &region.peer_gates] {
        gates[2].set(Passage::Stalled);
    }
    let (code, view, said) = replace_within(&region, "1");
    let waits = view["waits_for_nodes"].as_array();
    let waits = waits.unwrap_or_else(|| panic!("{code:?}: {said}"));
    let named = format!("nodes {} do not say that they trust it", waits[0]);
    assert!(code == Some(1) && said.contains(&named), "{code:?}: {said}");
    assert_eq!(waits.len(), 1, "{view}");
    assert_eq!(id(&view, "issuing"), first, "{view}");
    assert_ne!(id(&view, "next"), "", "{view}");
    assert_eq!(at_node(&region, 0).finish(false).status, 409);
    for gates in [&region.engine_gates, &region.peer_gates] {
        gates[2].set(Passage::Open);
    }
    let (code, now, said) = replace_within(&region, "60");
    assert_eq!(code, Some(0), "{said}");
    let issuing = id(&now, "issuing");
    assert_eq!(issuing, id(&view, "next"));
    at_node(&region, 2).wait_until_left(0);
    at_node(&region, 2).finish(false).done();
    thread::sleep(PAUSE * 20);
    callers.stop();
    for node in 0..3 {
        assert_eq!(region.request(node), "200");
    }

    // A node that starts from the copy of the records has the authority too.
    eventually("the node has a copy of the records", || {
        let [first, second] = [0, 1].map(|node| region.metric(node, "gw_store_revision"));
        (first == second).then_some(())
    });
    region.kill(1);
    region.engine_gates[1].set(Passage::Stalled);
    region.restart(1);
    assert_eq!(id(&at_node(&region, 1).status(), "issuing"), issuing);
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
    command
        .env("GW_ADMIN_TOKEN", "token")
        .args(["agent-ca", "replace", "--json", "--wait", "600"])
        .args(["--admin-url", &url]);
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
    let problem = json!({
        "type": "about:blank",
        "title": "Conflict",
        "status": 409,
        "detail": "is being replaced",
    });
    let refused = (Method::POST, 409, problem);
    for answers in [
        vec![waits(), is_next(), waits(), has_switched()],
        // The other command decides between the two requests.
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
        let view = at_node(region, 0).status();
        let authorities = view["authorities"].as_array().unwrap().len();
        (id(&view, "issuing"), authorities)
    };
    let (first, _) = issuing(&region);
    at_node(&region, 0).replace();
    let (replacing, authorities) = issuing(&region);
    assert_ne!(replacing, first);
    assert_eq!(authorities, 2);
    region.kill(0);
    let ended = gw_gateway()
        .args(["region", "forget", "--config"])
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
    assert!(![first, replacing].contains(&new));
    assert_eq!(authorities, 1);
}
