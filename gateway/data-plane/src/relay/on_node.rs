//! Requests of services that another node of the region owns, or the process that takes over from
//! this one: sends the request there, to be carried as any other.

use std::cell::RefCell;
use std::pin::pin;

use bytes::{Bytes, BytesMut};
use futures_util::future::{Either, select};
use gw_base::error::Error;
use gw_shared::http::{Fields, Part, fields};

use super::carry::Stopped;
use crate::http_message::{BodyError, CallerGone, Moved, Progress, RequestBody, ResponseSink};
use crate::request_scope::{RequestScope, Stage};
use crate::upstream::cross_node::{CrossNodeRequest, NotSent, ShortBody};
use crate::upstream::{PendingResponse, UpstreamRequest};

/// Sends the request, with its body if that is short. `scope` is as in
/// [`carry`](super::carry::carry).
pub(super) async fn open_on_node(
    scope: Option<&RequestScope>,
    request: CrossNodeRequest,
    body: &mut impl RequestBody,
    response: &mut impl ResponseSink,
) -> Result<UpstreamRequest, Stopped> {
    let short = match request.short_body() {
        Some(length) => {
            let kept = request.reserve(length).map_err(Stopped::Failed)?;
            let collected = collect(scope, length, body).await;
            let (data, trailers) = collected.map_err(|error| Stopped::by_body(error, response))?;
            Some(ShortBody {
                data,
                trailers,
                _kept: kept,
            })
        }
        None => None,
    };
    // Those that no scope observes go to the worker or the process of the caller, with its
    // response.
    let lost = RefCell::new(Vec::new());
    let on_lost = |failed| match scope {
        Some(scope) => scope.note(Stage::NodeLost(failed)),
        None => lost.borrow_mut().push(failed),
    };
    let sent = match select(pin!(request.send(short, on_lost)), pin!(body.gone())).await {
        Either::Left((sent, _)) => sent,
        Either::Right((CallerGone, _)) => return Err(Stopped::CallerGone),
    };
    let failed_attempts = lost.into_inner().into();
    match sent {
        Ok(mut request) => {
            if let PendingResponse::Stream(response) = &mut request.response {
                response.failed_before = failed_attempts;
            }
            note(scope, Stage::Upstream(request.response.progress()));
            Ok(request)
        }
        Err(not_sent) => {
            let (error, moved) = match not_sent {
                NotSent::Failed(error) => (error, None),
                NotSent::Waits => (Error::NodeUnavailable, Some(Moved::STILL_HERE)),
            };
            response.progress(Progress {
                failed_attempts,
                moved,
                ..Progress::default()
            });
            Err(Stopped::Failed(error))
        }
    }
}

fn note(scope: Option<&RequestScope>, stage: Stage<'_>) {
    if let Some(scope) = scope {
        scope.note(stage);
    }
}

/// Receives a body of this length.
async fn collect(
    scope: Option<&RequestScope>,
    length: usize,
    body: &mut impl RequestBody,
) -> Result<(Bytes, Option<Fields>), BodyError> {
    let mut whole = BytesMut::new();
    loop {
        match body.part().await? {
            Part::Data(data) => {
                let last = body.is_done();
                note(scope, Stage::RequestData { data: &data, last });
                if last && whole.is_empty() {
                    return Ok((data, None));
                }
                whole.reserve(length.saturating_sub(whole.len()));
                whole.extend_from_slice(&data);
                if last {
                    return Ok((whole.freeze(), None));
                }
            }
            end => {
                note(scope, Stage::RequestEnd);
                let trailers = if let Part::Trailers(trailers) = end {
                    Some(trailers)
                } else {
                    None
                };
                return Ok((whole.freeze(), trailers.map(fields::end_to_end_trailers)));
            }
        }
    }
}
