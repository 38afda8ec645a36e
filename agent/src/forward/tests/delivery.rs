//! What the gateway learns of how far a request has come: refusals of requests that were not sent,
//! and notices of acceptance.

use gw_bed::http1::ok;
use gw_shared::http::ResponseHead;

use super::*;

/// Sends requests to the backends at `urls` and asserts what their refusals say.
fn assert_refused(urls: &[String], code: &'static str, unsent: bool) {
    with_tunnel(urls, |gateway| async move {
        for request in [get("/"), post(Framing::None), upgrade("foo")] {
            let refusal = gateway.send(request).refusal().await;
            assert_refusal(&refusal, code, unsent);
        }
    });
}

#[test]
fn a_request_without_a_connection_was_not_sent() {
    let closed = ClosedPort::new();
    let address = closed.address;
    let directory = tempfile::tempdir().unwrap();
    for url in [
        format!("http://{address}"),
        format!("https://{address}"),
        format!("h2c://{address}"),
        "http://name.invalid".to_owned(),
        format!("unix:{}/none", directory.path().display()),
    ] {
        assert_refused(&[url], "GW_BACKEND_UNREACHABLE", true);
    }
}

#[test]
fn a_request_to_a_backend_of_another_protocol_was_not_sent() {
    let plain = http1_only();
    assert_refused(&[format!("https://{plain}")], "GW_BACKEND_TLS", true);
    let urls = [format!("h2c://{plain}")];
    assert_refused(&urls, "GW_BACKEND_INVALID_RESPONSE", true);
}

#[test]
fn a_request_whose_exchange_began_may_have_been_sent() {
    let urls = http1_backend(|mut backend, _| drop(request_head(&mut backend)));
    assert_refused(&urls, "GW_BACKEND_RESET", false);
    let urls = http1_backend(|mut backend, _| {
        drop(request_head(&mut backend));
        write(&mut backend, b"nonsense\r\n\r\n");
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
        write(&mut backend, ok(""));
        // Closing with unread bytes sends a reset.
        let interrupted = |error: std::io::Error| error.kind() == std::io::ErrorKind::Interrupted;
        while backend.peek(&mut [0]).is_err_and(interrupted) {}
    });
    with_tunnel(&[url], |gateway| async move {
        assert_eq!(gateway.send(get("/")).response().await.head.status, 200);
        let refusal = gateway.send(get("/")).refusal().await;
        assert_refusal(&refusal, "GW_BACKEND_UNREACHABLE", false);
    });
}

#[test]
fn an_upgrade_that_an_http_2_connection_cannot_carry_was_not_sent() {
    let urls = http2_backend(|_, _, _| async { panic!("a request arrived") });
    with_tunnel(&urls, |gateway| async move {
        let refusal = gateway.send(upgrade("websocket")).refusal().await;
        assert_refusal(&refusal, "GW_BACKEND_INVALID_RESPONSE", true);
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
            write(&mut backend, b"HTTP/1.1 100 Continue\r\n\r\n");
            let mut body = [0; 5];
            backend.read_exact(&mut body).unwrap();
            write(&mut backend, ok(body));
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
            exchange.upload("hello", true).await;
            assert_eq!(exchange.response().await.head.status, 200);
            assert_eq!(exchange.body().await.unwrap(), "hello");
        }
    });
}

#[test]
fn a_request_that_is_refused_unsent_gets_no_notice() {
    let closed = ClosedPort::new();
    with_tunnel(
        &[format!("http://{}", closed.address)],
        |gateway| async move {
            let exchange = gateway.send(awaiting(post(Framing::Length(5))));
            match exchange.down.receive().await.unwrap() {
                ReceivedPart::Head(Kind::Refused, payload) => {
                    assert!(head::parse_refusal(payload).unwrap().unsent);
                }
                other => panic!("{other:?}"),
            }
        },
    );
}

#[test]
fn a_request_that_is_sent_again_gets_one_notice() {
    let urls = http2_backend(move |_, mut respond, connection| async move {
        if connection == 0 {
            return respond.send_reset(Reason::REFUSED_STREAM);
        }
        respond.send_response(Response::new(()), true).unwrap();
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(awaiting(post(Framing::Chunked)));
        assert!(is_notice(&exchange.interim().await));
        // No other notice comes before it.
        assert_eq!(exchange.response().await.head.status, 200);
    });
}
