//! Attacks with write access to PostgreSQL, without the region key.

mod members;
mod repair;

use std::collections::BTreeSet;
use std::fs;

use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use gw_base::clock::Timestamp;
use gw_region::RegionKey;
use gw_shared::id::{AccountId, ClientId, KeyId, ServiceId};
use gw_shared::identity::secret::SecretHash;
use gw_store::{
    AuditEntry, CallerSecretRecord, History, Position, PostgresStore, SecretAccess, SigningKey,
    Step, Store, StoreError, StoredRecord,
};
use serde_json::{Value, json};

use super::{assert_says, config_file, region_command};
use crate::region_records::records::Node;
use crate::region_records::store::refusal;
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::processes::postgres::Postgres;
use crate::support::processes::successor::admin;

fn entry() -> AuditEntry {
    AuditEntry {
        at: Timestamp(7),
        actor: "admin".into(),
        action: "test".into(),
        account: None,
        target: "test".into(),
        detail: Value::Null,
    }
}

fn access(enabled: bool) -> SecretAccess {
    SecretAccess {
        account: AccountId::new("acme").unwrap(),
        name: None,
        secret: SecretHash::of("secret"),
        allowed_services: BTreeSet::from([ServiceId::new("api").unwrap()]),
        enabled,
        created_at: Timestamp(1),
    }
}

fn key(id: &str, enabled: bool) -> StoredRecord {
    let id = KeyId::new(&id.repeat(16)).unwrap();
    StoredRecord::ServiceKey(CallerSecretRecord {
        id,
        access: access(enabled),
        managed_by: None,
        later: Default::default(),
    })
}

fn credential() -> StoredRecord {
    let id = ClientId::new(&format!("gw_ci_{}", "c".repeat(20))).unwrap();
    StoredRecord::Credential(CallerSecretRecord {
        id,
        access: access(true),
        managed_by: None,
        later: Default::default(),
    })
}

/// A store whose records are loaded.
fn open(postgres: &Postgres) -> (PostgresStore, Position) {
    let mut store = PostgresStore::new(&postgres.source("a")).unwrap();
    let position = store.load().unwrap().position;
    (store, position)
}

/// A region with a signing key, a credential, and the service keys `a`, which is disabled since the
/// second change, and `b`. The rows of the first change are in the table `first`.
fn region() -> Option<Postgres> {
    let postgres = Postgres::with_region()?;
    let (mut store, start) = open(&postgres);
    let signing =
        StoredRecord::SigningKey(SigningKey::generate(Timestamp(1), Timestamp(1)).unwrap());
    let puts = [signing, credential(), key("a", true), key("b", true)].map(Step::Put);
    let first = store.commit(&start, &puts, &entry()).unwrap();
    postgres.sql(
        "CREATE TABLE first AS TABLE gw.records; CREATE TABLE first_region AS TABLE gw.region",
    );
    store
        .commit(&first, &[Step::Put(key("a", false))], &entry())
        .unwrap();
    Some(postgres)
}

/// Part of a refusal that names the record of the service key `a`.
const NAMED: &str = "service_key aaaaaaaaaaaaaaaa";
/// Part of a refusal that names the set of records.
const SET: &str = "not those of revision 2";

/// Changes of the tables, and a part of the refusal of each.
const ATTACKS: &[(&str, &str)] = &[
    (
        "UPDATE gw.records SET document = replace(document, 'false', 'true') WHERE id = \
         'aaaaaaaaaaaaaaaa'",
        NAMED,
    ),
    // The tag of one record under the name of another.
    (
        "UPDATE gw.records SET document = b.document, tag = b.tag FROM gw.records b WHERE \
         records.id = 'aaaaaaaaaaaaaaaa' AND b.id = 'bbbbbbbbbbbbbbbb'",
        NAMED,
    ),
    (
        "UPDATE gw.records SET tag = NULL WHERE id = 'aaaaaaaaaaaaaaaa'",
        "no gateway writes",
    ),
    (
        "UPDATE gw.records SET tag = '' WHERE id = 'aaaaaaaaaaaaaaaa'",
        NAMED,
    ),
    (
        "INSERT INTO gw.records SELECT kind, repeat('e', 16), document, revision, tag FROM \
         gw.records WHERE kind = 'service_key' LIMIT 1",
        "service_key eeee",
    ),
    (
        "UPDATE gw.records SET document = document || ' ' WHERE kind = 'signing_key'",
        "signing_key",
    ),
    ("UPDATE gw.records SET tag = '\\x00'", "4 rows"),
    // All of these rows are authentic.
    (
        "UPDATE gw.records SET document = first.document, tag = first.tag FROM first WHERE \
         records.id = first.id AND first.id = 'aaaaaaaaaaaaaaaa'",
        SET,
    ),
    ("DELETE FROM gw.records WHERE id = 'bbbbbbbbbbbbbbbb'", SET),
    ("DELETE FROM gw.records WHERE kind = 'signing_key'", SET),
    ("DELETE FROM gw.records", SET),
    ("INSERT INTO gw.secrets VALUES ('admin token', '')", SET),
    (
        "UPDATE gw.region SET tag = first_region.tag FROM first_region",
        SET,
    ),
    (
        "UPDATE gw.region SET revision = first_region.revision, last_change = \
         first_region.last_change, tag = first_region.tag FROM first_region",
        "not those of revision 1",
    ),
    (
        "UPDATE gw.region SET revision = 3",
        "not those of revision 3",
    ),
    ("UPDATE gw.region SET last_change = gen_random_uuid()", SET),
    ("UPDATE gw.region SET id = gen_random_uuid()", "4 rows"),
];

#[test]
fn rows_that_were_changed_added_swapped_replayed_or_removed_are_refused() {
    let Some(postgres) = region() else { return };
    postgres.sql(
        "ALTER TABLE gw.records ALTER tag DROP NOT NULL; CREATE TABLE good AS TABLE \
                  gw.records; CREATE TABLE good_region AS TABLE gw.region",
    );
    for (attack, named) in ATTACKS {
        postgres.sql(attack);
        let refused = refusal(&postgres.source("b"));
        assert!(refused.contains(named), "{attack}: {refused}");
        postgres.sql(
            "TRUNCATE gw.records, gw.secrets; INSERT INTO gw.records TABLE good; DELETE \
                      FROM gw.region; INSERT INTO gw.region TABLE good_region",
        );
        open(&postgres);
    }
}

/// It is the restore of a backup.
#[test]
fn a_roll_back_of_the_whole_database_is_not_refused() {
    let Some(postgres) = region() else { return };
    postgres.sql(
        "TRUNCATE gw.records, gw.changes; INSERT INTO gw.records TABLE first; DELETE FROM \
                  gw.region; INSERT INTO gw.region TABLE first_region",
    );
    assert_eq!(open(&postgres).1.revision.0, 1);
}

#[test]
fn changes_that_were_forged_replayed_or_reordered_are_refused() {
    let Some(postgres) = region() else { return };
    let (mut store, second) = open(&postgres);
    let (mut follower, _) = open(&postgres);
    let (mut other, _) = open(&postgres);
    let delete = [Step::Delete(key("b", true).id())];
    let third = store.commit(&second, &delete, &entry()).unwrap();
    let put = [Step::Put(key("d", true))];
    store.commit(&third, &put, &entry()).unwrap();
    postgres
        .sql("CREATE TABLE good AS TABLE gw.changes; CREATE TABLE good_region AS TABLE gw.region");
    let put_in = |at: i64, from: i64| {
        format!(
            "UPDATE gw.changes SET steps = good.steps, tag = good.tag FROM good WHERE \
             changes.revision = {at} AND good.revision = {from}"
        )
    };
    // The columns of a row once more, as the next change.
    let repeated = |from: i64| {
        format!(
            "UPDATE gw.region SET revision = 5, last_change = gen_random_uuid();
             INSERT INTO gw.changes SELECT 5, last_change, node, now(), steps, changes.tag
             FROM gw.changes, gw.region WHERE changes.revision = {from}"
        )
    };
    for attack in [
        "UPDATE gw.changes SET steps = '[]' WHERE revision = 3".to_owned(),
        "UPDATE gw.changes SET tag = '' WHERE revision = 4".to_owned(),
        put_in(4, 1),
        put_in(4, 3),
        put_in(3, 4),
        repeated(1),
        repeated(4),
        // The third change is left out.
        "DELETE FROM gw.changes WHERE revision = 3; UPDATE gw.changes SET revision = 3 WHERE \
         revision = 4; UPDATE gw.region SET revision = 3"
            .to_owned(),
    ] {
        postgres.sql(&attack);
        let followed = follow(&mut follower, second.clone());
        let is_refused = matches!(followed, Err(StoreError::Forged { count: 1, .. }));
        assert!(is_refused, "{attack}: {followed:?}");
        postgres.sql(
            "TRUNCATE gw.changes; INSERT INTO gw.changes TABLE good; DELETE FROM \
                      gw.region; INSERT INTO gw.region TABLE good_region",
        );
    }
    let followed = other.changes_after(&second);
    assert!(
        matches!(&followed, Ok(History::Changes(changes)) if changes.len() == 2),
        "{followed:?}"
    );
}

/// Follows the changes after `at` to their end, or until all records have to be loaded.
fn follow(store: &mut PostgresStore, mut at: Position) -> Result<String, StoreError> {
    loop {
        match store.changes_after(&at) {
            // The genuine ones before it.
            Ok(History::Changes(changes)) if !changes.is_empty() => {
                at = changes.last().unwrap().0.clone();
            }
            // Then all records are loaded.
            Ok(History::Forgotten) => {
                return store.load().map(|loaded| format!("{loaded:?}"));
            }
            followed => return followed.map(|history| format!("{history:?}")),
        }
    }
}

/// Sets the tables back to those of an earlier version, which had no tags. Its check of the region
/// key is of another purpose.
fn set_back(postgres: &Postgres) {
    let region_key = hmac::Key::new(hmac::HMAC_SHA256, &[0x5a; RegionKey::BYTES]);
    let derived = hmac::sign(&region_key, b"gw region key check 1");
    let derived = hmac::Key::new(hmac::HMAC_SHA256, derived.as_ref());
    let check = hmac::sign(&derived, b"eu1.gw.localhost");
    postgres.sql(&format!(
        "DROP TABLE IF EXISTS gw.usage; DROP TRIGGER chain ON gw.audit;
         DROP FUNCTION gw.chain_audit; DROP FUNCTION gw.audit_hash; DROP FUNCTION gw.audit_part;
         ALTER TABLE gw.audit DROP COLUMN hash; ALTER TABLE gw.records DROP COLUMN tag;
         ALTER TABLE gw.changes DROP COLUMN tag; ALTER TABLE gw.region DROP COLUMN tag;
         ALTER TABLE gw.nodes DROP COLUMN tag, DROP COLUMN key_proofs;
         UPDATE gw.region SET schema = 2, key_check = '{}'",
        STANDARD.encode(check)
    ));
}

/// Only the start of a gateway trusts them.
#[test]
fn commands_refuse_tables_of_an_earlier_version() {
    let Some(postgres) = region() else { return };
    set_back(&postgres);
    let folder = tempfile::tempdir().unwrap();
    let config = config_file(&postgres, &folder.path().join("data"));
    for command in ["export", "import"] {
        let ended = region_command(command, &config, &[folder.path().to_str().unwrap()]);
        ended.assert_failed(&["has schema 2, of an older version"]);
    }
}

#[test]
fn tables_of_an_earlier_version_get_tags_once_and_cannot_be_presented_again() {
    let Some(postgres) = region() else { return };
    set_back(&postgres);
    let source = postgres.source("a");
    let mut store = PostgresStore::new(&source).unwrap();
    let position = store.load().unwrap().position;
    assert_eq!(position.revision.0, 2);
    let put = [Step::Put(key("d", true))];
    store.commit(&position, &put, &entry()).unwrap();
    assert_eq!(store.load().unwrap().records.service_keys.len(), 3);
    // A process of the earlier version cannot write.
    let refused = postgres.fails("INSERT INTO gw.records VALUES ('service_key', 'x', '{}', 3)");
    assert_says(&refused, &["violates not-null constraint"]);

    // With the tables set back, rows would be trusted once more. The check of the key gives them
    // away, and a node that has used tables with tags takes no others.
    postgres.sql("CREATE TABLE good_region AS TABLE gw.region");
    set_back(&postgres);
    assert_says(&refusal(&source), &["had tags before"]);
    postgres.sql("UPDATE gw.region SET key_check = good_region.key_check FROM good_region");
    let another = postgres.source("b");
    assert_says(&refusal(&another), &["the region key differs"]);
}

/// The hash of a secret, as records have it.
fn hash_of(secret: &str) -> Value {
    serde_json::to_value(SecretHash::of(secret)).unwrap()
}

/// Adds a change and its record without the region key.
fn forge(postgres: &Postgres, kind: &str, id: &str, document: &str) {
    let step = json!([{ "kind": kind, "id": id, "document": document }]);
    postgres.sql(&format!(
        "BEGIN; UPDATE gw.region SET revision = revision + 1, last_change = gen_random_uuid();
         INSERT INTO gw.records VALUES ('{kind}', '{id}', '{document}', 1, '')
         ON CONFLICT (kind, id) DO UPDATE SET document = excluded.document;
         INSERT INTO gw.changes
         SELECT revision, last_change, 'node', now(), '{step}', '' FROM gw.region;
         SELECT pg_notify('gw', '1'); COMMIT"
    ));
}

/// One of them makes the shared secrets while the other one has loaded the records without them.
#[test]
fn nodes_that_start_together_agree_on_the_shared_secrets() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let postgres = &postgres;
    let folder = folder.path();
    let nodes = std::thread::scope(|scope| {
        ["a", "b", "c"]
            .map(|name| scope.spawn(move || Node::start(postgres, folder, name)))
            .map(|start| start.join().unwrap())
    });
    for file in ["admin.token", "agent-ca.key", "dev-ca.key"] {
        let [first, others @ ..] = nodes
            .each_ref()
            .map(|node| fs::read(node.file(file)).unwrap());
        assert_eq!(others, [first.clone(), first], "{file}");
    }
}

#[test]
fn a_row_that_no_gateway_writes_does_not_end_the_following_of_changes() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let nodes = ["a", "b"].map(|name| Node::start(&postgres, folder.path(), name));
    postgres.sql(
        "CREATE TABLE good_region AS TABLE gw.region;
         ALTER TABLE gw.changes ALTER steps DROP NOT NULL;
         UPDATE gw.region SET revision = revision + 1, last_change = gen_random_uuid();
         INSERT INTO gw.changes
         SELECT revision, last_change, 'node', now(), NULL, '' FROM gw.region",
    );
    for node in &nodes {
        eventually("the node notices", || {
            (node.metric("gw_store_away_seconds") > 0.0).then_some(())
        });
    }
    postgres.sql(
        "DELETE FROM gw.changes WHERE steps IS NULL; DELETE FROM gw.region; INSERT INTO gw.region \
         TABLE good_region",
    );
    let [first, second] = nodes.each_ref().map(|node| node.gateway.api());
    eventually("a change is made", || {
        let made = first.ask("POST", "/accounts", &json!({ "id": "acme" }));
        (made.status < 300).then_some(())
    });
    eventually("the other node follows", || {
        (second.list("/accounts").len() == 1).then_some(())
    });
    assert_eq!(admin(nodes[1].gateway.admin_address(), "/readyz").0, 200);
}

/// After a theft of the token, which was replaced, and of a backup of the database.
#[test]
fn an_earlier_admin_token_is_not_put_back() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let config = config_file(&postgres, &folder.path().join("a"));
    let token = |node: &Node| fs::read_to_string(node.file("admin.token")).unwrap();
    let node = Node::start(&postgres, folder.path(), "a");
    let stolen = token(&node);
    eventually("the copy is written", || {
        node.file("records.sealed").exists().then_some(())
    });
    node.gateway.drain();
    postgres.sql("CREATE TABLE old AS TABLE gw.secrets");

    region_command("forget", &config, &["admin-token"]).done();
    fs::remove_file(folder.path().join("a/admin.token")).unwrap();
    let node = Node::start(&postgres, folder.path(), "a");
    let renewed = token(&node);
    assert_ne!(renewed, stolen);
    let actions =
        "SELECT string_agg(action, ' ' ORDER BY number) FROM gw.audit WHERE target = 'admin token'";
    let expected = "region.secret.create region.secret.delete region.secret.create";
    assert_eq!(postgres.sql(actions), expected);

    postgres
        .sql("UPDATE gw.secrets SET sealed = old.sealed FROM old WHERE old.name = secrets.name");
    node.gateway.drain();
    let node = Node::start(&postgres, folder.path(), "a");
    assert_eq!(token(&node), renewed);
    let refused = Gateway::try_start(&postgres.config(&folder.path().join("b")));
    assert_says(&refused.err().unwrap(), &["gw.secrets"]);
    // The repair takes the secrets of the data folder.
    region_command("repair", &config, &[]).done();
    let other = Node::start(&postgres, folder.path(), "b");
    assert_eq!(token(&other), renewed);
}
