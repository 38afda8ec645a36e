//! Checks of the frames of a gateway: they have to be valid, and within what the caller allows.

use std::collections::HashMap;

use super::{
    ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, Frame, GOAWAY, HEADERS, PING, PREFACE,
    RST_STREAM, SETTINGS, Splitter, WINDOW_UPDATE,
};
use crate::agent::mark;

/// Least value of SETTINGS_MAX_FRAME_SIZE, and the one at the beginning (RFC 9113 §6.5.2).
const FRAME_MAX: u32 = 16_384;
/// Window of a connection, and of a stream without SETTINGS_INITIAL_WINDOW_SIZE.
const WINDOW: u64 = 65_535;

/// What the caller's frames allow the gateway to send, at most: the gateway may not have read them
/// yet.
#[derive(Debug, Default)]
pub struct Granted {
    splitter: Splitter,
    /// Bytes of the preface that were sent.
    preface: usize,
    frames: usize,
    /// Largest values of the settings.
    frame_max: u32,
    initial_window: u64,
    /// Window updates of streams, and of the connection as 0.
    updates: HashMap<u32, u64>,
    headers: usize,
}

impl Granted {
    /// Frames of the caller.
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// Notes bytes of the caller.
    pub fn note(&mut self, bytes: &[u8]) {
        let preface = bytes.len().min(PREFACE.len() - self.preface);
        self.preface += preface;
        self.splitter.buffer.extend_from_slice(&bytes[preface..]);
        while let Some(frame) = self.splitter.take() {
            self.frames += 1;
            self.headers += usize::from(frame.kind == HEADERS);
            match (frame.kind, frame.payload.first_chunk()) {
                (WINDOW_UPDATE, Some(increment)) => {
                    let increment = u32::from_be_bytes(*increment) & (u32::MAX >> 1);
                    *self.updates.entry(frame.stream).or_default() += u64::from(increment);
                }
                (SETTINGS, _) => {
                    for setting in frame.payload.chunks_exact(6) {
                        self.note_setting(setting.try_into().expect("six bytes"));
                    }
                }
                _ => {}
            }
        }
    }

    fn note_setting(&mut self, [high, low, value @ ..]: [u8; 6]) {
        let value = u32::from_be_bytes(value);
        match u16::from_be_bytes([high, low]) {
            4 => self.initial_window = self.initial_window.max(value.into()),
            5 => self.frame_max = self.frame_max.max(value),
            _ => {}
        }
    }

    fn frame_max(&self) -> u32 {
        self.frame_max.max(FRAME_MAX)
    }

    fn window(&self, stream: u32) -> u64 {
        let begin = if stream == 0 {
            WINDOW
        } else {
            self.initial_window.max(WINDOW)
        };
        begin + self.updates.get(&stream).copied().unwrap_or(0)
    }
}

/// The gateway's frames. Panics at an invalid one.
#[derive(Debug, Default)]
pub struct Received {
    splitter: Splitter,
    bytes: usize,
    frames: usize,
    data: u64,
    streams: HashMap<u32, Stream>,
    responses: usize,
    /// Stream of a header block that has not ended.
    block: Option<u32>,
    /// Last stream of the last GOAWAY.
    last_stream: Option<u32>,
}

/// The gateway's direction of a stream.
#[derive(Debug, Default)]
struct Stream {
    data: u64,
    has_head: bool,
    ended: bool,
    reset: bool,
}

impl Received {
    /// Bytes of all frames.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes bytes of the gateway. Panics if a frame is not valid or not granted.
    pub fn take(&mut self, bytes: &[u8], granted: &Granted) {
        self.bytes += bytes.len();
        self.splitter.buffer.extend_from_slice(bytes);
        while let Some(frame) = self.splitter.take() {
            self.check(&frame, granted);
            self.frames += 1;
        }
    }

    fn check(&mut self, frame: &Frame, granted: &Granted) {
        let Frame {
            kind,
            flags,
            stream,
            ref payload,
        } = *frame;
        let length = payload.len();
        assert!(length <= granted.frame_max() as usize, "{length} bytes");
        if self.frames == 0 {
            assert_eq!((kind, flags & ACK), (SETTINGS, 0), "the first frame");
        }
        if let Some(block) = self.block.take() {
            assert_eq!((kind, stream), (CONTINUATION, block), "in a header block");
        }
        let is_of_stream = matches!(kind, DATA | HEADERS | RST_STREAM | CONTINUATION);
        assert!(
            kind == WINDOW_UPDATE || is_of_stream == (stream % 2 == 1),
            "kind {kind} on stream {stream}"
        );
        match kind {
            DATA => self.check_data(stream, payload, flags, granted),
            HEADERS | CONTINUATION => {
                let state = self.streams.entry(stream).or_default();
                assert!(!state.reset && (kind == CONTINUATION || !state.ended));
                self.responses += usize::from(!std::mem::replace(&mut state.has_head, true));
                state.ended |= kind == HEADERS && flags & END_STREAM != 0;
                self.block = (flags & END_HEADERS == 0).then_some(stream);
                assert!(self.responses <= granted.headers, "unasked response");
            }
            RST_STREAM => {
                assert_eq!(length, 4);
                self.streams.entry(stream).or_default().reset = true;
            }
            SETTINGS => assert_eq!(length % 6, 0),
            PING => assert_eq!(length, 8),
            GOAWAY => {
                let last = u32::from_be_bytes(*payload.first_chunk().expect("a stream"));
                assert!(length >= 8 && self.last_stream.is_none_or(|earlier| last <= earlier));
                self.last_stream = Some(last);
            }
            WINDOW_UPDATE => {
                let increment = payload[..].try_into().map(u32::from_be_bytes);
                assert!(increment.is_ok_and(|increment| increment > 0));
            }
            other => panic!("a frame of kind {other}"),
        }
    }

    fn check_data(&mut self, stream: u32, payload: &[u8], flags: u8, granted: &Granted) {
        let length = payload.len() as u64;
        self.data += length;
        assert!(self.data <= granted.window(0), "window of the connection");
        let state = self.streams.entry(stream).or_default();
        state.data += length;
        assert!(state.data <= granted.window(stream), "window of a stream");
        assert!(
            state.has_head && !state.ended && !state.reset,
            "data outside of a response"
        );
        state.ended = flags & END_STREAM != 0;
        let is_own = |byte: &u8| byte.is_ascii() || *byte == mark(stream);
        assert!(payload.iter().all(is_own), "data of another response");
    }
}
