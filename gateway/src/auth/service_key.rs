//! Service keys: `gw_sk_{keyId}.{secret}`.

use gw_shared::id::{AccountId, KeyId, ServiceId, random_base62};
use gw_shared::secret::{Secret, SecretHash};
use http::HeaderValue;

use crate::error::Error;
use crate::store::{Directory, Service, ServiceKeyRecord};

const PREFIX: &str = "gw_sk_";
/// 43 of base62 hold 256 bits.
const SECRET_LENGTH: usize = 43;

/// Verifies the key that a caller sent. The id is public (it is in logs and in the console); the secret is compared in
/// constant time.
pub(super) fn verify(directory: &Directory, service: &Service, value: &HeaderValue) -> Result<KeyId, Error> {
    let text = value.to_str().map_err(|_| Error::ServiceKeyInvalid)?;
    let (id, secret) =
        text.strip_prefix(PREFIX).and_then(|rest| rest.split_once('.')).ok_or(Error::ServiceKeyInvalid)?;
    let key = directory.service_key(id).filter(|key| key.enabled).ok_or(Error::ServiceKeyInvalid)?;
    if !key.secret.matches(secret) {
        return Err(Error::ServiceKeyInvalid);
    }
    if key.account != service.account || !key.allowed_services.contains(&service.id) {
        return Err(Error::ServiceKeyNotAllowed);
    }
    Ok(key.id.clone())
}

/// A key that has just been made: the only time its text exists on our side.
pub struct NewServiceKey {
    /// `gw_sk_{keyId}.{secret}`, for the one reply that shows it.
    pub text: Secret,
    pub record: ServiceKeyRecord,
}

impl NewServiceKey {
    pub fn generate(account: AccountId, allowed_services: Vec<ServiceId>) -> Self {
        let id = KeyId::random();
        let secret = Secret::new(random_base62(SECRET_LENGTH));
        Self {
            text: Secret::new(format!("{PREFIX}{id}.{}", secret.reveal())),
            record: ServiceKeyRecord {
                id,
                account,
                secret: SecretHash::of(secret.reveal()),
                allowed_services,
                enabled: true,
            },
        }
    }
}
