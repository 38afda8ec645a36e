//! A region under load while its nodes are replaced and killed.
//!
//! `GW_REGION_LOAD_ROUNDS` sets the number of rounds, for longer runs by hand.

use std::collections::HashMap;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use http::Method;
use rustls::StreamOwned;

use crate::support::peers::backend;
use crate::support::peers::caller::{Caller, HOST, session};
use crate::support::peers::http1_peer::Peer;
use crate::support::processes::process::Running;
use crate::support::processes::region::Region;
use crate::support::processes::successor::{Successor, replace};
use crate::support::scene::About;
use crate::support::waiting_requests::Loss;
use crate::support::{SOON, eventually, turn};

/// Callers that send requests all the time.
const CALLERS: usize = 6;
/// Requests on one connection.
const REQUESTS: usize = 20;

fn rounds(default: usize) -> usize {
    std::env::var("GW_REGION_LOAD_ROUNDS")
        .map_or(default, |rounds| rounds.parse().expect("a number"))
}

/// The requests that a backend has received.
#[derive(Default, Clone)]
pub(super) struct Received {
    /// How often, by request id.
    ids: Arc<Mutex<HashMap<String, usize>>>,
    /// Requests that were received more often than they may be.
    repeated: Arc<AtomicU64>,
}

impl Received {
    pub(super) fn backend(&self) -> String {
        let received = self.clone();
        backend::start(move |mut peer| {
            while let Ok((head, ..)) = peer.request() {
                let id = head.headers.get("x-gw-request-id").unwrap();
                let id = id.to_str().unwrap().to_owned();
                let times = {
                    let mut ids = received.ids.lock().unwrap();
                    let times = ids.entry(id).or_default();
                    *times += 1;
                    *times
                };
                // A safe request is sent once more if its node was lost.
                if times > if head.method.is_safe() { 2 } else { 1 } {
                    received.repeated.fetch_add(1, Ordering::Relaxed);
                }
                peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
            }
        })
    }

    #[track_caller]
    fn assert_none_repeated(&self) {
        assert_eq!(self.repeated.load(Ordering::Relaxed), 0);
    }
}

/// A request without a response of the backend.
pub(crate) struct Failure {
    began: Instant,
    ended: Instant,
    pub(crate) what: String,
}

impl Failure {
    /// Whether the request was sent or waited in this time.
    fn is_within(&self, from: Instant, to: Instant) -> bool {
        self.began <= to && self.ended >= from
    }
}

/// What the callers have seen.
#[derive(Default)]
pub(crate) struct Outcome {
    /// Durations of successful requests.
    took: Vec<Duration>,
    failures: Vec<Failure>,
    /// Connections that the gateway closed before the next request of a caller, which may send it
    /// again (RFC 9112 §9.3.1).
    closed_before_request: usize,
}

impl Outcome {
    fn add(&mut self, mut other: Self) {
        self.took.append(&mut other.took);
        self.failures.append(&mut other.failures);
        self.closed_before_request += other.closed_before_request;
    }

    /// Asserts that there is no failure that counts.
    #[track_caller]
    pub(crate) fn assert_no_failure(&self, counts: impl Fn(&Failure) -> bool) {
        let failures = self.failures.iter().filter(|failure| counts(failure));
        let failures: Vec<_> = failures.map(|failure| &failure.what).collect();
        assert!(failures.is_empty(), "{failures:?}");
    }

    fn percentile(&mut self, percent: usize) -> Duration {
        self.took.sort_unstable();
        self.took[(self.took.len() - 1) * percent / 100]
    }
}

/// Callers that send requests until they are stopped.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
    callers: Vec<JoinHandle<Outcome>>,
}

impl Load {
    /// The callers connect to the nodes in turn, and to the next one if a node does not accept.
    pub(crate) fn start(region: &Region, nodes: usize) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let sent = Arc::<AtomicU64>::default();
        let addresses: Arc<[SocketAddr]> =
            (0..nodes).map(|node| region.node(node).address).collect();
        let callers = (0..CALLERS).map(|number| {
            let method = if number % 2 == 0 {
                Method::GET
            } else {
                Method::POST
            };
            let caller = LoadCaller {
                about: region.about(0),
                addresses: Arc::clone(&addresses),
                request: format!(
                    "{method} / HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 0\r\n\
                     X-Gw-Service-Key: {}\r\n\r\n",
                    region.service_key()
                ),
                stop: Arc::clone(&stop),
                sent: Arc::clone(&sent),
                outcome: Outcome::default(),
            };
            std::thread::spawn(move || caller.run(number))
        });
        let callers = callers.collect();
        Self {
            stop,
            sent,
            callers,
        }
    }

    /// Waits until the callers have sent `count` more requests.
    pub(crate) fn wait_for(&self, count: u64) {
        let until = self.sent.load(Ordering::Relaxed) + count;
        eventually("requests are sent", || {
            (self.sent.load(Ordering::Relaxed) >= until).then_some(())
        });
    }

    pub(crate) fn stop(self) -> Outcome {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Outcome::default();
        self.callers
            .into_iter()
            .for_each(|caller| all.add(caller.join().unwrap()));
        all
    }
}

struct LoadCaller {
    about: About,
    addresses: Arc<[SocketAddr]>,
    request: String,
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
    outcome: Outcome,
}

impl LoadCaller {
    fn run(mut self, number: usize) -> Outcome {
        let mut turn = number;
        while !self.stop.load(Ordering::Relaxed) {
            turn += 1;
            let Ok(socket) = TcpStream::connect(self.addresses[turn % self.addresses.len()]) else {
                continue;
            };
            socket.set_nodelay(true).unwrap();
            socket.set_read_timeout(Some(SOON)).unwrap();
            let tls = session(&self.about, HOST, &[b"http/1.1"], None);
            self.send_on(Peer::new(StreamOwned::new(tls, socket)));
        }
        self.outcome
    }

    fn send_on(&mut self, mut peer: Caller) {
        for number in 0..REQUESTS {
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            let began = Instant::now();
            let exchanged = self.exchange(&mut peer);
            self.sent.fetch_add(1, Ordering::Relaxed);
            match exchanged {
                Ok(()) => self.outcome.took.push(began.elapsed()),
                Err(error) if number > 0 && is_close(&error) => {
                    self.outcome.closed_before_request += 1;
                    return;
                }
                Err(error) => {
                    let what = error.to_string();
                    self.outcome.failures.push(Failure {
                        began,
                        ended: Instant::now(),
                        what,
                    });
                    return;
                }
            }
        }
    }

    fn exchange(&self, peer: &mut Caller) -> io::Result<()> {
        peer.stream.write_all(self.request.as_bytes())?;
        let response = peer.try_response(&Method::GET)?;
        match response.status.as_u16() {
            200 => Ok(()),
            status => Err(io::Error::other(format!("{status} {}", response.code()))),
        }
    }
}

/// Whether the gateway has closed a connection instead of answering.
fn is_close(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(
        error.kind(),
        BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof
    )
}

/// A region of three nodes with an agent.
pub(super) fn start() -> Option<(Region, Running, Received)> {
    let region = Region::start(3)?;
    let received = Received::default();
    let agent = region.run_agent(&received.backend());
    region.owner();
    Some((region, agent, received))
}

#[test]
fn no_request_fails_while_all_nodes_are_replaced() {
    let _turn = turn();
    let Some((region, _agent, received)) = start() else {
        return;
    };
    let load = Load::start(&region, 3);
    load.wait_for(200);
    let mut successors: Vec<Successor> = Vec::new();
    for node in 0..3 {
        let served = region.node(node);
        successors.push(replace(served.process.id(), &served.log));
        load.wait_for(300);
    }
    let mut outcome = load.stop();
    outcome.assert_no_failure(|_| true);
    received.assert_none_repeated();
    let slowest = outcome.percentile(100);
    let count = outcome.took.len();
    eprintln!(
        "{count} requests, slowest {slowest:?}, {} closed before a request",
        outcome.closed_before_request
    );
}

/// Waits until a killed process has closed these connections and its listeners. Its sockets close a
/// moment after its end.
fn wait_until_closed(addresses: &[SocketAddr], connections: Vec<TcpStream>) {
    for mut connection in connections {
        connection.set_read_timeout(Some(SOON)).unwrap();
        let ended = io::copy(&mut connection, &mut io::sink());
        assert!(ended.map_or_else(|error| is_close(&error), |_| true));
    }
    eventually("connections are refused", || {
        let is_refused = |address| TcpStream::connect(address).is_err();
        addresses.iter().all(is_refused).then_some(())
    });
}

#[test]
fn only_requests_in_flight_fail_when_nodes_are_killed() {
    let _turn = turn();
    let Some((mut region, _agent, received)) = start() else {
        return;
    };
    let load = Load::start(&region, 3);
    load.wait_for(200);
    let mut kills = Vec::new();
    for round in 0..rounds(2) {
        let node = round % 3;
        region.wait_for_trust();
        let addresses = [region.node(node).address, region.peer_listen(node)];
        // Enough that each of its workers has some.
        let connections = addresses.repeat(16).into_iter();
        let connections = connections.map(|address| TcpStream::connect(address).unwrap());
        let connections: Vec<_> = connections.collect();
        let began = Instant::now();
        region.kill(node);
        wait_until_closed(&addresses, connections);
        kills.push((began, Instant::now()));
        load.wait_for(300);
        region.restart(node);
        region.wait_for_members(3);
        load.wait_for(100);
    }
    let mut outcome = load.stop();
    // The ends of sockets are known to other nodes a moment later.
    let moment = Duration::from_millis(200);
    let was_in_flight = |failure: &Failure| {
        let mut kills = kills.iter();
        kills.any(|(began, ended)| failure.is_within(*began, *ended + moment))
    };
    outcome.assert_no_failure(|failure| !was_in_flight(failure));
    // A caller can lose one request at the killed node, and then one at the next node, whose link
    // to it is not known to have ended.
    let (answered, cut): (Vec<_>, Vec<_>) = outcome
        .failures
        .iter()
        .partition(|failure| failure.what.starts_with("502 "));
    for failures in [answered, cut] {
        let count = failures.len();
        assert!(count <= kills.len() * CALLERS, "{count} failures");
    }
    received.assert_none_repeated();
    let median = outcome.percentile(50);
    let p99 = outcome.percentile(99);
    let slowest = outcome.percentile(100);
    let count = outcome.took.len();
    let failed = outcome.failures.len();
    eprintln!(
        "{count} requests, {failed} in flight failed, median {median:?}, p99 {p99:?}, slowest \
         {slowest:?}"
    );
}

/// Waits until the agent is back. Returns the time of its absence if requests can have waited for
/// too long.
fn await_agent(region: &Region, loss: &Loss) -> Option<(Instant, Instant)> {
    region.owner();
    loss.is_long_ago().then(|| (loss.at(), Instant::now()))
}

#[test]
fn no_request_waits_in_vain_while_the_agent_and_nodes_change() {
    let _turn = turn();
    let Some((mut region, agent, received)) = start() else {
        return;
    };
    let backend = received.backend();
    let load = Load::start(&region, 3);
    load.wait_for(200);
    let mut agent = Some(agent);
    let mut successors: Vec<Successor> = Vec::new();
    // Absences of the agent in which requests can have waited for too long.
    let mut long = Vec::new();
    for round in 0..rounds(3) {
        let loss = Loss::of(agent.take().unwrap());
        // One node is replaced, and the others leave and come back.
        if let node @ 1.. = round % 3 {
            region.node(node).process.signal("TERM");
            let mut left = region.nodes[node].take().unwrap();
            agent = Some(region.run_agent(&backend));
            long.extend(await_agent(&region, &loss));
            assert_eq!(left.process.exit_code(), Some(0));
            region.restart(node);
            region.wait_for_members(3);
        } else {
            let first = region.node(0);
            let process = successors
                .last()
                .map_or(first.process.id(), |successor| successor.0);
            successors.push(replace(process, &first.log));
            agent = Some(region.run_agent(&backend));
            long.extend(await_agent(&region, &loss));
        }
        load.wait_for(300);
    }
    let mut outcome = load.stop();
    // The agent is killed with requests in flight.
    let was_in_flight = |failure: &Failure| failure.what.starts_with("502 ");
    let has_waited_too_long = |failure: &Failure| {
        let is_refused = ["503 ", "504 "].map(|status| failure.what.starts_with(status));
        let mut long = long.iter();
        is_refused.contains(&true) && long.any(|(from, to)| failure.is_within(*from, *to))
    };
    outcome.assert_no_failure(|it| !was_in_flight(it) && !has_waited_too_long(it));
    let in_flight = outcome.failures.iter().filter(|it| was_in_flight(it));
    let in_flight = in_flight.count();
    eprintln!("{in_flight} in flight failed");
    assert!(in_flight <= rounds(3) * CALLERS);
    received.assert_none_repeated();
    eprintln!(
        "{} requests, slowest {:?}",
        outcome.took.len(),
        outcome.percentile(100)
    );
}
