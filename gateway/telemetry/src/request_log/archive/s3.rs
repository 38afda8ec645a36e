//! Bucket of an S3-compatible server: the `object_store` crate on ureq, the HTTP client of the rest of the product.
//!
//! All functions block. Futures of the store never wait, since each request is sent within one poll.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_executor::block_on;
use futures_util::TryStreamExt;
use gw_base::clock::Timestamp;
use http::{Method, Request};
use http_body_util::BodyExt;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use object_store::path::Path;
use object_store::{ClientOptions, GetOptions, ObjectStore, ObjectStoreExt, RetryConfig};
use rustls::crypto::aws_lc_rs;
use ureq::tls::{Certificate, RootCerts, TlsConfig};

use super::{ArchiveError, ArchiveSettings};

const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// Longest wait for the beginning of a response.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// Longest time of one request, which moves at most [`OBJECT_MAX`].
const REQUEST_WITHIN: Duration = Duration::from_secs(120);
/// Most bytes read of one response.
pub(super) const OBJECT_MAX: u64 = 64 << 20;
/// Most objects listed at once.
const LISTED_MAX: usize = 20_000;
/// Longest text of a server's error in a message.
const REASON_MAX: usize = 300;

/// The bucket, and the beginning of the names of all objects in it.
pub(super) struct S3Bucket {
    store: AmazonS3,
    prefix: String,
    place: String,
}

impl S3Bucket {
    pub(super) fn new(settings: &ArchiveSettings) -> Result<Self, ArchiveError> {
        let mut builder = AmazonS3Builder::new()
            .with_bucket_name(&settings.bucket)
            .with_region(&settings.region)
            .with_access_key_id(&settings.access_key_id)
            .with_secret_access_key(settings.secret_key.reveal())
            .with_virtual_hosted_style_request(!settings.path_style)
            // Not all servers delete several objects at once.
            .with_disable_bulk_delete(true)
            .with_allow_http(true)
            // The uploader retries with a backoff of its own. The store's would wait in a runtime of tokio.
            .with_retry(RetryConfig {
                max_retries: 0,
                ..RetryConfig::default()
            })
            .with_http_connector(Connector(agent(settings)));
        if let Some(endpoint) = &settings.endpoint {
            // The store expects the bucket in the host of the endpoint, if requests are to have it there.
            let hosted = endpoint.replacen("://", &format!("://{}.", settings.bucket), 1);
            builder = builder.with_endpoint(if settings.path_style {
                endpoint
            } else {
                &hosted
            });
        }
        if let Some(token) = &settings.session_token {
            builder = builder.with_token(token.reveal());
        }
        let place = settings.place();
        let store = builder
            .build()
            .map_err(|error| failure("use", &place, &error))?;
        Ok(Self {
            store,
            prefix: settings.prefix.clone(),
            place,
        })
    }

    /// Writes or replaces an object.
    pub(super) fn put(&self, name: &str, content: Vec<u8>) -> Result<(), ArchiveError> {
        let written = block_on(
            self.store
                .put(&self.path(name), Bytes::from(content).into()),
        );
        written
            .map(drop)
            .map_err(|error| failure("write", name, &error))
    }

    /// Reads an object, or a part of it. `None` if it does not exist.
    pub(super) fn get(
        &self,
        name: &str,
        range: Option<Range<u64>>,
    ) -> Result<Option<Vec<u8>>, ArchiveError> {
        let options = GetOptions {
            range: range.map(Into::into),
            ..GetOptions::default()
        };
        let read = block_on(async {
            self.store
                .get_opts(&self.path(name), options)
                .await?
                .bytes()
                .await
        });
        found(read, "read", name).map(|bytes| bytes.map(Vec::from))
    }

    /// When an object was written, by the clock of the server. `None` if it does not exist.
    pub(super) fn written_at(&self, name: &str) -> Result<Option<Timestamp>, ArchiveError> {
        let meta = block_on(self.store.head(&self.path(name)));
        Ok(found(meta, "read", name)?.map(|meta| Timestamp(meta.last_modified.timestamp())))
    }

    /// Deletes an object. It may be missing.
    pub(super) fn delete(&self, name: &str) -> Result<(), ArchiveError> {
        found(
            block_on(self.store.delete(&self.path(name))),
            "delete",
            name,
        )
        .map(drop)
    }

    /// Names of the objects directly or further below `folder`, at most `limit`.
    pub(super) fn objects(&self, folder: &str, limit: usize) -> Result<Vec<String>, ArchiveError> {
        let mut objects = self.store.list(Some(&self.path(folder)));
        let mut names = Vec::new();
        block_on(async {
            while names.len() < limit.min(LISTED_MAX)
                && let Some(object) = objects.try_next().await?
            {
                names.extend(self.name(&object.location));
            }
            Ok(names)
        })
        .map_err(|error| failure("list", folder, &error))
    }

    /// Names of the folders directly below `folder`, without it.
    pub(super) fn folders(&self, folder: &str) -> Result<Vec<String>, ArchiveError> {
        let listed = block_on(self.store.list_with_delimiter(Some(&self.path(folder))));
        let listed = listed.map_err(|error| failure("list", folder, &error))?;
        let folders = listed
            .common_prefixes
            .iter()
            .filter_map(|path| path.parts().next_back());
        Ok(folders.map(|part| part.as_ref().to_owned()).collect())
    }

    pub(super) fn place(&self) -> &str {
        &self.place
    }

    fn path(&self, name: &str) -> Path {
        if self.prefix.is_empty() {
            Path::from(name)
        } else {
            Path::from(format!("{}/{name}", self.prefix))
        }
    }

    /// Name without the prefix. `None` of an object outside it.
    fn name(&self, path: &Path) -> Option<String> {
        let text = path.as_ref();
        let rest = if self.prefix.is_empty() {
            Some(text)
        } else {
            text.strip_prefix(&self.prefix)?.strip_prefix('/')
        };
        rest.map(str::to_owned)
    }
}

fn found<T>(
    result: object_store::Result<T>,
    action: &'static str,
    name: &str,
) -> Result<Option<T>, ArchiveError> {
    match result {
        Ok(value) => Ok(Some(value)),
        // Servers tell a missing bucket by the same status.
        Err(object_store::Error::NotFound { source, .. })
            if !source.to_string().contains("NoSuchBucket") =>
        {
            Ok(None)
        }
        Err(error) => Err(failure(action, name, &error)),
    }
}

fn failure(action: &'static str, name: &str, error: &object_store::Error) -> ArchiveError {
    ArchiveError::Store {
        action,
        name: name.to_owned(),
        reason: reason(error),
    }
}

/// The server's own code and message if it sent them, else the innermost cause.
fn reason(error: &object_store::Error) -> String {
    let text = error.to_string();
    let element = |name: &str| {
        let (_, rest) = text.split_once(&format!("<{name}>"))?;
        rest.split_once("</")
            .map(|(content, _)| content.trim().to_owned())
    };
    let mut reason = match (element("Code"), element("Message")) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        (Some(code), None) => code,
        _ => {
            let mut cause: &dyn std::error::Error = error;
            while let Some(next) = cause.source() {
                cause = next;
            }
            cause.to_string()
        }
    };
    reason.truncate(reason.floor_char_boundary(REASON_MAX));
    reason.replace(char::is_control, " ")
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
    let authorities = settings.authorities.clone().unwrap_or_else(|| {
        let found = rustls_native_certs::load_native_certs();
        if found.certs.is_empty() {
            tracing::warn!(errors = ?found.errors, "archive: the system has no trusted root certificates; connections will fail");
        }
        found.certs
    });
    let roots: Vec<_> = authorities
        .iter()
        .map(|root| Certificate::from_der(root).to_owned())
        .collect();
    let tls = TlsConfig::builder()
        .root_certs(RootCerts::new_with_certs(&roots))
        .unversioned_rustls_crypto_provider(Arc::new(aws_lc_rs::default_provider()))
        .build();
    config.tls_config(tls).build().new_agent()
}

#[derive(Debug)]
struct Connector(ureq::Agent);

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Client(self.0.clone())))
    }
}

#[derive(Debug)]
struct Client(ureq::Agent);

#[async_trait]
impl HttpService for Client {
    /// Blocks. Only threads of the uploader and of readers call this.
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (parts, body) = request.into_parts();
        let body = match body.as_bytes() {
            Some(bytes) => bytes.clone(),
            None => body.collect().await?.to_bytes(),
        };
        self.send(Request::from_parts(parts, body))
            .map_err(|error| HttpError::new(kind(&error), error))
    }
}

impl Client {
    fn send(&self, request: Request<Bytes>) -> Result<HttpResponse, ureq::Error> {
        let (parts, body) = request.into_parts();
        let response = match parts.method {
            Method::PUT | Method::POST => self.0.run(Request::from_parts(parts, &body[..]))?,
            _ => self.0.run(Request::from_parts(parts, ()))?,
        };
        let (parts, mut body) = response.into_parts();
        let body = body.with_config().limit(OBJECT_MAX).read_to_vec()?;
        Ok(HttpResponse::from_parts(parts, body.into()))
    }
}

fn kind(error: &ureq::Error) -> HttpErrorKind {
    match error {
        ureq::Error::Timeout(_) => HttpErrorKind::Timeout,
        ureq::Error::ConnectionFailed | ureq::Error::HostNotFound => HttpErrorKind::Connect,
        ureq::Error::Io(_) => HttpErrorKind::Interrupted,
        _ => HttpErrorKind::Unknown,
    }
}
