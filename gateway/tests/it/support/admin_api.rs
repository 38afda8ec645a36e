//! A client of the administration API.

use gw_gateway::demo::About;
use http::HeaderMap;
use serde_json::Value;

/// A response of the API.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) content_type: String,
    pub(crate) location: String,
    pub(crate) cache_control: String,
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
}

/// A client of a gateway's administration API.
pub(crate) struct Api<'a>(pub(crate) &'a About);

impl Api<'_> {
    pub(crate) fn send(
        &self,
        method: &str,
        path: &str,
        token: &str,
        content_type: &str,
        body: &str,
    ) -> Reply {
        let url = format!("{}/api/v1{path}", self.0.admin_url);
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .allow_non_standard_methods(true)
            .timeout_global(Some(super::SOON))
            .build()
            .into();
        let request = http::Request::builder()
            .method(method)
            .uri(url)
            .header("Authorization", token)
            .header("Content-Type", content_type)
            .body(body)
            .unwrap();
        let mut response = agent.run(request).unwrap();
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
        let pending_nodes = header("x-gw-pending-nodes");
        let status = response.status().as_u16();
        let body = response.body_mut().read_to_string().unwrap();
        let body = if body.is_empty() {
            Value::Null
        } else {
            serde_json::from_str(&body).unwrap()
        };
        Reply {
            status,
            content_type,
            location,
            cache_control,
            pending_nodes,
            body,
        }
    }

    pub(crate) fn ask(&self, method: &str, path: &str, body: &Value) -> Reply {
        let token = format!("Bearer {}", self.0.admin_token);
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        self.send(method, path, &token, "application/json", &body)
    }

    /// Sends `body` unchanged.
    pub(crate) fn ask_raw(&self, method: &str, path: &str, body: &str) -> Reply {
        let token = format!("Bearer {}", self.0.admin_token);
        self.send(method, path, &token, "application/json", body)
    }

    pub(crate) fn get(&self, path: &str) -> Reply {
        self.ask("GET", path, &Value::Null)
    }

    /// Headers and bytes of a resource that is not JSON.
    pub(crate) fn download(&self, path: &str) -> (HeaderMap, Vec<u8>) {
        let request = ureq::get(format!("{}/api/v1{path}", self.0.admin_url));
        let token = format!("Bearer {}", self.0.admin_token);
        let mut response = request.header("Authorization", token).call().unwrap();
        (
            response.headers().clone(),
            response.body_mut().read_to_vec().unwrap(),
        )
    }
}
