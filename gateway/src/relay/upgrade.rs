//! Upgrade requests (RFC 9110 §7.8, RFC 8441).

use std::cell::Cell;

use futures_util::future::{Either, select};
use gw_shared::error_code::AgentErrorCode;
use gw_shared::http::Version;

use super::stream::{TransferEnd, conclude, pass_on, receive_body, receive_head};
use crate::error::Error;
use crate::http_message::{CallerGone, Outcome, RequestBody, ResponseSink};
use crate::request_scope::{RequestScope, refuse};
use crate::upstream::{Upload, UpstreamRequest};

/// Carries an upgrade request. If the backend switches, carries both directions until each has ended; one may end long
/// before the other.
pub(super) async fn stream_upgrade(
    scope: &RequestScope,
    request: UpstreamRequest,
    version: Version,
    body: &mut impl RequestBody,
    response: &mut impl ResponseSink,
) -> Outcome {
    let UpstreamRequest { mut upload, response: pending } = request;
    let received = {
        let head = std::pin::pin!(receive_head(scope, pending, response));
        match select(head, std::pin::pin!(body.gone())).await {
            Either::Left((received, _)) => received,
            Either::Right((CallerGone, _)) => return Outcome::CallerGone,
        }
    };
    // `download` counts as a request in flight until both directions have ended.
    let (head, mut download) = match received {
        Ok(received) => received,
        Err(ended) => return conclude(scope, ended, response).await,
    };
    let switched = head.upgrade.is_some();
    if !switched && version == Version::Http2 && head.status.is_success() {
        drop(download);
        // An HTTP/2 caller would take a 2xx for a completed upgrade (RFC 8441 §5).
        let error =
            Error::from_agent(Some(AgentErrorCode::BackendInvalidResponse), "the backend did not switch protocols");
        return refuse(scope, &error, response).await;
    }
    if response.head(head).await.is_err() {
        return Outcome::CallerGone;
    }
    if switched {
        body.switch_protocols();
    } else {
        // An ordinary response: the request has no more data.
        let _ = upload.finish(None).await;
        upload = Upload::None;
    }
    let (received, passed_on) = (Cell::new(false), Cell::new(false));
    let ended = {
        let down = std::pin::pin!(receive_body(scope, &mut download, response));
        let up = std::pin::pin!(async {
            if pass_on(scope, body, upload).await.is_err() {
                return TransferEnd::CallerGone;
            }
            passed_on.set(true);
            if received.get() {
                return TransferEnd::Complete;
            }
            body.gone().await;
            TransferEnd::CallerGone
        });
        match select(down, up).await {
            Either::Left((TransferEnd::Complete, up)) if switched && !passed_on.get() => {
                received.set(true);
                up.await
            }
            Either::Left((ended, _)) | Either::Right((ended, _)) => ended,
        }
    };
    conclude(scope, ended, response).await
}
