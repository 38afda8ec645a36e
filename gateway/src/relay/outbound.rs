//! The request head as the agent receives it.

use bytes::Bytes;
use gw_shared::http::fields::{
    self, X_FORWARDED_FOR, X_FORWARDED_HOST, X_FORWARDED_PROTO, X_GW_REQUEST_ID, X_GW_UPGRADE_METHOD,
};
use gw_shared::http::head::set_content_length;
use gw_shared::http::{Framing, RequestHead, Version};
use gw_shared::id::RequestId;
use h2::ext::Protocol;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::uri::{Scheme, Uri};
use http::{Method, Request};

use crate::client_address::Peer;
use crate::error::{Error, request_id_value};

/// Fields that a request gets here, at most: four about its origin, its id, its trace.
const ADDED_FIELDS: usize = 6;

/// Removes the fields of this hop and adds those of the gateway (RFC 9110 §7.6).
pub(super) fn outbound(request: RequestHead, peer: &Peer, id: RequestId) -> Result<Request<()>, Error> {
    let RequestHead { method, target, authority, version, headers, framing, upgrade, .. } = request;
    // Removed: `Host` (the authority has its value), fields of the gateway (credentials or forged), and names that a
    // backend may read as forwarding fields because they have `_` in place of `-`. X-Forwarded-* and X-Gw-Request-Id
    // are set below in their place.
    let is_forged = |name: &HeaderName| {
        fields::is_own(name) && *name != X_GW_REQUEST_ID || name.as_str().contains('_') && fields::is_forwarding(name)
    };
    let ends_here = |name: &HeaderName| *name == header::HOST || is_forged(name);
    let mut headers = fields::end_to_end(headers, ends_here, ADDED_FIELDS);
    // Bytes after an upgrade request are not its body.
    set_content_length(&mut headers, if upgrade.is_some() { Framing::None } else { framing });
    append_to_list(&mut headers, X_FORWARDED_FOR, peer.forwarded.clone());
    let via = match version {
        Version::Http10 => "1.0 gw",
        Version::Http11 => "1.1 gw",
        Version::Http2 => "2 gw",
    };
    append_to_list(&mut headers, header::VIA, HeaderValue::from_static(via));
    headers.insert(X_FORWARDED_PROTO, HeaderValue::from_static("https"));
    let host = HeaderValue::from_str(authority.as_str()).map_err(|_| Error::BadRequest("Host field".to_owned()))?;
    headers.insert(X_FORWARDED_HOST, host);
    headers.insert(X_GW_REQUEST_ID, request_id_value(id));

    let mut parts = http::uri::Parts::default();
    parts.scheme = Some(Scheme::HTTPS);
    parts.authority = Some(authority);
    parts.path_and_query = Some(target);
    let uri = Uri::from_parts(parts).map_err(|_| Error::BadRequest("request target".to_owned()))?;
    let mut outbound = Request::new(());
    *outbound.method_mut() = method;
    *outbound.uri_mut() = uri;
    *outbound.version_mut() = http::Version::HTTP_2;
    *outbound.headers_mut() = headers;
    if let Some(protocol) = upgrade {
        outbound.extensions_mut().insert(Protocol::from(protocol.as_str()));
        let method = std::mem::replace(outbound.method_mut(), Method::CONNECT);
        if method != Method::GET {
            let method = HeaderValue::from_str(method.as_str()).map_err(|_| Error::BadRequest("method".to_owned()))?;
            outbound.headers_mut().insert(X_GW_UPGRADE_METHOD, method);
        }
    }
    Ok(outbound)
}

/// Appends to a comma-separated field and keeps the values of earlier hops in front.
fn append_to_list(headers: &mut HeaderMap, name: HeaderName, value: HeaderValue) {
    if !headers.contains_key(&name) {
        headers.insert(name, value);
        return;
    }
    let mut list: Vec<u8> = headers.get_all(&name).iter().fold(Vec::new(), |mut list, value| {
        list.extend_from_slice(value.as_bytes());
        list.extend_from_slice(b", ");
        list
    });
    list.extend_from_slice(value.as_bytes());
    if let Ok(value) = HeaderValue::from_maybe_shared(Bytes::from(list)) {
        headers.insert(name, value);
    }
}
