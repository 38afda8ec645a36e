//! What `region status` shows of the gateway on this machine: the region as its process sees it.

use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use http::Method;
use serde_json::Value;

use super::client::connection::AdminConnection;
use super::client::output::or_dash;
use super::client::table;

/// Longest wait for the process, which may hang.
const WITHIN: Duration = Duration::from_secs(5);

/// The answer of the process to `GET /api/v1/region`, or why there is none.
pub(crate) struct ThisNode(Result<Value, String>);

impl ThisNode {
    /// Asks the gateway with this configuration file.
    pub(crate) fn ask(config: &Path) -> Self {
        let api = AdminConnection::of(config)
            .open_api()
            .map_err(|failure| failure.message().to_owned());
        let answer = api.and_then(|api| {
            api.request_within(Method::GET, "/region", WITHIN)
                .map_err(|error| error.to_string())
        });
        Self(answer.and_then(|reply| reply.parse().map_err(|error| error.to_string())))
    }

    /// Adds it to the JSON of the command.
    pub(crate) fn add_to(self, status: &mut Value) {
        let (node, problem) = match self.0 {
            Ok(node) => (node, Value::Null),
            Err(problem) => (Value::Null, problem.into()),
        };
        status["this_node"] = node;
        status["this_node_problem"] = problem;
    }

    pub(crate) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(out, "This node:")?;
        let node = match &self.0 {
            Ok(node) => node,
            Err(problem) => return writeln!(out, "  its process does not answer: {problem}"),
        };
        let text = |value: &Value| value.as_str().map(ToOwned::to_owned);
        let nodes = node["nodes"]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default();
        let mut rows = vec![
            vec!["  node".to_owned(), or_dash(node["node"].as_u64().as_ref())],
            vec![
                "  standing".to_owned(),
                or_dash(text(&node["standing"]).as_ref()),
            ],
        ];
        for other in nodes.iter().filter(|other| other["refusal"].is_object()) {
            let seconds = other["refusal"]["seconds"].as_f64().unwrap_or(0.0);
            let reason = text(&other["refusal"]["reason"]).unwrap_or_default();
            rows.push(vec![
                "  refused by".to_owned(),
                format!("node {} for {seconds:.0} s: {reason}", other["slot"]),
            ]);
        }
        table::write(out, &rows)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn refusals_and_a_process_that_does_not_answer_are_shown() {
        let written = |node: &ThisNode| {
            let mut out = Vec::new();
            node.write(&mut out).unwrap();
            String::from_utf8(out)
                .unwrap()
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" ")
        };
        let nodes = json!([
            { "slot": 0, "refusal": null },
            { "slot": 2, "refusal": { "reason": "403 Forbidden: why", "seconds": 12.4 } },
        ]);
        let node = ThisNode(Ok(
            json!({ "node": 0, "standing": "member", "nodes": nodes }),
        ));
        let refused =
            "This node: node 0 standing member refused by node 2 for 12 s: 403 Forbidden: why";
        assert_eq!(written(&node), refused);
        let ended = ThisNode(Err("connection refused".to_owned()));
        assert_eq!(
            written(&ended),
            "This node: its process does not answer: connection refused"
        );
        let mut status = json!({ "nodes": [] });
        ended.add_to(&mut status);
        assert_eq!(
            (&status["this_node"], status["this_node_problem"].as_str()),
            (&Value::Null, Some("connection refused"))
        );
    }
}
