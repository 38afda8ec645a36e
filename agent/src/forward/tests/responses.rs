//! Responses of HTTP/1.1 backends.

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
        backend.write_all(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nX-Gw-Status: forged\r\n\r\n").unwrap();
        resumed.lock().unwrap().recv().unwrap();
        backend.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n").unwrap();
        backend.write_all(&body).unwrap();
    });
    with_tunnel(&urls, |requests| async move {
        let mut request = Request::post(format!("https://{HOST}/")).body(()).unwrap();
        request.headers_mut().insert("expect", HeaderValue::from_static("100-continue"));
        request.headers_mut().insert("content-length", HeaderValue::from_static("5"));
        let (mut response, mut upload) = send(&requests, request, false).await;
        let interim = std::future::poll_fn(|cx| response.poll_informational(cx)).await.unwrap().unwrap();
        assert_eq!(interim.status(), 100);
        upload.send_data(Bytes::from_static(b"hello"), true).unwrap();
        let interim = std::future::poll_fn(|cx| response.poll_informational(cx)).await.unwrap().unwrap();
        assert_eq!((interim.status().as_u16(), interim.headers().len()), (103, 1));
        assert_eq!(interim.headers()["link"], "</a>");
        resume.send(()).unwrap();
        let mut response = response.await.unwrap();
        assert_eq!(
            (response.status().as_u16(), read_body(response.body_mut()).await.unwrap().as_str()),
            (200, "hello")
        );
    });
}

#[test]
fn every_response_has_the_agents_timing_and_not_the_backends() {
    let urls = http1_backend(|mut backend, number| {
        while !request_head(&mut backend).is_empty() {
            let answer: &[u8] = match number {
                0 => b"HTTP/1.1 200 OK\r\nX-Gw-Timing: 4000000000,4000000000\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
                1 => b"HTTP/1.1 101 Yes\r\nUpgrade: foo\r\nX-Gw-Timing: 4000000000,4000000000\r\n\r\n",
                _ => b"nonsense\r\n\r\n",
            };
            backend.write_all(answer).unwrap();
        }
    });
    let timing = |response: &Response<RecvStream>| {
        let values: Vec<_> = response.headers().get_all(X_GW_TIMING).iter().collect();
        assert_eq!(values.len(), 1);
        AgentTiming::parse(values[0]).unwrap()
    };
    let is_real = |us: u32| us < 60_000_000;
    with_tunnel(&urls, |requests| async move {
        for request in [get("/"), upgrade("foo")] {
            let response = send(&requests, request, false).await.0.await.unwrap();
            let AgentTiming { agent_us, backend_first_byte_us } = timing(&response);
            assert!(is_real(agent_us) && backend_first_byte_us.is_some_and(is_real));
        }
        let response = send(&requests, get("/"), true).await.0.await.unwrap();
        assert!(response.headers().contains_key(X_GW_AGENT_ERROR));
        assert_eq!(timing(&response).backend_first_byte_us, None);
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
            0 => backend.write_all(format!("{chunked}zz\r\n").as_bytes()).unwrap(),
            1 => {
                backend.write_all(format!("{chunked}5\r\nhello\r\n").as_bytes()).unwrap();
                resumed.lock().unwrap().recv().unwrap();
                backend.write_all(b"zz\r\n").unwrap();
            }
            _ => backend.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello").unwrap(),
        }
    });
    with_tunnel(&urls, |requests| async move {
        let (response, _) = send(&requests, get("/"), true).await;
        assert_eq!(error_of(response).await.0, "GW_BACKEND_INVALID_RESPONSE");

        let (response, _) = send(&requests, get("/"), true).await;
        let mut response = response.await.unwrap();
        assert_eq!(read_exact(response.body_mut(), 5).await, b"hello");
        resume.send(()).unwrap();
        let end = std::future::poll_fn(|cx| stream::poll_receive(response.body_mut(), cx)).await;
        let Ok(Received::Trailers(trailers)) = end else { panic!("{end:?}") };
        assert_eq!(trailers[X_GW_AGENT_ERROR], "GW_BACKEND_INVALID_RESPONSE");

        let (response, _) = send(&requests, get("/"), true).await;
        let mut response = response.await.unwrap();
        assert_eq!(read_exact(response.body_mut(), 5).await, b"hello");
        assert_eq!(read_body(response.body_mut()).await, Err(stream::StreamClosed { is_reset: true }));
    });
}

#[test]
fn separate_cookie_fields_are_joined() {
    let urls = http1_backend(|mut backend, _| {
        let head = request_head(&mut backend);
        let text = field(&head, "cookie").unwrap();
        backend
            .write_all(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{text}", text.len()).as_bytes())
            .unwrap();
    });
    with_tunnel(&urls, |requests| async move {
        let mut request = get("/");
        request.headers_mut().append(COOKIE, HeaderValue::from_static("a=1"));
        request.headers_mut().append(COOKIE, HeaderValue::from_static("b=2"));
        let (response, _) = send(&requests, request, true).await;
        assert_eq!(read_body(response.await.unwrap().body_mut()).await.unwrap(), "a=1; b=2");
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
            backend.write_all(format!("HTTP/1.1 200 OK\r\n{fields}\r\n\r\n0\r\n\r\n").as_bytes()).unwrap();
        });
        with_tunnel(&urls, |requests| async move {
            let (response, _) = send(&requests, get("/"), true).await;
            assert_eq!(error_of(response).await.0, "GW_BACKEND_INVALID_RESPONSE", "{fields}");
        });
    }
}

#[test]
fn connection_with_a_body_announced_for_a_204_is_not_reused() {
    let urls = http1_backend(|mut backend, number| {
        while !request_head(&mut backend).is_empty() {
            let answer =
                format!("HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\nX-Connection: {number}\r\n\r\n");
            backend.write_all(answer.as_bytes()).unwrap();
        }
    });
    with_tunnel(&urls, |requests| async move {
        for number in ["0", "1"] {
            let (response, _) = send(&requests, get("/"), true).await;
            let response = response.await.unwrap();
            assert_eq!(
                (response.status().as_u16(), &response.headers()["x-connection"]),
                (204, &HeaderValue::from_static(number))
            );
        }
    });
}
