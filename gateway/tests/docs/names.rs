//! docs/errors.md has every error code and every reason of an overload, docs/tunnel.md every reason
//! for the end of a tunnel, docs/metrics.md every metric, and none has others.

use std::collections::BTreeSet;
use std::fs;

use gw_base::error::Overload;
use gw_shared::tunnel::cut_reason::CutReason;

use crate::sources::markdown::{headings, rows};
use crate::sources::served::served;
use crate::{assert_same, read, repository};

fn is_error_code(text: &str) -> bool {
    let is_name = text
        .bytes()
        .all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_');
    is_name && (text.starts_with("GW_") || text.starts_with("AGENT_"))
}

/// The codes in the source, tests left out. Those of the agent are among them: the gateway passes
/// on no others.
fn error_codes() -> BTreeSet<String> {
    let sources = ["gateway/base/src/error.rs", "shared/src/error_code.rs"].into_iter();
    let sources = sources.filter_map(|path| fs::read_to_string(repository().join(path)).ok());
    let literals = sources.flat_map(|source| {
        let source = source.split("#[cfg(test)]").next().unwrap();
        source.split('"').map(str::to_owned).collect::<Vec<_>>()
    });
    literals.filter(|text| is_error_code(text)).collect()
}

#[test]
fn every_error_code_has_a_heading_and_every_heading_a_code() {
    let codes = error_codes();
    assert!(
        codes.len() > 30 && codes.contains("AGENT_UNAVAILABLE") && codes.contains("GW_BACKEND_TLS"),
        "{codes:?}"
    );
    let headings = headings(&read("docs/errors.md")).into_iter();
    let titles = headings
        .filter(|(level, _)| *level == 2)
        .map(|(_, text)| text.trim_matches('`').to_owned());
    assert_same(
        "docs/errors.md",
        titles.filter(|title| is_error_code(title)),
        &codes,
    );
}

#[test]
fn the_page_has_every_reason_of_an_overload_and_no_other() {
    let reasons = Overload::ALL
        .iter()
        .map(|reason| reason.as_str().to_owned())
        .collect();
    let rows = rows(&read("docs/errors.md"), "message says").into_iter();
    assert_same(
        "docs/errors.md",
        rows.map(|cells| cells[0].clone()),
        &reasons,
    );
}

#[test]
fn the_page_has_every_reason_for_the_end_of_a_tunnel_and_no_other() {
    let told = |reason: &CutReason| {
        if reason.advice().is_some() {
            "yes"
        } else {
            "no"
        }
    };
    let reasons = CutReason::ALL
        .iter()
        .map(|reason| format!("`{}` {}", reason.as_str(), told(reason)))
        .collect();
    let rows = rows(&read("docs/tunnel.md"), "why it ended").into_iter();
    assert_same(
        "docs/tunnel.md",
        rows.map(|cells| format!("{} {}", cells[0], cells[2])),
        &reasons,
    );
}

/// Name and type of each metric of both programs.
fn metrics() -> BTreeSet<String> {
    let families = served()
        .gateway_metrics
        .lines()
        .chain(served().agent_metrics.lines())
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    families
        .map(|(name, kind)| format!("{name} {kind}"))
        .collect()
}

#[test]
fn the_page_has_every_metric_with_its_type_and_no_other() {
    let metrics = metrics();
    for metric in [
        "gw_requests_total counter",
        "gw_spans_exported_total counter",
        "gw_agent_slots gauge",
        "process_open_fds gauge",
    ] {
        assert!(metrics.contains(metric), "{metric}: {metrics:?}");
    }
    let rows = rows(&read("docs/metrics.md"), "metric").into_iter();
    let documented = rows.map(|cells| format!("{} {}", cells[0].trim_matches('`'), cells[1]));
    assert_same("docs/metrics.md", documented, &metrics);
}
