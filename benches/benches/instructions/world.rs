//! Gateway and agent with a tunnel in memory, on one thread.

use std::cell::{Cell, RefCell};
use std::io::{self, IoSlice};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use gw_agent::support::bench::CannedBackend;
use gw_data_plane::support::memory_worker::MemoryWorker;
use gw_shared::tunnel::transport::Transport;

/// Largest piece that arrives at once: a TLS record.
const RECORD: usize = 16 * 1024;

/// Services in the directory. Only one of them has a tunnel.
const SERVICES: usize = 1000;

/// Starts both ends of a tunnel on the reactor of the calling thread.
pub(crate) async fn start(backend: &CannedBackend) -> Rc<MemoryWorker> {
    let (gateway, agent) = MemoryStream::pair();
    gw_agent::support::bench::serve(agent, backend).unwrap();
    Rc::new(MemoryWorker::start(SERVICES, gateway).await.unwrap())
}

/// One end of a byte stream in memory.
struct MemoryStream {
    incoming: Rc<Direction>,
    outgoing: Rc<Direction>,
    /// Bytes that were written and not sent.
    written: RefCell<Vec<u8>>,
    /// Bytes that are being read. Kept for its capacity.
    reading: RefCell<Vec<u8>>,
}

/// Bytes under way from one end to the other.
#[derive(Default)]
struct Direction {
    bytes: RefCell<Vec<u8>>,
    reader: Cell<Option<Waker>>,
}

impl MemoryStream {
    fn pair() -> (Self, Self) {
        let directions = [Rc::<Direction>::default(), Rc::default()];
        let end = |incoming: &Rc<Direction>, outgoing: &Rc<Direction>| Self {
            incoming: Rc::clone(incoming),
            outgoing: Rc::clone(outgoing),
            written: RefCell::default(),
            reading: RefCell::default(),
        };
        (
            end(&directions[0], &directions[1]),
            end(&directions[1], &directions[0]),
        )
    }
}

impl Transport for MemoryStream {
    fn poll_plaintext(
        &self,
        cx: &mut Context<'_>,
        sink: &mut dyn FnMut(&[u8]),
    ) -> Poll<io::Result<usize>> {
        let mut reading = self.reading.borrow_mut();
        std::mem::swap(&mut *reading, &mut *self.incoming.bytes.borrow_mut());
        if reading.is_empty() {
            self.incoming.reader.set(Some(cx.waker().clone()));
            return Poll::Pending;
        }
        reading.chunks(RECORD).for_each(sink);
        let received = reading.len();
        reading.clear();
        Poll::Ready(Ok(received))
    }

    fn poll_write(&self, _: &mut Context<'_>, pieces: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let mut written = self.written.borrow_mut();
        let before = written.len();
        pieces
            .iter()
            .for_each(|piece| written.extend_from_slice(piece));
        Poll::Ready(Ok(written.len() - before))
    }

    fn poll_send(&self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut written = self.written.borrow_mut();
        if !written.is_empty() {
            self.outgoing.bytes.borrow_mut().append(&mut written);
            self.outgoing
                .reader
                .take()
                .into_iter()
                .for_each(Waker::wake);
        }
        Poll::Ready(Ok(()))
    }
}
