//! The administration API of a gateway.

use std::time::Duration;

use serde_json::{Value, json};

use crate::demo::UNLIMITED;
use crate::failure::{Failure, ensure};

const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// A client with the token of an administrator.
pub(crate) struct AdminApi {
    /// `http://address:port` of the admin listener.
    url: String,
    token: String,
    http: ureq::Agent,
}

/// Answer to a request.
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) body: Value,
    /// Slots of the nodes that may serve without a change.
    pub(crate) pending: Vec<usize>,
}

/// A key of services.
pub(crate) struct ServiceKey {
    pub(crate) id: String,
    pub(crate) secret: String,
}

impl AdminApi {
    pub(crate) fn new(url: &str, token: &str) -> Self {
        let http = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(ANSWER_WITHIN));
        Self {
            url: url.to_owned(),
            token: token.to_owned(),
            http: http.build().new_agent(),
        }
    }

    /// The same administrator at another admin listener.
    pub(crate) fn at(&self, url: &str) -> Self {
        Self::new(url, &self.token)
    }

    /// Sends a request; `body` is null for one without.
    pub(crate) fn exchange(
        &self,
        method: &str,
        path: &str,
        body: &Value,
    ) -> Result<Reply, Failure> {
        let url = format!("{}/api/v1{path}", self.url);
        let failed = |error: ureq::Error| Failure::during(&url, error);
        let text = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        let request = http::Request::builder()
            .method(method)
            .uri(&url)
            .header("Authorization", format!("Bearer {}", self.token))
            .header("Content-Type", "application/json")
            .body(text)
            .map_err(|error| Failure::during(&url, error))?;
        let mut response = self.http.run(request).map_err(failed)?;
        let pending = response
            .headers()
            .get("X-Gw-Pending-Nodes")
            .and_then(|names| names.to_str().ok());
        // Such as `2, 5;dead`.
        let slot = |node: &str| node.split(';').next()?.trim().parse().ok();
        let pending = pending.unwrap_or_default().split(',').filter_map(slot);
        let pending = pending.collect();
        let text = response.body_mut().read_to_string().map_err(failed)?;
        Ok(Reply {
            status: response.status().as_u16(),
            body: serde_json::from_str(&text).unwrap_or(Value::Null),
            pending,
        })
    }

    /// Like [`Self::exchange`], and fails unless the status is that of a success.
    pub(crate) fn change(&self, method: &str, path: &str, body: &Value) -> Result<Value, Failure> {
        let Reply { status, body, .. } = self.exchange(method, path, body)?;
        ensure((200..300).contains(&status), || {
            format!("{method} {path}: {status} {body}")
        })?;
        Ok(body)
    }

    pub(crate) fn create_account(&self, id: &str) -> Result<(), Failure> {
        self.change("POST", "/accounts", &json!({ "id": id }))
            .map(drop)
    }

    /// Creates a service whose rate limit is never reached.
    pub(crate) fn create_service(&self, account: &str, id: &str) -> Result<(), Failure> {
        let service = json!({ "id": id, "burst": UNLIMITED, "refill_per_minute": UNLIMITED });
        self.change("POST", &format!("/accounts/{account}/services"), &service)
            .map(drop)
    }

    pub(crate) fn create_key(
        &self,
        account: &str,
        name: &str,
        services: &[String],
    ) -> Result<ServiceKey, Failure> {
        let key = json!({ "name": name, "allowed_services": services });
        let key = self.change("POST", &format!("/accounts/{account}/service-keys"), &key)?;
        Ok(ServiceKey {
            id: text(&key, "key_id")?,
            secret: text(&key, "service_key")?,
        })
    }

    /// An enrollment token for this number of agents.
    pub(crate) fn enrollment_token(
        &self,
        account: &str,
        services: &[String],
        uses: usize,
    ) -> Result<String, Failure> {
        let token = json!({ "services": services, "uses": uses });
        let path = format!("/accounts/{account}/enrollment-tokens");
        text(&self.change("POST", &path, &token)?, "token")
    }
}

/// A member of a JSON object that is a text.
pub(crate) fn text(object: &Value, member: &str) -> Result<String, Failure> {
    let text = object[member].as_str().map(str::to_owned);
    text.ok_or_else(|| Failure::new(format!("no {member} in {object}")))
}
