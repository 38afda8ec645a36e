//! Requests that an HTTP/2 backend reports as not processed (RFC 9113 §8.7).

use super::tunnel::Exchange;
use super::*;

/// A backend that refuses requests on its first `refusing` connections, after it has read what
/// `reads` says of their bodies. Answers the others with their bodies. Returns its URL, and the
/// number of requests that have arrived.
fn refusing_backend(refusing: usize, reads: Read) -> (Vec<String>, Arc<AtomicUsize>) {
    let seen = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&seen);
    let urls = http2_backend_with(
        h2::server::Builder::new()
            .enable_connect_protocol()
            .initial_window_size(1 << 20),
        move |request, mut respond, connection| {
            counted.fetch_add(1, Ordering::Relaxed);
            async move {
                let is_upgrade = request.method() == Method::CONNECT;
                let mut body = request.into_body();
                if connection < refusing {
                    let mut left = match reads {
                        Read::Whole => usize::MAX,
                        Read::Bytes(bytes) => bytes,
                    };
                    while left > 0
                        && let Some(data) = body.data().await
                    {
                        let length = data.unwrap().len();
                        stream::release(&mut body, length);
                        left = left.saturating_sub(length);
                    }
                    return respond.send_reset(Reason::REFUSED_STREAM);
                }
                let mut sent = respond.send_response(Response::new(()), false).unwrap();
                if !is_upgrade {
                    let text = read_body(&mut body).await;
                    sent.send_data(Bytes::from(text), true).unwrap();
                }
            }
        },
    );
    (urls, seen)
}

/// What a backend reads of a body before it refuses the request.
#[derive(Clone, Copy)]
enum Read {
    Whole,
    Bytes(usize),
}

async fn send(exchange: &Exchange, body: &str, end: bool) {
    let body = Bytes::copy_from_slice(body.as_bytes());
    exchange.up.send(body, end).await.unwrap();
}

#[test]
fn a_kept_body_is_sent_again_from_its_beginning() {
    for (refusing, reads) in [
        (1, Read::Whole),
        (5, Read::Whole),
        (5, Read::Bytes(0)),
        (3, Read::Bytes(40_000)),
    ] {
        let (urls, seen) = refusing_backend(refusing, reads);
        with_tunnel(&urls, |gateway| async move {
            for framing in [Framing::Chunked, Framing::Length(64 * 1024)] {
                let exchange = gateway.send(post(framing));
                let whole = "0123456789abcdef".repeat(4096);
                // Small pieces are kept, too.
                send(&exchange, &whole[..10], false).await;
                send(&exchange, &whole[10..40_000], false).await;
                send(&exchange, &whole[40_000..], true).await;
                assert_eq!(exchange.response().await.head.status, 200);
                assert_eq!(exchange.body().await.unwrap(), whole);
            }
            assert_eq!(seen.load(Ordering::Relaxed), refusing + 2);
        });
    }
}

#[test]
fn the_rest_of_a_body_follows_what_was_kept() {
    let (urls, seen) = refusing_backend(2, Read::Bytes(5));
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(post(Framing::Chunked));
        send(&exchange, "begin", false).await;
        while seen.load(Ordering::Relaxed) < 3 {
            runtime::sleep(Duration::from_millis(1)).await;
        }
        // Nothing is kept any more once the response has begun, so the rest may be longer than 64
        // KiB.
        assert_eq!(exchange.response().await.head.status, 200);
        let rest = "x".repeat(300_000);
        send(&exchange, &rest, true).await;
        assert_eq!(exchange.body().await.unwrap(), format!("begin{rest}"));
    });
}

#[test]
fn a_request_is_sent_again_five_times_and_then_refused_as_not_processed() {
    let (urls, seen) = refusing_backend(usize::MAX, Read::Bytes(0));
    with_tunnel(&urls, |gateway| async move {
        let mut sent = 0;
        for request in [get("/"), post(Framing::None), upgrade("foo")] {
            let refusal = gateway.send(request).refusal().await;
            assert_refusal(&refusal, "GW_BACKEND_RESET", true);
            sent += 6;
            assert_eq!(seen.load(Ordering::Relaxed), sent);
        }
        // The gateway may have sent the body after the notice, and keeps none.
        let request = with_field(post(Framing::Chunked), "x-gw-await-acceptance", "1");
        assert!(!gateway.send(request).refusal().await.unsent);
        assert_eq!(seen.load(Ordering::Relaxed), sent + 6);
    });
}

#[test]
fn a_request_of_whose_body_more_was_read_is_sent_once() {
    let (urls, seen) = refusing_backend(usize::MAX, Read::Bytes(64 * 1024 + 1));
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(post(Framing::Chunked));
        send(&exchange, &"x".repeat(64 * 1024 + 1), false).await;
        assert!(exchange.refusal().await.unsent);
        assert_eq!(seen.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn a_refused_extended_connect_is_sent_again() {
    let (urls, seen) = refusing_backend(5, Read::Bytes(0));
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(upgrade("websocket"));
        assert_eq!(exchange.response().await.head.status, 101);
        assert_eq!(seen.load(Ordering::Relaxed), 6);
    });
}

#[test]
fn a_request_that_was_refused_after_an_interim_response_is_not_sent_again() {
    let seen = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&seen);
    let received = Arc::new(tokio::sync::Semaphore::new(0));
    let is_received = Arc::clone(&received);
    let urls = http2_backend(move |_, mut respond, _| {
        counted.fetch_add(1, Ordering::Relaxed);
        let is_received = Arc::clone(&is_received);
        async move {
            let interim = Response::builder().status(103).body(()).unwrap();
            respond.send_informational(interim).unwrap();
            is_received.acquire().await.unwrap().forget();
            respond.send_reset(Reason::REFUSED_STREAM);
        }
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(post(Framing::None));
        assert_eq!(exchange.interim().await.status, 103);
        received.add_permits(1);
        assert!(!exchange.refusal().await.unsent);
        assert_eq!(seen.load(Ordering::Relaxed), 1);
    });
}
