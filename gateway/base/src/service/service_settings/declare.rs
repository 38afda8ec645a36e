//! The macro that turns the list of settings into the objects of the API and a table.

use std::num::NonZeroU32;

use super::{Kind, Mode, Modes};
use crate::service::affinity::{Affinity, InvalidAffinity};

/// The stored value of a setting, which the API takes and shows as `Api`.
pub(super) trait Stored {
    type Api;

    fn shown(&self) -> Self::Api;

    /// The error describes the values that `kind` allows.
    fn set(&mut self, given: &Self::Api, kind: Kind) -> Result<(), String>;
}

impl Stored for bool {
    type Api = Self;

    fn shown(&self) -> Self {
        *self
    }

    fn set(&mut self, given: &Self, _: Kind) -> Result<(), String> {
        *self = *given;
        Ok(())
    }
}

impl Stored for NonZeroU32 {
    type Api = u32;

    fn shown(&self) -> u32 {
        self.get()
    }

    fn set(&mut self, given: &u32, kind: Kind) -> Result<(), String> {
        let within = kind.check(*given)?;
        *self = Self::new(within).ok_or("at least 1")?;
        Ok(())
    }
}

impl Stored for u32 {
    type Api = Self;

    fn shown(&self) -> Self {
        *self
    }

    fn set(&mut self, given: &Self, kind: Kind) -> Result<(), String> {
        *self = kind.check(*given)?;
        Ok(())
    }
}

impl Stored for Modes {
    type Api = Vec<Mode>;

    fn shown(&self) -> Vec<Mode> {
        let modes = [(Mode::Jwt, self.jwt), (Mode::ServiceKey, self.service_key)];
        modes
            .into_iter()
            .filter_map(|(mode, on)| on.then_some(mode))
            .collect()
    }

    fn set(&mut self, given: &Vec<Mode>, _: Kind) -> Result<(), String> {
        if given.is_empty() {
            return Err("must contain at least one of \"jwt\" and \"service_key\"".to_owned());
        }
        *self = Self {
            jwt: given.contains(&Mode::Jwt),
            service_key: given.contains(&Mode::ServiceKey),
        };
        Ok(())
    }
}

impl Stored for Affinity {
    type Api = String;

    fn shown(&self) -> String {
        self.to_string()
    }

    fn set(&mut self, given: &String, _: Kind) -> Result<(), String> {
        *self = given
            .parse()
            .map_err(|error: InvalidAffinity| error.to_string())?;
        Ok(())
    }
}

impl Kind {
    /// Checks the bounds of a number.
    pub(super) fn check(self, number: u32) -> Result<u32, String> {
        match self {
            Self::Count { min, max } if !(min..=max).contains(&number) => Err(match max {
                u32::MAX => format!("at least {min}"),
                _ => format!("must be a whole number from {min} to {max}"),
            }),
            _ => Ok(number),
        }
    }
}

/// Declares the settings: `name: type in the API`, each with
///
/// - the member of [`ServiceSettings`](super::ServiceSettings) that holds it;
/// - attributes of the member in responses (above the name) and in requests;
/// - its kind, the help of its option, and the group, label and hint of its field in forms.
macro_rules! settings {
    ($(
        $(#[$shown:meta])*
        $name:ident: $api:ty {
            stored: $($place:ident).+,
            $(request: { $(#[$given:meta])* })?
            kind: $kind:expr,
            help: $help:literal,
            form: $group:expr, $label:literal, $hint:literal,
        }
    )*) => {
        /// The settings in the order of the API.
        pub static SETTINGS: std::sync::LazyLock<Vec<Setting>> = std::sync::LazyLock::new(|| {
            vec![$(Setting {
                name: stringify!($name),
                option: stringify!($name).replace('_', "-"),
                words: stringify!($name).replace('_', " "),
                kind: $kind,
                help: $help,
                group: $group,
                label: $label,
                hint: $hint,
            }),*]
        });

        /// What callers reach under one hostname.
        #[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
        #[schema(as = Service)]
        pub struct ServiceView {
            /// Id of the service, unique in its account.
            #[schema(value_type = String)]
            pub id: ServiceId,
            /// Account that the service belongs to.
            #[schema(value_type = String)]
            pub account: AccountId,
            /// `{account}--{id}.{region}.{domain}`
            pub hostname: String,
            $($(#[$shown])* pub $name: $api,)*
            /// What manages it by documents; absent if nothing does.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            #[schema(value_type = Option<String>)]
            pub managed_by: Option<ManagerName>,
            /// Time at which the service was created, in UTC.
            #[schema(format = DateTime)]
            pub created_at: String,
        }

        /// Settings that are left out get their defaults. The fields of [`ServiceChanges`] again,
        /// not flattened in: of two objects that both refuse unknown fields, a schema makes one
        /// that refuses everything.
        #[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
        #[serde(deny_unknown_fields)]
        pub struct NewService {
            /// a-z, 0-9 and inner hyphens; account and id together at most 61 characters.
            #[schema(pattern = "^[a-z0-9]([a-z0-9-]{0,56}[a-z0-9])?$")]
            pub id: String,
            $(
                $($(#[$given])*)?
                #[serde(default, skip_serializing_if = "Option::is_none")]
                pub $name: Option<$api>,
            )*
            /// Name of what manages it by documents; empty for none.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            #[schema(max_length = 60, pattern = "^([A-Za-z0-9][A-Za-z0-9._/-]*)?$")]
            pub managed_by: Option<String>,
        }

        /// Settings that are left out stay as they are.
        #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
        #[serde(deny_unknown_fields)]
        pub struct ServiceChanges {
            $(
                $($(#[$given])*)?
                #[serde(default, skip_serializing_if = "Option::is_none")]
                pub $name: Option<$api>,
            )*
            /// Name of what manages it by documents; empty for none.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            #[schema(max_length = 60, pattern = "^([A-Za-z0-9][A-Za-z0-9._/-]*)?$")]
            pub managed_by: Option<String>,
        }

        impl ServiceView {
            /// The view of a service with these `settings`. `created_at` is in the form of RFC
            /// 3339.
            pub fn new(
                id: ServiceId,
                account: AccountId,
                hostname: String,
                settings: &ServiceSettings,
                managed_by: Option<ManagerName>,
                created_at: String,
            ) -> Self {
                Self {
                    id,
                    account,
                    hostname,
                    $($name: settings.$($place).+.shown(),)*
                    managed_by,
                    created_at,
                }
            }
        }

        impl NewService {
            /// A new service with `settings`.
            pub fn new(id: String, settings: ServiceChanges) -> Self {
                Self {
                    id,
                    $($name: settings.$name,)*
                    managed_by: settings.managed_by,
                }
            }

            /// The settings that the request gives.
            pub fn settings(&self) -> ServiceChanges {
                ServiceChanges {
                    $($name: self.$name.clone(),)*
                    managed_by: self.managed_by.clone(),
                }
            }
        }

        impl ServiceChanges {
            /// A copy of `settings` with these changes.
            pub fn applied_to(
                &self,
                settings: &ServiceSettings,
            ) -> Result<ServiceSettings, InvalidSetting> {
                let mut changed = settings.clone();
                $(
                    if let Some(given) = &self.$name {
                        let field = stringify!($name);
                        changed
                            .$($place).+
                            .set(given, $kind)
                            .map_err(|message| InvalidSetting { field, message })?;
                    }
                )*
                Ok(changed)
            }
        }

        impl From<&ServiceSettings> for ServiceChanges {
            fn from(settings: &ServiceSettings) -> Self {
                Self {
                    $($name: Some(settings.$($place).+.shown()),)*
                    managed_by: None,
                }
            }
        }
    };
}

pub(super) use settings;
