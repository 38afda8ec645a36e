//! A relayed request on its way to the agent: opens it on the tunnel of its service, carries its
//! body up and its response down.
//!
//! On the worker that owns the service, both are a stream of the tunnel (`local`). On another
//! worker they are pipes to a task of the owner, which opens the stream there (`cross_core`). On
//! another node they are a stream of a link to the owner (`cross_node`). Callers of this module see
//! a difference only before the request is opened.
//!
//! A request that waits for a tunnel has touched none. If its service moves meanwhile to another
//! node, or another process takes over, the task that waits sends the request on, or the node of
//! the caller does.

mod attempts;
mod cross_core;
pub(crate) mod cross_node;
mod frame;
mod local;
mod max_forwards;
mod repeatable_upload;
mod response;
mod successor_links;
mod turn;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker, ready};
use std::time::Instant;

use bytes::Bytes;
use gw_base::error::Error;
use gw_base::mailbox::Post;
use gw_interface::auth::Authenticated;
use gw_interface::rate_limit::Buckets;
use gw_region::owners::ownership::WorkerId;
use gw_shared::http::{Fields, Part};
use gw_shared::tunnel::body::ReceivedBody;
use gw_shared::tunnel::connection::StreamSender;
use gw_shared::tunnel::head::{OutboundRequest, write_trailers};
use gw_store::Directory;
use gw_telemetry::counters::Counters;

use self::attempts::AttemptsFailed;
pub(crate) use self::cross_core::CrossCoreRequest;
use self::cross_node::{CrossNodeRequest, Nodes};
pub(crate) use self::frame::{Frame, HeadResult};
use self::repeatable_upload::RepeatableUpload;
pub(crate) use self::response::Final;
use self::response::{Carrier, StreamResponse};
use self::successor_links::SuccessorLinks;
pub(crate) use self::turn::NotHere;
use crate::caller_session::CallerSessions;
use crate::current::Current;
use crate::http_message::{OpenedStream, Progress, RelayedHead, size_of_fields};
use crate::lifecycle::Lifecycle;
use crate::limits;
use crate::memory::relay::{Reserved, at_account_limit};
use crate::pipe::{self, OtherEndGone};
use crate::tunnel::Tunnels;

/// Opens the relayed requests of one worker.
pub(crate) struct Upstream {
    pub(crate) worker: WorkerId,
    pub(crate) buckets: Rc<RefCell<Buckets>>,
    pub(crate) tunnels: Rc<Tunnels>,
    pub(crate) counters: Rc<Counters>,
    /// Requests that this worker opens for callers of other workers.
    pub(crate) cross_core_served: Cell<usize>,
    /// Requests that this worker serves for other nodes, and for the process that this one has
    /// replaced.
    pub(crate) link_requests_served: Cell<usize>,
    /// Mailboxes of all workers.
    pub(crate) mailboxes: Arc<dyn Post<Box<CrossCoreRequest>>>,
    pub(crate) wakes: Arc<dyn Post<pipe::Wake>>,
    /// `None` if this gateway is the only node of its region.
    pub(crate) nodes: Option<Rc<Nodes>>,
    pub(crate) directory: Rc<Current<Directory>>,
    pub(crate) lifecycle: Rc<Lifecycle>,
    pub(crate) caller_sessions: CallerSessions,
    /// Links to the process that has taken over from this one.
    pub(crate) successor: Rc<SuccessorLinks>,
}

/// A request after it was opened.
pub(crate) enum Opening {
    Opened(UpstreamRequest),
    /// Another node may own the service, or another process has taken over: the request has yet to
    /// be sent there.
    OnNode(Box<CrossNodeRequest>),
}

/// Properties of the sender of a request. The default is a caller of this process.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Origin {
    /// Another node: it sends the request on if the service moves.
    pub(crate) sends_on: bool,
    /// Another process: it sends the body once the request is open on a tunnel.
    pub(crate) awaits_acceptance: bool,
    /// Another node: it has sent the whole body with the head.
    pub(crate) is_whole: bool,
    /// Another node that does not reach the owner: this one passes the request on, and no other one
    /// does.
    pub(crate) is_passed_on: bool,
    /// An attempt before this one was lost with another node.
    pub(crate) was_lost: bool,
}

impl Origin {
    /// The error that the caller gets. The one of a lost attempt says more than that there is no
    /// agent for another attempt.
    pub(crate) fn error(self, error: Error) -> Error {
        match error {
            Error::AgentUnavailable if self.was_lost => Error::NodeLost,
            error => error,
        }
    }
}

impl Upstream {
    /// Admits a request by the bucket of its service and opens it on a tunnel, on the node and the
    /// worker that own the service.
    pub(crate) fn open(
        self: &Rc<Self>,
        request: Authenticated,
        outbound: OutboundRequest,
        origin: Origin,
    ) -> Result<Opening, Error> {
        if let Some(nodes) = &self.nodes
            && !nodes
                .peering
                .admits(&request.service.hostname, Instant::now())
        {
            return Ok(self.elsewhere(request, outbound, origin));
        }
        self.open_here(request, outbound, origin)
            .map(Opening::Opened)
    }

    /// A request that another node or another process serves.
    pub(crate) fn elsewhere(
        self: &Rc<Self>,
        request: Authenticated,
        outbound: OutboundRequest,
        origin: Origin,
    ) -> Opening {
        Opening::OnNode(Box::new(CrossNodeRequest {
            upstream: Rc::clone(self),
            nodes: self.nodes.clone(),
            request,
            outbound,
            origin,
        }))
    }

    /// As [`Self::open`], for a service that this node owns.
    pub(crate) fn open_here(
        &self,
        request: Authenticated,
        outbound: OutboundRequest,
        origin: Origin,
    ) -> Result<UpstreamRequest, Error> {
        let now = Instant::now();
        // While another process has the buckets, admission has to wait: it is left to a task, as
        // for another worker. So it is while the agents of a service connect.
        if request.service.owner != self.worker
            || !self.buckets.borrow().are_here()
            || self.wait_until(&request, now).is_some()
        {
            return self.send_to_owner(request, outbound, origin);
        }
        let admitted = self.buckets.borrow_mut().charge(request, now)?;
        self.open_on_tunnel(admitted, outbound, origin)
    }
}

/// An opened request.
pub(crate) struct UpstreamRequest {
    pub(crate) upload: Upload,
    pub(crate) response: PendingResponse,
}

/// Destination of a request body.
pub(crate) enum Upload {
    Stream(StreamSender),
    /// To the agent of the current attempt.
    Repeatable(Rc<RepeatableUpload>),
    /// The whole body was given to the upload already.
    Complete(Rc<RepeatableUpload>),
    CrossCore(pipe::Sender<Part>),
    /// The request has no body; its stream ended with its head.
    None,
}

/// Source of a response.
pub(crate) enum PendingResponse {
    Stream(StreamResponse),
    CrossCore {
        pipe: pipe::Receiver<Frame>,
        opened: Arc<OnceLock<OpenedStream>>,
        /// The request has a body: the report of its upload follows the response.
        has_upload: bool,
        /// The final head, once received.
        head: Option<Box<HeadResult>>,
        /// Charge for the pipes of the request.
        memory: Reserved,
    },
    /// No stream was opened, after these attempts. Boxed because it is rare.
    NotOpened(Box<AttemptsFailed>),
}

impl UpstreamRequest {
    /// A request that was opened on no tunnel, and whose record names the attempts.
    fn not_opened(failed: AttemptsFailed) -> Self {
        Self {
            upload: Upload::None,
            response: PendingResponse::NotOpened(Box::new(failed)),
        }
    }

    /// Whether the request is open on a tunnel of this worker.
    pub(crate) fn is_opened(&self) -> bool {
        matches!(self.response, PendingResponse::Stream(_))
    }
}

/// A response body.
pub(crate) struct Download {
    source: BodySource,
    /// Part that was received with the head.
    first: Option<Part>,
    /// Bytes that were passed on and not released.
    unreleased: usize,
}

/// Source of a response body.
enum BodySource {
    Stream {
        body: ReceivedBody,
        has_body: bool,
        carrier: Carrier,
    },
    CrossCore {
        pipe: pipe::Receiver<Frame>,
        has_upload: bool,
        /// Charges the pipes until dropped.
        _memory: Reserved,
    },
}

impl Upload {
    /// The upload on a stream, if the request has a body.
    fn on(stream: StreamSender, request: &OutboundRequest) -> Self {
        if request.has_body() {
            Self::Stream(stream)
        } else {
            Self::None
        }
    }

    /// Sends data as fast as the agent reads it; with `last`, ends the body.
    pub(crate) async fn send(&self, data: Bytes, last: bool) -> Result<(), OtherEndGone> {
        match self {
            Self::Stream(stream) => stream.send(data, last).await.map_err(|_| OtherEndGone),
            Self::Repeatable(upload) => upload.send(data, last.then_some(None)).await,
            Self::CrossCore(pipe) => {
                pipe.send(Part::Data(data)).await?;
                if last {
                    pipe.send(Part::End).await
                } else {
                    Ok(())
                }
            }
            Self::Complete(_) | Self::None => Err(OtherEndGone),
        }
    }

    pub(crate) async fn finish(&self, trailers: Option<Fields>) -> Result<(), OtherEndGone> {
        match self {
            Self::Stream(stream) => {
                let finished = match trailers {
                    Some(trailers) => stream.finish_with_trailers(write_trailers(&trailers)),
                    None => stream.finish(),
                };
                finished.map_err(|_| OtherEndGone)
            }
            Self::Repeatable(upload) => upload.send(Bytes::new(), Some(trailers)).await,
            Self::CrossCore(pipe) => pipe.send(trailers.map_or(Part::End, Part::Trailers)).await,
            Self::Complete(_) | Self::None => Ok(()),
        }
    }

    /// The upload after its whole body was sent.
    fn complete(self) -> Self {
        if let Self::Repeatable(upload) = self {
            Self::Complete(upload)
        } else {
            Self::None
        }
    }

    /// Ends the request without a body, because the backend declined the upgrade.
    pub(crate) async fn without_body(self) -> Self {
        // If the other end reads no more, the response says why.
        let _ = self.finish(None).await;
        Self::None
    }

    /// Sends the kept copy of the body on the stream of each later attempt. Never ready.
    pub(crate) async fn repeat(&self) {
        std::future::poll_fn(|cx| {
            if let Self::Repeatable(upload) | Self::Complete(upload) = self {
                let _ = upload.poll_kept(cx);
            }
            Poll::<()>::Pending
        })
        .await;
    }

    /// A number that changes whenever the next hop has taken further bytes of the upload.
    pub(crate) fn progress(&self) -> u64 {
        match self {
            Self::Stream(stream) => stream.granted(),
            Self::Repeatable(upload) | Self::Complete(upload) => upload.granted(),
            Self::CrossCore(pipe) => pipe.in_flight() as u64,
            Self::None => 0,
        }
    }

    /// Resets the stream, so that the backend does not take an incomplete body for a complete one.
    pub(crate) fn abort(self) {
        match self {
            Self::Stream(stream) => stream.reset(),
            Self::Repeatable(upload) | Self::Complete(upload) => upload.abort(),
            // Dropping a pipe without an end has the same effect.
            Self::CrossCore(_) | Self::None => {}
        }
    }
}

impl PendingResponse {
    /// The next interim response (1xx); `None` once [`Self::head`] is ready. Without a time limit:
    /// the backend decides how long a request takes.
    pub(crate) async fn interim(&mut self) -> Option<RelayedHead> {
        match self {
            Self::Stream(response) => response.interim().await,
            Self::CrossCore { pipe, head, .. } => match pipe.receive().await {
                Ok(Frame::Head(received)) => match *received {
                    HeadResult {
                        head: Ok(interim), ..
                    } if interim.status.is_informational() => Some(interim),
                    last => {
                        *head = Some(Box::new(last));
                        None
                    }
                },
                Ok(_) | Err(OtherEndGone) => None,
            },
            Self::NotOpened(_) => None,
        }
    }

    /// Whether the request was sent with `Upgrade`, if it has one.
    pub(crate) fn may_switch(&self) -> bool {
        match self {
            Self::Stream(response) => response.may_switch(),
            Self::CrossCore { .. } | Self::NotOpened(_) => true,
        }
    }

    /// Progress of the request, as far as this worker knows it.
    pub(crate) fn progress(&self) -> Progress {
        match self {
            Self::Stream(response) => response.progress(),
            Self::CrossCore { opened, .. } => Progress {
                stream_at_owner: Some(Arc::clone(opened)),
                ..Progress::default()
            },
            Self::NotOpened(not_opened) => Progress {
                failed_attempts: not_opened.failed.clone().into(),
                ..Progress::default()
            },
        }
    }

    /// The final head, or another attempt; call it after the last interim response. A response that
    /// is already known to be broken behind its head is an error: nothing of it was passed on.
    pub(crate) fn head(self) -> Final {
        let (pipe, has_upload, received, mut memory) = match self {
            Self::Stream(response) => return response.head(),
            Self::NotOpened(not_opened) => {
                let AttemptsFailed { error, failed } = *not_opened;
                let progress = Progress {
                    failed_attempts: failed.into(),
                    ..Progress::default()
                };
                return Final::Answer(progress, Err(error));
            }
            Self::CrossCore { head: None, .. } => {
                return Final::Answer(self.progress(), Err(Error::TunnelLost));
            }
            Self::CrossCore {
                pipe,
                has_upload,
                head: Some(received),
                memory,
                ..
            } => (pipe, has_upload, received, memory),
        };
        let HeadResult { progress, head } = *received;
        let begun = match head {
            Ok(head) => {
                let beyond = size_of_fields(&head.headers).saturating_sub(limits::PIPE_MEMORY);
                if !memory.grow_with_reserve(beyond) {
                    return Final::Answer(progress, Err(at_account_limit()));
                }
                let mut download = Download::new(BodySource::CrossCore {
                    pipe,
                    has_upload,
                    _memory: memory,
                });
                download.begin().map(|()| (head, download))
            }
            Err(error) => Err(error),
        };
        Final::Answer(progress, begun)
    }
}

impl Download {
    fn new(source: BodySource) -> Self {
        Self {
            source,
            first: None,
            unreleased: 0,
        }
    }

    /// Takes the first part if it was received; fails if the body is already broken.
    fn begin(&mut self) -> Result<(), Error> {
        // Needs no waker: the body is polled again before the task waits for it.
        if let Poll::Ready(first) = self.poll_part(&mut Context::from_waker(Waker::noop())) {
            self.first = Some(first?);
        }
        Ok(())
    }

    /// The next part of the body. Fails if the body was cut short.
    pub(crate) fn poll_part(&mut self, cx: &mut Context<'_>) -> Poll<Result<Part, Error>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Ok(first));
        }
        match &mut self.source {
            // The stream stays charged until the caller has the head. Dropping it resets it and
            // discards data of the agent.
            BodySource::Stream {
                has_body: false, ..
            } => Poll::Ready(Ok(Part::End)),
            BodySource::Stream { body, .. } => response::poll_part(body, cx),
            BodySource::CrossCore { pipe, .. } => {
                Poll::Ready(match ready!(pipe.poll_receive(cx)) {
                    Ok(Frame::Part(part)) => Ok(part),
                    Ok(Frame::Broken(error)) => Err(*error),
                    Ok(Frame::Head(_) | Frame::Uploaded(_)) | Err(OtherEndGone) => {
                        Err(Error::TunnelLost)
                    }
                })
            }
        }
    }

    /// The bytes of the request body that the backend took, if known, once the upload has ended.
    /// Call it after the end of the response. Fails if the end of the upload will not be known.
    pub(crate) fn poll_uploaded(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<u64>, Error>> {
        match &mut self.source {
            BodySource::Stream { body, carrier, .. } => {
                body.poll_uploaded(cx).map_err(|_| carrier.lost())
            }
            BodySource::CrossCore {
                has_upload: false, ..
            } => Poll::Ready(Ok(None)),
            BodySource::CrossCore { pipe, .. } => {
                Poll::Ready(match ready!(pipe.poll_receive(cx)) {
                    Ok(Frame::Uploaded(taken)) => Ok(taken),
                    Ok(Frame::Broken(error)) => Err(*error),
                    Ok(Frame::Head(_) | Frame::Part(_)) | Err(OtherEndGone) => {
                        Err(Error::TunnelLost)
                    }
                })
            }
        }
    }

    /// Whether the part just received was the last one with data, as far as that is known.
    pub(crate) fn is_done(&self) -> bool {
        match &self.source {
            BodySource::Stream { body, has_body, .. } => !has_body || body.is_done(),
            BodySource::CrossCore { .. } => false,
        }
    }

    /// Records that `bytes` of the body were passed on. Releases what was passed on to the window
    /// of the stream, except the last `unsent` bytes, which are still in this process.
    pub(crate) fn release(&mut self, bytes: usize, unsent: usize) {
        self.unreleased += bytes;
        let released = self.unreleased.saturating_sub(unsent);
        if released == 0 {
            return;
        }
        self.unreleased -= released;
        match &mut self.source {
            BodySource::Stream { body, .. } => body.release(released),
            // A pipe gives credit when a frame is received.
            BodySource::CrossCore { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gw_shared::id::AgentId;

    use super::*;
    use crate::http_message::{AttemptFailure, FailedAttempt};

    #[test]
    fn a_request_that_was_opened_on_no_tunnel_names_its_attempts() {
        let attempt = FailedAttempt {
            agent: Some(AgentId::random()),
            reason: AttemptFailure::NoSlot,
            took: Duration::ZERO,
        };
        let request = UpstreamRequest::not_opened(AttemptsFailed {
            error: Error::AgentConcurrencyLimit,
            failed: vec![attempt.clone()],
        });
        assert!(!request.is_opened());
        assert_eq!(
            *request.response.progress().failed_attempts,
            *std::slice::from_ref(&attempt)
        );
        let Final::Answer(progress, Err(error)) = request.response.head() else {
            panic!("not an error");
        };
        assert_eq!(error, Error::AgentConcurrencyLimit);
        assert_eq!(*progress.failed_attempts, [attempt]);
    }
}
