//! Orders that another process goes on with, or whose proof another process shows.

use std::fs;
use std::path::PathBuf;

use serde_json::json;

use super::passage::Passage;
use super::{Connection, PROGRAMS, Prepared};
use crate::support::acme_front::{Front, Kind, Verdict};
use crate::support::acme_servers::named::Named;
use crate::support::acme_servers::pebble::{Options, Pebble};
use crate::support::eventually;
use crate::support::processes::process::{Log, send_signal};
use crate::support::processes::region::Region;
use crate::support::processes::successor::replace;
use crate::support::programs::usable;

const APEX_OF_NODES: &str = "eu1.gw.localhost";
/// Orders until the authority asks for a proof. Pebble accepts an earlier one for one order in a
/// hundred, also with `PEBBLE_AUTHZREUSE=0`.
const ORDERS_MAX: usize = 10;

/// Nodes that prove their apex in handshakes, at an authority whose connections go through a
/// passage.
struct Nodes {
    region: Region,
    passage: Passage,
    pebble: Pebble,
    /// Between the nodes and the authority.
    front: Front,
    root: PathBuf,
    _named: Named,
}

impl Nodes {
    /// A region without nodes; `None` without PostgreSQL or the programs.
    fn none_yet() -> Option<Self> {
        if !usable(&PROGRAMS) {
            return None;
        }
        let named = Named::start("");
        let passage = Passage::closed();
        let mut options = Options::new(named.address);
        options.tls_port = passage.port();
        let pebble = Pebble::start(options);
        let front = Front::start(&pebble);
        let configuration = format!(
            "tls = \"acme\"\nacme.directory = {:?}\nacme.ca_file = {:?}\n\
             acme.terms_accepted = true\nacme.challenge = \"tls-alpn\"\ndns_servers = [\"{}\"]\n",
            front.directory(),
            pebble.ca_file(),
            named.address,
        );
        let region = Region::start_with(0, false, &configuration)?;
        let root = region.data(0).with_file_name("root.pem");
        fs::write(&root, pebble.issuing_root()).unwrap();
        Some(Self {
            region,
            passage,
            pebble,
            front,
            root,
            _named: named,
        })
    }

    /// A region of two nodes, the first of which has ordered. The authority connects to it.
    fn two() -> Option<Self> {
        let mut nodes = Self::none_yet()?;
        nodes.region.add();
        nodes.passage.lead_to(nodes.region.node(0).address);
        nodes.region.add();
        nodes.region.wait_for_members(2);
        nodes.await_issue(0);
        Some(nodes)
    }

    /// The certificate of a node, if it is of the authority.
    fn certificate(&self, node: usize) -> Option<Vec<u8>> {
        let address = self.region.node(node).address;
        Some(Connection::open_to(&self.root, APEX_OF_NODES, address)?.certificate())
    }

    /// Renews the certificate until the authority connects for the proof, and returns the number of
    /// orders.
    #[track_caller]
    fn renew_with_proof(&self) -> usize {
        for order in 1..=ORDERS_MAX {
            let used = eventually("a certificate", || self.certificate(0));
            let before = self.passage.came();
            self.region.api(1).post("/certificates/renew", &json!({}));
            let is_proved = eventually("the authority connects or issues", || {
                let is_issued = self.certificate(0).is_some_and(|found| found != used);
                let has_come = self.passage.came() > before;
                (has_come || is_issued).then_some(has_come)
            });
            if is_proved {
                return order;
            }
        }
        panic!("the authority asked for no proof in {ORDERS_MAX} orders");
    }

    /// Waits until a node stores the end of an order.
    #[track_caller]
    fn await_issue(&self, node: usize) {
        let log = &self.region.node(node).log;
        log.find(|line| (line["action"] == "certificate.issue").then_some(()));
    }
}

#[test]
fn a_node_shows_the_proof_of_an_order_of_another_node() {
    let Some(nodes) = Nodes::two() else {
        return;
    };
    let [first, _] = [0, 1].map(|node| {
        eventually("the first certificate on each node", || {
            nodes.certificate(node)
        })
    });

    // The first node has the lease and orders; the authority connects to the other one.
    nodes.passage.lead_to(nodes.region.node(1).address);
    let renewals = nodes.renew_with_proof();
    // The log may leave out lines of further orders.
    if renewals == 1 {
        nodes.await_issue(0);
    }
    eventually("the renewed certificate on both nodes", || {
        let [here, there] = [0, 1].map(|node| nodes.certificate(node));
        (here.as_ref() != Some(&first) && here == there).then_some(())
    });
    assert_eq!(nodes.pebble.count("accounts in memory"), 1);
    assert_eq!(nodes.pebble.count("orders in the db"), 1 + renewals);
}

#[test]
fn a_node_goes_on_with_the_order_of_a_lost_node() {
    let Some(mut nodes) = Nodes::two() else {
        return;
    };
    eventually("the first certificate", || nodes.certificate(1));

    nodes.passage.close();
    let renewals = nodes.renew_with_proof();
    let used = eventually("one certificate on both nodes", || {
        let found = nodes.certificate(1);
        (found == nodes.certificate(0)).then_some(found)
    });
    nodes.region.kill(0);
    // The proof is in the records, so that the other node shows it at once. It orders once the
    // first node is declared dead.
    nodes.passage.lead_to(nodes.region.node(1).address);
    eventually("the renewed certificate", || {
        nodes
            .certificate(1)
            .filter(|found| Some(found) != used.as_ref())
    });
    assert_eq!(nodes.pebble.count("accounts in memory"), 1);
    let orders = nodes.pebble.count("orders in the db");
    assert_eq!(orders, 1 + renewals, "the same order");
}

#[test]
fn an_issued_certificate_is_fetched_after_all_nodes_were_replaced() {
    let Some(nodes) = Nodes::two() else {
        return;
    };
    let used = eventually("the first certificate", || nodes.certificate(1));
    let fetches = || nodes.front.requests(Kind::Certificate).len();
    let before = fetches();
    nodes.front.set(|request| match request.kind {
        Kind::Certificate => Verdict::Hold,
        _ => Verdict::Forward,
    });
    nodes.region.api(1).post("/certificates/renew", &json!({}));
    eventually("the certificate is issued", || {
        (fetches() > before).then_some(())
    });
    let _successors = [0, 1].map(|node| {
        let replaced = nodes.region.node(node);
        replace(replaced.process.id(), &replaced.log)
    });
    eventually("a successor fetches the certificate", || {
        (fetches() > before + 1).then_some(())
    });
    nodes.front.set(|_| Verdict::Forward);
    eventually("the renewed certificate", || {
        nodes.certificate(1).filter(|found| *found != used)
    });
    assert_eq!(nodes.pebble.count("orders in the db"), 2);
}

#[test]
fn a_successor_goes_on_with_the_order_of_its_predecessor() {
    let passage = Passage::closed();
    let Some(prepared) = Prepared::with_handshakes(0, passage.port()) else {
        return;
    };
    let served = prepared.serve();
    passage.await_more_than(0);
    // The authority waits for the answer of the listener.
    let _successor = replace(served.process.id(), &served.log);
    passage.lead_to(served.address);
    prepared.await_certificate(&served, &[]);
    prepared.await_valid(&served);
    assert_eq!(prepared.certificate(&served)["failures"], 0);
    assert_eq!(prepared.pebble.count("orders in the db"), 1);
    assert_eq!(prepared.pebble.count("accounts in memory"), 1);
}

#[test]
fn the_authority_is_told_once_all_live_nodes_use_the_proof() {
    let Some(nodes) = Nodes::two() else {
        return;
    };

    // The other node takes part in the region, and answers nothing.
    let other = nodes.region.node(1).process.id();
    assert!(send_signal(other, "STOP"));
    let before = nodes.passage.came();
    let is_published = (0..ORDERS_MAX).any(|_| {
        nodes.region.api(0).post("/certificates/renew", &json!({}));
        await_publication(&nodes.region.node(0).log)
    });
    assert!(is_published, "the authority asks for a proof");
    nodes.passage.await_more_than(before);
    let status = nodes.region.status(0);
    let others = status["nodes"].as_array().unwrap().iter();
    let states: Vec<_> = others.map(|node| &node["state"]).collect();
    assert_eq!(states, ["live", "dead"], "{status}");
}

/// Waits until the proof of an order is published. Returns `false` if the authority issues without
/// one.
#[track_caller]
fn await_publication(log: &Log) -> bool {
    // The order, its proof, and the time of its publication.
    const STEPS: usize = 3;
    let mut steps = 0;
    log.find(|line| {
        steps += usize::from(line["action"] == "certificate.order");
        let is_issued = line["action"] == "certificate.issue";
        (is_issued || steps == STEPS).then_some(!is_issued)
    })
}

#[test]
fn the_authority_is_told_once_a_draining_predecessor_uses_the_proof() {
    let passage = Passage::closed();
    let Some(prepared) = Prepared::with_handshakes(0, passage.port()) else {
        return;
    };
    let served = prepared.serve();
    passage.lead_to(served.address);
    prepared.await_certificate(&served, &[]);
    // A request that does not end keeps the predecessor.
    let mut caller = Connection::open(&prepared, served.address).unwrap();
    caller.begin_request();
    let predecessor = served.process.id();
    let _successor = replace(predecessor, &served.log);
    assert!(send_signal(predecessor, "STOP"));
    let is_published = (0..ORDERS_MAX).any(|_| {
        prepared.command(&served, "renew");
        await_publication(&served.log)
    });
    assert!(is_published, "the authority asks for a proof");
    let before = passage.came();
    // A change is answered a second later, because the predecessor does not use it.
    prepared.command(&served, "renew");
    served.log.line_with("a change is not in use at all nodes");
    assert_eq!(passage.came(), before);
    assert!(send_signal(predecessor, "CONT"));
    passage.await_more_than(before);
    prepared.await_valid(&served);
    assert_eq!(prepared.certificate(&served)["failures"], 0);
}
