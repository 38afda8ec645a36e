//! An agent in memory: the other end of a worker's tunnel. It asserts that the frames of the
//! gateway are valid, and answers as it is told.

use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use gw_shared::error_code::AgentErrorCode;
use gw_shared::http::{Fields, Framing, UpgradeProtocol};
use gw_shared::tunnel::endpoint::{Endpoint, Outgoing, ReceivedPart, StreamKey};
use gw_shared::tunnel::frame::Kind;
use gw_shared::tunnel::head;
use gw_shared::tunnel::timing::AgentTiming;
use gw_shared::tunnel::transport::Transport;
use http::StatusCode;
use http::header::{HeaderName, HeaderValue};

/// Requests that the agent takes at once.
const SLOTS: usize = 8;
/// Most bytes of a body that one step sends.
pub const DATA_MAX: usize = 64 * 1024;

/// The agent.
pub struct Agent(Rc<RefCell<State>>);

/// The gateway's end of the connection. The agent notices when it is dropped.
pub struct GatewayEnd(Rc<RefCell<State>>);

struct State {
    endpoint: Endpoint,
    /// Streams that the gateway has opened and that are not forgotten, in their order.
    requests: Vec<OpenRequest>,
    /// Bytes to send before those of the endpoint.
    raw: Vec<u8>,
    /// Bytes of bodies and fields that were sent.
    sent: usize,
    is_lost: bool,
    reader: Option<Waker>,
}

/// A request that the agent serves.
#[derive(Clone, Copy)]
struct OpenRequest {
    key: StreamKey,
    /// Byte that the response's body consists of.
    mark: u8,
}

impl Default for Agent {
    fn default() -> Self {
        Self(Rc::new(RefCell::new(State {
            endpoint: Endpoint::agent(SLOTS),
            requests: Vec::new(),
            raw: Vec::new(),
            sent: 0,
            is_lost: false,
            reader: None,
        })))
    }
}

impl Agent {
    /// The end of the connection that a gateway drives.
    pub fn gateway_end(&self) -> GatewayEnd {
        GatewayEnd(Rc::clone(&self.0))
    }

    /// Bytes of bodies and fields that were sent.
    pub fn sent(&self) -> usize {
        self.0.borrow().sent
    }

    /// Open requests that the gateway has not reset.
    pub fn requests(&self) -> usize {
        let state = self.0.borrow();
        let open = state.requests.iter();
        open.filter(|request| !state.endpoint.is_reset(request.key))
            .count()
    }

    /// Sends a head of a response to one of the open requests. Without a length, its body is
    /// chunked.
    pub fn respond(&self, of: usize, status: u16, length: Option<u64>, fields: &Fields) {
        self.with_request(of, |state, request| {
            let Ok(status) = StatusCode::from_u16(status) else {
                return;
            };
            let upgrade = (status == StatusCode::SWITCHING_PROTOCOLS)
                .then(|| UpgradeProtocol::from_static("websocket"));
            let kind = if status.is_informational() && upgrade.is_none() {
                Kind::Interim
            } else {
                Kind::Response
            };
            let framing = match length {
                _ if upgrade.is_some() => Framing::None,
                Some(length) => Framing::Length(length),
                None => Framing::Chunked,
            };
            let ends = kind == Kind::Response && framing == Framing::Length(0);
            state.sent += size_of_fields(fields);
            // Fails if the stream has ended.
            let _ = state.endpoint.send_head(request.key, kind, ends, |out| {
                if kind == Kind::Interim {
                    head::write_interim(out, status, fields);
                } else {
                    let timing = AgentTiming::default();
                    let upgrade = upgrade.as_ref();
                    head::write_response(out, timing, status, fields, framing, upgrade);
                }
            });
            if ends {
                state.finish(request.key);
            }
        });
    }

    /// Sends a piece of a response's body, as far as there is credit for it.
    pub fn send(&self, of: usize, length: usize, end: bool) {
        self.with_request(of, |state, request| {
            let cx = &mut Context::from_waker(Waker::noop());
            let capacity = match state.endpoint.poll_capacity(request.key, cx) {
                Poll::Ready(Ok(capacity)) => capacity,
                Poll::Ready(Err(_)) => return,
                Poll::Pending => 0,
            };
            let length = length.min(capacity).min(DATA_MAX);
            state.sent += length;
            let data = Bytes::from(vec![request.mark; length]);
            let _ = state.endpoint.send_data(request.key, data, end);
            if end {
                state.finish(request.key);
            }
        });
    }

    /// Ends a response with trailers.
    pub fn send_trailers(&self, of: usize, fields: &Fields) {
        self.with_request(of, |state, request| {
            state.sent += size_of_fields(fields);
            let lines = head::write_trailers(fields);
            let _ = state.endpoint.send_trailers(request.key, lines);
            state.finish(request.key);
        });
    }

    /// Answers with one of the errors of an agent, or with another code, instead of a response.
    pub fn refuse(&self, of: usize, code: usize) {
        let code = AgentErrorCode::ALL
            .get(code)
            .map_or("X", |code| code.as_str());
        self.with_request(of, |state, request| {
            let timing = AgentTiming::default();
            let write =
                |out: &mut Vec<u8>| head::write_refusal(out, timing, false, code, "a reason");
            let _ = state
                .endpoint
                .send_head(request.key, Kind::Refused, true, write);
            state.finish(request.key);
        });
    }

    /// Breaks a response off.
    pub fn break_off(&self, of: usize) {
        self.with_request(of, |state, request| {
            let _ = state.endpoint.break_off(request.key, "");
            state.finish(request.key);
        });
    }

    /// Reads what has arrived of the request's body.
    pub fn read(&self, of: usize) {
        self.with_request(of, |state, request| {
            let cx = &mut Context::from_waker(Waker::noop());
            let mut read = 0;
            while let Poll::Ready(Ok(part)) = state.endpoint.poll_receive(request.key, cx) {
                match part {
                    ReceivedPart::Data(data) => read += data.len(),
                    ReceivedPart::End => break,
                    ReceivedPart::Head(..) => {}
                }
            }
            state.endpoint.release(request.key, read);
        });
    }

    /// Sends bytes that need not be frames.
    pub fn send_raw(&self, bytes: &[u8]) {
        self.act(|state| state.raw.extend_from_slice(bytes));
    }

    /// Ends the connection.
    pub fn lose(&self) {
        self.act(|state| state.is_lost = true);
    }

    fn with_request(&self, of: usize, act: impl FnOnce(&mut State, OpenRequest)) {
        self.act(|state| {
            let count = state.requests.len().max(1);
            if let Some(request) = state.requests.get(of % count).copied() {
                act(state, request);
            }
        });
    }

    fn act(&self, act: impl FnOnce(&mut State)) {
        let mut state = self.0.borrow_mut();
        act(&mut state);
        state.forget_ended();
        let reader = state.reader.take();
        drop(state);
        reader.into_iter().for_each(Waker::wake);
    }
}

impl State {
    fn accept(&mut self) {
        let cx = &mut Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(key)) = self.endpoint.poll_accept(cx) {
            let Poll::Ready(Ok(ReceivedPart::Head(Kind::Request, payload))) =
                self.endpoint.poll_receive(key, cx)
            else {
                panic!("a stream begins with a request");
            };
            let ends = self.endpoint.ended_with_head(key);
            let request =
                head::parse_request(&payload, ends).expect("the gateway's requests are valid");
            let mark = mark_of_path(request.target.path()).unwrap_or(b'.');
            self.requests.push(OpenRequest { key, mark });
        }
        self.forget_ended();
    }

    /// Forgets a request after the end of its response.
    fn finish(&mut self, key: StreamKey) {
        self.endpoint.report_upload(key, None);
        self.endpoint.drop_sender(key);
        self.endpoint.drop_receiver(key);
        self.requests.retain(|request| request.key != key);
    }

    /// Frees the streams that the gateway has reset.
    fn forget_ended(&mut self) {
        let endpoint = &mut self.endpoint;
        self.requests.retain(|request| {
            let is_reset = endpoint.is_reset(request.key);
            if is_reset {
                endpoint.drop_sender(request.key);
                endpoint.drop_receiver(request.key);
            }
            !is_reset
        });
    }
}

impl Drop for GatewayEnd {
    fn drop(&mut self) {
        let mut state = self.0.borrow_mut();
        state.endpoint.lose();
        state.forget_ended();
    }
}

impl Transport for GatewayEnd {
    fn poll_plaintext(
        &self,
        cx: &mut Context<'_>,
        sink: &mut dyn FnMut(&[u8]),
    ) -> Poll<io::Result<usize>> {
        let mut state = self.0.borrow_mut();
        let mut bytes = std::mem::take(&mut state.raw);
        bytes.extend(sent(&mut state.endpoint));
        if bytes.is_empty() && !state.is_lost {
            state.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        if !bytes.is_empty() {
            sink(&bytes);
        }
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_write(&self, _: &mut Context<'_>, pieces: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let mut state = self.0.borrow_mut();
        for piece in pieces {
            let received = state.endpoint.receive(piece);
            received.expect("the gateway's frames are valid");
        }
        state.accept();
        let reader = state.reader.take();
        drop(state);
        reader.into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(pieces.iter().map(|piece| piece.len()).sum()))
    }

    fn poll_send(&self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Returns the frames that an end of a tunnel sends now.
pub fn sent(endpoint: &mut Endpoint) -> Vec<u8> {
    let mut out = Outgoing::default();
    let mut bytes = Vec::new();
    loop {
        endpoint.transmit(&mut out, 64 * 1024);
        if out.is_empty() {
            return bytes;
        }
        while !out.is_empty() {
            let mut slices = [IoSlice::new(&[]); 4];
            let used = out.slices(&mut slices);
            slices[..used]
                .iter()
                .for_each(|slice| bytes.extend_from_slice(slice));
            let written = slices[..used].iter().map(|slice| slice.len()).sum();
            out.advance(written);
        }
    }
}

/// Bytes of fields in memory, as the gateway counts them.
fn size_of_fields(fields: &Fields) -> usize {
    let entry = size_of::<(HeaderName, HeaderValue)>();
    let size =
        |(name, value): (&HeaderName, &HeaderValue)| name.as_str().len() + value.len() + entry;
    fields.iter().map(size).sum()
}

/// Path of the request on a stream. An input cannot contain it by chance.
pub fn path(stream: u32) -> String {
    format!("/{stream}-{:08x}", tag(stream))
}

fn tag(stream: u32) -> u32 {
    (stream ^ 0x5bd1_e995).wrapping_mul(0x9e37_79b1)
}

/// Byte that the body of a response to the request on `stream` consists of. Not ASCII, unlike a
/// response of the gateway.
pub fn mark(stream: u32) -> u8 {
    0x80 | (stream >> 1) as u8
}

fn mark_of_path(path: &str) -> Option<u8> {
    let (stream, tag_of_path) = path.strip_prefix('/')?.split_once('-')?;
    let stream: u32 = stream.parse().ok()?;
    (tag_of_path == format!("{:08x}", tag(stream))).then(|| mark(stream))
}

/// Fields of a head, as `name: value` separated by `|`. Those that are not valid are left out.
pub fn fields(text: &[u8]) -> Fields {
    let field = |field: &[u8]| {
        let colon = field.windows(2).position(|pair| pair == b": ")?;
        let name = HeaderName::from_bytes(&field[..colon]).ok()?;
        let value = HeaderValue::from_bytes(&field[colon + 2..]).ok()?;
        Some((name, value))
    };
    Fields::from_iter(text.split(|byte| *byte == b'|').filter_map(field))
}
