//! Tests over a real tunnel connection: they play the gateway and the backends.

mod alpn;
mod bounds;
mod framing;
mod http2;
mod responses;
mod upgrades;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use gw_shared::http::fields::{X_GW_UPGRADE, X_GW_UPGRADE_METHOD};
use gw_shared::net::{Socket, TlsStream};
use gw_shared::runtime::{self, Driver};
use gw_shared::tunnel::settings;
use gw_shared::tunnel::timing::AgentTiming;
use h2::Reason;
use h2::client::{ResponseFuture, SendRequest};
use h2::ext::Protocol;
use http::header::COOKIE;
use rcgen::{CertificateParams, KeyPair};
use rustls::{ServerConfig, ServerConnection};
use rustls_pki_types::PrivateKeyDer;

use super::*;
use crate::backend::{Backends, Stream};
use crate::forward::slots::Slots;
use crate::forward::upgrade::accept_of;

const TIME_LIMIT: Duration = Duration::from_secs(20);
const HOST: &str = "acme--api.eu1.gw.localhost";

/// Runs a test with a tunnel to backends at `urls`.
fn with_tunnel<F: Future<Output = ()>>(urls: &[String], test: impl FnOnce(SendRequest<Bytes>) -> F) {
    with_tunnel_to(&Backends::from_urls("test", urls, &mut Vec::new()).unwrap(), test);
}

fn with_tunnel_to<F: Future<Output = ()>>(backends: &Backends, test: impl FnOnce(SendRequest<Bytes>) -> F) {
    let run = async {
        let pool = Rc::new(Pool::new(backends, 128));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let gateway = Socket::connect(listener.local_addr().unwrap(), None).await.unwrap();
        let agent = Socket::from_fd(listener.accept().unwrap().0.into()).unwrap();
        runtime::spawn(async move {
            let slots = Slots::new(128);
            let mut tunnel = settings::server(128).handshake::<_, Bytes>(Stream::Plain(agent)).await.unwrap();
            while let Some(Ok((mut request, respond))) = tunnel.accept().await {
                let (pool, slot) = (Rc::clone(&pool), slots.take().unwrap());
                let scope = RequestScope::begin(None, &Rc::default(), 0, &mut request);
                runtime::spawn(async move { forward(&pool, slot, scope, request, respond).await });
            }
        });
        let (requests, tunnel) = settings::client().handshake::<_, Bytes>(Stream::Plain(gateway)).await.unwrap();
        runtime::spawn(async move { drop(tunnel.await) });
        test(requests).await;
    };
    let result = Driver::choose().unwrap().block_on(async { runtime::timeout(TIME_LIMIT, run).await });
    result.unwrap().expect("the test exceeded its time limit");
}

/// Starts a backend that calls `serve` with every connection and its number, each on its own thread. Returns its address.
fn listen(serve: impl Fn(TcpStream, usize) + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let serve = Arc::new(serve);
    thread::spawn(move || {
        for (number, connection) in listener.incoming().enumerate() {
            let (connection, serve) = (connection.unwrap(), Arc::clone(&serve));
            connection.set_read_timeout(Some(TIME_LIMIT)).unwrap();
            thread::spawn(move || serve(connection, number));
        }
    });
    address
}

/// Starts an HTTP/1.1 backend that calls `serve` with every connection and its number. Returns its URL.
fn http1_backend(serve: impl Fn(TcpStream, usize) + Send + Sync + 'static) -> Vec<String> {
    vec![format!("http://{}", listen(serve))]
}

/// Starts an HTTP/2 backend that calls `serve` with every request and the number of its connection. Returns its URL.
fn http2_backend<F: Future<Output = ()> + 'static>(
    settings: h2::server::Builder,
    serve: impl Fn(Request<RecvStream>, SendResponse<Bytes>, usize) -> F + Send + Sync + 'static,
) -> Vec<String> {
    let address = listen(move |connection, number| {
        let serve = async {
            let socket = Stream::Plain(Socket::from_fd(connection.into()).unwrap());
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
    head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

fn get(path: &str) -> Request<()> {
    Request::get(format!("https://{HOST}{path}")).body(()).unwrap()
}

/// A request to upgrade to `protocol`, in the gateway's form.
fn upgrade(protocol: &'static str) -> Request<()> {
    let protocol = Protocol::from_static(protocol);
    Request::connect(format!("https://{HOST}/chat")).extension(protocol).body(()).unwrap()
}

/// Sends `request` after the agent's SETTINGS have arrived, before which h2 refuses extended CONNECT.
async fn send(requests: &SendRequest<Bytes>, request: Request<()>, whole: bool) -> (ResponseFuture, SendStream<Bytes>) {
    while !requests.is_extended_connect_protocol_enabled() {
        runtime::sleep(Duration::from_millis(1)).await;
    }
    requests.clone().send_request(request, whole).unwrap()
}

/// Reads a body to its end.
async fn read_body(stream: &mut RecvStream) -> Result<String, stream::StreamClosed> {
    let mut whole = Vec::new();
    loop {
        match std::future::poll_fn(|cx| stream::poll_receive(stream, cx)).await? {
            Received::Data(data) => {
                stream::release(stream, data.len());
                whole.extend_from_slice(&data);
            }
            Received::Trailers(_) => {}
            Received::End => return Ok(String::from_utf8(whole).unwrap()),
        }
    }
}

/// Reads exactly `length` bytes of a body.
async fn read_exact(stream: &mut RecvStream, length: usize) -> Vec<u8> {
    let mut read = Vec::new();
    while read.len() < length {
        let Received::Data(data) = std::future::poll_fn(|cx| stream::poll_receive(stream, cx)).await.unwrap() else {
            panic!("ended after {read:?}");
        };
        stream::release(stream, data.len());
        read.extend_from_slice(&data);
    }
    read
}

/// The code and message of an error response of the agent.
async fn error_of(response: ResponseFuture) -> (String, String) {
    let mut response = response.await.unwrap();
    let message = read_body(response.body_mut()).await.unwrap();
    let code = response.headers().get(X_GW_AGENT_ERROR).unwrap_or_else(|| panic!("no error: {response:?}"));
    (code.to_str().unwrap().to_owned(), message)
}
