//! Ends that die in the middle.

use std::sync::{Mutex, mpsc};

use http::Method;

use crate::backend;
use crate::caller::{connect, get, request};
use crate::{SOON, demo, wait_until_slots_are_free};

#[test]
fn a_response_that_breaks_off_never_looks_complete() {
    for head in ["Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", "Content-Length: 100\r\n\r\nhello"] {
        let (release, held) = mpsc::channel::<()>();
        let held = Mutex::new(held);
        let demo = demo(Some(backend::start(move |mut peer| {
            drop(peer.request());
            peer.send(format!("HTTP/1.1 200 OK\r\n{head}"));
            // Until the caller has seen the beginning: before that, an error could still be told.
            let _ = held.lock().unwrap().recv_timeout(SOON);
        })));
        let mut caller = connect(&demo);
        caller.send(get(&demo, "/"));
        let begun = caller.response_head(&Method::GET).unwrap();
        assert_eq!(begun.status, 200);
        release.send(()).unwrap();
        assert!(caller.body(begun.framing).is_err(), "{head}");
        wait_until_slots_are_free(&demo);
    }
}

#[test]
fn a_caller_that_leaves_ends_the_backend_request_at_once() {
    let (tell, backend_saw) = mpsc::channel();
    let demo = demo(Some(backend::start(move |mut peer| {
        peer.request_head().unwrap();
        tell.send("head").unwrap();
        while peer.bytes(1).is_ok() {}
        tell.send("end").unwrap();
    })));
    // Waiting for a response, and in the middle of an upload.
    for rest in ["\r\n".to_owned(), "Content-Length: 10\r\n\r\nabc".to_owned()] {
        let mut caller = connect(&demo);
        caller.send(request(&demo, "POST /", &rest));
        assert_eq!(backend_saw.recv_timeout(SOON), Ok("head"));
        drop(caller);
        assert_eq!(backend_saw.recv_timeout(SOON), Ok("end"));
        wait_until_slots_are_free(&demo);
    }
}

#[test]
fn a_backend_that_answers_early_need_not_read_the_upload() {
    let demo = demo(Some(backend::start(|mut peer| {
        peer.request_head().unwrap();
        peer.send("HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nno!");
        // Stays open without reading: the upload cannot go on.
        while !peer.is_closed() {
            drop(peer.bytes(1));
        }
    })));
    let mut caller = connect(&demo);
    caller.send(request(&demo, "POST /", "Content-Length: 100000000\r\n\r\n"));
    let response = caller.response();
    assert_eq!((response.status.as_u16(), response.body.as_slice()), (413, b"no!".as_slice()));
    wait_until_slots_are_free(&demo);
}

#[test]
fn a_kept_connection_that_the_backend_closed_is_tried_again_where_that_is_safe() {
    // Answers one request on each connection and closes without saying so.
    let demo = demo(Some(backend::start(|mut peer| {
        drop(peer.request());
        peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    })));
    let mut caller = connect(&demo);
    for _ in 0..200 {
        caller.send(get(&demo, "/"));
        assert_eq!(caller.response().status, 200);
    }
}

#[test]
fn a_request_that_a_backend_took_is_not_sent_again() {
    let (seen, requests) = mpsc::channel();
    let demo = demo(Some(backend::start(move |mut peer| {
        // Answers the first request on each connection, takes the second and closes.
        let mut first = true;
        while let Ok((head, _, _)) = peer.request() {
            seen.send(head.target.to_string()).unwrap();
            if !std::mem::take(&mut first) {
                return;
            }
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        }
    })));
    let mut caller = connect(&demo);
    for line in ["GET /a", "DELETE /b"] {
        caller.send(request(&demo, line, "\r\n"));
        assert_eq!(caller.response().status, 200);
        caller.send(request(&demo, line, "\r\n"));
        assert_eq!(caller.response().code(), "GW_BACKEND_RESET");
    }
    wait_until_slots_are_free(&demo);
    assert_eq!(requests.try_iter().collect::<Vec<_>>(), ["/a", "/a", "/b", "/b"]);
}

#[test]
fn a_caller_that_leaves_is_noticed_behind_what_it_pipelined() {
    let (tell, backend_saw) = mpsc::channel();
    let demo = demo(Some(backend::start(move |mut peer| {
        peer.request_head().unwrap();
        tell.send("head").unwrap();
        while peer.bytes(1).is_ok() {}
        tell.send("end").unwrap();
    })));
    let mut caller = connect(&demo);
    // More than the gateway reads ahead, less than what its socket takes.
    caller.send(get(&demo, "/").repeat(600));
    assert_eq!(backend_saw.recv_timeout(SOON), Ok("head"));
    drop(caller);
    assert_eq!(backend_saw.recv_timeout(SOON / 3), Ok("end"));
    wait_until_slots_are_free(&demo);
}
