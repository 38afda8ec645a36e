//! Relaying in memory: a worker of the gateway with one service and one tunnel. Callers and transport are in memory.
//!
//! Everything between the bytes of a request and the bytes of its response runs as in the product: head, route, directory,
//! service key, bucket, tunnel, response, counters, and the record for the request log. Not included: TLS, sockets, the
//! table of connections with its deadlines, and the HTTP/2 codec. What passes between this module and those parts, such
//! as the choice of the response's framing, repeats `downstream`.

use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use crate::limits;
use bytes::{Bytes, BytesMut};
use gw_base::clock::Timestamp;
use gw_base::mailbox::{Inbox, mailbox};
use gw_base::service::hostname::Region;
use gw_base::service::rate::Rate;
use gw_base::service::service_settings::ServiceSettings;
use gw_region::owners::ownership::WorkerId;
use gw_shared::http::body::{self, BodyDecoder};
use gw_shared::http::head::{self, Framing, HeadScanner};
use gw_shared::http::{ConnectionField, Fields, Part};
use gw_shared::id::{AccountId, AgentId, KeyId, ServiceId};
use gw_shared::identity::secret::SecretHash;
use gw_shared::net::Socket;
use gw_shared::runtime;
use gw_shared::tunnel::transport::Transport;
use gw_shared::version::Version;
use gw_store::{
    CallerSecretRecord, Directory, PublicKeyHash, Records, SecretAccess, ServiceRecord,
    StoredRecord,
};
use http::{Method, Request};

use crate::http_message::{BodyError, CallerGone, Outcome, RelayedHead, RequestBody, ResponseSink};
use crate::peer::Peer;
use crate::tunnel::session::{Party, Session, drive};
use crate::worker::{Worker, WorkerMessage};

/// Host of the service.
pub const HOST: &str = "acme--api.bench.localhost";
/// Service key of the callers, as a field value.
pub const SERVICE_KEY: &str = "gw_sk_0123456789abcdef.0123456789abcdefghijABCDEFGHIJ0123456789abc";

/// Services in the directory. Only one of them has a tunnel.
const SERVICES: usize = 1000;

/// A worker with one tunnel.
pub struct BenchWorker {
    worker: Worker,
    session: Rc<Session>,
    peer: Peer,
    /// Gets no message.
    _inbox: Inbox<WorkerMessage>,
}

impl BenchWorker {
    /// Starts the gateway's end of a tunnel on the reactor of the calling thread. Waits until the agent takes requests.
    pub async fn start(transport: impl Transport + 'static) -> io::Result<Rc<Self>> {
        let (mailbox, inbox) = mailbox(limits::MAILBOX);
        let worker = Worker::new(super::setup(
            WorkerId(0),
            &mailbox,
            Arc::new(directory().ok_or(io::ErrorKind::Other)?),
        )?)?;
        let directory = worker.directory.get();
        let service = directory
            .service("acme--api")
            .ok_or(io::ErrorKind::NotFound)?;
        let agent = AgentId::random();
        let key = PublicKeyHash::of(&[]);
        let party = Party {
            agent,
            key,
            issuer: None,
            version: Version::own(),
            service: Arc::clone(service),
        };
        let session = Session::new(&worker.tunnels, &idle_socket()?, party);
        let driven = Rc::clone(&session);
        runtime::spawn(async move {
            let ended = drive(&driven, &transport).await;
            tracing::info!(?ended, "tunnel ended");
        });
        session
            .tunnel
            .hello()
            .await
            .ok_or(io::ErrorKind::BrokenPipe)?;
        worker
            .tunnels
            .registry
            .borrow_mut()
            .insert(&session, Instant::now())
            .map_err(|error| io::Error::other(error.as_str()))?;
        let peer = Peer::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), None);
        Ok(Rc::new(Self {
            worker,
            session,
            peer,
            _inbox: inbox,
        }))
    }

    /// Open streams of the tunnel.
    pub fn open_streams(&self) -> usize {
        self.session.open_streams()
    }

    /// Relays a request of HTTP/2, given as the codec gives it. Returns the bytes of the response's body; `None` if it is
    /// not complete.
    pub async fn relay_http2(&self, request: Request<()>) -> Option<usize> {
        let (parts, ()) = request.into_parts();
        let head = head::request_of_http2(parts, false, limits::REQUEST_HEAD).ok()?;
        let mut buffer = BytesMut::new();
        let mut sink = Http2Sink {
            bytes: 0,
            begun: false,
        };
        let mut body = WholeBody {
            decoder: BodyDecoder::new(Framing::None),
            buffer: &mut buffer,
        };
        let outcome = self
            .worker
            .router
            .serve(head, &self.peer, &mut body, &mut sink)
            .await;
        (outcome == Outcome::Complete).then_some(sink.bytes)
    }
}

/// Records of services, the first of which is `acme--api`.
fn directory() -> Option<Directory> {
    let account = AccountId::new("acme").ok()?;
    let rate = Rate::new(1_000_000, 1_000_000_000)?;
    let mut records = Records::default();
    let created_at = Timestamp::now();
    let (key, secret) = SERVICE_KEY.strip_prefix("gw_sk_")?.split_once('.')?;
    for number in 0..SERVICES {
        let (id, key) = match number {
            0 => (ServiceId::new("api").ok()?, KeyId::new(key).ok()?),
            _ => (
                ServiceId::new(&format!("svc{number}")).ok()?,
                KeyId::random(),
            ),
        };
        let access = SecretAccess {
            account: account.clone(),
            name: None,
            secret: SecretHash::of(secret),
            allowed_services: [id.clone()].into(),
            enabled: true,
            created_at,
        };
        records.put(StoredRecord::ServiceKey(CallerSecretRecord {
            id: key,
            access,
            managed_by: None,
            later: Default::default(),
        }));
        records.put(StoredRecord::Service(ServiceRecord {
            account: account.clone(),
            id,
            settings: ServiceSettings {
                rate,
                ..ServiceSettings::default()
            },
            created_at,
            managed_by: None,
            later: Default::default(),
        }));
    }
    Some(Directory::new(
        &records,
        &Region::new("bench", "localhost"),
        1,
    ))
}

/// A connected socket whose other end is closed. Answers questions about the connection of the tunnel, and carries no
/// bytes.
fn idle_socket() -> io::Result<Socket> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Socket::from_fd(TcpStream::connect(listener.local_addr()?)?.into())
}

/// A connection of HTTP/1.1.
pub struct Http1Caller {
    gateway: Rc<BenchWorker>,
    /// Bytes that were received and not read yet.
    buffer: BytesMut,
    /// Bytes of the last response.
    sent: Vec<u8>,
}

impl Http1Caller {
    /// Creates a connection that `gateway` serves.
    pub fn new(gateway: &Rc<BenchWorker>) -> Self {
        Self {
            gateway: Rc::clone(gateway),
            buffer: BytesMut::new(),
            sent: Vec::new(),
        }
    }

    /// Relays a request. Returns the response; `None` if it is not complete.
    pub async fn relay(&mut self, request: &[u8]) -> Option<&[u8]> {
        let Self {
            gateway,
            buffer,
            sent,
        } = self;
        buffer.extend_from_slice(request);
        sent.clear();
        let end = HeadScanner::default()
            .find_end(buffer, limits::REQUEST_HEAD)
            .ok()??;
        let head =
            head::parse_request(&buffer.split_to(end).freeze(), limits::REQUEST_HEAD).ok()?;
        let is_head = head.method == Method::HEAD;
        let mut body = WholeBody {
            decoder: BodyDecoder::new(head.framing),
            buffer,
        };
        let mut sink = Http1Sink {
            sent,
            is_head,
            framing: Framing::None,
            out: Vec::new(),
            begun: false,
            ended: false,
        };
        let outcome = gateway
            .worker
            .router
            .serve(head, &gateway.peer, &mut body, &mut sink)
            .await;
        (outcome == Outcome::Complete && buffer.is_empty()).then_some(sent)
    }
}

/// A request body that has arrived whole.
struct WholeBody<'a> {
    decoder: BodyDecoder,
    buffer: &'a mut BytesMut,
}

impl RequestBody for WholeBody<'_> {
    async fn part(&mut self) -> Result<Part, BodyError> {
        match self
            .decoder
            .decode(self.buffer)
            .map_err(BodyError::Malformed)?
        {
            Some(part) => Ok(part),
            None => Err(BodyError::Gone),
        }
    }

    fn is_done(&self) -> bool {
        self.decoder.is_done()
    }

    async fn gone(&mut self) -> CallerGone {
        std::future::pending().await
    }

    fn switch_protocols(&mut self) {}
}

/// Writes a response of HTTP/1.1 as [`crate::downstream::h1`] does.
struct Http1Sink<'a> {
    sent: &'a mut Vec<u8>,
    is_head: bool,
    framing: Framing,
    /// Head and other small pieces that are sent together with the next data.
    out: Vec<u8>,
    begun: bool,
    /// The end of the body was written with its last piece.
    ended: bool,
}

impl ResponseSink for Http1Sink<'_> {
    async fn interim(&mut self, head: RelayedHead) -> Result<(), CallerGone> {
        head::write_response(
            &mut self.out,
            head.status,
            &head.headers,
            Framing::None,
            ConnectionField::Persists,
        );
        self.flush().await
    }

    async fn head(&mut self, head: RelayedHead) -> Result<(), CallerGone> {
        self.begun = true;
        let announced = match head::content_length(&head.headers) {
            Ok(Some(length)) => Framing::Length(length),
            Ok(None) | Err(_) => Framing::Chunked,
        };
        let framing = announced.of_response(
            head.status,
            if self.is_head {
                &Method::HEAD
            } else {
                &Method::GET
            },
        );
        self.framing = if framing.has_body() && !head.has_body {
            Framing::Length(0)
        } else {
            framing
        };
        self.out.reserve(512);
        head::write_response(
            &mut self.out,
            head.status,
            &head.headers,
            self.framing,
            ConnectionField::Persists,
        );
        Ok(())
    }

    async fn data(&mut self, data: Bytes, last: bool) -> Result<(), CallerGone> {
        if data.is_empty() || !self.framing.has_body() {
            return Ok(());
        }
        let mut size = [0; 18];
        let (start, end): (&[u8], &[u8]) = match self.framing {
            Framing::Chunked if last => (
                body::chunk_start(data.len(), &mut size),
                body::LAST_CHUNK_END,
            ),
            Framing::Chunked => (body::chunk_start(data.len(), &mut size), body::CHUNK_END),
            _ => (&[], &[]),
        };
        for piece in [&self.out, start, &data, end] {
            self.sent.extend_from_slice(piece);
        }
        self.out.clear();
        self.ended = last;
        Ok(())
    }

    async fn end(&mut self, trailers: Option<Fields>) -> Result<(), CallerGone> {
        if self.framing == Framing::Chunked && !self.ended {
            body::write_last_chunk(&mut self.out, trailers.as_ref());
        }
        self.flush().await
    }

    async fn flush(&mut self) -> Result<(), CallerGone> {
        self.sent.append(&mut self.out);
        Ok(())
    }

    fn has_begun(&self) -> bool {
        self.begun
    }

    fn begin_own_response(&mut self, _: bool) {}
}

/// Counts the bytes of a response that the HTTP/2 codec would write.
struct Http2Sink {
    bytes: usize,
    begun: bool,
}

impl ResponseSink for Http2Sink {
    async fn interim(&mut self, _: RelayedHead) -> Result<(), CallerGone> {
        Ok(())
    }

    async fn head(&mut self, _: RelayedHead) -> Result<(), CallerGone> {
        self.begun = true;
        Ok(())
    }

    async fn data(&mut self, data: Bytes, _: bool) -> Result<(), CallerGone> {
        self.bytes += data.len();
        Ok(())
    }

    async fn end(&mut self, _: Option<Fields>) -> Result<(), CallerGone> {
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), CallerGone> {
        Ok(())
    }

    fn has_begun(&self) -> bool {
        self.begun
    }

    fn begin_own_response(&mut self, _: bool) {}
}
