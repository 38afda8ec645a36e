//! Responses of HTTP/1.1 backends.

use gw_bed::http1::ok;
use gw_shared::tunnel::timing::AgentTiming;

use super::*;

#[test]
fn interim_responses_are_relayed_without_delay() {
    let (resume, resumed) = mpsc::channel::<()>();
    let resumed = std::sync::Mutex::new(resumed);
    let urls = http1_backend(move |mut backend, _| {
        let head = request_head(&mut backend);
        assert_eq!(field(&head, "expect"), Some("100-continue"));
        write(&mut backend, b"HTTP/1.1 100 Continue\r\n\r\n");
        let mut body = [0; 5];
        backend.read_exact(&mut body).unwrap();
        let interim = "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nX-Gw-Status: forged\r\n\r\n";
        write(&mut backend, interim);
        resumed.lock().unwrap().recv().unwrap();
        write(&mut backend, ok(body));
    });
    with_tunnel(&urls, |gateway| async move {
        let request = with_field(post(Framing::Length(5)), "expect", "100-continue");
        let exchange = gateway.send(request);
        assert_eq!(exchange.interim().await.status, 100);
        exchange.upload("hello", true).await;
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
    let urls = http1_answers(|_, number| match number {
        0 => {
            "HTTP/1.1 200 OK\r\nX-Gw-Timing: 4000000000,4000000000\r\nContent-Length: 0\r\n\
             Connection: close\r\n\r\n"
        }
        1 => "HTTP/1.1 101 Yes\r\nUpgrade: foo\r\nX-Gw-Timing: 4000000000,4000000000\r\n\r\n",
        _ => "nonsense\r\n\r\n",
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
    const CHUNKED: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n";
    const LENGTH: &str = "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello";
    for (begin, rest, code) in [
        (CHUNKED, "zz\r\n", "GW_BACKEND_INVALID_RESPONSE"),
        (LENGTH, "", "GW_BACKEND_RESET"),
    ] {
        let (resume, resumed) = mpsc::channel::<()>();
        let resumed = std::sync::Mutex::new(resumed);
        let urls = http1_backend(move |mut backend, _| {
            drop(request_head(&mut backend));
            write(&mut backend, begin);
            resumed.lock().unwrap().recv().unwrap();
            write(&mut backend, rest);
        });
        with_tunnel(&urls, |gateway| async move {
            let exchange = gateway.send(get("/"));
            exchange.response().await;
            assert_eq!(exchange.bytes(5).await, b"hello");
            resume.send(()).unwrap();
            exchange.assert_reset(code).await;
        });
    }
}

#[test]
fn a_response_whose_first_chunk_is_invalid_is_rejected() {
    let urls = http1_answers(|_, _| "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n");
    with_tunnel(&urls, |gateway| async move {
        gateway
            .send(get("/"))
            .assert_error("GW_BACKEND_INVALID_RESPONSE", "")
            .await;
    });
}

#[test]
fn ambiguous_responses_are_rejected() {
    for fields in [
        "Content-Length: 1\r\nContent-Length: 2",
        "Content-Length: 1\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: gzip, chunked",
    ] {
        let answer = format!("HTTP/1.1 200 OK\r\n{fields}\r\n\r\n0\r\n\r\n");
        let urls = http1_answers(move |_, _| answer.clone());
        with_tunnel(&urls, |gateway| async move {
            let code = gateway.send(get("/")).error().await.0;
            assert_eq!(code, "GW_BACKEND_INVALID_RESPONSE", "{fields}");
        });
    }
}

#[test]
fn connection_with_a_body_announced_for_a_204_is_not_reused() {
    let urls = http1_answers(|_, number| {
        format!(
            "HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\nX-Connection: {number}\r\n\
             \r\n"
        )
    });
    with_tunnel(&urls, |gateway| async move {
        for number in ["0", "1"] {
            let head = gateway.send(get("/")).response().await.head;
            assert_eq!(head.status, 204);
            assert_eq!(head.headers["x-connection"], number);
        }
    });
}

/// Asserts that each of three requests gets the number of another connection.
fn assert_not_reused(urls: &[String]) {
    with_tunnel(urls, |gateway| async move {
        for number in ["0", "1", "2"] {
            let exchange = gateway.send(get("/"));
            exchange.response().await;
            assert_eq!(exchange.body().await.unwrap(), number);
        }
    });
}

#[test]
fn bytes_behind_a_response_are_not_the_next_one() {
    assert_not_reused(&http1_answers(|_, number| {
        format!(
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{number}HTTP/1.1 200 OK\r\n\
             Content-Length: 6\r\n\r\nforged"
        )
    }));
}

/// The backend goes on to read, although it has announced the end.
#[test]
fn a_connection_that_closes_takes_no_further_request() {
    assert_not_reused(&http1_answers(|_, number| {
        format!("HTTP/1.1 200 OK\r\nConnection: x, Close\r\nContent-Length: 1\r\n\r\n{number}")
    }));
}
