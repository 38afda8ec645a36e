//! The chain of the audit log in PostgreSQL.

use std::thread;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::region_records::records::Node;
use crate::support::admin_api::Api;
use crate::support::processes::postgres::Postgres;

/// What the check of the log finds, beside a head that was noted before.
fn check(api: &Api, noted: &str) -> Value {
    api.get(&format!("/audit-log/verification?heads={noted}"))
        .done()
}

/// Numbers of the entries with problems.
fn problems(api: &Api, noted: &str) -> Vec<u64> {
    let found = check(api, noted);
    let problems = found["problems"].as_array().unwrap();
    problems
        .iter()
        .map(|problem| problem["number"].as_u64().unwrap())
        .collect()
}

/// Asserts that the log has as many entries as there are changes, and no problem.
#[track_caller]
fn assert_complete(node: &Node) -> Value {
    let findings = check(&node.gateway.api(), "");
    assert_eq!(findings["entries"], node.revision(), "{findings}");
    assert_eq!(findings["problem_count"], 0, "{findings}");
    findings
}

/// A node that has created this number of accounts.
fn node_with_accounts(count: usize) -> Option<(Postgres, TempDir, Node)> {
    let postgres = Postgres::with_region()?;
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(&postgres, folder.path(), "a");
    let api = node.gateway.api();
    (0..count).for_each(|number| api.create_account(&format!("acme{number}")));
    Some((postgres, folder, node))
}

#[test]
fn entries_of_several_nodes_are_one_chain() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let names = ["a", "b", "c"];
    let nodes = names.map(|name| Node::start(&postgres, folder.path(), name));
    thread::scope(|scope| {
        for (name, node) in names.iter().zip(&nodes) {
            let api = node.gateway.api();
            scope.spawn(move || {
                (0..10).for_each(|number| api.create_account(&format!("{name}cc{number}")));
            });
        }
    });
    let [first, second, third] = &nodes;
    first.wait_for(second);
    first.wait_for(third);
    let findings = assert_complete(first);
    assert!(first.revision() >= 30, "{findings}");
    let head = findings["head"].as_str().unwrap();
    assert_eq!(problems(&first.gateway.api(), head), [0; 0]);
}

#[test]
fn a_change_of_the_audit_log_shows() {
    let Some((postgres, _folder, node)) = node_with_accounts(30) else {
        return;
    };
    let api = &node.gateway.api();
    let newest = node.revision();
    postgres.sql("CREATE TABLE kept AS TABLE gw.audit");
    let [early, later, last] = [25, 10, 0].map(|before| newest - before);
    let cases: [(String, &[u64]); 5] = [
        (
            format!("UPDATE gw.audit SET actor = 'another' WHERE number = {later}"),
            &[later],
        ),
        (
            format!("DELETE FROM gw.audit WHERE number = {later}"),
            &[later + 1],
        ),
        ("DELETE FROM gw.audit WHERE number <= 3".to_owned(), &[4]),
        (
            format!("DELETE FROM gw.audit WHERE number > {last} - 2"),
            &[last],
        ),
        (
            format!("UPDATE gw.audit SET detail = '{{}}' WHERE number IN ({early}, {later})"),
            &[later, early],
        ),
    ];
    for (change, expected) in cases {
        postgres.sql(&change);
        assert_eq!(problems(api, ""), expected, "{change}");
        postgres.sql("TRUNCATE gw.audit; INSERT INTO gw.audit TABLE kept");
        assert_eq!(problems(api, ""), [0; 0]);
    }
}

/// A log that was written again from a changed entry on is a chain of its own.
#[test]
fn a_log_that_was_written_again_is_not_the_one_that_was_noted() {
    let Some((postgres, _folder, node)) = node_with_accounts(10) else {
        return;
    };
    let api = &node.gateway.api();
    let findings = assert_complete(&node);
    let head = findings["head"].as_str().unwrap();
    postgres.sql(
        "CREATE TABLE kept AS TABLE gw.audit;
         TRUNCATE gw.audit;
         INSERT INTO gw.audit (number, at, actor, action, account, target, detail)
         SELECT number, at, actor, action, account,
             CASE number WHEN 5 THEN 'x' ELSE target END, detail FROM kept ORDER BY number",
    );
    assert_eq!(problems(api, ""), [0; 0]);
    assert_eq!(problems(api, head), [node.revision()]);
}

#[test]
fn tables_of_the_version_before_get_a_chain_and_nodes_of_it_go_on_with_it() {
    let Some((postgres, folder, node)) = node_with_accounts(5) else {
        return;
    };
    node.gateway.drain();
    postgres.sql(
        "DROP TABLE IF EXISTS gw.usage; DROP TRIGGER chain ON gw.audit;
         DROP FUNCTION gw.chain_audit; DROP FUNCTION gw.audit_hash; DROP FUNCTION gw.audit_part;
         ALTER TABLE gw.audit DROP COLUMN hash; UPDATE gw.region SET schema = 4",
    );
    let node = Node::start(&postgres, folder.path(), "a");
    let api = &node.gateway.api();
    let newest = node.revision();
    assert_complete(&node);
    // The statement of the version before does not know the column.
    postgres.sql(&format!(
        "DELETE FROM gw.audit WHERE number = {newest};
         INSERT INTO gw.audit (number, at, actor, action, account, target, detail)
         VALUES ({newest}, 7, 'admin', 'account.create', 'acme', 'é\t\"',
             '{{\"a\":[1,\"it''s\"]}}')"
    ));
    // The hash is the same that this program computes.
    assert_complete(&node);
    let entry = &api.list("/audit-log?limit=1")[0];
    assert_eq!(entry["target"], "é\t\"");
    assert_eq!(entry["detail"], json!({ "a": [1, "it's"] }));
    assert_eq!(entry["account"], "acme");
}
