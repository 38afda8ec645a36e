//! A client of the administration API and of the metrics.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use http::HeaderMap;
use serde::Deserialize;
use serde_json::{Value, json};

use super::SOON;
use super::metrics::Metrics;
use super::scene::About;

/// Time after which a gateway answers without the workers that have not reported.
const REPORT_WITHIN: Duration = Duration::from_secs(2);

/// A response of the API.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) content_type: String,
    pub(crate) location: String,
    pub(crate) cache_control: String,
    pub(crate) retry_after: String,
    /// Slots of the nodes that may not use the change yet, such as `1, 2;dead`.
    pub(crate) pending_nodes: String,
    pub(crate) body: Value,
}

impl Reply {
    /// Whether the node with this slot may not use the change yet.
    pub(crate) fn is_pending_at(&self, slot: &str) -> bool {
        self.pending_nodes
            .split([',', ';'])
            .any(|part| part.trim() == slot)
    }

    /// The body of a success.
    #[track_caller]
    pub(crate) fn done(self) -> Value {
        assert!((200..300).contains(&self.status), "{self:?}");
        self.body
    }
}

/// A tunnel, as the API shows it with its agent.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Tunnel {
    pub(crate) agent_id: String,
    pub(crate) agent_version: String,
    pub(crate) certificate_not_after: Option<String>,
    pub(crate) draining: bool,
    pub(crate) generation: u64,
    pub(crate) held_bytes: usize,
    pub(crate) in_flight: usize,
    /// Slot of the node that has it; `None` outside a region.
    pub(crate) node: Option<u16>,
    pub(crate) round_trip_us: Option<u64>,
    pub(crate) service: String,
    pub(crate) slots: Option<u32>,
    pub(crate) slots_in_use: Option<u32>,
    #[serde(default)]
    pub(crate) standby: bool,
    pub(crate) state: String,
    pub(crate) state_reason: Option<String>,
    pub(crate) state_seconds: u64,
    pub(crate) window: u32,
    pub(crate) worker: usize,
}

/// A client of a gateway's administration API.
#[derive(Debug, Clone)]
pub(crate) struct Api {
    /// URL of the admin listener.
    url: String,
    token: String,
}

impl Api {
    pub(crate) fn of(about: &About) -> Self {
        Self::new(&about.admin_url, &about.admin_token)
    }

    /// A client of the admin listener at `address`, which speaks plain HTTP.
    pub(crate) fn at(address: SocketAddr, token: &str) -> Self {
        Self::new(&format!("http://{address}"), token)
    }

    fn new(url: &str, token: &str) -> Self {
        Self {
            url: url.to_owned(),
            token: token.trim().to_owned(),
        }
    }

    /// Sends a request with this `Authorization`.
    pub(crate) fn send(
        &self,
        method: &str,
        path: &str,
        authorization: &str,
        content_type: &str,
        body: &str,
    ) -> Reply {
        self.try_send(method, path, authorization, content_type, body)
            .unwrap()
    }

    fn try_send(
        &self,
        method: &str,
        path: &str,
        authorization: &str,
        content_type: &str,
        body: &str,
    ) -> Result<Reply, ureq::Error> {
        let url = format!("{}/api/v1{path}", self.url);
        let request = http::Request::builder()
            .method(method)
            .uri(url)
            .header("Authorization", authorization)
            .header("Content-Type", content_type)
            .body(body)
            .unwrap();
        let mut response = client().run(request)?;
        let header = |name: &str| {
            response
                .headers()
                .get(name)
                .map_or("", |value| value.to_str().unwrap())
                .to_owned()
        };
        let content_type = header("content-type");
        let location = header("location");
        let cache_control = header("cache-control");
        let retry_after = header("retry-after");
        let pending_nodes = header("x-gw-pending-nodes");
        let status = response.status().as_u16();
        let body = response.body_mut().read_to_string()?;
        let body = if body.is_empty() {
            Value::Null
        } else {
            serde_json::from_str(&body).unwrap()
        };
        Ok(Reply {
            status,
            content_type,
            location,
            cache_control,
            retry_after,
            pending_nodes,
            body,
        })
    }

    pub(crate) fn ask(&self, method: &str, path: &str, body: &Value) -> Reply {
        self.ask_raw(method, path, &written(body))
    }

    /// As [`Self::ask`]; `None` if the gateway ends before the answer.
    pub(crate) fn try_ask(&self, method: &str, path: &str, body: &Value) -> Option<Reply> {
        let token = format!("Bearer {}", self.token);
        let body = written(body);
        self.try_send(method, path, &token, "application/json", &body)
            .ok()
    }

    /// Sends `body` unchanged.
    pub(crate) fn ask_raw(&self, method: &str, path: &str, body: &str) -> Reply {
        let token = format!("Bearer {}", self.token);
        self.send(method, path, &token, "application/json", body)
    }

    pub(crate) fn get(&self, path: &str) -> Reply {
        self.ask("GET", path, &Value::Null)
    }

    /// The body of the answer to a POST, which must succeed.
    #[track_caller]
    pub(crate) fn post(&self, path: &str, body: &Value) -> Value {
        self.ask("POST", path, body).done()
    }

    /// The body of the answer to a PATCH, which must succeed.
    #[track_caller]
    pub(crate) fn patch(&self, path: &str, body: &Value) -> Value {
        self.ask("PATCH", path, body).done()
    }

    /// A DELETE, which must succeed.
    #[track_caller]
    pub(crate) fn delete(&self, path: &str) {
        self.ask("DELETE", path, &Value::Null).done();
    }

    /// The items of a list; of its first page if it has several.
    #[track_caller]
    pub(crate) fn list(&self, path: &str) -> Vec<Value> {
        let mut page = self.get(path).done();
        serde_json::from_value(page["items"].take()).unwrap()
    }

    /// Headers and bytes of a resource that is not JSON.
    pub(crate) fn download(&self, path: &str) -> (HeaderMap, Vec<u8>) {
        let request = ureq::get(format!("{}/api/v1{path}", self.url));
        let token = format!("Bearer {}", self.token);
        let mut response = request.header("Authorization", token).call().unwrap();
        (
            response.headers().clone(),
            response.body_mut().read_to_vec().unwrap(),
        )
    }
}

/// Records.
impl Api {
    /// Creates an account that may capture, unless it exists.
    #[track_caller]
    pub(crate) fn create_account(&self, account: &str) {
        let body = json!({ "id": account, "capture_allowed": true });
        self.post("/accounts", &body);
    }

    /// Creates a service with default settings, and its account if it does not exist.
    #[track_caller]
    pub(crate) fn create_service(&self, account: &str, service: &str) {
        self.create_account(account);
        let path = format!("/accounts/{account}/services");
        self.post(&path, &json!({ "id": service }));
    }

    /// Changes settings of a service. Returns once they are in force.
    #[track_caller]
    pub(crate) fn change_service(&self, account: &str, service: &str, changes: &Value) {
        self.patch(&format!("/accounts/{account}/services/{service}"), changes);
        self.await_workers();
    }

    /// Creates a service key; returns its id and its full text.
    #[track_caller]
    pub(crate) fn create_service_key(&self, account: &str, services: &[&str]) -> (String, String) {
        let path = format!("/accounts/{account}/service-keys");
        let key = self.post(&path, &json!({ "allowed_services": services }));
        (text(&key["key_id"]), text(&key["service_key"]))
    }

    /// Creates a credential; returns its client id and secret.
    #[track_caller]
    pub(crate) fn create_credential(&self, account: &str, services: &[&str]) -> (String, String) {
        let path = format!("/accounts/{account}/credentials");
        let credential = self.post(&path, &json!({ "allowed_services": services }));
        (
            text(&credential["client_id"]),
            text(&credential["client_secret"]),
        )
    }

    /// Creates an enrollment token for one agent.
    #[track_caller]
    pub(crate) fn create_enrollment_token(&self, account: &str, services: &[&str]) -> String {
        let path = format!("/accounts/{account}/enrollment-tokens");
        text(&self.post(&path, &json!({ "services": services }))["token"])
    }

    /// An agent as the API shows it.
    #[track_caller]
    pub(crate) fn agent(&self, account: &str, agent: &str) -> Value {
        self.get(&format!("/accounts/{account}/agents/{agent}"))
            .done()
    }

    /// The agents of an account, as the API shows them.
    #[track_caller]
    pub(crate) fn agents(&self, account: &str) -> Vec<Value> {
        self.list(&format!("/accounts/{account}/agents"))
    }

    #[track_caller]
    pub(crate) fn revoke_agent(&self, account: &str, agent: &str) {
        self.post(
            &format!("/accounts/{account}/agents/{agent}/revoke"),
            &Value::Null,
        );
    }

    #[track_caller]
    pub(crate) fn delete_agent(&self, account: &str, agent: &str) {
        self.delete(&format!("/accounts/{account}/agents/{agent}"));
    }

    /// The newest entries of the audit log with this action, newest first.
    #[track_caller]
    pub(crate) fn audit(&self, action: &str) -> Vec<Value> {
        let mut entries = self.list("/audit-log?limit=1000");
        entries.retain(|entry| entry["action"] == action);
        entries
    }
}

/// What the workers do.
impl Api {
    pub(crate) fn metrics(&self) -> Metrics {
        let metrics = || {
            let request = client().get(format!("{}/metrics", self.url));
            let token = format!("Bearer {}", self.token);
            let mut response = request.header("Authorization", token).call().unwrap();
            response.body_mut().read_to_string().unwrap()
        };
        Metrics::parse(&of_all_workers(metrics, |_| false))
    }

    /// The tunnels of all agents, in a region those at all nodes.
    pub(crate) fn tunnels(&self) -> Vec<Tunnel> {
        let of_account = |account: Value| {
            let path = format!("/accounts/{}/agents?limit=1000", text(&account["id"]));
            let is_node_missing = |agents: &Vec<Value>| {
                let missing = |agent: &Value| !agent["missing_nodes"].is_null();
                agents.iter().any(missing)
            };
            of_all_workers(|| self.list(&path), is_node_missing)
        };
        self.list("/accounts?limit=1000")
            .into_iter()
            .flat_map(of_account)
            .flat_map(|mut agent| {
                serde_json::from_value::<Vec<Tunnel>>(agent["tunnels"].take()).unwrap()
            })
            .collect()
    }

    /// Waits until all workers have put in force what was changed before.
    pub(crate) fn await_workers(&self) {
        self.metrics();
    }
}

/// An answer to which all workers have contributed: on a busy machine a worker can be missing at
/// first. `may_be_late` says whether it is late because of other nodes.
fn of_all_workers<T>(ask: impl Fn() -> T, may_be_late: impl Fn(&T) -> bool) -> T {
    let deadline = Instant::now() + SOON;
    loop {
        let began = Instant::now();
        let answer = ask();
        if began.elapsed() < REPORT_WITHIN || may_be_late(&answer) {
            return answer;
        }
        assert!(Instant::now() < deadline, "a worker does not report");
    }
}

/// The text of a body; empty if there is none.
fn written(body: &Value) -> String {
    match body {
        Value::Null => String::new(),
        body => body.to_string(),
    }
}

fn client() -> ureq::Agent {
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        .allow_non_standard_methods(true)
        .timeout_global(Some(SOON))
        .build()
        .into()
}

#[track_caller]
fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}
