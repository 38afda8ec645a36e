//! Service keys: `gw_sk_{keyId}.{secret}`.

use gw_base::error::Error;
use gw_shared::id::KeyId;
use gw_store::{Directory, Service};

/// Beginning of a service key.
pub(super) const KEY_PREFIX: &str = "gw_sk_";

/// Verifies the key that a caller sent. The id is public (it appears in logs and in the console);
/// the secret is compared in constant time.
pub(super) fn verify(
    directory: &Directory,
    service: &Service,
    value: &[u8],
) -> Result<KeyId, Error> {
    let (id, secret) = parse(value).ok_or(Error::ServiceKeyInvalid)?;
    let (id, access) = directory
        .service_key(id)
        .filter(|(_, access)| access.enabled)
        .ok_or(Error::ServiceKeyInvalid)?;
    if !access.secret.matches(secret) {
        return Err(Error::ServiceKeyInvalid);
    }
    if !access.permits(service) {
        return Err(Error::ServiceKeyNotAllowed);
    }
    Ok(id.clone())
}

/// Checks that a key whose secret another node has verified still gives access to the service.
pub(super) fn check(directory: &Directory, service: &Service, id: &str) -> Result<KeyId, Error> {
    match directory.service_key(id) {
        Some((id, access)) if access.permits(service) => Ok(id.clone()),
        Some((_, access)) if access.enabled => Err(Error::ServiceKeyNotAllowed),
        _ => Err(Error::ServiceKeyInvalid),
    }
}

/// The full text of a service key.
pub fn text(id: &KeyId, secret: &str) -> String {
    format!("{KEY_PREFIX}{id}.{secret}")
}

/// Splits the text of a service key into id and secret.
pub fn parse(value: &[u8]) -> Option<(&str, &str)> {
    std::str::from_utf8(value)
        .ok()?
        .strip_prefix(KEY_PREFIX)?
        .split_once('.')
}
