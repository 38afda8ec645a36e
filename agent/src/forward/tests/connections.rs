//! Connections to backends: how they are opened, selected and used again.

mod alpn;
mod connecting;
mod reuse;
mod server_names;

use bytes::BytesMut;

use super::*;

/// Writes a self-signed certificate for `name` to `file`. Returns it with its key.
fn self_signed(name: &str, file: &Path) -> gw_bed::tls::Identity {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
    let certificate = params.self_signed(&key).unwrap();
    std::fs::write(file, certificate.pem()).unwrap();
    (certificate.der().clone(), PrivateKeyDer::from(key))
}

/// A backend with TLS, and a folder with the file of its authority.
pub(super) struct TlsBackend {
    directory: tempfile::TempDir,
    address: String,
}

impl TlsBackend {
    /// Starts a backend that calls `serve` with every connection.
    pub(super) fn start(
        alpn: &[&[u8]],
        serve: impl Fn(TcpStream, Arc<ServerConfig>) + Send + Sync + 'static,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let identity = self_signed("localhost", &directory.path().join("ca.pem"));
        let config = Arc::new(gw_bed::tls::server(identity, alpn));
        let address = listen(move |connection, _| serve(connection, Arc::clone(&config)));
        Self { directory, address }
    }

    /// As [`Self::start`], with the connections whose handshake succeeds.
    fn serving<F: Future<Output = ()>>(
        alpn: &[&[u8]],
        serve: impl Fn(TlsStream) -> F + Send + Sync + 'static,
    ) -> Self {
        Self::start(alpn, move |connection, config| {
            block_on(async {
                if let Some(stream) = accept_tls(connection, config).await {
                    serve(stream).await;
                }
            });
        })
    }

    /// The backend with these options of its table.
    pub(super) fn with(&self, options: &str) -> Backends {
        let port = self.address.rsplit(':').next().unwrap();
        let file = self.directory.path().join("ca.pem");
        backends(&format!(
            "urls = 'https://localhost:{port}'\nca_file = '{}'\n{options}",
            file.display()
        ))
    }
}

/// The backend's end of a connection with TLS; `None` if the agent ends the handshake.
async fn accept_tls(connection: TcpStream, config: Arc<ServerConfig>) -> Option<TlsStream> {
    let socket = Socket::from_fd(connection.into()).unwrap();
    let stream = TlsStream::new(socket, UnbufferedServerConnection::new(config).unwrap());
    stream.handshake().await.ok()?;
    Some(stream)
}

/// Sends bytes over TLS.
async fn send_tls(stream: &TlsStream, bytes: &[u8]) {
    let mut pieces = [std::io::IoSlice::new(bytes)];
    stream.write_all(&mut pieces).await.unwrap();
    stream.flush().await.unwrap();
}

/// Receives some bytes over TLS; none at the end.
async fn receive_some(stream: &TlsStream, received: &mut BytesMut) -> std::io::Result<usize> {
    std::future::poll_fn(|cx| stream.poll_read_buf(cx, received)).await
}

/// Receives over TLS until the received bytes end with `end`.
async fn receive_tls(stream: &TlsStream, end: &[u8]) {
    let mut received = BytesMut::new();
    while !received.ends_with(end) {
        receive_some(stream, &mut received).await.unwrap();
    }
}
