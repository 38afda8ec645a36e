//! A server with TLS that answers every request with the same bytes.

use std::io::Write;
use std::net::TcpListener;
use std::ops::Range;
use std::path::Path;

use gw_bed::threads::listen_tls;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

/// Starts a server whose certificate is for `name` and valid in `years`, and writes the certificate
/// of its authority to `ca_file`. Returns its port.
pub(crate) fn start(name: &str, years: Range<i32>, answer: String, ca_file: &Path) -> u16 {
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority_key = KeyPair::generate().unwrap();
    let certificate = authority.self_signed(&authority_key).unwrap();
    std::fs::write(ca_file, certificate.pem()).unwrap();
    let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
    params.not_before = date_time_ymd(years.start, 1, 1);
    params.not_after = date_time_ymd(years.end, 1, 1);
    let key = KeyPair::generate().unwrap();
    let issuer = Issuer::new(authority, authority_key);
    let certificate = params.signed_by(&key, &issuer).unwrap();
    let identity = (CertificateDer::from(certificate), PrivateKeyDer::from(key));
    let config = gw_bed::tls::server(identity, &[]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    listen_tls(listener, config, move |mut peer| {
        // A client that refuses the certificate sends no request.
        if peer.raw_head().is_ok() {
            peer.stream.write_all(answer.as_bytes()).unwrap();
            peer.stream.conn.send_close_notify();
            peer.stream.flush().unwrap();
        }
    });
    port
}
