//! Memory of the gateway process for callers that keep their connections.

use std::io::Write;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response};

use super::with_one_worker;
use crate::support::eventually;
use crate::support::peers::caller::{HOST, Tls, session, socket};
use crate::support::peers::http2_backend;
use crate::support::peers::http2_frames::{
    self, CONTINUATION, END_HEADERS, END_STREAM, Frame, HEADERS, WINDOW_UPDATE, frame,
    get_with_padding, indexed, preface,
};
use crate::support::processes::prepared::Prepared;
use crate::support::scene::About;

/// Connections: as many as it takes to tell their memory from that of the process.
const CONNECTIONS: usize = 1000;
/// Requests of each connection.
const REQUESTS: u32 = 20;
/// Most bytes of an idle connection. The buffers that it has while it is used take 24 KiB.
const CONNECTION: usize = 18 * 1024;
/// Memory of the process that does not depend on the number of connections.
const PROCESS: usize = 4 * 1024 * 1024;

/// Opens a connection that has sent no request.
fn begin(about: &About) -> Tls {
    let mut stream = Tls::new(session(about, HOST, &[b"h2"], None), socket(about));
    stream.write_all(&preface(&[])).unwrap();
    stream
}

/// Opens a connection, sends its requests one after another, and receives the responses. Each
/// request adds a small field and its path to the table of the gateway's decoder (RFC 7541 §2.3.2),
/// and fills more than half of the gateway's read buffer, so that the next request needs another
/// buffer.
fn connection(about: &About) -> Tls {
    let mut stream = begin(about);
    for number in 0..REQUESTS {
        let id = 2 * number + 1;
        let block = get_with_padding(number, 5000);
        let request = http2_frames::headers(id, END_STREAM, &block);
        stream.write_all(&request).unwrap();
        until_answered(&mut stream, id);
    }
    stream
}

/// Sends a request with its own `x-number`, which the tables of all encoders on its way keep, and
/// 30 KB in other fields. Receives the response, which has the same field and 50 KB in others.
fn exchange(stream: &mut Tls, key: &str, id: u32, number: &str) {
    let path = http2_frames::get("/", Some(key));
    let padding: Vec<String> = (0..10).map(|at| format!("x-padding-{at}")).collect();
    let value = "p".repeat(3000);
    let others = padding.iter().map(|name| (name.as_str(), &*value));
    let number = indexed("x-number", number);
    let block = [
        path,
        number,
        http2_frames::block(&others.collect::<Vec<_>>()),
    ]
    .concat();
    let (first, rest) = block.split_at(16 * 1024);
    let head = frame(HEADERS, END_STREAM, id, first);
    let rest = frame(CONTINUATION, END_HEADERS, id, rest);
    stream.write_all(&[head, rest].concat()).unwrap();
    until_answered(stream, id);
}

#[test]
fn an_idle_http2_connection_keeps_nothing_of_large_heads() {
    /// Requests of the connection, more than the tables of encoders have room for.
    const EXCHANGES: u32 = 100;
    /// Most growth of a process. The heads of these responses are 5 MB at the gateway, those of the
    /// requests 3 MB at the agent.
    const GROWTH: usize = 1024 * 1024;
    let backend = http2_backend::start(async |request, mut respond| {
        let mut response = Response::new(());
        let number = request.headers()["x-number"].clone();
        response.headers_mut().insert("x-number", number);
        for at in 0..10 {
            let name = HeaderName::try_from(format!("x-padding-{at}")).unwrap();
            let value = HeaderValue::try_from("p".repeat(5000)).unwrap();
            response.headers_mut().insert(name, value);
        }
        let mut stream = respond.send_response(response, false).unwrap();
        stream.send_data(Bytes::from_static(b"body"), true).unwrap();
    });
    let prepared = Prepared::new();
    let gateway = with_one_worker(&prepared);
    let agent = prepared.run_agent(gateway.address.port(), &backend);
    eventually("the tunnel is open", || {
        let get = prepared.get("/");
        let get = get.replace("\r\n\r\n", "\r\nx-number: 0\r\n\r\n");
        let response = prepared.connect(gateway.address).ask(get);
        (response.status == 200).then_some(())
    });
    let mut stream = begin(&prepared.about(gateway.address));
    let mut exchanges = |from: u32, number: &dyn Fn(u32) -> String| {
        for at in from..from + EXCHANGES {
            // Room for the response.
            let window = frame(WINDOW_UPDATE, 0, 0, &1000_u32.to_be_bytes());
            stream.write_all(&window).unwrap();
            let number = number(at);
            exchange(&mut stream, prepared.service_key(), 2 * at + 1, &number);
        }
        (gateway.resident(), agent.resident())
    };
    // The same value takes one place in each table.
    let before = exchanges(0, &|_| "0".to_owned());
    let after = exchanges(EXCHANGES, &|at| at.to_string());
    let growth = (
        after.0.saturating_sub(before.0),
        after.1.saturating_sub(before.1),
    );
    eprintln!("gateway {} bytes, agent {} bytes", growth.0, growth.1);
    assert!(growth.0 <= GROWTH && growth.1 <= GROWTH, "{growth:?}");
}

/// Receives frames up to the end of the stream.
fn until_answered(stream: &mut Tls, id: u32) {
    loop {
        let frame = Frame::read(stream).unwrap();
        if frame.ends_stream() && frame.stream == id {
            return;
        }
    }
}

#[test]
fn an_idle_http2_connection_holds_little_memory() {
    let prepared = Prepared::new();
    let gateway = with_one_worker(&prepared);
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
