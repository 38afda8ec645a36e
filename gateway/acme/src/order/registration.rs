//! Registration of an account with a key that exists already. `instant-acme` makes the key of an
//! account with contacts or with an external binding itself, so that a process that is killed
//! before it stores the key would lose it. With a key that is stored before, the authority answers
//! a second registration with the account of the first one (RFC 8555 §7.3.1).

use aws_lc_rs::hmac;
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair};
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use bytes::Bytes;
use gw_shared::identity::secret::Secret;
use http::request::Builder;
use http::{Request, Response, header};
use instant_acme::Problem;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::{AcmeError, failure, refusal, short_name};
use crate::http::AuthorityClient;
use crate::limits::NONCES_MAX;
use crate::settings::{ExternalAccount, Settings};

const JOSE: &str = "application/jose+json";
const ACTION: &str = "registration of the account";

/// Members of a directory that a registration needs (RFC 8555 §7.1.1).
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Directory {
    new_nonce: String,
    new_account: String,
    #[serde(default)]
    meta: Meta,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Meta {
    terms_of_service: Option<String>,
    #[serde(default)]
    external_account_required: bool,
}

/// A new P-256 key, PKCS#8 in base64.
pub(crate) fn new_key() -> Result<Secret, AcmeError> {
    let key = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &SystemRandom::new())
        .map_err(|_| {
            AcmeError::refused(
                "key of the account: no random numbers; the kernel has to offer them",
            )
        })?;
    Ok(Secret::new(BASE64_URL_SAFE_NO_PAD.encode(key.as_ref())))
}

/// Registers the account with this key, and returns its URL. Returns the existing account if there
/// is one.
pub(crate) async fn register(
    client: &AuthorityClient,
    settings: &Settings,
    pkcs8: &[u8],
) -> Result<String, AcmeError> {
    let url = &settings.directory;
    let directory = directory(client, url).await?;
    check_terms(settings, &directory)?;
    let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, pkcs8).map_err(|_| {
        AcmeError::refused(
            "the stored key of the account is not a P-256 key; restore a backup of the data folder",
        )
    })?;
    let jwk = public_key(&key);
    let contacts: Vec<String> = settings
        .contacts
        .iter()
        .map(|address| format!("mailto:{address}"))
        .collect();
    let mut payload = json!({"contact": contacts, "termsOfServiceAgreed": settings.terms_accepted});
    if let Some(external) = &settings.external_account {
        payload["externalAccountBinding"] = binding(external, &jwk, &directory.new_account)?;
    }
    for _ in 0..NONCES_MAX {
        let nonce = nonce(client, url, &directory.new_nonce).await?;
        let protected =
            json!({"alg": "ES256", "jwk": jwk, "nonce": nonce, "url": directory.new_account});
        let body = signed(&protected, &payload, |text| {
            let signature = key.sign(&SystemRandom::new(), text).ok()?;
            Some(signature.as_ref().to_vec())
        })?;
        let request = Request::post(&directory.new_account)
            .header(header::CONTENT_TYPE, JOSE)
            .body(body.to_string().into_bytes())
            .map_err(|error| failure(ACTION, url, &error.into()))?;
        let answer = client
            .send(request)
            .await
            .map_err(|error| failure(ACTION, url, &error))?;
        if answer.status().is_success() {
            let account = answer.headers().get(header::LOCATION);
            let account = account.and_then(|value| value.to_str().ok());
            return account.map(str::to_owned).ok_or_else(|| {
                AcmeError::unreachable(format!(
                    "{ACTION} at {url}: the answer has no Location; \
                                                check that it is the directory of an ACME server"
                ))
            });
        }
        let problem: Problem = serde_json::from_slice(answer.body())
            .map_err(|error| failure(ACTION, url, &error.into()))?;
        if short_name(&problem) != "badNonce" {
            return Err(refusal(ACTION, url, &problem).with_retry_after(client.take_retry_after()));
        }
    }
    Err(AcmeError::unreachable(format!(
        "{ACTION} at {url}: the authority refused {NONCES_MAX} nonces; it is tried again"
    )))
}

fn check_terms(settings: &Settings, directory: &Directory) -> Result<(), AcmeError> {
    let url = &settings.directory;
    if let Some(terms) = &directory.meta.terms_of_service
        && !settings.terms_accepted
    {
        return Err(AcmeError::refused(format!(
            "{ACTION} at {url}: its terms of service are not accepted; read {terms}, then set \
             acme.terms_accepted = true"
        )));
    }
    if directory.meta.external_account_required && settings.external_account.is_none() {
        return Err(AcmeError::refused(format!(
            "{ACTION} at {url}: the authority requires an external account; set acme.eab_key_id \
             and acme.eab_key_file to what it gave you"
        )));
    }
    Ok(())
}

/// Sends a request without a body. `action` and `url`, which is that of the directory, are named by
/// its failure.
async fn ask(
    client: &AuthorityClient,
    request: Builder,
    action: &str,
    url: &str,
) -> Result<Response<Bytes>, AcmeError> {
    let request = request
        .body(Vec::new())
        .map_err(|error| failure(action, url, &error.into()))?;
    client
        .send(request)
        .await
        .map_err(|error| failure(action, url, &error))
}

async fn directory(client: &AuthorityClient, url: &str) -> Result<Directory, AcmeError> {
    let action = "the directory";
    let answer = ask(client, Request::get(url), action, url).await?;
    serde_json::from_slice(answer.body()).map_err(|error| {
        AcmeError::unreachable(format!(
            "{action} at {url}: not an ACME directory: {error}; check acme.directory"
        ))
    })
}

async fn nonce(client: &AuthorityClient, url: &str, new_nonce: &str) -> Result<String, AcmeError> {
    let action = "a nonce";
    let answer = ask(client, Request::head(new_nonce), action, url).await?;
    let nonce = answer.headers().get("Replay-Nonce");
    let nonce = nonce.and_then(|value| value.to_str().ok());
    nonce.map(str::to_owned).ok_or_else(|| {
        AcmeError::unreachable(format!(
            "{action} at {url}: the answer has none; it is tried again"
        ))
    })
}

/// The public key as a JSON Web Key (RFC 7518 §6.2).
fn public_key(key: &EcdsaKeyPair) -> Value {
    let point = key.public_key().as_ref();
    // The first byte says that the point is not compressed.
    let (x, y) = point[1..].split_at(32);
    json!({
        "crv": "P-256",
        "kty": "EC",
        "x": BASE64_URL_SAFE_NO_PAD.encode(x),
        "y": BASE64_URL_SAFE_NO_PAD.encode(y),
    })
}

/// The external account binding (RFC 8555 §7.3.4).
fn binding(external: &ExternalAccount, jwk: &Value, url: &str) -> Result<Value, AcmeError> {
    let key = external.key.reveal().trim().trim_end_matches('=');
    let key = BASE64_URL_SAFE_NO_PAD.decode(key).map_err(|error| {
        AcmeError::refused(format!(
            "acme.eab_key_file: not base64url: {error}; write the key as the authority gave it"
        ))
    })?;
    let key = hmac::Key::new(hmac::HMAC_SHA256, &key);
    let protected = json!({"alg": "HS256", "kid": external.key_id, "url": url});
    signed(&protected, jwk, |text| {
        Some(hmac::sign(&key, text).as_ref().to_vec())
    })
}

/// A signed message in flattened JSON (RFC 7515 §7.2.2).
fn signed(
    protected: &Value,
    payload: &Value,
    sign: impl FnOnce(&[u8]) -> Option<Vec<u8>>,
) -> Result<Value, AcmeError> {
    let protected = BASE64_URL_SAFE_NO_PAD.encode(protected.to_string());
    let payload = BASE64_URL_SAFE_NO_PAD.encode(payload.to_string());
    let signature = sign(format!("{protected}.{payload}").as_bytes()).ok_or_else(|| {
        AcmeError::refused(
            "key of the account: it cannot sign; restore a backup of the data folder",
        )
    })?;
    let signature = BASE64_URL_SAFE_NO_PAD.encode(signature);
    Ok(json!({"protected": protected, "payload": payload, "signature": signature}))
}
