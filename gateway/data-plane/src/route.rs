//! Picks what serves a request: the relay to a tenant's backend, the apex, or a refusal.

use std::rc::Rc;

use gw_base::client_address::{TrustedProxies, client_address};
use gw_base::error::{Error, Overload};
use gw_base::service::hostname::{Destination, Region, host_name};
use gw_shared::http::{InvalidHeadParts, RequestHead};

use crate::apex::Apex;
use crate::http_message::{Outcome, RequestBody, ResponseSink, dated};
use crate::lifecycle::Lifecycle;
use crate::peer::Peer;
use crate::relay::Relay;
use crate::request_scope::{Observers, RequestScope, Stage, refuse};

/// Serves the requests of one worker's callers.
pub(crate) struct Router {
    pub(crate) region: Region,
    pub(crate) trusted_proxies: TrustedProxies,
    pub(crate) relay: Rc<Relay>,
    pub(crate) apex: Apex,
    pub(crate) observers: Rc<Observers>,
    pub(crate) lifecycle: Rc<Lifecycle>,
}

impl Router {
    /// Serves one request and accounts for it.
    pub(crate) async fn serve(
        &self,
        request: RequestHead,
        peer: &Peer,
        body: &mut impl RequestBody,
        response: &mut impl ResponseSink,
    ) -> Outcome {
        let client = client_address(peer.address(), &request.headers, &self.trusted_proxies);
        let scope = &RequestScope::begin(&self.observers, &request, client);
        let host = request.authority.clone();
        let destination = self.destination(host.as_str(), peer);
        if destination == Destination::Apex {
            scope.note(Stage::Apex(&request));
        }
        let outcome = match destination {
            Destination::Tenant(label) => {
                self.relay
                    .relay(scope, &label, request, peer, body, response)
                    .await
            }
            _ if self.lifecycle.is_ending() => {
                refuse(scope, &Error::Overloaded(Overload::Draining), response).await
            }
            // Boxed: every idle connection would reserve memory for it.
            Destination::Apex => Box::pin(self.apex.serve(scope, &request, body, response)).await,
            Destination::Elsewhere => refuse(scope, &Error::Misdirected, response).await,
        };
        scope.report(outcome);
        outcome
    }

    /// The destination of a request. A name of the region is served on connections for any of its
    /// names, because one certificate is for all of them. An own domain is served on connections
    /// for it alone.
    fn destination<'a>(&self, host: &'a str, peer: &Peer) -> Destination<'a> {
        match (self.region.destination(host), peer.domain()) {
            (Destination::Elsewhere, Some(domain)) if *host_name(host) == *domain.as_str() => {
                let directory = self.relay.directory.get();
                let served = directory.domain(domain.as_str()).filter(|it| it.is_served);
                served.map_or(Destination::Elsewhere, |domain| {
                    Destination::Tenant(domain.label.to_string().into())
                })
            }
            (_, Some(_)) => Destination::Elsewhere,
            (destination, None) => destination,
        }
    }

    /// Refuses a request whose head is invalid. The request is recorded if its head names a service
    /// or the apex.
    pub(crate) async fn refuse_invalid_head(
        &self,
        head: InvalidHeadParts,
        peer: &Peer,
        error: &Error,
        response: &mut impl ResponseSink,
    ) -> Outcome {
        let client = client_address(peer.address(), &head.headers, &self.trusted_proxies);
        let host = head.authority.clone();
        let scope = RequestScope::begin_invalid(&self.observers, head, client);
        match host
            .as_ref()
            .map(|host| self.destination(host.as_str(), peer))
        {
            Some(Destination::Tenant(label)) => {
                if let Some(service) = self.relay.directory.get().service(&label) {
                    scope.note(Stage::InvalidHeadNames(service));
                }
            }
            Some(Destination::Apex) => scope.note(Stage::InvalidHeadNamesApex),
            Some(Destination::Elsewhere) | None => {}
        }
        scope.note(Stage::Refused(error));
        let refusal = error.response(scope.id);
        scope.note(Stage::GatewayResponse {
            status: refusal.status(),
            bytes: refusal.body().len(),
        });
        let sent = response.whole(dated(refusal)).await;
        let outcome = if sent.is_ok() {
            Outcome::Refused
        } else {
            Outcome::CallerGone
        };
        scope.report(outcome);
        outcome
    }
}
