//! A demo of a region: a process for each node and one for the agent, on a PostgreSQL server in the
//! data folder or on a given database. [`gw_local_region`] starts and stops the processes; this
//! module makes the records and the agent.

mod about;
mod agent;
mod options;

use gw_base::service::hostname::Region;
use gw_control_plane::control::ControlError;
use gw_interface::config::Config;
use gw_local_region::{Settings, Starter, without_password};

pub use self::about::{AboutNode, AboutNodes};
pub use self::agent::run as run_agent;
pub use self::options::NodesOptions;

use self::agent::AgentSettings;
use super::records::Seeded;
use super::{About, DemoError};
use crate::process::gateway::{Gateway, StartError};
use crate::process::region::{self as commands, RegionError};

const REGION: &str = "eu1";
const DOMAIN: &str = "gw.localhost";
/// How long agent and nodes wait for running requests when they stop.
const DRAIN_SECONDS: u64 = 10;

/// A running demo of several nodes. A drop ends its processes at once.
pub struct NodesDemo {
    region: gw_local_region::Region,
    pub about: AboutNodes,
}

/// Reasons why a demo of several nodes does not start.
#[derive(Debug, thiserror::Error)]
pub enum NodesError {
    /// The command line is wrong.
    #[error("{0}")]
    Usage(String),
    #[error(
        "--store {database}: it holds the region {name} already, and its key is not in {folder}; \
         give the --data-dir of the demo that made it, or an empty database"
    )]
    OtherRegion {
        database: String,
        name: String,
        folder: String,
    },
    #[error("configuration of a node: {0}")]
    Config(String),
    #[error(transparent)]
    Region(#[from] RegionError),
    #[error(transparent)]
    Gateway(#[from] StartError),
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error(transparent)]
    Demo(#[from] DemoError),
    #[error(transparent)]
    Part(gw_local_region::Error),
}

impl From<gw_local_region::Error> for NodesError {
    fn from(error: gw_local_region::Error) -> Self {
        match error {
            gw_local_region::Error::Usage(message) => Self::Usage(message),
            other => Self::Part(other),
        }
    }
}

fn region() -> Region {
    Region::new(REGION, DOMAIN)
}

impl NodesDemo {
    /// Starts all parts; requests can be served by every node when this returns. The thread that
    /// calls it must live as long as the demo.
    pub fn start(options: &NodesOptions) -> Result<Self, NodesError> {
        options.check()?;
        agent::check_backend(options.backend.as_ref())?;
        let mut region =
            gw_local_region::Region::prepare(Starter::of_this_program()?, &options.parts)?;
        let settings = settings(options, &region);
        let (seeded, admin_token) = make_region(options, &region, &settings)?;
        region.start_nodes(&settings, &admin_token)?;
        let first = &region.nodes[0].place;
        let port = first.address.port();
        let admin_address = first.admin_address;
        let ca_file = first.data_dir.join("dev-ca.crt");
        let agent = AgentSettings {
            nodes: region.nodes.iter().map(|node| node.place.address).collect(),
            ca_file: ca_file.clone(),
            state_dir: region.folder().join("agent"),
            enrollment_token: seeded.enrollment_token.reveal().to_owned(),
            backend: options.backend.clone(),
            host_header: options.host_header.clone(),
        };
        let owner = region.start_agent(&agent.to_json()?, &admin_token)?;
        let about = AboutNodes {
            about: About {
                backend: options.backend.clone(),
                ..About::new(
                    seeded,
                    &self::region(),
                    port,
                    admin_address,
                    ca_file,
                    admin_token,
                )
            },
            nodes: region.nodes.iter().map(AboutNode::from).collect(),
            store: without_password(&region.store),
            data_dir: region.folder().to_owned(),
            owner,
        };
        Ok(Self { region, about })
    }

    /// Runs until a signal to stop, then stops agent, nodes and PostgreSQL. A further signal ends
    /// them at once.
    pub fn run_until_stopped(self) -> Result<(), NodesError> {
        Ok(self.region.run_until_stopped()?)
    }
}

fn settings(options: &NodesOptions, region: &gw_local_region::Region) -> Settings {
    Settings {
        region: REGION,
        domain: DOMAIN,
        store: region.store.clone(),
        region_key: region.key(),
        workers: options.workers_of_each(),
        burst: options.rate.burst(),
        refill_per_minute: options.rate.refill_per_minute(),
        relay_memory_mib: options.relay_memory_mib_of_each(),
        drain_seconds: DRAIN_SECONDS,
    }
}

/// Creates the region unless an earlier demo in the same folder has, and the records, by a gateway
/// that runs until then. Also returns the admin token.
fn make_region(
    options: &NodesOptions,
    region: &gw_local_region::Region,
    settings: &Settings,
) -> Result<(Seeded, String), NodesError> {
    let config = parse(&settings.without_membership(&region.folder().join("setup"))?)?;
    match commands::init(&config) {
        Ok(_) | Err(RegionError::Exists { .. }) => {}
        Err(RegionError::KeyOfOtherNodes { name, .. }) => {
            return Err(NodesError::OtherRegion {
                database: without_password(&region.store),
                name,
                folder: region.folder().display().to_string(),
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

/// Parses the configuration file of a node. The environment of the demo does not count.
fn parse(text: &str) -> Result<Config, NodesError> {
    Config::parse(text, |_| None).map_err(|errors| NodesError::Config(errors.to_string()))
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use gw_interface::config::StoreSettings;
    use gw_local_region::Place;

    use super::*;

    #[test]
    fn the_configuration_of_a_node_is_valid() {
        let settings = Settings {
            region: REGION,
            domain: DOMAIN,
            store: "postgres://gw@%2Ftmp/postgres".to_owned(),
            region_key: PathBuf::from("/k"),
            workers: 1,
            burst: 1,
            refill_per_minute: 1,
            relay_memory_mib: 16,
            drain_seconds: DRAIN_SECONDS,
        };
        let place = Place::new(Path::new("/tmp/a \"b\""), 2, 8444, 9081);
        let config = parse(&place.config_text(&settings).unwrap()).unwrap();
        assert_eq!(
            (config.listen.port(), config.admin_listen.port()),
            (8444, 9081)
        );
        assert_eq!(config.data_dir, Path::new("/tmp/a \"b\"/node-2"));
        assert!(config.peer_listen.is_some() && matches!(config.store, StoreSettings::Postgres(_)));
        assert_eq!(config.region.apex(), region().apex());
        let config = parse(&settings.without_membership(Path::new("/d")).unwrap()).unwrap();
        assert!(config.peer_listen.is_none());
    }
}
