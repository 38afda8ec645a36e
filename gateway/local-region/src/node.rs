//! A node: its configuration file, its process, and what its administration API says.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use gw_shared::files;
use serde::Serialize;
use serde_json::Value;

use crate::Error;
use crate::part::{Part, Starter, new_log};

/// Settings that all nodes have in common.
#[derive(Debug, Clone, Serialize)]
pub struct Settings {
    pub region: &'static str,
    pub domain: &'static str,
    pub store: String,
    pub region_key: PathBuf,
    pub workers: usize,
    pub burst: u32,
    pub refill_per_minute: u32,
    pub relay_memory_mib: usize,
    pub drain_seconds: u64,
}

/// Configuration file of a node.
#[derive(Serialize)]
struct NodeFile<'a> {
    data_dir: &'a Path,
    listen: SocketAddr,
    admin_listen: SocketAddr,
    /// `None` for the gateway that makes the records, which is no member.
    #[serde(skip_serializing_if = "Option::is_none")]
    peer_listen: Option<SocketAddr>,
    #[serde(flatten)]
    settings: &'a Settings,
}

impl Settings {
    /// The configuration of a gateway on free ports that is no member.
    pub fn without_membership(&self, data_dir: &Path) -> Result<String, Error> {
        let free = loopback(0);
        self.text(data_dir, free, free, None)
    }

    fn text(
        &self,
        data_dir: &Path,
        listen: SocketAddr,
        admin_listen: SocketAddr,
        peer_listen: Option<SocketAddr>,
    ) -> Result<String, Error> {
        toml::to_string(&NodeFile {
            data_dir,
            listen,
            admin_listen,
            peer_listen,
            settings: self,
        })
        .map_err(|error| Error::Config(error.to_string()))
    }
}

fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

/// Where a node keeps its files, and where it listens.
pub struct Place {
    /// Its number, from 1.
    pub(crate) number: usize,
    config: PathBuf,
    pub data_dir: PathBuf,
    pub(crate) log: PathBuf,
    pub address: SocketAddr,
    pub admin_address: SocketAddr,
}

impl Place {
    pub fn new(folder: &Path, number: usize, port: u16, admin_port: u16) -> Self {
        let at = |end: &str| folder.join(format!("node-{number}{end}"));
        Self {
            number,
            config: at(".toml"),
            data_dir: at(""),
            log: at(".log"),
            address: loopback(port),
            admin_address: loopback(admin_port),
        }
    }

    /// Text of the configuration file.
    pub fn config_text(&self, settings: &Settings) -> Result<String, Error> {
        settings.text(
            &self.data_dir,
            self.address,
            self.admin_address,
            Some(loopback(0)),
        )
    }
}

/// A running node.
pub struct Node {
    pub place: Place,
    pub part: Part,
}

impl Node {
    /// Writes the configuration file, and starts the node.
    pub(crate) fn start(
        place: Place,
        settings: &Settings,
        starter: &Starter,
    ) -> Result<Self, Error> {
        let text = place.config_text(settings)?;
        files::write_private(&place.config, text.as_bytes())
            .map_err(Error::io(place.config.display()))?;
        new_log(&place.log)?;
        let mut command = starter.command("node");
        command.arg("--config").arg(&place.config);
        let name = format!("node {}", place.number);
        let part = Part::start(&name, &mut command, &place.log, None)?;
        Ok(Self { place, part })
    }

    /// Whether this node is a member of a region of `count` live nodes, and no service moves.
    pub(crate) fn is_settled(&self, admin_token: &str, count: usize) -> bool {
        let text = self.fetch("/api/v1/region", admin_token);
        let status = text.and_then(|text| serde_json::from_str(&text).ok());
        status.is_some_and(|status| is_settled(&status, count))
    }

    /// Whether this node holds a tunnel.
    pub(crate) fn has_tunnel(&self, admin_token: &str) -> bool {
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

/// Whether a node, which gives this status of its region, is a member of a region of `count` live
/// nodes that all use the same epoch, and no service moves.
pub fn is_settled(status: &Value, count: usize) -> bool {
    let nodes = status["nodes"].as_array().map_or(&[][..], Vec::as_slice);
    let mut live = nodes.iter().filter(|node| node["state"] == "live");
    status["standing"] == "member"
        && status["moving"] == false
        && live.clone().count() == count
        && live.all(|node| node["epoch_lag"] == 0)
}
