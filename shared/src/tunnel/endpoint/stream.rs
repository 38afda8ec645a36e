//! One stream of an endpoint.

use std::collections::VecDeque;
use std::task::{Poll, Waker};

use bytes::{Bytes, BytesMut};

use super::STREAM_SEND_BUFFER;
use crate::tunnel::frame::{DATA_MAX, Kind, StreamId};

/// Data below this size is merged with the data before it: received data into buffers of at most `MERGED_MAX` bytes,
/// and data to send into frames.
const SMALL: usize = 1024;
const MERGED_MAX: usize = 16 * 1024;

/// A part of what the peer sends on a stream.
#[derive(Debug)]
pub enum ReceivedPart {
    /// Payload of REQUEST, RESPONSE, INTERIM, REFUSED or TRAILERS.
    Head(Kind, Bytes),
    /// Release it with its length after relaying it.
    Data(Bytes),
    /// The peer's direction is complete.
    End,
}

/// A stream ended before its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Closed {
    /// RESET of the peer, with its code.
    Reset(Bytes),
    /// This end has reset the stream or ended its direction.
    Here,
    /// The tunnel has ended.
    Lost,
}

/// Last frame of the own direction, queued behind the data.
#[derive(Debug)]
pub(super) enum Ended {
    End,
    Trailers(Bytes),
    Reset(&'static str),
}

#[derive(Debug)]
pub(super) struct Stream {
    /// [`StreamId::TUNNEL`] once the stream is closed on the wire.
    pub(super) id: StreamId,

    /// Data to send.
    queue: VecDeque<Bytes>,
    queued: usize,
    /// Bytes that the peer allows beyond the queued ones.
    pub(super) send_credit: usize,
    /// How this direction ends once the queue is empty. Nothing can be queued after it is set.
    pub(super) finish: Option<Ended>,
    /// The last frame of this direction was sent.
    pub(super) sent_end: bool,
    pub(super) sent_reset: bool,
    /// In the endpoint's list of streams with frames to send.
    pub(super) is_scheduled: bool,

    received: VecDeque<Item>,
    /// Bytes of bodies that were received and not released.
    pub(super) unread: usize,
    /// Bytes of bodies that the peer may still send.
    pub(super) receive_credit: usize,
    /// Bytes of heads and trailers received.
    pub(super) head_bytes: usize,
    /// The final head was received.
    pub(super) has_head: bool,
    /// How the peer's direction ended.
    pub(super) received_end: Option<Closing>,
    /// It ended with the head of a request.
    pub(super) ended_with_head: bool,
    pub(super) upload: Upload,
    /// Code of the peer's RESET, which may follow its END.
    reset: Option<Bytes>,
    /// Nothing reads the received parts: they are discarded.
    pub(super) discards: bool,
    /// A part of the peer's direction was discarded, so its END is no complete end.
    is_truncated: bool,
    /// The tunnel has ended.
    pub(super) is_lost: bool,

    pub(super) has_sender: bool,
    pub(super) has_receiver: bool,
    pub(super) send_task: Option<Waker>,
    pub(super) receive_task: Option<Waker>,
    pub(super) reset_task: Option<Waker>,
}

/// The agent's report of the request body (UPLOADED).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Upload {
    /// The agent sends no report: the request has no body or was refused, or the agent is of an earlier release line.
    Unreported,
    Due,
    /// Bytes of the body that the backend took, if known. The agent discards the rest.
    Reported(Option<u64>),
}

/// Last frame of the peer's direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Closing {
    End,
    Reset,
}

#[derive(Debug)]
enum Item {
    Head(Kind, Bytes),
    Data(BytesMut),
}

impl Stream {
    pub(super) fn new(id: StreamId, send_credit: usize) -> Self {
        Self {
            id,
            queue: VecDeque::new(),
            queued: 0,
            send_credit,
            finish: None,
            sent_end: false,
            sent_reset: false,
            is_scheduled: false,
            received: VecDeque::new(),
            unread: 0,
            receive_credit: 0,
            head_bytes: 0,
            has_head: false,
            received_end: None,
            ended_with_head: false,
            upload: Upload::Unreported,
            reset: None,
            discards: false,
            is_truncated: false,
            is_lost: false,
            has_sender: true,
            has_receiver: true,
            send_task: None,
            receive_task: None,
            reset_task: None,
        }
    }

    /// Bytes granted to the peer and not relayed.
    pub(super) fn committed(&self) -> usize {
        if self.discards { 0 } else { self.receive_credit + self.unread }
    }

    /// Bytes that may be queued.
    pub(super) fn capacity(&self) -> usize {
        self.send_credit.min(STREAM_SEND_BUFFER - self.queued)
    }

    /// Why nothing can be sent any more.
    pub(super) fn send_closed(&self) -> Option<Closed> {
        match &self.reset {
            _ if self.is_lost => Some(Closed::Lost),
            Some(code) => Some(Closed::Reset(code.clone())),
            None if self.sent_end || self.finish.is_some() => Some(Closed::Here),
            None => None,
        }
    }

    pub(super) fn push(&mut self, data: Bytes) {
        if data.is_empty() {
            return;
        }
        self.send_credit -= data.len();
        self.queued += data.len();
        match self.queue.back_mut() {
            Some(last) if data.len() < SMALL && may_grow(last, data.len()) => append(last, &data),
            _ => self.queue.push_back(data),
        }
    }

    pub(super) fn has_frames(&self) -> bool {
        !self.sent_end && (self.queued > 0 || self.finish.is_some())
    }

    /// Takes out the next data frame, of at most `most` bytes.
    pub(super) fn pop(&mut self, most: usize) -> Option<Bytes> {
        let front = self.queue.front_mut()?;
        let data = if front.len() > most { front.split_to(most) } else { self.queue.pop_front()? };
        self.queued -= data.len();
        Some(data)
    }

    pub(super) fn has_data(&self) -> bool {
        self.queued > 0
    }

    #[cfg(test)]
    pub(super) fn queued_pieces(&self) -> usize {
        self.queue.len()
    }

    #[cfg(test)]
    pub(super) fn received_items(&self) -> usize {
        self.received.len()
    }

    pub(super) fn discard_queue(&mut self) {
        self.queue = VecDeque::new();
        self.queued = 0;
        self.finish = None;
    }

    /// Adds a received head or trailers.
    pub(super) fn receive_head(&mut self, kind: Kind, payload: Bytes) {
        if !self.discards {
            self.received.push_back(Item::Head(kind, payload));
        }
        super::wake(&mut self.receive_task);
    }

    /// Adds received data. `following` bytes of the same frame follow.
    pub(super) fn receive_data(&mut self, data: &[u8], following: usize) {
        self.receive_credit -= data.len();
        if self.discards {
            return;
        }
        self.unread += data.len();
        match self.received.back_mut() {
            Some(Item::Data(last)) if has_room(last, data.len()) => last.extend_from_slice(data),
            _ => {
                let mut buffer = BytesMut::with_capacity(data.len() + following);
                buffer.extend_from_slice(data);
                self.received.push_back(Item::Data(buffer));
            }
        }
        super::wake(&mut self.receive_task);
    }

    pub(super) fn receive_end(&mut self) {
        self.received_end = Some(Closing::End);
        super::wake(&mut self.receive_task);
    }

    /// Handles a RESET. What the peer has sent with its END stays complete.
    pub(super) fn receive_reset(&mut self, code: Bytes) {
        self.received_end.get_or_insert(Closing::Reset);
        self.reset = Some(code);
        super::wake(&mut self.receive_task);
        super::wake(&mut self.send_task);
        super::wake(&mut self.reset_task);
    }

    /// The tunnel has ended.
    pub(super) fn lose(&mut self) {
        self.is_lost = true;
        self.discard_queue();
        super::wake(&mut self.receive_task);
        super::wake(&mut self.send_task);
        super::wake(&mut self.reset_task);
    }

    /// Whether both ends have sent their last frame. The report of the request body is one; a RESET replaces it.
    pub(super) fn has_ended(&self) -> bool {
        let is_reported = self.upload != Upload::Due || self.sent_reset || self.reset.is_some();
        self.sent_end && self.received_end.is_some() && is_reported
    }

    /// Whether the peer may still send parts that are to be read.
    pub(super) fn is_read_on(&self) -> bool {
        self.received_end.is_none() && !matches!(self.upload, Upload::Reported(_))
    }

    /// The agent's report of the request body: bytes that the backend took, if known. An agent without reports has taken what it takes
    /// once the body has been sent or the stream was reset.
    pub(super) fn poll_uploaded(&self) -> Poll<Result<Option<u64>, Closed>> {
        match (&self.reset, self.upload) {
            (_, Upload::Reported(bytes)) => Poll::Ready(Ok(bytes)),
            (Some(_), Upload::Unreported) => Poll::Ready(Ok(None)),
            (None, Upload::Unreported) if self.sent_end || self.finish.is_some() => Poll::Ready(Ok(None)),
            _ if self.is_lost => Poll::Ready(Err(Closed::Lost)),
            (Some(code), Upload::Due) => Poll::Ready(Err(Closed::Reset(code.clone()))),
            (None, Upload::Due) if self.sent_reset => Poll::Ready(Err(Closed::Here)),
            (None, Upload::Due | Upload::Unreported) => Poll::Pending,
        }
    }

    pub(super) fn is_reset(&self) -> bool {
        self.is_lost || self.reset.is_some()
    }

    pub(super) fn is_received(&self) -> bool {
        self.received.is_empty() && self.received_end == Some(Closing::End) && !self.is_truncated
    }

    pub(super) fn next_part(&mut self) -> Poll<Result<ReceivedPart, Closed>> {
        Poll::Ready(match (self.received.pop_front(), self.received_end) {
            (Some(Item::Head(kind, payload)), _) => Ok(ReceivedPart::Head(kind, payload)),
            (Some(Item::Data(data)), _) => Ok(ReceivedPart::Data(data.freeze())),
            (None, Some(Closing::End)) if !self.is_truncated => Ok(ReceivedPart::End),
            (None, Some(Closing::Reset)) => Err(Closed::Reset(self.reset.clone().unwrap_or_default())),
            (None, _) if self.is_lost => Err(Closed::Lost),
            (None, _) if self.is_truncated || self.sent_reset => Err(Closed::Here),
            (None, _) => return Poll::Pending,
        })
    }

    /// Discards what was received and what will be.
    pub(super) fn discard_received(&mut self) {
        self.is_truncated |= self.received_end.is_none() || !self.received.is_empty();
        self.discards = true;
        self.unread = 0;
        self.received = VecDeque::new();
    }
}

/// Whether a few bytes go into the last frame that waits. A large one whose buffer is shared is not copied for them.
fn may_grow(last: &Bytes, more: usize) -> bool {
    last.len() + more <= DATA_MAX && (last.len() < SMALL || last.is_unique())
}

/// Appends a few bytes to `last`. Copies it if its buffer is shared.
fn append(last: &mut Bytes, data: &[u8]) {
    let mut buffer = match std::mem::take(last).try_into_mut() {
        Ok(own) => own,
        Err(shared) => {
            let mut own = BytesMut::with_capacity(shared.len() + SMALL.max(data.len()));
            own.extend_from_slice(&shared);
            own
        }
    };
    buffer.extend_from_slice(data);
    *last = buffer.freeze();
}

/// Whether `more` bytes go into a buffer of received data: into its free capacity, or, if they are few, into a larger
/// one.
fn has_room(buffer: &BytesMut, more: usize) -> bool {
    let fits = buffer.capacity() - buffer.len() >= more;
    fits || more < SMALL && buffer.len() + more <= MERGED_MAX
}
