//! Waits for callers, on one worker, that hold a request: the rest of a refused one is received and
//! dropped, a body that was announced as empty has not ended, or a refusal is not read.
//!
//! A caller that sends a refused request may read the response only after it has sent everything,
//! and closing a connection with unread bytes resets it, which can destroy the response (RFC 9112
//! §9.6). So the rest is received for a while. That costs as much as a request that is served: the
//! number is limited, and one beyond the limit ends the oldest.

use std::cell::RefCell;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{Either, select};
use gw_interface::rate_limit::{Claimant, Places};
use gw_shared::runtime;
use tokio::sync::Notify;

/// The waits under way, each with its end.
pub(crate) struct Waits(RefCell<Places<Rc<Notify>>>);

/// Counts a wait until dropped.
struct CountedWait<'a> {
    waits: &'a Waits,
    number: u64,
    end: Rc<Notify>,
}

impl Waits {
    pub(super) fn new(limit: usize, per_address: usize) -> Self {
        Self(RefCell::new(Places::new(limit, per_address)))
    }

    /// Runs `wait` for this client. Returns `None` if that takes longer than `within`, or if a
    /// later one takes its place.
    pub(super) async fn run<T>(
        &self,
        client: Claimant,
        within: Duration,
        wait: impl Future<Output = T>,
    ) -> Option<T> {
        let counted = self.begin(client);
        match select(
            pin!(runtime::timeout(within, wait)),
            pin!(counted.end.notified()),
        )
        .await
        {
            Either::Left((done, _)) => done.ok(),
            Either::Right(((), _)) => None,
        }
    }

    /// Number of waits that are under way.
    #[cfg(feature = "support")]
    pub(super) fn len(&self) -> usize {
        self.0.borrow().holders().count()
    }

    /// Ends all waits.
    pub(super) fn end(&self) {
        self.0.borrow().holders().for_each(|end| end.notify_one());
    }

    fn begin(&self, client: Claimant) -> CountedWait<'_> {
        let end = Rc::new(Notify::new());
        let (number, older) = self.0.borrow_mut().take(client, Rc::clone(&end));
        if let Some(older) = older {
            older.notify_one();
        }
        CountedWait {
            waits: self,
            number,
            end,
        }
    }
}

impl Drop for CountedWait<'_> {
    fn drop(&mut self) {
        self.waits.0.borrow_mut().free(self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use gw_shared::runtime::Driver;

    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    fn address(last: u8) -> Claimant {
        Claimant::Address(std::net::IpAddr::from([192, 0, 2, last]).into())
    }

    #[test]
    fn a_wait_beyond_a_limit_ends_the_oldest() {
        let waits = Waits::new(4, 2);
        let run = |client| Box::pin(waits.run(client, LONG, pending::<()>()));
        Driver::choose()
            .unwrap()
            .block_on(async {
                let proxy = Claimant::Unshared;
                let mut all = [
                    run(address(1)),
                    run(proxy),
                    run(proxy),
                    run(address(1)),
                    run(address(1)),
                    run(proxy),
                ];
                let mut ended = Vec::new();
                for number in 0..all.len() {
                    assert!(futures_util::poll!(&mut all[number]).is_pending());
                    // The third of an address ends its first, and the fifth of all the oldest of
                    // all.
                    let over = (0..number)
                        .filter(|at| !ended.contains(at))
                        .collect::<Vec<_>>();
                    for at in over {
                        if futures_util::poll!(&mut all[at]).is_ready() {
                            ended.push(at);
                        }
                    }
                }
                assert_eq!(ended, [0, 1]);
                waits.end();
                for left in &mut all[2..] {
                    assert_eq!(futures_util::poll!(left), std::task::Poll::Ready(None));
                }
                assert!(waits.0.borrow().holders().next().is_none());
            })
            .unwrap();
    }

    #[test]
    fn a_wait_returns_its_output_or_its_end_in_time() {
        let waits = Waits::new(1, 1);
        Driver::choose()
            .unwrap()
            .block_on(async {
                assert_eq!(waits.run(address(1), LONG, ready(5)).await, Some(5));
                assert_eq!(
                    waits
                        .run(address(1), Duration::from_millis(1), pending::<()>())
                        .await,
                    None
                );
                assert!(waits.0.borrow().holders().next().is_none());
            })
            .unwrap();
    }
}
