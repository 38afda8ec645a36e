//! The chain of the audit log in PostgreSQL.

use std::thread;

use gw_store::{
    AuditCheck, AuditFindings, AuditHead, AuditQuery, NumberedEntry, PostgresStore, Store,
};

use super::{create, entry, open};
use crate::support::processes::postgres::Postgres;

fn check(store: &mut PostgresStore, noted: &[AuditHead]) -> AuditFindings {
    let newest = store.load().unwrap().position.revision;
    let mut check = AuditCheck::new(noted.iter().copied());
    let mut before = None;
    loop {
        let page = store
            .audit_log(&AuditQuery {
                account: None,
                before,
                limit: 7,
            })
            .unwrap();
        let Some(oldest) = page.last() else {
            return check.finish(newest);
        };
        before = Some(oldest.number);
        check.add(page);
    }
}

/// Numbers of the entries with problems.
fn problems(store: &mut PostgresStore, noted: &[AuditHead]) -> Vec<i64> {
    let found = check(store, noted).problems;
    found.into_iter().map(|(number, _)| number).collect()
}

#[test]
fn entries_of_several_nodes_are_one_chain_and_a_change_of_it_shows() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let names = ["a", "b", "c"];
    thread::scope(|scope| {
        for node in names {
            let postgres = &postgres;
            scope.spawn(move || {
                let mut store = open(postgres, node);
                let mut position = store.load().unwrap().position;
                for number in 0..10 {
                    create(&mut store, &mut position, &format!("{node}cc{number}"));
                }
            });
        }
    });
    let mut store = open(&postgres, "a");
    let findings = check(&mut store, &[]);
    assert_eq!((findings.entries, findings.count), (30, 0), "{findings:?}");
    let head = findings.head.unwrap();
    assert_eq!(problems(&mut store, &[head]), [0; 0]);

    postgres.sql("CREATE TABLE kept AS TABLE gw.audit");
    let cases: [(&str, &[i64]); 5] = [
        (
            "UPDATE gw.audit SET actor = 'gateway' WHERE number = 11",
            &[11],
        ),
        ("DELETE FROM gw.audit WHERE number = 11", &[12]),
        ("DELETE FROM gw.audit WHERE number <= 3", &[4]),
        ("DELETE FROM gw.audit WHERE number > 28", &[30]),
        (
            "UPDATE gw.audit SET detail = '{}' WHERE number IN (2, 20)",
            &[20, 2],
        ),
    ];
    for (change, expected) in cases {
        postgres.sql(change);
        assert_eq!(problems(&mut store, &[]), expected, "{change}");
        postgres.sql("TRUNCATE gw.audit; INSERT INTO gw.audit TABLE kept");
        assert_eq!(problems(&mut store, &[]), [0; 0]);
    }

    // A log that was written again from a changed entry on is a chain of its own. It is not the one
    // that was noted.
    postgres.sql(
        "TRUNCATE gw.audit;
         INSERT INTO gw.audit (number, at, actor, action, account, target, detail)
         SELECT number, at, actor, action, account,
             CASE number WHEN 5 THEN 'x' ELSE target END, detail FROM kept ORDER BY number",
    );
    assert_eq!(problems(&mut store, &[]), [0; 0]);
    assert_eq!(problems(&mut store, &[head]), [30]);
}

#[test]
fn tables_of_the_version_before_get_a_chain_and_nodes_of_it_go_on_with_it() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let mut store = open(&postgres, "a");
    let mut position = store.load().unwrap().position;
    for number in 0..5 {
        create(&mut store, &mut position, &format!("acme{number}"));
    }
    postgres.sql(
        "DROP TABLE IF EXISTS gw.usage; DROP TRIGGER chain ON gw.audit;
         DROP FUNCTION gw.chain_audit; DROP FUNCTION gw.audit_hash; DROP FUNCTION gw.audit_part;
         ALTER TABLE gw.audit DROP COLUMN hash; UPDATE gw.region SET schema = 4",
    );
    let mut store = open(&postgres, "a");
    let findings = check(&mut store, &[]);
    assert_eq!((findings.entries, findings.count), (5, 0), "{findings:?}");
    // The statement of the version before does not know the column.
    postgres.sql(
        "UPDATE gw.region SET revision = 6;
         INSERT INTO gw.audit (number, at, actor, action, account, target, detail)
         VALUES (6, 7, 'admin', 'account.create', 'acme', 'é\t\"', '{\"a\":[1,\"it''s\"]}')",
    );
    let newest = store
        .audit_log(&AuditQuery {
            account: None,
            before: None,
            limit: 1,
        })
        .unwrap();
    // The same as this program computes.
    let before = findings.head.unwrap().hash;
    let mut expected = entry("acme");
    expected.target = "é\t\"".to_owned();
    assert_eq!(newest, [NumberedEntry::new(6, expected, before)]);
}
