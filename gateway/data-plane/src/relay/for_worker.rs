//! Requests of callers of another worker, for services that this worker owns: admits them, opens
//! them on a tunnel and carries them between tunnel and pipes. So are requests of this worker that
//! have to wait. If the service moves while a request waits, the request is sent on from here.

use std::pin::pin;
use std::rc::Rc;
use std::time::Instant;

use crate::limits;
use bytes::Bytes;
use futures_util::future::{Either, select};
use gw_base::error::{Error, Overload};
use gw_interface::auth::Authenticated;
use gw_interface::rate_limit;
use gw_shared::http::{Fields, HttpVersion, Part};
use gw_shared::runtime;
use gw_shared::tunnel::head::OutboundRequest;

use super::carry::{Stopped, Upgrade, carry};
use super::on_node::open_on_node;
use crate::http_message::{
    BodyError, CallerGone, Moved, Progress, RelayedHead, RequestBody, ResponseSink,
};
use crate::pipe::{self, OtherEndGone};
use crate::upstream::{CrossCoreRequest, Frame, HeadResult, NotHere, Opening, Origin, Upstream};

/// Serves a request that another worker posted.
pub(crate) fn serve_for_worker(upstream: &Rc<Upstream>, request: CrossCoreRequest) {
    let is_within_limit = upstream.cross_core_served.get() < limits::CROSS_CORE_REQUESTS;
    let served = is_within_limit.then(|| Served::begin(upstream));
    runtime::spawn(async move {
        let CrossCoreRequest {
            request,
            outbound,
            origin,
            body,
            response,
            opened,
        } = request;
        let upgrade = outbound.upgrade_content().map(|content| Upgrade {
            version: HttpVersion::Http11,
            content,
        });
        let has_upload = body.is_some();
        let mut response = PipeSink {
            pipe: &response,
            progress: Progress::default(),
            begun: false,
            has_upload,
        };
        let mut body = PipeBody {
            parts: body,
            response: response.pipe,
        };
        let opening = match &served {
            Some(Served(upstream)) => {
                admit_and_open(upstream, request, outbound, origin, response.pipe).await
            }
            None => Err(NotServed::Failed(Error::Overloaded(Overload::QueueFull))),
        };
        let opened_here = match opening {
            Ok(Opening::Opened(request)) => Ok(request),
            // Boxed: rare.
            Ok(Opening::OnNode(request)) => {
                Box::pin(open_on_node(None, *request, &mut body, &mut response)).await
            }
            Err(NotServed::Moved(moved)) => {
                response.progress.moved = Some(moved);
                Err(Stopped::Failed(Error::NodeUnavailable))
            }
            Err(NotServed::Failed(error)) => Err(Stopped::Failed(error)),
        };
        let carried = match opened_here {
            Ok(request) => {
                if let Some(stream) = request.response.progress().stream {
                    // Set once: a request crosses cores at most once.
                    let _ = opened.set(stream);
                }
                if origin.awaits_acceptance && request.is_opened() {
                    // Fails if the caller has left, which ends the exchange below.
                    let _ = response.interim(RelayedHead::acceptance()).await;
                }
                carry(None, request, upgrade, &mut body, &mut response).await
            }
            Err(stopped) => Err(stopped),
        };
        if let Err(Stopped::Failed(error)) = carried {
            response.fail(origin.error(error)).await;
        }
    });
}

/// Why a request goes no further than to this worker.
enum NotServed {
    /// The sender of the request sends it on.
    Moved(Moved),
    Failed(Error),
}

impl From<Error> for NotServed {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// Admits a request and opens it, once it has its turn. If the service moves before, the request is
/// to be sent on: from here, unless its sender does that.
async fn admit_and_open(
    upstream: &Rc<Upstream>,
    request: Authenticated,
    outbound: OutboundRequest,
    origin: Origin,
    response: &pipe::Sender<Frame>,
) -> Result<Opening, NotServed> {
    let send_on = |request: Authenticated, outbound| {
        if origin.sends_on {
            return Err(NotServed::Moved(Moved {
                waited: request.waited,
                is_still_here: false,
            }));
        }
        Ok(upstream.elsewhere(request, outbound, origin))
    };
    let opening = pin!(async {
        if upstream.has_left(&request.service) {
            return send_on(request, outbound);
        }
        let charge_waits = !upstream.buckets.borrow().are_here();
        let mut admitted = rate_limit::charge_or_wait(&upstream.buckets, request).await?;
        let began = Instant::now();
        if origin.is_whole && upstream.wait_until(&admitted.0, began).is_some() {
            return Err(NotServed::Moved(Moved::STILL_HERE));
        }
        // The turn ends once the request is open.
        let turn = match upstream.turn(&admitted.0).await {
            Ok(turn) => turn,
            Err(NotHere::Moved) => {
                let before = admitted.0.waited.unwrap_or_default();
                admitted.0.waited = Some(before + began.elapsed());
                return send_on(admitted.0, outbound);
            }
            Err(NotHere::Failed(error)) => return Err(error.into()),
        };
        if charge_waits || turn.is_some() {
            admitted.0 = admitted.0.again(&upstream.directory.get())?;
        }
        let opened = upstream.open_on_tunnel(admitted, outbound, origin)?;
        Ok(Opening::Opened(opened))
    });
    match select(opening, pin!(response.closed())).await {
        Either::Left((opened, _)) => opened,
        // The worker of the caller has given up.
        Either::Right(((), _)) => Err(Error::AgentUnavailable.into()),
    }
}

/// Counts a served request until dropped.
struct Served(Rc<Upstream>);

impl Served {
    fn begin(upstream: &Rc<Upstream>) -> Self {
        upstream
            .cross_core_served
            .set(upstream.cross_core_served.get() + 1);
        Self(Rc::clone(upstream))
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.0
            .cross_core_served
            .set(self.0.cross_core_served.get() - 1);
    }
}

/// The request body, as the worker of the caller sends it.
struct PipeBody<'a> {
    /// `None` if there is none, or after its end.
    parts: Option<pipe::Receiver<Part>>,
    response: &'a pipe::Sender<Frame>,
}

impl RequestBody for PipeBody<'_> {
    async fn part(&mut self) -> Result<Part, BodyError> {
        let Some(parts) = &mut self.parts else {
            return Ok(Part::End);
        };
        let part = parts
            .receive()
            .await
            .map_err(|OtherEndGone| BodyError::Gone)?;
        if !matches!(part, Part::Data(_)) {
            self.parts = None;
        }
        Ok(part)
    }

    fn is_done(&self) -> bool {
        self.parts.is_none()
    }

    async fn gone(&mut self) -> CallerGone {
        self.response.closed().await;
        CallerGone
    }

    fn switch_protocols(&mut self) {}
}

/// The response, on its way to the worker of the caller.
struct PipeSink<'a> {
    pipe: &'a pipe::Sender<Frame>,
    progress: Progress,
    begun: bool,
    /// The request has a body: the report of its upload ends the response.
    has_upload: bool,
}

impl PipeSink<'_> {
    async fn send(&self, frame: Frame) -> Result<(), CallerGone> {
        self.pipe
            .send(frame)
            .await
            .map_err(|OtherEndGone| CallerGone)
    }

    async fn send_head(&mut self, head: Result<RelayedHead, Error>) -> Result<(), CallerGone> {
        let progress = std::mem::take(&mut self.progress);
        self.send(Frame::Head(Box::new(HeadResult { progress, head })))
            .await
    }

    /// Sends the error in place of a response, or in place of its rest.
    async fn fail(&mut self, error: Error) {
        // Fails when the worker of the caller has given up.
        let _ = if self.begun {
            self.send(Frame::Broken(Box::new(error))).await
        } else {
            self.send_head(Err(error)).await
        };
    }
}

impl ResponseSink for PipeSink<'_> {
    async fn interim(&mut self, head: RelayedHead) -> Result<(), CallerGone> {
        self.send_head(Ok(head)).await
    }

    fn progress(&mut self, progress: Progress) {
        self.progress = progress;
    }

    async fn head(&mut self, head: RelayedHead) -> Result<(), CallerGone> {
        self.begun = true;
        self.send_head(Ok(head)).await
    }

    async fn data(&mut self, data: Bytes, _last: bool) -> Result<(), CallerGone> {
        self.send(Frame::Part(Part::Data(data))).await
    }

    async fn end(&mut self, trailers: Option<Fields>) -> Result<(), CallerGone> {
        if let Some(trailers) = trailers {
            self.send(Frame::Part(Part::Trailers(trailers))).await?;
        }
        self.send(Frame::Part(Part::End)).await
    }

    async fn flush(&mut self) -> Result<(), CallerGone> {
        Ok(())
    }

    async fn uploaded(&mut self, taken: Option<u64>) -> Result<(), CallerGone> {
        if self.has_upload {
            self.send(Frame::Uploaded(taken)).await
        } else {
            Ok(())
        }
    }

    fn has_begun(&self) -> bool {
        self.begun
    }

    fn begin_own_response(&mut self, _request_is_readable: bool) {}
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::task::Poll;
    use std::time::Instant;

    use futures_util::poll;
    use gw_base::mailbox::mailbox;
    use gw_base::principal::Principal;
    use gw_region::owners::ownership::WorkerId;
    use gw_shared::id::KeyId;
    use gw_shared::runtime::Driver;

    use super::*;
    use crate::support::memory_worker;
    use crate::worker::{Worker, WorkerHandles};

    const LABEL: &str = "acme--api";

    /// The answer to a request with a service key that waits for its bucket until the worker uses
    /// `later`.
    fn answer_after_wait(later: impl FnOnce(&mut gw_store::Records)) -> Error {
        let mut records = memory_worker::records(1).unwrap();
        let directory = Arc::new(memory_worker::directory(&records));
        later(&mut records);
        let later = Arc::new(memory_worker::directory(&records));
        let key = memory_worker::SERVICE_KEY.strip_prefix("gw_sk_").unwrap();
        let key = KeyId::new(key.split_once('.').unwrap().0).unwrap();
        let by = Principal::ServiceKey(key);
        Driver::choose()
            .unwrap()
            .block_on(async move {
                let (mailbox, _inbox) = mailbox(1);
                let mut setup =
                    memory_worker::setup(WorkerId(0), &mailbox, Arc::clone(&directory)).unwrap();
                setup.levels = None;
                let worker = Worker::new(setup).unwrap();
                let wakes = WorkerHandles::new(vec![mailbox.clone()]);
                let (sender, _receiver) = pipe::pipe(WorkerId(0), WorkerId(0), wakes);
                let request = Authenticated::by_node(&directory, LABEL, by).unwrap();
                let outbound = outbound_get();
                let mut opening = Box::pin(admit_and_open(
                    &worker.upstream,
                    request,
                    outbound,
                    Origin::default(),
                    &sender,
                ));
                assert!(poll!(&mut opening).is_pending(), "the bucket is not here");
                worker.directory.replace(Arc::clone(&later));
                worker
                    .buckets
                    .borrow_mut()
                    .take_over(&[], &later, WorkerId(0), Instant::now());
                match poll!(&mut opening) {
                    Poll::Ready(Err(NotServed::Failed(error))) => error,
                    Poll::Ready(Err(NotServed::Moved(_))) => panic!("it has not moved"),
                    Poll::Ready(Ok(_)) => panic!("there is no tunnel"),
                    Poll::Pending => panic!("the bucket is here"),
                }
            })
            .unwrap()
    }

    fn outbound_get() -> OutboundRequest {
        OutboundRequest {
            method: http::Method::GET,
            target: "/".parse().unwrap(),
            authority: memory_worker::HOST.parse().unwrap(),
            headers: Fields::new(),
            framing: gw_shared::http::Framing::None,
            upgrade: None,
            caller_connection: None,
        }
    }

    #[test]
    fn what_was_revoked_while_a_request_waited_is_refused() {
        // Without a change, the request gets as far as to the tunnels.
        assert_eq!(answer_after_wait(|_| {}), Error::AgentUnavailable);
        assert_eq!(
            answer_after_wait(|records| records.services.clear()),
            Error::ServiceNotFound
        );
        let disable = |records: &mut gw_store::Records| {
            for service in records.services.values_mut() {
                service.settings.enabled = false;
            }
        };
        assert_eq!(answer_after_wait(disable), Error::ServiceDisabled);
        let revoked = answer_after_wait(|records| records.service_keys.clear());
        assert!(revoked.is_failed_authentication(), "{revoked:?}");
    }
}
