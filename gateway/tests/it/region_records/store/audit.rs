//! The chain of the audit log in PostgreSQL.

use std::thread;

use serde_json::{Value, json};

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

#[test]
fn entries_of_several_nodes_are_one_chain_and_a_change_of_it_shows() {
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
    nodes[0].wait_for(&nodes[1]);
    nodes[0].wait_for(&nodes[2]);
    let api = &nodes[0].gateway.api();
    let findings = check(api, "");
    let newest = nodes[0].revision();
    assert!(newest >= 30, "{findings}");
    assert_eq!(
        (&findings["entries"], &findings["problem_count"]),
        (&json!(newest), &json!(0)),
        "{findings}"
    );
    let head = findings["head"].as_str().unwrap();
    assert_eq!(problems(api, head), [0; 0]);

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

    // A log that was written again from a changed entry on is a chain of its own. It is not the one
    // that was noted.
    postgres.sql(
        "TRUNCATE gw.audit;
         INSERT INTO gw.audit (number, at, actor, action, account, target, detail)
         SELECT number, at, actor, action, account,
             CASE number WHEN 5 THEN 'x' ELSE target END, detail FROM kept ORDER BY number",
    );
    assert_eq!(problems(api, ""), [0; 0]);
    assert_eq!(problems(api, head), [newest]);
}

#[test]
fn tables_of_the_version_before_get_a_chain_and_nodes_of_it_go_on_with_it() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(&postgres, folder.path(), "a");
    let api = node.gateway.api();
    (0..5).for_each(|number| api.create_account(&format!("acme{number}")));
    node.gateway.drain();
    postgres.sql(
        "DROP TABLE IF EXISTS gw.usage; DROP TRIGGER chain ON gw.audit;
         DROP FUNCTION gw.chain_audit; DROP FUNCTION gw.audit_hash; DROP FUNCTION gw.audit_part;
         ALTER TABLE gw.audit DROP COLUMN hash; UPDATE gw.region SET schema = 4",
    );
    let node = Node::start(&postgres, folder.path(), "a");
    let api = &node.gateway.api();
    let newest = node.revision();
    let is_complete = || {
        let findings = check(api, "");
        assert_eq!(
            (&findings["entries"], &findings["problem_count"]),
            (&json!(newest), &json!(0)),
            "{findings}"
        );
    };
    is_complete();
    // The statement of the version before does not know the column.
    postgres.sql(&format!(
        "DELETE FROM gw.audit WHERE number = {newest};
         INSERT INTO gw.audit (number, at, actor, action, account, target, detail)
         VALUES ({newest}, 7, 'admin', 'account.create', 'acme', 'é\t\"',
             '{{\"a\":[1,\"it''s\"]}}')"
    ));
    // The hash is the same that this program computes.
    is_complete();
    let entry = &api.list("/audit-log?limit=1")[0];
    assert_eq!(
        [&entry["target"], &entry["detail"], &entry["account"]],
        [
            &json!("é\t\""),
            &json!({ "a": [1, "it's"] }),
            &json!("acme")
        ]
    );
}
