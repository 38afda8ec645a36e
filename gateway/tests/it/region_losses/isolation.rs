//! Random requests to services of several accounts at several nodes, while nodes leave, are killed
//! and join.
//!
//! `GW_REGION_REQUESTS` sets the number of requests, for longer runs by hand.

use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use http::Method;
use rustls::StreamOwned;

use crate::support::peers::backend;
use crate::support::peers::caller::{Caller, session};
use crate::support::peers::http1_peer::Peer;
use crate::support::processes::process::Running;
use crate::support::processes::region::Region;
use crate::support::scene::About;
use crate::support::{SOON, eventually, turn};

const CALLERS: u64 = 6;
const PER_CONNECTION: usize = 20;
/// Requests between two changes of the nodes.
const BETWEEN: u64 = 300;

fn requests() -> u64 {
    std::env::var("GW_REGION_REQUESTS").map_or(2000, |requests| requests.parse().expect("a number"))
}

struct Service {
    host: String,
    key: String,
    /// What its backend answers.
    answer: String,
}

/// Creates three accounts with three services each, every one with an agent and a backend of its
/// own.
fn services(region: &Region) -> (Vec<Service>, Vec<Running>) {
    let mut services = Vec::new();
    let mut agents = Vec::new();
    for account in ["red", "green", "blue"] {
        region.api(0).create_account(account);
        for id in ["one", "two", "three"] {
            region.api(1).create_service(account, id);
            let (_, key) = region.api(2).create_service_key(account, &[id]);
            let answer = format!("{account}/{id}");
            let response = format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{answer}",
                answer.len()
            );
            let backend = backend::start(move |mut peer| {
                while peer.request().is_ok() {
                    peer.send(&response);
                }
            });
            let name = format!("agent-{account}-{id}");
            agents.push(region.run_agent_in(
                &name,
                || region.api(0).create_enrollment_token(account, &[id]),
                &backend,
            ));
            let host = format!("{account}--{id}.eu1.gw.localhost");
            services.push(Service { host, key, answer });
        }
    }
    (services, agents)
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % bound as u64).unwrap()
    }
}

/// What the callers have seen.
#[derive(Default)]
struct Seen {
    sent: AtomicU64,
    answered: AtomicU64,
    /// Requests with the key of another service, which were refused.
    refused: AtomicU64,
}

struct RandomCaller {
    random: Random,
    about: About,
    nodes: Arc<[SocketAddr]>,
    services: Arc<[Service]>,
    seen: Arc<Seen>,
    stop: Arc<AtomicBool>,
}

impl RandomCaller {
    fn run(mut self) {
        while !self.stop.load(Ordering::Relaxed) {
            let node = self.nodes[self.random.below(self.nodes.len())];
            let Ok(socket) = TcpStream::connect(node) else {
                continue;
            };
            socket.set_read_timeout(Some(SOON)).unwrap();
            let name = &self.services[self.random.below(self.services.len())].host;
            let tls = session(&self.about, name, &[b"http/1.1"], None);
            let mut peer = Peer::new(StreamOwned::new(tls, socket));
            for _ in 0..PER_CONNECTION {
                if self.stop.load(Ordering::Relaxed) || !self.send(&mut peer) {
                    break;
                }
            }
        }
    }

    /// Sends one request on a connection, to any service. Returns whether the connection can be
    /// used again.
    fn send(&mut self, peer: &mut Caller) -> bool {
        let service = self.random.below(self.services.len());
        // One request in eight has the key of another service.
        let of_other = self.random.below(8) == 0;
        let key = if of_other {
            (service + 1 + self.random.below(8)) % self.services.len()
        } else {
            service
        };
        let Service { host, answer, .. } = &self.services[service];
        let key = &self.services[key].key;
        let request = format!("GET / HTTP/1.1\r\nHost: {host}\r\nX-Gw-Service-Key: {key}\r\n\r\n");
        let sent = std::io::Write::write_all(&mut peer.stream, request.as_bytes());
        let response = sent.and_then(|()| peer.try_response(&Method::GET));
        self.seen.sent.fetch_add(1, Ordering::Relaxed);
        // The node was killed or has ended.
        let Ok(response) = response else { return false };
        if response.status == 200 {
            assert!(!of_other, "{host} accepts the key of another service");
            let body = String::from_utf8_lossy(&response.body);
            assert_eq!(body, *answer, "wrong delivery");
            self.seen.answered.fetch_add(1, Ordering::Relaxed);
        } else if of_other {
            self.seen.refused.fetch_add(1, Ordering::Relaxed);
        }
        true
    }
}

#[test]
fn no_request_reaches_another_service_while_nodes_come_and_go() {
    let _turn = turn();
    let Some(mut region) = Region::start(3) else {
        return;
    };
    let (services, _agents) = services(&region);
    eventually("all agents are connected", || {
        let tunnels = [0, 1, 2].map(|node| region.metric(node, "gw_tunnels"));
        (tunnels.iter().sum::<f64>() >= 9.0).then_some(())
    });
    let services = Arc::from(services);
    let seen = Arc::<Seen>::default();
    let stop = Arc::<AtomicBool>::default();
    let nodes: Arc<[SocketAddr]> = (0..3).map(|node| region.node(node).address).collect();
    let callers = (1..=CALLERS).map(|seed| {
        let caller = RandomCaller {
            random: Random(seed),
            about: region.about(0),
            nodes: Arc::clone(&nodes),
            services: Arc::clone(&services),
            seen: Arc::clone(&seen),
            stop: Arc::clone(&stop),
        };
        std::thread::spawn(move || caller.run())
    });
    let callers: Vec<JoinHandle<()>> = callers.collect();
    let mut random = Random(0);
    while seen.sent.load(Ordering::Relaxed) < requests() {
        let until = seen.sent.load(Ordering::Relaxed) + BETWEEN;
        eventually("requests are sent", || {
            let is_over = callers.iter().any(JoinHandle::is_finished);
            (is_over || seen.sent.load(Ordering::Relaxed) >= until).then_some(())
        });
        let node = random.below(3);
        if random.below(2) == 0 {
            region.kill(node);
        } else {
            region.node(node).process.signal("TERM");
            // Before the end of its drain, which nothing must hold up.
            let mut left = region.nodes[node].take().unwrap();
            assert_eq!(left.process.exit_code(), Some(0));
        }
        region.restart(node);
        region.wait_for_members(3);
    }
    stop.store(true, Ordering::Relaxed);
    for caller in callers {
        caller.join().unwrap();
    }
    let [sent, answered, refused] =
        [&seen.sent, &seen.answered, &seen.refused].map(|count| count.load(Ordering::Relaxed));
    eprintln!(
        "{sent} requests: {answered} answered by their service, {refused} with another key refused"
    );
    assert!(answered > sent / 2, "{answered} of {sent}");
    assert!(refused > 0, "{refused} of {sent}");
}
