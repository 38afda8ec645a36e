//! HTTP client of the protocol, over ureq: the client of the rest of the product, so that no second
//! HTTP and TLS stack comes with `instant-acme`.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use gw_shared::net::https;
use gw_shared::net::tls::Trusted;
use http::response::Parts;
use http::{Method, Request, Response, StatusCode, Uri, header};
use http_body_util::BodyExt;
use instant_acme::{BodyWrapper, BytesBody, BytesResponse, Error, HttpClient};
use serde_json::Value;

use crate::error::{NoAnswer, innermost};
use crate::limits::{ANSWER_BYTES_MAX, CONNECT_WITHIN, REQUEST_WITHIN};

/// Client of one authority. Clones share its connections.
#[derive(Clone)]
pub(crate) struct AuthorityClient {
    agent: ureq::Agent,
    /// `Retry-After` of the last answer: `instant-acme` drops that of a refusal.
    retry_after: Arc<Mutex<Option<Duration>>>,
}

impl AuthorityClient {
    /// A client that verifies the authority's server with `authorities`, or with the certificates
    /// of the system.
    pub(crate) fn new(authorities: Option<&Arc<Trusted>>) -> Self {
        let trusted = authorities.map_or_else(|| Arc::new(Trusted::system()), Arc::clone);
        let config = ureq::Agent::config_builder()
            .timeout_connect(Some(CONNECT_WITHIN))
            .timeout_global(Some(REQUEST_WITHIN))
            .http_status_as_error(false)
            .max_redirects(0)
            .build();
        Self {
            agent: https::agent(config, trusted),
            retry_after: Arc::default(),
        }
    }

    /// A client with the same connections and a `Retry-After` of its own.
    pub(crate) fn beside(&self) -> Self {
        Self {
            agent: self.agent.clone(),
            retry_after: Arc::default(),
        }
    }

    /// `Retry-After` of the last answer that had one, and forgets it.
    pub(crate) fn take_retry_after(&self) -> Option<Duration> {
        self.retry_after
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    /// Sends one request from a thread that may block.
    pub(crate) async fn send(&self, request: Request<Vec<u8>>) -> Result<Response<Bytes>, Error> {
        let client = self.clone();
        let answer = tokio::task::spawn_blocking(move || client.send_blocking(request)).await;
        answer.map_err(|error| Error::Other(Box::new(error)))?
    }

    fn send_blocking(&self, request: Request<Vec<u8>>) -> Result<Response<Bytes>, Error> {
        let url = request.uri().clone();
        let method = request.method().clone();
        let no_answer = |reason: NoAnswer| Error::Other(Box::new(reason));
        // `ureq` sends a body, also an empty one, with POST only.
        let answer = match method == Method::POST {
            true => self.agent.run(request),
            false => self.agent.run(request.map(|_| ())),
        };
        let answer = answer.map_err(|error| {
            no_answer(match https::failure(&error) {
                Some(failure) => NoAnswer::Tls(url.clone(), failure.clone()),
                None => NoAnswer::Unreachable(url.clone(), innermost(&error)),
            })
        })?;
        let (mut parts, mut body) = answer.into_parts();
        let body = body
            .with_config()
            .limit(ANSWER_BYTES_MAX)
            .read_to_vec()
            .map_err(|error| no_answer(NoAnswer::CutOff(url.clone(), innermost(&error))))?;
        let kind = parts.headers.get(header::CONTENT_TYPE);
        let is_problem =
            kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/problem+json"));
        let retry_after = retry_after(&parts.headers);
        *self
            .retry_after
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = retry_after;
        // A proxy before the authority, or a server that is no authority, answers without a problem
        // document (RFC 7807).
        if (parts.status.is_server_error() || parts.status.is_client_error()) && !is_problem {
            return Err(no_answer(NoAnswer::Status(url, parts.status)));
        }
        let body = as_expected(&method, &url, &mut parts, body);
        Ok(Response::from_parts(parts, Bytes::from(body)))
    }
}

impl HttpClient for AuthorityClient {
    fn request(
        &self,
        request: Request<BodyWrapper<Bytes>>,
    ) -> Pin<Box<dyn Future<Output = Result<BytesResponse, Error>> + Send>> {
        let client = self.clone();
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            // A body in memory: it cannot fail.
            let body = match body.collect().await {
                Ok(body) => body.to_bytes().to_vec(),
                Err(never) => match never {},
            };
            let answer = client.send(Request::from_parts(parts, body)).await?;
            let (parts, body) = answer.into_parts();
            let body: Box<dyn BytesBody> = Box::new(body);
            Ok(BytesResponse { parts, body })
        })
    }
}

/// Changes what authorities send and `instant-acme` does not take: a relative `Location` (RFC 9110
/// §10.2.2), 204 to HEAD of a nonce, and `authorizations` that are null.
fn as_expected(method: &Method, url: &Uri, parts: &mut Parts, body: Vec<u8>) -> Vec<u8> {
    let location = parts.headers.get(header::LOCATION);
    let location = location.and_then(|value| absolute(value.to_str().ok()?, url)?.try_into().ok());
    if let Some(location) = location {
        parts.headers.insert(header::LOCATION, location);
    }
    if method == Method::HEAD && parts.status == StatusCode::NO_CONTENT {
        parts.status = StatusCode::OK;
    }
    match serde_json::from_slice::<Value>(&body) {
        Ok(mut order) if order.get("authorizations") == Some(&Value::Null) => {
            order["authorizations"] = Value::Array(Vec::new());
            order.to_string().into_bytes()
        }
        _ => body,
    }
}

/// The URL that a relative reference in the answer of `base` means; `None` if it is absolute.
fn absolute(location: &str, base: &Uri) -> Option<String> {
    let (scheme, authority) = (base.scheme_str()?, base.authority()?);
    let folder = base
        .path()
        .rsplit_once('/')
        .map_or("", |(folder, _)| folder);
    match location {
        _ if location.contains("://") => None,
        _ if location.starts_with("//") => Some(format!("{scheme}:{location}")),
        _ if location.starts_with('/') => Some(format!("{scheme}://{authority}{location}")),
        _ => Some(format!("{scheme}://{authority}{folder}/{location}")),
    }
}

/// Seconds or a date (RFC 9110 §10.2.3).
fn retry_after(headers: &http::HeaderMap) -> Option<Duration> {
    let value = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = value.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(value).ok()?;
    date.duration_since(SystemTime::now()).ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests stop at the first surprise")]

    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::thread;

    use super::*;
    use crate::error::failure;

    /// The answer of an authority, as it is used.
    fn taken(method: &Method, status: u16, location: &str, body: &str) -> Response<Vec<u8>> {
        let url = Uri::from_static("https://ca.example:14000/acme/new-order?a=b");
        let answer = Response::builder().status(status);
        let answer = answer.header(header::LOCATION, location).body(()).unwrap();
        let (mut parts, ()) = answer.into_parts();
        let body = as_expected(method, &url, &mut parts, body.into());
        Response::from_parts(parts, body)
    }

    #[test]
    fn a_relative_location_is_that_of_the_authority() {
        for (given, meant) in [
            ("/order/1", "https://ca.example:14000/order/1"),
            ("order/1", "https://ca.example:14000/acme/order/1"),
            ("//other.example/1", "https://other.example/1"),
            ("https://other.example/1", "https://other.example/1"),
        ] {
            let answer = taken(&Method::POST, 201, given, "");
            assert_eq!(answer.headers()[header::LOCATION], meant);
        }
    }

    #[test]
    fn deviations_of_authorities_are_taken() {
        assert_eq!(taken(&Method::HEAD, 204, "", "").status(), StatusCode::OK);
        let nothing = taken(&Method::GET, 204, "", "").status();
        assert_eq!(nothing, StatusCode::NO_CONTENT);
        let body =
            |text| String::from_utf8(taken(&Method::POST, 200, "", text).into_body()).unwrap();
        assert_eq!(
            body(r#"{"authorizations":null,"status":"valid"}"#),
            r#"{"authorizations":[],"status":"valid"}"#
        );
        for same in [r#"{ "authorizations": ["x"] }"#, "not JSON", "null"] {
            assert_eq!(body(same), same);
        }
    }

    /// The failure of a request to a server that answers with these bytes, or to none.
    fn refusal(answer: Option<&'static str>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/dir", listener.local_addr().unwrap());
        let server = answer.map(|answer| {
            thread::spawn(move || {
                let mut caller = listener.accept().unwrap().0;
                assert!(caller.read(&mut [0; 4096]).unwrap() > 0);
                caller.write_all(answer.as_bytes()).unwrap();
            })
        });
        let client = AuthorityClient::new(Some(&Arc::new(Trusted::only(Vec::new()).unwrap())));
        let request = Request::get(&url).body(Vec::new()).unwrap();
        let answer = client.send_blocking(request);
        let error = answer.map_or_else(
            |error| error,
            |answer| {
                let parsed: Result<Vec<u8>, _> = serde_json::from_slice(answer.body());
                parsed.unwrap_err().into()
            },
        );
        if let Some(server) = server {
            server.join().unwrap();
        }
        failure("the directory", &url, &error).to_string()
    }

    #[test]
    fn only_an_authority_without_an_answer_is_said_to_be_unreachable() {
        let reachable = "check that the directory is reachable";
        assert!(refusal(None).contains(reachable));
        for (answer, says) in [
            (
                "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
                "it answered 404 Not Found; check acme.directory",
            ),
            (
                "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>",
                "is not that of an ACME authority",
            ),
            (
                "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n<html>",
                "its answer broke off",
            ),
        ] {
            let said = refusal(Some(answer));
            assert!(said.contains(says) && !said.contains(reachable), "{said}");
        }
    }
}
