//! Many domains that are added at once.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write as _};
use std::time::Instant;

use gw_local_region::Balancer;
use serde_json::{Value, json};

use super::PROGRAMS;
use super::setup::Setup;
use crate::support::acme_front::{Front, Kind, Verdict, keep_pending};
use crate::support::acme_servers::named::Named;
use crate::support::acme_servers::pebble::{Options, Pebble};
use crate::support::eventually;
use crate::support::processes::region::Region;
use crate::support::processes::successor::replace;
use crate::support::programs::usable;

/// Domains, unless `GW_TEST_DOMAINS` has another number: at most those of one account, because of
/// the limits of orders.
const DOMAINS: usize = 30;
/// Domains of a region whose nodes are replaced, unless `GW_TEST_DOMAINS` has another number.
const DURING_REPLACEMENTS: usize = 12;
/// Orders of one account that are open at once (docs/own-domains.md).
const OPEN: usize = 8;
/// Domains of an account and of a service, as many as they may have.
const OF_ACCOUNT: usize = 100;
const OF_SERVICE: usize = 20;

/// `GW_TEST_DOMAINS`, or `default`.
fn number_of_domains(default: usize) -> usize {
    std::env::var("GW_TEST_DOMAINS").map_or(default, |it| it.parse().unwrap())
}

fn report(domains: usize, began: Instant, orders: usize) {
    let seconds = began.elapsed().as_secs_f64();
    let text = format!("{domains} domains in {seconds:.0} s, by {orders} orders\n");
    io::stdout().write_all(text.as_bytes()).unwrap();
}

/// A document with the domains, their services and accounts, and the commands that make their DNS
/// records.
fn declared(domains: usize) -> (String, Vec<String>) {
    let (mut document, mut records) = (String::new(), Vec::new());
    for number in 0..domains {
        let account = format!("many{}", number / OF_ACCOUNT);
        let service = format!("s{}", number / OF_SERVICE);
        if number % OF_ACCOUNT == 0 {
            writeln!(document, "[[account]]\nid = \"{account}\"").unwrap();
        }
        let account_line = format!("account = \"{account}\"");
        if number % OF_SERVICE == 0 {
            writeln!(document, "[[service]]\n{account_line}\nid = \"{service}\"").unwrap();
        }
        let name = format!("d{number}.customer.test");
        writeln!(document, "[[domain]]\n{account_line}\nname = \"{name}\"").unwrap();
        writeln!(document, "service = \"{service}\"").unwrap();
        let host = format!("{account}--{service}.eu1.gw.localhost");
        records.push(format!("add {name} 1 CNAME {host}"));
    }
    (document, records)
}

/// Waits until all domains have a certificate. Another one must come soon enough each time.
fn await_certificates(domains: usize, issued: impl Fn() -> usize) {
    let mut before = 0;
    while before < domains {
        before = eventually("another certificate", || {
            Some(issued()).filter(|now| *now > before)
        });
    }
}

#[test]
fn domains_that_are_added_at_once_get_their_certificates_by_one_order_each() {
    let domains = number_of_domains(DOMAINS);
    let Some(setup) = Setup::new() else {
        return;
    };
    let (document, records) = declared(domains);
    for records in records.chunks(OF_ACCOUNT) {
        let records: Vec<&str> = records.iter().map(String::as_str).collect();
        setup.named.update(&records);
    }
    let file = setup.prepared.path("domains.toml");
    fs::write(&file, document).unwrap();
    let began = Instant::now();
    let apply = ["apply", "--file", file.to_str().unwrap()];
    setup.command(&apply).unwrap();
    let valid = || {
        let metrics = setup.served.metrics();
        metrics.count_with("gw_own_domain_certificates", "state=\"valid\"") as usize
    };
    await_certificates(domains, valid);
    let orders = setup.front.requests(Kind::NewOrder).len();
    report(domains, began, orders);
    assert_eq!(orders, domains);
}

#[test]
fn orders_go_on_while_all_nodes_of_a_region_are_replaced() {
    if !usable(&PROGRAMS) {
        return;
    }
    let named = Named::start("");
    let balancer = Balancer::start(Vec::new()).unwrap();
    let mut options = Options::new(named.address);
    options.tls_port = balancer.address.port();
    let pebble = Pebble::start(options);
    let front = Front::start(&pebble);
    front.set(keep_pending);
    let configuration = format!(
        "dns_servers = [\"{}\"]\nacme.directory = {:?}\nacme.ca_file = {:?}\n\
         acme.terms_accepted = true\n",
        named.address,
        front.directory(),
        pebble.ca_file()
    );
    let Some(region) = Region::start_with(3, false, &configuration) else {
        return;
    };
    balancer.set((0..3).map(|node| region.node(node).address).collect());
    let domains = number_of_domains(DURING_REPLACEMENTS);
    let began = Instant::now();
    for number in 0..domains {
        let service = format!("s{}", number / OF_SERVICE);
        if number % OF_SERVICE == 0 {
            region.api(0).create_service("demo", &service);
        }
        let name = format!("d{number}.customer.test");
        let hostname = format!("demo--{service}.eu1.gw.localhost");
        named.update(&[&format!("add {name} 1 CNAME {hostname}")]);
        let path = format!("/accounts/demo/services/{service}/domains");
        region.api(0).post(&path, &json!({ "name": name }));
    }
    front.await_different(Kind::Challenge, OPEN);
    let _successors = [0, 1, 2].map(|node| {
        let replaced = region.node(node);
        replace(replaced.process.id(), &replaced.log)
    });
    front.set(|_| Verdict::Forward);
    let with_certificate = || {
        let listed = region.api(0).list("/accounts/demo/domains?limit=100");
        let has_one = |it: &&Value| it["certificate"]["source"] == "acme";
        listed.iter().filter(has_one).count()
    };
    await_certificates(domains, with_certificate);
    let orders = front.requests(Kind::NewOrder).len();
    report(domains, began, orders);
    assert_eq!(orders, domains, "one for each");
}
