//! An authority that limits the rate of new orders for own domains.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::setup::{Changes, Setup};
use super::{DOMAIN, OTHER};
use crate::support::acme_front::{Answer, Kind, Verdict};
use crate::support::eventually;
use crate::support::processes::machine::Machine;

/// Refuses the first new order for `name`, with a wait.
fn limit(setup: &Setup, name: &'static str, wait: Duration) {
    let is_limited = AtomicBool::new(true);
    setup.front.set(move |request| {
        let is_refused = request.kind == Kind::NewOrder
            && request.name() == name
            && is_limited.swap(false, Ordering::Relaxed);
        match is_refused {
            true => Verdict::Answer(Answer::rate_limited(wait)),
            false => Verdict::Forward,
        }
    });
}

/// Waits until the list shows the refusal.
fn await_refusal(setup: &Setup, domain: &str) {
    let shown = eventually("a failure in the list", || {
        let shown = setup.show(domain);
        (shown["failures"] == 1).then_some(shown)
    });
    let reason = shown["last_failure"].as_str().unwrap();
    assert!(reason.contains("too many new orders recently"), "{reason}");
    assert!(shown.get("certificate").is_none(), "{shown}");
}

#[test]
fn an_order_of_a_domain_that_is_limited_waits_as_long_as_the_authority_asks() {
    let wait = Duration::from_secs(4);
    let Some(setup) = Setup::new() else {
        return;
    };
    limit(&setup, DOMAIN, wait);
    setup.lead_here(DOMAIN);
    setup.add(DOMAIN).unwrap();
    await_refusal(&setup, DOMAIN);
    setup.serve(OTHER);
    setup.await_certificate(DOMAIN);
    assert_eq!(setup.show(DOMAIN)["failures"], 0);
    let orders = setup.front.orders_of(DOMAIN);
    let statuses: Vec<_> = orders.iter().map(|order| order.status).collect();
    assert_eq!(statuses, [Some(429), Some(201)]);
    let waited = orders[1].at - orders[0].at;
    assert!(waited >= wait, "{waited:?}");
    assert_eq!(setup.front.orders_of(OTHER).len(), 1);
}

#[test]
fn a_long_limit_of_one_domain_does_not_hold_another_one_up() {
    let Some(setup) = Setup::with(Changes {
        machine: Some(Machine::new()),
        ..Changes::default()
    }) else {
        return;
    };
    limit(&setup, DOMAIN, Duration::from_secs(60 * 60));
    setup.lead_here(DOMAIN);
    setup.add(DOMAIN).unwrap();
    await_refusal(&setup, DOMAIN);

    // Orders that failed for another reason wait for ten minutes at most. The order of another
    // domain makes the gateway look at its clock.
    setup.set_clock("+11m");
    setup.serve(OTHER);
    assert_eq!(setup.front.orders_of(DOMAIN).len(), 1);
    assert_eq!(setup.show(DOMAIN)["failures"], 1);

    // The wait is the hour, and at most a tenth of it more.
    setup.set_clock("+70m");
    setup.serve("a.customer.test");
    setup.await_certificate(DOMAIN);
    assert_eq!(setup.front.orders_of(DOMAIN).len(), 2);
    assert_eq!(setup.show(DOMAIN)["failures"], 0);
    setup.stop();
}
