//! Arguments → command.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Keeps a tunnel to the Gw gateway and forwards its requests to your backend.
#[derive(Parser)]
#[command(name = "gw-agent", version)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Make this machine an agent of a gateway, with a token from its administrator. Run it again to resume.
    Enroll(EnrollArguments),
    /// Connect, and forward until stopped. SIGTERM finishes running requests first.
    Run(RunArguments),
    /// Look whether this agent could run, and say what is wrong. Changes nothing; exit code 1 if something failed.
    Doctor {
        #[command(flatten)]
        run: RunArguments,
        /// Print one object of JSON.
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
    /// The gateway, for example https://eu1.example.com.
    #[arg(long)]
    pub(crate) gateway: Option<String>,
    /// Enrollment token, good once. Other users of this machine can see it here: GW_ENROLLMENT_TOKEN or --token-file
    /// hide it.
    #[arg(long, conflicts_with = "token_file")]
    pub(crate) token: Option<String>,
    /// File with the enrollment token.
    #[arg(long)]
    pub(crate) token_file: Option<PathBuf>,
    /// What people are to call this agent; the name of this machine if not given.
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Folder for the agent's identity.
    #[arg(long, env = gw_agent::identity::state::VARIABLE, default_value = gw_agent::identity::state::DEFAULT)]
    pub(crate) state_dir: PathBuf,
    /// Certificate (PEM) of the authority to trust for the gateway, instead of those of the system.
    #[arg(long)]
    pub(crate) ca_file: Option<PathBuf>,
    /// Replace the agent that the folder holds.
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Args)]
pub(crate) struct RunArguments {
    /// Configuration file; without one, what the state folder and the options say.
    #[arg(long)]
    pub(crate) config: Option<PathBuf>,
    /// Folder with the agent's identity, as enrollment left it.
    #[arg(long)]
    pub(crate) state_dir: Option<PathBuf>,
    /// Backend of every service, for example http://127.0.0.1:8080. Given several times, requests are spread over them.
    #[arg(long)]
    pub(crate) backend: Vec<String>,
}
