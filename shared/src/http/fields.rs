//! What an intermediary does to header fields (RFC 9110 §7.6).

use http::header::{self, HeaderMap, HeaderName, HeaderValue};

/// Prefix of the field names that belong to the gateway. A backend cannot set them, nor can a caller forge them.
const OWN_PREFIX: &str = "x-gw-";

pub const X_GW_REQUEST_ID: HeaderName = HeaderName::from_static("x-gw-request-id");
pub const X_GW_STATUS: HeaderName = HeaderName::from_static("x-gw-status");
pub const X_GW_AUTHORIZATION: HeaderName = HeaderName::from_static("x-gw-authorization");
pub const X_GW_SERVICE_KEY: HeaderName = HeaderName::from_static("x-gw-service-key");
pub const X_GW_VERSION: HeaderName = HeaderName::from_static("x-gw-version");
/// On the tunnel only: the response is the agent's own error, and this is its code.
pub const X_GW_AGENT_ERROR: HeaderName = HeaderName::from_static("x-gw-agent-error");
pub const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
pub const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
pub const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// Removes the fields that end at this hop: those of RFC 9110 §7.6.1 and those that `Connection` names.
///
/// `TE: trailers` stays (it is the one value that HTTP/2 carries, RFC 9113 §8.2.2).
pub fn remove_hop_by_hop(headers: &mut HeaderMap) {
    if headers.contains_key(header::CONNECTION) {
        let named: Vec<HeaderName> = headers
            .get_all(header::CONNECTION)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .filter_map(|name| HeaderName::from_bytes(name.trim().as_bytes()).ok())
            // A sender cannot have us drop what frames or addresses the message.
            .filter(|name| *name != header::HOST && *name != header::CONTENT_LENGTH)
            .collect();
        for name in named {
            headers.remove(name);
        }
        headers.remove(header::CONNECTION);
    }
    for name in [KEEP_ALIVE, PROXY_CONNECTION, header::TRANSFER_ENCODING, header::UPGRADE] {
        headers.remove(name);
    }
    let trailers_only = headers.get(header::TE).is_some_and(|value| {
        value.to_str().is_ok_and(|value| value.split(',').any(|coding| coding.trim().eq_ignore_ascii_case("trailers")))
    });
    if trailers_only {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    } else {
        headers.remove(header::TE);
    }
}

/// Removes every `X-Gw-*` field.
pub fn remove_own(headers: &mut HeaderMap) {
    if headers.keys().any(|name| name.as_str().starts_with(OWN_PREFIX)) {
        let own: Vec<HeaderName> =
            headers.keys().filter(|name| name.as_str().starts_with(OWN_PREFIX)).cloned().collect();
        for name in own {
            headers.remove(name);
        }
    }
}

/// Removes the fields that a trailer section must not carry (RFC 9110 §6.5.1), and those of ours.
pub fn clean_trailers(trailers: &mut HeaderMap) {
    remove_hop_by_hop(trailers);
    remove_own(trailers);
    for name in [header::CONTENT_LENGTH, header::HOST, header::TE, header::TRAILER, header::AUTHORIZATION] {
        trailers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        fields.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))).collect()
    }

    #[test]
    fn hop_by_hop_fields_and_nominated_ones_end_here() {
        let mut headers = map(&[
            ("connection", "close, X-Secret"),
            ("x-secret", "1"),
            ("keep-alive", "timeout=5"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("te", "gzip, trailers"),
            ("authorization", "Basic x"),
        ]);
        headers.append(header::CONNECTION, HeaderValue::from_static("content-length, proxy-authorization"));
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from_static("3"));
        headers.insert(header::PROXY_AUTHORIZATION, HeaderValue::from_static("p"));
        remove_hop_by_hop(&mut headers);
        let expected = map(&[("te", "trailers"), ("authorization", "Basic x"), ("content-length", "3")]);
        assert_eq!(headers, expected);
    }

    #[test]
    fn our_own_fields_cannot_be_forged() {
        let mut headers = map(&[("x-gw-status", "RateLimited"), ("x-gw-anything", "1"), ("x-gwen", "stays")]);
        remove_own(&mut headers);
        assert_eq!(headers, map(&[("x-gwen", "stays")]));
    }

    #[test]
    fn trailers_carry_no_framing() {
        let mut trailers = map(&[("content-length", "3"), ("grpc-status", "0"), ("transfer-encoding", "chunked")]);
        clean_trailers(&mut trailers);
        assert_eq!(trailers, map(&[("grpc-status", "0")]));
    }
}
