//! A relayed request on its way to the agent: opens it on the tunnel of its service, carries its body up and its
//! response down.
//!
//! On the worker that owns the service, both are a stream of the tunnel (`local`). On another worker they are pipes to a
//! task of the owner, which opens the stream there (`cross_core`). On another node they are a stream of a link to the
//! owner (`cross_node`). Callers of this module see a difference only before the request is opened.

mod cross_core;
pub(crate) mod cross_node;
mod frame;
mod local;
mod response;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::Bytes;
use gw_shared::http::Fields;
use gw_shared::tunnel::body::ReceivedBody;
use gw_shared::tunnel::connection::StreamSender;
use gw_shared::tunnel::head::{OutboundRequest, write_trailers};
use gw_shared::tunnel::timing::AgentTiming;

pub(crate) use self::cross_core::CrossCoreRequest;
use self::cross_node::{CrossNodeRequest, Nodes};
pub(crate) use self::frame::{Frame, HeadResult};
use self::response::{Carrier, TunnelResponse};
use crate::auth::Authenticated;
use crate::current::Current;
use crate::error::Error;
use crate::http_message::ResponseHead;
use crate::lifecycle::Lifecycle;
use crate::limits;
use crate::mailbox::Post;
use crate::ownership::WorkerId;
use crate::pipe::{self, Closed};
use crate::rate_limit::{Admitted, Buckets};
use crate::store::{Directory, Service};
use crate::telemetry::counters::Counters;
use crate::tunnel::Tunnels;
use crate::tunnel::session::OpenedStream;

/// Opens the relayed requests of one worker.
pub(crate) struct Upstream {
    pub(crate) worker: WorkerId,
    pub(crate) buckets: Rc<RefCell<Buckets>>,
    pub(crate) tunnels: Rc<Tunnels>,
    pub(crate) counters: Rc<Counters>,
    /// Requests that this worker opens for callers of other workers.
    pub(crate) cross_core_served: Cell<usize>,
    /// Mailboxes of all workers.
    pub(crate) owners: Arc<dyn Post<Box<CrossCoreRequest>>>,
    pub(crate) wakes: Arc<dyn Post<pipe::Wake>>,
    /// `None` if this gateway is the only node of its region.
    pub(crate) nodes: Option<Rc<Nodes>>,
    pub(crate) directory: Rc<Current<Directory>>,
    pub(crate) lifecycle: Rc<Lifecycle>,
}

/// Where an authenticated request is admitted.
pub(crate) enum Admission {
    /// The bucket of its service is on this worker and admitted it.
    Admitted(Admitted),
    /// The owner of its service admits it, or refuses it, when it arrives there.
    ByOwner(Authenticated),
    /// Another node of the region owns its service, or the owner is not known yet.
    ByNode(Rc<Nodes>, Authenticated),
}

/// A request after it was opened.
pub(crate) enum Opening {
    Opened(UpstreamRequest),
    /// Another node may own the service: the request has yet to be sent there.
    OnNode(Box<CrossNodeRequest>),
}

/// How far a request has got upstream.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    opened: Option<OpenedStream>,
    /// Set by the owner of the service, for a request that crosses cores.
    opened_by_owner: Option<Arc<OnceLock<OpenedStream>>>,
    /// Reported by the agent with its response.
    pub(crate) timing: Option<AgentTiming>,
}

impl Progress {
    /// The stream on the tunnel, once it is open.
    pub(crate) fn opened(&self) -> Option<&OpenedStream> {
        self.opened.as_ref().or_else(|| self.opened_by_owner.as_ref()?.get())
    }
}

impl Upstream {
    /// Admits a request by the bucket of its service if that is on this worker.
    pub(crate) fn admit(&self, request: Authenticated) -> Result<Admission, Error> {
        match &self.nodes {
            Some(nodes) if !nodes.peering.admits(&request.service.hostname, Instant::now()) => {
                Ok(Admission::ByNode(Rc::clone(nodes), request))
            }
            Some(_) | None => self.admit_here(request),
        }
    }

    /// As [`Self::admit`], for a service that this node owns.
    fn admit_here(&self, request: Authenticated) -> Result<Admission, Error> {
        // While another process has the buckets, admission has to wait: it is left to a task, as for another worker.
        // So it is while the agents of a service that has moved to this node connect.
        if request.service.owner != self.worker
            || !self.buckets.borrow().are_here()
            || self.lacks_tunnel(&request.service)
        {
            return Ok(Admission::ByOwner(request));
        }
        self.buckets.borrow_mut().charge(request, Instant::now()).map(Admission::Admitted)
    }

    /// Whether the service has no tunnel yet after a change a moment ago: it came to this node, the node between agent
    /// and this one was lost, or this process replaced another.
    fn lacks_tunnel(&self, service: &Service) -> bool {
        let Some(nodes) = &self.nodes else { return false };
        let (now, registry) = (Instant::now(), self.tunnels.registry.borrow());
        let is_expected = nodes.peering.has_arrived(&service.hostname, limits::FIRST_TUNNEL_BACK, now)
            || registry.was_cut_off(&service.label, now)
            || self.tunnels.grace.should_wait(&service.label, now);
        is_expected && !registry.has_tunnel(&service.label)
    }

    /// Opens a request on a tunnel of its service, on whichever worker owns that.
    pub(crate) fn open(self: &Rc<Self>, admission: Admission, outbound: OutboundRequest) -> Result<Opening, Error> {
        match admission {
            Admission::Admitted(admitted) => self.open_on_tunnel(&admitted, &outbound).map(Opening::Opened),
            Admission::ByOwner(request) => self.send_to_owner(request, outbound).map(Opening::Opened),
            Admission::ByNode(nodes, request) => {
                let upstream = Rc::clone(self);
                Ok(Opening::OnNode(Box::new(CrossNodeRequest { upstream, nodes, request, outbound })))
            }
        }
    }
}

/// An opened request.
pub(crate) struct UpstreamRequest {
    pub(crate) upload: Upload,
    pub(crate) response: PendingResponse,
}

/// Destination of a request body.
pub(crate) enum Upload {
    Tunnel(StreamSender),
    CrossCore(pipe::Sender<Frame>),
    /// The request has no body; its stream ended with its head.
    None,
}

/// Source of a response.
pub(crate) enum PendingResponse {
    Tunnel(TunnelResponse),
    CrossCore {
        pipe: pipe::Receiver<Frame>,
        opened: Arc<OnceLock<OpenedStream>>,
        /// The final head, once received.
        head: Option<Box<HeadResult>>,
    },
}

/// A response body.
pub(crate) struct Download {
    source: Source,
    /// Frame that was received with the head.
    first: Option<Frame>,
}

/// Source of a response body.
enum Source {
    Tunnel {
        body: ReceivedBody,
        _carrier: Carrier,
    },
    CrossCore(pipe::Receiver<Frame>),
    /// The response has no body.
    Nothing,
}

impl Upload {
    /// Sends data as fast as the agent reads it; with `last`, ends the body.
    pub(crate) async fn send(&mut self, data: Bytes, last: bool) -> Result<(), Closed> {
        match self {
            Self::Tunnel(stream) => stream.send(data, last).await.map_err(|_| Closed),
            Self::CrossCore(pipe) => {
                pipe.send(Frame::Data(data)).await?;
                if last { pipe.send(Frame::End).await } else { Ok(()) }
            }
            Self::None => Err(Closed),
        }
    }

    pub(crate) async fn finish(&mut self, trailers: Option<Fields>) -> Result<(), Closed> {
        match self {
            Self::Tunnel(stream) => {
                let finished = match trailers {
                    Some(trailers) => stream.finish_with_trailers(write_trailers(&trailers)),
                    None => stream.finish(),
                };
                finished.map_err(|_| Closed)
            }
            Self::CrossCore(pipe) => pipe.send(trailers.map_or(Frame::End, Frame::Trailers)).await,
            Self::None => Ok(()),
        }
    }

    /// Resets the stream, so that the backend does not take an incomplete body for a complete one.
    pub(crate) fn abort(self) {
        match self {
            Self::Tunnel(stream) => stream.reset(),
            // Dropping a pipe without an end has the same effect.
            Self::CrossCore(_) | Self::None => {}
        }
    }
}

impl PendingResponse {
    /// The next interim response (1xx); `None` once [`Self::head`] is ready. Without a time limit: the backend decides
    /// how long a request takes.
    pub(crate) async fn interim(&mut self) -> Option<ResponseHead> {
        match self {
            Self::Tunnel(response) => response.interim().await,
            Self::CrossCore { pipe, head, .. } => match pipe.receive().await {
                Ok(Frame::Head(received)) => match *received {
                    HeadResult { head: Ok(interim), .. } if interim.status.is_informational() => Some(interim),
                    last => {
                        *head = Some(Box::new(last));
                        None
                    }
                },
                Ok(_) | Err(Closed) => None,
            },
        }
    }

    /// Progress of the request, as far as this worker knows it.
    pub(crate) fn progress(&self) -> Progress {
        match self {
            Self::Tunnel(response) => response.progress(),
            Self::CrossCore { opened, .. } => {
                Progress { opened_by_owner: Some(Arc::clone(opened)), ..Progress::default() }
            }
        }
    }

    /// Waits for the final head; call it after the last interim response. A response that is already known to be broken
    /// behind its head is an error: nothing of it was passed on.
    pub(crate) async fn head(self) -> (Progress, Result<(ResponseHead, Download), Error>) {
        let (progress, received) = self.receive_head().await;
        let begun = match received {
            Ok((head, source)) => Download::begin(source).await.map(|download| (head, download)),
            Err(error) => Err(error),
        };
        (progress, begun)
    }

    async fn receive_head(self) -> (Progress, Result<(ResponseHead, Source), Error>) {
        match self {
            Self::Tunnel(response) => response.head(),
            Self::CrossCore { pipe, head: Some(received), .. } => {
                (received.progress, received.head.map(|head| (head, Source::CrossCore(pipe))))
            }
            Self::CrossCore { head: None, .. } => (self.progress(), Err(Error::TunnelLost)),
        }
    }
}

impl Download {
    /// Takes the first frame if it was received; fails if the body is already broken.
    async fn begin(source: Source) -> Result<Self, Error> {
        let mut download = Self { source, first: None };
        if let Poll::Ready(first) = futures_util::poll!(std::future::poll_fn(|cx| download.poll_frame(cx))) {
            download.first = Some(first?);
        }
        Ok(download)
    }

    /// The next frame of the body. Fails if the body was cut short.
    pub(crate) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Result<Frame, Error>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Ok(first));
        }
        match &mut self.source {
            Source::Tunnel { body, .. } => response::poll_frame(body, cx),
            Source::CrossCore(pipe) => Poll::Ready(match ready!(pipe.poll_receive(cx)) {
                Ok(Frame::Broken(error)) => Err(*error),
                Ok(frame) => Ok(frame),
                Err(Closed) => Err(Error::TunnelLost),
            }),
            Source::Nothing => Poll::Ready(Ok(Frame::End)),
        }
    }

    /// Whether the frame just received was the last one with data, as far as that is known.
    pub(crate) fn is_done(&self) -> bool {
        match &self.source {
            Source::Tunnel { body, .. } => body.is_done(),
            Source::CrossCore(_) => false,
            Source::Nothing => true,
        }
    }

    /// Releases `bytes` of the body to the window of the stream, once they were passed on.
    pub(crate) fn release(&mut self, bytes: usize) {
        match &mut self.source {
            Source::Tunnel { body, .. } if bytes > 0 => body.release(bytes),
            // A pipe gives credit when a frame is received.
            Source::Tunnel { .. } | Source::CrossCore(_) | Source::Nothing => {}
        }
    }
}
