//! The path of a relayed request, top to bottom: find the service, authenticate, admit, open,
//! stream.

mod after_freeze;
mod authenticate;
mod carry;
mod for_node;
mod for_worker;
mod on_node;
mod outbound;
mod refusal_pace;
mod replay;

use std::cell::RefCell;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;

use futures_util::future::{Either, select};
use gw_base::error::{Error, Overload};
use gw_interface::auth::{Authenticated, VerifiedTokens};
use gw_shared::http::RequestHead;
use gw_shared::runtime;
use gw_shared::tunnel::head::OutboundRequest;
use gw_store::{Directory, Service};

pub(crate) use self::authenticate::AuthFailures;
use self::carry::{Stopped, Upgrade, carry};
pub(crate) use self::for_node::{serve_link, serve_predecessor};
pub(crate) use self::for_worker::serve_for_worker;
use self::on_node::open_on_node;
use self::outbound::outbound;
pub(crate) use self::refusal_pace::RefusalPace;
use crate::current::Current;
use crate::http_message::{Outcome, RequestBody, ResponseSink};
use crate::lifecycle::Lifecycle;
use crate::peer::Peer;
use crate::request_scope::{Observers, RequestScope, Stage, refuse};
use crate::upstream::{Opening, Origin, Upstream};

/// A request for it panics in the task of its connection. For tests of the whole gateway; not in
/// release builds.
#[cfg(debug_assertions)]
pub const PANICKING_PATH: &str = "/gw-test-panic";

/// Relays the requests of one worker's callers.
pub(crate) struct Relay {
    pub(crate) directory: Rc<Current<Directory>>,
    /// Issuer of access tokens: the base URL of the region.
    pub(crate) issuer: String,
    pub(crate) tokens: RefCell<VerifiedTokens>,
    pub(crate) auth_failures: AuthFailures,
    pub(crate) refusals: RefCell<RefusalPace>,
    pub(crate) upstream: Rc<Upstream>,
    pub(crate) observers: Rc<Observers>,
    pub(crate) lifecycle: Rc<Lifecycle>,
}

impl Relay {
    /// Relays one request to the service with this label. Opens it before the returned future is
    /// made: the future, which every idle connection reserves memory for, does not hold the request
    /// head.
    pub(crate) fn relay(
        &self,
        scope: &RequestScope,
        label: &str,
        request: RequestHead,
        peer: &Peer,
        body: &mut impl RequestBody,
        response: &mut impl ResponseSink,
    ) -> impl Future<Output = Outcome> {
        let upgrade = Upgrade::of(&request);
        let opening = if self.upstream.tunnels.freeze.is_over(scope.began()) {
            Ok(self.open(scope, label, request, peer, body.was_taken_back()))
        } else {
            Err(Box::new(request))
        };
        async move {
            let opening = match opening {
                Ok(opening) => opening,
                // Boxed, as below.
                Err(request) => {
                    Box::pin(self.open_after_freeze(scope, label, *request, peer, body)).await
                }
            };
            let opened = match opening {
                Ok(Opening::Opened(request)) => Ok(request),
                // Boxed: a gateway without other nodes never needs the memory.
                Ok(Opening::OnNode(request)) => {
                    Box::pin(open_on_node(Some(scope), *request, body, response)).await
                }
                Err(NotRelayed::Refused(error)) => Err(Stopped::Failed(error)),
                Err(NotRelayed::TakenBack) => Err(Stopped::CallerGone),
            };
            let carried = match opened {
                Ok(request) => carry(Some(scope), request, upgrade, body, response).await,
                Err(stopped) => Err(stopped),
            };
            conclude(self, scope, carried, body, response).await
        }
    }

    /// Decides everything that precedes the first byte of the body, in the order in which errors
    /// are reported.
    fn open(
        &self,
        scope: &RequestScope,
        label: &str,
        request: RequestHead,
        peer: &Peer,
        taken_back: bool,
    ) -> Result<Opening, NotRelayed> {
        #[cfg(debug_assertions)]
        assert_ne!(request.target.path(), PANICKING_PATH, "injected");
        let directory = self.directory.get();
        let service = self.find(scope, &directory, label, &request)?;
        self.permit(service)?;
        let authenticated = self.authenticate(scope, &directory, service, &request.headers)?;
        peer.serves(&service.account);
        tracing::debug!(
            request_id = %scope.id,
            service = %service.label,
            by = ?authenticated.by,
            "admitting"
        );
        if taken_back {
            return Err(NotRelayed::TakenBack);
        }
        Ok(self.admit_and_open(scope, authenticated, request, peer)?)
    }

    /// The service with this label.
    fn find<'a>(
        &self,
        scope: &RequestScope,
        directory: &'a Directory,
        label: &str,
        request: &RequestHead,
    ) -> Result<&'a Arc<Service>, Error> {
        let service = directory.service(label).ok_or(Error::ServiceNotFound)?;
        scope.note(Stage::Service { service, request });
        Ok(service)
    }

    /// Checks that requests of the service are relayed.
    fn permit(&self, service: &Service) -> Result<(), Error> {
        if !service.settings.enabled {
            return Err(Error::ServiceDisabled);
        }
        if self.lifecycle.is_ending() {
            Err(Error::Overloaded(Overload::Draining))
        } else {
            Ok(())
        }
    }

    /// Admits the request by the bucket of its service and opens it on a tunnel, unless another
    /// node owns the service.
    fn admit_and_open(
        &self,
        scope: &RequestScope,
        authenticated: Authenticated,
        request: RequestHead,
        peer: &Peer,
    ) -> Result<Opening, Error> {
        scope.note(Stage::Opening(&request));
        let outbound = self.outbound(scope, request, peer)?;
        let opening = self
            .upstream
            .open(authenticated, outbound, Origin::default())?;
        if let Opening::Opened(opened) = &opening {
            scope.note(Stage::Upstream(opened.response.progress()));
        }
        Ok(opening)
    }

    fn outbound(
        &self,
        scope: &RequestScope,
        request: RequestHead,
        peer: &Peer,
    ) -> Result<OutboundRequest, Error> {
        let is_proxy = || self.upstream.caller_sessions.trusts(peer.address());
        let mut outbound = outbound(request, peer, is_proxy, scope.id)?;
        scope.write_trace_context(&mut outbound.headers);
        Ok(outbound)
    }
}

/// Why a request goes no further than to the gateway.
enum NotRelayed {
    Refused(Error),
    /// The caller reset the stream already (rapid reset, CVE-2023-44487): nothing is opened
    /// upstream.
    TakenBack,
}

impl From<Error> for NotRelayed {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

/// Answers with the error if there is no response yet.
async fn conclude(
    relay: &Relay,
    scope: &RequestScope,
    carried: Result<(), Stopped>,
    body: &mut impl RequestBody,
    response: &mut impl ResponseSink,
) -> Outcome {
    match carried {
        Ok(()) => Outcome::Complete,
        Err(Stopped::CallerGone) => Outcome::CallerGone,
        Err(Stopped::Failed(_)) if response.has_begun() => Outcome::Cut,
        Err(Stopped::Failed(error)) => {
            if let Some((wait, _charged)) = relay.refusal_wait(scope, &error) {
                // Boxed: rare, and the task of every request would reserve memory for it.
                let is_over = Box::pin(async {
                    let over = runtime::sleep(wait);
                    matches!(select(over, pin!(body.gone())).await, Either::Left(_))
                });
                if !is_over.await {
                    return Outcome::CallerGone;
                }
            }
            refuse(scope, &error, response).await
        }
    }
}
