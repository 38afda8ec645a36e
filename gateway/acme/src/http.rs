//! HTTP client of the protocol, over ureq: the client of the rest of the product, so that no second HTTP and TLS stack
//! comes with `instant-acme`.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use gw_shared::net::https;
use gw_shared::net::tls::Trusted;
use http::{Request, Response, header};
use http_body_util::BodyExt;
use instant_acme::{BodyWrapper, BytesBody, BytesResponse, Error, HttpClient};

use crate::error::innermost;
use crate::limits::{ANSWER_BYTES_MAX, CONNECT_WITHIN, REQUEST_WITHIN};

/// Client of one authority. Clones share its connections.
#[derive(Clone)]
pub(crate) struct AuthorityClient {
    agent: ureq::Agent,
    /// `Retry-After` of the last answer: `instant-acme` drops that of a refusal.
    retry_after: Arc<Mutex<Option<Duration>>>,
}

/// The authority does not answer, or not in its protocol.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct NoAnswer(String);

impl AuthorityClient {
    /// A client that verifies the authority's server with `authorities`, or with the certificates of the system.
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
        let url = request.uri().to_string();
        let no_answer =
            |reason: String| Error::Other(Box::new(NoAnswer(format!("{url}: {reason}"))));
        // `ureq` sends a body, also an empty one, with POST only.
        let answer = match request.method() == http::Method::POST {
            true => self.agent.run(request),
            false => self.agent.run(request.map(|_| ())),
        };
        let answer = answer.map_err(|error| no_answer(innermost(&error)))?;
        let (parts, mut body) = answer.into_parts();
        let body = body
            .with_config()
            .limit(ANSWER_BYTES_MAX)
            .read_to_vec()
            .map_err(|error| no_answer(innermost(&error)))?;
        let kind = parts.headers.get(header::CONTENT_TYPE);
        let is_problem =
            kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/problem+json"));
        let retry_after = retry_after(&parts.headers);
        *self
            .retry_after
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = retry_after;
        // A proxy before the authority, or a server that is no authority, answers without a problem document (RFC 7807).
        if (parts.status.is_server_error() || parts.status.is_client_error()) && !is_problem {
            return Err(no_answer(format!("it answered {}", parts.status)));
        }
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

/// Seconds or a date (RFC 9110 §10.2.3).
fn retry_after(headers: &http::HeaderMap) -> Option<Duration> {
    let value = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = value.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(value).ok()?;
    date.duration_since(SystemTime::now()).ok()
}
