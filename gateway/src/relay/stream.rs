//! Carries the bodies of a relayed request: up to the agent and down to the caller.

use std::task::Poll;
use std::time::Instant;

use futures_util::future::{Either, select};
use gw_shared::http::fields::{self, X_GW_REQUEST_ID};
use gw_shared::http::{InvalidBody, Part};
use gw_shared::runtime;

use crate::error::{Error, request_id_value};
use crate::http_message::{BodyError, CallerGone, Outcome, RequestBody, ResponseHead, ResponseSink, set_date};
use crate::limits;
use crate::rate_limit::Bucket;
use crate::request_scope::{RequestScope, Stage, refuse};
use crate::upstream::{Download, Frame, PendingResponse, Upload, UpstreamRequest};

/// Carries the request body up and the response down at the same time, until the response is complete or one side is
/// gone. Dropping this future cancels the request up to the backend.
pub(super) async fn stream(
    scope: &RequestScope,
    request: UpstreamRequest,
    body: &mut impl RequestBody,
    response: &mut impl ResponseSink,
) -> Outcome {
    let UpstreamRequest { upload, response: pending } = request;
    let ended = {
        let down = std::pin::pin!(receive_response(scope, pending, response));
        let up = std::pin::pin!(send_body(scope, body, upload));
        match select(down, up).await {
            Either::Left((ended, _)) => ended,
            Either::Right((BodyError::Gone, _)) => return Outcome::CallerGone,
            Either::Right((BodyError::Malformed(error), _)) => TransferEnd::BadBody(error),
        }
    };
    conclude(scope, ended, response).await
}

pub(super) async fn conclude(scope: &RequestScope, ended: TransferEnd, response: &mut impl ResponseSink) -> Outcome {
    match ended {
        TransferEnd::Complete => Outcome::Complete,
        TransferEnd::Cut => Outcome::Cut,
        TransferEnd::CallerGone => Outcome::CallerGone,
        TransferEnd::Refused(error) => refuse(scope, &error, response).await,
        TransferEnd::BadBody(_) if response.has_begun() => Outcome::Cut,
        TransferEnd::BadBody(error) => {
            response.begin_own_response(false);
            refuse(scope, &Error::BadRequest(error.to_string()), response).await
        }
    }
}

/// How the transfer of a request ended.
pub(super) enum TransferEnd {
    Complete,
    Cut,
    CallerGone,
    Refused(Error),
    BadBody(InvalidBody),
}

/// Passes the body on as it arrives, then watches the caller. Returns only when the caller is gone or its body is
/// malformed: a response can be complete long before or after its request.
async fn send_body(scope: &RequestScope, body: &mut impl RequestBody, upload: Upload) -> BodyError {
    if let Err(error) = pass_on(scope, body, upload).await {
        return error;
    }
    body.gone().await;
    BodyError::Gone
}

/// Passes the body on to its end, or until the backend stops reading it.
pub(super) async fn pass_on(
    scope: &RequestScope,
    body: &mut impl RequestBody,
    mut upload: Upload,
) -> Result<(), BodyError> {
    let mut tiny = None;
    loop {
        match body.part().await {
            Ok(Part::Data(data)) => {
                let last = body.is_done();
                if data.len() < limits::TINY_PIECE && !last {
                    let now = Instant::now();
                    let bucket = tiny.get_or_insert_with(|| Bucket::new(limits::TINY_PIECES, now));
                    if bucket.take(now).is_err() {
                        // Data that arrives during the pause is read as one piece.
                        let pause = runtime::sleep(limits::TINY_PIECE_WAIT);
                        if let Either::Right((CallerGone, _)) = select(pause, std::pin::pin!(body.gone())).await {
                            return Err(BodyError::Gone);
                        }
                    }
                }
                scope.note(Stage::RequestData { data: &data, last });
                // Watches the caller while a slow backend blocks the send.
                let send = std::pin::pin!(upload.send(data, last));
                let sent = match select(send, std::pin::pin!(body.gone())).await {
                    Either::Left((sent, _)) => sent,
                    Either::Right((CallerGone, _)) => return Err(BodyError::Gone),
                };
                // The response says why the data was not taken.
                if last || sent.is_err() {
                    return Ok(());
                }
            }
            Ok(Part::Trailers(trailers)) => {
                scope.note(Stage::RequestEnd);
                let _ = upload.finish(Some(fields::end_to_end_trailers(trailers))).await;
                return Ok(());
            }
            Ok(Part::End) => {
                scope.note(Stage::RequestEnd);
                let _ = upload.finish(None).await;
                return Ok(());
            }
            Err(error) => {
                upload.abort();
                return Err(error);
            }
        }
    }
}

async fn receive_response(
    scope: &RequestScope,
    pending: PendingResponse,
    response: &mut impl ResponseSink,
) -> TransferEnd {
    let (head, mut download) = match receive_head(scope, pending, response).await {
        Ok(received) => received,
        Err(ended) => return ended,
    };
    if response.head(head).await.is_err() {
        return TransferEnd::CallerGone;
    }
    receive_body(scope, &mut download, response).await
}

/// Passes interim responses on and returns the final head with the fields that the caller gets.
pub(super) async fn receive_head(
    scope: &RequestScope,
    mut pending: PendingResponse,
    response: &mut impl ResponseSink,
) -> Result<(ResponseHead, Download), TransferEnd> {
    while let Some(interim) = pending.interim().await {
        response.interim(interim).await.map_err(|CallerGone| TransferEnd::CallerGone)?;
    }
    let (progress, received) = pending.head().await;
    scope.note(Stage::Upstream(progress));
    let (mut head, download) = received.map_err(TransferEnd::Refused)?;
    scope.note(Stage::ResponseHead(&head));
    head.headers.insert(X_GW_REQUEST_ID, request_id_value(scope.id));
    set_date(&mut head.headers);
    Ok((head, download))
}

pub(super) async fn receive_body(
    scope: &RequestScope,
    download: &mut Download,
    response: &mut impl ResponseSink,
) -> TransferEnd {
    let mut trailers = None;
    loop {
        // Frames that are ready are written together; once none is ready, the written ones are flushed.
        let frame = match futures_util::poll!(std::future::poll_fn(|cx| download.poll_frame(cx))) {
            Poll::Ready(frame) => frame,
            Poll::Pending => {
                if response.flush().await.is_err() {
                    return TransferEnd::CallerGone;
                }
                std::future::poll_fn(|cx| download.poll_frame(cx)).await
            }
        };
        let sent = match frame {
            Ok(Frame::Data(data)) => {
                let (bytes, last) = (data.len(), download.is_done());
                scope.note(Stage::ResponseData(&data));
                let sent = response.data(data, last).await;
                download.release(bytes);
                sent
            }
            Ok(Frame::Trailers(fields)) => {
                trailers = Some(fields);
                Ok(())
            }
            Ok(Frame::End) => {
                scope.note(Stage::ResponseEnd);
                return match response.end(trailers).await {
                    Ok(()) => TransferEnd::Complete,
                    Err(CallerGone) => TransferEnd::CallerGone,
                };
            }
            Ok(Frame::Head(_) | Frame::Broken(_)) | Err(_) => return TransferEnd::Cut,
        };
        if sent.is_err() {
            return TransferEnd::CallerGone;
        }
    }
}
