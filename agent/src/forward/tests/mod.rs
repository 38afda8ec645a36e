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
use crate::forward::upgrade::accept_of;

const TIME_LIMIT: Duration = Duration::from_secs(20);
const HOST: &str = "acme--api.eu1.gw.localhost";

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

/// Starts an HTTP/2 backend that calls `serve` with every request and the number of its connection.
/// Returns its URL.
fn http2_backend<F: Future<Output = ()> + 'static>(
    settings: h2::server::Builder,
    serve: impl Fn(Request<RecvStream>, SendResponse<Bytes>, usize) -> F + Send + Sync + 'static,
) -> Vec<String> {
    let address = listen(move |connection, number| {
        let serve = async {
            let socket = BackendStream::Plain(Socket::from_fd(connection.into()).unwrap());
            let mut connection = settings.handshake::<_, Bytes>(socket).await.unwrap();
            while let Some(Ok((request, respond))) = connection.accept().await {
                runtime::spawn(serve(request, respond, number));
            }
        };
        Driver::choose().unwrap().block_on(serve).unwrap();
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

fn field<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

/// Reads a request body of an HTTP/2 backend to its end.
async fn read_body(stream: &mut RecvStream) -> String {
    let mut whole = Vec::new();
    loop {
        match std::future::poll_fn(|cx| stream::poll_receive(stream, cx))
            .await
            .unwrap()
        {
            Part::Data(data) => {
                stream::release(stream, data.len());
                whole.extend_from_slice(&data);
            }
            Part::Trailers(_) => {}
            Part::End => return String::from_utf8(whole).unwrap(),
        }
    }
}
