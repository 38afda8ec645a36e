//! Received bytes.

use std::rc::Rc;

use bytes::Bytes;

use super::credit::GRANT_LEAST;
use super::stream::{FinalFrame, Stream, UploadReport};
use super::{Endpoint, Role, StreamKey, UNKNOWN, wake};
use crate::tunnel::control;
use crate::tunnel::frame::{
    DATA_MAX, FrameHeader, HEADER, InvalidFrameHeader, Kind, REQUEST_PREFIX, RESPONSE_HEAD,
    RESPONSE_PREFIX, StreamId,
};
use crate::tunnel::response::{INTERIM_BYTES, INTERIM_MAX, OVERHEAD};
use crate::tunnel::window;

/// Bytes that a head counts in addition to its payload: the memory of an entry in the queue of
/// received parts.
const HEAD_OVERHEAD: usize = 64;

/// Most bytes of heads and trailers of one stream in one direction: interim responses, a final head
/// and trailers.
const HEADS_MAX: usize = INTERIM_BYTES
    + INTERIM_MAX as usize * HEAD_OVERHEAD
    + 2 * (RESPONSE_HEAD.head + RESPONSE_PREFIX + HEAD_OVERHEAD);

/// Bytes that a control message counts in addition to its payload.
pub(super) const MESSAGE_OVERHEAD: usize = 64;

/// Most bytes of control messages that wait for the task that handles them, in longest messages.
const MESSAGES_MAX: usize = 4;

/// Error of the peer, after which the tunnel must end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    #[error(transparent)]
    Header(#[from] InvalidFrameHeader),
    #[error("{0:?} is not sent by this end of a tunnel")]
    Role(Kind),
    #[error("{0:?} on stream {1:#010x}, which is not open")]
    NotOpen(Kind, u32),
    #[error("{0:?} on stream {1:#010x} in the wrong place")]
    Order(Kind, u32),
    #[error("REQUEST on slot {0}, which is in use or above the number of streams")]
    Slot(usize),
    #[error("more data on stream {0:#010x} than granted")]
    Credit(u32),
    #[error("a credit of {0} bytes")]
    CreditTooLarge(usize),
    #[error("more than {HEADS_MAX} bytes of heads on stream {0:#010x}")]
    Heads(u32),
    #[error("a control message of {0} bytes")]
    MessageTooLong(usize),
    #[error("too many control messages at once")]
    TooManyMessages,
    #[error("the number of streams is 0 or was sent twice")]
    Hello,
}

/// Frame that is being received.
#[derive(Debug)]
pub(super) struct FrameInput {
    header: [u8; HEADER],
    filled: usize,
    frame: Option<PartialFrame>,
    /// Payload of a frame other than DATA that did not arrive in one piece.
    pub(super) payload: Vec<u8>,
    /// Frames that carry nothing of a request or response, since the last
    /// [`Endpoint::take_overhead`].
    overhead: u32,
}

#[derive(Debug, Clone, Copy)]
struct PartialFrame {
    header: FrameHeader,
    /// Bytes of the payload still to come.
    left: usize,
    /// The payload is a head that nothing reads: its bytes are discarded as they arrive.
    is_discarded: bool,
}

/// Bytes that the fields of a head count in addition to its payload. From the 129th on each counts
/// twice: the map in which an HTTP/2 connection keeps hundreds of fields takes twice the memory of
/// a list.
fn field_bytes(payload: &[u8]) -> u32 {
    const FEW: usize = 128;
    const CHUNK: usize = 32;
    // A loop of constant length is compiled to vector instructions. `memchr` takes twice as many
    // for a short head.
    let lines_of = |chunk: &[u8; CHUNK]| {
        let mut ends = 0;
        for byte in chunk {
            ends += u8::from(*byte == b'\n');
        }
        usize::from(ends)
    };
    let (chunks, rest) = payload.as_chunks();
    let mut last = [0; CHUNK];
    last[..rest.len()].copy_from_slice(rest);
    let lines: usize = chunks.iter().chain([&last]).map(lines_of).sum();
    // Without the lines at both ends of a head.
    let fields = lines.saturating_sub(2);
    ((fields + fields.saturating_sub(FEW)) * OVERHEAD) as u32
}

impl Default for FrameInput {
    fn default() -> Self {
        Self {
            header: [0; HEADER],
            filled: 0,
            frame: None,
            payload: Vec::new(),
            overhead: 0,
        }
    }
}

impl Endpoint {
    /// Handles received bytes, in pieces of any size. After an error, the tunnel must end.
    pub fn receive(&mut self, mut bytes: &[u8]) -> Result<(), Violation> {
        while !bytes.is_empty() {
            let Some(frame) = self.input.frame else {
                let taken = bytes.len().min(HEADER - self.input.filled);
                self.input.header[self.input.filled..self.input.filled + taken]
                    .copy_from_slice(&bytes[..taken]);
                self.input.filled += taken;
                bytes = &bytes[taken..];
                if self.input.filled == HEADER {
                    self.input.filled = 0;
                    self.begin_frame(FrameHeader::decode(self.input.header)?)?;
                }
                continue;
            };
            let (now, later) = bytes.split_at(bytes.len().min(frame.left));
            bytes = later;
            self.receive_payload(frame, now)?;
        }
        Ok(())
    }

    /// Number of received frames that carry nothing of a request or response, since the last call:
    /// PING, PONG, MESSAGE, WINDOW, small CREDIT, and RESET, CREDIT or UPLOADED of a closed stream.
    pub fn take_overhead(&mut self) -> u32 {
        std::mem::take(&mut self.input.overhead)
    }

    fn begin_frame(&mut self, header: FrameHeader) -> Result<(), Violation> {
        self.check_role(header.kind)?;
        if header.kind == Kind::Data {
            let key = self.find(header)?;
            let stream = &self.streams[key];
            if self.role == Role::Gateway && !stream.has_head {
                return Err(Violation::Order(Kind::Data, header.stream.0));
            }
            if header.length > stream.receive_credit {
                return Err(Violation::Credit(header.stream.0));
            }
        }
        let is_head = matches!(
            header.kind,
            Kind::Response | Kind::Interim | Kind::Refused | Kind::Trailers
        );
        let is_discarded = is_head && !self.admit_head(header)?;
        if header.length == 0 {
            return self.end_frame(header, &[]);
        }
        self.input.frame = Some(PartialFrame {
            header,
            left: header.length,
            is_discarded,
        });
        Ok(())
    }

    /// Checks and charges a head before its payload arrives. Resets the stream if its share has no
    /// room. Returns whether anything reads the head.
    fn admit_head(&mut self, header: FrameHeader) -> Result<bool, Violation> {
        let key = self.find(header)?;
        let stream = &mut self.streams[key];
        // Heads come before data, and trailers after the final head.
        if stream.has_head != (header.kind == Kind::Trailers) {
            return Err(Violation::Order(header.kind, header.stream.0));
        }
        stream.has_head |= header.kind != Kind::Interim;
        stream.head_bytes += (header.length + HEAD_OVERHEAD) as u32;
        if stream.head_bytes as usize > HEADS_MAX {
            return Err(Violation::Heads(header.stream.0));
        }
        if !stream.discards && !stream.settle_heads_within_share() {
            self.reset(StreamKey(key), "");
        }
        Ok(!self.streams[key].discards)
    }

    fn receive_payload(&mut self, frame: PartialFrame, bytes: &[u8]) -> Result<(), Violation> {
        let left = frame.left - bytes.len();
        self.input.frame = (left > 0).then_some(PartialFrame { left, ..frame });
        if frame.header.kind == Kind::Data {
            // The stream stays open meanwhile: only a frame of the peer, or its answer to a RESET,
            // closes it.
            let key = self.find(frame.header)?;
            self.streams[key].receive_data(bytes, left.min(DATA_MAX));
            return if left == 0 && frame.header.end {
                self.receive_end(key)
            } else {
                Ok(())
            };
        }
        if frame.is_discarded {
            return if left == 0 {
                self.end_frame(frame.header, &[])
            } else {
                Ok(())
            };
        }
        if left > 0 {
            self.input.payload.extend_from_slice(bytes);
            return Ok(());
        }
        if self.input.payload.is_empty() {
            return self.end_frame(frame.header, bytes);
        }
        let mut payload = std::mem::take(&mut self.input.payload);
        payload.extend_from_slice(bytes);
        self.end_frame(frame.header, &payload)
    }

    /// Handles a frame whose payload is complete.
    fn end_frame(&mut self, header: FrameHeader, payload: &[u8]) -> Result<(), Violation> {
        match header.kind {
            Kind::Hello => self.receive_hello(payload),
            Kind::Request => self.receive_request(header, payload),
            Kind::Response | Kind::Interim | Kind::Refused | Kind::Trailers => {
                self.receive_head(header, payload)
            }
            // Data has its own way; this is an empty frame with END.
            Kind::Data => {
                let key = self.find(header)?;
                self.receive_end(key)
            }
            Kind::Reset => self.receive_reset(header, payload),
            Kind::Uploaded => self.receive_uploaded(header, payload),
            Kind::Credit => self.receive_credit(header, payload),
            Kind::Window => {
                self.input.overhead += 1;
                self.credit.announced = Some(number(payload));
                wake(&mut self.acceptor);
                Ok(())
            }
            Kind::Ping => {
                self.input.overhead += 1;
                self.urgent.pong = Some(payload.try_into().map_or(0, u64::from_be_bytes));
                self.wake_driver();
                Ok(())
            }
            Kind::Pong => {
                self.input.overhead += 1;
                self.pong = Some(payload.try_into().map_or(0, u64::from_be_bytes));
                wake(&mut self.acceptor);
                Ok(())
            }
            Kind::Message => self.receive_message(payload),
        }
    }

    fn check_role(&self, kind: Kind) -> Result<(), Violation> {
        let by_agent = matches!(
            kind,
            Kind::Hello | Kind::Response | Kind::Interim | Kind::Refused | Kind::Uploaded
        );
        let by_gateway = matches!(kind, Kind::Request | Kind::Window);
        match self.role {
            Role::Gateway if by_gateway => Err(Violation::Role(kind)),
            Role::Agent if by_agent => Err(Violation::Role(kind)),
            Role::Gateway | Role::Agent => Ok(()),
        }
    }

    fn receive_hello(&mut self, payload: &[u8]) -> Result<(), Violation> {
        let streams = number(payload) as usize;
        if streams == 0 || self.streams_max > 0 {
            return Err(Violation::Hello);
        }
        self.streams_max = streams.min(super::STREAMS_MAX);
        wake(&mut self.acceptor);
        Ok(())
    }

    fn receive_request(&mut self, header: FrameHeader, payload: &[u8]) -> Result<(), Violation> {
        let slot = header.stream.slot();
        if slot >= self.streams_max {
            return Err(Violation::Slot(slot));
        }
        if slot >= self.slots.len() {
            self.slots.resize_with(slot + 1, Default::default);
        }
        let place = &mut self.slots[slot];
        if place.stream.is_some() || place.generation == header.stream.generation() {
            return Err(Violation::Slot(slot));
        }
        let (credit, head) = payload.split_at(REQUEST_PREFIX);
        let credit = checked_credit(0, number(credit))?;
        let mut stream = Stream::new(header.stream, credit, Rc::clone(&self.share));
        stream.has_head = true;
        stream.head_bytes = (head.len() + HEAD_OVERHEAD) as u32;
        stream.receive_head(Kind::Request, head);
        stream.ended_with_head = header.end;
        if header.end {
            stream.receive_end();
        } else {
            if self.reports_uploads {
                stream.upload = UploadReport::Due;
            }
            stream.receive_credit = window::LEAST as usize;
            self.credit.opened(&stream);
        }
        let has_room = stream.settle_within_share();
        let key = self.streams.insert(stream);
        *place = super::Slot {
            stream: Some(key),
            generation: header.stream.generation(),
        };
        self.open += 1;
        if has_room {
            self.opened.push_back(key);
            wake(&mut self.acceptor);
        } else {
            self.drop_sender(StreamKey(key));
            self.drop_receiver(StreamKey(key));
        }
        Ok(())
    }

    fn receive_head(&mut self, header: FrameHeader, payload: &[u8]) -> Result<(), Violation> {
        let key = self.find(header)?;
        let stream = &mut self.streams[key];
        if header.kind == Kind::Refused {
            stream.upload = UploadReport::Unreported;
        }
        stream.field_bytes += field_bytes(payload);
        if !stream.discards && !stream.settle_heads_within_share() {
            self.reset(StreamKey(key), "");
        }
        self.streams[key].receive_head(header.kind, payload);
        if header.end {
            self.receive_end(key)
        } else {
            Ok(())
        }
    }

    fn receive_reset(&mut self, header: FrameHeader, payload: &[u8]) -> Result<(), Violation> {
        // A RESET after the end of its own direction may cross the end of the other direction.
        let Some(key) = self.find_open(header.stream) else {
            self.input.overhead += 1;
            return self.check_was_open(header);
        };
        let stream = &mut self.streams[key];
        if !stream.sent_end {
            // Answers the RESET with this end's last frame.
            stream.discard_queue();
            stream.sent_end = true;
            stream.sent_reset = true;
            let id = stream.id;
            self.urgent.frame(Kind::Reset, false, id, b"");
            self.wake_driver();
        }
        let stream = &mut self.streams[key];
        stream.receive_reset(Bytes::copy_from_slice(payload));
        self.credit.forget_credit(stream);
        self.close_if_ended(key);
        Ok(())
    }

    fn receive_uploaded(&mut self, header: FrameHeader, payload: &[u8]) -> Result<(), Violation> {
        // The report may cross a RESET.
        let Some(key) = self.find_open(header.stream) else {
            self.input.overhead += 1;
            return self.check_was_open(header);
        };
        let stream = &mut self.streams[key];
        if stream.upload != UploadReport::Due {
            return Err(Violation::Order(header.kind, header.stream.0));
        }
        let bytes = payload.try_into().map_or(UNKNOWN, u64::from_be_bytes);
        stream.upload = UploadReport::Reported(Some(bytes).filter(|bytes| *bytes != UNKNOWN));
        wake(&mut stream.receive_task);
        if !stream.sent_end {
            // The agent reads no more of the body. What is queued, and how it would have ended, is
            // dropped: a frame with END closes this direction.
            stream.discard_queue();
            stream.finish = Some(FinalFrame::End);
            stream.settle();
            wake(&mut stream.send_task);
            self.schedule(key);
        }
        self.close_if_ended(key);
        Ok(())
    }

    fn receive_credit(&mut self, header: FrameHeader, payload: &[u8]) -> Result<(), Violation> {
        // Credit may cross the end of the direction that it is for.
        let Some(key) = self.find_open(header.stream) else {
            self.input.overhead += 1;
            return self.check_was_open(header);
        };
        let stream = &mut self.streams[key];
        let granted = number(payload);
        if (granted as usize) < GRANT_LEAST {
            self.input.overhead += 1;
        }
        stream.send_credit = checked_credit(stream.send_credit, granted)?;
        stream.granted += u64::from(granted);
        wake(&mut stream.send_task);
        Ok(())
    }

    fn receive_message(&mut self, payload: &[u8]) -> Result<(), Violation> {
        let longest = if self.role == Role::Gateway {
            control::TO_GATEWAY_MAX
        } else {
            control::MESSAGE_MAX
        };
        if payload.len() > longest {
            return Err(Violation::MessageTooLong(payload.len()));
        }
        self.input.overhead += 1;
        self.message_bytes += payload.len() + MESSAGE_OVERHEAD;
        if self.message_bytes > MESSAGES_MAX * (longest + MESSAGE_OVERHEAD) {
            return Err(Violation::TooManyMessages);
        }
        self.messages.push_back(Bytes::copy_from_slice(payload));
        wake(&mut self.messenger);
        Ok(())
    }

    fn receive_end(&mut self, key: usize) -> Result<(), Violation> {
        let stream = &mut self.streams[key];
        stream.receive_end();
        self.credit.forget_credit(stream);
        self.close_if_ended(key);
        Ok(())
    }

    /// The stream of a frame that only an open direction may carry.
    fn find(&self, header: FrameHeader) -> Result<usize, Violation> {
        let key = self
            .find_open(header.stream)
            .ok_or(Violation::NotOpen(header.kind, header.stream.0))?;
        let has_ended = self.streams[key].received_end.is_some();
        if has_ended {
            Err(Violation::Order(header.kind, header.stream.0))
        } else {
            Ok(key)
        }
    }

    fn find_open(&self, id: StreamId) -> Option<usize> {
        let slot = self.slots.get(id.slot())?;
        slot.stream.filter(|_| slot.generation == id.generation())
    }

    /// Fails for a stream that was never open.
    fn check_was_open(&self, header: FrameHeader) -> Result<(), Violation> {
        let was_open = self
            .slots
            .get(header.stream.slot())
            .is_some_and(|slot| slot.generation > 0);
        if was_open {
            Ok(())
        } else {
            Err(Violation::NotOpen(header.kind, header.stream.0))
        }
    }
}

/// Adds a received grant to the credit of a stream.
fn checked_credit(before: usize, granted: u32) -> Result<usize, Violation> {
    let credit = before + granted as usize;
    if credit > window::MOST as usize {
        Err(Violation::CreditTooLarge(credit))
    } else {
        Ok(credit)
    }
}

/// A u32 at the beginning of a payload whose length was checked.
fn number(payload: &[u8]) -> u32 {
    payload
        .first_chunk()
        .map_or(0, |bytes| u32::from_be_bytes(*bytes))
}
