//! Backends that select the HTTP version by ALPN.

use super::*;

/// Serves the HTTP version that ALPN selected: upgrades HTTP/1.1 to an echo protocol, and echoes
/// bodies over HTTP/2.
async fn speak_either(stream: TlsStream) {
    if !stream.speaks(b"h2") {
        receive_tls(&stream, b"\r\n\r\n").await;
        let switch = b"HTTP/1.1 101 Yes\r\nUpgrade: foo\r\n\r\nHTTP/1.1 ";
        send_tls(&stream, switch).await;
        let mut received = BytesMut::new();
        while receive_some(&stream, &mut received).await.unwrap() > 0 {}
        send_tls(&stream, &received).await;
        return stream.close().await.unwrap();
    }
    let mut settings = h2::server::Builder::new();
    let settings = settings.enable_connect_protocol();
    let stream = BackendStream::Tls(stream);
    let mut connection = settings.handshake::<_, Bytes>(stream).await.unwrap();
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        runtime::spawn(async move {
            let mut sent = respond.send_response(Response::new(()), false).unwrap();
            let prefix = format!("HTTP/2 {} ", request.uri().scheme_str().unwrap());
            let received = read_body(&mut request.into_body()).await;
            sent.send_data(Bytes::from(prefix + &received), true)
                .unwrap();
        });
    }
}

#[test]
fn a_connection_ends_with_a_closure_alert() {
    let (sender, ends) = mpsc::channel();
    let backend = TlsBackend::serving(&[b"http/1.1"], move |stream| {
        let sender = sender.clone();
        async move {
            let mut received = BytesMut::new();
            receive_some(&stream, &mut received).await.unwrap();
            let answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
            send_tls(&stream, answer).await;
            // Without the alert, the end is an error.
            let end = receive_some(&stream, &mut received).await;
            sender.send(end.map_err(|error| error.kind())).unwrap();
        }
    });
    with_tunnel_to(&backend.with(""), |gateway| async move {
        assert_eq!(gateway.send(get("/")).response().await.head.status, 200);
        assert_eq!(received(&ends).await, Ok(0));
    });
}

#[test]
fn alpn_selects_the_version_and_upgrades_prefer_http_1_1() {
    for (alpn, after_upgrade) in [
        (&[&b"h2"[..], b"http/1.1"][..], "HTTP/1.1 hello"),
        (&[b"h2"], "HTTP/2 https hello"),
    ] {
        let backend = TlsBackend::serving(alpn, speak_either);
        with_tunnel_to(&backend.with(""), |gateway| async move {
            for _ in 0..2 {
                let exchange = gateway.send(get("/"));
                exchange.response().await;
                assert_eq!(exchange.body().await.unwrap(), "HTTP/2 https ");
                let exchange = gateway.send(upgrade("foo"));
                assert_eq!(exchange.response().await.head.headers["upgrade"], "foo");
                exchange.upload("hello", true).await;
                assert_eq!(exchange.body().await.unwrap(), after_upgrade);
            }
        });
    }
}

/// A backend that refuses requests with bodies over HTTP/2, and answers each one over HTTP/1.1.
async fn require_http1(stream: TlsStream) {
    if stream.speaks(b"h2") {
        let stream = BackendStream::Tls(stream);
        let mut connection = h2::server::handshake(stream).await.unwrap();
        while let Some(Ok((request, mut respond))) = connection.accept().await {
            runtime::spawn(async move {
                if request.method() == Method::GET {
                    respond.send_response(Response::new(()), true).unwrap();
                } else {
                    read_body(&mut request.into_body()).await;
                    respond.send_reset(Reason::HTTP_1_1_REQUIRED);
                }
            });
        }
        return;
    }
    receive_tls(&stream, b"0\r\n\r\n").await;
    send_tls(&stream, &gw_bed::http1::ok("HTTP/1.1")).await;
    let end = &mut BytesMut::new();
    while receive_some(&stream, end).await.is_ok_and(|read| read > 0) {}
}

#[test]
fn a_request_for_which_the_backend_requires_http_1_1_is_sent_again_over_it() {
    let backend = TlsBackend::serving(&[b"h2", b"http/1.1"], require_http1);
    with_tunnel_to(&backend.with(""), |gateway| async move {
        let post = async |length| {
            let exchange = gateway.send(post(Framing::Chunked));
            let body = Bytes::from(vec![b'x'; length]);
            exchange.up.send(body, true).await.unwrap();
            exchange
        };
        for _ in 0..2 {
            let exchange = post(1000).await;
            assert_eq!(exchange.response().await.head.status, 200);
            assert_eq!(exchange.body().await.unwrap(), "HTTP/1.1");
            // The backend is not remembered.
            let exchange = gateway.send(get("/"));
            assert_eq!(exchange.response().await.head.status, 200);
            assert_eq!(exchange.body().await.unwrap(), "");
        }
        // More than is kept.
        let exchange = post(100_000).await;
        let (_, refusal) = exchange.error().await;
        assert!(refusal.contains("http_version = \"1.1\""), "{refusal}");
    });
    with_tunnel_to(&backend.with("http_version = '2'"), |gateway| async move {
        let exchange = gateway.send(post(Framing::Chunked));
        exchange.upload("x", true).await;
        let (_, refusal) = exchange.error().await;
        assert!(refusal.contains("requires HTTP/1.1"), "{refusal}");
    });
}

#[test]
fn the_version_can_be_set() {
    let backend = TlsBackend::serving(&[b"h2", b"http/1.1"], speak_either);
    for (options, body) in [
        ("http_version = '1.1'", "HTTP/1.1 "),
        ("http_version = '2'", "HTTP/2 https "),
    ] {
        with_tunnel_to(&backend.with(options), |gateway| async move {
            let exchange = gateway.send(upgrade("foo"));
            exchange.response().await;
            exchange.up.finish().unwrap();
            assert_eq!(exchange.body().await.unwrap(), body);
        });
    }
}

#[test]
fn a_backend_that_does_not_select_the_version_that_is_set_is_refused() {
    let backend = TlsBackend::serving(&[], speak_either);
    with_tunnel_to(&backend.with("http_version = '2'"), |gateway| async move {
        let (_, refusal) = gateway.send(get("/")).error().await;
        assert!(refusal.contains("does not select HTTP/2"), "{refusal}");
    });
}
