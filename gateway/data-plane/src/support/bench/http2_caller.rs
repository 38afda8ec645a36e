//! A caller's connection of HTTP/2 in memory. Writes and reads frames as bytes: a client of the h2
//! crate would be counted with the gateway.

use std::cell::RefCell;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::relay::BenchWorker;
use crate::http2::frame_meter::CallerStream;
use crate::support::http2_frames::{
    ACK, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PREFACE, RST_STREAM, SETTINGS,
    WINDOW_UPDATE, frame,
};
use crate::support::memory_worker::{HOST, SERVICE_KEY};

/// Bytes of a frame header (RFC 9113 §4.1).
const FRAME_HEADER: usize = 9;
/// `:status: 200` in the static table (RFC 7541 appendix A).
const STATUS_200: u8 = 0x88;
/// Data after which the caller enlarges the window of the connection, in bytes: half of the first
/// window.
const UPDATE_AFTER: u32 = 32 * 1024;

/// A connection of HTTP/2.
pub struct Http2Caller {
    connection: Connection,
    /// Identifier of the next stream.
    next_stream: u32,
    /// Bytes of data since the last update of the window.
    since_update: u32,
    /// Bytes that were received and are not whole frames.
    received: BytesMut,
}

impl Http2Caller {
    /// Creates a connection that `gateway` serves.
    pub fn new(gateway: &BenchWorker) -> io::Result<Self> {
        let connection = Connection::default();
        gateway.serve_http2(connection.clone())?;
        connection.send(&[PREFACE, &frame(SETTINGS, 0, 0, &[])].concat());
        Ok(Self {
            connection,
            next_stream: 1,
            since_update: 0,
            received: BytesMut::new(),
        })
    }

    /// Relays this number of requests without a body, with a stream for each, sent at once. Returns
    /// the bytes of all bodies; `None` if a response is not complete or its status is not 200.
    pub async fn relay(&mut self, requests: u32) -> Option<usize> {
        let mut out = Vec::new();
        for _ in 0..requests {
            let block = if self.next_stream == 1 {
                first_block()
            } else {
                later_block().to_vec()
            };
            out.extend(frame(
                HEADERS,
                END_HEADERS | END_STREAM,
                self.next_stream,
                &block,
            ));
            self.next_stream += 2;
        }
        self.connection.send(&out);
        let mut open = requests;
        let mut bytes = 0;
        while open > 0 {
            let connection = &self.connection;
            let received = &mut self.received;
            std::future::poll_fn(|cx| connection.poll_receive(cx, received)).await;
            while let Some((kind, flags, payload)) = next_frame(&mut self.received) {
                match kind {
                    HEADERS if payload.first() != Some(&STATUS_200) => return None,
                    DATA => {
                        bytes += payload.len();
                        self.since_update += payload.len() as u32;
                    }
                    SETTINGS if flags & ACK == 0 => {
                        self.connection.send(&frame(SETTINGS, ACK, 0, &[]));
                    }
                    RST_STREAM | GOAWAY => return None,
                    _ => {}
                }
                if matches!(kind, HEADERS | DATA) && flags & END_STREAM != 0 {
                    open -= 1;
                }
            }
            if self.since_update > UPDATE_AFTER {
                let increment = std::mem::take(&mut self.since_update).to_be_bytes();
                self.connection
                    .send(&frame(WINDOW_UPDATE, 0, 0, &increment));
            }
        }
        Some(bytes)
    }
}

/// Takes a whole frame: type, flags and payload.
fn next_frame(received: &mut BytesMut) -> Option<(u8, u8, BytesMut)> {
    let &[a, b, c, kind, flags, ..] = received.first_chunk::<FRAME_HEADER>()?;
    let length = u32::from_be_bytes([0, a, b, c]) as usize;
    if received.len() < FRAME_HEADER + length {
        return None;
    }
    received.advance(FRAME_HEADER);
    Some((kind, flags, received.split_to(length)))
}

/// Fields of the request that the gateway's decoder has to keep, with the octets before their
/// values: the name's index in the static table, or the name itself (RFC 7541 §6.2.1).
fn kept_fields() -> [(Vec<u8>, &'static str); 5] {
    let mut key = vec![0x40];
    write_text(&mut key, "x-gw-service-key");
    [
        // :path, :authority, user-agent, accept
        (vec![0x44], "/hello?name=you"),
        (vec![0x41], HOST),
        (vec![0x7a], "curl/8.14.1"),
        (vec![0x53], "*/*"),
        (key, SERVICE_KEY),
    ]
}

/// `:method: GET` and `:scheme: https` in the static table.
const METHOD_AND_SCHEME: [u8; 2] = [0x82, 0x87];

/// Header block of the first request of a connection.
fn first_block() -> Vec<u8> {
    let mut block = METHOD_AND_SCHEME.to_vec();
    for (name, value) in kept_fields() {
        block.extend(name);
        write_text(&mut block, value);
    }
    block
}

/// Header block of a later request: [`kept_fields`] by their indices in the dynamic table, the last
/// one of which is 62.
fn later_block() -> [u8; 7] {
    let [method, scheme] = METHOD_AND_SCHEME;
    [method, scheme, 0xc2, 0xc1, 0xc0, 0xbf, 0xbe]
}

/// Appends a text that is shorter than 127 bytes, without a Huffman code (RFC 7541 §5.2).
fn write_text(block: &mut Vec<u8>, text: &str) {
    block.push(text.len() as u8);
    block.extend_from_slice(text.as_bytes());
}

/// Both directions of the connection.
#[derive(Clone, Default)]
struct Connection(Rc<RefCell<State>>);

#[derive(Default)]
struct State {
    to_gateway: BytesMut,
    from_gateway: BytesMut,
    gateway: Option<Waker>,
    caller: Option<Waker>,
}

impl Connection {
    fn send(&self, bytes: &[u8]) {
        let mut state = self.0.borrow_mut();
        state.to_gateway.extend_from_slice(bytes);
        let gateway = state.gateway.take();
        drop(state);
        gateway.into_iter().for_each(Waker::wake);
    }

    fn poll_receive(&self, cx: &mut Context<'_>, received: &mut BytesMut) -> Poll<()> {
        let mut state = self.0.borrow_mut();
        if state.from_gateway.is_empty() {
            state.caller = Some(cx.waker().clone());
            return Poll::Pending;
        }
        received.extend_from_slice(&state.from_gateway);
        state.from_gateway.clear();
        Poll::Ready(())
    }
}

impl CallerStream for Connection {
    fn unread(&self, bytes: &[u8]) {
        let mut state = self.0.borrow_mut();
        let later = std::mem::replace(&mut state.to_gateway, BytesMut::from(bytes));
        state.to_gateway.unsplit(later);
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut state = self.0.borrow_mut();
        if state.to_gateway.is_empty() {
            state.gateway = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let length = state.to_gateway.len().min(buffer.remaining());
        buffer.put_slice(&state.to_gateway[..length]);
        state.to_gateway.advance(length);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut state = self.0.borrow_mut();
        state.from_gateway.extend_from_slice(bytes);
        let caller = state.caller.take();
        drop(state);
        caller.into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
