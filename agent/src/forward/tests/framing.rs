//! Message framing towards backends.

use super::*;

/// Starts an HTTP/1.1 backend that reports each request head with the number of its connection and answers 200.
fn declining_backend() -> (Vec<String>, mpsc::Receiver<(usize, String)>) {
    let (sender, heads) = mpsc::channel();
    let urls = http1_backend(move |mut backend, number| {
        loop {
            let head = request_head(&mut backend);
            if head.is_empty() {
                return;
            }
            sender.send((number, head)).unwrap();
            backend.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno").unwrap();
        }
    });
    (urls, heads)
}

#[test]
fn connection_of_a_declined_upgrade_is_not_reused() {
    let (urls, heads) = declining_backend();
    with_tunnel(&urls, |requests| async move {
        for _ in 0..2 {
            let mut request = upgrade("websocket");
            request.headers_mut().insert("content-length", HeaderValue::from_static("34"));
            let (response, _up) = send(&requests, request, false).await;
            assert_eq!(read_body(response.await.unwrap().body_mut()).await.unwrap(), "no");
            let (response, _) = send(&requests, get("/next"), true).await;
            assert_eq!(read_body(response.await.unwrap().body_mut()).await.unwrap(), "no");
        }
    });
    let heads: Vec<(usize, String)> = heads.try_iter().collect();
    let connections: Vec<usize> = heads.iter().map(|(number, _)| *number).collect();
    // The plain requests share a connection; each upgrade request has its own.
    assert_eq!(connections, [0, 1, 2, 1]);
    for (_, head) in &heads {
        assert!(field(head, "content-length").is_none() && field(head, "transfer-encoding").is_none(), "{head}");
    }
}

#[test]
fn upgrades_to_forms_of_http_and_invalid_protocols_are_rejected() {
    let (urls, heads) = declining_backend();
    with_tunnel(&urls, |requests| async move {
        for protocol in ["h2c", "HTTP/2.0", "TLS/1.3", "websocket, h2c", "a b", ""] {
            let (response, _up) = send(&requests, upgrade(protocol), false).await;
            assert_eq!(response.await.unwrap_err().reason(), Some(Reason::PROTOCOL_ERROR), "{protocol:?}");
        }
    });
    assert_eq!(heads.try_iter().count(), 0);
}

#[test]
fn data_after_an_http_2_response_without_a_body_is_dropped() {
    let urls = http2_backend(h2::server::Builder::new(), |request, mut respond, _| async move {
        let mut response = Response::new(());
        *response.status_mut() = request.uri().path()[1..].parse().unwrap();
        response.headers_mut().insert("content-length", HeaderValue::from_static("4"));
        let mut sent = respond.send_response(response, false).unwrap();
        sent.send_data(Bytes::from_static(b"body"), true).unwrap();
    });
    with_tunnel(&urls, |requests| async move {
        for (path, length, text) in [("/204", None, ""), ("/304", Some("4"), ""), ("/200", Some("4"), "body")] {
            for _ in 0..3 {
                let mut response = send(&requests, get(path), true).await.0.await.unwrap();
                let found = response.headers().get("content-length").map(|value| value.to_str().unwrap().to_owned());
                assert_eq!(found.as_deref(), length, "{path}");
                assert_eq!(read_body(response.body_mut()).await.unwrap(), text, "{path}");
            }
        }
    });
}

#[test]
fn http_2_field_values_with_padding_are_malformed() {
    let urls = http2_backend(h2::server::Builder::new(), |request, mut respond, _| async move {
        let (path, padded) = (request.uri().path().to_owned(), HeaderValue::from_static("a "));
        let mut response = Response::new(());
        if path == "/head" {
            response.headers_mut().insert("x", padded.clone());
        }
        let mut sent = respond.send_response(response, false).unwrap();
        sent.send_data(Bytes::from_static(b"body"), false).unwrap();
        sent.send_trailers(HeaderMap::from_iter([("x".parse().unwrap(), padded)])).unwrap();
    });
    with_tunnel(&urls, |requests| async move {
        let (response, _) = send(&requests, get("/head"), true).await;
        assert_eq!(error_of(response).await.0, "GW_BACKEND_INVALID_RESPONSE");
        let mut response = send(&requests, get("/trailers"), true).await.0.await.unwrap();
        assert_eq!(read_exact(response.body_mut(), 4).await, b"body");
        let end = std::future::poll_fn(|cx| stream::poll_receive(response.body_mut(), cx)).await;
        let Ok(Received::Trailers(trailers)) = end else { panic!("{end:?}") };
        assert_eq!(trailers[X_GW_AGENT_ERROR], "GW_BACKEND_INVALID_RESPONSE");
    });
}

#[test]
fn extended_connect_has_no_content_length() {
    let mut settings = h2::server::Builder::new();
    settings.enable_connect_protocol();
    let urls = http2_backend(settings, |request, mut respond, _| async move {
        assert_eq!(request.headers().get("content-length"), None);
        let mut sent = respond.send_response(Response::new(()), false).unwrap();
        sent.send_data(Bytes::from_static(b"switched"), true).unwrap();
    });
    with_tunnel(&urls, |requests| async move {
        let mut request = upgrade("foo");
        request.headers_mut().insert("content-length", HeaderValue::from_static("3"));
        let (response, _up) = send(&requests, request, false).await;
        assert_eq!(read_exact(response.await.unwrap().body_mut(), 8).await, b"switched");
    });
}

#[test]
fn declined_upgrade_of_a_head_request_has_no_content_length() {
    let urls = http1_backend(|mut backend, _| {
        request_head(&mut backend);
        backend.write_all(b"HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 2\r\nX-Kept: 1\r\n\r\n").unwrap();
    });
    with_tunnel(&urls, |requests| async move {
        let mut request = upgrade("websocket");
        request.headers_mut().insert(X_GW_UPGRADE_METHOD, HeaderValue::from_static("HEAD"));
        let (response, _up) = send(&requests, request, false).await;
        let mut response = response.await.unwrap();
        assert_eq!((response.status().as_u16(), &response.headers()["x-kept"]), (405, &HeaderValue::from_static("1")));
        assert_eq!(response.headers().get("content-length"), None);
        assert_eq!(read_body(response.body_mut()).await.unwrap(), "");
    });
}
