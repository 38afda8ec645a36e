//! A blocking HTTP/1.1 client over TLS with timeouts, which streams bodies.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use gw_bed::threads::Peer;
use rustls::{ClientConfig, ClientConnection, StreamOwned};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, ServerName};

pub(crate) use gw_bed::http1::Head;

use crate::failure::{Failure, ensure};

const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// Timeout of one read or write.
const PATIENCE: Duration = Duration::from_secs(30);
/// Largest body that is kept in memory.
const BODY_MAX: u64 = 1024 * 1024;

/// A service on loopback, with its address, certificate authority and credential.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) port: u16,
    /// The tenant's host name, for TLS and for `Host`.
    pub(crate) host: String,
    pub(crate) service_key: String,
    /// Access token that requests carry in place of the service key.
    token: Option<String>,
    name: ServerName<'static>,
    /// Size of the socket receive buffer; `None` for the kernel's default.
    receive_buffer: Option<usize>,
    /// `None` for plain TCP.
    tls: Option<Arc<ClientConfig>>,
}

impl Target {
    /// `url` is `https://host:port`; connections go to loopback for any host.
    pub(crate) fn new(url: &str, ca_file: &Path, service_key: &str) -> Result<Self, Failure> {
        let bad = || Failure::new(format!("not https://host:port: {url}"));
        let (host, port) = url
            .strip_prefix("https://")
            .and_then(|rest| rest.rsplit_once(':'))
            .ok_or_else(bad)?;
        let name = ServerName::try_from(host.to_owned()).map_err(|_| bad())?;
        Ok(Self {
            port: port.parse().map_err(|_| bad())?,
            host: host.to_owned(),
            service_key: service_key.to_owned(),
            token: None,
            name,
            receive_buffer: None,
            tls: Some(Arc::new(tls_config(ca_file)?)),
        })
    }

    /// A server on loopback that speaks plain HTTP.
    pub(crate) fn plain(port: u16, host: &str, service_key: &str) -> Result<Self, Failure> {
        let name =
            ServerName::try_from(host.to_owned()).map_err(|error| Failure::during(host, error))?;
        let host = host.to_owned();
        let service_key = service_key.to_owned();
        Ok(Self {
            port,
            host,
            service_key,
            token: None,
            name,
            receive_buffer: None,
            tls: None,
        })
    }

    /// This target with an access token in place of the service key.
    pub(crate) fn with_token(&self, token: String) -> Self {
        Self {
            token: Some(token),
            ..self.clone()
        }
    }

    pub(crate) fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    /// Name and value of the field that authenticates a request.
    pub(crate) fn credential(&self) -> (&'static str, String) {
        match &self.token {
            Some(token) => ("X-Gw-Authorization", format!("Bearer {token}")),
            None => ("X-Gw-Service-Key", self.service_key.clone()),
        }
    }

    /// This target at another port.
    pub(crate) fn at_port(&self, port: u16) -> Self {
        Self {
            port,
            ..self.clone()
        }
    }

    /// This target with another service key.
    pub(crate) fn with_key(&self, service_key: String) -> Self {
        Self {
            service_key,
            ..self.clone()
        }
    }

    /// This target with receive buffers of `bytes`.
    pub(crate) fn with_receive_buffer(&self, bytes: usize) -> Self {
        Self {
            receive_buffer: Some(bytes),
            ..self.clone()
        }
    }

    /// Another service of the same gateway.
    pub(crate) fn for_service(&self, host: &str, service_key: &str) -> Result<Self, Failure> {
        let name =
            ServerName::try_from(host.to_owned()).map_err(|error| Failure::during(host, error))?;
        Ok(Self {
            host: host.to_owned(),
            service_key: service_key.to_owned(),
            name,
            ..self.clone()
        })
    }

    /// Opens a connection and completes its handshake.
    pub(crate) fn connect(&self) -> Result<Connection, Failure> {
        self.connect_from(0)
    }

    /// Like [`Self::connect`], from loopback address number `source`.
    pub(crate) fn connect_from(&self, source: usize) -> Result<Connection, Failure> {
        let stream = self.transport_from(source)?;
        Ok(Connection {
            peer: Peer::new(stream),
            fields: self.fields(),
            body_left: 0,
            closing: false,
        })
    }

    /// The header fields that every HTTP/1.1 request has.
    pub(crate) fn fields(&self) -> String {
        let (name, value) = self.credential();
        format!("Host: {}\r\n{name}: {value}\r\n", self.host)
    }

    /// Opens a connection for HTTP/1.1 from loopback address number `source`.
    pub(crate) fn transport_from(&self, source: usize) -> Result<Transport, Failure> {
        Ok(match self.tls {
            Some(_) => Transport::Tls(Box::new(self.open_from(source, &[b"http/1.1"])?)),
            None => Transport::Plain(self.socket_from(source)?),
        })
    }

    /// Opens a raw TLS connection that negotiates one of `protocols`.
    pub(crate) fn open(&self, protocols: &[&[u8]]) -> Result<Stream, Failure> {
        self.open_from(0, protocols)
    }

    /// Like [`Self::open`], from loopback address number `source`. One address has some 28,000
    /// ports.
    pub(crate) fn open_from(&self, source: usize, protocols: &[&[u8]]) -> Result<Stream, Failure> {
        let mut socket = self.socket_from(source)?;
        let mut tls = self.session(protocols)?;
        tls.complete_io(&mut socket)
            .map_err(|error| Failure::during("TLS handshake", error))?;
        Ok(StreamOwned::new(tls, socket))
    }

    /// A TCP connection.
    pub(crate) fn socket(&self) -> Result<TcpStream, Failure> {
        self.socket_from(0)
    }

    pub(crate) fn socket_from(&self, source: usize) -> Result<TcpStream, Failure> {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
        if let Some(bytes) = self.receive_buffer {
            socket.set_recv_buffer_size(bytes)?;
        }
        let loopback = u32::from(Ipv4Addr::LOCALHOST);
        if source > 0 {
            let address = Ipv4Addr::from_bits(loopback + u32::try_from(source).unwrap_or_default());
            socket.bind(&SocketAddr::from((address, 0)).into())?;
        }
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
        socket.connect_timeout(&address.into(), CONNECT_WITHIN)?;
        let socket = TcpStream::from(socket);
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        Ok(socket)
    }

    /// A ClientHello.
    pub(crate) fn hello(&self) -> Result<Vec<u8>, Failure> {
        let mut hello = Vec::new();
        self.session(&[b"http/1.1"])?.write_tls(&mut hello)?;
        Ok(hello)
    }

    fn session(&self, protocols: &[&[u8]]) -> Result<ClientConnection, Failure> {
        let protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        let tls = self
            .tls
            .as_ref()
            .ok_or_else(|| Failure::new(format!("port {} does not speak TLS", self.port)))?;
        Ok(ClientConnection::new_with_alpn(
            Arc::clone(tls),
            self.name.clone(),
            protocols,
        )?)
    }
}

fn tls_config(ca_file: &Path) -> Result<ClientConfig, Failure> {
    let unreadable = |error| Failure::during(ca_file.display(), error);
    let authorities: Result<Vec<_>, _> = CertificateDer::pem_file_iter(ca_file)
        .map_err(unreadable)?
        .collect();
    let mut config = gw_bed::tls::client(authorities.map_err(unreadable)?, None, &[]);
    // Every handshake is a full one.
    config.resumption = rustls::client::Resumption::disabled();
    Ok(config)
}

/// A TLS connection before its first HTTP message.
pub(crate) type Stream = StreamOwned<ClientConnection, TcpStream>;

/// A connection before its first HTTP/1.1 message.
pub(crate) enum Transport {
    Plain(TcpStream),
    Tls(Box<Stream>),
}

impl Read for Transport {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.read(into),
            Self::Tls(stream) => stream.read(into),
        }
    }
}

impl Write for Transport {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.write(from),
            Self::Tls(stream) => stream.write(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(socket) => socket.flush(),
            Self::Tls(stream) => stream.flush(),
        }
    }
}

/// A connection with one request at a time. Dropping it closes it at once.
pub(crate) struct Connection {
    peer: Peer<Transport>,
    /// The header fields that every request has.
    fields: String,
    body_left: u64,
    closing: bool,
}

/// A small response with its complete body.
pub(crate) struct Answer {
    pub(crate) head: Head,
    pub(crate) body: Vec<u8>,
}

impl Connection {
    /// Requests `path` and reads the head of the response; [`Self::read_body`] reads its body.
    pub(crate) fn get(&mut self, path: &str) -> Result<Head, Failure> {
        self.send_head("GET", path, "")?;
        self.response_head()
    }

    /// Requests `path` and reads the complete response, which must be small.
    pub(crate) fn ask(&mut self, path: &str) -> Result<Answer, Failure> {
        self.request(path)?;
        self.answer()
    }

    /// Requests `path` and reads nothing yet.
    pub(crate) fn request(&mut self, path: &str) -> Result<(), Failure> {
        self.send_head("GET", path, "")
    }

    /// Reads the complete response, which must be small.
    pub(crate) fn answer(&mut self) -> Result<Answer, Failure> {
        Ok(Answer {
            head: self.response_head()?,
            body: self.small_body()?,
        })
    }

    /// Sends `form` to `path` and reads the complete response, which must be small.
    pub(crate) fn post_form(&mut self, path: &str, form: &str) -> Result<Answer, Failure> {
        let fields = format!(
            "Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {}\r\n",
            form.len()
        );
        self.send_head("POST", path, &fields)?;
        self.peer.try_send(form)?;
        self.answer()
    }

    /// Requests `path` with all of `body`, which has `length` bytes.
    pub(crate) fn upload(
        &mut self,
        path: &str,
        length: u64,
        body: &mut impl Read,
    ) -> Result<Answer, Failure> {
        self.send_head("POST", path, &format!("Content-Length: {length}\r\n"))?;
        let stream = &mut self.peer.stream;
        let sent = io::copy(body, stream).and_then(|_| stream.flush());
        // A server that does not read the body may have sent an error response, which is the better
        // message.
        match (self.response_head(), sent) {
            (Ok(head), _) => Ok(Answer {
                head,
                body: self.small_body()?,
            }),
            (Err(_), Err(error)) => Err(Failure::during("sending the body", error)),
            (Err(failure), Ok(())) => Err(failure),
        }
    }

    /// The next bytes of the body; 0 when it is complete. Fails if it ends early.
    pub(crate) fn read_body(&mut self, into: &mut [u8]) -> Result<usize, Failure> {
        let most = into
            .len()
            .min(usize::try_from(self.body_left).unwrap_or(usize::MAX));
        let into = &mut into[..most];
        if into.is_empty() {
            return Ok(0);
        }
        let read = self.peer.some(into)?;
        ensure(read > 0, || {
            format!("the body ended {} bytes early", self.body_left)
        })?;
        self.body_left -= read as u64;
        Ok(read)
    }

    /// Fills `into` from the body.
    pub(crate) fn read_body_exact(&mut self, into: &mut [u8]) -> Result<(), Failure> {
        let mut filled = 0;
        while filled < into.len() {
            let read = self.read_body(&mut into[filled..])?;
            ensure(read > 0, || {
                format!("the body is complete {} bytes early", into.len() - filled)
            })?;
            filled += read;
        }
        Ok(())
    }

    /// Whether another request can be sent.
    pub(crate) fn is_reusable(&self) -> bool {
        !self.closing && self.body_left == 0
    }

    fn send_head(&mut self, method: &str, path: &str, more: &str) -> Result<(), Failure> {
        let head = format!("{method} {path} HTTP/1.1\r\n{}{more}\r\n", self.fields);
        Ok(self.peer.try_send(head)?)
    }

    fn response_head(&mut self) -> Result<Head, Failure> {
        let received = self.peer.raw_head().map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => Failure::new("the connection closed before a response"),
            ErrorKind::WouldBlock => Failure::new(format!("no response within {PATIENCE:?}")),
            _ => Failure::during("waiting for a response", error),
        })?;
        let head = Head::response(&received)?;
        // All requested resources have a known length.
        let length = head.content_length()?;
        self.body_left = length.ok_or_else(|| Failure::new("a response without Content-Length"))?;
        self.closing = head.closes();
        Ok(head)
    }

    fn small_body(&mut self) -> Result<Vec<u8>, Failure> {
        ensure(self.body_left <= BODY_MAX, || {
            format!("a body of {} bytes is not small", self.body_left)
        })?;
        let mut body = vec![0; usize::try_from(self.body_left).unwrap_or_default()];
        self.read_body_exact(&mut body)?;
        Ok(body)
    }
}

impl Answer {
    /// Error code, if this is an error response of the gateway.
    pub(crate) fn error_code(&self) -> Option<String> {
        let body: serde_json::Value = serde_json::from_slice(&self.body).ok()?;
        Some(body.get("error")?.get("code")?.as_str()?.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_of_a_gateway_error() {
        let answer = |body: &str| Answer {
            head: Head::default(),
            body: body.as_bytes().to_vec(),
        };
        let error = answer(r#"{"error":{"code":"GW_X","message":"","request_id":""}}"#);
        assert_eq!(error.error_code().as_deref(), Some("GW_X"));
        assert_eq!(answer("hello").error_code(), None);
    }
}
