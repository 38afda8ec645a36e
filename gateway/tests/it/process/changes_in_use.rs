//! A change that was answered is in use by every worker, however busy it is.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Instant;
use std::{fs, io};

use http::Method;
use serde_json::{Value, json};

use crate::support::admin_api::{Api, Reply};
use crate::support::limits::DRAIN_IDLE_SUCCEEDED;
use crate::support::peers::backend;
use crate::support::peers::caller::{Caller, HOST, connect_to};
use crate::support::processes::prepared::Prepared;
use crate::support::processes::region::Region;
use crate::support::processes::successor::replace;
use crate::support::scene::About;
use crate::support::stopwatch::in_time;
use crate::support::turn;

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
const KEYS: &str = "/accounts/demo/service-keys";
const REFUSED: &str = "GW_SERVICE_KEY_INVALID";
/// Kept connections at each node, which workers share.
const KEPT: usize = 8;

fn connect(about: &About) -> Caller {
    connect_to(about, HOST, &[b"http/1.1"], None)
}

/// Sends one request with a key. Returns the error code of the answer; `None` if it succeeds.
/// Connects again if the gateway closes the connection after the answer, and fails if it has closed
/// it before.
fn try_ask(about: &About, caller: &mut Caller, key: &str) -> io::Result<Option<String>> {
    caller.try_send(format!(
        "GET / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n\r\n"
    ))?;
    let response = caller.try_response(&Method::GET)?;
    if response.header("connection") == "close" {
        *caller = connect(about);
    }
    Ok((response.status != 200).then(|| response.code()))
}

fn ask(about: &About, caller: &mut Caller, key: &str) -> Option<String> {
    try_ask(about, caller, key).unwrap()
}

/// A node, and its slot in a region.
struct Node {
    about: About,
    slot: String,
}

/// Callers of the scene's service at some nodes.
struct BusyCallers {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Option<String>>>,
}

impl BusyCallers {
    fn start(nodes: &[Node], count: usize) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let run = |node: &Node| {
            let stop = Arc::clone(&stop);
            let about = node.about.clone();
            thread::spawn(move || {
                let mut caller = connect(&about);
                while !stop.load(Ordering::Relaxed) {
                    let refused = ask(&about, &mut caller, &about.service_key);
                    if refused.is_some() {
                        return refused;
                    }
                }
                None
            })
        };
        let threads = nodes.iter().cycle().take(count).map(run).collect();
        Self { stop, threads }
    }

    /// Returns the error codes of the requests that were refused.
    fn stop(self) -> Vec<String> {
        self.stop.store(true, Ordering::Relaxed);
        self.threads
            .into_iter()
            .filter_map(|thread| thread.join().unwrap())
            .collect()
    }
}

/// Creates a service key. Returns its id and its text, and the answer.
fn new_key(about: &About) -> (String, String, Reply) {
    let reply = Api::of(about).ask("POST", KEYS, &json!({ "allowed_services": ["echo"] }));
    assert_eq!(reply.status, 201, "{reply:?}");
    let text = |member: &str| reply.body[member].as_str().unwrap().to_owned();
    (text("key_id"), text("service_key"), reply)
}

fn delete_key(about: &About, id: &str) -> Reply {
    let reply = Api::of(about).ask("DELETE", &format!("{KEYS}/{id}"), &Value::Null);
    assert_eq!(reply.status, 204, "{reply:?}");
    reply
}

fn admit_all(about: &About) {
    let rate = json!({ "burst": 1_000_000, "refill_per_minute": 60_000_000 });
    Api::of(about).patch("/accounts/demo/services/echo", &rate);
}

/// Answers of nodes after changes, which are wrong if the node did not use the change.
#[derive(Default)]
struct Judged {
    /// Uses of a new key that were refused.
    refused: usize,
    /// Uses of a revoked key that were accepted.
    accepted: usize,
    /// Changes that all nodes use, as their answers say.
    in_use: usize,
}

impl Judged {
    /// Asserts that no answer was wrong, and that at least half of `changes` were in use at all
    /// nodes.
    fn assert_correct(&self, changes: usize) {
        assert_eq!((self.refused, self.accepted), (0, 0));
        assert!(
            2 * self.in_use >= changes,
            "{} of {changes} changes are in use at all nodes",
            self.in_use
        );
    }
}

/// Creates `count` keys and revokes each at one node, and uses it at another as soon as the change
/// is answered. An answer counts if the change is in use at this node and at the owner of the
/// service, which look at the key.
fn judged(nodes: &[Node], owner: usize, count: usize) -> Judged {
    // A connection without a request is closed after some seconds.
    let kept = |Node { about, .. }: &Node| {
        let mut caller = connect(about);
        assert_eq!(ask(about, &mut caller, &about.service_key), None);
        caller
    };
    let mut kept: Vec<Vec<Caller>> = nodes
        .iter()
        .map(|node| (0..KEPT).map(|_| kept(node)).collect())
        .collect();
    let mut judged = Judged::default();
    for number in 0..count {
        let at = &nodes[number % nodes.len()].about;
        let other = (number + 1) % nodes.len();
        let (about, caller) = (&nodes[other].about, &mut kept[other][number % KEPT]);
        let counts = |reply: &Reply| {
            ![other, owner]
                .iter()
                .any(|node| reply.is_pending_at(&nodes[*node].slot))
        };
        let (id, key, created) = new_key(at);
        let is_refused = ask(about, caller, &key).is_some();
        judged.refused += usize::from(is_refused && counts(&created));
        let revoked = delete_key(at, &id);
        let is_accepted = ask(about, caller, &key).is_none();
        judged.accepted += usize::from(is_accepted && counts(&revoked));
        for reply in [created, revoked] {
            judged.in_use += usize::from(reply.pending_nodes.is_empty());
        }
    }
    judged
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
    const KEYS: usize = 300;
    let _turn = turn();
    let prepared = Prepared::new();
    let (served, _agent) = prepared.start(&backend::answering(OK));
    let token = fs::read_to_string(prepared.path("data/admin.token")).unwrap();
    let node = [Node {
        about: administered(prepared.about(served.address), served.admin_address, &token),
        slot: "0".to_owned(),
    }];
    admit_all(&node[0].about);
    let busy = BusyCallers::start(&node, 128);
    let judged = judged(&node, 0, KEYS);
    assert!(busy.stop().is_empty());
    judged.assert_correct(2 * KEYS);
}

#[test]
fn an_answered_change_is_in_use_at_all_nodes_beside_busy_callers() {
    const KEYS: usize = 100;
    let _turn = turn();
    let Some(region) = Region::start(3) else {
        return;
    };
    let _agent = region.run_agent(&backend::answering(OK));
    region.owner();
    let token = region.admin_token();
    let nodes = [0, 1, 2].map(|node| Node {
        about: administered(region.about(node), region.node(node).admin_address, &token),
        slot: region.status(node)["node"].to_string(),
    });
    admit_all(&nodes[0].about);
    let epochs = || [0, 1, 2].map(|node| region.metric(node, "gw_region_epoch").to_string());
    in_time("the nodes stay members", || {
        region.wait_for_members(3);
        let owner = region.owner();
        let before = epochs();
        // Few enough for three nodes on one machine to stay members.
        let busy = BusyCallers::start(&nodes, 24);
        let judged = judged(&nodes, owner, KEYS);
        let refused = busy.stop();
        if epochs() != before {
            return None;
        }
        assert!(refused.is_empty(), "{refused:?}");
        judged.assert_correct(2 * KEYS);
        Some(())
    });
}

#[test]
fn an_answered_change_is_in_use_by_replaced_processes() {
    in_time(
        "replaced processes keep connections and use changes",
        || {
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
            let began = Instant::now();
            let second = replace(served.process.id(), &served.log);
            prepared.wait_for_tunnel(served.address);
            let of_second: Vec<Caller> = (0..10).map(kept).collect();
            let third = replace(second.0, &served.log);
            let answer = |mut caller: Caller, key: &str| match try_ask(&node, &mut caller, key) {
                Ok(answer) => Some(answer),
                Err(error) => {
                    assert!(began.elapsed() >= DRAIN_IDLE_SUCCEEDED, "{error}");
                    None
                }
            };
            // A connection of a replaced process ends with its next request.
            for mut kept in [of_first, of_second] {
                while let Some(before) = kept.pop() {
                    let (id, key, created) = new_key(&node);
                    let with_new = answer(before, &key)?;
                    let revoked = delete_key(&node, &id);
                    let with_revoked = answer(kept.pop().unwrap(), &key)?;
                    let replies = [created, revoked];
                    if replies.iter().any(|reply| !reply.pending_nodes.is_empty()) {
                        return None;
                    }
                    assert_eq!(with_new, None);
                    assert_eq!(with_revoked.as_deref(), Some(REFUSED));
                }
            }
            third.stop();
            Some(())
        },
    );
}
