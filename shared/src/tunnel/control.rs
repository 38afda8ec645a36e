//! Messages of the control stream: newline-delimited JSON in both directions on one HTTP/2 stream.

use bytes::{Bytes, BytesMut};
use serde::{Deserialize, Serialize};

use super::text::error_line;
use crate::identity::enrollment::CertificateReply;

/// `:authority` of the control stream. Not a valid hostname of a service.
pub const AUTHORITY: &str = "gw.control";

/// Longest message with its newline, in bytes.
pub const MESSAGE_MAX: usize = 64 * 1024;

/// Longest message of an agent with its newline, in bytes. The largest, a certificate request, has less than 1 KiB.
pub const TO_GATEWAY_MAX: usize = 16 * 1024;

/// Message from gateway to agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToAgent {
    /// The tunnel is registered: requests can arrive.
    Ready { agent_id: String, generation: u64 },
    /// The gateway is stopping: connect again, and keep this tunnel, since requests may still arrive on it.
    Drain,
    /// No request arrives after this: end the tunnel when its requests have ended. Answers the agent's `Drain`, and
    /// ends the gateway's own.
    Drained,
    /// A newer tunnel of this agent replaces this one: do not reconnect.
    Replaced,
    /// Services of this agent. Sent when the tunnel is ready and when they change.
    Services { hostnames: Vec<String> },
    /// Answer to `Renew`.
    Certificate(CertificateReply),
    /// Answer to `Renew` that is refused, with the reason.
    RenewalRefused { message: String },
    /// Flow-control window of request bodies, in bytes; the agent uses a smaller one if it has too many unread bytes.
    /// Sent again only after the answer: two ends that both wait to write SETTINGS or an acknowledgement would read
    /// nothing.
    Window { bytes: u32 },
}

/// Message from agent to gateway.
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
    /// Request for a certificate: `csr` is a PEM certificate request signed with the new key (RFC 2986).
    Renew {
        csr: String,
    },
    /// Answer to the gateway's `Window`.
    Window,
}

/// Invalid message on a control stream.
#[derive(Debug, thiserror::Error)]
pub enum InvalidMessage {
    #[error("control message is longer than {0} bytes")]
    TooLong(usize),
    /// The error may quote the message.
    #[error("control message: {}", error_line(.0))]
    Json(#[from] serde_json::Error),
}

/// Encodes a message as a line.
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
    /// Creates a decoder of messages of at most `longest` bytes.
    pub fn new(longest: usize) -> Self {
        Self { buffer: BytesMut::new(), scanned: 0, longest }
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Takes the next complete message, if there is one.
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
    fn messages_split_anywhere_are_decoded() {
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
    fn long_and_unknown_messages_are_refused() {
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
    fn errors_quote_a_message_in_one_short_line() {
        let mut decoder = Decoder::new(TO_GATEWAY_MAX);
        decoder.push(format!("{{\"type\":\"x\\nWARN forged{}\"}}\n", "y".repeat(10_000)).as_bytes());
        let error = decoder.next_message::<ToGateway>().unwrap_err().to_string();
        assert!(error.contains("x WARN forged") && error.len() < 400, "{error}");
    }
}
