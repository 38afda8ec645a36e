//! One stream of an endpoint.

use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Poll, Waker};

use bytes::{Bytes, BytesMut};

use super::credit::GRANT_LEAST;
use super::{HEADS_RESERVE, QUEUE_RESERVE, STREAM_SEND_BUFFER};
use crate::tunnel::frame::{DATA_MAX, Kind, StreamId};
use crate::tunnel::ledger::Share;
use crate::tunnel::window;

/// Data below this size is merged with the data before it: received data into buffers of at most
/// `MERGED_MAX` bytes, and data to send into frames.
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
pub(super) enum FinalFrame {
    End,
    Trailers(Bytes),
    Reset(&'static str),
}

#[derive(Debug)]
pub(super) struct Stream {
    /// [`StreamId::TUNNEL`] once the stream is closed on the wire.
    pub(super) id: StreamId,
    /// Share to which the memory of the stream is charged.
    pub(super) share: Rc<Share>,
    /// Bytes that are charged: the last [`Self::memory`].
    charged: u32,

    /// Bytes of the heads that this end has sent, with their frame headers. Charged until the
    /// stream is removed.
    pub(super) sent_head_bytes: u32,
    /// Data to send.
    queue: VecDeque<Bytes>,
    queued: usize,
    /// Bytes that the peer allows beyond the queued ones.
    pub(super) send_credit: usize,
    /// Sum of the grants of the peer.
    pub(super) granted: u64,
    /// How this direction ends once the queue is empty. Nothing can be queued after it is set.
    pub(super) finish: Option<FinalFrame>,
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
    /// Bytes that were released behind the end of a request body, and not reported.
    released_behind_end: usize,
    /// Bytes of all heads and trailers of the peer. One counts as soon as the header of its frame
    /// has arrived.
    pub(super) head_bytes: u32,
    /// Bytes that the fields of these heads count in addition: readers keep them in lists.
    pub(super) field_bytes: u32,
    /// The final head was received.
    pub(super) has_head: bool,
    /// How the peer's direction ended.
    pub(super) received_end: Option<Closing>,
    /// It ended with the head of a request.
    pub(super) ended_with_head: bool,
    pub(super) upload: UploadReport,
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
pub(super) enum UploadReport {
    /// The agent sends no report: the request has no body or was refused, or the agent is of an
    /// earlier release line.
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
    pub(super) fn new(id: StreamId, send_credit: usize, share: Rc<Share>) -> Self {
        Self {
            id,
            share,
            charged: 0,
            sent_head_bytes: 0,
            queue: VecDeque::new(),
            queued: 0,
            send_credit,
            granted: 0,
            finish: None,
            sent_end: false,
            sent_reset: false,
            is_scheduled: false,
            received: VecDeque::new(),
            unread: 0,
            receive_credit: 0,
            released_behind_end: 0,
            head_bytes: 0,
            field_bytes: 0,
            has_head: false,
            received_end: None,
            ended_with_head: false,
            upload: UploadReport::Unreported,
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
        if self.discards {
            0
        } else {
            self.receive_credit + self.unread
        }
    }

    /// Memory of a stream when it is opened with the least window, beside the head of its request.
    /// With `end`, this end sends no body.
    pub(super) fn least_memory(end: bool) -> usize {
        let queue = if end { 0 } else { QUEUE_RESERVE };
        size_of::<Self>() + HEADS_RESERVE + window::LEAST as usize + queue
    }

    /// Bytes that the stream holds, or may come to hold without asking again.
    fn memory(&self) -> usize {
        let queue = if self.sent_end {
            0
        } else {
            self.queued.max(QUEUE_RESERVE)
        };
        let received = if self.discards {
            self.trailer_bytes()
        } else {
            let is_open = self.received_end.is_none() && !self.is_lost;
            let least_window = if is_open { window::LEAST as usize } else { 0 };
            self.committed().max(least_window)
                + (self.received_head_bytes() + self.trailer_bytes()).max(HEADS_RESERVE)
        };
        size_of::<Self>() + self.sent_head_bytes as usize + queue + received
    }

    /// Bytes of the heads and trailers of the peer, with what their fields count.
    fn received_head_bytes(&self) -> usize {
        (self.head_bytes + self.field_bytes) as usize
    }

    /// Bytes of trailers that wait for sending.
    fn trailer_bytes(&self) -> usize {
        if let Some(FinalFrame::Trailers(lines)) = &self.finish {
            lines.len()
        } else {
            0
        }
    }

    /// Charges what has changed. Call it after each change of what [`Self::memory`] counts, unless
    /// the stream is about to be removed.
    pub(super) fn settle(&mut self) {
        let memory = self.memory();
        self.share.charge(self.charged as usize, memory);
        // A window, a queue and heads are some 9 MiB at most.
        self.charged = memory as u32;
    }

    /// As [`Self::settle`]. Charges nothing and returns false if the share has no room.
    #[must_use]
    pub(super) fn settle_within_share(&mut self) -> bool {
        let fits = self.memory() <= self.charged as usize + self.share.left();
        if fits {
            self.settle();
        }
        fits
    }

    /// As [`Self::settle_within_share`], after a head was received or sent. Charges nothing and
    /// returns true while the heads of each direction are at most [`HEADS_RESERVE`].
    #[must_use]
    pub(super) fn settle_heads_within_share(&mut self) -> bool {
        self.received_head_bytes()
            .max(self.sent_head_bytes as usize)
            <= HEADS_RESERVE
            || self.settle_within_share()
    }

    /// As [`Self::settle`], after a change of the queue or the end of this direction. `queued` is
    /// the length of the queue before.
    pub(super) fn settle_queue(&mut self, queued: usize) {
        // A stream that has ended is about to be removed.
        if queued.max(self.queued) > QUEUE_RESERVE || self.sent_end && !self.has_ended() {
            self.settle();
        }
    }

    /// Bytes in the queue.
    pub(super) fn queued(&self) -> usize {
        self.queued
    }

    /// Charges the stream to `share` from now on. Changes nothing and returns false if that has no
    /// room.
    #[must_use]
    pub(super) fn charge_to(&mut self, share: &Rc<Share>) -> bool {
        let charged = self.charged as usize;
        let fits = charged <= share.left();
        if fits {
            self.share.charge(charged, 0);
            share.charge(0, charged);
            self.share = Rc::clone(share);
        }
        fits
    }

    /// Bytes that are held: received and not relayed, or queued for sending.
    pub(super) fn held(&self) -> usize {
        let heads = if self.discards {
            0
        } else {
            self.received_head_bytes()
        };
        heads + self.unread + self.queued + self.trailer_bytes()
    }

    /// Bytes that may be queued. A queue with less than a frame never waits for memory, and any
    /// other goes on when its own frames leave.
    pub(super) fn capacity(&self) -> usize {
        let room = QUEUE_RESERVE.saturating_sub(self.queued) + self.share.left_beyond_least();
        self.send_credit
            .min(STREAM_SEND_BUFFER - self.queued)
            .min(room)
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
        let data = if front.len() > most {
            front.split_to(most)
        } else {
            self.queue.pop_front()?
        };
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
    pub(super) fn receive_head(&mut self, kind: Kind, payload: &[u8]) {
        if !self.discards {
            self.received
                .push_back(Item::Head(kind, Bytes::copy_from_slice(payload)));
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

    /// Whether both ends have sent their last frame. The report of the request body is one; a RESET
    /// replaces it.
    pub(super) fn has_ended(&self) -> bool {
        let is_reported =
            self.upload != UploadReport::Due || self.sent_reset || self.reset.is_some();
        self.sent_end && self.received_end.is_some() && is_reported
    }

    /// Counts bytes that were released. Behind the end of a request body, returns those to report
    /// in place of a grant.
    pub(super) fn report_released(&mut self, bytes: usize) -> usize {
        let is_due = self.received_end == Some(Closing::End) && self.upload == UploadReport::Due;
        if !is_due || self.sent_reset || self.is_reset() {
            return 0;
        }
        self.released_behind_end += bytes;
        if self.released_behind_end < GRANT_LEAST {
            return 0;
        }
        std::mem::take(&mut self.released_behind_end)
    }

    /// Whether the peer may still send parts that are to be read.
    pub(super) fn is_read_on(&self) -> bool {
        self.received_end.is_none() && !matches!(self.upload, UploadReport::Reported(_))
    }

    /// The agent's report of the request body: bytes that the backend took, if known. Without a
    /// report, the upload has ended with an unknown number once this end has sent the body or the
    /// peer has reset the stream.
    pub(super) fn poll_uploaded(&self) -> Poll<Result<Option<u64>, Closed>> {
        match (&self.reset, self.upload) {
            (_, UploadReport::Reported(bytes)) => Poll::Ready(Ok(bytes)),
            (Some(_), UploadReport::Unreported) => Poll::Ready(Ok(None)),
            (None, UploadReport::Unreported) if self.sent_end || self.finish.is_some() => {
                Poll::Ready(Ok(None))
            }
            _ if self.is_lost => Poll::Ready(Err(Closed::Lost)),
            (Some(code), UploadReport::Due) => Poll::Ready(Err(Closed::Reset(code.clone()))),
            (None, UploadReport::Due) if self.sent_reset => Poll::Ready(Err(Closed::Here)),
            (None, UploadReport::Due | UploadReport::Unreported) => Poll::Pending,
        }
    }

    /// Wakes the task that waits for the end of the upload, if the end of this direction is that
    /// end.
    pub(super) fn wake_for_end(&mut self) {
        if self.upload == UploadReport::Unreported {
            super::wake(&mut self.receive_task);
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
            (None, Some(Closing::Reset)) => {
                Err(Closed::Reset(self.reset.clone().unwrap_or_default()))
            }
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

impl Drop for Stream {
    fn drop(&mut self) {
        self.share.charge(self.charged as usize, 0);
    }
}

/// Whether a few bytes go into the last frame that waits. A large one whose buffer is shared is not
/// copied for them.
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

/// Whether `more` bytes go into a buffer of received data: into its free capacity, or, if they are
/// few, into a larger one.
fn has_room(buffer: &BytesMut, more: usize) -> bool {
    let fits = buffer.capacity() - buffer.len() >= more;
    fits || more < SMALL && buffer.len() + more <= MERGED_MAX
}
