//! How an agent comes to its certificate: the JSON of `POST /enroll`, `GET /enroll/status` and `POST /csr` on the apex.

use serde::{Deserialize, Serialize};

use crate::id::{AgentId, EnrollmentId};

pub const ENROLL_PATH: &str = "/enroll";
/// With `?enrollment_id=…` and `Authorization: Bearer {enrollment_secret}`.
pub const STATUS_PATH: &str = "/enroll/status";
/// With the same bearer; or, from an agent whose certificate has expired, with its `agent_id` in the body instead.
pub const CSR_PATH: &str = "/csr";

/// Largest request body of these paths that the gateway reads, and reply that the agent reads, in bytes.
pub const BODY_MAX: usize = 64 * 1024;

/// `POST /enroll`
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EnrollRequest {
    /// `gw_et_{id}.{secret}`: made by an administrator, good once.
    pub token: String,
    /// What people call the agent: 1 to 100 characters.
    pub name: String,
    /// The agent's version: the gateway's own, or it refuses.
    pub version: String,
}

/// 201
#[derive(Clone, Serialize, Deserialize)]
pub struct EnrollReply {
    pub enrollment_id: EnrollmentId,
    /// What administrators know the agent by, from the beginning: whether it may serve is in `status`.
    pub agent_id: AgentId,
    /// Proves to `/enroll/status` and `/csr` that it is still the same agent.
    pub enrollment_secret: String,
    pub status: EnrollmentStatus,
    pub poll_after_seconds: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EnrollmentStatus {
    /// An administrator has to approve it.
    Pending,
    Approved,
    Revoked,
}

/// `GET /enroll/status`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusReply {
    pub status: EnrollmentStatus,
    /// Once approved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_id: Option<AgentId>,
    pub poll_after_seconds: u32,
}

/// `POST /csr`
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CsrRequest {
    /// PEM (RFC 2986) for a key on P-256 or Ed25519, signed by it. Only the public key is taken from it.
    pub csr: String,
    /// Of an agent whose certificate has expired, instead of the bearer: the request is then for the key of that
    /// certificate, and signing it is the proof.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_id: Option<AgentId>,
}

/// The certificate, from `/csr` or over the tunnel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertificateReply {
    /// PEM.
    pub certificate: String,
    /// The authorities above it, PEM.
    pub chain: String,
    /// RFC 3339, UTC.
    pub not_after: String,
    pub agent_id: AgentId,
    /// Hostnames of the services that this agent serves.
    pub services: Vec<String>,
}
