//! Command-line arguments.

mod http;

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use gw_agent::config::HOST_HEADER_VARIABLE;
use gw_agent::identity::enroll::{EnrollError, EnrollmentOptions, TokenSource, ensure_enrolled};
use gw_agent::process::ConfigSource;
use gw_shared::command::Failure;
use gw_shared::identity::secret::Secret;

pub(crate) use http::{HttpArguments, enrolled_by_http};

/// Keeps tunnels to the Gw gateway and forwards their requests to your backends.
#[derive(Parser)]
#[command(name = "gw-agent", version)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Enroll this machine as an agent, with a token from the gateway's administrator. Run it again
    /// to resume.
    Enroll(EnrollArguments),
    /// Connect to the gateway and forward requests until stopped. SIGTERM finishes running requests
    /// first.
    ///
    /// With one of the options of an enrollment, it enrolls first unless the state folder has an
    /// agent.
    Run {
        #[command(flatten)]
        run: RunArguments,
        #[command(flatten)]
        enrolled: RunEnrolledArguments,
        /// Be a worker of the supervisor on standard input.
        #[arg(long, hide = true)]
        supervised: bool,
    },
    /// Relay requests to one backend: enroll if necessary, run, and print the public address of
    /// each service.
    Http(HttpArguments),
    /// Check whether this agent can run and report problems. Changes nothing; exits with 1 if a
    /// check failed.
    ///
    /// Without options, it checks the agent and the backend of the last `gw-agent http` of this
    /// user, if there was one.
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

/// A tip for a word that is not a command.
pub(crate) fn meant(word: &str) -> Option<String> {
    let tip = match word {
        port if gw_agent::config::backend_url(port).is_ok() => {
            return Some(format!("`gw-agent http {port}` relays to it"));
        }
        "start" | "serve" | "up" => {
            "`gw-agent http PORT` enrolls and runs, `gw-agent run` runs an enrolled agent"
        }
        "tunnel" | "connect" | "tcp" | "https" | "expose" => {
            "`gw-agent http PORT` relays to a program of this machine"
        }
        "register" | "join" | "login" => "`gw-agent enroll` enrolls this machine",
        "status" | "check" => "`gw-agent doctor` checks this agent",
        "version" | "-v" => "`gw-agent --version` prints it",
        "stop" | "restart" | "reload" => {
            "`systemctl restart gw-agent` restarts the service of systemd; Ctrl-C or SIGTERM stops \
             an agent"
        }
        "log" | "logs" => "`journalctl -u gw-agent` shows the log of the service of systemd",
        _ => return None,
    };
    Some(tip.to_owned())
}

#[derive(Args)]
pub(crate) struct EnrollArguments {
    #[command(flatten)]
    pub(crate) enrollment: EnrollmentArguments,
    /// Folder in which the agent's identity is stored.
    #[arg(
        long,
        env = gw_agent::identity::state::VARIABLE,
        default_value = gw_agent::identity::state::DEFAULT,
    )]
    pub(crate) state_dir: PathBuf,
    /// Replace an agent that is already enrolled in the folder.
    #[arg(long)]
    pub(crate) force: bool,
}

/// Options of every command that enrolls.
#[derive(Args)]
pub(crate) struct EnrollmentArguments {
    /// URL of the gateway, for example https://eu1.example.com.
    #[arg(long)]
    gateway: Option<String>,
    /// Enrollment token. Other users of this machine can see command-line arguments, and shells
    /// keep them; use --token-file or GW_ENROLLMENT_TOKEN to avoid that.
    #[arg(long, conflicts_with = "token_file")]
    token: Option<String>,
    /// File that contains the enrollment token; `-` is the first line of standard input.
    #[arg(long, value_name = "FILE|-")]
    token_file: Option<PathBuf>,
    /// Display name of the agent. Default: the host name of this machine.
    #[arg(long)]
    name: Option<String>,
    /// PEM file with the certificate of the authority to trust for the gateway, instead of the
    /// system's authorities.
    #[arg(long)]
    ca_file: Option<PathBuf>,
}

/// Options of the commands that enroll if necessary, and run.
#[derive(Args)]
pub(crate) struct RunEnrolledArguments {
    #[command(flatten)]
    enrollment: EnrollmentArguments,
    /// Replace the agent in the state folder, which the gateway does not know any more.
    #[arg(long, hide = true)]
    enroll_again: bool,
}

impl RunEnrolledArguments {
    /// Hidden option of the commands that enroll if necessary, and run.
    pub(crate) const ENROLL_AGAIN: &str = "--enroll-again";

    /// Whether the options ask for an enrollment. GW_ENROLLMENT_TOKEN alone does not.
    pub(crate) fn are_given(&self) -> bool {
        self.enroll_again || self.enrollment.are_given()
    }

    /// Enrolls the agent of the folder unless it is enrolled. Returns whether it can enroll again.
    pub(crate) fn enroll(self, state_dir: PathBuf) -> Result<bool, Failure> {
        let options = EnrollmentOptions {
            force: self.enroll_again,
            ..self.enrollment.options(state_dir)
        };
        // Standard input has its token once.
        let is_repeatable = !matches!(options.token, None | Some(TokenSource::StandardInput));
        ensure_enrolled(options, |name| std::env::var(name).ok()).map_err(enroll_failure)?;
        Ok(is_repeatable)
    }
}

impl EnrollmentArguments {
    fn are_given(&self) -> bool {
        let Self {
            gateway,
            token,
            token_file,
            name,
            ca_file,
        } = self;
        gateway.is_some()
            || token.is_some()
            || token_file.is_some()
            || name.is_some()
            || ca_file.is_some()
    }

    /// The options of an enrollment in `state_dir`. Arguments take precedence over
    /// GW_ENROLLMENT_TOKEN.
    pub(crate) fn options(self, state_dir: PathBuf) -> EnrollmentOptions {
        let of_environment = || {
            std::env::var("GW_ENROLLMENT_TOKEN")
                .ok()
                .filter(|token| !token.is_empty())
        };
        let token = match (self.token, self.token_file) {
            (None, Some(file)) if file.as_os_str() == "-" => Some(TokenSource::StandardInput),
            (None, Some(file)) => Some(TokenSource::File(file)),
            (token, _) => token
                .or_else(of_environment)
                .map(|token| TokenSource::Text(Secret::new(token))),
        };
        EnrollmentOptions {
            state_dir,
            gateway: self.gateway,
            token,
            name: self.name,
            ca_file: self.ca_file,
            ..EnrollmentOptions::default()
        }
    }
}

/// The failure of a command that enrolls.
pub(crate) fn enroll_failure(error: EnrollError) -> Failure {
    match error {
        EnrollError::Usage(_)
        | EnrollError::OtherGateway { .. }
        | EnrollError::ServiceUrl { .. } => Failure::Usage(error.to_string()),
        error => Failure::run(error),
    }
}

#[derive(Args)]
pub(crate) struct RunArguments {
    /// Configuration file. Optional if the state folder and the options are sufficient.
    #[arg(long)]
    pub(crate) config: Option<PathBuf>,
    /// Folder with the agent's identity, as created by `enroll`.
    #[arg(long)]
    pub(crate) state_dir: Option<PathBuf>,
    /// Backend of all services, for example http://127.0.0.1:8080. Can be repeated; requests are
    /// distributed.
    #[arg(long)]
    pub(crate) backend: Vec<String>,
    #[command(flatten)]
    pub(crate) host: HostHeaderArguments,
    /// Print the public address of each service once it is relayed.
    #[arg(long, hide = true)]
    pub(crate) print_addresses: bool,
}

#[derive(Args, Default)]
pub(crate) struct HostHeaderArguments {
    /// Host field that the backend gets: the caller's, or that of its URL, which is mapped back in
    /// responses. Default: preserve.
    #[arg(
        long,
        value_name = "preserve|rewrite",
        value_parser = ["preserve", "rewrite"],
        hide_possible_values = true,
    )]
    host_header: Option<String>,
}

impl HostHeaderArguments {
    /// The environment, in which the option takes precedence.
    pub(crate) fn environment(&self) -> impl Fn(&str) -> Option<String> {
        |name| match &self.host_header {
            Some(host) if name == HOST_HEADER_VARIABLE => Some(host.clone()),
            _ => std::env::var(name).ok(),
        }
    }
}

impl RunArguments {
    pub(crate) fn source(&self) -> ConfigSource {
        ConfigSource {
            file: self.config.clone(),
            state_dir: self.state_dir.clone(),
        }
    }

    /// Arguments of a worker with the same configuration.
    pub(crate) fn of_worker(&self) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = vec!["run".into(), "--supervised".into()];
        let mut add = |name: &str, value: &OsStr| arguments.extend([name.into(), value.to_owned()]);
        self.config
            .iter()
            .for_each(|path| add("--config", path.as_os_str()));
        self.state_dir
            .iter()
            .for_each(|path| add("--state-dir", path.as_os_str()));
        self.backend
            .iter()
            .for_each(|url| add("--backend", url.as_ref()));
        self.host
            .host_header
            .iter()
            .for_each(|host| add("--host-header", host.as_ref()));
        arguments.extend(self.print_addresses.then(|| "--print-addresses".into()));
        arguments
    }
}
