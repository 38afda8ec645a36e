//! Bound on the disk, and the accounts' shares of it.

use gw_shared::id::random_base62;

use super::*;

const MIB: usize = 1024 * 1024;
const MAX: u64 = 64 * MIB as u64;
/// Bytes of one day, and of the write-ahead logs.
const DAY_BYTES: u64 = MAX / 10;
const WAL_BYTES: u64 = 2 * MAX / 64;

struct Bounded {
    fixture: Fixture,
    number: u64,
}

impl Bounded {
    fn new() -> Self {
        let fixture = Fixture::with_bound(Some(MAX));
        Self { fixture, number: 0 }
    }

    /// Bytes that the file system has allocated for the files of the log.
    fn on_disk(&self) -> u64 {
        let output = std::process::Command::new("du")
            .args(["--summarize", "--block-size=1"])
            .arg(self.fixture.folder())
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        text.split_whitespace().next().unwrap().parse().unwrap()
    }

    /// Writes a record of today, and returns its id.
    fn write(
        &mut self,
        account: &str,
        change: impl FnOnce(RequestRecord) -> RequestRecord,
    ) -> RequestId {
        let now_ms = self.fixture.seconds.load(Ordering::Relaxed) as u64 * 1000;
        self.number += 1;
        let id = id(now_ms, self.number);
        let record = RequestRecord {
            by: Some(CallerId::Admin),
            ..RequestRecord::example(id)
        };
        let label = format!("{account}--api");
        self.fixture.write(&label, vec![change(record)]);
        id
    }

    fn is_recorded(&self, id: RequestId) -> bool {
        self.fixture.log.show(id).unwrap().is_some()
    }

    /// Why the captured request was cut; `None` if it is whole.
    fn cut(&self, id: RequestId) -> Option<Truncation> {
        let view = self.fixture.log.show(id).unwrap().unwrap();
        view.captured_request.unwrap().truncated_by
    }

    /// Writes records until the account has used its share.
    fn flood(&mut self, account: &str) {
        let before = self.fixture.log.stats().over_share;
        for _ in 0..2000 {
            self.write(account, long);
            if self.fixture.log.stats().over_share > before {
                return;
            }
        }
        panic!("{account} has no bound: {:?}", self.fixture.log.stats());
    }
}

/// With a target that cannot be compressed.
fn long(record: RequestRecord) -> RequestRecord {
    RequestRecord {
        target: format!("/{}", random_base62(record::TARGET_MAX - 1)).into(),
        ..record
    }
}

fn captured(record: RequestRecord) -> RequestRecord {
    with_body(record, MIB / 4)
}

fn with_small_capture(record: RequestRecord) -> RequestRecord {
    with_body(record, 10_000)
}

fn with_body(record: RequestRecord, bytes: usize) -> RequestRecord {
    let body = random_base62(bytes);
    let request = Some(message(
        &[("content-type", b"text/plain")],
        body.as_bytes(),
        false,
    ));
    let response = None;
    RequestRecord {
        capture: Some(Box::new(Capture { request, response })),
        ..record
    }
}

fn unauthenticated(record: RequestRecord) -> RequestRecord {
    RequestRecord {
        by: None,
        ..long(record)
    }
}

#[test]
fn an_account_loses_captures_first_then_records_and_costs_others_nothing() {
    let mut log = Bounded::new();
    let whole = log.write("flood", captured);
    assert_eq!(log.cut(whole), None);
    let ids: Vec<_> = (0..40).map(|_| log.write("flood", captured)).collect();
    let cut = *ids.last().unwrap();
    assert_eq!(log.cut(cut), Some(Truncation::Disk));
    let kept = log.fixture.log.body(cut, Side::Request).unwrap().unwrap();
    assert_eq!((kept.bytes.len(), kept.truncated), (0, true));
    let stats = log.fixture.log.stats();
    assert!(stats.captures_over_share > 20, "{stats:?}");
    assert_eq!((stats.over_share, stats.dropped, stats.written), (0, 0, 41));
    assert!(
        log.on_disk() < DAY_BYTES / 4 + WAL_BYTES + MIB as u64,
        "{}",
        log.on_disk()
    );

    log.flood("flood");
    assert!(
        log.on_disk() < DAY_BYTES / 2 + WAL_BYTES + MIB as u64,
        "{}",
        log.on_disk()
    );
    // Strangers at a service of an account are not that account.
    for _ in 0..1000 {
        log.write("quiet", unauthenticated);
    }
    let over_share = log.fixture.log.stats().over_share;
    for _ in 0..2 {
        let plain = log.write("quiet", |record| record);
        assert!(log.is_recorded(plain));
        let kept = log.write("quiet", with_small_capture);
        assert_eq!(log.cut(kept), None);
        // The file has the shares.
        log.fixture.log.close();
        log.fixture.log = open(&log.fixture.directory, &log.fixture.seconds, Some(MAX));
        let refused = log.write("flood", long);
        assert!(!log.is_recorded(refused));
    }
    assert_eq!((over_share, log.fixture.log.stats().dropped), (1, 0));

    // The next day has new shares.
    log.fixture
        .seconds
        .fetch_add(DAY_MS as i64 / 1000, Ordering::Relaxed);
    let next = log.write("flood", captured);
    assert_eq!(log.cut(next), None);
}

#[test]
fn all_accounts_together_stay_within_the_bound_for_all_days() {
    let mut log = Bounded::new();
    let mut first = Vec::new();
    for _ in 0..10 {
        let accounts = ["one", "two", "three"];
        first.push(accounts.map(|account| log.write(account, captured)));
        for account in accounts {
            log.flood(account);
        }
        for _ in 0..10 {
            log.write("one", unauthenticated);
        }
        // The clock has shown this day for long enough: expired days are removed step by step.
        (0..3).for_each(|_| log.fixture.log.flush());
        assert!(log.on_disk() <= MAX, "{}", log.on_disk());
        log.fixture
            .seconds
            .fetch_add(DAY_MS as i64 / 1000, Ordering::Relaxed);
    }
    let stats = log.fixture.log.stats();
    assert_eq!((stats.days_removed, stats.dropped), (0, 0));
    for id in first.iter().rev().take(7).flatten() {
        assert!(log.is_recorded(*id), "each account has its days");
    }
}

#[test]
fn the_oldest_days_are_removed_if_the_files_are_larger_than_the_bound() {
    let mut log = Bounded::new();
    let folder = log.fixture.folder();
    for day in ["2026-11-18", "2026-11-20"] {
        fs::write(
            folder.join(format!("{day}.sqlite")),
            vec![7; MAX as usize / 2 + MIB],
        )
        .unwrap();
    }
    let id = log.write("acme", |record| record);
    assert!(log.is_recorded(id));
    assert_eq!(log.fixture.log.stats().days_removed, 1);
    let measure = || LogDisk::measure(&folder, Some(MAX)).unwrap();
    assert_eq!(measure().removed.as_deref(), Some("2026-11-18"));
    assert!(folder.join("2026-11-20.sqlite").exists());

    // Today is not removed.
    fs::write(
        folder.join("2026-11-21.sqlite.corrupt"),
        vec![7; MAX as usize],
    )
    .unwrap();
    let lost = log.write("acme", |record| record);
    let stats = log.fixture.log.stats();
    assert!(
        stats.failing && log.is_recorded(id) && !log.is_recorded(lost),
        "{stats:?}"
    );
    assert_eq!((stats.days_removed, stats.dropped), (2, 1));
    fs::remove_file(folder.join("2026-11-21.sqlite.corrupt")).unwrap();
    let again = log.write("acme", |record| record);
    assert!(log.is_recorded(again) && !log.fixture.log.stats().failing);
    while log.on_disk() > MAX / 8 {
        log.fixture.log.flush();
    }

    // The mark goes when the day would have expired.
    let marked = || measure().removed.is_some();
    assert!(marked());
    log.fixture
        .seconds
        .fetch_add(8 * DAY_MS as i64 / 1000, Ordering::Relaxed);
    log.write("acme", |record| record);
    while marked() {
        log.fixture.log.flush();
    }
}
