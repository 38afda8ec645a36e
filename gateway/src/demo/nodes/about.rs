//! What a demo of several nodes prints.

use std::io::{self, Write};
use std::path::PathBuf;

use serde::Serialize;

use super::super::About;
use super::node::Node;

/// Addresses, secrets and processes of a demo; printed as one line with `--json`.
#[derive(Debug, Clone, Serialize)]
pub struct AboutNodes {
    /// The URLs are those of the first node.
    #[serde(flatten)]
    pub about: About,
    pub nodes: Vec<AboutNode>,
    /// URL of the database, without a password.
    pub store: String,
    /// Folder of configuration files and logs.
    #[serde(skip)]
    pub data_dir: PathBuf,
    /// Index of the node that held the agent's tunnel at the start.
    #[serde(skip)]
    pub owner: usize,
}

#[derive(Debug, Clone, Serialize)]
pub struct AboutNode {
    /// For callers and agents.
    pub port: u16,
    pub admin_url: String,
    pub pid: u32,
}

impl From<&Node> for AboutNode {
    fn from(node: &Node) -> Self {
        let place = &node.place;
        Self {
            port: place.address.port(),
            admin_url: format!("http://{}", place.admin_address),
            pid: node.part.id(),
        }
    }
}

impl AboutNodes {
    /// Writes example commands.
    pub fn write_hints(&self, out: &mut impl Write) -> io::Result<()> {
        let Self {
            about,
            nodes,
            store,
            data_dir,
            owner,
        } = self;
        let data = data_dir.display();
        writeln!(
            out,
            "Gw is running on {} nodes: caller -> node -> node with the tunnel -> agent -> backend.",
            nodes.len()
        )?;
        writeln!(out, "Nodes, with a process each:\n")?;
        for (
            number,
            AboutNode {
                port,
                admin_url,
                pid,
            },
        ) in (1..).zip(nodes)
        {
            writeln!(
                out,
                "  # node {number}: port {port}, administration {admin_url}, process {pid}"
            )?;
        }
        writeln!(out, "\nDatabase: {store}")?;
        writeln!(
            out,
            "Configuration and logs: {data}/node-1.toml, {data}/node-1.log, ..."
        )?;
        writeln!(out, "\nTry, at the first node:\n")?;
        about.write_commands(out)?;
        let Some(lost) = nodes.get(*owner) else {
            return Ok(());
        };
        writeln!(
            out,
            "Node {} has the agent's tunnel. Kill it: requests go on at the other nodes.\n",
            owner + 1
        )?;
        writeln!(out, "  kill -KILL {}", lost.pid)?;
        let ca = about.ca_file.display();
        let key = &about.service_key;
        let host = about
            .tenant_url
            .rsplit_once(':')
            .map_or("", |(host, _)| host);
        for node in nodes.iter().filter(|node| node.pid != lost.pid) {
            writeln!(
                out,
                "  curl --cacert {ca} -H 'X-Gw-Service-Key: {key}' {host}:{}/",
                node.port
            )?;
        }
        writeln!(
            out,
            "\nStart it again in another terminal: gw-gateway serve --config {data}/node-{}.toml",
            owner + 1
        )?;
        writeln!(
            out,
            "Also /slow?ms=500 and /status/404. Stop all with Ctrl-C."
        )
    }
}
