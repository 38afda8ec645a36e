//! A gateway and an agent whose bytes move only when a test says so.

use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use bytes::Bytes;

use crate::tunnel::endpoint::{Closed, Endpoint, Outgoing, ReceivedPart, StreamKey, Violation};
use crate::tunnel::frame::{FrameHeader, HEADER, Kind, RESPONSE_PREFIX, StreamId};
use crate::tunnel::window;

pub(super) const LEAST: usize = window::LEAST as usize;

/// Bytes of frames that one turn takes out of an endpoint.
pub(super) const TURN: usize = 64 * 1024;

/// Both ends of a tunnel, and the bytes under way between them.
pub(super) struct Pair {
    pub(super) gateway: Endpoint,
    pub(super) agent: Endpoint,
    pub(super) to_gateway: Vec<u8>,
    pub(super) to_agent: Vec<u8>,
}

impl Pair {
    /// A tunnel whose gateway has received HELLO.
    pub(super) fn new(streams: usize) -> Self {
        Self::of(Endpoint::gateway(), Endpoint::agent(streams))
    }

    /// As [`Self::new`], of these ends.
    pub(super) fn of(gateway: Endpoint, agent: Endpoint) -> Self {
        let mut pair = Self {
            gateway,
            agent,
            to_gateway: Vec::new(),
            to_agent: Vec::new(),
        };
        pair.run();
        pair
    }

    /// Moves the frames of both ends into the pipes.
    pub(super) fn transmit(&mut self) {
        transmit_all(&mut self.gateway, &mut self.to_agent);
        transmit_all(&mut self.agent, &mut self.to_gateway);
    }

    pub(super) fn deliver_to_agent(&mut self) {
        receive(&mut self.agent, std::mem::take(&mut self.to_agent));
    }

    pub(super) fn deliver_to_gateway(&mut self) {
        receive(&mut self.gateway, std::mem::take(&mut self.to_gateway));
    }

    /// Moves bytes until none is left.
    pub(super) fn run(&mut self) {
        loop {
            self.transmit();
            if self.to_agent.is_empty() && self.to_gateway.is_empty() {
                return;
            }
            self.deliver_to_agent();
            self.deliver_to_gateway();
        }
    }

    /// Opens a stream and accepts it. Returns its key at the gateway and at the agent.
    pub(super) fn open(&mut self, end: bool) -> (StreamKey, StreamKey) {
        let write = |head: &mut Vec<u8>| head.extend_from_slice(b"request");
        let at_gateway = self.gateway.open(LEAST, end, write).unwrap();
        self.run();
        let at_agent = accept(&mut self.agent).unwrap();
        let head = read_head(&mut self.agent, at_agent);
        assert_eq!(head, (Kind::Request, b"request".to_vec()));
        (at_gateway, at_agent)
    }

    /// Opens a stream with a response head that both ends have handled.
    pub(super) fn open_with_response(&mut self, end: bool) -> (StreamKey, StreamKey) {
        let (at_gateway, at_agent) = self.open(end);
        respond(&mut self.agent, at_agent, false);
        self.run();
        assert_eq!(read_head(&mut self.gateway, at_gateway).0, Kind::Response);
        (at_gateway, at_agent)
    }

    /// Drops all handles of a stream.
    pub(super) fn drop_all(&mut self, at_gateway: StreamKey, at_agent: StreamKey) {
        drop_both(&mut self.gateway, at_gateway);
        drop_both(&mut self.agent, at_agent);
    }

    /// Drops all handles of the only stream, and checks that nothing is left of it.
    pub(super) fn close(&mut self, at_gateway: StreamKey, at_agent: StreamKey) {
        self.drop_all(at_gateway, at_agent);
        self.assert_idle();
    }

    /// Open streams of the gateway and of the agent.
    pub(super) fn open_streams(&self) -> (usize, usize) {
        (self.gateway.open_streams(), self.agent.open_streams())
    }

    /// Reads all that has arrived at the gateway. Returns how it ended.
    pub(super) fn end(&mut self, at_gateway: StreamKey) -> Option<Result<(), Closed>> {
        read(&mut self.gateway, at_gateway).end
    }

    pub(super) fn capacity(&mut self, at_gateway: StreamKey) -> Poll<Result<usize, Closed>> {
        self.gateway.poll_capacity(at_gateway, &mut context())
    }

    /// What the gateway knows of the upload of a stream.
    pub(super) fn uploaded(&mut self, at_gateway: StreamKey) -> Poll<Result<Option<u64>, Closed>> {
        self.gateway.poll_uploaded(at_gateway, &mut context())
    }

    /// Checks that neither end has an open stream or any credit left.
    pub(super) fn assert_idle(&self) {
        for (name, endpoint) in [("gateway", &self.gateway), ("agent", &self.agent)] {
            assert_eq!(endpoint.open_streams(), 0, "open streams of the {name}");
            assert_eq!(endpoint.committed(), 0, "credit of the {name}");
            assert_eq!(endpoint.streams.len(), 0, "entries of the {name}");
            assert_eq!(endpoint.share.charged(), 0, "charged at the {name}");
        }
    }
}

pub(super) fn drop_both(endpoint: &mut Endpoint, key: StreamKey) {
    endpoint.drop_sender(key);
    endpoint.drop_receiver(key);
}

/// Moves all frames of an endpoint into `pipe`, as a driver writes them. Returns whether there was
/// any.
pub(super) fn transmit_all(endpoint: &mut Endpoint, pipe: &mut Vec<u8>) -> bool {
    let before = pipe.len();
    while transmit_turn(endpoint, pipe) {}
    pipe.len() > before
}

/// Moves the frames of one turn into `pipe`, in writes of different lengths.
pub(super) fn transmit_turn(endpoint: &mut Endpoint, pipe: &mut Vec<u8>) -> bool {
    let mut out = Outgoing::default();
    endpoint.transmit(&mut out, TURN);
    let length = out.len();
    let before = pipe.len();
    let mut most = 1;
    while !out.is_empty() {
        let mut slices = [IoSlice::new(&[]); 3];
        let used = out.slices(&mut slices);
        let mut written = 0;
        for slice in &slices[..used] {
            let now = slice.len().min(most - written);
            pipe.extend_from_slice(&slice[..now]);
            written += now;
        }
        out.advance(written);
        most = most * 3 + 7;
    }
    assert_eq!(pipe.len() - before, length);
    length > 0
}

pub(super) fn accept(endpoint: &mut Endpoint) -> Option<StreamKey> {
    match endpoint.poll_accept(&mut context()) {
        Poll::Ready(key) => key,
        Poll::Pending => None,
    }
}

/// Sends a response head.
pub(super) fn respond(agent: &mut Endpoint, key: StreamKey, end: bool) {
    send_head(agent, key, Kind::Response, end, &response(b"response"));
}

pub(super) fn send_head(
    agent: &mut Endpoint,
    key: StreamKey,
    kind: Kind,
    end: bool,
    payload: &[u8],
) {
    let sent = agent.send_head(key, kind, end, |out| out.extend_from_slice(payload));
    sent.unwrap();
}

/// Payload of a RESPONSE.
pub(super) fn response(head: &[u8]) -> Vec<u8> {
    [&[0; RESPONSE_PREFIX], head].concat()
}

/// Queues as much of `data` as the capacity allows. Returns the number of bytes.
pub(super) fn send(endpoint: &mut Endpoint, key: StreamKey, data: &[u8]) -> usize {
    let mut sent = 0;
    while sent < data.len()
        && let Poll::Ready(Ok(capacity)) = endpoint.poll_capacity(key, &mut context())
    {
        let piece = &data[sent..data.len().min(sent + capacity)];
        let sending = endpoint.send_data(key, Bytes::copy_from_slice(piece), false);
        sending.unwrap();
        sent += piece.len();
    }
    sent
}

pub(super) fn finish(endpoint: &mut Endpoint, key: StreamKey) {
    endpoint.send_data(key, Bytes::new(), true).unwrap();
}

/// Everything that was read from a stream at once.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Parts {
    pub(super) heads: Vec<(Kind, Vec<u8>)>,
    pub(super) data: Vec<u8>,
    pub(super) trailers: Option<Bytes>,
    /// The end of the direction, or the error that it broke off with.
    pub(super) end: Option<Result<(), Closed>>,
}

impl Parts {
    /// The data of a direction that has ended.
    pub(super) fn whole(self) -> Vec<u8> {
        assert_eq!(self.end, Some(Ok(())));
        self.data
    }
}

/// Reads all that has arrived, without releasing it.
pub(super) fn take(endpoint: &mut Endpoint, key: StreamKey) -> Parts {
    let mut parts = Parts::default();
    while let Poll::Ready(part) = endpoint.poll_receive(key, &mut context()) {
        match part {
            Ok(ReceivedPart::Head(Kind::Trailers, lines)) => parts.trailers = Some(lines),
            Ok(ReceivedPart::Head(kind, head)) => parts.heads.push((kind, head.to_vec())),
            Ok(ReceivedPart::Data(data)) => parts.data.extend_from_slice(&data),
            Ok(ReceivedPart::End) => parts.end = Some(Ok(())),
            Err(closed) => parts.end = Some(Err(closed)),
        }
        if parts.end.is_some() {
            break;
        }
    }
    parts
}

/// Reads all that has arrived and releases it.
pub(super) fn read(endpoint: &mut Endpoint, key: StreamKey) -> Parts {
    let parts = take(endpoint, key);
    endpoint.release(key, parts.data.len());
    parts
}

pub(super) fn read_head(endpoint: &mut Endpoint, key: StreamKey) -> (Kind, Vec<u8>) {
    match endpoint.poll_receive(key, &mut context()) {
        Poll::Ready(Ok(ReceivedPart::Head(kind, head))) => (kind, head.to_vec()),
        other => panic!("{other:?} in place of a head"),
    }
}

/// Code of the peer's RESET.
pub(super) fn reset(code: &'static str) -> Closed {
    Closed::Reset(Bytes::from_static(code.as_bytes()))
}

pub(super) fn context() -> Context<'static> {
    Context::from_waker(Waker::noop())
}

/// A waker that counts.
#[derive(Default)]
pub(super) struct Wakes(AtomicUsize);

impl Wakes {
    pub(super) fn new() -> (Arc<Self>, Waker) {
        let wakes = Arc::new(Self::default());
        let waker = Waker::from(Arc::clone(&wakes));
        (wakes, waker)
    }

    /// Number of wake-ups since the last call.
    pub(super) fn take(&self) -> usize {
        self.0.swap(0, Ordering::Relaxed)
    }
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

pub(super) fn receive(endpoint: &mut Endpoint, bytes: impl AsRef<[u8]>) {
    endpoint.receive(bytes.as_ref()).unwrap();
}

/// A frame made by hand.
pub(super) fn frame(kind: Kind, end: bool, stream: u32, payload: &[u8]) -> Vec<u8> {
    let header = FrameHeader {
        kind,
        end,
        length: payload.len(),
        stream: StreamId(stream),
    };
    [&header.encode(), payload].concat()
}

/// Frames in `bytes`: type, END, stream and payload.
pub(super) fn frames(mut bytes: &[u8]) -> Vec<(Kind, bool, u32, Vec<u8>)> {
    let mut frames = Vec::new();
    while let Some((header, rest)) = bytes.split_first_chunk::<HEADER>() {
        let header = FrameHeader::decode(*header).unwrap();
        let (payload, rest) = rest.split_at(header.length);
        frames.push((header.kind, header.end, header.stream.0, payload.to_vec()));
        bytes = rest;
    }
    assert!(bytes.is_empty());
    frames
}

/// Types of the frames in `bytes`.
pub(super) fn kinds(bytes: &[u8]) -> Vec<Kind> {
    frames(bytes).into_iter().map(|(kind, ..)| kind).collect()
}

/// An end with one open stream, 0x0001_0000. The gateway's has received no response.
pub(super) fn gateway_with_a_stream(end: bool) -> (Endpoint, StreamKey) {
    let mut gateway = Endpoint::gateway();
    receive(&mut gateway, frame(Kind::Hello, false, 0, &[0, 0, 0, 4]));
    let write = |head: &mut Vec<u8>| head.extend_from_slice(b"request");
    let key = gateway.open(LEAST, end, write).unwrap();
    transmit_all(&mut gateway, &mut Vec::new());
    (gateway, key)
}

pub(super) fn agent_with_a_stream(end: bool) -> (Endpoint, StreamKey) {
    let mut agent = Endpoint::agent(4);
    let request = frame(Kind::Request, end, 0x0001_0000, &[0, 1, 0, 0, b'x']);
    receive(&mut agent, request);
    transmit_all(&mut agent, &mut Vec::new());
    let key = accept(&mut agent).unwrap();
    (agent, key)
}

/// Asserts that `bytes` cause this error.
pub(super) fn assert_violation(endpoint: &mut Endpoint, bytes: &[u8], expected: Violation) {
    assert_eq!(endpoint.receive(bytes), Err(expected));
}
