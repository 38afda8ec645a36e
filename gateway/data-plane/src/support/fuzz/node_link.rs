//! What the nodes of a region add to the tunnel protocol on their links.

use std::time::Instant;

use bytes::Bytes;
use gw_shared::http::{Fields, Framing};
use gw_shared::tunnel::head::{self, OutboundRequest, Refusal};
use gw_shared::tunnel::timing::{AgentTiming, micros};
use http::Method;
use http::header::{HeaderName, HeaderValue};
use http::uri::{Authority, PathAndQuery};

use crate::http_message::{FailedAttempt, OpenedStream, Progress};
use crate::upstream::cross_node::wire;

/// A link between nodes: the code of a refusal, its message, and the fields of a head, each on a
/// line. What one node understands of it is the same after it has been passed on.
pub fn node_link(data: &[u8]) {
    let mut lines = data.splitn(3, |byte| *byte == b'\n');
    let mut line = || Bytes::copy_from_slice(lines.next().unwrap_or_default());
    let (code, message, fields) = (line(), line(), line());
    refusal(code, message);
    let fields = || Fields::from_iter(fields.split(|byte| *byte == b'\n').filter_map(field));
    principal(fields());
    notice(&fields());
}

fn refusal(code: Bytes, message: Bytes) {
    let refused = wire::read_refusal(&Refusal {
        timing: AgentTiming::default(),
        unsent: false,
        code,
        message,
    });
    let mut payload = Vec::new();
    wire::write_refusal(&mut payload, None, &refused);
    let passed_on = head::parse_refusal(payload.into()).expect("a written refusal can be read");
    assert_eq!(wire::timing(passed_on.timing, Default::default()), None);
    assert_eq!(wire::read_refusal(&passed_on), refused);
}

fn field(line: &[u8]) -> Option<(HeaderName, HeaderValue)> {
    let colon = line.iter().position(|byte| *byte == b':')?;
    let name = HeaderName::from_bytes(&line[..colon]).ok()?;
    let value = HeaderValue::from_bytes(line[colon + 1..].trim_ascii()).ok()?;
    Some((name, value))
}

/// The originator of a request is passed on once, and nothing else takes its place.
fn principal(mut headers: Fields) {
    let Some(by) = wire::take_principal(&mut headers) else {
        return;
    };
    let mut request = OutboundRequest {
        method: Method::GET,
        target: PathAndQuery::from_static("/"),
        authority: Authority::from_static("acme--api.eu1.example.com"),
        headers,
        framing: Framing::None,
        upgrade: None,
        caller_connection: None,
    };
    wire::put_principal(&mut request, &by);
    assert_eq!(wire::take_principal(&mut request.headers), Some(by));
}

fn notice(headers: &Fields) {
    let now = Instant::now();
    let Some(notice) = wire::read_notice(headers, now) else {
        return;
    };
    assert!(notice.opened.iter().all(|opened| opened.at <= now));
    let opened = notice
        .opened
        .map(|opened| OpenedStream { at: now, ..opened });
    let agent = opened.as_ref().map(|opened| opened.agent.clone());
    let progress = Progress {
        stream: opened,
        failed_attempts: notice.failed_attempts,
        ..Progress::default()
    };
    let mut written = Vec::new();
    wire::write_notice(&mut written, &progress);
    let head = head::parse_interim(&written.into()).expect("a written notice can be read");
    let passed_on = wire::read_notice(&head.headers, Instant::now()).expect("it is a notice");
    assert_eq!(passed_on.opened.map(|opened| opened.agent), agent);
    let short = |progress: &[FailedAttempt]| -> Vec<_> {
        let attempts = progress
            .iter()
            .map(|failed| (failed.agent.clone(), failed.reason, micros(failed.took)));
        attempts.collect()
    };
    assert_eq!(
        short(&passed_on.failed_attempts),
        short(&progress.failed_attempts)
    );
}
