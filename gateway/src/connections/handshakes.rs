//! Connections of one worker that have not finished their handshake. When there are too many, the oldest gives way: who
//! means well is done in milliseconds, who stalls has been there for longest.

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
    /// By number, which is the order they began in.
    under_way: RefCell<BTreeMap<u64, Closer>>,
    next: Cell<u64>,
    /// Held while a ClientHello is answered.
    turn: Semaphore,
}

/// A handshake that is under way; over when dropped.
pub(crate) struct HandshakeGuard {
    handshakes: Rc<Handshakes>,
    number: u64,
}

impl Handshakes {
    pub(crate) fn new(limit: usize) -> Rc<Self> {
        Rc::new(Self { limit, under_way: RefCell::default(), next: Cell::new(0), turn: Semaphore::new(1) })
    }

    /// Runs `handshake`, whose first step is the expensive one: key exchange and signature. Of many that wait for it, one
    /// a turn of the reactor takes that step, so that a crowd at the door does not keep requests waiting. `None` if it
    /// `is_pointless` when its turn comes.
    pub(crate) async fn one_a_turn<T>(
        &self,
        is_pointless: impl FnOnce() -> bool,
        handshake: impl Future<Output = T>,
    ) -> Option<T> {
        let mut handshake = pin!(handshake);
        // Never closed.
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

    /// Counts one in; whether another had to give way for it.
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
    fn each_turn_has_one_first_step_also_of_those_that_fail_in_it() {
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
                // Others may have two turns where this one has one.
                assert!(seen.windows(2).all(|turn| turn[1] - turn[0] <= 2), "{seen:?}");
            })
            .unwrap();
    }

    #[test]
    fn the_oldest_gives_way() {
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
                let (first, gave_way) = handshakes.begin(a);
                assert!(!gave_way);
                let (_second, gave_way) = handshakes.begin(b);
                assert!(!gave_way);
                drop(first);
                let (_third, gave_way) = handshakes.begin(c);
                assert!(!gave_way);
                let (_fourth, gave_way) = handshakes.begin(d);
                assert!(gave_way && handshakes.under_way.borrow().len() == 2);
                assert_eq!(b_peer.read(&mut [0]).unwrap(), 0);
            })
            .unwrap();
    }
}
