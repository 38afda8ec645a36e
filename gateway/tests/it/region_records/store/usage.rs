//! Usage of services in PostgreSQL.

use gw_store::{Store, UsageAmounts, UsageQuery, UsageRow};

use super::open;
use crate::support::processes::postgres::Postgres;

const SOURCES: [&str; 2] = [
    "019aa000-0000-7000-8000-000000000001",
    "019aa000-0000-7000-8000-000000000002",
];

fn row(date: &str, label: &str, requests: u64) -> UsageRow {
    UsageRow {
        date: date.to_owned(),
        label: label.to_owned(),
        amounts: UsageAmounts {
            requests,
            refusals: requests / 2,
            bytes_in: 10 * requests,
            bytes_out: 100 * requests,
        },
    }
}

#[test]
fn counts_of_several_nodes_are_added_and_a_repetition_changes_nothing() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let mut store = open(&postgres, "a");
    let everything = UsageQuery {
        since: "0001-01-01".to_owned(),
        until: "9999-12-31".to_owned(),
        limit: 100,
        ..UsageQuery::default()
    };
    let mut put = |source: usize, rows: &[UsageRow], oldest: &str| {
        assert!(store.put_usage(SOURCES[source], rows, oldest).unwrap());
        store.usage(&everything).unwrap().unwrap()
    };
    let first = [
        row("2026-11-20", "acme--api", 4),
        row("2026-11-21", "acme--api", 6),
    ];
    for _ in 0..2 {
        put(0, &first, "2026-01-01");
    }
    let all = put(
        1,
        &[
            row("2026-11-21", "acme--api", 8),
            row("2026-11-21", "acme-x--b", 2),
        ],
        "2026-01-01",
    );
    let expected = [
        row("2026-11-21", "acme--api", 14),
        row("2026-11-21", "acme-x--b", 2),
        row("2026-11-20", "acme--api", 4),
    ];
    assert_eq!(all, expected);
    // An earlier write that arrives late.
    assert_eq!(
        put(0, &[row("2026-11-21", "acme--api", 2)], "2026-01-01"),
        expected
    );
    assert_eq!(
        put(0, &[row("2026-11-21", "acme--api", 8)], "2026-11-21")[0]
            .amounts
            .requests,
        16
    );

    counts_are_found_by_label_and_position(&postgres, &everything);
}

fn counts_are_found_by_label_and_position(postgres: &Postgres, everything: &UsageQuery) {
    let of = |query: UsageQuery| -> Vec<String> {
        let rows = open(postgres, "b").usage(&query).unwrap().unwrap();
        rows.into_iter()
            .map(|row| format!("{} {}", row.date, row.label))
            .collect()
    };
    let prefix = UsageQuery {
        label_prefix: "acme--".to_owned(),
        ..everything.clone()
    };
    assert_eq!(
        of(prefix),
        ["2026-11-21 acme--api"],
        "the day before is forgotten"
    );
    let after = UsageQuery {
        after: Some(("2026-11-21".to_owned(), "acme--api".to_owned())),
        ..everything.clone()
    };
    assert_eq!(of(after), ["2026-11-21 acme-x--b"]);
    let label = UsageQuery {
        label_prefix: "acme-x--b".to_owned(),
        limit: 1,
        ..everything.clone()
    };
    assert_eq!(of(label), ["2026-11-21 acme-x--b"]);
}
