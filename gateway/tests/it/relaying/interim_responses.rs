//! Interim responses from the backend to the caller (RFC 9110 §15.2).

use http::{Method, StatusCode};

use crate::support::peers::http2_caller::{on_a_reactor, whole};
use crate::support::peers::{backend, http2_caller};
use crate::support::scene::Scene;

/// A backend that sends 103 responses, then 100 if the request expects it, then the body that it
/// received.
fn hinting() -> String {
    backend::start(|mut peer| {
        while let Ok(head) = peer.request_head() {
            peer.send(
                "HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\nX-Gw-Status: forged\r\n\
                 \r\n",
            );
            peer.send(
                "HTTP/1.1 103 Early Hints\r\nLink: </b.css>; rel=preload\r\nConnection: x\r\n\
                 X: 1\r\n\r\n",
            );
            if head.expects_continue {
                peer.send("HTTP/1.1 100 Continue\r\n\r\n");
            }
            let (body, _) = peer.body(head.framing).unwrap();
            peer.send(format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n",
                body.len()
            ));
            peer.send(body);
        }
    })
}

#[test]
fn http1_callers_get_interim_responses_in_order() {
    let scene = Scene::service().agent_to(hinting()).start();
    let mut caller = scene.connect();
    for _ in 0..2 {
        caller.send(scene.request(
            "POST /",
            "Expect: 100-continue\r\nContent-Length: 5\r\n\r\n",
        ));
        for link in ["</a.css>; rel=preload", "</b.css>; rel=preload"] {
            let hint = caller.response_head(&Method::POST).unwrap();
            assert_eq!(
                (
                    hint.status.as_u16(),
                    hint.headers["link"].to_str().unwrap(),
                    hint.headers.len()
                ),
                (103, link, 1)
            );
        }
        assert_eq!(
            caller.response_head(&Method::POST).unwrap().status,
            StatusCode::CONTINUE
        );
        caller.send("hello");
        assert_eq!(caller.response().body, b"hello");
    }
    // HTTP/1.0 has no interim responses.
    let old = scene.get("/").replace("HTTP/1.1", "HTTP/1.0");
    caller.send(old);
    assert_eq!(caller.response().status, 200);
}

#[test]
fn http2_callers_get_interim_responses_in_order() {
    let scene = Scene::service().agent_to(hinting()).start();
    on_a_reactor(async {
        let caller = http2_caller::connect(&scene).await;
        let request = caller
            .request(&Method::POST, "/")
            .header("expect", "100-continue")
            .header("content-length", 5);
        let (mut response, mut upload) = caller.begin(request, false).await;
        let mut interim = Vec::new();
        while interim.last() != Some(&StatusCode::CONTINUE) {
            let head = std::future::poll_fn(|cx| response.poll_informational(cx))
                .await
                .unwrap()
                .unwrap();
            interim.push(head.status());
        }
        assert_eq!(
            interim,
            [
                StatusCode::EARLY_HINTS,
                StatusCode::EARLY_HINTS,
                StatusCode::CONTINUE
            ]
        );
        upload.send_data("hello".into(), true).unwrap();
        assert_eq!(whole(response).await.body, b"hello");
    });
}

#[test]
fn a_backend_may_refuse_an_expected_body() {
    let scene = Scene::service()
        .agent_to(backend::start(|mut peer| {
            peer.request_head().unwrap();
            peer.send("HTTP/1.1 417 Expectation Failed\r\nContent-Length: 2\r\n\r\nno");
            assert!(peer.is_closed());
        }))
        .start();
    let mut caller = scene.connect();
    caller.send(scene.request(
        "POST /",
        "Expect: 100-continue\r\nContent-Length: 5\r\n\r\n",
    ));
    let response = caller.response();
    // No 100 was sent, so a body may or may not follow: the connection closes.
    assert_eq!(
        (response.status.as_u16(), response.header("connection")),
        (417, "close")
    );
    assert!(caller.is_closed());
    scene.wait_until_slots_are_free();
}

#[test]
fn the_apex_answers_expect_100_continue() {
    let scene = Scene::service().agent().start();
    let mut caller = scene.connect();
    caller.send(
        "POST /oauth/token HTTP/1.1\r\nHost: eu1.gw.localhost\r\nExpect: 100-continue\r\n\
         Content-Length: 3\r\n\r\n",
    );
    assert_eq!(
        caller.response_head(&Method::POST).unwrap().status,
        StatusCode::CONTINUE
    );
    caller.send("a=b");
    assert_eq!(caller.response().status, 400);
}
