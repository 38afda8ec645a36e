//! Callers: their connections, limits and refusals.

// On each driver:
mod caller_abuse;
mod connection_failures;
mod http2_violations;
mod idle_connections;
mod plain_http;
mod proxy_protocol;
mod rate_limit;
mod refusals;
mod refused_uploads;
mod session_tickets;
mod transport_security;
mod worker_hand_over;

// On each driver, slow:
mod http2_callers;

use gw_shared::net::TlsStream;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::peers::backend;
use crate::support::peers::http2_caller::tls;
use crate::support::peers::http2_frames::{Frame, GOAWAY, Splitter};
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::Served;
use crate::support::scene::Scene;

/// A gateway process with one worker.
fn with_one_worker(prepared: &Prepared) -> Served {
    prepared.serve_with(&prepared.config().replace("workers = 2", "workers = 1"))
}

/// A backend that echoes every body.
fn mirror() -> String {
    backend::start(|mut peer| {
        while let Ok((_, body, _)) = peer.request() {
            let length = body.len();
            peer.send(format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n"
            ));
            peer.send(body);
        }
    })
}

/// A body of this length, which differs between the numbers.
fn pattern(length: usize, number: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 7 + number) as u8).collect()
}

/// Bytes of a frame header of HTTP/2 (RFC 9113 §4.1).
const FRAME_HEADER: usize = 9;

/// A caller that writes and reads the frames of HTTP/2 itself.
struct FrameCaller {
    stream: TlsStream,
    received: Splitter,
}

impl FrameCaller {
    async fn connect(scene: &Scene) -> Self {
        Self {
            stream: tls(&scene.about).await,
            received: Splitter::default(),
        }
    }

    async fn send(&mut self, frames: &[u8]) {
        let stream = &mut self.stream;
        AsyncWriteExt::write_all(stream, frames).await.unwrap();
        AsyncWriteExt::flush(stream).await.unwrap();
    }

    /// The next frame; `None` at the end of the connection.
    async fn next(&mut self) -> Option<Frame> {
        loop {
            // `Frame` leaves out the reserved bit, which has to be unset (RFC 9113 §4.1).
            if let Some(stream) = self.received.buffer.get(5) {
                assert!(*stream < 0x80, "{:?}", self.received);
            }
            let frame = self.received.take();
            if frame.is_some() {
                return frame;
            }
            let buffer = &mut self.received.buffer;
            buffer.reserve(16 * 1024);
            match self.stream.read_buf(buffer).await {
                Ok(1..) => {}
                Ok(0) | Err(_) => {
                    assert!(buffer.len() < FRAME_HEADER, "a part of a frame: {buffer:?}");
                    return None;
                }
            }
        }
    }

    /// Receives frames up to one for which `is_wanted` is true.
    async fn until(&mut self, is_wanted: impl Fn(&Frame) -> bool) -> Frame {
        loop {
            let frame = self.next().await.expect("the connection goes on");
            if is_wanted(&frame) {
                return frame;
            }
        }
    }
}

/// The error code of RST_STREAM or GOAWAY (RFC 9113 §6.4 and §6.8).
fn error_code(frame: &Frame) -> u32 {
    let at = if frame.kind == GOAWAY { 4 } else { 0 };
    u32::from_be_bytes(frame.payload[at..at + 4].try_into().unwrap())
}

/// The error code of the last GOAWAY in received bytes.
fn goaway(received: &[u8]) -> Option<u32> {
    let mut splitter = Splitter {
        buffer: received.into(),
    };
    let frames = std::iter::from_fn(|| splitter.take());
    let goaways = frames.filter(|frame| frame.kind == GOAWAY);
    goaways.last().map(|frame| error_code(&frame))
}
