//! Drivers for threads: blocking peers on sockets, with and without TLS.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

use bytes::{Buf, BytesMut};
use gw_shared::http::head::{self, Framing, HeadLimits, HeadScanner, RequestHead, ResponseHead};
use gw_shared::http::{BodyDecoder, Fields, Part};
use http::{Method, StatusCode};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use crate::http1;

/// A connection that a server has accepted, with TLS.
pub type ServerTls = StreamOwned<ServerConnection, TcpStream>;

/// Gives every connection of `listener` to `serve`, each on its own thread, until the process ends.
pub fn listen(listener: TcpListener, serve: impl Fn(TcpStream) + Send + Sync + 'static) {
    let serve = Arc::new(serve);
    thread::spawn(move || {
        for connection in listener.incoming().flatten() {
            let serve = Arc::clone(&serve);
            thread::spawn(move || serve(connection));
        }
    });
}

/// As [`listen`], with TLS. The handshake begins with the first read or write.
pub fn listen_tls(
    listener: TcpListener,
    config: ServerConfig,
    serve: impl Fn(Peer<ServerTls>) + Send + Sync + 'static,
) {
    let config = Arc::new(config);
    listen(listener, move |socket| {
        let session = ServerConnection::new(Arc::clone(&config)).unwrap();
        serve(Peer::new(StreamOwned::new(session, socket)));
    });
}

const LIMITS: HeadLimits = HeadLimits {
    head: 1 << 20,
    fields: 1100,
    target: 1 << 20,
};

/// One end of a connection of HTTP/1.1. Parses messages strictly and sends any bytes.
///
/// The parser is the product's: tests of processes compare typed heads, framing and trailers, and
/// fail on a message that the other half of the product would refuse. [`http1`] parses messages
/// without the product's code, for the simulation and for loadtest.
pub struct Peer<S> {
    pub stream: S,
    /// Received bytes that are not read.
    buffer: BytesMut,
}

/// A response with its whole body.
#[derive(Debug)]
pub struct Response {
    pub status: StatusCode,
    pub headers: Fields,
    pub body: Vec<u8>,
    pub trailers: Fields,
    pub framing: Framing,
}

impl Response {
    /// Value of a field; empty if there is none.
    pub fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap())
    }

    /// `error.code` of a gateway error.
    pub fn code(&self) -> String {
        assert_eq!(
            self.header("content-type"),
            "application/vnd.gw.error+json",
            "{self:?}"
        );
        let body: serde_json::Value = serde_json::from_slice(&self.body).unwrap();
        assert_eq!(body["error"]["request_id"], self.header("x-gw-request-id"));
        assert!(!body["error"]["message"].as_str().unwrap().is_empty());
        body["error"]["code"].as_str().unwrap().to_owned()
    }

    /// The body as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

impl<S: Read + Write> Peer<S> {
    /// Wraps a connection.
    pub fn new(stream: S) -> Self {
        Self {
            stream,
            buffer: BytesMut::new(),
        }
    }

    /// Sends bytes.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.try_send(bytes).unwrap();
    }

    /// As [`Self::send`], to a peer that may have gone.
    pub fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        self.stream.write_all(bytes.as_ref())?;
        self.stream.flush()
    }

    /// Reads a request head and leaves the body unread.
    pub fn request_head(&mut self) -> io::Result<RequestHead> {
        let head = self.head()?;
        Ok(head::parse_request(&head.freeze(), LIMITS).unwrap())
    }

    /// Reads a request with its body.
    pub fn request(&mut self) -> io::Result<(RequestHead, Vec<u8>, Fields)> {
        let head = self.request_head()?;
        let (body, trailers) = self.body(head.framing)?;
        Ok((head, body, trailers))
    }

    /// Reads the head of a response to a request with this method.
    pub fn response_head(&mut self, method: &Method) -> io::Result<ResponseHead> {
        let head = self.head()?;
        Ok(head::parse_response(&head.freeze(), method, LIMITS).unwrap())
    }

    /// Sends a request whose response has a body, and reads the response.
    pub fn ask(&mut self, request: impl AsRef<[u8]>) -> Response {
        self.send(request);
        self.response()
    }

    /// Reads the response to a GET.
    pub fn response(&mut self) -> Response {
        self.response_to(&Method::GET)
    }

    /// Reads the response to a request with this method.
    pub fn response_to(&mut self, method: &Method) -> Response {
        self.try_response(method).unwrap()
    }

    /// Reads a response. Fails if the connection ends before the response is complete.
    pub fn try_response(&mut self, method: &Method) -> io::Result<Response> {
        let head = self.response_head(method)?;
        self.rest(head)
    }

    /// Reads the rest of a response whose head was read.
    pub fn rest(&mut self, head: ResponseHead) -> io::Result<Response> {
        let (body, trailers) = self.body(head.framing)?;
        Ok(Response {
            status: head.status,
            headers: head.headers,
            body,
            trailers,
            framing: head.framing,
        })
    }

    /// Reads a body to its end.
    pub fn body(&mut self, framing: Framing) -> io::Result<(Vec<u8>, Fields)> {
        let mut decoder = BodyDecoder::new(framing);
        let mut body = Vec::new();
        let mut trailers = Fields::new();
        loop {
            match decoder.decode(&mut self.buffer).unwrap() {
                Some(Part::Data(data)) => body.extend_from_slice(&data),
                Some(Part::Trailers(fields)) => trailers = fields,
                Some(Part::End) => return Ok((body, trailers)),
                None if self.fill()? == 0 => {
                    decoder
                        .finish()
                        .map_err(|error| io::Error::new(io::ErrorKind::UnexpectedEof, error))?;
                }
                None => {}
            }
        }
    }

    /// Reads exactly `count` bytes.
    pub fn bytes(&mut self, count: usize) -> io::Result<Vec<u8>> {
        while self.buffer.len() < count {
            if self.fill()? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(self.buffer.split_to(count).to_vec())
    }

    /// Reads some bytes; none at the end of the connection.
    pub fn some(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.buffer.is_empty() {
            return read(&mut self.stream, into);
        }
        let length = self.buffer.len().min(into.len());
        self.buffer.copy_to_slice(&mut into[..length]);
        Ok(length)
    }

    /// Whether the peer has closed the connection and no bytes are left to read. A read that times
    /// out tells of no end.
    pub fn is_closed(&mut self) -> bool {
        let timed_out = |kind| matches!(kind, io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
        self.buffer.is_empty()
            && self
                .fill()
                .map_or_else(|error| !timed_out(error.kind()), |read| read == 0)
    }

    /// Reads the bytes of a head that need not be valid.
    pub fn raw_head(&mut self) -> io::Result<BytesMut> {
        loop {
            if let Some(head) = http1::take_head(&mut self.buffer) {
                return Ok(head);
            }
            if self.buffer.len() > LIMITS.head {
                return Err(io::Error::other("a head without an end"));
            }
            if self.fill()? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    fn head(&mut self) -> io::Result<BytesMut> {
        let mut scanner = HeadScanner::default();
        loop {
            if let Some(end) = scanner.find_end(&mut self.buffer, LIMITS).unwrap() {
                return Ok(self.buffer.split_to(end));
            }
            if self.fill()? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    fn fill(&mut self) -> io::Result<usize> {
        let mut chunk = [0; 16 * 1024];
        let read = read(&mut self.stream, &mut chunk)?;
        self.buffer.extend_from_slice(&chunk[..read]);
        Ok(read)
    }
}

/// Reads from a socket. The io_uring of a gateway in this process interrupts reads that have a
/// timeout.
fn read(stream: &mut impl Read, into: &mut [u8]) -> io::Result<usize> {
    loop {
        match stream.read(into) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            read => return read,
        }
    }
}
