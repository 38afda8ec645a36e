//! Active health checks: requests of the agent's own that find out whether the backends of a
//! service work.

use std::time::Duration;

use futures_util::future::{join_all, join3};
use gw_shared::http::{Framing, HttpVersion, Part, RequestHead};
use gw_shared::runtime;
use http::header::{self, HeaderValue};
use http::uri::{Authority, PathAndQuery};
use http::{Method, StatusCode};

use super::config::HealthCheck;
use super::connect::{Attempt, ConnectError, Offer};
use super::life::LOOK_INTERVAL;
use super::pool::{Backend, Pool};
use super::{ResponseError, ResponseHalf};

const INTERVAL: Duration = Duration::from_secs(10);

/// Interval at which a service without a health check looks for backends that are due for another
/// attempt to connect.
const RECHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Time limit of a check, from the attempt to connect to the end of the response.
const WITHIN: Duration = Duration::from_secs(2);

/// Bytes of a response's body that are received. The connection of a longer one is closed.
const BODY_MAX: usize = 64 * 1024;

/// Why a check failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Response(#[from] ResponseError),
    #[error("the status is {0}")]
    Status(StatusCode),
    #[error("no answer within {WITHIN:?}")]
    TimedOut,
}

impl Pool {
    /// Checks the backends at regular intervals. Without a health check, connects to those that are
    /// down: the gateway prefers other agents, so that no request may come that finds out. Also
    /// ends connections to backends that are gone, and looks up names of backends. Never returns.
    pub(crate) async fn keep_checking(&self) {
        let looks = async {
            loop {
                runtime::sleep(LOOK_INTERVAL).await;
                self.look();
            }
        };
        let lookups = join_all(self.backends.iter().map(Backend::keep_looking_up));
        join3(looks, lookups, self.keep_checking_health()).await;
    }

    async fn keep_checking_health(&self) {
        loop {
            if self.health_check == HealthCheck::Off {
                runtime::sleep(RECHECK_INTERVAL).await;
                self.recheck().await;
                continue;
            }
            let next = runtime::sleep(INTERVAL);
            join_all(
                self.backends
                    .iter()
                    .map(async |backend| self.checked(backend, self.check(backend).await)),
            )
            .await;
            next.await;
        }
    }

    /// Connects to each backend once. Returns the HTTP version that it speaks, by its URL.
    pub(crate) async fn probe(
        &self,
        within: Duration,
    ) -> Vec<(String, Result<&'static str, ConnectError>)> {
        let mut results = Vec::with_capacity(self.backends.len());
        for backend in &self.backends {
            let origin = backend.origin(&self.authority);
            let dial = async |attempt: &Attempt| origin.dial(backend, Offer::Any, attempt).await;
            let version = Attempt::within(within, dial).await.map(|dialled| {
                if dialled.is_http2 {
                    "HTTP/2"
                } else {
                    "HTTP/1.1"
                }
            });
            results.push((backend.endpoint.to_string(), version));
        }
        results
    }

    /// Checks each backend once, and returns the results by the URLs.
    pub(crate) async fn check_all(&self) -> Vec<(String, Result<(), CheckError>)> {
        join_all(
            self.backends
                .iter()
                .map(async |backend| (backend.endpoint.to_string(), self.check(backend).await)),
        )
        .await
    }

    async fn check(&self, backend: &Backend) -> Result<(), CheckError> {
        let check = async {
            match &self.health_check {
                HealthCheck::Off => Ok(()),
                HealthCheck::Tcp => {
                    let origin = backend.origin(&self.authority);
                    let dialled = origin.dial(backend, Offer::Any, &Attempt::default()).await;
                    Ok(dialled.map(drop)?)
                }
                HealthCheck::Http(path) => self.ask(backend, &request(&self.authority, path)).await,
            }
        };
        runtime::timeout(WITHIN, check)
            .await
            .unwrap_or(Err(CheckError::TimedOut))
    }

    /// Sends a request, which takes no slot. Over HTTP/1.1 it has a new connection.
    async fn ask(&self, backend: &Backend, request: &RequestHead) -> Result<(), CheckError> {
        let lease = self.lease_from(backend, request).await?;
        let (up, mut down) = lease.exchange(request, false)?;
        // An error is reported when the response is read.
        let _ = up.head(request, lease.authority(request)).await;
        let head = loop {
            let head = down.head(&request.method).await?;
            match head.status {
                StatusCode::SWITCHING_PROTOCOLS => {
                    return Err(ResponseError::UnrequestedUpgrade.into());
                }
                status if status.is_informational() => {}
                _ => break head,
            }
        };
        let is_complete = discard(&mut down).await?;
        drop((up, down));
        if is_complete && head.keep_alive {
            lease.give_back();
        }
        let is_good = head.status.is_success() || head.status.is_redirection();
        if is_good {
            Ok(())
        } else {
            Err(CheckError::Status(head.status))
        }
    }
}

/// Receives the body of a response. Returns whether it has ended within [`BODY_MAX`].
async fn discard(response: &mut ResponseHalf<'_>) -> Result<bool, ResponseError> {
    let mut received = 0;
    while !response.is_done() && received <= BODY_MAX {
        if let Part::Data(data) = response.part().await? {
            received += data.len();
            response.release(data.len());
        }
    }
    Ok(response.is_done())
}

/// The request of a check. `authority` is the one that callers of the service send.
fn request(authority: &Authority, path: &PathAndQuery) -> RequestHead {
    const AGENT: HeaderValue =
        HeaderValue::from_static(concat!("gw-agent/", env!("CARGO_PKG_VERSION")));
    let fields = [
        (header::USER_AGENT, AGENT),
        (header::ACCEPT, HeaderValue::from_static("*/*")),
    ];
    RequestHead {
        method: Method::GET,
        target: path.clone(),
        authority: authority.clone(),
        version: HttpVersion::Http11,
        headers: fields.into_iter().collect(),
        framing: Framing::None,
        keep_alive: true,
        expects_continue: false,
        upgrade: None,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;
    use std::pin::pin;
    use std::rc::Rc;
    use std::sync::mpsc;
    use std::thread;

    use futures_util::future::{Either, select};
    use gw_bed::threads::Peer;
    use gw_shared::net::Socket;
    use gw_shared::tunnel::control::BackendHealth;
    use tokio::sync::watch;

    use super::*;
    use crate::backend::{BackendStream, Backends};
    use crate::fake_gateway::HOSTNAME;
    use crate::telemetry::request_scope::RequestScope;
    use crate::testing::{ClosedPort, block_on};

    const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";

    fn pool(table: &str) -> Pool {
        let value = toml::Value::Table(table.parse().unwrap());
        let backends = Backends::from_toml("test", &value, &mut Vec::new()).unwrap();
        Pool::new(HOSTNAME, &backends, 8)
    }

    /// Checks the backends once. Returns the errors, empty for a backend that passed.
    fn errors(table: &str) -> Vec<String> {
        let pool = pool(table);
        let results = block_on(pool.check_all()).into_iter();
        let errors = results.map(|(_, result)| result.err());
        errors
            .map(|error| error.map(|error| error.to_string()).unwrap_or_default())
            .collect()
    }

    /// Reads a request head and writes an answer.
    fn answer(backend: &mut Peer<impl Read + Write>, answer: &[u8]) -> String {
        let head = backend.raw_head().unwrap();
        backend.send(answer);
        String::from_utf8(head.to_vec()).unwrap()
    }

    /// Starts a backend that gives each connection the next answer. Returns its URL, and the
    /// requests.
    fn backend(answers: Vec<String>) -> (String, mpsc::Receiver<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (sender, requests) = mpsc::channel();
        thread::spawn(move || {
            let mut connections = Vec::new();
            for text in answers {
                let mut connection = Peer::new(listener.accept().unwrap().0);
                let head = answer(&mut connection, text.as_bytes());
                connections.push(connection);
                sender.send(head).unwrap();
            }
            listener.accept()
        });
        (url, requests)
    }

    #[test]
    fn statuses_below_400_pass_and_others_fail() {
        let body = "x".repeat(2 * BODY_MAX);
        let long = format!("200 OK\r\nContent-Length: 1000000000\r\n\r\n{body}");
        let not_found = "the status is 404 Not Found";
        let busy = "the status is 503 Service Unavailable";
        for (text, error) in [
            ("200 OK\r\nContent-Length: 2\r\n\r\nok", ""),
            ("204 No Content\r\n\r\n", ""),
            (
                "302 Found\r\nLocation: /login\r\nContent-Length: 0\r\n\r\n",
                "",
            ),
            (
                "103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
                "",
            ),
            // The rest is not received.
            (&long, ""),
            ("404 Not Found\r\nContent-Length: 0\r\n\r\n", not_found),
            ("503 Busy\r\nContent-Length: 0\r\n\r\n", busy),
            (
                "101 Yes\r\nUpgrade: foo\r\n\r\n",
                "it switches protocols without a request",
            ),
        ] {
            let (url, _requests) = backend(vec![format!("HTTP/1.1 {text}")]);
            let found = errors(&format!("urls = '{url}'\nhealth_check = '/'"));
            let [found] = &found[..] else {
                panic!("{found:?}")
            };
            let is_expected = found.contains(error) && found.is_empty() == error.is_empty();
            assert!(is_expected, "{found:?}");
        }
    }

    #[test]
    fn requests_have_the_path_and_the_host_of_other_requests() {
        for (host, expected) in [("preserve", Some(HOSTNAME)), ("rewrite", None)] {
            let (url, requests) = backend(vec![OK.to_owned()]);
            let table = format!("urls = '{url}'\nhost = '{host}'\nhealth_check = '/up?quick=1'");
            assert_eq!(errors(&table), [""]);
            let head = requests.recv().unwrap();
            assert!(head.starts_with("GET /up?quick=1 HTTP/1.1\r\n"), "{head}");
            let expected = expected.unwrap_or_else(|| url.strip_prefix("http://").unwrap());
            for field in [&format!("host: {expected}\r\n"), "user-agent: gw-agent/"] {
                assert!(head.contains(&format!("\r\n{field}")), "{head}");
            }
        }
    }

    #[test]
    fn backends_are_checked_over_unix_sockets_and_http_2() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let unix = UnixListener::bind(&path).unwrap();
        let http2 = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = http2.local_addr().unwrap();
        thread::spawn(move || {
            let mut backend = Peer::new(unix.accept().unwrap().0);
            answer(&mut backend, OK.as_bytes())
        });
        thread::spawn(move || {
            block_on(async {
                let socket = Socket::from_fd(http2.accept().unwrap().0.into()).unwrap();
                let socket = BackendStream::Plain(socket);
                let mut backend = ::h2::server::handshake(socket).await.unwrap();
                while let Some(Ok((request, mut respond))) = backend.accept().await {
                    assert_eq!(request.uri().path(), "/up");
                    assert_eq!(request.uri().authority().unwrap(), HOSTNAME);
                    let response = http::Response::builder().status(500).body(()).unwrap();
                    respond.send_response(response, true).unwrap();
                }
            });
        });
        let table = format!(
            "urls = ['unix:{}', 'h2c://{address}']\nhealth_check = '/up'",
            path.display()
        );
        let failed = "the status is 500 Internal Server Error";
        assert_eq!(errors(&table), ["", failed]);
    }

    #[test]
    fn a_connection_is_enough_for_tcp_and_an_answer_is_needed_for_http() {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", silent.local_addr().unwrap());
        let check = |kind: &str| errors(&format!("urls = '{url}'\nhealth_check = '{kind}'"));
        assert_eq!(check("tcp"), [""]);
        assert_eq!(check("/"), ["no answer within 2s"]);
        drop(silent);
        assert!(check("tcp")[0].contains("refused"));
    }

    /// Checks the backends of `pool` until it is healthy.
    async fn check_until_healthy(pool: &Pool, mut health: watch::Receiver<BackendHealth>) {
        let healthy = pin!(health.wait_for(|health| *health == BackendHealth::Healthy));
        let checking = pin!(pool.keep_checking());
        assert!(matches!(select(healthy, checking).await, Either::Left(_)));
    }

    #[test]
    fn checks_begin_at_once_and_set_the_health() {
        let (url, _requests) = backend(vec![OK.to_owned()]);
        let pool = pool(&format!("urls = '{url}'\nhealth_check = '/'"));
        block_on(check_until_healthy(&pool, pool.health()));
    }

    #[test]
    fn a_backend_that_was_not_reached_is_found_without_a_request_and_without_a_check() {
        let closed = ClosedPort::new();
        let pool = pool(&format!("urls = 'http://{}'", closed.address));
        let mut head = request(&pool.authority, &PathAndQuery::from_static("/"));
        let scope = RequestScope::begin(None, &Rc::default(), 0, &mut head);
        block_on(async {
            assert!(pool.connect(&head, Offer::Any, &scope).await.is_err());
            let mut health = pool.health();
            assert_eq!(*health.borrow_and_update(), BackendHealth::Unhealthy);
            rustix::net::listen(&closed.socket, 8).unwrap();
            check_until_healthy(&pool, health).await;
        });
    }

    #[test]
    fn a_backend_that_fails_its_checks_gets_requests_only_if_there_is_no_other() {
        let (first, _) = backend(Vec::new());
        let (second, _) = backend(Vec::new());
        let table = format!("urls = ['{first}', '{second}']\nhealth_check = '/'");
        let pool = pool(&table);
        let failed = || Err(CheckError::Status(StatusCode::SERVICE_UNAVAILABLE));
        for _ in 0..2 {
            pool.checked(&pool.backends[0], failed());
        }
        assert_eq!([(); 4].map(|()| pool.select(|_| false)), [Some(1); 4]);
        assert!(!pool.is_down());
        for _ in 0..2 {
            pool.checked(&pool.backends[1], failed());
        }
        assert!(pool.is_down() && pool.select(|_| false).is_some());
    }
}
