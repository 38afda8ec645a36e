//! Usage of services in PostgreSQL.

use super::{Usage, Writer};
use crate::support::processes::postgres::Postgres;

const SOURCES: [&str; 2] = [
    "019aa000-0000-7000-8000-000000000001",
    "019aa000-0000-7000-8000-000000000002",
];

fn row(date: &str, label: &str, requests: u64) -> Usage {
    let amounts = [requests, requests / 2, 10 * requests, 100 * requests];
    (date.to_owned(), label.to_owned(), amounts)
}

#[test]
fn counts_of_several_nodes_are_added_and_a_repetition_changes_nothing() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let mut node = Writer::start(&postgres, "a");
    let mut put = |source: usize, rows: &[Usage], oldest: &str| {
        node.put_usage(SOURCES[source], rows, oldest);
        node.usage("", None, 100)
    };
    let first = [
        row("2026-11-20", "acme--api", 4),
        row("2026-11-21", "acme--api", 6),
    ];
    for _ in 0..2 {
        put(0, &first, "2026-01-01");
    }
    let of_another = [
        row("2026-11-21", "acme--api", 8),
        row("2026-11-21", "acme-x--b", 2),
    ];
    let expected = [
        row("2026-11-21", "acme--api", 14),
        row("2026-11-21", "acme-x--b", 2),
        row("2026-11-20", "acme--api", 4),
    ];
    assert_eq!(put(1, &of_another, "2026-01-01"), expected);
    let late = [row("2026-11-21", "acme--api", 2)];
    let all = put(0, &late, "2026-01-01");
    assert_eq!(all, expected, "after an earlier write that arrives late");
    let next = [row("2026-11-21", "acme--api", 8)];
    let without_the_day_before = [
        row("2026-11-21", "acme--api", 16),
        row("2026-11-21", "acme-x--b", 2),
    ];
    assert_eq!(put(0, &next, "2026-11-21"), without_the_day_before);
}

#[test]
fn counts_are_found_by_label_and_position() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let mut node = Writer::start(&postgres, "a");
    let rows = ["acme--api", "acme-x--b"].map(|label| row("2026-11-21", label, 2));
    node.put_usage(SOURCES[0], &rows, "2026-01-01");
    let [api, other] = &rows;
    for (prefix, after, limit, expected) in [
        ("acme--", None, 100, api),
        ("", Some(("2026-11-21", "acme--api")), 100, other),
        ("acme-x--b", None, 1, other),
        ("", None, 1, api),
    ] {
        let found = node.usage(prefix, after, limit);
        assert_eq!(
            found,
            std::slice::from_ref(expected),
            "{prefix} {after:?} {limit}"
        );
    }
}
