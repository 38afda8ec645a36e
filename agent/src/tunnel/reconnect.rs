//! When to try again. The delays are pure: they take their randomness. [`Reconnects`] is what the services of an agent
//! share: they have one gateway, so a tunnel of one says something about the others.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, select};
use gw_shared::runtime;
use tokio::sync::{Semaphore, watch};

const FIRST: Duration = Duration::from_secs(1);
const CAP: Duration = Duration::from_secs(120);

/// Attempts of one agent at a time, of all its services.
const ATTEMPTS: usize = 32;
/// Services that another one's success wakes come within this time, evenly spread.
const WOKEN_WITHIN: Duration = Duration::from_millis(250);
/// Pause after another process of the same identity took the tunnel over. Two such processes displace each other this
/// often and no more; one that is left alone is back within the longer time.
const DISPLACED: [Duration; 2] = [Duration::from_secs(15), Duration::from_secs(30)];

/// Exponential backoff from 1 s to 120 s with full jitter.
///
/// Full jitter spreads the agents of a region over the whole delay when its gateway restarts, instead of having them
/// come back together.
#[derive(Debug, Clone)]
pub(crate) struct Backoff {
    first: Duration,
    ceiling: Duration,
}

impl Backoff {
    pub(crate) fn new() -> Self {
        Self::beginning_with(FIRST)
    }

    fn beginning_with(first: Duration) -> Self {
        Self { first, ceiling: first }
    }

    /// The next delay: `random`, from 0 up to 1, of the ceiling, which doubles.
    pub(crate) fn next_delay(&mut self, random: f64) -> Duration {
        let delay = self.ceiling.mul_f64(random.clamp(0.0, 1.0));
        self.ceiling = (self.ceiling * 2).min(CAP.max(self.first));
        delay
    }

    /// A connection succeeded: begin with the first delay again.
    pub(crate) fn reset(&mut self) {
        self.ceiling = self.first;
    }
}

/// Pause after another process with the same identity displaced this tunnel; `random` from 0 up to 1.
pub(crate) fn displaced_pause(random: f64) -> Duration {
    let [least, most] = DISPLACED;
    least + (most - least).mul_f64(random.clamp(0.0, 1.0))
}

/// What the services of one agent share about reconnecting.
pub(crate) struct Reconnects {
    /// First delay of their backoffs.
    first: Duration,
    /// Counts tunnels that became ready.
    successes: watch::Sender<u64>,
    attempts: Semaphore,
}

/// The successes of an agent's tunnels, as one service follows them.
pub(crate) struct Successes(watch::Receiver<u64>);

impl Default for Reconnects {
    fn default() -> Self {
        Self::beginning_with(FIRST)
    }
}

impl Reconnects {
    pub(crate) fn beginning_with(first: Duration) -> Self {
        Self { first, successes: watch::Sender::new(0), attempts: Semaphore::new(ATTEMPTS) }
    }

    pub(crate) fn backoff(&self) -> Backoff {
        Backoff::beginning_with(self.first)
    }

    pub(crate) fn successes(&self) -> Successes {
        Successes(self.successes.subscribe())
    }

    /// A tunnel is ready: the gateway is back. Ends the pauses of services that could not reach it.
    pub(crate) fn succeeded(&self) {
        self.successes.send_modify(|successes| *successes += 1);
    }

    /// Runs an attempt once fewer than [`ATTEMPTS`] are under way.
    pub(crate) async fn attempt<T>(&self, attempt: impl Future<Output = T>) -> T {
        // An error means that the semaphore is closed, which it never is.
        let _place = self.attempts.acquire().await;
        attempt.await
    }
}

impl Successes {
    /// Forgets the successes so far: an attempt begins, and only later ones say more than it will.
    pub(crate) fn forget(&mut self) {
        self.0.mark_unchanged();
    }

    /// Waits for `delay`, or until there is a success. Whether there was one; `random`, from 0 up to 1, spreads the
    /// services that it wakes.
    pub(crate) async fn pause(&mut self, delay: Duration, random: f64) -> bool {
        match select(pin!(self.0.changed()), runtime::sleep(delay)).await {
            Either::Left((Ok(()), _)) => {
                runtime::sleep(WOKEN_WITHIN.mul_f64(random.clamp(0.0, 1.0))).await;
                true
            }
            // The agent is going away.
            Either::Left((Err(_), delay)) => {
                delay.await;
                false
            }
            Either::Right(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;
    use std::time::Instant;

    use futures_util::future::join_all;
    use gw_shared::runtime::Driver;

    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn doubles_from_one_second_to_two_minutes_and_starts_over_after_success() {
        let mut backoff = Backoff::new();
        let ceilings: Vec<u64> = (0..10).map(|_| backoff.next_delay(1.0).as_secs()).collect();
        assert_eq!(ceilings, [1, 2, 4, 8, 16, 32, 64, 120, 120, 120]);
        backoff.reset();
        assert_eq!(backoff.next_delay(1.0), FIRST);
    }

    #[test]
    fn jitter_is_full() {
        let mut backoff = Backoff::new();
        assert_eq!(backoff.next_delay(0.0), Duration::ZERO);
        assert_eq!(backoff.next_delay(0.25), Duration::from_millis(500));
    }

    #[test]
    fn a_displaced_process_comes_back_within_30_seconds_and_not_before_15() {
        let pauses = [-1.0, 0.0, 0.5, 1.0, 7.0].map(|random| displaced_pause(random).as_millis());
        assert_eq!(pauses, [15_000, 15_000, 22_500, 30_000, 30_000]);
    }

    #[test]
    fn one_success_ends_the_pauses_of_all_and_jitter_spreads_them() {
        let reconnects = Reconnects::default();
        let begun = Instant::now();
        let woken_after = Driver::choose()
            .unwrap()
            .block_on(async {
                let pauses = (0..=4).map(async |number: u32| {
                    let mut successes = reconnects.successes();
                    let woken = successes.pause(LONG, f64::from(number) / 4.0).await;
                    assert!(woken);
                    begun.elapsed()
                });
                let (woken_after, ()) = futures_util::join!(join_all(pauses), async {
                    runtime::yield_now().await;
                    reconnects.succeeded();
                });
                woken_after
            })
            .unwrap();
        assert!(woken_after[4] >= WOKEN_WITHIN && woken_after[2] >= WOKEN_WITHIN / 2, "{woken_after:?}");
        assert!(woken_after[0] < woken_after[4], "{woken_after:?}");
    }

    #[test]
    fn successes_before_an_attempt_end_no_pause_and_those_during_it_do() {
        let reconnects = Reconnects::default();
        Driver::choose()
            .unwrap()
            .block_on(async {
                let mut successes = reconnects.successes();
                reconnects.succeeded();
                successes.forget();
                assert!(!successes.pause(Duration::from_millis(30), 0.0).await);
                reconnects.succeeded();
                assert!(successes.pause(LONG, 0.0).await);
            })
            .unwrap();
    }

    #[test]
    fn attempts_at_a_time_are_bounded() {
        let (reconnects, now, most) = (Reconnects::default(), Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        Driver::choose()
            .unwrap()
            .block_on(join_all((0..1000).map(|_| {
                let (now, most) = (Rc::clone(&now), Rc::clone(&most));
                reconnects.attempt(async move {
                    now.set(now.get() + 1);
                    most.set(most.get().max(now.get()));
                    runtime::yield_now().await;
                    now.set(now.get() - 1);
                })
            })))
            .unwrap();
        assert_eq!((now.get(), most.get()), (0, ATTEMPTS));
    }
}
