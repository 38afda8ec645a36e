//! Tests of the whole log: records that are written are found.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicI64, Ordering};

use axum::extract::Query;
use bytes::Bytes;
use gw_base::service::hostname::Region;
use gw_shared::http::Fields;
use gw_shared::id::{AgentId, ClientId, KeyId};
use gw_shared::identity::secret::Secret;
use gw_store::{Directory, Records, StoredRecord};
use http::header::{HeaderName, HeaderValue};
use rusqlite::Connection;
use serde_json::json;

use super::days::day::DAY_MS;
use super::*;

mod durability;
mod searches;
mod shares;

/// 2026-11-21T04:15:32.123Z
const NOON_MS: u64 = 1_795_234_532_123;
const LABEL: &str = "acme--api";

/// Log in a temporary folder, with a clock set by the test.
struct Fixture {
    directory: tempfile::TempDir,
    seconds: Arc<AtomicI64>,
    log: RequestLog,
}

impl Fixture {
    fn new() -> Self {
        Self::with_bound(None)
    }

    fn with_bound(max_bytes: Option<u64>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let seconds = Arc::new(AtomicI64::new((NOON_MS / 1000) as i64));
        let log = open(&directory, &seconds, max_bytes);
        Self {
            directory,
            seconds,
            log,
        }
    }

    fn reopen(&mut self) {
        self.log.close();
        self.log = open(&self.directory, &self.seconds, None);
    }

    fn folder(&self) -> PathBuf {
        self.directory.path().join("requests")
    }

    fn push(&self, label: &str, records: Vec<RequestRecord>) {
        self.log.queue().push(Batch {
            services: vec![(label.into(), records)],
        });
    }

    fn write(&self, label: &str, records: Vec<RequestRecord>) {
        self.push(label, records);
        self.log.flush();
    }

    fn ids(&self, query: &SearchQuery) -> Vec<RequestId> {
        let page = self.log.search(query).unwrap();
        page.items
            .iter()
            .map(|item| item.id.parse().unwrap())
            .collect()
    }
}

fn open(
    directory: &tempfile::TempDir,
    seconds: &Arc<AtomicI64>,
    max_bytes: Option<u64>,
) -> RequestLog {
    let seconds = Arc::clone(seconds);
    let background = Background::start().unwrap();
    let log = RequestLog::with_clock(
        background.tasks(),
        &directory.path().join("requests"),
        move || Timestamp(seconds.load(Ordering::Relaxed)),
        Duration::ZERO,
        Masker::default(),
        None,
        max_bytes,
    );
    log.unwrap().keeping(background)
}

fn id(unix_ms: u64, number: u64) -> RequestId {
    let first = u128::from_be_bytes(*RequestId::first_of_ms(unix_ms).as_bytes());
    RequestId::from_bytes((first + u128::from(number)).to_be_bytes()).unwrap()
}

/// The names of a gateway with the service [`LABEL`], created at `created_ms`.
fn names_since(created_ms: u64) -> Names {
    let records = [
        json!({ "account": { "id": "acme", "created_at": 0, "created_ms": 0 } }),
        json!({ "service": {
            "account": "acme",
            "id": "api",
            "modes": { "jwt": true, "service_key": true },
            "enabled": true,
            "rate": { "burst": 1, "refill_per_minute": 1 },
            "created_ms": created_ms,
        } }),
    ];
    let records = records.map(|record| serde_json::from_value::<StoredRecord>(record).unwrap());
    let region = Region::new("eu1", "example.com");
    let directory = Directory::new(&records.into_iter().collect::<Records>(), &region, 1);
    Names(Some(Arc::new(move || directory.clone())))
}

/// Query with these parameters.
fn query(parameters: &str) -> SearchQuery {
    let uri = format!("/?{parameters}").parse().unwrap();
    Query::try_from_uri(&uri).unwrap().0
}

fn of_service() -> SearchQuery {
    query("account=acme&service=api")
}

fn message(fields: &[(&'static str, &[u8])], body: &[u8], truncated: bool) -> MessageCapture {
    let fields = fields.iter().map(|(name, value)| {
        (
            HeaderName::from_static(name),
            HeaderValue::from_bytes(value).unwrap(),
        )
    });
    let mut headers = Fields::new();
    for (name, value) in fields {
        headers.append(name, value);
    }
    MessageCapture {
        headers,
        body: BodyCapture {
            bytes: Bytes::copy_from_slice(body),
            truncated,
            truncated_by: truncated.then_some(Truncation::Memory),
        },
    }
}

#[test]
fn secret_at_the_cut_of_a_target_is_masked() {
    let directory = tempfile::tempdir().unwrap();
    let masker = Masker::new([&Secret::new("0123456789".to_owned())]);
    let now = || Timestamp((NOON_MS / 1000) as i64);
    let background = Background::start().unwrap();
    let log = RequestLog::with_clock(
        background.tasks(),
        &directory.path().join("requests"),
        now,
        Duration::ZERO,
        masker,
        None,
        None,
    )
    .unwrap();
    let path = format!("/{}", "a".repeat(record::TARGET_MAX - 6));
    let record = RequestRecord {
        target: format!("{path}0123456789").into(),
        by: Some(CallerId::Admin),
        ..RequestRecord::example(id(NOON_MS, 1))
    };
    log.queue().push(Batch {
        services: vec![(LABEL.into(), vec![record])],
    });
    log.flush();
    assert_eq!(
        log.search(&of_service()).unwrap().items[0].path,
        format!("{path}gw\u{2026}")
    );
}

/// Record with all columns and messages.
fn full_record(id: RequestId, body: &[u8]) -> RequestRecord {
    let request = message(
        &[
            ("content-type", b"text/plain"),
            ("x-a", b"gw_cs_secret"),
            ("x-a", b"\xff"),
        ],
        body,
        true,
    );
    let response = message(&[("content-encoding", b"gzip")], b"not really", false);
    let original = RequestId::first_of_ms(NOON_MS - 9);
    RequestRecord {
        method: Method::from_bytes(b"PURGE").unwrap(),
        target: "/a/b?key=gw_sk_abc.secret&c".into(),
        caller: "2001:db8::1".parse().unwrap(),
        protocol: Protocol::Replay,
        by: Some(CallerId::Client(ClientId::random())),
        status: Some(502),
        code: Some("GW_BACKEND_RESET"),
        ended: Ended::Cut,
        bytes_in: u64::MAX,
        bytes_taken: Some(u64::MAX - 1),
        bytes_out: 7,
        timing: Timing {
            authenticate: 1,
            wait: Some(2),
            agent: Some(3),
            backend_first_byte: Some(4),
            response_head: Some(u32::MAX),
            total: u64::MAX / 2,
        },
        agent: Some(AgentId::random()),
        attempts: Box::new([RecordedAttempt {
            agent_id: Some(AgentId::random()),
            reason: "backend_tls",
            duration_us: 5000,
        }]),
        replayed_from: Some(original),
        trace_id: Some(*b"0123456789abcdef"),
        capture: Some(Box::new(Capture {
            request: Some(request),
            response: Some(response),
        })),
        ..RequestRecord::example(id)
    }
}

#[test]
fn request_is_shown_as_recorded_without_secrets() {
    let fixture = Fixture::new();
    let full = full_record(id(NOON_MS, 1), b"abc");
    fixture.write(
        LABEL,
        vec![full.clone(), RequestRecord::example(id(NOON_MS, 2))],
    );
    let expected = json!({
        "id": full.id.to_string(),
        "time": "2026-11-21T04:15:32.123Z",
        "account": "acme",
        "service": "api",
        "method": "PURGE",
        "path": "/a/b",
        "query": "key=gw_sk_abc.***&c",
        "caller_address": "2001:db8::1",
        "protocol": "replay",
        "auth_mode": "jwt",
        "caller_id": full.by.as_ref().unwrap().id(),
        "status": 502,
        "code": "GW_BACKEND_RESET",
        "ended": "cut",
        "bytes_in": u64::MAX,
        "bytes_taken": u64::MAX - 1,
        "bytes_out": 7,
        "durations_us": full.timing,
        "agent_id": full.agent,
        "attempts": [{
            "agent_id": full.attempts[0].agent_id,
            "reason": "backend_tls",
            "duration_us": 5000,
        }],
        "replayed_from": full.replayed_from,
        "trace_id": "30313233343536373839616263646566",
        "captured_request": {
            "headers": [["content-type", "text/plain"], ["x-a", "gw_cs_***"], ["x-a", "\u{fffd}"]],
            "bytes": 3,
            "truncated": true,
            "truncated_by": "memory",
        },
        "captured_response": {
            "headers": [["content-encoding", "gzip"]],
            "bytes": 10,
            "truncated": false,
            "truncated_by": null,
        },
    });
    let shown = fixture.log.show(full.id).unwrap().unwrap();
    assert_eq!(json!(shown), expected);
    let page = fixture.log.search(&of_service()).unwrap();
    assert_eq!(
        (&page.items[1], page.items.len(), &page.next_cursor),
        (&shown, 2, &None)
    );
    assert_eq!(
        fixture.log.show(id(NOON_MS, 2)).unwrap().unwrap().query,
        None
    );
    assert_eq!(fixture.log.show(id(NOON_MS, 3)).unwrap(), None);

    let mode = |path: PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(fixture.folder()), 0o700);
    for entry in fs::read_dir(fixture.folder()).unwrap() {
        assert_eq!(mode(entry.unwrap().path()), 0o600);
    }
}

#[test]
fn records_of_an_earlier_service_are_not_shown_and_captures_of_a_deleted_one_neither() {
    let mut fixture = Fixture::new();
    let earlier = id(NOON_MS, 1);
    let current = id(NOON_MS + 1, 1);
    let records = [earlier, current].map(|id| full_record(id, b"body"));
    fixture.write(LABEL, records.to_vec());
    fixture.write(APEX_LABEL, vec![RequestRecord::example(id(NOON_MS, 2))]);
    let mut shown = |names: Names| {
        fixture.log.names = names;
        let log = &fixture.log;
        for id in [earlier, current] {
            let view = log.show(id).unwrap();
            let captured = log.captured(id).unwrap();
            let of_captured = captured.as_ref().map(|captured| &captured.view);
            assert_eq!(of_captured, view.as_ref());
            let view = view.as_ref();
            let has_capture = view.is_some_and(|view| view.captured_request.is_some());
            assert_eq!(captured.is_some_and(|it| it.request.is_some()), has_capture);
            for side in [Side::Request, Side::Response] {
                assert_eq!(log.body(id, side).unwrap().is_some(), has_capture);
            }
        }
        for query in [of_service(), query("account=acme"), query("apex=false")] {
            let found = log.search(&query).unwrap().items;
            let expected = [current, earlier].map(|id| log.show(id).unwrap());
            let expected: Vec<RequestView> = expected.into_iter().flatten().collect();
            assert_eq!(found, expected);
        }
        assert_eq!(fixture.ids(&query("apex=true")).len(), 1);
        let found = log.search(&of_service()).unwrap().items;
        let captures = found.iter().filter(|view| view.captured_response.is_some());
        (found.len(), captures.count())
    };
    assert_eq!(shown(Names::default()), (2, 2));
    assert_eq!(shown(names_since(NOON_MS)), (2, 2));
    assert_eq!(shown(names_since(NOON_MS + 1)), (1, 1));
    assert_eq!(shown(names_since(NOON_MS + 2)), (0, 0));
    assert_eq!(shown(Names(Some(Arc::new(Directory::default)))), (2, 0));
}

#[test]
fn a_worker_that_panics_loses_no_records() {
    let fixture = Fixture::new();
    let id = id(NOON_MS, 1);
    let queue = fixture.log.queue();
    let worker = std::thread::spawn(move || {
        let mut recorder = Recorder::new(queue);
        recorder.add(&LABEL.into(), full_record(id, b""), true);
        panic!("injected");
    });
    assert!(worker.join().is_err());
    fixture.log.flush();
    assert_eq!(fixture.ids(&of_service()), [id]);
}

#[test]
fn captured_messages_are_read_as_recorded() {
    let fixture = Fixture::new();
    let body = vec![b'x'; 10_000];
    let full = full_record(id(NOON_MS, 1), &body);
    let plain = id(NOON_MS, 2);
    fixture.write(LABEL, vec![full.clone(), RequestRecord::example(plain)]);
    let text = |text: &str| Some(text.to_owned());
    let request = fixture.log.body(full.id, Side::Request).unwrap().unwrap();
    let expected = BodyView {
        content_type: text("text/plain"),
        content_encoding: None,
        truncated: true,
        truncated_by: Some(Truncation::Memory),
        bytes: body.clone(),
    };
    assert_eq!(request, expected);
    let response = fixture.log.body(full.id, Side::Response).unwrap().unwrap();
    assert_eq!(
        (response.content_encoding, response.bytes.as_slice()),
        (text("gzip"), b"not really".as_slice())
    );
    let captured = fixture.log.captured(full.id).unwrap().unwrap();
    assert_eq!(
        (captured.view, captured.method.as_str(), captured.target),
        (
            fixture.log.show(full.id).unwrap().unwrap(),
            "PURGE",
            "/a/b?key=gw_sk_abc.***&c".to_owned()
        )
    );
    let request = captured.request.unwrap();
    assert_eq!(
        (&request.body.bytes[..], request.body.truncated),
        (&body[..], true)
    );
    assert_eq!(
        request.headers.get_all("x-a").nth(1).unwrap().as_bytes(),
        b"\xff"
    );

    // A record without captured messages, and an unknown id.
    let unknown = id(NOON_MS, 3);
    assert_eq!(fixture.log.body(plain, Side::Request).unwrap(), None);
    let captured = fixture.log.captured(plain).unwrap().unwrap();
    assert!(captured.request.is_none());
    assert!(fixture.log.captured(unknown).unwrap().is_none());
    assert_eq!(fixture.log.body(unknown, Side::Request).unwrap(), None);
}

#[test]
fn day_expires_after_seven_days_and_late_records_are_not_written() {
    let mut fixture = Fixture::new();
    let old = id(NOON_MS, 0);
    fixture.write(LABEL, vec![RequestRecord::example(old)]);
    let day = (DAY_MS / 1000) as i64;
    fixture.seconds.fetch_add(7 * day, Ordering::Relaxed);
    fixture.log.flush();
    assert!(
        fixture.log.show(old).unwrap().is_some(),
        "kept for seven whole days besides today"
    );
    assert_eq!(fixture.ids(&of_service()), [old]);

    fixture.seconds.fetch_add(day, Ordering::Relaxed);
    assert_eq!(
        fixture.log.show(old).unwrap(),
        None,
        "hidden before its file is removed"
    );
    let late = id(NOON_MS + 1, 0);
    let ahead = id(NOON_MS + 10 * DAY_MS, 0);
    fixture.write(
        LABEL,
        vec![
            RequestRecord::example(late),
            RequestRecord::example(ahead),
            RequestRecord::example(id(NOON_MS + DAY_MS, 1)),
        ],
    );
    // Each flush removes one step: the file, its WAL and its shared-memory file.
    (0..3).for_each(|_| fixture.log.flush());
    let names = || {
        fs::read_dir(fixture.folder())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
    };
    assert!(
        !names().any(|name| name.starts_with("2026-11-21")),
        "{:?}",
        names().collect::<Vec<_>>()
    );
    let stats = fixture.log.stats();
    assert_eq!(
        (stats.written, stats.dropped, stats.out_of_range),
        (2, 0, 2)
    );
    assert_eq!(fixture.ids(&of_service()).len(), 1);
    fixture.reopen();
    assert_eq!(fixture.ids(&of_service()).len(), 1);
}

#[test]
fn two_processes_write_the_same_day_and_both_find_all_records() {
    let fixture = Fixture::new();
    let other = open(&fixture.directory, &fixture.seconds, None);
    let ids: Vec<RequestId> = (0..200)
        .map(|number| id(NOON_MS + number * 20, number))
        .collect();
    for (number, id) in ids.iter().enumerate() {
        let log = if number % 2 == 0 {
            &fixture.log
        } else {
            &other
        };
        log.queue().push(Batch {
            services: vec![(
                format!("acme--s{}", number % 3).into(),
                vec![RequestRecord::example(*id)],
            )],
        });
        if number % 20 < 2 {
            log.flush();
        }
    }
    other.close();
    fixture.log.flush();
    assert_eq!(
        (fixture.log.stats().written, other.stats().written),
        (100, 100)
    );
    for log in [&fixture.log, &other] {
        assert!(ids.iter().all(|id| log.show(*id).unwrap().is_some()));
        assert_eq!(
            log.search(&SearchQuery {
                limit: Some(1000),
                ..SearchQuery::default()
            })
            .unwrap()
            .items
            .len(),
            200
        );
    }
    other.queue().push(Batch {
        services: vec![(LABEL.into(), vec![RequestRecord::example(ids[0])])],
    });
    assert_eq!(
        (other.stats().dropped, other.stats().queued_records),
        (1, 0),
        "closed"
    );
}

#[test]
fn damaged_file_is_renamed_and_a_new_one_created() {
    let mut fixture = Fixture::new();
    fixture.write(LABEL, vec![RequestRecord::example(id(NOON_MS, 0))]);
    fixture.log.close();
    let path = fixture.folder().join("2026-11-21.sqlite");
    fs::write(&path, [7; 100_000]).unwrap();
    let yesterday = fixture.folder().join("2026-11-20.sqlite");
    fs::write(&yesterday, [7; 100_000]).unwrap();
    fixture.reopen();
    assert!(fixture.log.show(id(NOON_MS, 0)).unwrap_err().is_damage());
    fixture.write(LABEL, vec![RequestRecord::example(id(NOON_MS, 1))]);
    assert_eq!(
        fixture.ids(&of_service()),
        [id(NOON_MS, 1)],
        "skips yesterday's file, which is damaged too"
    );
    assert_eq!(
        fs::read(fixture.folder().join("2026-11-21.sqlite.corrupt")).unwrap(),
        [7; 100_000]
    );
    let stats = fixture.log.stats();
    assert_eq!(
        (stats.written, stats.dropped, stats.failing, stats.damaged),
        (1, 0, false, 2)
    );
}

#[test]
fn damaged_block_is_reported_and_others_are_found() {
    let fixture = Fixture::new();
    let good = id(NOON_MS, 0);
    let bad = id(NOON_MS + 5000, 0);
    fixture.write(
        LABEL,
        vec![RequestRecord::example(good), RequestRecord::example(bad)],
    );
    let connection = Connection::open(fixture.folder().join("2026-11-21.sqlite")).unwrap();
    let damage = "UPDATE block SET data = x'01ffff' WHERE key = (SELECT max(key) FROM block)";
    assert_eq!(connection.execute(damage, []).unwrap(), 1);
    assert!(matches!(fixture.log.show(bad), Err(LogError::Damaged(_))));
    assert!(fixture.log.show(good).unwrap().is_some());
    assert_eq!(fixture.ids(&of_service()), [good]);
    assert_eq!(fixture.log.stats().damaged, 1);
}

#[test]
fn many_records_of_one_second_are_split_into_blocks() {
    let fixture = Fixture::new();
    let caller = |number: u64| IpAddr::from([10, 0, (number >> 8) as u8, number as u8]);
    let records = (0..10_000).map(|number| RequestRecord {
        caller: caller(number),
        target: format!("/{}", "x".repeat(number as usize % 50 * 10)).into(),
        // More agents than a block interns.
        agent: Some(AgentId::random()),
        ..RequestRecord::example(id(NOON_MS - NOON_MS % 1000 + number % 1000, number))
    });
    let records: Vec<RequestRecord> = records.collect();
    fixture.write(LABEL, records.clone());
    for record in records.iter().step_by(97) {
        let view = fixture.log.show(record.id).unwrap().unwrap();
        assert_eq!(
            (view.caller_address, view.path.as_str()),
            (record.caller.to_string(), &record.target[..])
        );
        assert_eq!(
            view.agent_id.as_deref(),
            record.agent.as_ref().map(AgentId::as_str)
        );
    }
    assert_eq!(fixture.log.stats().written, 10_000);
}
