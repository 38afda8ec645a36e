//! Tests of the store on SQLite.

use gw_base::service::rate::Rate;
use gw_base::service::service_settings::Modes;
use gw_shared::id::{AgentId, KeyId};
use gw_shared::identity::enrollment::EnrollmentStatus;
use gw_shared::identity::secret::Secret;

use super::super::*;
use super::*;

fn entry(action: &'static str) -> AuditEntry {
    AuditEntry {
        at: Timestamp(7),
        actor: "admin".into(),
        action: action.into(),
        account: Some(AccountId::new("acme").unwrap()),
        target: "x".into(),
        detail: serde_json::json!({"a": [1, "it's"]}),
    }
}

/// All records of a store as comparable text, secrets included.
fn contents(store: &mut SqliteStore) -> Vec<String> {
    let records = store.load().unwrap().records;
    let all = records.into_vec();
    all.iter()
        .map(|record| record.document().unwrap())
        .collect()
}

fn all() -> AuditQuery {
    AuditQuery {
        account: None,
        before: None,
        limit: 100,
    }
}

#[test]
fn records_survive_reopening_until_deleted() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gw.sqlite");
    let mut store = SqliteStore::open(&path).unwrap();
    let samples = StoredRecord::samples();
    let expected: Vec<String> = samples
        .iter()
        .map(|record| record.document().unwrap())
        .collect();
    let puts: Vec<Step> = samples.iter().cloned().map(Step::Put).collect();
    store
        .commit(&Position::default(), &puts, &entry("first"))
        .unwrap();
    store
        .commit(&Position::default(), &puts, &entry("second"))
        .unwrap();
    assert_eq!(contents(&mut store), expected);
    drop(store);
    let mut store = SqliteStore::open(&path).unwrap();
    assert_eq!(contents(&mut store), expected);
    let deletes: Vec<Step> = samples
        .iter()
        .map(|record| Step::Delete(record.id()))
        .collect();
    store
        .commit(&Position::default(), &deletes, &entry("third"))
        .unwrap();
    assert_eq!(contents(&mut store), Vec::<String>::new());
    let actions: Vec<_> = store
        .audit_log(&all())
        .unwrap()
        .into_iter()
        .map(|row| row.entry.action)
        .collect();
    assert_eq!(actions, ["third", "second", "first"]);
    assert_eq!(
        store
            .audit_log(&AuditQuery {
                before: Some(2),
                ..all()
            })
            .unwrap()[0]
            .entry
            .detail,
        entry("").detail
    );
    assert!(
        store
            .audit_log(&AuditQuery {
                account: Some("other".to_owned()),
                ..all()
            })
            .unwrap()
            .is_empty()
    );
}

#[test]
fn a_deleted_key_does_not_stay_in_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gw.sqlite");
    let mut store = SqliteStore::open(&path).unwrap();
    let authority = |sample| match sample {
        StoredRecord::Authority(authority) => Some(authority),
        _ => None,
    };
    let authority = StoredRecord::samples()
        .into_iter()
        .find_map(authority)
        .unwrap();
    let secret = "a private key that is gone";
    let with_key = AuthorityRecord {
        private_key: Some(Secret::new(secret.repeat(10))),
        ..authority.clone()
    };
    let put = |record| [Step::Put(StoredRecord::Authority(record))];
    store
        .commit(&Position::default(), &put(with_key), &entry("first"))
        .unwrap();
    let ended = AuthorityRecord {
        private_key: None,
        role: AuthorityRole::Ended,
        ..authority
    };
    store
        .commit(&Position::default(), &put(ended), &entry("second"))
        .unwrap();
    // Writes the log back, and deletes it.
    drop(store);
    let file = std::fs::read(&path).unwrap();
    assert_eq!(memchr::memmem::find(&file, secret.as_bytes()), None);
}

#[test]
fn a_full_disk_refuses_a_change_as_a_whole() {
    let directory = tempfile::tempdir().unwrap();
    let mut store = SqliteStore::open(&directory.path().join("gw.sqlite")).unwrap();
    store
        .commit(
            &Position::default(),
            &StoredRecord::samples()
                .into_iter()
                .map(Step::Put)
                .collect::<Vec<_>>(),
            &entry("first"),
        )
        .unwrap();
    let before = contents(&mut store);
    let pages: u32 = store
        .connection
        .pragma_query_value(None, "page_count", |row| row.get(0))
        .unwrap();
    store
        .connection
        .pragma_update(None, "max_page_count", pages)
        .unwrap();
    let many: Vec<Step> = (0..100)
        .flat_map(|_| StoredRecord::samples())
        .map(Step::Put)
        .collect();
    assert!(matches!(
        store.commit(&Position::default(), &many, &entry("second")),
        Err(StoreError::Full)
    ));
    assert_eq!(contents(&mut store), before);
    assert_eq!(store.audit_log(&all()).unwrap().len(), 1);
    store
        .connection
        .pragma_update(None, "max_page_count", 1_000_000)
        .unwrap();
    store
        .commit(&Position::default(), &many, &entry("third"))
        .unwrap();
}

#[test]
fn a_database_of_the_first_schema_is_migrated() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gw.sqlite");
    let key = KeyId::random();
    let agent = AgentId::random();
    let old = Connection::open(&path).unwrap();
    old.execute_batch(DATABASE.migrations[0]).unwrap();
    old.execute_batch(&format!(
        "PRAGMA user_version = 1;
         INSERT INTO accounts VALUES ('acme');
         INSERT INTO services VALUES ('acme', 'api', 1, 0, 1, 10, 20);
         INSERT INTO service_keys VALUES ('{key}', 'acme', zeroblob(32), 'api b', 1);
         INSERT INTO agents VALUES ('{agent}', 'acme', 'a', 'api', 1);"
    ))
    .unwrap();
    drop(old);
    let records = SqliteStore::open(&path).unwrap().load().unwrap().records;
    let service = records.services.values().next().unwrap();
    assert_eq!(
        (service.settings.rate, service.settings.modes),
        (
            Rate::new(10, 20).unwrap(),
            Modes {
                jwt: true,
                service_key: false
            }
        )
    );
    let access = &records.service_keys[&key].access;
    assert_eq!(
        (
            access.enabled,
            access.allowed_services.len(),
            access.secret.as_bytes()
        ),
        (true, 2, &[0; 32][..])
    );
    assert_eq!(records.agents[&agent].status, EnrollmentStatus::Revoked);
    assert_eq!(records.accounts.len(), 1);
}

#[test]
fn a_second_process_and_a_newer_schema_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gw.sqlite");
    let store = SqliteStore::open(&path).unwrap();
    assert!(matches!(SqliteStore::open(&path), Err(StoreError::InUse)));
    store
        .connection
        .pragma_update(None, "user_version", 999)
        .unwrap();
    drop(store);
    assert!(matches!(
        SqliteStore::open(&path),
        Err(StoreError::NewerSchema { found: 999, .. })
    ));
}

fn chain(store: &mut SqliteStore) -> AuditFindings {
    let mut check = AuditCheck::new([]);
    check.add(store.audit_log(&all()).unwrap());
    check.finish(store.newest().unwrap().revision)
}

#[test]
fn hashes_that_were_removed_are_findings_and_are_not_made_again() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gw.sqlite");
    let mut store = SqliteStore::open(&path).unwrap();
    for action in ["first", "second", "third"] {
        store
            .commit(&Position::default(), &[], &entry(action))
            .unwrap();
    }
    let written = chain(&mut store);
    assert_eq!((written.entries, written.count), (3, 0), "{written:?}");
    for remove in [
        "UPDATE audit SET hash = x''",
        // A log of a schema without hashes.
        "ALTER TABLE audit DROP COLUMN hash; PRAGMA user_version = 2",
    ] {
        store.connection.execute_batch(remove).unwrap();
        drop(store);
        store = SqliteStore::open(&path).unwrap();
        let missing =
            [3, 2, 1].map(|number| (number, "it has no hash; gateways since 0.2 write one"));
        assert_eq!(chain(&mut store).problems, missing);
    }
    // The entries that follow do not hide it.
    store
        .commit(&Position::default(), &[], &entry("fourth"))
        .unwrap();
    assert_eq!(chain(&mut store).count, 3);
}
