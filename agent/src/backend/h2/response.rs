//! Responses over HTTP/2.

use std::io;
use std::pin::pin;
use std::rc::Rc;

use futures_util::future::{Either, select};
use gw_shared::http::framing::{self, Framing};
use gw_shared::http::{Fields, InvalidBody, InvalidHead, Part};
use gw_shared::http2::stream::{self as streams, StreamError};
use gw_shared::net::Acknowledger;
use gw_shared::tunnel::response::InvalidResponse;
use h2::client::ResponseFuture;
use h2::{Reason, RecvStream};
use http::{Method, Response};

use super::ConnectionState;
use crate::backend::ResponseError;
use crate::backend::exchange::BackendHead;

const TRAILERS_OF_A_SWITCH: InvalidHead =
    InvalidHead::Malformed("trailers behind an extended CONNECT");

/// A response head that has not arrived. Counts at its connection until dropped.
pub(super) struct AwaitedHead {
    connection: Rc<ConnectionState>,
    /// The request can be repeated on another connection.
    may_move: bool,
}

impl Drop for AwaitedHead {
    fn drop(&mut self) {
        let awaited = &self.connection.awaited;
        awaited.set(awaited.get() - 1);
    }
}

impl AwaitedHead {
    pub(super) fn new(connection: &Rc<ConnectionState>, may_move: bool) -> Self {
        connection.awaited.set(connection.awaited.get() + 1);
        Self {
            connection: Rc::clone(connection),
            may_move,
        }
    }
}

/// The receiving half of an exchange over HTTP/2.
pub(crate) struct Http2Response {
    response: ResponseFuture,
    connection: Rc<ConnectionState>,
    /// `None` once the final head has arrived.
    awaited: Option<AwaitedHead>,
    body: Option<RecvStream>,
    is_done: bool,
    /// Bytes of another protocol follow, which has no trailers (RFC 9113 §8.5).
    is_switched: bool,
    /// Acknowledges the head while the first part of the body is awaited; `None` afterwards.
    acknowledger: Option<Rc<Acknowledger>>,
}

impl Http2Response {
    pub(super) fn new(
        response: ResponseFuture,
        awaited: AwaitedHead,
        acknowledger: Rc<Acknowledger>,
    ) -> Self {
        Self {
            response,
            connection: Rc::clone(&awaited.connection),
            awaited: Some(awaited),
            body: None,
            is_done: false,
            is_switched: false,
            acknowledger: Some(acknowledger),
        }
    }

    /// Reads the next head, interim (1xx) or final, of the response to a request with `method`.
    pub(in crate::backend) async fn head(
        &mut self,
        method: &Method,
    ) -> Result<BackendHead, ResponseError> {
        if let Some(interim) = self.interim().await? {
            let (parts, ()) = interim.into_parts();
            let headers = Fields::from(parts.headers);
            framing::check_values_of_http2(&headers)?;
            return Ok(BackendHead {
                status: parts.status,
                headers,
                framing: Framing::None,
                keep_alive: true,
            });
        }
        let (parts, body) = (&mut self.response)
            .await
            .map_err(ResponseError::of_http2)?
            .into_parts();
        self.awaited = None;
        self.connection.has_message.set(true);
        let headers = Fields::from(parts.headers);
        framing::check_values_of_http2(&headers)?;
        let announced =
            framing::content_length(&headers)?.map_or(Framing::Chunked, Framing::Length);
        let framing = match announced.of_response(parts.status, method) {
            // Bytes of the other protocol follow, whatever the fields announce (RFC 9110 §9.3.6).
            _ if *method == Method::CONNECT && parts.status.is_success() => Framing::UntilClose,
            framing => framing,
        };
        self.is_switched = framing == Framing::UntilClose;
        // Dropping the stream resets it if DATA follows a response without a body.
        self.is_done = matches!(framing, Framing::None | Framing::Described(_));
        self.body = Some(body);
        Ok(BackendHead {
            status: parts.status,
            headers,
            framing,
            keep_alive: true,
        })
    }

    /// Waits for an interim head. Returns `None` if the final one comes next.
    async fn interim(&mut self) -> Result<Option<Response<()>>, ResponseError> {
        let interim = pin!(std::future::poll_fn(|cx| self
            .response
            .poll_informational(cx)));
        let interim = match &self.awaited {
            Some(awaited) if awaited.may_move => {
                let unanswered = pin!(awaited.connection.unanswered.notified());
                match select(interim, unanswered).await {
                    Either::Left((interim, _)) => interim,
                    Either::Right(_) => return Err(ResponseError::Unanswered),
                }
            }
            _ => interim.await,
        };
        let interim = interim.transpose().map_err(ResponseError::of_http2)?;
        if let Some(awaited) = &mut self.awaited
            && interim.is_some()
        {
            awaited.may_move = false;
            self.connection.has_message.set(true);
        }
        Ok(interim)
    }

    pub(in crate::backend) fn is_done(&self) -> bool {
        self.is_done || self.body.as_ref().is_some_and(RecvStream::is_end_stream)
    }

    pub(in crate::backend) async fn part(&mut self) -> Result<Part, ResponseError> {
        let cut_short = || ResponseError::Reset(io::ErrorKind::ConnectionReset.into());
        let body = self.body.as_mut().ok_or_else(cut_short)?;
        let received = std::future::poll_fn(|cx| {
            let received = streams::poll_receive(body, cx);
            // Only once: the end of a message in a long stream is unknown.
            if let Some(acknowledger) = self.acknowledger.take()
                && received.is_pending()
            {
                acknowledger.acknowledge();
            }
            received
        })
        .await
        .map_err(|error| match error {
            StreamError::Closed => cut_short(),
            StreamError::TrailersTooLarge => InvalidBody::Trailers.into(),
        })?;
        if let Part::Trailers(trailers) = &received {
            if self.is_switched {
                return Err(TRAILERS_OF_A_SWITCH.into());
            }
            framing::check_values_of_http2(trailers)?;
        }
        self.connection.has_message.set(true);
        self.is_done |= !matches!(received, Part::Data(_));
        Ok(received)
    }

    /// Returns flow-control capacity for `bytes` of relayed data.
    pub(in crate::backend) fn release(&mut self, bytes: usize) {
        if let Some(body) = &mut self.body {
            streams::release(body, bytes);
        }
    }
}

impl ResponseError {
    fn of_http2(error: h2::Error) -> Self {
        if error.is_remote() && error.reason() == Some(Reason::HTTP_1_1_REQUIRED) {
            return Self::Http11Required;
        }
        // Both mean that the backend has not processed the request (RFC 9113 §6.8, §8.7): h2
        // reports GOAWAY only for such streams.
        let refused = error.is_reset() && error.reason() == Some(Reason::REFUSED_STREAM);
        if error.is_remote() && (refused || error.is_go_away()) {
            return Self::Unprocessed {
                reason: error.to_string(),
                ends_connection: error.is_go_away(),
            };
        }
        // The head is larger than SETTINGS announce.
        if error.is_library()
            && error.is_reset()
            && error.reason() == Some(Reason::ENHANCE_YOUR_CALM)
        {
            return InvalidResponse::HeadTooLarge.into();
        }
        if error.is_remote() || error.is_io() {
            let message = error.to_string();
            return Self::of_io(error.into_io().unwrap_or_else(|| io::Error::other(message)));
        }
        Self::Http2(error)
    }
}
