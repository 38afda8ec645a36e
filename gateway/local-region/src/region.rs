//! A region of processes: its database, its nodes and their agent.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::Error;
use crate::events::{Event, Events, Wait};
use crate::folder::Folder;
use crate::node::{Node, Place, Settings};
use crate::part::{Part, Starter, new_log, wait_for_end};
use crate::ports::Ports;
use crate::postgres::{Listen, Server};

/// Longest wait for a node that stops: for its requests, and for leaving the region.
const STOP_WITHIN: Duration = Duration::from_secs(20);
/// Longest wait for the members, including those of an earlier region in the same folder to be
/// declared dead.
const MEMBERS_WITHIN: Duration = Duration::from_secs(60);
const TUNNEL_WITHIN: Duration = Duration::from_secs(30);

/// How a region is started.
#[derive(Debug, Clone)]
pub struct Options {
    pub nodes: usize,
    /// URL of the database; a PostgreSQL server of the region's own if `None`.
    pub store: Option<String>,
    /// Port for callers and agents of the first node; the others take the following ports. 0 means
    /// free ports.
    pub port: u16,
    /// The same for administration.
    pub admin_port: u16,
    /// A new temporary folder if `None`.
    pub data_dir: Option<PathBuf>,
}

/// A running region. A drop ends its processes at once, in the order of the fields.
pub struct Region {
    agent: Option<Part>,
    pub nodes: Vec<Node>,
    /// `None` with a given database.
    postgres: Option<Server>,
    /// URL of the database.
    pub store: String,
    starter: Starter,
    events: Events,
    ports: Ports,
    folder: Folder,
}

impl Options {
    /// Fails with the options that do not fit together.
    pub fn check(&self) -> Result<(), Error> {
        Ports::check(self.nodes, self.port, self.admin_port)
    }
}

impl Region {
    /// Takes ports and folder, and starts the database. The thread that calls it must live as long
    /// as the region.
    pub fn prepare(starter: Starter, options: &Options) -> Result<Self, Error> {
        options.check()?;
        let events = Events::listen().map_err(Error::io("signals"))?;
        let ports = Ports::hold(options.nodes, options.port, options.admin_port)?;
        let folder = Folder::new(options.data_dir.as_deref())?;
        let mut region = Self {
            agent: None,
            nodes: Vec::with_capacity(options.nodes),
            postgres: None,
            store: options.store.clone().unwrap_or_default(),
            starter,
            ports,
            folder,
            events,
        };
        if options.store.is_none() {
            let folder = &region.folder.path;
            let log = folder.join("postgres.log");
            new_log(&log)?;
            let postgres = folder.join("postgres");
            let mut server = Server::new(&region.starter, &postgres, log, Listen::Socket)?;
            server.initialize(&mut region.events)?;
            server.start(&mut region.events)?;
            region.store = server.url("postgres");
            region.postgres = Some(server);
        }
        Ok(region)
    }

    /// Folder of configuration files and logs.
    pub fn folder(&self) -> &Path {
        &self.folder.path
    }

    pub fn key(&self) -> PathBuf {
        self.folder.path.join("region.key")
    }

    /// Starts the nodes. All are members of the region when this returns.
    pub fn start_nodes(&mut self, settings: &Settings, admin_token: &str) -> Result<(), Error> {
        let ports = self.ports.callers.iter().zip(&self.ports.admin);
        for (number, (port, admin_port)) in (1..).zip(ports) {
            let place = Place::new(&self.folder.path, number, *port, *admin_port);
            self.nodes
                .push(Node::start(place, settings, &self.starter)?);
        }
        let count = self.nodes.len();
        let what = "all nodes are members of the region";
        self.events.until(what, MEMBERS_WITHIN, || {
            for node in &mut self.nodes {
                node.part.expect_running()?;
            }
            let mut nodes = self.nodes.iter();
            Ok(nodes
                .all(|node| node.is_settled(admin_token, count))
                .then_some(()))
        })
    }

    /// Starts the agent, with `input` as its standard input. Returns the index of the node that has
    /// its tunnel.
    pub fn start_agent(&mut self, input: &[u8], admin_token: &str) -> Result<usize, Error> {
        let log = self.agent_log();
        new_log(&log)?;
        let mut command = self.starter.command("agent");
        let agent = Part::start("agent", &mut command, &log, Some(input))?;
        let agent = self.agent.insert(agent);
        let what = "the agent has a tunnel";
        self.events.until(what, TUNNEL_WITHIN, || {
            agent.expect_running()?;
            let mut nodes = self.nodes.iter();
            Ok(nodes.position(|node| node.has_tunnel(admin_token)))
        })
    }

    fn agent_log(&self) -> PathBuf {
        self.folder.path.join("agent.log")
    }

    /// Runs until a signal to stop, then stops agent, nodes and PostgreSQL. A further signal ends
    /// them at once.
    pub fn run_until_stopped(mut self) -> Result<(), Error> {
        loop {
            // Before the first wait, too: a process may have ended during the start.
            self.log_ended();
            if self.events.wait_for_any() == Event::Stop {
                break;
            }
        }
        tracing::warn!("stopping after running requests; a second signal aborts them");
        let mut agent: Vec<Part> = self.agent.take().into_iter().collect();
        agent.iter_mut().for_each(Part::stop);
        wait_for_end(&mut self.events, agent, STOP_WITHIN)?;
        let nodes = self.nodes.drain(..);
        let mut nodes: Vec<Part> = nodes.map(|node| node.part).collect();
        nodes.iter_mut().for_each(Part::stop);
        wait_for_end(&mut self.events, nodes, STOP_WITHIN)?;
        match &mut self.postgres {
            Some(postgres) => postgres.stop(&mut self.events),
            None => Ok(()),
        }
    }

    /// Logs each process that has ended since the last call. The region goes on: nodes can be
    /// started by hand.
    fn log_ended(&mut self) {
        let folder = self.folder.path.display();
        for node in &mut self.nodes {
            if let Some(status) = node.part.newly_ended() {
                let name = &node.part.name;
                let log = node.place.log.display();
                tracing::warn!(
                    "{name} has ended ({status}): the other nodes go on; its log is {log}"
                );
            }
        }
        if let Some(status) = self.agent.as_mut().and_then(Part::newly_ended) {
            tracing::error!(
                "the agent has ended ({status}): requests fail; its log is {folder}/agent.log"
            );
        }
        let postgres = self.postgres.as_mut().and_then(Server::part);
        if let Some(status) = postgres.and_then(Part::newly_ended) {
            tracing::error!(
                "PostgreSQL has ended ({status}): requests go on, changes are refused; its log is \
                 {folder}/postgres.log"
            );
        }
    }
}
