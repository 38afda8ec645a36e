//! Backend transports: TLS, HTTP/2, Unix sockets, and several backends of one service.

mod connection_auth;
mod gone_backends;
mod reused_connections;
mod unprocessed;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use http::Method;
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use rustls::crypto::aws_lc_rs;
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection, StreamOwned};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use crate::support::SOON;
use crate::support::peers::backend;
use crate::support::peers::caller::HOST;
use crate::support::peers::http1_peer::Peer;
use crate::support::peers::http2_backend::http2;
use crate::support::scene::Scene;

const NAME: &str = "backend.example";

/// A scene whose agent has `backends` (TOML) as its backend configuration.
fn scene_with(folder: &Path, backends: &str) -> Scene {
    let file = folder.join("agent.toml");
    std::fs::write(&file, format!("backend = {backends}\n")).unwrap();
    Scene::service().agent_with(file).start()
}

/// A certificate authority with a server certificate and a client certificate, in files.
struct Authority {
    folder: tempfile::TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        std::fs::write(
            folder.path().join("ca.crt"),
            params.self_signed(&key).unwrap().pem(),
        )
        .unwrap();
        let authority = Self {
            folder,
            issuer: Issuer::new(params, key),
        };
        authority.issue("server", ExtendedKeyUsagePurpose::ServerAuth);
        authority.issue("client", ExtendedKeyUsagePurpose::ClientAuth);
        authority
    }

    fn issue(&self, name: &str, purpose: ExtendedKeyUsagePurpose) {
        let mut params = CertificateParams::new(vec![NAME.to_owned()]).unwrap();
        params.extended_key_usages = vec![purpose];
        let key = KeyPair::generate().unwrap();
        std::fs::write(self.file(&format!("{name}.key")), key.serialize_pem()).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        std::fs::write(self.file(&format!("{name}.crt")), certificate.pem()).unwrap();
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn certificate(&self, name: &str) -> CertificateDer<'static> {
        CertificateDer::from_pem_file(self.file(name)).unwrap()
    }

    fn server(&self, alpn: &[&[u8]], asks_for_certificates: bool) -> Arc<ServerConfig> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let builder = builder.with_safe_default_protocol_versions().unwrap();
        let builder = if asks_for_certificates {
            let mut roots = RootCertStore::empty();
            roots.add(self.certificate("ca.crt")).unwrap();
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .unwrap();
            builder.with_client_cert_verifier(verifier)
        } else {
            builder.with_no_client_auth()
        };
        let key = PrivateKeyDer::from_pem_file(self.file("server.key")).unwrap();
        let mut config = builder
            .with_single_cert(vec![self.certificate("server.crt")], key)
            .unwrap();
        config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
        Arc::new(config)
    }

    /// TOML options of an agent that trusts this authority.
    fn trusted(&self, url: &str) -> String {
        format!(
            "urls = '{url}', ca_file = '{}', server_name = '{NAME}'",
            self.file("ca.crt").display()
        )
    }
}

/// Starts a TLS backend that answers with host and target of the request. Returns its URL.
fn tls(config: Arc<ServerConfig>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for connection in listener.incoming() {
            let connection = connection.unwrap();
            let config = Arc::clone(&config);
            connection.set_read_timeout(Some(SOON)).unwrap();
            let session = ServerConnection::new(config).unwrap();
            thread::spawn(move || answer_target(Peer::new(StreamOwned::new(session, connection))));
        }
    });
    url
}

/// Answers requests with their host and target.
fn answer_target<S: Read + Write>(mut peer: Peer<S>) {
    while let Ok((head, _, _)) = peer.request() {
        let text = format!("{}{}", head.authority, head.target);
        peer.send(format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{text}",
            text.len()
        ));
    }
}

fn body(scene: &Scene, target: &str) -> String {
    let mut caller = scene.connect();
    caller.send(scene.get(target));
    let response = caller.response();
    assert_eq!(
        response.status,
        200,
        "{}",
        String::from_utf8_lossy(&response.body)
    );
    String::from_utf8(response.body).unwrap()
}

/// Code and message of the error that the gateway answers with.
fn error(scene: &Scene) -> (String, String) {
    let mut caller = scene.connect();
    caller.send(scene.get("/"));
    let response = caller.response();
    (
        response.code(),
        response.json()["error"]["message"]
            .as_str()
            .unwrap()
            .to_owned(),
    )
}

#[test]
fn a_tls_backend_is_verified_by_authority_and_name() {
    let authority = Authority::new();
    let stranger = Authority::new();
    let url = tls(authority.server(&[b"http/1.1"], false));
    let trusting = scene_with(
        authority.folder.path(),
        &format!("{{ {} }}", authority.trusted(&url)),
    );
    assert_eq!(body(&trusting, "/a"), format!("{HOST}/a"));
    assert_eq!(body(&trusting, "/b"), format!("{HOST}/b"));

    let wary = scene_with(
        stranger.folder.path(),
        &format!("{{ {} }}", stranger.trusted(&url)),
    );
    let (code, message) = error(&wary);
    assert!(
        code == "GW_BACKEND_TLS" && message.contains("ca_file") && message.contains(&url),
        "{code}: {message}"
    );
    let ca_file = authority.file("ca.crt");
    let unnamed = format!("{{ urls = '{url}', ca_file = '{}' }}", ca_file.display());
    let (code, message) = error(&scene_with(stranger.folder.path(), &unnamed));
    assert!(
        code == "GW_BACKEND_TLS" && message.contains("server_name"),
        "{code}: {message}"
    );
    // The certificate itself, behind a byte-order mark, is trusted for every name.
    let leaf = authority.file("leaf.crt");
    let certificate = std::fs::read_to_string(authority.file("server.crt")).unwrap();
    std::fs::write(&leaf, format!("\u{feff}{certificate}")).unwrap();
    let unnamed = format!("{{ urls = '{url}', ca_file = '{}' }}", leaf.display());
    let pinned = scene_with(stranger.folder.path(), &unnamed);
    assert_eq!(body(&pinned, "/c"), format!("{HOST}/c"));
}

#[test]
fn the_configured_client_certificate_is_presented_to_a_backend() {
    let authority = Authority::new();
    let url = tls(authority.server(&[], true));
    let [certificate, key] =
        ["client.crt", "client.key"].map(|name| authority.file(name).display().to_string());
    let trusted = authority.trusted(&url);
    let known =
        format!("{{ {trusted}, client_certificate = '{certificate}', client_key = '{key}' }}");
    assert_eq!(
        body(&scene_with(authority.folder.path(), &known), "/"),
        format!("{HOST}/")
    );
    let (code, message) = error(&scene_with(
        authority.folder.path(),
        &format!("{{ {trusted} }}"),
    ));
    assert!(
        code == "GW_BACKEND_TLS" && message.contains("client_certificate"),
        "{code}: {message}"
    );
}

#[test]
fn an_http2_backend_exchanges_bodies_and_trailers() {
    let scene = Scene::service().agent_to(http2()).start();
    let mut caller = scene.connect();
    for _ in 0..3 {
        let rest = "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX-Checksum: 7\r\n\r\n";
        caller.send(scene.request("POST /p?q", rest));
        let response = caller.response();
        assert_eq!(
            String::from_utf8_lossy(&response.body),
            format!("http://{HOST}/p?q 3 1")
        );
        assert_eq!(response.trailers["grpc-status"], "0");
    }
    // Larger than any flow control window.
    let large = "x".repeat(3_000_000);
    caller.send(scene.request(
        "POST /",
        &format!("Content-Length: {}\r\n\r\n{large}", large.len()),
    ));
    assert_eq!(
        String::from_utf8_lossy(&caller.response().body),
        format!("http://{HOST}/ 3000000 0")
    );
}

#[test]
fn a_backend_on_a_unix_socket_is_reached() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("backend.sock");
    let listener = UnixListener::bind(&path).unwrap();
    thread::spawn(move || {
        for connection in listener.incoming() {
            thread::spawn(move || answer_target(Peer::new(connection.unwrap())));
        }
    });
    let scene = Scene::service()
        .agent_to(format!("unix:{}", path.display()))
        .start();
    assert_eq!(body(&scene, "/one"), format!("{HOST}/one"));
    assert_eq!(body(&scene, "/two"), format!("{HOST}/two"));
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_backend_on_a_unix_socket_may_close_between_requests() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("backend.sock");
    let listener = UnixListener::bind(&path).unwrap();
    thread::spawn(move || {
        for connection in listener.incoming() {
            let mut peer = Peer::new(connection.unwrap());
            drop(peer.request());
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        }
    });
    let scene = Scene::service()
        .agent_to(format!("unix:{}", path.display()))
        .start();
    let mut caller = scene.connect();
    for _ in 0..20 {
        caller.send(scene.get("/"));
        assert!(matches!(caller.response().status.as_u16(), 200));
    }
}

#[test]
fn requests_go_to_the_reachable_backends() {
    let first = Arc::new(AtomicUsize::new(0));
    let second = Arc::new(AtomicUsize::new(0));
    let counting = |count: &Arc<AtomicUsize>| {
        let count = Arc::clone(count);
        backend::start(move |mut peer| {
            while peer.request().is_ok() {
                count.fetch_add(1, Ordering::Relaxed);
                peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
            }
        })
    };
    let (_closed, dead) = backend::refusing();
    let dead = format!("http://{dead}");
    let folder = tempfile::tempdir().unwrap();
    let scene_of = |urls: &[&str]| scene_with(folder.path(), &serde_json::to_string(urls).unwrap());

    let scene = scene_of(&[&dead, &counting(&first), &counting(&second)]);
    let mut caller = scene.connect();
    for _ in 0..60 {
        caller.send(scene.get("/"));
        assert_eq!(caller.response().status, 200);
    }
    let shares = (
        first.load(Ordering::Relaxed),
        second.load(Ordering::Relaxed),
    );
    assert!(
        shares.0 + shares.1 == 60 && shares.0.min(shares.1) >= 20,
        "{shares:?}"
    );

    // If all backends are set aside, they are tried nevertheless.
    let scene = scene_of(&[&dead, &dead]);
    for _ in 0..3 {
        let (code, message) = error(&scene);
        assert!(
            code == "GW_BACKEND_UNREACHABLE" && message.contains(&dead),
            "{message}"
        );
    }
}

#[test]
fn the_host_field_can_be_rewritten_to_the_backend() {
    let folder = tempfile::tempdir().unwrap();
    let url = backend::start(answer_target::<TcpStream>);
    let scene = scene_with(
        folder.path(),
        &format!("{{ urls = ['{url}'], host = 'rewrite' }}"),
    );
    assert_eq!(format!("http://{}", body(&scene, "/x")), format!("{url}/x"));
}

#[test]
fn a_rewritten_host_is_mapped_back_in_responses() {
    let url = backend::start(|mut peer| {
        while let Ok((head, ..)) = peer.request() {
            let (host, name) = (&head.authority, head.authority.host());
            let fields = format!(
                "Location: http://{host}/login\r\nContent-Location: /a\r\n\
                 Refresh: 5; url=http://{host}/\r\nSet-Cookie: a=b; Domain={name}; Path=/\r\n"
            );
            peer.send(match &head.upgrade {
                Some(protocol) => format!(
                    "HTTP/1.1 101 X\r\nConnection: upgrade\r\nUpgrade: {}\r\n{fields}\r\n",
                    protocol.as_str()
                ),
                None => format!("HTTP/1.1 302 Found\r\nContent-Length: 0\r\n{fields}\r\n"),
            });
        }
    });
    let scene = Scene::service()
        .agent_to(url)
        .host_header("rewrite")
        .start();
    for (rest, status) in [
        ("\r\n", 302),
        ("Connection: upgrade\r\nUpgrade: x\r\n\r\n", 101),
    ] {
        let mut caller = scene.connect();
        caller.send(scene.request("GET /", rest));
        let head = caller.response_head(&Method::GET).unwrap();
        assert_eq!(head.status, status);
        for (name, expected) in [
            ("location", format!("https://{HOST}/login")),
            ("content-location", "/a".to_owned()),
            ("refresh", format!("5; url=https://{HOST}/")),
            ("set-cookie", "a=b; Path=/".to_owned()),
        ] {
            assert_eq!(head.headers[name], *expected, "{status} {name}");
        }
    }
}

#[test]
fn a_response_is_relayed_while_the_request_body_is_sent() {
    let (sender, receiver) = mpsc::channel();
    let scene = Scene::service()
        .agent_to(backend::start(move |mut peer| {
            let head = peer.request_head().unwrap();
            peer.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n");
            sender
                .send(peer.body(head.framing).unwrap().0.len())
                .unwrap();
            peer.send("0\r\n\r\n");
        }))
        .start();
    let mut caller = scene.connect();
    caller.send(scene.request("POST /", "Content-Length: 1000000\r\n\r\n"));
    let head = caller.response_head(&Method::POST).unwrap();
    caller.send("x".repeat(1_000_000));
    assert_eq!(caller.body(head.framing).unwrap().0, b"hi");
    assert_eq!(receiver.recv_timeout(SOON), Ok(1_000_000));
}
