//! Frames to send.

use std::collections::VecDeque;
use std::io::IoSlice;

use bytes::{Buf, Bytes};

use super::stream::FinalFrame;
use super::{Endpoint, wake};
use crate::tunnel::frame::{DATA_MAX, FrameHeader, HEADER, Kind, StreamId};

/// Data up to this size, in bytes, is copied beside its header; larger data is sent from where it
/// is.
const COPIED_MAX: usize = 2048;

/// Most memory of an empty buffer that is kept, in bytes.
const KEPT: usize = 4096;

/// The queue of control messages is full: the peer does not read them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the peer does not read its control messages")]
pub struct OutgoingFull;

/// Frames without data. They leave before data.
#[derive(Debug, Default)]
pub(super) struct Urgent {
    frames: Vec<u8>,
    pub(super) ping: Option<u64>,
    /// Answer to the peer's last PING. Earlier ones need no answer.
    pub(super) pong: Option<u64>,
    messages: VecDeque<Bytes>,
    message_bytes: usize,
}

impl Urgent {
    /// Bytes of frames that wait, without control messages.
    pub(super) fn len(&self) -> usize {
        self.frames.len()
    }

    /// Removes the frames that were added since [`Self::len`] returned `len`.
    pub(super) fn truncate(&mut self, len: usize) {
        self.frames.truncate(len);
    }

    #[cfg(test)]
    pub(super) fn frames_capacity(&self) -> usize {
        self.frames.capacity()
    }

    pub(super) fn frame(&mut self, kind: Kind, end: bool, stream: StreamId, payload: &[u8]) {
        write_frame(&mut self.frames, kind, end, stream, payload);
    }

    /// Adds a frame whose payload `write` appends. Adds nothing and returns false if the payload is
    /// too long: the peer would end the tunnel.
    #[must_use]
    pub(super) fn frame_with(
        &mut self,
        kind: Kind,
        end: bool,
        stream: StreamId,
        write: impl FnOnce(&mut Vec<u8>),
    ) -> bool {
        let at = self.frames.len();
        self.frames.extend_from_slice(&[0; HEADER]);
        write(&mut self.frames);
        let length = self.frames.len() - at - HEADER;
        if length > kind.payload_max() {
            self.frames.truncate(at);
            return false;
        }
        self.frames[at..at + HEADER].copy_from_slice(
            &FrameHeader {
                kind,
                end,
                length,
                stream,
            }
            .encode(),
        );
        true
    }

    pub(super) fn message(&mut self, message: Bytes, queue_max: usize) -> Result<(), OutgoingFull> {
        if self.message_bytes + message.len() > queue_max {
            return Err(OutgoingFull);
        }
        self.message_bytes += message.len();
        self.messages.push_back(message);
        Ok(())
    }

    /// Moves all frames to `out`.
    fn drain(&mut self, out: &mut Outgoing) {
        for (kind, payload) in [
            (Kind::Ping, self.ping.take()),
            (Kind::Pong, self.pong.take()),
        ] {
            if let Some(payload) = payload {
                write_frame(
                    &mut out.copied,
                    kind,
                    false,
                    StreamId::TUNNEL,
                    &payload.to_be_bytes(),
                );
            }
        }
        if out.copied.is_empty() && out.pieces.is_empty() {
            std::mem::swap(&mut out.copied, &mut self.frames);
        } else {
            out.copied.extend_from_slice(&self.frames);
            self.frames.clear();
            self.frames.shrink_to(KEPT);
        }
        for message in self.messages.drain(..) {
            write_frame(
                &mut out.copied,
                Kind::Message,
                false,
                StreamId::TUNNEL,
                &message,
            );
        }
        self.message_bytes = 0;
    }
}

fn write_frame(out: &mut Vec<u8>, kind: Kind, end: bool, stream: StreamId, payload: &[u8]) {
    out.extend_from_slice(
        &FrameHeader {
            kind,
            end,
            length: payload.len(),
            stream,
        }
        .encode(),
    );
    out.extend_from_slice(payload);
}

/// Frames taken out of an endpoint, to be written in order.
#[derive(Debug, Default)]
pub struct Outgoing {
    /// Headers and small payloads.
    copied: Vec<u8>,
    /// Bytes of `copied` that were written.
    written: usize,
    /// Large payloads, and the position in `copied` before which each stands.
    pieces: VecDeque<(usize, Bytes)>,
    /// Bytes not written yet.
    length: usize,
}

impl Outgoing {
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Bytes not written yet.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Fills `slices` with the next bytes. Returns the number of slices used.
    pub fn slices<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let mut used = 0;
        let mut at = self.written;
        let mut push = |bytes: &'a [u8]| {
            if bytes.is_empty() {
                return true;
            }
            let Some(slot) = slices.get_mut(used) else {
                return false;
            };
            *slot = IoSlice::new(bytes);
            used += 1;
            true
        };
        for (before, data) in &self.pieces {
            if !push(&self.copied[at..*before]) || !push(data) {
                return used;
            }
            at = *before;
        }
        push(&self.copied[at..]);
        used
    }

    /// Removes `bytes` that were written.
    pub fn advance(&mut self, mut bytes: usize) {
        self.length -= bytes;
        while bytes > 0 {
            let until = self
                .pieces
                .front()
                .map_or(self.copied.len(), |(before, _)| *before);
            let copied = bytes.min(until - self.written);
            self.written += copied;
            bytes -= copied;
            if let Some((_, data)) = self.pieces.front_mut()
                && bytes > 0
            {
                let taken = bytes.min(data.len());
                data.advance(taken);
                bytes -= taken;
                if data.is_empty() {
                    self.pieces.pop_front();
                }
            }
        }
        if self.length == 0 {
            self.written = 0;
            self.copied.clear();
            self.copied.shrink_to(KEPT);
        }
    }
}

impl Endpoint {
    /// Moves frames to `out`, which must be empty: all frames without data, then data of each
    /// stream in turn until `out` has `enough` bytes, at least one frame.
    pub fn transmit(&mut self, out: &mut Outgoing, enough: usize) {
        debug_assert!(out.is_empty());
        self.urgent.drain(out);
        let mut data_bytes = 0;
        let mut turns = 0;
        while (turns == 0 || out.copied.len() + data_bytes < enough)
            && let Some(key) = self.ready.pop_front()
        {
            turns += 1;
            data_bytes += self.transmit_stream(key, out);
            // Sending the last frame may have queued a RESET.
            if self.urgent.len() > 0 {
                self.urgent.drain(out);
            }
        }
        out.length = out.copied.len() + data_bytes;
    }

    /// Moves one frame of a stream to `out`. Returns the bytes of data that were not copied.
    fn transmit_stream(&mut self, key: usize, out: &mut Outgoing) -> usize {
        let Some(stream) = self.streams.get_mut(key) else {
            return 0;
        };
        stream.is_scheduled = false;
        if !stream.has_frames() {
            self.remove_if_unused(key);
            return 0;
        }
        let id = stream.id;
        let mut not_copied = 0;
        let queued = stream.queued();
        let data = stream.pop(DATA_MAX);
        let is_last = !stream.has_data();
        if let Some(data) = data {
            let end = is_last && matches!(stream.finish, Some(FinalFrame::End));
            stream.sent_end = end;
            let header = FrameHeader {
                kind: Kind::Data,
                end,
                length: data.len(),
                stream: id,
            };
            out.copied.extend_from_slice(&header.encode());
            if data.len() <= COPIED_MAX {
                out.copied.extend_from_slice(&data);
            } else {
                not_copied = data.len();
                out.pieces.push_back((out.copied.len(), data));
            }
            wake(&mut stream.send_task);
        }
        if is_last
            && !stream.sent_end
            && let Some(finish) = stream.finish.take()
        {
            stream.sent_end = true;
            match finish {
                FinalFrame::End => write_frame(&mut out.copied, Kind::Data, true, id, b""),
                FinalFrame::Trailers(lines) => {
                    write_frame(&mut out.copied, Kind::Trailers, true, id, &lines);
                }
                FinalFrame::Reset(code) => {
                    stream.sent_reset = true;
                    write_frame(&mut out.copied, Kind::Reset, false, id, code.as_bytes());
                }
            }
        }
        stream.settle_queue(queued);
        if stream.sent_end {
            self.sent_last(key);
        } else {
            self.schedule_again(key);
        }
        not_copied
    }

    fn schedule_again(&mut self, key: usize) {
        let stream = &mut self.streams[key];
        if stream.has_frames() {
            stream.is_scheduled = true;
            self.ready.push_back(key);
        }
    }
}
