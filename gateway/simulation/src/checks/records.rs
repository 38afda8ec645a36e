//! Records of the request log and counters.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{SystemTime, UNIX_EPOCH};

use gw_simulated_kernel::clock::{self, Nanos};
use gw_telemetry::counters::WorkerReport;
use gw_telemetry::request_log::{Ended, RequestRecord};

use super::{Checked, Records, each, violated};
use crate::scenario::{FaultKind, Method, Request};
use crate::world::World;
use crate::world::ledger::Entry;
use crate::world::{agent_id, machine};

/// Time within which workers send records. A worker that panics, or a process that is killed, loses
/// those that it has.
const SENT_WITHIN: u64 = 1_500_000_000;

/// The log has one record of each request that got a response or reached a backend
/// (docs/request-log.md).
pub(super) fn each_request_is_recorded_once(world: &World) -> Checked {
    let records = Records::of(world);
    each(world, "each request is recorded once", |request, entry| {
        let found = records.count(request.id);
        let seen = &entry.seen;
        let must_exist =
            !was_lost(world, entry) && (seen.status.is_some() || !entry.attempts.is_empty());
        match found {
            0 if must_exist => Some("no record".to_owned()),
            0 | 1 => None,
            more => Some(format!("{more} records")),
        }
    })
}

/// Whether a worker was lost that may have had the request, or its record.
fn was_lost(world: &World, Entry { seen, attempts }: &Entry) -> bool {
    // A request lasts until the backend has ended its response.
    let answered = attempts.iter().map(|attempt| attempt.answered);
    let ends = answered
        .chain([seen.ended])
        .map(|at| at.unwrap_or(u64::MAX));
    let last = ends.max().unwrap_or(u64::MAX);
    let happened = world.happened.borrow();
    let mut losses = happened.iter().filter(|one| {
        matches!(
            one.fault,
            FaultKind::PanicWorker { .. } | FaultKind::KillGateway { .. }
        )
    });
    losses.any(|loss| {
        seen.began <= Some(loss.began) && loss.began <= last.saturating_add(SENT_WITHIN)
    })
}

/// No two records have one id, whichever process and worker made them, and wherever the clock
/// jumps: the log finds a request by it.
pub(super) fn ids_are_unique(world: &World) -> Checked {
    let mut ids = BTreeSet::new();
    for recorded in world.records.borrow().iter() {
        let record = &recorded.record;
        if !ids.insert(record.id) {
            return violated(
                "each record has an id of its own",
                format!("{} is also the id of {record:?}", record.id),
            );
        }
    }
    Ok(())
}

const NANOS_IN_MS: Nanos = 1_000_000;

/// The time in the id is that at which the head arrived: it decides in which file the record is,
/// and whether a search finds it (docs/request-log-format.md). So the ids of a caller that waits
/// for each response rise with the milliseconds, whichever worker gets its requests. Records come
/// in the order in which requests end, which is not that of the ids.
pub(super) fn ids_have_the_time_of_the_request(world: &World) -> Checked {
    let mut faults = world.scenario.faults.iter();
    // Ids follow jumps of the clock, but for short ones back.
    if faults.any(|fault| matches!(fault.kind, FaultKind::JumpClock { .. })) {
        return Ok(());
    }
    let wall = SystemTime::now().duration_since(UNIX_EPOCH);
    let wall = wall.map_or(0, |wall| wall.as_nanos() as Nanos);
    // The wall clock at the begin of the simulation.
    let at_start = wall.saturating_sub(clock::now().unwrap_or(0));
    let ms = |at: Nanos| (at_start + at) / NANOS_IN_MS;
    let records = Records::of(world);
    each(
        world,
        "an id has the time of its request",
        |request, Entry { seen, attempts }| {
            let id = records.sole(request.id)?.id;
            let first = ms(seen.began?);
            let arrived = attempts.first().map(|attempt| attempt.at);
            // The earliest that shows that the gateway had the head.
            let latest = arrived.into_iter().chain(seen.answered).min();
            let last = latest.map_or(u64::MAX, ms);
            let found = id.unix_ms();
            (found < first || found > last)
                .then(|| format!("{id} is of {found} ms, not from {first} to {last} ms"))
        },
    )
}

/// A record says what caller and backend saw (docs/request-log.md).
pub(super) fn records_agree(world: &World) -> Checked {
    let records = Records::of(world);
    let cuts_callers = world.scenario.faults.iter().any(|fault| {
        matches!(
            fault.kind,
            FaultKind::CutCaller { .. }
                | FaultKind::TakeOver
                | FaultKind::FreezeWorker { .. }
                | FaultKind::PanicWorker { .. }
                | FaultKind::KillGateway { .. }
        )
    });
    each(world, "the record is true", |request, entry| {
        let record = records.sole(request.id)?;
        let found = response_disagrees(world, request, entry, record)
            .or_else(|| upload_disagrees(entry, record))
            .or_else(|| attempts_disagree(request, entry, record))
            .or_else(|| {
                let seen = &entry.seen;
                let is_lost = !seen.is_complete && !seen.has_left && !seen.has_given_up;
                let says_complete = record.ended == Ended::Complete;
                (is_lost && says_complete && !cuts_callers)
                    .then(|| "it has a complete response, which the caller did not get".to_owned())
            });
        found.map(|found| format!("{found}; {record:?}"))
    })
}

fn response_disagrees(
    world: &World,
    request: &Request,
    entry: &Entry,
    record: &RequestRecord,
) -> Option<String> {
    let seen = &entry.seen;
    let status = seen.status?;
    if record.status != Some(status) {
        return Some(format!("the caller saw {status}"));
    }
    if seen.request_id.as_deref() != Some(record.id.to_string().as_str()) {
        return Some(format!("the response names request {:?}", seen.request_id));
    }
    if record.caller != machine(1, seen.caller) {
        return Some(format!("its caller is {}", machine(1, seen.caller)));
    }
    if seen.code.is_some() && seen.code.as_deref() != record.code {
        return Some(format!("the caller saw {:?}", seen.code));
    }
    let received = seen.body.length as u64;
    if seen.is_complete && received != record.bytes_out && request.method != Method::Upgrade {
        return Some(format!("the caller got {received} bytes"));
    }
    if received > record.bytes_out {
        return Some(format!("the caller got {received} bytes already"));
    }
    // The rest of an upload may still be on its way.
    let has_upload = request.upload.is_some();
    let must_be_complete = seen.is_complete && !has_upload && !was_lost(world, entry);
    (must_be_complete && record.ended != Ended::Complete)
        .then(|| "the caller got a complete response".to_owned())
}

fn upload_disagrees(entry: &Entry, record: &RequestRecord) -> Option<String> {
    let uploads = entry
        .attempts
        .iter()
        .map(|attempt| attempt.upload.length as u64);
    let most = uploads.max().unwrap_or(0);
    if most > record.bytes_in {
        return Some(format!("a backend got {most} bytes"));
    }
    (record.bytes_taken > Some(record.bytes_in)).then(|| "more was taken than sent".to_owned())
}

/// Reasons by which no backend has the request. After the loss of a node, a request is sent to the
/// next owner if it is safe, or if the first one has not accepted its body.
const NOT_SENT: [&str; 5] = [
    "node_lost",
    "no_slot",
    "not_opened",
    "backend_unreachable",
    "backend_tls",
];
/// Agents that one request is sent to (docs/limits.md).
const AGENTS_MAX: usize = 3;

/// The recorded agent is one whose backend got the request. A request that can have reached a
/// backend is retried only if it is safe and has no body (docs/redundancy.md).
fn attempts_disagree(request: &Request, entry: &Entry, record: &RequestRecord) -> Option<String> {
    let is_relayed = entry.seen.answer_to.is_some();
    let agents = || entry.attempts.iter().map(|attempt| attempt.agent);
    if is_relayed && !agents().any(|agent| record.agent == agent_id(agent)) {
        return Some(format!("agents {:?} got it", agents().collect::<Vec<_>>()));
    }
    let failed = record.attempts.len();
    if failed > AGENTS_MAX || (is_relayed && failed >= AGENTS_MAX) {
        return Some(format!("{failed} attempts failed"));
    }
    // An agent sends no upgrade to a backend that does not support extended CONNECT.
    if request.method == Method::Upgrade {
        return None;
    }
    let is_safe = matches!(request.method, Method::Get | Method::Head);
    let may_have_arrived = |reason: &str| !NOT_SENT.contains(&reason);
    let again = match record.attempts.split_last() {
        Some((_, before)) if !is_relayed => before,
        _ => &record.attempts[..],
    };
    let arrived = again
        .iter()
        .filter(|attempt| may_have_arrived(attempt.reason));
    let most = usize::from(is_safe);
    (arrived.count() > most).then(|| "it was sent again".to_owned())
}

/// Counters of each process agree with its records. A process that has ended has none, and a worker
/// that panics loses its own.
pub(super) fn counters_agree_with_records(world: &World) -> Checked {
    let faults = &world.scenario.faults;
    if faults
        .iter()
        .any(|fault| matches!(fault.kind, FaultKind::PanicWorker { .. }))
    {
        return Ok(());
    }
    let reports = world.reports.borrow();
    for (process, reports) in reports.iter() {
        let records = world.records.borrow();
        let records: Vec<_> = records
            .iter()
            .filter(|recorded| recorded.process == *process)
            .collect();
        let total = |name: &str| -> u64 {
            let totals = reports.iter().filter_map(|report| report.totals.get(name));
            totals.sum()
        };
        let ended = |how: Ended| {
            let records = records.iter().filter(|one| one.record.ended == how);
            records.count() as u64
        };
        let pairs = [
            ("requests_cut", ended(Ended::Cut)),
            ("requests_caller_gone", ended(Ended::CallerGone)),
            ("requests_complete", ended(Ended::Complete)),
            ("requests", records.len() as u64),
        ];
        for (name, recorded) in pairs {
            let counted = total(name);
            if counted != recorded {
                let found =
                    format!("process {process}: {name} is {counted}, of {recorded} records");
                return violated("counters agree with records", found);
            }
        }
        for service in &world.services {
            let counted = Sums::counted(reports, &service.label);
            let records = records.iter().filter(|one| one.label == service.label);
            let recorded = Sums::recorded(records.map(|one| &one.record));
            if counted != recorded {
                let found = format!("process {process}: {counted:?}, of records {recorded:?}");
                return violated("counters of services agree with records", found);
            }
        }
    }
    Ok(())
}

/// Whether a counter is of the service: its name is the label, and the time at which the service
/// was created.
fn is_of(counter: &str, label: &str) -> bool {
    counter.split_once('@').is_some_and(|(of, _)| of == label)
}

/// What a service's counters count.
#[derive(Debug, Default, PartialEq, Eq)]
struct Sums {
    requests: u64,
    bytes_in: u64,
    bytes_out: u64,
    codes: BTreeMap<&'static str, u64>,
}

impl Sums {
    fn counted(reports: &[WorkerReport], label: &str) -> Self {
        let mut sums = Self::default();
        let services = reports.iter().flat_map(|report| &report.services);
        for service in services.filter(|service| is_of(&service.label, label)) {
            sums.requests += service.stats.requests();
            sums.bytes_in += service.stats.bytes_in;
            sums.bytes_out += service.stats.bytes_out;
            for (code, count) in &service.stats.codes {
                *sums.codes.entry(code).or_default() += count;
            }
        }
        sums
    }

    fn recorded<'a>(records: impl Iterator<Item = &'a RequestRecord>) -> Self {
        let mut sums = Self::default();
        for record in records {
            sums.requests += 1;
            sums.bytes_in += record.bytes_in;
            sums.bytes_out += record.bytes_out;
            if let Some(code) = record.code {
                *sums.codes.entry(code).or_default() += 1;
            }
        }
        sums
    }
}
