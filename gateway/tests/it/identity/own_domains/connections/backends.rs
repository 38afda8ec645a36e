//! A backend that serves the hosts of one service with settings of their own.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::identity::own_domains::DOMAIN;
use crate::identity::own_domains::setup::{Changes, Pair, Setup};
use crate::support::eventually;
use crate::support::peers::caller::HOST;
use crate::support::processes::process::Running;
use crate::support::programs::usable;

/// Apache refuses requests for a host whose settings of TLS are not those of the server name (421).
/// So the hosts have different cipher suites.
const CONFIGURATION: &str = "
ServerRoot FOLDER
PidFile FOLDER/apache.pid
ErrorLog FOLDER/error.log
DefaultRuntimeDir FOLDER
LoadModule mpm_event_module MODULES/mod_mpm_event.so
LoadModule authz_core_module MODULES/mod_authz_core.so
LoadModule alias_module MODULES/mod_alias.so
LoadModule socache_shmcb_module MODULES/mod_socache_shmcb.so
LoadModule ssl_module MODULES/mod_ssl.so
LoadModule http2_module MODULES/mod_http2.so
Listen ADDRESS
ServerName localhost
Protocols h2 http/1.1
";

/// A host of Apache, with a certificate of its own. It answers with its name.
const HOST_CONFIGURATION: &str = "
<VirtualHost ADDRESS>
  ServerName NAME
  SSLEngine on
  SSLCipherSuite SUITE
  SSLCertificateFile FOLDER/NAME.pem
  SSLCertificateKeyFile FOLDER/NAME.key
  AliasMatch ^/ FOLDER/NAME.txt
</VirtualHost>
";

/// Starts Apache 2.4. The file `ca.pem` of the folder has the certificates of its hosts.
fn start_apache(folder: &Path, address: SocketAddr) -> Running {
    let mut configuration = CONFIGURATION.to_owned();
    let mut certificates = String::new();
    for (name, suite) in [
        (HOST, "ECDHE-ECDSA-AES128-GCM-SHA256"),
        (DOMAIN, "ECDHE-ECDSA-AES256-GCM-SHA384"),
    ] {
        let pair = Pair::write_in(folder, name, |_| {});
        certificates += &fs::read_to_string(pair.certificate).unwrap();
        fs::write(folder.join(format!("{name}.txt")), name).unwrap();
        let host = HOST_CONFIGURATION.replace("NAME", name);
        configuration += &host.replace("SUITE", suite);
    }
    fs::write(folder.join("ca.pem"), certificates).unwrap();
    let configuration = configuration
        .replace("FOLDER", &folder.display().to_string())
        .replace("MODULES", "/usr/lib/apache2/modules")
        .replace("ADDRESS", &address.to_string());
    let file = folder.join("apache.conf");
    fs::write(&file, configuration).unwrap();
    let mut apache = Command::new("apache2");
    // With `-X` Apache starts no processes, which would outlive it.
    apache.arg("-X").arg("-f").arg(file);
    apache.stdout(Stdio::null()).stderr(Stdio::null());
    let apache = Running::new(apache.spawn().unwrap());
    eventually("Apache accepts connections", || {
        TcpStream::connect(address).ok()
    });
    apache
}

#[test]
fn each_host_of_a_service_reaches_its_virtual_host() {
    if !usable(&["apache2"]) {
        return;
    }
    let folder = TempDir::new().unwrap();
    let (port, _held) = gw_local_region::hold(0).unwrap();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let _apache = start_apache(folder.path(), address);
    let ca_file = folder.path().join("ca.pem");
    let backend = format!("{{ urls = 'https://{address}', ca_file = {ca_file:?} }}");
    let Some(setup) = Setup::with(Changes {
        backend: Some(backend),
        ..Changes::default()
    }) else {
        return;
    };
    setup.serve_uploaded(DOMAIN);
    for _ in 0..2 {
        assert_eq!(setup.get(DOMAIN), ("200".to_owned(), DOMAIN.to_owned()));
        let mut caller = setup.prepared.connect(setup.address());
        caller.send(setup.prepared.get("/"));
        let response = caller.response();
        assert_eq!(response.status, 200);
        assert_eq!(response.body, HOST.as_bytes());
    }
}
