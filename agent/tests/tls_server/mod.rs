//! A server with TLS that answers every request with the same bytes.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};
use rustls::crypto::aws_lc_rs;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

/// Starts a server whose certificate is for `name` and valid in `years`, and writes the certificate
/// of its authority to `ca_file`. Returns its port.
pub(crate) fn start(name: &str, years: Range<i32>, answer: String, ca_file: &Path) -> u16 {
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority_key = KeyPair::generate().unwrap();
    std::fs::write(
        ca_file,
        authority.self_signed(&authority_key).unwrap().pem(),
    )
    .unwrap();
    let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
    (params.not_before, params.not_after) = (
        date_time_ymd(years.start, 1, 1),
        date_time_ymd(years.end, 1, 1),
    );
    let key = KeyPair::generate().unwrap();
    let certificate = params
        .signed_by(&key, &Issuer::new(authority, authority_key))
        .unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            vec![CertificateDer::from(certificate)],
            PrivateKeyDer::from(key),
        )
        .unwrap();
    let config = Arc::new(config);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for socket in listener.incoming().flatten() {
            let mut stream =
                StreamOwned::new(ServerConnection::new(Arc::clone(&config)).unwrap(), socket);
            let mut head = Vec::new();
            let mut byte = [0];
            // A client that refuses the certificate sends no request.
            while !head.ends_with(b"\r\n\r\n") && matches!(stream.read(&mut byte), Ok(1)) {
                head.push(byte[0]);
            }
            if head.ends_with(b"\r\n\r\n") {
                stream.write_all(answer.as_bytes()).unwrap();
                stream.conn.send_close_notify();
                stream.flush().unwrap();
            }
        }
    });
    port
}
