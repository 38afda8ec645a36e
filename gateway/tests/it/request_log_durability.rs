//! The request log when its process is killed, and when its disk is full.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, SystemTime};

use gw_gateway::telemetry::request_log::{Batch, Ended, Protocol, Record, RequestLog, SearchQuery, Timing};
use gw_shared::id::{RequestId, RequestIds, random_base62};

/// How often the writing process is killed.
const KILLS: usize = 20;
/// What a killed process may take with it, of what it had handed over.
const LOSS_MAX_MS: u64 = 1000;
/// Names the folder to the processes that this one starts.
const FOLDER: &str = "GW_TEST_REQUEST_LOG";

fn record(id: RequestId, target: &str) -> Record {
    Record {
        id,
        method: http::Method::GET,
        target: target.into(),
        caller: [127, 0, 0, 1].into(),
        protocol: Protocol::Http11,
        by: None,
        status: Some(200),
        code: None,
        ended: Ended::Complete,
        bytes_in: 0,
        bytes_out: 0,
        timing: Timing::default(),
        agent: None,
        replayed_from: None,
        trace_id: None,
        capture: None,
    }
}

fn push(log: &RequestLog, records: Vec<Record>) {
    log.queue().push(Batch { services: vec![("acme--api".into(), records)] });
}

/// This program again, for one of the tests that are ignored otherwise.
fn this_program(test: &str) -> Vec<String> {
    let program = env::current_exe().unwrap().into_os_string().into_string().unwrap();
    let arguments = ["--exact", test, "--ignored", "--nocapture"];
    std::iter::once(program).chain(arguments.map(str::to_owned)).collect()
}

#[test]
#[ignore = "run by `a_killed_process_takes_less_than_a_second_with_it`"]
#[allow(clippy::print_stdout, reason = "what it has done is read by the test that kills it")]
fn writes_until_it_is_killed() {
    let Some(folder) = env::var_os(FOLDER) else { return };
    let log = RequestLog::open(&PathBuf::from(folder)).unwrap();
    let ids = RequestIds::new();
    println!();
    for round in 0.. {
        let records: Vec<Record> = (0..20).map(|_| record(ids.next_id(), "/")).collect();
        let last = records[records.len() - 1].id;
        let all: Vec<String> = records.iter().map(|record| record.id.to_string()).collect();
        push(&log, records);
        println!("pushed {}", all.join(" "));
        if round % 50 == 49 {
            log.flush();
            println!("committed {last}");
        }
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
#[allow(clippy::print_stdout, reason = "the measured loss is worth seeing")]
fn a_killed_process_takes_less_than_a_second_with_it() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path().join("requests");
    let mut kept = 0;
    let mut longest_ms = 0;
    for kill in 0..KILLS {
        let program = this_program("request_log::writes_until_it_is_killed");
        let mut child =
            Command::new(&program[0]).args(&program[1..]).env(FOLDER, &folder).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (mut pushed, mut committed): (BTreeSet<RequestId>, usize) = (BTreeSet::new(), 0);
        let mut note = |line: &str| {
            if let Some((_, ids)) = line.split_once("pushed ") {
                // The last line may be cut.
                pushed.extend(ids.split(' ').filter_map(|id| id.parse::<RequestId>().ok()));
            } else if line.contains("committed ") {
                committed = pushed.len();
            }
            committed
        };
        // Killed at a moment that is different each time, once something is there to lose.
        while note(&lines.next().unwrap().unwrap()) == 0 {}
        thread::sleep(Duration::from_micros((kill as u64 * 79_190) % 400_000));
        child.kill().unwrap();
        let killed_ms = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis() as u64;
        child.wait().unwrap();
        for line in lines.map_while(Result::ok) {
            note(&line);
        }

        let log = RequestLog::open(&folder).unwrap();
        let found = everything(&log);
        assert_eq!(log.stats().damaged, 0);
        for (number, id) in pushed.iter().enumerate() {
            if found.contains(id) {
                kept += 1;
                continue;
            }
            assert!(number >= committed, "committed and lost");
            assert_eq!(log.show(*id).unwrap(), None);
            longest_ms = longest_ms.max(killed_ms.saturating_sub(id.unix_ms()));
        }
        assert!(log.show(*pushed.first().unwrap()).unwrap().is_some());
        assert!(found.len() >= kept, "earlier runs' records are still there");
    }
    println!("{kept} records kept over {KILLS} kills; at most the last {longest_ms} ms were lost");
    assert!(longest_ms < LOSS_MAX_MS, "{longest_ms} ms were lost");
}

/// All records that are there.
fn everything(log: &RequestLog) -> BTreeSet<RequestId> {
    let (mut query, mut found) = (SearchQuery { limit: Some(1000), ..SearchQuery::default() }, BTreeSet::new());
    loop {
        let page = log.search(&query).unwrap();
        found.extend(page.items.iter().map(|item| item.id.parse::<RequestId>().unwrap()));
        query.cursor = page.next_cursor;
        if query.cursor.is_none() {
            return found;
        }
    }
}

#[test]
#[ignore = "run by `a_full_disk_loses_records_and_nothing_else`, on a small disk"]
fn fills_the_disk_and_makes_room_again() {
    let Some(folder) = env::var_os(FOLDER).map(PathBuf::from) else { return };
    fs::write(folder.join("filler"), vec![0; 1 << 20]).unwrap();
    let log = RequestLog::open(&folder.join("requests")).unwrap();
    let ids = RequestIds::new();
    // What does not compress.
    let write = || {
        let records: Vec<Record> =
            (0..20).map(|_| record(ids.next_id(), &format!("/{}", random_base62(2000)))).collect();
        let ids: Vec<RequestId> = records.iter().map(|record| record.id).collect();
        push(&log, records);
        log.flush();
        ids
    };
    let mut written = Vec::new();
    while !log.stats().failing {
        assert!(written.len() < 1 << 20, "the disk is never full");
        written.push(write());
    }
    let lost = written.pop().unwrap();
    let readable = || written.iter().flatten().all(|id| log.show(*id).unwrap().is_some());
    assert!(readable(), "what was written before stays");
    for _ in 0..20 {
        write();
    }
    let stats = log.stats();
    assert!(stats.failing && stats.dropped >= 20, "{stats:?}");
    assert_eq!(stats.written, written.len() as u64 * 20 + (420 - stats.dropped), "{stats:?}");
    assert!(readable() && log.show(lost[0]).unwrap().is_none());

    fs::remove_file(folder.join("filler")).unwrap();
    let again = write();
    assert!(!log.stats().failing, "{:?}", log.stats());
    assert!(readable() && again.iter().all(|id| log.show(*id).unwrap().is_some()));
    log.close();
    let log = RequestLog::open(&folder.join("requests")).unwrap();
    assert!(log.show(again[0]).unwrap().is_some() && log.stats().damaged == 0);
}

#[test]
fn a_full_disk_loses_records_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    // A file system of 4 MiB, in a mount namespace that ends with the process.
    let script = r#"mount -t tmpfs -o size=4m,mode=700 none "$1" && shift && exec "$@""#;
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]).arg(directory.path());
    command.args(this_program("request_log::fills_the_disk_and_makes_room_again")).env(FOLDER, directory.path());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&output.stderr));
}
