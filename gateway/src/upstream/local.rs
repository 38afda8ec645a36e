//! Requests of services that this worker owns.

use http::Request;

use super::response::{RequestTraits, TunnelResponse};
use super::{PendingResponse, Upload, Upstream, UpstreamRequest};
use crate::error::Error;
use crate::limit::Admitted;

impl Upstream {
    /// Opens a stream for an admitted request on the least busy tunnel of its service.
    pub(super) fn open_on_tunnel(
        &self,
        admitted: &Admitted,
        head: Request<()>,
        has_body: bool,
    ) -> Result<UpstreamRequest, Error> {
        let session = self.tunnels.registry.borrow().pick(admitted)?;
        let request = RequestTraits::of(&head);
        let (response, upload, in_flight) = session.open_stream(head, !has_body)?;
        Ok(UpstreamRequest {
            upload: if has_body { Upload::Tunnel(upload) } else { Upload::None },
            response: PendingResponse::Tunnel(TunnelResponse::new(response, in_flight, request)),
        })
    }
}
