//! Name resolution, on threads of its own since it blocks, and connecting.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::pin::pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::time::{Duration, Instant};

use futures_util::future::{Either, select};
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::{oneshot, watch};

use super::Socket;
use crate::runtime;

/// Head start of one connection attempt over the next (RFC 8305 §5 recommends 250 ms).
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// Threads of the process that call getaddrinfo(3), which blocks. A reactor resolves a name only
/// once at a time, so a name whose servers do not answer occupies one thread of each reactor at
/// most.
const LOOKUP_THREADS: usize = 4;

/// How long [`resolve_cached`] uses an answer without another lookup, and how long if lookups fail
/// or take too long.
const FRESH_FOR: Duration = Duration::from_secs(5);
const STALE_FOR: Duration = Duration::from_secs(3600);

/// How long [`resolve_cached`] waits for a lookup if it has an older answer (RFC 8767 §5).
const PATIENCE: Duration = Duration::from_secs(1);
/// How long it does not wait at all after a failed lookup.
const FAILED_FOR: Duration = Duration::from_secs(30);

/// Most names in the cache. Names come from configuration, so there are few.
const ANSWERS_MAX: usize = 256;

/// Resolves `host` without the cache. Addresses alternate between families (RFC 8305 §4); never
/// empty. Loopback names are resolved here, since not every resolver knows them.
pub async fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    match without_lookup(host) {
        Some(addresses) => Ok(with_port(&addresses, port)),
        None => Ok(with_port(&look_up(host).await?, port)),
    }
}

/// Resolves `host` as [`resolve`] does, or uses an answer of the last seconds.
pub async fn resolve_recent(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    match CACHE.with_borrow(|cache| cache.get(host, Instant::now())) {
        Some(KnownAddresses {
            addresses,
            patience: None,
        }) => Ok(with_port(&addresses, port)),
        _ => resolve(host, port).await,
    }
}

/// Resolves `host` as [`resolve`] does; uses an answer of the last seconds, or an older one if the
/// lookup fails or takes longer than a second. The lookup then goes on.
pub async fn resolve_cached(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    if let Some(addresses) = without_lookup(host) {
        return Ok(with_port(&addresses, port));
    }
    let addresses = match CACHE.with_borrow(|cache| cache.get(host, Instant::now())) {
        Some(KnownAddresses {
            addresses,
            patience: None,
        }) => addresses,
        Some(KnownAddresses {
            addresses,
            patience: Some(patience),
        }) => {
            let lookup = begin_lookup(host);
            let patience = patience.saturating_sub(lookup.since.elapsed());
            match runtime::timeout(patience, lookup.answered()).await {
                Ok(Ok(newer)) => newer,
                _ => addresses,
            }
        }
        None => look_up(host).await?,
    };
    Ok(with_port(&addresses, port))
}

/// Connects to the first of `addresses` that accepts; starts the next attempt when one fails or is
/// slow. See [`Socket::connect`] for `receive_buffer`.
pub async fn connect_any(
    addresses: &[SocketAddr],
    receive_buffer: Option<usize>,
) -> io::Result<Socket> {
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

/// Addresses of literals and of loopback names.
pub fn without_lookup(host: &str) -> Option<Vec<IpAddr>> {
    match host.trim_matches(['[', ']']).parse() {
        Ok(address) => Some(vec![address]),
        Err(_) if is_loopback_name(host) => {
            Some(vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()])
        }
        Err(_) => None,
    }
}

fn with_port(addresses: &[IpAddr], port: u16) -> Vec<SocketAddr> {
    addresses
        .iter()
        .map(|address| SocketAddr::new(*address, port))
        .collect()
}

/// `localhost` and every name under it (RFC 6761 §6.3).
pub fn is_loopback_name(host: &str) -> bool {
    let host = host.strip_suffix('.').unwrap_or(host);
    host.rsplit('.')
        .next()
        .is_some_and(|label| label.eq_ignore_ascii_case("localhost"))
}

/// Reorders addresses so that families alternate, beginning with the family of the first address.
fn alternate_families(addresses: &[IpAddr]) -> Vec<IpAddr> {
    let (first, second): (Vec<IpAddr>, Vec<IpAddr>) = addresses
        .iter()
        .partition(|address| address.is_ipv6() == addresses[0].is_ipv6());
    let mut ordered = Vec::with_capacity(addresses.len());
    let mut first = first.into_iter();
    let mut second = second.into_iter();
    loop {
        match (first.next(), second.next()) {
            (None, None) => return ordered,
            (a, b) => ordered.extend(a.into_iter().chain(b)),
        }
    }
}

/// Result of a lookup, for all tasks that wait for it. An [`io::Error`] cannot be cloned.
type Answer = Result<Vec<IpAddr>, (io::ErrorKind, String)>;

/// A lookup for one of the tasks that wait for it.
struct Lookup {
    since: Instant,
    answer: watch::Receiver<Option<Answer>>,
}

impl Lookup {
    /// Waits for the answer.
    async fn answered(mut self) -> io::Result<Vec<IpAddr>> {
        let answer = self.answer.wait_for(Option::is_some).await;
        let ended = || io::Error::other("the lookup ended without an answer");
        let answer = answer
            .ok()
            .and_then(|answer| answer.clone())
            .ok_or_else(ended)?;
        answer.map_err(|(kind, message)| io::Error::new(kind, message))
    }
}

/// A lookup that runs. Tasks that no longer wait for it leave nothing behind.
struct RunningLookup {
    since: Instant,
    answer: watch::Sender<Option<Answer>>,
}

thread_local! {
    static CACHE: RefCell<AddressCache> = RefCell::default();
    /// The lookups that run, by name.
    static RUNNING: RefCell<HashMap<String, RunningLookup>> = RefCell::default();
}

/// Looks `host` up.
async fn look_up(host: &str) -> io::Result<Vec<IpAddr>> {
    begin_lookup(host).answered().await
}

/// Begins a lookup of `host`, or joins the one that runs. The cache keeps its answer.
fn begin_lookup(host: &str) -> Lookup {
    RUNNING.with_borrow_mut(|running| {
        let lookup = running.entry(host.to_owned()).or_insert_with(|| {
            // A separate task, since the first caller may be cancelled.
            runtime::spawn(finish_lookup(host.to_owned()));
            RunningLookup {
                since: Instant::now(),
                answer: watch::Sender::default(),
            }
        });
        Lookup {
            since: lookup.since,
            answer: lookup.answer.subscribe(),
        }
    })
}

async fn finish_lookup(host: String) {
    let answer = look_up_on_thread(host.clone()).await;
    CACHE.with_borrow_mut(|cache| cache.answered(&host, &answer, Instant::now()));
    if let Some(ended) = RUNNING.with_borrow_mut(|running| running.remove(&host)) {
        ended.answer.send_replace(Some(answer));
    }
}

/// A host name to look up, and where to send the answer.
struct LookupRequest {
    host: String,
    reply: oneshot::Sender<Answer>,
}

async fn look_up_on_thread(host: String) -> Answer {
    static THREADS: OnceLock<mpsc::Sender<LookupRequest>> = OnceLock::new();
    let died = || (io::ErrorKind::Other, "no thread resolves names".to_owned());
    let (reply, answered) = oneshot::channel();
    THREADS
        .get_or_init(start_threads)
        .send(LookupRequest { host, reply })
        .map_err(|_| died())?;
    answered.await.map_err(|_| died())?
}

fn start_threads() -> mpsc::Sender<LookupRequest> {
    let (requests, receiver) = mpsc::channel::<LookupRequest>();
    let receiver = Arc::new(Mutex::new(receiver));
    for _ in 0..LOOKUP_THREADS {
        let receiver = Arc::clone(&receiver);
        let serve = move || {
            loop {
                let next = receiver
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .recv();
                let Ok(LookupRequest { host, reply }) = next else {
                    return;
                };
                // Fails if no task waits any more.
                let _ = reply.send(getaddrinfo(&host));
            }
        };
        if let Err(error) = std::thread::Builder::new()
            .name("gw-resolve".into())
            .spawn(serve)
        {
            tracing::error!(%error, "cannot start a thread that resolves names");
        }
    }
    requests
}

/// Calls the system's resolver. Blocks.
fn getaddrinfo(host: &str) -> Answer {
    let found = (host, 0)
        .to_socket_addrs()
        .map_err(|error| (error.kind(), error.to_string()))?;
    let addresses: Vec<IpAddr> = found.map(|address| address.ip()).collect();
    if addresses.is_empty() {
        return Err((io::ErrorKind::NotFound, format!("{host} has no address")));
    }
    Ok(alternate_families(&addresses))
}

/// Last answer for each name. The time is an argument.
#[derive(Default)]
struct AddressCache(HashMap<String, CachedName>);

struct CachedName {
    answered: Instant,
    addresses: Vec<IpAddr>,
    /// When the last lookup failed, if it is later than the answer.
    failed: Option<Instant>,
}

/// What the cache knows of a name.
#[derive(Debug, PartialEq, Eq)]
struct KnownAddresses {
    addresses: Vec<IpAddr>,
    /// How long a lookup may take before the addresses are used. `None` if no lookup is due.
    patience: Option<Duration>,
}

impl AddressCache {
    /// Addresses of `host` that may be used at `now`.
    fn get(&self, host: &str, now: Instant) -> Option<KnownAddresses> {
        let cached = self.0.get(host)?;
        let age = now.saturating_duration_since(cached.answered);
        let has_failed = cached
            .failed
            .is_some_and(|at| now.saturating_duration_since(at) < FAILED_FOR);
        let patience = match () {
            () if age >= STALE_FOR => return None,
            () if age < FRESH_FOR => None,
            () if has_failed => Some(Duration::ZERO),
            () => Some(PATIENCE),
        };
        Some(KnownAddresses {
            addresses: cached.addresses.clone(),
            patience,
        })
    }

    /// Records the answer to a lookup.
    fn answered(&mut self, host: &str, answer: &Answer, now: Instant) {
        let Ok(addresses) = answer else {
            if let Some(cached) = self.0.get_mut(host) {
                cached.failed = Some(now);
            }
            return;
        };
        if self.0.len() >= ANSWERS_MAX && !self.0.contains_key(host) {
            let oldest = self.0.iter().min_by_key(|(_, cached)| cached.answered);
            let oldest = oldest.map(|(host, _)| host.clone());
            oldest.and_then(|oldest| self.0.remove(&oldest));
        }
        let cached = CachedName {
            answered: now,
            addresses: addresses.clone(),
            failed: None,
        };
        self.0.insert(host.to_owned(), cached);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::block_on;

    #[test]
    fn families_alternate_and_the_first_address_stays_first() {
        let parse = |list: [&str; 4]| list.map(|text| text.parse::<IpAddr>().unwrap());
        let ordered = alternate_families(&parse(["::1", "::2", "::3", "127.0.0.1"]));
        assert_eq!(ordered, parse(["::1", "127.0.0.1", "::2", "::3"]));
    }

    #[test]
    fn a_refusing_address_is_skipped() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let good = listener.local_addr().unwrap();
        // Bound but not listening: connections are refused and the port stays reserved.
        let stream = socket2::Type::STREAM;
        let closed = socket2::Socket::new(socket2::Domain::IPV4, stream, None).unwrap();
        let any_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        closed.bind(&any_port.into()).unwrap();
        let refusing = closed.local_addr().unwrap().as_socket().unwrap();
        let peer = block_on(async {
            let socket = connect_any(&[refusing, good], None).await.unwrap();
            socket2::SockRef::from(&socket).peer_addr().unwrap()
        });
        assert_eq!(peer.as_socket(), Some(good));
    }

    #[test]
    fn literals_and_loopback_names_resolve() {
        let both = &["127.0.0.1:8", "[::1]:8"][..];
        for (name, port, expected) in [
            ("[::1]", 7, &["[::1]:7"][..]),
            ("localhost", 8, both),
            ("LocalHost.", 8, both),
            ("acme--api.eu1.gw.localhost", 8, both),
        ] {
            let resolved = block_on(async { resolve(name, port).await.unwrap() });
            let resolved: Vec<String> = resolved.iter().map(ToString::to_string).collect();
            assert_eq!(resolved, expected, "{name}");
        }
        for other in [
            "",
            ".",
            "localhost.example.com",
            "notlocalhost",
            "127.0.0.1",
        ] {
            assert!(!is_loopback_name(other), "{other}");
        }
    }

    const NO_ANSWER: Answer = Err((io::ErrorKind::TimedOut, String::new()));

    #[test]
    fn cached_answers_expire_and_are_bounded() {
        let mut cache = AddressCache::default();
        let now = Instant::now();
        let after = |seconds| now + Duration::from_secs(seconds);
        let addresses = vec![IpAddr::from(Ipv4Addr::LOCALHOST)];
        let answer = Ok(addresses.clone());
        let known = |patience| {
            let addresses = addresses.clone();
            Some(KnownAddresses {
                addresses,
                patience,
            })
        };
        cache.answered("none", &NO_ANSWER, now);
        assert_eq!(cache.get("none", now), None);

        cache.answered("a", &answer, now);
        assert_eq!(cache.get("a", after(4)), known(None));
        assert_eq!(cache.get("a", after(5)), known(Some(PATIENCE)));
        // No lookup is waited for while the last one has failed.
        cache.answered("a", &NO_ANSWER, after(10));
        assert_eq!(cache.get("a", after(39)), known(Some(Duration::ZERO)));
        assert_eq!(cache.get("a", after(40)), known(Some(PATIENCE)));
        assert_eq!(cache.get("a", after(3600)), None);
        cache.answered("a", &answer, after(40));
        assert_eq!(cache.get("a", after(45)), known(Some(PATIENCE)));

        for n in 0..ANSWERS_MAX {
            cache.answered(&n.to_string(), &answer, after(41));
        }
        assert_eq!(cache.0.len(), ANSWERS_MAX);
        assert_eq!(cache.get("a", after(41)), None);
    }

    /// Waits for addresses of a name whose lookup does not end.
    fn resolve_while_a_lookup_runs(since: Instant, failed: Option<Instant>) -> Duration {
        const NAME: &str = "gw.invalid";
        let addresses = vec![IpAddr::from(Ipv4Addr::LOCALHOST)];
        let cached = CachedName {
            answered: Instant::now() - FRESH_FOR,
            addresses: addresses.clone(),
            failed,
        };
        CACHE.with_borrow_mut(|cache| cache.0.insert(NAME.to_owned(), cached));
        // It runs already, so that no other one begins.
        let lookup = RunningLookup {
            since,
            answer: watch::Sender::default(),
        };
        RUNNING.with_borrow_mut(|running| running.insert(NAME.to_owned(), lookup));
        let started = Instant::now();
        let resolved = block_on(async { resolve_cached(NAME, 7).await.unwrap() });
        assert_eq!(resolved, with_port(&addresses, 7));
        started.elapsed()
    }

    #[test]
    fn a_lookup_that_takes_long_is_not_waited_for_if_an_address_is_known() {
        let now = Instant::now();
        assert!(resolve_while_a_lookup_runs(now, None) >= Duration::from_millis(900));
        // Each is far below [`PATIENCE`] unless the machine stands still for that long.
        let at_once = |since, failed| {
            (0..5).any(|_| resolve_while_a_lookup_runs(since, failed) < PATIENCE / 2)
        };
        assert!(at_once(now - PATIENCE, None));
        assert!(at_once(Instant::now() + PATIENCE, Some(Instant::now())));
    }

    #[test]
    fn concurrent_callers_share_a_lookup_and_can_be_cancelled() {
        block_on(async {
            // No resolver knows this name (RFC 6761 §6.4).
            let look_up_again = || async { look_up("gw.invalid").await.unwrap_err().to_string() };
            let mut first = Box::pin(look_up_again());
            assert!(futures_util::poll!(&mut first).is_pending());
            let second = look_up_again();
            let mut third = Box::pin(look_up_again());
            assert!(futures_util::poll!(&mut third).is_pending());
            let waiting =
                || RUNNING.with_borrow(|running| running["gw.invalid"].answer.receiver_count());
            assert_eq!(waiting(), 2);
            drop(first);
            assert_eq!(waiting(), 1);
            let (second, third) = futures_util::join!(second, third);
            assert_eq!(second, third);
            assert!(RUNNING.with_borrow(HashMap::is_empty));
        });
    }
}
