//! Services.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use gw_base::clock::Timestamp;
use gw_base::service::hostname::tenant_label;
use gw_base::service::service_settings::ServiceSettings;
use gw_region::owners::ownership;
use gw_region::owners::ownership::WorkerId;
use gw_shared::id::{AccountId, InvalidId, ManagerName, ServiceId};
use gw_shared::version::later_members::LaterMembers;
use rpds::HashTrieMapSync;
use serde::{Deserialize, Serialize};

use super::{Directory, Indexing, RecordKind, Records};

/// A service of an account, with its settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceRecord {
    /// Account that the service belongs to.
    pub account: AccountId,
    /// Id of the service, unique in its account.
    pub id: ServiceId,
    /// Settings of the service.
    #[serde(flatten)]
    pub settings: ServiceSettings,
    /// Time of creation; 0 in records of earlier versions.
    #[serde(default)]
    pub created_at: Timestamp,
    /// The first millisecond after the creation, Unix time; `None` in records of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_ms: Option<u64>,
    /// What manages the record by documents; `None` if nothing does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub managed_by: Option<ManagerName>,
    /// Members of a later version.
    #[serde(flatten)]
    pub later: LaterMembers,
}

/// The identity of a service: `account/service`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ServicePath(pub AccountId, pub ServiceId);

impl fmt::Display for ServicePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.0, self.1)
    }
}

impl FromStr for ServicePath {
    type Err = InvalidId;

    fn from_str(text: &str) -> Result<Self, InvalidId> {
        let (account, service) = text.split_once('/').unwrap_or((text, ""));
        Ok(Self(account.parse()?, service.parse()?))
    }
}

/// A service as workers use it, from its [`ServiceRecord`].
#[derive(Debug)]
pub struct Service {
    /// `{account}--{service}`: the first label of the hostname, and the name of the service within
    /// workers.
    pub label: Arc<str>,
    /// `{account}--{service}.{region}.{domain}`
    pub hostname: Box<str>,
    /// The worker that holds the bucket and the tunnels of this service.
    pub owner: WorkerId,
    /// Account that the service belongs to.
    pub account: AccountId,
    /// Id of the service, unique in its account.
    pub id: ServiceId,
    /// Unix time of the creation in milliseconds. Tells services of the same name apart.
    pub created_ms: u64,
    /// Settings of the service.
    pub settings: ServiceSettings,
    /// As the settings say, if the account may capture.
    pub captures: Captures,
}

/// Which bodies are captured in the request log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Captures {
    /// Bodies of requests are captured.
    pub requests: bool,
    /// Bodies of responses are captured.
    pub responses: bool,
}

impl Service {
    /// `aud` of the service's tokens: `https://{hostname}`, never with a port.
    pub fn audience(&self) -> String {
        format!("https://{}", self.hostname)
    }

    /// Whether `aud` is that of the service's tokens.
    pub fn is_audience(&self, aud: &str) -> bool {
        aud.strip_prefix("https://") == Some(&*self.hostname)
    }
}

impl RecordKind for ServiceRecord {
    type Id = ServicePath;
    /// By the label of the service.
    type Index = HashTrieMapSync<Arc<str>, Arc<Service>>;

    fn id(&self) -> ServicePath {
        ServicePath(self.account.clone(), self.id.clone())
    }

    /// Omits a service whose hostname is too long for DNS; the control plane refuses to create it.
    fn put_into(&self, directory: &mut Directory, all: &Indexing<'_>) {
        let label = tenant_label(&self.account, &self.id);
        let Some((label, hostname)) =
            label.zip(all.region.tenant_hostname(&self.account, &self.id))
        else {
            return;
        };
        let label: Arc<str> = label.into();
        let may_capture = self.settings.request_logging
            && all
                .records
                .accounts
                .get(&self.account)
                .is_some_and(|account| account.capture_allowed);
        let service = Service {
            label: Arc::clone(&label),
            owner: ownership::owner(&hostname, all.workers),
            hostname: hostname.into(),
            account: self.account.clone(),
            id: self.id.clone(),
            created_ms: self.created_ms.unwrap_or(self.created_at.unix_ms()),
            captures: Captures {
                requests: may_capture && self.settings.capture_request_body,
                responses: may_capture && self.settings.capture_response_body,
            },
            settings: self.settings.clone(),
        };
        directory.services.insert_mut(label, Arc::new(service));
    }

    fn remove_from(id: &ServicePath, directory: &mut Directory, _: &Indexing<'_>) {
        if let Some(label) = tenant_label(&id.0, &id.1) {
            directory.services.remove_mut(label.as_str());
        }
    }

    #[cfg(test)]
    fn sample() -> Self {
        use gw_base::service::service_settings::Modes;
        Self {
            account: AccountId::new("acme").unwrap(),
            id: ServiceId::new("api").unwrap(),
            settings: ServiceSettings {
                modes: Modes {
                    jwt: true,
                    service_key: false,
                },
                capture_response_body: true,
                retries: false,
                affinity: "cookie:sid".parse().unwrap(),
                hsts_max_age_seconds: 300,
                ..ServiceSettings::default()
            },
            created_at: Timestamp(2),
            created_ms: Some(2_001),
            managed_by: ManagerName::new("git").ok(),
            later: LaterMembers::default(),
        }
    }
}

impl Records {
    /// The services of an account, by id.
    pub fn services_of(&self, account: &AccountId) -> impl Iterator<Item = &ServiceRecord> {
        let of_account = self
            .services
            .range(ServicePath(account.clone(), ServiceId::lower_bound())..);
        of_account
            .map(|(_, record)| record)
            .take_while(|record| record.account == *account)
    }
}

impl Directory {
    /// Returns all services, in no particular order.
    pub fn services(&self) -> impl Iterator<Item = &Arc<Service>> {
        self.services.values()
    }

    /// Returns the service with the label `{account}--{service}`.
    pub fn service(&self, label: &str) -> Option<&Arc<Service>> {
        self.services.get(label)
    }
}

#[cfg(test)]
mod tests {
    use gw_base::service::affinity::Affinity;

    use super::super::StoredRecord;
    use super::*;

    #[test]
    fn a_service_of_an_earlier_version_gets_defaults_and_keeps_its_document() {
        let document = concat!(
            r#"{"account":"acme","id":"api","modes":{"jwt":true,"service_key":false},"#,
            r#""enabled":true,"rate":{"burst":7,"refill_per_minute":8},"request_logging":true,"#,
            r#""capture_request_body":false,"capture_response_body":true,"created_at":1}"#,
        );
        let StoredRecord::Service(service) = StoredRecord::read("service", document).unwrap()
        else {
            unreachable!()
        };
        assert_eq!(
            (service.settings.retries, &service.settings.affinity),
            (true, &Affinity::None)
        );
        assert_eq!(service.settings.hsts_max_age_seconds, 0);
        assert_eq!(
            StoredRecord::Service(service.clone()).document().unwrap(),
            document
        );
        let changed = ServiceRecord {
            settings: ServiceSettings {
                retries: false,
                affinity: Affinity::Client,
                hsts_max_age_seconds: 300,
                ..service.settings
            },
            ..service
        };
        let document = StoredRecord::Service(changed.clone()).document().unwrap();
        assert!(
            document.ends_with(
                r#","retries":false,"affinity":"client","hsts_max_age_seconds":300,"created_at":1}"#
            ),
            "{document}"
        );
        let StoredRecord::Service(read) = StoredRecord::read("service", &document).unwrap() else {
            unreachable!()
        };
        assert_eq!(read, changed);
    }
}
