//! The upgrade that turns an agent's TLS connection into a tunnel (RFC 9110 §7.8): parsing and writing, no I/O.

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderValue};
use http::uri::PathAndQuery;
use http::{Method, StatusCode};

use crate::http::fields::X_GW_VERSION;
use crate::http::head::{self, Framing, HeadLimits, InvalidHead, RequestHead};
use crate::version::VERSION;

/// Path that the upgrade is requested on.
pub const PATH: &str = "/tunnel";
/// Protocol name in `Upgrade`.
pub const PROTOCOL: &str = "gw-tunnel";

/// Bounds on the heads of the handshake, either way.
pub const HEAD_LIMITS: HeadLimits = HeadLimits { head: 8 * 1024, fields: 32, target: 64 };

/// Largest refusal body that an agent reads, in bytes.
pub const REFUSAL_MAX: u64 = 16 * 1024;

/// Why a gateway refuses an upgrade request before it looks at who asks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadUpgrade {
    #[error("a tunnel begins with `GET {PATH}` and `Upgrade: {PROTOCOL}`")]
    NotAnUpgrade,
    #[error("gateway runs version {VERSION}, the agent version {agent}: they must be equal")]
    VersionMismatch { agent: String },
}

/// The head of an agent's request for a tunnel of the service at `host`.
pub fn request(host: &str) -> Vec<u8> {
    let mut headers = upgrade_fields();
    headers.insert(X_GW_VERSION, HeaderValue::from_static(VERSION));
    let mut out = Vec::with_capacity(256);
    let path = PathAndQuery::from_static(PATH);
    head::write_request(&mut out, &Method::GET, &path, host.as_bytes(), &headers, Framing::None);
    out
}

/// Checks that a parsed head asks for a tunnel, in our version.
pub fn check(request: &RequestHead) -> Result<(), BadUpgrade> {
    let upgrades = request.headers.get(header::UPGRADE).is_some_and(|protocol| protocol == PROTOCOL);
    if request.method != Method::GET || request.target != PATH || !upgrades || request.framing != Framing::None {
        return Err(BadUpgrade::NotAnUpgrade);
    }
    let agent = request.headers.get(X_GW_VERSION).map(HeaderValue::as_bytes).unwrap_or_default();
    if agent != VERSION.as_bytes() {
        let agent = String::from_utf8_lossy(agent).chars().take(40).collect();
        return Err(BadUpgrade::VersionMismatch { agent });
    }
    Ok(())
}

/// The head with which a gateway agrees; HTTP/2 begins right after it.
pub fn acceptance() -> Vec<u8> {
    let mut out = Vec::with_capacity(128);
    head::write_response(&mut out, StatusCode::SWITCHING_PROTOCOLS, &upgrade_fields(), Framing::None, None);
    out
}

/// Reads a gateway's answer: agreed, or refused with this status and a body framed so.
pub fn parse_answer(head: &Bytes) -> Result<Result<(), (StatusCode, Framing)>, InvalidHead> {
    let response = head::parse_response(head, &Method::GET, HEAD_LIMITS)?;
    Ok(if response.status == StatusCode::SWITCHING_PROTOCOLS {
        Ok(())
    } else {
        Err((response.status, response.framing))
    })
}

fn upgrade_fields() -> HeaderMap {
    HeaderMap::from_iter([
        (header::CONNECTION, HeaderValue::from_static("upgrade")),
        (header::UPGRADE, HeaderValue::from_static(PROTOCOL)),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agents_request_is_accepted_by_the_gateway_and_the_answer_by_the_agent() {
        let head = head::parse_request(&request("acme--api.eu1.example.com").into(), HEAD_LIMITS).unwrap();
        assert_eq!(check(&head), Ok(()));
        assert_eq!(head.authority.as_str(), "acme--api.eu1.example.com");
        assert_eq!(parse_answer(&acceptance().into()).unwrap(), Ok(()));
        let refusal = Bytes::from_static(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 2\r\n\r\n");
        assert_eq!(parse_answer(&refusal).unwrap(), Err((StatusCode::FORBIDDEN, Framing::Length(2))));
    }

    #[test]
    fn other_versions_and_other_requests_are_told_apart() {
        let text = String::from_utf8(request("h")).unwrap();
        let check_text = |text: String| check(&head::parse_request(&Bytes::from(text), HEAD_LIMITS).unwrap());
        let older = check_text(text.replace(VERSION, "0.0.9")).unwrap_err();
        assert_eq!(older, BadUpgrade::VersionMismatch { agent: "0.0.9".into() });
        assert!(older.to_string().contains("0.0.9") && older.to_string().contains(VERSION));
        for (from, to) in [("GET", "POST"), ("/tunnel", "/other"), ("gw-tunnel", "websocket")] {
            assert_eq!(check_text(text.replace(from, to)), Err(BadUpgrade::NotAnUpgrade), "{to}");
        }
    }
}
