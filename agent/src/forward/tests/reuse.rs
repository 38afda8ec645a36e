//! Connections that end while a request is sent on them, and how long they are used again.

use super::tunnel::Gateway;
use super::*;

/// A backend that answers the first request of each connection, and closes at the next one. `unread` leaves a part of that unread,
/// so that the agent gets a reset in place of the end. Returns its URL, and the number of requests that have arrived.
fn closing_backend(unread: bool) -> (Vec<String>, Arc<AtomicUsize>) {
    let seen = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&seen);
    let urls = http1_backend(move |mut backend, _| {
        request_head(&mut backend);
        counted.fetch_add(1, Ordering::Relaxed);
        backend
            .write_all(b"HTTP/1.1 204 No Content\r\n\r\n")
            .unwrap();
        if unread {
            let mut first = [0];
            read(&mut backend, &mut first);
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
        Driver::choose().unwrap().block_on(serve).unwrap();
        // The ring may still read the socket, which it keeps open.
        drop(socket.shutdown(std::net::Shutdown::Both));
    });
    (vec![format!("h2c://{address}")], seen)
}

fn with_method(method: Method) -> OutboundRequest {
    OutboundRequest { method, ..get("/") }
}

/// Asserts that the second request on a connection is repeated, or not.
async fn assert_repeated(gateway: &Gateway, seen: &AtomicUsize, method: Method, repeated: bool) {
    let before = seen.load(Ordering::Relaxed);
    let name = method.to_string();
    let first = gateway.send(with_method(Method::POST)).response().await;
    assert!(first.head.status.is_success());
    let second = gateway.send(with_method(method));
    if repeated {
        assert!(second.response().await.head.status.is_success(), "{name}");
        // Closes the connection, so that the next test begins with a new one.
        gateway.send(with_method(Method::POST)).error().await;
    } else {
        let refusal = second.refusal().await;
        let (code, unsent) = (&refusal.code[..], refusal.unsent);
        assert_eq!((code, unsent), (&b"GW_BACKEND_RESET"[..], false), "{name}");
    }
    let arrived = if repeated { 4 } else { 2 };
    assert_eq!(seen.load(Ordering::Relaxed) - before, arrived, "{name}");
}

#[test]
fn safe_requests_are_repeated_once_after_a_connection_that_has_ended() {
    for (urls, seen) in [
        closing_backend(false),
        closing_backend(true),
        closing_http2_backend(),
    ] {
        with_tunnel(&urls, |gateway| async move {
            for method in [Method::GET, Method::HEAD, Method::OPTIONS, Method::TRACE] {
                assert_repeated(&gateway, &seen, method, true).await;
            }
            for method in [Method::POST, Method::PUT, Method::DELETE, Method::PATCH] {
                assert_repeated(&gateway, &seen, method, false).await;
            }
            gateway.pool.set_retries(false);
            assert_repeated(&gateway, &seen, Method::GET, false).await;
            gateway.pool.set_retries(true);
            assert_repeated(&gateway, &seen, Method::GET, true).await;
        });
    }
}

#[test]
fn requests_that_cannot_be_repeated_take_no_connection_that_was_idle_for_long() {
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&connections);
    let urls = http1_backend(move |mut backend, _| {
        counted.fetch_add(1, Ordering::Relaxed);
        while !request_head(&mut backend).is_empty() {
            backend
                .write_all(b"HTTP/1.1 204 No Content\r\n\r\n")
                .unwrap();
        }
    });
    with_tunnel(&urls, |gateway| async move {
        gateway.send(get("/")).response().await;
        // The time itself is what is tested.
        runtime::sleep(Duration::from_millis(1100)).await;
        gateway.send(post(Framing::None)).response().await;
        assert_eq!(connections.load(Ordering::Relaxed), 2);
        gateway.pool.set_retries(false);
        runtime::sleep(Duration::from_millis(1100)).await;
        gateway.send(get("/")).response().await;
        assert_eq!(connections.load(Ordering::Relaxed), 3);
    });
}
