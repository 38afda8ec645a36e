//! `gw-gateway region`: sets up and examines a region of several nodes. Works on the database, not
//! through the administration API.

use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Subcommand;
use gw_gateway::process::region::{
    self, Created, Drained, KeyFileResult, Moved, ReplaceableSecret, ReplacedKey,
    StoredRegionStatus,
};
use gw_interface::config::Config;
use gw_shared::command::Failure;
use gw_shared::text::escaped_json;
use gw_store::{ContentsSummary, Replication};

use super::client::connection::load_config;
use super::client::output::{joined, or_dash, yes_or_no};
use super::client::table;
use super::this_node::ThisNode;

#[derive(Subcommand)]
pub(crate) enum RegionCommand {
    /// Create a region in an empty database, and its key if the file of the key does not exist.
    Init {
        /// Configuration file of this node.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Check whether this node can join its region. Changes nothing.
    Join {
        /// Configuration file of this node.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Show the database of the region, its nodes, its revision and the size of its records, and
    /// what the node on this machine says.
    Status {
        /// Configuration file of this node.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Move the services of a node to other nodes, and end it.
    Drain {
        /// Configuration file of any node.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// Return at once instead of waiting until the node has left.
        #[arg(long)]
        no_wait: bool,
        /// Slot of the node, as `region status` shows it.
        node: u16,
    },
    /// Remove a node that has left or is dead, so that its slot is free.
    Remove {
        /// Configuration file of any node.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// Slot of the node, as `region status` shows it.
        node: u16,
    },
    /// Write the records that this node knows back into a database that was changed by something
    /// other than a gateway. Nodes may run.
    Repair {
        /// Configuration file of this node.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// Write also if the database does not have all later changes any more, which are then
        /// lost.
        #[arg(long)]
        discard_later_changes: bool,
    },
    /// Replace the region key by `region_key_next`, which all nodes must have. Nodes may run.
    Rekey {
        /// Configuration file of any node.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// Replace it also if a node that runs does not have the next key. That node then works
        /// from memory.
        #[arg(long)]
        force: bool,
    },
    /// Delete a shared secret from the database, to replace it. All nodes must be stopped, and its
    /// files be deleted.
    Forget {
        /// Configuration file of any node.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        secret: ReplaceableSecret,
    },
    /// Move the data of a single gateway into the region, which must be empty. The gateway must not
    /// run.
    Import {
        /// Configuration file of this node.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// Data folder of the gateway. It stays as it is.
        folder: PathBuf,
    },
    /// Make a data folder from the region, for a single gateway.
    Export {
        /// Configuration file of this node.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// The folder; must be empty or missing.
        folder: PathBuf,
    },
}

impl RegionCommand {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let mut out = io::stdout();
        match self {
            Self::Init { config } => {
                let created = region::init(&load(&config)?)?;
                print(write_created(&mut out, &created, &config))
            }
            Self::Join { config } => {
                let found = region::join(&load(&config)?)?;
                found.print(false)?;
                say(format_args!(
                    "This node can join. Start it: gw-gateway serve --config {}",
                    config.display()
                ))
            }
            Self::Status { config, json } => show_status(&config, json),
            Self::Drain {
                config,
                no_wait,
                node,
            } => {
                let drained = region::drain(&load(&config)?, node, !no_wait)?;
                let result = match drained {
                    Drained::Left => "has left. Its process ends after its running requests.",
                    Drained::Told => "is to leave: see gw-gateway region status.",
                };
                say(format_args!("Node {node} {result}"))
            }
            Self::Remove { config, node } => {
                region::remove(&load(&config)?, node)?;
                say(format_args!(
                    "Removed node {node}. Another node can take its slot."
                ))
            }
            Self::Repair {
                config,
                discard_later_changes,
            } => {
                let repaired = region::repair(&load(&config)?, discard_later_changes)?;
                let known = repaired.known.0;
                let revision = repaired.revision.0;
                say(format_args!(
                    "Wrote the records of revision {known} back, as revision {revision}. All nodes \
                     load them."
                ))
            }
            Self::Rekey { config, force } => {
                let replaced = region::rekey(&load(&config)?, force)?;
                print(write_replaced(&mut out, &replaced))
            }
            Self::Forget { config, secret } => {
                region::forget(&load(&config)?, secret)?;
                say(format_args!(
                    "Deleted it. The first node that starts without its files makes another one."
                ))
            }
            Self::Import { config, folder } => {
                let moved = region::import(&load(&config)?, &folder)?;
                print(write_imported(&mut out, &moved, &config, &folder))
            }
            Self::Export { config, folder } => {
                let moved = region::export(&load(&config)?, &folder)?;
                print(write_exported(&mut out, &moved, &folder))
            }
        }
    }
}

fn load(path: &Path) -> Result<Config, Failure> {
    load_config(path, |name| std::env::var(name).ok())
}

/// Writes one line to standard output.
fn say(line: fmt::Arguments<'_>) -> Result<(), Failure> {
    print(writeln!(io::stdout(), "{line}"))
}

fn print(written: io::Result<()>) -> Result<(), Failure> {
    match written {
        // The reader of the output has closed the pipe.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(|error| Failure::Run(format!("standard output: {error}"))),
    }
}

/// Writes labels and values, each pair in a line.
fn write_facts(out: &mut impl Write, facts: &[(&str, String)]) -> io::Result<()> {
    let rows: Vec<Vec<String>> = facts
        .iter()
        .map(|(label, value)| vec![format!("  {label}"), value.clone()])
        .collect();
    table::write(out, &rows)
}

fn show_status(config: &Path, json: bool) -> Result<(), Failure> {
    let status = region::status(&load(config)?)?;
    let node = ThisNode::ask(config);
    if !json {
        let mut out = io::stdout();
        return print(write_status(&mut out, &status).and_then(|()| node.write(&mut out)));
    }
    let mut status = serde_json::to_value(&status).map_err(Failure::run)?;
    node.add_to(&mut status);
    say(format_args!("{}", escaped_json(&status.to_string())))
}

fn write_created(out: &mut impl Write, created: &Created, config: &Path) -> io::Result<()> {
    let key = created.key.display();
    let made = match created.key_file {
        KeyFileResult::Created => "created with mode 0600",
        KeyFileResult::Kept => "existed, unchanged",
    };
    writeln!(
        out,
        "Created the region {} in {}:",
        created.name, created.database
    )?;
    write_facts(
        out,
        &[
            ("region id", created.id.clone()),
            ("region key", format!("{key} ({made})")),
        ],
    )?;
    let config = config.display();
    writeln!(
        out,
        "Next:\n  1. Let the user of the gateway read the key. Copy it to the other nodes, and \
         keep a copy elsewhere:\n     a backup of the database cannot be used without it.\n  2. To \
         take over the data of a single gateway, stop it, then:\n     gw-gateway region import \
         --config {config} FOLDER\n  3. On each node: gw-gateway region join --config \
         {config}\n     and start it:  gw-gateway serve --config {config}"
    )
}

fn write_replaced(out: &mut impl Write, replaced: &ReplacedKey) -> io::Result<()> {
    let ReplacedKey { revision, records } = replaced;
    writeln!(
        out,
        "Replaced the region key, as revision {}; {records} records were written again.\n\
         Next, on each node: set region_key to the file of region_key_next, remove \
         region_key_next, and replace the process\n\
         with SIGUSR2. With [archive], set region_key_previous to the old file until its objects \
         have expired.",
        revision.0
    )
}

fn write_status(out: &mut impl Write, status: &StoredRegionStatus) -> io::Result<()> {
    writeln!(out, "Database:")?;
    write_facts(out, &database_facts(status))?;
    writeln!(out, "Region:")?;
    write_facts(out, &region_facts(status))?;
    if !status.nodes.is_empty() {
        writeln!(out, "Nodes:")?;
        table::write(out, &node_rows(status))?;
    }
    let header = ["  KIND", "COUNT", "BYTES"].map(str::to_owned).into();
    let rows = status.records.iter().map(|of_kind| {
        vec![
            format!("  {}", of_kind.kind),
            of_kind.count.to_string(),
            of_kind.bytes.to_string(),
        ]
    });
    writeln!(out, "Records:")?;
    table::write(
        out,
        &std::iter::once(header).chain(rows).collect::<Vec<_>>(),
    )
}

fn database_facts(status: &StoredRegionStatus) -> Vec<(&'static str, String)> {
    let engine = &status.engine;
    let standby = match engine.replication {
        Replication::Synchronous => "synchronous",
        Replication::SynchronousMissing => {
            "synchronous, but none is connected: changes are not acknowledged"
        }
        Replication::Asynchronous => "asynchronous: a failover can lose acknowledged changes",
        Replication::None => "none",
    };
    let several = status.several_primaries.clone();
    let primary = several.unwrap_or_else(|| yes_or_no(engine.is_primary));
    vec![
        ("store", status.database.clone()),
        ("address", or_dash(engine.address.as_ref())),
        ("version", engine.version.clone()),
        ("primary", primary),
        ("standby", standby.to_owned()),
        ("standbys connected", engine.standbys.to_string()),
    ]
}

fn region_facts(status: &StoredRegionStatus) -> Vec<(&'static str, String)> {
    let region = &status.region;
    let key = status
        .key_problem
        .clone()
        .unwrap_or_else(|| equal_key(status.key_in_use));
    let change = status.last_change.as_ref().map(|change| {
        let node = change
            .node
            .as_ref()
            .map_or_else(String::new, |node| format!(" on {node}"));
        format!("{} by {}{node}, {}", change.at, change.actor, change.action)
    });
    vec![
        ("region", region.name.clone()),
        ("region id", region.id.clone()),
        ("region key of this node", key),
        ("revision", region.revision.0.to_string()),
        ("last change", or_dash(change.as_ref())),
        ("schema", region.schema.to_string()),
        ("feature level", region.feature_level.to_string()),
    ]
}

fn node_rows(status: &StoredRegionStatus) -> Vec<Vec<String>> {
    let header = [
        "  NODE",
        "STATE",
        "VERSION",
        "ADDRESS",
        "EPOCHS BEHIND",
        "CHANGES BEHIND",
        "REGION KEYS",
    ];
    let rows = status.nodes.iter().map(|node| {
        vec![
            format!("  {}", node.slot),
            node.state.to_owned(),
            node.version.clone(),
            node.peer_address.clone(),
            node.epoch_lag.to_string(),
            node.revision_lag.to_string(),
            joined(&node.keys),
        ]
    });
    std::iter::once(header.map(str::to_owned).into())
        .chain(rows)
        .collect()
}

fn equal_key(in_use: Option<&str>) -> String {
    match in_use {
        Some("region_key") | None => "equal".to_owned(),
        Some(setting) => {
            format!(
                "equal ({setting}): set region_key to its file on all nodes, and replace their \
                 processes"
            )
        }
    }
}

/// Writes the summaries of source and destination beside each other.
fn write_moved(out: &mut impl Write, moved: &Moved) -> io::Result<()> {
    let Moved {
        source,
        destination,
        secrets,
    } = moved;
    let count = |summary: &ContentsSummary, kind: &str| {
        summary.records.get(kind).copied().unwrap_or(0).to_string()
    };
    let mut rows = vec![["  ", "SOURCE", "DESTINATION"].map(str::to_owned).to_vec()];
    let mut row =
        |label: &str, from: String, to: String| rows.push(vec![format!("  {label}"), from, to]);
    for kind in source.records.keys() {
        row(kind, count(source, kind), count(destination, kind));
    }
    row(
        "audit entries",
        source.audit_entries.to_string(),
        destination.audit_entries.to_string(),
    );
    table::write(out, &rows)?;
    write_facts(
        out,
        &[
            (
                "head of the audit log",
                or_dash(destination.audit_head.as_ref()),
            ),
            ("SHA-256 of source", source.sha256.clone()),
            ("SHA-256 of destination", destination.sha256.clone()),
            ("secrets", secrets.join(", ")),
        ],
    )
}

fn write_imported(
    out: &mut impl Write,
    moved: &Moved,
    config: &Path,
    folder: &Path,
) -> io::Result<()> {
    writeln!(
        out,
        "Imported {}; everything was read back and is equal:",
        folder.display()
    )?;
    write_moved(out, moved)?;
    writeln!(
        out,
        "Next, on each node: gw-gateway region join --config {}",
        config.display()
    )?;
    writeln!(
        out,
        "Do not start a gateway with the old database again: its changes would not be in the \
         region."
    )
}

fn write_exported(out: &mut impl Write, moved: &Moved, folder: &Path) -> io::Result<()> {
    let folder = folder.display();
    writeln!(
        out,
        "Exported to {folder}; everything was read back and is equal:"
    )?;
    write_moved(out, moved)?;
    writeln!(
        out,
        "Next: stop the nodes, and start one gateway with data_dir = \"{folder}\" and without \
         `store`."
    )?;
    writeln!(
        out,
        "Changes that were made after this export are not in it."
    )
}
