//! The settings of a service. Each is declared once, in the list below: the objects of the API, the
//! options of `gw-gateway service`, the forms of the console and the table in
//! `docs/administration.md` come from that list or are checked against it. A new setting is a
//! member of [`ServiceSettings`] with its default, and an entry of the list.

mod declare;

use declare::Stored;
use gw_shared::id::{AccountId, ManagerName, ServiceId};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::service::affinity::Affinity;
use crate::service::rate::Rate;

/// A way for callers to authenticate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Mode {
    /// `X-Gw-Authorization: Bearer …` with a token from `/oauth/token`.
    Jwt,
    /// `X-Gw-Service-Key: gw_sk_…`
    ServiceKey,
}

/// Ways in which callers of a service may authenticate, as they are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Modes {
    /// Access tokens are accepted.
    pub jwt: bool,
    /// Service keys are accepted.
    pub service_key: bool,
}

impl Modes {
    /// Access tokens and service keys.
    pub const BOTH: Self = Self {
        jwt: true,
        service_key: true,
    };
}

/// An affinity, for the description of settings.
#[derive(ToSchema)]
#[schema(
    as = Affinity,
    value_type = String,
    pattern = "^(none|client|cookie(:[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64})?|\
        header:[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64})$"
)]
#[expect(dead_code, reason = "describes, is never made")]
struct AffinityText(String);

/// The settings of a service, as they are stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceSettings {
    /// Credentials that callers may use.
    pub modes: Modes,
    /// The service accepts requests.
    pub enabled: bool,
    /// Burst and refill of the bucket of the service.
    pub rate: Rate,
    /// The metadata of each request is logged.
    #[serde(default)]
    pub request_logging: bool,
    /// Request bodies are captured in the log.
    #[serde(default)]
    pub capture_request_body: bool,
    /// Response bodies are captured in the log.
    #[serde(default)]
    pub capture_response_body: bool,
    /// A safe request that may have reached a backend is tried once more on another agent.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub retries: bool,
    /// What requests for the same agent have in common.
    #[serde(default, skip_serializing_if = "Affinity::is_none")]
    pub affinity: Affinity,
    /// Time for which browsers use only https for the hostname after a response (RFC 6797); 0
    /// leaves that to the backend.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub hsts_max_age_seconds: u32,
}

impl ServiceSettings {
    /// Default bucket: a burst of 1000, 300 per minute.
    pub const RATE: Rate = Rate::new(1000, 300).unwrap();
    /// Longest `hsts_max_age_seconds`: two years.
    pub const HSTS_MAX_AGE_MOST: u32 = 2 * 365 * 24 * 60 * 60;
}

impl Default for ServiceSettings {
    fn default() -> Self {
        Self {
            modes: Modes::BOTH,
            enabled: true,
            rate: Self::RATE,
            request_logging: true,
            capture_request_body: false,
            capture_response_body: false,
            retries: true,
            affinity: Affinity::None,
            hsts_max_age_seconds: 0,
        }
    }
}

fn yes() -> bool {
    true
}

fn is_yes(value: &bool) -> bool {
    *value
}

fn is_zero(value: &u32) -> bool {
    *value == 0
}

declare::settings! {
    /// Credentials that callers may use.
    modes: Vec<Mode> {
        stored: modes,
        request: {
            /// At least one.
            #[schema(min_items = 1)]
        }
        kind: Kind::Modes,
        help: "A way for callers to authenticate; repeat for each.",
        form: Group::Callers, "Callers authenticate with", "",
    }
    /// Whether the service accepts requests.
    enabled: bool {
        stored: enabled,
        request: {
            /// Whether the service accepts requests.
        }
        kind: Kind::State,
        help: "Enable it.",
        form: Group::State, "Enabled", "A disabled service refuses every request.",
    }
    /// Requests at once before the rate limit takes hold.
    burst: u32 {
        stored: rate.burst,
        request: {
            /// Requests at once before the rate limit applies.
            #[schema(value_type = Option<u64>, minimum = 1, maximum = 4_294_967_295_u64)]
        }
        kind: Kind::Count { min: 1, max: u32::MAX },
        help: "Requests at once before the rate limit applies.",
        form: Group::Rate, "Burst", "Requests at once before the rate limit applies.",
    }
    /// Requests per minute after that.
    refill_per_minute: u32 {
        stored: rate.refill_per_minute,
        request: {
            /// Requests per minute after that.
            #[schema(value_type = Option<u64>, minimum = 1, maximum = 4_294_967_295_u64)]
        }
        kind: Kind::Count { min: 1, max: u32::MAX },
        help: "Requests per minute after that.",
        form: Group::Rate, "Refill per minute", "Requests per minute after the burst.",
    }
    /// Whether the metadata of each request is logged for seven days.
    request_logging: bool {
        stored: request_logging,
        request: {
            /// Whether the metadata of each request is logged for seven days.
        }
        kind: Kind::Switch,
        help: "Whether requests are logged.",
        form: Group::Log, "Request logging", "Log the metadata of each request for seven days.",
    }
    /// Whether up to 1 MB of each request body is kept in the log.
    capture_request_body: bool {
        stored: capture_request_body,
        request: {
            /// Whether up to 1 MB of each request body is kept in the log.
        }
        kind: Kind::Switch,
        help: "Whether request bodies are captured in the log.",
        form: Group::Log, "Capture request body", "Keep up to 1 MB of each body.",
    }
    /// Whether up to 1 MB of each response body is kept in the log.
    capture_response_body: bool {
        stored: capture_response_body,
        request: {
            /// Whether up to 1 MB of each response body is kept in the log.
        }
        kind: Kind::Switch,
        help: "Whether response bodies are captured in the log.",
        form: Group::Log, "Capture backend response", "Keep up to 1 MB of each body.",
    }
    /// Whether a GET, HEAD, OPTIONS or TRACE without a body that may have reached a backend is
    /// tried once more on another agent.
    retries: bool {
        stored: retries,
        request: {
            /// Whether a GET, HEAD, OPTIONS or TRACE without a body that may have reached a backend
            /// is tried once more on another agent.
        }
        kind: Kind::Switch,
        help: "Whether a GET, HEAD, OPTIONS or TRACE without a body that may have reached a \
               backend is tried once more on another agent.",
        form: Group::Agents, "Retries",
            "A GET, HEAD, OPTIONS or TRACE without a body that may have reached a backend is tried \
             once more on another agent.",
    }
    /// What requests for the same agent have in common: nothing, a cookie, a field of theirs, or
    /// the address of the client.
    #[schema(value_type = AffinityText)]
    affinity: String {
        stored: affinity,
        request: {
            /// What requests for the same agent have in common: none, cookie, cookie:NAME,
            /// header:NAME or client.
            #[schema(value_type = Option<AffinityText>)]
        }
        kind: Kind::Affinity,
        help: "What requests for the same agent have in common: none, cookie, cookie:NAME, \
               header:NAME or client.",
        form: Group::Agents, "Affinity",
            "Requests for the same agent have in common: none, cookie, cookie:NAME, header:NAME, \
             or client for the address of the client.",
    }
    /// Seconds for which browsers use only https for the hostname of the service after a response;
    /// 0 leaves that to the backend.
    hsts_max_age_seconds: u32 {
        stored: hsts_max_age_seconds,
        request: {
            /// Seconds for which browsers use only https for the hostname of the service after a
            /// response; 0 leaves that to the backend.
            #[schema(value_type = Option<u64>, minimum = 0, maximum = 63_072_000_u64)]
        }
        kind: Kind::Count { min: 0, max: ServiceSettings::HSTS_MAX_AGE_MOST },
        help: "Seconds for which browsers use only https for the hostname of the service after a \
               response; 0 leaves that to the backend.",
        form: Group::Callers, "HSTS max-age in seconds",
            "Browsers use only https for the hostname for this time after a response \
             (Strict-Transport-Security). 0 leaves that to the backend.",
    }
}

/// A value that a setting cannot have.
#[derive(Debug, PartialEq, Eq)]
pub struct InvalidSetting {
    /// Name of the setting in the API.
    pub field: &'static str,
    /// Values that the setting can have, as text.
    pub message: String,
}

/// What is said about a setting where it is set.
#[derive(Debug)]
pub struct Setting {
    /// Name in the API and in the form.
    pub name: &'static str,
    /// The name with hyphens: the option of the command.
    pub option: String,
    /// The name with spaces.
    pub words: String,
    /// Values that the setting can have, which decide its option and its field in the form.
    pub kind: Kind,
    /// Help of the option.
    pub help: &'static str,
    /// Part of the form that has the field.
    pub group: Group,
    /// Label of the field in the form.
    pub label: &'static str,
    /// Hint below the field in the form; empty without one.
    pub hint: &'static str,
}

/// Which values a setting has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A set of [`Mode`]s, of at least one.
    Modes,
    /// On or off, by two options of the command.
    State,
    /// On or off, by one option of the command with a value.
    Switch,
    /// A whole number.
    Count {
        /// Smallest number.
        min: u32,
        /// Largest number.
        max: u32,
    },
    /// The text of an [`Affinity`].
    Affinity,
}

/// A part of the form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// Whether the service is enabled.
    State,
    /// Authentication of callers.
    Callers,
    /// Rate limit.
    Rate,
    /// Choice of the agent for a request.
    Agents,
    /// Request log.
    Log,
}

impl Setting {
    /// The settings in one part of the form.
    pub fn in_group(group: &Group) -> impl Iterator<Item = &'static Self> + use<> {
        let group = *group;
        SETTINGS
            .iter()
            .filter(move |setting| setting.group == group)
    }
}

#[cfg(test)]
mod tests {
    use utoipa::PartialSchema;

    use super::*;

    #[test]
    fn the_schema_has_the_bounds_of_numbers() {
        let schemas = [ServiceChanges::schema(), NewService::schema()];
        for schema in schemas.map(|schema| serde_json::to_value(schema).unwrap()) {
            for setting in SETTINGS.iter() {
                let described = &schema["properties"][setting.name];
                let Kind::Count { min, max } = setting.kind else {
                    continue;
                };
                assert_eq!(
                    (&described["minimum"], &described["maximum"]),
                    (&min.into(), &max.into()),
                    "{}",
                    setting.name
                );
            }
        }
    }

    #[test]
    fn numbers_out_of_bounds_are_refused() {
        let refused = |min, max| Kind::Count { min, max }.check(9).unwrap_err();
        assert_eq!(refused(10, u32::MAX), "at least 10");
        assert_eq!(refused(1, 8), "must be a whole number from 1 to 8");
    }
}
