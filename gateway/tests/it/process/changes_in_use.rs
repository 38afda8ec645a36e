//! A change that was answered is in use by every worker, however busy it is.

use std::fs;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use gw_gateway::demo::About;
use serde_json::{Value, json};

use crate::support::admin_api::Api;
use crate::support::peers::backend;
use crate::support::peers::caller::{Caller, HOST, connect_to};
use crate::support::processes::prepared::Prepared;
use crate::support::processes::region::Region;
use crate::support::processes::successor::replace;
use crate::support::turn;

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
const SERVICE: &str = "/accounts/demo/services/echo";
const KEYS: &str = "/accounts/demo/service-keys";
const REFUSED: &str = "GW_SERVICE_KEY_INVALID";
/// Kept connections at each node, which workers share.
const KEPT: usize = 8;

fn connect(about: &About) -> Caller {
    connect_to(about, HOST, &[b"http/1.1"], None)
}

/// Sends one request with a key. Returns the error code of the answer; `None` if it succeeds. Connects again if the gateway closes
/// the connection.
fn ask(about: &About, caller: &mut Caller, key: &str) -> Option<String> {
    caller.send(format!(
        "GET / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n\r\n"
    ));
    let response = caller.response();
    if response.header("connection") == "close" {
        *caller = connect(about);
    }
    (response.status != 200).then(|| response.code())
}

/// Callers of the demo's service at these nodes, none of which is refused.
struct BusyCallers {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl BusyCallers {
    fn start(nodes: &[About], count: usize) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let run = |about: &About| {
            let stop = Arc::clone(&stop);
            let about = about.clone();
            thread::spawn(move || {
                let mut caller = connect(&about);
                while !stop.load(Ordering::Relaxed) {
                    assert_eq!(ask(&about, &mut caller, &about.service_key), None);
                }
            })
        };
        let threads = nodes.iter().cycle().take(count).map(run).collect();
        Self { stop, threads }
    }

    fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
    }
}

/// Creates a service key. Returns its id and its text.
fn new_key(about: &About) -> (String, String) {
    let reply = Api(about).ask("POST", KEYS, &json!({ "allowed_services": ["echo"] }));
    assert_eq!(reply.status, 201, "{reply:?}");
    let text = |member: &str| reply.body[member].as_str().unwrap().to_owned();
    (text("key_id"), text("service_key"))
}

fn delete_key(about: &About, id: &str) {
    let reply = Api(about).ask("DELETE", &format!("{KEYS}/{id}"), &Value::Null);
    assert_eq!(reply.status, 204, "{reply:?}");
}

fn admit_all(about: &About) {
    let rate = json!({ "burst": 1_000_000, "refill_per_minute": 60_000_000 });
    let reply = Api(about).ask("PATCH", SERVICE, &rate);
    assert_eq!(reply.status, 200, "{reply:?}");
}

/// Creates `count` keys and revokes each at one node, and uses it at another as soon as the change is answered. Returns how many
/// new keys were refused, and how many revoked ones accepted.
fn misjudged(nodes: &[About], count: usize) -> (usize, usize) {
    // A connection without a request is closed after some seconds.
    let kept = |about| {
        let mut caller = connect(about);
        assert_eq!(ask(about, &mut caller, &about.service_key), None);
        caller
    };
    let mut kept: Vec<Vec<Caller>> = nodes
        .iter()
        .map(|about| (0..KEPT).map(|_| kept(about)).collect())
        .collect();
    let mut refused = 0;
    let mut accepted = 0;
    for number in 0..count {
        let at = &nodes[number % nodes.len()];
        let other = (number + 1) % nodes.len();
        let (about, caller) = (&nodes[other], &mut kept[other][number % KEPT]);
        let (id, key) = new_key(at);
        refused += usize::from(ask(about, caller, &key).is_some());
        delete_key(at, &id);
        accepted += usize::from(ask(about, caller, &key).is_none());
    }
    (refused, accepted)
}

/// `about` with the administration API at this address.
fn administered(about: About, admin_address: SocketAddr, token: &str) -> About {
    About {
        admin_url: format!("http://{admin_address}"),
        admin_token: token.trim().to_owned(),
        ..about
    }
}

#[test]
fn an_answered_change_is_in_use_beside_busy_callers() {
    let _turn = turn();
    let prepared = Prepared::new();
    let (served, _agent) = prepared.start(&backend::answering(OK));
    let token = fs::read_to_string(prepared.path("data/admin.token")).unwrap();
    let node = [administered(
        prepared.about(served.address),
        served.admin_address,
        &token,
    )];
    admit_all(&node[0]);
    let busy = BusyCallers::start(&node, 128);
    assert_eq!(misjudged(&node, 300), (0, 0));
    busy.stop();
}

#[test]
fn an_answered_change_is_in_use_at_all_nodes_beside_busy_callers() {
    let _turn = turn();
    let Some(region) = Region::start(3) else {
        return;
    };
    let _agent = region.run_agent(&backend::answering(OK));
    region.owner();
    let token = region.admin_token();
    let nodes = [0, 1, 2]
        .map(|node| administered(region.about(node), region.node(node).admin_address, &token));
    admit_all(&nodes[0]);
    // Few enough for three nodes on one machine to stay members.
    let busy = BusyCallers::start(&nodes, 24);
    assert_eq!(misjudged(&nodes, 100), (0, 0));
    busy.stop();
}

#[test]
fn an_answered_change_is_in_use_by_replaced_processes() {
    let prepared = Prepared::new();
    let (served, _agent) = prepared.start(&backend::answering(OK));
    let token = fs::read_to_string(prepared.path("data/admin.token")).unwrap();
    let node = administered(prepared.about(served.address), served.admin_address, &token);
    let kept = |_| {
        let mut caller = connect(&node);
        assert_eq!(ask(&node, &mut caller, prepared.service_key()), None);
        caller
    };
    let of_first: Vec<Caller> = (0..10).map(kept).collect();
    let second = replace(served.process.id(), &served.log);
    prepared.wait_for_tunnel(served.address);
    let of_second: Vec<Caller> = (0..10).map(kept).collect();
    let third = replace(second.0, &served.log);
    // A connection of a replaced process ends with its next request.
    for mut kept in [of_first, of_second] {
        while let Some(mut before) = kept.pop() {
            let (id, key) = new_key(&node);
            assert_eq!(ask(&node, &mut before, &key), None);
            delete_key(&node, &id);
            let mut after = kept.pop().unwrap();
            assert_eq!(ask(&node, &mut after, &key).as_deref(), Some(REFUSED));
        }
    }
    third.stop();
}
