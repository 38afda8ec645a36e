//! Orders that stay pending at the authority.

use serde_json::Value;

use super::setup::Setup;
use crate::support::acme_front::{Kind, Request, Verdict, keep_pending};
use crate::support::eventually;
use crate::support::peers::caller::HOST;

/// Orders that are open at once (docs/own-domains.md).
const ORDERS_MAX: usize = 16;
/// Orders of one account that are open at once.
const OF_ACCOUNT_MAX: usize = 8;
/// Two services of different accounts, and the beginning of the names of their domains.
const SERVICES: [[&str; 3]; 2] = [["demo", "echo", "d"], ["rival", "api", "r"]];
/// Number of domains of each service.
const DOMAINS: usize = 11;

/// Adds the domains of both services.
fn add(setup: &Setup) {
    setup.api().create_service("rival", "api");
    for [account, service, beginning] in SERVICES {
        let names: Vec<String> = (0..DOMAINS)
            .map(|number| format!("{beginning}{number}.customer.test"))
            .collect();
        let records: Vec<String> = names
            .iter()
            .map(|name| format!("add {name} 1 CNAME {account}--{service}.eu1.gw.localhost"))
            .collect();
        let records: Vec<&str> = records.iter().map(String::as_str).collect();
        setup.named.update(&records);
        for name in names {
            let added = setup.add_to([account, service], &name);
            assert_eq!(added.unwrap()["status"], "active");
        }
    }
}

/// Number of orders for domains of an account, by the beginning of their names.
fn count(orders: &[Request], beginning: &str) -> usize {
    let of_account = |order: &&Request| order.name().starts_with(beginning);
    orders.iter().filter(of_account).count()
}

#[test]
fn sixteen_orders_are_open_at_once_and_the_others_follow() {
    let Some(setup) = Setup::new() else {
        return;
    };
    setup.front.set(keep_pending);
    add(&setup);
    setup.front.await_different(Kind::Challenge, ORDERS_MAX);
    // The gateway looks at each of them again.
    let told = setup.front.requests(Kind::Challenge).len();
    eventually("the orders are looked at again", || {
        let now = setup.front.requests(Kind::Challenge).len();
        (now >= told + ORDERS_MAX).then_some(())
    });
    let orders = setup.front.requests(Kind::NewOrder);
    assert_eq!(orders.len(), ORDERS_MAX);
    let mut caller = setup.prepared.connect(setup.address());
    assert_eq!(setup.ask(&mut caller, HOST), 200);
    for [account, _, beginning] in SERVICES {
        assert_eq!(count(&orders, beginning), OF_ACCOUNT_MAX, "{account}");
        let without = setup.list(account);
        assert_eq!(without.len(), DOMAINS);
        assert!(without.iter().all(|it| it.get("certificate").is_none()));
    }

    setup.front.set(|_| Verdict::Forward);
    for [account, ..] in SERVICES {
        eventually("all domains have a certificate", || {
            assert_eq!(setup.ask(&mut caller, HOST), 200);
            let has_one = |it: &Value| it["certificate"]["source"] == "acme";
            setup.list(account).iter().all(has_one).then_some(())
        });
    }
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
    let orders = setup.front.requests(Kind::NewOrder);
    assert_eq!(orders.len(), SERVICES.len() * DOMAINS, "one for each");
}
