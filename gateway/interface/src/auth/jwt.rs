//! Access tokens: JSON Web Tokens of this region, signed with Ed25519 (RFC 7519, RFC 8037, RFC
//! 9068), created and verified according to RFC 8725.

use std::num::NonZeroUsize;
use std::rc::Rc;
use std::time::Duration;

use crate::limits;
use aws_lc_rs::digest;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use gw_base::clock::Timestamp;
use gw_base::error::Error;
use gw_shared::id::{AccountId, ClientId, ServiceId, SigningKeyId, random_base62};
use gw_store::{Directory, Service, SigningKey};
use http::HeaderValue;
use jsonwebtoken::{Algorithm, Validation};
use lru::LruCache;
use serde::{Deserialize, Serialize};

use super::service_key::KEY_PREFIX;
use super::{Checks, bearer};

/// `typ` of an access token (RFC 9068 §2.1), which distinguishes it from other kinds of tokens.
const TYPE: &str = "at+jwt";
/// In base62 characters: 131 bits.
const TOKEN_ID_LENGTH: usize = 22;

/// The claims of a token (RFC 9068 §2.2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claims {
    /// The base URL of the region.
    pub iss: String,
    /// The client that the token was issued to (RFC 7519 §4.1.2).
    pub sub: ClientId,
    /// The same client (RFC 8693 §4.3).
    pub client_id: ClientId,
    /// The URL of the service that the token is for, without a port.
    pub aud: String,
    /// Account and service that the token is for, as `account:… service:…` (RFC 8693 §4.2).
    pub scope: String,
    /// Time of issue, in seconds since the Unix epoch.
    pub iat: i64,
    /// Time from which the token is valid, in seconds since the Unix epoch.
    pub nbf: i64,
    /// Expiry, in seconds since the Unix epoch.
    pub exp: i64,
    /// Random id of the token.
    pub jti: String,
}

/// The header of tokens of this gateway. A token with `jku`, `jwk`, `x5u`, `crit` or any other
/// member is refused.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenHeader<'a> {
    alg: &'a str,
    typ: &'a str,
    kid: &'a str,
}

/// A token with a verified signature. Its key must still be published each time the token is used.
#[derive(Debug)]
struct Verified {
    claims: Claims,
    key: SigningKeyId,
}

/// Cache of the tokens that one worker has verified, by their SHA-256; the tokens themselves are
/// not stored.
///
/// Holds only the signature check and the claims, which never change. Expiry, audience, key and
/// credential are checked on every request.
pub struct VerifiedTokens(LruCache<[u8; digest::SHA256_OUTPUT_LEN], Rc<Verified>>);

impl Default for VerifiedTokens {
    fn default() -> Self {
        const CAPACITY: NonZeroUsize = NonZeroUsize::new(limits::VERIFIED_TOKENS).unwrap();
        Self(LruCache::new(CAPACITY))
    }
}

/// The error of a service key in `X-Gw-Authorization`.
const KEY: Error = Error::TokenInvalid("it is a service key; send it as X-Gw-Service-Key");

/// Verifies the value of `X-Gw-Authorization`; returns the client that the token was issued to.
pub(super) fn verify(
    checks: Checks<'_, impl FnOnce() -> Timestamp, impl FnOnce() -> Result<(), Error>>,
    tokens: &mut VerifiedTokens,
    value: &HeaderValue,
) -> Result<ClientId, Error> {
    let Checks {
        directory,
        issuer,
        service,
        now,
        may_verify,
    } = checks;
    let token = bearer(value)
        .filter(|token| !token.is_empty() && token.len() <= limits::TOKEN)
        .ok_or_else(|| match value.as_bytes() {
            key if key.starts_with(KEY_PREFIX.as_bytes()) => KEY,
            _ => Error::TokenInvalid("X-Gw-Authorization must be `Bearer` and a token"),
        })?;
    let mut fingerprint = [0; digest::SHA256_OUTPUT_LEN];
    fingerprint.copy_from_slice(digest::digest(&digest::SHA256, token.as_bytes()).as_ref());
    let verified = match tokens.0.get(&fingerprint) {
        Some(verified) if directory.signing_key(verified.key.as_str()).is_some() => {
            Rc::clone(verified)
        }
        _ => {
            let (claims, key) = verify_signature(directory, token, may_verify)?;
            let verified = Rc::new(Verified { claims, key });
            tokens.0.put(fingerprint, Rc::clone(&verified));
            verified
        }
    };
    check_claims(directory, &verified.claims, issuer, service, now())
}

fn verify_signature(
    directory: &Directory,
    token: &str,
    may_verify: impl FnOnce() -> Result<(), Error>,
) -> Result<(Claims, SigningKeyId), Error> {
    let malformed = || match token {
        key if key.starts_with(KEY_PREFIX) => KEY,
        _ => Error::TokenInvalid("not a JSON Web Token; request one at /oauth/token of the apex"),
    };
    let (header, _) = token.split_once('.').ok_or_else(malformed)?;
    let header = URL_SAFE_NO_PAD.decode(header).map_err(|_| malformed())?;
    let header: TokenHeader<'_> = serde_json::from_slice(&header).map_err(|_| malformed())?;
    if header.alg != "EdDSA" || header.typ != TYPE {
        return Err(Error::TokenInvalid(
            "not an access token signed with EdDSA; request one at /oauth/token of the apex",
        ));
    }
    let key = directory
        .signing_key(header.kid)
        .ok_or(Error::TokenInvalid(
            "signed by no key of this region; request a new one at its apex",
        ))?;
    may_verify()?;
    // The algorithm is that of the key, not that of the token (RFC 8725 §3.1). `check_claims`
    // checks the claims.
    let mut validation = Validation::new(Algorithm::EdDSA);
    validation.validate_exp = false;
    validation.validate_aud = false;
    validation.required_spec_claims.clear();
    let decoded = jsonwebtoken::decode::<Claims>(token, &key.public, &validation)
        .map_err(|_| Error::TokenForged)?;
    let claims = decoded.claims;
    // The gateway issues no longer ones: a token that is valid for years was made with a stolen
    // key.
    if claims.exp.saturating_sub(claims.iat.min(claims.nbf))
        > limits::TOKEN_LIFETIME_MAX.as_secs().cast_signed()
    {
        return Err(Error::TokenInvalid(
            "valid for longer than any token of this gateway",
        ));
    }
    Ok((claims, key.id.clone()))
}

/// Checks the claims that depend on the time and on the request.
fn check_claims(
    directory: &Directory,
    claims: &Claims,
    issuer: &str,
    service: &Service,
    now: Timestamp,
) -> Result<ClientId, Error> {
    if claims.iss != issuer {
        return Err(Error::TokenInvalid(
            "issued by another region; request one at the apex of this one",
        ));
    }
    if now.0 >= claims.exp {
        return Err(Error::TokenExpired("it has expired; request a new one"));
    }
    if now.0 < claims.nbf {
        return Err(Error::TokenExpired("it is not valid yet"));
    }
    if !service.is_audience(&claims.aud) {
        return Err(Error::TokenAudienceMismatch);
    }
    check_credential(directory, service, claims.client_id.as_str())
}

/// Checks that a credential still gives access to the service.
pub(super) fn check_credential(
    directory: &Directory,
    service: &Service,
    id: &str,
) -> Result<ClientId, Error> {
    match directory.credential(id) {
        Some((id, access)) if access.permits(service) => Ok(id.clone()),
        _ => Err(Error::CredentialRevoked),
    }
}

impl Claims {
    /// The claims of a token for `service` that is issued to `client` at `now`.
    pub fn new(
        issuer: &str,
        client: &ClientId,
        service: &Service,
        now: Timestamp,
        lifetime: Duration,
    ) -> Self {
        Self {
            iss: issuer.to_owned(),
            sub: client.clone(),
            client_id: client.clone(),
            aud: service.audience(),
            scope: scope(&service.account, &service.id),
            iat: now.0,
            nbf: now.0,
            exp: now.after(lifetime).0,
            jti: random_base62(TOKEN_ID_LENGTH),
        }
    }

    /// The token of these claims, signed with `key`.
    pub fn signed_by(&self, key: &SigningKey) -> Result<String, jsonwebtoken::errors::Error> {
        let mut header = jsonwebtoken::Header::new(Algorithm::EdDSA);
        header.typ = Some(TYPE.to_owned());
        header.kid = Some(key.id.to_string());
        jsonwebtoken::encode(&header, self, &key.private)
    }
}

fn scope(account: &AccountId, service: &ServiceId) -> String {
    format!("account:{account} service:{service}")
}
