//! Guard against floods of HTTP/2 frames without content: PING, SETTINGS, PRIORITY, RST_STREAM,
//! empty DATA and the like (CVE-2019-9511 to 9518, CVE-2024-27316). The h2 crate bounds some of
//! them; this module counts all as they are read. It also ends connections whose header blocks are
//! too large.

use std::cell::{Cell, RefCell};
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use crate::connections::unfinished::UnfinishedHeads;
use crate::limits;
use gw_interface::rate_limit::Bucket;
use gw_shared::net::TlsStream;
use gw_shared::runtime;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;

const HEADER: usize = 9;

/// Kind of flood, as the label of its counter.
#[derive(Debug, PartialEq, Eq)]
struct Flood(&'static str);

/// Too many frames without content.
const FRAMES: Flood = Flood("frames");
/// A header block over [`limits::HTTP2_HEADER_LIST`], or one that takes longer than
/// [`limits::HEAD`].
const HEADER_LIST: Flood = Flood("headers");

/// Bytes of the connection preface (RFC 9113 §3.4).
const PREFACE: u32 = 24;

/// Follows the frames of one connection (RFC 9113 §4.1).
struct FrameMeter {
    /// The frame header being read.
    header: [u8; HEADER],
    /// Bytes of `header` received so far.
    filled: usize,
    /// Bytes of a payload, or of the preface, still to come.
    payload: u32,
    budget: Bucket,
    /// Window updates that the peer has earned by its requests and by the bytes sent to it.
    updates: u64,
    /// Header blocks that the caller may send before requests earn further ones.
    earned: u32,
    /// Weight of the frames of this turn: see [`limits::HTTP2_WEIGHT_PER_TURN`].
    weight: u32,
    /// The header block being read.
    block: Option<FieldBlock>,
    /// A header block has ended since [`Metered`] last cleared this.
    block_ended: bool,
}

struct FieldBlock {
    bytes: u32,
    /// The frame being read is the last one of the block.
    is_last: bool,
}

impl FrameMeter {
    fn new(now: Instant) -> Self {
        Self {
            header: [0; HEADER],
            filled: 0,
            payload: PREFACE,
            budget: Bucket::new(limits::HTTP2_CONTROL_FRAMES, now),
            updates: 0,
            earned: limits::HTTP2_HEADERS_AHEAD,
            weight: 0,
            block: None,
            block_ended: false,
        }
    }

    /// Counts the frames in `bytes` until the weight of this turn is used up. Returns the number of
    /// bytes consumed.
    fn received(&mut self, bytes: &[u8], now: impl Fn() -> Instant) -> Result<usize, Flood> {
        let all = bytes.len();
        let mut bytes = bytes;
        while !self.has_enough() {
            let skipped = bytes.len().min(self.payload as usize);
            bytes = &bytes[skipped..];
            self.payload -= skipped as u32;
            if self.payload == 0 && self.block.take_if(|block| block.is_last).is_some() {
                self.block_ended = true;
            }
            if bytes.is_empty() {
                break;
            }
            let taken = bytes.len().min(HEADER - self.filled);
            self.header[self.filled..self.filled + taken].copy_from_slice(&bytes[..taken]);
            self.filled += taken;
            bytes = &bytes[taken..];
            if self.filled == HEADER {
                self.filled = 0;
                let [a, b, c, kind, flags, ..] = self.header;
                self.payload = u32::from_be_bytes([0, a, b, c]);
                self.count(kind, flags, &now)?;
            }
        }
        Ok(all - bytes.len())
    }

    /// Whether the weight of this turn is used up.
    fn has_enough(&self) -> bool {
        self.weight >= limits::HTTP2_WEIGHT_PER_TURN
    }

    fn count(&mut self, kind: u8, flags: u8, now: &impl Fn() -> Instant) -> Result<(), Flood> {
        const DATA: u8 = 0;
        const HEADERS: u8 = 1;
        const WINDOW_UPDATE: u8 = 8;
        const CONTINUATION: u8 = 9;
        const END_STREAM: u8 = 1;
        const END_HEADERS: u8 = 4;
        if matches!(kind, HEADERS | CONTINUATION) {
            let before = self.block.as_ref().map_or(0, |block| block.bytes);
            let block = FieldBlock {
                bytes: before + self.payload,
                is_last: flags & END_HEADERS != 0,
            };
            if block.bytes > limits::HTTP2_HEADER_LIST {
                return Err(HEADER_LIST);
            }
            let has_ended = block.is_last && self.payload == 0;
            self.block_ended |= has_ended;
            self.block = (!has_ended).then_some(block);
        }
        self.weight += match kind {
            HEADERS => {
                limits::HTTP2_WEIGHT_OF_HEADERS
                    + self.payload / limits::HTTP2_HEADER_BYTES_OF_WEIGHT
            }
            CONTINUATION => 1 + self.payload / limits::HTTP2_HEADER_BYTES_OF_WEIGHT,
            _ => 1,
        };
        match kind {
            // Bounded by flow control.
            DATA if self.payload > 0 => return Ok(()),
            DATA if flags & END_STREAM != 0 => return Ok(()),
            HEADERS if self.earned > 0 => {
                self.earned -= 1;
                return Ok(());
            }
            WINDOW_UPDATE if self.updates > 0 => {
                self.updates -= 1;
                return Ok(());
            }
            _ => {}
        }
        self.budget.take(now()).map_err(|_| FRAMES)
    }

    /// Counts a header block that has become a request. A request can have two: head and trailers.
    /// Callers of gRPC send two updates for each response, however small.
    fn became_request(&mut self) {
        self.earned = (self.earned + 2).min(limits::HTTP2_HEADERS_AHEAD);
        self.earn_updates(2);
    }

    fn sent(&mut self, bytes: usize) {
        self.earn_updates((bytes as u64).div_ceil(64));
    }

    fn earn_updates(&mut self, updates: u64) {
        self.updates = (self.updates + updates).min(limits::HTTP2_WINDOW_UPDATES);
    }
}

/// State shared by the reader and the server of a connection.
pub(crate) struct Meter {
    frames: RefCell<FrameMeter>,
    /// Kind of flood that the peer has sent.
    abuse: Cell<Option<&'static str>>,
    /// The last write is pending: it is under way, or the socket buffer is full.
    blocked: Cell<bool>,
    /// Notified when the connection takes bytes again, and when it has ended.
    passed: Notify,
    is_gone: Cell<bool>,
    unfinished: UnfinishedHeads,
}

impl Meter {
    pub(crate) fn new(now: Instant, unfinished: UnfinishedHeads) -> Self {
        Self {
            frames: RefCell::new(FrameMeter::new(now)),
            abuse: Cell::default(),
            blocked: Cell::default(),
            passed: Notify::new(),
            is_gone: Cell::default(),
            unfinished,
        }
    }

    /// Kind of flood that the peer has sent. Its connection has to be ended.
    pub(crate) fn abuse(&self) -> Option<&'static str> {
        self.abuse.get()
    }

    /// Notes whether a write, or a flush, is pending.
    fn wrote(&self, is_pending: bool) {
        if self.blocked.replace(is_pending) && !is_pending {
            self.passed.notify_waiters();
        }
    }

    /// Waits while h2 may hold frames back because a write is pending. It takes no new ones then.
    pub(crate) async fn until_not_blocked(&self) {
        while self.blocked.get() && !self.is_gone.get() {
            self.passed.notified().await;
        }
    }

    /// Records a flood and wakes the task of the connection, which is being polled, to end it.
    fn end_for(&self, Flood(abuse): Flood, cx: &Context<'_>) {
        self.abuse.set(Some(abuse));
        cx.waker().wake_by_ref();
    }

    /// Counts a header block that has become a request.
    pub(crate) fn became_request(&self) {
        self.frames.borrow_mut().became_request();
    }
}

/// The byte stream below an HTTP/2 connection: TLS, or memory in fuzz targets.
pub(crate) trait CallerStream: AsyncRead + AsyncWrite + Unpin + 'static {
    /// Puts bytes back; the next read returns them first.
    fn unread(&self, bytes: &[u8]);
}

impl CallerStream for TlsStream {
    fn unread(&self, bytes: &[u8]) {
        self.unread(bytes);
    }
}

/// A connection that counts frames as h2 reads them. Limits the frames of a turn, and stops reading
/// at a flood.
pub(crate) struct Metered<S> {
    stream: S,
    meter: Rc<Meter>,
    /// Yield to other tasks; reading continues when it resolves.
    pause: Option<Pin<Box<dyn Future<Output = ()>>>>,
    /// Deadline of the header block being read. Set when a block is incomplete and no more bytes
    /// are available.
    head_due: Option<Pin<Box<dyn Future<Output = ()>>>>,
}

impl<S> Metered<S> {
    pub(crate) fn new(stream: S, meter: Rc<Meter>) -> Self {
        Self {
            stream,
            meter,
            pause: None,
            head_due: None,
        }
    }
}

impl<S> Drop for Metered<S> {
    fn drop(&mut self) {
        self.meter.is_gone.set(true);
        self.meter.passed.notify_waiters();
    }
}

impl<S: CallerStream> AsyncRead for Metered<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.meter.abuse().is_some() {
            return Poll::Pending;
        }
        let mut meter = this.meter.frames.borrow_mut();
        if meter.has_enough() {
            let pause = this
                .pause
                .get_or_insert_with(|| Box::pin(runtime::yield_now()));
            ready!(pause.as_mut().poll(cx));
            this.pause = None;
            meter.weight = 0;
        }
        let filled = buffer.filled().len();
        if AsyncRead::poll_read(Pin::new(&mut this.stream), cx, buffer)?.is_pending() {
            // Later bytes arrive in another turn.
            meter.weight = 0;
            if meter.block.is_some() {
                let due = this.head_due.get_or_insert_with(|| {
                    let counted = this.meter.unfinished.begin_block();
                    Box::pin(async move {
                        runtime::sleep(limits::HEAD).await;
                        drop(counted);
                    })
                });
                ready!(due.as_mut().poll(cx));
                this.meter.end_for(HEADER_LIST, cx);
            }
            return Poll::Pending;
        }
        let read = &buffer.filled()[filled..];
        let received = meter.received(read, Instant::now);
        if std::mem::take(&mut meter.block_ended) {
            // The next block, which may begin in the same read, gets its own deadline.
            this.head_due = None;
        }
        match received {
            Ok(taken) => {
                if taken < read.len() {
                    this.stream.unread(&read[taken..]);
                    buffer.set_filled(filled + taken);
                }
                Poll::Ready(Ok(()))
            }
            Err(flood) => {
                // Discards the bytes just read.
                buffer.set_filled(filled);
                this.meter.end_for(flood, cx);
                Poll::Pending
            }
        }
    }
}

impl<S: CallerStream> AsyncWrite for Metered<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let sent = Pin::new(&mut this.stream).poll_write_vectored(cx, pieces);
        this.meter.wrote(sent.is_pending());
        let sent = ready!(sent)?;
        this.meter.frames.borrow_mut().sent(sent);
        Poll::Ready(Ok(sent))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let flushed = Pin::new(&mut this.stream).poll_flush(cx);
        this.meter.wrote(flushed.is_pending());
        flushed
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PING: u8 = 6;

    fn frame(kind: u8, flags: u8, payload: usize) -> Vec<u8> {
        let length = (payload as u32).to_be_bytes();
        let mut frame = vec![length[1], length[2], length[3], kind, flags, 0, 0, 0, 1];
        frame.resize(HEADER + payload, 0xff);
        frame
    }

    /// Number of copies of `frame`, at most `most`, that are accepted at one instant in pieces of
    /// `step` bytes.
    fn taken(meter: &mut FrameMeter, now: Instant, frame: &[u8], most: u32, step: usize) -> u32 {
        let mut whole = |mut piece: &[u8]| {
            while !piece.is_empty() {
                // The next turn.
                meter.weight = 0;
                let Ok(taken) = meter.received(piece, || now) else {
                    return false;
                };
                piece = &piece[taken..];
            }
            true
        };
        (0..most)
            .take_while(|_| frame.chunks(step).all(&mut whole))
            .count() as u32
    }

    fn begun(now: Instant) -> FrameMeter {
        let mut meter = FrameMeter::new(now);
        meter
            .received(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", || now)
            .unwrap();
        meter
    }

    #[test]
    fn frames_without_content_have_a_budget_however_they_are_split() {
        let now = Instant::now();
        let burst = limits::HTTP2_CONTROL_FRAMES.burst();
        for kind in [2, 3, 4, PING, 7, 9, 0xbe] {
            for step in [1, 5, 9, 100] {
                assert_eq!(
                    taken(&mut begun(now), now, &frame(kind, 0, 8), burst + 10, step),
                    burst,
                    "{kind}"
                );
            }
        }
        assert_eq!(
            taken(&mut begun(now), now, &frame(0, 0, 0), burst + 10, 9),
            burst
        );
    }

    #[test]
    fn frames_with_content_are_not_budgeted() {
        let now = Instant::now();
        for frame in [frame(0, 0, 1), frame(0, 1, 0)] {
            assert_eq!(taken(&mut begun(now), now, &frame, 100_000, 7), 100_000);
        }
    }

    #[test]
    fn header_blocks_are_free_if_they_become_requests() {
        let now = Instant::now();
        let burst = limits::HTTP2_CONTROL_FRAMES.burst();
        let ahead = limits::HTTP2_HEADERS_AHEAD;
        let request = frame(1, 4, 20);
        let trailers = frame(1, 5, 20);
        assert_eq!(
            taken(&mut begun(now), now, &request, 100_000, 7),
            ahead + burst
        );
        let mut meter = begun(now);
        for _ in 0..100_000 {
            assert_eq!(taken(&mut meter, now, &request, 1, 7), 1);
            meter.became_request();
            assert_eq!(taken(&mut meter, now, &trailers, 1, 7), 1);
        }
        assert_eq!(
            taken(&mut meter, now, &request, 100_000, 7),
            ahead - 1 + burst
        );
    }

    #[test]
    fn a_turn_is_bounded_by_weight() {
        let now = Instant::now();
        let all = limits::HTTP2_WEIGHT_PER_TURN as usize;
        let tiny = frame(0, 0, 1);
        let head = frame(1, 4, 15_000);
        let mut meter = begun(now);
        let many = tiny.repeat(10_000);
        // Up to the header of the last frame. Its payload is left to the next turn.
        assert_eq!(meter.received(&many, || now), Ok(all * tiny.len() - 1));
        assert_eq!(meter.received(&many, || now), Ok(0));
        let mut meter = begun(now);
        assert!(meter.received(&head.repeat(10), || now).unwrap() < 2 * head.len());
        // Large DATA frames weigh 1: their bytes are bounded elsewhere.
        let mut meter = begun(now);
        let large = frame(0, 0, 16_384).repeat(50);
        assert_eq!(meter.received(&large, || now), Ok(large.len()));
    }

    #[test]
    fn header_blocks_are_bounded_however_they_are_split() {
        let now = Instant::now();
        let most = limits::HTTP2_HEADER_LIST as usize;
        let head = |payload| frame(1, 0, payload);
        let last = frame(9, 4, 16_384);
        let rest = frame(9, 0, 16_384);
        let frames = most / 16_384;
        for (first, taken_frames) in [(16_384, frames - 1), (16_383, frames - 1), (1, frames - 1)] {
            let mut meter = begun(now);
            assert_eq!(taken(&mut meter, now, &head(first), 1, 1000), 1);
            assert!(meter.block.is_some());
            assert_eq!(
                taken(&mut meter, now, &rest, 100, 1000),
                taken_frames as u32
            );
        }
        // Resets the count for the next header block.
        let mut meter = begun(now);
        for _ in 0..100 {
            assert_eq!(taken(&mut meter, now, &head(16_384), 1, 1000), 1);
            assert_eq!(taken(&mut meter, now, &last, 1, 1000), 1);
            assert!(meter.block.is_none());
        }
        assert_eq!(taken(&mut meter, now, &frame(1, 4, 0), 1, 9), 1);
        assert!(meter.block.is_none());
    }

    #[test]
    fn the_end_of_a_header_block_is_recorded_when_the_next_one_begins() {
        let now = Instant::now();
        for last in [frame(9, 4, 8), frame(9, 4, 0)] {
            let mut meter = begun(now);
            let first = frame(1, 0, 8);
            assert_eq!(meter.received(&first, || now), Ok(first.len()));
            assert!(meter.block.is_some() && !meter.block_ended);
            let both = [last, frame(1, 0, 8)].concat();
            assert_eq!(meter.received(&both, || now), Ok(both.len()));
            assert!(meter.block.is_some() && meter.block_ended);
        }
    }

    #[test]
    fn sent_bytes_earn_window_updates() {
        let now = Instant::now();
        let burst = limits::HTTP2_CONTROL_FRAMES.burst();
        let mut meter = begun(now);
        meter.sent(10 * 64);
        assert_eq!(
            taken(&mut meter, now, &frame(8, 0, 4), burst + 100, 13),
            burst + 10
        );
    }

    #[test]
    fn each_request_earns_window_updates_for_its_stream_and_the_connection() {
        let now = Instant::now();
        let burst = limits::HTTP2_CONTROL_FRAMES.burst();
        let mut meter = begun(now);
        for _ in 0..10_000 {
            assert_eq!(taken(&mut meter, now, &frame(1, 4, 20), 1, 29), 1);
            meter.became_request();
            assert_eq!(taken(&mut meter, now, &frame(8, 0, 4), 2, 13), 2);
        }
        assert_eq!(
            taken(&mut meter, now, &frame(8, 0, 4), burst + 10, 13),
            burst
        );
    }

    #[test]
    fn the_budget_refills() {
        let now = Instant::now();
        let burst = limits::HTTP2_CONTROL_FRAMES.burst();
        let mut meter = begun(now);
        assert_eq!(
            taken(&mut meter, now, &frame(PING, 0, 8), burst + 1, 17),
            burst
        );
        let minute = std::time::Duration::from_secs(60);
        assert!(taken(&mut meter, now + minute, &frame(PING, 0, 8), burst, 17) == burst);
    }
}
