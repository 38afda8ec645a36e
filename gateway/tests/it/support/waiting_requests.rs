//! Requests that wait at a gateway until the agent of their service is back.

use std::thread::{self, JoinHandle};

use gw_data_plane::limits::PIPE_MEMORY;

use super::peers::caller::{Caller, HOST};
use super::peers::http1_peer::Response;

/// Pipes of the requests on the node that owns their service: one for each response, and one for each body.
const PIPES: usize = 7;

/// A request with each kind of body.
pub(crate) struct WaitingRequests(Vec<(String, JoinHandle<Response>)>);

impl WaitingRequests {
    /// Number of requests.
    pub(crate) const COUNT: usize = 4;
    /// Bytes that are charged, at least, while all wait at the owner of the service for callers of its own.
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
                caller.response()
            });
            (format!("{length:08}"), answered)
        };
        Self(bodies.into_iter().map(send).collect())
    }

    /// Waits for the responses of a backend that answers with the length of the body.
    pub(crate) fn are_answered(self) {
        for (length, answered) in self.0 {
            let response = answered.join().unwrap();
            let body = String::from_utf8_lossy(&response.body).into_owned();
            assert_eq!((response.status.as_u16(), body), (200, length));
        }
    }
}
