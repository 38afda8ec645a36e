//! An authority that limits the rate of new orders.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::{APEX, PROGRAMS, Prepared};
use crate::support::acme_front::{Answer, Kind, Verdict};
use crate::support::eventually;
use crate::support::programs::usable;

/// The wait that the authority asks for.
const RETRY_AFTER: Duration = Duration::from_secs(4);
#[test]
fn an_order_that_is_limited_waits_as_long_as_the_authority_asks() {
    if !usable(&PROGRAMS) {
        return;
    }
    let (prepared, front) = Prepared::with_front();
    prepared.root();
    let is_limited = AtomicBool::new(true);
    front.set(move |request| {
        let refuses = request.kind == Kind::NewOrder && is_limited.swap(false, Ordering::Relaxed);
        match refuses {
            true => Verdict::Answer(Answer::rate_limited(RETRY_AFTER)),
            false => Verdict::Forward,
        }
    });
    let served = prepared.serve();
    let listed = eventually("a failure in the list", || {
        let listed = prepared.certificate(&served);
        (listed["failures"] == 1).then_some(listed)
    });
    let reason = listed["last_failure"].as_str().unwrap();
    assert!(reason.contains("too many new orders recently"), "{reason}");
    assert!(reason.contains(&front.directory()), "{reason}");
    assert_ne!(listed["status"], "valid", "{listed}");

    prepared.await_certificate(&served, &[]);
    let orders = front.requests(Kind::NewOrder);
    let statuses: Vec<_> = orders.iter().map(|order| order.status).collect();
    assert_eq!(statuses, [Some(429), Some(201)]);
    assert!(orders.iter().all(|order| order.name() == APEX));
    let waited = orders[1].at - orders[0].at;
    assert!(waited >= RETRY_AFTER, "{waited:?}");
    eventually("no failure any more", || {
        let listed = prepared.certificate(&served);
        (listed["failures"] == 0 && listed["status"] == "valid").then_some(())
    });
}
