//! Upgrades to another protocol (RFC 9110 §7.8), and the relay of its bytes in both directions.

use std::cell::Cell;
use std::pin::pin;
use std::task::Poll;

use aws_lc_rs::digest;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use futures_util::future::{Either, select};
use gw_shared::http::{Fields, Framing, RequestHead, UpgradeProtocol, fields};
use gw_shared::tunnel::body::ReceivedBody;
use gw_shared::tunnel::connection::StreamSender;
use gw_shared::tunnel::frame::Kind;
use gw_shared::tunnel::head;
use http::header::{HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, UPGRADE};
use http::{Method, StatusCode};

use crate::backend::{
    BackendHead, CallerPool, Lease, Offer, RequestHalf, ResponseError, ResponseHalf,
};
use crate::forward::{
    Complete, ExchangeError, Failed, ForwardError, RequestDelivery, RequestReset, RequestUpload,
    Sent, connect, final_head, forward_message, is_unprocessed, refuse, relay_body, relay_final,
    send_body, unless_reset,
};
use crate::telemetry::request_scope::RequestScope;

/// Forwards a request to switch protocols.
///
/// The HTTP/1.1 connection is closed afterwards, even if the backend declined the upgrade: the
/// backend, or a proxy in front of it, may disagree about where the next message begins, and the
/// agent cannot detect that. Declined upgrades are rare.
pub(crate) async fn forward(
    pool: CallerPool<'_>,
    scope: &RequestScope,
    mut request: RequestHead,
    mut delivery: RequestDelivery,
    body: &mut ReceivedBody,
    sender: &StreamSender,
    upload: &RequestUpload,
) -> Result<Complete, Failed> {
    let protocol = request.upgrade.take().ok_or(Failed)?;
    // Another open HTTP/1.1 connection may be closing, and the request is not sent again.
    let mut private = pool.reuse_private(&request);
    let mut resent = 0;
    loop {
        let lease = match private.take() {
            Some(lease) => lease,
            None => connect(pool, &request, Offer::Http1, scope, delivery, sender).await?,
        };
        if lease.is_http2() && request.framing.has_body() {
            // Extended CONNECT has no content: `Upgrade` is ignored.
            upload.decided(false);
            return forward_message(pool, scope, &request, delivery, body, sender, upload).await;
        }
        scope.connected(|| lease.describe());
        delivery.accept(sender);
        if let Err(error) = lease.check_upgrade(&request) {
            let error = ForwardError::no_response(&error, &lease, delivery);
            return Err(refuse(sender, scope, &error));
        }
        let copy = request.clone();
        let error = match exchange(&lease, copy, &protocol, body, sender, scope, upload).await {
            Ok(()) => return Ok(Complete),
            Err(ExchangeError::Reset) => {
                lease.abort();
                return Err(Failed);
            }
            Err(ExchangeError::NoResponse(error)) => error,
        };
        if !is_unprocessed(&lease, &error, upload) {
            delivery = RequestDelivery::MaybeProcessed;
        } else if resent < error.resent_most() {
            resent += 1;
            continue;
        }
        let error = ForwardError::no_response(&error, &lease, delivery);
        return Err(refuse(sender, scope, &error));
    }
}

async fn exchange(
    lease: &Lease<'_>,
    mut request: RequestHead,
    protocol: &UpgradeProtocol,
    body: &mut ReceivedBody,
    sender: &StreamSender,
    scope: &RequestScope,
    upload: &RequestUpload,
) -> Result<(), ExchangeError> {
    let (method, websocket) = if lease.is_http2() {
        (
            UpgradeMethod::ExtendedConnect,
            WebSocketKey::over_http2(&mut request.headers, protocol),
        )
    } else {
        (
            UpgradeMethod::UpgradeField,
            WebSocketKey::over_http1(&mut request.headers, protocol),
        )
    };
    let (up, down) = lease
        .upgrade_exchange(&request, protocol)
        .map_err(ExchangeError::NoResponse)?;
    // Errors are reported when the response is read.
    let sent = unless_reset(sender, up.head(&request, lease.authority(&request))).await;
    sent.ok_or(ExchangeError::Reset)?.ok();
    let upgrade = Upgrade {
        lease,
        request: &request,
        method,
        protocol,
        websocket,
    };
    relay_both(up, down, upgrade, body, sender, scope, upload).await
}

/// The upgrade that the agent asks the backend for.
struct Upgrade<'a> {
    lease: &'a Lease<'a>,
    request: &'a RequestHead,
    method: UpgradeMethod,
    protocol: &'a UpgradeProtocol,
    websocket: WebSocketKey,
}

/// How the agent asks the backend for an upgrade.
#[derive(Clone, Copy, PartialEq, Eq)]
enum UpgradeMethod {
    /// The `Upgrade` field of HTTP/1.1.
    UpgradeField,
    /// Extended CONNECT of HTTP/2 (RFC 8441).
    ExtendedConnect,
}

/// Checks that the backend has upgraded as requested. Returns the header fields for the tunnel.
fn check_upgrade(head: BackendHead, upgrade: &Upgrade<'_>) -> Result<Fields, ResponseError> {
    let mut headers = head.headers;
    let protocol = upgrade.protocol;
    if upgrade.method == UpgradeMethod::UpgradeField {
        let mut named = headers.get_all(UPGRADE);
        let named = (named.next(), named.next());
        if !matches!(named, (Some(value), None) if protocol.is(value.as_bytes())) {
            let requested = protocol.as_str();
            let actual = named.0;
            return Err(ResponseError::Upgrade(format!(
                "requested {requested:?}, got {actual:?}"
            )));
        }
    }
    match &upgrade.websocket {
        WebSocketKey::Caller | WebSocketKey::NotWebSocket => {}
        WebSocketKey::Generated { expected } => {
            if headers.remove(SEC_WEBSOCKET_ACCEPT).as_ref() != Some(expected) {
                return Err(ResponseError::Upgrade(
                    "its Sec-WebSocket-Accept does not match the key".to_owned(),
                ));
            }
        }
        WebSocketKey::Answered { accept } => headers.insert(SEC_WEBSOCKET_ACCEPT, accept.clone()),
    }
    Ok(headers)
}

/// Handling of the key of a WebSocket handshake (RFC 6455 §4.1). Over HTTP/2 a handshake has no
/// key.
enum WebSocketKey {
    NotWebSocket,
    /// The caller's key is relayed, and the caller checks the answer.
    Caller,
    /// The agent generated the key and checks the answer.
    Generated {
        expected: HeaderValue,
    },
    /// The caller sent a key and the backend speaks HTTP/2: the agent adds the answer.
    Answered {
        accept: HeaderValue,
    },
}

impl WebSocketKey {
    fn over_http1(headers: &mut Fields, protocol: &UpgradeProtocol) -> Self {
        if !protocol.is_websocket() {
            return Self::NotWebSocket;
        }
        if headers.contains(SEC_WEBSOCKET_KEY) {
            return Self::Caller;
        }
        let mut nonce = [0; 16];
        // The key is no secret (RFC 6455 §1.3), so zeros are acceptable without a random source.
        let _ = aws_lc_rs::rand::fill(&mut nonce);
        let key = BASE64_STANDARD.encode(nonce);
        match (HeaderValue::try_from(&key), accept_of(key.as_bytes())) {
            (Ok(key), Some(expected)) => {
                headers.insert(SEC_WEBSOCKET_KEY, key);
                Self::Generated { expected }
            }
            // Never happens: Base64 is a valid field value.
            _ => Self::Caller,
        }
    }

    fn over_http2(headers: &mut Fields, protocol: &UpgradeProtocol) -> Self {
        if !protocol.is_websocket() {
            return Self::NotWebSocket;
        }
        let key = headers.remove(SEC_WEBSOCKET_KEY);
        let accept = key.and_then(|key| accept_of(key.as_bytes()));
        accept.map_or(Self::NotWebSocket, |accept| Self::Answered { accept })
    }
}

/// The `Sec-WebSocket-Accept` value for a key (RFC 6455 §4.2.2).
pub(crate) fn accept_of(key: &[u8]) -> Option<HeaderValue> {
    let mut context = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
    context.update(key);
    context.update(b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
    HeaderValue::try_from(BASE64_STANDARD.encode(context.finish())).ok()
}

/// Relays both directions until both have ended or one fails: the content of the request and the
/// response to it, then the bytes of the other protocol. No time limit.
async fn relay_both(
    mut request: RequestHalf<'_>,
    response: ResponseHalf<'_>,
    upgrade: Upgrade<'_>,
    body: &mut ReceivedBody,
    sender: &StreamSender,
    scope: &RequestScope,
    upload: &RequestUpload,
) -> Result<(), ExchangeError> {
    let down_ended = Cell::new(false);
    let up = pin!(send_body(&mut request, body, scope, upload));
    let mut down = pin!(async {
        relay_response(response, upgrade, sender, scope, upload).await?;
        down_ended.set(true);
        // The caller can still reset the stream while a backend that does not read blocks the other
        // direction.
        std::future::poll_fn(|cx| sender.poll_reset(cx)).await;
        Err(ExchangeError::Reset)
    });
    let sent = match select(down.as_mut(), up).await {
        Either::Left((ended, _)) => return ended,
        Either::Right((sent, _)) => sent.map_err(|RequestReset| ExchangeError::Reset)?,
    };
    if sent == Sent::BrokenOff {
        return Err(ExchangeError::Reset);
    }
    if sent == Sent::Partly {
        // The backend has closed its receiving direction.
        sender.report_upload(Some(upload.taken()));
    }
    // The backend may still send: relay that.
    std::future::poll_fn(|cx| match down.as_mut().poll(cx) {
        Poll::Pending if down_ended.get() => Poll::Ready(Ok(())),
        polled => polled,
    })
    .await
}

/// Relays the response, and behind one that switches protocols the bytes of the backend.
async fn relay_response(
    mut response: ResponseHalf<'_>,
    upgrade: Upgrade<'_>,
    sender: &StreamSender,
    scope: &RequestScope,
    upload: &RequestUpload,
) -> Result<(), ExchangeError> {
    let is_extended = upgrade.method == UpgradeMethod::ExtendedConnect;
    let method = if is_extended {
        &Method::CONNECT
    } else {
        &upgrade.request.method
    };
    let mut head = final_head(&mut response, method, sender, upload).await?;
    head.headers = upgrade.lease.map_back(upgrade.request, head.headers);
    if is_extended && head.status == StatusCode::SWITCHING_PROTOCOLS {
        return Err(ExchangeError::NoResponse(ResponseError::UnrequestedUpgrade));
    }
    let is_accepted = match upgrade.method {
        UpgradeMethod::ExtendedConnect => head.status.is_success(),
        UpgradeMethod::UpgradeField => head.status == StatusCode::SWITCHING_PROTOCOLS,
    };
    if !is_accepted {
        upload.decided(false);
        return relay_final(head, response, sender, scope).await;
    }
    let headers = check_upgrade(head, &upgrade).map_err(ExchangeError::NoResponse)?;
    let timing = scope.responded(StatusCode::SWITCHING_PROTOCOLS);
    let headers = fields::end_to_end_response(headers);
    let protocol = Some(upgrade.protocol);
    sender
        .send_head(Kind::Response, false, |out| {
            let status = StatusCode::SWITCHING_PROTOCOLS;
            head::write_response(out, timing, status, &headers, Framing::None, protocol);
        })
        .map_err(|_| ExchangeError::Reset)?;
    response.upgraded();
    upload.decided(true);
    relay_body(&mut response, sender, scope).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accept_value_matches_the_example_of_rfc_6455() {
        assert_eq!(
            accept_of(b"dGhlIHNhbXBsZSBub25jZQ==").unwrap(),
            "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
        );
    }
}
