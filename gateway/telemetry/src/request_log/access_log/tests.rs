use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::time::{Duration, Instant};

use gw_base::process::background::Background;
use gw_shared::id::{AgentId, ClientId, KeyId, RequestId, RequestIds};
use gw_shared::identity::secret::Secret;
use gw_shared::text::is_hidden;
use http::Method;
use serde_json::Value;

use super::super::record::{
    CallerId, Capture, Ended, METHOD_MAX, Protocol, RecordedAttempt, RequestRecord, TARGET_MAX,
};
use super::super::timing::Timing;
use super::super::{Names, RequestLog};
use super::*;

fn log(folder: &Path, target: &Path) -> RequestLog {
    let masker = Masker::new([&Secret::new("0123456789abcdef".to_owned())]);
    let background = Background::start().unwrap();
    RequestLog::open_on(
        &background,
        &folder.join("requests"),
        masker,
        Some(&AccessLogTarget::File(target.to_owned())),
        None,
        Names::default(),
    )
    .unwrap()
    .keeping(background)
}

fn batch(label: &str, records: Vec<RequestRecord>) -> Batch {
    Batch {
        services: vec![(label.into(), records)],
    }
}

/// Record with all columns, and with secrets and characters that a terminal obeys.
fn full_record(ids: &RequestIds) -> RequestRecord {
    RequestRecord {
        method: Method::from_bytes(&[b'M'; METHOD_MAX + 1]).unwrap(),
        target: "/a\u{e4}\"/b\u{9b}2J\u{202e}\u{2028}?key=gw_sk_abc.secret&token=0123456789abcdef"
            .into(),
        caller: "2001:db8::1".parse().unwrap(),
        protocol: Protocol::Replay,
        by: Some(CallerId::Client(ClientId::random())),
        status: Some(502),
        code: Some("GW_BACKEND_RESET"),
        ended: Ended::Cut,
        bytes_in: u64::MAX,
        bytes_taken: Some(6),
        bytes_out: 7,
        timing: Timing {
            authenticate: 1,
            wait: Some(2),
            agent: Some(3),
            backend_first_byte: Some(4),
            response_head: Some(u32::MAX),
            total: 9,
        },
        agent: Some(AgentId::random()),
        attempts: (0..5)
            .map(|duration_us| RecordedAttempt {
                agent_id: Some(AgentId::random()),
                reason: "no_slot",
                duration_us,
            })
            .collect(),
        replayed_from: Some(ids.next_id()),
        trace_id: Some(*b"0123456789abcdef"),
        capture: Some(Box::new(Capture::default())),
        ..RequestRecord::example(ids.next_id())
    }
}

#[test]
fn a_line_has_the_fields_of_the_request_log_without_messages() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.jsonl");
    let log = log(folder.path(), &path);
    let ids = RequestIds::new();
    let full = full_record(&ids);
    let plain = RequestRecord {
        target: "x".repeat(TARGET_MAX + 1).into(),
        protocol: Protocol::Http10,
        by: Some(CallerId::ServiceKey(KeyId::random())),
        status: None,
        ended: Ended::CallerGone,
        ..RequestRecord::example(ids.next_id())
    };
    let apex = RequestRecord {
        protocol: Protocol::Http11,
        ..RequestRecord::example(ids.next_id())
    };
    let replay = RequestRecord {
        by: Some(CallerId::Admin),
        ..RequestRecord::example(ids.next_id())
    };
    let past_log = RequestRecord::example(ids.next_id());
    let logged = [full.id, plain.id, replay.id, apex.id];
    log.queue()
        .push(batch("acme--api-2", vec![full, plain, replay]));
    log.queue().push(batch("", vec![apex]));
    log.queue()
        .push_past_log(batch("acme--quiet", vec![past_log.clone()]));
    log.close();

    let text = fs::read_to_string(&path).unwrap();
    assert!(
        !text.contains("0123456789abcdef") && !text.contains("abc.secret"),
        "{text}"
    );
    assert!(!text.contains(|c| is_hidden(c) && c != '\n'), "{text:?}");
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let line_of = |id: RequestId| {
        lines
            .iter()
            .find(|line| line["id"] == id.to_string())
            .unwrap()
    };
    for id in logged {
        let mut expected = serde_json::to_value(log.show(id).unwrap().unwrap()).unwrap();
        for key in ["captured_request", "captured_response"] {
            expected.as_object_mut().unwrap().remove(key).unwrap();
        }
        assert_eq!(line_of(id), &expected);
    }
    assert_eq!(line_of(past_log.id)["service"], "quiet");
    assert_eq!((lines.len(), log.show(past_log.id).unwrap()), (5, None));
    let stats = log.stats();
    assert_eq!((stats.written, stats.dropped), (4, 0));
    assert_eq!(
        stats.access_log,
        AccessLogStats {
            written: 5,
            dropped: 0,
            failing: false
        }
    );
}

/// Pushes records of almost 8 KiB until `until` holds for the counters; returns their number.
fn push_until(log: &RequestLog, until: impl Fn(AccessLogStats) -> bool) -> u64 {
    let ids = RequestIds::new();
    let mut pushed = 0;
    let began = Instant::now();
    while !until(log.stats().access_log) {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "{:?}",
            log.stats()
        );
        let record = || RequestRecord {
            target: "x".repeat(TARGET_MAX - 1).into(),
            ..RequestRecord::example(ids.next_id())
        };
        log.queue()
            .push_past_log(batch("acme--api", (0..64).map(|_| record()).collect()));
        pushed += 64;
        log.flush();
    }
    pushed
}

#[test]
fn a_pipe_that_is_not_read_holds_up_nothing_and_its_losses_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fifo");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &path,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RWXU,
        0,
    )
    .unwrap();
    // Open for reading and writing: opening does not wait for a writer.
    let reader = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let log = log(folder.path(), &path);
    let pushed = push_until(&log, |stats| stats.dropped > 0);
    // What waits is bounded: the queue, and the pipe.
    assert!(
        pushed < (limits::ACCESS_LOG_QUEUE_BYTES as u64 / TARGET_MAX as u64) + 256,
        "{pushed}"
    );
    // The request log goes on.
    let ids = RequestIds::new();
    let id = ids.next_id();
    log.queue()
        .push(batch("acme--api", vec![RequestRecord::example(id)]));
    log.flush();
    assert!(log.show(id).unwrap().is_some() && log.stats().dropped == 0);

    let lines = std::thread::spawn(move || {
        let mut reader = BufReader::new(reader);
        let mut lines = 0;
        let mut line = String::new();
        loop {
            line.clear();
            reader.read_line(&mut line).unwrap();
            if line == "end\n" {
                return lines;
            }
            serde_json::from_str::<Value>(&line).unwrap();
            lines += 1;
        }
    });
    // A stop gives up after a while, which may be too short for all lines on a busy machine.
    let has_all = |stats: &AccessLogStats| stats.written + stats.dropped == pushed + 1;
    let begun = Instant::now();
    while !has_all(&log.stats().access_log) {
        assert!(begun.elapsed() < Duration::from_secs(60));
        std::thread::yield_now();
    }
    log.close();
    let stats = log.stats().access_log;
    assert!(has_all(&stats));
    std::io::Write::write_all(
        &mut File::options().write(true).open(&path).unwrap(),
        b"end\n",
    )
    .unwrap();
    assert_eq!(lines.join().unwrap(), stats.written);
}

#[test]
fn a_stop_does_not_wait_for_a_reader_that_has_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fifo");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &path,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RWXU,
        0,
    )
    .unwrap();
    let _reader = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let log = log(folder.path(), &path);
    push_until(&log, |stats| stats.dropped > 0);
    let began = Instant::now();
    log.close();
    assert!(
        began.elapsed() >= limits::ACCESS_LOG_END,
        "it waits for the lines, within the bound"
    );
}

#[test]
fn failing_writes_are_counted_and_the_rest_of_the_log_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let log = log(folder.path(), Path::new("/dev/full"));
    let pushed = push_until(&log, |stats| stats.dropped > 0);
    log.close();
    assert_eq!(
        log.stats().access_log,
        AccessLogStats {
            written: 0,
            dropped: pushed,
            failing: true
        }
    );
}

#[test]
fn a_file_that_cannot_be_opened_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let target = AccessLogTarget::File(folder.path().join("no/access.jsonl"));
    let error = RequestLog::open_on(
        &Background::start().unwrap(),
        &folder.path().join("requests"),
        Masker::default(),
        Some(&target),
        None,
        Names::default(),
    )
    .unwrap_err();
    let expected = format!("access_log: cannot append to {target}: No such file or directory");
    assert!(error.to_string().starts_with(&expected), "{error}");
}
