//! Callers resume their TLS sessions.

use std::sync::Arc;

use rustls::HandshakeKind;
use rustls::version::{TLS12, TLS13};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

use crate::support::peers::resuming_caller::{caller, handshake};
use crate::support::processes::prepared::Prepared;

#[test]
fn a_caller_resumes_after_a_restart_of_the_gateway() {
    let prepared = Prepared::new();
    let gateway = prepared.serve_with(&prepared.config());
    let config = caller(&prepared, &TLS13);
    for expected in [HandshakeKind::Full, HandshakeKind::Resumed] {
        assert_eq!(handshake(&prepared, &config, gateway.address), expected);
    }
    drop(gateway);
    let gateway = prepared.serve_with(&prepared.config());
    let restarted = handshake(&prepared, &config, gateway.address);
    assert_eq!(restarted, HandshakeKind::Resumed);
}

#[test]
fn a_gateway_with_another_data_folder_has_other_keys() {
    let installations = [Prepared::new(), Prepared::new()];
    let authority = |prepared: &Prepared| {
        let file = prepared.path("data/dev-ca.crt");
        CertificateDer::from_pem_file(file).unwrap()
    };
    let authorities = installations.each_ref().map(authority);
    let config = Arc::new(gw_bed::tls::client(authorities, None, &[b"http/1.1"]));
    for prepared in &installations {
        let gateway = prepared.serve_with(&prepared.config());
        for expected in [HandshakeKind::Full, HandshakeKind::Resumed] {
            assert_eq!(handshake(prepared, &config, gateway.address), expected);
        }
    }
}

#[test]
fn a_caller_of_tls_1_2_has_no_ticket() {
    let prepared = Prepared::new();
    let gateway = prepared.serve_with(&prepared.config());
    let config = caller(&prepared, &TLS12);
    for _ in 0..2 {
        let kind = handshake(&prepared, &config, gateway.address);
        assert_eq!(kind, HandshakeKind::Full);
    }
}
