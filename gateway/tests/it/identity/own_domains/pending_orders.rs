//! Orders that stay pending at the authority.

use super::PROGRAMS;
use super::setup::Setup;
use crate::support::acme_front::{Kind, Verdict, keep_pending};
use crate::support::eventually;
use crate::support::peers::caller::HOST;
use crate::support::programs::usable;

/// Orders of one account that are open at once (docs/own-domains.md).
const ORDERS_MAX: usize = 8;
/// Domains of the test, as many as a service may have.
const DOMAINS: usize = 20;

#[test]
fn eight_orders_of_an_account_are_open_at_once_and_leave_room_for_others() {
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

    // Another account does not wait for them.
    let other = "d.other.customer.test";
    setup
        .named
        .update(&[&format!("add {other} 1 CNAME other--api.eu1.gw.localhost")]);
    for command in [
        &["account", "create", "other"][..],
        &["service", "create", "other", "api"],
        &["domain", "add", "other", "api", other],
    ] {
        setup.command(command).unwrap();
    }
    eventually("the order of another account", || {
        (setup.front.orders_of(other).len() == 1).then_some(())
    });

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
        assert!(open <= ORDERS_MAX + 1, "{open} orders are open");
    }
    for domain in &domains {
        assert_eq!(setup.front.orders_of(domain).len(), 1, "{domain}");
    }
}
