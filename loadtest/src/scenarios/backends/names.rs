//! A backend with a name whose name server stops answering, as a machine that is lost does.

use std::fs;
use std::io::Write;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use super::{Bench, Figures, Missed, need_root};
use crate::agents::Plan;
use crate::callers::Callers;
use crate::failure::{Failure, ensure};
use crate::report::millis;
use crate::sink;

/// Address of the name server. A file of name servers cannot name a port, so it has the usual one.
const NAME_SERVER: Ipv4Addr = Ipv4Addr::new(127, 77, 0, 53);
const NAME: &str = "backend.test";
const REQUESTS: usize = 379;
/// Those before the name server is silent.
const BEFORE: usize = 60;
/// All requests take 38 s.
const RATE: u32 = 10;
const CALLERS: u32 = 64;
/// Fewer than the requests of the time that a lookup without an answer takes.
const SLOTS: u32 = 16;

pub(super) fn run(bench: &Bench) -> Figures {
    need_root()?;
    let names = NameServer::start().map_err(|error| {
        Missed::Skipped(Failure::during(
            format!("UDP port 53 of {NAME_SERVER}"),
            error,
        ))
    })?;
    let folder = tempfile::tempdir()?;
    let resolv_conf = folder.path().join("resolv.conf");
    fs::write(&resolv_conf, format!("nameserver {NAME_SERVER}\n"))?;
    // Each request needs a new connection, and a known address.
    let backend = sink::listen("names", |_, _, socket| {
        socket.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")?;
        socket.shutdown(Shutdown::Write)
    })?;
    let pool = bench.pool(Plan {
        slots: Some(SLOTS),
        name_servers: Some(resolv_conf),
        ..Plan::new(format!("http://{NAME}:{}", backend.port()))
    })?;
    let callers = Callers::start(&pool.target, CALLERS, RATE);
    let wait_for = |sent: usize| {
        while callers.sent() < sent {
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    wait_for(BEFORE);
    names.silent.store(true, Ordering::Relaxed);
    wait_for(REQUESTS);
    let outcome = callers.stop()?;
    let (slowest, p50, p99) = outcome.figures();
    let refused = outcome
        .failed
        .iter()
        .filter(|it| it.what.to_string().contains("GW_AGENT_CONCURRENCY_LIMIT"))
        .count();
    let unanswered = names.unanswered.load(Ordering::Relaxed);
    let figures = format!(
        "{} requests, {RATE}/s, each on a new connection, {SLOTS} slots: {} failures, {refused} of \
         them GW_AGENT_CONCURRENCY_LIMIT; {unanswered} queries without an answer; p50 {:.1} ms, \
         p99 {:.0} ms, slowest {:.0} ms",
        outcome.answered.len() + outcome.failed.len(),
        outcome.failed.len(),
        millis(p50),
        millis(p99),
        millis(slowest)
    );
    ensure(outcome.failed.is_empty() && unanswered > 0, || {
        figures.clone()
    })?;
    Ok(figures)
}

/// A name server for one name, whose address is loopback.
struct NameServer {
    silent: Arc<AtomicBool>,
    unanswered: Arc<AtomicUsize>,
}

impl NameServer {
    fn start() -> std::io::Result<Self> {
        let socket = UdpSocket::bind(SocketAddr::from((NAME_SERVER, 53)))?;
        let server = Self {
            silent: Arc::default(),
            unanswered: Arc::default(),
        };
        let silent = Arc::clone(&server.silent);
        let unanswered = Arc::clone(&server.unanswered);
        std::thread::Builder::new()
            .name("name-server".into())
            .spawn(move || {
                let mut query = [0; 512];
                while let Ok((length, from)) = socket.recv_from(&mut query) {
                    if silent.load(Ordering::Relaxed) {
                        unanswered.fetch_add(1, Ordering::Relaxed);
                    } else if let Some(answer) = answer(&query[..length]) {
                        let _ = socket.send_to(&answer, from);
                    }
                }
            })?;
        Ok(server)
    }
}

/// Response to a query with one question (RFC 1035 §4.1).
fn answer(query: &[u8]) -> Option<Vec<u8>> {
    const HEADER: usize = 12;
    const A: [u8; 2] = [0, 1];
    let name_end = HEADER + query.get(HEADER..)?.iter().position(|byte| *byte == 0)? + 1;
    let question = query.get(HEADER..name_end + 4)?;
    let is_address = query.get(name_end..name_end + 2)? == A;
    let id = query.get(..2)?;
    let counts = [0, 1, 0, u8::from(is_address), 0, 0, 0, 0];
    let mut answer = [id, &[0x81, 0x80], &counts, question].concat();
    if is_address {
        // Name of the question, class IN, no time to live, and the address.
        answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4]);
        answer.extend(Ipv4Addr::LOCALHOST.octets());
    }
    Some(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_for_addresses_are_answered() {
        let query = |kind: u8| {
            [
                &[7, 9, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, b'a', 0, 0][..],
                &[kind, 0, 1],
            ]
            .concat()
        };
        let address = answer(&query(1)).unwrap();
        assert_eq!(address[..8], [7, 9, 0x81, 0x80, 0, 1, 0, 1]);
        assert_eq!(address[address.len() - 4..], [127, 0, 0, 1]);
        let none = answer(&query(28)).unwrap();
        assert_eq!(none[4..8], [0, 1, 0, 0]);
        assert_eq!(answer(&[0; 5]), None);
    }
}
