//! Backend transports: TLS, HTTP/2, Unix sockets, and several backends of one service.

mod backend_names;
mod connection_auth;
mod gone_backends;
mod reused_connections;
mod unprocessed;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::{fs, thread};

use http::Method;
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use rustls::crypto::aws_lc_rs;
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::{OK, response_with};
use crate::support::SOON;
use crate::support::peers::backend;
use crate::support::peers::caller::HOST;
use crate::support::peers::http1_peer::{Peer, listen_tls};
use crate::support::peers::http2_backend::http2;
use crate::support::scene::Scene;

const NAME: &str = "backend.example";

/// A scene whose agent has `backends` (TOML) as its backend configuration.
fn scene_with(folder: &Path, backends: &str) -> Scene {
    let file = folder.join("agent.toml");
    fs::write(&file, format!("backend = {backends}\n")).unwrap();
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
        let certificate = params.self_signed(&key).unwrap();
        fs::write(folder.path().join("ca.crt"), certificate.pem()).unwrap();
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
        fs::write(self.file(&format!("{name}.key")), key.serialize_pem()).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        fs::write(self.file(&format!("{name}.crt")), certificate.pem()).unwrap();
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn certificate(&self, name: &str) -> CertificateDer<'static> {
        CertificateDer::from_pem_file(self.file(name)).unwrap()
    }

    fn server(&self, alpn: &[&[u8]], asks_for_certificates: bool) -> ServerConfig {
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
        config
    }

    /// TOML options of a backend whose certificate is of this authority.
    fn trusted(&self, url: &str) -> String {
        let ca_file = self.file("ca.crt");
        let ca_file = ca_file.display();
        format!("urls = '{url}', ca_file = '{ca_file}', server_name = '{NAME}'")
    }

    /// A scene whose backend has these TOML options.
    fn scene(&self, options: &str) -> Scene {
        scene_with(self.folder.path(), &format!("{{ {options} }}"))
    }
}

/// Starts a TLS backend that answers with host and target of the request. Returns its URL.
fn tls(config: ServerConfig) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    listen_tls(listener, config, answer_target);
    url
}

/// Starts a backend on a Unix socket in `folder`. Returns its URL.
fn on_unix_socket(folder: &Path, serve: fn(Peer<UnixStream>)) -> String {
    let path = folder.join("backend.sock");
    let listener = UnixListener::bind(&path).unwrap();
    thread::spawn(move || {
        for connection in listener.incoming() {
            thread::spawn(move || serve(Peer::new(connection.unwrap())));
        }
    });
    format!("unix:{}", path.display())
}

/// Answers requests with their host and target.
fn answer_target<S: Read + Write>(mut peer: Peer<S>) {
    while let Ok((head, ..)) = peer.request() {
        peer.send(response_with(&format!("{}{}", head.authority, head.target)));
    }
}

/// Asserts that the backend of [`answer_target`] is reached.
#[track_caller]
fn assert_reached(scene: &Scene) {
    for target in ["/one", "/two"] {
        let response = scene.connect().ask(scene.get(target));
        let text = String::from_utf8_lossy(&response.body);
        assert_eq!(response.status, 200, "{text}");
        assert_eq!(text, format!("{HOST}{target}"));
    }
}

/// Asserts that the gateway answers with this error, whose message has these parts.
#[track_caller]
fn assert_error(scene: &Scene, code: &str, parts: &[&str]) {
    let response = scene.connect().ask(scene.get("/"));
    assert_eq!(response.code(), code);
    let error = &response.json()["error"];
    let message = error["message"].as_str().unwrap();
    let missing: Vec<_> = parts
        .iter()
        .filter(|part| !message.contains(**part))
        .collect();
    assert!(missing.is_empty(), "{missing:?} in {message}");
}

#[test]
fn a_tls_backend_is_verified_by_authority_and_name() {
    let authority = Authority::new();
    let stranger = Authority::new();
    let url = tls(authority.server(&[b"http/1.1"], false));
    assert_reached(&authority.scene(&authority.trusted(&url)));

    let wary = stranger.scene(&stranger.trusted(&url));
    assert_error(&wary, "GW_BACKEND_TLS", &["ca_file", &url]);

    let ca_file = authority.file("ca.crt");
    let unnamed = format!("urls = '{url}', ca_file = '{}'", ca_file.display());
    let misled = authority.scene(&unnamed);
    assert_error(&misled, "GW_BACKEND_TLS", &["server_name"]);
}

#[test]
fn a_backend_certificate_in_the_ca_file_is_trusted_for_every_name() {
    let authority = Authority::new();
    let url = tls(authority.server(&[b"http/1.1"], false));
    let certificate = fs::read_to_string(authority.file("server.crt")).unwrap();
    // A byte-order mark is skipped.
    let leaf = authority.file("leaf.crt");
    fs::write(&leaf, format!("\u{feff}{certificate}")).unwrap();
    let unnamed = format!("urls = '{url}', ca_file = '{}'", leaf.display());
    assert_reached(&authority.scene(&unnamed));
}

#[test]
fn the_configured_client_certificate_is_presented_to_a_backend() {
    let authority = Authority::new();
    let url = tls(authority.server(&[], true));
    let trusted = authority.trusted(&url);
    let [certificate, key] =
        ["client.crt", "client.key"].map(|name| authority.file(name).display().to_string());
    let known = format!("{trusted}, client_certificate = '{certificate}', client_key = '{key}'");
    assert_reached(&authority.scene(&known));
    let unknown = authority.scene(&trusted);
    assert_error(&unknown, "GW_BACKEND_TLS", &["client_certificate"]);
}

#[test]
fn an_http2_backend_exchanges_bodies_and_trailers() {
    let scene = Scene::service().agent_to(http2()).start();
    let mut caller = scene.connect();
    let rest = "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX-Checksum: 7\r\n\r\n";
    for _ in 0..3 {
        let response = caller.ask(scene.request("POST /p?q", rest));
        let text = String::from_utf8_lossy(&response.body);
        assert_eq!(text, format!("http://{HOST}/p?q 3 1"));
        assert_eq!(response.trailers["grpc-status"], "0");
    }
}

#[test]
fn an_http2_backend_gets_bodies_larger_than_any_window() {
    const LENGTH: usize = 3_000_000;
    let scene = Scene::service().agent_to(http2()).start();
    let head = scene.request("POST /", &format!("Content-Length: {LENGTH}\r\n\r\n"));
    let response = scene.connect().ask(head + &"x".repeat(LENGTH));
    let text = String::from_utf8_lossy(&response.body);
    assert_eq!(text, format!("http://{HOST}/ {LENGTH} 0"));
}

#[test]
fn a_backend_on_a_unix_socket_is_reached() {
    let folder = tempfile::tempdir().unwrap();
    let backend = on_unix_socket(folder.path(), answer_target);
    assert_reached(&Scene::service().agent_to(backend).start());
}

#[test]
fn a_backend_on_a_unix_socket_may_close_between_requests() {
    let folder = tempfile::tempdir().unwrap();
    let backend = on_unix_socket(folder.path(), |mut peer| {
        drop(peer.request());
        peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    });
    let scene = Scene::service().agent_to(backend).start();
    let mut caller = scene.connect();
    for _ in 0..20 {
        assert_eq!(caller.ask(scene.get("/")).status, 200);
    }
}

/// A scene with several backends.
fn scene_of(folder: &Path, urls: &[&str]) -> Scene {
    scene_with(folder, &serde_json::to_string(urls).unwrap())
}

#[test]
fn requests_go_to_the_reachable_backends() {
    const REQUESTS: usize = 60;
    let (seen, requests) = mpsc::channel();
    let noting = |name: &'static str| {
        let seen = seen.clone();
        backend::start(move |mut peer| {
            while peer.request().is_ok() {
                seen.send(name).unwrap();
                peer.send(OK);
            }
        })
    };
    let (_closed, dead) = backend::refusing();
    let dead = format!("http://{dead}");
    let folder = tempfile::tempdir().unwrap();
    let scene = scene_of(folder.path(), &[&dead, &noting("first"), &noting("second")]);
    let mut caller = scene.connect();
    for _ in 0..REQUESTS {
        assert_eq!(caller.ask(scene.get("/")).status, 200);
    }
    let mut names: Vec<&str> = requests.try_iter().collect();
    assert_eq!(names.len(), REQUESTS);
    names.retain(|name| *name == "first");
    let first = names.len();
    let third = REQUESTS / 3;
    assert!((third..=2 * third).contains(&first), "{first} requests");
}

#[test]
fn backends_that_are_all_set_aside_are_tried_nevertheless() {
    let (_closed, dead) = backend::refusing();
    let dead = format!("http://{dead}");
    let folder = tempfile::tempdir().unwrap();
    let scene = scene_of(folder.path(), &[&dead, &dead]);
    for _ in 0..3 {
        assert_error(&scene, "GW_BACKEND_UNREACHABLE", &[&dead]);
    }
}

#[test]
fn the_host_field_can_be_rewritten_to_the_backend() {
    let folder = tempfile::tempdir().unwrap();
    let url = backend::start(answer_target::<TcpStream>);
    let options = format!("{{ urls = ['{url}'], host = 'rewrite' }}");
    let scene = scene_with(folder.path(), &options);
    let response = scene.connect().ask(scene.get("/x"));
    let text = String::from_utf8(response.body).unwrap();
    assert_eq!(format!("http://{text}"), format!("{url}/x"));
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
            let status = if head.upgrade.is_some() {
                "101 X\r\nConnection: upgrade\r\nUpgrade: x\r\n"
            } else {
                "302 Found\r\nContent-Length: 0\r\n"
            };
            peer.send(format!("HTTP/1.1 {status}{fields}\r\n"));
        }
    });
    let scene = Scene::service()
        .agent_to(url)
        .host_header("rewrite")
        .start();
    let upgrade = "Connection: upgrade\r\nUpgrade: x\r\n\r\n";
    for (rest, status) in [("\r\n", 302), (upgrade, 101)] {
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
    const LENGTH: usize = 1_000_000;
    let (sender, receiver) = mpsc::channel();
    let backend = backend::start(move |mut peer| {
        let head = peer.request_head().unwrap();
        peer.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n");
        let (body, _) = peer.body(head.framing).unwrap();
        sender.send(body.len()).unwrap();
        peer.send("0\r\n\r\n");
    });
    let scene = Scene::service().agent_to(backend).start();
    let mut caller = scene.connect();
    caller.send(scene.request("POST /", &format!("Content-Length: {LENGTH}\r\n\r\n")));
    let head = caller.response_head(&Method::POST).unwrap();
    caller.send("x".repeat(LENGTH));
    assert_eq!(caller.body(head.framing).unwrap().0, b"hi");
    assert_eq!(receiver.recv_timeout(SOON), Ok(LENGTH));
}
