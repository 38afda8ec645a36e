//! Backends that speak HTTP/2.

use super::*;

#[test]
fn interim_responses_and_trailers_are_relayed() {
    let urls = http2_backend(|request, mut respond, _| async move {
        assert_eq!(request.uri().scheme_str(), Some("http"));
        assert_eq!(request.headers()["te"], "trailers");
        // HTTP/2 has no `Connection` (RFC 9113 §8.2.2).
        assert!(!request.headers().contains_key("connection"));
        assert_eq!(request.uri().authority().unwrap(), HOST);
        let interim = Response::builder().status(103).header("link", "</a>");
        let interim = interim.body(()).unwrap();
        respond.send_informational(interim).unwrap();
        let mut sent = respond.send_response(Response::new(()), false).unwrap();
        let text = read_body(&mut request.into_body()).await;
        sent.send_data(Bytes::from(text), false).unwrap();
        let status = ("grpc-status".parse().unwrap(), HeaderValue::from(0));
        sent.send_trailers(http::HeaderMap::from_iter([status]))
            .unwrap();
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(with_field(post(Framing::Chunked), "te", "trailers"));
        let interim = exchange.interim().await;
        assert_eq!(interim.status, 103);
        assert_eq!(interim.headers["link"], "</a>");
        // The response begins before the request has ended.
        assert_eq!(exchange.response().await.head.framing, Framing::Chunked);
        exchange.upload("hello", true).await;
        assert_eq!(exchange.bytes(5).await, b"hello");
        let part = exchange.down.receive().await;
        assert!(
            matches!(
                &part,
                Ok(ReceivedPart::Head(Kind::Trailers, lines)) if lines == "grpc-status: 0\r\n\r\n"
            ),
            "{part:?}"
        );
        assert!(matches!(
            exchange.down.receive().await,
            Ok(ReceivedPart::End)
        ));
    });
}

#[test]
fn requests_share_connections_up_to_the_backends_stream_limit() {
    let most = Arc::new(AtomicUsize::new(0));
    let held = Arc::new(tokio::sync::Semaphore::new(0));
    let connections = Arc::clone(&most);
    let hold = Arc::clone(&held);
    let mut settings = h2::server::Builder::new();
    let urls = http2_backend_with(
        settings.max_concurrent_streams(4),
        move |_, mut respond, connection| {
            connections.fetch_max(connection + 1, Ordering::Relaxed);
            let hold = Arc::clone(&hold);
            async move {
                hold.acquire().await.unwrap().forget();
                respond.send_response(Response::new(()), true).unwrap();
            }
        },
    );
    with_tunnel(&urls, |gateway| async move {
        let exchanges = [(); 10].map(|()| gateway.send(get("/")));
        while most.load(Ordering::Relaxed) < 3 {
            runtime::sleep(Duration::from_millis(1)).await;
        }
        held.add_permits(10);
        for exchange in exchanges {
            assert_eq!(exchange.response().await.head.status, 200);
        }
        assert_eq!(most.load(Ordering::Relaxed), 3);
    });
}

#[test]
fn reset_by_the_caller_ends_only_its_own_stream() {
    let (sender, ended) = mpsc::channel();
    let urls = http2_backend(move |request, mut respond, connection| {
        let sender = sender.clone();
        async move {
            if request.uri().path() == "/waits" {
                let reset = std::future::poll_fn(|cx| respond.poll_reset(cx)).await;
                return sender.send((reset.unwrap(), connection)).unwrap();
            }
            respond.send_response(Response::new(()), true).unwrap();
        }
    });
    with_tunnel(&urls, |gateway| async move {
        let first = gateway.send(get("/waits"));
        assert_eq!(gateway.send(get("/")).response().await.head.status, 200);
        first.up.reset();
        assert_eq!(received(&ended).await, (Reason::CANCEL, 0));
        assert_eq!(gateway.send(get("/")).response().await.head.status, 200);
    });
}

#[test]
fn backend_that_does_not_speak_http_2_is_reported() {
    with_tunnel(&[format!("h2c://{}", http1_only())], |gateway| async move {
        let exchange = gateway.send(get("/"));
        exchange
            .assert_error("GW_BACKEND_INVALID_RESPONSE", "HTTP/2")
            .await;
    });
}
