//! JSON of an agent's enrollment on the apex: `POST /enroll`, `GET /enroll/status` and `POST /csr`.

use serde::{Deserialize, Serialize};

use crate::id::{AgentId, EnrollmentId, split_tenant_label};
use crate::text::printable;

pub const ENROLL_PATH: &str = "/enroll";
/// Path of the status, with `?enrollment_id=…` and `Authorization: Bearer {enrollment_secret}`.
pub const STATUS_PATH: &str = "/enroll/status";
/// Path of certificate requests, with the same bearer token, or with `agent_id` in the body if the
/// certificate has expired.
pub const CSR_PATH: &str = "/csr";

/// Largest request and reply of these paths, in bytes.
pub const BODY_MAX: usize = 64 * 1024;

/// Most services of one agent. Their list must fit a control message.
pub const SERVICES_MAX: usize = 500;

/// List of services that no gateway sends.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidServices {
    #[error("{0} services, and an agent has at most {SERVICES_MAX}")]
    TooMany(usize),
    /// The name, and the apex.
    #[error("{0:?} is not the hostname of a service, ACCOUNT--SERVICE.{1}")]
    Name(String, String),
}

/// Checks the hostnames of an agent's services as they came from the gateway at `apex`. They are
/// printed, logged, stored and used as server names, so they must be what they are called.
pub fn check_services(hostnames: &[String], apex: &str) -> Result<(), InvalidServices> {
    if hostnames.len() > SERVICES_MAX {
        return Err(InvalidServices::TooMany(hostnames.len()));
    }
    let apex = apex.trim_end_matches('.');
    let is_service = |hostname: &&String| {
        let label = hostname
            .strip_suffix(apex)
            .and_then(|rest| rest.strip_suffix('.'));
        label.is_some_and(|label| split_tenant_label(label).is_some())
    };
    match hostnames.iter().find(|hostname| !is_service(hostname)) {
        Some(wrong) => Err(InvalidServices::Name(
            printable(wrong.as_bytes(), HOSTNAME_MAX),
            apex.to_owned(),
        )),
        None => Ok(()),
    }
}

/// Longest host name (RFC 1035 §2.3.4).
const HOSTNAME_MAX: usize = 253;

/// Request of `POST /enroll`.
#[derive(Clone, Serialize, Deserialize)]
pub struct EnrollRequest {
    /// Enrollment token made by an administrator, `gw_et_{id}.{secret}`. Valid once.
    pub token: String,
    /// Display name of the agent, 1 to 100 characters.
    pub name: String,
    /// The agent's version, of a release line that the gateway serves.
    pub version: String,
}

/// Reply to `POST /enroll`, with status 201.
#[derive(Clone, Serialize, Deserialize)]
pub struct EnrollReply {
    pub enrollment_id: EnrollmentId,
    /// Id of the agent, assigned before approval; `status` tells whether it may serve.
    pub agent_id: AgentId,
    /// Bearer token for `/enroll/status` and `/csr`.
    pub enrollment_secret: String,
    pub status: EnrollmentStatus,
    pub poll_after_seconds: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EnrollmentStatus {
    /// Waits for an administrator's approval.
    Pending,
    Approved,
    Revoked,
}

/// Reply to `GET /enroll/status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusReply {
    pub status: EnrollmentStatus,
    /// Set once the agent is approved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_id: Option<AgentId>,
    pub poll_after_seconds: u32,
}

/// Request of `POST /csr`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CsrRequest {
    /// Certificate request in PEM (RFC 2986) with a P-256 or Ed25519 key. Only its public key is
    /// used.
    pub csr: String,
    /// Replaces the bearer token for an agent whose certificate has expired. The request must have
    /// the key of that certificate; its signature is the proof.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_id: Option<AgentId>,
}

/// An issued certificate, from `/csr` or over the tunnel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertificateReply {
    /// The agent's certificate, PEM.
    pub certificate: String,
    /// Certificates of the issuing authorities, PEM.
    pub chain: String,
    /// End of validity (RFC 3339, UTC).
    pub not_after: String,
    pub agent_id: AgentId,
    /// Hostnames of the agent's services.
    pub services: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_services_below_the_apex_are_accepted() {
        let check = |hostnames: &[&str], apex: &str| {
            let hostnames: Vec<_> = hostnames.iter().map(ToString::to_string).collect();
            check_services(&hostnames, apex)
        };
        let good = ["acme--api.eu1.example.com", "acme--a--b.eu1.example.com"];
        assert_eq!(check(&good, "eu1.example.com"), Ok(()));
        assert_eq!(check(&good, "eu1.example.com."), Ok(()));
        for wrong in [
            "",
            "eu1.example.com",
            ".eu1.example.com",
            "acme--api.us1.example.com",
            "acme--apieu1.example.com",
            "a.acme--api.eu1.example.com",
            "acme--api.eu1.example.com.",
            "acme-api.eu1.example.com",
            "ACME--api.eu1.example.com",
            "acme--\u{1b}[2J.eu1.example.com",
            "acme--api\n.eu1.example.com",
            "acme--\u{e4}pi.eu1.example.com",
            "acme--api.eu1.example.com\nacme--api.eu1.example.com",
            &format!("acme--{}.eu1.example.com", "x".repeat(58)),
        ] {
            let error = check(&[good[0], wrong], "eu1.example.com").unwrap_err();
            let message = error.to_string();
            assert!(matches!(error, InvalidServices::Name(..)), "{message}");
            assert!(!message.contains(['\n', '\x1b']), "{message:?}");
        }
        assert_eq!(check(&[good[0]; SERVICES_MAX], "eu1.example.com"), Ok(()));
        let too_many = check(&[good[0]; SERVICES_MAX + 1], "eu1.example.com");
        assert_eq!(too_many, Err(InvalidServices::TooMany(SERVICES_MAX + 1)));
    }
}
