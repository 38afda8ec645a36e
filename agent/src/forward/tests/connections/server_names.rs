//! The server name that a backend with TLS gets.

use std::sync::Mutex;

use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use super::*;

/// Certificates by server name. Notes the names that clients send.
#[derive(Debug)]
struct Certificates {
    of_url: Arc<CertifiedKey>,
    /// The backend refuses other names by an alert.
    refuses_others: bool,
    names: Mutex<Vec<Option<String>>>,
}

impl ResolvesServerCert for Certificates {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let name = hello.server_name().map(str::to_owned);
        self.names.lock().unwrap().push(name.clone());
        let is_known = !self.refuses_others || name.as_deref() == Some("localhost");
        is_known.then(|| Arc::clone(&self.of_url))
    }
}

/// A backend that answers with the number of the connection. Its certificate is for `name` and
/// written to `file`.
fn tls_backend(
    name: &str,
    refuses_others: bool,
    alpn: &[u8],
    file: &Path,
) -> (String, Arc<Certificates>) {
    let (certificate, key) = self_signed(name, file);
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let certified = CertifiedKey::from_der(vec![certificate], key, &provider);
    let certificates = Arc::new(Certificates {
        of_url: Arc::new(certified.unwrap()),
        refuses_others,
        names: Mutex::default(),
    });
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Arc::<Certificates>::clone(&certificates));
    config.alpn_protocols = vec![alpn.to_vec()];
    let config = Arc::new(config);
    let address = listen(move |connection, number| {
        block_on(serve_tls(connection, Arc::clone(&config), number));
    });
    let port = address.rsplit(':').next().unwrap();
    (format!("https://localhost:{port}"), certificates)
}

/// Answers each request with the number of its connection, and ends that behind a request for
/// `/last`.
async fn serve_tls(connection: TcpStream, config: Arc<ServerConfig>, number: usize) {
    let Some(stream) = accept_tls(connection, config).await else {
        return;
    };
    if stream.speaks(b"h2") {
        let stream = BackendStream::Tls(stream);
        let mut connection = h2::server::handshake(stream).await.unwrap();
        while let Some(Ok((_, mut respond))) = connection.accept().await {
            let mut sent = respond.send_response(Response::new(()), false).unwrap();
            sent.send_data(number.to_string().into(), true).unwrap();
        }
        return;
    }
    let mut received = BytesMut::new();
    while receive_some(&stream, &mut received)
        .await
        .is_ok_and(|read| read > 0)
    {
        if received.ends_with(b"\r\n\r\n") {
            if received.starts_with(b"GET /last ") {
                let head = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\n";
                send_tls(&stream, format!("{head}{number}").as_bytes()).await;
                return;
            }
            received.clear();
            send_tls(&stream, &gw_bed::http1::ok(number.to_string())).await;
        }
    }
}

/// Sends a request for each host, which may have a path. Returns the numbers of the connections,
/// and the names that the backend got.
fn exchange(
    name: &str,
    refuses_others: bool,
    alpn: &[u8],
    options: &str,
    hosts: &[&'static str],
) -> (Vec<String>, Vec<String>) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ca.pem");
    let (url, certificates) = tls_backend(name, refuses_others, alpn, &file);
    let file = file.display();
    let backends = backends(&format!("urls = '{url}'\nca_file = '{file}'\n{options}"));
    let numbers = Mutex::<Vec<String>>::default();
    with_tunnel_to(&backends, |gateway| {
        let numbers = &numbers;
        async move {
            for host in hosts {
                let (host, path) = host.split_at(host.find('/').unwrap_or(host.len()));
                let exchange = gateway.send(OutboundRequest {
                    authority: host.parse().unwrap(),
                    ..get(if path.is_empty() { "/" } else { path })
                });
                let status = exchange.response().await.head.status;
                assert_eq!(status, 200, "{host}");
                let number = exchange.body().await.unwrap();
                numbers.lock().unwrap().push(number);
            }
        }
    });
    let names = std::mem::take(&mut *certificates.names.lock().unwrap());
    let names = names.into_iter().map(Option::unwrap_or_default).collect();
    (numbers.into_inner().unwrap(), names)
}

const HOSTS: &[&str] = &["a.example", "B.example:444", "a.example:443", "b.example"];

#[test]
fn each_host_has_connections_of_its_own_with_its_name() {
    for alpn in [&b"h2"[..], b"http/1.1"] {
        // Its certificate is for the host of the URL.
        let (numbers, names) = exchange("localhost", false, alpn, "", HOSTS);
        assert_eq!(numbers, ["0", "1", "0", "1"]);
        assert_eq!(names, ["a.example", "b.example"]);

        for (options, name) in [
            ("server_name = 'c.example'", "c.example"),
            ("host = 'rewrite'", "localhost"),
        ] {
            let (numbers, names) = exchange(name, false, alpn, options, HOSTS);
            assert_eq!(numbers, ["0"; 4]);
            assert_eq!(names, [name]);
        }
    }
}

#[test]
fn a_backend_that_refuses_the_host_gets_the_name_of_its_url() {
    for alpn in [&b"h2"[..], b"http/1.1"] {
        let (numbers, names) = exchange("localhost", true, alpn, "", &HOSTS[..3]);
        assert_eq!(numbers, ["1", "3", "1"]);
        assert_eq!(names, ["a.example", "localhost", "b.example", "localhost"]);
    }
}

#[test]
fn a_name_that_a_backend_has_refused_is_not_sent_with_the_next_connection() {
    let hosts = ["a.example/last", "a.example"];
    let (numbers, names) = exchange("localhost", true, b"http/1.1", "", &hosts);
    assert_eq!(numbers, ["1", "2"]);
    assert_eq!(names, ["a.example", "localhost", "localhost"]);
}
