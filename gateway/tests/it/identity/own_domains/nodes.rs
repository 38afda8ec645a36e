//! Domains that are removed at one node of a region, and connections for them at other nodes and
//! processes.

use std::fs;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use serde_json::json;

use super::setup::{Pair, Setup, open};
use super::{DOMAIN, OTHER};
use crate::support::acme_servers::named::Named;
use crate::support::eventually;
use crate::support::peers::caller::{Caller, HOST, client_config_of};
use crate::support::peers::held_backend::HeldBackend;
use crate::support::processes::kept_connection::KeptConnection;
use crate::support::processes::region::Region;
use crate::support::processes::successor::replace;
use crate::support::programs::usable;
use crate::support::stopwatch::within;

/// Longest time until a removal is in force everywhere.
const REMOVED_WITHIN: Duration = Duration::from_secs(5);
/// Connections to a process that drains, each for one request.
const KEPT: usize = 20;

/// A request for `domain`.
fn get(service_key: &str, domain: &str, target: &str) -> String {
    format!("GET {target} HTTP/1.1\r\nHost: {domain}\r\nX-Gw-Service-Key: {service_key}\r\n\r\n")
}

fn ask(region: &Region, caller: &mut Caller, domain: &str) -> u16 {
    caller.send(get(region.service_key(), domain, "/"));
    caller.response().status.as_u16()
}

/// Adds a domain with an uploaded certificate at a node. Returns a way to connect for it to another
/// one.
fn serve(
    region: &Region,
    named: &Named,
    domain: &'static str,
    [node, another]: [usize; 2],
) -> impl Fn() -> Option<Caller> {
    named.update(&[&format!("add {domain} 1 CNAME {HOST}")]);
    let path = "/accounts/demo/services/echo/domains";
    let added = region.api(node).post(path, &json!({ "name": domain }));
    assert_eq!(added["status"], "active", "{added}");
    let folder = region.data(0);
    let pair = Pair::write_in(&folder, domain, |_| {});
    let [chain, key] = [&pair.certificate, &pair.key].map(|it| fs::read_to_string(it).unwrap());
    let path = format!("/accounts/demo/domains/{domain}/certificate");
    region
        .api(node)
        .post(&path, &json!({ "chain": chain, "key": key }));
    let versions = rustls::DEFAULT_VERSIONS;
    let config = client_config_of(versions, &pair.certificate, &[b"http/1.1"], None);
    let config = Arc::new(config);
    let about = region.about(another);
    let connect = move || open(&config, domain, &about);
    eventually("a handshake at another node", &connect);
    connect
}

/// Removes a domain at a node.
fn remove(region: &Region, domain: &str, node: usize) {
    let api = region.api(node);
    api.delete(&format!("/accounts/demo/domains/{domain}"));
}

/// Sends a request on one connection after the other until one is refused. A process that drains
/// ends each with its response.
fn await_refusal(kept: Vec<KeptConnection>, request: &str) {
    let pause = REMOVED_WITHIN / u32::try_from(KEPT).unwrap();
    for mut kept in kept {
        match kept.ask(request).status.as_u16() {
            200 => thread::sleep(pause),
            status => return assert_eq!(status, 421),
        }
    }
    panic!("no connection refuses the domain");
}

/// Connections to a process that is replaced later.
fn keep(connect: impl Fn() -> Option<Caller>, request: &str) -> Vec<KeptConnection> {
    let begin = |_| KeptConnection::begin(connect().unwrap(), request);
    (0..KEPT).map(begin).collect()
}

/// Asserts that a predecessor, which has the connections, refuses the domain soon after `remove`.
fn assert_refused(mut kept: Vec<KeptConnection>, request: &str, remove: impl FnOnce()) {
    let mut old = kept.pop().unwrap();
    assert_eq!(old.ask(request).status, 200, "the predecessor serves");
    remove();
    within(REMOVED_WITHIN, "a removal at a predecessor", || {
        await_refusal(kept, request);
    });
}

#[test]
fn a_domain_that_is_removed_at_a_node_is_refused_at_another_and_by_its_predecessor() {
    if !usable(&["named", "postgresql"]) {
        return;
    }
    let named = Named::start("");
    let configuration = format!("dns_servers = [\"{}\"]\n", named.address);
    let Some(region) = Region::start_with(2, false, &configuration) else {
        return;
    };
    let backend = HeldBackend::start();
    let _agent = region.run_agent(&backend.url);
    // Connections are to the owner of the service: other nodes ask it, and it looks at the name of
    // a request, too.
    let owner = region.owner();
    let nodes = [1 - owner, owner];
    let connect = serve(&region, &named, DOMAIN, nodes);
    the_domain_is_refused_at_another_node(&region, nodes[0], connect);
    let connect = serve(&region, &named, OTHER, nodes);
    the_domain_is_refused_by_a_predecessor(&region, nodes, &backend, connect);
}

fn the_domain_is_refused_at_another_node(
    region: &Region,
    node: usize,
    connect: impl Fn() -> Option<Caller>,
) {
    let mut kept = connect().unwrap();
    assert_eq!(ask(region, &mut kept, DOMAIN), 200);
    remove(region, DOMAIN, node);
    within(REMOVED_WITHIN, "a removal at another node", || {
        eventually("the open connection refuses the domain", || {
            (ask(region, &mut kept, DOMAIN) == 421).then_some(())
        });
        eventually("no handshake has the certificate of the domain", || {
            connect().is_none().then_some(())
        });
    });
}

fn the_domain_is_refused_by_a_predecessor(
    region: &Region,
    [node, owner]: [usize; 2],
    backend: &HeldBackend,
    connect: impl Fn() -> Option<Caller>,
) {
    // A request that runs keeps the predecessor.
    let mut running = connect().unwrap();
    let request = get(region.service_key(), OTHER, "/");
    let kept = keep(connect, &request);
    running.send(get(region.service_key(), OTHER, "/held"));
    backend.wait_for_held();
    let replaced = region.node(owner);
    let _successor = replace(replaced.process.id(), &replaced.log);
    assert_refused(kept, &request, || remove(region, OTHER, node));
    backend.release();
    assert_eq!(running.response().status, 200);
}

#[test]
fn a_domain_that_is_removed_is_refused_by_a_predecessor() {
    let Some(setup) = Setup::new() else {
        return;
    };
    setup.serve_uploaded(DOMAIN);
    let config = setup.caller(&[b"http/1.1"]);
    let request = get(setup.prepared.service_key(), DOMAIN, "/");
    let kept = keep(|| setup.connect(&config, DOMAIN), &request);
    let _successor = replace(setup.served.process.id(), &setup.served.log);
    assert_refused(kept, &request, || setup.remove(DOMAIN));
}
