//! Tests that play the gateway and the backends.

mod bounds;
mod connections;
mod delivery;
mod framing;
mod http2;
mod http2_violations;
mod identities;
mod responses;
mod tunnel;
mod unprocessed;
mod upgrades;
mod uploads;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use gw_shared::http2::stream;
use gw_shared::net::{Socket, TlsStream};
use gw_shared::runtime::{self, Driver};
use gw_shared::tunnel::endpoint::Closed;
use gw_shared::tunnel::head::OutboundRequest;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::{HeaderValue, Request, Response};
use rcgen::{CertificateParams, KeyPair};
use rustls::ServerConfig;
use rustls::server::UnbufferedServerConnection;
use rustls_pki_types::PrivateKeyDer;

use self::tunnel::{get, post, upgrade, with_field, with_tunnel, with_tunnel_to};
use super::*;
use crate::backend::{BackendStream, Backends};
use crate::fake_gateway::HOSTNAME as HOST;
use crate::forward::upgrade::accept_of;
use crate::testing::{ClosedPort, block_on};

const TIME_LIMIT: Duration = Duration::from_secs(20);

/// The backends of a table of the configuration.
fn backends(table: &str) -> Backends {
    let table = toml::Value::Table(table.parse().unwrap());
    Backends::from_toml("test", &table, &mut Vec::new()).unwrap()
}

/// Starts a backend that calls `serve` with every connection and its number, each on its own
/// thread. Returns its address.
fn listen(serve: impl Fn(TcpStream, usize) + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let connections = AtomicUsize::new(0);
    gw_bed::threads::listen(listener, move |connection| {
        connection.set_read_timeout(Some(TIME_LIMIT)).unwrap();
        serve(connection, connections.fetch_add(1, Ordering::SeqCst));
    });
    address
}

/// Starts an HTTP/1.1 backend that calls `serve` with every connection and its number. Returns its
/// URL.
fn http1_backend(serve: impl Fn(TcpStream, usize) + Send + Sync + 'static) -> Vec<String> {
    vec![format!("http://{}", listen(serve))]
}

/// Starts a backend that has neither TLS nor HTTP/2. Returns its address.
fn http1_only() -> String {
    listen(|mut backend, _| {
        drop(backend.read(&mut [0; 24]));
        write(
            &mut backend,
            b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
        );
        while read(&mut backend, &mut [0; 100]) > 0 {}
    })
}

/// Starts an HTTP/1.1 backend that answers each request as `answer` says, which gets its head and
/// the number of its connection. Returns its URL.
fn http1_answers<A: AsRef<[u8]>>(
    answer: impl Fn(&str, usize) -> A + Send + Sync + 'static,
) -> Vec<String> {
    http1_backend(move |mut backend, number| {
        while let head = request_head(&mut backend)
            && !head.is_empty()
        {
            write(&mut backend, answer(&head, number));
        }
    })
}

/// Starts an HTTP/2 backend that calls `serve` with every request and the number of its connection.
/// Returns its URL.
fn http2_backend<F: Future<Output = ()> + 'static>(
    serve: impl Fn(Request<RecvStream>, SendResponse<Bytes>, usize) -> F + Send + Sync + 'static,
) -> Vec<String> {
    http2_backend_with(&h2::server::Builder::new(), serve)
}

/// As [`http2_backend`], with these settings.
fn http2_backend_with<F: Future<Output = ()> + 'static>(
    settings: &h2::server::Builder,
    serve: impl Fn(Request<RecvStream>, SendResponse<Bytes>, usize) -> F + Send + Sync + 'static,
) -> Vec<String> {
    let settings = settings.clone();
    let address = listen(move |connection, number| {
        block_on(async {
            let socket = BackendStream::Plain(Socket::from_fd(connection.into()).unwrap());
            let mut connection = settings.handshake::<_, Bytes>(socket).await.unwrap();
            while let Some(Ok((request, respond))) = connection.accept().await {
                runtime::spawn(serve(request, respond, number));
            }
        });
    });
    vec![format!("h2c://{address}")]
}

/// Reads a request head; empty at the end of the stream.
fn request_head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        if read(stream, &mut byte) == 0 {
            break;
        }
        head.push(byte[0]);
    }
    String::from_utf8(head).unwrap()
}

/// Reads available bytes; 0 is the end of the stream or a reset.
fn read(stream: &mut TcpStream, buffer: &mut [u8]) -> usize {
    loop {
        match stream.read(buffer) {
            // The io_uring in this process interrupts reads with a timeout.
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return 0,
            read => return read.unwrap(),
        }
    }
}

fn write(stream: &mut TcpStream, bytes: impl AsRef<[u8]>) {
    stream.write_all(bytes.as_ref()).unwrap();
}

/// Waits for a message of a backend's thread. Sleeps, because bytes leave only while this reactor
/// runs.
async fn received<T>(receiver: &mpsc::Receiver<T>) -> T {
    loop {
        match receiver.try_recv() {
            Ok(message) => return message,
            Err(_) => runtime::sleep(Duration::from_millis(1)).await,
        }
    }
}

fn assert_refusal(refusal: &head::Refusal, code: &str, unsent: bool) {
    let found = (&refusal.code[..], refusal.unsent);
    assert_eq!(found, (code.as_bytes(), unsent));
}

fn field<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

/// Reads a request body of an HTTP/2 backend to its end.
async fn read_body(stream: &mut RecvStream) -> String {
    let mut whole = Vec::new();
    loop {
        let part = std::future::poll_fn(|cx| stream::poll_receive(stream, cx)).await;
        match part.unwrap() {
            Part::Data(data) => {
                stream::release(stream, data.len());
                whole.extend_from_slice(&data);
            }
            Part::Trailers(_) => {}
            Part::End => return String::from_utf8(whole).unwrap(),
        }
    }
}
