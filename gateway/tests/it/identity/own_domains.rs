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
use std::process::Command;
use std::sync::Arc;

use gw_local_region::Balancer;
use rcgen::{CertificateParams, KeyPair};
use rustls::client::{
    ClientSessionMemoryCache, ClientSessionStore, Resumption, Tls12ClientSessionValue,
    Tls13ClientSessionValue,
};
use rustls::{ClientConfig, HandshakeKind, NamedGroup};
use rustls_pki_types::ServerName;
use serde_json::{Value, json};

use self::setup::{Changes, Setup, open};
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
    if !usable(&PROGRAMS) {
        return;
    }
    let setup = Setup::new();
    let added = setup.add(DOMAIN).unwrap();
    assert_eq!(added["status"], "pending", "{added}");
    assert_eq!(added["cname"], json!({ "name": DOMAIN, "value": HOST }));
    let finding = added["finding"].as_str().unwrap();
    assert!(
        finding.contains(&format!("{DOMAIN}. CNAME {HOST}.")) || finding.contains(HOST),
        "{finding}"
    );
    assert_eq!(
        setup.get(DOMAIN).0,
        "000",
        "nothing trusts the certificate of the region"
    );

    setup
        .named
        .update(&[&format!("add {DOMAIN} 1 CNAME {HOST}")]);
    let checked = setup.command(&["domain", "check", "demo", DOMAIN]).unwrap();
    assert_eq!(checked["status"], "active", "{checked}");
    setup.await_certificate(DOMAIN);
    let (status, host) = setup.get(DOMAIN);
    assert_eq!(status, "200");
    assert_eq!(
        host,
        format!("{DOMAIN}:{}", setup.address().port()),
        "the backend sees the name"
    );
    // The name counts in any case, with a port and a final dot.
    let mut caller = setup
        .connect(&setup.caller(&[b"http/1.1"]), DOMAIN)
        .unwrap();
    for host in [
        "API.customer.TEST",
        "api.customer.test.",
        "api.customer.test:443",
    ] {
        assert_eq!(setup.ask(&mut caller, host), 200, "{host}");
    }

    setup
        .command(&["domain", "remove", "demo", DOMAIN])
        .unwrap();
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
    if !usable(&PROGRAMS) {
        return;
    }
    let setup = Setup::new();
    let added = setup.add(DOMAIN).unwrap();
    let (name, token) = (&added["txt"]["name"], &added["txt"]["value"]);
    let (name, token) = (name.as_str().unwrap(), token.as_str().unwrap());
    assert_eq!(name, format!("_gw-domain.{DOMAIN}"));
    setup
        .named
        .update(&[&format!("add {name} 1 TXT \"{token}\"")]);
    let checked = setup.command(&["domain", "check", "demo", DOMAIN]).unwrap();
    assert_eq!(checked["status"], "active", "{checked}");

    setup.named.update(&[
        &format!("delete {name} TXT"),
        &format!("add {name} 1 TXT \"gw-another\""),
    ]);
    let checked = setup.command(&["domain", "check", "demo", DOMAIN]).unwrap();
    assert_eq!(checked["status"], "lost", "{checked}");
    assert!(checked["served_until"].is_string());
    let warnings = &setup.served.log;
    warnings.line_with("the proof of an own domain has changed");
    let callers = Arc::new(client_config_of(
        rustls::DEFAULT_VERSIONS,
        &setup.prepared.path("data/dev-ca.crt"),
        &[b"http/1.1"],
        None,
    ));
    // Its address does not lead here, so it has no certificate; the listener answers for it all the
    // same.
    assert!(setup.connect(&callers, DOMAIN).is_none());

    setup
        .named
        .update(&[&format!("add {name} 1 TXT \"{token}\"")]);
    let checked = setup.command(&["domain", "check", "demo", DOMAIN]).unwrap();
    assert_eq!(checked["status"], "active");
}

#[test]
fn names_of_others_are_refused() {
    if !usable(&PROGRAMS) {
        return;
    }
    let setup = Setup::new();
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

    setup.serve(DOMAIN);
    setup.command(&["account", "create", "rival"]).unwrap();
    setup
        .command(&["service", "create", "rival", "api"])
        .unwrap();
    let taken = setup.command(&["domain", "add", "rival", "api", DOMAIN]);
    let error = taken.unwrap_err();
    assert!(
        error.contains("another service has it, so a proof is needed"),
        "{error}"
    );
    for action in ["remove", "check"] {
        let other = setup.command(&["domain", action, "rival", DOMAIN]);
        assert!(other.is_err(), "{action}");
    }

    // Both claims are proved: the holder keeps the name.
    let token = setup
        .command(&["domain", "add", "rival", "api", "x.customer.test"])
        .unwrap();
    let token = token["txt"]["value"].as_str().unwrap().to_owned();
    setup
        .named
        .update(&[&format!("add _gw-domain.{DOMAIN} 1 TXT \"{token}\"")]);
    let error = setup
        .command(&["domain", "add", "rival", "api", DOMAIN])
        .unwrap_err();
    assert!(
        error.contains("still proves it for another service"),
        "{error}"
    );
    // The record of the holder is gone: the name moves.
    setup.named.update(&[&format!("delete {DOMAIN} CNAME")]);
    let moved = setup
        .command(&["domain", "add", "rival", "api", DOMAIN])
        .unwrap();
    assert_eq!(
        (&moved["status"], &moved["account"]),
        (&json!("active"), &json!("rival"))
    );
    assert!(
        moved.get("certificate").is_none(),
        "the key of the holder stays with it"
    );
    assert_eq!(setup.show(DOMAIN), Value::Null);
}

#[test]
fn a_connection_for_one_domain_serves_no_other_name() {
    if !usable(&PROGRAMS) {
        return;
    }
    let setup = Setup::new();
    setup.serve(DOMAIN);
    setup.serve(OTHER);
    let config = setup.caller(&[b"http/1.1"]);
    let mut caller = setup.connect(&config, DOMAIN).unwrap();
    assert_eq!(setup.ask(&mut caller, DOMAIN), 200);
    for host in [OTHER, HOST, "eu1.gw.localhost", "unknown.customer.test"] {
        assert_eq!(setup.ask(&mut caller, host), 421, "{host}");
    }
    // Nor does one for a name of the region.
    let region = client_config_of(
        rustls::DEFAULT_VERSIONS,
        &setup.prepared.path("data/dev-ca.crt"),
        &[b"http/1.1"],
        None,
    );
    let mut caller = setup.connect(&Arc::new(region), HOST).unwrap();
    assert_eq!(setup.ask(&mut caller, DOMAIN), 421);
    assert_eq!(setup.ask(&mut caller, HOST), 200);

    // A ticket resumes for its name alone.
    let kind = |name: &str, config: &Arc<ClientConfig>| {
        let mut caller = setup.connect(config, name).unwrap();
        assert_eq!(setup.ask(&mut caller, name), 200);
        caller.stream.conn.handshake_kind().unwrap()
    };
    let tickets = Arc::new(ClientSessionMemoryCache::new(8));
    let keeping = |store: Arc<dyn ClientSessionStore>| {
        let mut config = ClientConfig::clone(&config);
        config.resumption = Resumption::store(store);
        Arc::new(config)
    };
    let kept = keeping(tickets.clone());
    assert_eq!(kind(DOMAIN, &kept), HandshakeKind::Full);
    assert_eq!(kind(DOMAIN, &kept), HandshakeKind::Resumed);
    let crossed = keeping(Arc::new(Crossing(tickets, DOMAIN)));
    assert_eq!(kind(OTHER, &crossed), HandshakeKind::Full);

    // Handshakes of challenges are answered for orders alone.
    let challenge = setup.caller(&[b"acme-tls/1"]);
    for name in [DOMAIN, "unknown.customer.test", "eu1.gw.localhost"] {
        assert!(setup.connect(&challenge, name).is_none(), "{name}");
    }
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
        let ticket = self
            .0
            .take_tls13_ticket(&ServerName::try_from(self.1).unwrap());
        assert!(ticket.is_some(), "a ticket is offered");
        ticket
    }
}

#[test]
fn an_uploaded_certificate_is_served_and_checked_first() {
    if !usable(&PROGRAMS) {
        return;
    }
    let setup = Setup::new();
    let write = |name: &str, domain: &str| -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new([domain.to_owned()])
            .unwrap()
            .self_signed(&key)
            .unwrap();
        let path = |end: &str| {
            setup
                .prepared
                .path(&format!("{name}.{end}"))
                .display()
                .to_string()
        };
        fs::write(path("pem"), certificate.pem()).unwrap();
        fs::write(path("key"), key.serialize_pem()).unwrap();
        (path("pem"), path("key"))
    };
    let upload = |certificate: &str, key: &str| {
        setup.command(&[
            "certificate",
            "upload",
            "demo",
            DOMAIN,
            "--certificate",
            certificate,
            "--key",
            key,
        ])
    };
    let (good, good_key) = write("good", DOMAIN);
    let (other, other_key) = write("other", OTHER);
    let error = upload(&good, &good_key).unwrap_err();
    assert!(
        error.contains("no domain api.customer.test of account demo"),
        "{error}"
    );
    setup
        .named
        .update(&[&format!("add {DOMAIN} 1 CNAME {HOST}")]);
    setup.add(DOMAIN).unwrap();
    for (certificate, key, cause) in [
        (
            &other,
            &other_key,
            "is for shop.customer.test, and not for api.customer.test",
        ),
        (&good, &other_key, "the key does not match the certificate"),
        (&good_key, &good_key, "no certificate"),
    ] {
        let error = upload(certificate, key).unwrap_err();
        assert!(error.contains(cause), "{error}");
    }
    let shown = upload(&good, &good_key).unwrap();
    assert_eq!(shown["certificate"]["source"], "uploaded");
    fs::copy(&good, setup.root()).unwrap();
    eventually("the uploaded certificate is served", || {
        (setup.get(DOMAIN).0 == "200").then_some(())
    });
}

#[test]
fn every_node_of_a_region_serves_a_domain_and_answers_its_challenge() {
    if !usable(&PROGRAMS) {
        return;
    }
    // Where the authority connects: to one node after the other.
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
        let added = region.api(0).post(
            "/accounts/demo/services/echo/domains",
            &json!({ "name": domain }),
        );
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
    if !usable(&PROGRAMS) {
        return;
    }
    let plain = free_address();
    let setup = Setup::with(Changes {
        // Nothing listens where the authority connects for a proof in a handshake.
        tls_port: Some(free_address().port()),
        plain: Some(plain),
        ..Changes::default()
    });
    setup
        .named
        .update(&[&format!("add {DOMAIN} 1 CNAME {HOST}")]);
    setup.add(DOMAIN).unwrap();
    let refused = eventually("a refused order", || {
        let shown = setup.show(DOMAIN);
        (shown["failures"] == 1).then_some(shown)
    });
    let failure = refused["last_failure"].as_str().unwrap();
    assert!(failure.contains("refused"), "{failure}");
    // The next order is proved in plain HTTP, and need not wait for a minute if an administrator
    // looks.
    setup.command(&["domain", "check", "demo", DOMAIN]).unwrap();
    setup.await_certificate(DOMAIN);
    assert_eq!(setup.get(DOMAIN).0, "200");

    let output = Command::new("curl")
        .args([
            "--silent",
            "--output",
            "/dev/null",
            "--write-out",
            "%{http_code} %{redirect_url}",
        ])
        .args(["--resolve", &format!("{DOMAIN}:{}:127.0.0.1", plain.port())])
        .arg(format!("http://{DOMAIN}:{}/a?b=c", plain.port()))
        .output()
        .unwrap();
    let port = setup.address().port();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text, format!("308 https://{DOMAIN}:{port}/a?b=c"));
}
