//! The number of domains that a service may have.

use super::setup::Setup;

/// Domains that a service may have (docs/own-domains.md).
const DOMAINS_MAX: usize = 20;

#[test]
fn a_service_has_twenty_domains_and_the_next_one_is_refused() {
    let Some(setup) = Setup::new() else {
        return;
    };
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
    assert_eq!(setup.list("demo").len(), DOMAINS_MAX);
    // A domain that the service has already can be added again. Another service has room.
    setup.add(&name(0)).unwrap();
    setup.api().create_service("demo", "other");
    let further = name(DOMAINS_MAX);
    setup.add_to(["demo", "other"], &further).unwrap();
    setup.remove(&name(0));
    setup.add("a.customer.test").unwrap();
}
