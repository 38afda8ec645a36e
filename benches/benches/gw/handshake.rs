//! TLS 1.3 handshakes in memory: the server alone, and both ends. Without sockets, so that a figure
//! is the cost of key exchange, signature, verification and tickets. In CPU time of the thread,
//! which other programs on the machine change least.

use std::sync::Arc;
use std::time::Duration;

use criterion::Criterion;
use gw_base::tls::tickets::{TICKET_SECRET_LENGTH, TicketKeys};
use gw_shared::id::TicketKeyId;
use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_RSA_SHA256, RsaKeySize};
use rustix::time::{ClockId, clock_gettime};
use rustls::crypto::SupportedKxGroup;
use rustls::crypto::aws_lc_rs::{default_provider, kx_group};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::NoServerSessionStorage;
use rustls::version::TLS13;
use rustls::{
    ClientConfig, ClientConnection, ConnectionCommon, HandshakeKind, RootCertStore, ServerConfig,
    ServerConnection,
};

const NAME: &str = "localhost";

pub(crate) fn benches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("handshake");
    let p256 = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
    let rsa = KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048).unwrap();
    for (certificate, key) in [("ECDSA P-256", &p256), ("RSA-2048", &rsa)] {
        for (exchange, key_exchange) in [
            ("X25519", kx_group::X25519),
            ("X25519MLKEM768", kx_group::X25519MLKEM768),
        ] {
            let ends = Ends::new(key, key_exchange);
            for kind in [HandshakeKind::Full, HandshakeKind::Resumed] {
                let name = format!("{certificate}, {exchange}, {kind:?}");
                let run = |handshakes, share: fn(Cost) -> Duration| -> Duration {
                    (0..handshakes).map(|_| share(ends.shake_hands(kind))).sum()
                };
                group.bench_function(format!("{name}: server"), |bencher| {
                    bencher.iter_custom(|handshakes| run(handshakes, |cost| cost.server));
                });
                group.bench_function(format!("{name}: both ends"), |bencher| {
                    bencher.iter_custom(|handshakes| run(handshakes, |cost| cost.both));
                });
            }
        }
    }
    group.finish();
}

/// CPU time of a handshake, from the first byte to the tickets.
#[derive(Default)]
struct Cost {
    server: Duration,
    both: Duration,
}

/// Configurations of a client and a server, as callers and gateways have them.
struct Ends {
    /// Does not resume.
    client: Arc<ClientConfig>,
    /// Keeps the tickets of its sessions.
    resuming: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    key_exchange: &'static dyn SupportedKxGroup,
}

impl Ends {
    fn new(key: &KeyPair, key_exchange: &'static dyn SupportedKxGroup) -> Self {
        let mut provider = default_provider();
        provider.kx_groups = vec![key_exchange];
        let provider = Arc::new(provider);
        let params = CertificateParams::new([NAME.to_owned()]).unwrap();
        let certificate = params.self_signed(key).unwrap();
        let private_key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], private_key)
            .unwrap();
        let secret = [7; TICKET_SECRET_LENGTH];
        server.ticketer = Arc::new(TicketKeys::new([(TicketKeyId::random(), &secret[..])]));
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 2;
        let mut roots = RootCertStore::empty();
        roots.add(certificate.der().clone()).unwrap();
        let resuming = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let mut client = resuming.clone();
        client.resumption = rustls::client::Resumption::disabled();
        let ends = Self {
            client: Arc::new(client),
            resuming: Arc::new(resuming),
            server: Arc::new(server),
            key_exchange,
        };
        ends.connect(&ends.resuming, HandshakeKind::Full);
        ends
    }

    fn shake_hands(&self, kind: HandshakeKind) -> Cost {
        match kind {
            HandshakeKind::Resumed => self.connect(&self.resuming, kind),
            _ => self.connect(&self.client, kind),
        }
    }

    fn connect(&self, client: &Arc<ClientConfig>, kind: HandshakeKind) -> Cost {
        let mut cost = Cost::default();
        let began = cpu_time();
        let name = NAME.try_into().unwrap();
        let mut client = ClientConnection::new(Arc::clone(client), name).unwrap();
        let hello = pass(&mut client, &[]);
        let server_began = cpu_time();
        let mut server = ServerConnection::new(Arc::clone(&self.server)).unwrap();
        let flight = pass(&mut server, &hello);
        cost.server += cpu_time() - server_began;
        let answer = pass(&mut client, &flight);
        let server_began = cpu_time();
        let tickets = pass(&mut server, &answer);
        cost.server += cpu_time() - server_began;
        pass(&mut client, &tickets);
        cost.both = cpu_time() - began;
        assert!(!client.is_handshaking() && !server.is_handshaking());
        assert_eq!(client.handshake_kind(), Some(kind));
        let group = client.negotiated_key_exchange_group().unwrap();
        assert_eq!(group.name(), self.key_exchange.name());
        cost
    }
}

fn cpu_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap()
}

/// Gives `end` what the other one has sent. Returns its answer.
fn pass<Data>(end: &mut ConnectionCommon<Data>, mut received: &[u8]) -> Vec<u8> {
    while !received.is_empty() {
        end.read_tls(&mut received).unwrap();
        end.process_new_packets().unwrap();
    }
    let mut sent = Vec::new();
    while end.wants_write() {
        end.write_tls(&mut sent).unwrap();
    }
    sent
}
