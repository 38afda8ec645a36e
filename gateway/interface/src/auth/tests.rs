use std::time::Duration;

use gw_base::service::hostname::Region;
use gw_base::service::rate::Rate;
use gw_base::service::service_settings::{Modes, ServiceSettings};
use gw_shared::id::{AccountId, ClientId, KeyId, ServiceId};
use gw_shared::identity::secret::SecretHash;
use gw_store::{
    CallerSecretRecord, Records, SecretAccess, ServiceRecord, SigningKey, SigningKeyRecord,
    StoredRecord,
};

use super::jwt::Claims;
use super::*;

const BOTH: Modes = Modes {
    jwt: true,
    service_key: true,
};
const NOW: Timestamp = Timestamp(1_800_000_000);
const ISSUER: &str = "https://eu1.example.com";
const SECRET: &str = "s3cret";

/// A directory with service `acme--api` and a service key with this access; also returns the key's
/// text.
fn directory(modes: Modes, account: &str, allowed: &str, enabled: bool) -> (Directory, String) {
    let mut records = records(modes);
    let key = KeyId::random();
    let access = access(account, allowed, enabled);
    records.put(StoredRecord::ServiceKey(CallerSecretRecord {
        id: key.clone(),
        access,
        managed_by: None,
        later: Default::default(),
    }));
    (directory_of(&records), service_key::text(&key, SECRET))
}

fn directory_of(records: &Records) -> Directory {
    Directory::new(records, &Region::new("eu1", "example.com"), 1)
}

fn records(modes: Modes) -> Records {
    let mut records = Records::default();
    for id in ["api", "other"] {
        records.put(StoredRecord::Service(ServiceRecord {
            account: AccountId::new("acme").unwrap(),
            id: ServiceId::new(id).unwrap(),
            settings: ServiceSettings {
                modes,
                ..ServiceSettings::default()
            },
            created_at: NOW,
            created_ms: None,
            managed_by: None,
            later: Default::default(),
        }));
    }
    records
}

fn access(account: &str, allowed: &str, enabled: bool) -> SecretAccess {
    SecretAccess {
        account: AccountId::new(account).unwrap(),
        name: None,
        secret: SecretHash::of(SECRET),
        allowed_services: [ServiceId::new(allowed).unwrap()].into(),
        enabled,
        created_at: NOW,
    }
}

fn check(directory: &Directory, fields: &[(HeaderName, &str)]) -> Result<Principal, Error> {
    check_with(directory, &mut VerifiedTokens::default(), NOW, fields)
}

fn check_with(
    directory: &Directory,
    tokens: &mut VerifiedTokens,
    now: Timestamp,
    fields: &[(HeaderName, &str)],
) -> Result<Principal, Error> {
    let mut headers = Fields::new();
    for (name, value) in fields {
        headers.append(name.clone(), HeaderValue::from_str(value).unwrap());
    }
    let service = directory.service("acme--api").unwrap();
    let checks = Checks {
        directory,
        issuer: ISSUER,
        service,
        now: || now,
        may_verify: || Ok(()),
    };
    authenticate(checks, tokens, &headers).map(|authenticated| authenticated.by)
}

#[test]
fn a_valid_service_key_authenticates() {
    let (directory, key) = directory(BOTH, "acme", "api", true);
    let Ok(Principal::ServiceKey(id)) = check(&directory, &[(X_GW_SERVICE_KEY, &key)]) else {
        panic!()
    };
    assert!(key.contains(id.as_str()));
    // An empty field counts as absent.
    assert!(
        check(
            &directory,
            &[(X_GW_SERVICE_KEY, &key), (X_GW_AUTHORIZATION, "")]
        )
        .is_ok()
    );
}

#[test]
fn missing_repeated_and_conflicting_credentials_are_refused() {
    let (directory, key) = directory(BOTH, "acme", "api", true);
    assert_eq!(check(&directory, &[]), Err(Error::AuthRequired));
    assert_eq!(
        check(&directory, &[(X_GW_SERVICE_KEY, "")]),
        Err(Error::AuthRequired)
    );
    let both = [
        (X_GW_SERVICE_KEY, key.as_str()),
        (X_GW_AUTHORIZATION, "Bearer x"),
    ];
    assert_eq!(check(&directory, &both), Err(Error::AuthAmbiguous));
    let twice = [
        (X_GW_SERVICE_KEY, key.as_str()),
        (X_GW_SERVICE_KEY, key.as_str()),
    ];
    assert_eq!(check(&directory, &twice), Err(Error::AuthAmbiguous));
    let token = check(&directory, &[(X_GW_AUTHORIZATION, "Bearer x")]);
    assert!(matches!(token, Err(Error::TokenInvalid(_))));
    for misplaced in [key.clone(), format!("Bearer {key}")] {
        let error = check(&directory, &[(X_GW_AUTHORIZATION, &misplaced)]).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("send it as X-Gw-Service-Key"), "{message}");
    }
}

#[test]
fn credentials_of_a_disabled_mode_are_refused() {
    let (keys_only, key) = directory(
        Modes {
            jwt: false,
            service_key: true,
        },
        "acme",
        "api",
        true,
    );
    assert!(check(&keys_only, &[(X_GW_SERVICE_KEY, &key)]).is_ok());
    let token = check(&keys_only, &[(X_GW_AUTHORIZATION, "Bearer x")]);
    assert_eq!(token, Err(Error::AuthModeNotAllowed("access tokens")));
    let (tokens_only, key) = directory(
        Modes {
            jwt: true,
            service_key: false,
        },
        "acme",
        "api",
        true,
    );
    let refused = check(&tokens_only, &[(X_GW_SERVICE_KEY, &key)]);
    assert_eq!(refused, Err(Error::AuthModeNotAllowed("service keys")));
}

#[test]
fn invalid_service_keys_are_refused() {
    let (api, key) = directory(BOTH, "acme", "api", true);
    let wrong_secret = format!("{}x", &key[..key.len() - 1]);
    let (_, foreign) = directory(BOTH, "acme", "api", true);
    for bad in [
        wrong_secret.as_str(),
        &foreign,
        "gw_sk_",
        "gw_sk_.",
        "x",
        &key[1..],
        &key.replace('.', ""),
    ] {
        assert_eq!(
            check(&api, &[(X_GW_SERVICE_KEY, bad)]),
            Err(Error::ServiceKeyInvalid),
            "{bad}"
        );
    }
    let (other_service, key) = directory(BOTH, "acme", "other", true);
    assert_eq!(
        check(&other_service, &[(X_GW_SERVICE_KEY, &key)]),
        Err(Error::ServiceKeyNotAllowed)
    );
    let (other_account, key) = directory(BOTH, "evil", "api", true);
    assert_eq!(
        check(&other_account, &[(X_GW_SERVICE_KEY, &key)]),
        Err(Error::ServiceKeyNotAllowed)
    );
    let (disabled, key) = directory(BOTH, "acme", "api", false);
    assert_eq!(
        check(&disabled, &[(X_GW_SERVICE_KEY, &key)]),
        Err(Error::ServiceKeyInvalid)
    );
}

/// Records with a credential and a signing key, from which tests make valid and forged tokens.
struct Tokens {
    records: Records,
    client: ClientId,
    key: SigningKeyRecord,
}

impl Tokens {
    fn new() -> Self {
        let mut records = records(BOTH);
        let client = ClientId::random();
        let access = access("acme", "api", true);
        records.put(StoredRecord::Credential(CallerSecretRecord {
            id: client.clone(),
            access,
            managed_by: None,
            later: Default::default(),
        }));
        let key = SigningKey::generate(NOW, NOW).unwrap();
        records.put(StoredRecord::SigningKey(key.clone()));
        Self {
            records,
            client,
            key,
        }
    }

    fn claims(&self) -> Claims {
        let directory = directory_of(&self.records);
        let service = directory.service("acme--api").unwrap();
        Claims::new(
            ISSUER,
            &self.client,
            service,
            NOW,
            Duration::from_secs(3600),
        )
    }

    fn mint(&self, edit: impl FnOnce(&mut Claims)) -> String {
        let mut claims = self.claims();
        edit(&mut claims);
        claims
            .signed_by(&SigningKey::from_record(&self.key).unwrap())
            .unwrap()
    }

    /// A token with this header and valid claims, signed with the region's own key.
    fn forge(&self, header: &serde_json::Value) -> String {
        use base64::Engine;
        use base64::engine::general_purpose::URL_SAFE_NO_PAD;
        let claims = serde_json::to_vec(&self.claims()).unwrap();
        let message = [header.to_string().as_bytes(), &claims]
            .map(|part| URL_SAFE_NO_PAD.encode(part))
            .join(".");
        let private = URL_SAFE_NO_PAD
            .decode(self.key.private_key.reveal())
            .unwrap();
        let pair = aws_lc_rs::signature::Ed25519KeyPair::from_pkcs8(&private).unwrap();
        format!(
            "{message}.{}",
            URL_SAFE_NO_PAD.encode(pair.sign(message.as_bytes()))
        )
    }

    fn check_at(&self, token: &str, now: Timestamp) -> Result<Principal, Error> {
        let value = format!("Bearer {token}");
        let fields = [(X_GW_AUTHORIZATION, value.as_str())];
        check_with(
            &directory_of(&self.records),
            &mut VerifiedTokens::default(),
            now,
            &fields,
        )
    }

    fn code(&self, token: &str) -> &'static str {
        self.check_at(token, NOW).unwrap_err().outcome().2.as_str()
    }
}

/// The public key of a record, as `x` of the JWK.
fn x_of(key: &SigningKeyRecord) -> String {
    SigningKey::from_record(key).unwrap().x
}

#[test]
fn a_token_is_accepted_only_within_its_validity() {
    let tokens = Tokens::new();
    let token = tokens.mint(|_| {});
    assert_eq!(
        tokens.check_at(&token, NOW),
        Ok(Principal::Client(tokens.client.clone()))
    );
    let code = |now| {
        tokens
            .check_at(&token, Timestamp(NOW.0 + now))
            .map_err(|error| error.outcome().2.as_str())
    };
    assert!(code(3599).is_ok());
    assert_eq!(code(3600), Err("GW_TOKEN_EXPIRED"));
    assert_eq!(code(-1), Err("GW_TOKEN_EXPIRED"));
}

#[test]
fn forged_tokens_are_refused() {
    let tokens = Tokens::new();
    let kid = tokens.key.id.as_str();
    let good = serde_json::json!({ "alg": "EdDSA", "typ": "at+jwt", "kid": kid });
    assert!(tokens.check_at(&tokens.forge(&good), NOW).is_ok());
    let with = |name: &str, value: serde_json::Value| {
        let mut header = good.clone();
        header[name] = value;
        header
    };
    let foreign = SigningKey::generate(NOW, NOW).unwrap();
    for header in [
        with("alg", "none".into()),
        with("alg", "HS256".into()),
        with("alg", "ES256".into()),
        with("typ", "JWT".into()),
        with("typ", serde_json::Value::Null),
        with("kid", foreign.id.as_str().into()),
        with("kid", "../../etc/passwd".into()),
        with("jku", "https://evil.example.com/jwks.json".into()),
        with(
            "jwk",
            serde_json::json!({ "kty": "OKP", "crv": "Ed25519", "x": x_of(&foreign) }),
        ),
        with("x5u", "https://evil.example.com/chain.pem".into()),
        with("x5c", serde_json::json!(["MIIB"])),
        with("crit", serde_json::json!(["b64"])),
        with("zip", "DEF".into()),
    ] {
        assert_eq!(
            tokens.code(&tokens.forge(&header)),
            "GW_TOKEN_INVALID",
            "{header}"
        );
    }
    let token = tokens.mint(|_| {});
    let (message, signature) = token.rsplit_once('.').unwrap();
    let (header, claims) = message.split_once('.').unwrap();
    let elsewhere = tokens
        .claims()
        .signed_by(&SigningKey::from_record(&foreign).unwrap())
        .unwrap();
    for bad in [
        format!("{message}."),
        message.to_owned(),
        format!("{message}.{}", &signature[..signature.len() - 2]),
        format!("{message}.{}", "A".repeat(signature.len())),
        format!("{header}.{}.{signature}", claims.replacen('A', "B", 1)),
        format!("{token}.{signature}"),
        elsewhere,
        String::new(),
        "a.b.c".to_owned(),
        "x".repeat(5000),
    ] {
        assert_eq!(tokens.code(&bad), "GW_TOKEN_INVALID", "{bad}");
    }
    for scheme in ["", "Basic ", "Bearer  Bearer "] {
        let value = format!("{scheme}{token}");
        let refused = check(
            &directory_of(&tokens.records),
            &[(X_GW_AUTHORIZATION, &value)],
        )
        .unwrap_err();
        assert!(matches!(refused, Error::TokenInvalid(_)), "{scheme:?}");
    }
}

/// Algorithm confusion: the public key used as an HMAC secret.
#[test]
fn a_public_key_is_not_accepted_as_an_hmac_secret() {
    let tokens = Tokens::new();
    let mut header = jsonwebtoken::Header::new(jsonwebtoken::Algorithm::HS256);
    header.typ = Some("at+jwt".into());
    header.kid = Some(tokens.key.id.to_string());
    for secret in [
        x_of(&tokens.key).as_bytes(),
        directory_of(&tokens.records).jwks(),
    ] {
        let key = jsonwebtoken::EncodingKey::from_secret(secret);
        let token = jsonwebtoken::encode(&header, &tokens.claims(), &key).unwrap();
        assert_eq!(tokens.code(&token), "GW_TOKEN_INVALID");
    }
}

#[test]
fn validly_signed_tokens_with_other_claims_are_refused() {
    let tokens = Tokens::new();
    let code = |edit: fn(&mut Claims)| tokens.code(&tokens.mint(edit));
    assert_eq!(
        code(|claims| claims.iss = "https://eu2.example.com".into()),
        "GW_TOKEN_INVALID"
    );
    assert_eq!(
        code(|claims| std::mem::swap(&mut claims.iss, &mut claims.aud)),
        "GW_TOKEN_INVALID"
    );
    let other = |claims: &mut Claims| claims.aud = "https://acme--other.eu1.example.com".into();
    assert_eq!(code(other), "GW_TOKEN_AUDIENCE_MISMATCH");
    assert_eq!(
        code(|claims| claims.aud.push_str(":443")),
        "GW_TOKEN_AUDIENCE_MISMATCH"
    );
    assert_eq!(code(|claims| claims.exp = NOW.0), "GW_TOKEN_EXPIRED");
    assert_eq!(code(|claims| claims.nbf = NOW.0 + 1), "GW_TOKEN_EXPIRED");
    assert_eq!(
        code(|claims| claims.client_id = ClientId::random()),
        "GW_CREDENTIAL_REVOKED"
    );
}

#[test]
fn a_token_for_an_own_domain_of_the_service_is_refused() {
    let mut tokens = Tokens::new();
    let domain = serde_json::json!({
        "id": "api.customer.example",
        "account": "acme",
        "service": "api",
        "state": "active",
        "since": 0,
        "created_at": 0,
        "material": "{}",
    });
    let domain = serde_json::from_value(domain).unwrap();
    tokens.records.put(StoredRecord::Domain(domain));
    let token = tokens.mint(|claims| claims.aud = "https://api.customer.example".into());
    assert_eq!(tokens.code(&token), "GW_TOKEN_AUDIENCE_MISMATCH");
}

#[test]
fn a_token_is_valid_for_at_most_the_longest_lifetime() {
    const DAY: i64 = 24 * 3600;
    let tokens = Tokens::new();
    assert!(
        tokens
            .check_at(&tokens.mint(|claims| claims.exp = NOW.0 + DAY), NOW)
            .is_ok()
    );
    let code = |edit: fn(&mut Claims)| tokens.code(&tokens.mint(edit));
    assert_eq!(
        code(|claims| claims.exp = NOW.0 + DAY + 1),
        "GW_TOKEN_INVALID"
    );
    assert_eq!(code(|claims| claims.exp = i64::MAX), "GW_TOKEN_INVALID");
    let issued_later =
        |claims: &mut Claims| (claims.iat, claims.exp) = (NOW.0 + 90 * DAY, NOW.0 + 90 * DAY + 1);
    assert_eq!(code(issued_later), "GW_TOKEN_INVALID");
    let valid_later =
        |claims: &mut Claims| (claims.iat, claims.nbf, claims.exp) = (i64::MIN, NOW.0, NOW.0 + 1);
    assert_eq!(code(valid_later), "GW_TOKEN_INVALID");
}

#[test]
fn revocation_and_expiry_apply_to_cached_tokens() {
    let mut tokens = Tokens::new();
    let token = format!("Bearer {}", tokens.mint(|_| {}));
    let mut verified = VerifiedTokens::default();
    let mut code = |records: &Records, now| {
        let fields = [(X_GW_AUTHORIZATION, token.as_str())];
        check_with(&directory_of(records), &mut verified, now, &fields)
            .map_err(|error| error.outcome().2.as_str())
    };
    assert!(code(&tokens.records, NOW).is_ok());
    assert_eq!(
        code(&tokens.records, Timestamp(NOW.0 + 3600)),
        Err("GW_TOKEN_EXPIRED")
    );
    let put = |records: &mut Records, access| {
        records.put(StoredRecord::Credential(CallerSecretRecord {
            id: tokens.client.clone(),
            access,
            managed_by: None,
            later: Default::default(),
        }));
    };
    for revoked in [
        access("acme", "api", false),
        access("acme", "other", true),
        access("evil", "api", true),
    ] {
        put(&mut tokens.records, revoked);
        assert_eq!(code(&tokens.records, NOW), Err("GW_CREDENTIAL_REVOKED"));
    }
    put(&mut tokens.records, access("acme", "api", true));
    assert!(code(&tokens.records, NOW).is_ok());
    // Tokens of a withdrawn key are refused.
    tokens.records.signing_keys.clear();
    assert_eq!(code(&tokens.records, NOW), Err("GW_TOKEN_INVALID"));
}

#[test]
fn a_new_key_does_not_verify_signatures_of_the_old_key() {
    let mut tokens = Tokens::new();
    let old = tokens.mint(|_| {});
    let new = SigningKey::generate(NOW, NOW).unwrap();
    tokens.records.put(StoredRecord::SigningKey(new.clone()));
    assert!(
        tokens.check_at(&old, NOW).is_ok(),
        "the old key is still published"
    );
    // The old signature with the id of the new key.
    let header = serde_json::json!({ "alg": "EdDSA", "typ": "at+jwt", "kid": new.id });
    assert_eq!(tokens.code(&tokens.forge(&header)), "GW_TOKEN_INVALID");
}

#[test]
fn the_limit_on_verification_does_not_apply_to_cached_tokens() {
    let tokens = Tokens::new();
    let directory = directory_of(&tokens.records);
    let mut verified = VerifiedTokens::default();
    let mut headers = Fields::new();
    headers.insert(
        X_GW_AUTHORIZATION,
        format!("Bearer {}", tokens.mint(|_| {})).parse().unwrap(),
    );
    let mut attempt = |may_verify: Result<(), Error>| {
        let service = directory.service("acme--api").unwrap();
        let may_verify = || may_verify;
        let checks = Checks {
            directory: &directory,
            issuer: ISSUER,
            service,
            now: || NOW,
            may_verify,
        };
        authenticate(checks, &mut verified, &headers).map(drop)
    };
    let limited = Error::AuthRateLimited {
        rate: Rate::new(1, 1).unwrap(),
        retry_after: Duration::from_secs(1),
    };
    assert_eq!(attempt(Err(limited.clone())), Err(limited.clone()));
    assert_eq!(attempt(Ok(())), Ok(()));
    assert_eq!(attempt(Err(limited)), Ok(()));
}
