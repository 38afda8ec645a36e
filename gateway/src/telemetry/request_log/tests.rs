//! Tests of the whole log: records that are written are found.

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicI64, Ordering};

use bytes::Bytes;
use gw_shared::http::Fields;
use gw_shared::id::{AgentId, ClientId, KeyId};
use gw_shared::identity::secret::Secret;
use http::header::{HeaderName, HeaderValue};
use rusqlite::Connection;

use super::day::DAY_MS;
use super::*;

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
        let directory = tempfile::tempdir().unwrap();
        let seconds = Arc::new(AtomicI64::new((NOON_MS / 1000) as i64));
        let log = open(&directory, &seconds);
        Self {
            directory,
            seconds,
            log,
        }
    }

    fn reopen(&mut self) {
        self.log.close();
        self.log = open(&self.directory, &self.seconds);
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

fn open(directory: &tempfile::TempDir, seconds: &Arc<AtomicI64>) -> RequestLog {
    let seconds = Arc::clone(seconds);
    RequestLog::open_at(&directory.path().join("requests"), move || {
        Timestamp(seconds.load(Ordering::Relaxed))
    })
    .unwrap()
}

fn id(unix_ms: u64, number: u64) -> RequestId {
    let first = u128::from_be_bytes(*RequestId::first_of_ms(unix_ms).as_bytes());
    RequestId::from_bytes((first + u128::from(number)).to_be_bytes()).unwrap()
}

fn of_service() -> SearchQuery {
    SearchQuery {
        account: Some("acme".to_owned()),
        service: Some("api".to_owned()),
        ..SearchQuery::default()
    }
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
    )
    .unwrap();
    let path = format!("/{}", "a".repeat(record::TARGET_MAX - 6));
    let record = RequestRecord {
        target: format!("{path}0123456789").into(),
        ..RequestRecord::example(id(NOON_MS, 1))
    };
    log.queue().push(Batch {
        services: vec![(LABEL.into(), vec![record])],
    });
    log.flush();
    assert_eq!(
        log.search(&of_service()).unwrap().items[0].path,
        format!("{path}gw_ad")
    );
}

#[test]
fn request_is_shown_as_recorded_without_secrets() {
    let fixture = Fixture::new();
    let client = ClientId::random();
    let original = id(NOON_MS - 9, 0);
    let agent = AgentId::random();
    let failed = AgentId::random();
    let body = vec![b'x'; 10_000];
    let full = RequestRecord {
        method: Method::from_bytes(b"PURGE").unwrap(),
        target: "/a/b?key=gw_sk_abc.secret&c".into(),
        caller: "2001:db8::1".parse().unwrap(),
        protocol: Protocol::Replay,
        by: Some(CallerId::Client(client.clone())),
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
        agent: Some(agent.clone()),
        attempts: Box::new([RecordedAttempt {
            agent_id: Some(failed.clone()),
            reason: "backend_tls",
            duration_us: 5000,
        }]),
        replayed_from: Some(original),
        trace_id: Some(*b"0123456789abcdef"),
        capture: Some(Box::new(Capture {
            request: Some(message(
                &[
                    ("content-type", b"text/plain"),
                    ("x-a", b"gw_cs_secret"),
                    ("x-a", b"\xff"),
                ],
                &body,
                true,
            )),
            response: Some(message(
                &[("content-encoding", b"gzip")],
                b"not really",
                false,
            )),
        })),
        ..RequestRecord::example(id(NOON_MS, 1))
    };
    fixture.write(
        LABEL,
        vec![full.clone(), RequestRecord::example(id(NOON_MS, 2))],
    );

    let text = |text: &str| Some(text.to_owned());
    let expected = RequestView {
        id: full.id.to_string(),
        time: "2026-11-21T04:15:32.123Z".to_owned(),
        account: "acme".to_owned(),
        service: "api".to_owned(),
        method: "PURGE".to_owned(),
        path: "/a/b".to_owned(),
        query: text("key=gw_sk_abc.***&c"),
        caller_address: "2001:db8::1".to_owned(),
        protocol: "replay".to_owned(),
        auth_mode: text("jwt"),
        caller_id: text(client.as_str()),
        status: Some(502),
        code: text("GW_BACKEND_RESET"),
        ended: "cut".to_owned(),
        bytes_in: u64::MAX,
        bytes_taken: Some(u64::MAX - 1),
        bytes_out: 7,
        durations_us: Timing {
            authenticate: 1,
            wait: Some(2),
            agent: Some(3),
            backend_first_byte: Some(4),
            response_head: Some(u32::MAX),
            total: u64::MAX / 2,
        },
        agent_id: text(agent.as_str()),
        attempts: vec![AttemptView {
            agent_id: failed.to_string(),
            reason: "backend_tls".to_owned(),
            duration_us: 5000,
        }],
        replayed_from: text(&original.to_string()),
        trace_id: text("30313233343536373839616263646566"),
        captured_request: Some(CapturedView {
            headers: [
                ("content-type", "text/plain"),
                ("x-a", "gw_cs_***"),
                ("x-a", "\u{fffd}"),
            ]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .to_vec(),
            bytes: 10_000,
            truncated: true,
            truncated_by: Some(Truncation::Memory),
        }),
        captured_response: Some(CapturedView {
            headers: vec![("content-encoding".to_owned(), "gzip".to_owned())],
            bytes: 10,
            truncated: false,
            truncated_by: None,
        }),
    };
    assert_eq!(fixture.log.show(full.id).unwrap().unwrap(), expected);
    let page = fixture.log.search(&of_service()).unwrap();
    assert_eq!(
        (&page.items[1], page.items.len(), &page.next_cursor),
        (&expected, 2, &None)
    );

    let request = fixture.log.body(full.id, Side::Request).unwrap().unwrap();
    assert_eq!(
        (
            request.content_type,
            request.content_encoding,
            request.truncated
        ),
        (text("text/plain"), None, true)
    );
    assert_eq!(request.bytes, body);
    let response = fixture.log.body(full.id, Side::Response).unwrap().unwrap();
    assert_eq!(
        (response.content_encoding, response.bytes.as_slice()),
        (text("gzip"), b"not really".as_slice())
    );
    let captured = fixture.log.captured(full.id).unwrap().unwrap();
    assert_eq!(
        (captured.view, captured.method.as_str()),
        (expected, "PURGE")
    );
    assert_eq!(captured.target, "/a/b?key=gw_sk_abc.***&c");
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
    let plain = id(NOON_MS, 2);
    let unknown = id(NOON_MS, 3);
    assert_eq!(fixture.log.body(plain, Side::Request).unwrap(), None);
    assert!(
        fixture
            .log
            .captured(plain)
            .unwrap()
            .unwrap()
            .request
            .is_none()
    );
    assert_eq!(fixture.log.show(plain).unwrap().unwrap().query, None);
    assert_eq!(fixture.log.show(unknown).unwrap(), None);
    assert!(
        fixture.log.captured(unknown).unwrap().is_none()
            && fixture.log.body(unknown, Side::Request).unwrap().is_none()
    );

    let mode = |path: PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(fixture.folder()), 0o700);
    for entry in fs::read_dir(fixture.folder()).unwrap() {
        assert_eq!(mode(entry.unwrap().path()), 0o600);
    }
}

/// Writes records of three services over two days, in no order and in several flushes, and returns them.
fn many(fixture: &Fixture) -> BTreeMap<RequestId, (&'static str, RequestRecord)> {
    let labels = [LABEL, "acme--other", "globex--api"];
    let client = ClientId::new("gw_ci_00000000000000000000").unwrap();
    let key = KeyId::new("0000000000000000").unwrap();
    let failed = RecordedAttempt {
        agent_id: Some(AgentId::random()),
        reason: "silent",
        duration_us: 7,
    };
    let mut all = BTreeMap::new();
    for number in 0..600_u64 {
        let age_ms = number * number * 331 % DAY_MS;
        let record = RequestRecord {
            target: if number % 3 == 0 {
                "/x/y?/a".into()
            } else {
                "/a/b".into()
            },
            by: match number % 4 {
                0 => Some(CallerId::Client(client.clone())),
                1 => Some(CallerId::ServiceKey(key.clone())),
                2 => Some(CallerId::Admin),
                _ => None,
            },
            status: [Some(200), Some(404), Some(502), Some(503), None][number as usize % 5],
            code: (number % 5 == 3).then_some("GW_AGENT_UNAVAILABLE"),
            timing: Timing {
                total: number * 1000,
                ..Timing::default()
            },
            attempts: if number % 50 == 0 {
                Box::new([failed.clone()])
            } else {
                Box::default()
            },
            ..RequestRecord::example(id(NOON_MS - age_ms, number))
        };
        let label = labels[number as usize % 7 % 3];
        all.insert(record.id, (label, record.clone()));
        fixture.push(label, vec![record]);
        if number % 100 == 0 {
            fixture.log.flush();
        }
    }
    fixture.log.flush();
    all
}

#[test]
fn searches_return_matching_records_newest_first_in_pages() {
    let fixture = Fixture::new();
    let all = many(&fixture);
    let text = |text: &str| Some(text.to_owned());
    let everything = SearchQuery::default();
    let since = "2026-11-20T22:00:00.5+01:00";
    let since_ms = 1_795_208_400_500;
    type Takes = Box<dyn Fn(&str, &RequestRecord) -> bool>;
    let cases: Vec<(SearchQuery, Takes)> = vec![
        (everything.clone(), Box::new(|_, _| true)),
        (
            SearchQuery {
                account: text("acme"),
                ..everything.clone()
            },
            Box::new(|label, _| label.starts_with("acme--")),
        ),
        (of_service(), Box::new(|label, _| label == LABEL)),
        (
            SearchQuery {
                status: text("502"),
                ..of_service()
            },
            Box::new(|label, r| label == LABEL && r.status == Some(502)),
        ),
        (
            SearchQuery {
                status: text("502"),
                ..everything.clone()
            },
            Box::new(|_, r| r.status == Some(502)),
        ),
        (
            SearchQuery {
                status: text("5xx"),
                ..everything.clone()
            },
            Box::new(|_, r| r.status >= Some(500)),
        ),
        (
            SearchQuery {
                status: text("none"),
                ..everything.clone()
            },
            Box::new(|_, r| r.status.is_none()),
        ),
        (
            SearchQuery {
                code: text("GW_AGENT_UNAVAILABLE"),
                ..everything.clone()
            },
            Box::new(|_, r| r.code.is_some()),
        ),
        (
            SearchQuery {
                path_prefix: text("/a"),
                ..everything.clone()
            },
            Box::new(|_, r| r.target.starts_with("/a")),
        ),
        (
            SearchQuery {
                caller_id: text("0000000000000000"),
                ..everything.clone()
            },
            Box::new(|_, r| matches!(r.by, Some(CallerId::ServiceKey(_)))),
        ),
        (
            SearchQuery {
                retried: Some(true),
                ..everything.clone()
            },
            Box::new(|_, r| !r.attempts.is_empty()),
        ),
        (
            SearchQuery {
                retried: Some(false),
                ..of_service()
            },
            Box::new(|label, r| label == LABEL && r.attempts.is_empty()),
        ),
        (
            SearchQuery {
                min_ms: Some(300),
                ..everything.clone()
            },
            Box::new(|_, r| r.timing.total >= 300_000),
        ),
        (
            SearchQuery {
                since: text(since),
                ..of_service()
            },
            Box::new(move |label, r| label == LABEL && r.id.unix_ms() >= since_ms),
        ),
        (
            SearchQuery {
                until: text(since),
                ..everything.clone()
            },
            Box::new(move |_, r| r.id.unix_ms() < since_ms),
        ),
        (
            SearchQuery {
                account: text("nobody"),
                ..everything.clone()
            },
            Box::new(|_, _| false),
        ),
        (
            SearchQuery {
                account: text("acme"),
                service: text("nothing"),
                ..everything.clone()
            },
            Box::new(|_, _| false),
        ),
        (
            SearchQuery {
                until: text("1970-01-01T00:00:00Z"),
                ..everything.clone()
            },
            Box::new(|_, _| false),
        ),
    ];
    for (query, takes) in cases {
        // Pages of several sizes, and searches that end early after little work.
        let late_ms = NOON_MS - 2 * 60 * 60 * 1000;
        for (limit, work, from_ms) in [
            (1000, WORK_MAX, 0),
            (7, WORK_MAX, 0),
            (7, 1, late_ms),
            (1000, 40_000, 0),
        ] {
            let takes =
                |id: &RequestId, label, record| id.unix_ms() >= from_ms && takes(label, record);
            let matches = all
                .iter()
                .rev()
                .filter(|(id, (label, record))| takes(id, label, record));
            let expected: Vec<RequestId> = matches.map(|(id, _)| *id).collect();
            let mut query = query.clone();
            if from_ms > 0 {
                query.since = Some(block::time_text(from_ms));
            }
            let mut found = Vec::new();
            let mut query = SearchQuery {
                limit: Some(limit),
                ..query
            };
            loop {
                let page = fixture.log.search_within(&query, work).unwrap();
                assert!(page.items.len() <= limit);
                found.extend(
                    page.items
                        .iter()
                        .map(|item| item.id.parse::<RequestId>().unwrap()),
                );
                match page.next_cursor {
                    Some(cursor) => query.cursor = Some(cursor),
                    None => break,
                }
            }
            assert_eq!(found, expected, "{query:?}");
        }
    }
    for id in all.keys() {
        assert_eq!(fixture.log.show(*id).unwrap().unwrap().id, id.to_string());
    }
}

#[test]
fn invalid_searches_name_the_field_and_the_expected_value() {
    let fixture = Fixture::new();
    let text = |text: &str| Some(text.to_owned());
    let none = SearchQuery::default();
    for (query, expected) in [
        (
            SearchQuery {
                account: text("A"),
                ..none.clone()
            },
            "account: \"A\" is not an account id: 3 to 15 characters",
        ),
        (
            SearchQuery {
                service: text("api"),
                ..none.clone()
            },
            "account: required with `service`",
        ),
        (
            SearchQuery {
                service: text("-"),
                ..of_service()
            },
            "service: \"-\" is not a service id",
        ),
        (
            SearchQuery {
                service: Some("s".repeat(58)),
                account: Some("a".repeat(15)),
                ..none.clone()
            },
            "service: too long together with the account",
        ),
        (
            SearchQuery {
                status: text("6xx"),
                ..none.clone()
            },
            "status: must be a status like `502`, a class like `5xx`, or `none`",
        ),
        (
            SearchQuery {
                status: text("99"),
                ..none.clone()
            },
            "status: ",
        ),
        (
            SearchQuery {
                code: text("gw-x"),
                ..none.clone()
            },
            "code: must be an error code like `GW_RATE_LIMITED`",
        ),
        (
            SearchQuery {
                path_prefix: text("a"),
                ..none.clone()
            },
            "path_prefix: must begin with `/`",
        ),
        (
            SearchQuery {
                caller_id: text("me"),
                ..none.clone()
            },
            "caller_id: must be a client id",
        ),
        (
            SearchQuery {
                since: text("yesterday"),
                ..none.clone()
            },
            "since: must be a time like `2026-11-21T04:15:32Z`",
        ),
        (
            SearchQuery {
                until: text("2026-11-21"),
                ..none.clone()
            },
            "until: must be a time like",
        ),
        (
            SearchQuery {
                limit: Some(0),
                ..none.clone()
            },
            "limit: must be a whole number from 1 to 1000",
        ),
        (
            SearchQuery {
                limit: Some(1001),
                ..none.clone()
            },
            "limit: ",
        ),
        (
            SearchQuery {
                cursor: text("7"),
                ..none.clone()
            },
            "cursor: must be the `next_cursor` of the previous page",
        ),
    ] {
        let error = fixture.log.search(&query).unwrap_err();
        assert!(
            matches!(error, LogError::Invalid { .. }) && error.to_string().starts_with(expected),
            "{error}"
        );
    }
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
    let other = open(&fixture.directory, &fixture.seconds);
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
