//! Carries an opened request: its body up to the agent and its response down. One loop for callers of this worker, of another
//! worker and of another node.

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
use gw_shared::http::{HttpVersion, Part};
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
    /// Why a body that is no more received ends the exchange. The end of a malformed request is unknown.
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

/// Carries both directions until both have ended: a backend may answer before it has the whole request, and the directions of
/// an upgraded connection end one after the other. Dropping this future cancels the request up to the backend.
///
/// `scope` is present for callers of this worker. It observes the exchange, and gives the response what the gateway adds to
/// it. `upgrade` is the version of the caller if the request asks to switch protocols.
pub(super) async fn carry(
    scope: Option<&RequestScope>,
    request: UpstreamRequest,
    upgrade: Option<HttpVersion>,
    body: &mut impl RequestBody,
    response: &mut impl ResponseSink,
) -> Result<(), Stopped> {
    let UpstreamRequest {
        upload,
        response: pending,
    } = request;
    let switch = ProtocolSwitch {
        upgrade,
        is_switched: Cell::new(None),
    };
    let error = {
        let down = pin!(receive(scope, pending, &switch, response));
        let up = pin!(send(scope, upload, &switch, body));
        match select(down, up).await {
            Either::Left((ended, _)) => return ended,
            Either::Right((error, _)) => error,
        }
    };
    // The upload was dropped, which tells the backend that the request is incomplete.
    if error == BodyError::Gone && response.is_whole() {
        return Ok(());
    }
    Err(Stopped::by_body(error, response))
}

/// The decision of the backend about a request to switch protocols. Both directions run in one task.
struct ProtocolSwitch {
    upgrade: Option<HttpVersion>,
    /// `None` until the final head was received.
    is_switched: Cell<Option<bool>>,
}

impl ProtocolSwitch {
    /// Waits for the decision. Bytes that the caller sends before are not a body.
    async fn is_accepted(&self, body: &mut impl RequestBody) -> Result<bool, CallerGone> {
        let decided =
            std::future::poll_fn(|_| self.is_switched.get().map_or(Poll::Pending, Poll::Ready));
        match select(decided, pin!(body.gone())).await {
            Either::Left((is_switched, _)) => Ok(is_switched),
            Either::Right((CallerGone, _)) => Err(CallerGone),
        }
    }
}

/// Sends the body as it arrives, then watches the caller. Returns only when the caller is gone or its body is malformed.
async fn send(
    scope: Option<&RequestScope>,
    mut upload: Upload,
    switch: &ProtocolSwitch,
    body: &mut impl RequestBody,
) -> BodyError {
    if switch.upgrade.is_some() {
        match switch.is_accepted(body).await {
            Ok(true) => body.switch_protocols(),
            // An ordinary response: the request has no data.
            Ok(false) => upload = upload.without_body().await,
            Err(CallerGone) => return BodyError::Gone,
        }
    }
    if let Err(error) = send_body(scope, body, &mut upload).await {
        upload.abort();
        return error;
    }
    select(pin!(upload.repeat()), pin!(body.gone())).await;
    BodyError::Gone
}

/// Sends the body to its end. Once the backend reads no more, the rest is received and discarded: the caller may read the
/// response only after it has sent the whole request.
async fn send_body(
    scope: Option<&RequestScope>,
    body: &mut impl RequestBody,
    upload: &mut Upload,
) -> Result<(), BodyError> {
    let mut tiny = None;
    loop {
        let sent = match body.part().await? {
            Part::Data(data) => {
                let last = body.is_done();
                if let Some(scope) = scope {
                    if data.len() < limits::TINY_PIECE && !last {
                        pace(&mut tiny, body).await?;
                    }
                    scope.note(Stage::RequestData { data: &data, last });
                }
                // Watches the caller while a slow backend blocks the send.
                match select(pin!(upload.send(data, last)), pin!(body.gone())).await {
                    Either::Left((Ok(()), _)) if last => return Ok(()),
                    Either::Left((sent, _)) => sent,
                    Either::Right((CallerGone, _)) => return Err(BodyError::Gone),
                }
            }
            end => {
                if let Some(scope) = scope {
                    scope.note(Stage::RequestEnd);
                }
                let trailers = if let Part::Trailers(trailers) = end {
                    Some(trailers)
                } else {
                    None
                };
                // If the backend reads no more, its response says why.
                let _ = upload
                    .finish(trailers.map(fields::end_to_end_trailers))
                    .await;
                return Ok(());
            }
        };
        if sent.is_err() {
            return body.discard(None).await;
        }
    }
}

/// Delays a tiny piece beyond the rate of such pieces. Data that arrives during the pause is read as one piece.
async fn pace(tiny: &mut Option<Bucket>, body: &mut impl RequestBody) -> Result<(), BodyError> {
    let now = Instant::now();
    if tiny
        .get_or_insert_with(|| Bucket::new(limits::TINY_PIECES, now))
        .take(now)
        .is_ok()
    {
        return Ok(());
    }
    match select(runtime::sleep(limits::TINY_PIECE_WAIT), pin!(body.gone())).await {
        Either::Left(_) => Ok(()),
        Either::Right((CallerGone, _)) => Err(BodyError::Gone),
    }
}

/// Receives the response, then waits for the end of the upload.
async fn receive(
    scope: Option<&RequestScope>,
    pending: PendingResponse,
    switch: &ProtocolSwitch,
    response: &mut impl ResponseSink,
) -> Result<(), Stopped> {
    let (head, mut download) = receive_head(scope, pending, switch.upgrade, response).await?;
    let is_switched = head.upgrade.is_some();
    response.head(head).await?;
    switch.is_switched.set(Some(is_switched));
    match receive_body(scope, &mut download, response).await {
        // The caller does not miss the end of the stream.
        Err(Stopped::Failed(_)) if response.is_whole() => {}
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

/// Passes interim responses on and returns the final head with the fields that the caller gets. While an attempt fails and the
/// request can go to another agent, there is another one.
async fn receive_head(
    scope: Option<&RequestScope>,
    mut pending: PendingResponse,
    upgrade: Option<HttpVersion>,
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
    if upgrade == Some(HttpVersion::Http2) && head.upgrade.is_none() && head.status.is_success() {
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
    response: &mut impl ResponseSink,
) -> Result<(), Stopped> {
    let mut trailers = None;
    loop {
        // Parts that are ready are written together; once none is ready, the written ones are flushed.
        let part = match futures_util::poll!(std::future::poll_fn(|cx| download.poll_part(cx))) {
            Poll::Ready(part) => part,
            Poll::Pending => {
                response.flush().await?;
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
                return Ok(response.end(trailers).await?);
            }
        }
    }
}
