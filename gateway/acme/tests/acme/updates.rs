//! DNS updates: delegation, refusals.

use std::sync::Arc;

use gw_acme::{FailureKind, Orders, Proof, Publisher, Rfc2136, Rfc2136Settings, State};

use super::programs::usable;
use super::servers::named::Named;
use super::servers::pebble::{Options, Pebble};
use super::{PROGRAMS, issue, run, settings, updates};

fn proof(value: &str) -> Proof {
    Proof {
        name: "eu1.example.test".into(),
        value: value.into(),
    }
}

#[test]
fn a_delegated_record_is_published_where_the_cname_leads() {
    if !usable(&PROGRAMS) {
        return;
    }
    let named = Named::start("_acme-challenge.eu1 CNAME eu1.delegated.test.");
    let publisher = Rfc2136::new(updates(&named));
    run(publisher.publish(&[proof("one")])).unwrap();
    assert_eq!(named.texts("eu1.delegated.test"), ["\"one\""]);
    run(publisher.withdraw(&[proof("one")])).unwrap();
    assert!(named.texts("eu1.delegated.test").is_empty());

    let pebble = Pebble::start(Options::new(named.address));
    let orders = Orders::new(settings(&pebble), Arc::new(publisher));
    run(issue(&orders, &mut State::default())).unwrap();
}

#[test]
fn each_proof_has_its_record_and_both_actions_may_be_repeated() {
    if !usable(&PROGRAMS) {
        return;
    }
    let record = "_acme-challenge.eu1.example.test";
    let named = Named::start("");
    let publisher = Rfc2136::new(updates(&named));
    let proofs = [proof("one"), proof("two")];
    assert!(!run(publisher.is_visible(&proofs)).unwrap());
    run(publisher.publish(&proofs)).unwrap();
    run(publisher.publish(&proofs)).unwrap();
    let mut found = named.texts(record);
    found.sort();
    assert_eq!(found, ["\"one\"", "\"two\""]);
    assert!(run(publisher.is_visible(&proofs)).unwrap());
    run(publisher.withdraw(&proofs[..1])).unwrap();
    assert_eq!(named.texts(record), ["\"two\""], "the other record stays");
    run(publisher.withdraw(&proofs)).unwrap();
    run(publisher.withdraw(&proofs)).unwrap();
    assert!(named.texts(record).is_empty());
}

#[test]
fn a_refused_update_names_record_server_cause_and_remedy() {
    if !usable(&PROGRAMS) {
        return;
    }
    let named = Named::start("_acme-challenge.loop CNAME _acme-challenge.loop");
    let secret = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(secret.path(), "b3RoZXIgc2VjcmV0IG90aGVyIHNlY3JldA==").unwrap();
    let base = updates(&named);
    let other_key = Rfc2136Settings {
        key_file: secret.path().into(),
        ..base.clone()
    };
    let other_zone = Rfc2136Settings {
        zone: Some("delegated.test".into()),
        ..base.clone()
    };
    let closed = Rfc2136Settings {
        server: super::servers::free_address(),
        zone: Some("example.test".into()),
        ..base.clone()
    };
    let no_resolver = Rfc2136Settings {
        dns_servers: vec![super::servers::free_address()],
        ..base.clone()
    };
    for (settings, remedy) in [
        (other_key, "same algorithm and secret"),
        (other_zone, "acme.rfc2136.zone"),
        (closed, "acme.rfc2136.server"),
        (no_resolver, "dns_servers"),
    ] {
        let error = run(Rfc2136::new(settings).publish(&[proof("one")])).unwrap_err();
        assert_eq!(error.kind, FailureKind::Proof);
        assert!(
            error.message.contains("_acme-challenge.eu1.example.test"),
            "{error}"
        );
        assert!(error.message.contains(remedy), "{error}");
    }
    let circle = Proof {
        name: "loop.example.test".into(),
        value: "one".into(),
    };
    let error = run(Rfc2136::new(base).publish(&[circle])).unwrap_err();
    assert!(error.message.contains("CNAME"), "{error}");
}
