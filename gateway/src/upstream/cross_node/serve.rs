//! The owner of a service: serves the requests that other nodes send on their links.

use std::cell::Cell;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use futures_util::future::{Either, select};
use gw_shared::http::framing::content_length;
use gw_shared::http::{Framing, Part, RequestHead, fields};
use gw_shared::net::TlsStream;
use gw_shared::runtime;
use gw_shared::tunnel::body::{BrokenBody, ReceivedBody};
use gw_shared::tunnel::connection::{StreamReceiver, StreamSender, Tunnel, TunnelError, UNSENT};
use gw_shared::tunnel::endpoint::{Closed, Endpoint, ReceivedPart};
use gw_shared::tunnel::frame::Kind;
use gw_shared::tunnel::head::{self, OutboundRequest, write_trailers};
use gw_shared::tunnel::text::error_line;
use gw_shared::tunnel::{heartbeat, window};
use http::StatusCode;

use super::Nodes;
use super::wire::{self, Refused};
use crate::auth::Authenticated;
use crate::error::Error;
use crate::hostname::Destination;
use crate::http_message::ResponseHead;
use crate::limits;
use crate::tls::pki::NodeIdentity;
use crate::upstream::{Download, Frame, Opening, PendingResponse, Upload, Upstream, UpstreamRequest};

/// A value that is counted until it is dropped.
struct Counted<'a>(&'a Cell<usize>);

impl<'a> Counted<'a> {
    fn new(count: &'a Cell<usize>) -> Self {
        count.set(count.get() + 1);
        Self(count)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Serves a link that another node has opened, until it ends.
pub(crate) async fn serve_link(upstream: Rc<Upstream>, nodes: Rc<Nodes>, stream: TlsStream, node: NodeIdentity) {
    let _counted = Counted::new(&nodes.links_served);
    let _attached = nodes.attach(stream.closer());
    let node = node.slot.get();
    tracing::info!(node, "link of another node opened");
    let ended = drive(&upstream, &nodes, &stream).await;
    let error = ended.err().map(|error| error_line(&error));
    tracing::info!(node, error, "link of another node ended");
}

async fn drive(upstream: &Rc<Upstream>, nodes: &Rc<Nodes>, stream: &TlsStream) -> Result<(), TunnelError> {
    let last_received = stream.socket().last_received();
    stream.socket().detect_dead_peer(heartbeat::TCP_DEAD_AFTER)?;
    stream.socket().limit_unsent(UNSENT)?;
    let tunnel = Tunnel::new(Endpoint::agent(limits::LINK_REQUESTS));
    tunnel.with(|endpoint| endpoint.set_credit(window::FIRST as usize, limits::LINK_BUDGET));
    let driven = pin!(std::future::poll_fn(|cx| {
        let driven = tunnel.poll_drive(cx, stream, &mut |_| Ok(()));
        // Needs no waker: only this task receives.
        while let Poll::Ready(Some(halves)) = tunnel.poll_accept(&mut Context::from_waker(Waker::noop())) {
            runtime::spawn(serve(Rc::clone(upstream), Rc::clone(nodes), halves));
        }
        driven
    }));
    let dead = pin!(heartbeat::until_dead(&tunnel, &last_received));
    let ended = match select(driven, dead).await {
        Either::Left((ended, _)) => ended,
        Either::Right(((), _)) => Err(TunnelError::Silent),
    };
    tunnel.with(Endpoint::lose);
    ended
}

/// Serves one request. A reset of its stream cancels it.
async fn serve(upstream: Rc<Upstream>, nodes: Rc<Nodes>, (sender, receiver): (StreamSender, StreamReceiver)) {
    let _counted = Counted::new(&nodes.requests_served);
    let Some(head) = read_head(&receiver) else { return };
    let framing = if head.upgrade.is_some() { Framing::None } else { head.framing };
    let is_upgrade = head.upgrade.is_some();
    let has_body = framing.has_body() || is_upgrade;
    let is_announced = wire::waits_for_acceptance(framing, is_upgrade, &head.headers);
    if upstream.lifecycle.sends_nodes_away() {
        return refuse(&sender, None, &Refused::Ending);
    }
    let mut reset = pin!(std::future::poll_fn(|cx| sender.poll_reset(cx)));
    let Either::Left((owned, _)) = select(pin!(owned(&nodes, &head)), &mut reset).await else { return };
    let begun = owned.and_then(|label| begin(&upstream, &label, head, is_announced.then_some(&sender)));
    let request = match begun {
        Ok(request) => request,
        Err(refused) => return refuse(&sender, None, &refused),
    };
    let body = match (has_body, is_upgrade) {
        (true, true) => Some(ReceivedBody::upgraded(receiver)),
        (true, false) => Some(ReceivedBody::new(receiver, framing)),
        (false, _) => None,
    };
    // Dropping the rest of the request cancels it.
    select(pin!(carry(request, body, &sender)), reset).await;
}

/// The head of a stream that another node has opened. It has arrived with the stream.
fn read_head(receiver: &StreamReceiver) -> Option<RequestHead> {
    let part = receiver.poll_receive(&mut Context::from_waker(Waker::noop()));
    let Poll::Ready(Ok(ReceivedPart::Head(Kind::Request, payload))) = part else { return None };
    match head::parse_request(&payload, receiver.ended_with_head()) {
        Ok(head) => Some(head),
        Err(error) => {
            tracing::warn!(%error, "invalid request of another node");
            None
        }
    }
}

/// The label of the request's service, once this node knows that it owns the service.
async fn owned(nodes: &Nodes, head: &RequestHead) -> Result<String, Refused> {
    let Destination::Tenant(label) = nodes.region.destination(head.authority.as_str()) else {
        return Err(Refused::Error(Error::ServiceNotFound));
    };
    let hostname = format!("{label}.{}", nodes.region.apex());
    let deadline = Instant::now() + limits::NODE_WAIT;
    loop {
        match nodes.peering.accepts(&hostname, Instant::now()) {
            Some(Ok(())) => return Ok(label.to_string()),
            Some(Err(epoch)) => return Err(Refused::NotOwner { epoch }),
            None if Instant::now() >= deadline => return Err(Refused::Error(Error::Overloaded("overloaded"))),
            None => drop(runtime::timeout(limits::LEASE_CHECK, nodes.peering.changed()).await),
        }
    }
}

/// Checks that the caller may call the service, then admits and opens the request. Tells the other node on `accepting`
/// that it can send the body.
fn begin(
    upstream: &Rc<Upstream>,
    label: &str,
    mut head: RequestHead,
    accepting: Option<&StreamSender>,
) -> Result<UpstreamRequest, Refused> {
    let principal = wire::take_principal(&mut head.headers);
    let open = || {
        let directory = upstream.directory.get();
        let service = directory.service(label).ok_or(Error::ServiceNotFound)?;
        if !service.enabled {
            return Err(Error::ServiceDisabled);
        }
        let by = principal.ok_or(Error::TunnelProtocol)?;
        let request = Authenticated::by_node(&directory, service, by)?;
        let admission = upstream.admit_here(request)?;
        if let Some(sender) = accepting {
            // Fails if the other node has reset the stream, which cancels the request.
            let _ = sender.send_head(Kind::Interim, false, |out| wire::write_notice(out, None));
        }
        match upstream.open(admission, outbound(head))? {
            Opening::Opened(request) => Ok(request),
            Opening::OnNode(_) => Err(Error::NodeUnavailable),
        }
    };
    open().map_err(Refused::Error)
}

/// The request as it goes to the agent. The fields that frame it have no effect as fields.
fn outbound(head: RequestHead) -> OutboundRequest {
    let RequestHead { method, target, authority, headers, framing, upgrade, .. } = head;
    let framing = if upgrade.is_some() { Framing::None } else { framing };
    OutboundRequest { method, target, authority, headers: fields::end_to_end(headers, |_| false), framing, upgrade }
}

fn refuse(sender: &StreamSender, timing: Option<gw_shared::tunnel::timing::AgentTiming>, refused: &Refused) {
    // Fails only if the stream is closed, in which case the caller is gone.
    let _ = sender.send_head(Kind::Refused, true, |out| wire::write_refusal(out, timing, refused));
}

/// Carries both bodies until the response is complete. After an upgrade, carries both directions to their ends.
async fn carry(request: UpstreamRequest, body: Option<ReceivedBody>, sender: &StreamSender) {
    let UpstreamRequest { upload, response } = request;
    let up = pin!(async {
        if let Some(body) = body {
            carry_up(body, upload).await;
        }
    });
    let down = pin!(carry_down(response, sender));
    match select(down, up).await {
        Either::Left((Ok(Switched(Some(download))), up)) => {
            up.await;
            drop(download);
        }
        Either::Left(_) => {}
        Either::Right(((), down)) => drop(down.await),
    }
}

async fn carry_up(mut body: ReceivedBody, mut upload: Upload) {
    loop {
        let sent = match body.receive().await {
            Ok(Part::Data(data)) => {
                let (length, last) = (data.len(), body.is_done());
                let sent = upload.send(data, last).await;
                body.release(length);
                if last {
                    return;
                }
                sent
            }
            Ok(Part::Trailers(trailers)) => {
                let _ = upload.finish(Some(trailers)).await;
                return;
            }
            Ok(Part::End) => {
                let _ = upload.finish(None).await;
                return;
            }
            Err(BrokenBody::Reset(_) | BrokenBody::Lost | BrokenBody::Length | BrokenBody::Malformed) => {
                return upload.abort();
            }
        };
        if sent.is_err() {
            return;
        }
    }
}

/// A response that was carried to its end. After an upgrade: keeps the stream counted as in flight.
struct Switched(Option<Download>);

async fn carry_down(mut response: PendingResponse, sender: &StreamSender) -> Result<Switched, Closed> {
    while let Some(interim) = response.interim().await {
        let ResponseHead { status, headers, .. } = interim;
        sender.send_head(Kind::Interim, false, |out| head::write_interim(out, status, &headers))?;
    }
    let (progress, received) = response.head().await;
    if let Some(opened) = progress.opened() {
        sender.send_head(Kind::Interim, false, |out| wire::write_notice(out, Some(opened)))?;
    }
    let (head, mut download) = match received {
        Ok(received) => received,
        Err(error) => {
            refuse(sender, progress.timing, &Refused::Error(error));
            return Ok(Switched(None));
        }
    };
    let (switched, has_body) = (head.upgrade.is_some(), head.has_body);
    let timing = wire::timing_or_absent(progress.timing);
    sender.send_head(Kind::Response, !has_body, |out| {
        let status = if switched { StatusCode::SWITCHING_PROTOCOLS } else { head.status };
        head::write_response(out, timing, status, &head.headers, framing(&head), head.upgrade.as_ref());
    })?;
    if has_body {
        carry_body(&mut download, sender).await?;
    }
    Ok(Switched(switched.then_some(download)))
}

/// Framing of a response whose fields were checked.
fn framing(head: &ResponseHead) -> Framing {
    match content_length(&head.headers).ok().flatten() {
        _ if head.upgrade.is_some() => Framing::None,
        Some(length) if head.has_body => Framing::Length(length),
        Some(length) => Framing::Described(length),
        None if head.has_body => Framing::Chunked,
        None => Framing::None,
    }
}

async fn carry_body(download: &mut Download, sender: &StreamSender) -> Result<(), Closed> {
    loop {
        match std::future::poll_fn(|cx| download.poll_frame(cx)).await {
            Ok(Frame::Data(data)) => {
                let (length, last) = (data.len(), download.is_done());
                sender.send(data, last).await?;
                download.release(length);
                if last {
                    return Ok(());
                }
            }
            Ok(Frame::Trailers(trailers)) => return sender.finish_with_trailers(write_trailers(&trailers)),
            Ok(Frame::End) => return sender.finish(),
            Ok(Frame::Head(_) | Frame::Broken(_)) => return sender.break_off(""),
            Err(error) => {
                let (.., code, _) = error.outcome();
                return sender.break_off(code.as_str());
            }
        }
    }
}
