//! A region of several gateways in this process, which share their records by copies of one data
//! folder.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use gw_agent::AgentHandle;
use gw_gateway::Gateway;
use gw_gateway::demo::About;
use gw_interface::config::Config;
use gw_region::{Member, NodeSlot, Owner, Placement};
use gw_telemetry::counters::{TunnelReport, WorkerReport};

use super::prepared::Prepared;
use super::process::config_text;
use crate::support::peers::caller::{Caller, HOST, connect_to};
use crate::support::{SOON, all_reports, eventually};

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
        let mut nodes = Self::start_unplaced_with(count, configuration);
        let all: Vec<usize> = (0..count).collect();
        nodes.place(&all);
        nodes
    }

    /// Starts `count` gateways that know of no other node yet.
    pub(crate) fn start_unplaced(count: usize) -> Self {
        Self::start_unplaced_with(count, "")
    }

    /// As [`Self::start`], with agents of these names.
    pub(crate) fn start_with_agents(count: usize, agents: &[&str]) -> Self {
        let mut nodes = Self::start_prepared(Prepared::with_agents(agents), count, "");
        let all: Vec<usize> = (0..count).collect();
        nodes.place(&all);
        nodes
    }

    fn start_unplaced_with(count: usize, configuration: &str) -> Self {
        Self::start_prepared(Prepared::new(), count, configuration)
    }

    fn start_prepared(prepared: Prepared, count: usize, configuration: &str) -> Self {
        let key = prepared.path("region.key");
        fs::write(&key, KEY).unwrap();
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
        let start = |number: usize| {
            let data = prepared.path(&format!("node{number}"));
            copy(&prepared.path("data"), &data);
            let text = format!("{}{configuration}", config_text(&data, 0));
            let mut config = Config::parse(&text, |_| None).unwrap();
            config.peer_listen = Some("127.0.0.1:0".parse().unwrap());
            config.region_key = Some(key.clone());
            Some(Gateway::start(&config).unwrap())
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
            peer_address: self.gateway(*node).peer_address().unwrap(),
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
            .set_placement(placement, session, &processes)
            .unwrap();
        // A worker answers after it has handled earlier messages.
        all_reports(gateway);
    }

    /// The node that owns the demo's service if all running nodes are members, and another one.
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
    pub(crate) fn run_agent(&self, node: usize, backend: &str) -> AgentHandle {
        self.run_agent_of("agent", node, backend)
    }

    /// As [`Self::run_agent`], for the agent of this name.
    pub(crate) fn run_agent_of(&self, name: &str, node: usize, backend: &str) -> AgentHandle {
        self.run_agent_at(name, self.gateway(node).address().port(), backend)
    }

    /// As [`Self::run_agent_of`]; the agent connects to this port.
    pub(crate) fn run_agent_at(&self, name: &str, port: u16, backend: &str) -> AgentHandle {
        let state = self.prepared.path(name);
        self.prepared.set_port_of(name, port);
        let config =
            gw_agent::Config::load(None, Some(state), &[backend.to_owned()], |_| None).unwrap();
        gw_agent::start(config).unwrap()
    }

    pub(crate) fn about(&self, node: usize) -> About {
        let gateway = self.gateway(node);
        About {
            admin_url: format!("http://{}", gateway.admin_address()),
            admin_token: gateway.control().admin_token().reveal().to_owned(),
            ..self.prepared.about(gateway.address())
        }
    }

    /// A connection of a caller to `node`.
    pub(crate) fn connect(&self, node: usize) -> Caller {
        connect_to(&self.about(node), HOST, &[b"http/1.1"], None)
    }

    /// A connection to the listener of `node` for other nodes.
    pub(crate) fn connect_as_node(&self, node: usize) -> TcpStream {
        let socket = TcpStream::connect(self.gateway(node).peer_address().unwrap()).unwrap();
        socket.set_read_timeout(Some(SOON)).unwrap();
        socket
    }

    /// A request head for the demo's service, with its key; `rest` is further fields and the body.
    pub(crate) fn request(&self, line: &str, rest: &str) -> String {
        let key = self.prepared.service_key();
        format!("{line} HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n{rest}")
    }

    /// The reports of all workers of `node`. On a busy machine the report of a worker can be
    /// missing at first.
    fn reports(&self, node: usize) -> Vec<WorkerReport> {
        all_reports(self.gateway(node))
    }

    pub(crate) fn tunnels(&self, node: usize) -> Vec<TunnelReport> {
        self.reports(node)
            .into_iter()
            .flat_map(|report| report.tunnels)
            .collect()
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

    /// The sum of a counter over the workers of `node`.
    pub(crate) fn total(&self, node: usize, name: &str) -> u64 {
        self.reports(node)
            .iter()
            .map(|report| report.totals[name])
            .sum()
    }

    /// Counters of connections that a node did not take, for the message of a failed assertion.
    pub(crate) fn refusals(&self, node: usize) -> String {
        let reports = self.gateway(node).control().reports();
        let counters = reports.iter().map(|report| {
            (
                report.totals["connections_shed"],
                &report.by_reason.turned_away,
            )
        });
        format!("{:?}", counters.collect::<Vec<_>>())
    }

    /// Connections to `node` that were not taken for this reason.
    pub(crate) fn turned_away(&self, node: usize, reason: &str) -> u64 {
        self.reports(node)
            .iter()
            .filter_map(|report| report.by_reason.turned_away.get(reason))
            .sum()
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
