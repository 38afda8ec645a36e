//! `gw-gateway init`: from nothing to a gateway that runs: its configuration, its service of
//! systemd, an account.

mod answers;
mod authority;
mod configuration;
mod first_request;
mod next_steps;
mod systemd;

use std::io::{self, IsTerminal, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::Args;
use gw_base::process::file_owner::FileOwner;
use gw_control_plane::control::ControlError;
use gw_gateway::Gateway;
use gw_gateway::process::init::create_account;
use gw_interface::config::Config;
use gw_shared::command::Failure;
use gw_shared::id::AccountId;

use self::answers::{Answers, Dialogue, domain, region};
use self::next_steps::{SetupStage, next_steps};
use self::systemd::Systemd;
use super::administration::account::AccountCommand;
use super::client::connection::AdminConnection;

/// What is not given is asked on a terminal, unless domain and account are given.
#[derive(Args, Default)]
pub(crate) struct InitArguments {
    /// Domain of the region: all names are below REGION.DOMAIN. Default: gw.localhost, for a trial
    /// on this machine.
    #[arg(long, value_parser = domain)]
    domain: Option<String>,
    /// Name of the region. Default: eu1.
    #[arg(long, value_parser = region)]
    region: Option<String>,
    /// Account to create, unless it exists. Services belong to an account. Required without a
    /// terminal.
    #[arg(long)]
    account: Option<AccountId>,
    /// Configuration file to write. Default: gateway.toml; for root /etc/gw/gateway.toml.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Folder for keys, records and the request log. Default: gw-data beside the configuration; for
    /// root /var/lib/gw-gateway.
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Listener for callers and agents. Default: 0.0.0.0:8443, or 127.0.0.1:8443 for a domain below
    /// localhost; for root 0.0.0.0:443.
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// Listener of administration. Default: 127.0.0.1:9080.
    #[arg(long, value_name = "ADDRESS:PORT")]
    admin_listen: Option<SocketAddr>,
    /// PEM file of a certificate for REGION.DOMAIN and *.REGION.DOMAIN. Default: one of a
    /// development CA.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_certificate: Option<PathBuf>,
    /// PEM file of its key.
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_key: Option<PathBuf>,
    /// Let an ACME authority issue the certificate, with this mail address for its messages.
    /// Accepts the terms of service of the authority. The certificate is for REGION.DOMAIN; one for
    /// all names below it also needs DNS: see acme.challenge in the configuration.
    #[arg(long, value_name = "ADDRESS", conflicts_with = "tls_certificate")]
    acme_contact: Option<String>,
    /// Directory of the authority. Default: that of Let's Encrypt.
    #[arg(long, value_name = "URL", requires = "acme_contact")]
    acme_directory: Option<String>,
    /// Replace a configuration file, and a unit of systemd, that exist with other settings.
    #[arg(long)]
    force: bool,
    /// Do not start the service of systemd.
    #[arg(long)]
    no_start: bool,
    /// Go on as the gateway, in the foreground, without systemd.
    #[arg(long, conflicts_with = "no_start")]
    serve: bool,
}

impl InitArguments {
    /// Writes what is missing, and starts the gateway. `serve` runs a gateway in this process: it
    /// calls its second argument once the gateway accepts connections.
    pub(crate) fn run(
        self,
        serve: impl FnOnce(&Path, &dyn Fn(&Gateway) -> Result<(), Failure>) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let force = self.force;
        let no_start = self.no_start;
        let foreground = self.serve;
        let is_root = rustix::process::geteuid().is_root();
        let answers = {
            let stdin = io::stdin();
            let stdout = io::stdout();
            let is_terminal = stdin.is_terminal() && stdout.is_terminal();
            let mut dialogue = Dialogue {
                input: &mut stdin.lock(),
                out: &mut stdout.lock(),
            };
            Answers::collect(self, is_root, is_terminal.then_some(&mut dialogue))?
        };
        let systemd = if is_root && !foreground {
            Systemd::of_this_machine(&answers, force)?
        } else {
            None
        };

        let (config, written) = configuration::write(&answers, force)?;
        say(&format!("{}: {written}.", answers.config.display()))?;
        let say_next = |stage| say(&next_steps(&answers, &config, stage));
        if let Some(systemd) = systemd {
            systemd.install(&config)?;
            if no_start {
                add_account(&config, &answers, &systemd::user()?)?;
                return say_next(SetupStage::StoppedService);
            }
            systemd.start(&config, written.is_change())?;
            add_account_by_api(&answers)?;
            say_next(SetupStage::Service)?;
            return say(&first_request::send(&answers, &config, config.listen));
        }
        if is_root {
            systemd::prepare_data_dir(&config.data_dir)?;
        }
        let owner = FileOwner::of(&config.data_dir).map_err(at_data_dir(&config))?;
        add_account(&config, &answers, &owner)?;
        if !foreground {
            return say_next(SetupStage::Stopped);
        }
        if owner.is_lesser() {
            say(&rights(&config, &owner))?;
        }
        let started = |gateway: &Gateway| {
            say_next(SetupStage::Foreground {
                listen: gateway.address(),
                admin_listen: gateway.admin_address(),
            })?;
            say(&first_request::send(&answers, &config, gateway.address()))
        };
        // Files of root would stop the service of systemd, which runs as the owner.
        let served = owner.run_server(|| serve(&answers.config, &started));
        served
            .map_err(at_data_dir(&config))?
            .map_err(|failure| match failure {
                Failure::Usage(message) if owner.is_lesser() => {
                    Failure::Usage(format!("{message}\n{}", rights(&config, &owner)))
                }
                failure => failure,
            })
    }
}

/// Note for root about a data folder that belongs to another user.
fn rights(config: &Config, owner: &FileOwner) -> String {
    format!(
        "The gateway has the rights of user {}, which owns {} and must be able to read all files \
         of its configuration.",
        owner.user(),
        config.data_dir.display()
    )
}

/// Creates the account in the records, with the rights of `owner`; through the administration API
/// if a gateway has the records open.
fn add_account(config: &Config, answers: &Answers, owner: &FileOwner) -> Result<(), Failure> {
    let account = &answers.account;
    match owner
        .run(|| create_account(config, account))
        .map_err(at_data_dir(config))?
    {
        Ok(true) => say(&format!("Account {account}: created.")),
        Ok(false) => say(&format!("Account {account}: exists, unchanged.")),
        Err(ControlError::DataFolderInUse { .. }) => add_account_by_api(answers),
        Err(error) => Err(Failure::Run(format!(
            "cannot create the account {account}: {error}"
        ))),
    }
}

fn at_data_dir(config: &Config) -> impl Fn(io::Error) -> Failure {
    |error| Failure::Run(format!("{}: {error}", config.data_dir.display()))
}

fn add_account_by_api(answers: &Answers) -> Result<(), Failure> {
    let create = AccountCommand::Create {
        account: answers.account.clone(),
        capture_allowed: None,
        domains_max: None,
    };
    let created = create.run(&mut AdminConnection::of(&answers.config).open()?);
    created.map_err(|error| {
        Failure::Run(format!(
            "cannot create the account {}: {error}",
            answers.account
        ))
    })
}

/// Writes lines to standard output.
fn say(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    let written = writeln!(out, "{}", text.trim_end()).and_then(|()| out.flush());
    written.map_err(|error| Failure::Run(format!("standard output: {error}")))
}
