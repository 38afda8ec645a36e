//! Objects that documents declare: their kinds, and the keys and values that each kind has. The
//! types of the API say which settings exist, so a new one needs nothing here.

use std::collections::BTreeSet;
use std::fmt;

use gw_base::service::service_settings::ServiceSettings;
use gw_control_plane::control::{
    AccountChanges, AgentChanges, CallerSecretChanges, ControlError, NewAccount, NewCallerSecret,
    NewDomain, NewService, ServiceChanges, checked_name,
};
use gw_shared::id::{AccountId, AgentId, DomainName, ManagerName, ServiceId, tenant_label};
use gw_shared::identity::enrollment::SERVICES_MAX;
use serde::de::value::Error as NoValue;
use serde::de::{DeserializeOwned, Error as _, Visitor};
use serde::{Deserializer, forward_to_deserialize_any};
use serde_json::{Map, Value, json};

/// Key of the label that says what manages an object.
pub(super) const MANAGED_BY: &str = "managed_by";
/// Key of the service that a domain leads to.
pub(super) const SERVICE: &str = "service";

/// A kind of object, in the order of creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ObjectKind {
    Account,
    Service,
    Domain,
    Credential,
    Key,
    Agent,
}

/// What names an object on both sides.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ObjectId {
    pub(super) kind: ObjectKind,
    pub(super) account: String,
    /// Id of an account or service, name of a domain, credential or key, name or id of an agent.
    pub(super) name: String,
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = self.kind.table();
        match self.kind {
            ObjectKind::Account => write!(f, "{table} {}", self.account),
            _ => write!(f, "{table} {}/{}", self.account, self.name),
        }
    }
}

impl ObjectId {
    pub(super) fn account(account: &str) -> Self {
        Self {
            kind: ObjectKind::Account,
            account: account.to_owned(),
            name: account.to_owned(),
        }
    }

    pub(super) fn service(account: &str, service: &str) -> Self {
        Self {
            kind: ObjectKind::Service,
            account: account.to_owned(),
            name: service.to_owned(),
        }
    }
}

impl ObjectKind {
    pub(super) const ALL: [Self; 6] = [
        Self::Account,
        Self::Service,
        Self::Domain,
        Self::Credential,
        Self::Key,
        Self::Agent,
    ];

    /// Name of its tables in documents.
    pub(super) fn table(self) -> &'static str {
        match self {
            Self::Account => "account",
            Self::Service => "service",
            Self::Domain => "domain",
            Self::Credential => "credential",
            Self::Key => "key",
            Self::Agent => "agent",
        }
    }

    /// Path of the collection in the API.
    pub(super) fn collection(self, account: &str) -> String {
        let name = match self {
            Self::Account => return "/accounts".to_owned(),
            Self::Service => "services",
            Self::Domain => "domains",
            Self::Credential => "credentials",
            Self::Key => "service-keys",
            Self::Agent => "agents",
        };
        format!("/accounts/{account}/{name}")
    }

    /// Member of a view that is the last part of its path.
    pub(super) fn id_member(self) -> &'static str {
        match self {
            Self::Account | Self::Service => "id",
            Self::Domain => "name",
            Self::Credential => "client_id",
            Self::Key => "key_id",
            Self::Agent => "agent_id",
        }
    }

    /// Keys that name an object, besides its account.
    pub(super) fn name_keys(self) -> &'static [&'static str] {
        match self {
            Self::Account | Self::Service => &["id"],
            Self::Domain | Self::Credential | Self::Key => &["name"],
            Self::Agent => &["id", "name"],
        }
    }

    /// Keys of its settings, in the order of the API.
    pub(super) fn settings(self) -> &'static [&'static str] {
        match self {
            Self::Account => members::<AccountChanges>(),
            Self::Service => members::<ServiceChanges>(),
            Self::Domain => &[SERVICE, MANAGED_BY],
            Self::Credential | Self::Key => members::<CallerSecretChanges>(),
            Self::Agent => members::<AgentChanges>(),
        }
    }

    /// All keys of its tables.
    pub(super) fn keys(self) -> impl Iterator<Item = &'static str> {
        let account = (self != Self::Account).then_some("account");
        let names = self.name_keys().iter().copied();
        let settings = self.settings().iter().copied();
        let others = settings.filter(move |key| !self.name_keys().contains(key));
        account.into_iter().chain(names).chain(others)
    }

    /// Whether it has a secret, which is shown when the object is created.
    pub(super) fn has_secret(self) -> bool {
        matches!(self, Self::Credential | Self::Key)
    }

    /// Whether documents can create it, and label it. Agents exist by their enrollment.
    pub(super) fn is_created(self) -> bool {
        self != Self::Agent
    }

    /// Path of the request that creates an object with the members of `body`. Takes the members out
    /// that the path has.
    pub(super) fn creation(
        self,
        account: &str,
        body: &mut Map<String, Value>,
    ) -> Result<String, String> {
        if self != Self::Domain {
            return Ok(self.collection(account));
        }
        match body.remove(SERVICE) {
            Some(Value::String(service)) => {
                Ok(format!("/accounts/{account}/services/{service}/domains"))
            }
            _ => Err(format!("missing field `{SERVICE}`")),
        }
    }

    /// Setting that is a service of the account, or a list of them.
    pub(super) fn services_key(self) -> Option<&'static str> {
        match self {
            Self::Domain => Some(SERVICE),
            _ => self.service_list(),
        }
    }

    /// Setting that is a list of services of the account.
    fn service_list(self) -> Option<&'static str> {
        match self {
            Self::Account | Self::Service | Self::Domain => None,
            Self::Credential | Self::Key => Some("allowed_services"),
            Self::Agent => Some("services"),
        }
    }

    /// The value of a setting as the API gives it back. The error says which values it can have.
    pub(super) fn checked(self, key: &str, value: Value) -> Result<Value, String> {
        if key == MANAGED_BY {
            let name: ManagerName = read(value)?;
            return Ok(json!(name));
        }
        let given = json!({ key: &value });
        let mut checked = match self {
            Self::Account => json!(read::<AccountChanges>(given)?),
            Self::Service => {
                let settings = read::<ServiceChanges>(given)?
                    .applied_to(&ServiceSettings::default())
                    .map_err(|invalid| invalid.message)?;
                json!(ServiceChanges::from(&settings))
            }
            Self::Domain => return Ok(json!(read::<ServiceId>(value)?)),
            Self::Credential | Self::Key => json!(read::<CallerSecretChanges>(given)?),
            Self::Agent => json!(read::<AgentChanges>(given)?),
        };
        let value = checked[key].take();
        match value {
            Value::String(name) if key == "name" => name_of(&name).map(Value::from),
            value if self.service_list() == Some(key) => services_of(value),
            value => Ok(value),
        }
    }

    /// Checks the keys that name an object.
    pub(super) fn checked_name(
        self,
        account: &str,
        key: &str,
        name: &str,
    ) -> Result<String, String> {
        match (self, key) {
            (Self::Account, _) => text_of(AccountId::new(name)),
            (Self::Service, _) => {
                let id = ServiceId::new(name).map_err(|error| error.to_string())?;
                let account = AccountId::new(account).map_err(|error| error.to_string())?;
                match tenant_label(&account, &id) {
                    Some(_) => Ok(id.to_string()),
                    None => Err(format!(
                        "{account}--{id} is longer than the 63 characters that DNS allows in a \
                         label"
                    )),
                }
            }
            (Self::Domain, _) => text_of(DomainName::new(name)),
            (Self::Agent, "id") => text_of(AgentId::new(name)),
            (Self::Credential | Self::Key | Self::Agent, _) => name_of(name),
        }
    }

    /// Whether the members suffice to create an object.
    pub(super) fn check_new(self, body: &Map<String, Value>) -> Result<(), String> {
        let body = Value::Object(body.clone());
        match self {
            Self::Account => read::<NewAccount>(body).map(drop),
            Self::Service => read::<NewService>(body).map(drop),
            Self::Domain => read::<NewDomain>(body).map(drop),
            Self::Credential | Self::Key => read::<NewCallerSecret>(body).map(drop),
            Self::Agent => Ok(()),
        }
    }
}

fn read<T: DeserializeOwned>(value: Value) -> Result<T, String> {
    // Names of types mean nothing to the author of a document.
    let plain = |error: String| error.replace("expected u32", "expected a whole number");
    serde_json::from_value(value).map_err(|error| plain(error.to_string()))
}

fn text_of<T: fmt::Display, E: fmt::Display>(id: Result<T, E>) -> Result<String, String> {
    id.map(|id| id.to_string())
        .map_err(|error| error.to_string())
}

fn name_of(name: &str) -> Result<String, String> {
    checked_name(name).map_err(|error| match error {
        ControlError::Invalid { message, .. } => message,
        error => error.to_string(),
    })
}

/// A list of services, in the order of the API and each once.
fn services_of(list: Value) -> Result<Value, String> {
    let list: BTreeSet<ServiceId> = read(list)?;
    if list.len() > SERVICES_MAX {
        return Err(format!("must have at most {SERVICES_MAX} services"));
    }
    Ok(json!(list))
}

/// Names of the members of a type.
fn members<T: DeserializeOwned>() -> &'static [&'static str] {
    let mut names = Members(&[]);
    // Ends with the names and without a value.
    let _ = T::deserialize(&mut names);
    names.0
}

/// Takes the names of members from the code that serde derives.
struct Members(&'static [&'static str]);

impl<'de> Deserializer<'de> for &mut Members {
    type Error = NoValue;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, NoValue> {
        Err(NoValue::custom("names of members have no value"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        names: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, NoValue> {
        self.0 = names;
        self.deserialize_any(visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use gw_base::service::service_settings::SETTINGS;

    use super::*;

    #[test]
    fn every_setting_of_a_service_is_a_key() {
        let keys: Vec<&str> = ObjectKind::Service.keys().collect();
        let mut expected = vec!["account", "id"];
        expected.extend(SETTINGS.iter().map(|setting| setting.name));
        expected.push(MANAGED_BY);
        assert_eq!(keys, expected);
        for (kind, expected) in [
            (
                ObjectKind::Account,
                "id capture_allowed domains_max managed_by",
            ),
            (
                ObjectKind::Key,
                "account name allowed_services enabled managed_by",
            ),
            (ObjectKind::Domain, "account name service managed_by"),
            (ObjectKind::Agent, "account id name services standby"),
        ] {
            let keys: Vec<&str> = kind.keys().collect();
            assert_eq!(keys.join(" "), expected);
        }
    }

    #[test]
    fn values_are_as_the_api_gives_them_back() {
        for (kind, key, given, expected) in [
            (
                ObjectKind::Service,
                "affinity",
                json!("header:X-Session"),
                json!("header:x-session"),
            ),
            (
                ObjectKind::Service,
                "modes",
                json!(["service_key", "jwt", "jwt"]),
                json!(["jwt", "service_key"]),
            ),
            (
                ObjectKind::Key,
                "allowed_services",
                json!(["b", "a", "b"]),
                json!(["a", "b"]),
            ),
            (ObjectKind::Agent, "name", json!(" edge 1"), json!("edge 1")),
        ] {
            assert_eq!(kind.checked(key, given), Ok(expected));
        }
        for (kind, key, given, message) in [
            (ObjectKind::Service, "burst", json!(0), "at least 1"),
            (
                ObjectKind::Service,
                "burst",
                json!("9"),
                "expected a whole number",
            ),
            (ObjectKind::Service, "modes", json!(["password"]), "jwt"),
            (
                ObjectKind::Account,
                "domains_max",
                json!(10_001),
                "from 0 to 10000",
            ),
            (
                ObjectKind::Account,
                MANAGED_BY,
                json!("a b"),
                "60 characters",
            ),
            (ObjectKind::Key, "allowed_services", json!(["A"]), "a-z"),
            (ObjectKind::Key, "name", json!("\u{202e}"), "U+202E"),
            (ObjectKind::Domain, SERVICE, json!("A"), "a-z"),
        ] {
            let error = kind.checked(key, given).unwrap_err();
            assert!(error.contains(message), "{key}: {error}");
        }
    }
}
