//! Command-line arguments.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Keeps tunnels to the Gw gateway and forwards their requests to your backends.
#[derive(Parser)]
#[command(name = "gw-agent", version)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Enroll this machine as an agent, with a token from the gateway's administrator. Run it again to resume.
    Enroll(EnrollArguments),
    /// Connect to the gateway and forward requests until stopped. SIGTERM finishes running requests first.
    Run(RunArguments),
    /// Check whether this agent can run and report problems. Changes nothing; exits with 1 if a check failed.
    Doctor {
        #[command(flatten)]
        run: RunArguments,
        /// Print the result as one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Write man pages and shell completions into a folder.
    #[command(hide = true)]
    Manual {
        /// The folder; made if it is missing.
        folder: PathBuf,
    },
}

#[derive(Args)]
pub(crate) struct EnrollArguments {
    /// URL of the gateway, for example https://eu1.example.com.
    #[arg(long)]
    pub(crate) gateway: Option<String>,
    /// Enrollment token, valid once. Other users of this machine can see command-line arguments; use
    /// GW_ENROLLMENT_TOKEN or --token-file to avoid that.
    #[arg(long, conflicts_with = "token_file")]
    pub(crate) token: Option<String>,
    /// File that contains the enrollment token.
    #[arg(long)]
    pub(crate) token_file: Option<PathBuf>,
    /// Display name of the agent. Default: the host name of this machine.
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Folder in which the agent's identity is stored.
    #[arg(long, env = gw_agent::identity::state::VARIABLE, default_value = gw_agent::identity::state::DEFAULT)]
    pub(crate) state_dir: PathBuf,
    /// PEM file with the certificate of the authority to trust for the gateway, instead of the system's authorities.
    #[arg(long)]
    pub(crate) ca_file: Option<PathBuf>,
    /// Replace an agent that is already enrolled in the folder.
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Args)]
pub(crate) struct RunArguments {
    /// Configuration file. Optional if the state folder and the options are sufficient.
    #[arg(long)]
    pub(crate) config: Option<PathBuf>,
    /// Folder with the agent's identity, as created by `enroll`.
    #[arg(long)]
    pub(crate) state_dir: Option<PathBuf>,
    /// Backend of all services, for example http://127.0.0.1:8080. Can be repeated; requests are distributed.
    #[arg(long)]
    pub(crate) backend: Vec<String>,
}
