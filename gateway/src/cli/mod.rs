//! `gw-gateway account|service|…`: administration of a running gateway, through the API on its admin listener.

pub(crate) mod arguments;
#[cfg(feature = "demo")]
pub(crate) mod demo;

mod account;
mod agent;
mod api;
mod audit;
mod connection;
mod enrollment_token;
mod grant;
mod output;
mod request;
mod service;
mod signing_key;
mod table;

use std::io;

use clap::{Args, Subcommand};
use gw_shared::id::ServiceId;

use crate::Failure;
use connection::Connection;
use output::CommandError;

/// One family of commands for each kind of thing.
#[derive(Subcommand)]
pub(crate) enum Administration {
    /// Accounts: whose everything else is.
    Account(Family<account::Command>),
    /// Services: what callers reach, each under its own hostname.
    Service(Family<service::Command>),
    /// Credentials: OAuth clients, which get access tokens with their secret.
    Credential(Family<grant::Command<grant::Credential>>),
    /// Service keys: what callers without OAuth send with each request.
    Key(Family<grant::Command<grant::ServiceKey>>),
    /// Enrollment tokens: each lets one agent enroll, once.
    EnrollmentToken(Family<enrollment_token::Command>),
    /// Agents: what runs beside the backends.
    Agent(Family<agent::Command>),
    /// Signing keys: what access tokens are signed with.
    SigningKey(Family<signing_key::Command>),
    /// Requests: what became of each, for 7 days.
    Request(Family<request::Command>),
    /// The audit log: who changed what, the newest first.
    Audit {
        #[command(flatten)]
        query: audit::Query,
        #[command(flatten)]
        connection: Connection,
    },
}

#[derive(Args)]
pub(crate) struct Family<C: Subcommand> {
    #[command(subcommand)]
    command: C,
    #[command(flatten)]
    connection: Connection,
}

impl Administration {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let done = match self {
            Self::Account(Family { command, connection }) => command.run(&mut connection.open()?),
            Self::Service(Family { command, connection }) => command.run(&mut connection.open()?),
            Self::Credential(Family { command, connection }) => command.run(&mut connection.open()?),
            Self::Key(Family { command, connection }) => command.run(&mut connection.open()?),
            Self::EnrollmentToken(Family { command, connection }) => command.run(&mut connection.open()?),
            Self::Agent(Family { command, connection }) => command.run(&mut connection.open()?),
            Self::SigningKey(Family { command, connection }) => command.run(&mut connection.open()?),
            Self::Request(Family { command, connection }) => command.run(&mut connection.open()?),
            Self::Audit { query, connection } => query.run(&mut connection.open()?),
        };
        match done {
            // Whoever read has read enough.
            Err(CommandError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            Err(error @ CommandError::NothingToChange) => Err(Failure::Usage(error.to_string())),
            done => done.map_err(|error| Failure::Run(error.to_string())),
        }
    }
}

/// Whether a thing may be used.
#[derive(Args)]
pub(crate) struct Switch {
    /// Let it be used.
    #[arg(long, conflicts_with = "disable")]
    enable: bool,
    /// Keep it, but refuse its use.
    #[arg(long)]
    disable: bool,
}

impl Switch {
    /// None: as it is.
    fn enabled(&self) -> Option<bool> {
        (self.enable || self.disable).then_some(self.enable)
    }
}

/// As the API takes them.
fn texts(services: &[ServiceId]) -> Vec<String> {
    services.iter().map(ServiceId::to_string).collect()
}

/// As the API takes a list that replaces the old one: without any, the old one stays.
fn new_list<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}
