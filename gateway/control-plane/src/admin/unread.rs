//! Large responses to clients that have not authenticated. Few are kept for clients that do not
//! read them.

use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use crate::limits;
use axum::BoxError;
use axum::body::{Body, HttpBody};
use bytes::{Buf, Bytes};
use gw_interface::rate_limit::{Claimant, Places};
use hyper::body::{Frame, SizeHint};

/// Bytes that are handed to a connection at once.
const PIECE: usize = 16 * 1024;

/// The responses on their way. Each is emptied when it has to give way.
#[derive(Clone)]
pub(super) struct Unread(Arc<Mutex<Places<Arc<Mutex<Bytes>>>>>);

impl Default for Unread {
    fn default() -> Self {
        let places = Places::new(limits::ADMIN_UNREAD, limits::ADMIN_UNREAD_PER_ADDRESS);
        Self(Arc::new(Mutex::new(places)))
    }
}

/// The body of such a response.
struct UnreadBody {
    unread: Unread,
    place: u64,
    rest: Arc<Mutex<Bytes>>,
    /// Bytes that the client has yet to get.
    left: usize,
}

impl Unread {
    /// A response body with this content, for a client at `address`.
    pub(super) fn body(&self, address: IpAddr, content: Bytes) -> Body {
        let left = content.len();
        let rest = Arc::new(Mutex::new(content));
        let (place, older) =
            lock(&self.0).take(Claimant::Address(address.into()), Arc::clone(&rest));
        if let Some(older) = older {
            *lock(&older) = Bytes::new();
        }
        Body::new(UnreadBody {
            unread: self.clone(),
            place,
            rest,
            left,
        })
    }
}

impl HttpBody for UnreadBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        let piece = {
            let mut rest = lock(&self.rest);
            // A copy: a part of the content would keep all of it.
            let piece = Bytes::copy_from_slice(&rest[..rest.len().min(PIECE)]);
            rest.advance(piece.len());
            piece
        };
        if piece.is_empty() {
            return Poll::Ready(Some(Err("the response gave way to a later one".into())));
        }
        self.left -= piece.len();
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left as u64)
    }
}

impl Drop for UnreadBody {
    fn drop(&mut self) {
        lock(&self.unread.0).free(self.place);
    }
}

/// Consistent even after a panic.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;

    use super::*;

    #[tokio::test]
    async fn a_response_is_sent_whole_unless_later_ones_take_its_place() {
        let unread = Unread::default();
        let content = Bytes::from(
            (0..100_000_u32)
                .map(|at| (at % 251) as u8)
                .collect::<Vec<_>>(),
        );
        let body = |last: u8| unread.body(IpAddr::from([192, 0, 2, last]), content.clone());
        for _ in 0..2 * limits::ADMIN_UNREAD {
            assert_eq!(to_bytes(body(1), usize::MAX).await.unwrap(), content);
        }
        let held: Vec<Body> = (0..=limits::ADMIN_UNREAD_PER_ADDRESS)
            .map(|_| body(1))
            .collect();
        let other = body(2);
        let mut whole = Vec::new();
        for body in held {
            whole.push(to_bytes(body, usize::MAX).await.is_ok());
        }
        assert_eq!(
            (whole[0], whole[1..].iter().all(|whole| *whole)),
            (false, true)
        );
        assert_eq!(to_bytes(other, usize::MAX).await.unwrap(), content);
    }
}
