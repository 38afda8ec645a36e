//! Requests of callers of another process: of another node, for services that this node owns, or of
//! the process that this one has replaced. Checks and admits what they send on their links, opens
//! it and carries it between tunnel and link.

use std::cell::Cell;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use crate::limits;
use bytes::Bytes;
use futures_util::future::{Either, select};
use gw_base::error::Error;
use gw_base::service::hostname::Destination;
use gw_base::tls::node::ALPN_NODE;
use gw_base::tls::pki::NodeIdentity;
use gw_interface::auth::Authenticated;
use gw_shared::http::caller_connection::CallerConnection;
use gw_shared::http::framing::content_length;
use gw_shared::http::{Fields, Framing, HttpVersion, Part, RequestHead, fields};
use gw_shared::net::{Socket, TlsStream};
use gw_shared::runtime;
use gw_shared::text::error_line;
use gw_shared::tunnel::body::ReceivedBody;
use gw_shared::tunnel::connection::{StreamReceiver, StreamSender, Tunnel, TunnelError};
use gw_shared::tunnel::endpoint::{Closed, Endpoint, ReceivedPart};
use gw_shared::tunnel::frame::Kind;
use gw_shared::tunnel::head::{self, OutboundRequest, write_trailers};
use gw_shared::tunnel::transport::Transport;
use gw_shared::tunnel::{heartbeat, window};
use http::StatusCode;

use super::carry::{Stopped, Upgrade, carry};
use super::on_node::open_on_node;
use crate::http_message::{
    BodyError, CallerGone, Moved, Progress, RelayedHead, RequestBody, ResponseSink,
};
use crate::upstream::cross_node::wire::{self, Refused};
use crate::upstream::cross_node::{self, Nodes};
use crate::upstream::{Opening, Origin, Upstream};

/// A value that is counted until it is dropped.
struct CountedUntilDrop<'a>(&'a Cell<usize>);

impl<'a> CountedUntilDrop<'a> {
    fn new(count: &'a Cell<usize>) -> Self {
        count.set(count.get() + 1);
        Self(count)
    }
}

impl Drop for CountedUntilDrop<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Serves a link that another node has opened, until it ends.
pub(crate) async fn serve_link(
    upstream: Rc<Upstream>,
    nodes: Rc<Nodes>,
    stream: TlsStream,
    node: NodeIdentity,
) {
    let _counted = CountedUntilDrop::new(&nodes.links_served);
    let _attached = nodes.attach(node.session, stream.closer());
    let node = node.slot.get();
    tracing::info!(node, "link of another node opened");
    // A certificate that was verified by an earlier configuration is looked at again.
    let Some(certificate) = stream.peer_certificate() else {
        return;
    };
    let ended = async {
        let socket = stream.socket();
        cross_node::prepare(socket)?;
        let mut endpoint = endpoint(&upstream);
        if !stream.speaks(ALPN_NODE) {
            endpoint = endpoint.without_upload_reports();
        }
        let distrusted = nodes.distrusts(&certificate);
        drive(
            &upstream,
            Some(&nodes),
            &stream,
            socket,
            endpoint,
            distrusted,
        )
        .await
    };
    let error = ended.await.err().map(|error| error_line(&error));
    tracing::info!(node, error, "link of another node ended");
}

/// Serves a link that the process has opened which this one has replaced, until it ends.
pub(crate) async fn serve_predecessor(upstream: Rc<Upstream>, socket: Socket) {
    let endpoint = endpoint(&upstream);
    let ended = drive(
        &upstream,
        None,
        &socket,
        &socket,
        endpoint,
        std::future::pending(),
    );
    let error = ended.await.err().map(|error| error_line(&error));
    tracing::debug!(error, "link of the predecessor ended");
}

fn endpoint(upstream: &Upstream) -> Endpoint {
    Endpoint::agent_within(limits::LINK_REQUESTS, upstream.tunnels.relay_memory.links())
}

/// Serves the requests of a link until it ends, or `distrusted` resolves. `nodes` is absent on the
/// link of a predecessor.
async fn drive(
    upstream: &Rc<Upstream>,
    nodes: Option<&Rc<Nodes>>,
    stream: &impl Transport,
    socket: &Socket,
    endpoint: Endpoint,
    distrusted: impl Future<Output = ()>,
) -> Result<(), TunnelError> {
    let last_received = socket.last_received();
    let tunnel = Tunnel::new(endpoint);
    tunnel.with(|endpoint| endpoint.set_credit(window::FIRST as usize, limits::LINK_BUDGET));
    let driven = pin!(std::future::poll_fn(|cx| {
        let driven = tunnel.poll_drive(cx, stream, &mut |_| Ok(()));
        // Needs no waker: only this task receives.
        while let Poll::Ready(Some(halves)) =
            tunnel.poll_accept(&mut Context::from_waker(Waker::noop()))
        {
            runtime::spawn(serve(Rc::clone(upstream), nodes.cloned(), halves));
        }
        driven
    }));
    let dead = pin!(heartbeat::until_dead(&tunnel, &last_received));
    let ended = match select(driven, select(dead, pin!(distrusted))).await {
        Either::Left((ended, _)) => ended,
        Either::Right((Either::Left(_), _)) => Err(TunnelError::Silent),
        Either::Right((Either::Right(_), _)) => {
            Err(io::Error::other("the authority of its certificate is not trusted any more").into())
        }
    };
    tunnel.with(Endpoint::lose);
    ended
}

/// Serves one request. A reset of its stream cancels it.
async fn serve(
    upstream: Rc<Upstream>,
    nodes: Option<Rc<Nodes>>,
    (sender, receiver): (StreamSender, StreamReceiver),
) {
    let _counted = CountedUntilDrop::new(&upstream.link_requests_served);
    let Some(mut head) = read_head(&receiver) else {
        return;
    };
    let service = wire::take_service(&mut head.headers);
    let is_marked = head.headers.remove(wire::PASS_ON).is_some();
    let is_passed_on = is_marked && nodes.is_some();
    let was_lost = head.headers.remove(wire::LOST_BEFORE).is_some();
    let lifecycle = &upstream.lifecycle;
    if lifecycle.is_ending() || nodes.is_some() && lifecycle.is_succeeded() {
        return refuse(&sender, None, &Refused::Ending { waited: None });
    }
    let reset = pin!(std::future::poll_fn(|cx| sender.poll_reset(cx)));
    let owned = after_freeze(&upstream, nodes.as_deref(), &head, service, is_passed_on);
    // The reset comes first: after a cut of the link a request often arrives together with its
    // reset, and is not charged.
    let Either::Right((owned, _)) = select(reset, pin!(owned)).await else {
        return;
    };
    let is_upgrade = head.upgrade.is_some();
    let framing = head.framing;
    let has_body = framing.has_body() || is_upgrade;
    let awaits_acceptance = wire::waits_for_acceptance(framing, is_upgrade, &head.headers);
    let origin = Origin {
        sends_on: nodes.is_some(),
        is_passed_on,
        was_lost,
        awaits_acceptance,
        is_whole: nodes.is_some() && has_body && !awaits_acceptance,
    };
    let opening = match owned.and_then(|label| open(&upstream, &label, head, &sender, origin)) {
        Ok(opening) => opening,
        Err(refused) => return refuse(&sender, None, &refused),
    };
    let upgrade = is_upgrade.then(|| Upgrade {
        version: HttpVersion::Http11,
        content: framing.content_length().unwrap_or(0),
    });
    let body = match &upgrade {
        Some(upgrade) => Some(ReceivedBody::upgraded(receiver, upgrade.content)),
        None => has_body.then(|| ReceivedBody::new(receiver, framing)),
    };
    let mut body = LinkBody {
        body,
        unreleased: 0,
        sender: &sender,
    };
    let mut response = LinkSink {
        sender: &sender,
        progress: Progress::default(),
        begun: false,
        ended: false,
    };
    let carried = accept_and_carry(opening, origin, upgrade, &mut body, &mut response).await;
    if let Err(Stopped::Failed(error)) = carried {
        let sends_on = response.progress.moved;
        match sends_on.and_then(|moved| moved_to(&upstream, nodes.as_deref(), moved)) {
            Some(refused) => refuse(&sender, None, &refused),
            None => response.fail(error),
        }
    }
}

/// Carries the request once it is open, and tells a process that waits for it that the body may
/// follow.
async fn accept_and_carry(
    opening: Opening,
    origin: Origin,
    upgrade: Option<Upgrade>,
    body: &mut LinkBody<'_>,
    response: &mut LinkSink<'_>,
) -> Result<(), Stopped> {
    let request = match opening {
        Opening::Opened(request) => request,
        // Boxed: rare, and the task of every request would reserve memory for it.
        Opening::OnNode(request) => Box::pin(open_on_node(None, *request, body, response)).await?,
    };
    if origin.awaits_acceptance && request.is_opened() {
        // Fails if the other process has reset the stream, which cancels the request.
        let _ = response.interim(RelayedHead::acceptance()).await;
    }
    carry(None, request, upgrade, body, response).await
}

/// What the node of the caller is told of a request that it is to send on.
fn moved_to(
    upstream: &Upstream,
    nodes: Option<&Nodes>,
    Moved {
        waited,
        is_still_here,
    }: Moved,
) -> Option<Refused> {
    if is_still_here {
        return Some(Refused::Waits);
    }
    if upstream.lifecycle.sends_nodes_away() {
        return Some(Refused::Ending { waited });
    }
    let epoch = nodes?.peering.view()?.epoch();
    Some(Refused::NotOwner { epoch, waited })
}

/// The head of a stream that another node has opened. It has arrived with the stream.
fn read_head(receiver: &StreamReceiver) -> Option<RequestHead> {
    let part = receiver.poll_receive(&mut Context::from_waker(Waker::noop()));
    let Poll::Ready(Ok(ReceivedPart::Head(Kind::Request, payload))) = part else {
        return None;
    };
    match head::parse_request(&payload, receiver.ended_with_head()) {
        Ok(head) => Some(head),
        Err(error) => {
            tracing::warn!(%error, "invalid request of another node");
            None
        }
    }
}

/// The label of the request's service, which this node owns if another node has sent the request,
/// unless the request `is_passed_on`. The request may have queued while this process was frozen.
async fn after_freeze(
    upstream: &Upstream,
    nodes: Option<&Nodes>,
    head: &RequestHead,
    service: Option<String>,
    is_passed_on: bool,
) -> Result<String, Refused> {
    let region = &upstream.tunnels.region;
    let label = match (service, region.destination(head.authority.as_str())) {
        (Some(label), Destination::Elsewhere) => label,
        (None, Destination::Tenant(label)) => label.into_owned(),
        _ => return Err(Refused::Error(Error::ServiceNotFound)),
    };
    if let Some(nodes) = nodes {
        owned(nodes, &label, is_passed_on).await?;
    }
    let freeze = &upstream.tunnels.freeze;
    if freeze.is_over(Instant::now()) {
        return Ok(label);
    }
    freeze.over().await.map_err(Refused::Error)?;
    if let Some(nodes) = nodes {
        owned(nodes, &label, is_passed_on).await?;
    }
    Ok(label)
}

/// Waits until this node knows that it owns the service, or that another one does if the request
/// `is_passed_on`.
async fn owned(nodes: &Nodes, label: &str, is_passed_on: bool) -> Result<(), Refused> {
    let hostname = format!("{label}.{}", nodes.region.apex());
    let deadline = Instant::now() + limits::NODE_WAIT;
    loop {
        match nodes.peering.accepts(&hostname, Instant::now()) {
            Some(Ok(())) => return Ok(()),
            Some(Err(_)) if is_passed_on => return Ok(()),
            Some(Err(epoch)) => {
                return Err(Refused::NotOwner {
                    epoch,
                    waited: None,
                });
            }
            None if Instant::now() >= deadline => {
                return Err(Refused::Error(Error::NodeUnavailable));
            }
            None => drop(runtime::timeout(limits::LEASE_CHECK, nodes.peering.changed()).await),
        }
    }
}

/// Checks that the caller may call the service, then charges the stream of `sender` to its account,
/// admits and opens the request, unless it is passed on.
fn open(
    upstream: &Rc<Upstream>,
    label: &str,
    mut head: RequestHead,
    sender: &StreamSender,
    origin: Origin,
) -> Result<Opening, Refused> {
    let principal = wire::take_principal(&mut head.headers);
    let waited = wire::take_waited(&mut head.headers);
    let open = || {
        let directory = upstream.directory.get();
        let by = principal.ok_or(Error::TunnelProtocol)?;
        let mut request = Authenticated::by_node(&directory, label, by)?;
        request.waited = waited;
        let memory = upstream
            .tunnels
            .relay_memory
            .account(&request.service.account);
        if !sender.charge_to(memory.share()) {
            return Err(memory.refusal());
        }
        if !origin.sends_on || origin.is_passed_on {
            return upstream.open(request, outbound(head), origin);
        }
        upstream
            .open_here(request, outbound(head), origin)
            .map(Opening::Opened)
    };
    open().map_err(Refused::Error)
}

/// The request as it goes to the agent. The fields that frame it have no effect as fields.
fn outbound(head: RequestHead) -> OutboundRequest {
    let RequestHead {
        method,
        target,
        authority,
        mut headers,
        framing,
        upgrade,
        ..
    } = head;
    let caller_connection = CallerConnection::take(&mut headers);
    OutboundRequest {
        method,
        target,
        authority,
        headers: fields::end_to_end(headers, |_| false),
        framing,
        upgrade,
        caller_connection,
    }
}

fn refuse(
    sender: &StreamSender,
    timing: Option<gw_shared::tunnel::timing::AgentTiming>,
    refused: &Refused,
) {
    // Fails only if the stream is closed, in which case the caller is gone.
    let _ = sender.send_head(Kind::Refused, true, |out| {
        wire::write_refusal(out, timing, refused);
    });
}

/// The request body, as the node of the caller sends it.
struct LinkBody<'a> {
    body: Option<ReceivedBody>,
    /// Bytes of the last returned part; released when the next part is requested.
    unreleased: usize,
    sender: &'a StreamSender,
}

impl RequestBody for LinkBody<'_> {
    async fn part(&mut self) -> Result<Part, BodyError> {
        let Some(body) = &mut self.body else {
            return Ok(Part::End);
        };
        if self.unreleased > 0 {
            body.release(std::mem::take(&mut self.unreleased));
        }
        // The other node checks the framing of its callers, so a body breaks off only when its
        // caller has left.
        let part = body.receive().await.map_err(|_| BodyError::Gone)?;
        if let Part::Data(data) = &part {
            self.unreleased = data.len();
        }
        Ok(part)
    }

    fn is_done(&self) -> bool {
        self.body.as_ref().is_none_or(ReceivedBody::is_done)
    }

    async fn gone(&mut self) -> CallerGone {
        std::future::poll_fn(|cx| self.sender.poll_reset(cx)).await;
        CallerGone
    }

    fn switch_protocols(&mut self) {}
}

/// The response, on its way to the node of the caller.
struct LinkSink<'a> {
    sender: &'a StreamSender,
    progress: Progress,
    begun: bool,
    /// This direction of the stream has ended.
    ended: bool,
}

impl LinkSink<'_> {
    /// Sends the error in place of a response, or breaks the response off.
    fn fail(&self, error: Error) {
        if self.begun {
            let (.., code, _) = error.outcome();
            // Fails if the response has ended. Dropping the stream then resets it, because the
            // report of the upload is missing.
            let _ = self.sender.break_off(code.as_str());
        } else {
            if !self.progress.failed_attempts.is_empty() {
                // Fails as the refusal.
                let _ = self.sender.send_head(Kind::Interim, false, |out| {
                    wire::write_notice(out, &self.progress);
                });
            }
            refuse(self.sender, self.progress.timing, &Refused::Error(error));
        }
    }
}

impl From<Closed> for CallerGone {
    fn from(_: Closed) -> Self {
        Self
    }
}

impl ResponseSink for LinkSink<'_> {
    async fn interim(&mut self, head: RelayedHead) -> Result<(), CallerGone> {
        let write = |out: &mut Vec<u8>| head::write_interim(out, head.status, &head.headers);
        Ok(self.sender.send_head(Kind::Interim, false, write)?)
    }

    fn progress(&mut self, progress: Progress) {
        self.progress = progress;
    }

    async fn head(&mut self, head: RelayedHead) -> Result<(), CallerGone> {
        if self.progress.opened().is_some() {
            self.sender.send_head(Kind::Interim, false, |out| {
                wire::write_notice(out, &self.progress);
            })?;
        }
        self.begun = true;
        self.ended = !head.has_body;
        let timing = wire::timing_or_absent(self.progress.timing);
        let status = if head.upgrade.is_some() {
            StatusCode::SWITCHING_PROTOCOLS
        } else {
            head.status
        };
        self.sender.send_head(Kind::Response, self.ended, |out| {
            head::write_response(
                out,
                timing,
                status,
                &head.headers,
                framing(&head),
                head.upgrade.as_ref(),
            );
        })?;
        Ok(())
    }

    async fn data(&mut self, data: Bytes, last: bool) -> Result<(), CallerGone> {
        self.ended |= last;
        Ok(self.sender.send(data, last).await?)
    }

    async fn end(&mut self, trailers: Option<Fields>) -> Result<(), CallerGone> {
        if std::mem::replace(&mut self.ended, true) {
            return Ok(());
        }
        let finished = match trailers {
            Some(trailers) => self.sender.finish_with_trailers(write_trailers(&trailers)),
            None => self.sender.finish(),
        };
        Ok(finished?)
    }

    async fn flush(&mut self) -> Result<(), CallerGone> {
        Ok(())
    }

    async fn uploaded(&mut self, taken: Option<u64>) -> Result<(), CallerGone> {
        self.sender.report_upload(taken);
        Ok(())
    }

    fn has_begun(&self) -> bool {
        self.begun
    }

    fn begin_own_response(&mut self, _request_is_readable: bool) {}
}

/// Framing of a response whose fields were checked.
fn framing(head: &RelayedHead) -> Framing {
    match content_length(&head.headers).ok().flatten() {
        _ if head.upgrade.is_some() => Framing::None,
        Some(length) if head.has_body => Framing::Length(length),
        Some(length) => Framing::Described(length),
        None if head.has_body => Framing::Chunked,
        None => Framing::None,
    }
}
