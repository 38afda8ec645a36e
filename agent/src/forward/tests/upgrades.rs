//! Upgrades to other protocols.

use rustix::event::{PollFd, PollFlags, poll};

use super::*;

#[test]
fn any_protocol_is_relayed_and_each_direction_ends_separately() {
    let urls = http1_backend(|mut backend, _| {
        let head = request_head(&mut backend);
        assert!(head.starts_with("PUT /chat HTTP/1.1\r\n"), "{head}");
        assert_eq!(
            ["connection", "upgrade", "host"].map(|name| field(&head, name)),
            ["upgrade", "Foo/2", HOST].map(Some)
        );
        write(
            &mut backend,
            "HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 101 Yes\r\nConnection: upgrade\r\n\
             Upgrade: foo/2\r\nX-Own: 1\r\n\r\nfirst",
        );
        let mut received = String::new();
        backend.read_to_string(&mut received).unwrap();
        write(&mut backend, format!("received {received}"));
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(OutboundRequest {
            method: Method::PUT,
            ..upgrade("Foo/2")
        });
        assert_eq!(exchange.interim().await.status, 103);
        let head = exchange.response().await.head;
        assert_eq!(head.status, 101);
        assert_eq!(head.headers["upgrade"], "Foo/2");
        assert_eq!(head.headers["x-own"], "1");
        assert_eq!(head.headers.len(), 3);
        assert_eq!(exchange.bytes(5).await, b"first");
        exchange.upload("one ", false).await;
        exchange.upload("two", true).await;
        assert_eq!(exchange.body().await.unwrap(), "received one two");
    });
}

#[test]
fn backend_that_ends_its_direction_first_still_receives() {
    let (sender, texts) = mpsc::channel();
    let urls = http1_backend(move |mut backend, _| {
        drop(request_head(&mut backend));
        write(
            &mut backend,
            b"HTTP/1.1 101 Yes\r\nConnection: upgrade\r\nUpgrade: foo\r\n\r\n",
        );
        backend.shutdown(std::net::Shutdown::Write).unwrap();
        let mut text = [0; 4];
        backend.read_exact(&mut text).unwrap();
        sender.send((text, read(&mut backend, &mut [0]))).unwrap();
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(upgrade("foo"));
        exchange.response().await;
        assert_eq!(exchange.body().await.unwrap(), "");
        exchange.upload("late", false).await;
        exchange.up.finish().unwrap();
        assert_eq!(received(&texts).await, (*b"late", 0));
    });
}

const SWITCH_AND_HI: &str = "HTTP/1.1 101 Yes\r\nConnection: upgrade\r\nUpgrade: foo\r\n\r\nhi";

#[test]
fn a_reset_by_the_caller_ends_the_connection_to_the_backend() {
    let (sender, ended) = mpsc::channel();
    let urls = http1_backend(move |mut backend, _| {
        drop(request_head(&mut backend));
        write(&mut backend, SWITCH_AND_HI);
        sender.send(read(&mut backend, &mut [0])).unwrap();
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(upgrade("foo"));
        exchange.response().await;
        assert_eq!(exchange.bytes(2).await, b"hi");
        exchange.up.reset();
        assert_eq!(received(&ended).await, 0);
    });
}

#[test]
fn a_reset_by_the_backend_is_relayed() {
    let urls = http1_backend(move |mut backend, _| {
        drop(request_head(&mut backend));
        write(&mut backend, SWITCH_AND_HI);
        read(&mut backend, &mut [0]);
        rustix::net::sockopt::set_socket_linger(&backend, Some(Duration::ZERO)).unwrap();
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(upgrade("foo"));
        exchange.response().await;
        assert_eq!(exchange.bytes(2).await, b"hi");
        exchange.upload("now", false).await;
        exchange.assert_reset("GW_BACKEND_RESET").await;
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
        let switch = "HTTP/1.1 101 Yes\r\nUpgrade: WebSocket\r\nSec-WebSocket-Accept";
        write(&mut backend, format!("{switch}: {accept}\r\n\r\n"));
        read(&mut backend, &mut [0]);
    });
    with_tunnel(&urls, |gateway| async move {
        let head = gateway.send(upgrade("websocket")).response().await.head;
        assert_eq!(head.headers["upgrade"], "websocket");
        assert_eq!(head.headers.len(), 2);
        gateway
            .send(upgrade("websocket"))
            .assert_error("GW_BACKEND_INVALID_RESPONSE", "")
            .await;
        // A caller that sends a key checks the answer itself.
        let with_key = with_field(upgrade("websocket"), "sec-websocket-key", "x");
        let head = gateway.send(with_key).response().await.head;
        assert_eq!(head.headers["sec-websocket-accept"], "wrong");
    });
}

#[test]
fn declined_upgrades_are_relayed_and_wrong_ones_are_errors() {
    let declined = http1_answers(|_, _| "HTTP/1.1 403 No\r\nContent-Length: 2\r\n\r\nno");
    with_tunnel(&declined, |gateway| async move {
        let exchange = gateway.send(upgrade("foo"));
        let head = exchange.response().await.head;
        assert_eq!(head.status, 403);
        assert_eq!(head.headers.get("upgrade"), None);
        assert_eq!(exchange.body().await.unwrap(), "no");
    });
    let to_another = http1_answers(|_, _| "HTTP/1.1 101 Yes\r\nUpgrade: bar\r\n\r\n");
    with_tunnel(&to_another, |gateway| async move {
        for (request, parts) in [(upgrade("foo"), &["foo", "bar"][..]), (get("/"), &[])] {
            let (code, message) = gateway.send(request).error().await;
            assert_eq!(code, "GW_BACKEND_INVALID_RESPONSE");
            for part in parts {
                assert!(message.contains(part), "{message}");
            }
        }
    });
}

#[test]
fn http_2_backends_are_upgraded_by_extended_connect() {
    let echo = |request: Request<RecvStream>, mut respond: SendResponse<Bytes>, _| async move {
        assert_eq!(request.method(), Method::CONNECT);
        let protocol = request.extensions().get::<h2::ext::Protocol>().unwrap();
        assert_eq!(protocol.as_str(), "websocket");
        assert!(!request.headers().contains_key("sec-websocket-key"));
        let mut sent = respond.send_response(Response::new(()), false).unwrap();
        let received = read_body(&mut request.into_body()).await;
        sent.send_data(Bytes::from(received), true).unwrap();
    };
    let mut settings = h2::server::Builder::new();
    let able = http2_backend_with(settings.enable_connect_protocol(), echo);
    with_tunnel(&able, |gateway| async move {
        let key = "dGhlIHNhbXBsZSBub25jZQ==";
        let exchange = gateway.send(with_field(upgrade("websocket"), "sec-websocket-key", key));
        let head = exchange.response().await.head;
        assert_eq!(head.status, 101);
        assert_eq!(head.headers["upgrade"], "websocket");
        let accept = &head.headers["sec-websocket-accept"];
        assert_eq!(accept, "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
        exchange.upload("both ways", true).await;
        assert_eq!(exchange.body().await.unwrap(), "both ways");
    });
    let unable = http2_backend(echo);
    with_tunnel(&unable, |gateway| async move {
        let exchange = gateway.send(upgrade("websocket"));
        exchange
            .assert_error("GW_BACKEND_INVALID_RESPONSE", "extended CONNECT")
            .await;
    });
}

#[test]
fn reset_by_the_caller_is_noticed_while_the_backend_does_not_read() {
    let (sender, ended) = mpsc::channel();
    let urls = http1_backend(move |mut backend, _| {
        drop(request_head(&mut backend));
        write(&mut backend, b"HTTP/1.1 101 Yes\r\nUpgrade: foo\r\n\r\n");
        backend.shutdown(std::net::Shutdown::Write).unwrap();
        // Does not read; the closed connection shows as a hang-up.
        let mut watched = [PollFd::new(&backend, PollFlags::RDHUP)];
        while poll(&mut watched, None) == Err(rustix::io::Errno::INTR) {}
        sender.send(()).unwrap();
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(upgrade("foo"));
        exchange.response().await;
        assert_eq!(exchange.body().await.unwrap(), "");
        // More than socket buffers and credit allow.
        let flood = exchange.up.send(Bytes::from(vec![0; 64 << 20]), false);
        let in_time = runtime::timeout(Duration::from_millis(500), flood).await;
        assert!(in_time.is_err());
        exchange.up.reset();
        received(&ended).await;
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
                write(&mut backend, switch);
            }
            backend.read_exact(&mut content).unwrap();
            if !early {
                write(&mut backend, switch);
            }
            write(&mut backend, content);
            let mut raw = String::new();
            backend.read_to_string(&mut raw).unwrap();
            write(&mut backend, raw);
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
            exchange.upload("jsonraw ", false).await;
            if !early {
                assert_eq!(exchange.response().await.head.status, 101);
            }
            assert_eq!(exchange.bytes(4).await, b"json");
            exchange.upload("stream", true).await;
            assert_eq!(exchange.body().await.unwrap(), "raw stream");
        });
    }
}

#[test]
fn bytes_behind_the_content_of_a_declined_upgrade_reach_no_backend() {
    let (sender, reads) = mpsc::channel();
    let urls = http1_backend(move |mut backend, _| {
        drop(request_head(&mut backend));
        backend.read_exact(&mut [0; 4]).unwrap();
        let answer = b"HTTP/1.1 409 Conflict\r\nContent-Length: 2\r\n\r\nno";
        write(&mut backend, answer);
        sender.send(read(&mut backend, &mut [0])).unwrap();
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(OutboundRequest {
            framing: Framing::Length(4),
            ..upgrade("tcp")
        });
        exchange.upload("jsonGET /", false).await;
        assert_eq!(exchange.response().await.head.status, 409);
        assert_eq!(exchange.body().await.unwrap(), "no");
        assert_eq!(received(&reads).await, 0);
    });
}

#[test]
fn http_2_backends_get_an_upgrade_with_content_as_an_ordinary_request() {
    let urls = http2_backend(|request, mut respond, _| async move {
        let method = request.method().clone();
        // To its end: the gateway ends its direction only after the response.
        let body = read_body(&mut request.into_body()).await;
        let mut sent = respond.send_response(Response::new(()), false).unwrap();
        sent.send_data(format!("{method} {body}").into(), true)
            .unwrap();
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(OutboundRequest {
            method: Method::POST,
            framing: Framing::Length(4),
            ..upgrade("tcp")
        });
        exchange.upload("json", false).await;
        assert_eq!(exchange.response().await.head.status, 200);
        assert_eq!(exchange.body().await.unwrap(), "POST json");
    });
}
