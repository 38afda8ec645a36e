//! Requests of services that this worker owns.

use gw_shared::tunnel::head::OutboundRequest;

use super::attempts::Attempts;
use super::response::{Carrier, RequestTraits, TunnelResponse};
use super::{PendingResponse, Upload, Upstream, UpstreamRequest};
use crate::error::Error;
use crate::rate_limit::Admitted;
use crate::tunnel::Serving;

impl Upstream {
    /// Opens a stream for an admitted request on a tunnel of its service. If there are several, the request can be sent to
    /// another agent when the first one provably did nothing with it.
    pub(crate) fn open_on_tunnel(
        &self,
        admitted: &Admitted,
        outbound: OutboundRequest,
    ) -> Result<UpstreamRequest, Error> {
        let service = &admitted.0.service;
        let serving = self.tunnels.registry.borrow().serving(&service.label);
        let session = match serving {
            Serving::One(session) => session,
            Serving::Several => return Attempts::open(&self.tunnels, service, None, outbound),
            Serving::None => return Err(Error::AgentUnavailable),
        };
        let (upload, response, in_flight) = session.open_stream(&outbound)?;
        let request = RequestTraits::of(&outbound);
        Ok(UpstreamRequest {
            upload: if outbound.has_body() { Upload::Tunnel(upload) } else { Upload::None },
            response: PendingResponse::Tunnel(TunnelResponse::new(response, Carrier::Tunnel(in_flight), request)),
        })
    }
}
