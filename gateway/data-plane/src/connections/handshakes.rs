//! Unfinished handshakes of one worker. A handshake beyond a limit ends the oldest one: an honest handshake takes
//! milliseconds, so the oldest are the ones that stall.

use std::cell::RefCell;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

use gw_interface::rate_limit::{Claimant, Places};
use gw_shared::net::Closer;
use gw_shared::runtime;
use tokio::sync::Semaphore;

pub(crate) struct Handshakes {
    under_way: RefCell<Places<Closer>>,
    /// Held during the first step of a handshake.
    turn: Semaphore,
}

/// A running handshake. Dropping it ends the count.
pub(crate) struct HandshakeGuard {
    handshakes: Rc<Handshakes>,
    number: u64,
}

impl Handshakes {
    /// Allows `limit` handshakes, of which each client address has at most `per_address`.
    pub(crate) fn new(limit: usize, per_address: usize) -> Rc<Self> {
        Rc::new(Self {
            under_way: RefCell::new(Places::new(limit, per_address)),
            turn: Semaphore::new(1),
        })
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

    /// Number of handshakes that are under way.
    #[cfg(feature = "simulation_support")]
    pub(crate) fn len(&self) -> usize {
        self.under_way.borrow().holders().count()
    }

    /// Counts a handshake. Returns whether it has ended an older one.
    pub(crate) fn begin(
        self: &Rc<Self>,
        claimant: Claimant,
        closer: Closer,
    ) -> (HandshakeGuard, bool) {
        let (number, older) = self.under_way.borrow_mut().take(claimant, closer);
        if let Some(closer) = &older {
            closer.abort();
        }
        (
            HandshakeGuard {
                handshakes: Rc::clone(self),
                number,
            },
            older.is_some(),
        )
    }
}

impl Drop for HandshakeGuard {
    fn drop(&mut self) {
        self.handshakes.under_way.borrow_mut().free(self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
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
                let handshakes = Handshakes::new(100, 100);
                let begun = Rc::new(Cell::new(0));
                for _ in 0..10 {
                    let handshakes = Rc::clone(&handshakes);
                    let begun = Rc::clone(&begun);
                    runtime::spawn(async move {
                        assert_eq!(handshakes.one_a_turn(|| true, ready(())).await, None);
                        handshakes
                            .one_a_turn(|| false, async { begun.set(begun.get() + 1) })
                            .await;
                    });
                }
                let mut seen = vec![0];
                while begun.get() < 10 {
                    runtime::yield_now().await;
                    seen.push(begun.get());
                }
                // The other tasks may run twice between two checks.
                assert!(
                    seen.windows(2).all(|turn| turn[1] - turn[0] <= 2),
                    "{seen:?}"
                );
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
                let handshakes = Handshakes::new(2, 2);
                let mut ours = Vec::new();
                let mut connect = || {
                    let peer = TcpStream::connect(address).unwrap();
                    ours.push(Socket::from_fd(listener.accept().unwrap().0.into()).unwrap());
                    (peer, ours[ours.len() - 1].closer())
                };
                let [(_a, a), (mut b_peer, b), (_c, c), (_d, d)] =
                    [connect(), connect(), connect(), connect()];
                let begin = |closer| handshakes.begin(Claimant::Unshared, closer);
                let (first, has_ended_oldest) = begin(a);
                assert!(!has_ended_oldest);
                let (_second, has_ended_oldest) = begin(b);
                assert!(!has_ended_oldest);
                drop(first);
                let (_third, has_ended_oldest) = begin(c);
                assert!(!has_ended_oldest);
                let (_fourth, has_ended_oldest) = begin(d);
                assert!(has_ended_oldest && handshakes.under_way.borrow().holders().count() == 2);
                assert_eq!(b_peer.read(&mut [0]).unwrap(), 0);
            })
            .unwrap();
    }
}
