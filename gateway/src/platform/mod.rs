//! The regional apex host: the platform's own endpoints. Tunnels come in by ALPN, not here.

mod address_limits;
mod body;
mod enroll;
pub(crate) mod scope;
pub(crate) mod token;

use std::net::IpAddr;
use std::rc::Rc;

use gw_shared::enrollment;
use gw_shared::http::RequestHead;
use gw_shared::http::fields::X_GW_REQUEST_ID;
use gw_shared::id::RequestId;
use http::header::{self, HeaderValue};
use http::{Method, Response, StatusCode};

pub(crate) use address_limits::{AddressTables, Charge};

use crate::caller::{CallerGone, RequestBody};
use crate::error::{Error, request_id_value};
use crate::worker::Core;

/// How long verifiers may keep the key set: shorter than a new key is published before it signs.
const JWKS_CACHE: &str = "public, max-age=300";

/// Answers a request to the apex from `client`.
pub(crate) async fn serve(
    core: &Rc<Core>,
    request: &RequestHead,
    client: IpAddr,
    id: RequestId,
    body: &mut impl RequestBody,
) -> Result<Response<Vec<u8>>, CallerGone> {
    let answer = match request.target.path() {
        "/oauth/token" => Ok(token::serve(core, request, client, body).await?),
        "/.well-known/jwks.json" => only(&Method::GET, "GET, HEAD", request).map(|()| key_set(core)),
        enrollment::ENROLL_PATH => enroll::enroll(core, request, client, body).await?,
        enrollment::STATUS_PATH => enroll::status(core, request, client).await,
        enrollment::CSR_PATH => enroll::sign(core, request, client, body).await?,
        _ => Err(Error::PathNotFound),
    };
    let mut response = answer.unwrap_or_else(|error| {
        core.counters.refused(&error);
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
