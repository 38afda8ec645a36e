//! `gw-gateway service`

use clap::{Args, Subcommand, value_parser};
use gw_gateway::affinity::Affinity;
use gw_gateway::control::{Mode, NewService, ServiceChanges, ServiceView};
use gw_shared::id::{AccountId, ServiceId};

use super::output::{CommandError, Listed, Output, Shown, joined, word, yes_or_no};
use super::service_access::Access;
use super::{Switch, new_list};

#[derive(Subcommand)]
pub(crate) enum ServiceCommand {
    /// Create a service. Omitted settings get their defaults. --with-key and --with-agent also create what a first request
    /// needs, and print the commands to paste.
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

#[derive(Args)]
pub(crate) struct Settings {
    /// A way for callers to authenticate; repeat for each.
    #[arg(long = "mode", value_name = "MODE")]
    modes: Vec<Mode>,
    #[command(flatten)]
    switch: Switch,
    /// Requests at once before the rate limit applies.
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..))]
    burst: Option<u32>,
    /// Requests per minute after that.
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..))]
    refill_per_minute: Option<u32>,
    /// Whether requests are logged.
    #[arg(long, value_name = "true|false")]
    request_logging: Option<bool>,
    /// Whether request bodies are captured in the log.
    #[arg(long, value_name = "true|false")]
    capture_request_body: Option<bool>,
    /// Whether response bodies are captured in the log.
    #[arg(long, value_name = "true|false")]
    capture_response_body: Option<bool>,
    /// Whether a GET, HEAD, OPTIONS or TRACE without a body that may have reached a backend is tried once more on another
    /// agent.
    #[arg(long, value_name = "true|false")]
    retries: Option<bool>,
    /// What requests for the same agent have in common: none, cookie, cookie:NAME, header:NAME or client.
    #[arg(long, value_name = "AFFINITY")]
    affinity: Option<Affinity>,
}

impl From<Settings> for ServiceChanges {
    fn from(settings: Settings) -> Self {
        Self {
            modes: new_list(settings.modes),
            enabled: settings.switch.enabled(),
            burst: settings.burst,
            refill_per_minute: settings.refill_per_minute,
            request_logging: settings.request_logging,
            capture_request_body: settings.capture_request_body,
            capture_response_body: settings.capture_response_body,
            retries: settings.retries,
            affinity: settings.affinity.map(String::from),
        }
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
                let new = NewService::new(service.to_string(), settings.into());
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
            } => output
                .change::<ServiceView>(&path(&account, &service), &ServiceChanges::from(settings)),
            Self::Delete { account, service } => output.delete(&path(&account, &service)),
        }
    }
}

pub(crate) fn path(account: &AccountId, service: &ServiceId) -> String {
    format!("/accounts/{account}/services/{service}")
}

impl Shown for ServiceView {
    fn facts(&self) -> Vec<(&'static str, String)> {
        vec![
            ("service", self.id.to_string()),
            ("hostname", self.hostname.clone()),
            ("modes", joined(self.modes.iter().map(word))),
            ("enabled", yes_or_no(self.enabled)),
            ("burst", self.burst.to_string()),
            ("refill per minute", self.refill_per_minute.to_string()),
            ("request logging", yes_or_no(self.request_logging)),
            ("capture request body", yes_or_no(self.capture_request_body)),
            (
                "capture response body",
                yes_or_no(self.capture_response_body),
            ),
            ("retries", yes_or_no(self.retries)),
            ("affinity", self.affinity.to_string()),
            ("created", self.created_at.clone()),
        ]
    }
}

impl Listed for ServiceView {
    const PLURAL: &'static str = "services";
    const COLUMNS: usize = 7;
}
