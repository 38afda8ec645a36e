//! Message framing towards backends.

use gw_bed::http1::ok;

use super::*;

/// Starts an HTTP/1.1 backend that reports each request head with the number of its connection and
/// answers 200.
fn declining_backend() -> (Vec<String>, mpsc::Receiver<(usize, String)>) {
    let (sender, heads) = mpsc::channel();
    let urls = http1_answers(move |head, number| {
        sender.send((number, head.to_owned())).unwrap();
        ok("no")
    });
    (urls, heads)
}

#[test]
fn connection_of_a_declined_upgrade_is_not_reused() {
    let (urls, heads) = declining_backend();
    with_tunnel(&urls, |gateway| async move {
        for _ in 0..2 {
            for request in [
                with_field(upgrade("websocket"), "content-length", "34"),
                get("/next"),
            ] {
                let exchange = gateway.send(request);
                assert_eq!(exchange.response().await.head.framing, Framing::Length(2));
                assert_eq!(exchange.body().await.unwrap(), "no");
            }
        }
    });
    let heads: Vec<(usize, String)> = heads.try_iter().collect();
    let connections: Vec<usize> = heads.iter().map(|(number, _)| *number).collect();
    // The plain requests share a connection; each upgrade request has its own.
    assert_eq!(connections, [0, 1, 2, 1]);
    for (_, head) in &heads {
        let fields = ["content-length", "transfer-encoding"].map(|name| field(head, name));
        assert_eq!(fields, [None; 2], "{head}");
    }
}

#[test]
fn upgrades_to_forms_of_http_and_invalid_protocols_are_rejected() {
    let (urls, heads) = declining_backend();
    with_tunnel(&urls, |gateway| async move {
        for protocol in ["h2c", "HTTP/2.0", "TLS/1.3", "websocket, h2c", "a b", ""] {
            let head = format!(
                "GET / HTTP/1.1\r\nhost: {HOST}\r\nconnection: upgrade\r\nupgrade: {protocol}\r\n\
                 \r\n"
            );
            let answer = gateway.send_head(&head, false).down.receive().await;
            assert!(
                matches!(answer, Err(Closed::Reset(_))),
                "{protocol:?}: {answer:?}"
            );
        }
    });
    assert_eq!(heads.try_iter().count(), 0);
}

#[test]
fn data_after_an_http_2_response_without_a_body_is_dropped() {
    let urls = http2_backend(|request, mut respond, _| async move {
        let mut response = Response::new(());
        *response.status_mut() = request.uri().path()[1..].parse().unwrap();
        response
            .headers_mut()
            .insert("content-length", HeaderValue::from_static("4"));
        let mut sent = respond.send_response(response, false).unwrap();
        sent.send_data(Bytes::from_static(b"body"), true).unwrap();
    });
    with_tunnel(&urls, |gateway| async move {
        for (path, framing, text) in [
            ("/204", Framing::None, ""),
            ("/304", Framing::Described(4), ""),
            ("/200", Framing::Length(4), "body"),
        ] {
            for _ in 0..3 {
                let exchange = gateway.send(get(path));
                assert_eq!(exchange.response().await.head.framing, framing, "{path}");
                assert_eq!(exchange.body().await.unwrap(), text, "{path}");
            }
        }
    });
}

/// The END flag of a response agrees with its framing, whatever a backend announces.
#[test]
fn responses_without_a_body_end_with_their_head() {
    let over_http1 = http1_answers(|_, _| ok(""));
    let over_http2 = http2_backend(|_, mut respond, _| async move {
        respond.send_response(Response::new(()), true).unwrap();
    });
    for urls in [over_http1, over_http2] {
        with_tunnel(&urls, |gateway| async move {
            let exchange = gateway.send(get("/"));
            let framing = exchange.response().await.head.framing;
            // Without a length, only END tells that there is no body.
            assert!(
                matches!(framing, Framing::Length(0) | Framing::UntilClose),
                "{framing:?}"
            );
            assert!(exchange.down.is_done());
        });
    }
}

#[test]
fn body_up_to_the_end_of_the_connection_is_of_unknown_length() {
    let urls = http1_backend(|mut backend, _| {
        drop(request_head(&mut backend));
        write(&mut backend, b"HTTP/1.1 200 OK\r\n\r\nall of it");
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(get("/"));
        assert_eq!(exchange.response().await.head.framing, Framing::Chunked);
        assert_eq!(exchange.body().await.unwrap(), "all of it");
    });
}

#[test]
fn request_body_of_another_length_than_announced_is_not_completed() {
    let (sender, reads) = mpsc::channel();
    let urls = http1_backend(move |mut backend, _| {
        drop(request_head(&mut backend));
        let mut body = [0; 10];
        let first = read(&mut backend, &mut body);
        sender.send((first, read(&mut backend, &mut [0]))).unwrap();
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(post(Framing::Length(6)));
        exchange.upload("short", true).await;
        assert!(matches!(
            exchange.down.receive().await,
            Err(Closed::Reset(_))
        ));
        assert_eq!(received(&reads).await, (5, 0));
    });
}

#[test]
fn http_2_field_values_with_padding_are_malformed() {
    let urls = http2_backend(|request, mut respond, _| async move {
        let path = request.uri().path().to_owned();
        let padded = HeaderValue::from_static("a ");
        let mut response = Response::new(());
        if path == "/head" {
            response.headers_mut().insert("x", padded.clone());
        }
        let mut sent = respond.send_response(response, false).unwrap();
        sent.send_data(Bytes::from_static(b"body"), false).unwrap();
        sent.send_trailers(http::HeaderMap::from_iter([("x".parse().unwrap(), padded)]))
            .unwrap();
    });
    with_tunnel(&urls, |gateway| async move {
        gateway
            .send(get("/head"))
            .assert_error("GW_BACKEND_INVALID_RESPONSE", "")
            .await;
        let exchange = gateway.send(get("/trailers"));
        exchange.response().await;
        assert_eq!(exchange.bytes(4).await, b"body");
        exchange.assert_reset("GW_BACKEND_INVALID_RESPONSE").await;
    });
}

#[test]
fn http_2_trailers_over_the_limits_cut_the_response() {
    let urls = http2_backend(|request, mut respond, _| async move {
        let fields: usize = request.uri().path()[1..].parse().unwrap();
        let mut sent = respond.send_response(Response::new(()), false).unwrap();
        sent.send_data(Bytes::from_static(b"body"), false).unwrap();
        let trailer = |at: usize| {
            let name = http::HeaderName::try_from(format!("x-{at}")).unwrap();
            (name, HeaderValue::try_from("v".repeat(at)).unwrap())
        };
        let status = ("grpc-status".parse().unwrap(), HeaderValue::from(0));
        let trailers = (0..fields).map(trailer).chain([status]);
        sent.send_trailers(trailers.collect()).unwrap();
    });
    with_tunnel(&urls, |gateway| async move {
        // 64 fields; one more; more than the header list that SETTINGS allow.
        for (path, is_whole) in [("/63", true), ("/64", false), ("/400", false)] {
            let exchange = gateway.send(get(path));
            exchange.response().await;
            assert_eq!(exchange.bytes(4).await, b"body");
            let cut = || Closed::Reset("GW_BACKEND_INVALID_RESPONSE".into());
            let expected = is_whole.then(String::new).ok_or_else(cut);
            assert_eq!(exchange.body().await, expected, "{path}");
        }
    });
}

#[test]
fn extended_connect_has_no_content_length() {
    let mut settings = h2::server::Builder::new();
    settings.enable_connect_protocol();
    let urls = http2_backend_with(&settings, |request, mut respond, _| async move {
        assert_eq!(request.headers().get("content-length"), None);
        let mut sent = respond.send_response(Response::new(()), false).unwrap();
        sent.send_data(Bytes::from_static(b"switched"), true)
            .unwrap();
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(with_field(upgrade("foo"), "content-length", "3"));
        assert_eq!(exchange.response().await.head.status, 101);
        assert_eq!(exchange.bytes(8).await, b"switched");
    });
}

#[test]
fn declined_upgrade_of_a_head_request_describes_its_length() {
    let urls = http1_backend(|mut backend, _| {
        request_head(&mut backend);
        let answer = "HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 2\r\nX-Kept: 1\r\n\r\n";
        write(&mut backend, answer);
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(OutboundRequest {
            method: Method::HEAD,
            ..upgrade("websocket")
        });
        let head = exchange.response().await.head;
        assert_eq!(head.status, 405);
        assert_eq!(head.headers["x-kept"], "1");
        assert_eq!(head.framing, Framing::Described(2));
        assert!(exchange.down.is_done());
    });
}
