//! Messages of the upgrade from an agent's TLS connection to a tunnel (RFC 9110 §7.8), without I/O.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::header::{self, HeaderValue};
use http::uri::PathAndQuery;
use http::{Method, StatusCode};

use crate::clock;
use crate::http::fields::X_GW_VERSION;
use crate::http::head::{self, HeadLimits, RequestHead};
use crate::http::{ConnectionField, Fields, Framing, UpgradeProtocol};
use crate::identity::program;
use crate::text::printable;
use crate::version::{AgentVersions, VERSION, Version, VersionMismatch};

/// Path of the upgrade request.
pub const PATH: &str = "/tunnel";
/// Name of the tunnel protocol in `Upgrade`.
pub const PROTOCOL: &str = "gw-tunnel";

/// [`PROTOCOL`], parsed.
const UPGRADE: UpgradeProtocol = UpgradeProtocol::from_static(PROTOCOL);

/// Bounds on the heads of the handshake in both directions.
pub const HEAD_LIMITS: HeadLimits = HeadLimits {
    head: 8 * 1024,
    fields: 32,
    target: 128,
};

/// Error of a request that is refused before authentication.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadUpgrade {
    #[error("a tunnel begins with `GET {PATH}` and `Upgrade: {PROTOCOL}`")]
    NotAnUpgrade,
    #[error(transparent)]
    VersionMismatch(#[from] VersionMismatch),
}

/// Response to a challenge, by which an agent authenticates if the gateway requests no client
/// certificate in the TLS handshake: `Authorization: Gw-Agent certificate="…", signature="…"`, both
/// in base64url without padding (RFC 9110 §11.4).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proof {
    /// The agent's certificate, DER.
    pub certificate: Vec<u8>,
    /// Signature of [`challenge_message`] with the certificate's key: ECDSA P-256 with SHA-256
    /// (DER), or Ed25519.
    pub signature: Vec<u8>,
}

/// Name of the authentication scheme.
pub const SCHEME: &str = "Gw-Agent";

/// Value of `WWW-Authenticate` that asks for a [`Proof`] over `challenge`.
pub fn challenge_field(challenge: &str) -> String {
    format!("{SCHEME} challenge=\"{challenge}\"")
}

/// Parses the challenge in a value of `WWW-Authenticate`.
pub fn parse_challenge(field: &str) -> Option<&str> {
    parameters(field)?
        .strip_prefix("challenge=\"")?
        .strip_suffix('"')
}

/// Message that the agent signs: bound to its purpose, the service and the challenge, which is
/// random for each connection.
pub fn challenge_message(host: &str, challenge: &str) -> Vec<u8> {
    format!("gw-tunnel agent authentication\0{host}\0{challenge}").into_bytes()
}

impl Proof {
    /// Value of `Authorization`.
    pub fn field(&self) -> String {
        let encode = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        format!(
            "{SCHEME} certificate=\"{}\", signature=\"{}\"",
            encode(&self.certificate),
            encode(&self.signature)
        )
    }

    /// Parses a value of `Authorization`.
    pub fn parse(field: &str) -> Option<Self> {
        let (certificate, signature) = parameters(field)?.split_once(',')?;
        let value = |parameter: &str, name: &str| {
            let quoted = parameter
                .trim()
                .strip_prefix(name)?
                .strip_prefix("=\"")?
                .strip_suffix('"')?;
            URL_SAFE_NO_PAD.decode(quoted).ok()
        };
        Some(Self {
            certificate: value(certificate, "certificate")?,
            signature: value(signature, "signature")?,
        })
    }
}

fn parameters(field: &str) -> Option<&str> {
    let (scheme, parameters) = field.split_once(' ')?;
    scheme
        .eq_ignore_ascii_case(SCHEME)
        .then(|| parameters.trim())
}

/// Head of an agent's request for a tunnel of the service at `host`, with the proof if it was
/// challenged.
pub fn request(host: &str, proof: Option<&Proof>) -> Vec<u8> {
    write(
        host,
        &PathAndQuery::from_static(PATH),
        ConnectionField::Upgrade(&UPGRADE),
        proof,
    )
}

/// Head of an agent's request for the program with this SHA-256 (hexadecimal), in place of a
/// tunnel.
pub fn program_request(host: &str, sha256: &str, proof: Option<&Proof>) -> Vec<u8> {
    let path = format!("{}{sha256}", program::PATH);
    let path =
        PathAndQuery::try_from(path).unwrap_or_else(|_| PathAndQuery::from_static(program::PATH));
    write(host, &path, ConnectionField::Persists, proof)
}

fn write(
    host: &str,
    path: &PathAndQuery,
    connection: ConnectionField<'_>,
    proof: Option<&Proof>,
) -> Vec<u8> {
    let mut headers = Fields::new();
    if let Some(proof) = proof {
        // Base64url and ASCII words are a valid value.
        headers.extend(
            HeaderValue::try_from(proof.field())
                .ok()
                .map(|value| (header::AUTHORIZATION, value)),
        );
    }
    headers.insert(X_GW_VERSION, HeaderValue::from_static(VERSION));
    let mut out = Vec::with_capacity(256);
    head::write_request(
        &mut out,
        &Method::GET,
        path,
        host.as_bytes(),
        &headers,
        Framing::None,
        connection,
    );
    out
}

/// What an agent asks for on a connection of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentRequest {
    pub version: Version,
    pub purpose: Purpose,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Purpose {
    Tunnel,
    /// The agent program with this SHA-256.
    Program(String),
}

/// Checks that a request head asks for a tunnel or for a program, in a version that the gateway
/// serves.
pub fn check(request: &RequestHead, served: AgentVersions) -> Result<AgentRequest, BadUpgrade> {
    // `upgrade` is `None` for a request with a body.
    let upgrades = request
        .upgrade
        .as_ref()
        .is_some_and(|protocol| *protocol == UPGRADE);
    let purpose = match request.target.path() {
        PATH if request.target == PATH && upgrades => Purpose::Tunnel,
        path => path
            .strip_prefix(program::PATH)
            .map(|sha256| Purpose::Program(sha256.to_owned()))
            .ok_or(BadUpgrade::NotAnUpgrade)?,
    };
    if request.method != Method::GET {
        return Err(BadUpgrade::NotAnUpgrade);
    }
    let agent = request
        .headers
        .get(X_GW_VERSION)
        .map(HeaderValue::as_bytes)
        .unwrap_or_default();
    Ok(AgentRequest {
        version: served.check(&printable(agent, 40))?,
        purpose,
    })
}

/// Head of the gateway's 101 response; HTTP/2 follows at once. `Date` tells the agent the gateway's
/// clock, by which its certificate is issued and checked.
pub fn acceptance() -> Vec<u8> {
    let mut headers = Fields::new();
    let date = HeaderValue::try_from(httpdate::fmt_http_date(clock::now()));
    headers.extend(date.ok().map(|date| (header::DATE, date)));
    let mut out = Vec::with_capacity(160);
    let connection = ConnectionField::Upgrade(&UPGRADE);
    head::write_response(
        &mut out,
        StatusCode::SWITCHING_PROTOCOLS,
        &headers,
        Framing::UntilClose,
        connection,
    );
    out
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use bytes::Bytes;

    use super::*;

    #[test]
    fn request_and_acceptance_parse_back() {
        let sent = request("acme--api.eu1.example.com", None);
        let head = head::parse_request(&sent.into(), HEAD_LIMITS).unwrap();
        let request = check(&head, AgentVersions::Same).unwrap();
        assert_eq!(request.version, Version::own());
        assert_eq!(request.purpose, Purpose::Tunnel);
        assert_eq!(head.authority.as_str(), "acme--api.eu1.example.com");
        let accepted =
            head::parse_response(&acceptance().into(), &Method::GET, HEAD_LIMITS).unwrap();
        assert_eq!(accepted.status, StatusCode::SWITCHING_PROTOCOLS);
        let date = accepted.headers[header::DATE].to_str().unwrap();
        let date = httpdate::parse_http_date(date).unwrap();
        assert!(SystemTime::now().duration_since(date).unwrap().as_secs() < 60);
    }

    #[test]
    fn challenges_and_proofs_parse_back() {
        assert_eq!(parse_challenge(&challenge_field("abc_-9")), Some("abc_-9"));
        for other in ["Bearer challenge=\"x\"", "Bearer", SCHEME] {
            assert_eq!(parse_challenge(other), None, "{other}");
        }
        let proof = Proof {
            certificate: vec![0, 255, 7],
            signature: b"signed".to_vec(),
        };
        assert_eq!(Proof::parse(&proof.field()), Some(proof.clone()));
        let head = head::parse_request(&request("h", Some(&proof)).into(), HEAD_LIMITS).unwrap();
        assert_eq!(head.headers[header::AUTHORIZATION], proof.field().as_str());
        for bad in [
            "",
            "Gw-Agent",
            "Gw-Agent certificate=\"AA\"",
            "Gw-Agent certificate=AA, signature=AA",
        ] {
            assert_eq!(Proof::parse(bad), None, "{bad}");
        }
        assert_ne!(challenge_message("a", "b"), challenge_message("a\0b", ""));
    }

    #[test]
    fn other_versions_and_other_requests_are_refused() {
        let text = String::from_utf8(request("h", None)).unwrap();
        let check_text = |text: String| {
            let head = head::parse_request(&Bytes::from(text), HEAD_LIMITS).unwrap();
            check(&head, AgentVersions::Same)
        };
        let older = check_text(text.replace(VERSION, "0.0.9")).unwrap_err();
        assert!(matches!(&older, BadUpgrade::VersionMismatch(older) if older.agent == "0.0.9"));
        assert!(older.to_string().contains("0.0.9") && older.to_string().contains(VERSION));
        for (from, to) in [
            ("GET", "POST"),
            ("/tunnel", "/other"),
            ("gw-tunnel", "websocket"),
        ] {
            let checked = check_text(text.replace(from, to));
            assert_eq!(checked, Err(BadUpgrade::NotAnUpgrade), "{to}");
        }
    }

    #[test]
    fn request_for_a_program_parses_back() {
        let sha256 = "0a".repeat(32);
        let request = program_request("acme--api.eu1.example.com", &sha256, None);
        let head = head::parse_request(&request.into(), HEAD_LIMITS).unwrap();
        let request = check(&head, AgentVersions::Same).unwrap();
        assert_eq!(request.purpose, Purpose::Program(sha256));
    }
}
