//! Starting and stopping a gateway: listeners, workers, control plane.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gw_shared::runtime::{self, Driver, DriverError};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use crate::admin::{self, Admin};
use crate::config::Config;
use crate::control::{self, Control, ControlError, Desk};
use crate::limits;
use crate::mailbox::{Message, mailbox};
use crate::ownership::WorkerId;
use crate::worker::{self, Peers, Policy, Setup};

/// Connections that the kernel completes while we are not looking; it caps this at net.core.somaxconn.
const BACKLOG: i32 = 4096;
/// How often a drain looks whether the last request has ended.
const DRAIN_TICK: Duration = Duration::from_millis(20);

/// A running gateway. Dropping it stops it at once; see [`Gateway::drain`].
pub struct Gateway {
    control: Arc<Control>,
    address: SocketAddr,
    admin_address: SocketAddr,
    draining: Arc<AtomicBool>,
    drain_within: Duration,
    workers: Vec<JoinHandle<()>>,
    /// The threads of the control plane: one ends when `desk` is closed, one when `stop_admin` is dropped.
    control_plane: Vec<JoinHandle<()>>,
    desk: Desk,
    stop_admin: Option<oneshot::Sender<()>>,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error("cannot listen on {address}: {error}")]
    Listen { address: SocketAddr, error: io::Error },
    #[error("a worker did not start; see the log above")]
    Worker,
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
}

impl Gateway {
    /// Starts a gateway; it takes connections when this returns.
    pub fn start(config: &Config) -> Result<Self, StartError> {
        let driver = Driver::choose()?;
        let descriptors = runtime::raise_open_file_limit();
        driver.log();
        let (mailboxes, inboxes): (Vec<_>, Vec<_>) = (0..config.workers).map(|_| mailbox(limits::MAILBOX)).unzip();
        let busy = (0..config.workers).map(|_| AtomicU32::new(0)).collect();
        let peers = Arc::new(Peers { mailboxes, busy });
        let control = Arc::new(Control::open(config, Arc::clone(&peers))?);
        let (directory, certificates) = control.initial_state()?;

        let admin_listener = bind(config.admin_listen, false)?;
        let admin_address = local_address(&admin_listener, config.admin_listen)?;
        // Workers share the port, and so could another gateway that was started by mistake: its callers would be ours.
        drop(bind(config.listen, false)?);
        // The first one may let the kernel choose the port; the others share it.
        let first = bind(config.listen, true)?;
        let address = local_address(&first, config.listen)?;
        let mut listeners = vec![first];
        for _ in 1..config.workers {
            listeners.push(bind(address, true)?);
        }

        let (desk, errands) = control::desk();
        let (up, ups) = crossbeam_channel::bounded(config.workers);
        let mut workers = Vec::with_capacity(config.workers);
        for (number, (inbox, listener)) in inboxes.into_iter().zip(listeners).enumerate() {
            let setup = Setup {
                id: WorkerId(number),
                inbox,
                peers: Arc::clone(&peers),
                listener,
                region: config.region.clone(),
                directory: Arc::clone(&directory),
                certificates: Arc::clone(&certificates),
                policy: policy(config),
                desk: desk.clone(),
                connection_limit: connections_per_worker(descriptors, config.workers),
                up: up.clone(),
            };
            let driver = driver.clone();
            workers.push(spawn(format!("gw-worker-{number}"), move || {
                if let Err(error) = worker::run(setup, &driver) {
                    tracing::error!(worker = number, %error, "worker did not start");
                }
            })?);
        }
        drop(up);
        if ups.iter().count() < config.workers {
            control.tell_workers(|| Message::Stop);
            return Err(StartError::Worker);
        }
        let errands_control = Arc::clone(&control);
        let errands = spawn("gw-errands".to_owned(), move || errands.serve(&errands_control))?;
        let draining = Arc::new(AtomicBool::new(false));
        let admin = Admin { control: Arc::clone(&control), draining: Arc::clone(&draining) };
        let (stop_admin, admin_stopped) = oneshot::channel();
        let admin = spawn("gw-control".to_owned(), move || serve_admin(admin_listener, admin, admin_stopped))?;
        let control_plane = vec![errands, admin];
        tracing::info!(%address, %admin_address, workers = config.workers, region = config.region.apex(), "gateway");
        let (drain_within, stop_admin) = (config.drain, Some(stop_admin));
        Ok(Self { control, address, admin_address, draining, drain_within, workers, control_plane, desk, stop_admin })
    }

    pub fn control(&self) -> &Arc<Control> {
        &self.control
    }

    /// Where callers and agents connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn admin_address(&self) -> SocketAddr {
        self.admin_address
    }

    /// Takes nothing new, lets running requests end (for as long as the configuration says), then stops.
    pub fn drain(mut self) {
        self.draining.store(true, Ordering::Relaxed);
        self.control.tell_workers(|| Message::Drain);
        let deadline = Instant::now() + self.drain_within;
        while Instant::now() < deadline && !self.is_idle() {
            std::thread::sleep(DRAIN_TICK);
        }
        self.control.tell_workers(|| Message::Stop);
        drop(self.stop_admin.take());
        self.desk.close();
        for thread in self.workers.drain(..).chain(self.control_plane.drain(..)) {
            if thread.join().is_err() {
                tracing::error!("a thread panicked");
            }
        }
    }

    fn reload_certificates(&self) {
        match self.control.reload_certificates() {
            Ok(()) => tracing::info!("certificates reloaded"),
            Err(error) => tracing::error!(%error, "certificates not reloaded: the old ones stay in use"),
        }
    }

    fn is_idle(&self) -> bool {
        self.control.reports().iter().all(|report| report.connections == 0 && report.crossings_served == 0)
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.control.tell_workers(|| Message::Stop);
        self.desk.close();
    }
}

/// Runs until SIGTERM or SIGINT, reloading certificates on SIGHUP, then drains; a second signal ends the process at
/// once. Tells systemd, if it asked.
pub fn run_until_stopped(gateway: Gateway) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let result = runtime.block_on(async {
        let mut signals = Signals::listen()?;
        notify(&[sd_notify::NotifyState::Ready]);
        signals.stop(|| gateway.reload_certificates()).await;
        notify(&[sd_notify::NotifyState::Stopping]);
        tracing::warn!("stopping: running requests may end; a second signal cuts them");
        let drained = tokio::task::spawn_blocking(|| gateway.drain());
        tokio::select! {
            _ = drained => Ok(()),
            () = signals.stop(|| ()) => Err(io::Error::other("stopped during the drain: running requests were cut")),
        }
    });
    // A drain that was cut short is not waited for.
    runtime.shutdown_background();
    result
}

/// The signals that a gateway listens to.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Signals {
    fn listen() -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for the next signal to stop; calls `reload` on each to reload.
    async fn stop(&mut self, reload: impl Fn()) {
        loop {
            tokio::select! {
                _ = self.interrupt.recv() => return,
                _ = self.terminate.recv() => return,
                _ = self.hang_up.recv() => reload(),
            }
        }
    }
}

fn notify(state: &[sd_notify::NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "systemd cannot be told");
    }
}

/// Serves the admin listener until `stopped` resolves.
fn serve_admin(listener: TcpListener, admin: Admin, stopped: oneshot::Receiver<()>) {
    let served = tokio::runtime::Builder::new_current_thread().enable_all().build().and_then(|control| {
        control.block_on(async {
            tokio::select! {
                served = admin::serve(listener, admin) => served,
                _ = stopped => Ok(()),
            }
        })
    });
    if let Err(error) = served {
        tracing::error!(%error, "the admin listener ended");
    }
}

pub(crate) fn policy(config: &Config) -> Policy {
    Policy {
        hand_over: config.hand_over,
        trusted_proxies: config.trusted_proxies.clone(),
        agent_mtls: config.agent_mtls,
        token_lifetime: config.token_lifetime,
        relay_memory: (config.relay_memory / config.workers.max(1)).max(limits::RELAY_MEMORY_LEAST),
        token_requests: config.token_requests,
        enrollment_requests: config.enrollment_requests,
        auth_failures: config.auth_failures,
    }
}

fn spawn(name: String, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, StartError> {
    std::thread::Builder::new().name(name).spawn(run).map_err(StartError::Thread)
}

fn bind(address: SocketAddr, shared: bool) -> Result<TcpListener, StartError> {
    let listen = || {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        // One listening queue for each worker; the kernel spreads connections over them (Linux 3.9).
        socket.set_reuse_port(shared)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        io::Result::Ok(TcpListener::from(socket))
    };
    listen().map_err(|error| StartError::Listen { address, error })
}

fn local_address(listener: &TcpListener, wanted: SocketAddr) -> Result<SocketAddr, StartError> {
    listener.local_addr().map_err(|error| StartError::Listen { address: wanted, error })
}

/// A worker's share of the descriptors, so that accepting never runs out of them.
fn connections_per_worker(descriptors: u64, workers: usize) -> usize {
    let share = descriptors.saturating_sub(limits::RESERVED_DESCRIPTORS) / workers as u64;
    usize::try_from(share).unwrap_or(usize::MAX).clamp(1, limits::CONNECTIONS_PER_WORKER)
}
