//! Who is calling, and may they: decided before anything is taken from the service's bucket or opened on its tunnel.

mod service_key;

use std::sync::Arc;

use gw_shared::http::fields::{X_GW_AUTHORIZATION, X_GW_SERVICE_KEY};
use gw_shared::id::KeyId;
use http::header::{HeaderMap, HeaderName, HeaderValue};

pub use service_key::NewServiceKey;

use crate::error::Error;
use crate::store::{Directory, Service};

/// A request whose caller may call the service. Only [`authenticate`] makes one.
pub struct Authenticated {
    pub(crate) service: Arc<Service>,
    pub(crate) by: Principal,
    _proof: Proof,
}

struct Proof;

/// In whose name a request comes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Principal {
    ServiceKey(KeyId),
}

/// Checks the credentials in `headers` against `service`.
pub fn authenticate(
    directory: &Directory,
    service: &Arc<Service>,
    headers: &HeaderMap,
) -> Result<Authenticated, Error> {
    let token = single(headers, &X_GW_AUTHORIZATION)?;
    let key = single(headers, &X_GW_SERVICE_KEY)?;
    let by = match (token, key) {
        (None, None) => return Err(Error::AuthRequired),
        (Some(_), Some(_)) => return Err(Error::AuthAmbiguous),
        (Some(_), None) if !service.modes.jwt => return Err(Error::AuthModeNotAllowed("access tokens")),
        // A token is valid if a published key signed it. No key has been published.
        (Some(_), None) => return Err(Error::TokenInvalid("signed by no key of this region")),
        (None, Some(_)) if !service.modes.service_key => return Err(Error::AuthModeNotAllowed("service keys")),
        (None, Some(key)) => Principal::ServiceKey(service_key::verify(directory, service, key)?),
    };
    Ok(Authenticated { service: Arc::clone(service), by, _proof: Proof })
}

/// The value of a field that may come once. Empty counts as absent; repeated, as ambiguous.
fn single<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a HeaderValue>, Error> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (_, Some(_)) => Err(Error::AuthAmbiguous),
        (value, None) => Ok(value.filter(|value| !value.is_empty())),
    }
}

#[cfg(test)]
mod tests {
    use gw_shared::id::{AccountId, ServiceId};

    use super::*;
    use crate::hostname::Region;
    use crate::limit::Rate;
    use crate::store::{Modes, Records, ServiceRecord};

    const BOTH: Modes = Modes { jwt: true, service_key: true };

    /// A directory with service `acme--api` and a key for it; the key's full text.
    fn directory(modes: Modes, key_account: &str, allowed: &str, enabled: bool) -> (Directory, String) {
        let services = |id: &str| vec![ServiceId::new(id).unwrap()];
        let key = NewServiceKey::generate(AccountId::new(key_account).unwrap(), services(allowed));
        let text = key.text.reveal().to_owned();
        let mut record = key.record;
        record.enabled = enabled;
        let service = ServiceRecord {
            account: AccountId::new("acme").unwrap(),
            id: ServiceId::new("api").unwrap(),
            modes,
            enabled: true,
            rate: Rate::new(1, 1).unwrap(),
        };
        let records = Records { services: vec![service], service_keys: vec![record], ..Records::default() };
        (Directory::new(records, &Region::new("eu1", "example.com"), 1), text)
    }

    fn check(directory: &Directory, fields: &[(HeaderName, &str)]) -> Result<Principal, Error> {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(name, HeaderValue::from_str(value).unwrap());
        }
        let service = directory.service("acme--api").unwrap();
        authenticate(directory, service, &headers).map(|authenticated| authenticated.by)
    }

    #[test]
    fn the_right_key_opens_its_service() {
        let (directory, key) = directory(BOTH, "acme", "api", true);
        let Ok(Principal::ServiceKey(id)) = check(&directory, &[(X_GW_SERVICE_KEY, &key)]) else { panic!() };
        assert!(key.contains(id.as_str()));
        // An empty field is as good as none.
        assert!(check(&directory, &[(X_GW_SERVICE_KEY, &key), (X_GW_AUTHORIZATION, "")]).is_ok());
    }

    #[test]
    fn header_rules() {
        let (directory, key) = directory(BOTH, "acme", "api", true);
        assert_eq!(check(&directory, &[]), Err(Error::AuthRequired));
        assert_eq!(check(&directory, &[(X_GW_SERVICE_KEY, "")]), Err(Error::AuthRequired));
        let both = [(X_GW_SERVICE_KEY, key.as_str()), (X_GW_AUTHORIZATION, "Bearer x")];
        assert_eq!(check(&directory, &both), Err(Error::AuthAmbiguous));
        let twice = [(X_GW_SERVICE_KEY, key.as_str()), (X_GW_SERVICE_KEY, key.as_str())];
        assert_eq!(check(&directory, &twice), Err(Error::AuthAmbiguous));
        let token = check(&directory, &[(X_GW_AUTHORIZATION, "Bearer x")]);
        assert!(matches!(token, Err(Error::TokenInvalid(_))));
    }

    #[test]
    fn modes_are_kept_to() {
        let (keys_only, key) = directory(Modes { jwt: false, service_key: true }, "acme", "api", true);
        assert!(check(&keys_only, &[(X_GW_SERVICE_KEY, &key)]).is_ok());
        let token = check(&keys_only, &[(X_GW_AUTHORIZATION, "Bearer x")]);
        assert_eq!(token, Err(Error::AuthModeNotAllowed("access tokens")));
        let (tokens_only, key) = directory(Modes { jwt: true, service_key: false }, "acme", "api", true);
        let refused = check(&tokens_only, &[(X_GW_SERVICE_KEY, &key)]);
        assert_eq!(refused, Err(Error::AuthModeNotAllowed("service keys")));
    }

    #[test]
    fn wrong_keys_are_refused() {
        let (api, key) = directory(BOTH, "acme", "api", true);
        let wrong_secret = format!("{}x", &key[..key.len() - 1]);
        let (_, foreign) = directory(BOTH, "acme", "api", true);
        for bad in [wrong_secret.as_str(), &foreign, "gw_sk_", "gw_sk_.", "x", &key[1..], &key.replace('.', "")] {
            assert_eq!(check(&api, &[(X_GW_SERVICE_KEY, bad)]), Err(Error::ServiceKeyInvalid), "{bad}");
        }
        let (other_service, key) = directory(BOTH, "acme", "other", true);
        assert_eq!(check(&other_service, &[(X_GW_SERVICE_KEY, &key)]), Err(Error::ServiceKeyNotAllowed));
        let (other_account, key) = directory(BOTH, "evil", "api", true);
        assert_eq!(check(&other_account, &[(X_GW_SERVICE_KEY, &key)]), Err(Error::ServiceKeyNotAllowed));
        let (disabled, key) = directory(BOTH, "acme", "api", false);
        assert_eq!(check(&disabled, &[(X_GW_SERVICE_KEY, &key)]), Err(Error::ServiceKeyInvalid));
    }
}
