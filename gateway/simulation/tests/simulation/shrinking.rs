//! What is left of a scenario that fails.

use std::time::Duration;

use gw_simulation::run::run;
use gw_simulation::scenario::{FaultKind, Framing, Method, Scenario};
use gw_simulation::shrink::shrink;

/// The first scenario for which `holds`.
fn first(holds: impl Fn(&Scenario) -> bool) -> Scenario {
    let mut scenarios = (0..1000).map(Scenario::new);
    scenarios.find(|scenario| holds(scenario)).unwrap()
}

fn has_cut(scenario: &Scenario) -> bool {
    let is_cut = |kind| matches!(kind, FaultKind::CutAgent { agent: 1, .. });
    scenario.faults.iter().any(|fault| is_cut(fault.kind))
}

fn has_long_upload(scenario: &Scenario) -> bool {
    let mut requests = scenario.callers.iter().flat_map(|caller| &caller.requests);
    requests.any(|request| {
        let length = request.upload.map_or(0, |upload| upload.length);
        request.method == Method::Put && length > 5000
    })
}

#[test]
fn only_what_the_failure_needs_is_left() {
    let fails = |scenario: &Scenario| has_cut(scenario) && has_long_upload(scenario);
    let scenario = first(|scenario| {
        fails(scenario) && scenario.faults.len() > 2 && scenario.callers.len() > 3
    });
    let shrunk = shrink(&scenario, 10_000, fails);
    assert!(shrunk.is_minimal);
    assert_eq!(shrink(&scenario, 10_000, fails), shrunk);
    let left = shrunk.scenario;
    // The fault is one of the second agent.
    assert_eq!(
        (left.agents.len(), left.services.len(), left.workers),
        (2, 1, 1)
    );
    assert_eq!((left.faults.len(), left.callers.len()), (1, 1));
    let caller = &left.callers[0];
    assert_eq!(caller.requests.len(), 1);
    assert_eq!((caller.is_http2, caller.at_once), (false, 1));
    assert_eq!((caller.begins, caller.pause), Default::default());
    let request = &caller.requests[0];
    let upload = request.upload.unwrap();
    assert!((5001..=10_001).contains(&upload.length), "{upload:?}");
    assert_eq!((upload.is_chunked, upload.pause), Default::default());
    assert_eq!(request.response.length, 0);
    assert_eq!(request.response.framing, Framing::Length);
    let FaultKind::CutAgent { lasts, .. } = left.faults[0].kind else {
        panic!("{left}");
    };
    assert!(lasts <= Duration::from_millis(1), "{lasts:?}");
}

#[test]
fn attempts_are_bounded() {
    let scenario = first(has_cut);
    let mut calls = 0;
    let shrunk = shrink(&scenario, 20, |scenario| {
        calls += 1;
        has_cut(scenario)
    });
    assert_eq!((calls, shrunk.attempts), (20, 20));
    assert!(!shrunk.is_minimal);
    assert!(shrunk.scenario.requests() < scenario.requests());
}

#[test]
fn a_scenario_that_cannot_be_smaller_stays() {
    let scenario = first(has_cut);
    let shrunk = shrink(&scenario, 10_000, |candidate| *candidate == scenario);
    assert_eq!(shrunk.scenario, scenario);
    assert!(shrunk.is_minimal);
}

/// An invariant that does not hold: no backend ever answers 404.
#[test]
fn a_simulation_that_fails_shrinks_to_one_request() {
    let fails = |scenario: &Scenario| {
        let trace = run(scenario, true).trace.unwrap();
        trace.contains("complete, status Some(404) ,")
    };
    let scenario = first(|scenario| {
        scenario.callers.len() < 4 && scenario.faults.len() == 2 && fails(scenario)
    });
    let shrunk = shrink(&scenario, 1000, fails);
    assert!(shrunk.is_minimal);
    let left = &shrunk.scenario;
    assert_eq!((left.requests(), left.faults.len()), (1, 0), "{left}");
    assert_eq!((left.agents.len(), left.workers), (1, 1), "{left}");
    let request = &left.callers[0].requests[0];
    assert_eq!(
        (request.method, request.response.status),
        (Method::Get, 404)
    );
}
