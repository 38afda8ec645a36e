//! A line of the access log: the fields of a [`RequestView`](super::super::RequestView) without the captured messages.

use std::borrow::Cow;
use std::net::IpAddr;

use gw_shared::id::RequestId;
use gw_shared::telemetry::mask::Masker;
use gw_shared::text::escaped_json;
use serde::{Serialize, Serializer};

use super::super::block::time_text;
use super::super::record::{ATTEMPTS_MAX, RecordedAttempt, RequestRecord};
use super::super::timing::Timing;

#[derive(Serialize)]
struct Line<'a> {
    #[serde(serialize_with = "as_text")]
    id: RequestId,
    time: String,
    account: &'a str,
    service: &'a str,
    method: &'a str,
    path: &'a str,
    query: Option<&'a str>,
    caller_address: IpAddr,
    protocol: &'static str,
    auth_mode: Option<&'static str>,
    caller_id: Option<&'a str>,
    status: Option<u16>,
    code: Option<&'static str>,
    ended: &'static str,
    bytes_in: u64,
    bytes_taken: Option<u64>,
    bytes_out: u64,
    durations_us: Timing,
    agent_id: Option<&'a str>,
    attempts: &'a [RecordedAttempt],
    #[serde(serialize_with = "as_optional_text")]
    replayed_from: Option<RequestId>,
    trace_id: Option<String>,
}

/// Appends the line of a request of the service `label`, with its line end.
pub(super) fn append(
    record: &RequestRecord,
    label: &str,
    masker: &Masker,
    out: &mut Vec<u8>,
) -> Result<(), serde_json::Error> {
    let target: Cow<'_, str> = record.masked_target(masker);
    let (account, service) = label.split_once("--").unwrap_or((label, ""));
    let (path, query) = match target.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (&*target, None),
    };
    let line = Line {
        id: record.id,
        time: time_text(record.id.unix_ms()),
        account,
        service,
        method: record.shown_method(),
        path,
        query,
        caller_address: record.caller,
        protocol: record.protocol.as_str(),
        auth_mode: record.by.as_ref().map(|by| by.mode()),
        caller_id: record.by.as_ref().and_then(|by| by.id()),
        status: record.status,
        code: record.code,
        ended: record.ended.as_str(),
        bytes_in: record.bytes_in,
        bytes_taken: record.bytes_taken,
        bytes_out: record.bytes_out,
        durations_us: record.timing,
        agent_id: record.agent.as_ref().map(|agent| agent.as_str()),
        attempts: &record.attempts[..record.attempts.len().min(ATTEMPTS_MAX)],
        replayed_from: record.replayed_from,
        trace_id: record
            .trace_id
            .map(|id| format!("{:032x}", u128::from_be_bytes(id))),
    };
    // A path may have characters that a terminal obeys.
    out.extend_from_slice(escaped_json(&serde_json::to_string(&line)?).as_bytes());
    out.push(b'\n');
    Ok(())
}

fn as_text<S: Serializer>(id: &RequestId, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(id)
}

fn as_optional_text<S: Serializer>(
    id: &Option<RequestId>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match id {
        Some(id) => serializer.collect_str(id),
        None => serializer.serialize_none(),
    }
}
