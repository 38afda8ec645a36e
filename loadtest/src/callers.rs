//! Callers that send requests at a steady rate.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::client::{Connection, Target};
use crate::failure::Failure;
use crate::report::per_mille;

const CALLERS: u32 = 16;
/// Requests on one connection. A caller opens another one then, so that the balancer chooses a node. Fewer than one request
/// in a hundred has a TLS handshake, so that the 99th percentile has none.
const PER_CONNECTION: usize = 200;

/// A request without a response of the backend.
pub(super) struct Failed {
    pub(super) began: Instant,
    pub(super) ended: Instant,
    pub(super) what: String,
}

/// What the callers have seen.
#[derive(Default)]
pub(super) struct Outcome {
    /// Start and duration of answered requests.
    pub(super) answered: Vec<(Instant, Duration)>,
    pub(super) failed: Vec<Failed>,
    /// Connections that ended after a response and before the next one. The caller sends the request again, as RFC 9112
    /// §9.3.1 allows for GET.
    pub(super) sent_again: usize,
}

/// Callers until they are stopped.
pub(super) struct Callers {
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicUsize>,
    threads: Vec<JoinHandle<Outcome>>,
}

impl Outcome {
    /// Durations of requests that began in this time, sorted.
    pub(super) fn durations(&self, from: Instant, to: Instant) -> Vec<Duration> {
        let within = self.answered.iter().filter(|(began, _)| (from..to).contains(began));
        let mut durations: Vec<Duration> = within.map(|(_, took)| *took).collect();
        durations.sort_unstable();
        durations
    }

    /// The slowest request, and the durations that 50 % and 99 % of the requests do not exceed.
    pub(super) fn figures(&self) -> (Duration, Duration, Duration) {
        let mut all: Vec<Duration> = self.answered.iter().map(|(_, took)| *took).collect();
        all.sort_unstable();
        (all.last().copied().unwrap_or_default(), per_mille(&all, 500), per_mille(&all, 990))
    }
}

impl Callers {
    /// Sends `rate` requests per second in all.
    pub(super) fn start(target: &Target, rate: u32) -> Self {
        let (stop, sent) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let every = Duration::from_secs(1) * CALLERS / rate;
        let caller = |number: u32| {
            let (target, stop, sent) = (target.clone(), Arc::clone(&stop), Arc::clone(&sent));
            let first = Instant::now() + every * number / CALLERS;
            std::thread::spawn(move || call(&target, first, every, &stop, &sent))
        };
        let threads = (0..CALLERS).map(caller).collect();
        Self { stop, sent, threads }
    }

    /// Requests that have ended.
    pub(super) fn sent(&self) -> usize {
        self.sent.load(Ordering::Relaxed)
    }

    pub(super) fn stop(self) -> Result<Outcome, Failure> {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Outcome::default();
        for thread in self.threads {
            let one = thread.join().map_err(|_| Failure::new("a caller panicked"))?;
            all.answered.extend(one.answered);
            all.failed.extend(one.failed);
            all.sent_again += one.sent_again;
        }
        Ok(all)
    }
}

fn call(target: &Target, first: Instant, every: Duration, stop: &AtomicBool, sent: &AtomicUsize) -> Outcome {
    let mut outcome = Outcome::default();
    let mut connection: Option<(Connection, usize)> = None;
    let mut due = first;
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        let began = Instant::now();
        due = (due + every).max(began);
        let is_used = connection.as_ref().is_some_and(|(_, used)| *used > 0);
        let mut exchanged = exchange(target, &mut connection);
        if exchanged.as_ref().is_err_and(|error| error.is_none()) && is_used {
            outcome.sent_again += 1;
            exchanged = exchange(target, &mut connection);
        }
        match exchanged {
            Ok(()) => outcome.answered.push((began, began.elapsed())),
            Err(what) => {
                let what = what.unwrap_or_else(|| "the connection ended".to_owned());
                outcome.failed.push(Failed { began, ended: Instant::now(), what });
            }
        }
        sent.fetch_add(1, Ordering::Relaxed);
    }
    outcome
}

/// Sends one request on the connection, or on a new one. The error is `None` if the connection ended.
fn exchange(target: &Target, kept: &mut Option<(Connection, usize)>) -> Result<(), Option<String>> {
    let (mut connection, used) = match kept.take() {
        Some(kept) => kept,
        None => (target.connect().map_err(|_| None)?, 0),
    };
    let answer = connection.ask("/hello").map_err(|_| None)?;
    if answer.head.status != 200 {
        return Err(Some(format!("{} {}", answer.head.status, answer.error_code().unwrap_or_default())));
    }
    if connection.is_reusable() && used + 1 < PER_CONNECTION {
        *kept = Some((connection, used + 1));
    }
    Ok(())
}
