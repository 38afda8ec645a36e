//! Name resolution and connecting, off the reactor where they block.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::pin::pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::time::{Duration, Instant};

use futures_util::future::{Either, select};
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::oneshot;

use super::Socket;
use crate::runtime;

/// Head start of one connection attempt over the next (RFC 8305 §5 recommends 250 ms).
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// Threads that ask, for the whole process: getaddrinfo(3) blocks. A name is asked for once at a time by each reactor,
/// so one whose servers do not answer holds up one of them.
const ASKING_THREADS: usize = 4;

/// How long [`resolve_lately`] is content with an answer, and how long with one that cannot be had anew.
const FRESH_FOR: Duration = Duration::from_secs(5);
const STALE_FOR: Duration = Duration::from_secs(3600);
/// Most names whose answers are kept. They come from configuration, so there are few.
const ANSWERS_MAX: usize = 256;

/// Resolves `host`, anew each time. Addresses alternate between families, as RFC 8305 §4 asks; never empty. Names of
/// loopback are not asked for: not every resolver knows them.
pub async fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    match without_asking(host) {
        Some(addresses) => Ok(with_port(&addresses, port)),
        None => Ok(with_port(&ask(host).await?, port)),
    }
}

/// Like [`resolve`], but an answer of the last seconds will do, and an older one where there is none now.
pub async fn resolve_lately(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    if let Some(addresses) = without_asking(host) {
        return Ok(with_port(&addresses, port));
    }
    let kept = |within| KEPT.with_borrow(|kept| kept.of(host, within, Instant::now()).map(|it| with_port(it, port)));
    if let Some(addresses) = kept(FRESH_FOR) {
        return Ok(addresses);
    }
    match ask(host).await {
        Ok(addresses) => {
            let answer = with_port(&addresses, port);
            KEPT.with_borrow_mut(|kept| kept.keep(host, addresses, Instant::now()));
            Ok(answer)
        }
        Err(error) => kept(STALE_FOR).ok_or(error),
    }
}

/// Connects to the first of `addresses` that answers, starting the next attempt when one fails or lags. `receive_buffer`
/// is as of [`Socket::connect`].
pub async fn connect_any(addresses: &[SocketAddr], receive_buffer: Option<usize>) -> io::Result<Socket> {
    let mut attempts = FuturesUnordered::new();
    let mut waiting = addresses.iter().copied();
    let mut last_error = io::Error::new(io::ErrorKind::NotFound, "no address to connect to");
    loop {
        let Some(address) = waiting.next() else {
            return match attempts.next().await {
                Some(Ok(socket)) => Ok(socket),
                Some(Err(error)) if attempts.is_empty() => Err(error),
                Some(Err(_)) => continue,
                None => Err(last_error),
            };
        };
        attempts.push(Socket::connect(address, receive_buffer));
        match select(attempts.next(), pin!(runtime::sleep(ATTEMPT_DELAY))).await {
            Either::Left((Some(Ok(socket)), _)) => return Ok(socket),
            Either::Left((Some(Err(error)), _)) => last_error = error,
            Either::Left((None, _)) | Either::Right(_) => {}
        }
    }
}

/// The addresses of literals and of names of loopback.
fn without_asking(host: &str) -> Option<Vec<IpAddr>> {
    match host.trim_matches(['[', ']']).parse() {
        Ok(address) => Some(vec![address]),
        Err(_) if is_loopback_name(host) => Some(vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]),
        Err(_) => None,
    }
}

fn with_port(addresses: &[IpAddr], port: u16) -> Vec<SocketAddr> {
    addresses.iter().map(|address| SocketAddr::new(*address, port)).collect()
}

/// `localhost` and every name under it (RFC 6761 §6.3).
fn is_loopback_name(host: &str) -> bool {
    let host = host.strip_suffix('.').unwrap_or(host);
    host.rsplit('.').next().is_some_and(|label| label.eq_ignore_ascii_case("localhost"))
}

/// In the order given, but alternately of the family of the first and of the other.
fn alternate_families(addresses: &[IpAddr]) -> Vec<IpAddr> {
    let (first, second): (Vec<IpAddr>, Vec<IpAddr>) =
        addresses.iter().partition(|address| address.is_ipv6() == addresses[0].is_ipv6());
    let mut ordered = Vec::with_capacity(addresses.len());
    let (mut first, mut second) = (first.into_iter(), second.into_iter());
    loop {
        match (first.next(), second.next()) {
            (None, None) => return ordered,
            (a, b) => ordered.extend(a.into_iter().chain(b)),
        }
    }
}

/// What all who wait for one answer get; an [`io::Error`] cannot be cloned.
type Answer = Result<Vec<IpAddr>, (io::ErrorKind, String)>;

thread_local! {
    static KEPT: RefCell<Answers> = RefCell::default();
    /// Who waits for the answer about a name that is being asked for.
    static WAITING: RefCell<HashMap<String, Vec<oneshot::Sender<Answer>>>> = RefCell::default();
}

/// Asks for `host`, or waits with those who have.
async fn ask(host: &str) -> io::Result<Vec<IpAddr>> {
    let (answer, answered) = oneshot::channel();
    let is_first = WAITING.with_borrow_mut(|waiting| {
        let of_host = waiting.entry(host.to_owned()).or_default();
        of_host.push(answer);
        of_host.len() == 1
    });
    if is_first {
        let host = host.to_owned();
        // A task of its own: whoever asked first may give up.
        runtime::spawn(async move {
            let answer = ask_thread(host.clone()).await;
            let waiting = WAITING.with_borrow_mut(|waiting| waiting.remove(&host)).unwrap_or_default();
            for waiter in waiting {
                // Fails for who gave up.
                let _ = waiter.send(answer.clone());
            }
        });
    }
    let answer = answered.await.map_err(|_| io::Error::other("the resolver died"))?;
    answer.map_err(|(kind, message)| io::Error::new(kind, message))
}

struct Question {
    host: String,
    reply: oneshot::Sender<Answer>,
}

async fn ask_thread(host: String) -> Answer {
    static THREADS: OnceLock<mpsc::Sender<Question>> = OnceLock::new();
    let died = || (io::ErrorKind::Other, "no thread to resolve names with".to_owned());
    let (reply, answered) = oneshot::channel();
    THREADS.get_or_init(start_threads).send(Question { host, reply }).map_err(|_| died())?;
    answered.await.map_err(|_| died())?
}

fn start_threads() -> mpsc::Sender<Question> {
    let (questions, asked) = mpsc::channel::<Question>();
    let asked = Arc::new(Mutex::new(asked));
    for _ in 0..ASKING_THREADS {
        let asked = Arc::clone(&asked);
        let serve = move || {
            loop {
                let next = asked.lock().unwrap_or_else(PoisonError::into_inner).recv();
                let Ok(Question { host, reply }) = next else { return };
                // Fails when nobody waits any more.
                let _ = reply.send(lookup(&host));
            }
        };
        if let Err(error) = std::thread::Builder::new().name("gw-resolve".into()).spawn(serve) {
            tracing::error!(%error, "a thread to resolve names with cannot be started");
        }
    }
    questions
}

/// Blocks.
fn lookup(host: &str) -> Answer {
    let found = (host, 0).to_socket_addrs().map_err(|error| (error.kind(), error.to_string()))?;
    let addresses: Vec<IpAddr> = found.map(|address| address.ip()).collect();
    if addresses.is_empty() {
        return Err((io::ErrorKind::NotFound, format!("{host} has no address")));
    }
    Ok(alternate_families(&addresses))
}

/// The last answer about each name. Pure: takes the time.
#[derive(Default)]
struct Answers(HashMap<String, (Instant, Vec<IpAddr>)>);

impl Answers {
    /// The answer about `host`, if it came not longer than `within` before `now`.
    fn of(&self, host: &str, within: Duration, now: Instant) -> Option<&[IpAddr]> {
        let (since, addresses) = self.0.get(host)?;
        (now.saturating_duration_since(*since) < within).then_some(addresses)
    }

    fn keep(&mut self, host: &str, addresses: Vec<IpAddr>, now: Instant) {
        if self.0.len() >= ANSWERS_MAX && !self.0.contains_key(host) {
            let oldest = self.0.iter().min_by_key(|(_, (since, _))| *since).map(|(host, _)| host.clone());
            oldest.and_then(|oldest| self.0.remove(&oldest));
        }
        self.0.insert(host.to_owned(), (now, addresses));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::Driver;

    #[test]
    fn families_alternate_and_the_first_choice_of_the_resolver_stays_first() {
        let parse = |list: &[&str]| list.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpAddr>>();
        let ordered = alternate_families(&parse(&["::1", "::2", "::3", "127.0.0.1"]));
        assert_eq!(ordered, parse(&["::1", "127.0.0.1", "::2", "::3"]));
    }

    #[test]
    fn a_refusing_address_is_passed_over() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let good = listener.local_addr().unwrap();
        // Bound but not listening: connections are refused and the port stays reserved.
        let closed = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        closed.bind(&"127.0.0.1:0".parse::<SocketAddr>().unwrap().into()).unwrap();
        let refusing = closed.local_addr().unwrap().as_socket().unwrap();
        let connected = Driver::choose()
            .unwrap()
            .block_on(async {
                socket2::SockRef::from(&connect_any(&[refusing, good], None).await.unwrap()).peer_addr().unwrap()
            })
            .unwrap();
        assert_eq!(connected.as_socket(), Some(good));
    }

    #[test]
    fn literals_and_names_of_loopback_resolve() {
        let loopback: [SocketAddr; 2] = ["127.0.0.1:8".parse().unwrap(), "[::1]:8".parse().unwrap()];
        Driver::choose()
            .unwrap()
            .block_on(async {
                assert_eq!(resolve("[::1]", 7).await.unwrap(), ["[::1]:7".parse().unwrap()]);
                for name in ["localhost", "LocalHost.", "acme--api.eu1.gw.localhost"] {
                    assert_eq!(resolve(name, 8).await.unwrap(), loopback, "{name}");
                }
            })
            .unwrap();
        for other in ["", ".", "localhost.example.com", "notlocalhost", "127.0.0.1"] {
            assert!(!is_loopback_name(other), "{other}");
        }
    }

    #[test]
    fn answers_are_kept_for_a_while_and_only_so_many() {
        let (mut answers, now) = (Answers::default(), Instant::now());
        let addresses = vec![IpAddr::from(Ipv4Addr::LOCALHOST)];
        answers.keep("a", addresses.clone(), now);
        let after = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(answers.of("a", FRESH_FOR, after(4)), Some(&addresses[..]));
        assert_eq!(answers.of("a", FRESH_FOR, after(5)), None);
        assert_eq!(answers.of("a", STALE_FOR, after(5)), Some(&addresses[..]));
        for n in 0..ANSWERS_MAX {
            answers.keep(&n.to_string(), addresses.clone(), after(1));
        }
        assert_eq!((answers.0.len(), answers.of("a", STALE_FOR, after(1))), (ANSWERS_MAX, None));
    }

    #[test]
    fn who_asks_at_the_same_time_shares_an_answer_and_may_give_up() {
        Driver::choose()
            .unwrap()
            .block_on(async {
                // Not a name that any resolver knows (RFC 6761 §6.4).
                let ask_again = || async { ask("gw.invalid").await.unwrap_err().to_string() };
                let mut first = Box::pin(ask_again());
                assert!(futures_util::poll!(&mut first).is_pending());
                let second = ask_again();
                let mut third = Box::pin(ask_again());
                assert!(futures_util::poll!(&mut third).is_pending());
                assert_eq!(WAITING.with_borrow(|waiting| waiting["gw.invalid"].len()), 2);
                drop(first);
                let (second, third) = futures_util::join!(second, third);
                assert_eq!(second, third);
                assert!(WAITING.with_borrow(HashMap::is_empty));
            })
            .unwrap();
    }
}
