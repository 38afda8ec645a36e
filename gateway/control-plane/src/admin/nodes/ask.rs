//! Questions to other nodes.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use gw_region::Member;
use http::{Request, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::admin::Admin;
use crate::cluster::UnavailableNode;

/// Time limit of an answer from the request log. A search takes one to two seconds at most.
pub(super) const LOG_WITHIN: Duration = Duration::from_secs(10);

impl Admin {
    /// Asks another node.
    pub(super) async fn ask_node<T: DeserializeOwned>(
        &self,
        node: &Member,
        target: &str,
        within: Duration,
    ) -> Result<T, UnavailableNode> {
        let slot = node.slot.get();
        let unavailable = |reason: String| UnavailableNode { slot, reason };
        let request = Request::get(target)
            .body(Bytes::new())
            .map_err(|error| unavailable(error.to_string()))?;
        let response = self.control.node_client().send(node, request, within).await;
        let response =
            response.map_err(|error| unavailable(format!("does not answer: {error}")))?;
        if response.status() != StatusCode::OK {
            return Err(unavailable(format!(
                "answers with status {}",
                response.status()
            )));
        }
        serde_json::from_slice(response.body())
            .map_err(|error| unavailable(format!("sends an invalid answer: {error}")))
    }

    /// Asks several nodes at the same time.
    pub(super) async fn ask_nodes<T: DeserializeOwned>(
        &self,
        nodes: &[Member],
        target: &str,
        within: Duration,
    ) -> (Vec<T>, Vec<UnavailableNode>) {
        let mut answers = Vec::new();
        let mut missing = Vec::new();
        for answer in join_all(nodes.iter().map(|node| self.ask_node(node, target, within))).await {
            match answer {
                Ok(answer) => answers.push(answer),
                Err(unavailable) => missing.push(unavailable),
            }
        }
        (answers, missing)
    }

    /// All members but this node; empty if this gateway is the only node.
    pub(super) fn other_nodes(&self) -> Vec<Member> {
        self.control
            .local_node()
            .placement()
            .map(|placement| placement.others().cloned().collect())
            .unwrap_or_default()
    }
}

/// Path and query with the fields of `query`.
pub(super) fn target(path: &str, query: &impl Serialize) -> String {
    let mut pairs = form_urlencoded::Serializer::new(String::new());
    // Queries are structs of strings, numbers and truth values.
    if let Ok(Value::Object(fields)) = serde_json::to_value(query) {
        for (name, value) in &fields {
            match value {
                Value::Null => {}
                Value::String(text) => drop(pairs.append_pair(name, text)),
                other => drop(pairs.append_pair(name, &other.to_string())),
            }
        }
    }
    format!("{path}?{}", pairs.finish())
}

#[cfg(test)]
mod tests {
    use gw_telemetry::request_log::SearchQuery;

    use super::*;

    #[test]
    fn queries_are_encoded() {
        let query = SearchQuery {
            path_prefix: Some("/a b&c".to_owned()),
            apex: Some(false),
            limit: Some(5),
            ..SearchQuery::default()
        };
        assert_eq!(
            target("/v1/requests", &query),
            "/v1/requests?apex=false&limit=5&path_prefix=%2Fa+b%26c"
        );
    }
}
