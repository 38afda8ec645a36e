//! Programs that one worker sends to agents at once.
//!
//! While all places are taken, the account with the most downloads gives way to one that has fewer,
//! so that no account keeps the agents of others from their updates.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Instant;

use crate::limits;
use gw_shared::id::{AccountId, AgentId};
use gw_shared::net::Closer;

/// The downloads of one worker, the oldest first.
#[derive(Default)]
pub(crate) struct Downloads {
    under_way: RefCell<Vec<DownloadEntry>>,
    begun: Cell<u64>,
}

struct DownloadEntry {
    number: u64,
    agent: AgentId,
    account: AccountId,
    closer: Closer,
}

/// A running download. Dropping it frees its place.
pub(super) struct RunningDownload {
    downloads: Rc<Downloads>,
    number: u64,
}

impl Downloads {
    /// Begins a download on the connection of `closer`. Ends an earlier one of the agent, which has
    /// given that up. `None` if all places are taken and no account has more of them than this one
    /// would have.
    pub(super) fn begin(
        self: &Rc<Self>,
        agent: &AgentId,
        account: &AccountId,
        closer: Closer,
    ) -> Option<RunningDownload> {
        let mut under_way = self.under_way.borrow_mut();
        let gives_way = match under_way.iter().position(|entry| entry.agent == *agent) {
            None if under_way.len() >= limits::PROGRAM_DOWNLOADS => {
                Some(giving_way(&under_way, account)?)
            }
            earlier => earlier,
        };
        if let Some(at) = gives_way {
            under_way.remove(at).closer.abort();
        }
        let number = self.begun.get();
        self.begun.set(number + 1);
        under_way.push(DownloadEntry {
            number,
            agent: agent.clone(),
            account: account.clone(),
            closer,
        });
        Some(RunningDownload {
            downloads: Rc::clone(self),
            number,
        })
    }
}

impl Drop for RunningDownload {
    fn drop(&mut self) {
        self.downloads
            .under_way
            .borrow_mut()
            .retain(|entry| entry.number != self.number);
    }
}

/// The latest download of the account that has the most, if those are still as many as the ones of
/// `account` afterwards.
fn giving_way(under_way: &[DownloadEntry], account: &AccountId) -> Option<usize> {
    let of = |account: &AccountId| {
        under_way
            .iter()
            .filter(|entry| entry.account == *account)
            .count()
    };
    let (at, most) = under_way
        .iter()
        .enumerate()
        .map(|(at, entry)| (at, of(&entry.account)))
        .max_by_key(|(_, most)| *most)?;
    (most > of(account) + 1).then_some(at)
}

/// When `sent` of `size` bytes of a program must have been sent that was begun at `start`.
pub(super) fn due(start: Instant, sent: usize, size: usize) -> Instant {
    let share = sent as f64 / size.max(1) as f64;
    start + limits::PROGRAM_CHUNK_WITHIN + limits::PROGRAM_WITHIN.mul_f64(share.min(1.0))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use gw_shared::net::Socket;
    use gw_shared::runtime::Driver;

    use super::*;

    /// Runs `test` with a function that gives closers of new connections.
    fn with_closers(test: impl FnOnce(&mut dyn FnMut() -> Closer) + 'static) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let run = async move {
            let mut sockets = Vec::new();
            test(&mut || {
                let client = TcpStream::connect(address).unwrap();
                let socket = Socket::from_fd(listener.accept().unwrap().0.into()).unwrap();
                let closer = socket.closer();
                sockets.push((client, socket));
                closer
            });
        };
        Driver::choose().unwrap().block_on(run).unwrap();
    }

    fn account(name: &str) -> AccountId {
        AccountId::new(name).unwrap()
    }

    fn of(downloads: &Downloads, name: &str) -> usize {
        downloads
            .under_way
            .borrow()
            .iter()
            .filter(|entry| entry.account == account(name))
            .count()
    }

    #[test]
    fn an_agent_has_one_download_and_its_next_one_replaces_it() {
        with_closers(|closer| {
            let downloads = Rc::new(Downloads::default());
            let agent = AgentId::random();
            let first = downloads.begin(&agent, &account("acme"), closer()).unwrap();
            let second = downloads.begin(&agent, &account("acme"), closer()).unwrap();
            assert_eq!(of(&downloads, "acme"), 1);
            drop(first);
            assert_eq!(of(&downloads, "acme"), 1);
            drop(second);
            assert_eq!(of(&downloads, "acme"), 0);
        });
    }

    #[test]
    fn the_account_with_the_most_downloads_gives_way_to_those_with_fewer() {
        with_closers(|closer| {
            let downloads = Rc::new(Downloads::default());
            let mut held = Vec::new();
            let mut begin = |name: &str| {
                let begun = downloads.begin(&AgentId::random(), &account(name), closer());
                let is_begun = begun.is_some();
                held.extend(begun);
                is_begun
            };
            for _ in 0..limits::PROGRAM_DOWNLOADS {
                assert!(begin("mallory"));
            }
            assert!(!begin("mallory"), "it has all places");
            let half = limits::PROGRAM_DOWNLOADS / 2;
            for count in 1..=half {
                assert!(begin("acme"));
                assert_eq!(
                    (of(&downloads, "acme"), of(&downloads, "mallory")),
                    (count, 2 * half - count)
                );
            }
            assert!(!begin("acme") && !begin("mallory"), "each has half");
            assert!(begin("zeta"));
            assert_eq!(
                downloads.under_way.borrow().len(),
                limits::PROGRAM_DOWNLOADS
            );
        });
    }

    #[test]
    fn a_download_must_keep_up_with_the_time_for_all_of_it() {
        let start = Instant::now();
        let size = 10_000_000;
        let within = |sent| due(start, sent, size).duration_since(start);
        assert_eq!(within(0), limits::PROGRAM_CHUNK_WITHIN);
        assert_eq!(
            within(size / 2),
            limits::PROGRAM_CHUNK_WITHIN + limits::PROGRAM_WITHIN / 2
        );
        assert_eq!(
            within(size),
            limits::PROGRAM_CHUNK_WITHIN + limits::PROGRAM_WITHIN
        );
        assert_eq!(due(start, 0, 0), start + Duration::from_secs(20));
    }
}
