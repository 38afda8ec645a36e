//! Backends that select the HTTP version by ALPN.

use super::*;

/// A TLS server configuration with a self-signed certificate, which is written to `file`.
pub(in crate::forward) fn tls(alpn: &[&[u8]], file: &std::path::Path) -> Arc<ServerConfig> {
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(vec!["localhost".to_owned()])
        .unwrap()
        .self_signed(&key)
        .unwrap();
    std::fs::write(file, certificate.pem()).unwrap();
    let identity = (certificate.der().clone(), PrivateKeyDer::from(key));
    Arc::new(gw_bed::tls::server(identity, alpn))
}

/// Serves the HTTP version that ALPN selected: upgrades HTTP/1.1 to an echo protocol, and echoes
/// bodies over HTTP/2.
async fn speak_either(connection: TcpStream, config: Arc<ServerConfig>) {
    let Some(stream) = accept_tls(connection, config).await else {
        return;
    };
    if !stream.speaks(b"h2") {
        receive_tls(&stream, b"\r\n\r\n").await;
        send_tls(
            &stream,
            b"HTTP/1.1 101 Yes\r\nUpgrade: foo\r\n\r\nHTTP/1.1 ",
        )
        .await;
        let mut received = bytes::BytesMut::new();
        while std::future::poll_fn(|cx| stream.poll_read_buf(cx, &mut received))
            .await
            .unwrap()
            > 0
        {}
        stream
            .write_all(&mut [std::io::IoSlice::new(&received)])
            .await
            .unwrap();
        return stream.close().await.unwrap();
    }
    let mut settings = h2::server::Builder::new();
    let settings = settings.enable_connect_protocol();
    let mut connection = settings
        .handshake::<_, Bytes>(BackendStream::Tls(stream))
        .await
        .unwrap();
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

/// The backend at `address`, whose certificate is in `file`.
fn backends_at(address: &str, file: &std::path::Path, options: &str) -> Backends {
    let port = address.rsplit(':').next().unwrap();
    backends(&format!(
        "urls = 'https://localhost:{port}'\nca_file = '{}'\n{options}",
        file.display()
    ))
}

#[test]
fn a_connection_ends_with_a_closure_alert() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ca.pem");
    let config = tls(&[b"http/1.1"], &file);
    let (sender, ends) = mpsc::channel();
    let address = listen(move |connection, _| {
        let serve = async {
            let socket = Socket::from_fd(connection.into()).unwrap();
            let session = UnbufferedServerConnection::new(Arc::clone(&config)).unwrap();
            let stream = TlsStream::new(socket, session);
            stream.handshake().await.unwrap();
            let mut received = bytes::BytesMut::new();
            let mut receive =
                async || std::future::poll_fn(|cx| stream.poll_read_buf(cx, &mut received)).await;
            receive().await.unwrap();
            let answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
            send_tls(&stream, answer).await;
            // Without the alert, the end is an error.
            sender
                .send(receive().await.map_err(|error| error.kind()))
                .unwrap();
        };
        Driver::choose().unwrap().block_on(serve).unwrap();
    });
    with_tunnel_to(&backends_at(&address, &file, ""), |gateway| async move {
        assert_eq!(gateway.send(get("/")).response().await.head.status, 200);
        let end = loop {
            match ends.try_recv() {
                Ok(end) => break end,
                Err(_) => runtime::sleep(Duration::from_millis(1)).await,
            }
        };
        assert_eq!(end, Ok(0));
    });
}

#[test]
fn alpn_selects_the_version_and_upgrades_prefer_http_1_1() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ca.pem");
    for (alpn, after_upgrade) in [
        (&[&b"h2"[..], b"http/1.1"][..], "HTTP/1.1 hello"),
        (&[b"h2"], "HTTP/2 https hello"),
    ] {
        let config = tls(alpn, &file);
        let address = listen(move |connection, _| {
            Driver::choose()
                .unwrap()
                .block_on(speak_either(connection, Arc::clone(&config)))
                .unwrap();
        });
        with_tunnel_to(&backends_at(&address, &file, ""), |gateway| async move {
            for _ in 0..2 {
                let exchange = gateway.send(get("/"));
                exchange.response().await;
                assert_eq!(exchange.body().await.unwrap(), "HTTP/2 https ");
                let exchange = gateway.send(upgrade("foo"));
                assert_eq!(exchange.response().await.head.headers["upgrade"], "foo");
                exchange
                    .up
                    .send(Bytes::from_static(b"hello"), true)
                    .await
                    .unwrap();
                assert_eq!(exchange.body().await.unwrap(), after_upgrade);
            }
        });
    }
}

/// A backend that refuses requests with bodies over HTTP/2, and answers each one over HTTP/1.1.
async fn require_http1(connection: TcpStream, config: Arc<ServerConfig>) {
    let Some(stream) = accept_tls(connection, config).await else {
        return;
    };
    if stream.speaks(b"h2") {
        let mut connection = h2::server::handshake(BackendStream::Tls(stream))
            .await
            .unwrap();
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
    send_tls(
        &stream,
        b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nHTTP/1.1",
    )
    .await;
    let mut received = bytes::BytesMut::new();
    while std::future::poll_fn(|cx| stream.poll_read_buf(cx, &mut received))
        .await
        .is_ok_and(|read| read > 0)
    {}
}

#[test]
fn a_request_for_which_the_backend_requires_http_1_1_is_sent_again_over_it() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ca.pem");
    let config = tls(&[b"h2", b"http/1.1"], &file);
    let address = listen(move |connection, _| {
        Driver::choose()
            .unwrap()
            .block_on(require_http1(connection, Arc::clone(&config)))
            .unwrap();
    });
    with_tunnel_to(&backends_at(&address, &file, ""), |gateway| async move {
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
    let only_http2 = backends_at(&address, &file, "http_version = '2'");
    with_tunnel_to(&only_http2, |gateway| async move {
        let exchange = gateway.send(post(Framing::Chunked));
        exchange
            .up
            .send(Bytes::from_static(b"x"), true)
            .await
            .unwrap();
        let (_, refusal) = exchange.error().await;
        assert!(refusal.contains("requires HTTP/1.1"), "{refusal}");
    });
}

#[test]
fn the_version_can_be_set() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ca.pem");
    let start = |alpn: &[&[u8]]| {
        let config = tls(alpn, &file);
        listen(move |connection, _| {
            Driver::choose()
                .unwrap()
                .block_on(speak_either(connection, Arc::clone(&config)))
                .unwrap();
        })
    };
    let address = start(&[b"h2", b"http/1.1"]);
    let http1 = backends_at(&address, &file, "http_version = '1.1'");
    with_tunnel_to(&http1, |gateway| async move {
        let exchange = gateway.send(upgrade("foo"));
        exchange.response().await;
        exchange.up.finish().unwrap();
        assert_eq!(exchange.body().await.unwrap(), "HTTP/1.1 ");
    });
    let http2 = backends_at(&address, &file, "http_version = '2'");
    with_tunnel_to(&http2, |gateway| async move {
        let exchange = gateway.send(upgrade("foo"));
        exchange.response().await;
        exchange.up.finish().unwrap();
        assert_eq!(exchange.body().await.unwrap(), "HTTP/2 https ");
    });
    let http2 = backends_at(&start(&[]), &file, "http_version = '2'");
    with_tunnel_to(&http2, |gateway| async move {
        let (_, refusal) = gateway.send(get("/")).error().await;
        assert!(refusal.contains("does not select HTTP/2"), "{refusal}");
    });
}
