//! The scope of an access token: `account:{account_id} service:{service_id}`, each once, in any order.

use gw_shared::id::{AccountId, ServiceId};

/// The one service that a token is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Scope {
    pub(crate) account: AccountId,
    pub(crate) service: ServiceId,
}

/// What is wrong with a scope.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidScope {
    #[error("{0:?} is not of the form key:value")]
    NotAPair(String),
    #[error("{0:?} is not known; a scope is account:<account_id> and service:<service_id>")]
    UnknownKey(String),
    #[error("{0} is there more than once")]
    Repeated(&'static str),
    #[error("{0}:<{0}_id> is missing")]
    Missing(&'static str),
    #[error("{0}")]
    Id(#[from] gw_shared::id::InvalidId),
}

/// Longest piece of a bad scope that is shown to who sent it.
const SHOWN: usize = 80;

impl Scope {
    /// Reads pairs separated by spaces (RFC 6749 §3.3).
    pub(crate) fn parse(text: &str) -> Result<Self, InvalidScope> {
        let (mut account, mut service) = (None, None);
        let shown = |text: &str| text.chars().take(SHOWN).collect();
        for pair in text.split(' ').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once(':').ok_or_else(|| InvalidScope::NotAPair(shown(pair)))?;
            match key {
                "account" if account.is_some() => return Err(InvalidScope::Repeated("account")),
                "service" if service.is_some() => return Err(InvalidScope::Repeated("service")),
                "account" => account = Some(AccountId::new(value)?),
                "service" => service = Some(ServiceId::new(value)?),
                _ => return Err(InvalidScope::UnknownKey(shown(key))),
            }
        }
        Ok(Self {
            account: account.ok_or(InvalidScope::Missing("account"))?,
            service: service.ok_or(InvalidScope::Missing("service"))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_orders_are_one_scope() {
        let scope = Scope::parse("account:acme service:api").unwrap();
        assert_eq!((scope.account.as_str(), scope.service.as_str()), ("acme", "api"));
        assert_eq!(Scope::parse(" service:api  account:acme ").unwrap(), scope);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let error = |text: &str| Scope::parse(text).unwrap_err().to_string();
        assert_eq!(error(""), "account:<account_id> is missing");
        assert_eq!(error("account:acme"), "service:<service_id> is missing");
        assert_eq!(error("service:api"), "account:<account_id> is missing");
        assert_eq!(error("account:acme service:api account:acme"), "account is there more than once");
        assert_eq!(error("account:acme service:api service:b"), "service is there more than once");
        assert_eq!(error("account service:api"), "\"account\" is not of the form key:value");
        assert!(error("account:acme service:api admin:yes").starts_with("\"admin\" is not known"));
        assert!(error("account:ACME service:api").contains("is not an account id"));
        assert!(error("account:acme service:-").contains("is not a service id"));
        assert!(error("account:acme\tservice:api").contains("is not an account id"));
    }
}
