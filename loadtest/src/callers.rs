//! Callers that send requests, at a steady rate or back to back.

use std::fmt;
use std::io::{self, ErrorKind, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::client::{Connection, Target};
use crate::failure::Failure;
use crate::report::per_mille;

/// Callers of a scenario whose requests are short.
pub(crate) const CALLERS: u32 = 16;
/// Requests on one connection. A caller opens another one then, so that the balancer chooses a
/// node. Fewer than one request in a hundred has a TLS handshake, so that the 99th percentile has
/// none.
pub(crate) const PER_CONNECTION: usize = 200;

const PATH: &str = "/hello";
/// Lengths of request bodies, in turns.
const BODIES: [u64; 4] = [1, 1024, 16 * 1024, 64 * 1024];

/// What callers send.
#[derive(Clone)]
pub(crate) struct Load {
    /// Addresses of the service, in turns.
    pub(crate) targets: Vec<Target>,
    pub(crate) callers: u32,
    /// Requests per second of all; `None` for requests that follow each other at once.
    pub(crate) rate: Option<u32>,
    pub(crate) methods: Methods,
    /// Requests on one connection.
    pub(crate) per_connection: usize,
}

/// Methods of the requests of a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Methods {
    Get,
    /// GET and, every second time, POST with a body of up to 64 KiB.
    GetAndPost,
}

/// A request without a response of the backend.
pub(crate) struct Failed {
    pub(crate) began: Instant,
    pub(crate) ended: Instant,
    pub(crate) what: What,
    pub(crate) is_post: bool,
}

/// What was there in place of a response of the backend.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// No program accepts connections.
    Refused,
    /// The connection ended before a response.
    Ended,
    /// Status and error code of the gateway.
    Status(String),
}

/// What the callers have seen.
#[derive(Default)]
pub(crate) struct Outcome {
    /// Start and duration of answered requests.
    pub(crate) answered: Vec<(Instant, Duration)>,
    pub(crate) failed: Vec<Failed>,
    /// Connections that ended after a response and before the next one. The caller sends the
    /// request again, as RFC 9112 §9.3.1 allows for GET.
    pub(crate) sent_again: usize,
}

/// Callers until they are stopped.
pub(crate) struct Callers {
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicUsize>,
    threads: Vec<JoinHandle<Outcome>>,
}

impl Outcome {
    /// Durations of requests that began in this time, sorted.
    pub(crate) fn durations(&self, from: Instant, to: Instant) -> Vec<Duration> {
        let within = self
            .answered
            .iter()
            .filter(|(began, _)| (from..to).contains(began));
        let mut durations: Vec<Duration> = within.map(|(_, took)| *took).collect();
        durations.sort_unstable();
        durations
    }

    /// The slowest request, and the durations that 50 % and 99 % of the requests do not exceed.
    pub(crate) fn figures(&self) -> (Duration, Duration, Duration) {
        let mut all: Vec<Duration> = self.answered.iter().map(|(_, took)| *took).collect();
        all.sort_unstable();
        (
            all.last().copied().unwrap_or_default(),
            per_mille(&all, 500),
            per_mille(&all, 990),
        )
    }
}

impl Callers {
    /// `callers` send `rate` requests per second in all. A caller that still waits for a response
    /// sends none.
    pub(crate) fn start(target: &Target, callers: u32, rate: u32) -> Self {
        Self::send(&Load {
            targets: vec![target.clone()],
            callers,
            rate: Some(rate),
            methods: Methods::Get,
            per_connection: PER_CONNECTION,
        })
    }

    pub(crate) fn send(load: &Load) -> Self {
        let Load {
            targets,
            callers,
            rate,
            methods,
            per_connection,
        } = load;
        let callers = *callers;
        let methods = *methods;
        let per_connection = *per_connection;
        let stop = Arc::<AtomicBool>::default();
        let sent = Arc::<AtomicUsize>::default();
        let every = rate.map_or(Duration::ZERO, |rate| {
            Duration::from_secs(1) * callers / rate
        });
        let caller = |number: u32| {
            let target = targets[number as usize % targets.len()].clone();
            let stop = Arc::clone(&stop);
            let sent = Arc::clone(&sent);
            let first = Instant::now() + every * number / callers;
            std::thread::spawn(move || {
                call(&target, first, every, methods, per_connection, &stop, &sent)
            })
        };
        let threads = (0..callers).map(caller).collect();
        Self {
            stop,
            sent,
            threads,
        }
    }

    /// Lets the callers end after their current requests.
    pub(crate) fn end(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Requests that have ended.
    pub(crate) fn sent(&self) -> usize {
        self.sent.load(Ordering::Relaxed)
    }

    pub(crate) fn stop(self) -> Result<Outcome, Failure> {
        self.end();
        let mut all = Outcome::default();
        for thread in self.threads {
            let one = thread
                .join()
                .map_err(|_| Failure::new("a caller panicked"))?;
            all.answered.extend(one.answered);
            all.failed.extend(one.failed);
            all.sent_again += one.sent_again;
        }
        Ok(all)
    }
}

fn call(
    target: &Target,
    first: Instant,
    every: Duration,
    methods: Methods,
    per_connection: usize,
    stop: &AtomicBool,
    sent: &AtomicUsize,
) -> Outcome {
    let mut outcome = Outcome::default();
    let mut connection: Option<(Connection, usize)> = None;
    let mut due = first;
    for number in 0.. {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let body = methods.body(number);
        let began = Instant::now();
        due = (due + every).max(began);
        let is_used = connection.as_ref().is_some_and(|(_, used)| *used > 0);
        let mut exchanged = exchange(target, body, per_connection, &mut connection);
        if exchanged == Err(What::Ended) && is_used && body.is_none() {
            outcome.sent_again += 1;
            exchanged = exchange(target, body, per_connection, &mut connection);
        }
        let is_post = body.is_some();
        match exchanged {
            Ok(()) => outcome.answered.push((began, began.elapsed())),
            Err(what) => outcome.failed.push(Failed {
                began,
                ended: Instant::now(),
                what,
                is_post,
            }),
        }
        sent.fetch_add(1, Ordering::Relaxed);
    }
    outcome
}

impl Methods {
    /// Length of the body of a caller's request; `None` for GET.
    fn body(self, number: usize) -> Option<u64> {
        let has_body = self == Self::GetAndPost && !number.is_multiple_of(2);
        has_body.then(|| BODIES[number / 2 % BODIES.len()])
    }
}

/// Sends one request on the connection, or on a new one.
fn exchange(
    target: &Target,
    body: Option<u64>,
    per_connection: usize,
    kept: &mut Option<(Connection, usize)>,
) -> Result<(), What> {
    let (mut connection, used) = match kept.take() {
        Some(kept) => kept,
        None => (target.connect()?, 0),
    };
    let answer = match body {
        None => connection.ask(PATH)?,
        Some(length) => connection.upload(PATH, length, &mut io::repeat(b'x').take(length))?,
    };
    if answer.head.status != 200 {
        return Err(What::Status(format!(
            "{} {}",
            answer.head.status,
            answer.error_code().unwrap_or_default()
        )));
    }
    if connection.is_reusable() && used + 1 < per_connection {
        *kept = Some((connection, used + 1));
    }
    Ok(())
}

impl From<Failure> for What {
    fn from(failure: Failure) -> Self {
        if failure.kind() == Some(ErrorKind::ConnectionRefused) {
            Self::Refused
        } else {
            Self::Ended
        }
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused => f.write_str("the connection was refused"),
            Self::Ended => f.write_str("the connection ended"),
            Self::Status(status) => f.write_str(status),
        }
    }
}
