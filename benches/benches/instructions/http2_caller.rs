//! A caller of HTTP/2 in memory. Writes and reads frames as bytes: a client of the h2 crate would
//! be counted with the gateway.

use std::future::poll_fn;

use gw_bed::http2::{
    self, ACK, DATA, END_STREAM, GOAWAY, HEADERS, RST_STREAM, SETTINGS, Splitter, WINDOW_UPDATE,
    preface, write_text,
};
use gw_bed::memory::Connection;
use gw_data_plane::support::memory_worker::{HOST, MemoryWorker, SERVICE_KEY};

/// `:status: 200` in the static table (RFC 7541 appendix A).
const STATUS_200: u8 = 0x88;
/// Data after which the caller enlarges the window of the connection, in bytes: half of the first
/// window.
const UPDATE_AFTER: u32 = 32 * 1024;

/// A connection of HTTP/2.
pub(crate) struct Http2Caller {
    connection: Connection,
    /// Identifier of the next stream.
    next_stream: u32,
    /// Bytes of data since the last update of the window.
    since_update: u32,
    /// Bytes that were received and are not whole frames.
    received: Splitter,
}

impl Http2Caller {
    /// Creates a connection that `gateway` serves.
    pub(crate) fn new(gateway: &MemoryWorker) -> Self {
        let connection = Connection::default();
        gateway.serve_http2(connection.clone()).unwrap();
        connection.send(&preface(&[]));
        Self {
            connection,
            next_stream: 1,
            since_update: 0,
            received: Splitter::default(),
        }
    }

    /// Relays this number of requests without a body, with a stream for each, sent at once. Returns
    /// the bytes of all bodies; `None` if a response is not complete or its status is not 200.
    pub(crate) async fn relay(&mut self, requests: u32) -> Option<usize> {
        let mut out = Vec::new();
        for _ in 0..requests {
            let block = if self.next_stream == 1 {
                first_block()
            } else {
                later_block().to_vec()
            };
            out.extend(http2::headers(self.next_stream, END_STREAM, &block));
            self.next_stream += 2;
        }
        self.connection.send(&out);
        let mut open = requests;
        let mut bytes = 0;
        while open > 0 {
            let received = &mut self.received.buffer;
            poll_fn(|cx| self.connection.poll_receive(cx, received)).await;
            while let Some(frame) = self.received.take() {
                match frame.kind {
                    HEADERS if frame.payload.first() != Some(&STATUS_200) => return None,
                    DATA => {
                        bytes += frame.payload.len();
                        self.since_update += frame.payload.len() as u32;
                    }
                    SETTINGS if frame.flags & ACK == 0 => {
                        self.connection.send(&http2::frame(SETTINGS, ACK, 0, &[]));
                    }
                    RST_STREAM | GOAWAY => return None,
                    _ => {}
                }
                open -= u32::from(frame.ends_stream());
            }
            if self.since_update > UPDATE_AFTER {
                let increment = std::mem::take(&mut self.since_update).to_be_bytes();
                self.connection
                    .send(&http2::frame(WINDOW_UPDATE, 0, 0, &increment));
            }
        }
        Some(bytes)
    }
}

/// Fields of the request that the gateway's decoder has to keep, with the octets before their
/// values: the name's index in the static table, or the name itself (RFC 7541 §6.2.1).
fn kept_fields() -> [(Vec<u8>, &'static str); 5] {
    let mut key = vec![0x40];
    write_text(&mut key, b"x-gw-service-key");
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
        write_text(&mut block, value.as_bytes());
    }
    block
}

/// Header block of a later request: [`kept_fields`] by their indices in the dynamic table, the last
/// one of which is 62.
fn later_block() -> [u8; 7] {
    let [method, scheme] = METHOD_AND_SCHEME;
    [method, scheme, 0xc2, 0xc1, 0xc0, 0xbf, 0xbe]
}
