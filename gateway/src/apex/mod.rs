//! The regional apex host: the platform's own endpoints. Tunnels come in by ALPN, not here.

mod address_limits;
mod body;
mod enroll;
pub(crate) mod scope;
pub(crate) mod token;

use gw_shared::http::RequestHead;
use gw_shared::http::fields::X_GW_REQUEST_ID;
use gw_shared::identity::enrollment;
use http::header::{self, HeaderValue};
use http::{Method, Response, StatusCode};

pub(crate) use address_limits::{AddressTables, Charge};

use crate::downstream::{CallerGone, RequestBody};
use crate::error::{Error, request_id_value};
use crate::request_scope::Journey;
use crate::worker::Core;

const JWKS_PATH: &str = "/.well-known/jwks.json";
/// How long verifiers may keep the key set: shorter than a new key is published before it signs.
const JWKS_CACHE: &str = "public, max-age=300";

/// Answers a request to the apex.
pub(crate) async fn serve(
    journey: &Journey,
    request: &RequestHead,
    body: &mut impl RequestBody,
) -> Result<Response<Vec<u8>>, CallerGone> {
    let (core, client, id) = (&journey.core, journey.client, journey.id);
    let path = request.target.path();
    let answer = match path {
        "/oauth/token" => Ok(token::serve(journey, request, body).await?),
        JWKS_PATH => only(&Method::GET, "GET, HEAD", request).map(|()| key_set(core)),
        enrollment::ENROLL_PATH => enroll::enroll(core, request, client, body).await?,
        enrollment::STATUS_PATH => enroll::status(core, request, client).await,
        enrollment::CSR_PATH => enroll::sign(core, request, client, body).await?,
        _ => Err(Error::PathNotFound),
    };
    // All but the keys are given to those only that have authenticated.
    if path != JWKS_PATH && answer.as_ref().is_ok_and(|answer| answer.status().is_success()) {
        journey.authenticated_at_apex();
    }
    let mut response = answer.unwrap_or_else(|error| {
        journey.refused(&error);
        error.response(id)
    });
    response.headers_mut().insert(X_GW_REQUEST_ID, request_id_value(id));
    Ok(response)
}

/// Refuses other methods than `method`; where that is GET, HEAD is as good.
fn only(method: &Method, allowed: &'static str, request: &RequestHead) -> Result<(), Error> {
    let as_good = *method == Method::GET && request.method == Method::HEAD;
    if request.method == *method || as_good { Ok(()) } else { Err(Error::MethodNotAllowed(allowed)) }
}

fn key_set(core: &Core) -> Response<Vec<u8>> {
    json(StatusCode::OK, core.directory().jwks().to_vec(), JWKS_CACHE)
}

/// A JSON response.
fn json(status: StatusCode, body: Vec<u8>, cache: &'static str) -> Response<Vec<u8>> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let length = HeaderValue::from(response.body().len());
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::CONTENT_LENGTH, length);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static(cache));
    response
}
