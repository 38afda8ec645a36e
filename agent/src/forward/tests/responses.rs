//! Responses of HTTP/1.1 backends.

use gw_shared::tunnel::timing::AgentTiming;

use super::*;

#[test]
fn interim_responses_are_relayed_without_delay() {
    let (resume, resumed) = mpsc::channel::<()>();
    let resumed = std::sync::Mutex::new(resumed);
    let urls = http1_backend(move |mut backend, _| {
        let head = request_head(&mut backend);
        assert_eq!(field(&head, "expect"), Some("100-continue"));
        backend.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").unwrap();
        let mut body = [0; 5];
        backend.read_exact(&mut body).unwrap();
        backend
            .write_all(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nX-Gw-Status: forged\r\n\r\n")
            .unwrap();
        resumed.lock().unwrap().recv().unwrap();
        backend
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
            .unwrap();
        backend.write_all(&body).unwrap();
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(with_field(
            post(Framing::Length(5)),
            "expect",
            "100-continue",
        ));
        assert_eq!(exchange.interim().await.status, 100);
        exchange
            .up
            .send(Bytes::from_static(b"hello"), true)
            .await
            .unwrap();
        let interim = exchange.interim().await;
        assert_eq!((interim.status.as_u16(), interim.headers.len()), (103, 1));
        assert_eq!(interim.headers["link"], "</a>");
        resume.send(()).unwrap();
        assert_eq!(exchange.response().await.head.status, 200);
        assert_eq!(exchange.body().await.unwrap(), "hello");
    });
}

#[test]
fn every_response_has_the_agents_timing_and_not_the_backends() {
    let urls = http1_backend(|mut backend, number| {
        while !request_head(&mut backend).is_empty() {
            let answer: &[u8] = match number {
                0 => {
                    b"HTTP/1.1 200 OK\r\nX-Gw-Timing: 4000000000,4000000000\r\n\
                      Content-Length: 0\r\nConnection: close\r\n\r\n"
                }
                1 => {
                    b"HTTP/1.1 101 Yes\r\nUpgrade: foo\r\nX-Gw-Timing: 4000000000,4000000000\r\n\
                      \r\n"
                }
                _ => b"nonsense\r\n\r\n",
            };
            backend.write_all(answer).unwrap();
        }
    });
    let is_real = |us: u32| us < 60_000_000;
    with_tunnel(&urls, |gateway| async move {
        for request in [get("/"), upgrade("foo")] {
            let response = gateway.send(request).response().await;
            let AgentTiming {
                agent_us,
                backend_first_byte_us,
            } = response.timing;
            assert!(is_real(agent_us) && backend_first_byte_us.is_some_and(is_real));
            assert!(!response.head.headers.contains("x-gw-timing"));
        }
        let timing = gateway.send(get("/")).refusal().await.timing;
        assert!(is_real(timing.agent_us) && timing.backend_first_byte_us.is_none());
    });
}

#[test]
fn response_cut_short_is_reported_after_its_data() {
    let (resume, resumed) = mpsc::channel::<()>();
    let resumed = std::sync::Mutex::new(resumed);
    let urls = http1_backend(move |mut backend, number| {
        drop(request_head(&mut backend));
        let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        match number {
            0 => backend
                .write_all(format!("{chunked}zz\r\n").as_bytes())
                .unwrap(),
            1 => {
                backend
                    .write_all(format!("{chunked}5\r\nhello\r\n").as_bytes())
                    .unwrap();
                resumed.lock().unwrap().recv().unwrap();
                backend.write_all(b"zz\r\n").unwrap();
            }
            _ => backend
                .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello")
                .unwrap(),
        }
    });
    with_tunnel(&urls, |gateway| async move {
        assert_eq!(
            gateway.send(get("/")).error().await.0,
            "GW_BACKEND_INVALID_RESPONSE"
        );

        let exchange = gateway.send(get("/"));
        exchange.response().await;
        assert_eq!(exchange.bytes(5).await, b"hello");
        resume.send(()).unwrap();
        assert_eq!(
            exchange.body().await,
            Err(Closed::Reset("GW_BACKEND_INVALID_RESPONSE".into()))
        );

        let exchange = gateway.send(get("/"));
        exchange.response().await;
        assert_eq!(exchange.bytes(5).await, b"hello");
        assert_eq!(
            exchange.body().await,
            Err(Closed::Reset("GW_BACKEND_RESET".into()))
        );
    });
}

#[test]
fn ambiguous_responses_are_rejected() {
    for fields in [
        "Content-Length: 1\r\nContent-Length: 2",
        "Content-Length: 1\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: gzip, chunked",
    ] {
        let urls = http1_backend(move |mut backend, _| {
            drop(request_head(&mut backend));
            backend
                .write_all(format!("HTTP/1.1 200 OK\r\n{fields}\r\n\r\n0\r\n\r\n").as_bytes())
                .unwrap();
        });
        with_tunnel(&urls, |gateway| async move {
            assert_eq!(
                gateway.send(get("/")).error().await.0,
                "GW_BACKEND_INVALID_RESPONSE",
                "{fields}"
            );
        });
    }
}

#[test]
fn connection_with_a_body_announced_for_a_204_is_not_reused() {
    let urls = http1_backend(|mut backend, number| {
        while !request_head(&mut backend).is_empty() {
            let answer = format!(
                "HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\
                 X-Connection: {number}\r\n\r\n"
            );
            backend.write_all(answer.as_bytes()).unwrap();
        }
    });
    with_tunnel(&urls, |gateway| async move {
        for number in ["0", "1"] {
            let head = gateway.send(get("/")).response().await.head;
            assert_eq!(
                (head.status.as_u16(), &head.headers["x-connection"]),
                (204, &HeaderValue::from_static(number))
            );
        }
    });
}

#[test]
fn bytes_behind_a_response_are_not_the_next_one() {
    let urls = http1_backend(|mut backend, number| {
        while !request_head(&mut backend).is_empty() {
            let answer = format!(
                "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{number}HTTP/1.1 200 OK\r\n\
                 Content-Length: 6\r\n\r\nforged"
            );
            backend.write_all(answer.as_bytes()).unwrap();
        }
    });
    with_tunnel(&urls, |gateway| async move {
        for number in ["0", "1", "2"] {
            let exchange = gateway.send(get("/"));
            exchange.response().await;
            assert_eq!(exchange.body().await.unwrap(), number);
        }
    });
}

#[test]
fn a_connection_that_closes_takes_no_further_request() {
    let urls = http1_backend(|mut backend, number| {
        // Goes on to read, although it has announced the end.
        while !request_head(&mut backend).is_empty() {
            let answer = format!(
                "HTTP/1.1 200 OK\r\nConnection: x, Close\r\nContent-Length: 1\r\n\r\n{number}"
            );
            backend.write_all(answer.as_bytes()).unwrap();
        }
    });
    with_tunnel(&urls, |gateway| async move {
        for number in ["0", "1", "2"] {
            let exchange = gateway.send(get("/"));
            exchange.response().await;
            assert_eq!(exchange.body().await.unwrap(), number);
        }
    });
}
