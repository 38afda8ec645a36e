//! Requests of services that this worker owns.

use std::time::Instant;

use gw_base::error::Error;
use gw_interface::rate_limit::Admitted;
use gw_shared::tunnel::head::OutboundRequest;

use super::attempts::{Attempts, is_safe};
use super::response::{Carrier, RequestTraits, StreamResponse};
use super::{Origin, PendingResponse, Upload, Upstream, UpstreamRequest, max_forwards};
use crate::caller_session::CallerSession;
use crate::tunnel::Serving;
use crate::tunnel::attempt_budget::FailedAttempts;

impl Upstream {
    /// Opens a stream for an admitted request on a tunnel of its service. If there are several, the
    /// request can be sent to another agent when the first one provably did nothing with it. The
    /// gateway answers a request that is not to be forwarded.
    pub(crate) fn open_on_tunnel(
        &self,
        Admitted(request): Admitted,
        mut outbound: OutboundRequest,
        origin: Origin,
    ) -> Result<UpstreamRequest, Error> {
        let service = &request.service;
        if let Some((head, body)) = max_forwards::count_down(&mut outbound) {
            return self.answer(&service.account, head, body);
        }
        let CallerSession { hash, set_cookie } = self.caller_sessions.of(service, &mut outbound);
        if outbound
            .upgrade_content()
            .is_some_and(|content| content > 0)
            && !self
                .tunnels
                .registry
                .borrow()
                .takes_upgrade_content(&service.label)
        {
            outbound.upgrade = None;
        }
        let serving = self.tunnels.registry.borrow().serving(&service.label);
        let session = match serving {
            Serving::One(session) => session,
            Serving::Several => {
                let registry = self.tunnels.registry.borrow();
                registry.deposit(&service.label, Instant::now());
                drop(registry);
                // One that was lost before is sent a second time by the first attempt.
                let is_repeatable = is_safe(&outbound) && !origin.was_lost;
                let rules = FailedAttempts::new(is_repeatable, service.settings.retries);
                let caller = CallerSession { hash, set_cookie };
                return Attempts::open(&self.tunnels, request, caller, outbound, rules);
            }
            Serving::None => return Err(Error::AgentUnavailable),
        };
        let (upload, response, in_flight) = session.open_stream(&outbound)?;
        let registry = self.tunnels.registry.borrow();
        registry.bind(&outbound, &session, &self.tunnels.relay_memory);
        let request = RequestTraits::of(&outbound);
        let mut response = StreamResponse::new(response, Carrier::Tunnel(in_flight), request);
        response.set_cookie = set_cookie.map(Box::new);
        Ok(UpstreamRequest {
            upload: Upload::on(upload, &outbound),
            response: PendingResponse::Stream(response),
        })
    }
}
