//! Scenarios that failed once. Each says in its first lines what was wrong.

use std::fs;

use gw_simulation::run::run;
use gw_simulation::scenario_file;

use crate::folder;

#[test]
fn what_failed_once_holds() {
    let mut failed = Vec::new();
    let mut scenarios = 0;
    for entry in fs::read_dir(folder().join("regressions")).unwrap() {
        let path = entry.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        assert!(
            text.starts_with("# "),
            "{} does not say what was wrong",
            path.display()
        );
        let scenario = scenario_file::parse(&text)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        scenarios += 1;
        if let Some(violation) = run(&scenario, false).report.violation {
            failed.push(format!("{}: {violation:?}", path.display()));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    assert!(scenarios > 0, "no scenario was found");
}
