//! What comes out of a tunnel when backends do what tests say. The tests play the gateway.

mod framing;

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

mod bounds;

const SOON: Duration = Duration::from_secs(20);
const HOST: &str = "acme--api.eu1.gw.localhost";

/// Runs a test that has a tunnel to backends at `urls`.
fn with_tunnel<F: Future<Output = ()>>(urls: &[String], test: impl FnOnce(SendRequest<Bytes>) -> F) {
    with_tunnel_to(&Backends::of_urls("test", urls, &mut Vec::new()).unwrap(), test);
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
                let passage = Passage::begin(None, &Rc::default(), 0, &mut request);
                runtime::spawn(async move { forward(&pool, slot, passage, request, respond).await });
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

#[test]
fn interim_responses_are_passed_on_as_they_come() {
    let (go_on, told) = mpsc::channel::<()>();
    let told = std::sync::Mutex::new(told);
    let urls = http1(move |mut backend, _| {
        let head = request_head(&mut backend);
        assert_eq!(field(&head, "expect"), Some("100-continue"));
        backend.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").unwrap();
        let mut body = [0; 5];
        backend.read_exact(&mut body).unwrap();
        backend.write_all(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nX-Gw-Status: forged\r\n\r\n").unwrap();
        told.lock().unwrap().recv().unwrap();
        backend.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n").unwrap();
        backend.write_all(&body).unwrap();
    });
    with_tunnel(&urls, |requests| async move {
        let mut request = Request::post(format!("https://{HOST}/")).body(()).unwrap();
        request.headers_mut().insert("expect", HeaderValue::from_static("100-continue"));
        request.headers_mut().insert("content-length", HeaderValue::from_static("5"));
        let (mut response, mut upload) = send(&requests, request, false).await;
        let interim = std::future::poll_fn(|cx| response.poll_informational(cx)).await.unwrap().unwrap();
        assert_eq!(interim.status(), 100);
        upload.send_data(Bytes::from_static(b"hello"), true).unwrap();
        let interim = std::future::poll_fn(|cx| response.poll_informational(cx)).await.unwrap().unwrap();
        assert_eq!((interim.status().as_u16(), interim.headers().len()), (103, 1));
        assert_eq!(interim.headers()["link"], "</a>");
        go_on.send(()).unwrap();
        let mut response = response.await.unwrap();
        assert_eq!((response.status().as_u16(), body(response.body_mut()).await.unwrap().as_str()), (200, "hello"));
    });
}

#[test]
fn every_answer_says_where_the_time_went_and_no_backend_says_it_for_us() {
    let urls = http1(|mut backend, number| {
        while !request_head(&mut backend).is_empty() {
            let answer: &[u8] = match number {
                0 => b"HTTP/1.1 200 OK\r\nX-Gw-Timing: 4000000000,4000000000\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
                1 => b"HTTP/1.1 101 Yes\r\nUpgrade: foo\r\nX-Gw-Timing: 4000000000,4000000000\r\n\r\n",
                _ => b"nonsense\r\n\r\n",
            };
            backend.write_all(answer).unwrap();
        }
    });
    let timing = |response: &Response<RecvStream>| {
        let values: Vec<_> = response.headers().get_all(X_GW_TIMING).iter().collect();
        assert_eq!(values.len(), 1);
        AgentTiming::parse(values[0]).unwrap()
    };
    let is_real = |us: u32| us < 60_000_000;
    with_tunnel(&urls, |requests| async move {
        for request in [get("/"), switch("foo")] {
            let response = send(&requests, request, false).await.0.await.unwrap();
            let AgentTiming { agent_us, backend_first_byte_us } = timing(&response);
            assert!(is_real(agent_us) && backend_first_byte_us.is_some_and(is_real));
        }
        let response = send(&requests, get("/"), true).await.0.await.unwrap();
        assert!(response.headers().contains_key(X_GW_AGENT_ERROR));
        assert_eq!(timing(&response).backend_first_byte_us, None);
    });
}

#[test]
fn interim_responses_and_trailers_of_http_2_are_passed_on() {
    let urls = http2(h2::server::Builder::new(), |request, mut respond, _| async move {
        assert_eq!((request.uri().scheme_str(), request.headers()["te"].as_bytes()), (Some("http"), &b"trailers"[..]));
        assert_eq!(request.uri().authority().unwrap(), HOST);
        respond.send_informational(Response::builder().status(103).header("link", "</a>").body(()).unwrap()).unwrap();
        let mut sent = respond.send_response(Response::new(()), false).unwrap();
        let text = body(&mut request.into_body()).await.unwrap();
        sent.send_data(Bytes::from(text), false).unwrap();
        sent.send_trailers(HeaderMap::from_iter([("grpc-status".parse().unwrap(), HeaderValue::from_static("0"))]))
            .unwrap();
    });
    with_tunnel(&urls, |requests| async move {
        let mut request = Request::post(format!("https://{HOST}/")).body(()).unwrap();
        request.headers_mut().insert("te", HeaderValue::from_static("trailers"));
        let (mut response, mut upload) = send(&requests, request, false).await;
        let interim = std::future::poll_fn(|cx| response.poll_informational(cx)).await.unwrap().unwrap();
        assert_eq!((interim.status().as_u16(), &interim.headers()["link"]), (103, &HeaderValue::from_static("</a>")));
        // The response begins while the upload goes on.
        let mut response = response.await.unwrap();
        upload.send_data(Bytes::from_static(b"hello"), true).unwrap();
        assert_eq!(some(response.body_mut(), 5).await, b"hello");
        let trailers = std::future::poll_fn(|cx| response.body_mut().poll_trailers(cx)).await.unwrap().unwrap();
        assert_eq!(trailers["grpc-status"], "0");
    });
}

#[test]
fn any_protocol_is_switched_to_and_each_direction_ends_on_its_own() {
    let urls = http1(|mut backend, _| {
        let head = request_head(&mut backend);
        assert!(head.starts_with("PUT /chat HTTP/1.1\r\n"), "{head}");
        assert_eq!((field(&head, "connection"), field(&head, "upgrade")), (Some("upgrade"), Some("Foo/2")));
        assert_eq!((field(&head, "host"), field(&head, "x-gw-upgrade-method")), (Some(HOST), None));
        backend.write_all(b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 101 Yes\r\nConnection: upgrade\r\nUpgrade: foo/2\r\nX-Own: 1\r\n\r\nfirst").unwrap();
        let mut heard = String::new();
        let mut byte = [0; 100];
        loop {
            match read(&mut backend, &mut byte) {
                0 => break,
                length => heard.push_str(std::str::from_utf8(&byte[..length]).unwrap()),
            }
        }
        backend.write_all(format!("heard {heard}").as_bytes()).unwrap();
    });
    with_tunnel(&urls, |requests| async move {
        let mut request = switch("Foo/2");
        request.headers_mut().insert(X_GW_UPGRADE_METHOD, HeaderValue::from_static("PUT"));
        let (response, mut up) = send(&requests, request, false).await;
        let mut response = response.await.unwrap();
        assert_eq!(
            (response.status().as_u16(), &response.headers()[X_GW_UPGRADE]),
            (200, &HeaderValue::from_static("Foo/2"))
        );
        assert_eq!(response.headers()["x-own"], "1");
        assert_eq!(response.headers().len(), 3);
        let down = response.body_mut();
        assert_eq!(some(down, 5).await, b"first");
        up.send_data(Bytes::from_static(b"one "), false).unwrap();
        up.send_data(Bytes::from_static(b"two"), true).unwrap();
        assert_eq!(body(down).await.unwrap(), "heard one two");
    });
}

#[test]
fn a_backend_that_ends_first_still_hears() {
    let (tell, heard) = mpsc::channel();
    let urls = http1(move |mut backend, _| {
        drop(request_head(&mut backend));
        backend.write_all(b"HTTP/1.1 101 Yes\r\nConnection: upgrade\r\nUpgrade: foo\r\n\r\n").unwrap();
        backend.shutdown(std::net::Shutdown::Write).unwrap();
        let mut text = [0; 4];
        backend.read_exact(&mut text).unwrap();
        tell.send((text, read(&mut backend, &mut [0]))).unwrap();
    });
    with_tunnel(&urls, |requests| async move {
        let (response, mut up) = send(&requests, switch("foo"), false).await;
        assert_eq!(body(response.await.unwrap().body_mut()).await.unwrap(), "");
        up.send_data(Bytes::from_static(b"late"), false).unwrap();
        up.send_data(Bytes::new(), true).unwrap();
        // What was sent is on its way only while this reactor turns.
        let heard = loop {
            match heard.try_recv() {
                Ok(heard) => break heard,
                Err(_) => runtime::sleep(Duration::from_millis(1)).await,
            }
        };
        assert_eq!(heard, (*b"late", 0));
    });
}

#[test]
fn a_break_behind_the_head_is_told_after_all_that_came_before_it() {
    let (go_on, told) = mpsc::channel::<()>();
    let told = std::sync::Mutex::new(told);
    let urls = http1(move |mut backend, number| {
        drop(request_head(&mut backend));
        let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        match number {
            0 => backend.write_all(format!("{chunked}zz\r\n").as_bytes()).unwrap(),
            1 => {
                backend.write_all(format!("{chunked}5\r\nhello\r\n").as_bytes()).unwrap();
                told.lock().unwrap().recv().unwrap();
                backend.write_all(b"zz\r\n").unwrap();
            }
            _ => backend.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello").unwrap(),
        }
    });
    with_tunnel(&urls, |requests| async move {
        let (response, _) = send(&requests, get("/"), true).await;
        assert_eq!(error_of(response).await.0, "GW_BACKEND_INVALID_RESPONSE");

        let (response, _) = send(&requests, get("/"), true).await;
        let mut response = response.await.unwrap();
        assert_eq!(some(response.body_mut(), 5).await, b"hello");
        go_on.send(()).unwrap();
        let end = std::future::poll_fn(|cx| stream::poll_receive(response.body_mut(), cx)).await;
        let Ok(Received::Trailers(trailers)) = end else { panic!("{end:?}") };
        assert_eq!(trailers[X_GW_AGENT_ERROR], "GW_BACKEND_INVALID_RESPONSE");

        let (response, _) = send(&requests, get("/"), true).await;
        let mut response = response.await.unwrap();
        assert_eq!(some(response.body_mut(), 5).await, b"hello");
        assert_eq!(body(response.body_mut()).await, Err(stream::StreamClosed { is_reset: true }));
    });
}

#[test]
fn resets_go_through_both_ways() {
    let (tell, ended) = mpsc::channel();
    let urls = http1(move |mut backend, number| {
        drop(request_head(&mut backend));
        backend.write_all(b"HTTP/1.1 101 Yes\r\nConnection: upgrade\r\nUpgrade: foo\r\n\r\nhi").unwrap();
        if number == 0 {
            tell.send(read(&mut backend, &mut [0])).unwrap();
        } else {
            read(&mut backend, &mut [0]);
            rustix::net::sockopt::set_socket_linger(&backend, Some(Duration::ZERO)).unwrap();
        }
    });
    with_tunnel(&urls, |requests| async move {
        let (response, mut up) = send(&requests, switch("foo"), false).await;
        assert_eq!(some(response.await.unwrap().body_mut(), 2).await, b"hi");
        up.send_reset(Reason::CANCEL);
        while ended.try_recv() != Ok(0) {
            runtime::sleep(Duration::from_millis(1)).await;
        }
        let (response, mut up) = send(&requests, switch("foo"), false).await;
        let mut response = response.await.unwrap();
        assert_eq!(some(response.body_mut(), 2).await, b"hi");
        up.send_data(Bytes::from_static(b"now"), false).unwrap();
        assert_eq!(body(response.body_mut()).await, Err(stream::StreamClosed { is_reset: true }));
    });
}

#[test]
fn a_web_socket_without_a_key_gets_one() {
    let urls = http1(|mut backend, number| {
        let head = request_head(&mut backend);
        let key = field(&head, "sec-websocket-key").unwrap();
        let accept = if number == 0 { accept_of(key.as_bytes()).unwrap() } else { HeaderValue::from_static("wrong") };
        let accept = accept.to_str().unwrap();
        backend
            .write_all(
                format!("HTTP/1.1 101 Yes\r\nUpgrade: WebSocket\r\nSec-WebSocket-Accept: {accept}\r\n\r\n").as_bytes(),
            )
            .unwrap();
        read(&mut backend, &mut [0]);
    });
    with_tunnel(&urls, |requests| async move {
        let (response, _up) = send(&requests, switch("websocket"), false).await;
        let response = response.await.unwrap();
        assert_eq!((response.headers()[X_GW_UPGRADE].as_bytes(), response.headers().len()), (&b"websocket"[..], 2));
        let (response, _up) = send(&requests, switch("websocket"), false).await;
        assert_eq!(error_of(response).await.0, "GW_BACKEND_INVALID_RESPONSE");
        // A caller with a key of its own checks for itself.
        let mut request = switch("websocket");
        request.headers_mut().insert("sec-websocket-key", HeaderValue::from_static("x"));
        let (response, _up) = send(&requests, request, false).await;
        assert_eq!(response.await.unwrap().headers()["sec-websocket-accept"], "wrong");
    });
}

#[test]
fn what_is_no_switch_is_an_answer_or_an_error() {
    let urls = http1(|mut backend, _| {
        for answer in ["HTTP/1.1 403 No\r\nContent-Length: 2\r\n\r\nno", "HTTP/1.1 101 Yes\r\nUpgrade: bar\r\n\r\n"] {
            drop(request_head(&mut backend));
            backend.write_all(answer.as_bytes()).unwrap();
        }
    });
    let unasked = http1(|mut backend, _| {
        drop(request_head(&mut backend));
        backend.write_all(b"HTTP/1.1 101 Yes\r\nUpgrade: foo\r\n\r\n").unwrap();
    });
    with_tunnel(&urls, |requests| async move {
        let (response, _up) = send(&requests, switch("foo"), false).await;
        let mut response = response.await.unwrap();
        assert_eq!((response.status().as_u16(), response.headers().get(X_GW_UPGRADE)), (403, None));
        assert_eq!(body(response.body_mut()).await.unwrap(), "no");
    });
    let urls_of_another = http1(|mut backend, _| {
        drop(request_head(&mut backend));
        backend.write_all(b"HTTP/1.1 101 Yes\r\nUpgrade: bar\r\n\r\n").unwrap();
    });
    with_tunnel(&urls_of_another, |requests| async move {
        let (response, _up) = send(&requests, switch("foo"), false).await;
        let (code, message) = error_of(response).await;
        assert!(
            code == "GW_BACKEND_INVALID_RESPONSE" && message.contains("foo") && message.contains("bar"),
            "{message}"
        );
    });
    with_tunnel(&unasked, |requests| async move {
        let (response, _) = send(&requests, get("/"), true).await;
        assert_eq!(error_of(response).await.0, "GW_BACKEND_INVALID_RESPONSE");
    });
}

#[test]
fn http_2_backends_are_asked_for_protocols_their_own_way() {
    let echo = |request: Request<RecvStream>, mut respond: SendResponse<Bytes>, _| async move {
        assert_eq!(request.method(), Method::CONNECT);
        assert_eq!(request.extensions().get::<Protocol>().unwrap().as_str(), "websocket");
        assert!(!request.headers().contains_key("sec-websocket-key"));
        let mut sent = respond.send_response(Response::new(()), false).unwrap();
        let heard = body(&mut request.into_body()).await.unwrap();
        sent.send_data(Bytes::from(heard), true).unwrap();
    };
    let mut settings = h2::server::Builder::new();
    let able = http2(settings.enable_connect_protocol().clone(), echo);
    with_tunnel(&able, |requests| async move {
        let mut request = switch("websocket");
        request.headers_mut().insert("sec-websocket-key", HeaderValue::from_static("dGhlIHNhbXBsZSBub25jZQ=="));
        let (response, mut up) = send(&requests, request, false).await;
        let mut response = response.await.unwrap();
        assert_eq!(response.headers()[X_GW_UPGRADE], "websocket");
        assert_eq!(response.headers()["sec-websocket-accept"], "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
        up.send_data(Bytes::from_static(b"both ways"), true).unwrap();
        assert_eq!(body(response.body_mut()).await.unwrap(), "both ways");
    });
    let unable = http2(h2::server::Builder::new(), echo);
    with_tunnel(&unable, |requests| async move {
        let (response, _up) = send(&requests, switch("websocket"), false).await;
        let (code, message) = error_of(response).await;
        assert!(code == "GW_BACKEND_INVALID_RESPONSE" && message.contains("extended CONNECT"), "{message}");
    });
}

#[test]
fn what_a_backend_refuses_before_it_begins_is_tried_once_more_elsewhere() {
    let seen = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&seen);
    let urls = http2(h2::server::Builder::new(), move |request, mut respond, connection| {
        counted.fetch_add(1, Ordering::Relaxed);
        async move {
            if connection == 0 || request.uri().path() == "/never" {
                return respond.send_reset(Reason::REFUSED_STREAM);
            }
            respond.send_response(Response::new(()), true).unwrap();
        }
    });
    with_tunnel(&urls, |requests| async move {
        // Whatever the method: the backend says itself that it has done nothing.
        let post = Request::post(format!("https://{HOST}/")).body(()).unwrap();
        let (response, _) = send(&requests, post, true).await;
        assert_eq!(response.await.unwrap().status(), 200);
        assert_eq!(seen.load(Ordering::Relaxed), 2);
        let (response, _) = send(&requests, get("/never"), true).await;
        assert_eq!(error_of(response).await.0, "GW_BACKEND_RESET");
        assert_eq!(seen.load(Ordering::Relaxed), 4);
    });
}

#[test]
fn requests_share_connections_up_to_what_the_backend_allows() {
    let (most, held) = (Arc::new(AtomicUsize::new(0)), Arc::new(tokio::sync::Semaphore::new(0)));
    let (connections, hold) = (Arc::clone(&most), Arc::clone(&held));
    let mut settings = h2::server::Builder::new();
    let urls = http2(settings.max_concurrent_streams(4).clone(), move |_, mut respond, connection| {
        connections.fetch_max(connection + 1, Ordering::Relaxed);
        let hold = Arc::clone(&hold);
        async move {
            hold.acquire().await.unwrap().forget();
            respond.send_response(Response::new(()), true).unwrap();
        }
    });
    with_tunnel(&urls, |requests| async move {
        let mut responses = Vec::new();
        for _ in 0..10 {
            responses.push(send(&requests, get("/"), true).await.0);
        }
        while most.load(Ordering::Relaxed) < 3 {
            runtime::sleep(Duration::from_millis(1)).await;
        }
        held.add_permits(10);
        for response in responses {
            assert_eq!(response.await.unwrap().status(), 200);
        }
        assert_eq!(most.load(Ordering::Relaxed), 3);
    });
}

#[test]
fn a_caller_that_gives_up_ends_its_stream_and_no_other() {
    let (tell, ended) = mpsc::channel();
    let urls = http2(h2::server::Builder::new(), move |request, mut respond, connection| {
        let tell = tell.clone();
        async move {
            if request.uri().path() == "/waits" {
                let reason = std::future::poll_fn(|cx| respond.poll_reset(cx)).await.unwrap();
                return tell.send((reason, connection)).unwrap();
            }
            respond.send_response(Response::new(()), true).unwrap();
        }
    });
    with_tunnel(&urls, |requests| async move {
        let (first, mut upload) = send(&requests, get("/waits"), false).await;
        let (response, _) = send(&requests, get("/"), true).await;
        assert_eq!(response.await.unwrap().status(), 200);
        upload.send_reset(Reason::CANCEL);
        assert!(first.await.is_err());
        while ended.try_recv() != Ok((Reason::CANCEL, 0)) {
            runtime::sleep(Duration::from_millis(1)).await;
        }
        let (response, _) = send(&requests, get("/"), true).await;
        assert_eq!(response.await.unwrap().status(), 200);
    });
}

#[test]
fn a_caller_that_gives_up_is_noticed_behind_a_backend_that_does_not_read() {
    let (tell, ended) = mpsc::channel();
    let urls = http1(move |mut backend, _| {
        drop(request_head(&mut backend));
        backend.write_all(b"HTTP/1.1 101 Yes\r\nUpgrade: foo\r\n\r\n").unwrap();
        backend.shutdown(std::net::Shutdown::Write).unwrap();
        // Without reading: that the connection is gone shows as a hang-up.
        let mut watched = [rustix::event::PollFd::new(&backend, rustix::event::PollFlags::RDHUP)];
        while rustix::event::poll(&mut watched, None) == Err(rustix::io::Errno::INTR) {}
        tell.send(()).unwrap();
    });
    with_tunnel(&urls, |requests| async move {
        let (response, mut up) = send(&requests, switch("foo"), false).await;
        assert_eq!(body(response.await.unwrap().body_mut()).await.unwrap(), "");
        // More than sockets and windows hold.
        let flood = stream::send(&mut up, Bytes::from(vec![0; 64 << 20]), false);
        assert!(runtime::timeout(Duration::from_millis(500), flood).await.is_err());
        up.send_reset(Reason::CANCEL);
        while ended.try_recv().is_err() {
            runtime::sleep(Duration::from_millis(1)).await;
        }
    });
}

#[test]
fn cookies_that_came_apart_are_one_field() {
    let urls = http1(|mut backend, _| {
        let head = request_head(&mut backend);
        let text = field(&head, "cookie").unwrap();
        backend
            .write_all(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{text}", text.len()).as_bytes())
            .unwrap();
    });
    with_tunnel(&urls, |requests| async move {
        let mut request = get("/");
        request.headers_mut().append(COOKIE, HeaderValue::from_static("a=1"));
        request.headers_mut().append(COOKIE, HeaderValue::from_static("b=2"));
        let (response, _) = send(&requests, request, true).await;
        assert_eq!(body(response.await.unwrap().body_mut()).await.unwrap(), "a=1; b=2");
    });
}

#[test]
fn ambiguous_responses_are_refused() {
    for fields in [
        "Content-Length: 1\r\nContent-Length: 2",
        "Content-Length: 1\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: gzip, chunked",
    ] {
        let urls = http1(move |mut backend, _| {
            drop(request_head(&mut backend));
            backend.write_all(format!("HTTP/1.1 200 OK\r\n{fields}\r\n\r\n0\r\n\r\n").as_bytes()).unwrap();
        });
        with_tunnel(&urls, |requests| async move {
            let (response, _) = send(&requests, get("/"), true).await;
            assert_eq!(error_of(response).await.0, "GW_BACKEND_INVALID_RESPONSE", "{fields}");
        });
    }
}

#[test]
fn a_connection_on_which_a_body_may_follow_a_204_is_not_used_again() {
    let urls = http1(|mut backend, number| {
        while !request_head(&mut backend).is_empty() {
            let answer =
                format!("HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\nX-Connection: {number}\r\n\r\n");
            backend.write_all(answer.as_bytes()).unwrap();
        }
    });
    with_tunnel(&urls, |requests| async move {
        for number in ["0", "1"] {
            let (response, _) = send(&requests, get("/"), true).await;
            let response = response.await.unwrap();
            assert_eq!(
                (response.status().as_u16(), &response.headers()["x-connection"]),
                (204, &HeaderValue::from_static(number))
            );
        }
    });
}

#[test]
fn what_does_not_speak_http_2_is_told_apart() {
    let address = listen(|mut backend, _| {
        drop(backend.read(&mut [0; 24]));
        backend.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n").unwrap();
        while read(&mut backend, &mut [0; 100]) > 0 {}
    });
    with_tunnel(&[format!("h2c://{address}")], |requests| async move {
        let (response, _) = send(&requests, get("/"), true).await;
        let (code, message) = error_of(response).await;
        assert!(code == "GW_BACKEND_INVALID_RESPONSE" && message.contains("HTTP/2"), "{code}: {message}");
    });
}

/// A TLS server's configuration with a certificate of its own, which goes to `file` for who is to trust it.
fn tls(alpn: &[&[u8]], file: &std::path::Path) -> Arc<ServerConfig> {
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(vec!["localhost".to_owned()]).unwrap().self_signed(&key).unwrap();
    std::fs::write(file, certificate.pem()).unwrap();
    let mut config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], PrivateKeyDer::from(key))
        .unwrap();
    config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
    Arc::new(config)
}

/// Speaks what ALPN selects: answers requests of HTTP/2, and switches to an echo on request.
async fn speak_either(connection: TcpStream, config: Arc<ServerConfig>) {
    let socket = Socket::from_fd(connection.into()).unwrap();
    let stream = TlsStream::new(socket, ServerConnection::new(config).unwrap());
    if stream.handshake().await.is_err() {
        return;
    }
    if !stream.speaks(b"h2") {
        let mut heard = bytes::BytesMut::new();
        while !heard.ends_with(b"\r\n\r\n") {
            std::future::poll_fn(|cx| stream.poll_read_buf(cx, &mut heard)).await.unwrap();
        }
        let answer = b"HTTP/1.1 101 Yes\r\nUpgrade: foo\r\n\r\nHTTP/1.1 ";
        stream.write_all(&mut [std::io::IoSlice::new(answer)]).await.unwrap();
        stream.flush().await.unwrap();
        heard.clear();
        while std::future::poll_fn(|cx| stream.poll_read_buf(cx, &mut heard)).await.unwrap() > 0 {}
        stream.write_all(&mut [std::io::IoSlice::new(&heard)]).await.unwrap();
        return stream.close().await.unwrap();
    }
    let mut settings = h2::server::Builder::new();
    let settings = settings.enable_connect_protocol();
    let mut connection = settings.handshake::<_, Bytes>(Stream::Tls(stream)).await.unwrap();
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        runtime::spawn(async move {
            let mut sent = respond.send_response(Response::new(()), false).unwrap();
            let said = format!("HTTP/2 {} ", request.uri().scheme_str().unwrap());
            let heard = body(&mut request.into_body()).await.unwrap();
            sent.send_data(Bytes::from(said + &heard), true).unwrap();
        });
    }
}

#[test]
fn alpn_decides_and_other_protocols_prefer_http_1_1() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ca.pem");
    for (alpn, to_switched) in [(&[&b"h2"[..], b"http/1.1"][..], "HTTP/1.1 hello"), (&[b"h2"], "HTTP/2 https hello")] {
        let config = tls(alpn, &file);
        let address = listen(move |connection, _| {
            Driver::choose().unwrap().block_on(speak_either(connection, Arc::clone(&config))).unwrap();
        });
        let port = address.rsplit(':').next().unwrap();
        let toml = format!("urls = 'https://localhost:{port}'\nca_file = '{}'", file.display());
        let value = toml::Value::Table(toml.parse().unwrap());
        let backends = Backends::of_toml("test", &value, &mut Vec::new()).unwrap();
        with_tunnel_to(&backends, |requests| async move {
            for _ in 0..2 {
                let (response, _) = send(&requests, get("/"), true).await;
                assert_eq!(body(response.await.unwrap().body_mut()).await.unwrap(), "HTTP/2 https ");
                let (response, mut up) = send(&requests, switch("foo"), false).await;
                let mut response = response.await.unwrap();
                assert_eq!(response.headers()[X_GW_UPGRADE], "foo");
                up.send_data(Bytes::from_static(b"hello"), true).unwrap();
                assert_eq!(body(response.body_mut()).await.unwrap(), to_switched);
            }
        });
    }
}
