//! Bucket of an S3-compatible server, reached with ureq, the HTTP client of the rest of the
//! product.
//!
//! All functions block. Only threads of the uploader and of readers call them.

mod answer;
mod signature;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gw_base::clock::Timestamp;
use gw_shared::net::https;
use gw_shared::net::tls::{Remedies, Trusted};
use http::uri::{Authority, Scheme};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use time::OffsetDateTime;

use self::answer::{Listed, reason, shortened};
use self::signature::{Credentials, Request, escaped};
use super::{ArchiveError, ArchiveSettings};

const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// Longest wait for the beginning of a response, which an upload gets once the object is stored.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// Longest time of one request, which moves at most [`OBJECT_MAX`].
const REQUEST_WITHIN: Duration = Duration::from_secs(120);
/// Most bytes read of one response.
pub(super) const OBJECT_MAX: u64 = 64 << 20;
/// Most bytes read of a list, which has 1,000 names of at most 1,024 bytes.
const LIST_MAX: u64 = 8 << 20;
/// Most bytes read of an error, or of the answer to a write.
const MESSAGE_MAX: u64 = 64 << 10;
/// Most objects or folders listed at once.
const LISTED_MAX: usize = 20_000;
/// Most requests for one list: a server may answer with few names at a time.
const PAGES_MAX: usize = 1000;

/// The bucket, and the beginning of the names of all objects in it.
#[derive(Clone)]
pub(super) struct S3Bucket {
    agent: ureq::Agent,
    credentials: Credentials,
    scheme: Scheme,
    authority: Authority,
    /// Path of the bucket without a `/` at its end: empty if the bucket is in the host.
    path: String,
    prefix: String,
    place: String,
    /// End of all requests, if they have one together.
    until: Option<Instant>,
}

/// A response that was read completely.
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Vec<u8>,
}

impl S3Bucket {
    pub(super) fn new(settings: &ArchiveSettings) -> Result<Self, ArchiveError> {
        let place = settings.place();
        let (scheme, authority) =
            server(settings).map_err(|error| failure("use", &place, error.to_string()))?;
        let credentials = Credentials {
            access_key_id: settings.access_key_id.clone(),
            secret_key: settings.secret_key.clone(),
            session_token: settings.session_token.clone(),
            region: settings.region.clone(),
        };
        Ok(Self {
            agent: agent(settings),
            credentials,
            scheme,
            authority,
            path: match settings.path_style {
                true => format!("/{}", settings.bucket),
                false => String::new(),
            },
            prefix: settings.prefix.clone(),
            place,
            until: None,
        })
    }

    /// The bucket for requests that end before `until`.
    pub(super) fn until(&self, until: Instant) -> Self {
        let until = Some(until);
        Self {
            until,
            ..self.clone()
        }
    }

    /// Writes or replaces an object.
    pub(super) fn put(&self, name: &str, content: &[u8]) -> Result<(), ArchiveError> {
        let request = Request {
            content,
            ..self.object(Method::PUT, name)
        };
        let answer = self.send(request, MESSAGE_MAX);
        answer
            .and_then(|answer| answer.successful().map(drop))
            .map_err(|reason| failure("write", name, reason))
    }

    /// Reads an object, or a part of it. `None` if it does not exist.
    pub(super) fn get(
        &self,
        name: &str,
        range: Option<&Range<u64>>,
    ) -> Result<Option<Vec<u8>>, ArchiveError> {
        let mut request = self.object(Method::GET, name);
        if let Some(Range { start, end }) = range {
            let last = end.saturating_sub(1);
            request
                .headers
                .insert("range", format!("bytes={start}-{last}"));
        }
        let answer = self.send(request, OBJECT_MAX);
        let read = answer.and_then(|answer| {
            let Some(answer) = answer.found()? else {
                return Ok(None);
            };
            if let Some(range) = range {
                answer.is_range(range)?;
            }
            Ok(Some(answer.body))
        });
        read.map_err(|reason| failure("read", name, reason))
    }

    /// When an object was written, by the clock of the server. `None` if it does not exist.
    pub(super) fn written_at(&self, name: &str) -> Result<Option<Timestamp>, ArchiveError> {
        let answer = self.send(self.object(Method::HEAD, name), MESSAGE_MAX);
        let written_at = answer.and_then(|answer| {
            let answer = answer.found()?;
            answer.map(|answer| answer.last_modified()).transpose()
        });
        written_at.map_err(|reason| failure("read", name, reason))
    }

    /// Deletes an object. It may be missing.
    pub(super) fn delete(&self, name: &str) -> Result<(), ArchiveError> {
        let answer = self.send(self.object(Method::DELETE, name), MESSAGE_MAX);
        answer
            .and_then(|answer| answer.found().map(drop))
            .map_err(|reason| failure("delete", name, reason))
    }

    /// Names of the objects directly or further below `folder`, at most `limit`.
    pub(super) fn objects(&self, folder: &str, limit: usize) -> Result<Vec<String>, ArchiveError> {
        let limit = limit.min(LISTED_MAX);
        let mut names = Vec::new();
        self.list(folder, None, |page| {
            names.extend(page.objects.iter().filter_map(|key| self.name(key)));
            names.len() < limit
        })?;
        names.truncate(limit);
        Ok(names)
    }

    /// Names of the folders directly below `folder`, without it.
    pub(super) fn folders(&self, folder: &str) -> Result<Vec<String>, ArchiveError> {
        let mut names = Vec::new();
        self.list(folder, Some("/"), |page| {
            let names_of_page = page.folders.iter().filter_map(|key| {
                let (_, name) = key.strip_suffix('/')?.rsplit_once('/')?;
                Some(name.to_owned())
            });
            names.extend(names_of_page);
            names.len() < LISTED_MAX
        })?;
        Ok(names)
    }

    pub(super) fn place(&self) -> &str {
        &self.place
    }

    /// Lists the objects below `folder` page by page. Ends early if `each` returns `false`.
    fn list(
        &self,
        folder: &str,
        delimiter: Option<&str>,
        mut each: impl FnMut(&Listed) -> bool,
    ) -> Result<(), ArchiveError> {
        let failed = |reason| failure("list", folder, reason);
        let prefix = format!("{}/", self.key(folder));
        let mut continuation = None;
        for _ in 0..PAGES_MAX {
            let page = self
                .page(&prefix, delimiter, continuation.as_deref())
                .map_err(failed)?;
            if !each(&page) || page.continuation.is_none() {
                return Ok(());
            }
            continuation = page.continuation;
        }
        Err(failed(format!(
            "the list does not end within {PAGES_MAX} requests"
        )))
    }

    fn page(
        &self,
        prefix: &str,
        delimiter: Option<&str>,
        continuation: Option<&str>,
    ) -> Result<Listed, String> {
        let optional = [
            ("continuation-token", continuation),
            ("delimiter", delimiter),
        ];
        let mut query = BTreeMap::from([("list-type", "2"), ("prefix", prefix)]);
        query.extend(
            optional
                .into_iter()
                .filter_map(|(name, it)| Some((name, it?))),
        );
        let path = match self.path.as_str() {
            "" => "/".to_owned(),
            path => path.to_owned(),
        };
        let request = Request {
            query,
            ..self.request(Method::GET, path)
        };
        let answer = self.send(request, LIST_MAX)?.successful()?;
        Listed::parse(&answer.body)
            .map_err(|error| shortened(format!("the answer is not a list of objects: {error}")))
    }

    fn object<'a>(&self, method: Method, name: &str) -> Request<'a> {
        self.request(
            method,
            format!("{}/{}", self.path, escaped(&self.key(name))),
        )
    }

    fn request<'a>(&self, method: Method, path: String) -> Request<'a> {
        Request {
            method,
            path,
            query: BTreeMap::new(),
            headers: BTreeMap::from([("host", self.authority.to_string())]),
            content: b"",
        }
    }

    /// Signs and sends a request. Reads at most `limit` bytes of the body.
    fn send(&self, mut request: Request<'_>, limit: u64) -> Result<Answer, String> {
        let left = |until: Instant| until.saturating_duration_since(Instant::now());
        let left = self.until.map_or(REQUEST_WITHIN, left);
        self.credentials
            .sign(&mut request, OffsetDateTime::now_utc());
        let uri = Uri::builder()
            .scheme(self.scheme.clone())
            .authority(self.authority.clone())
            .path_and_query(request.target())
            .build()
            .map_err(|error| error.to_string())?;
        let mut sent = http::Request::new(());
        *sent.method_mut() = request.method;
        *sent.uri_mut() = uri;
        for (name, value) in request.headers {
            let mut value = HeaderValue::try_from(value)
                .map_err(|_| format!("the header {name} cannot have its value"))?;
            value.set_sensitive(true);
            sent.headers_mut().insert(name, value);
        }
        let response = match *sent.method() {
            Method::PUT => self.agent.run(sent.map(|()| request.content)),
            _ => {
                let sent = self.agent.configure_request(sent);
                self.agent.run(sent.timeout_global(Some(left)).build())
            }
        };
        let (parts, mut body) = response.map_err(|error| innermost(&error))?.into_parts();
        let limit = match parts.status.is_success() {
            true => limit,
            false => limit.min(MESSAGE_MAX),
        };
        let body = body.with_config().limit(limit).read_to_vec();
        Ok(Answer {
            status: parts.status,
            headers: parts.headers,
            body: body.map_err(|error| innermost(&error))?,
        })
    }

    /// Name of an object in the bucket.
    fn key(&self, name: &str) -> String {
        if self.prefix.is_empty() {
            name.to_owned()
        } else {
            format!("{}/{name}", self.prefix)
        }
    }

    /// Name without the prefix. `None` of an object outside it.
    fn name(&self, key: &str) -> Option<String> {
        let rest = if self.prefix.is_empty() {
            Some(key)
        } else {
            key.strip_prefix(&self.prefix)?.strip_prefix('/')
        };
        rest.map(str::to_owned)
    }
}

impl Answer {
    fn successful(self) -> Result<Self, String> {
        match self.status.is_success() {
            true => Ok(self),
            false => Err(reason(self.status, &self.body)),
        }
    }

    /// `None` if the object does not exist.
    fn found(self) -> Result<Option<Self>, String> {
        if self.status != StatusCode::NOT_FOUND {
            return self.successful().map(Some);
        }
        // Servers tell a missing bucket by the same status.
        let reason = reason(self.status, &self.body);
        match reason.contains("NoSuchBucket") {
            true => Err(reason),
            false => Ok(None),
        }
    }

    /// Checks that the body is this part of an object.
    fn is_range(&self, range: &Range<u64>) -> Result<(), String> {
        let Range { start, end } = range;
        let expected = format!("bytes {start}-{}/", end.saturating_sub(1));
        let given = self.header(&header::CONTENT_RANGE).unwrap_or_default();
        let is_partial = self.status == StatusCode::PARTIAL_CONTENT;
        if is_partial && given.starts_with(&expected) && self.body.len() as u64 == end - start {
            Ok(())
        } else {
            Err(shortened(format!(
                "bytes {start} to {end} were requested; the server answered {} with {} bytes, \
                 Content-Range: {given}",
                self.status,
                self.body.len()
            )))
        }
    }

    fn last_modified(&self) -> Result<Timestamp, String> {
        let text = self.header(&header::LAST_MODIFIED).unwrap_or_default();
        let time = httpdate::parse_http_date(text)
            .map_err(|_| shortened(format!("the server answered Last-Modified: {text}")))?;
        Ok(Timestamp(OffsetDateTime::from(time).unix_timestamp()))
    }

    fn header(&self, name: &header::HeaderName) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

/// Scheme and authority of the URLs, as a client writes them in `Host`: without the port of the
/// scheme.
fn server(settings: &ArchiveSettings) -> Result<(Scheme, Authority), http::Error> {
    let endpoint: Uri = match &settings.endpoint {
        Some(endpoint) => endpoint.parse()?,
        None => Uri::try_from(format!("https://s3.{}.amazonaws.com", settings.region))?,
    };
    let is_http = endpoint.scheme() == Some(&Scheme::HTTP);
    let (scheme, port_of_scheme) = match is_http {
        true => (Scheme::HTTP, 80),
        false => (Scheme::HTTPS, 443),
    };
    let mut host = endpoint.host().unwrap_or_default().to_ascii_lowercase();
    if !settings.path_style {
        host = format!("{}.{host}", settings.bucket);
    }
    let port = endpoint.port_u16().filter(|port| *port != port_of_scheme);
    let authority = match port {
        Some(port) => format!("{host}:{port}"),
        None => host,
    };
    Ok((scheme, Authority::try_from(authority)?))
}

fn failure(action: &'static str, name: &str, reason: String) -> ArchiveError {
    ArchiveError::Store {
        action,
        name: name.to_owned(),
        reason,
    }
}

/// What to do about errors of TLS with the store.
const REMEDIES: Remedies = Remedies {
    issuer: "set archive.ca to a PEM file of the authority's certificate, or of this certificate \
             itself",
    name: "name it by a name of its certificate in archive.endpoint, or set archive.ca to a PEM \
           file of this certificate",
    certificate: "replace it at the store, or set the clock of this machine",
    client_certificate: "let the store accept requests without one",
    not_tls: "correct archive.endpoint",
    other: "check that archive.endpoint names the HTTPS port of the store",
    versions: "TLS 1.3 and 1.2",
};

/// The cause that an error of the network begins with.
fn innermost(error: &ureq::Error) -> String {
    if matches!(error, ureq::Error::Timeout(_)) {
        return "the store has not answered in time".to_owned();
    }
    if let Some(failure) = https::failure(error) {
        return REMEDIES.explain(failure);
    }
    let mut cause: &dyn std::error::Error = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    shortened(cause.to_string())
}

fn agent(settings: &ArchiveSettings) -> ureq::Agent {
    let config = ureq::Agent::config_builder()
        .timeout_connect(Some(CONNECT_WITHIN))
        .timeout_recv_response(Some(ANSWER_WITHIN))
        .timeout_global(Some(REQUEST_WITHIN))
        .http_status_as_error(false)
        .max_redirects(0);
    if settings
        .endpoint
        .as_deref()
        .is_some_and(|endpoint| endpoint.starts_with("http:"))
    {
        return config.build().new_agent();
    }
    let trusted = settings.authorities.clone();
    https::agent(
        config.build(),
        trusted.unwrap_or_else(|| Arc::new(Trusted::system())),
    )
}
