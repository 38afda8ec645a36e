//! An open-loop load: requests are due at a constant rate, however slow the responses are.
//! Latencies count from the time when a request is due, so that a delay also counts for the
//! requests that wait behind it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::set_current_timer_slack;

use crate::client::{Connection, Target};
use crate::failure::Failure;

/// Results of a run.
#[derive(Default)]
pub(super) struct Latencies {
    /// Times from due to the complete response, in ascending order.
    pub(super) sorted: Vec<Duration>,
    /// Time from the first due request to the last response.
    pub(super) elapsed: Duration,
    /// Responses other than 200.
    pub(super) refused: u64,
}

/// Due times of requests at a constant rate.
#[derive(Debug, Clone, Copy)]
pub(super) struct Schedule {
    pub(super) per_second: u64,
    pub(super) requests: u64,
}

impl Schedule {
    pub(super) fn new(per_second: u64, seconds: u32) -> Self {
        Self {
            per_second,
            requests: per_second * u64::from(seconds),
        }
    }

    /// Due time of a request after the start. Rounded for each request alone, so that errors do not
    /// add up.
    fn due(self, number: u64) -> Duration {
        let nanoseconds = u128::from(number) * 1_000_000_000 / u128::from(self.per_second);
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }
}

/// Sends the scheduled requests on `callers` connections, each with a thread. A request that finds
/// all of them busy waits for the next free one; the wait is a part of its latency.
pub(super) fn run(
    target: &Target,
    callers: usize,
    schedule: Schedule,
) -> Result<Latencies, Failure> {
    let connections = (0..callers).map(|_| target.connect());
    let connections = connections.collect::<Result<Vec<_>, _>>()?;
    let load = Load {
        schedule,
        next: AtomicU64::new(0),
        start: Instant::now(),
    };
    std::thread::scope(|scope| {
        let load = &load;
        let threads: Vec<_> = connections
            .into_iter()
            .map(|connection| scope.spawn(|| load.call(connection)))
            .collect();
        let mut all = Latencies::default();
        for thread in threads {
            let joined = thread.join();
            let one = joined.unwrap_or_else(|_| Err(Failure::new("a caller panicked")))?;
            all.sorted.extend(one.sorted);
            all.elapsed = all.elapsed.max(one.elapsed);
            all.refused += one.refused;
        }
        all.sorted.sort_unstable();
        Ok(all)
    })
}

/// What the callers of a run share.
struct Load {
    schedule: Schedule,
    /// The next request that no caller has.
    next: AtomicU64,
    start: Instant,
}

impl Load {
    /// Sends the next request when it is due, until there is none.
    fn call(&self, mut connection: Connection) -> Result<Latencies, Failure> {
        // By default, the kernel lets a thread sleep for 50 µs longer.
        set_current_timer_slack(std::num::NonZeroU64::new(1))
            .map_err(|error| Failure::during("a timer", error))?;
        let mut seen = Latencies::default();
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if number >= self.schedule.requests {
                return Ok(seen);
            }
            let due = self.schedule.due(number);
            std::thread::sleep(due.saturating_sub(self.start.elapsed()));
            let answer = connection.ask("/")?;
            seen.elapsed = self.start.elapsed();
            seen.sorted.push(seen.elapsed.saturating_sub(due));
            seen.refused += u64::from(answer.head.status != 200);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::sink;

    #[test]
    fn due_times_keep_the_rate_without_drift() {
        let schedule = Schedule::new(3, 2);
        let due: Vec<u128> = (0..schedule.requests)
            .map(|number| schedule.due(number).as_nanos())
            .collect();
        assert_eq!(
            due,
            [
                0,
                333_333_333,
                666_666_666,
                1_000_000_000,
                1_333_333_333,
                1_666_666_666
            ]
        );
        // One day at a rate that divides no second.
        assert_eq!(
            Schedule::new(7, 1).due(7 * 86_400),
            Duration::from_secs(86_400)
        );
    }

    /// Each response takes 20 ms, so on one connection request number n, due after n ms, is
    /// answered after 20 (n + 1) ms.
    #[test]
    fn a_delay_counts_for_the_requests_that_wait_behind_it() {
        let backend = sink::listen("slow", |_, _, socket| {
            std::thread::sleep(Duration::from_millis(20));
            socket.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        });
        let target = Target::plain(backend.unwrap().port(), "localhost", "key").unwrap();
        let schedule = Schedule {
            per_second: 1000,
            requests: 5,
        };
        let outcome = run(&target, 1, schedule).unwrap();
        let least = [20, 39, 58, 77, 96].map(Duration::from_millis);
        assert!(
            outcome
                .sorted
                .iter()
                .zip(least)
                .all(|(latency, least)| *latency >= least),
            "{:?}",
            outcome.sorted
        );
        assert_eq!((outcome.sorted.len(), outcome.refused), (5, 0));
    }
}
