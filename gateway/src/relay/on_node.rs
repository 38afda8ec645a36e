//! Requests of services that another node of the region owns: sends the request there, then carries it as any other.

use std::pin::pin;

use bytes::BytesMut;
use futures_util::future::{Either, select};
use gw_shared::http::{Part, Version, fields};

use super::stream::{TransferEnd, conclude, stream};
use super::upgrade::stream_upgrade;
use crate::error::Error;
use crate::http_message::{BodyError, CallerGone, Outcome, RequestBody, ResponseSink};
use crate::request_scope::{RequestScope, Stage, refuse};
use crate::upstream::UpstreamRequest;
use crate::upstream::cross_node::{CrossNodeRequest, ShortBody};

/// Why a request was not sent.
enum NotSent {
    CallerGone,
    Ended(TransferEnd),
    Refused(Error),
}

impl From<BodyError> for NotSent {
    fn from(error: BodyError) -> Self {
        match error {
            BodyError::Gone => Self::CallerGone,
            BodyError::Malformed(error) => Self::Ended(TransferEnd::BadBody(error)),
        }
    }
}

/// Relays a request through the node that owns its service.
pub(super) async fn stream_on_node(
    scope: &RequestScope,
    request: CrossNodeRequest,
    upgrade_of: Option<Version>,
    body: &mut impl RequestBody,
    response: &mut impl ResponseSink,
) -> Outcome {
    match send(scope, request, body).await {
        Ok(request) => {
            scope.note(Stage::Upstream(request.response.progress()));
            match upgrade_of {
                Some(version) => stream_upgrade(scope, request, version, body, response).await,
                None => stream(scope, request, body, response).await,
            }
        }
        Err(NotSent::CallerGone) => Outcome::CallerGone,
        Err(NotSent::Ended(ended)) => conclude(scope, ended, response).await,
        Err(NotSent::Refused(error)) => refuse(scope, &error, response).await,
    }
}

/// Sends the request, with its body if that is short.
async fn send(
    scope: &RequestScope,
    request: CrossNodeRequest,
    body: &mut impl RequestBody,
) -> Result<UpstreamRequest, NotSent> {
    let short = match request.short_body() {
        Some(length) => Some(collect(scope, length, body).await?),
        None => None,
    };
    match select(pin!(request.send(short)), pin!(body.gone())).await {
        Either::Left((sent, _)) => sent.map_err(NotSent::Refused),
        Either::Right((CallerGone, _)) => Err(NotSent::CallerGone),
    }
}

/// Receives a body of this length.
async fn collect(scope: &RequestScope, length: usize, body: &mut impl RequestBody) -> Result<ShortBody, BodyError> {
    let mut whole = BytesMut::new();
    loop {
        match body.part().await? {
            Part::Data(data) => {
                let last = body.is_done();
                scope.note(Stage::RequestData { data: &data, last });
                if last && whole.is_empty() {
                    return Ok(ShortBody { data, trailers: None });
                }
                whole.reserve(length.saturating_sub(whole.len()));
                whole.extend_from_slice(&data);
                if last {
                    return Ok(ShortBody { data: whole.freeze(), trailers: None });
                }
            }
            Part::Trailers(trailers) => {
                scope.note(Stage::RequestEnd);
                let trailers = Some(fields::end_to_end_trailers(trailers));
                return Ok(ShortBody { data: whole.freeze(), trailers });
            }
            Part::End => {
                scope.note(Stage::RequestEnd);
                return Ok(ShortBody { data: whole.freeze(), trailers: None });
            }
        }
    }
}
