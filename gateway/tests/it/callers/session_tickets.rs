//! Callers resume their TLS sessions.

use rustls::HandshakeKind;
use rustls::version::{TLS12, TLS13};

use crate::support::peers::resuming_caller::{caller, handshake};
use crate::support::processes::prepared::Prepared;

#[test]
fn a_caller_resumes_after_a_restart_of_the_gateway() {
    let prepared = Prepared::new();
    let gateway = prepared.serve_with(&prepared.config());
    let config = caller(&prepared, &TLS13);
    assert_eq!(
        handshake(&prepared, &config, gateway.address),
        HandshakeKind::Full
    );
    assert_eq!(
        handshake(&prepared, &config, gateway.address),
        HandshakeKind::Resumed
    );
    drop(gateway);
    let restarted = prepared.serve_with(&prepared.config());
    assert_eq!(
        handshake(&prepared, &config, restarted.address),
        HandshakeKind::Resumed
    );
    // Another data folder has other keys.
    let other = Prepared::new();
    let gateway = other.serve_with(&other.config());
    let config = caller(&other, &TLS13);
    assert_eq!(
        handshake(&other, &config, gateway.address),
        HandshakeKind::Full
    );
}

#[test]
fn a_caller_of_tls_1_2_has_no_ticket() {
    let prepared = Prepared::new();
    let gateway = prepared.serve_with(&prepared.config());
    let config = caller(&prepared, &TLS12);
    for _ in 0..2 {
        assert_eq!(
            handshake(&prepared, &config, gateway.address),
            HandshakeKind::Full
        );
    }
}
