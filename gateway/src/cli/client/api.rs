//! HTTP client of the administration API.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use gw_control_plane::admin_client::{URL_DEFAULT, is_of_tls_listener};
use gw_shared::command;
use gw_shared::text::escaped;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::connection::AdminEndpoint;
use super::pending_nodes;

const BASE_PATH: &str = "/api/v1";
/// Longer than any request to the API takes.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Longer than any backup takes.
const BACKUP_WITHIN: Duration = Duration::from_hours(1);
const ITEMS_PER_PAGE: usize = 500;
/// Longest name of a document that the API takes, in characters.
const DOCUMENT_NAME_MAX: usize = 200;
/// Largest response body, in bytes; a page of records is far smaller.
const BODY_MAX: u64 = 64 << 20;

pub(crate) struct Api {
    http: ureq::Agent,
    endpoint: AdminEndpoint,
    /// Names of the document that requests apply, for the audit log.
    document: Vec<(&'static str, HeaderValue)>,
}

/// A successful response of the API.
pub(crate) struct ApiReply {
    status: StatusCode,
    /// JSON; empty for a response without a body.
    pub(crate) text: String,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ApiError {
    #[error(
        "no response from {url}: {error}; check that the gateway runs and that --admin-url names \
         its admin listener"
    )]
    Unreachable {
        url: String,
        error: Box<ureq::Error>,
    },
    #[error("{0}")]
    Tls(String),
    #[error("{url} speaks https, not plain HTTP: use https:// in the URL (--admin-url)")]
    NotPlain { url: String },
    #[error(
        "the gateway at {url} refuses the admin token (from {token_source}): it is of another \
         gateway, or an earlier one; use the token in admin.token in the data_dir of that gateway, \
         which --config FILE with its configuration finds"
    )]
    Unauthorized { url: String, token_source: String },
    #[error("{0}")]
    Refused(ReceivedProblem),
    #[error(
        "{url} is not the admin listener of a gateway: it responds with {status} and no problem \
         details; name the listener (`admin_listen`, by default {}) with --admin-url, or the \
         gateway's own configuration with --config",
        URL_DEFAULT
    )]
    UnexpectedResponse { url: String, status: StatusCode },
    #[error("cannot parse the response of the gateway: {0}; check that it runs the same version")]
    Malformed(#[from] serde_json::Error),
}

impl ApiError {
    /// Whether no process listens at the address.
    pub(crate) fn is_connection_refused(&self) -> bool {
        let Self::Unreachable { error, .. } = self else {
            return false;
        };
        matches!(
            &**error,
            ureq::Error::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused
        )
    }
}

/// A captured body.
pub(crate) struct DownloadedBody {
    pub(crate) bytes: Vec<u8>,
    /// `Content-Encoding` (RFC 9110 §8.4).
    pub(crate) encoding: Option<String>,
    pub(crate) truncated: bool,
    /// The reason, in the API's word.
    pub(crate) truncated_by: Option<String>,
}

/// Problem details (RFC 9457).
#[derive(Debug, Deserialize)]
pub(crate) struct ReceivedProblem {
    title: String,
    detail: Option<String>,
    /// Name of the invalid value.
    field: Option<String>,
}

impl std::fmt::Display for ReceivedProblem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Quotes records and requests.
        let detail = escaped(self.detail.as_ref().unwrap_or(&self.title));
        match &self.field {
            // The detail may already begin with the field.
            Some(field) if !detail.starts_with(field.as_str()) => {
                write!(f, "{}: {detail}", escaped(field))
            }
            _ => f.write_str(&detail),
        }
    }
}

/// One or more pages of a list.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Listing {
    pub(crate) items: Vec<Value>,
    pub(crate) next_cursor: Option<String>,
    /// Slots of nodes of the region whose items are missing, because they do not answer.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) missing_nodes: BTreeSet<u16>,
    /// Requests of lost nodes are missing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) missing_archive: bool,
}

impl Api {
    pub(crate) fn new(endpoint: AdminEndpoint) -> Self {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            // No redirects: the token must not be sent to another server.
            .max_redirects(0)
            .max_redirects_will_error(false);
        Self {
            http: endpoint.address.agent(config),
            endpoint,
            document: Vec::new(),
        }
    }

    /// Names the document that the next requests apply, for the audit log, in printable ASCII.
    /// Keeps the end of a long name.
    pub(crate) fn name_document(&mut self, file: &str, revision: Option<&str>) {
        let file: Cow<'_, str> = match file.len().checked_sub(DOCUMENT_NAME_MAX) {
            None | Some(0) => file.into(),
            Some(too_long) => format!("...{}", file.get(too_long + 3..).unwrap_or_default()).into(),
        };
        let fields = [
            ("x-gw-applied-file", Some(&*file)),
            ("x-gw-applied-revision", revision),
        ];
        let fields = fields.into_iter();
        self.document = fields
            .filter_map(|(name, text)| Some((name, HeaderValue::from_str(text?).ok()?)))
            .collect();
    }

    /// Sends a request without a body to `path`, for example `/accounts/acme`.
    pub(crate) fn request(&self, method: Method, path: &str) -> Result<ApiReply, ApiError> {
        self.send(method, path, None, Some(TIMEOUT))
    }

    /// As [`Self::request`], for a listener that may not answer.
    pub(crate) fn request_within(
        &self,
        method: Method,
        path: &str,
        within: Duration,
    ) -> Result<ApiReply, ApiError> {
        self.send(method, path, None, Some(within))
    }

    /// Sends a request with `body`.
    pub(crate) fn request_with(
        &self,
        method: Method,
        path: &str,
        body: &Value,
    ) -> Result<ApiReply, ApiError> {
        self.send(method, path, Some(body), Some(TIMEOUT))
    }

    /// Sends a request that is answered when another operation ends, without a time limit.
    pub(crate) fn wait_for(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<ApiReply, ApiError> {
        self.send(method, path, body, None)
    }

    /// Follows the pages of a list until its end, or until there are `at_most` items.
    pub(crate) fn list(
        &self,
        path: &str,
        filter: &[(&str, &str)],
        at_most: Option<usize>,
    ) -> Result<Listing, ApiError> {
        let mut list = Listing::default();
        loop {
            let missing = at_most.map_or(usize::MAX, |at_most| {
                at_most.saturating_sub(list.items.len())
            });
            let mut query = form_urlencoded::Serializer::new(String::new());
            query
                .append_pair("limit", &missing.min(ITEMS_PER_PAGE).to_string())
                .extend_pairs(filter);
            query.extend_pairs(list.next_cursor.take().map(|cursor| ("cursor", cursor)));
            let page: Listing = self
                .request(Method::GET, &format!("{path}?{}", query.finish()))?
                .parse()?;
            let page_length = page.items.len();
            list.items.extend(page.items);
            list.missing_nodes.extend(page.missing_nodes);
            list.missing_archive |= page.missing_archive;
            list.next_cursor = page.next_cursor;
            if list.next_cursor.is_none() || page_length >= missing {
                return Ok(list);
            }
        }
    }

    pub(crate) fn download(&self, path: &str) -> Result<DownloadedBody, ApiError> {
        let (_, headers, bytes) = self.ask(Method::GET, path, None, Some(TIMEOUT))?;
        let text = |name: &str| {
            headers
                .get(name)
                .and_then(|value| value.to_str().ok())
                .map(str::to_owned)
        };
        let truncated = text("x-gw-truncated").is_some_and(|truncated| truncated == "true");
        Ok(DownloadedBody {
            bytes,
            encoding: text("content-encoding"),
            truncated,
            truncated_by: text("x-gw-truncated-by"),
        })
    }

    fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        timeout: Option<Duration>,
    ) -> Result<ApiReply, ApiError> {
        let (status, _, bytes) = self.ask(method, path, body, timeout)?;
        Ok(ApiReply {
            status,
            text: String::from_utf8_lossy(&bytes).into_owned(),
        })
    }

    /// A backup of the gateway, which is read while it is made.
    pub(crate) fn backup(&self) -> Result<impl io::Read + use<>, ApiError> {
        let mut response = self.begin(Method::GET, "/backup", None, Some(BACKUP_WITHIN))?;
        if !response.status().is_success() {
            let status = response.status();
            let bytes = self.read(&mut response)?;
            return Err(self.refusal(status, &bytes));
        }
        Ok(response.into_body().into_reader())
    }

    /// The response to a request; an error response becomes an error.
    fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        timeout: Option<Duration>,
    ) -> Result<(StatusCode, HeaderMap, Vec<u8>), ApiError> {
        let mut response = self.begin(method, path, body, timeout)?;
        let bytes = self.read(&mut response)?;
        let status = response.status();
        let headers = response.headers().clone();
        if !status.is_success() {
            return Err(self.refusal(status, &bytes));
        }
        if let Some(nodes) = headers
            .get("x-gw-pending-nodes")
            .and_then(|value| value.to_str().ok())
        {
            // The change is made. A failure to say so must not look like a failure to make it.
            for warning in pending_nodes::warnings(nodes) {
                command::note("gw-gateway", format_args!("warning: {warning}"));
            }
        }
        Ok((status, headers, bytes))
    }
}

impl Api {
    /// Sends a request, and returns the response with its body unread.
    fn begin(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        timeout: Option<Duration>,
    ) -> Result<http::Response<ureq::Body>, ApiError> {
        let AdminEndpoint { address, token, .. } = &self.endpoint;
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{BASE_PATH}{path}", address.url))
            .header(ACCEPT, "application/json")
            .header(AUTHORIZATION, format!("Bearer {}", token.reveal()));
        let fields = self.document.iter();
        let request = fields.fold(request, |request, (name, value)| {
            request.header(*name, value)
        });
        let sent = match body {
            Some(body) => {
                let request = request
                    .header(CONTENT_TYPE, "application/json")
                    .body(body.to_string());
                request
                    .map_err(ureq::Error::from)
                    .and_then(|request| self.run(request, timeout))
            }
            None => request
                .body(())
                .map_err(ureq::Error::from)
                .and_then(|request| self.run(request, timeout)),
        };
        sent.map_err(|error| self.unreachable(error))
    }

    fn read(&self, response: &mut http::Response<ureq::Body>) -> Result<Vec<u8>, ApiError> {
        let read = response
            .body_mut()
            .with_config()
            .limit(BODY_MAX)
            .read_to_vec();
        read.map_err(|error| self.unreachable(error))
    }

    fn unreachable(&self, error: ureq::Error) -> ApiError {
        let address = &self.endpoint.address;
        match address.explain(&error) {
            Some(explanation) => ApiError::Tls(explanation),
            None => ApiError::Unreachable {
                url: address.url.clone(),
                error: Box::new(error),
            },
        }
    }

    /// The error of a response without success.
    fn refusal(&self, status: StatusCode, body: &[u8]) -> ApiError {
        let AdminEndpoint {
            address,
            token_source,
            ..
        } = &self.endpoint;
        let url = address.url.clone();
        match status {
            StatusCode::UNAUTHORIZED => ApiError::Unauthorized {
                url,
                token_source: token_source.clone(),
            },
            StatusCode::BAD_REQUEST if is_of_tls_listener(body) => ApiError::NotPlain { url },
            _ => serde_json::from_slice(body).map_or_else(
                |_| ApiError::UnexpectedResponse { url, status },
                ApiError::Refused,
            ),
        }
    }

    fn run(
        &self,
        request: Request<impl ureq::AsSendBody>,
        timeout: Option<Duration>,
    ) -> Result<http::Response<ureq::Body>, ureq::Error> {
        self.http.run(
            self.http
                .configure_request(request)
                .timeout_global(timeout)
                .build(),
        )
    }
}

impl ApiReply {
    /// Whether the request created the record.
    pub(crate) fn created(&self) -> bool {
        self.status == StatusCode::CREATED
    }

    pub(crate) fn parse<T: DeserializeOwned>(&self) -> Result<T, ApiError> {
        Ok(serde_json::from_str(&self.text)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problem_messages_name_the_field_once() {
        let text = |json: &str| {
            serde_json::from_str::<ReceivedProblem>(json)
                .unwrap()
                .to_string()
        };
        assert_eq!(
            text(r#"{"title":"Not Found","detail":"no account acme"}"#),
            "no account acme"
        );
        assert_eq!(
            text(r#"{"title":"Invalid","detail":"at least 1","field":"burst"}"#),
            "burst: at least 1"
        );
        assert_eq!(
            text(r#"{"title":"Invalid","detail":"burst: at least 1","field":"burst"}"#),
            "burst: at least 1"
        );
        assert_eq!(
            text(r#"{"type":"about:blank","title":"Conflict","status":409}"#),
            "Conflict"
        );
    }
}
