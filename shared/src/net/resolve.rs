//! Name resolution and connecting, off the reactor where they block.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, select};
use futures_util::stream::{FuturesUnordered, StreamExt};

use super::Socket;
use crate::runtime;

/// Head start of one connection attempt over the next (RFC 8305 §5 recommends 250 ms).
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// Resolves `host` on a thread of its own: getaddrinfo(3) blocks. Addresses alternate between families, as
/// RFC 8305 §4 asks; never empty. Names of loopback are not asked for: not every resolver knows them.
pub async fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.trim_matches(['[', ']']).parse() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    if is_loopback_name(host) {
        return Ok(vec![(Ipv4Addr::LOCALHOST, port).into(), (Ipv6Addr::LOCALHOST, port).into()]);
    }
    let (reply, answer) = tokio::sync::oneshot::channel();
    let name = host.to_owned();
    std::thread::Builder::new().name("gw-resolve".into()).spawn(move || {
        let resolved = (name.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
        drop(reply.send(resolved));
    })?;
    let addresses = answer.await.map_err(|_| io::Error::other("the resolver thread died"))??;
    if addresses.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, format!("{host} has no address")));
    }
    Ok(alternate_families(&addresses))
}

/// Connects to the first of `addresses` that answers, starting the next attempt when one fails or lags.
pub async fn connect_any(addresses: &[SocketAddr]) -> io::Result<Socket> {
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
        attempts.push(Socket::connect(address));
        match select(attempts.next(), pin!(runtime::sleep(ATTEMPT_DELAY))).await {
            Either::Left((Some(Ok(socket)), _)) => return Ok(socket),
            Either::Left((Some(Err(error)), _)) => last_error = error,
            Either::Left((None, _)) | Either::Right(_) => {}
        }
    }
}

/// `localhost` and every name under it (RFC 6761 §6.3).
fn is_loopback_name(host: &str) -> bool {
    let host = host.strip_suffix('.').unwrap_or(host);
    host.rsplit('.').next().is_some_and(|label| label.eq_ignore_ascii_case("localhost"))
}

fn alternate_families(addresses: &[SocketAddr]) -> Vec<SocketAddr> {
    let (first, second): (Vec<SocketAddr>, Vec<SocketAddr>) =
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::Driver;

    #[test]
    fn families_alternate_and_the_first_choice_of_the_resolver_stays_first() {
        let parse = |list: &[&str]| list.iter().map(|text| text.parse().unwrap()).collect::<Vec<SocketAddr>>();
        let ordered = alternate_families(&parse(&["[::1]:1", "[::2]:1", "[::3]:1", "127.0.0.1:1"]));
        assert_eq!(ordered, parse(&["[::1]:1", "127.0.0.1:1", "[::2]:1", "[::3]:1"]));
    }

    #[test]
    fn a_refusing_address_is_passed_over() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let good = listener.local_addr().unwrap();
        // Bound and not listening: refuses, and nobody else gets the port.
        let closed = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        closed.bind(&"127.0.0.1:0".parse::<SocketAddr>().unwrap().into()).unwrap();
        let refusing = closed.local_addr().unwrap().as_socket().unwrap();
        let connected = Driver::choose()
            .unwrap()
            .block_on(async {
                socket2::SockRef::from(&connect_any(&[refusing, good]).await.unwrap()).peer_addr().unwrap()
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
}
