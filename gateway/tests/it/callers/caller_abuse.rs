//! Attacks by callers. The attacker loses its connection, and other connections are still served.

mod stalled_handshakes;
mod waiting_header_lists;

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use http::Method;

use super::goaway;
use crate::support::peers::caller::{Caller, HOST, Tls};
use crate::support::peers::http2_frames::{
    CONTINUATION, END_STREAM, HEADERS, LAST, NO_WINDOW, RST_STREAM, WINDOW_UPDATE, frame, headers,
    preface,
};
use crate::support::peers::proxy_protocol::{connect_through, tcp4_of};
use crate::support::peers::{caller, http2_frames};
use crate::support::scene::Scene;
use crate::support::{SOON, eventually};

/// A scene with one worker and these further lines of configuration.
fn configured(configuration: &str) -> Scene {
    Scene::service()
        .agent()
        .configuration(configuration)
        .workers(1)
        .start()
}

/// Number of connections that were refused or closed for `reason`.
fn count(scene: &Scene, reason: &str) -> u64 {
    let metrics = scene.metrics();
    let of = |name| metrics.count_with(name, &format!("\"{reason}\""));
    of("gw_connections_turned_away_total") + of("gw_connections_ended_early_total")
}

fn connections(scene: &Scene) -> u64 {
    scene.metrics().count("gw_connections")
}

fn is_served(scene: &Scene, caller: &mut Caller) {
    let response = caller.ask(scene.get("/"));
    let body = String::from_utf8_lossy(&response.body);
    assert_eq!(response.status, 200, "{body}");
}

fn are_served(scene: &Scene, callers: &mut [Caller]) {
    for caller in callers {
        is_served(scene, caller);
    }
}

/// Whether the gateway ends a new connection before TLS.
fn is_refused(scene: &Scene) -> bool {
    let mut session = caller::session(&scene.about, HOST, &[b"http/1.1"], None);
    session
        .complete_io(&mut caller::socket(&scene.about))
        .is_err()
}

#[test]
fn connections_per_address_are_limited() {
    let scene = configured("connections_per_address = 4\n");
    // Waits until the connections of enrollment and of the tunnel handshake are closed.
    eventually("no connections are left", || {
        (connections(&scene) == 0).then_some(())
    });
    let mut callers: Vec<Caller> = (0..4).map(|_| scene.connect()).collect();
    are_served(&scene, &mut callers);
    assert!(is_refused(&scene));
    assert_eq!(count(&scene, "address_connections"), 1);
    are_served(&scene, &mut callers);
    drop(callers.pop());
    eventually("a connection is accepted again", || {
        (!is_refused(&scene)).then_some(())
    });
    is_served(&scene, &mut callers[0]);
}

#[test]
fn the_rate_of_new_connections_per_address_is_limited() {
    let scene = configured("new_connections_per_minute = 40\n");
    let mut bystander = scene.connect();
    is_served(&scene, &mut bystander);
    let sockets: Vec<TcpStream> = (0..40).map(|_| caller::socket(&scene.about)).collect();
    eventually("a connection is refused", || {
        (count(&scene, "address_rate") > 0).then_some(())
    });
    drop(sockets);
    // There is a connection more every 1.5 seconds.
    eventually("another connection is refused", || {
        is_refused(&scene).then_some(())
    });
    is_served(&scene, &mut bystander);
}

#[test]
fn behind_a_trusted_proxy_limits_apply_to_the_announced_address() {
    let scene = configured("trusted_proxies = [\"127.0.0.1/32\"]\nconnections_per_address = 1\n");
    let from = |last| connect_through(&scene, &tcp4_of([198, 51, 100, last]));
    // Connections of the proxy itself are not limited.
    let mut own: Vec<Caller> = (0..5).map(|_| scene.connect()).collect();
    are_served(&scene, &mut own);
    let mut first = from(7);
    is_served(&scene, &mut first);
    let mut second = from(7);
    let _ = second.stream.write_all(scene.get("/").as_bytes());
    assert!(second.try_response(&Method::GET).is_err());
    assert_eq!(count(&scene, "address_connections"), 1);
    is_served(&scene, &mut from(8));
    is_served(&scene, &mut first);
}

#[test]
fn handshakes_and_heads_that_take_too_long_are_closed() {
    let scene = Scene::service().agent().start();
    let mut bystander = scene.connect();
    let mut hello = Vec::new();
    caller::session(&scene.about, HOST, &[b"h2"], None)
        .write_tls(&mut hello)
        .unwrap();
    let dripping = [
        drip(caller::socket(&scene.about), hello),
        drip(scene.connect().stream, b"GET / HTTP/1.1\r\nX: y".to_vec()),
        drip(tls(&scene), b"PRI * HTTP/2.0\r\n".to_vec()),
    ];
    is_served(&scene, &mut bystander);
    for ended in dripping {
        ended.join().unwrap();
    }
    eventually("only the bystander is left", || {
        (connections(&scene) == 1).then_some(())
    });
    is_served(&scene, &mut bystander);
}

/// Sends a byte every 100 ms, until the connection ends.
fn drip(mut stream: impl Write + Send + 'static, bytes: Vec<u8>) -> JoinHandle<()> {
    thread::spawn(move || {
        for byte in bytes.iter().cycle() {
            let written = stream.write_all(&[*byte]);
            if written.and_then(|()| stream.flush()).is_err() {
                return;
            }
            thread::sleep(Duration::from_millis(100));
        }
    })
}

#[test]
fn a_connection_with_many_refused_requests_is_closed() {
    let scene = Scene::service().agent().start();
    let mut bystander = scene.connect();
    for (closed, host) in [(1, HOST), (2, "eu1.gw.localhost")] {
        // An unused connection would be closed after `limits::HEAD`, and a busy machine can take
        // longer than that.
        is_served(&scene, &mut bystander);
        let mut stranger = scene.connect();
        let began = Instant::now();
        let request = format!("GET /none HTTP/1.1\r\nHost: {host}\r\n\r\n");
        let mut is_answered =
            || stranger.try_send(&request).is_ok() && stranger.try_response(&Method::GET).is_ok();
        // A connection that is not closed would go on without an end.
        let refused = (0..100_000).take_while(|_| is_answered()).count();
        // The budget, plus the tokens refilled in the meantime.
        let refilled = usize::try_from(began.elapsed().as_millis() / 100).unwrap() + 1;
        assert!(
            (1001..=1001 + refilled).contains(&refused),
            "{host}: {refused}, {refilled} refilled"
        );
        assert_eq!(count(&scene, "refusals"), closed, "{host}");
    }
    is_served(&scene, &mut bystander);
    is_served(&scene, &mut scene.connect());
}

/// The header block of a request whose answer takes longer than the test.
fn slow_get(key: Option<&str>) -> Vec<u8> {
    http2_frames::get("/slow?ms=60000", key)
}

/// A connection that speaks HTTP/2.
fn tls(scene: &Scene) -> Tls {
    Tls::new(
        caller::session(&scene.about, HOST, &[b"h2"], None),
        caller::socket(&scene.about),
    )
}

/// Sends `first`, then the result of `more` for each stream id, until the gateway ends the
/// connection. Reads all frames, and returns the error code of a GOAWAY.
fn flood(scene: &Scene, first: &[u8], more: impl Fn(u32) -> Vec<u8>) -> Option<u32> {
    let mut stream = tls(scene);
    stream.write_all(&preface(&[])).unwrap();
    stream.write_all(first).unwrap();
    stream.flush().unwrap();
    stream.sock.set_nonblocking(true).unwrap();
    let mut id = 1;
    let mut received = Vec::new();
    let mut chunk = vec![0; 64 * 1024];
    let mut rest = Vec::new();
    let deadline = Instant::now() + SOON;
    loop {
        assert!(Instant::now() < deadline, "the connection is still open");
        if rest.is_empty() {
            rest = more(id);
            id += 2;
        }
        let written = match stream.write(&rest) {
            Ok(written) => written,
            Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
            Err(_) => break,
        };
        rest.drain(..written);
        match stream.flush().and_then(|()| stream.read(&mut chunk)) {
            Ok(0) => break,
            Ok(read) => received.extend_from_slice(&chunk[..read]),
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(_) => break,
        }
    }
    // Bytes that have arrived can still be read.
    while let Ok(read @ 1..) = stream.read(&mut chunk) {
        received.extend_from_slice(&chunk[..read]);
    }
    goaway(&received)
}

/// Number of connections that the gateway has ended because of abuse.
fn ended_connections(scene: &Scene) -> u64 {
    ["frames", "resets", "refusals", "http2"]
        .iter()
        .map(|reason| count(scene, reason))
        .sum()
}

/// Name, the first frames, and the further ones for each stream id.
type Flood<'a> = (&'a str, &'a [u8], &'a dyn Fn(u32) -> Vec<u8>);

#[test]
fn http2_floods_end_their_connection() {
    const ENHANCE_YOUR_CALM: Option<u32> = Some(11);
    const PROTOCOL_ERROR: Option<u32> = Some(1);
    // Requests with a valid key hold slots until the agent has processed the reset.
    let scene = Scene::service().agent().slots(1024).start();
    let mut bystander = scene.connect();
    // An unused connection would be closed after `limits::HEAD`, and a busy machine can take longer
    // than that.
    is_served(&scene, &mut bystander);
    let of_stranger = |id: u32| headers(id, END_STREAM, &slow_get(None));
    let key = Some(scene.about.service_key.as_str());
    let request = |id: u32| headers(id, END_STREAM, &slow_get(key));
    let reset = |id: u32| frame(RST_STREAM, 0, id, &[0, 0, 0, 8]);
    // A WINDOW_UPDATE with increment 0 is a stream error (RFC 9113 §6.9): the gateway resets the
    // stream (CVE-2025-8671).
    let invalid = |id: u32| frame(WINDOW_UPDATE, 0, id, &[0; 4]);
    let unfinished = frame(HEADERS, 0, 1, &[0x87]);
    // Adds a field of 4,000 bytes to the dynamic table and then refers to it (RFC 7541 §2.3.3) a
    // thousand times.
    let mut bomb = vec![0x40, 1, b'x', 127, 0xa1, 0x1e];
    bomb.extend([b'y'; 4000]);
    bomb.extend([LAST; 1000]);
    let floods: [Flood<'_>; 7] = [
        ("rapid reset", &[], &|id| [request(id), reset(id)].concat()),
        ("made you reset", &[], &|id| {
            [request(id), invalid(id)].concat()
        }),
        ("more streams than allowed", &[], &request),
        ("requests of a stranger", &[], &of_stranger),
        ("continuations without end", &unfinished, &|_| {
            frame(CONTINUATION, 0, 1, &[])
        }),
        ("header blocks that grow", &[], &|id| {
            headers(id, END_STREAM, &bomb)
        }),
        ("window updates", &[], &|_| {
            frame(WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1])
        }),
    ];
    for (ended, (what, first, more)) in (1..).zip(floods) {
        let goaway = flood(&scene, first, more);
        // A TCP reset may discard the GOAWAY; then only the counter shows the reason. A frame on a
        // stream that was reset long ago is a PROTOCOL_ERROR.
        let expected = [ENHANCE_YOUR_CALM, PROTOCOL_ERROR, None];
        assert!(expected.contains(&goaway), "{what}: {goaway:?}");
        eventually(what, || (ended_connections(&scene) == ended).then_some(()));
        is_served(&scene, &mut bystander);
    }
    scene.wait_until_slots_are_free();
}

#[test]
fn unread_error_responses_are_given_up() {
    const REQUESTS: u32 = 50;
    let scene = Scene::service().agent().start();
    let mut bystander = scene.connect();
    // From now on the connection is idle, for longer than the limit of the first head allows.
    is_served(&scene, &mut bystander);
    let mut stream = tls(&scene);
    // Without a window the gateway cannot send a body.
    stream.write_all(&preface(NO_WINDOW)).unwrap();
    for number in 0..REQUESTS {
        let request = headers(2 * number + 1, END_STREAM, &slow_get(None));
        stream.write_all(&request).unwrap();
    }
    stream.flush().unwrap();
    eventually("all refusals are given up", || {
        let given_up = scene.metrics().count("gw_requests_caller_gone_total");
        (given_up == u64::from(REQUESTS)).then_some(())
    });
    is_served(&scene, &mut bystander);
}
