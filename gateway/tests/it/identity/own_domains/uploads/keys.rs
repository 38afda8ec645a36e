//! Kinds of keys of own domains, and what their handshakes may cost.

use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use gw_bed::dns::{self, Answer};
use rcgen::{CertificateParams, KeyPair, RsaKeySize, SignatureAlgorithm};
use rustix::time::{ClockId, clock_gettime};
use rustls::{CertificateError, ClientConnection, Error, SignatureScheme};
use rustls_pki_types::PrivateKeyDer;
use serde_json::json;

use super::DOMAIN;
use crate::support::peers::caller::{HOST, session, socket};
use crate::support::scene::Scene;

/// A domain of another account, and the host name of its service.
const OTHER: &str = "shop.rival.test";
const OTHER_HOST: &str = "rival--api.eu1.gw.localhost";
/// Handshakes at once.
const FLOOD: u32 = 150;
/// Time of a worker that handshakes for the domains of one account may take at once. After that
/// they get a quarter of its time.
const AT_ONCE: Duration = Duration::from_millis(50);

/// A certificate for `domain` and its key, PEM.
fn pair(domain: &str, key: &KeyPair) -> (String, String) {
    let params = CertificateParams::new([domain.to_owned()]).unwrap();
    let certificate = params.self_signed(key).unwrap();
    (certificate.pem(), key.serialize_pem())
}

fn generated(algorithm: &'static SignatureAlgorithm) -> KeyPair {
    KeyPair::generate_for(algorithm).unwrap()
}

/// Starts a DNS server in which both domains are aliases of their services, and which has no other
/// records. Returns its address.
fn start_dns() -> SocketAddr {
    let aliases = [(DOMAIN, HOST), (OTHER, OTHER_HOST)];
    dns::serve(move |asked, _| {
        let found = aliases.iter().find(|(alias, _)| *alias == asked);
        found.map_or(Answer::Nothing, |(_, of)| Answer::Record {
            kind: dns::CNAME,
            data: dns::name(of),
        })
    })
}

/// A scene that finds both domains in DNS.
fn start() -> Scene {
    Scene::service()
        .agent()
        .workers(1)
        .configuration(format!("dns_servers = [\"{}\"]\n", start_dns()))
        .start()
}

/// Adds a domain with an uploaded certificate, which is served once this returns.
fn serve(scene: &Scene, account: &str, service: &str, domain: &str, key: &KeyPair) {
    let (chain, key) = pair(domain, key);
    let api = scene.api();
    let path = format!("/accounts/{account}/services/{service}/domains");
    let added = api.post(&path, &json!({ "name": domain }));
    assert_eq!(added["status"], "active", "{added}");
    let path = format!("/accounts/{account}/domains/{domain}/certificate");
    api.post(&path, &json!({ "chain": chain, "key": key }));
    api.await_workers();
}

/// The error of a caller that trusts the authority of the region.
fn refusal(scene: &Scene, domain: &str) -> CertificateError {
    let mut session: ClientConnection = session(&scene.about, domain, &[b"http/1.1"], None);
    let mut socket = socket(&scene.about);
    let error = loop {
        if let Err(error) = session.complete_io(&mut socket) {
            break error.into_inner().unwrap();
        }
    };
    match *error.downcast::<Error>().unwrap() {
        Error::InvalidCertificate(error) => error,
        error => panic!("{error}"),
    }
}

#[test]
fn a_certificate_with_slow_handshakes_is_refused() {
    let scene = start();
    let quick = generated(&rcgen::PKCS_ECDSA_P384_SHA384);
    serve(&scene, "demo", "echo", DOMAIN, &quick);
    assert_eq!(refusal(&scene, DOMAIN), CertificateError::UnknownIssuer);

    let slow = generated(&rcgen::PKCS_ECDSA_P521_SHA512);
    let (chain, key) = pair(DOMAIN, &slow);
    let path = format!("/accounts/demo/domains/{DOMAIN}");
    let api = scene.api();
    let upload = json!({ "chain": chain, "key": key });
    let refused = api.ask("POST", &format!("{path}/certificate"), &upload);
    assert_eq!(refused.status, 422, "{refused:?}");
    let text = refused.body.to_string();
    assert!(
        text.contains("ECDSA P-256 or P-384, Ed25519, or RSA"),
        "{text}"
    );
    assert!(api.get(&path).body.get("finding").is_none());
    assert_eq!(refusal(&scene, DOMAIN), CertificateError::UnknownIssuer);
}

/// Time of one signature on a core of its own.
fn cost(key: &KeyPair) -> Duration {
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let key = rustls::crypto::aws_lc_rs::sign::any_supported_type(&key).unwrap();
    let signer = key
        .choose_scheme(&[SignatureScheme::RSA_PSS_SHA256])
        .unwrap();
    // The time of the thread, because others may run meanwhile.
    let now = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    let signature = || {
        let began = now();
        signer.sign(b"a transcript").unwrap();
        now() - began
    };
    (0..10).map(|_| signature()).min().unwrap()
}

/// Whether the gateway has neither answered nor ended a connection.
fn waits(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let peeked = stream.peek(&mut [0]);
    stream.set_nonblocking(false).unwrap();
    peeked.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

/// Whether the gateway answers a ClientHello. Otherwise it ends the connection after 5 s.
fn is_answered(stream: &TcpStream) -> bool {
    let mut first = [0];
    // The content type of a record with a handshake (RFC 8446 §5.1).
    stream
        .peek(&mut first)
        .is_ok_and(|count| count == 1 && first[0] == 22)
}

#[test]
fn a_flood_of_expensive_handshakes_takes_a_quarter_of_a_worker_and_delays_no_other_account() {
    let scene = start();
    scene.api().create_service("rival", "api");
    let expensive = KeyPair::generate_rsa_for(&rcgen::PKCS_RSA_SHA256, RsaKeySize::_4096).unwrap();
    serve(&scene, "demo", "echo", DOMAIN, &expensive);
    let quick = generated(&rcgen::PKCS_ECDSA_P256_SHA256);
    serve(&scene, "rival", "api", OTHER, &quick);

    let hello = || {
        let mut hello = Vec::new();
        session(&scene.about, DOMAIN, &[b"http/1.1"], None)
            .write_tls(&mut hello)
            .unwrap();
        (socket(&scene.about), hello)
    };
    let cost_before = cost(&expensive);
    // On a busy machine the gateway may have answered all of a flood before the others come.
    let shown = (0..5).find_map(|_| {
        let mut flood: Vec<(TcpStream, Vec<u8>)> = (0..FLOOD).map(|_| hello()).collect();
        let began = Instant::now();
        for (stream, hello) in &mut flood {
            stream.write_all(hello).unwrap();
        }
        // These two requests come last, and do not wait for the flood.
        assert_eq!(refusal(&scene, OTHER), CertificateError::UnknownIssuer);
        let mut caller = scene.connect();
        caller.send(scene.get("/"));
        assert_eq!(caller.response().status, 200);
        let waiting = flood.iter().filter(|(stream, _)| waits(stream)).count();
        let answered = flood
            .iter()
            .filter(|(stream, _)| is_answered(stream))
            .count();
        (waiting > 0).then_some((answered, began.elapsed()))
    });
    let (answered, took) = shown.expect("all of the flood went first");
    let answered = u32::try_from(answered).unwrap();
    let all = cost_before.min(cost(&expensive)) * answered.saturating_sub(1);
    // The bound is a third of the worker, because the cost of a handshake varies.
    assert!(
        answered > 1 && took >= 3 * all.saturating_sub(AT_ONCE),
        "{answered} in {took:?}: {all:?}"
    );
}
