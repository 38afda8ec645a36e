//! Certificates from files, and their reload.

use std::fs;
use std::path::Path;

use rcgen::{CertificateParams, KeyPair};

use crate::support::eventually;
use crate::support::peers::caller::{Caller, HOST, connect_to};
use crate::support::processes::prepared;
use crate::support::processes::process::{config_text, serve, serve_command};
use crate::support::scene::About;

const NAMES: [&str; 2] = ["eu1.gw.localhost", "*.eu1.gw.localhost"];

/// Writes a self-signed certificate for these names, and its key.
fn write_certificate(directory: &Path, names: &[&str]) -> Vec<u8> {
    let key = KeyPair::generate().unwrap();
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    let params = CertificateParams::new(names).unwrap();
    let certificate = params.self_signed(&key).unwrap();
    fs::write(directory.join("server.key"), key.serialize_pem()).unwrap();
    fs::write(directory.join("server.crt"), certificate.pem()).unwrap();
    certificate.der().to_vec()
}

#[test]
fn a_reload_loads_new_certificates_and_keeps_the_old_one_on_errors() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    let first = write_certificate(directory.path(), &NAMES);
    let text = format!(
        "{}tls_certificate = {:?}\ntls_key = {:?}\n",
        config_text(&file("data"), 0),
        file("server.crt"),
        file("server.key"),
    );
    fs::write(file("gateway.toml"), text).unwrap();
    let gateway = serve(&mut serve_command(&file("gateway.toml")));
    let about = prepared::about(gateway.address, "", file("server.crt"));
    let served = |about: &About| {
        let mut caller: Caller = connect_to(about, HOST, &[b"http/1.1"], None);
        caller.send("GET / HTTP/1.1\r\nHost: eu1.gw.localhost\r\n\r\n");
        assert_eq!(caller.response().code(), "GW_NOT_FOUND");
        let certificate = caller.stream.conn.peer_certificates().unwrap()[0].to_vec();
        (certificate, caller)
    };
    let (certificate, mut kept) = served(&about);
    assert_eq!(certificate, first);

    let second = write_certificate(directory.path(), &NAMES);
    gateway.process.signal("HUP");
    gateway.log.line_with("certificates reloaded");
    eventually("the new certificate", || {
        (served(&about).0 == second).then_some(())
    });
    kept.send("GET / HTTP/1.1\r\nHost: eu1.gw.localhost\r\n\r\n");
    assert_eq!(kept.response().code(), "GW_NOT_FOUND");

    let is_refused = |parts: &[&str]| {
        gateway.process.signal("HUP");
        let error = gateway.log.line_with("cannot reload a certificate");
        for part in parts {
            assert!(error.contains(part), "{part}: {error}");
        }
    };
    fs::write(file("server.key"), "not a key").unwrap();
    is_refused(&["server.key"]);
    assert_eq!(served(&about).0, second);
    let about = About {
        ca_file: file("second.crt"),
        ..about
    };
    fs::copy(file("server.crt"), &about.ca_file).unwrap();
    let other_key = KeyPair::generate().unwrap().serialize_pem();
    fs::write(file("server.key"), other_key).unwrap();
    is_refused(&["tls_key", "server.key"]);
    write_certificate(directory.path(), &["*.eu1.gw.localhost"]);
    is_refused(&["tls_certificate", "eu1.gw.localhost"]);
    assert_eq!(served(&about).0, second);
}
