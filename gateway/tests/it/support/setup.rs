//! Services, keys and agents, created through the control plane of a demo.

use std::path::Path;

use gw_agent::identity::enroll::TokenSource;
use gw_control_plane::control::records::{account, caller_secret, enrollment_token, service};
use gw_control_plane::control::{
    Actor, Control, NewAccount, NewCallerSecret, NewCredentialView, NewEnrollmentToken, NewService,
    NewServiceKeyView,
};
use gw_shared::id::{AgentId, ClientId, KeyId};
use gw_shared::identity::secret::Secret;

/// Creates a service with default settings, and its account if it does not exist.
pub(crate) fn service(control: &Control, account: &str, service: &str) {
    account::create(
        control,
        &Actor::Admin,
        &NewAccount {
            id: account.to_owned(),
            capture_allowed: Some(true),
            domains_max: None,
            managed_by: None,
        },
    )
    .unwrap();
    let new = NewService {
        id: service.to_owned(),
        ..NewService::default()
    };
    service::create(control, &Actor::Admin, account, &new).unwrap();
}

fn new_secret(services: &[&str]) -> NewCallerSecret {
    NewCallerSecret {
        allowed_services: owned(services),
        ..NewCallerSecret::default()
    }
}

/// Creates a service key; returns its id and its full text.
pub(crate) fn service_key(control: &Control, account: &str, services: &[&str]) -> (String, String) {
    let (NewServiceKeyView { key, service_key }, _) =
        caller_secret::create::<KeyId>(control, &Actor::Admin, account, &new_secret(services))
            .unwrap();
    (key.key_id.to_string(), service_key.unwrap())
}

/// Creates a credential; returns its client id and secret.
pub(crate) fn credential(control: &Control, account: &str, services: &[&str]) -> (String, String) {
    let (
        NewCredentialView {
            credential,
            client_secret,
        },
        _,
    ) = caller_secret::create::<ClientId>(control, &Actor::Admin, account, &new_secret(services))
        .unwrap();
    (credential.client_id.to_string(), client_secret.unwrap())
}

/// Creates an enrollment token.
pub(crate) fn enrollment_token(control: &Control, account: &str, services: &[&str]) -> String {
    let new = NewEnrollmentToken {
        services: owned(services),
        ..NewEnrollmentToken::default()
    };
    enrollment_token::create(control, &Actor::Admin, account, &new)
        .unwrap()
        .token
}

/// Enrolls an agent over HTTPS, as `gw-agent enroll` does, into `state_dir`.
pub(crate) fn agent(
    control: &Control,
    account: &str,
    services: &[&str],
    port: u16,
    ca_file: &Path,
    state_dir: &Path,
) -> AgentId {
    let token = enrollment_token(control, account, services);
    agent_with(
        token,
        &format!("{}:{port}", control.region().base_url()),
        ca_file,
        state_dir,
    )
}

/// Enrolls an agent with a token at `gateway`, a base URL.
pub(crate) fn agent_with(
    token: String,
    gateway: &str,
    ca_file: &Path,
    state_dir: &Path,
) -> AgentId {
    let options = gw_agent::identity::enroll::EnrollmentOptions {
        state_dir: state_dir.to_owned(),
        gateway: Some(gateway.to_owned()),
        token: Some(TokenSource::Text(Secret::new(token))),
        name: Some("test".to_owned()),
        ca_file: Some(ca_file.to_owned()),
        ..gw_agent::identity::enroll::EnrollmentOptions::default()
    };
    gw_agent::identity::enroll::enroll(options, |_| None)
        .unwrap()
        .enrollment
        .agent_id
}

fn owned(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}
