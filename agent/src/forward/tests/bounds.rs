//! Bounds on the responses of backends.

use gw_shared::tunnel::response;

use super::*;

/// What a gateway would refuse of a tunnel, the agent refuses of a backend.
#[test]
fn responses_beyond_the_tunnels_bounds_are_refused() {
    let interim = format!("HTTP/1.1 103 Early Hints\r\nLink: {}\r\n\r\n", "x".repeat(1000));
    let many = "HTTP/1.1 102 Processing\r\n\r\n".repeat(response::INTERIM_MAX as usize + 1);
    for (answer, told) in [
        (interim.repeat(response::INTERIM_BYTES / 1000), "interim responses"),
        (many, "interim responses"),
        ("HTTP/1.1 600 Odd\r\nContent-Length: 0\r\n\r\n".to_owned(), "status is 600"),
    ] {
        let urls = http1(move |mut backend, _| {
            request_head(&mut backend);
            // The agent may close before it has read all of it.
            let _ = backend.write_all(answer.as_bytes());
        });
        with_tunnel(&urls, |requests| async move {
            let (code, message) = error_of(send(&requests, get("/"), true).await.0).await;
            assert_eq!(code, "GW_BACKEND_INVALID_RESPONSE");
            assert!(message.contains(told), "{message}");
        });
    }
}

#[test]
fn responses_of_http_2_have_the_same_bounds_and_interim_ones_no_length() {
    let urls = http2(h2::server::Builder::new(), |request, mut respond, _| async move {
        let interim = Response::builder().status(103).header("link", "</a>").header("content-length", "5");
        respond.send_informational(interim.body(()).unwrap()).unwrap();
        let mut response = Response::new(());
        if request.uri().path() == "/odd" {
            *response.status_mut() = StatusCode::from_u16(999).unwrap();
        } else {
            response.headers_mut().extend((0..=response::HEAD.fields).map(|number| {
                (http::HeaderName::try_from(format!("x-{number}")).unwrap(), HeaderValue::from_static("1"))
            }));
        }
        respond.send_response(response, true).unwrap();
    });
    with_tunnel(&urls, |requests| async move {
        for (path, told) in [("/odd", "status is 999"), ("/many", "header fields")] {
            let (mut response, _) = send(&requests, get(path), true).await;
            let interim = std::future::poll_fn(|cx| response.poll_informational(cx)).await.unwrap().unwrap();
            assert_eq!((interim.headers().len(), interim.headers().contains_key("link")), (1, true));
            let (code, message) = error_of(response).await;
            assert_eq!(code, "GW_BACKEND_INVALID_RESPONSE");
            assert!(message.contains(told), "{message}");
        }
    });
}
