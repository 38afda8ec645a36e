//! What a demo of several nodes prints.

use std::io::{self, Write};
use std::path::PathBuf;

use gw_local_region::Node;
use serde::Serialize;

use super::super::About;

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
            "Gw is running on {} nodes: caller -> node -> node with the tunnel -> agent -> \
             backend.\nNodes, with a process each:\n",
            nodes.len()
        )?;
        for (number, node) in (1..).zip(nodes) {
            writeln!(
                out,
                "  # node {number}: port {}, administration {}, process {}",
                node.port, node.admin_url, node.pid
            )?;
        }
        writeln!(
            out,
            "\nDatabase: {store}\n\
             Configuration and logs: {data}/node-1.toml, {data}/node-1.log, ...\n\n\
             Try, at the first node:\n"
        )?;
        about.write_commands(out)?;
        let Some(lost) = nodes.get(*owner) else {
            return Ok(());
        };
        let number = owner + 1;
        writeln!(
            out,
            "Node {number} has the agent's tunnel. Kill it: requests go on at the other \
             nodes.\n\n  kill -KILL {}",
            lost.pid
        )?;
        let curl = about.curl();
        let key = &about.service_key;
        let url = &about.tenant_url;
        let host = url.rsplit_once(':').map_or("", |(host, _)| host);
        for node in nodes.iter().filter(|node| node.pid != lost.pid) {
            writeln!(
                out,
                "  {curl} -H 'X-Gw-Service-Key: {key}' {host}:{}/",
                node.port
            )?;
        }
        writeln!(
            out,
            "\n\
             Start it again in another terminal: gw-gateway serve --config \
             {data}/node-{number}.toml\n{}Stop all with Ctrl-C.",
            about.further_paths()
        )
    }
}
