//! Records that only time or an earlier version makes, in a complete gateway with its agent; and
//! the commands that a demo prints.

use std::io::Read;
use std::net::TcpStream;
use std::sync::Arc;

use gw_base::clock::Timestamp;
use gw_bed::tls;
use gw_control_plane::control::changes::audit;
use gw_control_plane::control::records::domain;
use gw_store::{AgentRecord, AuditQuery, StoredRecord};
use gw_telemetry::counters::WorkerReport;
use rcgen::{CertificateParams, KeyPair, SignatureAlgorithm};
use rustls::{CertificateError, ClientConnection, Error, StreamOwned};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use serde_json::json;

use super::*;

const APEX: &str = "eu1.gw.localhost";
/// Host name of the demo's service.
pub(crate) const HOST: &str = "demo--echo.eu1.gw.localhost";

/// A connection of a caller.
pub(crate) type Caller = StreamOwned<ClientConnection, TcpStream>;

/// A connection before its handshake, with this server name.
fn connect_to(demo: &Demo, name: &'static str) -> Caller {
    let authority = CertificateDer::from_pem_file(&demo.about.ca_file).unwrap();
    let config = tls::client([authority], None, &[]);
    let session = ClientConnection::new(Arc::new(config), name.try_into().unwrap()).unwrap();
    let stream = TcpStream::connect(demo.gateway().address()).unwrap();
    let timeout = Some(Duration::from_secs(60));
    stream.set_read_timeout(timeout).unwrap();
    StreamOwned::new(session, stream)
}

/// A connection to the demo's service.
pub(crate) fn connect(demo: &Demo) -> Caller {
    connect_to(demo, HOST)
}

/// Sends a request to the demo's service. Fails if the connection has ended.
fn send(demo: &Demo, caller: &mut Caller, path: &str) -> io::Result<()> {
    let key = &demo.about.service_key;
    let request = format!("GET {path} HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n\r\n");
    caller.write_all(request.as_bytes())
}

/// The beginning of a response, or nothing if the connection has ended.
fn receive(caller: &mut Caller) -> String {
    let mut buffer = [0; 64 * 1024];
    let read = caller.read(&mut buffer).unwrap_or(0);
    String::from_utf8_lossy(&buffer[..read]).into_owned()
}

/// The beginning of the response to a request, or nothing if the connection has ended.
pub(crate) fn ask(demo: &Demo, caller: &mut Caller, path: &str) -> String {
    match send(demo, caller, path) {
        Ok(()) => receive(caller),
        Err(_) => String::new(),
    }
}

pub(crate) fn is_served(demo: &Demo, caller: &mut Caller) -> bool {
    ask(demo, caller, "/status/204").starts_with("HTTP/1.1 204 ")
}

pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(Instant::now() < deadline, "timed out waiting for: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What the workers report. They have handled earlier messages then.
pub(crate) fn reports(demo: &Demo) -> Vec<WorkerReport> {
    demo.gateway().control().reports()
}

/// Generations of the open tunnels.
fn tunnels(demo: &Demo) -> Vec<u64> {
    let reports = reports(demo);
    let tunnels = reports.iter().flat_map(|report| &report.tunnels);
    tunnels.map(|tunnel| tunnel.generation).collect()
}

/// The record of the demo's agent.
fn agent(demo: &Demo) -> AgentRecord {
    let records = demo.gateway().control().records();
    let mut agents = records.agents.into_values();
    agents.find(|agent| agent.name == AGENT).unwrap()
}

fn csr(key: &KeyPair) -> String {
    let request = CertificateParams::default().serialize_request(key);
    request.unwrap().pem().unwrap()
}

#[test]
fn certificate_renewal_does_not_interrupt_requests() {
    let folder = tempfile::tempdir().unwrap();
    let options = Options {
        workers: 2,
        rate: Rate::new(1_000_000, 1_000_000).unwrap(),
        ..Options::default()
    };
    let config = Config {
        agent_certificate_lifetime: Duration::from_secs(15),
        ..options.config(folder.path().to_owned())
    };
    let demo = Demo::start_with(&config, &options).unwrap();
    let begun = tunnels(&demo);
    let first = agent(&demo);
    // One request spans two renewals; short requests run beside it.
    let mut long = connect(&demo);
    send(&demo, &mut long, "/slow?ms=26000").unwrap();
    let mut caller = connect(&demo);
    let mut renewals = 0;
    let mut last = first.clone();
    eventually("two renewals are done", || {
        assert!(is_served(&demo, &mut caller));
        let now = agent(&demo);
        if now.certificate_not_after > last.certificate_not_after {
            assert_ne!(now.key, last.key, "each certificate is for a new key");
            (renewals, last) = (renewals + 1, now);
        }
        renewals == 2
    });
    assert!(receive(&mut long).starts_with("HTTP/1.1 200 "));
    // The tunnel has outlived the first certificate.
    assert_eq!(tunnels(&demo), begun);
    let query = AuditQuery {
        account: None,
        before: None,
        limit: 1,
    };
    let log = audit::list(demo.gateway().control(), &query).unwrap();
    let entry = &log.items[0];
    assert_eq!(
        (entry.action.as_str(), &entry.actor),
        ("agent.certificate", &format!("agent {}", first.id))
    );
    demo.stop();
}

/// Asks for a certificate for `key` in the name of the demo's agent. The request is signed with
/// this key. Returns the response.
fn ask_for_certificate(demo: &Demo, key: &KeyPair) -> String {
    let body = json!({ "csr": csr(key), "agent_id": agent(demo).id }).to_string();
    let mut caller = connect_to(demo, APEX);
    let request = format!(
        "POST /csr HTTP/1.1\r\nHost: {APEX}\r\nContent-Type: application/json\r\n\
         Connection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    caller.write_all(request.as_bytes()).unwrap();
    let mut response = String::new();
    loop {
        let part = receive(&mut caller);
        if part.is_empty() {
            return response;
        }
        response.push_str(&part);
    }
}

#[test]
fn an_agent_with_an_expired_certificate_recovers_within_the_grace_period() {
    let demo = Demo::start(&Options::default()).unwrap();
    // Makes the certificate one that has expired so many days ago.
    let expire = |days: i64| {
        let not_after = Timestamp(Timestamp::now().0 - days * 24 * 3600 - 5);
        let record = AgentRecord {
            certificate_not_after: Some(not_after),
            ..agent(&demo)
        };
        let record = StoredRecord::Agent(record);
        demo.gateway().control().put(&record).unwrap();
        Some(not_after)
    };
    let expired = expire(29);
    // The gateway closes the tunnel; the agent recovers at /csr with its old key and reconnects.
    eventually("a new certificate", || {
        agent(&demo).certificate_not_after > expired
    });
    eventually("the tunnel is back", || {
        is_served(&demo, &mut connect(&demo))
    });
    expire(31);
    eventually("no tunnel is left", || tunnels(&demo).is_empty());
    let key = KeyPair::generate().unwrap();
    let refused = ask_for_certificate(&demo, &key);
    assert!(refused.starts_with("HTTP/1.1 401 "), "{refused}");
    assert!(
        refused.contains("GW_AGENT_CERTIFICATE_EXPIRED"),
        "{refused}"
    );
    // A recovery with another key is refused.
    expire(1);
    let refused = ask_for_certificate(&demo, &key);
    assert!(refused.starts_with("HTTP/1.1 401 "), "{refused}");
    assert!(refused.contains("GW_ENROLLMENT_INVALID"), "{refused}");
    demo.stop();
}

const DOMAIN: &str = "api.customer.test";

/// Stores an active domain with an uploaded certificate, without the checks of an upload.
fn store_domain(demo: &Demo, algorithm: &'static SignatureAlgorithm) {
    let key = KeyPair::generate_for(algorithm).unwrap();
    let params = CertificateParams::new([DOMAIN.to_owned()]).unwrap();
    let chain = params.self_signed(&key).unwrap().pem();
    let material = json!({ "served": { "chain": chain, "key": key.serialize_pem() } });
    let record = json!({
        "id": DOMAIN,
        "account": ACCOUNT,
        "service": SERVICE,
        "state": "active",
        "since": 0,
        "certificate": { "not_before": 0, "not_after": u32::MAX, "source": "uploaded" },
        "created_at": 0,
        "material": material.to_string(),
    });
    let record = StoredRecord::Domain(serde_json::from_value(record).unwrap());
    demo.gateway().control().put(&record).unwrap();
    reports(demo);
}

/// The error of a caller of the domain that trusts the authority of the region.
fn refusal(demo: &Demo) -> CertificateError {
    let mut caller = connect_to(demo, DOMAIN);
    let error = caller.write_all(b"x").unwrap_err().into_inner().unwrap();
    match *error.downcast::<Error>().unwrap() {
        Error::InvalidCertificate(error) => error,
        error => panic!("{error}"),
    }
}

#[test]
fn a_stored_certificate_with_slow_handshakes_is_not_served() {
    let demo = Demo::start(&Options::default()).unwrap();
    store_domain(&demo, &rcgen::PKCS_ECDSA_P384_SHA384);
    assert_eq!(refusal(&demo), CertificateError::UnknownIssuer);

    store_domain(&demo, &rcgen::PKCS_ECDSA_P521_SHA512);
    let shown = domain::show(demo.gateway().control(), ACCOUNT, DOMAIN).unwrap();
    let finding = shown.finding.unwrap();
    assert!(
        finding.starts_with("the region's certificate is served"),
        "{finding}"
    );
    assert!(finding.contains("use ECDSA P-256"), "{finding}");
    let refused = refusal(&demo);
    let CertificateError::NotValidForNameContext { presented, .. } = refused else {
        panic!("the certificate of the region is for other names: {refused}");
    };
    assert!(presented.iter().any(|name| name.contains(APEX)));
    demo.stop();
}

#[test]
fn the_printed_commands_fit_the_backend() {
    let printed = |backend: Option<&str>| {
        let about = About {
            base_url: "https://eu1.gw.localhost:1".to_owned(),
            tenant_url: "https://demo--echo.eu1.gw.localhost:1".to_owned(),
            account: ACCOUNT,
            service: SERVICE,
            client_id: "id".to_owned(),
            client_secret: "secret".to_owned(),
            service_key: "key".to_owned(),
            ca_file: "ca.crt".into(),
            admin_url: String::new(),
            console_url: String::new(),
            admin_token: String::new(),
            backend: backend.map(str::to_owned),
        };
        let mut out = Vec::new();
        about.write_hints(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    };
    let of_echo = ["/hello", "/bytes/", "/sse", "/slow", "/status/"];
    let text = printed(None);
    assert!(of_echo.iter().all(|path| text.contains(path)), "{text}");
    let text = printed(Some("http://127.0.0.1:3000"));
    assert!(!of_echo.iter().any(|path| text.contains(path)), "{text}");
    for part in [
        "  # The backend is http://127.0.0.1:3000.\n",
        "'X-Gw-Service-Key: key' https://demo--echo.eu1.gw.localhost:1/\n",
        "\nStop with Ctrl-C.\n",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}
