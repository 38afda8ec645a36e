//! Connections that end while a request is sent on them, and how long they are used again.

use std::cell::Cell;

use super::*;

/// A backend that answers the first request of each connection, and closes at the next one.
/// `unread` leaves a part of that unread, so that the agent gets a reset in place of the end.
/// Returns its URL, and the number of requests that have arrived.
fn closing_backend(unread: bool) -> (Vec<String>, Arc<AtomicUsize>) {
    let seen = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&seen);
    let urls = http1_backend(move |mut backend, _| {
        request_head(&mut backend);
        counted.fetch_add(1, Ordering::Relaxed);
        write(&mut backend, b"HTTP/1.1 204 No Content\r\n\r\n");
        if unread {
            read(&mut backend, &mut [0]);
        } else {
            request_head(&mut backend);
        }
        counted.fetch_add(1, Ordering::Relaxed);
    });
    (urls, seen)
}

/// As [`closing_backend`], over HTTP/2.
fn closing_http2_backend() -> (Vec<String>, Arc<AtomicUsize>) {
    let seen = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&seen);
    let address = listen(move |connection, _| {
        let socket = connection.try_clone().unwrap();
        let serve = async {
            let socket = BackendStream::Plain(Socket::from_fd(connection.into()).unwrap());
            let mut connection = h2::server::handshake(socket).await.unwrap();
            let mut number = 0;
            while number < 2
                && let Some(Ok((_, mut respond))) = connection.accept().await
            {
                counted.fetch_add(1, Ordering::Relaxed);
                number += 1;
                if number == 1 {
                    respond.send_response(Response::new(()), true).unwrap();
                }
            }
        };
        block_on(serve);
        // The ring may still read the socket, which it keeps open.
        drop(socket.shutdown(std::net::Shutdown::Both));
    });
    (vec![format!("h2c://{address}")], seen)
}

fn with_method(method: Method) -> OutboundRequest {
    OutboundRequest { method, ..get("/") }
}

/// Whether the second request on a connection is repeated. `retries` is the setting of the service.
fn is_repeated(
    backend: fn() -> (Vec<String>, Arc<AtomicUsize>),
    method: &Method,
    retries: bool,
) -> bool {
    for _ in 0..5 {
        let (urls, seen) = backend();
        let answer = Cell::new(None);
        with_tunnel(&urls, |gateway| {
            let answer = &answer;
            async move {
                gateway.pool.set_retries(retries);
                let first = gateway.send(with_method(Method::POST)).response().await;
                assert!(first.head.status.is_success());
                let second = gateway.send(with_method(method.clone()));
                answer.set(Some(second.down.receive().await.unwrap()));
            }
        });
        match (answer.take().unwrap(), seen.load(Ordering::Relaxed)) {
            (ReceivedPart::Head(Kind::Response, _), 3) => return true,
            (ReceivedPart::Head(Kind::Refused, payload), 2) => {
                let refusal = head::parse_refusal(payload).unwrap();
                assert_refusal(&refusal, "GW_BACKEND_RESET", false);
                return false;
            }
            // The machine was so busy that the connection had been idle for too long, and a new one
            // was used.
            (ReceivedPart::Head(Kind::Response, _), 2) => {}
            (answer, seen) => panic!("{method}: {answer:?} after {seen} requests"),
        }
    }
    panic!("no connection was used again")
}

#[test]
fn safe_requests_are_repeated_once_after_a_connection_that_has_ended() {
    for backend in [
        || closing_backend(false),
        || closing_backend(true),
        closing_http2_backend,
    ] {
        for method in [Method::GET, Method::HEAD, Method::OPTIONS, Method::TRACE] {
            assert!(is_repeated(backend, &method, true), "{method}");
        }
        for method in [Method::POST, Method::PUT, Method::DELETE, Method::PATCH] {
            assert!(!is_repeated(backend, &method, true), "{method}");
        }
        assert!(!is_repeated(backend, &Method::GET, false));
    }
}

#[test]
fn requests_that_cannot_be_repeated_take_no_connection_that_was_idle_for_long() {
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&connections);
    let urls = http1_answers(move |_, number| {
        counted.fetch_max(number + 1, Ordering::Relaxed);
        "HTTP/1.1 204 No Content\r\n\r\n"
    });
    with_tunnel(&urls, |gateway| async move {
        gateway.send(get("/")).response().await;
        // Longer than requests of other methods take a connection again.
        runtime::sleep(Duration::from_millis(1100)).await;
        gateway.send(post(Framing::None)).response().await;
        assert_eq!(connections.load(Ordering::Relaxed), 2);
        gateway.pool.set_retries(false);
        runtime::sleep(Duration::from_millis(1100)).await;
        gateway.send(get("/")).response().await;
        assert_eq!(connections.load(Ordering::Relaxed), 3);
    });
}
