//! Requests that wait at a gateway until the agent of their service is back.

use std::io;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use http::Method;

use super::eventually;
use super::limits::{FIRST_TUNNEL_BACK, PIPE_MEMORY};
use super::peers::caller::{Caller, HOST};
use super::peers::http1_peer::Response;
use super::processes::process::Running;

/// Time from the loss of an agent in which no request has waited for too long. An attempt that
/// takes longer shows nothing.
const SHORT: Duration = Duration::from_secs(4);
/// Attempts that a busy machine may spoil.
const ATTEMPTS: usize = 10;

const _: () = assert!(SHORT.as_secs() < FIRST_TUNNEL_BACK.as_secs());

/// Repeats an attempt that a busy machine can spoil: it returns `None` then.
pub(crate) fn until_quick(mut attempt: impl FnMut() -> Option<()>) {
    let is_quick = (0..ATTEMPTS).any(|_| attempt().is_some());
    assert!(is_quick, "each of {ATTEMPTS} attempts took too long");
}

/// The loss of an agent, for which requests wait from then on.
pub(crate) struct Loss(Instant);

impl Loss {
    /// Kills the agent.
    pub(crate) fn of(agent: Running) -> Self {
        let at = Instant::now();
        drop(agent);
        Self(at)
    }

    pub(crate) fn at(&self) -> Instant {
        self.0
    }

    /// Whether requests may have waited for too long.
    pub(crate) fn is_long_ago(&self) -> bool {
        self.0.elapsed() > SHORT
    }

    /// Waits for `holds`. `None` once requests may have waited for too long.
    pub(crate) fn wait_for(&self, what: &str, mut holds: impl FnMut() -> bool) -> Option<()> {
        let found = eventually(what, || match holds() {
            true => Some(Some(())),
            false => self.is_long_ago().then_some(None),
        });
        if found.is_none() {
            eprintln!("another attempt follows, as this took too long: {what}");
        }
        found
    }
}

/// Pipes of the requests on the node that owns their service: one for each response, and one for
/// each body.
const PIPES: usize = 7;

/// A request with each kind of body.
pub(crate) struct WaitingRequests(Vec<(String, JoinHandle<io::Result<Response>>)>);

impl WaitingRequests {
    /// Number of requests.
    pub(crate) const COUNT: usize = 4;
    /// Bytes that are charged, at least, while all wait at the owner of the service for callers of
    /// its own.
    pub(crate) const MEMORY: usize = PIPES * PIPE_MEMORY;

    /// Sends each on a connection of its own.
    pub(crate) fn send(connect: impl Fn() -> Caller, service_key: &str) -> Self {
        let long = "a".repeat(100_000);
        let bodies = [
            ("GET", String::new(), 0),
            (
                "POST",
                format!("Content-Length: 5000\r\n\r\n{}", &long[..5000]),
                5000,
            ),
            (
                "POST",
                format!("Content-Length: 100000\r\n\r\n{long}"),
                100_000,
            ),
            (
                "POST",
                "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n".to_owned(),
                3,
            ),
        ];
        let send = |(method, rest, length): (&str, String, usize)| {
            let mut caller = connect();
            let rest = if rest.is_empty() { "\r\n" } else { &rest };
            let request = format!(
                "{method} / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {service_key}\r\n{rest}"
            );
            let answered = thread::spawn(move || {
                caller.send(request);
                caller.try_response(&Method::GET)
            });
            (format!("{length:08}"), answered)
        };
        Self(bodies.into_iter().map(send).collect())
    }

    /// Waits for the responses of a backend that answers with the length of the body. `None` if a
    /// request was refused and `is_late`: the agent came back so late that requests may have waited
    /// for too long.
    pub(crate) fn are_answered(self, is_late: bool) -> Option<()> {
        for (length, answered) in self.0 {
            let response = answered.join().unwrap().unwrap();
            let status = response.status.as_u16();
            if is_late && [503, 504].contains(&status) {
                eprintln!("another attempt follows, as the agent came back too late");
                return None;
            }
            let body = String::from_utf8_lossy(&response.body).into_owned();
            assert_eq!((status, body), (200, length));
        }
        Some(())
    }
}
