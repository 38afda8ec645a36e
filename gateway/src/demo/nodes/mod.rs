//! A demo of a region: a process for each node and one for the agent, on a PostgreSQL server in the data folder or on a
//! given database. The demo's own process starts them, watches them, and ends them in order.

mod about;
mod agent;
mod balancer;
mod error;
mod events;
mod node;
mod options;
mod part;
mod ports;
mod postgres;
mod programs;

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use gw_shared::files;
use rustix::process::geteuid;

pub use self::about::{AboutNode, AboutNodes};
pub use self::agent::run as run_agent;
pub use self::error::NodesError;
pub use self::options::NodesOptions;
pub use self::part::{User, become_program, end_with};

use self::agent::AgentSettings;
use self::error::parse;
use self::events::{Event, Events};
use self::node::{Node, Place, config_text};
use self::part::{Part, wait_for_end};
use self::ports::Ports;
use self::postgres::Server;
use super::About;
use super::records::Seeded;
use crate::hostname::Region;
use crate::process::gateway::Gateway;
use crate::process::region::{self as commands, RegionError};

const REGION: &str = "eu1";
const DOMAIN: &str = "gw.localhost";
/// How long agent and nodes wait for running requests when they stop.
const DRAIN: Duration = Duration::from_secs(10);
/// Longest wait for a node that stops: for its requests, and for leaving the region.
const STOP_WITHIN: Duration = Duration::from_secs(20);
/// Longest wait for the members, including those of an earlier demo to be declared dead.
const MEMBERS_WITHIN: Duration = Duration::from_secs(60);
const TUNNEL_WITHIN: Duration = Duration::from_secs(30);

/// A running demo of several nodes. A drop ends its processes at once, in the order of the fields.
pub struct NodesDemo {
    agent: Option<Part>,
    nodes: Vec<Node>,
    /// `None` with a given database.
    postgres: Option<Server>,
    pub about: AboutNodes,
    events: Events,
    _ports: Ports,
    _folder: Folder,
}

fn region() -> Region {
    Region::new(REGION, DOMAIN)
}

impl NodesDemo {
    /// Starts all parts; requests can be served by every node when this returns. The thread that calls it must live as
    /// long as the demo.
    pub fn start(options: &NodesOptions) -> Result<Self, NodesError> {
        options.check()?;
        agent::check_backend(options.backend.as_ref())?;
        let mut events = Events::listen().map_err(NodesError::io("signals"))?;
        let ports = Ports::hold(options.nodes, options.port, options.admin_port)?;
        let folder = Folder::new(options.data_dir.as_deref())?;
        let postgres = match options.store {
            Some(_) => None,
            None => Some(Server::start(&folder.path, &mut events)?),
        };
        let own = postgres.as_ref().map(Server::url);
        let store = own
            .as_ref()
            .or(options.store.as_ref())
            .map_or("", String::as_str);
        let (seeded, admin_token) = make_region(options, store, &folder.path)?;

        let numbered = (1..).zip(ports.callers.iter().zip(&ports.admin));
        let places =
            numbered.map(|(number, (port, admin))| Place::new(&folder.path, number, *port, *admin));
        let mut nodes = Vec::with_capacity(options.nodes);
        for place in places {
            place.write_config(options, store, &folder.key())?;
            nodes.push(Node::start(place)?);
        }
        wait_for_members(&mut events, &mut nodes, &admin_token)?;

        let first = &nodes[0].place;
        let address = first.address;
        let admin_address = first.admin_address;
        let ca_file = first.data_dir.join("dev-ca.crt");
        let settings = AgentSettings {
            nodes: nodes.iter().map(|node| node.place.address).collect(),
            ca_file: ca_file.clone(),
            state_dir: folder.path.join("agent"),
            enrollment_token: seeded.enrollment_token.reveal().to_owned(),
            backend: options.backend.clone(),
        };
        let mut agent = agent::start(&settings, &folder.path.join("agent.log"))?;
        let owner = events.until("the agent has a tunnel", TUNNEL_WITHIN, || {
            agent.expect_running()?;
            Ok(nodes.iter().position(|node| node.has_tunnel(&admin_token)))
        })?;

        let about = AboutNodes {
            about: About::new(
                seeded,
                &region(),
                address.port(),
                admin_address,
                ca_file,
                admin_token,
            ),
            nodes: nodes.iter().map(AboutNode::from).collect(),
            store: options::without_password(store),
            data_dir: folder.path.clone(),
            owner,
        };
        Ok(Self {
            agent: Some(agent),
            nodes,
            postgres,
            about,
            events,
            _ports: ports,
            _folder: folder,
        })
    }

    /// Runs until a signal to stop, then stops agent, nodes and PostgreSQL. A further signal ends them at once.
    pub fn run_until_stopped(mut self) -> Result<(), NodesError> {
        loop {
            // Before the first wait, too: a process may have ended during the start.
            self.log_ended();
            if self.events.wait(None) == Event::Stop {
                break;
            }
        }
        tracing::warn!("stopping after running requests; a second signal aborts them");
        let Self {
            agent,
            nodes,
            postgres,
            mut events,
            ..
        } = self;
        let mut agent: Vec<Part> = agent.into_iter().collect();
        agent.iter_mut().for_each(Part::stop);
        let mut nodes: Vec<Part> = nodes.into_iter().map(|node| node.part).collect();
        wait_for_end(&mut events, agent, STOP_WITHIN)?;
        nodes.iter_mut().for_each(Part::stop);
        wait_for_end(&mut events, nodes, STOP_WITHIN)?;
        postgres.map_or(Ok(()), |postgres| postgres.stop(&mut events))
    }

    /// Logs each process that has ended since the last call. The demo goes on: nodes can be started by hand.
    fn log_ended(&mut self) {
        for node in &mut self.nodes {
            if let Some(status) = node.part.newly_ended() {
                let name = &node.part.name;
                let log = node.place.log.display();
                tracing::warn!(
                    "{name} has ended ({status}): the other nodes go on; its log is {log}"
                );
            }
        }
        let folder = self.about.data_dir.display();
        if let Some(status) = self.agent.as_mut().and_then(Part::newly_ended) {
            tracing::error!(
                "the agent has ended ({status}): requests fail; its log is {folder}/agent.log"
            );
        }
        if let Some(status) = self
            .postgres
            .as_mut()
            .and_then(|postgres| postgres.part().newly_ended())
        {
            tracing::error!(
                "PostgreSQL has ended ({status}): requests go on, changes are refused; its log is {folder}/postgres.log"
            );
        }
    }
}

/// Creates the region unless an earlier demo in the same folder has, and the records, by a gateway that runs until then.
/// Also returns the admin token.
fn make_region(
    options: &NodesOptions,
    store: &str,
    folder: &Path,
) -> Result<(Seeded, String), NodesError> {
    let text = config_text(options, store, &key_in(folder), &folder.join("setup"), None)?;
    let config = parse(&text)?;
    match commands::init(&config) {
        Ok(_) | Err(RegionError::Exists { .. }) => {}
        Err(RegionError::KeyOfOtherNodes { name, .. }) => {
            let database = options::without_password(store);
            return Err(NodesError::OtherRegion {
                database,
                name,
                folder: folder.display().to_string(),
            });
        }
        Err(error) => return Err(error.into()),
    }
    let gateway = Gateway::start(&config)?;
    let seeded = Seeded::new(gateway.control(), options.rate)?;
    let token = gateway.control().admin_token().reveal().to_owned();
    gateway.drain();
    Ok((seeded, token))
}

/// Waits until every node knows all others as members.
fn wait_for_members(
    events: &mut Events,
    nodes: &mut [Node],
    admin_token: &str,
) -> Result<(), NodesError> {
    let count = nodes.len();
    events.until(
        "all nodes are members of the region",
        MEMBERS_WITHIN,
        || {
            for node in &mut *nodes {
                node.part.expect_running()?;
            }
            Ok(nodes
                .iter()
                .all(|node| node.is_settled(admin_token, count))
                .then_some(()))
        },
    )
}

/// The data folder.
struct Folder {
    path: PathBuf,
    /// Removed with its contents when the demo ends.
    _temporary: Option<tempfile::TempDir>,
}

impl Folder {
    fn new(given: Option<&Path>) -> Result<Self, NodesError> {
        let Some(path) = given else {
            let temporary = tempfile::Builder::new().prefix("gw-demo-").tempdir();
            let temporary = temporary.map_err(NodesError::io(std::env::temp_dir().display()))?;
            let path = temporary.path().to_owned();
            enterable(&path)?;
            return Ok(Self {
                path,
                _temporary: Some(temporary),
            });
        };
        let failed = |error: io::Error| NodesError::Io {
            what: format!("--data-dir {}", path.display()),
            error,
        };
        let is_new = !path.exists();
        files::create_private_dir(path).map_err(failed)?;
        let path = std::path::absolute(path).map_err(failed)?;
        if is_new {
            enterable(&path)?;
        }
        Ok(Self {
            path,
            _temporary: None,
        })
    }

    fn key(&self) -> PathBuf {
        key_in(&self.path)
    }
}

fn key_in(folder: &Path) -> PathBuf {
    folder.join("region.key")
}

/// Lets other users enter the folder, but not list it, if this process is root: the user of PostgreSQL must reach its
/// own folder there. All others are private.
fn enterable(path: &Path) -> Result<(), NodesError> {
    if !geteuid().is_root() {
        return Ok(());
    }
    let permissions = std::fs::Permissions::from_mode(0o711);
    std::fs::set_permissions(path, permissions).map_err(NodesError::io(path.display()))
}
