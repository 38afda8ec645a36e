//! What gateway/fuzz/ feeds arbitrary bytes to: everything that reads what a stranger sent. Not an interface.
//!
//! A target takes any bytes, does what the gateway would do with them, and panics if something holds that never may.
//! Inputs of several parts have them on lines of their own, so that the corpus can be read and written by hand.

#![expect(clippy::expect_used, reason = "a target fails by panicking, and what it sets up must exist")]

mod http;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use ::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use bytes::Bytes;
use gw_shared::http::fields::{X_FORWARDED_FOR, X_GW_AUTHORIZATION, X_GW_SERVICE_KEY, X_GW_VERSION};
use gw_shared::http::head;
use gw_shared::id::{AccountId, AgentId, ClientId, KeyId, RequestId, ServiceId, SigningKeyId};
use gw_shared::identity::secret::{Secret, SecretHash};
use gw_shared::telemetry::trace::TraceContext;
use gw_shared::tunnel::control::{Decoder, InvalidMessage, MESSAGE_MAX, ToAgent, ToGateway, encode};
use gw_shared::tunnel::handshake;
use gw_shared::version::VERSION;
use ipnet::IpNet;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use serde::{Deserialize, Serialize};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use crate::apex::scope::Scope;
use crate::apex::token::{self, Denial, TokenRequest};
use crate::auth::jwt::Claims;
use crate::auth::{self, Checks, Principal, VerifiedTokens, service_key as key_format};
use crate::client_address::{TrustedProxies, client_address as client_of};
use crate::clock::Timestamp;
use crate::control::parse_token;
use crate::error::Error;
use crate::hostname::{Destination, Region, split_tenant_label, tenant_label};
use crate::ingress::proxy_protocol::{self, Preface};
use crate::limit::Rate;
use crate::limits;
use crate::store::{
    CredentialRecord, Directory, Modes, Record, Records, SecretAccess, Service, ServiceKeyRecord, ServiceRecord,
    SigningKey, SigningKeyRecord,
};
use crate::telemetry::request_log;
use crate::tls::pki::{AgentIdentity, Authority, CertificateRequest, agent_identity};

pub use self::http::{body, header_rules, request_head, response_head};

/// Every target, by the name of its wrapper in fuzz/fuzz_targets/ and of its folder in fuzz/corpus/.
#[expect(clippy::type_complexity, reason = "a table of two columns")]
pub const TARGETS: &[(&str, fn(&[u8]))] = &[
    ("access_token", access_token),
    ("body", body),
    ("client_address", client_address),
    ("control_stream", control_stream),
    ("csr", csr),
    ("handshake", handshake),
    ("header_rules", header_rules),
    ("hostname", hostname),
    ("log_block", log_block),
    ("proxy_header", proxy_header),
    ("request_head", request_head),
    ("response_head", response_head),
    ("scope", scope),
    ("service_key", service_key),
    ("token_body", token_body),
    ("trace_context", trace_context),
];

/// A block of the request log: damaged in any way, it is refused, or what it shows are requests.
pub fn log_block(data: &[u8]) {
    for view in request_log::show_block(data).unwrap_or_default() {
        assert!(
            view.id.parse::<RequestId>().is_ok() && view.time.len() >= "2026-11-21T04:15:32.123Z".len(),
            "{view:?}"
        );
    }
}

/// `POST /oauth/token`. Lines: `Content-Type`; values of `Authorization`, if any, separated by `|`; the body.
pub fn token_body(data: &[u8]) {
    let mut parts = data.splitn(3, |byte| *byte == b'\n');
    let (Some(content_type), Some(authorizations), Some(body)) = (parts.next(), parts.next(), parts.next()) else {
        return;
    };
    let Ok(content_type) = HeaderValue::from_bytes(content_type) else { return };
    let without_authorization = HeaderMap::from_iter([(header::CONTENT_TYPE, content_type)]);
    let mut headers = without_authorization.clone();
    for authorization in authorizations.split(|byte| *byte == b'|').filter(|value| !value.is_empty()) {
        let Ok(authorization) = HeaderValue::from_bytes(authorization) else { return };
        headers.append(header::AUTHORIZATION, authorization);
    }

    let in_body = token::parse(&without_authorization, body);
    match &in_body {
        Ok(request) => {
            for (name, value) in fields(request) {
                let Some(value) = value else { continue };
                // In JSON an empty grant type was sent; in a form it was not.
                let was_sent = name == "grant_type" && is_json(&without_authorization);
                assert!(!value.is_empty() || was_sent, "an empty {name} counts as left out");
                refuses_another(name, &without_authorization, body);
            }
        }
        Err(denial) => describes_itself(denial),
    }
    match token::parse(&headers, body) {
        // What it says may be empty, and is then nobody's.
        Ok(request) if headers.contains_key(header::AUTHORIZATION) => {
            let in_body = in_body.expect("a body is no better for an Authorization beside it");
            assert_eq!(headers.get_all(header::AUTHORIZATION).iter().count(), 1);
            assert!(request.client_id.is_some() && request.client_secret.is_some());
            assert!(in_body.client_secret.is_none(), "two ways of authenticating at a time");
            assert!(in_body.client_id.is_none() || in_body.client_id == request.client_id);
            assert_eq!((in_body.grant_type, in_body.scope), (request.grant_type, request.scope));
        }
        Ok(_) => {}
        Err(denial) => describes_itself(&denial),
    }
}

fn fields(request: &TokenRequest) -> [(&'static str, Option<&str>); 4] {
    [
        ("grant_type", request.grant_type.as_deref()),
        ("client_id", request.client_id.as_deref()),
        ("client_secret", request.client_secret.as_ref().map(Secret::reveal)),
        ("scope", request.scope.as_deref()),
    ]
}

fn is_json(headers: &HeaderMap) -> bool {
    headers[header::CONTENT_TYPE].as_bytes().trim_ascii_start().to_ascii_lowercase().starts_with(b"application/json")
}

/// A field that is there may not come again (RFC 6749 §3.2), whatever it says.
fn refuses_another(name: &str, headers: &HeaderMap, body: &[u8]) {
    let body = match body.trim_ascii_start().strip_prefix(b"{") {
        Some(members) if is_json(headers) => [format!("{{\"{name}\":\"again\",").as_bytes(), members].concat(),
        _ => [body, format!("&{name}=again").as_bytes()].concat(),
    };
    let refused = token::parse(headers, &body);
    assert!(matches!(refused, Err(Denial::InvalidRequest(_))), "{name} twice: {refused:?}");
}

/// Every refusal can be sent, in the characters that RFC 6749 §5.2 allows.
fn describes_itself(denial: &Denial) {
    let response = denial.response("eu1.example.com");
    assert!(response.status().is_client_error());
    let body: serde_json::Value = serde_json::from_slice(response.body()).expect("a refusal is JSON");
    for field in ["error", "error_description"] {
        let text = body[field].as_str().expect("both are texts");
        assert!(!text.is_empty() && text.chars().all(|c| matches!(c, ' '..='~') && c != '"' && c != '\\'), "{text:?}");
    }
}

/// The value of `traceparent`.
pub fn trace_context(data: &[u8]) {
    let Some(context) = TraceContext::parse(data) else { return };
    let written = context.to_value();
    assert_eq!(TraceContext::parse(written.as_bytes()), Some(context));
    assert_eq!(written.as_bytes()[2..53], data[2..53]);
    let child = context.child(7);
    assert_eq!((child.trace_id, child.sampled), (context.trace_id, context.sampled));
}

/// The scope of a token request, as text.
pub fn scope(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(scope) = Scope::parse(text) else { return };
    let (account, service) = (&scope.account, &scope.service);
    for written in [format!("account:{account} service:{service}"), format!(" service:{service}  account:{account}")] {
        assert_eq!(Scope::parse(&written), Ok(Scope { ignored: false, ..scope.clone() }));
    }
    for more in [format!("account:{account}"), format!("service:{service}"), "x".to_owned(), ":y".to_owned()] {
        assert!(Scope::parse(&format!("{text} {more}")).is_err(), "with {more:?}");
    }
    // Pairs with other keys are ignored.
    assert_eq!(Scope::parse(&format!("{text} x:y")), Ok(Scope { ignored: true, ..scope.clone() }));
}

/// A host as callers write it; or two lines, an account and a service.
pub fn hostname(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let region = region();
    if let Some((account, service)) = text.split_once('\n') {
        let (Ok(account), Ok(service)) = (AccountId::new(account), ServiceId::new(service)) else { return };
        if let Some(label) = tenant_label(&account, &service) {
            assert_eq!(split_tenant_label(&label), Some((account, service)));
        }
        return;
    }

    let destination = region.destination(text);
    assert_eq!(region.destination(&text.to_ascii_uppercase()), destination, "case");
    if !text.contains(':') {
        assert_eq!(region.destination(&format!("{text}:8443")), destination, "port");
        assert!(text.ends_with('.') || region.destination(&format!("{text}.")) == destination, "final dot");
    }
    if let Destination::Tenant(label) = &destination {
        assert!(!label.is_empty() && !label.contains('.') && !label.bytes().any(|byte| byte.is_ascii_uppercase()));
        assert_eq!(region.destination(&format!("{label}.{}", region.apex())), destination);
    }

    let label = if let Destination::Tenant(label) = &destination { label } else { text };
    if let Some((account, service)) = split_tenant_label(label) {
        assert_eq!(tenant_label(&account, &service).as_deref(), Some(label));
        let hostname = region.tenant_hostname(&account, &service).expect("it has room for the label it came from");
        assert_eq!(region.destination(&hostname), Destination::Tenant(label.into()));
    }
}

/// A certificate request: PEM; or DER; or, from the first byte on, the length of a subject, that subject and attributes,
/// both DER, which are put into a request that is properly signed.
pub fn csr(data: &[u8]) {
    const SEQUENCE: u8 = 0x30;
    let request = match data {
        [b'-', ..] => CertificateRequest::parse(&String::from_utf8_lossy(data)),
        [SEQUENCE, ..] => CertificateRequest::parse(&pem(data)),
        [subject_length, rest @ ..] => {
            let (subject, attributes) = rest.split_at(rest.len().min((*subject_length).into()));
            let requested = CertificateRequest::parse(&pem(&signed_request(subject, attributes)));
            if let Ok(request) = &requested {
                assert_eq!(request.subject_public_key_info(), spki(&key_pair(1)));
            }
            requested
        }
        [] => return,
    };
    let Ok(request) = request else { return };

    static AUTHORITY: LazyLock<Authority> = LazyLock::new(|| {
        let directory = tempfile::tempdir().expect("a folder for the authority");
        Authority::load_or_create(directory.path(), "agent-ca", "fuzzing").expect("an authority")
    });
    let region = region();
    let (account, agent) = (account(), AgentId::new("ag_00000000000000000000").expect("an agent's id"));
    let not_after = NOW.after(Duration::from_hours(24));
    let issued = AUTHORITY.issue_agent(&region, &account, &agent, &request, NOW, not_after);
    let issued = CertificateDer::from_pem_slice(issued.expect("a certificate").as_bytes()).expect("PEM");
    let (rest, certificate) = X509Certificate::from_der(&issued).expect("a certificate");
    assert!(rest.is_empty());
    assert_eq!(certificate.public_key().raw, request.subject_public_key_info());
    assert_eq!(certificate.subject().to_string(), format!("CN={agent}"));
    let names = certificate.subject_alternative_name().expect("names").expect("names").value;
    assert_eq!(names.general_names, [GeneralName::URI(&format!("gw://{}/{account}/agent/{agent}", region.apex()))]);
    let usage = certificate.extended_key_usage().expect("usage").expect("usage").value;
    assert!(usage.client_auth && !usage.server_auth && !usage.any && usage.other.is_empty());
    let usage = certificate.key_usage().expect("usage").expect("usage").value;
    assert!(usage.digital_signature() && !usage.key_cert_sign() && !usage.crl_sign());
    assert!(!certificate.is_ca());
    assert_eq!(certificate.extensions().len(), 6, "the names, two on usage, not a CA, two key ids");
    assert_eq!(agent_identity(&issued, &region), Some(AgentIdentity { account, agent }));
}

fn pem(der: &[u8]) -> String {
    format!("-----BEGIN CERTIFICATE REQUEST-----\n{}\n-----END CERTIFICATE REQUEST-----\n", STANDARD.encode(der))
}

/// A certificate request (RFC 2986 §4) that asks for anything in any form, with a good signature.
fn signed_request(subject: &[u8], attributes: &[u8]) -> Vec<u8> {
    const VERSION_1: &[u8] = &[0x02, 0x01, 0x00];
    let pair = key_pair(1);
    let info = der(0x30, &[VERSION_1, subject, &spki(&pair), attributes]);
    let signature = der(0x03, &[&[0], pair.sign(&info).as_ref()]);
    der(0x30, &[&info, ED25519_ALGORITHM, &signature])
}

/// AlgorithmIdentifier of Ed25519 (RFC 8410 §3).
const ED25519_ALGORITHM: &[u8] = &[0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70];

/// SubjectPublicKeyInfo (RFC 8410 §4).
fn spki(pair: &Ed25519KeyPair) -> Vec<u8> {
    der(0x30, &[ED25519_ALGORITHM, &der(0x03, &[&[0], pair.public_key().as_ref()])])
}

/// One element, its length in the shortest form (X.690 §10.1).
fn der(tag: u8, contents: &[&[u8]]) -> Vec<u8> {
    let contents = contents.concat();
    let length = contents.len().to_be_bytes();
    let length = &length[length.iter().take_while(|byte| **byte == 0).count()..];
    let prefix = match (contents.len(), u8::try_from(length.len())) {
        (0, _) => vec![tag, 0],
        (1..0x80, _) => vec![tag, length[0]],
        (_, Ok(octets)) => [&[tag, 0x80 | octets], length].concat(),
        (_, Err(_)) => unreachable!("a length has at most 8 octets"),
    };
    [prefix, contents].concat()
}

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
        assert!(key.is_none(), "one text is not both");
    }

    let Some(outcome) = authenticate(X_GW_SERVICE_KEY, data) else { return };
    let expected = match data {
        b"" => Err(Error::AuthRequired),
        _ if data == format!("gw_sk_{KEY_ID}.{KEY_SECRET}").as_bytes() => {
            Ok(Principal::ServiceKey(KeyId::new(KEY_ID).expect("a key's id")))
        }
        _ => Err(Error::ServiceKeyInvalid),
    };
    assert_eq!(outcome, expected);
}

/// A value of `X-Gw-Authorization`.
pub fn access_token(data: &[u8]) {
    let Some(outcome) = authenticate(X_GW_AUTHORIZATION, data) else { return };
    // By now it may be one that the worker remembers.
    assert_eq!(authenticate(X_GW_AUTHORIZATION, data).as_ref(), Some(&outcome));
    let sent = std::str::from_utf8(data).ok().and_then(|value| value.split_once(' '));
    let minted = sent
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
        .and_then(|(_, token)| CALLERS.tokens.values().find(|minted| minted.text == token.trim_matches(' ')));
    match minted {
        Some(minted) => assert_eq!(outcome, minted.outcome),
        None if data.is_empty() => assert_eq!(outcome, Err(Error::AuthRequired)),
        // Nothing else about a token that is not ours is as much as looked at.
        None => assert!(matches!(outcome, Err(Error::TokenInvalid(_) | Error::TokenForged)), "{outcome:?}"),
    }
}

/// The tokens that [`access_token`] tells from all others, by what is special about them, each as the field's value.
pub fn access_tokens() -> impl Iterator<Item = (&'static str, String)> {
    CALLERS.tokens.iter().map(|(name, token)| (*name, format!("Bearer {}", token.text)))
}

/// What becomes of a request with this one field; `None` if no request can have it.
fn authenticate(name: HeaderName, value: &[u8]) -> Option<Result<Principal, Error>> {
    thread_local! {
        static VERIFIED: RefCell<VerifiedTokens> = RefCell::default();
    }
    let headers = HeaderMap::from_iter([(name, HeaderValue::from_bytes(value).ok()?)]);
    let Callers { directory, service, issuer, .. } = &*CALLERS;
    let checks = Checks { directory, issuer, service, now: || NOW, may_verify: || Ok(()) };
    let outcome = VERIFIED.with_borrow_mut(|verified| auth::authenticate(checks, verified, &headers));
    Some(outcome.map(|authenticated| authenticated.by))
}

/// Who may call the service `acme--api`, and a token of every kind.
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

const NOW: Timestamp = Timestamp(1_800_000_000);
const KEY_ID: &str = "0123456789abcdef";
const KEY_SECRET: &str = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefg";

static CALLERS: LazyLock<Callers> = LazyLock::new(|| {
    let mut records = Records::default();
    for id in ["api", "other"] {
        records.put(Record::Service(ServiceRecord {
            account: account(),
            id: service_id(id),
            modes: Modes { jwt: true, service_key: true },
            enabled: true,
            rate: Rate::new(1, 1).expect("a rate"),
            request_logging: false,
            capture_request_body: false,
            capture_response_body: false,
            created_at: NOW,
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
    let (allowed, disabled, unknown) = (client(1), client(2), client(3));
    records.put(Record::Credential(CredentialRecord { id: allowed.clone(), access: access("", true) }));
    records.put(Record::Credential(CredentialRecord { id: disabled.clone(), access: access("", false) }));
    let key_id = KeyId::new(KEY_ID).expect("a key's id");
    records.put(Record::ServiceKey(ServiceKeyRecord { id: key_id, access: access(KEY_SECRET, true) }));
    let (published, foreign) = (signing_key(2, "k"), signing_key(3, "f"));
    let impostor = SigningKeyRecord { id: published.id.clone(), ..foreign.clone() };
    records.put(Record::SigningKey(published.clone()));

    let region = region();
    let directory = Directory::new(&records, &region, 1);
    let label = |id: &str| tenant_label(&account(), &service_id(id)).expect("a short label");
    let service = |id: &str| directory.service(&label(id)).expect("a service").clone();
    let claims = |client: &ClientId, service: &Service| Claims {
        jti: "fuzz".to_owned(),
        ..Claims::new(&region.base_url(), client, service, NOW, Duration::from_secs(600))
    };
    let (api, other) = (service("api"), service("other"));
    let good = claims(&allowed, &api);
    let elsewhere = Claims { iss: Region::new("eu2", "example.com").base_url(), ..good.clone() };
    let expired = Claims { exp: NOW.0, ..good.clone() };
    let not_yet = Claims { nbf: NOW.0 + 1, ..good.clone() };
    let invalid = |why| Err(Error::TokenInvalid(why));
    let tokens = [
        ("good", &published, &good, Ok(Principal::Client(allowed.clone()))),
        ("expired", &published, &expired, Err(Error::TokenExpired("it has expired; request a new one"))),
        ("not_yet_valid", &published, &not_yet, Err(Error::TokenExpired("it is not valid yet"))),
        ("other_service", &published, &claims(&allowed, &other), Err(Error::TokenAudienceMismatch)),
        ("other_region", &published, &elsewhere, invalid("issued by another region")),
        ("disabled_client", &published, &claims(&disabled, &api), Err(Error::CredentialRevoked)),
        ("unknown_client", &published, &claims(&unknown, &api), Err(Error::CredentialRevoked)),
        ("foreign_key", &foreign, &good, invalid("signed by no key of this region")),
        ("foreign_key_named_as_ours", &impostor, &good, Err(Error::TokenForged)),
    ];
    let tokens = tokens.map(|(name, key, claims, outcome)| {
        let key = SigningKey::from_record(key).expect("a key");
        (name, Minted { text: claims.signed_by(&key).expect("a token"), outcome })
    });
    Callers { tokens: BTreeMap::from(tokens), service: api, issuer: region.base_url(), directory }
});

/// The same key every time, and with it the same tokens.
fn signing_key(seed: u8, id: &str) -> SigningKeyRecord {
    let pair = key_pair(seed);
    SigningKeyRecord {
        id: SigningKeyId::new(&id.repeat(43)).expect("a signing key's id"),
        private_key: Secret::new(URL_SAFE_NO_PAD.encode(pair.to_pkcs8v1().expect("PKCS #8"))),
        public_key: URL_SAFE_NO_PAD.encode(pair.public_key()),
        created_at: NOW,
        active_from: NOW,
    }
}

fn key_pair(seed: u8) -> Ed25519KeyPair {
    Ed25519KeyPair::from_seed_unchecked(&[seed; 32]).expect("any seed is a key")
}

fn account() -> AccountId {
    AccountId::new("acme").expect("an account's id")
}

fn service_id(id: &str) -> ServiceId {
    ServiceId::new(id).expect("a service's id")
}

fn region() -> Region {
    Region::new("eu1", "example.com")
}

/// What agent and gateway send each other before a tunnel is one: a head; or a value of `Authorization` or
/// `WWW-Authenticate`.
pub fn handshake(data: &[u8]) {
    let received = Bytes::copy_from_slice(data);
    if let Ok(request) = head::parse_request(&received, handshake::HEAD_LIMITS) {
        if handshake::check(&request).is_ok() {
            assert_eq!((request.method.as_str(), request.target.as_str()), ("GET", handshake::PATH));
            assert_eq!(request.headers[header::UPGRADE], handshake::PROTOCOL);
            assert_eq!(request.headers[X_GW_VERSION], VERSION);
        }
        request.headers.values().filter_map(|value| value.to_str().ok()).for_each(proof_and_challenge);
    }
    if let Ok(field) = std::str::from_utf8(data) {
        proof_and_challenge(field);
    }
}

fn proof_and_challenge(field: &str) {
    if let Some(challenge) = handshake::parse_challenge(field) {
        assert_eq!(handshake::parse_challenge(&handshake::challenge_field(challenge)), Some(challenge));
    }
    let Some(proof) = handshake::Proof::parse(field) else { return };
    assert_eq!(handshake::Proof::parse(&proof.field()).as_ref(), Some(&proof));
    let request = Bytes::from(handshake::request("acme--api.eu1.example.com", Some(&proof)));
    // A proof that was not too long to receive is not too long to send.
    let request = head::parse_request(&request, head::HeadLimits { head: usize::MAX, ..handshake::HEAD_LIMITS });
    let request = request.expect("our own request");
    assert_eq!(handshake::check(&request), Ok(()));
    assert_eq!(request.headers[header::AUTHORIZATION], proof.field().as_str());
}

/// The control stream, as either end reads it: in pieces of as many bytes as the first byte says, and whole.
pub fn control_stream(data: &[u8]) {
    let Some((step, stream)) = data.split_first() else { return };
    let step = usize::from(*step).max(1);
    splits_alike::<ToAgent>(stream, step);
    splits_alike::<ToGateway>(stream, step);
}

fn splits_alike<M>(stream: &[u8], step: usize)
where
    M: Serialize + for<'de> Deserialize<'de> + PartialEq + std::fmt::Debug,
{
    let whole = read_messages::<M>([stream]);
    if stream.split(|byte| *byte == b'\n').all(|line| line.len() < MESSAGE_MAX) {
        assert_eq!(read_messages::<M>(stream.chunks(step)), whole);
    }
    for message in whole.0 {
        let line = encode(&message).expect("a message can be sent");
        assert_eq!(read_messages::<M>([&line[..]]), (vec![message], false));
    }
}

/// The messages up to the first error, and whether there was one.
fn read_messages<'a, M: for<'de> Deserialize<'de>>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<M>, bool) {
    let (mut decoder, mut messages) = (Decoder::default(), Vec::new());
    for piece in pieces {
        decoder.push(piece);
        loop {
            match decoder.next_message() {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(InvalidMessage::TooLong(_) | InvalidMessage::Json(_)) => return (messages, true),
            }
        }
    }
    (messages, false)
}

/// How a connection from a trusted proxy begins.
pub fn proxy_header(data: &[u8]) {
    match proxy_protocol::parse(data) {
        Ok(Some(Preface { source: None, length: 0 })) => assert!(!data.starts_with(ppp::v2::PROTOCOL_PREFIX)),
        Ok(Some(preface)) => {
            let length = preface.length;
            assert!((16..=16 + limits::PROXY_HEADER).contains(&length) && length <= data.len());
            for end in 0..length {
                assert_eq!(proxy_protocol::parse(&data[..end]), Ok(None), "{end} of {length} bytes");
            }
            assert_eq!(proxy_protocol::parse(&data[..length]), Ok(Some(preface)));
        }
        // A connection must not wait for ever for a header that cannot become one.
        Ok(None) => assert!(data.len() < 16 + limits::PROXY_HEADER),
        error => assert_eq!(proxy_protocol::parse(&[data, b"more"].concat()), error),
    }
}

/// Lines: who connected, then those of `X-Forwarded-For`. Trusted are 10.0.0.0/8 and fd00::/8.
pub fn client_address(data: &[u8]) {
    let mut lines = data.split(|byte| *byte == b'\n');
    let peer = lines.next().and_then(|peer| std::str::from_utf8(peer).ok()?.parse::<IpAddr>().ok());
    let (Some(peer), Ok(lines)) = (peer, lines.map(HeaderValue::from_bytes).collect::<Result<Vec<_>, _>>()) else {
        return;
    };
    let trusted: TrustedProxies =
        ["10.0.0.0/8", "fd00::/8"].map(|block| block.parse::<IpNet>().expect("a block")).into_iter().collect();
    let client = |lines: &[&[HeaderValue]]| {
        let lines = lines.concat().into_iter().map(|line| (X_FORWARDED_FOR, line));
        client_of(peer, &lines.collect(), &trusted)
    };

    let found = client(&[&lines]);
    assert_eq!(found, found.to_canonical(), "never an IPv4 address in the form of IPv6");
    let peer = peer.to_canonical();
    if !trusted.contains(peer) {
        assert_eq!(found, peer, "nobody else is believed");
        return;
    }
    let forged = HeaderValue::from_static("6.6.6.6");
    if !trusted.contains(found) {
        let found_then = client(&[std::slice::from_ref(&forged), &lines]);
        assert_eq!(found_then, found, "what stands to the left is anybody's claim");
    }
    assert_eq!(client(&[&lines, &[forged]]).to_string(), "6.6.6.6", "the last proxy's word is taken");
    assert!(found == peer || lines.iter().any(|line| names(line, found)), "{found} is neither peer nor in the list");
}

/// Whether one of the list's elements has this address in it: in whatever notation, with a zone (RFC 4007 §11) and a port.
fn names(line: &HeaderValue, address: IpAddr) -> bool {
    String::from_utf8_lossy(line.as_bytes()).split(',').map(str::trim).any(|element| {
        let without_port = element.rsplit_once(':').map_or(element, |(address, _)| address);
        [element, without_port].iter().any(|text| {
            let text = text.trim_start_matches('[').trim_end_matches(']');
            let text = text.split_once('%').map_or(text, |(address, _zone)| address);
            text.parse::<IpAddr>().is_ok_and(|found| found.to_canonical() == address)
        })
    })
}
