//! Ends of streams: resets, dropped halves, the report of a request body, and the last frames of
//! both ends.

use std::task::{Context, Poll};

use slab::Slab;

use super::stream::{Stream, UploadReport};
use super::{Closed, Endpoint, Role, StreamKey, UNKNOWN, set_waker, wake};
use crate::tunnel::frame::{Kind, StreamId};

impl Endpoint {
    /// Ends both directions of a stream at once and discards its queued and received bytes.
    pub fn reset(&mut self, key: StreamKey, code: &'static str) {
        self.discard_received(key.0);
        self.send_reset(key, code);
    }

    /// Ends this direction, and the peer's if it has not ended yet, with a RESET. Discards the
    /// queued bytes.
    fn send_reset(&mut self, key: StreamKey, code: &'static str) {
        let stream = &mut self.streams[key.0];
        stream.discard_queue();
        let is_open = stream.id != StreamId::TUNNEL && !self.is_lost;
        if is_open && !stream.has_ended() && !stream.sent_reset {
            stream.sent_reset = true;
            stream.sent_end = true;
            let id = stream.id;
            stream.settle();
            self.urgent.frame(Kind::Reset, false, id, code.as_bytes());
            self.wake_driver();
            self.sent_last(key.0);
        }
    }

    /// The sending half was dropped. Resets the stream if its direction has not ended. What the
    /// peer has sent completely stays readable.
    pub fn drop_sender(&mut self, key: StreamKey) {
        self.streams[key.0].has_sender = false;
        self.streams[key.0].send_task = None;
        let stream = &self.streams[key.0];
        let is_whole = if stream.sent_end {
            !self.owes_report(stream)
        } else {
            stream.finish.is_some()
        };
        if !self.is_lost && !is_whole {
            if stream.received_end.is_some() {
                self.send_reset(key, "");
            } else {
                self.reset(key, "");
            }
        }
        self.remove_if_unused(key.0);
    }

    /// The receiving half was dropped: discards what arrives on the stream, and tells the peer once
    /// this direction has ended.
    pub fn drop_receiver(&mut self, key: StreamKey) {
        self.streams[key.0].has_receiver = false;
        self.streams[key.0].receive_task = None;
        self.discard_received(key.0);
        let stream = &self.streams[key.0];
        let is_unwanted = match self.role {
            // The gateway has no use for its request without the response.
            Role::Gateway => stream.received_end.is_none() || stream.upload == UploadReport::Due,
            Role::Agent => stream.sent_end && stream.is_read_on(),
        };
        if is_unwanted {
            self.reset(key, "");
        }
        self.remove_if_unused(key.0);
    }

    /// The transport has ended: closes every stream.
    pub fn lose(&mut self) {
        self.is_lost = true;
        self.ready.clear();
        let keys: Vec<usize> = self.streams.iter().map(|(key, _)| key).collect();
        for key in keys {
            let stream = &mut self.streams[key];
            self.credit.forget_credit(stream);
            stream.lose();
            stream.settle();
            stream.is_scheduled = false;
            self.remove_if_unused(key);
        }
        self.slots.clear();
        self.open = 0;
        wake(&mut self.acceptor);
        wake(&mut self.messenger);
    }

    pub(super) fn discard_received(&mut self, key: usize) {
        let stream = &mut self.streams[key];
        self.credit.discard(stream);
    }

    /// This end has sent its last frame of the stream.
    pub(super) fn sent_last(&mut self, key: usize) {
        let stream = &self.streams[key];
        let is_without_reader = !stream.has_receiver && stream.is_read_on();
        let is_without_report = !stream.has_sender && self.owes_report(stream);
        if !stream.sent_reset && (is_without_reader || is_without_report) {
            // Closes the stream, too.
            return self.reset(StreamKey(key), "");
        }
        self.close_if_ended(key);
    }

    /// Whether this end, the agent's, has to report the request body.
    fn owes_report(&self, stream: &Stream) -> bool {
        self.role == Role::Agent && stream.upload == UploadReport::Due
    }

    /// Frees the slot once both ends have sent their last frame.
    pub(super) fn close_if_ended(&mut self, key: usize) {
        let stream = &mut self.streams[key];
        if stream.id == StreamId::TUNNEL || !stream.has_ended() {
            return;
        }
        let slot = stream.id.slot();
        stream.id = StreamId::TUNNEL;
        if let Some(place) = self.slots.get_mut(slot) {
            place.stream = None;
            self.open -= 1;
            if self.role == Role::Gateway {
                self.free.push_back(slot as u16);
            }
        }
        self.remove_if_unused(key);
    }

    /// Removes a stream that is closed on the wire, has no handle and is not in the list of streams
    /// with frames to send.
    pub(super) fn remove_if_unused(&mut self, key: usize) {
        let Some(stream) = self.streams.get(key) else {
            return;
        };
        let is_closed = stream.id == StreamId::TUNNEL || self.is_lost;
        if is_closed && !stream.has_sender && !stream.has_receiver && !stream.is_scheduled {
            self.streams.remove(key);
            if self.streams.is_empty() {
                self.shrink();
            }
        }
    }

    /// Returns the memory of an idle tunnel.
    fn shrink(&mut self) {
        const KEPT: usize = 16;
        if self.streams.capacity() > KEPT {
            self.streams = Slab::with_capacity(KEPT);
        }
        self.ready.shrink_to(KEPT);
        self.opened.shrink_to(KEPT);
    }

    /// Reports that the backend took `bytes` of the request body, if known, and discards the rest.
    /// Has no effect on a request without a body, or after the report or a RESET.
    pub fn report_upload(&mut self, key: StreamKey, bytes: Option<u64>) {
        debug_assert_eq!(self.role, Role::Agent);
        let stream = &mut self.streams[key.0];
        if stream.upload != UploadReport::Due || stream.sent_reset || stream.is_reset() {
            return;
        }
        stream.upload = UploadReport::Reported(bytes);
        self.urgent.frame(
            Kind::Uploaded,
            false,
            stream.id,
            &bytes.unwrap_or(UNKNOWN).to_be_bytes(),
        );
        self.discard_received(key.0);
        self.wake_driver();
        self.close_if_ended(key.0);
    }

    /// The agent's report of the request body: bytes that the backend took, if known. An error if
    /// the stream was reset or the tunnel has ended before.
    pub fn poll_uploaded(
        &mut self,
        key: StreamKey,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<u64>, Closed>> {
        let stream = &mut self.streams[key.0];
        let uploaded = stream.poll_uploaded();
        if uploaded.is_pending() {
            set_waker(&mut stream.receive_task, cx);
        }
        uploaded
    }
}
