//! Request bodies that are longer than their responses.

use gw_bed::threads::Peer;
use tokio::sync::mpsc::unbounded_channel;

use super::connections::TlsBackend;
use super::tunnel::{Exchange, Gateway};
use super::*;

/// More than the credit of a stream, the buffers of a socket and the window of an HTTP/2 stream
/// hold together.
const BODY: usize = 16 * 1024 * 1024;

const EARLY: &[u8] = b"HTTP/1.1 202 Accepted\r\nContent-Length: 2\r\n\r\nok";

/// Sends `length` bytes in pieces, until they are sent or the agent takes no more. Returns whether
/// they were sent.
async fn upload(exchange: &Exchange, length: usize) -> bool {
    let piece = Bytes::from(vec![b'x'; 64 * 1024]);
    for at in (0..length).step_by(piece.len()) {
        let last = at + piece.len() >= length;
        if exchange.up.send(piece.clone(), last).await.is_err() {
            return false;
        }
    }
    true
}

async fn uploaded(exchange: &Exchange) -> u64 {
    let uploaded = std::future::poll_fn(|cx| exchange.down.poll_uploaded(cx)).await;
    uploaded.unwrap().unwrap()
}

/// Sends a body after its response was read whole.
async fn upload_after_the_response(gateway: &Gateway) {
    let exchange = gateway.send(post(Framing::Length(BODY as u64)));
    assert_eq!(exchange.response().await.head.status, 202);
    assert_eq!(exchange.body().await.unwrap(), "ok");
    assert!(upload(&exchange, BODY).await);
    assert_eq!(uploaded(&exchange).await, BODY as u64);
}

/// Answers before it reads the body. Returns whether the body arrives.
fn answer_early(backend: &mut (impl Read + Write)) -> bool {
    backend.write_all(EARLY).unwrap();
    let mut body = vec![0; BODY];
    backend.read_exact(&mut body).unwrap();
    body.iter().all(|byte| *byte == b'x')
}

/// Answers with `status` and `body` over HTTP/2.
fn respond_with(respond: &mut SendResponse<Bytes>, status: u16, body: &'static str) {
    let response = Response::builder().status(status).body(()).unwrap();
    let mut sent = respond.send_response(response, false).unwrap();
    sent.send_data(Bytes::from_static(body.as_bytes()), true)
        .unwrap();
}

#[test]
fn a_backend_that_answers_early_gets_the_whole_body() {
    let (received, mut at_backend) = unbounded_channel();
    let urls = http1_backend(move |mut backend, _| {
        while !request_head(&mut backend).is_empty() {
            received.send(answer_early(&mut backend)).unwrap();
        }
    });
    with_tunnel(&urls, |gateway| async move {
        // The second request reuses the connection.
        for _ in 0..2 {
            upload_after_the_response(&gateway).await;
            assert!(at_backend.recv().await.unwrap());
        }
    });
}

#[test]
fn a_backend_that_ends_its_response_by_closing_one_direction_gets_the_whole_body() {
    let (received, mut at_backend) = unbounded_channel();
    let urls = http1_backend(move |mut backend, _| {
        drop(request_head(&mut backend));
        write(&mut backend, b"HTTP/1.1 202 Accepted\r\n\r\nok");
        backend.shutdown(std::net::Shutdown::Write).unwrap();
        let mut body = Vec::new();
        backend.read_to_end(&mut body).unwrap();
        received.send(body.len()).unwrap();
    });
    with_tunnel(&urls, |gateway| async move {
        upload_after_the_response(&gateway).await;
        assert_eq!(at_backend.recv().await.unwrap(), BODY);
    });
}

#[test]
fn an_http2_backend_that_answers_early_gets_the_whole_body() {
    let (received, mut at_backend) = unbounded_channel();
    let urls = http2_backend(move |request, mut respond, _| {
        let received = received.clone();
        async move {
            respond_with(&mut respond, 202, "ok");
            let body = read_body(&mut request.into_body()).await;
            received.send(body.len()).unwrap();
        }
    });
    with_tunnel(&urls, |gateway| async move {
        upload_after_the_response(&gateway).await;
        assert_eq!(at_backend.recv().await.unwrap(), BODY);
    });
}

#[test]
fn a_tls_backend_that_answers_early_gets_the_whole_body() {
    let (received, mut at_backend) = unbounded_channel();
    let backend = TlsBackend::start(&[b"http/1.1"], move |connection, config| {
        let session = rustls::ServerConnection::new(config).unwrap();
        let mut backend = Peer::new(rustls::StreamOwned::new(session, connection));
        backend.raw_head().unwrap();
        received.send(answer_early(&mut backend.stream)).unwrap();
    });
    with_tunnel_to(&backend.with(""), |gateway| async move {
        upload_after_the_response(&gateway).await;
        assert!(at_backend.recv().await.unwrap());
    });
}

#[test]
fn the_rest_of_a_body_is_discarded_once_a_backend_reads_no_more() {
    let urls = http1_backend(|mut backend, _| {
        drop(request_head(&mut backend));
        let answer = "HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno";
        write(&mut backend, answer);
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(post(Framing::Chunked));
        assert!(!upload(&exchange, usize::MAX / 2).await);
        assert_eq!(exchange.response().await.head.status, 413);
        assert_eq!(exchange.body().await.unwrap(), "no");
        uploaded(&exchange).await;
    });
}

#[test]
fn a_reset_without_an_error_by_an_http2_backend_ends_the_body_at_once() {
    let urls = http2_backend(|request, mut respond, _| async move {
        respond_with(&mut respond, 413, "no");
        // Dropped with an unread body: RST_STREAM with NO_ERROR (RFC 9113 §8.1).
        drop(request);
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(post(Framing::Chunked));
        assert_eq!(exchange.response().await.head.status, 413);
        assert_eq!(exchange.body().await.unwrap(), "no");
        // The caller sends nothing.
        assert_eq!(uploaded(&exchange).await, 0);
    });
}

#[test]
fn a_reset_by_the_gateway_after_the_response_reaches_the_backend() {
    let (ended, mut at_backend) = unbounded_channel();
    let urls = http1_backend(move |mut backend, _| {
        drop(request_head(&mut backend));
        write(&mut backend, EARLY);
        let mut body = Vec::new();
        let end = backend.read_to_end(&mut body).map(|_| body.len());
        ended.send(end.map_err(|error| error.kind())).unwrap();
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(post(Framing::Length(BODY as u64)));
        assert_eq!(exchange.response().await.head.status, 202);
        assert_eq!(exchange.body().await.unwrap(), "ok");
        exchange.upload("part", false).await;
        exchange.up.reset();
        assert_eq!(
            at_backend.recv().await.unwrap(),
            Err(std::io::ErrorKind::ConnectionReset)
        );
    });
}
