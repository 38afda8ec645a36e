//! `gw-gateway account|service|…`: administration of a running gateway through its administration
//! API.

pub(crate) mod arguments;
#[cfg(feature = "demo")]
pub(crate) mod demo;
mod domain;

pub(crate) mod administration;
mod agent_program;
pub(crate) mod backup;
mod certificate;
mod client;
mod documents;
pub(crate) mod init;
mod interrupt;
pub(crate) mod region;
mod this_node;
mod usage;

use std::io;

use clap::{Args, Subcommand};
use gw_shared::command::Failure;
use gw_shared::id::{ClientId, KeyId, ServiceId};

use administration::account::AccountCommand;
use administration::agent::AgentCommand;
use administration::agent_ca::AgentCaCommand;
use administration::audit::AuditCommand;
use administration::caller_secret::CallerSecretCommand;
use administration::enrollment_token::EnrollmentTokenCommand;
use administration::request::RequestCommand;
use administration::service::ServiceCommand;
use administration::signing_key::SigningKeyCommand;
use administration::tunnel::TunnelCommand;
use certificate::CertificateCommand;
use client::connection::AdminConnection;
use client::output::{CommandError, Output};
use documents::{ApplyArguments, DiffArguments, ExportArguments};
use domain::DomainCommand;

/// One family of commands for each kind of record.
#[derive(Subcommand)]
pub(crate) enum Administration {
    /// Accounts: owners of all other records.
    Account(CommandFamily<AccountCommand>),
    /// Services: each has a hostname, a rate limit and agents.
    Service(CommandFamily<ServiceCommand>),
    /// Credentials: OAuth clients that get access tokens with their secret.
    Credential(CommandFamily<CallerSecretCommand<ClientId>>),
    /// Service keys: keys that callers send with each request.
    Key(CommandFamily<CallerSecretCommand<KeyId>>),
    /// Enrollment tokens: each lets one agent enroll, or several.
    EnrollmentToken(CommandFamily<EnrollmentTokenCommand>),
    /// Agents: connectors that run beside the backends.
    Agent(CommandFamily<AgentCommand>),
    /// The authority that issues the certificates of agents and nodes, and its replacement.
    AgentCa(CommandFamily<AgentCaCommand>),
    /// Tunnels: connections of agents, one for each service.
    Tunnel(CommandFamily<TunnelCommand>),
    /// Certificates of the region and of own domains.
    Certificate(CommandFamily<CertificateCommand>),
    /// Own domains: names of customers that lead to a service.
    Domain(CommandFamily<DomainCommand>),
    /// Signing keys: keys that sign access tokens.
    SigningKey(CommandFamily<SigningKeyCommand>),
    /// Requests: the request log of the last 7 days.
    Request(CommandFamily<RequestCommand>),
    /// Requests, refusals and bytes of each service by day, the newest day first.
    Usage {
        #[command(flatten)]
        arguments: usage::UsageArguments,
        #[command(flatten)]
        connection: AdminConnection,
    },
    /// Make the changes that documents declare: accounts, services, own domains, credentials, keys
    /// and settings of agents.
    Apply {
        #[command(flatten)]
        arguments: ApplyArguments,
        #[command(flatten)]
        connection: AdminConnection,
    },
    /// Print what `apply` would change. Exit code 0 if that is nothing, 1 if it is something, 2
    /// after an error.
    Diff {
        #[command(flatten)]
        arguments: DiffArguments,
        #[command(flatten)]
        connection: AdminConnection,
    },
    /// Print what the gateway has as a document for `apply`. It has no secrets.
    Export {
        #[command(flatten)]
        arguments: ExportArguments,
        #[command(flatten)]
        connection: AdminConnection,
    },
    /// The audit log of all changes, and the check of its chain.
    Audit(CommandFamily<AuditCommand>),
}

#[derive(Args)]
pub(crate) struct CommandFamily<C: Subcommand> {
    #[command(subcommand)]
    command: C,
    #[command(flatten)]
    connection: AdminConnection,
}

impl<C: Subcommand> CommandFamily<C> {
    fn run(
        self,
        run: impl FnOnce(C, &mut Output) -> Result<(), CommandError>,
    ) -> Result<(), Failure> {
        ended(run(self.command, &mut self.connection.open()?))
    }
}

impl Administration {
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self {
            Self::Account(family) => family.run(AccountCommand::run),
            Self::Service(family) => family.run(ServiceCommand::run),
            Self::Credential(family) => family.run(CallerSecretCommand::<ClientId>::run),
            Self::Key(family) => family.run(CallerSecretCommand::<KeyId>::run),
            Self::EnrollmentToken(family) => family.run(EnrollmentTokenCommand::run),
            Self::Agent(family) => family.run(AgentCommand::run),
            Self::AgentCa(family) => family.run(AgentCaCommand::run),
            Self::Tunnel(family) => family.run(TunnelCommand::run),
            Self::Certificate(family) => family.run(CertificateCommand::run),
            Self::Domain(family) => family.run(DomainCommand::run),
            Self::SigningKey(family) => family.run(SigningKeyCommand::run),
            Self::Request(family) => family.run(RequestCommand::run),
            Self::Audit(family) => family.run(AuditCommand::run),
            Self::Usage {
                arguments,
                connection,
            } => ended(arguments.run(&mut connection.open()?)),
            Self::Apply {
                arguments,
                connection,
            } => ended(arguments.run(&mut connection.open()?)),
            Self::Diff {
                arguments,
                connection,
            } => arguments.run(&mut connection.open()?),
            Self::Export {
                arguments,
                connection,
            } => ended(arguments.run(&mut connection.open()?)),
        }
    }
}

/// The end of a command, with the kind of failure that gives its exit code.
fn ended(done: Result<(), CommandError>) -> Result<(), Failure> {
    match done {
        // The reader of the output has closed the pipe.
        Err(CommandError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(
            error @ (CommandError::NothingToChange
            | CommandError::NoKeyMode
            | CommandError::Documents(_)),
        ) => Err(Failure::Usage(error.to_string())),
        done => done.map_err(|error| Failure::Run(error.to_string())),
    }
}

/// Whether a record is enabled.
#[derive(Args)]
pub(crate) struct Switch {
    /// Enable it.
    #[arg(long, conflicts_with = "disable")]
    enable: bool,
    /// Disable it: requests that use it are refused.
    #[arg(long)]
    disable: bool,
}

impl Switch {
    /// `None` leaves the setting unchanged.
    fn enabled(&self) -> Option<bool> {
        (self.enable || self.disable).then_some(self.enable)
    }
}

/// The ids as strings, as the API takes them.
fn texts(services: &[ServiceId]) -> Vec<String> {
    services.iter().map(ServiceId::to_string).collect()
}

/// A list that replaces the old one; an empty list leaves the old one unchanged.
fn new_list<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}
