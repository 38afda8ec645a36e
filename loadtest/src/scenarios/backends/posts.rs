//! Callers that send POSTs with different paths, and count those that fail.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::client::{Connection, Target};
use crate::failure::Failure;
use crate::load;

const LENGTH: u64 = 3000;

/// Sends `each` POSTs on each of `callers` connections at once, with a pause before each. Returns
/// the failures, with their numbers.
pub(super) fn send(
    target: &Target,
    callers: usize,
    each: usize,
    pause: impl Fn(usize) -> Duration + Sync,
) -> Result<BTreeMap<String, usize>, Failure> {
    let started = AtomicUsize::new(0);
    let failures = load::at_once(load::connect(target, callers)?, |connection| {
        let caller = started.fetch_add(1, Ordering::Relaxed);
        let mut connection = Some(connection);
        let mut failures = Vec::new();
        for turn in 0..each {
            std::thread::sleep(pause(caller * each + turn));
            failures.extend(post(target, &mut connection, &format!("/{caller}/{turn}")).err());
        }
        Ok(failures)
    })?;
    let mut counted = BTreeMap::new();
    for failure in failures.into_iter().flatten() {
        *counted.entry(failure).or_default() += 1;
    }
    Ok(counted)
}

/// Sends one POST on the connection, or on a new one.
fn post(target: &Target, kept: &mut Option<Connection>, path: &str) -> Result<(), String> {
    let text = |failure: Failure| failure.to_string();
    let mut connection = match kept.take() {
        Some(connection) => connection,
        None => target.connect().map_err(text)?,
    };
    let mut body = io::repeat(b'x').take(LENGTH);
    let answer = connection.upload(path, LENGTH, &mut body).map_err(text)?;
    if connection.is_reusable() {
        *kept = Some(connection);
    }
    match answer.head.status {
        200 => Ok(()),
        status => Err(format!(
            "{status} {}",
            answer.error_code().unwrap_or_default()
        )),
    }
}
