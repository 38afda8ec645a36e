//! The request head as the agent receives it.

use bytes::Bytes;
use gw_base::error::{Error, request_id_value};
use gw_shared::http::fields::{
    self, X_FORWARDED_FOR, X_FORWARDED_HOST, X_FORWARDED_PROTO, X_GW_REQUEST_ID, X_REAL_IP,
};
use gw_shared::http::{Fields, Framing, HttpVersion, RequestHead};
use gw_shared::id::RequestId;
use gw_shared::tunnel::head::OutboundRequest;
use http::header::{self, HeaderName, HeaderValue};

use crate::peer::Peer;

/// Removes the fields of this hop and adds those of the gateway (RFC 9110 §7.6). Calls `is_proxy`
/// for a request with a field that only trusted proxies may set.
pub(super) fn outbound(
    request: RequestHead,
    peer: &Peer,
    is_proxy: impl Fn() -> bool,
    id: RequestId,
) -> Result<OutboundRequest, Error> {
    let RequestHead {
        method,
        target,
        authority,
        version,
        headers,
        framing,
        upgrade,
        ..
    } = request;
    // Removed: `Host` (the authority has its value), fields of the gateway (credentials or forged),
    // and forwarding fields, also those that have `_` in place of `-`. Three of these and
    // X-Gw-Request-Id are set below in their place.
    let is_set = |name: &HeaderName| {
        [X_FORWARDED_FOR, X_FORWARDED_PROTO, X_FORWARDED_HOST].contains(name)
            || *name == X_REAL_IP && is_proxy()
    };
    let is_forged = |name: &HeaderName| {
        fields::is_own(name) && *name != X_GW_REQUEST_ID
            || fields::is_forwarding(name) && !is_set(name)
    };
    let ends_here = |name: &HeaderName| *name == header::HOST || is_forged(name);
    let mut headers = fields::end_to_end(headers, ends_here);
    let caller_connection = peer.connection(version, &headers);
    if version == HttpVersion::Http10 {
        // Trailers of the response would not reach the caller.
        headers.remove(header::TE);
    }
    fields::join_cookies(&mut headers);
    append_to_list(&mut headers, X_FORWARDED_FOR, peer.forwarded.clone());
    let via = match version {
        HttpVersion::Http10 => "1.0 gw",
        HttpVersion::Http11 => "1.1 gw",
        HttpVersion::Http2 => "2 gw",
    };
    append_to_list(&mut headers, header::VIA, HeaderValue::from_static(via));
    headers.insert(X_FORWARDED_PROTO, HeaderValue::from_static("https"));
    let host = HeaderValue::from_str(authority.as_str())
        .map_err(|_| Error::BadRequest("Host field".to_owned()))?;
    headers.insert(X_FORWARDED_HOST, host);
    headers.insert(X_GW_REQUEST_ID, request_id_value(id));
    // Bytes of another protocol are not a body. An extended CONNECT has nothing else (RFC 8441 §5).
    let framing = match framing {
        Framing::Length(1..) if version == HttpVersion::Http11 => framing,
        _ if upgrade.is_some() => Framing::None,
        framing => framing,
    };
    Ok(OutboundRequest {
        method,
        target,
        authority,
        headers,
        framing,
        upgrade,
        caller_connection,
    })
}

/// Appends to a comma-separated field and keeps the values of earlier hops in front.
fn append_to_list(headers: &mut Fields, name: HeaderName, value: HeaderValue) {
    if !headers.contains(&name) {
        headers.insert(name, value);
        return;
    }
    let mut list: Vec<u8> = headers.get_all(&name).fold(Vec::new(), |mut list, value| {
        list.extend_from_slice(value.as_bytes());
        list.extend_from_slice(b", ");
        list
    });
    list.extend_from_slice(value.as_bytes());
    if let Ok(value) = HeaderValue::from_maybe_shared(Bytes::from(list)) {
        headers.insert(name, value);
    }
}
