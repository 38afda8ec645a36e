//! The records of a region and its certificates. Ids and secrets are numbered, so that they are the
//! same in every process.

use std::collections::BTreeSet;
use std::sync::Arc;

use aws_lc_rs::digest;
use gw_base::service::hostname::{self, tenant_label};
use gw_base::service::service_settings::ServiceSettings;
use gw_interface::auth::service_key;
use gw_shared::id::{AccountId, AgentId, KeyId, SECRET_LENGTH, ServiceId};
use gw_shared::identity::enrollment::EnrollmentStatus;
use gw_shared::identity::secret::SecretHash;
use gw_shared::text::hexadecimal;
use gw_store::{
    AccountRecord, AgentRecord, CallerSecretRecord, Directory, Records, SecretAccess, ServicePath,
    ServiceRecord, StoredRecord,
};

use super::certificates::{Certificates, NOT_AFTER, NOT_BEFORE};
use super::{AgentPlan, SetupError};

/// A service to create.
#[derive(Debug, Clone)]
pub struct ServicePlan {
    /// Id of its account, such as `acme`.
    pub account: String,
    /// Id of the service, such as `api`.
    pub id: String,
    /// Its settings, with its rate.
    pub settings: ServiceSettings,
}

/// A service of a region, with a service key that gives access to it.
#[derive(Debug, Clone)]
pub struct PlannedService {
    /// Account and id.
    pub path: ServicePath,
    /// `{account}--{service}`
    pub label: Arc<str>,
    /// Host name.
    pub hostname: String,
    /// Id of the service key.
    pub key_id: KeyId,
    /// The service key, as callers send it in `X-Gw-Service-Key`.
    pub key: String,
}

/// Records and certificates of a region.
pub struct Region {
    name: hostname::Region,
    certificates: Certificates,
    records: Records,
    revision: u64,
}

impl Region {
    /// A region without records: `{label}.{domain}`.
    pub fn new(label: &str, domain: &str) -> Result<Self, SetupError> {
        let name = hostname::Region::new(label, domain);
        Ok(Self {
            certificates: Certificates::new(&name)?,
            name,
            records: Records::default(),
            revision: 0,
        })
    }

    /// Host names of the region.
    pub fn name(&self) -> &hostname::Region {
        &self.name
    }

    /// Certificates of the region.
    pub fn certificates(&self) -> &Certificates {
        &self.certificates
    }

    /// All records.
    pub fn records(&self) -> &Records {
        &self.records
    }

    /// Number of changes so far.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// The directory of the records, for a gateway with this number of workers.
    pub fn directory(&self, workers: usize) -> Arc<Directory> {
        Arc::new(Directory::new(&self.records, &self.name, workers))
    }

    /// Creates or replaces a record.
    pub fn put(&mut self, record: StoredRecord) {
        self.revision += 1;
        self.records.put(record);
    }

    /// Creates a service, its account if there is none, and a service key. Keys have the numbers of
    /// their services.
    pub fn add_service(&mut self, plan: &ServicePlan) -> Result<PlannedService, SetupError> {
        let account = AccountId::new(&plan.account)?;
        let id = ServiceId::new(&plan.id)?;
        let (Some(label), Some(hostname)) = (
            tenant_label(&account, &id),
            self.name.tenant_hostname(&account, &id),
        ) else {
            let message = format!("{account}--{id} is too long for a label of DNS");
            return Err(SetupError::Plan(message));
        };
        let key_id = KeyId::new(&format!("{:016}", self.records.services.len()))?;
        let secret = secret(&label);
        if !self.records.accounts.contains_key(&account) {
            self.put(StoredRecord::Account(AccountRecord {
                id: account.clone(),
                capture_allowed: false,
                domains_max: Default::default(),
                created_at: NOT_BEFORE,
                created_ms: None,
                managed_by: None,
                later: Default::default(),
            }));
        }
        self.put(StoredRecord::Service(ServiceRecord {
            account: account.clone(),
            id: id.clone(),
            settings: plan.settings.clone(),
            created_at: NOT_BEFORE,
            created_ms: None,
            managed_by: None,
            later: Default::default(),
        }));
        self.put(StoredRecord::ServiceKey(CallerSecretRecord {
            id: key_id.clone(),
            access: SecretAccess {
                account: account.clone(),
                name: None,
                secret: SecretHash::of(&secret),
                allowed_services: BTreeSet::from([id.clone()]),
                enabled: true,
                created_at: NOT_BEFORE,
            },
            managed_by: None,
            later: Default::default(),
        }));
        Ok(PlannedService {
            path: ServicePath(account, id),
            label: label.into(),
            hostname,
            key: service_key::text(&key_id, &secret),
            key_id,
        })
    }

    /// Creates the record of an agent that has enrolled and is approved.
    pub fn add_agent(&mut self, plan: &AgentPlan) -> Result<(), SetupError> {
        let (account, services) = plan.services_of_account()?;
        let id = plan.id()?;
        let identity = self.certificates.identity(&account, &id)?;
        self.put(StoredRecord::Agent(AgentRecord {
            name: id.to_string(),
            id,
            account,
            services,
            status: EnrollmentStatus::Approved,
            standby: false,
            ephemeral: false,
            absent_since: None,
            enrollment_token: None,
            version: None,
            enrollment: None,
            key: Some(identity.key),
            previous_key: None,
            certificate_not_after: Some(NOT_AFTER),
            authority: identity.authority,
            created_at: NOT_BEFORE,
            later: Default::default(),
        }));
        Ok(())
    }

    /// Changes the settings of a service.
    pub fn change_service(
        &mut self,
        service: &ServicePath,
        change: impl FnOnce(&mut ServiceSettings),
    ) -> Result<(), SetupError> {
        let record = self.records.services.get(service).cloned();
        let mut record = record.ok_or_else(|| missing("service", service))?;
        change(&mut record.settings);
        self.put(StoredRecord::Service(record));
        Ok(())
    }

    /// Changes the record of an agent, such as its status to [`EnrollmentStatus::Revoked`].
    pub fn change_agent(
        &mut self,
        agent: &AgentId,
        change: impl FnOnce(&mut AgentRecord),
    ) -> Result<(), SetupError> {
        let record = self.records.agents.get(agent).cloned();
        let mut record = record.ok_or_else(|| missing("agent", agent))?;
        change(&mut record);
        self.put(StoredRecord::Agent(record));
        Ok(())
    }

    /// Enables or disables a service key.
    pub fn enable_key(&mut self, key: &KeyId, enabled: bool) -> Result<(), SetupError> {
        let record = self.records.service_keys.get(key).cloned();
        let mut record = record.ok_or_else(|| missing("service key", key))?;
        record.access.enabled = enabled;
        self.put(StoredRecord::ServiceKey(record));
        Ok(())
    }

    /// Deletes the record of an agent.
    pub fn delete_agent(&mut self, agent: &AgentId) {
        self.revision += 1;
        self.records.agents.remove(agent);
    }

    /// Deletes a service.
    pub fn delete_service(&mut self, service: &ServicePath) {
        self.revision += 1;
        self.records.services.remove(service);
    }

    /// Host names of the services of `agent`.
    pub fn hostnames(&self, agent: &AgentRecord) -> Vec<String> {
        let services = agent.services.iter();
        services
            .filter_map(|service| self.name.tenant_hostname(&agent.account, service))
            .collect()
    }
}

/// The secret of the service key for the service with this label.
fn secret(label: &str) -> String {
    let hash = digest::digest(&digest::SHA256, label.as_bytes());
    let mut secret = hexadecimal(hash.as_ref());
    secret.truncate(SECRET_LENGTH);
    secret
}

fn missing(kind: &str, id: &dyn std::fmt::Display) -> SetupError {
    SetupError::Plan(format!("the region has no {kind} {id}"))
}
