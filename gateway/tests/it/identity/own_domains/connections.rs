//! Connections for one domain, and names of other accounts or without an order.

mod backends;

use rustls::ClientConnection;
use rustls_pki_types::ServerName;

use super::setup::Setup;
use super::{DOMAIN, OTHER};
use crate::support::acme_front::{Kind, Verdict};
use crate::support::eventually;
use crate::support::peers::caller::{HOST, connect_to, socket};

/// A service of another account.
const RIVAL: &str = "rival--api.eu1.gw.localhost";

#[test]
fn domains_of_two_accounts_are_not_served_on_a_connection_of_each_other() {
    let Some(setup) = Setup::new() else {
        return;
    };
    setup.serve(DOMAIN);
    setup.api().create_service("rival", "api");
    let lead = format!("add {OTHER} 1 CNAME {RIVAL}");
    setup.named.update(&[&lead]);
    setup.add_to(["rival", "api"], OTHER).unwrap();
    let config = setup.caller(&[b"http/1.1"]);
    let mut of_rival = eventually("the certificate of the other account", || {
        setup.connect(&config, OTHER)
    });
    let mut of_demo = setup.connect(&config, DOMAIN).unwrap();
    assert_eq!(setup.ask(&mut of_demo, DOMAIN), 200);
    // The key of the scene's service opens no service of another account.
    let about = setup.prepared.about(setup.address());
    let mut by_hostname = connect_to(&about, RIVAL, &[b"http/1.1"], None);
    let refused = setup.ask(&mut by_hostname, RIVAL);
    assert_ne!(refused, 421);
    assert_eq!(setup.ask(&mut of_rival, OTHER), refused);
    for host in [OTHER, RIVAL] {
        assert_eq!(setup.ask(&mut of_demo, host), 421, "{host}");
    }
    for host in [DOMAIN, HOST] {
        assert_eq!(setup.ask(&mut of_rival, host), 421, "{host}");
    }
    // Both connections go on.
    assert_eq!(setup.ask(&mut of_demo, DOMAIN), 200);
    assert_eq!(setup.ask(&mut of_rival, OTHER), refused);
}

/// Error of a handshake of a challenge (RFC 8737 §3) for `name`.
fn challenged(setup: &Setup, name: &str) -> rustls::Error {
    let config = setup.caller(&[b"acme-tls/1"]);
    let server_name = ServerName::try_from(name.to_owned()).unwrap();
    let mut session = ClientConnection::new(config, server_name).unwrap();
    let mut socket = socket(&setup.prepared.about(setup.address()));
    loop {
        assert!(
            session.is_handshaking(),
            "{name}: the certificate is trusted"
        );
        if let Err(error) = session.complete_io(&mut socket) {
            let error = error.into_inner().unwrap();
            return *error.downcast::<rustls::Error>().unwrap();
        }
    }
}

#[test]
fn a_challenge_is_answered_for_the_domain_of_the_open_order_alone() {
    let Some(setup) = Setup::new() else {
        return;
    };
    // The other domain has no order, as its certificate is uploaded.
    setup.serve_uploaded(OTHER);
    setup.front.set(|request| match request.kind {
        Kind::Challenge => Verdict::Hold,
        _ => Verdict::Forward,
    });
    setup.lead_here(DOMAIN);
    setup.add(DOMAIN).unwrap();
    setup.front.await_different(Kind::Challenge, 1);
    let shown = challenged(&setup, DOMAIN);
    assert!(
        matches!(shown, rustls::Error::InvalidCertificate(_)),
        "the proof, which this caller does not trust: {shown}"
    );
    for name in [OTHER, HOST, "eu1.gw.localhost", "unknown.customer.test"] {
        let refused = challenged(&setup, name);
        assert!(
            matches!(refused, rustls::Error::AlertReceived(_)),
            "{name}: {refused}"
        );
    }
    setup.front.set(|_| Verdict::Forward);
    eventually("the certificate of the domain", || {
        let shown = setup.show(DOMAIN);
        (shown["certificate"]["source"] == "acme").then_some(())
    });
    let refused = challenged(&setup, DOMAIN);
    assert!(
        matches!(refused, rustls::Error::AlertReceived(_)),
        "the order has ended: {refused}"
    );
}
