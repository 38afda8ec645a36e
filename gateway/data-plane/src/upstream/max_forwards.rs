//! `Max-Forwards` of TRACE and OPTIONS (RFC 9110 §7.6.2).

use bytes::Bytes;
use gw_shared::http::{Fields, Framing, fields};
use gw_shared::tunnel::head::OutboundRequest;
use http::header::{self, HeaderValue};
use http::{Method, StatusCode};

use crate::http_message::RelayedHead;

/// Decrements `Max-Forwards` of a TRACE or OPTIONS; returns head and body of the response if it was
/// 0. A value that is not a number is ignored.
pub(super) fn count_down(request: &mut OutboundRequest) -> Option<(RelayedHead, Bytes)> {
    if !matches!(request.method, Method::TRACE | Method::OPTIONS) {
        return None;
    }
    let left = number(request.headers.get(header::MAX_FORWARDS)?)?;
    if left > 0 {
        request
            .headers
            .insert(header::MAX_FORWARDS, HeaderValue::from(left - 1));
        return None;
    }
    let mut response = RelayedHead {
        status: StatusCode::NO_CONTENT,
        headers: Fields::new(),
        has_body: false,
        upgrade: None,
    };
    let mut body = Vec::new();
    if request.method == Method::TRACE {
        // The response leaves out credentials (RFC 9110 §9.3.8), and addresses of proxies in front
        // of the gateway.
        let is_shown = |name: &_| !fields::is_credential(name) && !fields::is_forwarding(name);
        request.headers.retain(is_shown);
        request.framing = Framing::None;
        request.upgrade = None;
        request.write(&mut body, None);
        let media_type = HeaderValue::from_static("message/http");
        response.headers.insert(header::CONTENT_TYPE, media_type);
        response
            .headers
            .insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
        response.status = StatusCode::OK;
        response.has_body = true;
    }
    Some((response, body.into()))
}

/// The number in a value of digits only, at most the largest one.
fn number(value: &HeaderValue) -> Option<u64> {
    let digits = value.as_bytes();
    let is_number = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    is_number
        .then(|| value.to_str().ok()?.parse().ok())
        .map(|number| number.unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use gw_shared::http::head;

    use super::*;
    use crate::limits;

    fn count(method: &str, fields: &str) -> (OutboundRequest, Option<(RelayedHead, Bytes)>) {
        let text = format!("{method} /p HTTP/1.1\r\nHost: h\r\n{fields}\r\n");
        let request = head::parse_request(&Bytes::from(text), limits::REQUEST_HEAD).unwrap();
        let mut request = OutboundRequest {
            method: request.method,
            target: request.target,
            authority: request.authority,
            headers: fields::end_to_end(request.headers, |name| *name == header::HOST),
            framing: request.framing,
            upgrade: request.upgrade,
            caller_connection: None,
        };
        let answer = count_down(&mut request);
        (request, answer)
    }

    #[test]
    fn forwards_are_counted_down_and_the_last_is_ours() {
        let (request, answer) = count("OPTIONS", "Max-Forwards: 7\r\n");
        let value = request.headers[header::MAX_FORWARDS].to_str().unwrap();
        assert_eq!((value, answer.is_none()), ("6", true));
        let (head, body) = count("OPTIONS", "Max-Forwards: 0\r\n").1.unwrap();
        assert_eq!(
            (head.status, head.has_body),
            (StatusCode::NO_CONTENT, false)
        );
        assert!(body.is_empty());
        for fields in ["", "x", "-1", "+0", "0x0"].map(|value| match value {
            "" => String::new(),
            value => format!("Max-Forwards: {value}\r\n"),
        }) {
            assert!(count("TRACE", &fields).1.is_none(), "{fields}");
        }
        assert!(count("GET", "Max-Forwards: 0\r\n").1.is_none());
    }

    #[test]
    fn forwards_beyond_the_largest_number_are_reduced_to_it() {
        let largest = u64::MAX;
        for (received, forwarded) in [
            (format!("{largest}"), largest - 1),
            (format!("{largest}0"), largest - 1),
            ("0".repeat(30) + "7", 6),
        ] {
            let (request, answer) = count("TRACE", &format!("Max-Forwards: {received}\r\n"));
            let value = &request.headers[header::MAX_FORWARDS];
            assert_eq!(value, &HeaderValue::from(forwarded), "{received}");
            assert!(answer.is_none());
        }
    }

    #[test]
    fn a_trace_repeats_the_request_without_its_secrets() {
        let (_, answer) = count(
            "TRACE",
            "Max-Forwards: 0\r\nX: 1\r\nCookie: a\r\nAuthorization: b\r\nX-Gw-Service-Key: c\r\n",
        );
        let (head, body) = answer.unwrap();
        assert_eq!(head.headers[header::CONTENT_TYPE], "message/http");
        let text = "TRACE /p HTTP/1.1\r\nhost: h\r\nmax-forwards: 0\r\nx: 1\r\n\r\n";
        assert_eq!(body, text);
    }
}
