//! Heads as the tunnel carries them: HTTP/1.1 heads (RFC 9112) behind a few fixed bytes.
//!
//! The framing fields of a head mean what they mean in HTTP/1.1, but bodies are DATA frames:
//! `transfer-encoding: chunked` announces a body of unknown length. A head without a body has END.
//! An upgrade is requested and accepted as in HTTP/1.1, with `connection: upgrade` and status 101.

use bytes::{Buf, Bytes};
use http::header::{HeaderName, HeaderValue};
use http::uri::{Authority, PathAndQuery};
use http::{Method, StatusCode};

use super::frame::{CODE_MAX, MESSAGE_TEXT_MAX, REQUEST_HEAD, RESPONSE_HEAD};
use super::timing::AgentTiming;
use crate::http::caller_connection::CallerConnection;
use crate::http::head::{self, InvalidHead, RequestHead, ResponseHead};
use crate::http::{ConnectionField, Fields, Framing, UpgradeProtocol, write};

/// Absent duration.
const NONE: u32 = u32::MAX;

/// A request as the gateway sends it.
#[derive(Debug)]
pub struct OutboundRequest {
    pub method: Method,
    pub target: PathAndQuery,
    pub authority: Authority,
    pub headers: Fields,
    pub framing: Framing,
    pub upgrade: Option<UpgradeProtocol>,
    /// The caller's connection, if the backend may authenticate connections.
    pub caller_connection: Option<CallerConnection>,
}

impl OutboundRequest {
    /// Bytes of content before those of another protocol; `None` for an ordinary request.
    pub fn upgrade_content(&self) -> Option<u64> {
        let content = || self.framing.content_length().unwrap_or(0);
        self.upgrade.is_some().then(content)
    }

    /// Whether data follows the head: a body, or the caller's direction of an upgrade.
    pub fn has_body(&self) -> bool {
        self.framing.has_body() || self.upgrade.is_some()
    }

    /// Appends the head of a REQUEST, with the caller's connection for a peer that knows the field.
    pub fn write(&self, out: &mut Vec<u8>, caller: Option<CallerConnection>) {
        let named = caller.map(|caller| {
            let mut headers = self.headers.clone();
            caller.put(&mut headers);
            headers
        });
        let connection = self
            .upgrade
            .as_ref()
            .map_or(ConnectionField::Persists, ConnectionField::Upgrade);
        let host = self.authority.as_str().as_bytes();
        head::write_request(
            out,
            &self.method,
            &self.target,
            host,
            named.as_ref().unwrap_or(&self.headers),
            self.framing,
            connection,
        );
    }
}

/// Parses the head of a REQUEST. `end` tells whether the frame had END.
pub fn parse_request(payload: &Bytes, end: bool) -> Result<RequestHead, InvalidHead> {
    let request = head::parse_request(payload, REQUEST_HEAD)?;
    let follows = request.framing.has_body() || request.upgrade.is_some();
    if follows == end {
        return Err(InvalidHead::Syntax(
            "the END flag contradicts the framing fields",
        ));
    }
    Ok(request)
}

/// Appends the payload of a RESPONSE.
pub fn write_response(
    out: &mut Vec<u8>,
    timing: AgentTiming,
    status: StatusCode,
    headers: &Fields,
    framing: Framing,
    upgrade: Option<&UpgradeProtocol>,
) {
    write_timing(out, timing);
    write_response_head(out, status, headers, framing, upgrade);
}

/// Appends the payload of an INTERIM.
pub fn write_interim(out: &mut Vec<u8>, status: StatusCode, headers: &Fields) {
    write_response_head(out, status, headers, Framing::None, None);
}

fn write_response_head(
    out: &mut Vec<u8>,
    status: StatusCode,
    headers: &Fields,
    framing: Framing,
    upgrade: Option<&UpgradeProtocol>,
) {
    let connection = upgrade.map_or(ConnectionField::Persists, ConnectionField::Upgrade);
    head::write_response(out, status, headers, framing, connection);
}

/// A final response of the agent.
#[derive(Debug)]
pub struct AgentResponse {
    pub timing: AgentTiming,
    pub head: ResponseHead,
}

/// Parses the payload of a RESPONSE to a request with `method`.
pub fn parse_response(mut payload: Bytes, method: &Method) -> Result<AgentResponse, InvalidHead> {
    let timing = read_timing(&mut payload);
    Ok(AgentResponse {
        timing,
        head: head::parse_response(&payload, method, RESPONSE_HEAD)?,
    })
}

/// Parses the payload of an INTERIM.
pub fn parse_interim(payload: &Bytes) -> Result<ResponseHead, InvalidHead> {
    head::parse_response(payload, &Method::GET, RESPONSE_HEAD)
}

/// Error of an agent in place of a response.
#[derive(Debug, PartialEq, Eq)]
pub struct Refusal {
    pub timing: AgentTiming,
    /// The agent says that no backend processed any of the request.
    pub unsent: bool,
    /// Code as in `AgentErrorCode`; from an untrusted agent any bytes.
    pub code: Bytes,
    /// Text for people; from an untrusted agent any bytes.
    pub message: Bytes,
}

/// Bit of the byte with the length of a code: no backend processed any of the request. Agents of
/// the release line 0.1 never set it.
const UNSENT: u8 = 0x80;

/// Appends the payload of a REFUSED. Cuts a message that is too long. `unsent` tells that no
/// backend processed any of the request.
pub fn write_refusal(
    out: &mut Vec<u8>,
    timing: AgentTiming,
    unsent: bool,
    code: &'static str,
    message: &str,
) {
    const { assert!(CODE_MAX < UNSENT as usize) };
    debug_assert!(code.len() <= CODE_MAX);
    write_timing(out, timing);
    out.push(code.len() as u8 | if unsent { UNSENT } else { 0 });
    out.extend_from_slice(code.as_bytes());
    let bytes = message.as_bytes();
    out.extend_from_slice(&bytes[..bytes.len().min(MESSAGE_TEXT_MAX)]);
}

/// Parses the payload of a REFUSED; `None` if the code is longer than the payload.
pub fn parse_refusal(mut payload: Bytes) -> Option<Refusal> {
    let timing = read_timing(&mut payload);
    let first = payload.try_get_u8().ok()?;
    let unsent = first & UNSENT != 0;
    let length = usize::from(first & !UNSENT);
    if payload.len() < length {
        return None;
    }
    Some(Refusal {
        timing,
        unsent,
        code: payload.split_to(length),
        message: payload,
    })
}

fn write_timing(out: &mut Vec<u8>, timing: AgentTiming) {
    out.extend_from_slice(&timing.agent_us.to_be_bytes());
    out.extend_from_slice(&timing.backend_first_byte_us.unwrap_or(NONE).to_be_bytes());
}

/// Reads the two durations. The frame's length was checked.
fn read_timing(payload: &mut Bytes) -> AgentTiming {
    let mut next = || payload.try_get_u32().unwrap_or(NONE);
    let agent_us = next();
    let first_byte = next();
    AgentTiming {
        agent_us,
        backend_first_byte_us: (first_byte != NONE).then_some(first_byte),
    }
}

/// Field of a REQUEST that asks for a notice of [acceptance](write_acceptance). The agent does not
/// pass it on.
pub const AWAIT_ACCEPTANCE: HeaderName = HeaderName::from_static("x-gw-await-acceptance");

/// Field of a notice of acceptance.
const ACCEPTED: HeaderName = HeaderName::from_static("x-gw-accepted");

/// Appends the payload of an INTERIM that is a notice of acceptance: the request has a slot and a
/// connection to a backend, and its body may follow. The gateway does not pass it on.
pub fn write_acceptance(out: &mut Vec<u8>) {
    let headers = std::iter::once((ACCEPTED, HeaderValue::from_static("1"))).collect();
    write_interim(out, StatusCode::CONTINUE, &headers);
}

/// Whether the head of an INTERIM is a notice of acceptance. A backend cannot send one: an agent
/// removes the fields of the gateway from its responses.
pub fn is_acceptance(head: &ResponseHead) -> bool {
    head.headers.contains(&ACCEPTED)
}

/// Trailer field of a request for another protocol whose caller ended without `close_notify` or
/// END_STREAM: the agent resets the connection to the backend once that has the bytes before.
/// Trailers of callers do not have it.
pub const BROKEN_OFF: HeaderName = HeaderName::from_static("x-gw-broken-off");

/// Trailers with [`BROKEN_OFF`].
pub fn broken_off() -> Fields {
    std::iter::once((BROKEN_OFF, HeaderValue::from_static("1"))).collect()
}

/// Payload of TRAILERS: field lines and an empty line.
pub fn write_trailers(trailers: &Fields) -> Bytes {
    let mut lines = Vec::new();
    write::write_trailers(&mut lines, trailers);
    lines.extend_from_slice(b"\r\n");
    lines.into()
}

#[cfg(test)]
mod tests {
    use http::header::CONTENT_TYPE;

    use super::*;
    use crate::testing::fields;

    fn request(framing: Framing, upgrade: Option<&'static str>) -> OutboundRequest {
        OutboundRequest {
            method: Method::PUT,
            target: PathAndQuery::from_static("/a?b=%2F"),
            authority: Authority::from_static("acme--api.eu1.example.com"),
            headers: fields(&[("accept", "*/*"), ("x-one", "1")]),
            framing,
            upgrade: upgrade.map(UpgradeProtocol::from_static),
            caller_connection: Some(CallerConnection::name_randomly()),
        }
    }

    #[test]
    fn requests_parse_back() {
        let lengths = [Framing::Length(0), Framing::Length(7)];
        for framing in [Framing::None, Framing::Chunked].into_iter().chain(lengths) {
            for upgrade in [None, Some("websocket")] {
                // A request to switch protocols may have content of a known length.
                let framing = match (upgrade, framing) {
                    (None, _) | (_, Framing::Length(1..)) => framing,
                    _ => Framing::None,
                };
                let sent = request(framing, upgrade);
                let mut out = Vec::new();
                sent.write(&mut out, sent.caller_connection);
                let payload = Bytes::from(out);
                let mut received = parse_request(&payload, !sent.has_body()).unwrap();
                assert_eq!(received.method, sent.method);
                assert_eq!(received.target, sent.target);
                assert_eq!(received.authority, sent.authority);
                assert_eq!(received.framing, sent.framing);
                assert_eq!(received.upgrade, sent.upgrade);
                assert_eq!(received.headers["x-one"], "1");
                let caller = CallerConnection::take(&mut received.headers);
                assert_eq!(caller, sent.caller_connection);
                // The END flag must agree with the fields.
                assert!(parse_request(&payload, sent.has_body()).is_err());
            }
        }
    }

    #[test]
    fn responses_parse_back() {
        let timing = AgentTiming {
            agent_us: 5,
            backend_first_byte_us: Some(70),
        };
        let mut out = Vec::new();
        let headers = fields(&[("content-type", "text/plain")]);
        let framing = Framing::Length(3);
        write_response(
            &mut out,
            timing,
            StatusCode::NOT_FOUND,
            &headers,
            framing,
            None,
        );
        let response = parse_response(out.into(), &Method::GET).unwrap();
        assert_eq!(response.timing, timing);
        assert_eq!(response.head.status, StatusCode::NOT_FOUND);
        assert_eq!(response.head.framing, framing);
        assert_eq!(response.head.headers[CONTENT_TYPE], headers[CONTENT_TYPE]);
    }

    #[test]
    fn interim_responses_parse_back() {
        let mut out = Vec::new();
        let headers = fields(&[("link", "</a>")]);
        write_interim(&mut out, StatusCode::EARLY_HINTS, &headers);
        let interim = parse_interim(&out.into()).unwrap();
        assert_eq!(interim.status, StatusCode::EARLY_HINTS);
        assert_eq!(interim.headers["link"], "</a>");
    }

    #[test]
    fn notices_of_acceptance_are_told_from_interim_responses() {
        let is_notice = |write: fn(&mut Vec<u8>)| {
            let mut out = Vec::new();
            write(&mut out);
            is_acceptance(&parse_interim(&out.into()).unwrap())
        };
        assert!(is_notice(write_acceptance));
        assert!(!is_notice(|out| write_interim(
            out,
            StatusCode::CONTINUE,
            &Fields::new()
        )));
    }

    #[test]
    fn refusals_parse_back_and_long_messages_are_cut() {
        let timing = AgentTiming {
            agent_us: 9,
            backend_first_byte_us: None,
        };
        let long = "x".repeat(5000);
        for (code, unsent, message, length) in [
            ("GW_BACKEND_UNREACHABLE", false, &long[..], MESSAGE_TEXT_MAX),
            ("GW_BACKEND_TLS", true, "", 0),
        ] {
            let mut out = Vec::new();
            write_refusal(&mut out, timing, unsent, code, message);
            let refusal = parse_refusal(out.into()).unwrap();
            assert_eq!(refusal.timing, timing);
            assert_eq!(refusal.code, code);
            assert_eq!(refusal.unsent, unsent, "{code}");
            assert_eq!(refusal.message.len(), length, "{code}");
        }
    }

    #[test]
    fn cut_refusals_are_refused() {
        for cut in [&[0, 0, 0, 1, 0, 0, 0, 1, 5, b'a'][..], &[0, 0, 0, 1]] {
            assert_eq!(parse_refusal(Bytes::from_static(cut)), None);
        }
    }
}
