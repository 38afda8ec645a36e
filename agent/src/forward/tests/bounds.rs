//! Limits on the responses and the reading of backends.

use std::cell::Cell;
use std::sync::atomic::AtomicBool;

use gw_shared::tunnel::response;

use super::*;

/// The agent rejects responses that the gateway would reject.
#[test]
fn responses_beyond_the_limits_of_the_tunnel_are_rejected() {
    let interim = format!(
        "HTTP/1.1 103 Early Hints\r\nLink: {}\r\n\r\n",
        "x".repeat(1000)
    );
    let many = "HTTP/1.1 102 Processing\r\n\r\n".repeat(response::INTERIM_MAX as usize + 1);
    let with_fields = |fields: String| format!("HTTP/1.1 204 No Content\r\n{fields}\r\n");
    for (answer, expected) in [
        (
            interim.repeat(response::INTERIM_BYTES / 1000),
            "interim responses",
        ),
        (many, "interim responses"),
        (
            "HTTP/1.1 600 Odd\r\nContent-Length: 0\r\n\r\n".to_owned(),
            "status is 600",
        ),
        (
            with_fields("x: 1\r\n".repeat(response::HEAD.fields + 1)),
            "the backend's response is refused: it has more than 1000 header fields",
        ),
        (
            with_fields(format!("x: {}\r\n", "x".repeat(response::HEAD.head))),
            "the backend's response is refused: its head is larger than 61440 bytes",
        ),
    ] {
        let urls = http1_backend(move |mut backend, _| {
            request_head(&mut backend);
            // Fails if the agent closes the connection before it has read everything.
            let _ = backend.write_all(answer.as_bytes());
        });
        with_tunnel(&urls, |gateway| async move {
            gateway
                .send(get("/"))
                .assert_error("GW_BACKEND_INVALID_RESPONSE", expected)
                .await;
        });
    }
}

#[test]
fn http_2_responses_have_the_same_limits_and_interim_ones_no_length() {
    let urls = http2_backend(|request, mut respond, _| async move {
        let interim = Response::builder()
            .status(103)
            .header("link", "</a>")
            .header("content-length", "5");
        let interim = interim.body(()).unwrap();
        respond.send_informational(interim).unwrap();
        let mut response = Response::new(());
        let path = request.uri().path();
        if path == "/odd" {
            *response.status_mut() = StatusCode::from_u16(999).unwrap();
        } else if path == "/large" {
            let value = HeaderValue::try_from("x".repeat(100 * 1024)).unwrap();
            response.headers_mut().insert("x", value);
        } else {
            for number in 0..=response::HEAD.fields {
                let name = http::HeaderName::try_from(format!("x-{number}")).unwrap();
                response
                    .headers_mut()
                    .insert(name, HeaderValue::from_static("1"));
            }
        }
        respond.send_response(response, true).unwrap();
    });
    with_tunnel(&urls, |gateway| async move {
        for (path, expected) in [
            ("/odd", "status is 999"),
            ("/many", "more than 1000 header fields"),
            ("/large", "head is larger than 61440 bytes"),
        ] {
            let exchange = gateway.send(get(path));
            let interim = exchange.interim().await;
            assert!(interim.headers.len() == 1 && interim.headers.contains("link"));
            exchange
                .assert_error("GW_BACKEND_INVALID_RESPONSE", expected)
                .await;
        }
    });
}

/// A request body in pieces of one byte for a backend that does not read delays no other request of
/// its tunnel and arrives complete.
#[test]
fn backend_that_does_not_read_stalls_only_its_request() {
    if matches!(Driver::choose().unwrap(), Driver::Epoll { .. }) {
        // On epoll a socket with more bytes is ready at once, so the two ends on this thread starve
        // the other tasks.
        return;
    }
    const TINY: usize = 400_000;
    let byte = |number: usize| (number % 251) as u8;
    let reads = Arc::new(AtomicBool::new(false));
    let mut window = h2::server::Builder::new();
    window.initial_window_size(1000);
    let may_read = Arc::clone(&reads);
    let urls = http2_backend_with(&window, move |request, mut respond, _| {
        let may_read = Arc::clone(&may_read);
        async move {
            if request.uri().path() == "/other" {
                respond.send_response(Response::new(()), true).unwrap();
                return;
            }
            let mut body = request.into_body();
            while !may_read.load(Ordering::Relaxed) {
                runtime::sleep(Duration::from_millis(5)).await;
            }
            let mut count = 0;
            while let Some(data) = std::future::poll_fn(|cx| body.poll_data(cx)).await {
                let data = data.unwrap();
                body.flow_control().release_capacity(data.len()).unwrap();
                let expected = (count..count + data.len()).map(byte);
                assert!(data.iter().copied().eq(expected));
                count += data.len();
            }
            assert_eq!(count, TINY);
            respond.send_response(Response::new(()), true).unwrap();
        }
    });
    with_tunnel(&urls, |gateway| async move {
        let upload = gateway.send(post(Framing::Chunked));
        let sent = Cell::new(0);
        let send_all = async || {
            while sent.get() < TINY {
                let data = Bytes::copy_from_slice(&[byte(sent.get())]);
                upload.up.send(data, false).await.unwrap();
                sent.update(|sent| sent + 1);
            }
        };
        // The credit of a stream is less than the body.
        let in_time = runtime::timeout(Duration::from_millis(500), send_all()).await;
        assert!(in_time.is_err());
        let other = gateway.send(get("/other"));
        assert_eq!(other.response().await.head.status, 200);
        reads.store(true, Ordering::Relaxed);
        send_all().await;
        upload.up.finish().unwrap();
        assert_eq!(upload.response().await.head.status, 200);
    });
}
