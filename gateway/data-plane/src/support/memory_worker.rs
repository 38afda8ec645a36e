//! A worker of the gateway with one tunnel in memory, for benchmarks and fuzz targets.

use std::cell::RefCell;
use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::limits;
use ::aws_lc_rs::hmac;
use bytes::{Buf, BytesMut};
use gw_base::clock::Timestamp;
use gw_base::mailbox::{Inbox, Mailbox, mailbox};
use gw_base::service::affinity::AffinityKey;
use gw_base::service::hostname::Region;
use gw_base::service::rate::Rate;
use gw_base::service::service_settings::ServiceSettings;
use gw_base::tls::ServerConfigs;
use gw_base::tls::agents::{AgentVerifier, TrustedAuthorities};
use gw_interface::config::Config;
use gw_interface::control_plane;
use gw_region::owners::ownership::WorkerId;
use gw_shared::id::{AccountId, AgentId, KeyId, ServiceId};
use gw_shared::identity::secret::SecretHash;
use gw_shared::net::Socket;
use gw_shared::runtime;
use gw_shared::tunnel::cut_reason::CutReason;
use gw_shared::tunnel::endpoint::Endpoint;
use gw_shared::tunnel::transport::Transport;
use gw_shared::version::Version;
use gw_store::{
    CallerSecretRecord, Directory, PublicKeyHash, Records, SecretAccess, ServiceRecord,
    StoredRecord,
};
use gw_telemetry::request_log::LogQueue;
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls::server::{NoClientAuth, ResolvesServerCertUsingSni};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::connections::Connections;
use crate::downstream::h2;
use crate::downstream::upload_window::UploadWindow;
use crate::http2::frame_meter::CallerStream;
use crate::memory::sockets::SocketBudget;
use crate::peer::Peer;
use crate::tunnel::session::{Party, Session, drive};
use crate::worker::{Setup, Worker, WorkerHandles, WorkerMessage};

/// Host of the service.
pub const HOST: &str = "acme--api.bench.localhost";
/// Service key of the callers, as a field value.
pub const SERVICE_KEY: &str = "gw_sk_0123456789abcdef.0123456789abcdefghijABCDEFGHIJ0123456789abc";

/// Address of the callers.
pub(crate) const CALLER: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

/// A worker with one tunnel.
pub struct MemoryWorker {
    pub(crate) worker: Worker,
    session: Rc<Session>,
    /// Gets no message.
    _inbox: Inbox<WorkerMessage>,
}

impl MemoryWorker {
    /// Starts the gateway's end of a tunnel of the first of `services` services on the reactor of
    /// the calling thread. Waits until the agent takes requests.
    pub async fn start(services: usize, transport: impl Transport + 'static) -> io::Result<Self> {
        let (mailbox, inbox) = mailbox(limits::MAILBOX);
        let directory = directory(&records(services).ok_or(io::ErrorKind::Other)?);
        let worker = Worker::new(setup(WorkerId(0), &mailbox, Arc::new(directory))?)?;
        let directory = worker.directory.get();
        let service = directory
            .service("acme--api")
            .ok_or(io::ErrorKind::NotFound)?;
        let party = Party {
            agent: AgentId::random(),
            key: PublicKeyHash::of(&[]),
            issuer: None,
            version: Version::own(),
            service: Arc::clone(service),
        };
        let session = Session::new(&worker.tunnels, &idle_socket()?, party);
        let driven = Rc::clone(&session);
        let tunnels = Rc::clone(&worker.tunnels);
        runtime::spawn(async move {
            let ended = drive(&driven, &transport).await;
            tracing::info!(?ended, "tunnel ended");
            driven.tunnel.with(Endpoint::lose);
            let mut registry = tunnels.registry.borrow_mut();
            registry.remove(&driven, CutReason::ConnectionLost, Instant::now());
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
        Ok(Self {
            worker,
            session,
            _inbox: inbox,
        })
    }

    /// Starts to serve a caller's connection of HTTP/2. Fails if there is no place for it.
    pub fn serve_http2(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
    ) -> io::Result<()> {
        // Is asked about the connection, and carries no bytes.
        let socket = idle_socket()?;
        let deadline = Instant::now() + limits::HANDSHAKE;
        let guard = Connections::register(&self.worker.connections, &socket, deadline)
            .ok_or(io::ErrorKind::QuotaExceeded)?;
        let caller = Peer::new(CALLER, None, Some(guard.socket_use()));
        runtime::spawn(h2::serve_on(
            Rc::clone(&self.worker.router),
            MemoryStream {
                stream,
                unread: RefCell::default(),
            },
            socket.closer(),
            UploadWindow::new(socket.gauge()),
            caller,
            guard,
        ));
        Ok(())
    }

    /// Open streams of the tunnel.
    pub fn open_streams(&self) -> usize {
        self.session.open_streams()
    }

    /// Whether nothing is left of the tunnel.
    pub fn has_lost_its_tunnel(&self) -> bool {
        self.open_streams() == 0 && Rc::strong_count(&self.session) == 1
    }

    /// Connections of callers.
    pub fn connections(&self) -> usize {
        self.worker.connections.len()
    }

    /// Bytes that are charged to all accounts.
    pub fn relay_bytes(&self) -> usize {
        self.worker.tunnels.relay_memory.charged()
    }

    /// Limit of these bytes now.
    pub fn relay_limit(&self) -> usize {
        self.worker.tunnels.relay_memory.limit()
    }

    /// Lets all deadlines of connections up to this time from now pass.
    pub fn sweep(&self, time: Duration) {
        self.worker.connections.sweep(Instant::now() + time);
    }

    /// Lets the connections of callers drain.
    pub fn drain(&self) {
        let connections = &self.worker.connections;
        connections.drain(Instant::now(), limits::DRAIN_IDLE);
    }
}

/// A caller's connection of which read bytes can be put back.
struct MemoryStream<S> {
    stream: S,
    unread: RefCell<BytesMut>,
}

impl<S: AsyncRead + AsyncWrite + Unpin + 'static> CallerStream for MemoryStream<S> {
    fn unread(&self, bytes: &[u8]) {
        let later = self.unread.replace(BytesMut::from(bytes));
        self.unread.borrow_mut().unsplit(later);
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for MemoryStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let unread = self.unread.get_mut();
        if unread.is_empty() {
            return Pin::new(&mut self.stream).poll_read(cx, buffer);
        }
        let length = unread.len().min(buffer.remaining());
        buffer.put_slice(&unread[..length]);
        unread.advance(length);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for MemoryStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Set-up of a worker without connections. All workers up to `id` have its mailbox.
pub(crate) fn setup(
    id: WorkerId,
    mailbox: &Mailbox<WorkerMessage>,
    directory: Arc<Directory>,
) -> io::Result<Setup> {
    Ok(Setup {
        id,
        handles: WorkerHandles::new(vec![mailbox.clone(); id.0 + 1]),
        listeners: vec![TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?],
        listeners_are_ours: true,
        plain_listeners: Vec::new(),
        region: None,
        directory,
        awaited_read: None,
        certificates: Arc::new(no_certificates()?),
        affinity_key: AffinityKey::new(hmac::Key::new(hmac::HMAC_SHA256, &[0; 32])),
        tunnel_grace: Arc::default(),
        levels: Some(Arc::default()),
        config: Arc::new(Config::new(
            Region::new("bench", "localhost"),
            "unused".into(),
        )),
        agent_releases: Arc::default(),
        executor: control_plane::executor().0,
        log: LogQueue::to_nowhere(),
        traces: None,
        socket_budget: Arc::new(SocketBudget::new(usize::MAX, 1)),
        connection_limit: 1,
    })
}

/// A configuration without certificates. There are no handshakes.
fn no_certificates() -> io::Result<ServerConfigs> {
    let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(ResolvesServerCertUsingSni::new()));
    let config = Arc::new(config);
    let agents = Arc::new(AgentVerifier {
        of_all: Arc::new(NoClientAuth),
        of_each: Vec::new(),
        of_ended: None,
    });
    Ok(ServerConfigs {
        public: Arc::clone(&config),
        tunnel: config,
        agents,
        authorities: TrustedAuthorities::default(),
        challenge: None,
    })
}

/// The directory of these records for one worker.
pub(crate) fn directory(records: &Records) -> Directory {
    Directory::new(records, &Region::new("bench", "localhost"), 1)
}

/// Records of as many services, the first of which is `acme--api`.
pub(crate) fn records(services: usize) -> Option<Records> {
    let account = AccountId::new("acme").ok()?;
    let rate = Rate::new(1_000_000, 1_000_000_000)?;
    let mut records = Records::default();
    let created_at = Timestamp::now();
    let (key, secret) = SERVICE_KEY.strip_prefix("gw_sk_")?.split_once('.')?;
    for number in 0..services {
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
            created_ms: None,
            managed_by: None,
            later: Default::default(),
        }));
    }
    Some(records)
}

/// A connected socket whose other end is closed. Answers questions about a connection in memory,
/// and carries no bytes.
pub(super) fn idle_socket() -> io::Result<Socket> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Socket::from_fd(TcpStream::connect(listener.local_addr()?)?.into())
}
