//! Answers to other nodes: what this node has, and nothing of other nodes. An object that does not
//! exist is `null`: status 404 is left to nodes of other versions, without such a path.

use std::sync::Arc;

use axum::extract::{Path, Query, State};
use axum::routing::get;
use axum::{Json, Router};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use gw_base::page::Page;
use gw_region::Member;
use gw_shared::http::Fields;
use gw_shared::id::RequestId;
use gw_telemetry::request_log::{
    BodyCapture, BodyView, CapturedRequest, MessageCapture, RequestView, SearchQuery, Side,
    Truncation,
};
use gw_telemetry::timeseries::{SeriesCounts, SeriesPlan};
use http::{HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};

use super::{console_sessions, live};
use crate::admin::Admin;
use crate::admin::problem::Problem;
use crate::cluster::UnavailableNode;

pub(in crate::admin) fn routes() -> Router<Admin> {
    Router::new()
        .route("/v1/alive", get(async || "ok\n"))
        .route(
            "/v1/console-sessions/{key}",
            get(console_sessions::show)
                .put(console_sessions::open)
                .delete(console_sessions::end),
        )
        .route("/v1/live", get(live::serve))
        .route("/v1/requests", get(search))
        .route("/v1/requests/{id}", get(show))
        .route("/v1/requests/{id}/body/{side}", get(body))
        .route("/v1/requests/{id}/captured", get(captured))
        .route("/v1/series", get(series))
}

async fn search(
    State(admin): State<Admin>,
    Query(query): Query<SearchQuery>,
) -> Result<Json<Page<RequestView>>, Problem> {
    Ok(Json(admin.read_log(move |log| log.search(&query)).await?))
}

async fn show(
    State(admin): State<Admin>,
    Path(id): Path<String>,
) -> Result<Json<Option<RequestView>>, Problem> {
    let Ok(id) = id.parse::<RequestId>() else {
        return Ok(Json(None));
    };
    Ok(Json(admin.read_log(move |log| log.show(id)).await?))
}

async fn body(
    State(admin): State<Admin>,
    Path((id, side)): Path<(String, Side)>,
) -> Result<Json<Option<WireBody>>, Problem> {
    let Ok(id) = id.parse::<RequestId>() else {
        return Ok(Json(None));
    };
    let body = admin.read_log(move |log| log.body(id, side)).await?;
    Ok(Json(body.map(WireBody::from)))
}

async fn captured(
    State(admin): State<Admin>,
    Path(id): Path<String>,
) -> Result<Json<Option<WireCaptured>>, Problem> {
    let Ok(id) = id.parse::<RequestId>() else {
        return Ok(Json(None));
    };
    let captured = admin.read_log(move |log| log.captured(id)).await?;
    Ok(Json(captured.map(WireCaptured::from)))
}

async fn series(
    State(admin): State<Admin>,
    Query(plan): Query<SeriesPlan>,
) -> Result<Json<SeriesCounts>, Problem> {
    let series = Arc::clone(&admin.series);
    let counts = admin.ask(move |control| Ok(series.counts(&plan, &control.directory())?));
    Ok(Json(counts.await?))
}

/// A captured body.
#[derive(Serialize, Deserialize)]
pub(super) struct WireBody {
    content_type: Option<String>,
    content_encoding: Option<String>,
    truncated: bool,
    truncated_by: Option<Truncation>,
    /// In base64.
    bytes: String,
}

/// A recorded request with its captured message.
#[derive(Serialize, Deserialize)]
pub(super) struct WireCaptured {
    view: RequestView,
    target: String,
    request: Option<WireMessage>,
}

#[derive(Serialize, Deserialize)]
struct WireMessage {
    /// Names, and values in base64.
    headers: Vec<(String, String)>,
    truncated: bool,
    truncated_by: Option<Truncation>,
    /// In base64.
    body: String,
}

/// Another node sent an object that is not valid.
pub(super) struct InvalidObject;

impl InvalidObject {
    pub(super) fn of(self, node: &Member) -> UnavailableNode {
        UnavailableNode {
            slot: node.slot.get(),
            reason: "sends an invalid answer".to_owned(),
        }
    }
}

fn decode(text: &str) -> Result<Vec<u8>, InvalidObject> {
    STANDARD.decode(text).map_err(|_| InvalidObject)
}

impl From<BodyView> for WireBody {
    fn from(body: BodyView) -> Self {
        let BodyView {
            content_type,
            content_encoding,
            truncated,
            truncated_by,
            bytes,
        } = body;
        Self {
            content_type,
            content_encoding,
            truncated,
            truncated_by,
            bytes: STANDARD.encode(bytes),
        }
    }
}

impl TryFrom<WireBody> for BodyView {
    type Error = InvalidObject;

    fn try_from(body: WireBody) -> Result<Self, InvalidObject> {
        let WireBody {
            content_type,
            content_encoding,
            truncated,
            truncated_by,
            bytes,
        } = body;
        Ok(Self {
            content_type,
            content_encoding,
            truncated,
            truncated_by,
            bytes: decode(&bytes)?,
        })
    }
}

impl From<CapturedRequest> for WireCaptured {
    fn from(kept: CapturedRequest) -> Self {
        let message = |MessageCapture { headers, body }: MessageCapture| WireMessage {
            headers: headers
                .iter()
                .map(|(name, value)| (name.to_string(), STANDARD.encode(value)))
                .collect(),
            truncated: body.truncated,
            truncated_by: body.truncated_by,
            body: STANDARD.encode(&body.bytes),
        };
        Self {
            view: kept.view,
            target: kept.target,
            request: kept.request.map(message),
        }
    }
}

impl TryFrom<WireCaptured> for CapturedRequest {
    type Error = InvalidObject;

    fn try_from(kept: WireCaptured) -> Result<Self, InvalidObject> {
        let message = |WireMessage {
                           headers,
                           truncated,
                           truncated_by,
                           body,
                       }: WireMessage| {
            let field = |(name, value): (String, String)| {
                let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| InvalidObject)?;
                let value = HeaderValue::from_bytes(&decode(&value)?).map_err(|_| InvalidObject)?;
                Ok((name, value))
            };
            let headers = headers
                .into_iter()
                .map(field)
                .collect::<Result<Fields, InvalidObject>>()?;
            let body = BodyCapture {
                bytes: decode(&body)?.into(),
                truncated,
                truncated_by,
            };
            Ok(MessageCapture { headers, body })
        };
        let method = kept.view.method.parse().map_err(|_| InvalidObject)?;
        let request = kept.request.map(message).transpose()?;
        Ok(Self {
            view: kept.view,
            method,
            target: kept.target,
            request,
        })
    }
}
