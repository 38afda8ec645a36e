//! Requests of services that this worker owns.

use gw_shared::tunnel::head::OutboundRequest;

use super::response::{Carrier, RequestTraits, TunnelResponse};
use super::{PendingResponse, Upload, Upstream, UpstreamRequest};
use crate::error::Error;
use crate::rate_limit::Admitted;

impl Upstream {
    /// Opens a stream for an admitted request on the least busy tunnel of its service.
    pub(crate) fn open_on_tunnel(
        &self,
        admitted: &Admitted,
        outbound: &OutboundRequest,
    ) -> Result<UpstreamRequest, Error> {
        let session = self.tunnels.registry.borrow().pick(admitted)?;
        let (upload, response, in_flight) = session.open_stream(outbound)?;
        let request = RequestTraits::of(outbound);
        Ok(UpstreamRequest {
            upload: if outbound.has_body() { Upload::Tunnel(upload) } else { Upload::None },
            response: PendingResponse::Tunnel(TunnelResponse::new(response, Carrier::Tunnel(in_flight), request)),
        })
    }
}
