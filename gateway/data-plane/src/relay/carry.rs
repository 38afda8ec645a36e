//! Carries an opened request: its body up to the agent and its response down. One loop for callers
//! of this worker, of another worker and of another node.

use std::cell::Cell;
use std::pin::pin;
use std::task::Poll;
use std::time::Instant;

use crate::limits;
use futures_util::future::{Either, select};
use gw_base::error::{Error, request_id_value};
use gw_interface::rate_limit::Bucket;
use gw_shared::error_code::AgentErrorCode;
use gw_shared::http::fields::{self, X_GW_REQUEST_ID};
use gw_shared::http::{HttpVersion, Part, RequestHead};
use gw_shared::runtime;
use http::header;

use crate::http_message::{
    BodyError, CallerGone, RelayedHead, RequestBody, ResponseSink, set_date,
};
use crate::request_scope::{RequestScope, Stage};
use crate::upstream::{Download, Final, PendingResponse, Upload, UpstreamRequest};

/// Why an exchange did not reach its end.
pub(super) enum Stopped {
    CallerGone,
    /// There is no response, or the one that has begun is incomplete.
    Failed(Error),
}

impl Stopped {
    /// Why a body that is no more received ends the exchange. The end of a malformed request is
    /// unknown.
    pub(super) fn by_body(error: BodyError, response: &mut impl ResponseSink) -> Self {
        match error {
            BodyError::Gone => Self::CallerGone,
            BodyError::Malformed(error) => {
                response.begin_own_response(false);
                Self::Failed(Error::BadRequest(error.to_string()))
            }
        }
    }
}

impl From<CallerGone> for Stopped {
    fn from(CallerGone: CallerGone) -> Self {
        Self::CallerGone
    }
}

/// Carries both directions until both have ended: a backend may answer before it has the whole
/// request, and the directions of an upgraded connection end one after the other. Dropping this
/// future cancels the request up to the backend.
///
/// `scope` is present for callers of this worker. It observes the exchange, and gives the response
/// what the gateway adds to it.
pub(super) async fn carry(
    scope: Option<&RequestScope>,
    request: UpstreamRequest,
    upgrade: Option<Upgrade>,
    body: &mut impl RequestBody,
    response: &mut impl ResponseSink,
) -> Result<(), Stopped> {
    let UpstreamRequest {
        upload,
        response: pending,
    } = request;
    let is_ignored = upgrade.is_some() && !pending.may_switch();
    let answered = Answered {
        upgrade,
        is_of_caller: scope.is_some(),
        is_switched: Cell::new(is_ignored.then_some(false)),
        is_whole: Cell::new(false),
        is_broken_off: Cell::new(false),
    };
    let sent = {
        let down = pin!(receive(scope, pending, &answered, response));
        let up = pin!(send(scope, upload, &answered, body));
        match select(down, up).await {
            Either::Left(_) if answered.is_broken_off.get() => return Err(Stopped::CallerGone),
            Either::Left((ended, _)) => return ended,
            Either::Right((sent, _)) => sent,
        }
    };
    // The upload was dropped, which tells the backend that the request is incomplete.
    match sent {
        Ok(CallerGone) if response.is_whole() => Ok(()),
        Ok(CallerGone) => Err(Stopped::CallerGone),
        Err(error) => Err(Stopped::by_body(error, response)),
    }
}

/// A request to switch protocols.
#[derive(Debug, Clone, Copy)]
pub(super) struct Upgrade {
    /// Version of the caller.
    pub(super) version: HttpVersion,
    /// Bytes of content before those of the other protocol.
    pub(super) content: u64,
}

impl Upgrade {
    pub(super) fn of(request: &RequestHead) -> Option<Self> {
        let version = request.version;
        let content = match version {
            HttpVersion::Http2 => 0,
            _ => request.framing.content_length().unwrap_or(0),
        };
        request.upgrade.as_ref().map(|_| Self { version, content })
    }
}

/// How far the response has got. Both directions run in one task.
struct Answered {
    upgrade: Option<Upgrade>,
    /// The response goes to the caller itself, not to another worker or node.
    is_of_caller: bool,
    /// The decision of the backend about a request to switch protocols, or of the gateway to send
    /// it without `Upgrade`. `None` until the final head was received.
    is_switched: Cell<Option<bool>>,
    /// The caller has the whole response.
    is_whole: Cell<bool>,
    /// The caller broke off an upgraded connection.
    is_broken_off: Cell<bool>,
}

impl Answered {
    fn has_switched(&self) -> bool {
        self.is_switched.get() == Some(true)
    }

    /// Waits for the decision. Bytes that the caller sends before are not a body.
    async fn is_accepted(&self, body: &mut impl RequestBody) -> Result<bool, CallerGone> {
        let decided =
            std::future::poll_fn(|_| self.is_switched.get().map_or(Poll::Pending, Poll::Ready));
        match select(decided, pin!(body.gone())).await {
            Either::Left((is_switched, _)) => Ok(is_switched),
            Either::Right((CallerGone, _)) => Err(CallerGone),
        }
    }

    /// Resolves when the caller is gone and the upload is cancelled. A caller that has the whole
    /// response may leave without that, and so may a caller of an upgraded connection: the bytes
    /// that it sent are delivered as long as the backend takes some within [`limits::LAST_BYTES`].
    async fn abandoned(&self, upload: &Upload, body: &mut impl RequestBody) -> CallerGone {
        let gone = body.gone().await;
        let may_leave = self.is_whole.get() || self.is_of_caller && self.has_switched();
        while may_leave && !body.is_reset() {
            let before = upload.progress();
            runtime::sleep(limits::LAST_BYTES).await;
            if upload.progress() == before {
                break;
            }
        }
        gone
    }
}

/// Sends the body as it arrives, then watches the caller. Returns only when the caller is gone or
/// its body is malformed. `Ok` if the request has no body that the backend may still read.
async fn send(
    scope: Option<&RequestScope>,
    mut upload: Upload,
    answered: &Answered,
    body: &mut impl RequestBody,
) -> Result<CallerGone, BodyError> {
    let mut content = answered.upgrade.map(|upgrade| upgrade.content);
    loop {
        if let Err(error) = send_body(scope, body, &upload, answered, content).await {
            upload.abort();
            return Err(error);
        }
        if content.take().is_none() {
            break;
        }
        match answered.is_accepted(body).await {
            Ok(true) => body.switch_protocols(),
            // An ordinary response: the request has no further data.
            Ok(false) => upload = upload.without_body().await,
            Err(CallerGone) => return Err(BodyError::Gone),
        }
    }
    if let Upload::None = upload {
        return Ok(body.gone().await);
    }
    let abandoned = answered.abandoned(&upload, body);
    select(pin!(upload.repeat()), pin!(abandoned)).await;
    Err(BodyError::Gone)
}

/// Sends the body to its end, or the `content` of a request to switch protocols. Once the backend
/// reads no more, the rest is received and discarded: the caller may read the response only after
/// it has sent the whole request.
async fn send_body(
    scope: Option<&RequestScope>,
    body: &mut impl RequestBody,
    upload: &Upload,
    answered: &Answered,
    mut content: Option<u64>,
) -> Result<(), BodyError> {
    let mut tiny = None;
    while content != Some(0) {
        let sent = match body.part().await? {
            Part::Data(data) => {
                // No part has bytes behind the content, and those of the other protocol may follow.
                content = content.map(|left| left.saturating_sub(data.len() as u64));
                let last = content.is_none() && body.is_done();
                if let Some(scope) = scope {
                    if data.len() < limits::TINY_PIECE && !last {
                        pace(&mut tiny, answered.abandoned(upload, body)).await?;
                    }
                    let last = last || content == Some(0);
                    scope.note(Stage::RequestData { data: &data, last });
                }
                // Watches the caller while a slow backend blocks the send.
                let abandoned = answered.abandoned(upload, body);
                match select(pin!(upload.send(data, last)), pin!(abandoned)).await {
                    Either::Left((Ok(()), _)) if last => return Ok(()),
                    Either::Left((sent, _)) => sent,
                    Either::Right((CallerGone, _)) => return Err(BodyError::Gone),
                }
            }
            end => {
                if let Some(scope) = scope {
                    scope.note(Stage::RequestEnd);
                }
                let trailers = match end {
                    Part::Trailers(broken_off) if answered.has_switched() => {
                        answered.is_broken_off.set(true);
                        Some(broken_off)
                    }
                    Part::Trailers(trailers) => Some(fields::end_to_end_trailers(trailers)),
                    Part::Data(_) | Part::End => None,
                };
                // If the backend reads no more, its response says why.
                let _ = upload.finish(trailers).await;
                return Ok(());
            }
        };
        if sent.is_err() && content.is_none() {
            return body.discard(None).await;
        }
    }
    Ok(())
}

/// Delays a tiny piece beyond the rate of such pieces. Data that arrives during the pause is read
/// as one piece.
async fn pace(
    tiny: &mut Option<Bucket>,
    abandoned: impl Future<Output = CallerGone>,
) -> Result<(), BodyError> {
    let now = Instant::now();
    if tiny
        .get_or_insert_with(|| Bucket::new(limits::TINY_PIECES, now))
        .take(now)
        .is_ok()
    {
        return Ok(());
    }
    let wait = runtime::sleep(limits::TINY_PIECE_WAIT);
    match select(wait, pin!(abandoned)).await {
        Either::Left(_) => Ok(()),
        Either::Right((CallerGone, _)) => Err(BodyError::Gone),
    }
}

/// Receives the response, then waits for the end of the upload.
async fn receive(
    scope: Option<&RequestScope>,
    pending: PendingResponse,
    answered: &Answered,
    response: &mut impl ResponseSink,
) -> Result<(), Stopped> {
    let (head, mut download) = receive_head(scope, pending, answered.upgrade, response).await?;
    let is_switched = head.upgrade.is_some();
    response.head(head).await?;
    answered.is_switched.set(Some(is_switched));
    match receive_body(scope, &mut download, answered, response).await {
        // The caller does not miss the end of the stream.
        Err(Stopped::Failed(_)) if response.is_whole() => {}
        // A backend may take the last bytes of the caller only if its own are read.
        Err(Stopped::CallerGone) if answered.is_of_caller && is_switched => {
            answered.is_broken_off.set(true);
            discard(&mut download).await;
        }
        received => received?,
    }
    if response.has_withheld_body() {
        return Ok(());
    }
    let taken = std::future::poll_fn(|cx| download.poll_uploaded(cx))
        .await
        .map_err(Stopped::Failed)?;
    match scope {
        Some(scope) => scope.note(Stage::Uploaded(taken)),
        None => response.uploaded(taken).await?,
    }
    Ok(())
}

/// Passes interim responses on and returns the final head with the fields that the caller gets.
/// While an attempt fails and the request can go to another agent, there is another one.
async fn receive_head(
    scope: Option<&RequestScope>,
    mut pending: PendingResponse,
    upgrade: Option<Upgrade>,
    response: &mut impl ResponseSink,
) -> Result<(RelayedHead, Download), Stopped> {
    let (progress, received) = loop {
        while let Some(interim) = pending.interim().await {
            response.interim(interim).await?;
        }
        match pending.head() {
            Final::Answer(progress, received) => break (progress, received),
            // Boxed: rare, and the task of every request would reserve memory for it.
            Final::Failed(attempt) => match Box::pin(attempt.again()).await {
                Ok(next) => pending = next,
                Err((progress, error)) => break (progress, Err(error)),
            },
        }
    };
    match scope {
        Some(scope) => scope.note(Stage::Upstream(progress)),
        None => response.progress(progress),
    }
    let (mut head, download) = received.map_err(Stopped::Failed)?;
    let is_extended = upgrade.is_some_and(|upgrade| upgrade.version == HttpVersion::Http2);
    if is_extended && head.upgrade.is_none() && head.status.is_success() {
        // An HTTP/2 caller would take a 2xx for a completed upgrade (RFC 8441 §5).
        let code = Some(AgentErrorCode::BackendInvalidResponse);
        return Err(Stopped::Failed(Error::from_agent(
            code,
            "the backend did not switch protocols",
        )));
    }
    if let Some(scope) = scope {
        scope.note(Stage::ResponseHead(&head));
        head.headers
            .insert(X_GW_REQUEST_ID, request_id_value(scope.id));
        set_date(&mut head.headers);
        if let Some(policy) = scope.transport_security()
            && !head.headers.contains(header::STRICT_TRANSPORT_SECURITY)
        {
            head.headers
                .insert(header::STRICT_TRANSPORT_SECURITY, policy);
        }
    }
    Ok((head, download))
}

async fn receive_body(
    scope: Option<&RequestScope>,
    download: &mut Download,
    answered: &Answered,
    response: &mut impl ResponseSink,
) -> Result<(), Stopped> {
    let mut trailers = None;
    loop {
        // Parts that are ready are written together; once none is ready, the written ones are
        // flushed.
        let part = match futures_util::poll!(std::future::poll_fn(|cx| download.poll_part(cx))) {
            Poll::Ready(part) => part,
            Poll::Pending => {
                response.flush().await?;
                answered.is_whole.set(response.is_whole());
                download.release(0, response.unsent());
                std::future::poll_fn(|cx| download.poll_part(cx)).await
            }
        };
        match part.map_err(Stopped::Failed)? {
            Part::Data(data) => {
                let bytes = data.len();
                let last = download.is_done();
                if let Some(scope) = scope {
                    scope.note(Stage::ResponseData(&data));
                }
                response.data(data, last).await?;
                download.release(bytes, response.unsent());
            }
            Part::Trailers(fields) => trailers = Some(fields),
            Part::End => {
                if let Some(scope) = scope {
                    scope.note(Stage::ResponseEnd);
                }
                response.end(trailers).await?;
                answered.is_whole.set(response.is_whole());
                return Ok(());
            }
        }
    }
}

/// Receives the rest of a response and drops it.
async fn discard(download: &mut Download) {
    while let Ok(part) = std::future::poll_fn(|cx| download.poll_part(cx)).await {
        match part {
            Part::Data(data) => download.release(data.len(), 0),
            Part::Trailers(_) => {}
            Part::End => return,
        }
    }
}
