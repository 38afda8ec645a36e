//! Attacks by callers. The attacker loses its connection, and other connections are still served.

mod stalled_handshakes;
mod waiting_header_lists;

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::Duration;

use http::Method;

use crate::support::eventually;
use crate::support::peers::caller::{Caller, HOST, Tls};
use crate::support::peers::http2_frames::{
    CONTINUATION, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PREFACE, RST_STREAM, SETTINGS,
    WINDOW_UPDATE, frame,
};
use crate::support::peers::proxy_protocol::{connect_through, tcp4_of};
use crate::support::peers::{caller, http2_frames};
use crate::support::scene::Scene;

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
    caller.send(scene.get("/"));
    let response = caller.response();
    assert_eq!(
        response.status,
        200,
        "{}",
        String::from_utf8_lossy(&response.body)
    );
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
    callers
        .iter_mut()
        .for_each(|caller| is_served(&scene, caller));
    assert!(is_refused(&scene));
    assert_eq!(count(&scene, "address_connections"), 1);
    callers
        .iter_mut()
        .for_each(|caller| is_served(&scene, caller));
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
    // Connections of the proxy itself are not limited.
    let mut own: Vec<Caller> = (0..5).map(|_| scene.connect()).collect();
    own.iter_mut().for_each(|caller| is_served(&scene, caller));
    let mut first = connect_through(&scene, &tcp4_of([198, 51, 100, 7]));
    is_served(&scene, &mut first);
    let mut second = connect_through(&scene, &tcp4_of([198, 51, 100, 7]));
    drop(second.stream.write_all(scene.get("/").as_bytes()));
    assert!(second.try_response(&Method::GET).is_err());
    assert_eq!(count(&scene, "address_connections"), 1);
    is_served(
        &scene,
        &mut connect_through(&scene, &tcp4_of([198, 51, 100, 8])),
    );
    is_served(&scene, &mut first);
}

#[test]
fn handshakes_and_heads_that_take_too_long_are_closed() {
    let scene = Scene::service().agent().start();
    let mut bystander = scene.connect();
    let drip = |mut stream: Box<dyn Write + Send>, bytes: Vec<u8>| {
        thread::spawn(move || {
            for byte in bytes.iter().cycle() {
                if stream
                    .write_all(&[*byte])
                    .and_then(|()| stream.flush())
                    .is_err()
                {
                    return;
                }
                thread::sleep(Duration::from_millis(100));
            }
        })
    };
    let mut hello = Vec::new();
    caller::session(&scene.about, HOST, &[b"h2"], None)
        .write_tls(&mut hello)
        .unwrap();
    let dripping = [
        drip(Box::new(caller::socket(&scene.about)), hello),
        drip(
            Box::new(scene.connect().stream),
            b"GET / HTTP/1.1\r\nX: y".to_vec(),
        ),
        drip(Box::new(tls(&scene)), b"PRI * HTTP/2.0\r\n".to_vec()),
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

#[test]
fn a_connection_with_many_refused_requests_is_closed() {
    let scene = Scene::service().agent().start();
    let mut bystander = scene.connect();
    for (closed, host) in [(1, HOST), (2, "eu1.gw.localhost")] {
        // An unused connection would be closed after `limits::HEAD`, and a busy machine can take
        // longer than that.
        is_served(&scene, &mut bystander);
        let mut stranger = scene.connect();
        let began = std::time::Instant::now();
        let refused = (0..)
            .take_while(|_| {
                let request = format!("GET /none HTTP/1.1\r\nHost: {host}\r\n\r\n");
                let sent = stranger
                    .stream
                    .write_all(request.as_bytes())
                    .and_then(|()| stranger.stream.flush());
                sent.is_ok() && stranger.try_response(&Method::GET).is_ok()
            })
            // A connection that is not closed would go on without an end.
            .take(100_000)
            .count();
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
fn flood(scene: &Scene, first: &[u8], more: impl Fn(u32) -> Vec<u8>) -> Option<u8> {
    let mut stream = tls(scene);
    stream.write_all(PREFACE).unwrap();
    stream.write_all(&frame(SETTINGS, 0, 0, &[])).unwrap();
    stream.write_all(first).unwrap();
    stream.flush().unwrap();
    stream.sock.set_nonblocking(true).unwrap();
    let mut id = 1;
    let mut received = Vec::new();
    let mut chunk = vec![0; 64 * 1024];
    let mut rest = Vec::new();
    let deadline = std::time::Instant::now() + crate::support::SOON;
    loop {
        assert!(
            std::time::Instant::now() < deadline,
            "the connection is still open"
        );
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

fn goaway(mut received: &[u8]) -> Option<u8> {
    let mut code = None;
    while let [a, b, c, kind, rest @ ..] = received {
        let length = usize::from(*a) << 16 | usize::from(*b) << 8 | usize::from(*c);
        if *kind == GOAWAY {
            // Flags, stream id, last stream id, then the error code (RFC 9113 §6.8).
            code = rest.get(12).copied();
        }
        received = rest.get(5 + length..).unwrap_or_default();
    }
    code
}

/// Number of connections that the gateway has ended because of abuse.
fn ended_connections(scene: &Scene) -> u64 {
    ["frames", "resets", "refusals", "http2"]
        .iter()
        .map(|reason| count(scene, reason))
        .sum()
}

#[test]
fn http2_floods_end_their_connection() {
    const ENHANCE_YOUR_CALM: Option<u8> = Some(11);
    const PROTOCOL_ERROR: Option<u8> = Some(1);
    // Requests with a valid key hold slots until the agent has processed the reset.
    let scene = Scene::service().agent().slots(1024).start();
    let mut bystander = scene.connect();
    // An unused connection would be closed after `limits::HEAD`, and a busy machine can take longer
    // than that.
    is_served(&scene, &mut bystander);
    let key = scene.about.service_key.clone();
    let request =
        |id: u32, key: Option<&str>| frame(HEADERS, END_HEADERS | END_STREAM, id, &slow_get(key));
    let mut ended = 0;
    let mut ends = |what: &str, first: &[u8], more: &dyn Fn(u32) -> Vec<u8>| {
        let goaway = flood(&scene, first, more);
        // A TCP reset may discard the GOAWAY; then only the counter shows the reason. A frame on a
        // stream that was reset long ago is a PROTOCOL_ERROR.
        assert!(
            [ENHANCE_YOUR_CALM, PROTOCOL_ERROR, None].contains(&goaway),
            "{what}: {goaway:?}"
        );
        ended += 1;
        eventually(what, || (ended_connections(&scene) == ended).then_some(()));
        is_served(&scene, &mut bystander);
    };
    ends("rapid reset", &[], &|id| {
        [
            request(id, Some(&key)),
            frame(RST_STREAM, 0, id, &[0, 0, 0, 8]),
        ]
        .concat()
    });
    // A WINDOW_UPDATE with increment 0 is a stream error (RFC 9113 §6.9): the gateway resets the
    // stream (CVE-2025-8671).
    ends("made you reset", &[], &|id| {
        [
            request(id, Some(&key)),
            frame(WINDOW_UPDATE, 0, id, &[0; 4]),
        ]
        .concat()
    });
    ends("more streams than allowed", &[], &|id| {
        request(id, Some(&key))
    });
    ends("requests of a stranger", &[], &|id| request(id, None));
    ends(
        "continuations without end",
        &frame(HEADERS, 0, 1, &[0x87]),
        &|_| frame(CONTINUATION, 0, 1, &[]),
    );
    // Adds a field of 4,000 bytes to the dynamic table and then refers to it (RFC 7541 §2.3.3) a
    // thousand times.
    let mut bomb = vec![0x40, 1, b'x', 127, 0xa1, 0x1e];
    bomb.extend([b'y'; 4000]);
    bomb.extend([0x80 | 62; 1000]);
    ends("header blocks that grow", &[], &|id| {
        frame(HEADERS, END_HEADERS | END_STREAM, id, &bomb)
    });
    ends("window updates", &[], &|_| {
        frame(WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1])
    });
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
    stream.write_all(PREFACE).unwrap();
    // SETTINGS_INITIAL_WINDOW_SIZE is 0, so the gateway cannot send a body.
    stream
        .write_all(&frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0]))
        .unwrap();
    for number in 0..REQUESTS {
        stream
            .write_all(&frame(
                HEADERS,
                END_HEADERS | END_STREAM,
                2 * number + 1,
                &slow_get(None),
            ))
            .unwrap();
    }
    stream.flush().unwrap();
    eventually("all refusals are given up", || {
        let given_up = scene.metrics().count("gw_requests_caller_gone_total");
        (given_up == u64::from(REQUESTS)).then_some(())
    });
    is_served(&scene, &mut bystander);
}
