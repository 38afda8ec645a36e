//! The life of an agent: one thread with one reactor; on it a task per service that keeps its tunnel, and one that
//! keeps the certificate fresh.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::thread::JoinHandle;
use std::time::Duration;

use futures_util::future::select;
use gw_shared::runtime::{self, Driver, DriverError};
use gw_shared::telemetry::trace::{Exporter, Identity};
use tokio::sync::{Mutex, mpsc, watch};

use crate::clock::GatewayClock;
use crate::config::Config;
use crate::gateway_events::Desk;
use crate::identity::issuance::Issuance;
use crate::identity::renewal;
use crate::identity::state::{Enrollment, StateError};
use crate::telemetry::observe::{self, Observed, Observers};
use crate::telemetry::trace::Tracing;
use crate::tunnel::reconnect::Reconnects;
use crate::tunnel::service::{self, unless_stopped};

/// A running agent. Dropping it stops the agent too, without waiting for its requests to end.
pub struct AgentHandle {
    /// `None` only while draining.
    thread: Option<JoinHandle<()>>,
    stop: watch::Sender<bool>,
    metrics_address: Option<SocketAddr>,
    /// Of spans; ends after the thread that makes them.
    exporter: Option<Exporter>,
}

/// How long the last spans may take to be exported when the agent has stopped.
const SPANS_END_WITHIN: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("agent thread: {0}")]
    Thread(#[from] io::Error),
    #[error(transparent)]
    Traces(#[from] gw_shared::telemetry::trace::StartError),
    /// The state folder: another process has it.
    #[error(transparent)]
    State(#[from] StateError),
}

/// Starts an agent on a thread of its own. It runs until [`AgentHandle::drain`], whatever its gateway does, and has its
/// state folder to itself until then.
pub fn start(config: Config) -> Result<AgentHandle, StartError> {
    let lock = config.state.lock()?;
    let driver = Driver::choose()?;
    runtime::raise_open_file_limit();
    driver.log();
    let (exporter, spans) =
        config.traces.as_ref().map(|traces| Exporter::start(traces, &identity(&config))).transpose()?.unzip();
    let observers = config.metrics_listen.map(Observers::listen);
    let metrics_address = observers.as_ref().and_then(Observers::address);
    let (stop, stopped) = watch::channel(false);
    let thread = std::thread::Builder::new().name("gw-agent".into()).spawn(move || {
        let _until_the_end = lock;
        let tracing = spans
            .zip(config.traces.as_ref())
            .map(|(spans, traces)| Tracing::new(spans, traces.sample_ratio, config.enrollment.agent_id.clone()));
        if let Err(error) = driver.block_on(run(config, tracing, observers, stopped)) {
            tracing::error!(%error, "the agent's reactor did not start");
        }
    })?;
    Ok(AgentHandle { thread: Some(thread), stop, metrics_address, exporter })
}

/// As a collector knows the agent.
fn identity(config: &Config) -> Identity {
    let Enrollment { agent_id, gateway_name, .. } = &config.enrollment;
    let region = gateway_name.split('.').next().unwrap_or_default().to_owned();
    Identity { service_name: "gw-agent", instance_id: agent_id.to_string(), region }
}

impl AgentHandle {
    /// Where `/metrics`, `/readyz` and `/healthz` are; `None` if they are not configured, or another program is there.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics_address
    }

    /// Takes no new requests, finishes those that run, ends the tunnels, then returns.
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

/// What the tasks of one agent share.
pub(crate) struct Agent {
    pub(crate) config: Config,
    pub(crate) desk: Desk,
    /// Held while an expired certificate is being replaced.
    pub(crate) recovering: Mutex<()>,
    pub(crate) reconnects: Reconnects,
    pub(crate) clock: GatewayClock,
    pub(crate) issuance: Issuance,
    /// `None` where there is no collector.
    pub(crate) tracing: Option<Tracing>,
    pub(crate) observed: Observed,
}

async fn run(config: Config, tracing: Option<Tracing>, observers: Option<Observers>, stop: watch::Receiver<bool>) {
    config.warn();
    let desk = Desk::new(config.enrollment.services.iter().cloned());
    let agent = Rc::new(Agent::new(config, desk, tracing));
    if let Some(observers) = observers {
        runtime::spawn(observe::serve(Rc::clone(&agent), observers));
    }
    if agent.tracing.is_some() {
        let agent = Rc::clone(&agent);
        runtime::spawn(async move {
            if let Some(tracing) = &agent.tracing {
                tracing.keep_flushing().await;
            }
        });
    }
    // Of these two, only the services end.
    select(pin!(keep_services(&agent, stop)), pin!(renewal::keep_fresh(&agent))).await;
    if let Some(tracing) = &agent.tracing {
        tracing.flush();
    }
}

/// Keeps a tunnel for each service that the gateway gives this agent, until the agent stops.
async fn keep_services(agent: &Rc<Agent>, stop: watch::Receiver<bool>) {
    let mut services = agent.desk.services();
    // What stops each of those that run.
    let mut running: BTreeMap<String, watch::Sender<bool>> = BTreeMap::new();
    // Every service holds a sender: when all are dropped, all have ended.
    let (alive, mut ended) = mpsc::channel::<()>(1);
    loop {
        let wanted = services.borrow_and_update().clone();
        running.retain(|hostname, stop| {
            let stays = wanted.contains(hostname);
            if !stays {
                tracing::info!(service = %hostname, "no longer a service of this agent");
                stop.send_replace(true);
            }
            stays
        });
        for hostname in wanted {
            if running.contains_key(&hostname) {
                continue;
            }
            let Some(backends) = agent.config.backends.of(&hostname).cloned() else {
                tracing::error!(service = %hostname, "not served: it has no backend; {}", Config::HOW_TO_SET_A_BACKEND);
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
        agent.remember_services(services.borrow().iter().cloned().collect());
    }
    agent.observed.stopping.set(true);
    for stop in running.values() {
        stop.send_replace(true);
    }
    drop(alive);
    // Nothing is ever sent: this is the end of the last service.
    ended.recv().await;
}

impl Agent {
    pub(crate) fn new(config: Config, desk: Desk, tracing: Option<Tracing>) -> Self {
        Self {
            config,
            desk,
            recovering: Mutex::default(),
            reconnects: Reconnects::default(),
            clock: GatewayClock::default(),
            issuance: Issuance::default(),
            tracing,
            observed: Observed::default(),
        }
    }

    /// For the next start.
    fn remember_services(&self, services: Vec<String>) {
        tracing::info!(services = services.join(", "), "the services of this agent have changed");
        let enrollment = Enrollment { services, ..self.config.enrollment.clone() };
        if let Err(error) = self.config.state.write_enrollment(&enrollment) {
            tracing::error!(%error, "the services of this agent cannot be stored");
        }
    }
}

/// Even between 0 and 1.
pub(crate) fn random() -> f64 {
    let mut bytes = [0; 4];
    // Without randomness the delays are the longest there are, which does no harm.
    if aws_lc_rs::rand::fill(&mut bytes).is_err() {
        return 1.0;
    }
    f64::from(u32::from_le_bytes(bytes)) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::fake_gateway::{self, Authority, HOSTNAME, NOW, refusal};

    #[test]
    fn services_come_and_go_as_the_gateway_says() {
        const OTHER: &str = "acme--other.eu1.gw.localhost";
        let (authority, directory) = (Authority::new(), tempfile::tempdir().unwrap());
        // Tells which services ask for a tunnel.
        let (asks, mut asked) = mpsc::unbounded_channel();
        let port = fake_gateway::serve(&authority, move |request| {
            let host = request.head.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
            // Fails once the test is over.
            let _ = asks.send(host.to_owned());
            refusal(503, "", "GW_OVERLOADED")
        });
        let agent = Rc::new(fake_gateway::agent(directory.path(), &authority, &authority.identity_pem(NOW), port));
        let (stop, stopped) = watch::channel(false);
        let gateway = async {
            assert_eq!(asked.recv().await.unwrap(), HOSTNAME);
            agent.desk.services_are(vec![OTHER.to_owned()]);
            while asked.recv().await.unwrap() != OTHER {}
            stop.send_replace(true);
        };
        let driver = Driver::choose().unwrap();
        driver.block_on(async { futures_util::join!(keep_services(&agent, stopped), gateway) }).unwrap();
        assert_eq!(agent.config.state.enrollment().unwrap().services, [OTHER]);
    }

    #[test]
    fn all_services_come_back_with_the_first_that_reaches_the_gateway() {
        let (authority, directory) = (Authority::new(), tempfile::tempdir().unwrap());
        let (asks, mut asked) = mpsc::unbounded_channel();
        let port = fake_gateway::serve(&authority, move |request| {
            let host = request.head.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
            // Fails once the test is over.
            let _ = asks.send(host.to_owned());
            refusal(503, "", "GW_OVERLOADED")
        });
        let mut agent = fake_gateway::agent(directory.path(), &authority, &authority.identity_pem(NOW), port);
        // None of them comes back by itself while this test runs.
        agent.reconnects = Reconnects::beginning_with(Duration::from_secs(100_000));
        let services = (0..4).map(|number| format!("acme--s{number}.eu1.gw.localhost"));
        let services: BTreeSet<String> = services.collect();
        agent.desk = Desk::new(services.clone());
        let agent = Rc::new(agent);
        let (stop, stopped) = watch::channel(false);
        let gateway = async {
            for round in 1..=2 {
                let mut hosts = BTreeSet::new();
                while hosts.len() < services.len() {
                    assert!(hosts.insert(asked.recv().await.unwrap()), "each once");
                }
                assert_eq!(hosts, services);
                // Until each has heard of its refusal.
                while agent.observed.failed_attempts() < 4 * round {
                    runtime::sleep(Duration::from_millis(1)).await;
                }
                agent.reconnects.succeeded();
            }
            stop.send_replace(true);
        };
        let driver = Driver::choose().unwrap();
        driver.block_on(async { futures_util::join!(keep_services(&agent, stopped), gateway) }).unwrap();
    }
}
