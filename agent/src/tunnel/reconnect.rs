//! Coordination of reconnects. All services of an agent have the same gateway, so the success of
//! one tunnel ends the pauses of the others.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, select};
use gw_shared::runtime;
use tokio::sync::{Semaphore, watch};

use crate::backoff::Backoff;

/// Concurrent connection attempts of one agent, over all its services.
const ATTEMPTS: usize = 32;
/// Services woken by the success of another one reconnect within this time, evenly spread.
const WOKEN_WITHIN: Duration = Duration::from_millis(250);
/// Range of the pause after a reserve tunnel has ended. Another process with the same identity has
/// the newer tunnel, and the range limits how often the two replace each other.
const DISPLACED: [Duration; 2] = [Duration::from_secs(15), Duration::from_secs(30)];

/// The pause after a reserve tunnel has ended; `random` is between 0 and 1.
pub(crate) fn displaced_pause(random: f64) -> Duration {
    let [least, most] = DISPLACED;
    least + (most - least).mul_f64(random.clamp(0.0, 1.0))
}

/// Reconnect state that the services of one agent share.
pub(crate) struct Reconnects {
    backoff: Backoff,
    /// Number of tunnels that became ready.
    successes: watch::Sender<u64>,
    attempts: Semaphore,
}

/// One service's subscription to the successes of all tunnels of its agent.
pub(crate) struct Successes(watch::Receiver<u64>);

impl Default for Reconnects {
    fn default() -> Self {
        Self::new(Backoff::default())
    }
}

impl Reconnects {
    /// `backoff` is the initial backoff of every service.
    pub(crate) fn new(backoff: Backoff) -> Self {
        Self {
            backoff,
            successes: watch::Sender::new(0),
            attempts: Semaphore::new(ATTEMPTS),
        }
    }

    pub(crate) fn backoff(&self) -> Backoff {
        self.backoff.clone()
    }

    pub(crate) fn successes(&self) -> Successes {
        Successes(self.successes.subscribe())
    }

    /// Records that a tunnel became ready. Ends the pauses of the services that could not reach the
    /// gateway. Returns whether it is the first one.
    pub(crate) fn record_success(&self) -> bool {
        self.successes.send_modify(|successes| *successes += 1);
        *self.successes.borrow() == 1
    }

    /// Runs `attempt` once fewer than [`ATTEMPTS`] others are running.
    pub(crate) async fn attempt<T>(&self, attempt: impl Future<Output = T>) -> T {
        // Fails only if the semaphore is closed, which never happens.
        let _permit = self.attempts.acquire().await;
        attempt.await
    }
}

impl Successes {
    /// Ignores the successes so far. Called at the start of an attempt, whose own result is newer.
    pub(crate) fn ignore_past(&mut self) {
        self.0.mark_unchanged();
    }

    /// Waits for `delay` or for a success, and returns true for a success. `random` (0 to 1)
    /// spreads the services that the same success wakes.
    pub(crate) async fn pause(&mut self, delay: Duration, random: f64) -> bool {
        match select(pin!(self.0.changed()), runtime::sleep(delay)).await {
            Either::Left((Ok(()), _)) => {
                runtime::sleep(WOKEN_WITHIN.mul_f64(random.clamp(0.0, 1.0))).await;
                true
            }
            // The agent is being dropped.
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

    use super::*;
    use crate::testing::block_on;

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn displaced_process_pauses_for_15_to_30_seconds() {
        let pauses = [-1.0, 0.0, 0.5, 1.0, 7.0].map(|random| displaced_pause(random).as_millis());
        assert_eq!(pauses, [15_000, 15_000, 22_500, 30_000, 30_000]);
    }

    #[test]
    fn one_success_ends_all_pauses_spread_by_jitter() {
        let reconnects = Reconnects::default();
        let start = Instant::now();
        let woken_after = block_on(async {
            let pauses = (0..=4).map(async |number: u32| {
                let mut successes = reconnects.successes();
                let woken = successes.pause(LONG, f64::from(number) / 4.0).await;
                assert!(woken);
                start.elapsed()
            });
            let (woken_after, ()) = futures_util::join!(join_all(pauses), async {
                runtime::yield_now().await;
                reconnects.record_success();
            });
            woken_after
        });
        assert!(
            woken_after[4] >= WOKEN_WITHIN && woken_after[2] >= WOKEN_WITHIN / 2,
            "{woken_after:?}"
        );
        assert!(woken_after[0] < woken_after[4], "{woken_after:?}");
    }

    #[test]
    fn only_successes_since_the_attempt_began_end_a_pause() {
        let reconnects = Reconnects::default();
        block_on(async {
            let mut successes = reconnects.successes();
            reconnects.record_success();
            successes.ignore_past();
            assert!(!successes.pause(Duration::from_millis(30), 0.0).await);
            reconnects.record_success();
            assert!(successes.pause(LONG, 0.0).await);
        });
    }

    #[test]
    fn concurrent_attempts_are_bounded() {
        let reconnects = Reconnects::default();
        let now = Rc::new(Cell::new(0));
        let most = Rc::new(Cell::new(0));
        block_on(join_all((0..1000).map(|_| {
            let now = Rc::clone(&now);
            let most = Rc::clone(&most);
            reconnects.attempt(async move {
                now.set(now.get() + 1);
                most.set(most.get().max(now.get()));
                runtime::yield_now().await;
                now.set(now.get() - 1);
            })
        })));
        assert_eq!((now.get(), most.get()), (0, ATTEMPTS));
    }
}
