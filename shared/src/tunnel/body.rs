//! Received bodies: data, trailers and the end, checked against the announced length.

use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;

use super::connection::StreamReceiver;
use super::endpoint::{Closed, ReceivedPart};
use super::frame::{Kind, TRAILER_FIELDS};
use super::ledger::Share;
use crate::http::body::parse_trailers;
use crate::http::{Framing, Part};

/// Why a body broke off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BrokenBody {
    /// The peer has reset the stream, with this code.
    Reset(Bytes),
    /// The tunnel has ended, or this end has closed the stream.
    Lost,
    /// The body is longer or shorter than announced.
    Length,
    /// The trailers are no valid field lines, or a head is in the body.
    Malformed,
}

/// A body that is being received.
#[derive(Debug)]
pub struct ReceivedBody {
    stream: StreamReceiver,
    /// Bytes that are still to come, if the length was announced.
    left: Option<u64>,
    /// Bytes of content that are still to come before those of another protocol. `None` for a
    /// message.
    content: Option<u64>,
    /// Bytes of the other protocol that arrived together with the end of the content.
    behind_content: Bytes,
}

impl ReceivedBody {
    /// The body of a message with this framing, after its head was received.
    pub fn new(stream: StreamReceiver, framing: Framing) -> Self {
        let left = match framing {
            Framing::Length(length) => Some(length),
            Framing::None | Framing::Described(_) => Some(0),
            Framing::Chunked | Framing::UntilClose => None,
        };
        Self {
            stream,
            left,
            content: None,
            behind_content: Bytes::new(),
        }
    }

    /// The direction of another protocol, before or after an upgrade: bytes of unknown number
    /// behind those of the content of the request. No part has bytes of both.
    pub fn upgraded(stream: StreamReceiver, content: u64) -> Self {
        Self {
            stream,
            left: None,
            content: Some(content),
            behind_content: Bytes::new(),
        }
    }

    /// Whether the next part is of another protocol.
    pub fn is_behind_content(&self) -> bool {
        self.content == Some(0)
    }

    /// The next part; after an error none. [Release](Self::release) data after relaying it.
    pub fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<Result<Part, BrokenBody>> {
        if self.is_behind_content() && !self.behind_content.is_empty() {
            return Poll::Ready(Ok(Part::Data(std::mem::take(&mut self.behind_content))));
        }
        let has_content = self.content.is_some_and(|content| content > 0);
        Poll::Ready(match ready!(self.stream.poll_receive(cx)) {
            Ok(ReceivedPart::Data(data)) if has_content => Ok(Part::Data(self.split_content(data))),
            Ok(ReceivedPart::End | ReceivedPart::Head(..)) if has_content => {
                Err(BrokenBody::Length)
            }
            Ok(ReceivedPart::Data(data)) => match self.count(data.len()) {
                Ok(()) => Ok(Part::Data(data)),
                Err(error) => Err(error),
            },
            Ok(ReceivedPart::Head(Kind::Trailers, lines)) => {
                parse_trailers::<TRAILER_FIELDS>(&lines)
                    .map(Part::Trailers)
                    .map_err(|_| BrokenBody::Malformed)
            }
            Ok(ReceivedPart::End) if self.left.unwrap_or(0) > 0 => Err(BrokenBody::Length),
            Ok(ReceivedPart::End) => Ok(Part::End),
            Ok(ReceivedPart::Head(..)) => Err(BrokenBody::Malformed),
            Err(Closed::Reset(code)) => Err(BrokenBody::Reset(code)),
            Err(Closed::Here | Closed::Lost) => Err(BrokenBody::Lost),
        })
    }

    pub async fn receive(&mut self) -> Result<Part, BrokenBody> {
        std::future::poll_fn(|cx| self.poll_receive(cx)).await
    }

    /// Takes the content off the front of received data, and keeps the rest.
    fn split_content(&mut self, mut data: Bytes) -> Bytes {
        if let Some(content) = &mut self.content {
            let end =
                usize::try_from(*content).map_or(data.len(), |content| content.min(data.len()));
            self.behind_content = data.split_off(end);
            *content -= end as u64;
        }
        data
    }

    fn count(&mut self, bytes: usize) -> Result<(), BrokenBody> {
        if let Some(left) = &mut self.left {
            *left = left.checked_sub(bytes as u64).ok_or(BrokenBody::Length)?;
        }
        Ok(())
    }

    /// The agent's report of the request body, of which this is the response: see
    /// [`Endpoint::poll_uploaded`](super::endpoint::Endpoint::poll_uploaded).
    pub fn poll_uploaded(&self, cx: &mut Context<'_>) -> Poll<Result<Option<u64>, Closed>> {
        self.stream.poll_uploaded(cx)
    }

    /// Whether the body is complete and no part is left.
    pub fn is_done(&self) -> bool {
        self.stream.is_done() && self.left.unwrap_or(0) == 0 && self.behind_content.is_empty()
    }

    /// The share to which the memory of the stream is charged.
    pub fn share(&self) -> Rc<Share> {
        self.stream.share()
    }

    /// Gives the peer credit for `bytes` that were relayed.
    pub fn release(&self, bytes: usize) {
        self.stream.release(bytes);
    }
}
