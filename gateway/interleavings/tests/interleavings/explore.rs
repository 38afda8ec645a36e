//! Runs scenarios in all orders of their threads' steps.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use loom::model::Builder;

/// Most preemptions of a thread in one interleaving. `LOOM_MAX_PREEMPTIONS` changes it. Waits do
/// not count.
const PREEMPTIONS: usize = 3;
/// Most steps of one interleaving.
const STEPS: usize = 10_000;

/// Explores a scenario. Panics if one of its interleavings ends in a panic, or with threads that
/// wait for ever.
pub(crate) fn explore(scenario: fn()) {
    let mut builder = Builder::new();
    builder.max_branches = STEPS;
    builder.preemption_bound.get_or_insert(PREEMPTIONS);
    let began = Instant::now();
    let explored = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&explored);
    builder.check(move || {
        count.fetch_add(1, Ordering::Relaxed);
        scenario();
    });
    let explored = explored.load(Ordering::Relaxed);
    assert!(explored > 1, "the threads do not meet");
    eprintln!("{explored} interleavings in {:.1?}", began.elapsed());
}

/// Asserts that the scenario fails with the code of a mutant.
pub(crate) fn find(scenario: fn()) {
    let Err(panic) = catch_unwind(AssertUnwindSafe(|| explore(scenario))) else {
        panic!("not found: no interleaving of the scenario fails");
    };
    let message = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or_default();
    eprintln!("found: {message}");
    assert!(
        message.starts_with("deadlock") || message.starts_with("assertion"),
        "the exploration ended for another reason: {message}"
    );
}
