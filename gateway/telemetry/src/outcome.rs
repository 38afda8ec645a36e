//! How requests and their attempts end, as counters, traces and records name it.

/// How a request ended, for the connection that carried it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The response went out whole.
    Complete,
    /// The response went out whole and refused a caller that had not authenticated.
    Refused,
    /// The response began and broke off: it must not look complete.
    Cut,
    /// The caller closed the connection or reset the stream.
    CallerGone,
}

/// Why an attempt failed. The names are the values of a metric label, of the request log and of
/// messages between nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttemptFailure {
    /// The agent has no free slot.
    NoSlot,
    /// The agent does not read what the gateway sends, or its tunnel ended before the request was
    /// sent.
    NotOpened,
    /// The agent could not connect to a backend.
    BackendUnreachable,
    /// TLS to the backend failed.
    BackendTls,
    /// The backend broke the connection off.
    BackendReset,
    /// The backend's response was not valid HTTP.
    BackendInvalidResponse,
    /// The tunnel ended before the response began.
    TunnelLost,
    /// The agent left a PING unanswered.
    Silent,
    /// The agent's answer was not valid on the tunnel.
    Protocol,
    /// The link to the node that owned the service ended before the response began.
    NodeLost,
}

impl AttemptFailure {
    /// All reasons.
    pub const ALL: [Self; 10] = [
        Self::NoSlot,
        Self::NotOpened,
        Self::BackendUnreachable,
        Self::BackendTls,
        Self::BackendReset,
        Self::BackendInvalidResponse,
        Self::TunnelLost,
        Self::Silent,
        Self::Protocol,
        Self::NodeLost,
    ];

    /// Returns the name of the reason, for example `no_slot`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NoSlot => "no_slot",
            Self::NotOpened => "not_opened",
            Self::BackendUnreachable => "backend_unreachable",
            Self::BackendTls => "backend_tls",
            Self::BackendReset => "backend_reset",
            Self::BackendInvalidResponse => "backend_invalid_response",
            Self::TunnelLost => "tunnel_lost",
            Self::Silent => "silent",
            Self::Protocol => "protocol",
            Self::NodeLost => "node_lost",
        }
    }

    /// Returns the reason with this name; `None` if the name is not known.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.as_str() == text)
    }
}
