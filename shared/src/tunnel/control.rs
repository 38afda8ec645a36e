//! Control messages of a tunnel: one JSON object in each MESSAGE frame, in both directions.

use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::id::AuthorityId;
use crate::identity::enrollment::CertificateReply;
use crate::identity::program::{SignedProgram, UpdateReport};
use crate::text::error_line;

/// Longest message, in bytes.
pub const MESSAGE_MAX: usize = 64 * 1024;

/// Longest message of an agent, in bytes. The largest, a certificate request, has less than 1 KiB.
pub const TO_GATEWAY_MAX: usize = 16 * 1024;

/// Message from gateway to agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToAgent {
    /// The tunnel is registered: requests can arrive.
    Ready { agent_id: String, generation: u64 },
    /// The gateway is stopping: connect again, and keep this tunnel, since requests may still
    /// arrive on it.
    Drain,
    /// No request arrives after this: end the tunnel when its requests have ended. Answers the
    /// agent's `Drain`, and ends the gateway's own.
    Drained,
    /// A newer tunnel of this agent replaces this one: do not reconnect.
    Replaced,
    /// Services of this agent. Sent when the tunnel is ready and when they change.
    Services { hostnames: Vec<String> },
    /// Answer to `Renew`.
    Certificate(CertificateReply),
    /// Answer to `Renew` that is refused, with the reason.
    RenewalRefused { message: String },
    /// Whether the service has tunnels of other agents, to which the gateway can send what this
    /// agent refuses, and its setting `retries`. Sent when the tunnel is ready, unless it says
    /// `false` and `true`, and when it changes. Not sent to agents of a line before 0.2.
    OtherTunnels {
        exist: bool,
        /// The agent may repeat safe requests whose connection to a backend has ended. The first
        /// versions of 0.2 do not send it.
        #[serde(default = "yes")]
        retries: bool,
    },
    /// Programs of the gateway's version, for agents that update themselves. Not sent to agents of
    /// a line before 0.2.
    Programs { programs: Vec<SignedProgram> },
    /// Renew the certificate unless this authority has issued it, after a random part of
    /// `within_seconds`: another authority issues the certificates of agents now. Not sent to
    /// agents of a line before 0.2.
    RenewalWanted {
        authority: AuthorityId,
        within_seconds: u32,
    },
    /// The gateway ends this tunnel now, for this [reason](super::cut_reason::CutReason). Not sent
    /// to agents of a line before 0.2.
    Ended { reason: String },
}

fn yes() -> bool {
    true
}

/// Message from agent to gateway.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToGateway {
    Statistics {
        slots: u32,
        slots_in_use: u32,
        backend_connections: u32,
        /// Agents of a line before 0.2 do not send it.
        #[serde(default)]
        backend: BackendHealth,
        /// The agent gets requests only if no other can serve them. Agents of a line before 0.2 do
        /// not send it.
        #[serde(default)]
        standby: bool,
    },
    /// The agent is stopping: send no new requests on this tunnel.
    Drain,
    /// Request for a certificate: `csr` is a PEM certificate request signed with the new key (RFC
    /// 2986).
    Renew { csr: String },
    /// Whether the agent updates itself, and how far it is. Sent when it changes.
    Update(UpdateReport),
}

/// Whether a backend of the service takes connections, as far as the agent knows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BackendHealth {
    /// No connection was attempted yet.
    #[default]
    Unknown,
    /// At least one backend takes connections.
    Healthy,
    /// No backend does.
    Unhealthy,
}

/// A message to one end of a tunnel.
pub trait ControlMessage: Serialize + DeserializeOwned {
    /// Longest encoded message, in bytes.
    const LONGEST: usize;
}

impl ControlMessage for ToAgent {
    const LONGEST: usize = MESSAGE_MAX;
}

impl ControlMessage for ToGateway {
    const LONGEST: usize = TO_GATEWAY_MAX;
}

/// Invalid control message.
#[derive(Debug, thiserror::Error)]
pub enum InvalidMessage {
    #[error("control message is longer than {0} bytes")]
    TooLong(usize),
    /// The error may quote the message.
    #[error("control message: {}", error_line(.0))]
    Json(#[from] serde_json::Error),
}

/// Encodes a message. Fails if it is too long to be sent.
pub fn encode<M: ControlMessage>(message: &M) -> Result<Bytes, InvalidMessage> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > M::LONGEST {
        Err(InvalidMessage::TooLong(M::LONGEST))
    } else {
        Ok(bytes.into())
    }
}

/// Decodes a message.
pub fn decode<M: ControlMessage>(bytes: &[u8]) -> Result<M, InvalidMessage> {
    if bytes.len() > M::LONGEST {
        return Err(InvalidMessage::TooLong(M::LONGEST));
    }
    Ok(serde_json::from_slice(bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_decode_back() {
        for sent in [
            ToAgent::Ready {
                agent_id: "ag_1\n".into(),
                generation: 7,
            },
            ToAgent::Drain,
            ToAgent::Replaced,
            ToAgent::Services {
                hostnames: vec!["a".into(), "b".into()],
            },
            ToAgent::Ended {
                reason: "agent_revoked".into(),
            },
            ToAgent::RenewalWanted {
                authority: AuthorityId::new(&"0".repeat(40)).unwrap(),
                within_seconds: 9,
            },
        ] {
            assert_eq!(decode::<ToAgent>(&encode(&sent).unwrap()).unwrap(), sent);
        }
        let sent = ToGateway::Renew {
            csr: "-----BEGIN\n".into(),
        };
        assert_eq!(decode::<ToGateway>(&encode(&sent).unwrap()).unwrap(), sent);
    }

    #[test]
    fn long_and_unknown_messages_are_refused() {
        let padded = |length| [b"{\"type\":\"drain\"}".as_slice(), &vec![b' '; length]].concat();
        let rest = TO_GATEWAY_MAX - padded(0).len();
        let longest: ToGateway = decode(&padded(rest)).unwrap();
        assert_eq!(longest, ToGateway::Drain);
        assert!(matches!(
            decode::<ToGateway>(&padded(rest + 1)),
            Err(InvalidMessage::TooLong(TO_GATEWAY_MAX))
        ));
        let to_agent: ToAgent = decode(&padded(rest + 1)).unwrap();
        assert_eq!(to_agent, ToAgent::Drain);
        let hostnames = vec!["x".repeat(MESSAGE_MAX)];
        assert!(matches!(
            encode(&ToAgent::Services { hostnames }),
            Err(InvalidMessage::TooLong(MESSAGE_MAX))
        ));
        for unknown in ["{\"type\":\"reboot\"}", "{\"type\":\"drain\"} {}", ""] {
            let decoded = decode::<ToGateway>(unknown.as_bytes());
            let is_refused = matches!(decoded, Err(InvalidMessage::Json(_)));
            assert!(is_refused, "{unknown}");
        }
    }

    #[test]
    fn errors_quote_a_message_in_one_short_line() {
        let message = format!("{{\"type\":\"x\\nWARN forged{}\"}}", "y".repeat(10_000));
        let error = decode::<ToGateway>(message.as_bytes()).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("x\\u{a}WARN forged"), "{error}");
        assert!(error.len() < 400, "{error}");
    }
}
