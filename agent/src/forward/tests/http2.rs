//! Backends that speak HTTP/2.

use super::*;

#[test]
fn interim_responses_and_trailers_are_relayed() {
    let urls = http2_backend(
        h2::server::Builder::new(),
        |request, mut respond, _| async move {
            assert_eq!(
                (
                    request.uri().scheme_str(),
                    request.headers()["te"].as_bytes()
                ),
                (Some("http"), &b"trailers"[..])
            );
            // HTTP/2 has no `Connection` (RFC 9113 §8.2.2).
            assert!(!request.headers().contains_key("connection"));
            assert_eq!(request.uri().authority().unwrap(), HOST);
            respond
                .send_informational(
                    Response::builder()
                        .status(103)
                        .header("link", "</a>")
                        .body(())
                        .unwrap(),
                )
                .unwrap();
            let mut sent = respond.send_response(Response::new(()), false).unwrap();
            let text = read_body(&mut request.into_body()).await;
            sent.send_data(Bytes::from(text), false).unwrap();
            sent.send_trailers(http::HeaderMap::from_iter([(
                "grpc-status".parse().unwrap(),
                HeaderValue::from_static("0"),
            )]))
            .unwrap();
        },
    );
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(with_field(post(Framing::Chunked), "te", "trailers"));
        let interim = exchange.interim().await;
        assert_eq!(
            (interim.status.as_u16(), &interim.headers["link"]),
            (103, &HeaderValue::from_static("</a>"))
        );
        // The response begins before the request has ended.
        assert_eq!(exchange.response().await.head.framing, Framing::Chunked);
        exchange
            .up
            .send(Bytes::from_static(b"hello"), true)
            .await
            .unwrap();
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
    let urls = http2_backend(
        settings.max_concurrent_streams(4).clone(),
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
    let urls = http2_backend(
        h2::server::Builder::new(),
        move |request, mut respond, connection| {
            let sender = sender.clone();
            async move {
                if request.uri().path() == "/waits" {
                    let reason = std::future::poll_fn(|cx| respond.poll_reset(cx))
                        .await
                        .unwrap();
                    return sender.send((reason, connection)).unwrap();
                }
                respond.send_response(Response::new(()), true).unwrap();
            }
        },
    );
    with_tunnel(&urls, |gateway| async move {
        let first = gateway.send(get("/waits"));
        assert_eq!(gateway.send(get("/")).response().await.head.status, 200);
        first.up.reset();
        while ended.try_recv() != Ok((Reason::CANCEL, 0)) {
            runtime::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(gateway.send(get("/")).response().await.head.status, 200);
    });
}

#[test]
fn backend_that_does_not_speak_http_2_is_reported() {
    let address = listen(|mut backend, _| {
        drop(backend.read(&mut [0; 24]));
        backend
            .write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            .unwrap();
        while read(&mut backend, &mut [0; 100]) > 0 {}
    });
    with_tunnel(&[format!("h2c://{address}")], |gateway| async move {
        let (code, message) = gateway.send(get("/")).error().await;
        assert!(
            code == "GW_BACKEND_INVALID_RESPONSE" && message.contains("HTTP/2"),
            "{code}: {message}"
        );
    });
}
