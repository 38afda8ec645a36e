//! Attempts of a request whose service has several tunnels.
//!
//! What happened to an attempt decides whether another one follows. A request that provably no
//! backend processed goes to another agent, whatever its method. One that a backend may have
//! processed is sent once more if it is safe and has no body (RFC 9110 §9.2.2). A response that has
//! begun is the answer. `docs/redundancy.md` describes the rules.

use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::limits;
use bytes::Bytes;
use gw_base::error::Error;
use gw_base::principal::Principal;
use gw_interface::auth::Authenticated;
use gw_shared::error_code::AgentErrorCode;
use gw_shared::id::AgentId;
use gw_shared::tunnel::connection::{StreamReceiver, StreamSender};
use gw_shared::tunnel::endpoint::{Closed, OpenError, ReceivedPart};
use gw_shared::tunnel::head::{self, AWAIT_ACCEPTANCE, OutboundRequest};
use gw_store::Service;
use http::Method;
use http::header::HeaderValue;

use super::repeatable_upload::RepeatableUpload;
use super::response::{Carrier, RequestTraits, StreamResponse};
use super::{PendingResponse, Upload, UpstreamRequest};
use crate::caller_session::CallerSession;
use crate::http_message::{AttemptFailure, FailedAttempt, size_of_fields};
use crate::memory::relay::Reserved;
use crate::tunnel::attempt_budget::{FailedAttempts, Transmission};
use crate::tunnel::choice::Wanted;
use crate::tunnel::health::TunnelFailure;
use crate::tunnel::session::Session;
use crate::tunnel::{Chosen, InFlight, Tunnels};

/// What further attempts of a request need.
pub(super) struct Attempts {
    search: TunnelSearch,
    outbound: OutboundRequest,
    /// `None` if the request has no body.
    upload: Option<Rc<RepeatableUpload>>,
    /// Tunnel of the current attempt.
    session: Rc<Session>,
    began: Instant,
    /// The body follows when the agent has accepted the request.
    is_withheld: bool,
    /// An interim response went to the caller.
    is_passed_on: bool,
    /// The budget has paid for the next attempt.
    is_paid: bool,
    /// Charge for the head.
    _memory: Reserved,
}

/// The search for a tunnel of an agent that has not been tried.
struct TunnelSearch {
    tunnels: Rc<Tunnels>,
    service: Arc<Service>,
    /// The originator of the request.
    by: Principal,
    /// Hash of the caller's session, if the service has an affinity.
    affinity: Option<u64>,
    /// The agent of the caller's connection: while it has a tunnel that is in order, the request
    /// goes to no other.
    bound_to: Option<AgentId>,
    rules: FailedAttempts,
    failed: Vec<FailedAttempt>,
}

/// A stream on which the head of the request was sent.
struct Opened {
    session: Rc<Session>,
    began: Instant,
    sender: StreamSender,
    receiver: StreamReceiver,
    in_flight: InFlight,
}

impl Attempts {
    /// Makes the first attempt of an admitted request. `rules` are those for further ones.
    pub(super) fn open(
        tunnels: &Rc<Tunnels>,
        Authenticated { service, by, .. }: Authenticated,
        caller: CallerSession,
        mut outbound: OutboundRequest,
        rules: FailedAttempts,
    ) -> Result<UpstreamRequest, Error> {
        let body = Body::of(&outbound);
        let spare = |bytes| tunnels.relay_memory.spare(&service.account, bytes);
        let memory = spare(size_of_head(&outbound) + size_of::<Self>()).zip(spare(body.kept()));
        let mut search = TunnelSearch {
            tunnels: Rc::clone(tunnels),
            affinity: caller.hash,
            bound_to: tunnels
                .registry
                .borrow()
                .bound_to(&outbound, &service.label),
            rules,
            failed: Vec::new(),
            service,
            by,
        };
        let is_withheld = memory.is_some() && matches!(body, Body::Withheld);
        let Opened {
            session,
            began,
            sender,
            receiver,
            in_flight,
        } = match search.open(&mut outbound, is_withheld, None) {
            Ok(opened) => opened,
            Err(not_opened) => return search.end(not_opened),
        };
        let traits = RequestTraits::of(&outbound);
        let mut response = StreamResponse::new(receiver, Carrier::Tunnel(in_flight), traits);
        response.set_cookie = caller.set_cookie.map(Box::new);
        let Some((memory, of_body)) = memory else {
            // Without memory to spare, the first opened attempt is the last one.
            response.failed_before = search.failed.into();
            return Ok(UpstreamRequest {
                upload: Upload::on(sender, &outbound),
                response: PendingResponse::Stream(response),
            });
        };
        let upload = match body {
            Body::None => None,
            Body::Kept(length) => Some(Rc::new(RepeatableUpload::kept(sender, length, of_body))),
            Body::Withheld | Body::Upgraded => Some(Rc::new(RepeatableUpload::withheld(sender))),
        };
        if is_withheld && !session.notifies_of_acceptance() {
            upload.iter().for_each(|upload| upload.pass());
        }
        let attempts = Self {
            search,
            outbound,
            upload: upload.clone(),
            session,
            began,
            is_withheld,
            is_passed_on: false,
            is_paid: false,
            _memory: memory,
        };
        Ok(UpstreamRequest {
            upload: upload.map_or(Upload::None, Upload::Repeatable),
            response: PendingResponse::Stream(response.with_attempts(Box::new(attempts))),
        })
    }

    /// The next part of the response. Also sends the kept bytes of the body on the current stream.
    /// Fails with [`Closed::Lost`] once the agent is silent and another one can take the request.
    pub(super) fn poll_receive(
        &mut self,
        cx: &mut Context<'_>,
        stream: &StreamReceiver,
    ) -> Poll<Result<ReceivedPart, Closed>> {
        if let Some(upload) = &self.upload {
            // Pending if the agent does not read, which the response does not wait for.
            let _ = upload.poll_kept(cx);
        }
        let received = stream.poll_receive(cx);
        if received.is_pending() && self.leaves_silent_agent() {
            return Poll::Ready(Err(Closed::Lost));
        }
        received
    }

    /// Whether the agent of this attempt is silent and the request goes to another one, which is
    /// ready and paid for. Asked again while the agent is silent.
    fn leaves_silent_agent(&mut self) -> bool {
        if self.is_paid {
            return true;
        }
        if !self.session.is_suspect() || self.is_passed_on || !self.search.rules.may_leave() {
            return false;
        }
        self.is_paid =
            self.search.has_ready_besides(&self.session) && self.search.pay(Instant::now());
        self.is_paid
    }

    /// Takes a notice that the agent has accepted the request: an interim response that goes no
    /// further.
    pub(super) fn take_acceptance(&mut self, payload: &Bytes) -> bool {
        let upload = self
            .upload
            .as_ref()
            .filter(|upload| self.is_withheld && upload.is_withheld());
        let Some(upload) = upload else { return false };
        let is_notice = head::parse_interim(payload).is_ok_and(|head| head::is_acceptance(&head));
        if is_notice {
            upload.pass();
        }
        is_notice
    }

    /// Notes that an interim response goes to the caller.
    pub(super) fn passes_on(&mut self) {
        self.is_passed_on = true;
    }

    /// Time that the agent and its backend took for the response that begins now; `None` if it is
    /// not known, because the caller has not sent the whole body.
    pub(super) fn latency(&self) -> Option<Duration> {
        match &self.upload {
            None => Some(self.began.elapsed()),
            Some(upload) => upload.ended().map(|ended| ended.elapsed()),
        }
    }

    /// Ends the attempts, because a response has begun. Returns those that failed.
    pub(super) fn answered(self) -> Vec<FailedAttempt> {
        if let Some(upload) = &self.upload {
            upload.settle();
        }
        self.search.failed
    }

    /// Makes another attempt after this one has failed. Fails with the error of the last attempt if
    /// there is none. Waits for a slot if the others are full.
    pub(super) async fn again(
        mut self: Box<Self>,
        failure: AttemptError,
    ) -> Result<StreamResponse, AttemptsFailed> {
        let AttemptError { error, is_unsent } = failure;
        let is_silent = self.is_paid || self.session.is_suspect();
        let Some(reason) = reason_of(&error, is_silent) else {
            return Err(AttemptsFailed {
                error,
                failed: self.search.failed,
            });
        };
        let agent = Some(self.session.agent.clone());
        self.search.failed(FailedAttempt {
            agent,
            reason,
            took: self.began.elapsed(),
        });
        let is_whole = self
            .upload
            .as_ref()
            .is_none_or(|upload| upload.is_repeatable());
        let may_go_on = self
            .search
            .rules
            .may_go_on_after(Transmission::of(is_unsent, self.is_passed_on));
        if !is_whole || !may_go_on {
            return Err(AttemptsFailed {
                error,
                failed: self.search.failed,
            });
        }
        let last = Last {
            error,
            is_paid: std::mem::take(&mut self.is_paid),
        };
        let mut opened = self.reopen(Some(last));
        if let Err(NotOpened::Full(last)) = opened {
            let TunnelSearch {
                tunnels, service, ..
            } = &self.search;
            let tunnels = Rc::clone(tunnels);
            let can_open = || self.search.has_room();
            // Without a turn, the second look finds no room either.
            let _turn = tunnels
                .waiting
                .turn(&service.label, limits::SLOT_WAIT, can_open, || false)
                .await;
            opened = self.reopen(last);
        }
        match opened {
            Ok(opened) => Ok(self.continue_on(opened)),
            Err(not_opened) => Err(AttemptsFailed {
                error: not_opened.into_error(),
                failed: self.search.failed,
            }),
        }
    }

    /// Opens a stream on another tunnel. Checks before that the caller may still call the service:
    /// the attempt before, or the wait for a slot, may have taken long.
    fn reopen(&mut self, last: Option<Last>) -> Result<Opened, NotOpened> {
        let TunnelSearch {
            tunnels,
            service,
            by,
            ..
        } = &self.search;
        Authenticated::by_node(&tunnels.directory.get(), &service.label, by.clone())
            .map_err(NotOpened::Failed)?;
        self.search.open(&mut self.outbound, self.is_withheld, last)
    }

    fn continue_on(mut self: Box<Self>, opened: Opened) -> StreamResponse {
        let Opened {
            session,
            began,
            sender,
            receiver,
            in_flight,
        } = opened;
        if let Some(upload) = &self.upload {
            upload.repeat_on(sender);
            if self.is_withheld && !session.notifies_of_acceptance() {
                upload.pass();
            }
        }
        (self.session, self.began) = (session, began);
        let traits = RequestTraits::of(&self.outbound);
        StreamResponse::new(receiver, Carrier::Tunnel(in_flight), traits).with_attempts(self)
    }
}

/// Why an attempt brought no response.
pub(super) struct AttemptError {
    pub(super) error: Error,
    /// The agent says that no backend processed any of the request.
    pub(super) is_unsent: bool,
}

impl From<Error> for AttemptError {
    fn from(error: Error) -> Self {
        Self {
            error,
            is_unsent: false,
        }
    }
}

/// The failed attempt before.
struct Last {
    error: Error,
    /// The budget has paid for the next one.
    is_paid: bool,
}

/// Why no stream was opened.
enum NotOpened {
    /// All tunnels that could take the request are full.
    Full(Option<Last>),
    Failed(Error),
}

impl NotOpened {
    fn into_error(self) -> Error {
        match self {
            Self::Full(last) => last.map_or(Error::AgentConcurrencyLimit, |last| last.error),
            Self::Failed(error) => error,
        }
    }
}

/// A request whose last attempt has failed.
pub(crate) struct AttemptsFailed {
    pub(super) error: Error,
    pub(super) failed: Vec<FailedAttempt>,
}

impl TunnelSearch {
    /// Ends a search without a tunnel: with a response that names the failed attempts, or with an
    /// error if there are none.
    fn end(self, not_opened: NotOpened) -> Result<UpstreamRequest, Error> {
        let error = not_opened.into_error();
        if self.failed.is_empty() {
            return Err(error);
        }
        Ok(UpstreamRequest::not_opened(AttemptsFailed {
            error,
            failed: self.failed,
        }))
    }

    /// Opens a stream on a tunnel of an agent that was not tried, after an attempt that failed with
    /// `last`. Fails with the error of the last attempt.
    fn open(
        &mut self,
        outbound: &mut OutboundRequest,
        is_withheld: bool,
        mut last: Option<Last>,
    ) -> Result<Opened, NotOpened> {
        loop {
            let now = Instant::now();
            let session = match (self.choose(now), last.take()) {
                (Chosen::Tunnel(session), None) => session,
                (Chosen::Tunnel(session), Some(Last { error, is_paid })) => {
                    if !is_paid && !self.pay(now) {
                        self.tunnels.counters.attempts_over_budget.increment();
                        return Err(NotOpened::Failed(error));
                    }
                    session
                }
                (Chosen::Full, last) => return Err(NotOpened::Full(last)),
                (Chosen::None, last) => {
                    return Err(NotOpened::Failed(
                        last.map_or(Error::AgentUnavailable, |last| last.error),
                    ));
                }
            };
            if is_withheld && session.notifies_of_acceptance() {
                outbound
                    .headers
                    .insert(AWAIT_ACCEPTANCE, HeaderValue::from_static("1"));
            } else if is_withheld {
                outbound.headers.remove(AWAIT_ACCEPTANCE);
            }
            let error = match session.try_open(outbound) {
                Ok((sender, receiver, in_flight)) => {
                    in_flight.observe(!outbound.has_body());
                    let registry = self.tunnels.registry.borrow();
                    registry.bind(outbound, &session, &self.tunnels.relay_memory);
                    return Ok(Opened {
                        session,
                        began: now,
                        sender,
                        receiver,
                        in_flight,
                    });
                }
                Err(error) => error,
            };
            let reason = match error {
                OpenError::StreamLimit => AttemptFailure::NoSlot,
                OpenError::Congested | OpenError::Lost => AttemptFailure::NotOpened,
                OpenError::HeadTooLarge | OpenError::Memory => {
                    return Err(NotOpened::Failed(session.cannot_open(error)));
                }
            };
            self.failed(FailedAttempt {
                agent: Some(session.agent.clone()),
                reason,
                took: Duration::ZERO,
            });
            let error = session.cannot_open(error);
            if !self.rules.may_go_on_after(Transmission::NeverSent) {
                return Err(NotOpened::Failed(error));
            }
            last = Some(Last {
                error,
                is_paid: false,
            });
        }
    }

    fn choose(&self, now: Instant) -> Chosen {
        let wanted = Wanted {
            session: self.affinity,
            is_first: self.failed.is_empty(),
            is_repeatable: self.rules.is_repeatable(),
        };
        let may_take = |session: &Session| self.may_take(session);
        self.tunnels
            .registry
            .borrow()
            .choose(&self.service.label, may_take, wanted, now)
    }

    /// Takes an attempt from the budget of the service.
    fn pay(&self, now: Instant) -> bool {
        self.tunnels
            .registry
            .borrow()
            .take_attempt(&self.service.label, now)
    }

    /// Whether an agent that was not tried has room for the request.
    fn has_room(&self) -> bool {
        let may_take = |session: &Session| self.may_take(session);
        self.tunnels
            .registry
            .borrow()
            .has_room(&self.service.label, may_take, Instant::now())
    }

    /// Whether the agent was not tried, and is not another one than that of the caller's
    /// connection.
    fn may_take(&self, session: &Session) -> bool {
        let is_other = |agent: &AgentId| {
            let registry = self.tunnels.registry.borrow();
            *agent != session.agent
                && registry.is_in_order(&self.service.label, agent, Instant::now())
        };
        let mut failed = self.failed.iter();
        failed.all(|failed| failed.agent.as_ref() != Some(&session.agent))
            && !self.bound_to.as_ref().is_some_and(is_other)
    }

    /// Whether another agent than that of `current` is ready to take the request.
    fn has_ready_besides(&self, current: &Session) -> bool {
        let is_other = |session: &Session| session.agent != current.agent && self.may_take(session);
        self.tunnels
            .registry
            .borrow()
            .has_ready(&self.service.label, is_other, Instant::now())
    }

    fn failed(&mut self, attempt: FailedAttempt) {
        self.tunnels.counters.attempt_failed(attempt.reason);
        self.failed.push(attempt);
    }
}

/// How the body of a request is sent.
#[derive(Debug, Clone, Copy)]
enum Body {
    None,
    /// At once, and a copy of this length is kept.
    Kept(usize),
    /// After the agent has accepted the request.
    Withheld,
    /// After the backend has switched protocols.
    Upgraded,
}

impl Body {
    fn of(outbound: &OutboundRequest) -> Self {
        let length = outbound
            .framing
            .content_length()
            .and_then(|length| usize::try_from(length).ok());
        match length {
            _ if outbound.upgrade_content() == Some(0) => Self::Upgraded,
            _ if !outbound.has_body() => Self::None,
            Some(length) if length <= limits::KEPT_BODY => Self::Kept(length),
            _ => Self::Withheld,
        }
    }

    /// Bytes of the copy.
    fn kept(self) -> usize {
        if let Self::Kept(length) = self {
            length
        } else {
            0
        }
    }
}

/// Whether the request can be sent again although a backend may have processed it: its method is
/// safe (RFC 9110 §9.2.1) and it has no body.
pub(super) fn is_safe(outbound: &OutboundRequest) -> bool {
    let is_safe = matches!(
        outbound.method,
        Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE
    );
    is_safe && !outbound.has_body()
}

/// Memory of a head that is kept.
fn size_of_head(outbound: &OutboundRequest) -> usize {
    outbound.target.as_str().len()
        + outbound.authority.as_str().len()
        + size_of_fields(&outbound.headers)
}

/// Why an attempt failed; `None` for an error of the gateway itself.
pub(super) fn reason_of(error: &Error, is_silent: bool) -> Option<AttemptFailure> {
    Some(match error {
        Error::TunnelLost if is_silent => AttemptFailure::Silent,
        Error::TunnelLost => AttemptFailure::TunnelLost,
        Error::TunnelProtocol => AttemptFailure::Protocol,
        Error::AgentConcurrencyLimit => AttemptFailure::NoSlot,
        Error::AgentForward(error) => match error.code() {
            AgentErrorCode::ConcurrencyLimit => AttemptFailure::NoSlot,
            AgentErrorCode::BackendUnreachable => AttemptFailure::BackendUnreachable,
            AgentErrorCode::BackendTls => AttemptFailure::BackendTls,
            AgentErrorCode::BackendReset => AttemptFailure::BackendReset,
            AgentErrorCode::BackendInvalidResponse => AttemptFailure::BackendInvalidResponse,
        },
        _ => return None,
    })
}

/// What a failed attempt says about the health of its tunnel; `None` for a tunnel that is lost or
/// silent, which says it all.
pub(super) fn verdict(reason: AttemptFailure, is_unsent: bool) -> Option<TunnelFailure> {
    match reason {
        AttemptFailure::NoSlot => Some(TunnelFailure::NoSlot),
        AttemptFailure::BackendUnreachable => Some(TunnelFailure::Unreachable),
        AttemptFailure::BackendTls if is_unsent => Some(TunnelFailure::Unreachable),
        AttemptFailure::BackendTls
        | AttemptFailure::BackendReset
        | AttemptFailure::BackendInvalidResponse
        | AttemptFailure::Protocol => Some(TunnelFailure::Broken),
        AttemptFailure::NotOpened
        | AttemptFailure::TunnelLost
        | AttemptFailure::Silent
        | AttemptFailure::NodeLost => None,
    }
}
