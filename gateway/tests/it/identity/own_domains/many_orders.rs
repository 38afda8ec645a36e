//! Many domains that are added at once.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write as _};
use std::time::Instant;

use super::PROGRAMS;
use super::setup::Setup;
use crate::support::acme_front::Kind;
use crate::support::eventually;
use crate::support::processes::successor::admin;
use crate::support::programs::usable;

/// Domains, unless `GW_TEST_DOMAINS` has another number: at most those of one account, because of
/// the limits of orders.
const DOMAINS: usize = 30;
/// Domains of an account and of a service, as many as they may have.
const OF_ACCOUNT: usize = 100;
const OF_SERVICE: usize = 20;

/// A document with the domains, their services and accounts, and the commands that make their DNS records.
fn declared(domains: usize) -> (String, Vec<String>) {
    let (mut document, mut records) = (String::new(), Vec::new());
    for number in 0..domains {
        let account = format!("many{}", number / OF_ACCOUNT);
        let service = format!("s{}", number / OF_SERVICE);
        if number % OF_ACCOUNT == 0 {
            writeln!(document, "[[account]]\nid = \"{account}\"").unwrap();
        }
        if number % OF_SERVICE == 0 {
            writeln!(
                document,
                "[[service]]\naccount = \"{account}\"\nid = \"{service}\""
            )
            .unwrap();
        }
        let name = format!("d{number}.customer.test");
        writeln!(
            document,
            "[[domain]]\naccount = \"{account}\"\nservice = \"{service}\"\nname = \"{name}\""
        )
        .unwrap();
        records.push(format!(
            "add {name} 1 CNAME {account}--{service}.eu1.gw.localhost"
        ));
    }
    (document, records)
}

#[test]
fn domains_that_are_added_at_once_get_their_certificates_by_one_order_each() {
    if !usable(&PROGRAMS) {
        return;
    }
    let domains = std::env::var("GW_TEST_DOMAINS").map_or(DOMAINS, |it| it.parse().unwrap());
    let setup = Setup::new();
    let (document, records) = declared(domains);
    for records in records.chunks(OF_ACCOUNT) {
        let records: Vec<&str> = records.iter().map(String::as_str).collect();
        setup.named.update(&records);
    }
    let file = setup.prepared.path("domains.toml");
    fs::write(&file, document).unwrap();
    let began = Instant::now();
    setup
        .command(&["apply", "--file", file.to_str().unwrap()])
        .unwrap();
    let valid = || {
        let (_, metrics) = admin(setup.served.admin_address, "/metrics");
        let name = "gw_own_domain_certificates{state=\"valid\"} ";
        let line = metrics.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap().parse::<usize>().unwrap()
    };
    let mut issued = 0;
    while issued < domains {
        issued = eventually("another certificate", || {
            Some(valid()).filter(|now| *now > issued)
        });
    }
    let seconds = began.elapsed().as_secs_f64();
    let orders = setup.front.requests(Kind::NewOrder).len();
    writeln!(
        io::stdout(),
        "{domains} domains in {seconds:.0} s, by {orders} orders"
    )
    .unwrap();
    assert_eq!(orders, domains);
}
