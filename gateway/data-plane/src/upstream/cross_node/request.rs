//! The node of the caller: sends a request to the owner of its service, and to another node if the
//! owner has changed. A process that has been replaced sends it to its successor.

use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::limits;
use bytes::Bytes;
use futures_util::future::{Either, select};
use gw_base::error::{Error, Overload};
use gw_interface::auth::Authenticated;
use gw_region::{Member, NextHop};
use gw_shared::http::{Fields, Framing, InvalidHead};
use gw_shared::runtime;
use gw_shared::tunnel::connection::StreamSender;
use gw_shared::tunnel::endpoint::{Closed, OpenError, ReceivedPart};
use gw_shared::tunnel::frame::{Kind, REQUEST_HEAD};
use gw_shared::tunnel::head::{OutboundRequest, parse_refusal, write_trailers};
use gw_shared::tunnel::window;
use http::header::HeaderValue;

use super::Nodes;
use super::link::{self, Link};
use super::wire::{self, Notice, Refused};
use crate::http_message::{AttemptFailure, FailedAttempt};
use crate::memory::relay::Reserved;
use crate::tunnel::attempt_budget::{FailedAttempts, Transmission};
use crate::upstream::attempts::is_safe;
use crate::upstream::response::{Carrier, RequestTraits, StreamResponse};
use crate::upstream::{Origin, PendingResponse, Upload, Upstream, UpstreamRequest};

/// Value of the marks of a request.
const MARK: HeaderValue = HeaderValue::from_static("1");

/// A request of a service that another node owns, as far as this node knows, or that the successor
/// of this process serves. Nothing of it has been sent.
pub(crate) struct CrossNodeRequest {
    pub(in crate::upstream) upstream: Rc<Upstream>,
    /// `None` if this gateway is the only node of its region.
    pub(in crate::upstream) nodes: Option<Rc<Nodes>>,
    pub(in crate::upstream) request: Authenticated,
    pub(in crate::upstream) outbound: OutboundRequest,
    pub(in crate::upstream) origin: Origin,
}

/// A request body that is sent together with the head, and again if another node turns out to be
/// the owner.
pub(crate) struct ShortBody {
    pub(crate) data: Bytes,
    pub(crate) trailers: Option<Fields>,
    /// Charge for the data.
    pub(crate) _kept: Reserved,
}

/// A request on a link.
pub(in crate::upstream) struct OnNode {
    /// What the owner has reported: its tunnel, and failed attempts.
    pub(in crate::upstream) notice: Notice,
    /// First part of the answer, until the response is read.
    pub(in crate::upstream) first: Option<ReceivedPart>,
    /// When the request was sent.
    pub(in crate::upstream) sent: Instant,
    _counted: link::OnLink,
}

/// Why [`CrossNodeRequest::send`] has no answer.
pub(crate) enum NotSent {
    Failed(Error),
    /// The owner has no tunnel for it yet. The node of the caller, which has sent the whole body to
    /// this one, sends it again, and its body after the acceptance.
    Waits,
}

impl From<Error> for NotSent {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// Why a request was not served.
enum CrossNodeFailure {
    Refused(Error),
    /// Nothing of the request has reached a tunnel.
    Retry(RetryCause),
    /// The link was lost before an answer.
    Lost {
        after: Duration,
    },
}

#[derive(Debug)]
enum RetryCause {
    Unreachable,
    /// The owner does not answer this node, nor a third one.
    Silent,
    /// The process ends; another one may listen there.
    Ending {
        waited: Option<Duration>,
    },
    /// The owner has no tunnel for it yet. It is sent there again, and its body after the
    /// acceptance.
    Waits,
    NotOwner {
        epoch: u64,
        waited: Option<Duration>,
    },
}

impl RetryCause {
    /// Time that the request has waited at the owner, which has admitted it.
    fn waited(&self) -> Option<Duration> {
        match self {
            Self::Unreachable | Self::Silent | Self::Waits => None,
            Self::Ending { waited } | Self::NotOwner { waited, .. } => *waited,
        }
    }
}

impl CrossNodeRequest {
    /// Length of a body that [`Self::send`] takes as a whole; `None` if the request has no body, or
    /// one that is carried after the owner has accepted the request.
    pub(crate) fn short_body(&self) -> Option<usize> {
        let is_carried = self.waits_for_acceptance() || self.request.waited.is_some();
        if !self.outbound.has_body() || is_carried {
            return None;
        }
        usize::try_from(self.outbound.framing.content_length()?).ok()
    }

    /// Charges a body of `bytes` to the account of the service before it is received.
    pub(crate) fn reserve(&self, bytes: usize) -> Result<Reserved, Error> {
        self.upstream
            .tunnels
            .relay_memory
            .reserve(&self.request.service.account, bytes)
    }

    fn waits_for_acceptance(&self) -> bool {
        let OutboundRequest {
            framing,
            upgrade,
            headers,
            ..
        } = &self.outbound;
        wire::waits_for_acceptance(*framing, upgrade.is_some(), headers)
    }

    /// Sends the request to the owner. Returns when the owner has accepted it, or with its first
    /// answer; then nothing is sent again. `body` is present if [`Self::short_body`] says so. Calls
    /// `on_lost` for each attempt that ends with the link.
    pub(crate) async fn send(
        mut self,
        body: Option<ShortBody>,
        on_lost: impl Fn(FailedAttempt),
    ) -> Result<UpstreamRequest, NotSent> {
        let service = Arc::clone(&self.request.service);
        let hostname = &service.hostname;
        let mut patience = Patience::begin(Instant::now());
        wire::put_principal(&mut self.outbound, &self.request.by);
        wire::put_service(&mut self.outbound, &self.request.service);
        let Some(nodes) = self.nodes.clone() else {
            return Ok(self.send_to_successor(body, patience.deadline).await?);
        };
        nodes
            .attempt_budgets
            .borrow_mut()
            .request(&service.label, patience.began);
        let mut rules = self.rules();
        // Answer if the request is served by no node.
        let mut error = Error::NodeUnavailable;
        loop {
            let next = next_hop(&nodes, hostname, patience.deadline).await;
            if self.belongs_to_successor(&next, &patience) {
                return Ok(self.send_to_successor(body, patience.deadline).await?);
            }
            let (owner, epoch) = match next {
                NextHop::Node { owner, epoch } => (owner, epoch),
                NextHop::Here => return Ok(self.send_here(body).await?),
                NextHop::Unknown => return Err(error.into()),
            };
            let tried = self.try_owner(&nodes, &owner, body.as_ref(), patience.deadline);
            let retry = match tried.await {
                Ok(request) => return Ok(request),
                Err(CrossNodeFailure::Refused(error)) => Err(self.origin.error(error))?,
                Err(CrossNodeFailure::Retry(RetryCause::Waits)) if self.origin.is_whole => {
                    return Err(NotSent::Waits);
                }
                Err(CrossNodeFailure::Retry(retry)) => retry,
                // The node of the caller counts the attempt, and decides.
                Err(CrossNodeFailure::Lost { .. }) if self.origin.is_passed_on => {
                    return Err(Error::NodeLost.into());
                }
                Err(CrossNodeFailure::Lost { after }) => {
                    on_lost(lost_with_node(after));
                    if !self.may_move(&nodes, &mut rules) {
                        return Err(Error::NodeLost.into());
                    }
                    // The next owner is known already if this one was declared dead.
                    patience.deadline = Instant::now() + limits::NODE_WAIT;
                    error = Error::NodeLost;
                    self.origin.was_lost = true;
                    continue;
                }
            };
            tracing::debug!(
                node = owner.slot.get(),
                epoch,
                ?retry,
                "not served by the node of the service"
            );
            self.request.waited = retry.waited().or(self.request.waited);
            if !patience.lasts(&retry, epoch) {
                return Err(error.into());
            }
            self.upstream.counters.node_retries.increment();
            patience.wait(&nodes, &retry, epoch).await;
        }
    }

    /// One that was lost before is sent a second time by the first attempt.
    fn rules(&self) -> FailedAttempts {
        let is_repeatable = is_safe(&self.outbound) && !self.origin.was_lost;
        FailedAttempts::new(is_repeatable, self.request.service.settings.retries)
    }

    /// Whether the process that has taken over serves this node, or is to say which one owns the
    /// service: this process gets no more views.
    fn belongs_to_successor(&self, next: &NextHop, patience: &Patience) -> bool {
        let is_elsewhere = matches!(next, NextHop::Node { .. });
        self.upstream.lifecycle.is_succeeded() && (patience.is_stale || !is_elsewhere)
    }

    /// Sends the request to the process that has taken over, which passes it on if another node
    /// owns the service.
    async fn send_to_successor(
        &mut self,
        body: Option<ShortBody>,
        deadline: Instant,
    ) -> Result<UpstreamRequest, Error> {
        let Some(mut successor) = self.upstream.successor.link() else {
            return Err(Error::NodeUnavailable);
        };
        self.outbound.headers.remove(wire::PASS_ON);
        let mut sent = self.attempt(&successor, body.as_ref(), deadline).await;
        while let Err(CrossNodeFailure::Retry(RetryCause::Unreachable)) = &sent
            && let Some(next) = self.upstream.successor.link()
            && !Rc::ptr_eq(&next, &successor)
        {
            successor = next;
            sent = self.attempt(&successor, body.as_ref(), deadline).await;
        }
        sent.map_err(|failed| match failed {
            CrossNodeFailure::Refused(error) => self.origin.error(error),
            CrossNodeFailure::Retry(_) if !self.origin.was_lost => Error::NodeUnavailable,
            CrossNodeFailure::Retry(_) | CrossNodeFailure::Lost { .. } => Error::NodeLost,
        })
    }

    /// Sends the request to the owner, or to a third node while the owner does not answer, unless
    /// this is the third.
    async fn try_owner(
        &mut self,
        nodes: &Rc<Nodes>,
        owner: &Member,
        body: Option<&ShortBody>,
        deadline: Instant,
    ) -> Result<UpstreamRequest, CrossNodeFailure> {
        let way = nodes.way_to(owner);
        let is_past = way.as_ref().is_none_or(|node| node.slot != owner.slot);
        if is_past && self.origin.is_passed_on {
            return Err(CrossNodeFailure::Refused(Error::NodeUnavailable));
        }
        let node = way.ok_or(CrossNodeFailure::Retry(RetryCause::Silent))?;
        self.outbound.headers.remove(wire::PASS_ON);
        if is_past {
            self.outbound.headers.insert(wire::PASS_ON, MARK);
        }
        let link = nodes.link(&node);
        let sent = Instant::now();
        let mut attempt = self.attempt(&link, body, deadline).await;
        if self.request.waited.is_none()
            && !self.origin.is_whole
            && matches!(attempt, Err(CrossNodeFailure::Retry(RetryCause::Waits)))
        {
            self.request.waited = Some(Duration::ZERO);
            attempt = self.attempt(&link, body, deadline).await;
        }
        match attempt {
            Err(CrossNodeFailure::Refused(Error::NodeUnavailable)) if is_past => {
                Err(CrossNodeFailure::Retry(RetryCause::Silent))
            }
            Err(CrossNodeFailure::Retry(RetryCause::Unreachable)) if nodes.is_silent(&node) => {
                Err(CrossNodeFailure::Retry(RetryCause::Silent))
            }
            // The third node has lost the owner.
            Err(CrossNodeFailure::Refused(Error::NodeLost)) if is_past => Err(lost(sent)),
            Err(CrossNodeFailure::Retry(ending @ RetryCause::Ending { .. })) => {
                nodes.forget(&link);
                link.retire();
                Err(CrossNodeFailure::Retry(ending))
            }
            attempt => attempt,
        }
    }

    /// Whether the request is sent again after its link was lost.
    fn may_move(&self, nodes: &Nodes, rules: &mut FailedAttempts) -> bool {
        let counters = &self.upstream.counters;
        counters.attempt_failed(AttemptFailure::NodeLost);
        // The owner sends INTERIM 100 once the request is open on a tunnel. Before, the backend has
        // the head at most, and not the request. A protocol is switched without a body.
        let is_unsent = self.waits_for_acceptance() && self.outbound.upgrade.is_none();
        if !rules.may_go_on_after(Transmission::of(is_unsent, false)) {
            return false;
        }
        let label = &self.request.service.label;
        let is_paid = nodes
            .attempt_budgets
            .borrow_mut()
            .try_take(label, Instant::now());
        if !is_paid {
            counters.attempts_over_budget.increment();
        }
        is_paid
    }

    /// Serves the request on this node, which owns the service now.
    async fn send_here(mut self, body: Option<ShortBody>) -> Result<UpstreamRequest, Error> {
        let origin = self.origin;
        wire::take_principal(&mut self.outbound.headers);
        wire::take_service(&mut self.outbound.headers);
        wire::put_waited(&mut self.outbound, None);
        self.outbound.headers.remove(wire::PASS_ON);
        self.outbound.headers.remove(wire::LOST_BEFORE);
        let request = self.request.again(&self.upstream.directory.get())?;
        let opened = self.upstream.open_here(request, self.outbound, origin);
        let mut opened = opened.map_err(|error| origin.error(error))?;
        if let Some(ShortBody { data, trailers, .. }) = body {
            // A short body fits into the first credit. The response says why it was not taken.
            if opened.upload.send(data, trailers.is_none()).await.is_ok() && trailers.is_some() {
                let _ = opened.upload.finish(trailers).await;
            }
            opened.upload = opened.upload.complete();
        }
        Ok(opened)
    }

    /// Removes `Upgrade` of a request with content for a node of the previous line. A body of
    /// unknown length waits for the acceptance, as this one does.
    fn fit_to_line(&mut self, is_current: bool) {
        let content = self.outbound.upgrade_content();
        if !is_current && content.is_some_and(|content| content > 0) {
            (self.outbound.upgrade, self.outbound.framing) = (None, Framing::Chunked);
        }
    }

    async fn attempt(
        &mut self,
        link: &Rc<Link>,
        body: Option<&ShortBody>,
        deadline: Instant,
    ) -> Result<UpstreamRequest, CrossNodeFailure> {
        wire::put_waited(&mut self.outbound, self.request.waited);
        if self.origin.was_lost {
            self.outbound.headers.insert(wire::LOST_BEFORE, MARK);
        }
        let within = deadline.saturating_duration_since(Instant::now());
        let Ok(Ok(tunnel)) =
            runtime::timeout(within.max(Duration::from_millis(1)), link.tunnel()).await
        else {
            return Err(CrossNodeFailure::Retry(RetryCause::Unreachable));
        };
        let memory = self
            .upstream
            .tunnels
            .relay_memory
            .account(&self.request.service.account);
        let sent = Instant::now();
        let counted = link.count();
        let is_current = tunnel.with(|endpoint| endpoint.reports_uploads());
        self.fit_to_line(is_current);
        let outbound = &self.outbound;
        let caller = outbound.caller_connection.filter(|_| is_current);
        let share = Rc::clone(memory.share());
        let opened = tunnel.open_for(share, window::LEAST as usize, !outbound.has_body(), |out| {
            outbound.write(out, caller);
        });
        let (sender, receiver) = opened.map_err(|error| not_opened(&error, || memory.refusal()))?;
        let awaits_acceptance = self.waits_for_acceptance();
        let answered = async {
            if let Some(body) = body.filter(|_| !awaits_acceptance) {
                send_short(&sender, body).await;
            }
            receiver.receive().await
        };
        let first = first_part(answered, link, sent).await?;
        // A short body has been sent, unless it has waited for the acceptance as a longer one.
        let (upload, notice, first) = match (awaits_acceptance, first) {
            (true, ReceivedPart::Head(Kind::Interim, payload)) => {
                // In place of the acceptance, the owner may name the attempts that have failed.
                let notice = wire::parse_notice(&payload).unwrap_or_default();
                let upload = if let Some(body) = body {
                    send_short(&sender, body).await;
                    Upload::None
                } else {
                    Upload::Stream(sender)
                };
                (upload, notice, None)
            }
            (_, first) => (Upload::None, Notice::default(), Some(first)),
        };
        if link.to.is_some() {
            self.upstream.counters.node_crossings.increment();
        }
        let carrier = Carrier::Node(Box::new(OnNode {
            notice,
            first,
            sent,
            _counted: counted,
        }));
        let response = StreamResponse::new(receiver, carrier, RequestTraits::of(outbound));
        Ok(UpstreamRequest {
            upload,
            response: PendingResponse::Stream(response),
        })
    }
}

/// Why no stream of a link was opened. `refusal` is the error if the account has no memory left.
fn not_opened(error: &OpenError, refusal: impl Fn() -> Error) -> CrossNodeFailure {
    CrossNodeFailure::Refused(match error {
        OpenError::StreamLimit | OpenError::Congested => Error::Overloaded(Overload::QueueFull),
        OpenError::HeadTooLarge => {
            Error::HeadersTooLarge(InvalidHead::HeadTooLarge(REQUEST_HEAD.head))
        }
        OpenError::Memory => refusal(),
        OpenError::Lost => return CrossNodeFailure::Retry(RetryCause::Unreachable),
    })
}

/// The node that owns the service. Waits until it is known, up to `deadline`.
async fn next_hop(nodes: &Nodes, hostname: &str, deadline: Instant) -> NextHop {
    loop {
        let now = Instant::now();
        let next = nodes.peering.next_hop(hostname, now);
        if next != NextHop::Unknown || now >= deadline {
            return next;
        }
        // The end of a lease can change without a view.
        let _ = runtime::timeout(limits::LEASE_CHECK, nodes.peering.changed()).await;
    }
}

/// How long and how often a request is sent to the nodes of its service.
struct Patience {
    began: Instant,
    deadline: Instant,
    /// Answers of nodes that know a later placement.
    retries: usize,
    /// Answers of nodes that may not know the current placement yet.
    late_answers: u32,
    /// A node that owns the service by the view of this process has not served the request.
    is_stale: bool,
}

impl Patience {
    fn begin(began: Instant) -> Self {
        Self {
            began,
            deadline: began + limits::NODE_WAIT,
            retries: 0,
            late_answers: 0,
            is_stale: false,
        }
    }

    /// Counts an answer of a node that does not serve the request by the placement of `epoch`.
    /// Returns whether the request is sent again. Each owner at which it has waited begins another
    /// wait.
    fn lasts(&mut self, retry: &RetryCause, epoch: u64) -> bool {
        let now = Instant::now();
        self.is_stale = true;
        if retry.waited().is_some() {
            self.deadline = (now + limits::NODE_WAIT).min(self.began + limits::WAIT_IN_ALL);
        }
        let lasts = self.retries < limits::NODE_RETRIES && now < self.deadline;
        // A lost owner is about to be replaced, and a node that is late to learn that it is the
        // owner. Both take their time.
        match retry {
            // The deadline bounds them.
            RetryCause::NotOwner {
                waited: Some(_), ..
            } => {}
            RetryCause::Waits => self.retries += 1,
            RetryCause::NotOwner { epoch: theirs, .. } if *theirs > epoch => self.retries += 1,
            RetryCause::NotOwner { .. } | RetryCause::Silent => self.late_answers += 1,
            RetryCause::Unreachable | RetryCause::Ending { .. } => {}
        }
        lasts
    }

    /// Waits for a later placement, but not long: the other node may be the one that is late. Waits
    /// longer after each of its late answers.
    async fn wait(&self, nodes: &Nodes, retry: &RetryCause, epoch: u64) {
        if let RetryCause::NotOwner { epoch: theirs, .. } = retry {
            nodes.peering.signals.name_epoch(*theirs);
        }
        let pause = match retry {
            RetryCause::NotOwner { epoch: theirs, .. } if *theirs > epoch => {
                limits::PLACEMENT_IS_LATE
            }
            RetryCause::NotOwner { .. } | RetryCause::Silent => {
                limits::NODE_IS_LATE * (1 << self.late_answers.saturating_sub(1).min(3))
            }
            RetryCause::Ending { .. } => limits::LEASE_CHECK,
            RetryCause::Unreachable | RetryCause::Waits => limits::PLACEMENT_IS_LATE,
        };
        let pause = pause.min(self.deadline.saturating_duration_since(Instant::now()));
        // Tries again in any case.
        let _ = runtime::timeout(pause, nodes.peering.later_than(epoch)).await;
    }
}

/// Sends a whole body, which fits into the first credit.
async fn send_short(sender: &StreamSender, body: &ShortBody) {
    // If the owner has refused the request already, its answer says so.
    let sent = sender
        .send(body.data.clone(), body.trailers.is_none())
        .await;
    if let (Ok(()), Some(trailers)) = (sent, &body.trailers) {
        let _ = sender.finish_with_trailers(write_trailers(trailers));
    }
}

fn lost_with_node(took: Duration) -> FailedAttempt {
    FailedAttempt {
        agent: None,
        reason: AttemptFailure::NodeLost,
        took,
    }
}

/// The owner may have passed the request on before the link was lost.
fn lost(sent: Instant) -> CrossNodeFailure {
    CrossNodeFailure::Lost {
        after: sent.elapsed(),
    }
}

/// Waits for the first part of the answer for as long as the other node answers PINGs: it may be
/// the backend's.
async fn first_part(
    answered: impl Future<Output = Result<ReceivedPart, Closed>>,
    link: &Link,
    sent: Instant,
) -> Result<ReceivedPart, CrossNodeFailure> {
    let silent = pin!(link.silent_for(limits::LINK_SILENT));
    let first = match select(pin!(answered), silent).await {
        Either::Left((first, _)) => first,
        Either::Right(_) => Err(Closed::Lost),
    };
    match first {
        Ok(ReceivedPart::Head(Kind::Refused, payload)) => {
            let refusal =
                parse_refusal(payload).ok_or(CrossNodeFailure::Refused(Error::TunnelProtocol))?;
            Err(match wire::read_refusal(&refusal) {
                Refused::NotOwner { epoch, waited } => {
                    CrossNodeFailure::Retry(RetryCause::NotOwner { epoch, waited })
                }
                Refused::Ending { waited } => {
                    CrossNodeFailure::Retry(RetryCause::Ending { waited })
                }
                Refused::Waits => CrossNodeFailure::Retry(RetryCause::Waits),
                Refused::Error(error) => CrossNodeFailure::Refused(error),
            })
        }
        Ok(part) => Ok(part),
        Err(Closed::Lost) => Err(lost(sent)),
        Err(Closed::Reset(_) | Closed::Here) => Err(CrossNodeFailure::Refused(Error::NodeLost)),
    }
}
