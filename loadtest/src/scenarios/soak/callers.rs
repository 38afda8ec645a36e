//! Steady callers of services at all nodes. Each compares the bytes of every response.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::NODES;
use super::site::{Service, Site};
use super::world::Machine;
use crate::callers::{Failed, What};
use crate::client::{Connection, Target};
use crate::failure::Failure;

/// Callers of a service at a node.
const CALLERS: u32 = 4;
/// Requests per second of the limited service at a node, which are more than its bucket admits.
const LIMITED_RATE: u32 = 15;
/// Requests on one connection.
const PER_CONNECTION: usize = 100;
/// Length of the body of each POST. Every second request is one.
const BODY: u64 = 16 * 1024;

/// Callers on the machine of a node, of one service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pair {
    pub(super) node: usize,
    pub(super) service: usize,
}

/// What the callers of a pair have seen.
#[derive(Default)]
pub(super) struct Seen {
    pub(super) answered: usize,
    /// Begin and duration of each GET.
    pub(super) gets: Vec<(Instant, Duration)>,
    pub(super) failed: Vec<Failed>,
}

/// Callers until they are stopped.
pub(super) struct Callers {
    stop: Arc<AtomicBool>,
    threads: Vec<(Pair, JoinHandle<Seen>)>,
}

impl Callers {
    /// Starts callers of the services at all nodes, which send `rate` requests per second to each
    /// pair of node and service.
    pub(super) fn start(site: &Site, services: &[usize], rate: u32) -> Result<Self, Failure> {
        let stop = Arc::<AtomicBool>::default();
        let mut threads = Vec::new();
        for (service, node) in services
            .iter()
            .flat_map(|it| (0..NODES).map(|node| (*it, node)))
        {
            let is_limited = service == site.limited();
            let rate = if is_limited { LIMITED_RATE } else { rate };
            let every = Duration::from_secs(1) * CALLERS / rate;
            for number in 0..CALLERS {
                let caller = Caller {
                    target: site.target(service)?,
                    service: site.services[service].clone(),
                    due: Instant::now() + every * number / CALLERS,
                    every,
                    kept: None,
                };
                let stop = Arc::clone(&stop);
                let started = site.world.on(Machine::Node(node), || {
                    Ok(std::thread::spawn(move || caller.run(&stop)))
                })?;
                threads.push((Pair { node, service }, started));
            }
        }
        Ok(Self { stop, threads })
    }

    pub(super) fn stop(mut self) -> Result<Vec<(Pair, Seen)>, Failure> {
        self.stop.store(true, Ordering::Relaxed);
        let seen = std::mem::take(&mut self.threads)
            .into_iter()
            .map(|(pair, thread)| {
                let seen = thread.join();
                Ok((pair, seen.map_err(|_| Failure::new("a caller panicked"))?))
            });
        seen.collect()
    }
}

impl Drop for Callers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

struct Caller {
    target: Target,
    service: Service,
    due: Instant,
    every: Duration,
    /// A connection, and how many requests it has had.
    kept: Option<(Connection, usize)>,
}

impl Caller {
    fn run(mut self, stop: &AtomicBool) -> Seen {
        let mut seen = Seen::default();
        for number in 0_usize.. {
            std::thread::sleep(self.due.saturating_duration_since(Instant::now()));
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let began = Instant::now();
            self.due = (self.due + self.every).max(began);
            let is_post = !number.is_multiple_of(2);
            let is_used = self.kept.is_some();
            let mut exchanged = self.exchange(is_post);
            // As RFC 9112 §9.3.1 allows for GET.
            if exchanged == Err(What::Ended) && is_used && !is_post {
                exchanged = self.exchange(is_post);
            }
            let took = began.elapsed();
            seen.gets.extend((!is_post).then_some((began, took)));
            match exchanged {
                Ok(()) => seen.answered += 1,
                Err(what) => seen.failed.push(Failed {
                    began,
                    ended: began + took,
                    what,
                    is_post,
                }),
            }
        }
        seen
    }

    /// Sends one request on the connection, or on a new one.
    fn exchange(&mut self, is_post: bool) -> Result<(), What> {
        let (mut connection, used) = match self.kept.take() {
            Some(kept) => kept,
            None => (self.target.connect()?, 0),
        };
        let answer = if is_post {
            connection.upload("/hello", BODY, &mut io::repeat(b'x').take(BODY))?
        } else {
            connection.ask("/hello")?
        };
        let status = answer.head.status;
        if status != 200 {
            let code = answer.error_code().unwrap_or_default();
            return Err(What::Status(format!("{status} {code}")));
        }
        if answer.body != self.service.answer.as_bytes() {
            let length = answer.body.len();
            return Err(What::Status(format!("200 with {length} wrong bytes")));
        }
        if connection.is_reusable() && used + 1 < PER_CONNECTION {
            self.kept = Some((connection, used + 1));
        }
        Ok(())
    }
}

/// Whether the rate limit refused a request.
pub(super) fn is_limited(failed: &Failed) -> bool {
    matches!(&failed.what, What::Status(status) if status.starts_with("429 "))
}

/// Failures by their kind, such as `3 × 504 AGENT_UNAVAILABLE`.
pub(super) fn kinds<'a>(failed: impl IntoIterator<Item = &'a Failed>) -> String {
    let mut counts = BTreeMap::<String, usize>::new();
    for failed in failed {
        *counts.entry(failed.what.to_string()).or_default() += 1;
    }
    let parts = counts
        .iter()
        .map(|(what, count)| format!("{count} × {what}"));
    let parts: Vec<String> = parts.collect();
    if parts.is_empty() {
        "none".to_owned()
    } else {
        parts.join(", ")
    }
}
