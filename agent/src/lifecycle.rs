//! Life cycle of an agent: one thread with one reactor, on which a task per service keeps the
//! tunnel and another task keeps the certificate fresh.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::Duration;

use futures_util::future::select;
use gw_shared::identity::program::{ReleaseKeys, SignedProgram};
use gw_shared::runtime::{self, Driver, DriverError};
use gw_shared::telemetry::trace::{Exporter, ProgramIdentity};
use tokio::sync::{mpsc, watch};

use crate::admin::{self, AdminListener};
use crate::config::Config;
use crate::identity::state::{Enrollment, StateError, StateLock};
use crate::program::Updates;
use crate::program::stored::UpdateRecord;
use crate::succession::{AgentEvent, AgentEvents, LifecycleCommand, Succession};
use crate::telemetry::trace::Tracing;
use crate::tunnel::service::{self, unless_stopped};
use crate::tunnel::{AgentContext, RelayedService};
use crate::update;

/// A running agent. Dropping it stops the agent without waiting for its requests to end.
pub struct AgentHandle {
    /// `None` only while draining.
    thread: Option<JoinHandle<()>>,
    stop: watch::Sender<bool>,
    commands: mpsc::UnboundedSender<LifecycleCommand>,
    metrics_address: Option<SocketAddr>,
    /// Exporter of trace spans. Stopped after the agent's thread, which produces them.
    exporter: Option<Exporter>,
}

/// Time limit for the export of the last spans after the agent has stopped.
const SPANS_END_WITHIN: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("cannot start the agent's thread: {0}")]
    Thread(#[from] io::Error),
    #[error(transparent)]
    Traces(#[from] gw_shared::telemetry::trace::ExporterError),
    /// The state folder is in use by another process.
    #[error(transparent)]
    State(#[from] StateError),
}

/// Starts an agent on its own thread and locks its state folder. The agent runs until
/// [`AgentHandle::drain`], regardless of its gateway.
pub fn start(config: Config) -> Result<AgentHandle, StartError> {
    let lock = config.state.lock()?;
    let (events, _) = AgentEvents::new();
    let (commands, link) = ProcessLink::new(events);
    start_thread(config, Some(lock), commands, link)
}

/// What a supervisor tells its worker at the start.
#[derive(Debug, Default)]
pub(crate) struct Supervised {
    /// Services for which the predecessor has tunnels: they have to be ready before
    /// [`AgentEvent::Ready`].
    pub(crate) required: Vec<String>,
    /// The stored program that runs; `None` for the installed one.
    pub(crate) program: Option<SignedProgram>,
    /// Release keys by which the supervisor accepts programs; `None` if it runs no updates.
    pub(crate) release_keys: Option<ReleaseKeys>,
}

/// As [`start`], for a process of which the supervisor has locked the state folder. Sends each
/// service to `relayed` once its first tunnel is ready.
pub(crate) fn start_supervised(
    config: Config,
    relayed: Option<Sender<RelayedService>>,
    supervised: Supervised,
) -> Result<(AgentHandle, mpsc::UnboundedReceiver<AgentEvent>), StartError> {
    let (events, received) = AgentEvents::new();
    let (commands, link) = ProcessLink::new(events);
    let link = ProcessLink {
        relayed,
        supervised,
        ..link
    };
    start_thread(config, None, commands, link).map(|agent| (agent, received))
}

fn start_thread(
    config: Config,
    lock: Option<StateLock>,
    commands: mpsc::UnboundedSender<LifecycleCommand>,
    link: ProcessLink,
) -> Result<AgentHandle, StartError> {
    let driver = Driver::choose()?;
    runtime::raise_open_file_limit();
    driver.log();
    let (exporter, spans) = config
        .traces
        .as_ref()
        .map(|traces| Exporter::start(traces, &identity(&config)))
        .transpose()?
        .unzip();
    let listener = config.metrics_listen.map(AdminListener::bind);
    let metrics_address = listener.as_ref().and_then(AdminListener::address);
    let (stop, stopped) = watch::channel(false);
    let thread = std::thread::Builder::new()
        .name("gw-agent".into())
        .spawn(move || {
            let _lock = lock;
            let tracing = spans.zip(config.traces.as_ref()).map(|(spans, traces)| {
                Tracing::new(
                    spans,
                    traces.sample_ratio,
                    config.enrollment.agent_id.clone(),
                )
            });
            let running = async {
                let agent = context(config, tracing, &link);
                run(agent, listener, link, stopped).await;
            };
            if let Err(error) = driver.block_on(running) {
                tracing::error!(%error, "cannot start the agent's reactor");
            }
        })?;
    Ok(AgentHandle {
        thread: Some(thread),
        stop,
        commands,
        metrics_address,
        exporter,
    })
}

/// The agent as a trace collector identifies it.
fn identity(config: &Config) -> ProgramIdentity {
    let Enrollment {
        agent_id,
        gateway_name,
        ..
    } = &config.enrollment;
    let region = gateway_name
        .split('.')
        .next()
        .unwrap_or_default()
        .to_owned();
    ProgramIdentity {
        service_name: "gw-agent",
        instance_id: agent_id.to_string(),
        region,
    }
}

impl AgentHandle {
    /// Address of `/metrics`, `/readyz` and `/healthz`; `None` if not configured or not bound.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics_address
    }

    /// Tells the agent's thread about its successor.
    pub(crate) fn command(&self, command: LifecycleCommand) {
        // Fails if the thread has ended.
        let _ = self.commands.send(command);
    }

    /// Stops accepting requests, finishes the running ones, closes the tunnels, then returns.
    pub fn drain(mut self) {
        self.stop.send_replace(true);
        if self
            .thread
            .take()
            .is_some_and(|thread| thread.join().is_err())
        {
            tracing::error!("the agent's thread panicked");
        }
        if let Some(exporter) = self.exporter.take() {
            exporter.stop(SPANS_END_WITHIN);
        }
    }
}

impl Drop for AgentHandle {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

/// An agent in a process that nothing supervises, and the future that runs it.
#[cfg(feature = "simulation_support")]
pub(crate) fn alone(
    config: Config,
    stop: watch::Receiver<bool>,
) -> (Rc<AgentContext>, impl Future<Output = ()>) {
    let (events, _) = AgentEvents::new();
    let (commands, link) = ProcessLink::new(events);
    let agent = context(config, None, &link);
    let running = Rc::clone(&agent);
    let running = async move {
        // Open as long as the agent runs.
        let _commands = commands;
        run(running, None, link, stop).await;
    };
    (agent, running)
}

fn context(config: Config, tracing: Option<Tracing>, link: &ProcessLink) -> Rc<AgentContext> {
    config.warn();
    let updates = updates(&config, link);
    let agent = AgentContext::new(config, tracing, updates, link.events.clone());
    Rc::new(AgentContext {
        relayed: link.relayed.clone(),
        ..agent
    })
}

async fn run(
    agent: Rc<AgentContext>,
    listener: Option<AdminListener>,
    link: ProcessLink,
    stop: watch::Receiver<bool>,
) {
    if let Some(listener) = listener {
        let agent = Rc::clone(&agent);
        runtime::spawn(async move {
            // A successor binds the same address.
            let succeeded = pin!(agent.succession.wait_for(Succession::Done));
            select(succeeded, pin!(admin::serve(Rc::clone(&agent), listener))).await;
        });
    }
    runtime::spawn(obey(Rc::clone(&agent), link));
    {
        let agent = Rc::clone(&agent);
        runtime::spawn(async move { update::keep_updated(&agent).await });
    }
    if agent.tracing.is_some() {
        let agent = Rc::clone(&agent);
        runtime::spawn(async move {
            if let Some(tracing) = &agent.tracing {
                tracing.keep_flushing().await;
            }
        });
    }
    // Renewal never returns, so this ends with the services.
    select(
        pin!(keep_services(&agent, stop)),
        pin!(agent.certificates.keep_fresh()),
    )
    .await;
    if let Some(tracing) = &agent.tracing {
        tracing.flush();
    }
}

/// The ends of the agent's thread.
struct ProcessLink {
    commands: mpsc::UnboundedReceiver<LifecycleCommand>,
    events: AgentEvents,
    /// Receives each service once its first tunnel is ready, if a receiver is interested.
    relayed: Option<Sender<RelayedService>>,
    /// Nothing of these in a process without a supervisor.
    supervised: Supervised,
}

impl ProcessLink {
    /// A link of a process without a supervisor, and its sender of commands.
    fn new(events: AgentEvents) -> (mpsc::UnboundedSender<LifecycleCommand>, Self) {
        let (sender, commands) = mpsc::unbounded_channel();
        (
            sender,
            Self {
                commands,
                events,
                relayed: None,
                supervised: Supervised::default(),
            },
        )
    }
}

/// The agent's updates. Only a supervisor can run another program.
fn updates(config: &Config, link: &ProcessLink) -> Updates {
    let Supervised {
        program,
        release_keys,
        ..
    } = &link.supervised;
    let record = config.state.updates().unwrap_or_else(|error| {
        tracing::warn!(%error,
            "cannot read the record of updates: programs that failed before may be tried again");
        UpdateRecord::default()
    });
    Updates::new(release_keys.clone(), program.clone(), &record)
}

/// Interval at which the state of all tunnels is compared with what the process waits for.
const SUCCESSION_TICK: Duration = Duration::from_millis(20);

/// Follows the commands of the process and reports what it waits for. Ends with the process's end
/// of the channel.
async fn obey(agent: Rc<AgentContext>, link: ProcessLink) {
    let ProcessLink {
        mut commands,
        events,
        supervised: Supervised { required, .. },
        ..
    } = link;
    let is_ready = || {
        let services = agent.registry.services();
        let assigned = agent.services.subscribe();
        let is_kept = |hostname: &&String| {
            assigned.borrow().contains(*hostname) && agent.config.backends.of(hostname).is_some()
        };
        let is_up = |hostname: &String| {
            services
                .get(hostname)
                .is_some_and(|service| service.is_up())
        };
        required.iter().filter(is_kept).all(is_up)
    };
    let mut awaits_ready = true;
    let mut awaits_displacement = false;
    loop {
        if awaits_ready && is_ready() {
            awaits_ready = false;
            events.send(AgentEvent::Ready);
        }
        if awaits_displacement && serving(&agent).is_empty() {
            awaits_displacement = false;
            events.send(AgentEvent::Displaced);
        }
        let command = if awaits_ready || awaits_displacement {
            runtime::timeout(SUCCESSION_TICK, commands.recv()).await
        } else {
            Ok(commands.recv().await)
        };
        match command {
            // The time is up: look again.
            Err(_) => {}
            Ok(None) => return,
            Ok(Some(LifecycleCommand::ExpectSuccessor)) => {
                agent.succession.set(Succession::Expected);
                events.send(AgentEvent::Serving {
                    hostnames: serving(&agent),
                });
                awaits_displacement = true;
            }
            Ok(Some(LifecycleCommand::Resume)) => {
                agent.succession.set(Succession::None);
                awaits_displacement = false;
            }
            Ok(Some(LifecycleCommand::Succeeded)) => agent.succession.set(Succession::Done),
            Ok(Some(LifecycleCommand::UpdateFailed {
                program,
                error,
                is_refused,
            })) => {
                agent.updates.given_up(&program, &error, is_refused);
            }
        }
    }
}

/// Hostnames of the services that have a tunnel.
fn serving(agent: &AgentContext) -> Vec<String> {
    agent
        .registry
        .services()
        .iter()
        .filter(|(_, service)| service.is_up())
        .map(|(name, _)| name.clone())
        .collect()
}

/// Keeps a tunnel for each service that the gateway assigns to this agent, until the agent stops.
async fn keep_services(agent: &Rc<AgentContext>, stop: watch::Receiver<bool>) {
    let mut services = agent.services.subscribe();
    // Stop senders of the running services.
    let mut running: BTreeMap<String, watch::Sender<bool>> = BTreeMap::new();
    // Every service holds a sender, so the channel closes when the last service has ended.
    let (alive, mut ended) = mpsc::channel::<()>(1);
    loop {
        let wanted = services.borrow_and_update().clone();
        running.retain(|hostname, stop| {
            let is_wanted = wanted.contains(hostname);
            if !is_wanted {
                tracing::info!(service = %hostname,
                    "the service is no longer assigned to this agent");
                stop.send_replace(true);
            }
            is_wanted
        });
        for hostname in wanted {
            if running.contains_key(&hostname) {
                continue;
            }
            let Some(backends) = agent.config.backends.of(&hostname).cloned() else {
                tracing::error!(service = %hostname,
                    "the service is not served because it has no backend; {}",
                    Config::HOW_TO_SET_A_BACKEND);
                continue;
            };
            let (stop, stopped) = watch::channel(false);
            running.insert(hostname.clone(), stop);
            let agent = Rc::clone(agent);
            let alive = alive.clone();
            runtime::spawn(async move {
                service::keep_tunnel(agent, hostname, backends, stopped).await;
                drop(alive);
            });
        }
        if unless_stopped(&stop, services.changed()).await.is_none() {
            break;
        }
        store_services(agent, services.borrow().iter().cloned().collect());
    }
    agent.registry.stopping.set(true);
    for stop in running.values() {
        stop.send_replace(true);
    }
    drop(alive);
    // Nothing is ever sent, so this resolves when the channel closes.
    ended.recv().await;
}

/// Stores the services in the state folder, for the next start.
fn store_services(agent: &AgentContext, services: Vec<String>) {
    tracing::info!(
        services = services.join(", "),
        "the services of this agent have changed"
    );
    let enrollment = Enrollment {
        services,
        ..agent.config.enrollment.clone()
    };
    if let Err(error) = agent.config.state.write_enrollment(&enrollment) {
        tracing::error!(%error, "cannot store the services of this agent");
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tempfile::TempDir;

    use super::*;
    use crate::backoff::Backoff;
    use crate::fake_gateway::{self, Authority, HOSTNAME, NOW, refusal};
    use crate::testing::block_on;
    use crate::tunnel::reconnect::Reconnects;

    /// An agent whose gateway refuses every tunnel as overloaded, and the hostnames of the
    /// requested tunnels.
    fn refused_agent() -> (TempDir, AgentContext, mpsc::UnboundedReceiver<String>) {
        let authority = Authority::new();
        let (sender, hosts) = mpsc::unbounded_channel();
        let port = fake_gateway::serve(&authority, move |request| {
            let mut lines = request.head.lines();
            let host = lines.find_map(|line| line.strip_prefix("host: "));
            // Fails once the test has ended.
            let _ = sender.send(host.unwrap().to_owned());
            refusal(503, "", "GW_OVERLOADED")
        });
        let (directory, agent) = fake_gateway::agent(&authority, NOW, port);
        (directory, agent, hosts)
    }

    #[test]
    fn services_are_started_and_stopped_as_the_gateway_assigns_them() {
        const OTHER: &str = "acme--other.eu1.gw.localhost";
        let (_directory, agent, mut hosts) = refused_agent();
        let agent = Rc::new(agent);
        let (stop, stopped) = watch::channel(false);
        let gateway = async {
            assert_eq!(hosts.recv().await.unwrap(), HOSTNAME);
            agent.services.set(vec![OTHER.to_owned()]);
            while hosts.recv().await.unwrap() != OTHER {}
            stop.send_replace(true);
        };
        block_on(async { futures_util::join!(keep_services(&agent, stopped), gateway) });
        assert_eq!(agent.config.state.enrollment().unwrap().services, [OTHER]);
    }

    #[test]
    fn all_services_reconnect_when_the_first_reaches_the_gateway() {
        let (_directory, mut agent, mut hosts) = refused_agent();
        // The backoff alone does not end within this test.
        let long = Duration::from_secs(100_000);
        agent.reconnects = Reconnects::new(Backoff::between(long, long));
        let services: BTreeSet<String> = (0..4)
            .map(|number| format!("acme--s{number}.eu1.gw.localhost"))
            .collect();
        agent.services.set(services.iter().cloned().collect());
        let agent = Rc::new(agent);
        let failed_attempts = || {
            let services = agent.registry.services();
            let attempts = services
                .values()
                .map(|service| service.failed_attempts.get());
            attempts.sum::<u64>()
        };
        let (stop, stopped) = watch::channel(false);
        let gateway = async {
            for round in 1..=2 {
                let mut requested = BTreeSet::new();
                while requested.len() < services.len() {
                    assert!(requested.insert(hosts.recv().await.unwrap()), "each once");
                }
                assert_eq!(requested, services);
                // Until each service has received its refusal.
                while failed_attempts() < 4 * round {
                    runtime::sleep(Duration::from_millis(1)).await;
                }
                agent.reconnects.record_success();
            }
            stop.send_replace(true);
        };
        block_on(async { futures_util::join!(keep_services(&agent, stopped), gateway) });
    }
}
