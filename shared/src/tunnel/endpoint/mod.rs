//! State machine of one end of a tunnel: streams, credit and the order of frames. Does no I/O and
//! reads no clock.
//!
//! The gateway opens streams and the agent accepts them. Each end of a stream sends frames until
//! one with END, or RESET. A stream is closed once both ends have sent their last frame; only then
//! may the gateway use its slot again. So both ends agree on the number of open streams, and a
//! frame of a stream that was never open is an error of the peer.
//!
//! # Credit
//!
//! A receiver grants bytes of body for each stream. A grant cannot be taken back, so the sum of all
//! grants that are not relayed yet, [`Endpoint::committed`], bounds the memory of a tunnel whose
//! readers all stall. A grant above [`window::LEAST`] is made only while that sum stays within the
//! budget. There is no credit of the whole tunnel on the wire: streams whose readers stall would
//! use it up and block the others.
//!
//! # Memory
//!
//! Each stream charges what it holds, and what it has granted, to a [`Share`]. When it is opened it
//! is charged for the least window, an ordinary head and one frame to send, so that it can always
//! go on. Everything beyond is charged first: a grant, or a larger queue, is made only if the share
//! has room for it. Heads have no credit: a head that the share has no room for resets its stream.
//!
//! # Order of sending
//!
//! Heads, credit, resets, pings and control messages leave before data. Streams with data take
//! turns of one frame.

mod closing;
mod credit;
mod input;
mod opening;
mod output;
mod stream;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use slab::Slab;

use self::credit::Credit;
use self::input::FrameInput;
pub use self::input::Violation;
pub use self::opening::OpenError;
use self::output::Urgent;
pub use self::output::{Outgoing, OutgoingFull};
pub use self::stream::{Closed, ReceivedPart};
use self::stream::{FinalFrame, Stream, UploadReport};
use super::frame::{DATA_MAX, Kind, StreamId};
use super::ledger::Share;
use super::window;

/// Most streams of a tunnel at once.
pub const STREAMS_MAX: usize = 32 * 1024;

/// Streams that an agent accepts beyond its slots, to refuse their requests for lack of a slot.
pub const STREAMS_BEYOND_SLOTS: usize = 128;

/// Most bytes of body queued for sending on one stream.
pub const STREAM_SEND_BUFFER: usize = 128 * 1024;

/// Bytes of heads and trailers that each stream is charged for when it is opened. More are charged
/// when they arrive.
const HEADS_RESERVE: usize = 4 * 1024;

/// Bytes of body queued for sending that each stream is charged for until this end has sent all.
const QUEUE_RESERVE: usize = DATA_MAX;

/// Most bytes of heads that wait for sending before the gateway opens no further stream, and the
/// agent receives no further request.
const HEADS_AHEAD: usize = 512 * 1024;

/// Payload of an UPLOADED that names no number of bytes.
const UNKNOWN: u64 = u64::MAX;

/// End of the tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Gateway,
    Agent,
}

/// Key of a stream at this end. Valid until both halves were dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamKey(usize);

/// One end of a tunnel.
#[derive(Debug)]
pub struct Endpoint {
    role: Role,
    /// Share of streams that are opened for no other.
    share: Rc<Share>,
    streams: Slab<Stream>,
    /// Stream of each slot that is in use on the wire, and the generation of the slot.
    slots: Vec<Slot>,
    /// Free slots of the gateway. The oldest is used first.
    free: VecDeque<u16>,
    /// Slots in use.
    open: usize,
    /// Streams that the agent serves at once; 0 until the gateway has received HELLO.
    streams_max: usize,
    input: FrameInput,
    urgent: Urgent,
    /// Streams with frames to send, each once.
    ready: VecDeque<usize>,
    credit: Credit,
    /// Opened streams that the agent has not accepted yet.
    opened: VecDeque<usize>,
    /// Received control messages.
    messages: VecDeque<Bytes>,
    /// Memory of `messages`.
    message_bytes: usize,
    /// Payload of the last PONG.
    pong: Option<u64>,
    /// The agent's end reports how much of a request body the backend took. Ends of the release
    /// line 0.1 do not know that.
    reports_uploads: bool,
    /// The transport has ended.
    is_lost: bool,
    /// Task that moves bytes between this endpoint and the transport.
    driver: Option<Waker>,
    /// Task that accepts streams, pongs and windows, or waits for HELLO.
    acceptor: Option<Waker>,
    /// Task that receives control messages.
    messenger: Option<Waker>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    stream: Option<usize>,
    generation: u16,
}

impl Endpoint {
    /// The gateway's end. It can open streams after the agent's HELLO. Their memory is not limited,
    /// unless they are opened for a share.
    pub fn gateway() -> Self {
        Self::gateway_within(Share::alone(usize::MAX))
    }

    /// The gateway's end, whose streams are charged to `share`.
    pub fn gateway_within(share: Rc<Share>) -> Self {
        Self::new(Role::Gateway, 0, share)
    }

    /// The agent's end, which serves at most `streams` streams at once.
    pub fn agent(streams: usize) -> Self {
        // Windows and queues beyond the least use half of the share: the other half has room for
        // all streams.
        let least = streams.clamp(1, STREAMS_MAX) * Stream::least_memory(false);
        Self::agent_within(streams, Share::alone(2 * least.max(window::TUNNEL_BUDGET)))
    }

    /// The agent's end, whose streams are charged to `share`.
    pub fn agent_within(streams: usize, share: Rc<Share>) -> Self {
        let streams_max = streams.clamp(1, STREAMS_MAX);
        let mut endpoint = Self::new(Role::Agent, streams_max, share);
        endpoint.urgent.frame(
            Kind::Hello,
            false,
            StreamId::TUNNEL,
            &(streams_max as u32).to_be_bytes(),
        );
        endpoint
    }

    fn new(role: Role, streams_max: usize, share: Rc<Share>) -> Self {
        Self {
            role,
            share,
            streams: Slab::new(),
            slots: Vec::new(),
            free: VecDeque::new(),
            open: 0,
            streams_max,
            input: FrameInput::default(),
            urgent: Urgent::default(),
            ready: VecDeque::new(),
            credit: Credit::default(),
            opened: VecDeque::new(),
            messages: VecDeque::new(),
            message_bytes: 0,
            pong: None,
            reports_uploads: true,
            is_lost: false,
            driver: None,
            acceptor: None,
            messenger: None,
        }
    }

    /// Neither sends nor expects UPLOADED, which the peer does not know.
    pub fn without_upload_reports(mut self) -> Self {
        self.reports_uploads = false;
        self
    }

    /// Whether UPLOADED is sent and expected: the peer is of this release line.
    pub fn reports_uploads(&self) -> bool {
        self.reports_uploads
    }

    /// Streams that the agent serves at once; 0 until the gateway has received HELLO.
    pub fn streams_max(&self) -> usize {
        self.streams_max
    }

    /// Streams that are open on the wire.
    pub fn open_streams(&self) -> usize {
        self.open
    }

    /// The next stream that the gateway has opened; its head is the first received part. `None`
    /// once the tunnel has ended.
    pub fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<Option<StreamKey>> {
        match self.opened.pop_front() {
            Some(key) => Poll::Ready(Some(StreamKey(key))),
            None if self.is_lost => Poll::Ready(None),
            None => {
                set_waker(&mut self.acceptor, cx);
                Poll::Pending
            }
        }
    }

    /// Streams that the agent serves at once, from its HELLO; `None` once the tunnel has ended.
    pub fn poll_hello(&mut self, cx: &mut Context<'_>) -> Poll<Option<usize>> {
        if self.streams_max > 0 {
            return Poll::Ready(Some(self.streams_max));
        }
        if self.is_lost {
            return Poll::Ready(None);
        }
        set_waker(&mut self.acceptor, cx);
        Poll::Pending
    }

    /// The next control message; `None` once the tunnel has ended.
    pub fn poll_message(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        match self.messages.pop_front() {
            Some(message) => {
                self.message_bytes -= message.len() + input::MESSAGE_OVERHEAD;
                Poll::Ready(Some(message))
            }
            None if self.is_lost => Poll::Ready(None),
            None => {
                set_waker(&mut self.messenger, cx);
                Poll::Pending
            }
        }
    }

    /// Whether the endpoint has so many heads to send that it must not receive before it has sent
    /// them. Never true at the gateway: of two ends that both wait for the other, one must receive.
    pub fn is_congested(&self) -> bool {
        self.role == Role::Agent && self.urgent.len() > HEADS_AHEAD
    }

    /// Payload of the PONG that arrived since the last call.
    pub fn take_pong(&mut self) -> Option<u64> {
        self.pong.take()
    }

    /// Wakes the tasks that wait for a part of a stream, so that they look at what else they know
    /// of the tunnel.
    pub fn wake_receivers(&mut self) {
        self.streams
            .iter_mut()
            .for_each(|(_, stream)| wake(&mut stream.receive_task));
    }

    /// Queues a PING.
    pub fn ping(&mut self, payload: u64) {
        self.urgent.ping = Some(payload);
        self.wake_driver();
    }

    /// Queues a control message. Fails if more than `queue_max` bytes of messages would wait.
    pub fn send_message(&mut self, message: Bytes, queue_max: usize) -> Result<(), OutgoingFull> {
        self.urgent.message(message, queue_max)?;
        self.wake_driver();
        Ok(())
    }

    /// Tells the agent to let the gateway send at most `bytes` ahead on each stream.
    pub fn send_window(&mut self, bytes: u32) {
        self.urgent
            .frame(Kind::Window, false, StreamId::TUNNEL, &bytes.to_be_bytes());
        self.wake_driver();
    }

    /// Sets how many bytes a stream may be granted ahead of its reader, and the budget for all of
    /// them, from now on.
    pub fn set_credit(&mut self, window: usize, budget: usize) {
        self.credit.set(window, budget);
    }

    /// Bytes that each stream may be granted ahead of its reader.
    pub fn window(&self) -> usize {
        self.credit.window()
    }

    /// The gateway's last WINDOW; `None` before the first.
    pub fn announced_window(&self) -> Option<u32> {
        self.credit.announced
    }

    /// Bytes granted to the peer and not relayed yet: an upper bound on the memory that received
    /// bodies can use.
    pub fn committed(&self) -> usize {
        self.credit.committed()
    }

    /// Received bytes of bodies that are not relayed yet.
    pub fn unread(&self) -> usize {
        self.streams.iter().map(|(_, stream)| stream.unread).sum()
    }

    /// Bytes of all streams: bodies received and not relayed, bodies queued for sending, and heads.
    /// A head counts until its stream is removed.
    pub fn held(&self) -> usize {
        self.streams.iter().map(|(_, stream)| stream.held()).sum()
    }

    /// Unread bytes of each stream that has any.
    pub fn unread_by_stream(&self) -> impl Iterator<Item = usize> {
        self.streams
            .iter()
            .map(|(_, stream)| stream.unread)
            .filter(|unread| *unread > 0)
    }

    /// Bytes that may be queued for sending on a stream.
    pub fn poll_capacity(
        &mut self,
        key: StreamKey,
        cx: &mut Context<'_>,
    ) -> Poll<Result<usize, Closed>> {
        let stream = &mut self.streams[key.0];
        if let Some(closed) = stream.send_closed() {
            return Poll::Ready(Err(closed));
        }
        match stream.capacity() {
            0 => {
                set_waker(&mut stream.send_task, cx);
                Poll::Pending
            }
            capacity => Poll::Ready(Ok(capacity)),
        }
    }

    /// Queues data, at most the capacity of the stream; with `end`, no more follows.
    pub fn send_data(&mut self, key: StreamKey, data: Bytes, end: bool) -> Result<(), Closed> {
        let stream = &mut self.streams[key.0];
        if let Some(closed) = stream.send_closed() {
            return Err(closed);
        }
        debug_assert!(data.len() <= stream.capacity());
        stream.push(data);
        if end {
            stream.finish = Some(FinalFrame::End);
            stream.wake_for_end();
        }
        stream.settle_queue(0);
        self.schedule(key.0);
        Ok(())
    }

    /// Queues trailers as field lines, which end this direction. Breaks the body off and fails if
    /// they are too large, or if the share has no room for them.
    pub fn send_trailers(&mut self, key: StreamKey, lines: Bytes) -> Result<(), Closed> {
        if lines.len() > Kind::Trailers.payload_max() {
            self.break_off(key, "")?;
            return Err(Closed::Here);
        }
        self.finish(key, FinalFrame::Trailers(lines))
    }

    /// Queues a RESET with a code behind the data: the body breaks off there.
    pub fn break_off(&mut self, key: StreamKey, code: &'static str) -> Result<(), Closed> {
        self.finish(key, FinalFrame::Reset(code))
    }

    fn finish(&mut self, key: StreamKey, ended: FinalFrame) -> Result<(), Closed> {
        let stream = &mut self.streams[key.0];
        if let Some(closed) = stream.send_closed() {
            return Err(closed);
        }
        let needs_room = matches!(ended, FinalFrame::Trailers(_));
        stream.finish = Some(ended);
        let has_room = !needs_room || stream.settle_within_share();
        if !has_room {
            stream.finish = Some(FinalFrame::Reset(""));
        }
        stream.wake_for_end();
        self.schedule(key.0);
        if has_room { Ok(()) } else { Err(Closed::Here) }
    }

    /// Sends a head of a response: INTERIM, RESPONSE or REFUSED. `end` as in the frame. Resets the
    /// stream if the head is too large, or if the share has no room for it.
    pub fn send_head(
        &mut self,
        key: StreamKey,
        kind: Kind,
        end: bool,
        write: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), Closed> {
        debug_assert_eq!(self.role, Role::Agent);
        let stream = &mut self.streams[key.0];
        if let Some(closed) = stream.send_closed() {
            return Err(closed);
        }
        let before = self.urgent.len();
        let is_written = self.urgent.frame_with(kind, end, stream.id, write);
        stream.sent_head_bytes += (self.urgent.len() - before) as u32;
        if !is_written || !stream.settle_heads_within_share() {
            self.urgent.truncate(before);
            self.reset(key, "");
            return Err(Closed::Here);
        }
        if kind == Kind::Refused {
            stream.upload = UploadReport::Unreported;
        }
        if end {
            stream.sent_end = true;
            stream.settle_queue(0);
            self.sent_last(key.0);
        }
        self.wake_driver();
        Ok(())
    }

    /// The next received part. A body that was cut off is an error after all data before it.
    pub fn poll_receive(
        &mut self,
        key: StreamKey,
        cx: &mut Context<'_>,
    ) -> Poll<Result<ReceivedPart, Closed>> {
        let stream = &mut self.streams[key.0];
        let part = stream.next_part();
        if part.is_pending() {
            set_waker(&mut stream.receive_task, cx);
        }
        part
    }

    /// Whether the peer has ended its direction and everything was received.
    pub fn is_received(&self, key: StreamKey) -> bool {
        self.streams[key.0].is_received()
    }

    /// Whether the head of a request had END. Unlike [`Self::is_received`], false if the end of an
    /// empty body follows it.
    pub fn ended_with_head(&self, key: StreamKey) -> bool {
        self.streams[key.0].ended_with_head
    }

    /// Ready once the peer has reset the stream or the tunnel has ended.
    pub fn poll_reset(&mut self, key: StreamKey, cx: &mut Context<'_>) -> Poll<()> {
        let stream = &mut self.streams[key.0];
        if stream.is_reset() {
            return Poll::Ready(());
        }
        set_waker(&mut stream.reset_task, cx);
        Poll::Pending
    }

    /// Whether the peer has reset the stream or the tunnel has ended.
    pub fn is_reset(&self, key: StreamKey) -> bool {
        self.streams[key.0].is_reset()
    }

    /// Records that `bytes` of received data were relayed: grants the peer as many again if the
    /// window allows. A gateway that has sent a whole request body learns by such grants that the
    /// backend takes it.
    pub fn release(&mut self, key: StreamKey, bytes: usize) {
        let stream = &mut self.streams[key.0];
        let bytes = bytes.min(stream.unread);
        let mut granted = self.credit.release(stream, bytes);
        if self.role == Role::Agent {
            granted = granted.max(stream.report_released(bytes));
        }
        if granted > 0 {
            let id = stream.id;
            self.urgent
                .frame(Kind::Credit, false, id, &(granted as u32).to_be_bytes());
            self.wake_driver();
        }
    }

    /// The share to which the memory of a stream is charged.
    pub fn share_of(&self, key: StreamKey) -> Rc<Share> {
        Rc::clone(&self.streams[key.0].share)
    }

    /// Sum of the grants of the peer, which grows as the backend takes the body of a request.
    pub fn granted(&self, key: StreamKey) -> u64 {
        self.streams[key.0].granted
    }

    /// Charges a stream to `share` from now on. Changes nothing and returns false if that has no
    /// room.
    #[must_use]
    pub fn charge_to(&mut self, key: StreamKey, share: &Rc<Share>) -> bool {
        self.streams[key.0].charge_to(share)
    }

    /// Lets a stream take part in the turns if it has frames to send.
    fn schedule(&mut self, key: usize) {
        let stream = &mut self.streams[key];
        if !stream.is_scheduled && stream.has_frames() {
            stream.is_scheduled = true;
            self.ready.push_back(key);
            self.wake_driver();
        }
    }

    fn wake_driver(&mut self) {
        wake(&mut self.driver);
    }

    /// Registers the task that is woken when there are frames to send.
    pub fn register_driver(&mut self, cx: &Context<'_>) {
        set_waker(&mut self.driver, cx);
    }
}

fn set_waker(place: &mut Option<Waker>, cx: &Context<'_>) {
    match place {
        Some(waker) if waker.will_wake(cx.waker()) => {}
        _ => *place = Some(cx.waker().clone()),
    }
}

fn wake(place: &mut Option<Waker>) {
    if let Some(waker) = place.take() {
        waker.wake();
    }
}
