//! The ways from files with a certificate to ACME and back, by the steps of docs/certificates.md.

use std::fs;
use std::path::Path;

use rcgen::{CertificateParams, KeyPair};

use super::{APEX, Connection, Prepared};
use crate::support::doctor::{
    OF_NODE, assert_quiet_gateway, doctor_of, examine, of_development, with,
};
use crate::support::eventually;
use crate::support::processes::process::{Served, gw_gateway, serve, serve_command};
use crate::support::processes::successor::{Successor, replace};

/// A gateway whose process is replaced after each change of its configuration.
struct Replaced<'a> {
    prepared: &'a Prepared,
    served: Served,
    /// The latest of its successors.
    successors: Vec<Successor>,
}

impl Replaced<'_> {
    /// Checks a configuration, and replaces the process.
    fn use_configuration(&mut self, text: &str) {
        check(self.prepared, text).unwrap();
        let latest = self.successors.last().map(|it| it.0);
        let id = latest.unwrap_or(self.served.process.id());
        self.successors.push(replace(id, &self.served.log));
    }

    /// The certificate of new connections, once it is one of this root.
    fn certificate(&self, root: &Path) -> Vec<u8> {
        eventually("a certificate of the root", || {
            Some(Connection::open_to(root, APEX, self.served.address)?.certificate())
        })
    }
}

/// `gw-gateway serve --check` with this configuration, or its message.
fn check(prepared: &Prepared, text: &str) -> Result<(), String> {
    let path = prepared.path("gateway.toml");
    fs::write(&path, text).unwrap();
    let output = gw_gateway()
        .args(["serve", "--check", "--config"])
        .arg(path)
        .output()
        .unwrap();
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8(output.stderr).unwrap()),
    }
}

#[test]
fn a_gateway_goes_from_files_to_acme_and_back() {
    let Some(prepared) = Prepared::new() else {
        return;
    };
    let root = prepared.root();
    let (file, key_file) = (prepared.path("server.crt"), prepared.path("server.key"));
    let key = KeyPair::generate().unwrap();
    let names = [APEX.to_owned(), format!("*.{APEX}")];
    let params = CertificateParams::new(names).unwrap();
    let certificate = params.self_signed(&key).unwrap();
    fs::write(&file, certificate.pem()).unwrap();
    fs::write(&key_file, key.serialize_pem()).unwrap();
    let with_acme = fs::read_to_string(prepared.path("gateway.toml")).unwrap();
    let files = format!("tls_certificate = {file:?}\ntls_key = {key_file:?}\n");
    let (common, _) = with_acme.split_once("tls = \"acme\"\n").unwrap();
    let with_files = format!("{common}{files}");
    check(&prepared, &with_files).unwrap();
    let mut gateway = Replaced {
        prepared: &prepared,
        served: serve(&mut serve_command(&prepared.path("gateway.toml"))),
        successors: Vec::new(),
    };
    assert_eq!(gateway.certificate(&file), certificate.der().to_vec());

    let both = with_acme.replace("tls = \"acme\"\n", &format!("tls = \"acme\"\n{files}"));
    let error = check(&prepared, &both).unwrap_err();
    let expected = "tls: \"acme\" and tls_certificate exclude each other";
    assert!(error.contains(expected), "{error}");
    gateway.use_configuration(&with_acme);
    let issued = gateway.certificate(&root);
    assert!(prepared.answers(gateway.served.address, APEX));
    prepared.await_valid(&gateway.served);

    gateway.use_configuration(&with_files);
    assert_eq!(gateway.certificate(&file), certificate.der().to_vec());
    // The record stays in the store: the certificate is used again without an order.
    gateway.use_configuration(&with_acme);
    assert_eq!(gateway.certificate(&root), issued);
    assert_eq!(prepared.pebble.count("orders in the db"), 1);
    assert_eq!(prepared.pebble.count("accounts in memory"), 1);
}

#[test]
fn a_node_with_a_certificate_of_the_authority_has_nothing_to_complain_of() {
    let Some(prepared) = Prepared::new() else {
        return;
    };
    let first = prepared.serve();
    prepared.await_certificate(&first, &[]);
    // The first start says that it has no certificate yet.
    drop(first);
    let served = prepared.serve();
    let checks = with(&of_development(&OF_NODE), "services", &["audit log"]);
    let found = examine(&mut doctor_of(&prepared.path("gateway.toml"), &served));
    // The resolver of this machine does not ask the name server of the test.
    let names = ["name of the apex", "names of tenants"];
    found.assert(&checks, &names.map(|check| (check, "failed")));
    let certificate = &found.of("certificate").found;
    assert!(certificate.contains(", valid until "), "{certificate}");
    assert_quiet_gateway(&served);
}
