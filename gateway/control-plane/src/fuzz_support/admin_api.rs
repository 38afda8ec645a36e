//! The administration API, with the records and the database of a gateway.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Instant;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, Response, StatusCode, Uri, header};
use bytes::Bytes;
use gw_base::clock::Timestamp;
use gw_base::process::background::Background;
use gw_base::service::hostname::Region;
use gw_base::tls::ServerConfigs;
use gw_base::tls::node::NodeTls;
use gw_interface::config::Config;
use gw_interface::rate_limit::Level;
use gw_interface::replay::Replay;
use gw_interface::workers::{LostNode, ViewApplied, Workers};
use gw_region::View;
use gw_region::owners::ownership::WorkerId;
use gw_shared::identity::secret::SecretHash;
use gw_store::{Directory, RecordId, Records, SqliteStore, Step, Store, StoreSource, StoredRecord};
use gw_telemetry::counters::WorkerReport;
use gw_telemetry::request_log::RequestLog;
use gw_telemetry::timeseries::Series;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::sync::mpsc::UnboundedSender;

use super::memory_folder;
use crate::admin::{Admin, api_router};
use crate::control::changes::change::Plan;
use crate::control::{Actor, Control};

/// Most requests of an input.
const REQUESTS_MAX: usize = 16;
/// Longest response, in bytes.
const RESPONSE_MAX: usize = 4 << 20;

/// Requests of an administrator, each on two lines: method, path and, if the request applies a
/// document, its name; then the body. No request fails by a fault of the gateway. Each refusal
/// describes itself and changes nothing, nor does a request that only reads, or a change that is
/// repeated. At the end the database has the records that are in memory.
pub fn admin_api(data: &[u8]) {
    static GATEWAY: LazyLock<Mutex<Gateway>> = LazyLock::new(|| Mutex::new(Gateway::start()));
    let gateway = GATEWAY.lock().unwrap_or_else(PoisonError::into_inner);
    let mut lines = data.split(|byte| *byte == b'\n');
    for _ in 0..REQUESTS_MAX {
        let Some(line) = lines.next() else { break };
        let body = lines.next().unwrap_or_default();
        gateway.serve(line, body);
    }
    gateway.compare_with_database();
    gateway.set_back();
}

/// The control plane of a gateway without workers.
struct Gateway {
    runtime: Runtime,
    control: Arc<Control>,
    router: TowerToHyperService<Router>,
    authorization: String,
    /// Records that every input begins with.
    first: HashMap<RecordId, (StoredRecord, Value)>,
    folder: TempDir,
    _background: Background,
}

/// A request of an input.
#[derive(Clone, Copy)]
struct AdminRequest<'a> {
    method: &'a str,
    path: &'a str,
    applied_file: &'a [u8],
    body: &'a [u8],
}

/// A response that has arrived whole.
#[derive(Debug, PartialEq)]
struct Answer {
    status: StatusCode,
    body: Bytes,
}

impl Gateway {
    fn start() -> Self {
        let folder = memory_folder();
        let path = folder.path();
        let background = Background::start().expect("threads");
        let config = Config::new(Region::new("eu1", "example.com"), path.to_owned());
        let control = Control::open(&config, Arc::new(NoWorkers), background.tasks());
        let control = Arc::new(control.expect("an empty folder"));
        let records: Vec<StoredRecord> =
            serde_json::from_value(first_records()).expect("valid records");
        control.put_all(&records).expect("a store");
        let log = RequestLog::open(&path.join("requests")).expect("a request log");
        let series = Series::open(&path.join("series.sqlite"));
        let draining = Arc::<AtomicBool>::default();
        let admin = Admin::new(
            Arc::clone(&control),
            Arc::new(log),
            None,
            Arc::new(series),
            draining,
            None,
            443,
        );
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        Self {
            runtime: runtime.expect("a runtime"),
            router: TowerToHyperService::new(api_router(admin)),
            authorization: format!("Bearer {}", control.admin_token().reveal()),
            first: by_id(control.records()),
            control,
            folder,
            _background: background,
        }
    }

    fn serve(&self, line: &[u8], body: &[u8]) {
        let mut words = line.splitn(3, |byte| *byte == b' ');
        let mut text = || std::str::from_utf8(words.next().unwrap_or_default()).ok();
        let (Some(method), Some(path)) = (text(), text()) else {
            return;
        };
        let request = AdminRequest {
            method,
            path,
            applied_file: words.next().unwrap_or_default(),
            body,
        };
        // A backup is the whole database.
        if path.starts_with("/backup") {
            return;
        }
        let before = self.control.position();
        let Some(answer) = self.send(request) else {
            return;
        };
        let is_refused = !answer.status.is_success();
        if is_refused || method == "GET" {
            assert_eq!(self.control.position(), before, "{answer:?}");
        } else if method == "PATCH" {
            let after = self.control.position();
            assert_eq!(self.send(request).as_ref(), Some(&answer), "sent again");
            assert_eq!(self.control.position(), after, "{answer:?}");
        }
    }

    /// Sends a request; `None` if it is not one of HTTP.
    fn send(&self, request: AdminRequest<'_>) -> Option<Answer> {
        let path: Uri = request.path.parse().ok()?;
        let mut builder = Request::builder()
            .method(request.method)
            .uri(path)
            .header(header::AUTHORIZATION, &self.authorization)
            .header(header::CONTENT_TYPE, "application/json");
        if !request.applied_file.is_empty() {
            builder = builder.header("x-gw-applied-file", request.applied_file);
        }
        let is_head = request.method == "HEAD";
        let body = Body::from(Bytes::copy_from_slice(request.body));
        let request = builder.body(body).ok()?;
        Some(self.runtime.block_on(async {
            let response = self.router.call(request).await;
            read(response.expect("a router does not fail"), is_head).await
        }))
    }

    fn compare_with_database(&self) {
        self.control.close_store();
        let path = StoreSource::sqlite_in(self.folder.path());
        let mut database = SqliteStore::open_existing(&path).expect("a database");
        let stored = database.load().expect("records");
        drop(database);
        self.control.reopen_store().expect("the same database");
        assert_eq!(stored.position.revision, self.control.position().revision);
        let [stored, kept] = [stored.records, self.control.records()].map(by_id);
        let json = |records: HashMap<RecordId, (StoredRecord, Value)>| -> HashMap<_, _> {
            records
                .into_iter()
                .map(|(id, (_, json))| (id, json))
                .collect()
        };
        assert_eq!(json(stored), json(kept));
    }

    /// Makes the records those of the beginning.
    fn set_back(&self) {
        let now = by_id(self.control.records());
        let added = now.keys().filter(|id| !self.first.contains_key(id));
        let mut steps: Vec<_> = added.cloned().map(Step::Delete).collect();
        let changed = self
            .first
            .iter()
            .filter(|(id, (_, first))| now.get(id).is_none_or(|(_, record)| record != first));
        steps.extend(changed.map(|(_, (record, _))| Step::Put(record.clone())));
        let plan = |_: &Records, _: Timestamp| {
            Ok(Plan {
                steps: steps.clone(),
                action: "set back",
                account: None,
                target: String::new(),
                detail: Value::Null,
                output: (),
            })
        };
        self.control.change(&Actor::Admin, plan).expect("a store");
    }
}

/// Reads a response, and asserts that it is one of the API. That to a HEAD has no body.
async fn read(response: Response<Body>, is_head: bool) -> Answer {
    let (head, body) = response.into_parts();
    let body = to_bytes(body, RESPONSE_MAX)
        .await
        .expect("a short response");
    let status = head.status;
    let media_type = head.headers.get(header::CONTENT_TYPE);
    let is =
        |wanted: &str| media_type.is_some_and(|it| it.as_bytes().starts_with(wanted.as_bytes()));
    let json: Option<Value> = serde_json::from_slice(&body).ok();
    if is_head {
        assert!(body.is_empty());
    } else if status.is_success() {
        assert!(json.is_some() || !is("application/json"), "{body:?}");
    } else {
        assert!(
            status.is_client_error() || status == StatusCode::SERVICE_UNAVAILABLE,
            "{status}: {body:?}"
        );
        let problem = json.unwrap_or_default();
        assert!(is("application/problem+json"), "{status}: {body:?}");
        assert_eq!(problem["status"], status.as_u16());
        assert!(problem["detail"].is_string() && problem["title"].is_string());
    }
    Answer { status, body }
}

fn by_id(records: Records) -> HashMap<RecordId, (StoredRecord, Value)> {
    let record = |record: StoredRecord| {
        let json = serde_json::to_value(&record).expect("a record is JSON");
        (record.id(), (record, json))
    };
    records.into_vec().into_iter().map(record).collect()
}

/// One record of most kinds. The API can make others.
fn first_records() -> Value {
    let secret = SecretHash::of("secret");
    let created_at = 1_700_000_000;
    json!([
        { "account": { "id": "acme", "created_at": created_at } },
        { "service": service("api") },
        { "service": service("web") },
        { "credential": {
            "id": "gw_ci_00000000000000000001",
            "account": "acme",
            "name": "client",
            "secret": secret,
            "allowed_services": ["api"],
            "enabled": true,
            "created_at": created_at,
        } },
        { "service_key": {
            "id": "0123456789abcdef", "account": "acme", "secret": secret,
            "allowed_services": ["api", "web"], "enabled": true, "created_at": created_at,
        } },
        { "agent": {
            "id": "ag_01234567890123456789",
            "account": "acme",
            "name": "agent",
            "services": ["api"],
            "status": "pending",
            "created_at": created_at,
        } },
    ])
}

fn service(id: &str) -> Value {
    let settings = gw_base::service::service_settings::ServiceSettings::default();
    let mut record = json!(settings);
    record["account"] = "acme".into();
    record["id"] = id.into();
    record["created_at"] = 1_700_000_000.into();
    record
}

/// Takes the place of the workers.
pub(crate) struct NoWorkers;

impl Workers for NoWorkers {
    fn count(&self) -> usize {
        1
    }

    fn publish_directory(&self, _: &Arc<Directory>) {}

    fn publish_read(&self, _: Instant) {}

    fn publish_view(&self, _: u64, _: &Arc<View>, _: &UnboundedSender<ViewApplied>) {}

    fn publish_levels(&self, _: &Arc<Vec<Level>>) {}

    fn publish_node_tls(&self, _: &Arc<NodeTls>) {}

    fn end_connections(&self, _: LostNode) {}

    fn publish_certificates(&self, _: &Arc<ServerConfigs>) {}

    fn reports(&self, _: bool) -> Vec<WorkerReport> {
        Vec::new()
    }

    fn replay(&self, _: WorkerId, replay: Box<Replay>) -> Result<(), Box<Replay>> {
        Err(replay)
    }
}
