//! Requests to switch to another protocol (RFC 9110 §7.8, RFC 8441).

use std::cell::Cell;

use futures_util::future::{Either, select};
use gw_shared::error_code::AgentErrorCode;
use gw_shared::http::Version;

use super::{Ended, Outcome, conclude, pass_on, receive_body, receive_head, refuse};
use crate::downstream::{CallerGone, RequestBody, ResponseSink};
use crate::error::Error;
use crate::request_scope::Journey;
use crate::upstream::{Exchange, Upload};

/// Relays the request. If the backend agrees, both halves are carried until
/// each has ended: one may end long before the other.
pub(super) async fn switch(
    journey: &Journey,
    exchange: Exchange,
    version: Version,
    body: &mut impl RequestBody,
    response: &mut impl ResponseSink,
) -> Outcome {
    let Exchange { mut upload, response: pending } = exchange;
    let received = {
        let head = std::pin::pin!(receive_head(journey, pending, response));
        match select(head, std::pin::pin!(body.gone())).await {
            Either::Left((received, _)) => received,
            Either::Right((CallerGone, _)) => return Outcome::CallerGone,
        }
    };
    // Counts among the requests in flight as long as it is kept: until both halves have ended.
    let (head, mut download) = match received {
        Ok(received) => received,
        Err(ended) => return conclude(journey, ended, response).await,
    };
    let switched = head.upgrade.is_some();
    if !switched && version == Version::Http2 && head.status.is_success() {
        drop(download);
        // To a caller of HTTP/2 it would mean that the backend has switched (RFC 8441 §5).
        let error =
            Error::from_agent(Some(AgentErrorCode::BackendInvalidResponse), "the backend did not switch protocols");
        return refuse(journey, &error, response).await;
    }
    if response.head(head).await.is_err() {
        return Outcome::CallerGone;
    }
    if switched {
        body.switch_protocols();
    } else {
        // An ordinary response: nothing more will be sent.
        let _ = upload.finish(None).await;
        upload = Upload::None;
    }
    let (received, passed_on) = (Cell::new(false), Cell::new(false));
    let ended = {
        let down = std::pin::pin!(receive_body(journey, &mut download, response));
        let up = std::pin::pin!(async {
            if pass_on(journey, body, upload).await.is_err() {
                return Ended::CallerGone;
            }
            passed_on.set(true);
            if received.get() {
                return Ended::Complete;
            }
            body.gone().await;
            Ended::CallerGone
        });
        match select(down, up).await {
            Either::Left((Ended::Complete, up)) if switched && !passed_on.get() => {
                received.set(true);
                up.await
            }
            Either::Left((ended, _)) | Either::Right((ended, _)) => ended,
        }
    };
    conclude(journey, ended, response).await
}
