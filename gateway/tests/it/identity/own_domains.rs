//! Own domains: proofs in DNS, certificates of an ACME authority and uploaded ones, and names that
//! must not be served.

mod connections;
mod kills;
mod lost_proofs;
mod many_orders;
mod nodes;
mod pending_orders;
mod quota;
mod rate_limits;
mod renewals;
mod reused_accounts;
mod service_settings;
mod setup;
mod uploads;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use gw_local_region::Balancer;
use rustls::client::{
    ClientSessionMemoryCache, ClientSessionStore, Resumption, Tls12ClientSessionValue,
    Tls13ClientSessionValue,
};
use rustls::{ClientConfig, HandshakeKind, NamedGroup};
use rustls_pki_types::ServerName;
use serde_json::{Value, json};

use self::setup::{Changes, Pair, Setup, open};
use crate::support::acme_servers::free_address;
use crate::support::acme_servers::named::Named;
use crate::support::acme_servers::pebble::{Options, Pebble};
use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::peers::caller::{HOST, client_config_of};
use crate::support::processes::region::Region;
use crate::support::programs::usable;
use crate::support::stopwatch::within_a_second;

const PROGRAMS: [&str; 3] = ["pebble", "named", "curl"];
const DOMAIN: &str = "api.customer.test";
const OTHER: &str = "shop.customer.test";

#[test]
fn a_domain_is_served_once_dns_proves_it_and_an_authority_has_issued_its_certificate() {
    let Some(setup) = Setup::new() else {
        return;
    };
    let added = setup.add(DOMAIN).unwrap();
    assert_eq!(added["status"], "pending", "{added}");
    assert_eq!(added["cname"], json!({ "name": DOMAIN, "value": HOST }));
    let finding = added["finding"].as_str().unwrap();
    assert!(finding.contains(HOST), "{finding}");
    // The caller does not trust the certificate of the region.
    assert_eq!(setup.get(DOMAIN).0, "000");

    setup.lead_here(DOMAIN);
    let checked = setup.check(DOMAIN);
    assert_eq!(checked["status"], "active", "{checked}");
    setup.await_certificate(DOMAIN);
    // The backend sees the name.
    let host = format!("{DOMAIN}:{}", setup.address().port());
    assert_eq!(setup.get(DOMAIN), ("200".to_owned(), host));
    // A request may have the name in any case, with a port or a final dot.
    let config = setup.caller(&[b"http/1.1"]);
    let mut caller = setup.connect(&config, DOMAIN).unwrap();
    for host in [
        "API.customer.TEST",
        "api.customer.test.",
        "api.customer.test:443",
    ] {
        assert_eq!(setup.ask(&mut caller, host), 200, "{host}");
    }

    setup.remove(DOMAIN);
    let refused = "the open connection refuses the domain";
    within_a_second(refused, || {
        eventually(refused, || {
            (setup.ask(&mut caller, DOMAIN) == 421).then_some(())
        });
    });
    assert_eq!(setup.show(DOMAIN), Value::Null);
}

#[test]
fn a_txt_record_proves_a_domain_and_a_domain_that_loses_its_proof_is_served_for_a_while() {
    let Some(setup) = Setup::new() else {
        return;
    };
    let added = setup.add(DOMAIN).unwrap();
    let (name, token) = (&added["txt"]["name"], &added["txt"]["value"]);
    let (name, token) = (name.as_str().unwrap(), token.as_str().unwrap());
    assert_eq!(name, format!("_gw-domain.{DOMAIN}"));
    let delete = format!("delete {name} TXT");
    let add = format!("add {name} 1 TXT \"{token}\"");
    setup.named.update(&[&add]);
    let checked = setup.check(DOMAIN);
    assert_eq!(checked["status"], "active", "{checked}");

    let another = format!("add {name} 1 TXT \"gw-another\"");
    setup.named.update(&[&delete, &another]);
    let checked = setup.check(DOMAIN);
    assert_eq!(checked["status"], "lost", "{checked}");
    assert!(checked["served_until"].is_string());
    let warning = "the proof of an own domain has changed";
    setup.served.log.line_with(warning);
    // The domain's address is not this gateway, so it has no certificate, and the listener shows
    // another one.
    assert!(setup.connect(&setup.caller_of_region(), DOMAIN).is_none());

    setup.named.update(&[&add]);
    assert_eq!(setup.check(DOMAIN)["status"], "active");
}

#[test]
fn names_that_no_service_can_have_are_refused() {
    let Some(setup) = Setup::new() else {
        return;
    };
    for (name, cause) in [
        ("eu1.gw.localhost", "is a name of the region"),
        ("other--api.eu1.gw.localhost", "is a name of the region"),
        ("a.b.eu1.gw.localhost", "is a name of the region"),
        ("*.customer.test", "is not the name of a domain"),
        ("API.customer.test", "is not the name of a domain"),
        ("b\u{fc}cher.example", "A-labels"),
        ("192.0.2.1", "is not the name of a domain"),
        ("localhost", "at least two labels"),
    ] {
        let error = setup.add(name).unwrap_err();
        assert!(error.contains(cause), "{name}: {error}");
    }
}

#[test]
fn a_domain_moves_to_another_account_once_its_holder_does_not_prove_it() {
    let Some(setup) = Setup::new() else {
        return;
    };
    setup.serve(DOMAIN);
    setup.api().create_service("rival", "api");
    let add = |domain: &str| setup.add_to(["rival", "api"], domain);
    let error = add(DOMAIN).unwrap_err();
    let reason = "another service has it, so a proof is needed";
    assert!(error.contains(reason), "{error}");
    for action in ["remove", "check"] {
        let other = setup.command(&["domain", action, "rival", DOMAIN]);
        assert!(other.is_err(), "{action}");
    }

    // Both claims are proved: the holder keeps the name.
    let token = add("x.customer.test").unwrap()["txt"]["value"].take();
    let record = format!("add _gw-domain.{DOMAIN} 1 TXT {token}");
    setup.named.update(&[&record]);
    let error = add(DOMAIN).unwrap_err();
    let reason = "still proves it for another service";
    assert!(error.contains(reason), "{error}");
    // The record of the holder is gone: the name moves. The key of the holder stays with it.
    setup.named.update(&[&format!("delete {DOMAIN} CNAME")]);
    let moved = add(DOMAIN).unwrap();
    assert_eq!(moved["status"], "active", "{moved}");
    assert_eq!(moved["account"], "rival", "{moved}");
    assert_eq!(moved.get("certificate"), None);
    assert_eq!(setup.show(DOMAIN), Value::Null);
}

#[test]
fn a_connection_for_one_domain_serves_no_other_name() {
    let Some(setup) = Setup::new() else {
        return;
    };
    setup.serve(DOMAIN);
    setup.serve(OTHER);
    let config = setup.caller(&[b"http/1.1"]);
    let mut caller = setup.connect(&config, DOMAIN).unwrap();
    assert_eq!(setup.ask(&mut caller, DOMAIN), 200);
    for host in [OTHER, HOST, "eu1.gw.localhost", "unknown.customer.test"] {
        assert_eq!(setup.ask(&mut caller, host), 421, "{host}");
    }
    // A connection for a name of the region does not serve the domain either.
    let mut caller = setup.connect(&setup.caller_of_region(), HOST).unwrap();
    assert_eq!(setup.ask(&mut caller, DOMAIN), 421);
    assert_eq!(setup.ask(&mut caller, HOST), 200);
    tickets_resume_for_their_name_alone(&setup, &config);

    // Handshakes of challenges are answered for open orders only.
    let challenge = setup.caller(&[b"acme-tls/1"]);
    for name in [DOMAIN, "unknown.customer.test", "eu1.gw.localhost"] {
        assert!(setup.connect(&challenge, name).is_none(), "{name}");
    }
}

fn tickets_resume_for_their_name_alone(setup: &Setup, config: &ClientConfig) {
    let kind = |name: &str, store: Arc<dyn ClientSessionStore>| {
        let mut config = config.clone();
        config.resumption = Resumption::store(store);
        let mut caller = setup.connect(&Arc::new(config), name).unwrap();
        assert_eq!(setup.ask(&mut caller, name), 200);
        caller.stream.conn.handshake_kind().unwrap()
    };
    let tickets = Arc::new(ClientSessionMemoryCache::new(8));
    assert_eq!(kind(DOMAIN, tickets.clone()), HandshakeKind::Full);
    assert_eq!(kind(DOMAIN, tickets.clone()), HandshakeKind::Resumed);
    let crossing = Arc::new(Crossing(tickets, DOMAIN));
    assert_eq!(kind(OTHER, crossing), HandshakeKind::Full);
}

/// Offers the tickets of one name to every server.
#[derive(Debug)]
struct Crossing(Arc<ClientSessionMemoryCache>, &'static str);

impl ClientSessionStore for Crossing {
    fn set_kx_hint(&self, _: ServerName<'static>, _: NamedGroup) {}

    fn kx_hint(&self, _: &ServerName<'_>) -> Option<NamedGroup> {
        None
    }

    fn set_tls12_session(&self, _: ServerName<'static>, _: Tls12ClientSessionValue) {}

    fn tls12_session(&self, _: &ServerName<'_>) -> Option<Tls12ClientSessionValue> {
        None
    }

    fn remove_tls12_session(&self, _: &ServerName<'static>) {}

    fn insert_tls13_ticket(&self, _: ServerName<'static>, _: Tls13ClientSessionValue) {}

    fn take_tls13_ticket(&self, _: &ServerName<'static>) -> Option<Tls13ClientSessionValue> {
        let name = ServerName::try_from(self.1).unwrap();
        let ticket = self.0.take_tls13_ticket(&name);
        assert!(ticket.is_some(), "a ticket is offered");
        ticket
    }
}

#[test]
fn an_uploaded_certificate_is_served_and_checked_first() {
    let Some(setup) = Setup::new() else {
        return;
    };
    let [good, other] = [DOMAIN, OTHER].map(|domain| Pair::write(&setup.prepared, domain, |_| {}));
    let upload = |certificate: &Path, key: &Path| setup.try_upload(DOMAIN, certificate, key);
    let error = upload(&good.certificate, &good.key).unwrap_err();
    let reason = "no domain api.customer.test of account demo";
    assert!(error.contains(reason), "{error}");
    setup.lead_here(DOMAIN);
    setup.add(DOMAIN).unwrap();
    let is_for_other = "is for shop.customer.test, and not for api.customer.test";
    let is_no_match = "the key does not match the certificate";
    for (certificate, key, cause) in [
        (&other.certificate, &other.key, is_for_other),
        (&good.certificate, &other.key, is_no_match),
        (&good.key, &good.key, "no certificate"),
    ] {
        let error = upload(certificate, key).unwrap_err();
        assert!(error.contains(cause), "{error}");
    }
    setup.upload(DOMAIN, &good);
    eventually("the uploaded certificate is served", || {
        (setup.get(DOMAIN).0 == "200").then_some(())
    });
}

#[test]
fn every_node_of_a_region_serves_a_domain_and_answers_its_challenge() {
    if !usable(&PROGRAMS) {
        return;
    }
    // The authority connects to one node after the other.
    let balancer = Balancer::start(Vec::new()).unwrap();
    let named = Named::start("");
    let mut options = Options::new(named.address);
    options.tls_port = balancer.address.port();
    let pebble = Pebble::start(options);
    let configuration = format!(
        "dns_servers = [\"{}\"]\nacme.directory = {:?}\nacme.ca_file = {:?}\n\
         acme.terms_accepted = true\n",
        named.address,
        pebble.directory(),
        pebble.ca_file(),
    );
    let Some(region) = Region::start_with(2, false, &configuration) else {
        return;
    };
    balancer.set((0..2).map(|node| region.node(node).address).collect());
    let backend = backend::answering("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    let _agent = region.run_agent(&backend);
    region.owner();
    let domains = [DOMAIN, OTHER, "a.customer.test"];
    for domain in domains {
        named.update(&[&format!("add {domain} 1 CNAME {HOST}")]);
        let path = "/accounts/demo/services/echo/domains";
        let added = region.api(0).post(path, &json!({ "name": domain }));
        assert_eq!(added["status"], "active", "{added}");
    }
    let root = region.data(0).with_file_name("root.pem");
    fs::write(&root, pebble.issuing_root()).unwrap();
    let config = client_config_of(rustls::DEFAULT_VERSIONS, &root, &[b"http/1.1"], None);
    let config = Arc::new(config);
    for domain in domains {
        for node in 0..2 {
            let mut caller = eventually("the certificate of the domain", || {
                open(&config, domain, &region.about(node))
            });
            let key = region.service_key();
            caller.send(format!(
                "GET / HTTP/1.1\r\nHost: {domain}\r\nX-Gw-Service-Key: {key}\r\n\r\n"
            ));
            assert_eq!(caller.response().status, 200, "{domain} at node {node}");
        }
    }
    assert_eq!(pebble.count("orders in the db"), domains.len());
}

#[test]
fn port_80_proves_and_redirects_a_domain_whose_tls_ends_elsewhere() {
    let plain = free_address();
    let Some(setup) = Setup::with(Changes {
        // Nothing listens where the authority connects for a proof in a handshake.
        tls_port: Some(free_address().port()),
        plain: Some(plain),
        ..Changes::default()
    }) else {
        return;
    };
    setup.lead_here(DOMAIN);
    setup.add(DOMAIN).unwrap();
    let refused = eventually("a refused order", || {
        let shown = setup.show(DOMAIN);
        (shown["failures"] == 1).then_some(shown)
    });
    let failure = refused["last_failure"].as_str().unwrap();
    assert!(failure.contains("refused"), "{failure}");
    // The next order is proved in plain HTTP. A check ends the wait of a minute before it.
    setup.check(DOMAIN);
    setup.await_certificate(DOMAIN);
    assert_eq!(setup.get(DOMAIN).0, "200");

    let output = Command::new("curl")
        .args(["--silent", "--output", "/dev/null"])
        .args(["--write-out", "%{http_code} %{redirect_url}"])
        .args(["--resolve", &format!("{DOMAIN}:{}:127.0.0.1", plain.port())])
        .arg(format!("http://{DOMAIN}:{}/a?b=c", plain.port()))
        .output()
        .unwrap();
    let port = setup.address().port();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text, format!("308 https://{DOMAIN}:{port}/a?b=c"));
}
