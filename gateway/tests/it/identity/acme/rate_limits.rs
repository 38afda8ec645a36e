//! An authority that limits the rate of new orders.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::{APEX, Prepared};
use crate::support::acme_front::{Answer, Kind, Verdict};
use crate::support::acme_servers::free_address;
use crate::support::eventually;

/// The wait that the authority asks for.
const RETRY_AFTER: Duration = Duration::from_secs(4);

#[test]
fn an_order_that_is_limited_waits_as_long_as_the_authority_asks() {
    let Some((prepared, front)) = Prepared::with_front() else {
        return;
    };
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

#[test]
fn a_limit_of_one_account_stops_neither_another_account_nor_the_region() {
    const LIMITED: &str = "limited.customer.test";
    const SAME: &str = "same.customer.test";
    const OTHER: &str = "other.customer.test";
    let Some((prepared, front)) = Prepared::with_front_at(free_address().port()) else {
        return;
    };
    let served = prepared.serve();
    let before = prepared.await_certificate(&served, &[]);
    front.set(|request| match request.name() {
        LIMITED => Verdict::Answer(Answer::rate_limited(Duration::from_secs(60 * 60))),
        _ => Verdict::Forward,
    });
    for account in ["one", "two"] {
        prepared.run(&served, &["account", "create", account]);
        prepared.run(&served, &["service", "create", account, "api"]);
    }
    let add = |account: &str, domain: &str| {
        let record = format!("add {domain} 1 CNAME {account}--api.eu1.example.test");
        prepared.named.update(&[&record]);
        let added = prepared.run(&served, &["domain", "add", account, "api", domain]);
        assert_eq!(added["status"], "active", "{added}");
    };
    let show = |account: &str, domain: &str| {
        let list = prepared.run(&served, &["domain", "list", account]);
        let items = list.get("items").unwrap_or(&list).as_array().unwrap();
        let found = items.iter().find(|item| item["name"] == domain);
        found.unwrap().clone()
    };
    add("one", LIMITED);
    eventually("the refusal", || {
        (show("one", LIMITED)["failures"] == 1).then_some(())
    });

    // The orders of another account and of the region go on. The limited account begins no other
    // order.
    add("one", SAME);
    add("two", OTHER);
    eventually("the certificate of the other account", || {
        (show("two", OTHER)["certificate"]["source"] == "acme").then_some(())
    });
    prepared.command(&served, "renew");
    prepared.await_certificate(&served, &before);
    assert_eq!(front.orders_of(SAME).len(), 0);

    // A domain that is added again goes on with its failures.
    prepared.run(&served, &["domain", "remove", "one", LIMITED]);
    prepared.run(&served, &["domain", "add", "one", "api", LIMITED]);
    let shown = show("one", LIMITED);
    assert_eq!(shown["failures"], 1, "{shown}");
    let reason = shown["last_failure"].as_str().unwrap();
    assert!(reason.contains("too many new orders recently"), "{reason}");
    assert_eq!(front.orders_of(LIMITED).len(), 1);
}
