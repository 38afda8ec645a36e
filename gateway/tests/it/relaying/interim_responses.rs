//! Interim responses from the backend to the caller (RFC 9110 §15.2).

use http::{Method, StatusCode};

use super::response_with;
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
            peer.send(response_with(str::from_utf8(&body).unwrap()));
        }
    })
}

const EXPECTING: &str = "Expect: 100-continue\r\nContent-Length: 5\r\n\r\n";

#[test]
fn http1_callers_get_interim_responses_in_order() {
    let scene = Scene::service().agent_to(hinting()).start();
    let mut caller = scene.connect();
    for _ in 0..2 {
        caller.send(scene.request("POST /", EXPECTING));
        for link in ["</a.css>; rel=preload", "</b.css>; rel=preload"] {
            let hint = caller.response_head(&Method::POST).unwrap();
            assert_eq!(hint.status, StatusCode::EARLY_HINTS);
            assert_eq!(hint.headers["link"], link);
            assert_eq!(hint.headers.len(), 1);
        }
        let interim = caller.response_head(&Method::POST).unwrap();
        assert_eq!(interim.status, StatusCode::CONTINUE);
        assert_eq!(caller.ask("hello").body, b"hello");
    }
}

#[test]
fn http_1_0_callers_get_no_interim_responses() {
    let scene = Scene::service().agent_to(hinting()).start();
    let old = scene.get("/").replace("HTTP/1.1", "HTTP/1.0");
    assert_eq!(scene.connect().ask(old).status, 200);
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
        while interim.last() != Some(&100) {
            let head = std::future::poll_fn(|cx| response.poll_informational(cx))
                .await
                .unwrap()
                .unwrap();
            interim.push(head.status().as_u16());
        }
        assert_eq!(interim, [103, 103, 100]);
        upload.send_data("hello".into(), true).unwrap();
        assert_eq!(whole(response).await.body, b"hello");
    });
}

#[test]
fn a_backend_may_refuse_an_expected_body() {
    let backend = backend::start(|mut peer| {
        peer.request_head().unwrap();
        peer.send("HTTP/1.1 417 Expectation Failed\r\nContent-Length: 2\r\n\r\nno");
        assert!(peer.is_closed());
    });
    let scene = Scene::service().agent_to(backend).start();
    let mut caller = scene.connect();
    let response = caller.ask(scene.request("POST /", EXPECTING));
    assert_eq!(response.status, 417);
    // No 100 was sent, so a body may or may not follow: the connection closes.
    assert_eq!(response.header("connection"), "close");
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
    let interim = caller.response_head(&Method::POST).unwrap();
    assert_eq!(interim.status, StatusCode::CONTINUE);
    assert_eq!(caller.ask("a=b").status, 400);
}
