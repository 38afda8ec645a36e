//! Arguments → command.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// The Gw relay gateway: lets callers reach backends that nobody can reach.
#[derive(Parser)]
#[command(name = "gw-gateway", version)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Run a gateway.
    Serve {
        /// Configuration file (TOML); the README lists its keys.
        #[arg(long)]
        config: PathBuf,
        /// Report everything that is wrong with the configuration and exit.
        #[arg(long)]
        check: bool,
    },
    /// Run gateway, agent and a small backend in one process, with nothing to configure.
    Demo(DemoArguments),
}

#[derive(Args)]
pub(crate) struct DemoArguments {
    /// Port for callers and the agent, on loopback; 0 lets the kernel choose.
    #[arg(long, default_value_t = 8443)]
    pub(crate) port: u16,
    /// Port of the admin listener, on loopback; 0 lets the kernel choose.
    #[arg(long, default_value_t = 9080)]
    pub(crate) admin_port: u16,
    /// A backend of your own instead of the built-in echo, for example http://127.0.0.1:8080.
    #[arg(long)]
    pub(crate) backend: Option<String>,
    /// Where certificates and the database go; a fresh temporary folder if not given.
    #[arg(long)]
    pub(crate) data_dir: Option<PathBuf>,
    /// Worker threads; 0 means one for each core.
    #[arg(long, default_value_t = 0)]
    pub(crate) workers: usize,
    /// Requests at once before the rate limit takes hold.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) burst: u32,
    /// Requests per minute after that.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) refill_per_minute: u32,
    /// Print one line of JSON instead of hints.
    #[arg(long)]
    pub(crate) json: bool,
}
