//! Unfinished handshakes of one worker. A handshake beyond a limit ends the oldest one: an honest
//! handshake takes milliseconds, so the oldest are the ones that stall.

use std::cell::RefCell;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_util::{pending, poll};
use gw_interface::rate_limit::{Claimant, ClientLimits, Places};
use gw_shared::id::AccountId;
use gw_shared::net::Closer;
use gw_shared::runtime;
use tokio::sync::Semaphore;

use crate::limits;

pub(crate) struct Handshakes {
    under_way: RefCell<Places<Closer>>,
    /// Held during the first step of a handshake.
    turn: Semaphore,
    /// Time of accounts for handshakes of own domains, whose certificates decide what they cost.
    domain_time: RefCell<Option<ClientLimits<AccountId>>>,
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
            domain_time: RefCell::default(),
        })
    }

    /// Runs `handshake`. Its first step is expensive (key exchange and signature), so only one
    /// handshake per turn of the reactor runs that step, and a burst of connections does not delay
    /// requests. The steps of a handshake for an own domain wait until its `account` has time left.
    /// Fails if the handshake `is_pointless` when its turn comes.
    pub(crate) async fn one_a_turn<T>(
        &self,
        account: Option<&AccountId>,
        is_pointless: impl Fn() -> bool,
        handshake: impl Future<Output = io::Result<T>>,
    ) -> io::Result<T> {
        let mut handshake = pin!(handshake);
        let mut step = async || {
            let began = Instant::now();
            let polled = poll!(handshake.as_mut());
            if let Some(account) = account {
                let now = Instant::now();
                let mut time = self.domain_time.borrow_mut();
                time.get_or_insert_with(|| ClientLimits::new(limits::DOMAIN_TIME))
                    .spend(account.clone(), now - began, now);
            }
            polled
        };
        let turn = loop {
            // Never fails: the semaphore is not closed.
            let turn = self.turn.acquire().await;
            if is_pointless() {
                let left = "the peer did not wait for an answer";
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, left));
            }
            let Some(wait) = self.until_time(account) else {
                break turn;
            };
            drop(turn);
            runtime::sleep(wait + limits::DOMAIN_TIME_PAUSE).await;
        };
        let mut polled = step().await;
        runtime::yield_now().await;
        drop(turn);
        loop {
            if let Poll::Ready(done) = polled {
                return done;
            }
            // A later step can be the expensive one (HelloRetryRequest, RFC 8446 §4.1.4).
            while let Some(wait) = self.until_time(account) {
                runtime::sleep(wait).await;
            }
            polled = step().await;
            if polled.is_pending() {
                pending!();
            }
        }
    }

    /// Time until `account` has time left; `None` if it has.
    fn until_time(&self, account: Option<&AccountId>) -> Option<Duration> {
        let mut time = self.domain_time.borrow_mut();
        let exhausted = time
            .as_mut()?
            .is_exhausted(account?.clone(), Instant::now())?;
        Some(exhausted.until_one)
    }

    /// Number of handshakes that are under way.
    #[cfg(feature = "support")]
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

    fn count(counter: &Cell<usize>) {
        counter.set(counter.get() + 1);
    }

    /// Occupies the worker, as a signature does.
    fn work(time: Duration) {
        let began = Instant::now();
        while began.elapsed() < time {
            std::hint::spin_loop();
        }
    }

    #[test]
    fn handshakes_of_one_account_take_a_quarter_of_the_time_and_delay_no_others() {
        const OF_ACCOUNT: u32 = 20;
        const STEP: Duration = Duration::from_millis(10);
        Driver::choose()
            .unwrap()
            .block_on(async {
                let handshakes = Handshakes::new(100, 100);
                let begin =
                    |account: Option<&str>, time, is_later: bool, done: &Rc<Cell<usize>>| {
                        let handshakes = Rc::clone(&handshakes);
                        let done = Rc::clone(done);
                        let account = account.map(|id| AccountId::new(id).unwrap());
                        runtime::spawn(async move {
                            let handshake = async {
                                // As after a HelloRetryRequest: the second step is the expensive
                                // one.
                                if is_later {
                                    runtime::yield_now().await;
                                }
                                work(time);
                                count(&done);
                                Ok(())
                            };
                            let shaken =
                                handshakes.one_a_turn(account.as_ref(), || false, handshake);
                            shaken.await.unwrap();
                        });
                    };
                let (done, others) = (Rc::default(), Rc::default());
                let began = Instant::now();
                for number in 0..OF_ACCOUNT {
                    begin(Some("acme"), STEP, number % 2 == 1, &done);
                }
                for account in [None, Some("rival"), None, Some("rival")] {
                    begin(account, Duration::ZERO, false, &others);
                }
                while others.get() < 4 {
                    runtime::yield_now().await;
                }
                assert!(done.get() < 15, "{} went first", done.get());
                while done.get() < OF_ACCOUNT as usize {
                    runtime::sleep(Duration::from_millis(1)).await;
                }
                // 50 ms at once, and the last one is charged after it.
                let least = 4 * ((OF_ACCOUNT - 1) * STEP - Duration::from_millis(50));
                assert!(began.elapsed() >= least, "{:?}", began.elapsed());
            })
            .unwrap();
    }

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
                        assert!(
                            handshakes
                                .one_a_turn(None, || true, ready(Ok(())))
                                .await
                                .is_err()
                        );
                        handshakes
                            .one_a_turn(None, || false, async {
                                count(&begun);
                                Ok(())
                            })
                            .await
                            .unwrap();
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
