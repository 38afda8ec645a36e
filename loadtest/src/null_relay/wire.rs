//! One connection of the relay, plain or with TLS.

use std::fs;
use std::io::{self, IoSlice};
use std::path::Path;
use std::sync::Arc;

use bytes::BytesMut;
use gw_shared::net::tls::Greeting;
use gw_shared::net::{Socket, TlsStream};
use rustls::client::UnbufferedClientConnection;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};

use crate::failure::Failure;

/// TLS of both hops, with one certificate.
#[derive(Clone)]
pub(super) struct Tls {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl Tls {
    /// Reads a self-signed certificate for `name`, which the second hop trusts.
    pub(super) fn load(certificate: &Path, key: &Path, name: &str) -> Result<Self, Failure> {
        let pem =
            |path: &Path| fs::read(path).map_err(|error| Failure::during(path.display(), error));
        let failed = |error| Failure::during(certificate.display(), error);
        let leaf = CertificateDer::from_pem_slice(&pem(certificate)?)
            .map_err(|error| Failure::during(certificate.display(), error))?;
        let private = PrivateKeyDer::from_pem_slice(&pem(key)?)
            .map_err(|error| Failure::during(key.display(), error))?;
        let provider = Arc::new(default_provider());
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .and_then(|builder| {
                builder
                    .with_no_client_auth()
                    .with_single_cert(vec![leaf.clone()], private)
            })
            .map_err(failed)?;
        server.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let mut roots = RootCertStore::empty();
        roots.add(leaf).map_err(failed)?;
        let client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(failed)?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name =
            ServerName::try_from(name.to_owned()).map_err(|error| Failure::during(name, error))?;
        Ok(Self {
            server: Arc::new(server),
            client: Arc::new(client),
            name,
        })
    }
}

/// A connection whose bytes are relayed.
pub(super) enum Wire {
    Plain(Socket),
    Tls(TlsStream),
}

impl Wire {
    /// Answers the peer's handshake, if there is TLS.
    pub(super) async fn accept(socket: Socket, tls: Option<&Tls>) -> io::Result<Self> {
        let Some(tls) = tls else {
            return Ok(Self::Plain(socket));
        };
        let greeting = Greeting::read(socket, BytesMut::new(), Vec::new).await?;
        Ok(Self::Tls(greeting.accept(Arc::clone(&tls.server)).await?))
    }

    /// Begins the handshake, if there is TLS.
    pub(super) async fn connect(socket: Socket, tls: Option<&Tls>) -> io::Result<Self> {
        let Some(tls) = tls else {
            return Ok(Self::Plain(socket));
        };
        let session = UnbufferedClientConnection::new(Arc::clone(&tls.client), tls.name.clone())
            .map_err(io::Error::other)?;
        let stream = TlsStream::new(socket, session);
        stream.handshake().await?;
        Ok(Self::Tls(stream))
    }

    /// Appends arrived bytes to `buffer`; 0 is the end.
    pub(super) async fn receive(&self, buffer: &mut BytesMut) -> io::Result<usize> {
        std::future::poll_fn(|cx| match self {
            Self::Plain(socket) => socket.poll_recv_buf(cx, buffer),
            Self::Tls(stream) => stream.poll_read_buf(cx, buffer),
        })
        .await
    }

    /// Sends all of `bytes`, in one system call if the kernel has room.
    pub(super) async fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let mut pieces = [IoSlice::new(bytes)];
        match self {
            Self::Plain(socket) => socket.send_all(&mut pieces).await,
            Self::Tls(stream) => {
                stream.write_all(&mut pieces).await?;
                stream.flush().await
            }
        }
    }
}
