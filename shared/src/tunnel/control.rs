//! The control stream: newline-delimited JSON in both directions on one long HTTP/2 stream.

use bytes::{Bytes, BytesMut};
use serde::{Deserialize, Serialize};

use super::text::error_line;
use crate::identity::enrollment::CertificateReply;

/// `:authority` of the control stream. Not a host name anybody can have: no account is called `gw.control`.
pub const AUTHORITY: &str = "gw.control";

/// Longest message, its newline included, in bytes.
pub const MESSAGE_MAX: usize = 64 * 1024;

/// Longest message from an agent, its newline included, in bytes: a certificate request is the largest, with less than
/// 1 KiB.
pub const TO_GATEWAY_MAX: usize = 16 * 1024;

/// Gateway to agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToAgent {
    /// The tunnel is registered: requests can arrive from now on.
    Ready { agent_id: String, generation: u64 },
    /// The gateway is going away: connect anew, and keep this tunnel, on which requests may still come.
    Drain,
    /// No request comes after this: end the tunnel when those it has are over. The answer to the agent's `Drain`, and
    /// the end of the gateway's own.
    Drained,
    /// A newer tunnel of this agent has taken over; do not reconnect for this one.
    Replaced,
    /// The services that this agent serves: when the tunnel becomes ready, and again whenever they change.
    Services { hostnames: Vec<String> },
    /// The answer to `Renew`.
    Certificate(CertificateReply),
    /// The other answer to `Renew`: what is wrong with the request.
    RenewalRefused { message: String },
    /// The flow-control window that uploads may have now, in bytes, or less if the agent holds too much for that. Not
    /// sent again before the answer: of two ends that both wait to write SETTINGS or their acknowledgement neither reads.
    Window { bytes: u32 },
}

/// Agent to gateway.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToGateway {
    Statistics {
        slots: u32,
        slots_in_use: u32,
        backend_connections: u32,
    },
    /// The agent is stopping: send no new requests on this tunnel.
    Drain,
    /// A certificate for a new key is wanted: `csr` is a PEM certificate request signed by it (RFC 2986).
    Renew {
        csr: String,
    },
    /// The answer to the gateway's `Window`.
    Window,
}

/// A control stream carried something that is not a message.
#[derive(Debug, thiserror::Error)]
pub enum InvalidMessage {
    #[error("control message is longer than {0} bytes")]
    TooLong(usize),
    /// Quotes the message.
    #[error("control message: {}", error_line(.0))]
    Json(#[from] serde_json::Error),
}

/// One message as a line.
pub fn encode(message: &impl Serialize) -> Result<Bytes, InvalidMessage> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    Ok(line.into())
}

/// Splits a stream of bytes into messages.
#[derive(Debug)]
pub struct Decoder {
    buffer: BytesMut,
    scanned: usize,
    longest: usize,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new(MESSAGE_MAX)
    }
}

impl Decoder {
    /// Decoder of messages of at most `longest` bytes.
    pub fn new(longest: usize) -> Self {
        Self { buffer: BytesMut::new(), scanned: 0, longest }
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole message, if there is one.
    pub fn next_message<M: for<'de> Deserialize<'de>>(&mut self) -> Result<Option<M>, InvalidMessage> {
        let Some(end) = self.buffer[self.scanned..].iter().position(|byte| *byte == b'\n') else {
            self.scanned = self.buffer.len();
            return if self.scanned >= self.longest { Err(InvalidMessage::TooLong(self.longest)) } else { Ok(None) };
        };
        let line = self.buffer.split_to(self.scanned + end + 1);
        self.scanned = 0;
        if line.len() > self.longest {
            return Err(InvalidMessage::TooLong(self.longest));
        }
        Ok(Some(serde_json::from_slice(&line)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_any_split() {
        let sent = [ToAgent::Ready { agent_id: "ag_1\n".into(), generation: 7 }, ToAgent::Drain, ToAgent::Replaced];
        let bytes: Vec<u8> = sent.iter().flat_map(|message| encode(message).unwrap()).collect();
        for step in 1..bytes.len() {
            let (mut decoder, mut received) = (Decoder::default(), Vec::new());
            for piece in bytes.chunks(step) {
                decoder.push(piece);
                while let Some(message) = decoder.next_message::<ToAgent>().unwrap() {
                    received.push(message);
                }
            }
            assert_eq!(received, sent, "step {step}");
        }
    }

    #[test]
    fn endless_and_foreign_lines_are_refused() {
        for longest in [TO_GATEWAY_MAX, MESSAGE_MAX] {
            let mut decoder = Decoder::new(longest);
            decoder.push(&vec![b' '; longest - 1]);
            assert!(matches!(decoder.next_message::<ToGateway>(), Ok(None)));
            decoder.push(b" ");
            assert!(matches!(decoder.next_message::<ToGateway>(), Err(InvalidMessage::TooLong(_))));
        }
        let mut decoder = Decoder::default();
        decoder.push(b"{\"type\":\"reboot\"}\n");
        assert!(matches!(decoder.next_message::<ToGateway>(), Err(InvalidMessage::Json(_))));
    }

    #[test]
    fn errors_quote_a_peer_in_one_short_line() {
        let mut decoder = Decoder::new(TO_GATEWAY_MAX);
        decoder.push(format!("{{\"type\":\"x\\nWARN forged{}\"}}\n", "y".repeat(10_000)).as_bytes());
        let error = decoder.next_message::<ToGateway>().unwrap_err().to_string();
        assert!(error.contains("x WARN forged") && error.len() < 400, "{error}");
    }
}
