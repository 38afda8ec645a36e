//! Life cycle of an agent: one thread with one reactor, on which a task per service keeps the tunnel and another task
//! keeps the certificate fresh.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::Duration;

use futures_util::future::select;
use gw_shared::runtime::{self, Driver, DriverError};
use gw_shared::telemetry::trace::{Exporter, Identity};
use tokio::sync::{mpsc, watch};

use crate::admin::{self, AdminListener};
use crate::config::Config;
use crate::identity::state::{Enrollment, StateError};
use crate::telemetry::trace::Tracing;
use crate::tunnel::service::{self, unless_stopped};
use crate::tunnel::{Agent, RelayedService};

/// A running agent. Dropping it stops the agent without waiting for its requests to end.
pub struct AgentHandle {
    /// `None` only while draining.
    thread: Option<JoinHandle<()>>,
    stop: watch::Sender<bool>,
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
    Traces(#[from] gw_shared::telemetry::trace::StartError),
    /// The state folder is in use by another process.
    #[error(transparent)]
    State(#[from] StateError),
}

/// Starts an agent on its own thread and locks its state folder. The agent runs until [`AgentHandle::drain`], regardless
/// of its gateway.
pub fn start(config: Config) -> Result<AgentHandle, StartError> {
    start_with(config, None)
}

/// As [`start`], and sends each service once its first tunnel is ready.
pub fn start_announcing(config: Config, relayed: Sender<RelayedService>) -> Result<AgentHandle, StartError> {
    start_with(config, Some(relayed))
}

fn start_with(config: Config, relayed: Option<Sender<RelayedService>>) -> Result<AgentHandle, StartError> {
    let lock = config.state.lock()?;
    let driver = Driver::choose()?;
    runtime::raise_open_file_limit();
    driver.log();
    let (exporter, spans) =
        config.traces.as_ref().map(|traces| Exporter::start(traces, &identity(&config))).transpose()?.unzip();
    let listener = config.metrics_listen.map(AdminListener::bind);
    let metrics_address = listener.as_ref().and_then(AdminListener::address);
    let (stop, stopped) = watch::channel(false);
    let thread = std::thread::Builder::new().name("gw-agent".into()).spawn(move || {
        let _lock = lock;
        let tracing = spans
            .zip(config.traces.as_ref())
            .map(|(spans, traces)| Tracing::new(spans, traces.sample_ratio, config.enrollment.agent_id.clone()));
        if let Err(error) = driver.block_on(run(Agent { relayed, ..Agent::new(config, tracing) }, listener, stopped)) {
            tracing::error!(%error, "cannot start the agent's reactor");
        }
    })?;
    Ok(AgentHandle { thread: Some(thread), stop, metrics_address, exporter })
}

/// The agent as a trace collector identifies it.
fn identity(config: &Config) -> Identity {
    let Enrollment { agent_id, gateway_name, .. } = &config.enrollment;
    let region = gateway_name.split('.').next().unwrap_or_default().to_owned();
    Identity { service_name: "gw-agent", instance_id: agent_id.to_string(), region }
}

impl AgentHandle {
    /// Address of `/metrics`, `/readyz` and `/healthz`; `None` if not configured or not bound.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics_address
    }

    /// Stops accepting requests, finishes the running ones, closes the tunnels, then returns.
    pub fn drain(mut self) {
        self.stop.send_replace(true);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
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

async fn run(agent: Agent, listener: Option<AdminListener>, stop: watch::Receiver<bool>) {
    agent.config.warn();
    let agent = Rc::new(agent);
    if let Some(listener) = listener {
        runtime::spawn(admin::serve(Rc::clone(&agent), listener));
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
    select(pin!(keep_services(&agent, stop)), pin!(agent.certificates.keep_fresh())).await;
    if let Some(tracing) = &agent.tracing {
        tracing.flush();
    }
}

/// Keeps a tunnel for each service that the gateway assigns to this agent, until the agent stops.
async fn keep_services(agent: &Rc<Agent>, stop: watch::Receiver<bool>) {
    let mut services = agent.gateway_events.services();
    // Stop senders of the running services.
    let mut running: BTreeMap<String, watch::Sender<bool>> = BTreeMap::new();
    // Every service holds a sender, so the channel closes when the last service has ended.
    let (alive, mut ended) = mpsc::channel::<()>(1);
    loop {
        let wanted = services.borrow_and_update().clone();
        running.retain(|hostname, stop| {
            let is_wanted = wanted.contains(hostname);
            if !is_wanted {
                tracing::info!(service = %hostname, "the service is no longer assigned to this agent");
                stop.send_replace(true);
            }
            is_wanted
        });
        for hostname in wanted {
            if running.contains_key(&hostname) {
                continue;
            }
            let Some(backends) = agent.config.backends.of(&hostname).cloned() else {
                tracing::error!(service = %hostname, "the service is not served because it has no backend; {}", Config::HOW_TO_SET_A_BACKEND);
                continue;
            };
            let (stop, stopped) = watch::channel(false);
            running.insert(hostname.clone(), stop);
            let (agent, alive) = (Rc::clone(agent), alive.clone());
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
fn store_services(agent: &Agent, services: Vec<String>) {
    tracing::info!(services = services.join(", "), "the services of this agent have changed");
    let enrollment = Enrollment { services, ..agent.config.enrollment.clone() };
    if let Err(error) = agent.config.state.write_enrollment(&enrollment) {
        tracing::error!(%error, "cannot store the services of this agent");
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;
    use crate::backoff::Backoff;
    use crate::fake_gateway::{self, Authority, HOSTNAME, NOW, refusal};
    use crate::tunnel::reconnect::Reconnects;

    /// An agent whose gateway refuses every tunnel as overloaded, and the hostnames of the requested tunnels.
    fn refused_agent(state_dir: &Path) -> (Agent, mpsc::UnboundedReceiver<String>) {
        let authority = Authority::new();
        let (sender, hosts) = mpsc::unbounded_channel();
        let port = fake_gateway::serve(&authority, move |request| {
            let host = request.head.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
            // Fails once the test has ended.
            let _ = sender.send(host.to_owned());
            refusal(503, "", "GW_OVERLOADED")
        });
        (fake_gateway::agent(state_dir, &authority, &authority.identity_pem(NOW), port), hosts)
    }

    #[test]
    fn services_are_started_and_stopped_as_the_gateway_assigns_them() {
        const OTHER: &str = "acme--other.eu1.gw.localhost";
        let directory = tempfile::tempdir().unwrap();
        let (agent, mut hosts) = refused_agent(directory.path());
        let agent = Rc::new(agent);
        let (stop, stopped) = watch::channel(false);
        let gateway = async {
            assert_eq!(hosts.recv().await.unwrap(), HOSTNAME);
            agent.gateway_events.set_services(vec![OTHER.to_owned()]);
            while hosts.recv().await.unwrap() != OTHER {}
            stop.send_replace(true);
        };
        let driver = Driver::choose().unwrap();
        driver.block_on(async { futures_util::join!(keep_services(&agent, stopped), gateway) }).unwrap();
        assert_eq!(agent.config.state.enrollment().unwrap().services, [OTHER]);
    }

    #[test]
    fn all_services_reconnect_when_the_first_reaches_the_gateway() {
        let directory = tempfile::tempdir().unwrap();
        let (mut agent, mut hosts) = refused_agent(directory.path());
        // The backoff alone does not end within this test.
        agent.reconnects = Reconnects::new(Backoff::starting_at(Duration::from_secs(100_000)));
        let services: BTreeSet<String> = (0..4).map(|number| format!("acme--s{number}.eu1.gw.localhost")).collect();
        agent.gateway_events.set_services(services.iter().cloned().collect());
        let agent = Rc::new(agent);
        let failed_attempts =
            || agent.registry.services().values().map(|service| service.failed_attempts.get()).sum::<u64>();
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
        let driver = Driver::choose().unwrap();
        driver.block_on(async { futures_util::join!(keep_services(&agent, stopped), gateway) }).unwrap();
    }
}
