//! Groups of integration tests, which say how often `./test` runs them.

use std::fs;

use super::workspace;

/// Heads of the groups of modules of `it`, as `./test` reads them.
const GROUPS: [&str; 4] = [
    "// Once:",
    "// Once, slow:",
    "// On each driver:",
    "// On each driver, slow:",
];

#[test]
fn every_integration_test_is_in_a_group_that_says_how_often_it_runs() {
    let tests = workspace().join("gateway/tests/it");
    let main = fs::read_to_string(tests.join("main.rs")).unwrap();
    let folders: Vec<&str> = main
        .lines()
        .filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';'))
        // These have no tests.
        .filter(|folder| !["collector", "support"].contains(folder))
        .collect();
    assert!(!folders.is_empty());
    for folder in folders {
        let text = fs::read_to_string(tests.join(folder).join("mod.rs")).unwrap();
        let other: Vec<&str> = text
            .split("\n\n")
            .filter(|block| block.lines().any(|line| line.starts_with("mod ")))
            .filter(|block| {
                !block
                    .lines()
                    .next()
                    .is_some_and(|head| GROUPS.contains(&head))
            })
            .collect();
        assert!(
            other.is_empty(),
            "{folder}: modules without a group: {other:?}"
        );
    }
}
