//! Relayed requests and responses.

// On each driver:
mod backend_transports;
mod framing;
mod header_lists;
mod http1;
mod interim_responses;
mod intermediary;
mod request_targets;
mod smuggling;
mod tiny_frames;
mod upgrades;

// On each driver, slow:
mod early_responses;
mod flow_control;
mod relay_memory;

use crate::support::peers::backend;
use crate::support::peers::caller::{Caller, HOST, connect_to};
use crate::support::peers::http2_frames::{self, DATA, Frame, RST_STREAM};
use crate::support::scene::Scene;

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// A response that accepts the protocol `x`.
const SWITCHING: &str =
    "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n";

/// A response with this body.
fn response_with(body: &str) -> String {
    let length = body.len();
    format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{body}")
}

/// A backend that answers with the request target.
fn target_backend() -> String {
    backend::start(|mut peer| {
        while let Ok((head, ..)) = peer.request() {
            peer.send(response_with(head.target.as_str()));
        }
    })
}

/// Asserts that a request of another caller is answered with [`OK`].
#[track_caller]
fn assert_answered(scene: &Scene) {
    assert_eq!(scene.connect().ask(scene.get("/")).body, b"ok");
}

/// Number of requests that have crossed workers.
fn crossings(scene: &Scene) -> u64 {
    scene.metrics().count("gw_requests_crossing_total")
}

/// Sends frames on a new connection of HTTP/2, behind the preface.
fn send_frames(scene: &Scene, frames: &[u8]) -> Caller {
    let mut caller = connect_to(&scene.about, HOST, &[b"h2"], None);
    caller.send([&http2_frames::preface(&[])[..], frames].concat());
    caller
}

/// Sends frames of stream 1 on a new connection of HTTP/2. Returns the body of the response, or the
/// error code of a reset.
fn exchange_frames(scene: &Scene, frames: &[u8]) -> Result<Vec<u8>, u32> {
    let mut caller = send_frames(scene, frames);
    let mut body = Vec::new();
    loop {
        let frame = Frame::read(&mut caller.stream).unwrap();
        match (frame.kind, frame.stream) {
            (RST_STREAM, 1) => {
                return Err(u32::from_be_bytes(frame.payload[..].try_into().unwrap()));
            }
            (DATA, 1) => body.extend_from_slice(&frame.payload),
            _ => {}
        }
        if frame.ends_stream() {
            return Ok(body);
        }
    }
}
