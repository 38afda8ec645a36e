//! JSON of an agent's enrollment on the apex: `POST /enroll`, `GET /enroll/status` and `POST /csr`.

use serde::{Deserialize, Serialize};

use crate::id::{AgentId, EnrollmentId};

pub const ENROLL_PATH: &str = "/enroll";
/// Path of the status, with `?enrollment_id=…` and `Authorization: Bearer {enrollment_secret}`.
pub const STATUS_PATH: &str = "/enroll/status";
/// Path of certificate requests, with the same bearer token, or with `agent_id` in the body if the certificate has
/// expired.
pub const CSR_PATH: &str = "/csr";

/// Largest request and reply of these paths, in bytes.
pub const BODY_MAX: usize = 64 * 1024;

/// Request of `POST /enroll`.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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
#[serde(deny_unknown_fields)]
pub struct CsrRequest {
    /// Certificate request in PEM (RFC 2986) with a P-256 or Ed25519 key. Only its public key is used.
    pub csr: String,
    /// Replaces the bearer token for an agent whose certificate has expired. The request must have the key of that
    /// certificate; its signature is the proof.
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
