//! `gw-agent http`: from an enrollment token to relayed requests with one command.

use std::path::{Path, PathBuf};

use clap::Args;
use gw_agent::config::backend_url;
use gw_agent::identity::state::{self, StateDir};
use gw_shared::command::Failure;
use gw_shared::telemetry::logging;

use super::{HostHeaderArguments, RunArguments, RunEnrolledArguments};

#[derive(Args)]
pub(crate) struct HttpArguments {
    /// Backend of all services: the port of a program on this machine, HOST:PORT, or a URL such as
    /// http://10.0.0.7:3000.
    #[arg(value_name = "PORT|URL", value_parser = backend_url)]
    backend: String,
    #[command(flatten)]
    host: HostHeaderArguments,
    #[command(flatten)]
    enrolled: RunEnrolledArguments,
    /// Folder in which the agent's identity is stored. Default: gw-agent in $XDG_STATE_HOME or
    /// ~/.local/state; /var/lib/gw-agent for root.
    #[arg(long, env = state::VARIABLE)]
    state_dir: Option<PathBuf>,
}

impl HttpArguments {
    /// Enrolls the agent unless it is enrolled. Returns the arguments with which to run it, and
    /// whether it can enroll again.
    pub(crate) fn enroll(self) -> Result<(RunArguments, bool), Failure> {
        let environment = |name: &str| std::env::var(name).ok();
        logging::start(
            environment("GW_LOG_FORMAT")
                .and_then(|text| text.parse().ok())
                .unwrap_or_default(),
            tracing::Level::INFO,
        );
        let is_root = rustix::process::geteuid().is_root();
        let state_dir = self
            .state_dir
            .or_else(|| default_state_dir(is_root, environment))
            .ok_or_else(|| {
                let message = "--state-dir: missing; HOME and XDG_STATE_HOME are not set, so there \
                               is no default folder";
                Failure::Usage(message.to_owned())
            })?;
        let can_enroll = self.enrolled.enroll(state_dir.clone())?;
        let run = RunArguments {
            config: None,
            state_dir: Some(state_dir),
            backend: vec![self.backend],
            host: self.host,
            print_addresses: true,
        };
        Ok((run, can_enroll))
    }
}

/// The folder in which `http` of this user finds an agent; `None` if there is none.
pub(crate) fn enrolled_by_http(environment: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let is_root = rustix::process::geteuid().is_root();
    default_state_dir(is_root, environment).filter(|path| StateDir::new(path).is_enrolled())
}

/// The state folder of the user, as the XDG Base Directory Specification has it, or that of the
/// machine's agent for root.
fn default_state_dir(
    is_root: bool,
    environment: impl Fn(&str) -> Option<String>,
) -> Option<PathBuf> {
    if is_root {
        return Some(state::DEFAULT.into());
    }
    let folder = |name: &str| {
        environment(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let of_user =
        folder("XDG_STATE_HOME").or_else(|| folder("HOME").map(|home| home.join(".local/state")));
    Some(of_user?.join(Path::new(env!("CARGO_PKG_NAME"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_folder_is_that_of_the_user() {
        let home = ("HOME", "/home/ann");
        for (is_root, variables, expected) in [
            (false, &[home][..], Some("/home/ann/.local/state/gw-agent")),
            (
                false,
                &[home, ("XDG_STATE_HOME", "/state")],
                Some("/state/gw-agent"),
            ),
            (
                false,
                &[home, ("XDG_STATE_HOME", "relative")],
                Some("/home/ann/.local/state/gw-agent"),
            ),
            (true, &[home], Some("/var/lib/gw-agent")),
            (false, &[], None),
        ] {
            let variable = |name: &str| {
                let found = variables.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| (*value).to_owned())
            };
            let path = default_state_dir(is_root, variable);
            assert_eq!(path, expected.map(PathBuf::from), "{variables:?}");
        }
    }
}
