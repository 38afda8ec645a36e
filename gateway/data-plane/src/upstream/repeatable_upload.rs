//! The body of a request that may be sent to several agents, one after the other.

use std::cell::RefCell;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use gw_shared::http::Fields;
use gw_shared::tunnel::connection::StreamSender;
use gw_shared::tunnel::endpoint;
use gw_shared::tunnel::head::write_trailers;

use crate::memory::relay::Reserved;
use crate::pipe::OtherEndGone;

/// The upload of a request and the stream of its current attempt. Two futures of one task share it:
/// one receives the body from the caller, the other one waits for the response and makes the
/// attempts. The task polls both each time.
pub(crate) struct RepeatableUpload(RefCell<UploadState>);

struct UploadState {
    stream: StreamSender,
    mode: UploadMode,
    /// When this direction of the stream has ended.
    ended: Option<Instant>,
    /// The stream takes no more.
    closed: bool,
    /// There will be no further attempt.
    settled: bool,
}

enum UploadMode {
    /// A short body is sent as it arrives, and a copy is kept for the next attempt.
    Kept(Copy),
    /// The body follows when the agent has accepted the request, or has switched protocols. None of
    /// it was received before.
    Withheld,
    /// The body goes to this stream only.
    Passing,
}

/// Copy of the received bytes of a short body.
struct Copy {
    data: BytesMut,
    /// Bytes of `data` that the stream has taken.
    sent: usize,
    /// Bytes behind them, if the stream can take them without another copy.
    next: Bytes,
    end: Option<BodyEnd>,
    /// Charge for `data`.
    _memory: Reserved,
}

/// End of a body, with its trailers.
type BodyEnd = Option<Fields>;

impl RepeatableUpload {
    /// A body of `length` bytes, of which a copy is kept. `memory` is the charge for it.
    pub(super) fn kept(stream: StreamSender, length: usize, memory: Reserved) -> Self {
        let data = BytesMut::with_capacity(length);
        Self::new(
            stream,
            UploadMode::Kept(Copy {
                data,
                sent: 0,
                next: Bytes::new(),
                end: None,
                _memory: memory,
            }),
        )
    }

    /// A body that follows after [`Self::pass`].
    pub(super) fn withheld(stream: StreamSender) -> Self {
        Self::new(stream, UploadMode::Withheld)
    }

    fn new(stream: StreamSender, mode: UploadMode) -> Self {
        Self(RefCell::new(UploadState {
            stream,
            mode,
            ended: None,
            closed: false,
            settled: false,
        }))
    }

    /// Whether another attempt can send the body from its beginning.
    pub(super) fn is_repeatable(&self) -> bool {
        !matches!(self.0.borrow().mode, UploadMode::Passing)
    }

    pub(super) fn is_withheld(&self) -> bool {
        matches!(self.0.borrow().mode, UploadMode::Withheld)
    }

    /// When the whole body was sent on the current stream, if it was.
    pub(super) fn ended(&self) -> Option<Instant> {
        self.0.borrow().ended
    }

    /// Sends a withheld body to the current stream from now on, which makes the attempt the last
    /// one.
    pub(super) fn pass(&self) {
        let mut state = self.0.borrow_mut();
        if matches!(state.mode, UploadMode::Withheld) {
            state.mode = UploadMode::Passing;
        }
    }

    /// Sends the body on the stream of another attempt. Resets the previous stream if it is open.
    pub(super) fn repeat_on(&self, stream: StreamSender) {
        let mut state = self.0.borrow_mut();
        state.stream = stream;
        (state.ended, state.closed) = (None, false);
        if let UploadMode::Kept(copy) = &mut state.mode {
            copy.sent = 0;
            copy.next = Bytes::new();
        }
    }

    /// There will be no further attempt: the rest of the body goes to the current stream, and no
    /// copy is kept.
    pub(super) fn settle(&self) {
        self.pass();
        let mut state = self.0.borrow_mut();
        state.settled = true;
        state.drop_sent_copy();
    }

    /// Sends data, and with `end` the end of the body, as fast as the agent reads. Fails once the
    /// stream is closed and there will be no further attempt.
    pub(super) async fn send(
        &self,
        mut data: Bytes,
        mut end: Option<BodyEnd>,
    ) -> Result<(), OtherEndGone> {
        let is_kept = self.0.borrow_mut().keep(&data, &end);
        std::future::poll_fn(|cx| {
            let state = &mut *self.0.borrow_mut();
            match &mut state.mode {
                // What was kept goes first.
                UploadMode::Kept(_) if is_kept => state.poll_kept(cx).map(Ok),
                UploadMode::Kept(_) | UploadMode::Withheld => Poll::Pending,
                UploadMode::Passing if is_kept => Poll::Ready(Ok(())),
                UploadMode::Passing => {
                    let is_end = end.is_some();
                    ready!(poll_send(&state.stream, cx, &mut data, &mut end))
                        .map_err(|_| OtherEndGone)?;
                    if is_end {
                        state.ended = Some(Instant::now());
                    }
                    Poll::Ready(Ok(()))
                }
            }
        })
        .await
    }

    /// Sends what is kept and was not sent on the current stream. Ready when there is nothing to
    /// send.
    pub(super) fn poll_kept(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.0.borrow_mut().poll_kept(cx)
    }

    /// Sum of the grants on the current stream.
    pub(super) fn granted(&self) -> u64 {
        self.0.borrow().stream.granted()
    }

    /// Resets the current stream.
    pub(super) fn abort(&self) {
        self.0.borrow().stream.reset();
    }
}

impl UploadState {
    /// Adds to the copy; returns false if none is kept.
    fn keep(&mut self, data: &Bytes, end: &Option<BodyEnd>) -> bool {
        let UploadMode::Kept(copy) = &mut self.mode else {
            return false;
        };
        copy.next = if copy.sent == copy.data.len() {
            data.clone()
        } else {
            Bytes::new()
        };
        copy.data.extend_from_slice(data);
        copy.end.clone_from(end);
        true
    }

    fn poll_kept(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let UploadMode::Kept(copy) = &mut self.mode else {
            return Poll::Ready(());
        };
        if self.closed {
            return Poll::Ready(());
        }
        if copy.next.is_empty() {
            copy.next = Bytes::copy_from_slice(&copy.data[copy.sent..]);
        }
        let mut end = if self.ended.is_some() {
            None
        } else {
            copy.end.clone()
        };
        let is_end = end.is_some();
        let before = copy.next.len();
        let polled = poll_send(&self.stream, cx, &mut copy.next, &mut end);
        copy.sent += before - copy.next.len();
        match ready!(polled) {
            Ok(()) if is_end => self.ended = Some(Instant::now()),
            Ok(()) => {}
            // The response says why, or another attempt sends the body again.
            Err(_) => self.closed = true,
        }
        self.drop_sent_copy();
        Poll::Ready(())
    }

    /// Drops the copy once no attempt needs it.
    fn drop_sent_copy(&mut self) {
        if let UploadMode::Kept(copy) = &self.mode
            && self.settled
            && (self.closed
                || copy.sent == copy.data.len() && (copy.end.is_none() || self.ended.is_some()))
        {
            self.mode = UploadMode::Passing;
        }
    }
}

/// Sends data and the end of the body. Removes from both what was sent.
fn poll_send(
    stream: &StreamSender,
    cx: &mut Context<'_>,
    data: &mut Bytes,
    end: &mut Option<BodyEnd>,
) -> Poll<Result<(), endpoint::Closed>> {
    let ends_here = matches!(end, Some(None));
    if !data.is_empty() || ends_here {
        ready!(stream.poll_send(cx, data, ends_here))?;
    }
    match end.take() {
        Some(Some(trailers)) => Poll::Ready(stream.finish_with_trailers(write_trailers(&trailers))),
        _ => Poll::Ready(Ok(())),
    }
}
