//! Credentials of callers: service keys and access tokens.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use ::http::header::{HeaderName, HeaderValue};
use gw_base::error::Error;
use gw_base::principal::Principal;
use gw_base::service::hostname::{Region, tenant_label};
use gw_base::service::service_settings::ServiceSettings;
use gw_interface::auth::enrollment_token::parse_token;
use gw_interface::auth::jwt::Claims;
use gw_interface::auth::{self, Checks, VerifiedTokens, service_key as key_format};
use gw_shared::http::Fields;
use gw_shared::http::fields::{X_GW_AUTHORIZATION, X_GW_SERVICE_KEY};
use gw_shared::id::{ClientId, KeyId, ServiceId};
use gw_shared::identity::secret::SecretHash;
use gw_store::{
    CallerSecretRecord, Directory, Records, SecretAccess, Service, ServiceRecord, SigningKey,
    SigningKeyRecord, StoredRecord,
};

use super::{NOW, account, key_pair, region};

/// A value of `X-Gw-Service-Key`, or the text of an enrollment token.
pub fn service_key(data: &[u8]) {
    let key = key_format::parse(data);
    if let Some((id, secret)) = key {
        assert_eq!(format!("gw_sk_{id}.{secret}").as_bytes(), data);
        assert!(!id.contains('.'));
        if let Ok(id) = KeyId::new(id) {
            assert_eq!(key_format::text(&id, secret).as_bytes(), data);
        }
    }
    if let Some((id, secret)) = std::str::from_utf8(data).ok().and_then(parse_token) {
        assert_eq!(format!("gw_et_{id}.{secret}").as_bytes(), data);
        assert!(
            key.is_none(),
            "a text is either a service key or an enrollment token"
        );
    }

    let Some(outcome) = authenticate(X_GW_SERVICE_KEY, data) else {
        return;
    };
    let expected = match data {
        b"" => Err(Error::AuthRequired),
        _ if data == format!("gw_sk_{KEY_ID}.{KEY_SECRET}").as_bytes() => Ok(
            Principal::ServiceKey(KeyId::new(KEY_ID).expect("a key's id")),
        ),
        _ => Err(Error::ServiceKeyInvalid),
    };
    assert_eq!(outcome, expected);
}

/// A value of `X-Gw-Authorization`.
pub fn access_token(data: &[u8]) {
    let Some(outcome) = authenticate(X_GW_AUTHORIZATION, data) else {
        return;
    };
    // The second time, the token may come from the cache.
    assert_eq!(
        authenticate(X_GW_AUTHORIZATION, data).as_ref(),
        Some(&outcome)
    );
    let sent = std::str::from_utf8(data)
        .ok()
        .and_then(|value| value.split_once(' '));
    let minted = sent
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
        .and_then(|(_, token)| {
            CALLERS
                .tokens
                .values()
                .find(|minted| minted.text == token.trim_matches(' '))
        });
    match minted {
        Some(minted) => assert_eq!(outcome, minted.outcome),
        None if data.is_empty() => assert_eq!(outcome, Err(Error::AuthRequired)),
        // Claims of a token with an invalid signature do not change the error.
        None => assert!(
            matches!(outcome, Err(Error::TokenInvalid(_) | Error::TokenForged)),
            "{outcome:?}"
        ),
    }
}

/// Signed tokens that [`access_token`] expects an outcome of, as values of the field, with the name
/// of their property.
pub fn access_tokens() -> impl Iterator<Item = (&'static str, String)> {
    CALLERS
        .tokens
        .iter()
        .map(|(name, token)| (*name, format!("Bearer {}", token.text)))
}

/// The outcome of authenticating a request with one field; `None` if the value is not a valid field
/// value.
fn authenticate(name: HeaderName, value: &[u8]) -> Option<Result<Principal, Error>> {
    thread_local! {
        static VERIFIED: RefCell<VerifiedTokens> = RefCell::default();
    }
    let headers = Fields::from_iter([(name, HeaderValue::from_bytes(value).ok()?)]);
    let Callers {
        directory,
        service,
        issuer,
        ..
    } = &*CALLERS;
    let checks = Checks {
        directory,
        issuer,
        service,
        now: || NOW,
        may_verify: || Ok(()),
    };
    let outcome =
        VERIFIED.with_borrow_mut(|verified| auth::authenticate(checks, verified, &headers));
    Some(outcome.map(|authenticated| authenticated.by))
}

/// Credentials for the service `acme--api`, and a token for every outcome.
struct Callers {
    directory: Directory,
    service: Arc<Service>,
    issuer: String,
    tokens: BTreeMap<&'static str, Minted>,
}

struct Minted {
    text: String,
    outcome: Result<Principal, Error>,
}

const KEY_ID: &str = "0123456789abcdef";
const KEY_SECRET: &str = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefg";

static CALLERS: LazyLock<Callers> = LazyLock::new(|| {
    let mut records = Records::default();
    for id in ["api", "other"] {
        records.put(StoredRecord::Service(ServiceRecord {
            account: account(),
            id: service_id(id),
            settings: ServiceSettings::default(),
            created_at: NOW,
            created_ms: None,
            managed_by: None,
            later: Default::default(),
        }));
    }
    let access = |secret: &str, enabled| SecretAccess {
        account: account(),
        name: None,
        secret: SecretHash::of(secret),
        allowed_services: BTreeSet::from(["api", "other"].map(service_id)),
        enabled,
        created_at: NOW,
    };
    let client = |number: u8| ClientId::new(&format!("gw_ci_{number:020}")).expect("a client's id");
    let allowed = client(1);
    let disabled = client(2);
    let unknown = client(3);
    records.put(StoredRecord::Credential(CallerSecretRecord {
        id: allowed.clone(),
        access: access("", true),
        managed_by: None,
        later: Default::default(),
    }));
    records.put(StoredRecord::Credential(CallerSecretRecord {
        id: disabled.clone(),
        access: access("", false),
        managed_by: None,
        later: Default::default(),
    }));
    let key_id = KeyId::new(KEY_ID).expect("a key's id");
    records.put(StoredRecord::ServiceKey(CallerSecretRecord {
        id: key_id,
        access: access(KEY_SECRET, true),
        managed_by: None,
        later: Default::default(),
    }));
    records.put(StoredRecord::SigningKey(signing_key_record(2)));
    let published = signing_key(2);
    let foreign = signing_key(3);
    let impostor = SigningKey {
        id: published.id.clone(),
        ..signing_key(3)
    };

    let region = region();
    let directory = Directory::new(&records, &region, 1);
    let label = |id: &str| tenant_label(&account(), &service_id(id)).expect("a short label");
    let service = |id: &str| directory.service(&label(id)).expect("a service").clone();
    let claims = |client: &ClientId, service: &Service| Claims {
        jti: "fuzz".to_owned(),
        ..Claims::new(
            &region.base_url(),
            client,
            service,
            NOW,
            Duration::from_secs(600),
        )
    };
    let api = service("api");
    let other = service("other");
    let good = claims(&allowed, &api);
    let elsewhere = Claims {
        iss: Region::new("eu2", "example.com").base_url(),
        ..good.clone()
    };
    let expired = Claims {
        exp: NOW.0,
        ..good.clone()
    };
    let not_yet = Claims {
        nbf: NOW.0 + 1,
        ..good.clone()
    };
    let invalid = |why| Err(Error::TokenInvalid(why));
    let tokens = [
        (
            "good",
            &published,
            &good,
            Ok(Principal::Client(allowed.clone())),
        ),
        (
            "expired",
            &published,
            &expired,
            Err(Error::TokenExpired("it has expired; request a new one")),
        ),
        (
            "not_yet_valid",
            &published,
            &not_yet,
            Err(Error::TokenExpired("it is not valid yet")),
        ),
        (
            "other_service",
            &published,
            &claims(&allowed, &other),
            Err(Error::TokenAudienceMismatch),
        ),
        (
            "other_region",
            &published,
            &elsewhere,
            invalid("issued by another region; request one at the apex of this one"),
        ),
        (
            "disabled_client",
            &published,
            &claims(&disabled, &api),
            Err(Error::CredentialRevoked),
        ),
        (
            "unknown_client",
            &published,
            &claims(&unknown, &api),
            Err(Error::CredentialRevoked),
        ),
        (
            "foreign_key",
            &foreign,
            &good,
            invalid("signed by no key of this region; request a new one at its apex"),
        ),
        (
            "foreign_key_named_as_ours",
            &impostor,
            &good,
            Err(Error::TokenForged),
        ),
    ];
    let tokens = tokens.map(|(name, key, claims, outcome)| {
        (
            name,
            Minted {
                text: claims.signed_by(key).expect("a token"),
                outcome,
            },
        )
    });
    Callers {
        tokens: BTreeMap::from(tokens),
        service: api,
        issuer: region.base_url(),
        directory,
    }
});

/// A key from a fixed seed, so that the tokens are the same in every run.
fn signing_key(seed: u8) -> SigningKey {
    SigningKey::from_record(&signing_key_record(seed)).expect("a key")
}

fn signing_key_record(seed: u8) -> SigningKeyRecord {
    SigningKey::record_of(&key_pair(seed), NOW, NOW).expect("a key")
}

fn service_id(id: &str) -> ServiceId {
    ServiceId::new(id).expect("a service's id")
}
