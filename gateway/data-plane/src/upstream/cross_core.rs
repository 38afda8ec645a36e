//! Requests of services that another worker owns: posted to the owner, with one end of two pipes
//! for the bodies.

use std::sync::{Arc, OnceLock};

use crate::limits;
use bytes::Bytes;
use gw_base::error::{Error, Overload};
use gw_interface::auth::Authenticated;
use gw_shared::http::Part;
use gw_shared::id::AccountId;
use gw_shared::tunnel::head::OutboundRequest;

use super::{Frame, HeadResult, Origin, PendingResponse, Upload, Upstream, UpstreamRequest};
use crate::http_message::{OpenedStream, Progress, RelayedHead};
use crate::pipe;

/// A request on its way to the worker that owns its service.
pub struct CrossCoreRequest {
    /// Proof that the caller may call the service, with the service.
    pub request: Authenticated,
    pub(crate) outbound: OutboundRequest,
    pub(crate) origin: Origin,
    /// The request body; `None` if there is none.
    pub body: Option<pipe::Receiver<Part>>,
    /// Sending end of the pipe for the response.
    pub response: pipe::Sender<Frame>,
    /// Set once the request is open on a tunnel.
    pub opened: Arc<OnceLock<OpenedStream>>,
}

impl Upstream {
    /// Posts a request to the owner of its service. Refuses it if the mailbox there is full.
    pub(super) fn send_to_owner(
        &self,
        request: Authenticated,
        outbound: OutboundRequest,
        origin: Origin,
    ) -> Result<UpstreamRequest, Error> {
        let worker = self.worker;
        let owner = request.service.owner;
        let has_upload = outbound.has_body();
        let pipes = if has_upload { 2 } else { 1 };
        let memory = self
            .tunnels
            .relay_memory
            .reserve(&request.service.account, pipes * limits::PIPE_MEMORY)?;
        let (upload_in, upload_out) = has_upload
            .then(|| pipe::pipe(worker, owner, Arc::clone(&self.wakes)))
            .unzip();
        let (response_in, response_out) = pipe::pipe(owner, worker, Arc::clone(&self.wakes));
        let opened = Arc::default();
        let request = CrossCoreRequest {
            request,
            outbound,
            origin,
            body: upload_out,
            response: response_in,
            opened: Arc::clone(&opened),
        };
        self.mailboxes
            .post(owner, Box::new(request))
            .map_err(|_| Error::Overloaded(Overload::QueueFull))?;
        self.counters.crossings.increment();
        Ok(UpstreamRequest {
            upload: upload_in.map_or(Upload::None, Upload::CrossCore),
            response: PendingResponse::CrossCore {
                pipe: response_out,
                opened,
                has_upload,
                head: None,
                memory,
            },
        })
    }

    /// A response of the gateway to an admitted request: a pipe of this worker with all its frames.
    pub(super) fn answer(
        &self,
        account: &AccountId,
        head: RelayedHead,
        body: Bytes,
    ) -> Result<UpstreamRequest, Error> {
        let relay_memory = &self.tunnels.relay_memory;
        let memory = relay_memory.reserve(account, limits::PIPE_MEMORY)?;
        let (sender, pipe) = pipe::pipe(self.worker, self.worker, Arc::clone(&self.wakes));
        let body = head.has_body.then_some(Frame::Part(Part::Data(body)));
        let head = Frame::Head(Box::new(HeadResult {
            progress: Progress::default(),
            head: Ok(head),
        }));
        let end = Frame::Part(Part::End);
        for frame in [Some(head), body, Some(end)].into_iter().flatten() {
            // An empty pipe has room for them.
            let _ = sender.try_send(&mut Some(frame));
        }
        Ok(UpstreamRequest {
            upload: Upload::None,
            response: PendingResponse::CrossCore {
                pipe,
                opened: Arc::default(),
                has_upload: false,
                head: None,
                memory,
            },
        })
    }
}
