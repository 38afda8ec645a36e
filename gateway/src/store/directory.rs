//! The immutable snapshot of all records that every worker holds a reference to.

use std::collections::HashMap;
use std::sync::Arc;

use gw_shared::id::{AccountId, AgentId, KeyId, ServiceId};
use gw_shared::secret::SecretHash;

use super::{Modes, Records};
use crate::hostname::{Region, tenant_label};
use crate::limit::Rate;
use crate::ownership::{self, WorkerId};

/// What admission needs to know, indexed the way it asks.
#[derive(Debug, Default)]
pub struct Directory {
    services: HashMap<Arc<str>, Arc<Service>>,
    service_keys: HashMap<KeyId, ServiceKey>,
    agents: HashMap<AgentId, Agent>,
}

#[derive(Debug)]
pub struct Service {
    /// `{account}--{service}`: the first label of the hostname, and the name by which workers know the service.
    pub label: Arc<str>,
    pub hostname: String,
    /// The worker that holds this service's bucket and tunnels.
    pub owner: WorkerId,
    pub account: AccountId,
    pub id: ServiceId,
    pub modes: Modes,
    pub enabled: bool,
    pub rate: Rate,
}

#[derive(Debug)]
pub struct ServiceKey {
    pub id: KeyId,
    pub account: AccountId,
    pub secret: SecretHash,
    pub allowed_services: Vec<ServiceId>,
    pub enabled: bool,
}

#[derive(Debug)]
pub struct Agent {
    pub account: AccountId,
    pub services: Vec<ServiceId>,
    pub revoked: bool,
}

impl Directory {
    /// Indexes `records` for `workers` workers. Services whose hostname DNS has no room for cannot be reached and are
    /// left out; the store does not take them in the first place.
    pub fn new(records: Records, region: &Region, workers: usize) -> Self {
        let services = records.services.into_iter().filter_map(|record| {
            let label: Arc<str> = tenant_label(&record.account, &record.id)?.into();
            let hostname = region.tenant_hostname(&record.account, &record.id)?;
            let service = Service {
                label: Arc::clone(&label),
                owner: ownership::owner(&hostname, workers),
                hostname,
                account: record.account,
                id: record.id,
                modes: record.modes,
                enabled: record.enabled,
                rate: record.rate,
            };
            Some((label, Arc::new(service)))
        });
        let service_keys = records.service_keys.into_iter().map(|record| {
            let key = ServiceKey {
                id: record.id.clone(),
                account: record.account,
                secret: record.secret,
                allowed_services: record.allowed_services,
                enabled: record.enabled,
            };
            (record.id, key)
        });
        let agents = records.agents.into_iter().map(|record| {
            (record.id, Agent { account: record.account, services: record.services, revoked: record.revoked })
        });
        Self { services: services.collect(), service_keys: service_keys.collect(), agents: agents.collect() }
    }

    pub fn service(&self, label: &str) -> Option<&Arc<Service>> {
        self.services.get(label)
    }

    pub fn service_key(&self, id: &str) -> Option<&ServiceKey> {
        self.service_keys.get(id)
    }

    pub fn agent(&self, id: &str) -> Option<&Agent> {
        self.agents.get(id)
    }
}

impl Agent {
    /// Whether this agent may serve `service` now.
    pub fn may_serve(&self, service: &Service) -> bool {
        !self.revoked && self.account == service.account && self.services.contains(&service.id)
    }
}
