//! The request log of a killed process and on a full disk.

#[path = "../../../../../shared/tests/programs/mod.rs"]
mod programs;

use std::collections::BTreeSet;
use std::env;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::thread;
use std::time::SystemTime;

use gw_base::process::disk::DiskSpace;
use gw_shared::id::{RequestIds, random_base62};

use super::*;

/// Number of kills of the writing process.
const KILLS: usize = 20;
/// Maximum age of the records that a killed process may lose.
const LOSS_MAX_MS: u64 = 1000;
/// Environment variable with the log folder of a child process.
const FOLDER: &str = "GW_TEST_REQUEST_LOG";

fn record(id: RequestId, target: &str) -> RequestRecord {
    RequestRecord {
        target: target.into(),
        ..RequestRecord::example(id)
    }
}

fn push(log: &RequestLog, records: Vec<RequestRecord>) {
    log.queue().push(Batch {
        services: vec![("acme--api".into(), records)],
    });
}

/// Command line that runs one ignored test of this file.
fn this_program(test: &str) -> Vec<String> {
    let program = env::current_exe()
        .unwrap()
        .into_os_string()
        .into_string()
        .unwrap();
    let (_, module) = module_path!().split_once("::").unwrap();
    let test = format!("{module}::{test}");
    [&program, "--exact", &test, "--ignored", "--nocapture"]
        .map(str::to_owned)
        .to_vec()
}

#[test]
#[ignore = "run by `a_killed_process_loses_less_than_a_second_of_records`"]
#[allow(
    clippy::print_stdout,
    reason = "its output is read by the test that kills it"
)]
fn writes_until_it_is_killed() {
    let Some(folder) = env::var_os(FOLDER) else {
        return;
    };
    let log = RequestLog::open(&PathBuf::from(folder)).unwrap();
    let ids = RequestIds::new();
    println!();
    for round in 0.. {
        let records: Vec<RequestRecord> = (0..20).map(|_| record(ids.next_id(), "/")).collect();
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
#[allow(clippy::print_stdout, reason = "prints the measured loss")]
fn a_killed_process_loses_less_than_a_second_of_records() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path().join("requests");
    let mut kept = 0;
    let mut longest_ms = 0;
    for kill in 0..KILLS {
        let program = this_program("writes_until_it_is_killed");
        let mut child = Command::new(&program[0])
            .args(&program[1..])
            .env(FOLDER, &folder)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut pushed: BTreeSet<RequestId> = BTreeSet::new();
        let mut committed: usize = 0;
        let mut note = |line: &str| {
            if let Some((_, ids)) = line.split_once("pushed ") {
                // The last line may be incomplete.
                pushed.extend(ids.split(' ').filter_map(|id| id.parse::<RequestId>().ok()));
            } else if line.contains("committed ") {
                committed = pushed.len();
            }
            committed
        };
        // Killed at a different moment each time, once a record is pending.
        while note(&lines.next().unwrap().unwrap()) == 0 {}
        thread::sleep(Duration::from_micros((kill as u64 * 79_190) % 400_000));
        child.kill().unwrap();
        let killed_ms = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap()
            .as_millis() as u64;
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
            assert!(number >= committed, "a committed record is lost");
            assert_eq!(log.show(*id).unwrap(), None);
            longest_ms = longest_ms.max(killed_ms.saturating_sub(id.unix_ms()));
        }
        assert!(log.show(*pushed.first().unwrap()).unwrap().is_some());
        assert!(found.len() >= kept, "records of earlier runs are kept");
    }
    println!("{kept} records kept over {KILLS} kills; at most the last {longest_ms} ms were lost");
    assert!(longest_ms < LOSS_MAX_MS, "{longest_ms} ms were lost");
}

/// Ids of all records in the log.
fn everything(log: &RequestLog) -> BTreeSet<RequestId> {
    let mut query = SearchQuery {
        limit: Some(1000),
        ..SearchQuery::default()
    };
    let mut found = BTreeSet::new();
    loop {
        let page = log.search(&query).unwrap();
        found.extend(
            page.items
                .iter()
                .map(|item| item.id.parse::<RequestId>().unwrap()),
        );
        query.cursor = page.next_cursor;
        if query.cursor.is_none() {
            return found;
        }
    }
}

fn open_on(background: &Background, folder: &Path) -> RequestLog {
    let most = Some(u64::MAX);
    let folder = folder.join("requests");
    RequestLog::open_on(
        background,
        &folder,
        Masker::default(),
        None,
        most,
        Names::default(),
    )
    .unwrap()
}

#[test]
#[ignore = "run by `a_full_disk_loses_only_records`, on a small disk"]
fn fills_the_disk_and_frees_space() {
    let Some(folder) = env::var_os(FOLDER).map(PathBuf::from) else {
        return;
    };
    // 384 KiB above the floor: less than the share of the account, which would be used up first.
    let space = DiskSpace::of(&folder).unwrap();
    let filler = space.free - space.floor() - 384 * 1024;
    fs::write(folder.join("filler"), vec![0; filler as usize]).unwrap();
    let background = Background::start().unwrap();
    let open = || open_on(&background, &folder);
    let log = open();
    let ids = RequestIds::new();
    // Incompressible data.
    let write = || {
        let records: Vec<RequestRecord> = (0..20)
            .map(|_| RequestRecord {
                by: Some(CallerId::Admin),
                ..record(ids.next_id(), &format!("/{}", random_base62(2000)))
            })
            .collect();
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
    let readable = || {
        written
            .iter()
            .flatten()
            .all(|id| log.show(*id).unwrap().is_some())
    };
    assert!(readable(), "earlier records are kept");
    for _ in 0..20 {
        write();
    }
    let stats = log.stats();
    assert!(stats.failing && stats.dropped >= 20, "{stats:?}");
    assert_eq!(
        stats.written,
        written.len() as u64 * 20 + (420 - stats.dropped),
        "{stats:?}"
    );
    assert!(readable() && log.show(lost[0]).unwrap().is_none());
    assert_eq!(stats.over_share, 0, "{stats:?}");
    // The floor is still free.
    let space = DiskSpace::of(&folder).unwrap();
    assert!(space.free > space.floor() * 3 / 4, "{space:?}");

    fs::remove_file(folder.join("filler")).unwrap();
    let again = write();
    assert!(!log.stats().failing, "{:?}", log.stats());
    assert!(readable() && again.iter().all(|id| log.show(*id).unwrap().is_some()));
    log.close();
    let log = open();
    assert!(log.show(again[0]).unwrap().is_some() && log.stats().damaged == 0);
}

#[test]
fn a_full_disk_loses_only_records() {
    if !programs::usable(&["unshare"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // Mounts a file system of 16 MiB in a mount namespace that ends with the process.
    let script = r#"mount -t tmpfs -o size=16m,mode=700 none "$1" && shift && exec "$@""#;
    let mut command = Command::new("unshare");
    command
        .args([
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            script,
            "sh",
        ])
        .arg(directory.path());
    command
        .args(this_program("fills_the_disk_and_frees_space"))
        .env(FOLDER, directory.path());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
