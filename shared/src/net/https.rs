//! TLS of HTTP clients that block: `ureq` with the [verification](super::tls::Trusted) and the
//! texts of all clients.

use std::fmt;
use std::io::{self, Read, Write};
use std::sync::Arc;

use rustls::{ClientConfig, ClientConnection, StreamOwned};
use rustls_pki_types::ServerName;
use ureq::Agent;
use ureq::config::Config;
use ureq::unversioned::resolver::{DefaultResolver, Resolver};
use ureq::unversioned::transport::{
    Buffers, ConnectProxyConnector, ConnectionDetails, Connector, Either, LazyBuffers, NextTimeout,
    TcpConnector, Transport, TransportAdapter,
};

use super::tls::{Trusted, client_config, in_words, rustls_error};

/// A client for `http://` and `https://` URLs, also through proxies, that verifies servers by
/// `trusted`.
pub fn agent(config: Config, trusted: Arc<Trusted>) -> Agent {
    agent_with(config, trusted, DefaultResolver::default())
}

/// [`agent`] with another resolver of names.
pub fn agent_with(config: Config, trusted: Arc<Trusted>, resolver: impl Resolver) -> Agent {
    let tls = client_config(rustls::ALL_VERSIONS, trusted, Vec::new());
    let tls = tls.map(|builder| Arc::new(builder.with_no_client_auth()));
    let connector =
        ().chain(ConnectProxyConnector::default())
            .chain(TcpConnector::default())
            .chain(TlsConnector(tls));
    Agent::with_parts(config, connector, resolver)
}

/// The error of TLS in an error of `ureq`, if that is its cause.
pub fn failure(error: &ureq::Error) -> Option<&rustls::Error> {
    match error {
        ureq::Error::Rustls(error) => Some(error),
        ureq::Error::Io(error) => rustls_error(error),
        _ => None,
    }
}

/// Wraps connections of `https://` URLs in TLS.
#[derive(Debug)]
struct TlsConnector(Result<Arc<ClientConfig>, rustls::Error>);

impl<In: Transport> Connector<In> for TlsConnector {
    type Out = Either<In, TlsTransport>;

    fn connect(
        &self,
        details: &ConnectionDetails<'_>,
        chained: Option<In>,
    ) -> Result<Option<Self::Out>, ureq::Error> {
        let Some(transport) = chained else {
            return Ok(None);
        };
        // In a tunnel of an https:// proxy, TLS with the server is inside TLS with the proxy.
        if !details.needs_tls() {
            return Ok(Some(Either::A(transport)));
        }
        let host = details.uri.host().unwrap_or_default();
        let name = ServerName::try_from(host.trim_matches(['[', ']']).to_owned())
            .map_err(io::Error::other)?;
        let mut connection = ClientConnection::new(self.0.clone()?, name)?;
        let clock = Arc::clone(&details.current_time);
        let mut socket = TransportAdapter::new(transport.boxed(), clock);
        socket.set_timeout(details.timeout);
        connection.complete_io(&mut socket).map_err(in_words)?;
        let config = details.config;
        Ok(Some(Either::B(TlsTransport {
            buffers: LazyBuffers::new(config.input_buffer_size(), config.output_buffer_size()),
            stream: StreamOwned::new(connection, socket),
        })))
    }
}

struct TlsTransport {
    buffers: LazyBuffers,
    stream: StreamOwned<ClientConnection, TransportAdapter>,
}

impl Transport for TlsTransport {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), ureq::Error> {
        self.stream.sock.set_timeout(timeout);
        let output = &self.buffers.output()[..amount];
        Ok(self.stream.write_all(output).map_err(in_words)?)
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, ureq::Error> {
        self.stream.sock.set_timeout(timeout);
        let read = self.stream.read(self.buffers.input_append_buf());
        let amount = read.map_err(in_words)?;
        self.buffers.input_appended(amount);
        Ok(amount > 0)
    }

    fn is_open(&mut self) -> bool {
        self.stream.sock.get_mut().is_open()
    }

    fn is_tls(&self) -> bool {
        true
    }
}

impl fmt::Debug for TlsTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsTransport").finish_non_exhaustive()
    }
}
