//! Memory of the gateway process for callers that keep their connections.

use std::io::{Read, Write};

use gw_gateway::demo::About;

use crate::support::peers::caller::{HOST, Tls, session, socket};
use crate::support::peers::http2_frames::{
    DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame, get_with_padding,
};
use crate::support::processes::prepared::Prepared;

/// Connections: as many as it takes to tell their memory from that of the process.
const CONNECTIONS: usize = 1000;
/// Requests of each connection.
const REQUESTS: u32 = 20;
/// Most bytes of an idle connection. The buffers that it has while it is used take 24 KiB.
const CONNECTION: usize = 18 * 1024;
/// Memory of the process that does not depend on the number of connections.
const PROCESS: usize = 4 * 1024 * 1024;

/// Opens a connection, sends its requests one after another, and receives the responses. Each request adds a small field and
/// its path to the table of the gateway's decoder (RFC 7541 §2.3.2), and fills more than half of the gateway's read buffer, so
/// that the next request needs another buffer.
fn connection(about: &About) -> Tls {
    let mut stream = Tls::new(session(about, HOST, &[b"h2"], None), socket(about));
    stream.write_all(PREFACE).unwrap();
    stream.write_all(&frame(SETTINGS, 0, 0, &[])).unwrap();
    for number in 0..REQUESTS {
        let id = 2 * number + 1;
        let block = get_with_padding(number, 5000);
        let request = frame(HEADERS, END_HEADERS | END_STREAM, id, &block);
        stream.write_all(&request).unwrap();
        until_answered(&mut stream, id);
    }
    stream
}

/// Receives frames up to the end of the stream.
fn until_answered(stream: &mut Tls, id: u32) {
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).unwrap();
        let [a, b, c, kind, flags, stream_id @ ..] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        stream.read_exact(&mut payload).unwrap();
        let ends = matches!(kind, HEADERS | DATA) && flags & END_STREAM != 0;
        if ends && u32::from_be_bytes(stream_id) == id {
            return;
        }
    }
}

#[test]
fn an_idle_http2_connection_holds_little_memory() {
    let prepared = Prepared::new();
    let gateway = prepared.serve_with(&prepared.config().replace("workers = 2", "workers = 1"));
    let about = prepared.about(gateway.address);
    // The first connections allocate what the process keeps.
    drop((0..50).map(|_| connection(&about)).collect::<Vec<_>>());
    let before = gateway.resident();
    let idle: Vec<Tls> = (0..CONNECTIONS).map(|_| connection(&about)).collect();
    let growth = gateway.resident().saturating_sub(before);
    assert!(
        growth <= CONNECTIONS * CONNECTION + PROCESS,
        "{} bytes for each of {} connections",
        growth / CONNECTIONS,
        idle.len()
    );
}
