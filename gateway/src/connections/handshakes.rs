//! Unfinished handshakes of one worker. A handshake beyond the limit ends the oldest one: an honest handshake takes
//! milliseconds, so the oldest are the ones that stall.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

use gw_shared::net::Closer;
use gw_shared::runtime;
use tokio::sync::Semaphore;

pub(crate) struct Handshakes {
    limit: usize,
    /// Running handshakes by number. Numbers are in the order of their start.
    under_way: RefCell<BTreeMap<u64, Closer>>,
    next: Cell<u64>,
    /// Held during the first step of a handshake.
    turn: Semaphore,
}

/// A running handshake. Dropping it ends the count.
pub(crate) struct HandshakeGuard {
    handshakes: Rc<Handshakes>,
    number: u64,
}

impl Handshakes {
    pub(crate) fn new(limit: usize) -> Rc<Self> {
        Rc::new(Self { limit, under_way: RefCell::default(), next: Cell::new(0), turn: Semaphore::new(1) })
    }

    /// Runs `handshake`. Its first step is expensive (key exchange and signature), so only one handshake per turn of
    /// the reactor runs that step, and a burst of connections does not delay requests. Returns `None` if the handshake
    /// `is_pointless` when its turn comes.
    pub(crate) async fn one_a_turn<T>(
        &self,
        is_pointless: impl FnOnce() -> bool,
        handshake: impl Future<Output = T>,
    ) -> Option<T> {
        let mut handshake = pin!(handshake);
        // Never fails: the semaphore is not closed.
        let turn = self.turn.acquire().await;
        if is_pointless() {
            return None;
        }
        let first = std::future::poll_fn(|cx| Poll::Ready(handshake.as_mut().poll(cx))).await;
        runtime::yield_now().await;
        drop(turn);
        match first {
            Poll::Ready(done) => Some(done),
            Poll::Pending => Some(handshake.await),
        }
    }

    /// Counts a handshake. Returns whether it has ended the oldest one.
    pub(crate) fn begin(self: &Rc<Self>, closer: Closer) -> (HandshakeGuard, bool) {
        let mut under_way = self.under_way.borrow_mut();
        let oldest = if under_way.len() >= self.limit { under_way.pop_first() } else { None };
        if let Some((_, closer)) = &oldest {
            closer.abort();
        }
        let number = self.next.get();
        self.next.set(number + 1);
        under_way.insert(number, closer);
        (HandshakeGuard { handshakes: Rc::clone(self), number }, oldest.is_some())
    }
}

impl Drop for HandshakeGuard {
    fn drop(&mut self) {
        self.handshakes.under_way.borrow_mut().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;
    use std::io::Read;
    use std::net::TcpStream;

    use gw_shared::net::Socket;
    use gw_shared::runtime::Driver;

    use super::*;

    #[test]
    fn one_first_step_runs_per_turn() {
        Driver::choose()
            .unwrap()
            .block_on(async {
                let handshakes = Handshakes::new(100);
                let begun = Rc::new(Cell::new(0));
                for _ in 0..10 {
                    let (handshakes, begun) = (Rc::clone(&handshakes), Rc::clone(&begun));
                    runtime::spawn(async move {
                        assert_eq!(handshakes.one_a_turn(|| true, ready(())).await, None);
                        handshakes.one_a_turn(|| false, async { begun.set(begun.get() + 1) }).await;
                    });
                }
                let mut seen = vec![0];
                while begun.get() < 10 {
                    runtime::yield_now().await;
                    seen.push(begun.get());
                }
                // The other tasks may run twice between two checks.
                assert!(seen.windows(2).all(|turn| turn[1] - turn[0] <= 2), "{seen:?}");
            })
            .unwrap();
    }

    #[test]
    fn a_handshake_beyond_the_limit_ends_the_oldest() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        Driver::choose()
            .unwrap()
            .block_on(async {
                let handshakes = Handshakes::new(2);
                let mut ours = Vec::new();
                let mut connect = || {
                    let peer = TcpStream::connect(address).unwrap();
                    ours.push(Socket::from_fd(listener.accept().unwrap().0.into()).unwrap());
                    (peer, ours[ours.len() - 1].closer())
                };
                let [(_a, a), (mut b_peer, b), (_c, c), (_d, d)] = [connect(), connect(), connect(), connect()];
                let (first, has_ended_oldest) = handshakes.begin(a);
                assert!(!has_ended_oldest);
                let (_second, has_ended_oldest) = handshakes.begin(b);
                assert!(!has_ended_oldest);
                drop(first);
                let (_third, has_ended_oldest) = handshakes.begin(c);
                assert!(!has_ended_oldest);
                let (_fourth, has_ended_oldest) = handshakes.begin(d);
                assert!(has_ended_oldest && handshakes.under_way.borrow().len() == 2);
                assert_eq!(b_peer.read(&mut [0]).unwrap(), 0);
            })
            .unwrap();
    }
}
