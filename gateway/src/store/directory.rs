//! The immutable snapshot of all records that every worker holds a reference to.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use gw_shared::id::{AccountId, AgentId, ClientId, KeyId, ServiceId, SigningKeyId};
use gw_shared::identity::enrollment::EnrollmentStatus;

use super::signing_key::{self, SigningKey};
use super::{Modes, Records, SecretAccess};
use crate::clock::Timestamp;
use crate::hostname::{Region, tenant_label};
use crate::ownership::{self, WorkerId};
use crate::rate::Rate;

/// The data that admission needs, indexed for its lookups.
#[derive(Default)]
pub struct Directory {
    services: HashMap<Arc<str>, Arc<Service>>,
    service_keys: HashMap<KeyId, SecretAccess>,
    credentials: HashMap<ClientId, SecretAccess>,
    agents: HashMap<AgentId, Agent>,
    signing_keys: HashMap<SigningKeyId, SigningKey>,
    jwks: bytes::Bytes,
}

#[derive(Debug)]
pub struct Service {
    /// `{account}--{service}`: the first label of the hostname, and the name of the service within workers.
    pub label: Arc<str>,
    pub hostname: String,
    /// `aud` of the service's tokens: `https://{hostname}`, never with a port.
    pub audience: String,
    /// The worker that holds the bucket and the tunnels of this service.
    pub owner: WorkerId,
    pub account: AccountId,
    pub id: ServiceId,
    pub modes: Modes,
    pub enabled: bool,
    pub rate: Rate,
    pub request_logging: bool,
    pub captures: Captures,
}

/// Which bodies are captured in the request log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Captures {
    pub requests: bool,
    pub responses: bool,
}

#[derive(Debug)]
pub struct Agent {
    pub account: AccountId,
    pub services: BTreeSet<ServiceId>,
    pub status: EnrollmentStatus,
    /// Expiry of the newest certificate; `None` while there is none.
    pub certificate_not_after: Option<Timestamp>,
}

impl Directory {
    /// Indexes `records` for `workers` workers. Omits services whose hostname is too long for DNS; the control plane
    /// refuses to create them.
    pub fn new(records: &Records, region: &Region, workers: usize) -> Self {
        let services = records.services.values().filter_map(|record| {
            let label: Arc<str> = tenant_label(&record.account, &record.id)?.into();
            let hostname = region.tenant_hostname(&record.account, &record.id)?;
            let may_capture = record.request_logging
                && records.accounts.get(&record.account).is_some_and(|account| account.capture_allowed);
            let service = Service {
                label: Arc::clone(&label),
                owner: ownership::owner(&hostname, workers),
                audience: format!("https://{hostname}"),
                hostname,
                account: record.account.clone(),
                id: record.id.clone(),
                modes: record.modes,
                enabled: record.enabled,
                rate: record.rate,
                request_logging: record.request_logging,
                captures: Captures {
                    requests: may_capture && record.capture_request_body,
                    responses: may_capture && record.capture_response_body,
                },
            };
            Some((label, Arc::new(service)))
        });
        let service_keys = records.service_keys.values().map(|record| (record.id.clone(), record.access.clone()));
        let credentials = records.credentials.values().map(|record| (record.id.clone(), record.access.clone()));
        let agents = records.agents.values().map(|record| {
            let agent = Agent {
                account: record.account.clone(),
                services: record.services.clone(),
                status: record.status,
                certificate_not_after: record.certificate_not_after,
            };
            (record.id.clone(), agent)
        });
        let signing_keys = records.signing_keys.values().filter_map(SigningKey::from_record);
        Self {
            services: services.collect(),
            service_keys: service_keys.collect(),
            credentials: credentials.collect(),
            agents: agents.collect(),
            signing_keys: signing_keys.map(|key| (key.id.clone(), key)).collect(),
            jwks: signing_key::key_set(records.signing_keys.values()),
        }
    }

    pub fn service(&self, label: &str) -> Option<&Arc<Service>> {
        self.services.get(label)
    }

    pub fn service_key(&self, id: &str) -> Option<(&KeyId, &SecretAccess)> {
        self.service_keys.get_key_value(id)
    }

    pub fn credential(&self, id: &str) -> Option<(&ClientId, &SecretAccess)> {
        self.credentials.get_key_value(id)
    }

    pub fn agent(&self, id: &str) -> Option<&Agent> {
        self.agents.get(id)
    }

    /// Hostnames of the services of an agent.
    pub fn hostnames(&self, agent: &Agent) -> Vec<String> {
        let label = |service| tenant_label(&agent.account, service);
        let services = agent.services.iter().filter_map(|service| self.service(&label(service)?));
        services.map(|service| service.hostname.clone()).collect()
    }

    pub fn signing_key(&self, id: &str) -> Option<&SigningKey> {
        self.signing_keys.get(id)
    }

    /// The latest of the keys that may sign at `now`. If none may sign yet, because the clock was set back, the
    /// earliest.
    pub fn active_signing_key(&self, now: Timestamp) -> Option<&SigningKey> {
        let order = |key: &&SigningKey| (key.active_from, key.id.clone());
        let active = self.signing_keys.values().filter(|key| key.active_from <= now).max_by_key(order);
        active.or_else(|| self.signing_keys.values().min_by_key(order))
    }

    /// The public keys as JSON of a JWK Set (RFC 7517 §5).
    pub fn jwks(&self) -> &bytes::Bytes {
        &self.jwks
    }
}

impl SecretAccess {
    /// Whether the secret gives access to `service`.
    pub(crate) fn permits(&self, service: &Service) -> bool {
        self.enabled && self.account == service.account && self.allowed_services.contains(&service.id)
    }
}

impl Agent {
    /// Whether this agent may serve `service`.
    pub fn may_serve(&self, service: &Service) -> bool {
        self.status == EnrollmentStatus::Approved
            && self.account == service.account
            && self.services.contains(&service.id)
    }

    /// Whether the newest certificate has expired.
    pub fn is_expired(&self, now: Timestamp) -> bool {
        self.certificate_not_after.is_some_and(|not_after| not_after <= now)
    }
}
