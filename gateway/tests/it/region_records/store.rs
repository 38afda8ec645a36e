//! The store on PostgreSQL: commits, concurrent writers, lost replies, crashes of the server,
//! sealed secrets.
//!
//! `GW_STORE_KILLS` sets how often the server is killed or stopped, for longer runs by hand.

mod audit;
mod outages;
mod usage;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use gw_base::clock::Timestamp;
use gw_shared::id::AccountId;
use gw_store::{
    AccountRecord, AuditEntry, AuditQuery, History, Position, PostgresSource, PostgresStore,
    Revision, SigningKey, Step, Store, StoreError, StoreSource, StoredRecord, UsageAmounts,
    UsageQuery, UsageRow,
};

use super::{StopOnDrop, assert_says};
use crate::support::processes::postgres::Postgres;
use crate::support::processes::process::send_signal;
use crate::support::{eventually, programs};

fn account(id: &str) -> StoredRecord {
    StoredRecord::Account(AccountRecord {
        id: AccountId::new(id).unwrap(),
        capture_allowed: false,
        domains_max: Default::default(),
        created_at: Timestamp(1),
        created_ms: None,
        managed_by: None,
        later: Default::default(),
    })
}

fn entry(target: &str) -> AuditEntry {
    AuditEntry {
        at: Timestamp(7),
        actor: "admin".into(),
        action: "account.create".into(),
        account: AccountId::new(target).ok(),
        target: target.to_owned(),
        detail: serde_json::json!({"a": [1, "it's"]}),
    }
}

fn open(postgres: &Postgres, node: &str) -> PostgresStore {
    let mut store = PostgresStore::new(&postgres.source(node)).unwrap();
    store.load().unwrap();
    store
}

/// Creates accounts, as the control plane of a node does.
pub(crate) struct Writer {
    store: PostgresStore,
    /// The newest change that it knows.
    position: Position,
}

/// Date, label of a service, and its requests, refusals, bytes in and bytes out.
type Usage = (String, String, [u64; 4]);

impl Writer {
    pub(crate) fn start(postgres: &Postgres, node: &str) -> Self {
        Self::start_at(postgres, &postgres.url(), node)
    }

    /// As [`Self::start`], with the server at this URL.
    fn start_at(postgres: &Postgres, url: &str, node: &str) -> Self {
        let mut store = PostgresStore::new(&postgres.source_at(url, node)).unwrap();
        let position = store.load().unwrap().position;
        Self { store, position }
    }

    /// Creates an account, after catching up if necessary.
    pub(crate) fn create(&mut self, id: &str) {
        while let Err(reason) = self.try_create(id) {
            assert_eq!(reason, "stale");
            let changes = changes_after(&mut self.store, &self.position);
            self.position = changes.last().unwrap().0.clone();
        }
    }

    /// Creates an account by one commit, unless the records have changed or the server does not
    /// confirm it.
    fn try_create(&mut self, id: &str) -> Result<(), &'static str> {
        let steps = [Step::Put(account(id))];
        match self.store.commit(&self.position, &steps, &entry(id)) {
            Ok(position) => {
                self.position = position;
                Ok(())
            }
            Err(StoreError::Stale) => Err("stale"),
            Err(StoreError::Unavailable(_)) => Err("unavailable"),
            Err(error) => panic!("{error}"),
        }
    }

    /// Loads all records. Returns the number of accounts; `None` if the server does not answer.
    fn reload(&mut self) -> Option<usize> {
        let loaded = self.store.load().ok()?;
        self.position = loaded.position;
        Some(loaded.records.accounts.len())
    }

    /// Writes what a node has counted, and forgets days before `oldest`.
    fn put_usage(&mut self, source: &str, rows: &[Usage], oldest: &str) {
        let rows: Vec<UsageRow> = rows
            .iter()
            .map(
                |(date, label, [requests, refusals, bytes_in, bytes_out])| UsageRow {
                    date: date.clone(),
                    label: label.clone(),
                    amounts: UsageAmounts {
                        requests: *requests,
                        refusals: *refusals,
                        bytes_in: *bytes_in,
                        bytes_out: *bytes_out,
                    },
                },
            )
            .collect();
        assert!(self.store.put_usage(source, &rows, oldest).unwrap());
    }

    /// The usage of services whose label has this prefix, after a row.
    fn usage(&mut self, prefix: &str, after: Option<(&str, &str)>, limit: usize) -> Vec<Usage> {
        let query = UsageQuery {
            since: "0001-01-01".to_owned(),
            until: "9999-12-31".to_owned(),
            label_prefix: prefix.to_owned(),
            after: after.map(|(date, label)| (date.to_owned(), label.to_owned())),
            limit,
        };
        let rows = self.store.usage(&query).unwrap().unwrap().into_iter();
        rows.map(|row| {
            let of = row.amounts;
            let amounts = [of.requests, of.refusals, of.bytes_in, of.bytes_out];
            (row.date, row.label, amounts)
        })
        .collect()
    }

    /// Number and target of all entries of the audit log, the newest first.
    fn audit(&mut self) -> Vec<(i64, String)> {
        audit(&mut self.store)
    }
}

/// The position with this revision in the region of `postgres`.
fn at(postgres: &Postgres, revision: i64) -> Position {
    let origin = postgres.sql("SELECT id FROM gw.region");
    let change = postgres.sql(&format!(
        "SELECT change_id FROM gw.changes WHERE revision = {revision}"
    ));
    Position {
        origin,
        revision: Revision(revision),
        change,
    }
}

/// The changes after a position of a history that is not lost.
#[track_caller]
fn changes_after(store: &mut PostgresStore, position: &Position) -> Vec<(Position, Vec<Step>)> {
    match store.changes_after(position).unwrap() {
        History::Changes(changes) => changes,
        lost => panic!("{lost:?}"),
    }
}

fn audit(store: &mut PostgresStore) -> Vec<(i64, String)> {
    let mut all: Vec<(i64, String)> = Vec::new();
    loop {
        let query = AuditQuery {
            account: None,
            before: all.last().map(|(number, _)| *number),
            limit: 1000,
        };
        let page = store.audit_log(&query).unwrap();
        if page.is_empty() {
            return all;
        }
        let entries = page.into_iter().map(|it| (it.number, it.entry.target));
        all.extend(entries);
    }
}

/// Asserts that the audit log has each target once, and numbers without gaps.
fn assert_each_once(entries: &[(i64, String)]) {
    let numbers: Vec<i64> = entries.iter().map(|(number, _)| *number).rev().collect();
    let expected: Vec<i64> = (1..=entries.len() as i64).collect();
    assert_eq!(numbers, expected, "without gaps");
    let targets: BTreeSet<&String> = entries.iter().map(|(_, target)| target).collect();
    assert_eq!(targets.len(), entries.len(), "each once");
}

#[test]
fn a_change_is_stored_with_its_entry_and_its_steps() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let mut first = open(&postgres, "a");
    let mut second = open(&postgres, "b");
    let start = at(&postgres, 0);
    let put = vec![Step::Put(account("acme"))];
    let made = first.commit(&start, &put, &entry("acme")).unwrap();
    assert_eq!(made, at(&postgres, 1));
    let followed = changes_after(&mut second, &start);
    let expected = [(made.clone(), put)];
    assert_eq!(format!("{followed:?}"), format!("{expected:?}"));
    let delete = [Step::Delete(account("acme").id())];
    let deleted = second.commit(&made, &delete, &entry("twice")).unwrap();
    assert_eq!(deleted, at(&postgres, 2));

    let loaded = first.load().unwrap();
    assert_eq!(loaded.position, deleted);
    assert_eq!(loaded.records.accounts.len(), 0);
    let targets = [(2, "twice".to_owned()), (1, "acme".to_owned())];
    assert_eq!(audit(&mut first), targets);
    let of_account = AuditQuery {
        account: Some("acme".into()),
        before: Some(2),
        limit: 1,
    };
    let found = first.audit_log(&of_account).unwrap();
    assert_eq!(found[0].entry, entry("acme"));
    let nodes = "SELECT string_agg(node, ',' ORDER BY revision) FROM gw.changes";
    assert_eq!(postgres.sql(nodes), "a,b");
}

#[test]
fn a_change_of_earlier_records_is_not_made() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let mut second = open(&postgres, "b");
    let start = at(&postgres, 0);
    Writer::start(&postgres, "a").create("acme");
    let stale = second.commit(&start, &[Step::Put(account("other"))], &entry("other"));
    assert!(matches!(stale, Err(StoreError::Stale)), "{stale:?}");
    assert_eq!(audit(&mut second), [(1, "acme".to_owned())]);
}

#[test]
fn the_last_step_of_a_record_counts() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let mut writer = Writer::start(&postgres, "a");
    writer.create("acme");
    let steps = [
        Step::Put(account("twice")),
        Step::Delete(account("twice").id()),
        Step::Delete(account("acme").id()),
    ];
    let made = writer
        .store
        .commit(&writer.position, &steps, &entry("twice"));
    assert_eq!(made.unwrap(), at(&postgres, 2));
    assert_eq!(writer.reload(), Some(0));
}

#[test]
fn a_load_knows_the_authentic_changes_before_it() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let mut writer = Writer::start(&postgres, "a");
    for id in ["red", "green", "blue"] {
        writer.create(id);
    }
    let mut recent = || writer.store.load().unwrap().recent;
    assert_eq!(recent(), [1, 2, 3].map(|revision| at(&postgres, revision)));
    postgres.sql("UPDATE gw.changes SET change_id = gen_random_uuid() WHERE revision = 1");
    assert_eq!(recent(), [2, 3].map(|revision| at(&postgres, revision)));
    postgres.sql("DELETE FROM gw.changes");
    assert_eq!(recent(), [writer.position]);
}

#[test]
fn concurrent_writers_lose_and_double_no_change() {
    const EACH: usize = 100;
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    std::thread::scope(|scope| {
        for name in ["a", "b", "c"] {
            let mut writer = Writer::start(&postgres, name);
            scope.spawn(move || (0..EACH).for_each(|n| writer.create(&format!("{name}{n:03}"))));
        }
    });
    let mut reader = Writer::start(&postgres, "reader");
    assert_eq!(reader.reload(), Some(3 * EACH));
    let entries = reader.audit();
    assert_each_once(&entries);
    assert_eq!(entries.len(), 3 * EACH);
}

#[test]
fn a_commit_with_a_lost_reply_is_made_once() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let proxy = postgres.proxy();
    let mut writer = Writer::start_at(&postgres, &proxy.url(), "a");
    for n in 0..5 {
        // The statement is prepared by the first commit, so that later ones lose the reply of the
        // commit itself.
        if n > 0 {
            proxy.lose_the_next_reply();
        }
        writer.try_create(&format!("acme{n}")).unwrap();
        assert!(!proxy.has_lost_none());
    }
    assert_eq!(writer.position.revision, Revision(5));
    assert_eq!(writer.audit().len(), 5);
}

#[test]
fn history_before_the_oldest_change_and_of_a_restored_database_is_lost() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let mut writer = Writer::start(&postgres, "a");
    for id in ["acme1", "acme2", "acme3"] {
        writer.create(id);
    }
    let Writer {
        mut store,
        position,
    } = writer;
    let positions: Vec<Position> = (0..=3).map(|revision| at(&postgres, revision)).collect();
    let mut history = |position: &Position| match store.changes_after(position).unwrap() {
        History::Changes(changes) => changes.len().to_string(),
        lost => format!("{lost:?}"),
    };
    let later = Position {
        revision: Revision(4),
        ..position.clone()
    };
    let other = |revision: usize| Position {
        change: positions[0].origin.clone(),
        ..positions[revision].clone()
    };
    for (what, position, expected) in [
        ("the start", &positions[0], "3"),
        ("the first change", &positions[1], "2"),
        ("the newest change", &positions[3], "0"),
        ("later than the database", &later, "Replaced"),
        ("a change that a failover lost", &other(2), "Replaced"),
        ("the newest one, which it lost", &other(3), "Replaced"),
        ("records to be loaded again", &position, "Forgotten"),
    ] {
        assert_eq!(history(position), expected, "{what}");
    }
    store.load().unwrap();
    postgres.sql("DELETE FROM gw.changes WHERE revision <= 2");
    let mut history = |position: &Position| format!("{:?}", store.changes_after(position).unwrap());
    let found = [0, 1, 3].map(|revision| history(&positions[revision]));
    assert_eq!(found, ["Forgotten", "Forgotten", "Changes([])"]);
    postgres.sql("UPDATE gw.region SET id = gen_random_uuid()");
    assert_eq!(history(&position), "Replaced", "another region");
    let put = [Step::Put(account("acme4"))];
    let refused = store.commit(&position, &put, &entry("acme4"));
    assert!(matches!(refused, Err(StoreError::Stale)), "{refused:?}");
}

#[test]
fn secrets_are_sealed_with_the_region_key() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let mut store = open(&postgres, "a");
    let key = SigningKey::generate(Timestamp(1), Timestamp(1)).unwrap();
    let private = key.private_key.reveal().to_owned();
    let start = at(&postgres, 0);
    let put = [Step::Put(StoredRecord::SigningKey(key.clone()))];
    store.commit(&start, &put, &entry("key")).unwrap();
    let dump = postgres.dump();
    assert!(dump.contains(key.id.as_str()) && !dump.contains(&private));
    let loaded = open(&postgres, "b").load().unwrap().records;
    assert_eq!(loaded.signing_keys[&key.id].private_key.reveal(), private);
    let changes = changes_after(&mut open(&postgres, "c"), &start);
    let [Step::Put(StoredRecord::SigningKey(followed))] = &changes[0].1[..] else {
        panic!("{changes:?}")
    };
    assert_eq!(followed.private_key.reveal(), private);
}

/// The reason for which a store cannot be used.
#[track_caller]
pub(super) fn refusal(source: &PostgresSource) -> String {
    let loaded = PostgresStore::new(source).unwrap().load();
    loaded.unwrap_err().to_string()
}

#[test]
fn a_database_that_does_not_fit_is_refused_with_the_reason() {
    if !programs::usable(&["postgresql"]) {
        return;
    }
    let postgres = Postgres::start();
    let good = || postgres.source("a");
    let advice = "create one with `gw-gateway region init`";
    assert_says(&refusal(&good()), &[advice]);
    PostgresStore::create(&good()).unwrap();
    let again = PostgresStore::create(&good()).unwrap_err().to_string();
    assert_says(&again, &["holds a region already"]);
    let other_apex = PostgresSource {
        apex: "eu2.gw.localhost".to_owned(),
        ..good()
    };
    let other_key = PostgresSource {
        keys: gw_region::RegionKey::new([1; 32]).into(),
        ..good()
    };
    for (other, reason) in [
        (other_apex, "belongs to region eu1.gw.localhost"),
        (other_key, "the region key differs"),
    ] {
        assert_says(&refusal(&other), &[reason]);
    }
    let nowhere = postgres.source_at("postgres://gw@127.0.0.1:1/gw", "a");
    let nowhere = PostgresStore::new(&nowhere).unwrap().load();
    assert!(matches!(nowhere, Err(StoreError::Unavailable(text)) if text.contains("127.0.0.1")));
}

/// Nodes are upgraded one after another.
#[test]
fn tables_of_the_next_version_are_used_and_no_later_ones() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let set = |schema: usize| postgres.sql(&format!("UPDATE gw.region SET schema = {schema}"));
    let known = postgres.sql("SELECT schema FROM gw.region");
    let known: usize = known.parse().unwrap();
    set(known + 1);
    open(&postgres, "a");
    for later in [known + 2, 999] {
        set(later);
        let reason = refusal(&postgres.source("a"));
        assert_says(&reason, &[&format!("schema {later}")]);
    }
}

#[test]
fn a_data_folder_has_one_process() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let source = StoreSource::Postgres(postgres.source("a"));
    let first = source.open().unwrap();
    assert!(matches!(source.open(), Err(StoreError::InUse)));
    drop(first);
    assert!(source.open().is_ok());
}

/// Creates accounts one after the other until `stop`. Returns those that the store has
/// acknowledged.
fn create_accounts(
    mut writer: Writer,
    name: &str,
    stop: &AtomicBool,
    [made, unknown]: [&AtomicUsize; 2],
) -> Vec<String> {
    let mut acknowledged = Vec::new();
    for number in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        // After an unknown outcome, another account: the first may be committed late.
        let id = format!("{name}{number:06}");
        let created = loop {
            match writer.try_create(&id) {
                Err("stale") => {
                    writer.reload();
                }
                created => break created,
            }
        };
        match created {
            Ok(()) => {
                acknowledged.push(id);
                made.fetch_add(1, Ordering::Relaxed);
            }
            Err(_) => {
                unknown.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    acknowledged
}

#[test]
fn acknowledged_changes_survive_kills_and_stops_of_the_server() {
    let rounds =
        std::env::var("GW_STORE_KILLS").map_or(4, |rounds| rounds.parse().expect("a number"));
    let Some(mut postgres) = Postgres::with_region() else {
        return;
    };
    let stop = AtomicBool::new(false);
    let made = AtomicUsize::new(0);
    let unknown = AtomicUsize::new(0);
    let acknowledged: Vec<String> = std::thread::scope(|scope| {
        let writers = ["a", "b", "c"].map(|name| {
            let writer = Writer::start(&postgres, name);
            let (stop, counts) = (&stop, [&made, &unknown]);
            scope.spawn(move || create_accounts(writer, name, stop, counts))
        });
        let _stop = StopOnDrop(&stop);
        for round in 0..rounds {
            let until = made.load(Ordering::Relaxed) + 30;
            eventually("changes are made", || {
                (made.load(Ordering::Relaxed) >= until).then_some(())
            });
            disturb(&mut postgres, round, &unknown);
        }
        stop.store(true, Ordering::Relaxed);
        writers
            .into_iter()
            .flat_map(|writer| writer.join().unwrap())
            .collect()
    });
    let mut store = PostgresStore::new(&postgres.source("reader")).unwrap();
    let records = eventually("the server answers", || store.load().ok()).records;
    let entries = audit(&mut store);
    assert_each_once(&entries);
    assert_eq!(records.accounts.len(), entries.len(), "with an entry each");
    let targets: BTreeSet<&String> = entries.iter().map(|(_, target)| target).collect();
    let is_lost = |id: &&String| !targets.contains(id);
    let lost: Vec<&String> = acknowledged.iter().filter(is_lost).collect();
    assert!(lost.is_empty(), "{lost:?}");
    eprintln!(
        "{} changes acknowledged, {} made, {rounds} rounds",
        acknowledged.len(),
        entries.len()
    );
}

/// Kills a session of the server, holds its processes until a change fails, or starts it again.
fn disturb(postgres: &mut Postgres, round: usize, unknown: &AtomicUsize) {
    match round % 3 {
        // The server ends all sessions, and recovers.
        0 => assert!(send_signal(session(postgres), "KILL")),
        1 => {
            let processes = postgres.processes();
            for id in &processes {
                send_signal(*id, "STOP");
            }
            let until = unknown.load(Ordering::Relaxed) + 1;
            eventually("a change fails", || {
                (unknown.load(Ordering::Relaxed) >= until).then_some(())
            });
            for id in &processes {
                send_signal(*id, "CONT");
            }
        }
        _ => {
            postgres.stop();
            postgres.resume();
        }
    }
}

/// The session of one of the writers.
fn session(postgres: &Postgres) -> u32 {
    eventually("a writer is connected", || postgres.sessions().pop())
}
