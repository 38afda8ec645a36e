//! What the gateway learns of how far a request has come: refusals of requests that were not sent,
//! and notices of acceptance.

use gw_shared::http::ResponseHead;

use super::*;

/// A port that refuses connections until it is dropped.
struct ClosedPort(rustix::fd::OwnedFd, std::net::SocketAddr);

impl ClosedPort {
    fn new() -> Self {
        // Bound but not listening.
        let socket = rustix::net::socket(
            rustix::net::AddressFamily::INET,
            rustix::net::SocketType::STREAM,
            None,
        )
        .unwrap();
        rustix::net::bind(&socket, &std::net::SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address =
            std::net::SocketAddr::try_from(rustix::net::getsockname(&socket).unwrap()).unwrap();
        Self(socket, address)
    }
}

/// Sends requests to the backends at `urls` and asserts what their refusals say.
fn assert_refused(urls: &[String], code: &'static str, unsent: bool) {
    with_tunnel(urls, |gateway| async move {
        for request in [get("/"), post(Framing::None), upgrade("foo")] {
            let refusal = gateway.send(request).refusal().await;
            assert_eq!(
                (&refusal.code[..], refusal.unsent),
                (code.as_bytes(), unsent)
            );
        }
    });
}

#[test]
fn a_request_without_a_connection_was_not_sent() {
    let closed = ClosedPort::new();
    for url in ["http", "https", "h2c"].map(|scheme| format!("{scheme}://{}", closed.1)) {
        assert_refused(&[url], "GW_BACKEND_UNREACHABLE", true);
    }
    assert_refused(
        &["http://name.invalid".to_owned()],
        "GW_BACKEND_UNREACHABLE",
        true,
    );
    let directory = tempfile::tempdir().unwrap();
    assert_refused(
        &[format!("unix:{}/none", directory.path().display())],
        "GW_BACKEND_UNREACHABLE",
        true,
    );
    // Neither TLS nor HTTP/2.
    let plain = listen(|mut backend, _| {
        drop(backend.read(&mut [0; 24]));
        backend
            .write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            .unwrap();
        while read(&mut backend, &mut [0; 100]) > 0 {}
    });
    assert_refused(&[format!("https://{plain}")], "GW_BACKEND_TLS", true);
    assert_refused(
        &[format!("h2c://{plain}")],
        "GW_BACKEND_INVALID_RESPONSE",
        true,
    );
    drop(closed.0);
}

#[test]
fn a_request_whose_exchange_began_may_have_been_sent() {
    let urls = http1_backend(|mut backend, _| drop(request_head(&mut backend)));
    assert_refused(&urls, "GW_BACKEND_RESET", false);
    let urls = http1_backend(|mut backend, _| {
        drop(request_head(&mut backend));
        backend.write_all(b"nonsense\r\n\r\n").unwrap();
    });
    assert_refused(&urls, "GW_BACKEND_INVALID_RESPONSE", false);
}

/// The first connection may have received the request.
#[test]
fn a_retry_without_a_connection_may_have_been_sent() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        let mut backend = listener.accept().unwrap().0;
        request_head(&mut backend);
        drop(listener);
        backend
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            .unwrap();
        // Closing with unread bytes sends a reset.
        while backend
            .peek(&mut [0])
            .is_err_and(|error| error.kind() == std::io::ErrorKind::Interrupted)
        {}
    });
    with_tunnel(&[url], |gateway| async move {
        assert_eq!(gateway.send(get("/")).response().await.head.status, 200);
        let refusal = gateway.send(get("/")).refusal().await;
        assert_eq!(
            (&refusal.code[..], refusal.unsent),
            (&b"GW_BACKEND_UNREACHABLE"[..], false)
        );
    });
}

#[test]
fn an_upgrade_that_an_http_2_connection_cannot_carry_was_not_sent() {
    let urls = http2_backend(h2::server::Builder::new(), |_, _, _| async {
        panic!("a request arrived")
    });
    with_tunnel(&urls, |gateway| async move {
        let refusal = gateway.send(upgrade("websocket")).refusal().await;
        assert_eq!(
            (&refusal.code[..], refusal.unsent),
            (&b"GW_BACKEND_INVALID_RESPONSE"[..], true)
        );
        // The gateway may have sent what follows a notice.
        let exchange = gateway.send(awaiting(upgrade("websocket")));
        assert!(is_notice(&exchange.interim().await));
        assert!(!exchange.refusal().await.unsent);
    });
}

fn awaiting(request: OutboundRequest) -> OutboundRequest {
    with_field(request, "x-gw-await-acceptance", "1")
}

fn is_notice(interim: &ResponseHead) -> bool {
    interim.status == StatusCode::CONTINUE && head::is_acceptance(interim)
}

#[test]
fn acceptance_is_noticed_before_the_request_is_sent_and_not_to_the_backend() {
    let (go_on, may_go_on) = mpsc::channel::<()>();
    let may_go_on = std::sync::Mutex::new(may_go_on);
    let urls = http1_backend(move |mut backend, _| {
        while let head = request_head(&mut backend)
            && !head.is_empty()
        {
            assert!(!head.contains("x-gw-await-acceptance"), "{head}");
            // Only after the notice, so it does not come from here.
            may_go_on.lock().unwrap().recv().unwrap();
            backend.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").unwrap();
            let mut body = [0; 5];
            backend.read_exact(&mut body).unwrap();
            backend
                .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
                .unwrap();
            backend.write_all(&body).unwrap();
        }
    });
    with_tunnel(&urls, |gateway| async move {
        // The second request is sent on the connection of the first.
        for _ in 0..2 {
            let exchange = gateway.send(awaiting(post(Framing::Length(5))));
            assert!(is_notice(&exchange.interim().await));
            go_on.send(()).unwrap();
            let of_backend = exchange.interim().await;
            assert!(of_backend.status == StatusCode::CONTINUE && !is_notice(&of_backend));
            exchange
                .up
                .send(Bytes::from_static(b"hello"), true)
                .await
                .unwrap();
            assert_eq!(exchange.response().await.head.status, 200);
            assert_eq!(exchange.body().await.unwrap(), "hello");
        }
    });
}

#[test]
fn a_request_that_is_refused_unsent_gets_no_notice() {
    let closed = ClosedPort::new();
    with_tunnel(&[format!("http://{}", closed.1)], |gateway| async move {
        let exchange = gateway.send(awaiting(post(Framing::Length(5))));
        match exchange.down.receive().await.unwrap() {
            ReceivedPart::Head(Kind::Refused, payload) => {
                assert!(head::parse_refusal(payload).unwrap().unsent);
            }
            other => panic!("{other:?}"),
        }
    });
    drop(closed.0);
}

#[test]
fn a_request_that_is_sent_again_gets_one_notice() {
    let urls = http2_backend(
        h2::server::Builder::new(),
        move |_, mut respond, connection| async move {
            if connection == 0 {
                return respond.send_reset(Reason::REFUSED_STREAM);
            }
            respond.send_response(Response::new(()), true).unwrap();
        },
    );
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(awaiting(post(Framing::Chunked)));
        assert!(is_notice(&exchange.interim().await));
        // No other notice comes before it.
        assert_eq!(exchange.response().await.head.status, 200);
    });
}
