//! The key exchange and the versions of TLS: of callers, of tunnels, and between nodes.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::sync::Arc;

use rustls::crypto::aws_lc_rs::{default_provider, kx_group};
use rustls::crypto::{CryptoProvider, SupportedKxGroup};
use rustls::version::{TLS12, TLS13};
use rustls::{
    AlertDescription, ClientConnection, HandshakeKind, NamedGroup, SupportedProtocolVersion,
};

use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::peers::caller::{Caller, HOST, Tls, client_config_with, socket};
use crate::support::peers::gate::{Gate, Target};
use crate::support::peers::http1_peer::Peer;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::region::Region;

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// A session before its handshake, with this version and key exchange. `None` is all key exchanges
/// of rustls.
fn session(
    prepared: &Prepared,
    version: &'static SupportedProtocolVersion,
    key_exchange: Option<&'static dyn SupportedKxGroup>,
) -> ClientConnection {
    let mut provider: CryptoProvider = default_provider();
    if let Some(key_exchange) = key_exchange {
        provider.kx_groups = vec![key_exchange];
    }
    let ca_file = prepared.path("data/dev-ca.crt");
    let config = client_config_with(provider, &[version], &ca_file, &[b"http/1.1"], None);
    ClientConnection::new(Arc::new(config), HOST.try_into().unwrap()).unwrap()
}

/// Sends a request. Returns the status, the key exchange and how the connection began.
fn request(
    prepared: &Prepared,
    address: SocketAddr,
    session: ClientConnection,
) -> (u16, NamedGroup, HandshakeKind) {
    let stream = Tls::new(session, socket(&prepared.about(address)));
    let mut caller: Caller = Peer::new(stream);
    caller.send(prepared.get("/"));
    let status = caller.response().status.as_u16();
    let connection = &caller.stream.conn;
    let group = connection.negotiated_key_exchange_group().unwrap().name();
    (status, group, connection.handshake_kind().unwrap())
}

#[test]
fn callers_and_tunnels_prefer_the_hybrid_key_exchange_and_others_are_served() {
    let prepared = Prepared::new();
    let served = prepared.serve_with(&prepared.config());
    let address = served.address;
    let gate = Gate::to(Target::Tcp(address));
    let _agent = prepared.run_agent(gate.address.port(), &backend::answering(OK));
    prepared.wait_for_tunnel(address);
    assert_eq!(gate.key_exchanges(), [NamedGroup::X25519MLKEM768]);

    let hybrid = kx_group::X25519MLKEM768;
    for (version, key_exchange, expected) in [
        (&TLS13, None, NamedGroup::X25519MLKEM768),
        (&TLS13, Some(hybrid), NamedGroup::X25519MLKEM768),
        (&TLS13, Some(kx_group::X25519), NamedGroup::X25519),
        (&TLS13, Some(kx_group::SECP256R1), NamedGroup::secp256r1),
        (&TLS12, None, NamedGroup::X25519),
        (&TLS12, Some(kx_group::SECP384R1), NamedGroup::secp384r1),
    ] {
        let session = session(&prepared, version, key_exchange);
        let expected = (200, expected, HandshakeKind::Full);
        let found = request(&prepared, address, session);
        assert_eq!(found, expected, "{version:?} {key_exchange:?}");
    }
}

#[test]
fn a_client_hello_in_many_segments_is_answered() {
    let prepared = Prepared::new();
    let (served, _agent) = prepared.start(&backend::answering(OK));
    for (size, version) in [(1, &TLS13), (100, &TLS13), (1, &TLS12)] {
        let mut session = session(&prepared, version, None);
        let mut hello = Vec::new();
        session.write_tls(&mut hello).unwrap();
        assert!(version == &TLS12 || hello.len() > 1216, "{}", hello.len());
        // Without Nagle's algorithm each piece is a segment.
        let mut connection = socket(&prepared.about(served.address));
        for piece in hello.chunks(size) {
            connection.write_all(piece).unwrap();
        }
        let mut caller: Caller = Peer::new(Tls::new(session, connection));
        caller.send(prepared.get("/"));
        assert_eq!(caller.response().status, 200);
    }
}

#[test]
fn nodes_exchange_keys_by_the_hybrid_key_exchange() {
    let Some(region) = Region::start_gated(2) else {
        return;
    };
    let _agent = region.run_agent(&backend::answering(OK));
    let owner = region.owner();
    eventually("the other node relays to the owner", || {
        (region.request(1 - owner) == "200").then_some(())
    });
    let key_exchanges = region.peer_gates[owner].key_exchanges();
    assert!(!key_exchanges.is_empty());
    for group in &key_exchanges {
        assert_eq!(*group, NamedGroup::X25519MLKEM768, "{key_exchanges:?}");
    }
}

#[test]
fn tls_min_version_refuses_callers_of_tls_1_2() {
    let prepared = Prepared::new();
    let config = format!("tls_min_version = \"1.3\"\n{}", prepared.config());
    let served = prepared.serve_with(&config);
    let mut connection = socket(&prepared.about(served.address));
    let refused = session(&prepared, &TLS12, None).complete_io(&mut connection);
    let refused = refused.unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    let alert = refused.get_ref().and_then(|error| error.downcast_ref());
    let expected = rustls::Error::AlertReceived(AlertDescription::ProtocolVersion);
    assert_eq!(alert, Some(&expected));
    // No agent is connected, but the request has arrived.
    let session = session(&prepared, &TLS13, None);
    let (status, _, _) = request(&prepared, served.address, session);
    assert!(matches!(status, 502 | 504), "{status}");
}
