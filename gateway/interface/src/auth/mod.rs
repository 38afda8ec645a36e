//! Authentication of callers, before a request takes from the service's bucket or opens a stream on
//! its tunnel.

pub mod enrollment_token;
pub mod jwt;
pub mod service_key;

use std::sync::Arc;
use std::time::Duration;

use gw_base::clock::Timestamp;
use gw_base::error::Error;
use gw_base::principal::Principal;
use gw_shared::http::Fields;
use gw_shared::http::fields::{X_GW_AUTHORIZATION, X_GW_SERVICE_KEY};
use gw_store::{Directory, Service};
use http::header::{self, HeaderName, HeaderValue};

pub use jwt::VerifiedTokens;

/// Proof that the caller of a request may call the service. Only [`authenticate`], `Self::by_node`
/// and `Self::administrator` create one. A request that has waited is checked
/// [`again`](Self::again).
pub struct Authenticated {
    /// The service that the caller may call.
    pub service: Arc<Service>,
    /// The originator of the request.
    pub by: Principal,
    /// Time that the request has waited at earlier owners of the service, which have admitted it:
    /// no bucket is charged again. `None` before it is admitted.
    pub waited: Option<Duration>,
    _proof: AuthProof,
}

struct AuthProof;

/// Access tokens, as errors name them.
pub const TOKENS: &str = "access tokens";
/// Service keys, as errors name them.
pub const KEYS: &str = "service keys";

impl Authenticated {
    /// Checks by this directory that a caller may call the service with this label, after another
    /// node of the region has authenticated the request: that node may not know yet that an
    /// administrator has revoked the access.
    pub fn by_node(directory: &Directory, label: &str, by: Principal) -> Result<Self, Error> {
        let service = directory.service(label).ok_or(Error::ServiceNotFound)?;
        if !service.settings.enabled {
            return Err(Error::ServiceDisabled);
        }
        match &by {
            Principal::Client(_) if !service.settings.modes.jwt => {
                return Err(Error::AuthModeNotAllowed(TOKENS));
            }
            Principal::Client(id) => drop(jwt::check_credential(directory, service, id.as_str())?),
            Principal::ServiceKey(_) if !service.settings.modes.service_key => {
                return Err(Error::AuthModeNotAllowed(KEYS));
            }
            Principal::ServiceKey(id) => drop(service_key::check(directory, service, id.as_str())?),
            Principal::Admin => {}
        }
        Ok(Self {
            service: Arc::clone(service),
            by,
            waited: None,
            _proof: AuthProof,
        })
    }

    /// Checks again by this directory, after a wait in which an administrator may have revoked the
    /// access.
    pub fn again(self, directory: &Directory) -> Result<Self, Error> {
        Ok(Self {
            waited: self.waited,
            ..Self::by_node(directory, &self.service.label, self.by)?
        })
    }

    /// Used for replays, which the admin listener has authenticated.
    pub fn administrator(service: &Arc<Service>) -> Self {
        Self {
            service: Arc::clone(service),
            by: Principal::Admin,
            waited: None,
            _proof: AuthProof,
        }
    }
}

/// The inputs of authentication besides the request.
pub struct Checks<'a, Now, MayVerify> {
    /// Services, keys and credentials at this moment.
    pub directory: &'a Directory,
    /// The base URL of the region, which must be the issuer of tokens.
    pub issuer: &'a str,
    /// The service that the request is for.
    pub service: &'a Arc<Service>,
    /// Called only where the time is needed.
    pub now: Now,
    /// Called before an unknown signature is verified, because that is expensive.
    pub may_verify: MayVerify,
}

/// The error of a request without a credential.
fn missing(headers: &Fields) -> Error {
    let is_key = |value: &HeaderValue| {
        let value = value.as_bytes();
        let value = value.strip_prefix(b"Bearer ").unwrap_or(value);
        value.starts_with(service_key::KEY_PREFIX.as_bytes())
    };
    match headers.get(header::AUTHORIZATION) {
        Some(value) if is_key(value) => Error::AuthMisplaced,
        _ => Error::AuthRequired,
    }
}

/// Authenticates the credentials in `headers`.
pub fn authenticate(
    checks: Checks<'_, impl FnOnce() -> Timestamp, impl FnOnce() -> Result<(), Error>>,
    tokens: &mut VerifiedTokens,
    headers: &Fields,
) -> Result<Authenticated, Error> {
    let service = checks.service;
    let token = single(headers, &X_GW_AUTHORIZATION)?;
    let key = single(headers, &X_GW_SERVICE_KEY)?;
    let by = match (token, key) {
        (None, None) => return Err(missing(headers)),
        (Some(_), Some(_)) => return Err(Error::AuthAmbiguous),
        (Some(_), None) if !service.settings.modes.jwt => {
            return Err(Error::AuthModeNotAllowed(TOKENS));
        }
        (Some(token), None) => Principal::Client(jwt::verify(checks, tokens, token)?),
        (None, Some(_)) if !service.settings.modes.service_key => {
            return Err(Error::AuthModeNotAllowed(KEYS));
        }
        (None, Some(key)) => Principal::ServiceKey(service_key::verify(
            checks.directory,
            service,
            key.as_bytes(),
        )?),
    };
    Ok(Authenticated {
        service: Arc::clone(service),
        by,
        waited: None,
        _proof: AuthProof,
    })
}

/// The token in a value of the `Bearer` scheme (RFC 6750 §2.1), whose name is case-insensitive (RFC
/// 9110 §11.1).
pub fn bearer(value: &HeaderValue) -> Option<&str> {
    let (scheme, token) = std::str::from_utf8(value.as_bytes())
        .ok()?
        .split_once(' ')?;
    scheme
        .eq_ignore_ascii_case("bearer")
        .then(|| token.trim_matches(' '))
}

/// The value of a field that may occur once. An empty field counts as absent; a repeated field is
/// ambiguous.
fn single<'a>(headers: &'a Fields, name: &HeaderName) -> Result<Option<&'a HeaderValue>, Error> {
    let mut values = headers.get_all(name);
    match (values.next(), values.next()) {
        (_, Some(_)) => Err(Error::AuthAmbiguous),
        (value, None) => Ok(value.filter(|value| !value.is_empty())),
    }
}

#[cfg(test)]
mod tests;
