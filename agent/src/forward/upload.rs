//! Sends the body of a request to a backend, and keeps its beginning so that it can be sent again.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::Poll;

use bytes::Bytes;
use gw_shared::http::{Part, fields};
use gw_shared::tunnel::body::ReceivedBody;
use gw_shared::tunnel::frame::DATA_MAX;
use gw_shared::tunnel::head;
use gw_shared::tunnel::ledger::{Reserved, Share};

use crate::backend::RequestHalf;
use crate::telemetry::request_scope::RequestScope;

/// Bytes of a body that are kept. The gateway keeps as many.
const KEPT_MOST: usize = 64 * 1024;

/// Pieces below this size are copied. Larger ones share the buffer that they arrived in.
const SMALL: usize = 1024;

/// Memory of a copied piece beside its bytes.
const PIECE_OVERHEAD: usize = 128;

/// Progress of a request body.
#[derive(Default)]
pub(crate) struct RequestUpload {
    /// Part of the body has been read from the tunnel.
    is_consumed: Cell<bool>,
    /// Bytes that the current connection to the backend took.
    taken: Cell<u64>,
    /// Bytes for which the gateway has credit again.
    released: Cell<u64>,
    /// A backend has begun to respond.
    has_response: Cell<bool>,
    /// Whether the backend has switched protocols. `None` until it has answered. Bytes behind the
    /// content of the request wait for that, and are dropped if it has not.
    is_switched: Cell<Option<bool>>,
    kept: RefCell<Kept>,
}

/// The kept part of a body.
enum Kept {
    /// All of it that has been read from the tunnel.
    All(KeptBody),
    /// The body cannot be sent again: it was too long, there was no memory, or the response has
    /// begun.
    None,
}

impl Default for Kept {
    fn default() -> Self {
        Self::All(KeptBody::default())
    }
}

/// The beginning of a body.
#[derive(Default)]
struct KeptBody {
    parts: Vec<Part>,
    /// Bytes of data.
    length: usize,
    /// Charge for the data; `None` before the first. Trailers share the memory of the received
    /// head.
    memory: Option<Reserved>,
}

impl RequestUpload {
    /// Part of the body has been read from the tunnel.
    pub(super) fn is_consumed(&self) -> bool {
        self.is_consumed.get()
    }

    /// Bytes that the current connection to the backend took.
    pub(super) fn taken(&self) -> u64 {
        self.taken.get()
    }

    /// A backend begins to respond: the request is not sent again.
    pub(super) fn response_began(&self) {
        self.has_response.set(true);
        self.kept.replace(Kept::None);
    }

    pub(super) fn has_response(&self) -> bool {
        self.has_response.get()
    }

    /// Notes whether the backend has switched protocols.
    pub(super) fn decided(&self, is_switched: bool) {
        self.is_switched.set(Some(is_switched));
    }

    /// Whether the body can be sent from its beginning.
    pub(super) fn is_repeatable(&self) -> bool {
        matches!(*self.kept.borrow(), Kept::All(_))
    }

    /// The kept part at this position.
    fn kept(&self, at: usize) -> Option<Part> {
        match &*self.kept.borrow() {
            Kept::All(body) => body.parts.get(at).cloned(),
            Kept::None => None,
        }
    }

    /// Keeps a part that has been read from the tunnel, as long as there is room for all of the
    /// body.
    fn keep(&self, part: &Part, share: impl FnOnce() -> Rc<Share>) {
        let mut kept = self.kept.borrow_mut();
        if let Kept::All(body) = &mut *kept
            && !body.keep(part, share)
        {
            *kept = Kept::None;
        }
    }

    /// Returns the credit for the body up to this position, unless it was returned when these bytes
    /// were sent before.
    fn release(&self, body: &ReceivedBody, position: u64) {
        let bytes = position.saturating_sub(self.released.get());
        if bytes > 0 {
            self.released.set(position);
            body.release(usize::try_from(bytes).unwrap_or(usize::MAX));
        }
    }
}

impl KeptBody {
    /// Returns false if there is no room.
    fn keep(&mut self, part: &Part, share: impl FnOnce() -> Rc<Share>) -> bool {
        let kept = match part {
            Part::Data(data) => self.keep_data(data, share),
            Part::Trailers(_) | Part::End => Some(part.clone()),
        };
        let has_room = kept.is_some();
        self.parts.extend(kept);
        has_room
    }

    /// Charges data. `None` if there is no room.
    fn keep_data(&mut self, data: &Bytes, share: impl FnOnce() -> Rc<Share>) -> Option<Part> {
        self.length += data.len();
        let is_small = data.len() < SMALL;
        let memory = if is_small {
            data.len() + PIECE_OVERHEAD
        } else {
            // The buffer of a frame, all of which a piece may keep.
            data.len().max(DATA_MAX) + PIECE_OVERHEAD
        };
        let has_room = self.length <= KEPT_MOST
            && match &mut self.memory {
                Some(reserved) => reserved.grow(memory),
                None => {
                    self.memory = share().spare(memory);
                    self.memory.is_some()
                }
            };
        has_room.then(|| {
            Part::Data(if is_small {
                Bytes::copy_from_slice(data)
            } else {
                data.clone()
            })
        })
    }
}

/// How much of a request was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sent {
    Whole,
    /// The backend reads no more.
    Partly,
    /// The caller broke off an upgraded connection; the backend has the bytes before.
    BrokenOff,
}

/// The gateway reset the stream before the request was complete, or the body was not as announced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestReset;

/// Sends the request body until it ends or the backend stops reading. Begins with the kept bytes.
/// Bytes of another protocol follow once the backend has switched to it.
pub(crate) async fn send_body(
    request: &mut RequestHalf<'_>,
    body: &mut ReceivedBody,
    scope: &RequestScope,
    upload: &RequestUpload,
) -> Result<Sent, RequestReset> {
    let mut trailers = None;
    let mut position = 0;
    upload.taken.set(0);
    for number in 0.. {
        let part = match upload.kept(number) {
            Some(part) => part,
            None => match next_part(request, body, scope, upload).await? {
                Some(part) => part,
                None => return Ok(Sent::Partly),
            },
        };
        match part {
            Part::Data(data) => {
                position += data.len() as u64;
                let sent = request.data(data).await;
                upload.release(body, position);
                if sent.is_err() {
                    return Ok(Sent::Partly);
                }
                upload.taken.set(position);
            }
            Part::Trailers(fields) if fields.contains(&head::BROKEN_OFF) => {
                request.delivered().await;
                return Ok(Sent::BrokenOff);
            }
            Part::Trailers(fields) => trailers = Some(fields),
            Part::End => break,
        }
    }
    if upload.is_switched.get() == Some(true) {
        request.upgraded();
    }
    let finished = request
        .finish(trailers.map(fields::end_to_end_trailers))
        .await;
    Ok(if finished.is_ok() {
        Sent::Whole
    } else {
        Sent::Partly
    })
}

/// Reads the next part of the body from the tunnel; `None` if the backend reads no more.
async fn next_part(
    request: &mut RequestHalf<'_>,
    body: &mut ReceivedBody,
    scope: &RequestScope,
    upload: &RequestUpload,
) -> Result<Option<Part>, RequestReset> {
    let received = std::future::poll_fn(|cx| {
        // The response is awaited in the same task.
        let received = match upload.is_switched.get() {
            None if body.is_behind_content() => Poll::Pending,
            Some(false) if body.is_behind_content() => Poll::Ready(Ok(Part::End)),
            _ => body.poll_receive(cx),
        };
        match received {
            Poll::Ready(received) => Poll::Ready(Some(received)),
            Poll::Pending => request.poll_stopped(cx).map(|()| None),
        }
    });
    let Some(received) = received.await else {
        return Ok(None);
    };
    upload.is_consumed.set(true);
    let part = received.map_err(|_| RequestReset)?;
    if let Part::Data(data) = &part {
        scope.counts.sent(data.len());
    }
    if request.reports_unprocessed() {
        upload.keep(&part, || body.share());
    } else {
        upload.kept.replace(Kept::None);
    }
    Ok(Some(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_bytes_are_charged_until_the_response_begins() {
        let share = Share::alone(4 * DATA_MAX);
        let keep = |upload: &RequestUpload, bytes: usize| {
            let part = Part::Data(Bytes::from(vec![0; bytes]));
            upload.keep(&part, || Rc::clone(&share));
        };
        let upload = RequestUpload::default();
        keep(&upload, 10);
        assert_eq!(share.charged(), 10 + PIECE_OVERHEAD);
        // May share the buffer of a frame.
        keep(&upload, SMALL);
        assert_eq!(share.charged(), 10 + DATA_MAX + 2 * PIECE_OVERHEAD);
        upload.keep(&Part::End, || Rc::clone(&share));
        assert_eq!(upload.kept(2), Some(Part::End));
        upload.response_began();
        assert_eq!((share.charged(), upload.kept(0)), (0, None));

        // Half of the share is for what streams cannot do without.
        let upload = RequestUpload::default();
        keep(&upload, SMALL);
        assert!(upload.is_repeatable());
        keep(&upload, SMALL);
        assert!(!upload.is_repeatable() && share.charged() == 0);
    }

    #[test]
    fn no_more_than_64_kib_are_kept() {
        let share = Share::alone(1 << 30);
        let upload = RequestUpload::default();
        for (bytes, is_repeatable) in [(KEPT_MOST - 1, true), (1, true), (1, false)] {
            let part = Part::Data(Bytes::from(vec![0; bytes]));
            upload.keep(&part, || Rc::clone(&share));
            assert_eq!(upload.is_repeatable(), is_repeatable);
        }
        assert_eq!(share.charged(), 0);
    }
}
