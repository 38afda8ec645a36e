//! Whole orders, and kills between and within their steps.

use std::time::Duration;

use gw_acme::{AccountState, Progress, State};
use gw_base::clock::Timestamp;
use gw_base::tls::certificate::check_key;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::programs::usable;
use super::servers::named::Named;
use super::{NAMES, PROGRAMS, STEPS_MAX, everything, issue, run};

const RECORD: &str = "_acme-challenge.eu1.example.test";

fn assert_no_records(named: &Named) {
    assert_eq!(named.texts(RECORD), [""; 0], "the proofs are withdrawn");
}

fn key(account: Option<&AccountState>) -> String {
    account.unwrap().key.reveal().to_owned()
}

#[test]
fn an_order_yields_a_certificate_for_both_names_and_removes_its_records() {
    if !usable(&PROGRAMS) {
        return;
    }
    let (named, _pebble, orders) = everything(|options| options);
    let mut state = State::default();
    run(issue(&orders, &mut state)).unwrap();
    let certificate = state.certificate.as_ref().unwrap();
    assert_eq!(certificate.names, NAMES);
    let chain: Vec<_> = CertificateDer::pem_slice_iter(certificate.chain.as_bytes())
        .collect::<Result<_, _>>()
        .unwrap();
    let key = PrivateKeyDer::from_pem_slice(certificate.key.reveal().as_bytes()).unwrap();
    check_key(&chain, &key).unwrap();
    assert!(state.order.is_none());
    assert_no_records(&named);

    // The renewal uses the same account, and another key.
    let account = state.account.clone().unwrap();
    let before = certificate.key.clone();
    run(issue(&orders, &mut state)).unwrap();
    assert_eq!(state.account.unwrap().url, account.url);
    assert_ne!(state.certificate.unwrap().key.reveal(), before.reveal());
}

/// Steps of an order in which each `kills` th change is lost: the effect happened, and the process
/// died before it stored it.
#[test]
fn an_order_that_is_killed_at_each_step_goes_on_and_orders_at_most_once_more() {
    if !usable(&PROGRAMS) {
        return;
    }
    let (named, _pebble, orders) = everything(|options| options);
    let mut kills = 0;
    // The account, its registration, the order, its proofs, their publication, their visibility,
    // the key, the chain, the end.
    for killed in 0..9 {
        let mut stored = serde_json::to_string(&State::default()).unwrap();
        let mut account_key = None;
        let mut begun = 0;
        let mut changes = 0;
        let issued = (0..STEPS_MAX).find_map(|_| {
            let mut state: State = serde_json::from_str(&stored).unwrap();
            let had_order = state.order.is_some();
            let progress = run(orders.advance(&mut state, Timestamp::now())).unwrap();
            begun += usize::from(!had_order && state.order.is_some());
            match progress {
                Progress::Wait(_) => {
                    std::thread::sleep(Duration::from_millis(50));
                    return None;
                }
                Progress::GivenUp(error) => panic!("{error}"),
                Progress::Changed | Progress::Issued => changes += 1,
            }
            if changes == killed + 1 {
                kills += 1;
                return None;
            }
            stored = serde_json::to_string(&state).unwrap();
            let known = account_key.get_or_insert_with(|| key(state.account.as_ref()));
            assert_eq!(
                *known,
                key(state.account.as_ref()),
                "the key of the account is never lost"
            );
            state.order.is_none().then_some(state.certificate).flatten()
        });
        assert!(issued.is_some(), "killed at change {killed}");
        let expected = if killed == 2 { 2 } else { 1 };
        assert_eq!(begun, expected, "orders, killed at change {killed}");
        assert_no_records(&named);
    }
    assert_eq!(kills, 9);
}

#[test]
fn an_order_of_other_names_is_given_up_and_its_proofs_are_withdrawn() {
    if !usable(&PROGRAMS) {
        return;
    }
    let (named, pebble, orders) = everything(|options| options);
    let mut state = State::default();
    run(async {
        while state
            .order
            .as_ref()
            .is_none_or(|order| order.published.is_none())
        {
            orders.advance(&mut state, Timestamp::now()).await.unwrap();
        }
    });
    assert_eq!(named.texts(RECORD).len(), 2, "two names, one record each");
    let mut other = super::settings(&pebble);
    other.names = vec!["eu1.example.test".into()];
    let publisher = std::sync::Arc::new(gw_acme::Rfc2136::new(super::updates(&named)));
    let orders = gw_acme::Orders::new(other, publisher);
    let error = run(issue(&orders, &mut state)).unwrap_err();
    assert!(
        error.message.contains("other names are configured now"),
        "{error}"
    );
    assert_no_records(&named);
    run(issue(&orders, &mut state)).unwrap();
    assert_eq!(state.certificate.unwrap().names, ["eu1.example.test"]);
}

#[test]
fn an_old_order_is_given_up() {
    if !usable(&PROGRAMS) {
        return;
    }
    let (named, _pebble, orders) = everything(|options| options);
    let mut state = State::default();
    let error = run(async {
        while state.order.is_none() {
            orders.advance(&mut state, Timestamp(0)).await.unwrap();
        }
        issue(&orders, &mut state).await.unwrap_err()
    });
    assert!(
        error.message.contains("not issued after 60 minutes"),
        "{error}"
    );
    assert_no_records(&named);
}

#[test]
fn an_order_of_another_authority_is_given_up() {
    if !usable(&PROGRAMS) {
        return;
    }
    let (_named, _pebble, orders) = everything(|options| options);
    let mut state = State::default();
    let error = run(async {
        while state.order.is_none() {
            orders.advance(&mut state, Timestamp::now()).await.unwrap();
        }
        "https://other.test/dir".clone_into(&mut state.order.as_mut().unwrap().directory);
        issue(&orders, &mut state).await.unwrap_err()
    });
    assert!(
        error.message.contains("another authority is configured"),
        "{error}"
    );
    run(issue(&orders, &mut state)).unwrap();
}
