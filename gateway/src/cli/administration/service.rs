//! `gw-gateway service`

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, Subcommand, value_parser};
use gw_base::service::affinity::Affinity;
use gw_base::service::service_settings::{Kind, SETTINGS};
use gw_control_plane::control::{Mode, NewService, ServiceChanges, ServiceView};
use gw_shared::id::{AccountId, ServiceId};
use serde_json::{Map, Value, json};

use super::service_access::Access;
use crate::cli::Switch;
use crate::cli::client::output::{CommandError, Listed, Output, Shown, joined, or_dash, yes_or_no};

#[derive(Subcommand)]
pub(crate) enum ServiceCommand {
    /// Create a service. Omitted settings get their defaults. --with-key and --with-agent also
    /// create what a first request needs, and print the commands to paste.
    Create {
        account: AccountId,
        service: ServiceId,
        #[command(flatten)]
        settings: Settings,
        #[command(flatten)]
        access: Access,
    },
    /// List the services of an account.
    List { account: AccountId },
    /// Show a service.
    Show {
        account: AccountId,
        service: ServiceId,
    },
    /// Change a service. Omitted settings stay unchanged.
    Change {
        account: AccountId,
        service: ServiceId,
        #[command(flatten)]
        settings: Settings,
    },
    /// Delete a service, and remove it from the lists of credentials, keys and agents.
    Delete {
        account: AccountId,
        service: ServiceId,
    },
}

/// The settings that options give.
pub(crate) struct Settings(ServiceChanges);

impl Args for Settings {
    fn augment_args(command: Command) -> Command {
        SETTINGS.iter().fold(command, |command, setting| {
            let option = Arg::new(setting.name)
                .long(setting.option.as_str())
                .help(setting.help.trim_end_matches('.'));
            let option = match setting.kind {
                Kind::State => return Switch::augment_args(command),
                Kind::Modes => option
                    .long("mode")
                    .value_name("MODE")
                    .action(ArgAction::Append)
                    .value_parser(value_parser!(Mode)),
                Kind::Switch => option
                    .value_name("true|false")
                    .value_parser(value_parser!(bool)),
                Kind::Count { min, max } => option
                    .value_name("N")
                    .value_parser(value_parser!(u32).range(i64::from(min)..=i64::from(max))),
                Kind::Affinity => option
                    .value_name("AFFINITY")
                    .value_parser(value_parser!(Affinity)),
            };
            command.arg(option)
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Settings {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut given = Map::new();
        for setting in SETTINGS.iter() {
            let name = setting.name;
            let value = match setting.kind {
                Kind::State => Switch::from_arg_matches(matches)?
                    .enabled()
                    .map(Value::from),
                Kind::Modes => matches
                    .get_many::<Mode>(name)
                    .map(|modes| modes.map(|mode| json!(mode)).collect()),
                Kind::Switch => matches.get_one::<bool>(name).map(|is_on| json!(is_on)),
                Kind::Count { .. } => matches.get_one::<u32>(name).map(|number| json!(number)),
                Kind::Affinity => matches.get_one::<Affinity>(name).map(|it| json!(it)),
            };
            given.extend(value.map(|value| (name.to_owned(), value)));
        }
        serde_json::from_value(given.into())
            .map(Self)
            .map_err(|error| clap::Error::raw(ErrorKind::Format, error))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl ServiceCommand {
    pub(crate) fn run(self, output: &mut Output) -> Result<(), CommandError> {
        match self {
            Self::Create {
                account,
                service,
                settings,
                access,
            } => {
                let new = NewService::new(service.to_string(), settings.0);
                if access.is_wanted() {
                    return access.create(&account, &new, output);
                }
                output.create::<ServiceView>(&format!("/accounts/{account}/services"), &new)
            }
            Self::List { account } => {
                output.list::<ServiceView>(&format!("/accounts/{account}/services"), &[], None)
            }
            Self::Show { account, service } => {
                output.show::<ServiceView>(&path(&account, &service))
            }
            Self::Change {
                account,
                service,
                settings,
            } => output.change::<ServiceView>(&path(&account, &service), &settings.0),
            Self::Delete { account, service } => output.delete(&path(&account, &service)),
        }
    }
}

pub(crate) fn path(account: &AccountId, service: &ServiceId) -> String {
    format!("/accounts/{account}/services/{service}")
}

impl Shown for ServiceView {
    fn facts(&self) -> Vec<(&'static str, String)> {
        let service = json!(self);
        let settings = SETTINGS.iter().map(|setting| {
            let value = match &service[setting.name] {
                Value::Bool(is_on) => yes_or_no(*is_on),
                Value::Array(words) => joined(words.iter().filter_map(Value::as_str)),
                Value::String(text) => text.clone(),
                value => value.to_string(),
            };
            (setting.words.as_str(), value)
        });
        let id = ("service", self.id.to_string());
        let hostname = ("hostname", self.hostname.clone());
        let managed_by = ("managed by", or_dash(self.managed_by.as_ref()));
        let created = ("created", self.created_at.clone());
        [id, hostname, managed_by]
            .into_iter()
            .chain(settings)
            .chain([created])
            .collect()
    }
}

impl Listed for ServiceView {
    const PLURAL: &'static str = "services";
    const COLUMNS: usize = 8;
}
