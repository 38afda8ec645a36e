//! The administration API of a gateway.

use std::time::Duration;

use serde_json::Value;

use crate::failure::{Failure, ensure};

const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// A client with the token of an administrator.
pub(crate) struct AdminApi {
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

impl AdminApi {
    pub(crate) fn new(token: &str) -> Self {
        let http = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(ANSWER_WITHIN));
        Self {
            token: token.to_owned(),
            http: http.build().new_agent(),
        }
    }

    pub(crate) fn token(&self) -> &str {
        &self.token
    }

    /// Sends a request to the gateway whose admin listener is `admin_url`; returns status and JSON.
    pub(crate) fn ask(
        &self,
        admin_url: &str,
        method: &str,
        path: &str,
        body: &Value,
    ) -> Result<(u16, Value), Failure> {
        let reply = self.exchange(admin_url, method, path, body)?;
        Ok((reply.status, reply.body))
    }

    /// Like [`Self::ask`], with the nodes that the reply names.
    pub(crate) fn exchange(
        &self,
        admin_url: &str,
        method: &str,
        path: &str,
        body: &Value,
    ) -> Result<Reply, Failure> {
        let url = format!("{admin_url}/api/v1{path}");
        let request = http::Request::builder()
            .method(method)
            .uri(&url)
            .header("Authorization", format!("Bearer {}", self.token))
            .header("Content-Type", "application/json");
        let failed = |error: ureq::Error| Failure::during(&url, error);
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        let request = request
            .body(body)
            .map_err(|error| Failure::during(&url, error))?;
        let mut response = self.http.run(request).map_err(failed)?;
        let pending = response
            .headers()
            .get("X-Gw-Pending-Nodes")
            .and_then(|names| names.to_str().ok());
        // Such as `2, 5;dead`.
        let slot = |node: &str| node.split(';').next()?.trim().parse().ok();
        let pending = pending
            .unwrap_or_default()
            .split(',')
            .filter_map(slot)
            .collect();
        let text = response.body_mut().read_to_string().map_err(failed)?;
        let body = serde_json::from_str(&text).unwrap_or(Value::Null);
        Ok(Reply {
            status: response.status().as_u16(),
            body,
            pending,
        })
    }

    /// Like [`Self::ask`], and fails unless the status is that of a success.
    pub(crate) fn change(
        &self,
        admin_url: &str,
        method: &str,
        path: &str,
        body: &Value,
    ) -> Result<Value, Failure> {
        let (status, answer) = self.ask(admin_url, method, path, body)?;
        ensure((200..300).contains(&status), || {
            format!("{method} {path}: {status} {answer}")
        })?;
        Ok(answer)
    }
}
