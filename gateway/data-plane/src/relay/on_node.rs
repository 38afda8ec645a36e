//! Requests of services that another node of the region owns, or the process that takes over from this one: sends the request
//! there, to be carried as any other.

use std::pin::pin;

use bytes::{Bytes, BytesMut};
use futures_util::future::{Either, select};
use gw_shared::http::{Fields, Part, fields};

use super::carry::Stopped;
use crate::http_message::{BodyError, CallerGone, RequestBody, ResponseSink};
use crate::request_scope::{RequestScope, Stage};
use crate::upstream::UpstreamRequest;
use crate::upstream::cross_node::{CrossNodeRequest, ShortBody};

/// Sends the request, with its body if that is short. `scope` is as in [`carry`](super::carry::carry).
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
    let on_lost = |failed| note(scope, Stage::NodeLost(failed));
    match select(pin!(request.send(short, on_lost)), pin!(body.gone())).await {
        Either::Left((Ok(request), _)) => {
            note(scope, Stage::Upstream(request.response.progress()));
            Ok(request)
        }
        Either::Left((Err(error), _)) => Err(Stopped::Failed(error)),
        Either::Right((CallerGone, _)) => Err(Stopped::CallerGone),
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
