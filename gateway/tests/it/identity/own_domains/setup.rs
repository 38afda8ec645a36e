//! A gateway, an authority and a DNS server for tests of own domains.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use rcgen::{CertificateParams, KeyPair};
use rustls::{ClientConfig, ClientConnection, StreamOwned};
use rustls_pki_types::ServerName;
use serde_json::Value;

use super::PROGRAMS;
use crate::support::acme_front::Front;
use crate::support::acme_servers::free_address;
use crate::support::acme_servers::named::Named;
use crate::support::acme_servers::pebble::{Options as PebbleOptions, Pebble};
use crate::support::admin_api::Api;
use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::peers::caller::{Caller, HOST, client_config_of, socket};
use crate::support::peers::http1_peer::Peer;
use crate::support::processes::machine::Machine;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::{
    Running, Served, config_text, gw_agent, gw_gateway, hold, serve, serve_command,
};
use crate::support::programs::usable;
use crate::support::scene::About;

/// A gateway with an agent and a backend that answers with the host of the request, a DNS server
/// with the zone `customer.test`, and an authority behind a front.
pub(super) struct Setup {
    pub(super) prepared: Prepared,
    pub(super) named: Named,
    pub(super) pebble: Pebble,
    pub(super) front: Front,
    pub(super) served: Served,
    machine: Option<Machine>,
    _agent: Running,
}

/// Differences of a setup from the default.
#[derive(Default)]
pub(super) struct Changes {
    /// Where the authority connects for a proof in a handshake, in place of the gateway.
    pub(super) tls_port: Option<u16>,
    /// Where the gateway listens in plain HTTP.
    pub(super) plain: Option<SocketAddr>,
    /// Machine that sets the clock of the gateway.
    pub(super) machine: Option<Machine>,
    /// The table of the agent's backend, in place of one that answers with the host.
    pub(super) backend: Option<String>,
}

impl Setup {
    /// `None` without the programs.
    pub(super) fn new() -> Option<Self> {
        Self::with(Changes::default())
    }

    pub(super) fn with(changes: Changes) -> Option<Self> {
        if !usable(&PROGRAMS) || (changes.machine.is_some() && !usable(&["faketime"])) {
            return None;
        }
        let named = Named::start("");
        let address = free_address();
        let mut options = PebbleOptions::new(named.address);
        options.tls_port = changes.tls_port.unwrap_or(address.port());
        options.http_port = changes.plain.map_or(options.http_port, |it| it.port());
        let pebble = Pebble::start(options);
        let front = Front::start(&pebble);
        let plain = changes.plain;
        let listen_http = plain.map(|plain| format!("listen_http = \"{plain}\"\n"));
        let prepared = Prepared::new();
        let config = format!(
            "{}{}dns_servers = [\"{}\"]\n[acme]\ndirectory = {:?}\nca_file = {:?}\n\
             terms_accepted = true\n",
            config_text(&prepared.path("data"), address.port()),
            listen_http.unwrap_or_default(),
            named.address,
            front.directory(),
            pebble.ca_file(),
        );
        fs::write(prepared.path("gateway.toml"), config).unwrap();
        let served = start(&prepared, changes.machine.as_ref());
        let agent = match changes.backend {
            Some(table) => run_agent(&prepared, served.address.port(), &table),
            None => prepared.run_agent(served.address.port(), &host_backend()),
        };
        prepared.wait_for_tunnel(served.address);
        let setup = Self {
            prepared,
            named,
            pebble,
            front,
            served,
            machine: changes.machine,
            _agent: agent,
        };
        setup.trust_authority();
        Some(setup)
    }

    /// Lets callers trust the authority from now on.
    pub(super) fn trust_authority(&self) {
        fs::write(self.root(), self.pebble.issuing_root()).unwrap();
    }

    /// Sets the clock of the machine to this difference from the right time.
    pub(super) fn set_clock(&self, difference: &str) {
        self.machine.as_ref().unwrap().set(difference);
    }

    /// Ends the gateway by a signal, and starts it again after `meanwhile`.
    pub(super) fn restart(&mut self, signal: &str, meanwhile: impl FnOnce(&Self)) {
        // No other program takes the port meanwhile.
        let _held = hold(self.address());
        self.served.process.signal(signal);
        self.served.process.exit_code();
        meanwhile(self);
        self.served = start(&self.prepared, self.machine.as_ref());
    }

    /// Ends the gateway, which removes the shared memory of the machine's clock.
    pub(super) fn stop(mut self) {
        self.served.process.stop();
    }

    /// The root of the issued certificates.
    pub(super) fn root(&self) -> PathBuf {
        self.prepared.path("root.pem")
    }

    pub(super) fn api(&self) -> Api {
        self.prepared.api(self.served.admin_address)
    }

    /// Runs `gw-gateway` against the gateway. Returns the JSON that it prints, or the error.
    pub(super) fn command(&self, arguments: &[&str]) -> Result<Value, String> {
        let url = format!("http://{}", self.served.admin_address);
        let output = gw_gateway()
            .args(arguments)
            .args(["--json", "--admin-token-file"])
            .arg(self.prepared.path("data/admin.token"))
            .args(["--admin-url", &url])
            .stdin(Stdio::null())
            .output()
            .unwrap();
        match output.status.success() {
            true => Ok(serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)),
            false => Err(String::from_utf8(output.stderr).unwrap()),
        }
    }

    pub(super) fn add(&self, domain: &str) -> Result<Value, String> {
        self.add_to(["demo", "echo"], domain)
    }

    /// Adds a domain to a service of an account.
    pub(super) fn add_to(&self, service: [&str; 2], domain: &str) -> Result<Value, String> {
        self.command(&["domain", "add", service[0], service[1], domain])
    }

    /// Lets DNS lead `domain` to the scene's service, and waits for the certificate.
    pub(super) fn serve(&self, domain: &str) {
        self.lead_here(domain);
        self.add(domain).unwrap();
        self.await_certificate(domain);
    }

    /// Waits until the certificate is recorded, and until the workers use the record.
    pub(super) fn await_certificate(&self, domain: &str) {
        eventually("the certificate of the domain", || {
            let shown = self.show(domain);
            (shown["certificate"]["source"] == "acme").then_some(())
        });
        let config = self.caller(&[b"http/1.1"]);
        eventually("a handshake with the certificate", || {
            self.connect(&config, domain)
        });
    }

    /// The domain as the API shows it.
    pub(super) fn show(&self, domain: &str) -> Value {
        let list = self.list("demo");
        let found = list.into_iter().find(|item| item["name"] == domain);
        found.unwrap_or(Value::Null)
    }

    /// The domains of an account.
    pub(super) fn list(&self, account: &str) -> Vec<Value> {
        let list = self.command(&["domain", "list", account]).unwrap();
        let items = list.get("items").unwrap_or(&list).as_array();
        items.unwrap().clone()
    }

    /// Lets DNS lead `domain` to the scene's service.
    pub(super) fn lead_here(&self, domain: &str) {
        let add = format!("add {domain} 1 CNAME {HOST}");
        self.named.update(&[&add]);
    }

    pub(super) fn check(&self, domain: &str) -> Value {
        let checked = self.command(&["domain", "check", "demo", domain]);
        checked.unwrap()
    }

    pub(super) fn remove(&self, domain: &str) {
        self.command(&["domain", "remove", "demo", domain]).unwrap();
    }

    /// Uploads a certificate for `domain`.
    pub(super) fn try_upload(
        &self,
        domain: &str,
        certificate: &Path,
        key: &Path,
    ) -> Result<Value, String> {
        let [certificate, key] = [certificate, key].map(|it| it.to_str().unwrap());
        let upload = ["certificate", "upload", "demo", domain];
        let files = ["--certificate", certificate, "--key", key];
        self.command(&[upload, files].concat())
    }

    /// Uploads a certificate for `domain`, which is the root that callers trust from then on.
    pub(super) fn upload(&self, domain: &str, files: &Pair) {
        let shown = self.try_upload(domain, &files.certificate, &files.key);
        assert_eq!(shown.unwrap()["certificate"]["source"], "uploaded");
        fs::copy(&files.certificate, self.root()).unwrap();
    }

    /// Adds a domain with an uploaded certificate, without an order at the authority, and waits
    /// until it is served.
    pub(super) fn serve_uploaded(&self, domain: &str) {
        self.add(domain).unwrap();
        self.upload(domain, &Pair::write(&self.prepared, domain, |_| {}));
        self.lead_here(domain);
        assert_eq!(self.check(domain)["status"], "active");
        let config = self.caller(&[b"http/1.1"]);
        eventually("a handshake with the certificate", || {
            self.connect(&config, domain)
        });
    }

    /// Status and body of a request, by curl, which trusts the authority.
    pub(super) fn get(&self, domain: &str) -> (String, String) {
        let port = self.served.address.port();
        let key = format!("X-Gw-Service-Key: {}", self.prepared.service_key());
        let output = Command::new("curl")
            .args(["--silent", "--show-error", "--max-time", "10"])
            .args(["--write-out", "\n%{http_code}", "--header", &key])
            .arg("--cacert")
            .arg(self.root())
            .args(["--resolve", &format!("{domain}:{port}:127.0.0.1")])
            .arg(format!("https://{domain}:{port}/"))
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let (body, status) = text.rsplit_once('\n').unwrap();
        (status.to_owned(), body.to_owned())
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.served.address
    }

    /// A connection with this server name; `None` without a handshake.
    pub(super) fn connect(&self, config: &Arc<ClientConfig>, name: &str) -> Option<Caller> {
        open(config, name, &self.prepared.about(self.address()))
    }

    /// A caller's configuration that trusts the authority.
    pub(super) fn caller(&self, alpn: &[&[u8]]) -> Arc<ClientConfig> {
        let versions = rustls::DEFAULT_VERSIONS;
        Arc::new(client_config_of(versions, &self.root(), alpn, None))
    }

    /// A caller's configuration that trusts the certificates of the region's names.
    pub(super) fn caller_of_region(&self) -> Arc<ClientConfig> {
        let versions = rustls::DEFAULT_VERSIONS;
        let root = self.prepared.path("data/dev-ca.crt");
        Arc::new(client_config_of(versions, &root, &[b"http/1.1"], None))
    }

    /// The status of a request for `host` on a connection.
    pub(super) fn ask(&self, caller: &mut Caller, host: &str) -> u16 {
        let key = self.prepared.service_key();
        caller.send(format!(
            "GET / HTTP/1.1\r\nHost: {host}\r\nX-Gw-Service-Key: {key}\r\n\r\n"
        ));
        caller.response().status.as_u16()
    }
}

/// Files with a self-signed certificate and its key.
pub(super) struct Pair {
    pub(super) certificate: PathBuf,
    pub(super) key: PathBuf,
}

impl Pair {
    /// Makes a certificate for `domain`, after `adjust`.
    pub(super) fn write(
        prepared: &Prepared,
        domain: &str,
        adjust: impl FnOnce(&mut CertificateParams),
    ) -> Self {
        Self::write_in(&prepared.path(""), domain, adjust)
    }

    /// As [`Self::write`], in this folder.
    pub(super) fn write_in(
        folder: &Path,
        domain: &str,
        adjust: impl FnOnce(&mut CertificateParams),
    ) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new([domain.to_owned()]).unwrap();
        adjust(&mut params);
        let certificate = params.self_signed(&key).unwrap();
        let path = |end: &str| folder.join(format!("{domain}.{end}"));
        let pair = Self {
            certificate: path("pem"),
            key: path("key"),
        };
        fs::write(&pair.certificate, certificate.pem()).unwrap();
        fs::write(&pair.key, key.serialize_pem()).unwrap();
        pair
    }
}

/// Starts a backend that answers with the host of the request.
fn host_backend() -> String {
    backend::start(|mut peer| {
        while let Ok(head) = peer.request_head() {
            let host = head.authority.to_string();
            let length = format!("Content-Length: {}", host.len());
            // The response begins before the request body is received.
            peer.send(format!("HTTP/1.1 200 OK\r\n{length}\r\n\r\n"));
            if peer.body(head.framing).is_err() {
                return;
            }
            peer.send(host);
        }
    })
}

/// Runs the agent with the table of a backend.
fn run_agent(prepared: &Prepared, port: u16, backend: &str) -> Running {
    prepared.set_agent_port(port);
    let config = prepared.path("agent.toml");
    let state_dir = prepared.path("agent");
    let text = format!("state_dir = {state_dir:?}\nbackend = {backend}\n");
    fs::write(&config, text).unwrap();
    let mut command = gw_agent();
    command.arg("run").arg("--config").arg(config);
    Running::new(command.stderr(Stdio::null()).spawn().unwrap())
}

/// Starts the gateway, on this machine if there is one.
fn start(prepared: &Prepared, machine: Option<&Machine>) -> Served {
    let mut command = serve_command(&prepared.path("gateway.toml"));
    match machine {
        Some(machine) => serve(machine.run(&mut command)),
        None => serve(&mut command),
    }
}

/// A connection with this server name; `None` without a handshake.
pub(super) fn open(config: &Arc<ClientConfig>, name: &str, about: &About) -> Option<Caller> {
    let server_name = ServerName::try_from(name.to_owned()).unwrap();
    let mut session = ClientConnection::new(Arc::clone(config), server_name).unwrap();
    let mut socket = socket(about);
    while session.is_handshaking() {
        session.complete_io(&mut socket).ok()?;
    }
    Some(Peer::new(StreamOwned::new(session, socket)))
}
