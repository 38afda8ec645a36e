//! What comes out of a tunnel when backends do what tests say. The tests play the gateway.

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

const SOON: Duration = Duration::from_secs(20);
const HOST: &str = "acme--api.eu1.gw.localhost";

/// Runs a test that has a tunnel to backends at `urls`.
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
        // Settings have come once anything is answered.
        test(requests).await;
    };
    let in_time = Driver::choose().unwrap().block_on(async { runtime::timeout(SOON, run).await });
    in_time.unwrap().expect("a test that waits for ever");
}

/// A backend that gives every connection to `serve`, each on its own thread, with its number. Returns its address.
fn listen(serve: impl Fn(TcpStream, usize) + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let serve = Arc::new(serve);
    thread::spawn(move || {
        for (number, connection) in listener.incoming().enumerate() {
            let (connection, serve) = (connection.unwrap(), Arc::clone(&serve));
            connection.set_read_timeout(Some(SOON)).unwrap();
            thread::spawn(move || serve(connection, number));
        }
    });
    address
}

fn http1(serve: impl Fn(TcpStream, usize) + Send + Sync + 'static) -> Vec<String> {
    vec![format!("http://{}", listen(serve))]
}

/// A backend of HTTP/2 that gives every request to `serve`, with the number of its connection.
fn http2<F: Future<Output = ()> + 'static>(
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

/// Reads what is there; 0 is the end, be it a reset.
fn read(stream: &mut TcpStream, buffer: &mut [u8]) -> usize {
    loop {
        match stream.read(buffer) {
            // A ring in this process interrupts reads that have a timeout.
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

/// A request to switch to `protocol`, as the gateway puts it.
fn switch(protocol: &'static str) -> Request<()> {
    let protocol = Protocol::from_static(protocol);
    Request::connect(format!("https://{HOST}/chat")).extension(protocol).body(()).unwrap()
}

/// Sends `request`. Waits for the agent's settings, without which h2 refuses other protocols.
async fn send(requests: &SendRequest<Bytes>, request: Request<()>, whole: bool) -> (ResponseFuture, SendStream<Bytes>) {
    while !requests.is_extended_connect_protocol_enabled() {
        runtime::sleep(Duration::from_millis(1)).await;
    }
    requests.clone().send_request(request, whole).unwrap()
}

async fn body(stream: &mut RecvStream) -> Result<String, stream::StreamClosed> {
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

/// Reads exactly `length` bytes of a body that may go on.
async fn some(stream: &mut RecvStream, length: usize) -> Vec<u8> {
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

/// The code and message of the agent's own error.
async fn error_of(response: ResponseFuture) -> (String, String) {
    let mut response = response.await.unwrap();
    let message = body(response.body_mut()).await.unwrap();
    let code = response.headers().get(X_GW_AGENT_ERROR).unwrap_or_else(|| panic!("no error: {response:?}"));
    (code.to_str().unwrap().to_owned(), message)
}
