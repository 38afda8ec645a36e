//! A blocking HTTP/1.1 peer: parses messages strictly and sends any bytes.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};

use bytes::BytesMut;
use gw_shared::http::head::{self, Framing, HeadLimits, HeadScanner, RequestHead, ResponseHead};
use gw_shared::http::{BodyDecoder, Fields, Part};
use http::{Method, StatusCode};

const LIMITS: HeadLimits = HeadLimits {
    head: 1 << 20,
    fields: 1100,
    target: 1 << 20,
};

/// One end of a connection.
pub(crate) struct Peer<S> {
    pub(crate) stream: S,
    buffer: BytesMut,
}

/// A response with its whole body.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: StatusCode,
    pub(crate) headers: Fields,
    pub(crate) body: Vec<u8>,
    pub(crate) trailers: Fields,
    pub(crate) framing: Framing,
}

impl Response {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap())
    }

    /// `error.code` of a gateway error.
    pub(crate) fn code(&self) -> String {
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

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

impl<S: Read + Write> Peer<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self {
            stream,
            buffer: BytesMut::new(),
        }
    }

    pub(crate) fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.try_send(bytes).unwrap();
    }

    /// As [`Self::send`], to a peer that may have gone.
    pub(crate) fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        self.stream.write_all(bytes.as_ref())?;
        self.stream.flush()
    }

    /// Reads a request head and leaves the body unread.
    pub(crate) fn request_head(&mut self) -> io::Result<RequestHead> {
        let head = self.head()?;
        Ok(head::parse_request(&head.freeze(), LIMITS).unwrap())
    }

    /// Reads a request with its body.
    pub(crate) fn request(&mut self) -> io::Result<(RequestHead, Vec<u8>, Fields)> {
        let head = self.request_head()?;
        let (body, trailers) = self.body(head.framing)?;
        Ok((head, body, trailers))
    }

    pub(crate) fn response_head(&mut self, method: &Method) -> io::Result<ResponseHead> {
        let head = self.head()?;
        Ok(head::parse_response(&head.freeze(), method, LIMITS).unwrap())
    }

    pub(crate) fn response(&mut self) -> Response {
        self.response_to(&Method::GET)
    }

    pub(crate) fn response_to(&mut self, method: &Method) -> Response {
        self.try_response(method).unwrap()
    }

    /// Reads a response. Fails if the connection ends before the response is complete.
    pub(crate) fn try_response(&mut self, method: &Method) -> io::Result<Response> {
        let head = self.response_head(method)?;
        let (body, trailers) = self.body(head.framing)?;
        Ok(Response {
            status: head.status,
            headers: head.headers,
            body,
            trailers,
            framing: head.framing,
        })
    }

    pub(crate) fn body(&mut self, framing: Framing) -> io::Result<(Vec<u8>, Fields)> {
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
    pub(crate) fn bytes(&mut self, count: usize) -> io::Result<Vec<u8>> {
        while self.buffer.len() < count {
            if self.fill()? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(self.buffer.split_to(count).to_vec())
    }

    /// Whether the peer has closed the connection and no bytes are left to read. A read that times
    /// out tells of no end.
    pub(crate) fn is_closed(&mut self) -> bool {
        let timed_out = |kind| matches!(kind, io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
        self.buffer.is_empty()
            && self
                .fill()
                .map_or_else(|error| !timed_out(error.kind()), |read| read == 0)
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
        let mut chunk = vec![0; 64 * 1024];
        let read = loop {
            match self.stream.read(&mut chunk) {
                // The io_uring of a gateway in this process interrupts reads that have a timeout.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => break read?,
            }
        };
        self.buffer.extend_from_slice(&chunk[..read]);
        Ok(read)
    }
}

/// Fields as a sorted map, for comparison.
pub(crate) fn fields(headers: &Fields) -> BTreeMap<String, String> {
    headers
        .iter()
        .map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned()))
        .collect()
}
