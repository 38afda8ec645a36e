//! `Max-Forwards` of TRACE and OPTIONS (RFC 9110 §7.6.2).

use gw_base::error::request_id_value;
use gw_shared::http::fields::X_GW_REQUEST_ID;
use gw_shared::http::{ConnectionField, Framing, RequestHead, fields, head};
use gw_shared::id::RequestId;
use http::header::{self, HeaderValue};
use http::{Method, Response, StatusCode};

/// Decrements `Max-Forwards` of a TRACE or OPTIONS; returns the response if it was 0. A value that is not a number is
/// ignored.
pub(crate) fn count_down(request: &mut RequestHead, id: RequestId) -> Option<Response<Vec<u8>>> {
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
    let mut response = Response::new(Vec::new());
    if request.method == Method::TRACE {
        // The response leaves out credentials (RFC 9110 §9.3.8).
        let kept = fields::end_to_end(request.headers.clone(), fields::is_credential);
        let target = &request.target;
        let authority = request.authority.as_str().as_bytes();
        let method = &request.method;
        let framing = Framing::None;
        let connection = ConnectionField::Persists;
        head::write_request(
            response.body_mut(),
            method,
            target,
            authority,
            &kept,
            framing,
            connection,
        );
        response.headers_mut().insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("message/http"),
        );
    } else {
        *response.status_mut() = StatusCode::NO_CONTENT;
    }
    response
        .headers_mut()
        .insert(X_GW_REQUEST_ID, request_id_value(id));
    Some(response)
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
    use crate::limits;
    use bytes::Bytes;
    use gw_shared::id::RequestIds;

    use super::*;

    fn count(method: &str, fields: &str) -> (RequestHead, Option<Response<Vec<u8>>>) {
        let text = format!("{method} /p HTTP/1.1\r\nHost: h\r\n{fields}\r\n");
        let mut request = head::parse_request(&Bytes::from(text), limits::REQUEST_HEAD).unwrap();
        let answer = count_down(&mut request, RequestIds::new().next_id());
        (request, answer)
    }

    #[test]
    fn forwards_are_counted_down_and_the_last_is_ours() {
        let (request, answer) = count("OPTIONS", "Max-Forwards: 7\r\n");
        assert_eq!(
            (
                request.headers[header::MAX_FORWARDS].to_str().unwrap(),
                answer.is_none()
            ),
            ("6", true)
        );
        let (_, answer) = count("OPTIONS", "Max-Forwards: 0\r\n");
        assert_eq!(answer.unwrap().status(), StatusCode::NO_CONTENT);
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
        let answer = answer.unwrap();
        assert_eq!(answer.headers()[header::CONTENT_TYPE], "message/http");
        let text = String::from_utf8(answer.into_body()).unwrap();
        assert_eq!(
            text,
            "TRACE /p HTTP/1.1\r\nhost: h\r\nmax-forwards: 0\r\nx: 1\r\n\r\n"
        );
    }
}
