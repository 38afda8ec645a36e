//! Many renewals under a steady load of requests.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::{Connection, Prepared};
use crate::support::turn;

/// Renewals, unless `GW_TEST_RENEWALS` has another number.
const RENEWALS: usize = 8;
/// Callers that keep their connection, and those that open one for each request.
const KEEPING: usize = 5;
const OPENING: usize = 1;
/// Time between two requests of a caller: 50 requests a second, 300 of all.
const BETWEEN: Duration = Duration::from_millis(20);

/// Requests of all callers.
#[derive(Default)]
struct Load {
    is_over: AtomicBool,
    answered: AtomicUsize,
    failed: AtomicUsize,
}

/// Ends the load, also when the test fails.
struct Over<'a>(&'a Load);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
    }
}

impl Load {
    /// Sends requests at a steady rate. A late one does not delay those after it.
    fn send(&self, mut request: impl FnMut() -> Option<u16>) {
        let mut next = Instant::now();
        while !self.is_over.load(Ordering::Relaxed) {
            match request() {
                Some(200) => &self.answered,
                _ => &self.failed,
            }
            .fetch_add(1, Ordering::Relaxed);
            next += BETWEEN;
            thread::sleep(next.saturating_duration_since(Instant::now()));
        }
    }
}

#[test]
fn no_request_fails_while_the_certificate_is_renewed_again_and_again() {
    let _turn = turn();
    let renewals = std::env::var("GW_TEST_RENEWALS").map_or(RENEWALS, |it| it.parse().unwrap());
    let Some(prepared) = Prepared::new() else {
        return;
    };
    let served = prepared.serve();
    let first = prepared.await_certificate(&served, &[]);
    let address: SocketAddr = served.address;
    let load = Load::default();
    let mut certificates = BTreeSet::from([first.clone()]);
    let began = Instant::now();
    thread::scope(|scope| {
        for _ in 0..KEEPING {
            scope.spawn(|| {
                let mut connection = Connection::open(&prepared, address).unwrap();
                load.send(|| Some(connection.request()));
            });
        }
        for _ in 0..OPENING {
            scope.spawn(|| load.send(|| Some(Connection::open(&prepared, address)?.request())));
        }
        let _over = Over(&load);
        let mut latest = first;
        for _ in 0..renewals {
            prepared.command(&served, "renew");
            latest = prepared.await_certificate(&served, &latest);
            certificates.insert(latest.clone());
            prepared.await_valid(&served);
        }
    });
    let seconds = began.elapsed().as_secs_f64();
    let answered = load.answered.into_inner();
    let figures = format!(
        "{renewals} renewals in {seconds:.0} s: {answered} requests, {:.0} a second",
        answered as f64 / seconds
    );
    writeln!(io::stdout(), "{figures}").unwrap();
    assert_eq!(load.failed.into_inner(), 0, "{figures}");
    assert!(answered > renewals, "{figures}");
    assert_eq!(certificates.len(), renewals + 1);
    assert_eq!(prepared.certificate(&served)["failures"], 0);
}
