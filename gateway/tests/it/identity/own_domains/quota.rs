//! The number of domains that a service may have.

use super::PROGRAMS;
use super::setup::Setup;
use crate::support::programs::usable;

/// Domains that a service may have (docs/own-domains.md).
const DOMAINS_MAX: usize = 20;

#[test]
fn a_service_has_twenty_domains_and_the_next_one_is_refused() {
    if !usable(&PROGRAMS) {
        return;
    }
    let setup = Setup::new();
    let name = |number: usize| format!("d{number}.customer.test");
    for number in 0..DOMAINS_MAX {
        assert_eq!(setup.add(&name(number)).unwrap()["status"], "pending");
    }
    let error = setup.add(&name(DOMAINS_MAX)).unwrap_err();
    for part in [
        "service echo has 20 domains, and may have 20",
        "`gw-gateway domain remove`",
    ] {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(setup.list().len(), DOMAINS_MAX);
    // One that is there already is no further one, and another service has room.
    setup.add(&name(0)).unwrap();
    setup
        .command(&["service", "create", "demo", "other"])
        .unwrap();
    let further = name(DOMAINS_MAX);
    setup
        .command(&["domain", "add", "demo", "other", &further])
        .unwrap();
    setup.remove(&name(0));
    setup.add("a.customer.test").unwrap();
}
