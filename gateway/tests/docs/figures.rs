//! Figures of the speed in the README and in docs/performance.md are those of
//! loadtest/results/comparison.json, and bounds of the tunnel on the pages are those of the code.

use gw_shared::tunnel::{control, endpoint, frame, handshake, window};
use num_format::{Locale, ToFormattedString};
use serde_json::Value;

use crate::read;
use crate::sources::markdown::rows;

/// Setups that the tables compare Gw with.
const PEERS: [&str; 2] = ["haproxy", "nginx"];

/// The median of a quantity of one setup. None if the case has no such setup.
fn median(results: &Value, section: &str, case: &str, setup: &str, quantity: &str) -> Option<f64> {
    let mut cases = results.as_array().unwrap().iter();
    let setups = cases.find(|it| it["section"] == section && it["case"] == case)?["setups"]
        .as_array()
        .unwrap();
    let setup = setups.iter().find(|it| it["setup"] == setup)?;
    setup["quantities"][quantity]["median"].as_f64()
}

/// The CPU time of a request by Gw, divided by that by `peer`; empty if it was not measured.
fn ratio(results: &Value, section: &str, callers: &str, peer: &str) -> String {
    let unit = if callers == "1" { "caller" } else { "callers" };
    let cpu = |setup| median(results, section, &format!("{callers} {unit}"), setup, "cpu");
    cpu("gw")
        .zip(cpu(peer))
        .map_or_else(String::new, |(gw, peer)| format!("{:.2}", gw / peer))
}

#[test]
fn ratios_of_cpu_time_are_those_of_the_results() {
    let results = serde_json::from_str(&read("loadtest/results/comparison.json")).unwrap();
    let expected = ["1", "16", "64", "256"].map(|callers| {
        let ratios = ["http1", "http2"]
            .into_iter()
            .flat_map(|section| PEERS.map(|peer| ratio(&results, section, callers, peer)));
        [callers.to_owned()]
            .into_iter()
            .chain(ratios)
            .collect::<Vec<String>>()
    });
    assert!(
        expected.iter().all(|row| !row[1].is_empty()),
        "{expected:?}"
    );
    for page in ["README.md", "docs/performance.md"] {
        assert_eq!(rows(&read(page), "concurrent requests"), expected, "{page}");
    }
}

/// Rows of the second table that are of the same run: title, section, case, quantity.
const ROWS: [(&str, &str, &str, &str); 8] = [
    (
        "CPU of a new connection with one request",
        "handshakes",
        "8 callers",
        "cpu",
    ),
    (
        "memory of an idle HTTP/1.1 caller",
        "idle",
        "HTTP/1.1 caller",
        "bytes",
    ),
    (
        "memory of an idle HTTP/2 caller",
        "idle",
        "HTTP/2 caller",
        "bytes",
    ),
    (
        "backend that writes head and body apart (Nagle), p50",
        "split-writes",
        "1 caller",
        "p50_ms",
    ),
    ("small request alone, p99", "beside", "alone", "p99_ms"),
    (
        "the same beside 500 new connections per second, p99",
        "beside",
        "beside 500 new connections/s",
        "p99_ms",
    ),
    (
        "the same beside eight downloads of its service, p99",
        "beside",
        "beside 8 downloads",
        "p99_ms",
    ),
    (
        "speed of these downloads",
        "beside",
        "beside 8 downloads",
        "rate",
    ),
];

/// The page rounds to as many decimals as it likes.
#[test]
fn further_figures_of_the_comparison_are_those_of_the_results() {
    let results = serde_json::from_str(&read("loadtest/results/comparison.json")).unwrap();
    let page = rows(&read("docs/performance.md"), "compared");
    for (title, section, case, quantity) in ROWS {
        let row = page.iter().find(|cells| cells[0] == title).unwrap();
        for (cell, setup) in row[1..].iter().zip(["gw"].into_iter().chain(PEERS)) {
            let (figure, unit) = cell.split_once(' ').unwrap();
            let scale = if unit == "KB" { 1000.0 } else { 1.0 };
            let value = median(&results, section, case, setup, quantity).unwrap() / scale;
            let decimals = figure.split_once('.').map_or(0, |(_, digits)| digits.len());
            assert_eq!(figure, format!("{value:.decimals$}"), "{title}: {setup}");
        }
    }
}

#[test]
fn bounds_of_a_tunnel_on_the_pages_are_those_of_the_code() {
    let kib = |bytes: usize| format!("{} KiB", bytes / 1024);
    let tunnel = [
        format!(
            "below {}.",
            endpoint::STREAMS_MAX.to_formatted_string(&Locale::en)
        ),
        format!(
            "HELLO, at most {} |",
            endpoint::STREAMS_MAX.to_formatted_string(&Locale::en)
        ),
        format!("accepts {} more", endpoint::STREAMS_BEYOND_SLOTS),
        format!(
            "0 to {}; 0 only with END",
            frame::DATA_MAX.to_formatted_string(&Locale::en)
        ),
        format!(
            "9 + {} + {}",
            frame::CODE_MAX,
            frame::MESSAGE_TEXT_MAX.to_formatted_string(&Locale::en)
        ),
        format!(
            "1 to {}; from an agent to {}",
            kib(control::MESSAGE_MAX),
            kib(control::TO_GATEWAY_MAX)
        ),
        format!(
            "({}) of unused credit",
            window::MOST.to_formatted_string(&Locale::en)
        ),
        format!(
            "Before the first WINDOW it is {}.",
            window::FIRST.to_formatted_string(&Locale::en)
        ),
        format!(
            "that of a request with {}.",
            window::LEAST.to_formatted_string(&Locale::en)
        ),
        format!(
            "at most {} and {} fields",
            kib(handshake::HEAD_LIMITS.head),
            handshake::HEAD_LIMITS.fields
        ),
    ];
    let configuration = [format!(
        "uses at most {} |",
        endpoint::STREAMS_MAX.to_formatted_string(&Locale::en)
    )];
    for (page, bounds) in [
        ("docs/tunnel.md", tunnel.as_slice()),
        ("docs/configuration.md", &configuration),
    ] {
        let text = read(page).replace('\n', " ");
        for bound in bounds {
            assert!(text.contains(bound), "{page} lacks {bound:?}");
        }
    }
}
