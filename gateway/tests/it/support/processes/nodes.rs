//! A region of several gateways in this process, which share their records by copies of one data
//! folder.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use gw_region::{Member, NodeSlot, Owner, Placement};

use super::prepared::Prepared;
use super::process::config_text;
use crate::support::admin_api::{Api, Tunnel};
use crate::support::agents::in_process::Agent;
use crate::support::gateway::Gateway;
use crate::support::metrics::Metrics;
use crate::support::peers::caller::{Caller, HOST, connect_to};
use crate::support::scene::About;
use crate::support::{SOON, eventually};

/// Secret of the region.
pub(crate) const KEY: [u8; 32] = [7; 32];

/// The gateways. Node 0 has slot 0, and so on.
pub(crate) struct Nodes {
    pub(crate) prepared: Prepared,
    /// `None` once a node was stopped.
    gateways: Vec<Option<Gateway>>,
    epoch: u64,
}

impl Nodes {
    /// Starts `count` gateways that are all members and know it.
    pub(crate) fn start(count: usize) -> Self {
        Self::start_with(count, "")
    }

    /// As [`Self::start`], with more lines of configuration.
    pub(crate) fn start_with(count: usize, configuration: &str) -> Self {
        Self::start_of(Prepared::new(), count, configuration)
    }

    /// As [`Self::start_with`], with copies of this data folder.
    pub(crate) fn start_of(prepared: Prepared, count: usize, configuration: &str) -> Self {
        let mut nodes = Self::start_prepared(prepared, count, configuration);
        let all: Vec<usize> = (0..count).collect();
        nodes.place(&all);
        nodes
    }

    /// Starts `count` gateways that know of no other node yet.
    pub(crate) fn start_unplaced(count: usize) -> Self {
        Self::start_prepared(Prepared::new(), count, "")
    }

    /// As [`Self::start`], with agents of these names.
    pub(crate) fn start_with_agents(count: usize, agents: &[&str]) -> Self {
        Self::start_of(Prepared::with_agents(agents), count, "")
    }

    fn start_prepared(prepared: Prepared, count: usize, configuration: &str) -> Self {
        let key = prepared.path("region.key");
        fs::write(&key, KEY).unwrap();
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
        let start = |number: usize| {
            let data = prepared.path(&format!("node{number}"));
            copy(&prepared.path("data"), &data);
            let configuration = format!("{}{configuration}", config_text(&data, 0));
            Some(Gateway::start_as_node(&configuration, &key))
        };
        let gateways = (0..count).map(start).collect();
        Self {
            prepared,
            gateways,
            epoch: 0,
        }
    }

    pub(crate) fn gateway(&self, node: usize) -> &Gateway {
        self.gateways[node].as_ref().unwrap()
    }

    pub(crate) fn api(&self, node: usize) -> Api {
        self.gateway(node).api()
    }

    /// Address at which a node listens for other nodes.
    pub(crate) fn peer_address(&self, node: usize) -> SocketAddr {
        self.gateway(node).inner().peer_address().unwrap()
    }

    /// Stops a node at once, as if its machine were lost.
    pub(crate) fn stop(&mut self, node: usize) {
        drop(self.gateways[node].take());
    }

    /// The session of the process that runs as this node.
    pub(crate) fn session(node: usize) -> u128 {
        100 + node as u128
    }

    pub(crate) fn slot(node: usize) -> NodeSlot {
        NodeSlot::new(node.try_into().unwrap()).unwrap()
    }

    /// The placement as `here` sees it, with these members.
    pub(crate) fn placement(&self, here: usize, members: &[usize]) -> Placement {
        let member = |node: &usize| Member {
            slot: Self::slot(*node),
            session: Self::session(*node),
            peer_address: self.peer_address(*node),
        };
        Placement::new(
            self.epoch,
            Self::slot(here),
            members.iter().map(member).collect(),
        )
    }

    /// Makes all running nodes use these members.
    pub(crate) fn place(&mut self, members: &[usize]) {
        self.epoch += 1;
        for (node, gateway) in self.gateways.iter().enumerate() {
            if let Some(gateway) = gateway {
                self.set_placement(gateway, self.placement(node, members), Self::session(node));
            }
        }
    }

    /// Makes one node use a placement with another address of one of these members.
    pub(crate) fn place_with(
        &mut self,
        node: usize,
        members: &[usize],
        moved: usize,
        peer_address: SocketAddr,
    ) {
        self.epoch += 1;
        let placement = self.placement(node, members);
        let at = |member: &Member| match member.slot == Self::slot(moved) {
            true => Member {
                peer_address,
                ..member.clone()
            },
            false => member.clone(),
        };
        let members = placement.members().iter().map(at).collect();
        let placement = Placement::new(self.epoch, Self::slot(node), members);
        self.set_placement(self.gateway(node), placement, Self::session(node));
    }

    /// Makes one node use these members.
    pub(crate) fn place_at(&mut self, node: usize, members: &[usize]) {
        self.epoch += 1;
        self.set_placement(
            self.gateway(node),
            self.placement(node, members),
            Self::session(node),
        );
    }

    /// Gives the process of `node` its next session, as when it joins again.
    pub(crate) fn renew(&self, node: usize, members: &[usize]) {
        self.set_placement(
            self.gateway(node),
            self.placement(node, members),
            Self::session(node) + 1,
        );
    }

    fn set_placement(&self, gateway: &Gateway, placement: Placement, session: u128) {
        let processes: Vec<_> = (0..self.gateways.len())
            .map(|node| (Self::slot(node), Self::session(node)))
            .collect();
        gateway
            .inner()
            .set_placement(placement, session, &processes)
            .unwrap();
        // A worker answers after it has handled earlier messages.
        gateway.api().await_workers();
    }

    /// The node that owns the scene's service if all running nodes are members, and another one.
    pub(crate) fn owner_and_other(&self) -> (usize, usize) {
        let running: Vec<usize> = (0..self.gateways.len())
            .filter(|node| self.gateways[*node].is_some())
            .collect();
        let owner = match self.placement(running[0], &running).owner(HOST) {
            Owner::Here => running[0],
            Owner::OtherNode(member) => usize::from(member.slot.get()),
        };
        (
            owner,
            running.into_iter().find(|node| *node != owner).unwrap(),
        )
    }

    /// Starts the agent, which connects to `node`.
    pub(crate) fn run_agent(&self, node: usize, backend: &str) -> Agent {
        self.run_agent_of("agent", node, backend)
    }

    /// As [`Self::run_agent`], for the agent of this name.
    pub(crate) fn run_agent_of(&self, name: &str, node: usize, backend: &str) -> Agent {
        self.run_agent_at(name, self.gateway(node).port(), backend)
    }

    /// As [`Self::run_agent_of`]; the agent connects to this port.
    pub(crate) fn run_agent_at(&self, name: &str, port: u16, backend: &str) -> Agent {
        self.prepared.set_port_of(name, port);
        Agent::start(self.prepared.path(name), backend)
    }

    pub(crate) fn about(&self, node: usize) -> About {
        let gateway = self.gateway(node);
        About {
            admin_url: format!("http://{}", gateway.admin_address()),
            admin_token: gateway.admin_token(),
            ..self.prepared.about(gateway.address())
        }
    }

    /// A connection of a caller to `node`.
    pub(crate) fn connect(&self, node: usize) -> Caller {
        connect_to(&self.about(node), HOST, &[b"http/1.1"], None)
    }

    /// A connection to the listener of `node` for other nodes.
    pub(crate) fn connect_as_node(&self, node: usize) -> TcpStream {
        let socket = TcpStream::connect(self.peer_address(node)).unwrap();
        socket.set_read_timeout(Some(SOON)).unwrap();
        socket
    }

    /// A request head for the scene's service, with its key; `rest` is further fields and the body.
    pub(crate) fn request(&self, line: &str, rest: &str) -> String {
        let key = self.prepared.service_key();
        format!("{line} HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n{rest}")
    }

    /// The tunnels of the workers of `node`.
    pub(crate) fn tunnels(&self, node: usize) -> Vec<Tunnel> {
        let is_here = |tunnel: &Tunnel| tunnel.node.is_none_or(|slot| usize::from(slot) == node);
        let mut tunnels = self.gateway(node).tunnels();
        tunnels.retain(is_here);
        tunnels
    }

    pub(crate) fn metrics(&self, node: usize) -> Metrics {
        self.gateway(node).metrics()
    }

    /// Waits until `node` has a tunnel that takes requests.
    pub(crate) fn wait_for_tunnel(&self, node: usize) {
        eventually("the tunnel is open", || {
            self.tunnels(node)
                .iter()
                .any(|tunnel| !tunnel.draining)
                .then_some(())
        });
    }

    /// The sum over the workers of `node` of a metric whose name is `gw_`, this name and `_total`.
    pub(crate) fn total(&self, node: usize, name: &str) -> u64 {
        self.metrics(node).count(&format!("gw_{name}_total"))
    }

    /// Counters of connections that a node did not take, for the message of a failed assertion.
    pub(crate) fn refusals(&self, node: usize) -> String {
        let metrics = self.metrics(node);
        let reasons = metrics.by_label("gw_connections_turned_away_total", "reason");
        format!("{} {reasons:?}", metrics.count("gw_connections_shed_total"))
    }

    /// Connections to `node` that were not taken for this reason.
    pub(crate) fn turned_away(&self, node: usize, reason: &str) -> u64 {
        let name = "gw_connections_turned_away_total";
        self.metrics(node).count_with(name, reason)
    }
}

/// Copies a folder without its folders.
fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_file() {
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}
