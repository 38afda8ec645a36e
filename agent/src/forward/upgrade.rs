//! A request to switch to another protocol (RFC 9110 §7.8), and the bytes of that protocol both ways.

use std::cell::Cell;
use std::task::Poll;

use aws_lc_rs::digest;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use futures_util::future::{Either, select};
use gw_shared::http::UpgradeProtocol;
use gw_shared::http::fields::{self, X_GW_TIMING, X_GW_UPGRADE, X_GW_UPGRADE_METHOD};
use gw_shared::runtime;
use gw_shared::tunnel::incoming::Incoming;
use h2::ext::Protocol;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::header::{CONTENT_LENGTH, HeaderMap, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, UPGRADE};
use http::request::Parts;
use http::{Method, StatusCode};

use crate::backend::{Head, Lease, Pool, RequestHalf, ResponseError, ResponseHalf, Wanted};
use crate::forward::{Failure, final_head, on_the_tunnel, refuse, relay_body, relay_final, send_body, unless_reset};
use crate::telemetry::request_scope::Passage;

/// Forwards an extended CONNECT of the tunnel.
///
/// An HTTP/1.1 connection serves no other request afterwards, be it that the backend has switched or that it declined: the
/// backend's parser, or that of a proxy in front of it, may have left the boundary between messages, which nothing here
/// can see. It closes; requests to switch are rare, and most of them end in a switch.
pub(crate) async fn forward(
    pool: &Pool,
    passage: Passage,
    mut parts: Parts,
    body: RecvStream,
    mut respond: SendResponse<Bytes>,
) {
    let method = parts
        .headers
        .remove(X_GW_UPGRADE_METHOD)
        .map_or(Ok(Method::GET), |method| Method::from_bytes(method.as_bytes()));
    let protocol = parts.extensions.remove::<Protocol>();
    let protocol = protocol.and_then(|protocol| UpgradeProtocol::parse_str(protocol.as_str()));
    let (Some(protocol), Ok(method)) = (protocol, method) else {
        // Not what a gateway sends.
        return respond.send_reset(Reason::PROTOCOL_ERROR);
    };
    parts.method = method;
    fields::join_cookies(&mut parts.headers);
    let lease = match unless_reset(&mut respond, pool.connect(Wanted::Http1, &passage)).await {
        Some(Ok(lease)) => lease,
        Some(Err(error)) => return refuse(&mut respond, &passage, &error.into()),
        None => return,
    };
    passage.connected(&lease);
    match exchange(&lease, parts, &protocol, body, &mut respond, &passage).await {
        Ok(()) => passage.complete(),
        Err(Failure::Over) => lease.abort(),
        Err(Failure::NoResponse(error)) => refuse(&mut respond, &passage, &error.into()),
    }
}

async fn exchange(
    lease: &Lease<'_>,
    mut parts: Parts,
    protocol: &UpgradeProtocol,
    body: RecvStream,
    respond: &mut SendResponse<Bytes>,
    passage: &Passage,
) -> Result<(), Failure> {
    let (ask, websocket) = if lease.is_http2() {
        (Ask::Connect, WebSocket::over_http2(&mut parts.headers, protocol))
    } else {
        (Ask::Upgrade, WebSocket::over_http1(&mut parts.headers, protocol))
    };
    let (request, mut response) = lease.exchange_protocol(&parts, protocol).map_err(Failure::NoResponse)?;
    // What went wrong shows when the response is read.
    let asked = unless_reset(respond, request.head(&parts, lease.authority(&parts))).await;
    asked.ok_or(Failure::Over)?.ok();
    let method = if lease.is_http2() { &Method::CONNECT } else { &parts.method };
    let mut head = final_head(&mut response, method, respond).await?;
    if ask == Ask::Connect && head.status == StatusCode::SWITCHING_PROTOCOLS {
        return Err(Failure::NoResponse(ResponseError::Unasked));
    }
    let switched = match ask {
        Ask::Connect => head.status.is_success(),
        Ask::Upgrade => head.status == StatusCode::SWITCHING_PROTOCOLS,
    };
    if !switched {
        if parts.method == Method::HEAD && response.is_done() {
            // The tunnel's request is CONNECT: END_STREAM with a Content-Length above 0 is malformed there
            // (RFC 9113 §8.1.1).
            head.headers.remove(CONTENT_LENGTH);
        }
        return relay_final(head, response, respond, passage).await;
    }
    let answer = answer(head, ask, protocol, &websocket).map_err(Failure::NoResponse)?;
    let mut on_tunnel = on_the_tunnel(StatusCode::OK, answer);
    on_tunnel.headers_mut().insert(X_GW_UPGRADE, protocol.as_value().clone());
    on_tunnel.headers_mut().insert(X_GW_TIMING, passage.responded(StatusCode::SWITCHING_PROTOCOLS));
    let stream = respond.send_response(on_tunnel, false).map_err(|_| Failure::Over)?;
    relay_both(request, response, body, stream, passage).await
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ask {
    /// HTTP/1.1.
    Upgrade,
    /// Extended CONNECT (RFC 8441).
    Connect,
}

/// The fields of the answer, once it is the one that was asked for.
fn answer(head: Head, ask: Ask, protocol: &UpgradeProtocol, websocket: &WebSocket) -> Result<HeaderMap, ResponseError> {
    let mut headers = head.headers;
    if ask == Ask::Upgrade {
        let mut named = headers.get_all(UPGRADE).iter();
        let named = (named.next(), named.next());
        if !matches!(named, (Some(value), None) if protocol.is(value.as_bytes())) {
            let (asked, got) = (protocol.as_str(), named.0);
            return Err(ResponseError::Switch(format!("asked for {asked:?}, it switched to {got:?}")));
        }
    }
    // The bytes of the protocol have no length (RFC 9110 §8.6).
    headers.remove(CONTENT_LENGTH);
    match websocket {
        WebSocket::Caller | WebSocket::None => {}
        WebSocket::Ours { expected } => {
            if headers.remove(SEC_WEBSOCKET_ACCEPT).as_ref() != Some(expected) {
                return Err(ResponseError::Switch("its Sec-WebSocket-Accept is not the one for our key".to_owned()));
            }
        }
        WebSocket::Expects { accept } => drop(headers.insert(SEC_WEBSOCKET_ACCEPT, accept.clone())),
    }
    Ok(headers)
}

/// Who sees to the key of a WebSocket handshake (RFC 6455 §4.1), which HTTP/2 does without.
enum WebSocket {
    /// It is none.
    None,
    /// Caller and backend between them.
    Caller,
    /// We made the key.
    Ours { expected: HeaderValue },
    /// The caller sent a key, and the backend is asked over HTTP/2: we answer.
    Expects { accept: HeaderValue },
}

impl WebSocket {
    fn over_http1(headers: &mut HeaderMap, protocol: &UpgradeProtocol) -> Self {
        if !protocol.is_websocket() {
            return Self::None;
        }
        if headers.contains_key(SEC_WEBSOCKET_KEY) {
            return Self::Caller;
        }
        let mut nonce = [0; 16];
        // The key guards nothing: it is there for caches that know no better, and any will do.
        let _ = aws_lc_rs::rand::fill(&mut nonce);
        let key = BASE64_STANDARD.encode(nonce);
        match (HeaderValue::try_from(&key), accept_of(key.as_bytes())) {
            (Ok(key), Some(expected)) => {
                headers.insert(SEC_WEBSOCKET_KEY, key);
                Self::Ours { expected }
            }
            // Base64 is a valid field value.
            _ => Self::Caller,
        }
    }

    fn over_http2(headers: &mut HeaderMap, protocol: &UpgradeProtocol) -> Self {
        if !protocol.is_websocket() {
            return Self::None;
        }
        let key = headers.remove(SEC_WEBSOCKET_KEY);
        let accept = key.and_then(|key| accept_of(key.as_bytes()));
        accept.map_or(Self::None, |accept| Self::Expects { accept })
    }
}

/// `Sec-WebSocket-Accept` for a key (RFC 6455 §4.2.2).
pub(crate) fn accept_of(key: &[u8]) -> Option<HeaderValue> {
    let mut context = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
    context.update(key);
    context.update(b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
    HeaderValue::try_from(BASE64_STANDARD.encode(context.finish())).ok()
}

/// Carries bytes both ways until both sides have ended, or one breaks off. No time limit.
async fn relay_both(
    mut request: RequestHalf<'_>,
    mut response: ResponseHalf<'_>,
    body: RecvStream,
    mut stream: SendStream<Bytes>,
    passage: &Passage,
) -> Result<(), Failure> {
    let mut body = Incoming::new(body);
    request.switched();
    response.switched();
    let (took, down_ended) = (Cell::new(false), Cell::new(false));
    let sent_whole = {
        let up = std::pin::pin!(send_body(&mut request, &mut body, passage, &took));
        let mut down = std::pin::pin!(async {
            relay_body(&mut response, &mut stream, passage, true).await?;
            down_ended.set(true);
            // The caller can still give up, while a backend that does not read holds up the other direction.
            let _ = std::future::poll_fn(|cx| stream.poll_reset(cx)).await;
            Err::<(), _>(Failure::Over)
        });
        let Either::Left((Ok(sent), _)) = select(up, down.as_mut()).await else {
            return Err(Failure::Over);
        };
        // A backend that takes no more may have ended: what it said is still relayed.
        let relayed = std::future::poll_fn(|cx| match down.as_mut().poll(cx) {
            Poll::Pending if down_ended.get() => Poll::Ready(true),
            polled => polled.map(|_| false),
        });
        if !relayed.await {
            return Err(Failure::Over);
        }
        sent.is_ok()
    };
    if !sent_whole {
        // Not everything has arrived: the caller must not believe so. What has goes out first.
        runtime::yield_now().await;
        stream.send_reset(Reason::CANCEL);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_of_the_rfc_is_accepted_as_there() {
        assert_eq!(accept_of(b"dGhlIHNhbXBsZSBub25jZQ==").unwrap(), "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    }
}
