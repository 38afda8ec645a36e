//! Header fields: names, and the rules for relaying them (RFC 9110 §7.6).

use http::header::{self, HeaderName, HeaderValue, InvalidHeaderName};

use super::framing::is_of_connection;
use crate::http::Fields;

/// Prefix of the gateway's own field names. Neither clients nor backends can set them.
const OWN_PREFIX: &str = "x-gw-";

pub const X_GW_REQUEST_ID: HeaderName = HeaderName::from_static("x-gw-request-id");
pub const X_GW_STATUS: HeaderName = HeaderName::from_static("x-gw-status");
pub const X_GW_AUTHORIZATION: HeaderName = HeaderName::from_static("x-gw-authorization");
pub const X_GW_SERVICE_KEY: HeaderName = HeaderName::from_static("x-gw-service-key");
pub const X_GW_VERSION: HeaderName = HeaderName::from_static("x-gw-version");
pub const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
pub const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
pub const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
pub const X_REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");

/// Fields by which backends learn of a caller what the connection from the proxy does not tell:
/// address, scheme, host and port. The gateway sets the first three. Backends build links and
/// decide on access by all of them, so none of a caller passes.
const FORWARDING: [HeaderName; 13] = [
    X_FORWARDED_FOR,
    X_FORWARDED_PROTO,
    X_FORWARDED_HOST,
    HeaderName::from_static("x-forwarded-port"),
    HeaderName::from_static("x-forwarded-scheme"),
    HeaderName::from_static("x-forwarded-ssl"),
    HeaderName::from_static("x-forwarded-server"),
    HeaderName::from_static("x-original-host"),
    HeaderName::from_static("x-original-proto"),
    HeaderName::from_static("x-url-scheme"),
    X_REAL_IP,
    HeaderName::from_static("front-end-https"),
    // RFC 7239.
    header::FORWARDED,
];

/// The name of a field. As [`HeaderName::from_bytes`], which copies each name that HTTP does not
/// define; names that the gateway adds to each request are not copied if they have no upper case.
pub(super) fn field_name(name: &[u8]) -> Result<HeaderName, InvalidHeaderName> {
    match name {
        b"x-forwarded-for" => Ok(X_FORWARDED_FOR),
        b"x-forwarded-host" => Ok(X_FORWARDED_HOST),
        b"x-forwarded-proto" => Ok(X_FORWARDED_PROTO),
        b"x-gw-request-id" => Ok(X_GW_REQUEST_ID),
        b"x-gw-service-key" => Ok(X_GW_SERVICE_KEY),
        _ => HeaderName::from_bytes(name),
    }
}

/// Removes the fields of a request that are not relayed: the fields of RFC 9110 §7.6.1, fields that
/// `Connection` names, fields for which `drop` returns true, and names that some servers confuse
/// with framing fields ([`is_framing`](super::framing::is_framing)).
///
/// Keeps `Content-Length`: over HTTP/2 the stream ends the body, and the field only describes it.
/// Keeps `TE: trailers`, the only value that HTTP/2 allows (RFC 9113 §8.2.2): every hop relays
/// trailers.
pub fn end_to_end(mut headers: Fields, drop: impl Fn(&HeaderName) -> bool) -> Fields {
    let trailers = accepts_trailers(&headers);
    remove_hop_by_hop(&mut headers, drop);
    if trailers {
        headers.append(header::TE, HeaderValue::from_static("trailers"));
    }
    headers
}

/// As [`end_to_end`], for the fields of a response: removes the gateway's own fields ([`is_own`]),
/// and `TE`, which is a field of requests.
pub fn end_to_end_response(mut headers: Fields) -> Fields {
    remove_hop_by_hop(&mut headers, is_own);
    headers
}

fn remove_hop_by_hop(headers: &mut Fields, drop: impl Fn(&HeaderName) -> bool) {
    let named = named_by_connection(headers);
    headers.retain(|name| {
        !(is_of_connection(name) || *name == header::TE || named.contains(name) || drop(name))
    });
}

/// Names in `Connection`, except those of fields that frame or address the message: a sender must
/// not remove them.
fn named_by_connection(headers: &Fields) -> Vec<HeaderName> {
    headers
        .get_all(header::CONNECTION)
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| HeaderName::from_bytes(name.trim().as_bytes()).ok())
        .filter(|name| *name != header::HOST && *name != header::CONTENT_LENGTH)
        .collect()
}

/// Most options in the `Connection` fields of a message. Each is compared with the name of every
/// field.
const CONNECTION_OPTIONS_MAX: usize = 64;

/// Whether the `Connection` fields have more options than a sender has use for.
pub(super) fn has_too_many_connection_options(headers: &Fields) -> bool {
    let options = |value: &HeaderValue| memchr::memchr_iter(b',', value.as_bytes()).count() + 1;
    headers
        .get_all(header::CONNECTION)
        .map(options)
        .sum::<usize>()
        > CONNECTION_OPTIONS_MAX
}

fn accepts_trailers(headers: &Fields) -> bool {
    headers
        .get_all(header::TE)
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|coding| coding.trim().eq_ignore_ascii_case("trailers"))
}

/// Joins `Cookie` fields, which HTTP/2 may split, into one for HTTP/1.1 (RFC 9113 §8.2.3).
pub fn join_cookies(headers: &mut Fields) {
    if headers.get_all(header::COOKIE).nth(1).is_none() {
        return;
    }
    let cookies: Vec<&[u8]> = headers
        .get_all(header::COOKIE)
        .map(HeaderValue::as_bytes)
        .collect();
    // The joined value is valid, since its parts are.
    if let Ok(joined) = HeaderValue::from_maybe_shared(bytes::Bytes::from(cookies.join(&b"; "[..])))
    {
        headers.insert(header::COOKIE, joined);
        headers.shrink_to_fit();
    }
}

/// Whether a field is one of the gateway's own, `X-Gw-*`, or is for servers that read `_` as `-`.
pub fn is_own(name: &HeaderName) -> bool {
    begins_as(name.as_str(), OWN_PREFIX)
}

/// Whether a field may carry a credential: the credential fields of HTTP, and all of the gateway's
/// own fields.
pub fn is_credential(name: &HeaderName) -> bool {
    const OF_HTTP: [HeaderName; 4] = [
        header::AUTHORIZATION,
        header::PROXY_AUTHORIZATION,
        header::COOKIE,
        header::SET_COOKIE,
    ];
    OF_HTTP.contains(name) || is_own(name)
}

/// Whether a field tells backends of a caller what the gateway or a trusted proxy is to tell them,
/// or is for servers that read `_` as `-`: `Forwarded`, `X-Forwarded-*`, `X-Real-IP` and others.
pub fn is_forwarding(name: &HeaderName) -> bool {
    let name = name.as_str();
    // Most names begin otherwise.
    name.starts_with(['x', 'f'])
        && FORWARDING
            .iter()
            .any(|field| name.len() == field.as_str().len() && begins_as(name, field.as_str()))
}

/// Whether `name` begins with `prefix` once `_` is read as `-`.
fn begins_as(name: &str, prefix: &str) -> bool {
    let as_read = |byte: &u8| if *byte == b'_' { b'-' } else { *byte };
    name.len() >= prefix.len()
        && name
            .as_bytes()
            .iter()
            .map(as_read)
            .zip(prefix.bytes())
            .all(|(read, byte)| read == byte)
}

/// Removes the trailer fields that are not relayed: fields that a trailer section must not have
/// (RFC 9110 §6.5.1), forwarding fields, and the gateway's own fields.
pub fn end_to_end_trailers(mut trailers: Fields) -> Fields {
    const NEVER: [HeaderName; 4] = [
        header::CONTENT_LENGTH,
        header::HOST,
        header::TRAILER,
        header::AUTHORIZATION,
    ];
    remove_hop_by_hop(&mut trailers, |name| {
        is_own(name) || is_forwarding(name) || NEVER.contains(name)
    });
    trailers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fields;

    #[test]
    fn names_are_those_of_the_http_crate() {
        for name in [
            X_FORWARDED_FOR,
            X_FORWARDED_HOST,
            X_FORWARDED_PROTO,
            X_GW_REQUEST_ID,
            X_GW_SERVICE_KEY,
            HeaderName::from_static("x-forwarded-port"),
            header::VIA,
        ] {
            for text in [name.as_str(), &name.as_str().to_ascii_uppercase()] {
                assert_eq!(field_name(text.as_bytes()).unwrap(), name);
            }
        }
        assert!(field_name(b"x forwarded for").is_err());
    }

    #[test]
    fn hop_by_hop_fields_are_removed_and_the_others_keep_their_order() {
        let mut headers = fields(&[
            ("x-first", "1"),
            ("connection", "close, X-Secret, TE"),
            ("x-secret", "1"),
            ("x-second", "2"),
            ("keep-alive", "timeout=5"),
            ("transfer-encoding", "chunked"),
            ("x-third", "3"),
            ("upgrade", "h2c"),
            ("content_length", "7"),
            ("transfer_encoding", "chunked"),
            ("te", "gzip, trailers"),
            ("x-drop", "1"),
            ("authorization", "Basic x"),
        ]);
        let named = HeaderValue::from_static("content-length, proxy-authorization");
        headers.append(header::CONNECTION, named);
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from_static("3"));
        headers.insert(header::PROXY_AUTHORIZATION, HeaderValue::from_static("p"));
        let second = HeaderName::from_static("x-second");
        headers.append(second, HeaderValue::from_static("2b"));
        let kept = end_to_end(headers, |name| name == "x-drop");
        let expected = fields(&[
            ("x-first", "1"),
            ("x-second", "2"),
            ("x-third", "3"),
            ("authorization", "Basic x"),
            ("content-length", "3"),
            ("x-second", "2b"),
            ("te", "trailers"),
        ]);
        assert_eq!(kept, expected);
    }

    #[test]
    fn the_gateways_own_fields_are_removed() {
        let headers = fields(&[
            ("x-gw-status", "RateLimited"),
            ("x-gw-anything", "1"),
            ("x_gw_status", "1"),
            ("x-gw_anything", "1"),
            ("x-gwen", "stays"),
        ]);
        assert_eq!(end_to_end_response(headers), fields(&[("x-gwen", "stays")]));
    }

    #[test]
    fn te_is_kept_in_requests_only_and_only_for_trailers() {
        for (te, kept) in [
            ("trailers", true),
            ("Trailers", true),
            ("gzip;q=0.5, trailers", true),
            ("gzip", false),
            ("trailers2", false),
            ("", false),
        ] {
            for connection in ["te", "close, TE", "close"] {
                let headers = fields(&[("connection", connection), ("te", te), ("x-kept", "1")]);
                let of_request = end_to_end(headers.clone(), |_| false);
                let expected = &[("x-kept", "1"), ("te", "trailers")][..1 + usize::from(kept)];
                assert_eq!(of_request, fields(expected), "{te:?} {connection}");
                let of_response = end_to_end_response(headers);
                assert_eq!(of_response, fields(&expected[..1]), "{te:?} {connection}");
            }
        }
    }

    #[test]
    fn credential_fields_include_the_gateways_own() {
        for (name, expected) in [
            ("authorization", true),
            ("proxy-authorization", true),
            ("cookie", true),
            ("set-cookie", true),
            ("x-gw-service-key", true),
            ("x-authorization", false),
            ("accept", false),
            ("cookie2", false),
        ] {
            let found = is_credential(&HeaderName::from_static(name));
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn framing_fields_are_removed_from_trailers() {
        let trailers = fields(&[
            ("content-length", "3"),
            ("grpc-status", "0"),
            ("transfer-encoding", "chunked"),
            ("te", "trailers"),
            ("content_length", "3"),
            ("x_gw_timing", "1"),
        ]);
        assert_eq!(
            end_to_end_trailers(trailers),
            fields(&[("grpc-status", "0")])
        );
    }

    #[test]
    fn forwarding_fields_are_removed_from_trailers() {
        let trailers = fields(&[
            ("x-forwarded-for", "192.0.2.1"),
            ("x-forwarded-proto", "http"),
            ("x-forwarded-host", "a"),
            ("x_forwarded_for", "192.0.2.1"),
            ("x-forwarded_proto", "http"),
            ("x_forwarded-host", "a"),
            ("x-forwarded_port", "1"),
            ("forwarded", "host=a"),
            ("front_end-https", "on"),
            ("x_real_ip", "192.0.2.1"),
            ("x-forwarded-prefix", "/a"),
            ("x_forwarded_hosts", "a"),
        ]);
        let expected = fields(&[("x-forwarded-prefix", "/a"), ("x_forwarded_hosts", "a")]);
        assert_eq!(end_to_end_trailers(trailers), expected);
    }

    #[test]
    fn cookies_are_joined_at_the_place_of_the_first() {
        let mut headers = fields(&[
            ("a", "1"),
            ("cookie", "x=1"),
            ("b", "2"),
            ("cookie", "y=2; z=3"),
        ]);
        join_cookies(&mut headers);
        let joined = fields(&[("a", "1"), ("cookie", "x=1; y=2; z=3"), ("b", "2")]);
        assert_eq!(headers, joined);
        let names: Vec<&str> = headers.names().map(HeaderName::as_str).collect();
        assert_eq!(names, ["a", "cookie", "b"]);
    }
}
