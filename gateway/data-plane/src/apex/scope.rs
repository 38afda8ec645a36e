//! OAuth scope of an access token: `account:{account_id} service:{service_id}`, each once, in any
//! order. Pairs with other keys are ignored and not granted (RFC 6749 §3.3).

use gw_shared::id::{AccountId, ServiceId};

/// The service that a token grants access to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Scope {
    pub(crate) account: AccountId,
    pub(crate) service: ServiceId,
    /// The requested scope had other pairs, which are not granted.
    pub(crate) ignored: bool,
}

/// Why a scope is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidScope {
    #[error("{0:?} is not of the form key:value, such as account:acme service:api")]
    NotAPair(String),
    #[error("{0} appears more than once")]
    Repeated(&'static str),
    #[error("{0}:<{0}_id> is missing; it is of the form account:acme service:api")]
    Missing(&'static str),
    #[error("{0}")]
    Id(#[from] gw_shared::id::InvalidId),
}

/// Longest part of a rejected scope that an error repeats.
const SHOWN: usize = 80;

impl Scope {
    /// Reads pairs separated by spaces (RFC 6749 §3.3).
    pub(crate) fn parse(text: &str) -> Result<Self, InvalidScope> {
        let mut account = None;
        let mut service = None;
        let mut ignored = false;
        for pair in text.split(' ').filter(|pair| !pair.is_empty()) {
            let split = pair.split_once(':').filter(|(key, _)| !key.is_empty());
            let (key, value) =
                split.ok_or_else(|| InvalidScope::NotAPair(pair.chars().take(SHOWN).collect()))?;
            match key {
                "account" if account.is_some() => return Err(InvalidScope::Repeated("account")),
                "service" if service.is_some() => return Err(InvalidScope::Repeated("service")),
                "account" => account = Some(AccountId::new(value)?),
                "service" => service = Some(ServiceId::new(value)?),
                _ => ignored = true,
            }
        }
        Ok(Self {
            account: account.ok_or(InvalidScope::Missing("account"))?,
            service: service.ok_or(InvalidScope::Missing("service"))?,
            ignored,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_orders_parse_to_one_scope() {
        let scope = Scope::parse("account:acme service:api").unwrap();
        assert_eq!(
            (scope.account.as_str(), scope.service.as_str()),
            ("acme", "api")
        );
        assert_eq!(Scope::parse(" service:api  account:acme ").unwrap(), scope);
        assert!(!scope.ignored);
    }

    #[test]
    fn pairs_with_other_keys_are_ignored() {
        for text in [
            "admin:yes account:acme service:api",
            "account:acme a:b:c service:api a: admin:yes admin:yes",
        ] {
            let scope = Scope::parse(text).unwrap();
            assert_eq!(
                (
                    scope.account.as_str(),
                    scope.service.as_str(),
                    scope.ignored
                ),
                ("acme", "api", true),
                "{text}"
            );
        }
    }

    #[test]
    fn errors_name_the_mistake() {
        let error = |text: &str| Scope::parse(text).unwrap_err().to_string();
        assert_eq!(
            error(""),
            "account:<account_id> is missing; it is of the form account:acme service:api"
        );
        assert_eq!(
            error("account:acme"),
            "service:<service_id> is missing; it is of the form account:acme service:api"
        );
        assert_eq!(
            error("service:api"),
            "account:<account_id> is missing; it is of the form account:acme service:api"
        );
        assert_eq!(
            error("account:acme service:api account:acme"),
            "account appears more than once"
        );
        assert_eq!(
            error("account:acme service:api service:b"),
            "service appears more than once"
        );
        assert_eq!(
            error("account service:api"),
            "\"account\" is not of the form key:value, such as account:acme service:api"
        );
        assert_eq!(
            error("account:acme service:api :yes"),
            "\":yes\" is not of the form key:value, such as account:acme service:api"
        );
        // Keys are case-sensitive.
        assert_eq!(
            error("Account:acme service:api"),
            "account:<account_id> is missing; it is of the form account:acme service:api"
        );
        assert_eq!(
            error("admin:yes account:acme service:api account:acme"),
            "account appears more than once"
        );
        assert!(error("account:ACME service:api").contains("is not an account id"));
        assert!(error("account:acme service:-").contains("is not a service id"));
        assert!(error("account:acme\tservice:api").contains("is not an account id"));
    }
}
