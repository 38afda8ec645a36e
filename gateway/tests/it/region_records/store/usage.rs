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
    let later = put(0, &[row("2026-11-21", "acme--api", 8)], "2026-11-21");
    assert_eq!(later[0].2[0], 16);

    counts_are_found_by_label_and_position(&postgres);
}

fn counts_are_found_by_label_and_position(postgres: &Postgres) {
    let of = |prefix: &str, after: Option<(&str, &str)>, limit: usize| -> Vec<String> {
        let rows = Writer::start(postgres, "b").usage(prefix, after, limit);
        rows.into_iter()
            .map(|(date, label, _)| format!("{date} {label}"))
            .collect()
    };
    assert_eq!(
        of("acme--", None, 100),
        ["2026-11-21 acme--api"],
        "the day before is forgotten"
    );
    assert_eq!(
        of("", Some(("2026-11-21", "acme--api")), 100),
        ["2026-11-21 acme-x--b"]
    );
    assert_eq!(of("acme-x--b", None, 1), ["2026-11-21 acme-x--b"]);
}
