//! Requests of services that another worker owns.
//!
//! The worker of the caller posts the request to the owner and keeps one end of two pipes. A task of the owner admits
//! the request, opens it on a tunnel, and carries both bodies.

use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::future::{Either, select};
use gw_shared::runtime;
use gw_shared::tunnel::head::OutboundRequest;

use super::{Download, Frame, HeadResult, PendingResponse, Progress, Upload, Upstream, UpstreamRequest};
use crate::auth::Authenticated;
use crate::error::Error;
use crate::limits;
use crate::pipe::{self, Closed};
use crate::rate_limit::{self, Admitted};
use crate::store::Service;
use crate::tunnel::session::OpenedStream;

/// Interval between checks for the first tunnel of a service that has moved to this node.
const TUNNEL_CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// A request on its way to the worker that owns its service.
pub(crate) struct CrossCoreRequest {
    request: Authenticated,
    outbound: OutboundRequest,
    upload: Option<pipe::Receiver<Frame>>,
    response: pipe::Sender<Frame>,
    opened: Arc<OnceLock<OpenedStream>>,
}

impl Upstream {
    /// Posts a request to the owner of its service. Refuses it if the mailbox there is full.
    pub(super) fn send_to_owner(
        &self,
        request: Authenticated,
        outbound: OutboundRequest,
    ) -> Result<UpstreamRequest, Error> {
        let (worker, owner) = (self.worker, request.service.owner);
        let pipe = |sender, receiver| pipe::pipe(sender, receiver, Arc::clone(&self.wakes));
        let (upload_in, upload_out) = outbound.has_body().then(|| pipe(worker, owner)).unzip();
        let (response_in, response_out) = pipe(owner, worker);
        let opened = Arc::default();
        let request = CrossCoreRequest {
            request,
            outbound,
            upload: upload_out,
            response: response_in,
            opened: Arc::clone(&opened),
        };
        self.owners.post(owner, Box::new(request)).map_err(|_| Error::Overloaded("overloaded"))?;
        self.counters.crossings.increment();
        Ok(UpstreamRequest {
            upload: upload_in.map_or(Upload::None, Upload::CrossCore),
            response: PendingResponse::CrossCore { pipe: response_out, opened, head: None },
        })
    }

    /// Serves a request that another worker posted.
    pub(crate) fn serve_cross_core(self: &Rc<Self>, request: CrossCoreRequest) {
        if self.cross_core_served.get() >= limits::CROSS_CORE_REQUESTS {
            runtime::spawn(refuse(request.response, Error::Overloaded("overloaded")));
            return;
        }
        self.cross_core_served.set(self.cross_core_served.get() + 1);
        let served = ServedRequest(Rc::clone(self));
        runtime::spawn(async move {
            let CrossCoreRequest { request, outbound, upload, response, opened } = request;
            let upstream = &served.0;
            let admitted = rate_limit::charge_or_wait(&upstream.buckets, request).await;
            if let Ok(Admitted(request)) = &admitted {
                // The caller's worker may give up meanwhile, which is noticed below.
                let _ = or_closed(&response, upstream.wait_for_tunnel(&request.service)).await;
            }
            match admitted.and_then(|admitted| upstream.open_on_tunnel(&admitted, &outbound)) {
                Ok(request) => {
                    if let Some(stream) = request.response.progress().opened {
                        // Set once: a request crosses cores at most once.
                        let _ = opened.set(stream);
                    }
                    carry(request, upload, response).await;
                }
                Err(error) => refuse(response, error).await,
            }
        });
    }
}

impl Upstream {
    /// Waits for the first tunnel of a service that came to this node a moment ago.
    async fn wait_for_tunnel(&self, service: &Service) {
        while self.lacks_tunnel(service) {
            runtime::sleep(TUNNEL_CHECK_INTERVAL).await;
        }
    }
}

/// Counts a served request down however its task ends.
struct ServedRequest(Rc<Upstream>);

impl Drop for ServedRequest {
    fn drop(&mut self) {
        self.0.cross_core_served.set(self.0.cross_core_served.get() - 1);
    }
}

async fn refuse(mut response: pipe::Sender<Frame>, error: Error) {
    let head = HeadResult { progress: Progress::default(), head: Err(error) };
    // Fails when the worker of the caller has given up.
    let _ = response.send(Frame::Head(Box::new(head))).await;
}

/// Carries both bodies between pipes and tunnel until the response is complete or the caller's worker gives up. After an
/// upgrade, carries both directions to their ends.
async fn carry(request: UpstreamRequest, upload: Option<pipe::Receiver<Frame>>, mut response: pipe::Sender<Frame>) {
    let up = std::pin::pin!(async {
        if let Some(body) = upload {
            carry_up(body, request.upload).await;
        }
    });
    let down = std::pin::pin!(carry_down(request.response, &mut response));
    // Dropping the rest of the stream resets it.
    match select(down, up).await {
        Either::Left((Ok(Completed { switched: Some(download) }), up)) => {
            up.await;
            drop(download);
        }
        Either::Left(_) => {}
        Either::Right(((), down)) => drop(down.await),
    }
}

async fn carry_up(mut body: pipe::Receiver<Frame>, mut upload: Upload) {
    loop {
        let sent = match body.receive().await {
            Ok(Frame::Data(data)) => upload.send(data, false).await,
            Ok(Frame::Trailers(trailers)) => {
                let _ = upload.finish(Some(trailers)).await;
                return;
            }
            Ok(Frame::End) => {
                let _ = upload.finish(None).await;
                return;
            }
            Ok(Frame::Head(_) | Frame::Broken(_)) => return,
            Err(Closed) => {
                upload.abort();
                return;
            }
        };
        if sent.is_err() {
            return;
        }
    }
}

/// A response that was carried to its end.
struct Completed {
    /// After an upgrade: keeps the stream counted as in flight.
    switched: Option<Download>,
}

async fn carry_down(mut response: PendingResponse, pipe: &mut pipe::Sender<Frame>) -> Result<Completed, Closed> {
    while let Some(interim) = or_closed(pipe, response.interim()).await? {
        let head = Box::new(HeadResult { progress: Progress::default(), head: Ok(interim) });
        pipe.send(Frame::Head(head)).await?;
    }
    let (progress, received) = or_closed(pipe, response.head()).await?;
    let (head, mut download) = match received {
        Ok(received) => received,
        Err(error) => {
            pipe.send(Frame::Head(Box::new(HeadResult { progress, head: Err(error) }))).await?;
            return Ok(Completed { switched: None });
        }
    };
    let switched = head.upgrade.is_some();
    let head = Box::new(HeadResult { progress, head: Ok(head) });
    pipe.send(Frame::Head(head)).await?;
    loop {
        let frame = or_closed(pipe, std::future::poll_fn(|cx| download.poll_frame(cx))).await?;
        let frame = frame.unwrap_or_else(|error| Frame::Broken(Box::new(error)));
        let (bytes, last) = match &frame {
            Frame::Data(data) => (data.len(), false),
            Frame::End => (0, true),
            Frame::Head(_) | Frame::Trailers(_) => (0, false),
            Frame::Broken(_) => {
                pipe.send(frame).await?;
                return Err(Closed);
            }
        };
        pipe.send(frame).await?;
        download.release(bytes);
        if last {
            return Ok(Completed { switched: switched.then_some(download) });
        }
    }
}

async fn or_closed<T>(pipe: &pipe::Sender<Frame>, future: impl Future<Output = T>) -> Result<T, Closed> {
    match select(std::pin::pin!(future), std::pin::pin!(pipe.closed())).await {
        Either::Left((value, _)) => Ok(value),
        Either::Right(((), _)) => Err(Closed),
    }
}
