//! Rests of requests that are received only to be dropped, on one worker.
//!
//! A caller that sends a refused request may read the response only after it has sent everything, and closing a connection
//! with unread bytes resets it, which can destroy the response (RFC 9112 §9.6). So the rest is received for a while. That
//! costs as much as a request that is served: the number is limited, and one beyond the limit ends the oldest.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{Either, select};
use gw_shared::runtime;
use tokio::sync::Notify;

use crate::rate_limit::AddressKey;

pub(crate) struct Discards {
    limit: usize,
    per_address: usize,
    /// The discards under way, in the order of their start.
    under_way: RefCell<BTreeMap<u64, Discard>>,
    next: Cell<u64>,
}

struct Discard {
    /// `None` for a trusted proxy, which brings many clients.
    address: Option<AddressKey>,
    end: Rc<Notify>,
}

/// Counts a discard until dropped.
struct Counted<'a> {
    discards: &'a Discards,
    number: u64,
    end: Rc<Notify>,
}

impl Discards {
    pub(super) fn new(limit: usize, per_address: usize) -> Self {
        Self { limit, per_address, under_way: RefCell::default(), next: Cell::new(0) }
    }

    /// Runs `discard`, which receives the rest of a request of a client at `address`. Returns `None` if that takes longer than
    /// `within`, or if a later one takes its place.
    pub(super) async fn run<T>(
        &self,
        address: Option<AddressKey>,
        within: Duration,
        discard: impl Future<Output = T>,
    ) -> Option<T> {
        let counted = self.begin(address);
        match select(pin!(runtime::timeout(within, discard)), pin!(counted.end.notified())).await {
            Either::Left((discarded, _)) => discarded.ok(),
            Either::Right(((), _)) => None,
        }
    }

    /// Ends all discards.
    pub(super) fn end(&self) {
        self.under_way.borrow().values().for_each(|discard| discard.end.notify_one());
    }

    fn begin(&self, address: Option<AddressKey>) -> Counted<'_> {
        let mut under_way = self.under_way.borrow_mut();
        if let Some(oldest) = self.displaced(&under_way, address)
            && let Some(discard) = under_way.remove(&oldest)
        {
            discard.end.notify_one();
        }
        let number = self.next.get();
        self.next.set(number + 1);
        let end = Rc::new(Notify::new());
        under_way.insert(number, Discard { address, end: Rc::clone(&end) });
        Counted { discards: self, number, end }
    }

    /// The discard that ends for a further one of this address: the oldest of an address that is at its limit, or the oldest
    /// of all.
    fn displaced(&self, under_way: &BTreeMap<u64, Discard>, address: Option<AddressKey>) -> Option<u64> {
        // With fewer of all, an address cannot be at its limit.
        if address.is_some() && under_way.len() >= self.per_address {
            let mut of_address = under_way.iter().filter(|(_, discard)| discard.address == address);
            let oldest = of_address.next().map(|(number, _)| *number);
            if of_address.count() + 1 >= self.per_address && oldest.is_some() {
                return oldest;
            }
        }
        if under_way.len() >= self.limit { under_way.keys().next().copied() } else { None }
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.discards.under_way.borrow_mut().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use gw_shared::runtime::Driver;

    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    fn address(last: u8) -> Option<AddressKey> {
        Some(std::net::IpAddr::from([192, 0, 2, last]).into())
    }

    #[test]
    fn a_discard_beyond_a_limit_ends_the_oldest() {
        let discards = Discards::new(4, 2);
        let run = |address| Box::pin(discards.run(address, LONG, pending::<()>()));
        Driver::choose()
            .unwrap()
            .block_on(async {
                let mut all = [run(address(1)), run(None), run(None), run(address(1)), run(address(1)), run(None)];
                let mut ended = Vec::new();
                for number in 0..all.len() {
                    assert!(futures_util::poll!(&mut all[number]).is_pending());
                    // The third of an address ends its first, and the fifth of all the oldest of all.
                    let over = (0..number).filter(|at| !ended.contains(at)).collect::<Vec<_>>();
                    for at in over {
                        if futures_util::poll!(&mut all[at]).is_ready() {
                            ended.push(at);
                        }
                    }
                }
                assert_eq!(ended, [0, 1]);
                discards.end();
                for left in &mut all[2..] {
                    assert_eq!(futures_util::poll!(left), std::task::Poll::Ready(None));
                }
                assert!(discards.under_way.borrow().is_empty());
            })
            .unwrap();
    }

    #[test]
    fn a_discard_returns_its_output_or_its_end_in_time() {
        let discards = Discards::new(1, 1);
        Driver::choose()
            .unwrap()
            .block_on(async {
                assert_eq!(discards.run(address(1), LONG, ready(5)).await, Some(5));
                assert_eq!(discards.run(address(1), Duration::from_millis(1), pending::<()>()).await, None);
                assert!(discards.under_way.borrow().is_empty());
            })
            .unwrap();
    }
}
