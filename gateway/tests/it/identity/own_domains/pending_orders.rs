//! Orders that stay pending at the authority.

use super::PROGRAMS;
use super::setup::Setup;
use crate::support::acme_front::{Kind, Verdict, keep_pending};
use crate::support::eventually;
use crate::support::peers::caller::HOST;
use crate::support::programs::usable;

/// Orders that are open at once (docs/own-domains.md).
const ORDERS_MAX: usize = 16;
/// Domains of the test, as many as a service may have.
const DOMAINS: usize = 20;

#[test]
fn sixteen_orders_are_open_at_once_and_the_others_follow() {
    if !usable(&PROGRAMS) {
        return;
    }
    let setup = Setup::new();
    setup.front.set(keep_pending);
    let domains: Vec<String> = (0..DOMAINS)
        .map(|number| format!("d{number}.customer.test"))
        .collect();
    let records: Vec<String> = domains
        .iter()
        .map(|domain| format!("add {domain} 1 CNAME {HOST}"))
        .collect();
    let records: Vec<&str> = records.iter().map(String::as_str).collect();
    setup.named.update(&records);
    for domain in &domains {
        assert_eq!(setup.add(domain).unwrap()["status"], "active");
    }
    setup.front.await_different(Kind::Challenge, ORDERS_MAX);
    // The gateway looks at each of them again.
    let told = setup.front.requests(Kind::Challenge).len();
    eventually("the orders are looked at again", || {
        let now = setup.front.requests(Kind::Challenge).len();
        (now >= told + ORDERS_MAX).then_some(())
    });
    assert_eq!(setup.front.requests(Kind::NewOrder).len(), ORDERS_MAX);
    let mut caller = setup.prepared.connect(setup.address());
    assert_eq!(setup.ask(&mut caller, HOST), 200);
    let without = setup.list();
    assert_eq!(without.len(), DOMAINS);
    assert!(without.iter().all(|it| it.get("certificate").is_none()));

    setup.front.set(|_| Verdict::Forward);
    eventually("all domains have a certificate", || {
        assert_eq!(setup.ask(&mut caller, HOST), 200);
        let list = setup.list();
        list.iter()
            .all(|it| it["certificate"]["source"] == "acme")
            .then_some(())
    });
    // An order ends with its certificate.
    let mut open = 0_usize;
    for kind in setup.front.kinds() {
        match kind {
            Kind::NewOrder => open += 1,
            Kind::Certificate => open -= 1,
            _ => continue,
        }
        assert!(open <= ORDERS_MAX, "{open} orders are open");
    }
    for domain in &domains {
        assert_eq!(setup.front.orders_of(domain).len(), 1, "{domain}");
    }
}
