//! An authority that refuses, forgets, or does not answer.

use std::sync::Arc;

use gw_acme::{ExternalAccount, FailureKind, Orders, Publisher, Rfc2136, State};
use gw_shared::identity::secret::Secret;
use gw_shared::net::tls::Trusted;

use super::programs::usable;
use super::servers::named::Named;
use super::servers::pebble::{Options, Pebble};
use super::{PROGRAMS, everything, issue, run, settings, updates};

const EXTERNAL: (&str, &str) = (
    "kid-1",
    "zWNDZM6eQGHWpSRTPal5eIUYFTu7EajVIoguysqZ9wG44nMEtx3MUAsUDkMTQ12W",
);

#[test]
fn an_authority_that_refuses_half_of_the_nonces_issues() {
    if !usable(&PROGRAMS) {
        return;
    }
    let (_named, _pebble, orders) =
        everything(|options| options.variable("PEBBLE_WFE_NONCEREJECT", "50"));
    let mut state = State::default();
    run(async {
        // `instant-acme` tries a nonce three times; a step that fails for it costs nothing, and is
        // made again.
        loop {
            match issue(&orders, &mut state).await {
                Ok(()) => break,
                Err(error) => assert_eq!(error.kind, FailureKind::Unreachable, "{error}"),
            }
        }
    });
    assert!(state.certificate.is_some());
}

#[test]
fn an_external_account_is_bound_and_a_missing_one_is_named() {
    if !usable(&PROGRAMS) {
        return;
    }
    let (named, pebble, orders) = everything(|mut options| {
        options.external_account = Some(EXTERNAL);
        options
    });
    let mut state = State::default();
    let error = run(issue(&orders, &mut state)).unwrap_err();
    assert_eq!(error.kind, FailureKind::Refused);
    assert!(error.message.contains("acme.eab_key_id"), "{error}");

    let mut settings = settings(&pebble);
    settings.external_account = Some(ExternalAccount {
        key_id: EXTERNAL.0.into(),
        key: Secret::new(EXTERNAL.1.into()),
    });
    let publisher: Arc<dyn Publisher> = Arc::new(Rfc2136::new(updates(&named)));
    let orders = Orders::new(settings, publisher);
    run(issue(&orders, &mut state)).unwrap();
}

#[test]
fn terms_that_are_not_accepted_are_named() {
    if !usable(&PROGRAMS) {
        return;
    }
    let (named, pebble, _) = everything(|options| options);
    let mut settings = settings(&pebble);
    settings.terms_accepted = false;
    let publisher: Arc<dyn Publisher> = Arc::new(Rfc2136::new(updates(&named)));
    let orders = Orders::new(settings, publisher);
    let error = run(issue(&orders, &mut State::default())).unwrap_err();
    assert!(
        error.message.contains("acme.terms_accepted = true"),
        "{error}"
    );
}

#[test]
fn an_authority_that_forgot_the_account_gets_the_same_key_again() {
    if !usable(&PROGRAMS) {
        return;
    }
    let (_named, mut pebble, orders) = everything(|options| options);
    let mut state = State::default();
    run(async {
        while state.order.is_none() {
            orders
                .advance(&mut state, gw_base::clock::Timestamp::now())
                .await
                .unwrap();
        }
    });
    let key = state.account.as_ref().unwrap().key.clone();
    pebble.stop();
    let error = run(issue(&orders, &mut state)).unwrap_err();
    assert_eq!(error.kind, FailureKind::Unreachable);
    assert!(error.message.contains(&pebble.directory()), "{error}");
    assert!(error.message.contains("is reachable"), "{error}");
    pebble.start_again();
    let error = run(issue(&orders, &mut state)).unwrap_err();
    assert!(error.message.contains("a new order follows"), "{error}");
    run(issue(&orders, &mut state)).unwrap();
    assert_eq!(state.account.unwrap().key.reveal(), key.reveal());
}

#[test]
fn a_refused_proof_ends_the_order_with_the_reason_of_the_authority() {
    if !usable(&PROGRAMS) {
        return;
    }
    // The authority asks a server without the proofs.
    let named = Named::start("");
    let other = Named::start("");
    let pebble = Pebble::start(Options::new(other.address));
    let publisher: Arc<dyn Publisher> = Arc::new(Rfc2136::new(updates(&named)));
    let orders = Orders::new(settings(&pebble), publisher);
    let mut state = State::default();
    let error = run(issue(&orders, &mut state)).unwrap_err();
    assert_eq!(error.kind, FailureKind::Refused);
    assert!(error.message.contains("eu1.example.test: "), "{error}");
    assert!(error.message.contains("_acme-challenge"), "{error}");
    assert!(state.order.is_none(), "the next attempt begins a new order");
    assert!(named.texts("_acme-challenge.eu1.example.test").is_empty());
}

#[test]
fn what_is_no_authority_is_named() {
    if !usable(&PROGRAMS) {
        return;
    }
    let (named, pebble, _) = everything(|options| options);
    let publisher: Arc<dyn Publisher> = Arc::new(Rfc2136::new(updates(&named)));
    let mut wrong = settings(&pebble);
    wrong.directory = pebble.directory().replace("/dir", "/other");
    let orders = Orders::new(wrong, Arc::clone(&publisher));
    let error = run(issue(&orders, &mut State::default())).unwrap_err();
    assert!(error.message.contains("/other"), "{error}");
    assert_eq!(error.kind, FailureKind::Unreachable);
    // Without its file, the certificate of the directory's server is not trusted.
    let mut untrusted = settings(&pebble);
    untrusted.authorities = Some(Arc::new(Trusted::only(Vec::new()).unwrap()));
    let orders = Orders::new(untrusted, publisher);
    let error = run(issue(&orders, &mut State::default())).unwrap_err();
    assert!(error.message.contains("acme.ca_file"), "{error}");
}
