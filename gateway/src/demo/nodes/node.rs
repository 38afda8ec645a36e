//! A node of a demo: its configuration file, its process, and what its administration API says.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use gw_shared::files;
use serde::Serialize;
use serde_json::Value;

use super::options::NodesOptions;
use super::part::{self, Part};
use super::{DOMAIN, NodesError, REGION};

/// Configuration file of a node.
#[derive(Serialize)]
struct NodeFile<'a> {
    region: &'a str,
    domain: &'a str,
    data_dir: &'a str,
    store: &'a str,
    region_key: &'a str,
    listen: SocketAddr,
    admin_listen: SocketAddr,
    /// `None` for the gateway that makes the records, which is no member.
    #[serde(skip_serializing_if = "Option::is_none")]
    peer_listen: Option<SocketAddr>,
    workers: usize,
    burst: u32,
    refill_per_minute: u32,
    relay_memory_mib: usize,
    drain_seconds: u64,
}

/// Where a node keeps its files, and where it listens.
pub(super) struct Place {
    /// Its number, from 1.
    pub(super) number: usize,
    pub(super) config: PathBuf,
    pub(super) data_dir: PathBuf,
    pub(super) log: PathBuf,
    pub(super) address: SocketAddr,
    pub(super) admin_address: SocketAddr,
}

impl Place {
    pub(super) fn new(folder: &Path, number: usize, port: u16, admin_port: u16) -> Self {
        let at = |end: &str| folder.join(format!("node-{number}{end}"));
        let loopback = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        Self {
            number,
            config: at(".toml"),
            data_dir: at(""),
            log: at(".log"),
            address: loopback(port),
            admin_address: loopback(admin_port),
        }
    }

    /// Writes the configuration file; returns its text.
    pub(super) fn write_config(
        &self,
        options: &NodesOptions,
        store: &str,
        key: &Path,
    ) -> Result<String, NodesError> {
        let text = config_text(
            options,
            store,
            key,
            &self.data_dir,
            Some((self.address, self.admin_address)),
        )?;
        files::write_private(&self.config, text.as_bytes())
            .map_err(NodesError::io(self.config.display()))?;
        Ok(text)
    }
}

/// The configuration of a node that listens at `addresses`, or of a gateway on free ports that is no member.
pub(super) fn config_text(
    options: &NodesOptions,
    store: &str,
    key: &Path,
    data_dir: &Path,
    addresses: Option<(SocketAddr, SocketAddr)>,
) -> Result<String, NodesError> {
    let text = |path: &'_ Path| -> Result<String, NodesError> {
        let text = path.to_str().ok_or_else(|| {
            NodesError::Usage(format!(
                "--data-dir: {} is not UTF-8, as a configuration file is",
                path.display()
            ))
        });
        text.map(str::to_owned)
    };
    let free = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let (listen, admin_listen) = addresses.unwrap_or((free, free));
    let file = NodeFile {
        region: REGION,
        domain: DOMAIN,
        data_dir: &text(data_dir)?,
        store,
        region_key: &text(key)?,
        listen,
        admin_listen,
        peer_listen: addresses.map(|_| free),
        workers: options.workers_of_each(),
        burst: options.rate.burst(),
        refill_per_minute: options.rate.refill_per_minute(),
        relay_memory_mib: options.relay_memory_mib_of_each(),
        drain_seconds: super::DRAIN.as_secs(),
    };
    toml::to_string(&file).map_err(|error| NodesError::Config(error.to_string()))
}

/// A running node.
pub(super) struct Node {
    pub(super) place: Place,
    pub(super) part: Part,
}

impl Node {
    pub(super) fn start(place: Place) -> Result<Self, NodesError> {
        part::new_log(&place.log)?;
        let mut command = part::command("node")?;
        command.arg("--config").arg(&place.config);
        let part = Part::start(
            &format!("node {}", place.number),
            &mut command,
            &place.log,
            None,
        )?;
        Ok(Self { place, part })
    }

    /// Whether this node is a member of a region of `count` live nodes, and no service moves.
    pub(super) fn is_settled(&self, admin_token: &str, count: usize) -> bool {
        let Some(text) = self.fetch("/api/v1/region", admin_token) else {
            return false;
        };
        let status: Value = serde_json::from_str(&text).unwrap_or_default();
        let nodes = status["nodes"].as_array().map_or(&[][..], Vec::as_slice);
        let mut live = nodes.iter().filter(|node| node["state"] == "live");
        status["standing"] == "member"
            && status["moving"] == false
            && live.clone().count() == count
            && live.all(|node| node["epoch_lag"] == 0)
    }

    /// Whether this node holds a tunnel.
    pub(super) fn has_tunnel(&self, admin_token: &str) -> bool {
        let metrics = self.fetch("/metrics", admin_token).unwrap_or_default();
        let tunnels = metrics
            .lines()
            .find_map(|line| line.strip_prefix("gw_tunnels ")?.trim().parse::<f64>().ok());
        tunnels.is_some_and(|tunnels| tunnels >= 1.0)
    }

    /// The response to a request to the admin listener; `None` if there is none, or an error.
    fn fetch(&self, path: &str, admin_token: &str) -> Option<String> {
        const WITHIN: Duration = Duration::from_secs(2);
        let config = ureq::Agent::config_builder()
            .proxy(None)
            .timeout_global(Some(WITHIN))
            .build();
        let request =
            ureq::Agent::from(config).get(format!("http://{}{path}", self.place.admin_address));
        let mut response = request
            .header("Authorization", format!("Bearer {admin_token}"))
            .call()
            .ok()?;
        response.body_mut().read_to_string().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::StoreSettings;

    #[test]
    fn the_configuration_of_a_node_is_valid() {
        let options = NodesOptions::default();
        let place = Place::new(Path::new("/tmp/a \"b\""), 2, 8444, 9081);
        let text = config_text(
            &options,
            "postgres://gw@%2Ftmp/postgres",
            Path::new("/k"),
            &place.data_dir,
            Some((place.address, place.admin_address)),
        )
        .unwrap();
        let config = super::super::error::parse(&text).unwrap();
        assert_eq!(
            (config.listen.port(), config.admin_listen.port()),
            (8444, 9081)
        );
        assert_eq!(config.data_dir, Path::new("/tmp/a \"b\"/node-2"));
        assert!(config.peer_listen.is_some() && matches!(config.store, StoreSettings::Postgres(_)));
        assert_eq!(config.region.apex(), super::super::region().apex());
        let text = config_text(
            &options,
            "postgres://gw@db/gw",
            Path::new("/k"),
            Path::new("/d"),
            None,
        )
        .unwrap();
        assert!(
            super::super::error::parse(&text)
                .unwrap()
                .peer_listen
                .is_none()
        );
    }
}
