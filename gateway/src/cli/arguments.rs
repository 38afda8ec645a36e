//! Command-line arguments.

#[cfg(feature = "demo")]
use std::ffi::OsString;
use std::path::PathBuf;

#[cfg(feature = "demo")]
use clap::Args;
use clap::{Parser, Subcommand};

use crate::cli::Administration;
use crate::cli::agent_program::AgentProgramCommand;
use crate::cli::backup::{BackupArguments, RestoreArguments};
use crate::cli::client::connection::healthy::HealthyArguments;
use crate::cli::init::InitArguments;
use crate::cli::region::RegionCommand;

/// The Gw relay gateway: relays requests of callers to backends behind private networks.
#[derive(Parser)]
#[command(name = "gw-gateway", version)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Write the configuration of a gateway, create an account, and start the gateway as a service
    /// of systemd.
    Init(InitArguments),
    /// Run a gateway.
    Serve {
        /// Configuration file (TOML); gateway.toml(5) lists its keys.
        #[arg(long)]
        config: PathBuf,
        /// Report all mistakes in the configuration and exit.
        #[arg(long)]
        check: bool,
    },
    /// Check whether a gateway can run on this machine, and report problems. Changes nothing; exit
    /// code 1 if a check failed.
    Doctor {
        /// Configuration file (TOML); without it, only the machine is checked.
        #[arg(long)]
        config: Option<PathBuf>,
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Ask a running gateway whether it takes requests. Exit code 0 if it does; otherwise 1, and
    /// the reason in one line.
    Healthy(HealthyArguments),
    /// Make a backup of a single gateway, running or stopped.
    Backup(BackupArguments),
    /// Restore a backup into an empty data folder.
    Restore(RestoreArguments),
    /// Regions of several nodes: set up, examine, move to and from PostgreSQL.
    Region {
        #[command(subcommand)]
        command: RegionCommand,
    },
    /// Programs with which agents update themselves: make a release key, sign.
    AgentProgram {
        #[command(subcommand)]
        command: AgentProgramCommand,
    },
    /// Run gateway, agent and a small backend without configuration: in one process, or a region
    /// with --nodes.
    #[cfg(feature = "demo")]
    Demo(DemoArguments),
    /// Run a process of a demo with --nodes.
    #[cfg(feature = "demo")]
    #[command(hide = true)]
    DemoPart(PartArguments),
    /// Write man pages and shell completions into a folder.
    #[command(hide = true)]
    Manual {
        /// The folder; made if it is missing.
        folder: PathBuf,
    },
    #[command(flatten)]
    Administer(Administration),
}

/// A tip for a word that is not a command, or for a missing argument.
pub(crate) fn meant(word: &str) -> Option<String> {
    let tip = match word {
        "run" | "start" | "up" => "`gw-gateway serve --config FILE` runs a gateway",
        "status" | "health" | "ping" => {
            "`gw-gateway healthy` asks a running gateway, `gw-gateway doctor` checks this machine"
        }
        "check" | "validate" => {
            "`gw-gateway serve --config FILE --check` checks a configuration, `gw-gateway doctor` \
             also the machine"
        }
        "version" | "-v" => "`gw-gateway --version` prints it",
        "stop" | "restart" | "reload" => {
            "`systemctl restart gw-gateway` restarts the service of systemd; Ctrl-C or SIGTERM \
             stops a gateway"
        }
        "log" | "logs" => {
            "`journalctl -u gw-gateway` shows the log of the service of systemd, `gw-gateway \
             request search` the requests"
        }
        "setup" | "install" | "configure" => {
            "`gw-gateway init` writes a configuration and starts the gateway"
        }
        "list" | "create" | "add" | "show" | "change" | "delete" | "remove" => {
            "the kind of record comes first, such as `gw-gateway service list ACCOUNT`"
        }
        _ if word.starts_with("--config ") => {
            "the package has /etc/gw/gateway.toml, and `gw-gateway init` writes one"
        }
        "--prune" => {
            "--yes answers the question before deletions, which only --prune makes: add --prune, \
             or leave --yes out"
        }
        _ => return None,
    };
    Some(tip.to_owned())
}

#[cfg(feature = "demo")]
#[derive(Args)]
pub(crate) struct DemoArguments {
    /// Run a region of this many nodes, with a process for each node and one for the agent.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(2..=9))]
    pub(crate) nodes: Option<u8>,
    /// Database of the nodes, for example postgres://gw@db1/gw; by default the installed PostgreSQL
    /// is started.
    #[arg(long, value_name = "URL")]
    pub(crate) store: Option<String>,
    /// Port for callers and the agent, on loopback; 0 means a free port. Further nodes take the
    /// ports after it.
    #[arg(long, default_value_t = 8443)]
    pub(crate) port: u16,
    /// Port of the admin listener, on loopback; 0 means a free port. Further nodes take the ports
    /// after it.
    #[arg(long, default_value_t = 9080)]
    pub(crate) admin_port: u16,
    /// A backend to use instead of the built-in echo, for example http://127.0.0.1:8080.
    #[arg(long, value_parser = gw_agent::config::backend_url)]
    pub(crate) backend: Option<String>,
    /// Host field that the backend gets: the caller's, or that of its URL, which is mapped back in
    /// responses. Default: preserve.
    #[arg(
        long,
        value_name = "preserve|rewrite",
        value_parser = ["preserve", "rewrite"],
        hide_possible_values = true,
        requires = "backend",
    )]
    pub(crate) host_header: Option<String>,
    /// Folder for certificates and the database; a new temporary folder by default.
    #[arg(long)]
    pub(crate) data_dir: Option<PathBuf>,
    /// Worker threads of each node; 0 means one for each core, divided among the nodes.
    #[arg(long, default_value_t = 0)]
    pub(crate) workers: usize,
    /// Requests at once before the rate limit applies.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) burst: u32,
    /// Requests per minute after that.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) refill_per_minute: u32,
    /// Print one line of JSON instead of example commands.
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(feature = "demo")]
#[derive(Args)]
pub(crate) struct PartArguments {
    /// Process id of the demo: this process ends with it.
    #[arg(long, value_name = "PID")]
    pub(crate) parent: u32,
    #[command(subcommand)]
    pub(crate) part: DemoPart,
}

#[cfg(feature = "demo")]
#[derive(Subcommand)]
pub(crate) enum DemoPart {
    /// A node.
    Node {
        /// Its configuration file.
        #[arg(long)]
        config: PathBuf,
    },
    /// The agent, with its settings as JSON on standard input.
    Agent,
    /// Another program, such as PostgreSQL.
    Program {
        /// Id of the user that runs it.
        #[arg(long, requires = "group")]
        user: Option<u32>,
        /// Id of that user's group.
        #[arg(long, requires = "user")]
        group: Option<u32>,
        /// The program.
        program: PathBuf,
        /// Its arguments.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use clap::error::ErrorKind;

    use super::*;

    #[test]
    fn the_argument_definitions_are_consistent() {
        Arguments::command().debug_assert();
    }

    /// Commands that are accepted.
    const GOOD: [&str; 26] = [
        "gw-gateway account create acme --json",
        "gw-gateway service create acme api --mode jwt --mode service_key --burst 5 \
         --request-logging false",
        "gw-gateway service create acme api --create-account --with-key --with-agent \
         --backend-port 80",
        "gw-gateway service change acme api --disable --admin-url http://localhost:1",
        "gw-gateway credential create acme --service api --service b --name ci",
        "gw-gateway key rotate-secret acme 0123456789abcdef",
        "gw-gateway enrollment-token create acme --service api --approval manual \
         --expires-in-seconds 60",
        "gw-gateway enrollment-token create acme --service api --expires-in 30d --uses 10000",
        "gw-gateway agent revoke acme ag_0123456789abcdefghij",
        "gw-gateway signing-key rotate --immediately",
        "gw-gateway audit list --account acme --limit 5 --config gateway.toml",
        "gw-gateway audit verify --head \
         7:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
        "gw-gateway apply -f a.toml --file b --prune --yes --take-over --managed-by git/shop \
         --revision 4f --secrets-dir s",
        "gw-gateway diff -f - --prune --config gateway.toml",
        "gw-gateway export --account acme --managed-by git --json",
        "gw-gateway backup --config gateway.toml backup.tar.zst --force",
        "gw-gateway backup - --admin-url https://localhost:1 --admin-ca ca.pem",
        "gw-gateway restore --config gateway.toml -",
        "gw-gateway healthy",
        "gw-gateway healthy --wait 30s --admin-url https://localhost:1 --admin-ca ca.pem",
        "gw-gateway init",
        "gw-gateway init --domain example.com --account acme --config gateway.toml --force \
         --no-start",
        "gw-gateway region status --config gateway.toml --json",
        "gw-gateway region import --config gateway.toml folder",
        "gw-gateway demo --nodes 3 --store postgres://gw@db1/gw",
        "gw-gateway demo-part --parent 7 program --user 1 --group 2 -- postgres -D folder -p 5432",
    ];

    /// Commands that are refused before any request.
    const REFUSED: [(&str, ErrorKind); 28] = [
        ("gw-gateway account create ACME", ErrorKind::ValueValidation),
        (
            "gw-gateway account show acme/../other",
            ErrorKind::ValueValidation,
        ),
        (
            "gw-gateway credential show acme 0123456789abcdef",
            ErrorKind::ValueValidation,
        ),
        (
            "gw-gateway service create acme api --backend-port 80",
            ErrorKind::MissingRequiredArgument,
        ),
        (
            "gw-gateway service create acme api --burst 0",
            ErrorKind::ValueValidation,
        ),
        (
            "gw-gateway service create acme api --mode password",
            ErrorKind::InvalidValue,
        ),
        (
            "gw-gateway service change acme api --enable --disable",
            ErrorKind::ArgumentConflict,
        ),
        (
            "gw-gateway key create acme",
            ErrorKind::MissingRequiredArgument,
        ),
        (
            "gw-gateway apply --dry-run",
            ErrorKind::MissingRequiredArgument,
        ),
        (
            "gw-gateway apply -f a.toml --yes",
            ErrorKind::MissingRequiredArgument,
        ),
        (
            "gw-gateway apply -f a.toml --print-secrets --secrets-dir s",
            ErrorKind::ArgumentConflict,
        ),
        (
            "gw-gateway diff -f a.toml --managed-by .",
            ErrorKind::ValueValidation,
        ),
        (
            "gw-gateway enrollment-token create acme --service api --approval maybe",
            ErrorKind::InvalidValue,
        ),
        (
            "gw-gateway enrollment-token create acme --service api --expires-in 31d",
            ErrorKind::ValueValidation,
        ),
        (
            "gw-gateway enrollment-token create acme --service api --uses 10001",
            ErrorKind::ValueValidation,
        ),
        (
            "gw-gateway enrollment-token create acme --service api --expires-in 1h \
             --expires-in-seconds 9",
            ErrorKind::ArgumentConflict,
        ),
        (
            "gw-gateway audit list --limit 0",
            ErrorKind::ValueValidation,
        ),
        (
            "gw-gateway audit verify --head 7",
            ErrorKind::ValueValidation,
        ),
        ("gw-gateway healthy --wait 30", ErrorKind::ValueValidation),
        (
            "gw-gateway init --domain EXAMPLE",
            ErrorKind::ValueValidation,
        ),
        ("gw-gateway init --listen 443", ErrorKind::ValueValidation),
        (
            "gw-gateway init --tls-key key.pem",
            ErrorKind::MissingRequiredArgument,
        ),
        (
            "gw-gateway init --serve --no-start",
            ErrorKind::ArgumentConflict,
        ),
        ("gw-gateway demo --nodes 1", ErrorKind::ValueValidation),
        ("gw-gateway demo --nodes 10", ErrorKind::ValueValidation),
        (
            "gw-gateway restore backup.tar.zst",
            ErrorKind::MissingRequiredArgument,
        ),
        ("gw-gateway region init", ErrorKind::MissingRequiredArgument),
        (
            "gw-gateway region export --config gateway.toml",
            ErrorKind::MissingRequiredArgument,
        ),
    ];

    #[test]
    fn ids_and_settings_are_checked_before_any_request() {
        let kind = |line: &str| {
            Arguments::try_parse_from(line.split(' '))
                .err()
                .map(|error| error.kind())
        };
        for good in GOOD {
            assert_eq!(kind(good), None, "{good}");
        }
        for (line, expected) in REFUSED {
            assert_eq!(kind(line), Some(expected), "{line}");
        }
    }
}
