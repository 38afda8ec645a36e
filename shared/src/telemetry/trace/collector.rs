//! Connection to the collector: OpenTelemetry's OTLP exporter (protobuf, retries with backoff) on
//! ureq, the HTTP client of the rest of the product.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use opentelemetry::KeyValue;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::resource::{EnvResourceDetector, TelemetryResourceDetector};
use opentelemetry_sdk::trace::SpanExporter as _;

use super::export::{ExporterError, ProgramIdentity};
use super::settings::CollectorUrl;
use crate::net::https;
use crate::net::tls::Trusted;

/// Time limit for one batch, retries included.
const EXPORT_WITHIN: Duration = Duration::from_secs(10);
/// Longest pause that a collector can ask for.
const LONGEST_HOLD: Duration = Duration::from_secs(600);
/// Most bytes read of a response body, which only tells what was rejected.
const ANSWER_MAX: u64 = 64 * 1024;

/// Builds the exporter. It connects when the first batch is sent.
pub(super) fn connect(
    endpoint: &CollectorUrl,
    identity: &ProgramIdentity,
) -> Result<(SpanExporter, Arc<LastAnswer>), ExporterError> {
    let answers = Arc::new(LastAnswer::default());
    let client = CollectorClient {
        http: agent(endpoint),
        answers: Arc::clone(&answers),
    };
    let mut exporter = SpanExporter::builder()
        .with_http()
        .with_http_client(client)
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(endpoint.as_str())
        .with_timeout(EXPORT_WITHIN)
        .build()
        .map_err(|error| ExporterError::Exporter(error.to_string()))?;
    exporter.set_resource(&resource(identity));
    Ok((exporter, answers))
}

/// Resource attributes of this program. OpenTelemetry's environment variables add to them and
/// override them.
fn resource(identity: &ProgramIdentity) -> Resource {
    let ours = [
        KeyValue::new("service.name", identity.service_name),
        KeyValue::new("service.version", crate::version::VERSION),
        KeyValue::new("service.instance.id", identity.instance_id.clone()),
        KeyValue::new("gw.region", identity.region.clone()),
    ];
    let resource = Resource::builder_empty()
        .with_attributes(ours)
        .with_detectors(&[
            Box::new(TelemetryResourceDetector),
            Box::new(EnvResourceDetector::new()),
        ]);
    match std::env::var("OTEL_SERVICE_NAME") {
        Ok(name) if !name.is_empty() => resource.with_service_name(name).build(),
        _ => resource.build(),
    }
}

fn agent(endpoint: &CollectorUrl) -> ureq::Agent {
    let config = ureq::Agent::config_builder()
        .timeout_global(Some(EXPORT_WITHIN))
        .http_status_as_error(false)
        .max_redirects(0);
    if !endpoint.as_str().starts_with("https:") {
        return config.build().new_agent();
    }
    https::agent(config.build(), Arc::new(Trusted::system()))
}

/// The collector's last answer, written by the HTTP client and read by the exporting thread.
#[derive(Debug, Default)]
pub(super) struct LastAnswer(Mutex<Answer>);

#[derive(Debug, Clone, Default)]
pub(super) struct Answer {
    /// Reason why the last attempt failed; `None` if it succeeded.
    pub(super) failure: Option<String>,
    /// Time before which the collector accepts nothing (`Retry-After`).
    pub(super) hold_until: Option<Instant>,
}

impl LastAnswer {
    pub(super) fn last(&self) -> Answer {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn set(&self, answer: Answer) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = answer;
    }
}

#[derive(Debug)]
struct CollectorClient {
    http: ureq::Agent,
    answers: Arc<LastAnswer>,
}

#[async_trait::async_trait]
impl HttpClient for CollectorClient {
    /// Blocks. Only the exporting thread calls this.
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let sent = self.send(request);
        self.answers.set(match &sent {
            Ok(response) if response.status().is_success() => Answer::default(),
            Ok(response) => Answer {
                failure: Some(format!("the collector answered {}", response.status())),
                hold_until: retry_after(response)
                    .and_then(|delay| Instant::now().checked_add(delay)),
            },
            Err(error) => Answer {
                failure: Some(error.to_string()),
                hold_until: None,
            },
        });
        Ok(sent?)
    }
}

impl CollectorClient {
    fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, ureq::Error> {
        let (parts, body) = request.into_parts();
        let (parts, mut body) = self
            .http
            .run(Request::from_parts(parts, &body[..]))?
            .into_parts();
        let body = body.with_config().limit(ANSWER_MAX).read_to_vec()?;
        Ok(Response::from_parts(parts, body.into()))
    }
}

/// Delay in `Retry-After` if it is in seconds. A date, which collectors do not send, is left to the
/// exporter's retries.
fn retry_after(response: &Response<Bytes>) -> Option<Duration> {
    let seconds = response
        .headers()
        .get(http::header::RETRY_AFTER)?
        .to_str()
        .ok()?
        .trim()
        .parse()
        .ok()?;
    Some(Duration::from_secs(seconds).min(LONGEST_HOLD))
}
