//! Upgrades to other protocols.

use super::*;

#[test]
fn any_protocol_is_relayed_and_each_direction_ends_separately() {
    let urls = http1_backend(|mut backend, _| {
        let head = request_head(&mut backend);
        assert!(head.starts_with("PUT /chat HTTP/1.1\r\n"), "{head}");
        assert_eq!(
            (field(&head, "connection"), field(&head, "upgrade")),
            (Some("upgrade"), Some("Foo/2"))
        );
        assert_eq!(field(&head, "host"), Some(HOST));
        backend
            .write_all(
                b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 101 Yes\r\nConnection: upgrade\r\n\
                  Upgrade: foo/2\r\nX-Own: 1\r\n\r\nfirst",
            )
            .unwrap();
        let mut received = String::new();
        let mut byte = [0; 100];
        loop {
            match read(&mut backend, &mut byte) {
                0 => break,
                length => received.push_str(std::str::from_utf8(&byte[..length]).unwrap()),
            }
        }
        backend
            .write_all(format!("received {received}").as_bytes())
            .unwrap();
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(OutboundRequest {
            method: Method::PUT,
            ..upgrade("Foo/2")
        });
        assert_eq!(exchange.interim().await.status, 103);
        let head = exchange.response().await.head;
        assert_eq!(
            (head.status.as_u16(), &head.headers["upgrade"]),
            (101, &HeaderValue::from_static("Foo/2"))
        );
        assert_eq!(head.headers["x-own"], "1");
        assert_eq!(head.headers.len(), 3);
        assert_eq!(exchange.bytes(5).await, b"first");
        exchange
            .up
            .send(Bytes::from_static(b"one "), false)
            .await
            .unwrap();
        exchange
            .up
            .send(Bytes::from_static(b"two"), true)
            .await
            .unwrap();
        assert_eq!(exchange.body().await.unwrap(), "received one two");
    });
}

#[test]
fn backend_that_ends_its_direction_first_still_receives() {
    let (sender, received) = mpsc::channel();
    let urls = http1_backend(move |mut backend, _| {
        drop(request_head(&mut backend));
        backend
            .write_all(b"HTTP/1.1 101 Yes\r\nConnection: upgrade\r\nUpgrade: foo\r\n\r\n")
            .unwrap();
        backend.shutdown(std::net::Shutdown::Write).unwrap();
        let mut text = [0; 4];
        backend.read_exact(&mut text).unwrap();
        sender.send((text, read(&mut backend, &mut [0]))).unwrap();
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(upgrade("foo"));
        exchange.response().await;
        assert_eq!(exchange.body().await.unwrap(), "");
        exchange
            .up
            .send(Bytes::from_static(b"late"), false)
            .await
            .unwrap();
        exchange.up.finish().unwrap();
        // Sleeps because the sent bytes leave only while this reactor runs.
        let received = loop {
            match received.try_recv() {
                Ok(received) => break received,
                Err(_) => runtime::sleep(Duration::from_millis(1)).await,
            }
        };
        assert_eq!(received, (*b"late", 0));
    });
}

#[test]
fn resets_are_relayed_in_both_directions() {
    let (sender, ended) = mpsc::channel();
    let urls = http1_backend(move |mut backend, number| {
        drop(request_head(&mut backend));
        backend
            .write_all(b"HTTP/1.1 101 Yes\r\nConnection: upgrade\r\nUpgrade: foo\r\n\r\nhi")
            .unwrap();
        if number == 0 {
            sender.send(read(&mut backend, &mut [0])).unwrap();
        } else {
            read(&mut backend, &mut [0]);
            rustix::net::sockopt::set_socket_linger(&backend, Some(Duration::ZERO)).unwrap();
        }
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(upgrade("foo"));
        exchange.response().await;
        assert_eq!(exchange.bytes(2).await, b"hi");
        exchange.up.reset();
        while ended.try_recv() != Ok(0) {
            runtime::sleep(Duration::from_millis(1)).await;
        }
        let exchange = gateway.send(upgrade("foo"));
        exchange.response().await;
        assert_eq!(exchange.bytes(2).await, b"hi");
        exchange
            .up
            .send(Bytes::from_static(b"now"), false)
            .await
            .unwrap();
        assert_eq!(
            exchange.body().await,
            Err(Closed::Reset("GW_BACKEND_RESET".into()))
        );
    });
}

#[test]
fn websocket_without_a_key_gets_one() {
    let urls = http1_backend(|mut backend, number| {
        let head = request_head(&mut backend);
        let key = field(&head, "sec-websocket-key").unwrap();
        let accept = if number == 0 {
            accept_of(key.as_bytes()).unwrap()
        } else {
            HeaderValue::from_static("wrong")
        };
        let accept = accept.to_str().unwrap();
        backend
            .write_all(
                format!(
                    "HTTP/1.1 101 Yes\r\nUpgrade: WebSocket\r\nSec-WebSocket-Accept: {accept}\r\n\
                     \r\n"
                )
                .as_bytes(),
            )
            .unwrap();
        read(&mut backend, &mut [0]);
    });
    with_tunnel(&urls, |gateway| async move {
        let head = gateway.send(upgrade("websocket")).response().await.head;
        assert_eq!(
            (head.headers["upgrade"].as_bytes(), head.headers.len()),
            (&b"websocket"[..], 2)
        );
        assert_eq!(
            gateway.send(upgrade("websocket")).error().await.0,
            "GW_BACKEND_INVALID_RESPONSE"
        );
        // A caller that sends a key checks the answer itself.
        let with_key = with_field(upgrade("websocket"), "sec-websocket-key", "x");
        assert_eq!(
            gateway.send(with_key).response().await.head.headers["sec-websocket-accept"],
            "wrong"
        );
    });
}

#[test]
fn declined_upgrades_are_relayed_and_wrong_ones_are_errors() {
    let urls = http1_backend(|mut backend, _| {
        for answer in [
            "HTTP/1.1 403 No\r\nContent-Length: 2\r\n\r\nno",
            "HTTP/1.1 101 Yes\r\nUpgrade: bar\r\n\r\n",
        ] {
            drop(request_head(&mut backend));
            backend.write_all(answer.as_bytes()).unwrap();
        }
    });
    let unasked = http1_backend(|mut backend, _| {
        drop(request_head(&mut backend));
        backend
            .write_all(b"HTTP/1.1 101 Yes\r\nUpgrade: foo\r\n\r\n")
            .unwrap();
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(upgrade("foo"));
        let head = exchange.response().await.head;
        assert_eq!(
            (head.status.as_u16(), head.headers.get("upgrade")),
            (403, None)
        );
        assert_eq!(exchange.body().await.unwrap(), "no");
    });
    let urls_of_another = http1_backend(|mut backend, _| {
        drop(request_head(&mut backend));
        backend
            .write_all(b"HTTP/1.1 101 Yes\r\nUpgrade: bar\r\n\r\n")
            .unwrap();
    });
    with_tunnel(&urls_of_another, |gateway| async move {
        let (code, message) = gateway.send(upgrade("foo")).error().await;
        assert!(
            code == "GW_BACKEND_INVALID_RESPONSE"
                && message.contains("foo")
                && message.contains("bar"),
            "{message}"
        );
    });
    with_tunnel(&unasked, |gateway| async move {
        assert_eq!(
            gateway.send(get("/")).error().await.0,
            "GW_BACKEND_INVALID_RESPONSE"
        );
    });
}

#[test]
fn http_2_backends_are_upgraded_by_extended_connect() {
    let echo = |request: Request<RecvStream>, mut respond: SendResponse<Bytes>, _| async move {
        assert_eq!(request.method(), Method::CONNECT);
        assert_eq!(
            request
                .extensions()
                .get::<h2::ext::Protocol>()
                .unwrap()
                .as_str(),
            "websocket"
        );
        assert!(!request.headers().contains_key("sec-websocket-key"));
        let mut sent = respond.send_response(Response::new(()), false).unwrap();
        let received = read_body(&mut request.into_body()).await;
        sent.send_data(Bytes::from(received), true).unwrap();
    };
    let mut settings = h2::server::Builder::new();
    let able = http2_backend(settings.enable_connect_protocol().clone(), echo);
    with_tunnel(&able, |gateway| async move {
        let with_key = with_field(
            upgrade("websocket"),
            "sec-websocket-key",
            "dGhlIHNhbXBsZSBub25jZQ==",
        );
        let exchange = gateway.send(with_key);
        let head = exchange.response().await.head;
        assert_eq!(
            (head.status.as_u16(), &head.headers["upgrade"]),
            (101, &HeaderValue::from_static("websocket"))
        );
        assert_eq!(
            head.headers["sec-websocket-accept"],
            "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
        );
        exchange
            .up
            .send(Bytes::from_static(b"both ways"), true)
            .await
            .unwrap();
        assert_eq!(exchange.body().await.unwrap(), "both ways");
    });
    let unable = http2_backend(h2::server::Builder::new(), echo);
    with_tunnel(&unable, |gateway| async move {
        let (code, message) = gateway.send(upgrade("websocket")).error().await;
        assert!(
            code == "GW_BACKEND_INVALID_RESPONSE" && message.contains("extended CONNECT"),
            "{message}"
        );
    });
}

#[test]
fn reset_by_the_caller_is_noticed_while_the_backend_does_not_read() {
    let (sender, ended) = mpsc::channel();
    let urls = http1_backend(move |mut backend, _| {
        drop(request_head(&mut backend));
        backend
            .write_all(b"HTTP/1.1 101 Yes\r\nUpgrade: foo\r\n\r\n")
            .unwrap();
        backend.shutdown(std::net::Shutdown::Write).unwrap();
        // Does not read; the closed connection shows as a hang-up.
        let mut watched = [rustix::event::PollFd::new(
            &backend,
            rustix::event::PollFlags::RDHUP,
        )];
        while rustix::event::poll(&mut watched, None) == Err(rustix::io::Errno::INTR) {}
        sender.send(()).unwrap();
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(upgrade("foo"));
        exchange.response().await;
        assert_eq!(exchange.body().await.unwrap(), "");
        // More than socket buffers and credit allow.
        let flood = exchange.up.send(Bytes::from(vec![0; 64 << 20]), false);
        assert!(
            runtime::timeout(Duration::from_millis(500), flood)
                .await
                .is_err()
        );
        exchange.up.reset();
        while ended.try_recv().is_err() {
            runtime::sleep(Duration::from_millis(1)).await;
        }
    });
}

/// As a daemon of containers does: it reads the content, answers 101, and carries a raw stream.
#[test]
fn content_of_an_upgrade_reaches_the_backend_before_it_switches() {
    for early in [false, true] {
        let urls = http1_backend(move |mut backend, _| {
            let head = request_head(&mut backend);
            assert_eq!(
                ["content-length", "connection", "upgrade"].map(|name| field(&head, name)),
                [Some("4"), Some("upgrade"), Some("tcp")]
            );
            let mut content = [0; 4];
            let switch = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n";
            if early {
                backend.write_all(switch).unwrap();
            }
            backend.read_exact(&mut content).unwrap();
            if !early {
                backend.write_all(switch).unwrap();
            }
            backend.write_all(&content).unwrap();
            let mut raw = String::new();
            backend.read_to_string(&mut raw).unwrap();
            backend.write_all(raw.as_bytes()).unwrap();
        });
        with_tunnel(&urls, |gateway| async move {
            let exchange = gateway.send(OutboundRequest {
                framing: Framing::Length(4),
                ..upgrade("tcp")
            });
            if early {
                assert_eq!(exchange.response().await.head.status, 101);
            }
            // In one frame.
            let sent = exchange.up.send(Bytes::from_static(b"jsonraw "), false);
            sent.await.unwrap();
            if !early {
                assert_eq!(exchange.response().await.head.status, 101);
            }
            assert_eq!(exchange.bytes(4).await, b"json");
            let sent = exchange.up.send(Bytes::from_static(b"stream"), true);
            sent.await.unwrap();
            assert_eq!(exchange.body().await.unwrap(), "raw stream");
        });
    }
}

#[test]
fn bytes_behind_the_content_of_a_declined_upgrade_reach_no_backend() {
    let (sender, received) = mpsc::channel();
    let urls = http1_backend(move |mut backend, _| {
        drop(request_head(&mut backend));
        backend.read_exact(&mut [0; 4]).unwrap();
        let answer = b"HTTP/1.1 409 Conflict\r\nContent-Length: 2\r\n\r\nno";
        backend.write_all(answer).unwrap();
        sender.send(read(&mut backend, &mut [0])).unwrap();
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(OutboundRequest {
            framing: Framing::Length(4),
            ..upgrade("tcp")
        });
        let sent = exchange.up.send(Bytes::from_static(b"jsonGET /"), false);
        sent.await.unwrap();
        assert_eq!(exchange.response().await.head.status, 409);
        assert_eq!(exchange.body().await.unwrap(), "no");
        while received.try_recv() != Ok(0) {
            runtime::sleep(Duration::from_millis(1)).await;
        }
    });
}

#[test]
fn http_2_backends_get_an_upgrade_with_content_as_an_ordinary_request() {
    let urls = http2_backend(
        h2::server::Builder::new(),
        |request, mut respond, _| async move {
            let method = request.method().clone();
            // To its end: the gateway ends its direction only after the response.
            let body = read_body(&mut request.into_body()).await;
            let mut sent = respond.send_response(Response::new(()), false).unwrap();
            sent.send_data(format!("{method} {body}").into(), true)
                .unwrap();
        },
    );
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(OutboundRequest {
            method: Method::POST,
            framing: Framing::Length(4),
            ..upgrade("tcp")
        });
        let sent = exchange.up.send(Bytes::from_static(b"json"), false);
        sent.await.unwrap();
        assert_eq!(exchange.response().await.head.status, 200);
        assert_eq!(exchange.body().await.unwrap(), "POST json");
    });
}
