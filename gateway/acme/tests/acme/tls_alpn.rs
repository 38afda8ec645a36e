//! An order of the apex alone, proved in a TLS handshake.

use std::io::Read;
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::thread;

use async_trait::async_trait;
use gw_acme::{AcmeError, ChallengeKind, Orders, Proof, Publisher, State, tls_alpn};
use rustls::{ServerConnection, Stream};

use super::programs::usable;
use super::servers::named::Named;
use super::servers::pebble::{Options, Pebble};
use super::{PROGRAMS, issue, run, settings};

/// Answers challenges on its port with what is published.
struct Port(Arc<Mutex<Vec<Proof>>>);

#[async_trait]
impl Publisher for Port {
    fn kind(&self) -> ChallengeKind {
        ChallengeKind::TlsAlpn01
    }

    async fn publish(&self, proofs: &[Proof]) -> Result<(), AcmeError> {
        *self.0.lock().unwrap() = proofs.to_vec();
        Ok(())
    }

    async fn is_visible(&self, _proofs: &[Proof]) -> Result<bool, AcmeError> {
        Ok(true)
    }

    async fn withdraw(&self, _proofs: &[Proof]) -> Result<(), AcmeError> {
        self.0.lock().unwrap().clear();
        Ok(())
    }
}

fn serve(listener: &TcpListener, published: &Mutex<Vec<Proof>>) {
    for stream in listener.incoming() {
        let mut stream = stream.unwrap();
        let config = tls_alpn::server_config(&published.lock().unwrap()).unwrap();
        let mut connection = ServerConnection::new(config).unwrap();
        // The authority closes after the handshake.
        let mut rest = Vec::new();
        Stream::new(&mut connection, &mut stream)
            .read_to_end(&mut rest)
            .ok();
    }
}

#[test]
fn the_apex_is_proved_in_a_handshake_and_a_wildcard_is_not() {
    if !usable(&PROGRAMS) {
        return;
    }
    let named = Named::start("eu1 A 127.0.0.1");
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let mut options = Options::new(named.address);
    options.tls_port = listener.local_addr().unwrap().port();
    let pebble = Pebble::start(options);
    let published = Arc::new(Mutex::new(Vec::new()));
    let shown = Arc::clone(&published);
    thread::spawn(move || serve(&listener, &shown));

    let mut apex = settings(&pebble);
    let orders = Orders::new(apex.clone(), Arc::new(Port(Arc::clone(&published))));
    let error = run(issue(&orders, &mut State::default())).unwrap_err();
    assert!(error.message.contains("a wildcard needs DNS"), "{error}");

    apex.names.truncate(1);
    let orders = Orders::new(apex, Arc::new(Port(Arc::clone(&published))));
    let mut state = State::default();
    run(issue(&orders, &mut state)).unwrap();
    assert_eq!(state.certificate.unwrap().names, ["eu1.example.test"]);
    assert!(published.lock().unwrap().is_empty());
}
