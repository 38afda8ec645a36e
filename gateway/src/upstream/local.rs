//! Requests of services that this worker owns.

use gw_shared::tunnel::head::OutboundRequest;
use http::HeaderValue;

use super::attempts::Attempts;
use super::response::{Carrier, RequestTraits, TunnelResponse};
use super::{PendingResponse, Upload, Upstream, UpstreamRequest};
use crate::caller_session::CallerSession;
use crate::error::Error;
use crate::rate_limit::Admitted;
use crate::tunnel::Serving;

impl Upstream {
    /// Opens a stream for an admitted request on a tunnel of its service. If there are several, the request can be sent to
    /// another agent when the first one provably did nothing with it.
    pub(crate) fn open_on_tunnel(
        &self,
        admitted: &Admitted,
        mut outbound: OutboundRequest,
    ) -> Result<UpstreamRequest, Error> {
        let service = &admitted.0.service;
        let CallerSession { hash, set_cookie } = self.caller_sessions.of(service, &mut outbound);
        let serving = self.tunnels.registry.borrow().serving(&service.label);
        let session = match serving {
            Serving::One(session) => session,
            Serving::Several => {
                let opened = Attempts::open(&self.tunnels, service, hash, outbound)?;
                return Ok(opened.with_set_cookie(set_cookie));
            }
            Serving::None => return Err(Error::AgentUnavailable),
        };
        let (upload, response, in_flight) = session.open_stream(&outbound)?;
        let request = RequestTraits::of(&outbound);
        let opened = UpstreamRequest {
            upload: if outbound.has_body() { Upload::Tunnel(upload) } else { Upload::None },
            response: PendingResponse::Tunnel(TunnelResponse::new(response, Carrier::Tunnel(in_flight), request)),
        };
        Ok(opened.with_set_cookie(set_cookie))
    }
}

impl UpstreamRequest {
    /// Adds a cookie of the gateway to the response.
    fn with_set_cookie(mut self, set_cookie: Option<HeaderValue>) -> Self {
        if let (Some(set_cookie), PendingResponse::Tunnel(response)) = (set_cookie, &mut self.response) {
            response.set_cookie = Some(Box::new(set_cookie));
        }
        self
    }
}
