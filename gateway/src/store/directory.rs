//! The immutable snapshot of all records that every worker holds a reference to.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use gw_shared::id::{AccountId, AgentId, AuthorityId, ClientId, KeyId, ServiceId, SigningKeyId};
use gw_shared::identity::enrollment::EnrollmentStatus;
use gw_shared::identity::secret::SecretHash;

use rpds::HashTrieMapSync;

use super::signing_key::{self, SigningKey};
use super::{
    AccountRecord, AgentRecord, Modes, PublicKeyHash, RecordId, Records, SecretAccess,
    ServiceRecord, Step, StoredRecord,
};
use crate::affinity::Affinity;
use crate::clock::Timestamp;
use crate::hostname::{Region, tenant_label};
use crate::ownership::{self, WorkerId};
use crate::rate::Rate;

/// The data that admission needs, indexed for its lookups. The maps share their nodes with earlier directories: a copy
/// takes constant time, and a change of one record logarithmic time.
#[derive(Clone, Default)]
pub struct Directory {
    services: HashTrieMapSync<Arc<str>, Arc<Service>>,
    service_keys: HashTrieMapSync<KeyId, SecretAccess>,
    credentials: HashTrieMapSync<ClientId, SecretAccess>,
    agents: HashTrieMapSync<AgentId, Agent>,
    /// Agents by the secret of their enrollment.
    enrollments: HashTrieMapSync<SecretHash, AgentId>,
    signing_keys: Arc<HashMap<SigningKeyId, SigningKey>>,
    /// Signing keys that are stored, and not used because they are not what their id says.
    refused_signing_keys: usize,
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
    /// A safe request that may have reached a backend is tried once more on another agent.
    pub retries: bool,
    pub affinity: Affinity,
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
    /// The administrator's setting; the agent can also say so itself.
    pub standby: bool,
    /// Expiry of the newest certificate; `None` while there is none.
    pub certificate_not_after: Option<Timestamp>,
    /// As [`AgentRecord::authority`].
    pub(crate) authority: Option<AuthorityId>,
    /// Key of the newest certificate, while the key before it is stored too.
    pub(crate) replacing_key: Option<PublicKeyHash>,
    /// Secret of its enrollment, which may have expired.
    enrollment: Option<SecretHash>,
}

impl Directory {
    /// Indexes `records` for `workers` workers. Omits services whose hostname is too long for DNS; the control plane
    /// refuses to create them.
    pub fn new(records: &Records, region: &Region, workers: usize) -> Self {
        let mut directory = Self::default();
        for record in records.services.values() {
            directory.put_service(record, records, region, workers);
        }
        for record in records.service_keys.values() {
            directory
                .service_keys
                .insert_mut(record.id.clone(), record.access.clone());
        }
        for record in records.credentials.values() {
            directory
                .credentials
                .insert_mut(record.id.clone(), record.access.clone());
        }
        for record in records.agents.values() {
            directory.put_agent(record);
        }
        directory.put_signing_keys(records);
        directory
    }

    /// Indexes the records that `steps` have changed. `records` are all records after these steps.
    pub fn apply(&mut self, steps: &[Step], records: &Records, region: &Region, workers: usize) {
        for step in steps {
            match step {
                Step::Put(StoredRecord::Account(AccountRecord { id, .. }))
                | Step::Delete(RecordId::Account(id)) => {
                    // Whether bodies may be captured depends on the account.
                    for record in records.services_of(id) {
                        self.put_service(record, records, region, workers);
                    }
                }
                Step::Put(StoredRecord::Service(record)) => {
                    self.put_service(record, records, region, workers)
                }
                Step::Put(StoredRecord::Credential(record)) => {
                    self.credentials
                        .insert_mut(record.id.clone(), record.access.clone());
                }
                Step::Put(StoredRecord::ServiceKey(record)) => {
                    self.service_keys
                        .insert_mut(record.id.clone(), record.access.clone());
                }
                Step::Put(StoredRecord::Agent(record)) => self.put_agent(record),
                Step::Delete(RecordId::Service(account, id)) => {
                    if let Some(label) = tenant_label(account, id) {
                        self.services.remove_mut(label.as_str());
                    }
                }
                Step::Delete(RecordId::Credential(id)) => drop(self.credentials.remove_mut(id)),
                Step::Delete(RecordId::ServiceKey(id)) => drop(self.service_keys.remove_mut(id)),
                Step::Delete(RecordId::Agent(id)) => {
                    self.forget_enrollment(id);
                    self.agents.remove_mut(id);
                }
                Step::Put(StoredRecord::SigningKey(_)) | Step::Delete(RecordId::SigningKey(_)) => {
                    self.put_signing_keys(records);
                }
                // Admission does not use enrollment tokens. Authorities reach the workers as TLS configurations.
                Step::Put(StoredRecord::EnrollmentToken(_) | StoredRecord::Authority(_))
                | Step::Delete(RecordId::EnrollmentToken(_) | RecordId::Authority(_)) => {}
            }
        }
    }

    fn put_service(
        &mut self,
        record: &ServiceRecord,
        records: &Records,
        region: &Region,
        workers: usize,
    ) {
        let label = tenant_label(&record.account, &record.id);
        let Some((label, hostname)) =
            label.zip(region.tenant_hostname(&record.account, &record.id))
        else {
            return;
        };
        let label: Arc<str> = label.into();
        let may_capture = record.request_logging
            && records
                .accounts
                .get(&record.account)
                .is_some_and(|account| account.capture_allowed);
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
            retries: record.retries,
            affinity: record.affinity.clone(),
        };
        self.services.insert_mut(label, Arc::new(service));
    }

    fn put_agent(&mut self, record: &AgentRecord) {
        self.forget_enrollment(&record.id);
        let agent = Agent::from(record);
        if let Some(secret) = &agent.enrollment {
            self.enrollments
                .insert_mut(secret.clone(), record.id.clone());
        }
        self.agents.insert_mut(record.id.clone(), agent);
    }

    fn forget_enrollment(&mut self, id: &AgentId) {
        if let Some(secret) = self
            .agents
            .get(id)
            .and_then(|agent| agent.enrollment.as_ref())
        {
            self.enrollments.remove_mut(secret);
        }
    }

    fn put_signing_keys(&mut self, records: &Records) {
        let usable = |record| match SigningKey::from_record(record) {
            Ok(key) => Some(key),
            Err(reason) => {
                tracing::error!(kid = %record.id, %reason, "a signing key is not used; `gw-gateway signing-key delete` removes it");
                None
            }
        };
        let keys: Vec<SigningKey> = records.signing_keys.values().filter_map(usable).collect();
        self.refused_signing_keys = records.signing_keys.len() - keys.len();
        self.jwks = signing_key::key_set(&keys);
        self.signing_keys = Arc::new(keys.into_iter().map(|key| (key.id.clone(), key)).collect());
    }

    pub fn services(&self) -> impl Iterator<Item = &Arc<Service>> {
        self.services.values()
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

    /// Number of agents.
    pub(crate) fn agents(&self) -> usize {
        self.agents.size()
    }

    /// Finds the agent by the secret of its enrollment, which may have expired.
    pub fn enrolled(&self, secret: &SecretHash) -> Option<&AgentId> {
        self.enrollments.get(secret)
    }

    /// Hostnames of the services of an agent.
    pub fn hostnames(&self, agent: &Agent) -> Vec<String> {
        let label = |service| tenant_label(&agent.account, service);
        let services = agent
            .services
            .iter()
            .filter_map(|service| self.service(&label(service)?));
        services.map(|service| service.hostname.clone()).collect()
    }

    pub fn signing_key(&self, id: &str) -> Option<&SigningKey> {
        self.signing_keys.get(id)
    }

    /// The latest of the keys that may sign at `now`. If none may sign yet, because the clock was set back, the
    /// earliest.
    pub fn active_signing_key(&self, now: Timestamp) -> Option<&SigningKey> {
        let order = |key: &&SigningKey| (key.active_from, key.id.clone());
        let active = self
            .signing_keys
            .values()
            .filter(|key| key.active_from <= now)
            .max_by_key(order);
        active.or_else(|| self.signing_keys.values().min_by_key(order))
    }

    /// Number of signing keys that are stored, and not used because they are not what their id says.
    pub(crate) fn refused_signing_keys(&self) -> usize {
        self.refused_signing_keys
    }

    /// The public keys as JSON of a JWK Set (RFC 7517 §5).
    pub fn jwks(&self) -> &bytes::Bytes {
        &self.jwks
    }
}

impl From<&AgentRecord> for Agent {
    fn from(record: &AgentRecord) -> Self {
        Self {
            account: record.account.clone(),
            services: record.services.clone(),
            status: record.status,
            standby: record.standby,
            certificate_not_after: record.certificate_not_after,
            authority: record.authority.clone(),
            replacing_key: record.previous_key.as_ref().and(record.key.clone()),
            enrollment: record
                .enrollment
                .as_ref()
                .map(|enrollment| enrollment.secret.clone()),
        }
    }
}

impl SecretAccess {
    /// Whether the secret gives access to `service`.
    pub(crate) fn permits(&self, service: &Service) -> bool {
        self.enabled
            && self.account == service.account
            && self.allowed_services.contains(&service.id)
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
        self.certificate_not_after
            .is_some_and(|not_after| not_after <= now)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::LazyLock;

    use gw_shared::id::EnrollmentId;
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::super::{
        CallerSecretRecord, EnrollmentRecord, EnrollmentTokenRecord, SigningKeyRecord,
    };
    use super::*;
    use crate::store::Approval;

    const WORKERS: usize = 3;

    fn region() -> Region {
        Region::new("eu1", "example.com")
    }

    /// The contents of a directory as text, in a fixed order.
    fn contents(directory: &Directory) -> BTreeMap<String, String> {
        let mut all = BTreeMap::new();
        let mut add = |kind: &str, id: &dyn std::fmt::Debug, value: String| {
            assert!(all.insert(format!("{kind} {id:?}"), value).is_none());
        };
        directory
            .services
            .iter()
            .for_each(|(id, service)| add("service", id, format!("{service:?}")));
        directory
            .service_keys
            .iter()
            .for_each(|(id, access)| add("key", id, format!("{access:?}")));
        directory
            .credentials
            .iter()
            .for_each(|(id, access)| add("credential", id, format!("{access:?}")));
        directory
            .agents
            .iter()
            .for_each(|(id, agent)| add("agent", id, format!("{agent:?}")));
        directory.enrollments.iter().for_each(|(secret, agent)| {
            add("enrollment", &secret.as_bytes(), format!("{agent:?}"))
        });
        directory
            .signing_keys
            .values()
            .for_each(|key| add("signing key", &key.id, key.active_from.to_string()));
        add("jwks", &"", format!("{:?}", directory.jwks));
        all
    }

    static SIGNING_KEYS: LazyLock<[SigningKeyRecord; 3]> = LazyLock::new(|| {
        [(); 3].map(|()| SigningKey::generate(Timestamp(1), Timestamp(1)).unwrap())
    });

    /// Records with few identities, so that steps replace and delete each other's records.
    fn record() -> impl Strategy<Value = StoredRecord> {
        let account =
            || select(vec!["abc", "abd", "b00"]).prop_map(|id| AccountId::new(id).unwrap());
        let service = || select(vec!["0", "api", "zz"]).prop_map(|id| ServiceId::new(id).unwrap());
        let number = || select(vec![1u64, 2, 3]);
        fn id(number: u64, prefix: &str, length: usize) -> String {
            format!("{prefix}{}", number.to_string().repeat(length))
        }
        prop_oneof![
            (account(), any::<bool>()).prop_map(|(id, capture_allowed)| StoredRecord::Account(
                AccountRecord {
                    id,
                    capture_allowed,
                    created_at: Timestamp(1),
                }
            )),
            (account(), service(), any::<[bool; 4]>(), 1u32..9).prop_map(
                |(account, id, flags, burst)| {
                    StoredRecord::Service(ServiceRecord {
                        account,
                        id,
                        modes: Modes {
                            jwt: flags[0],
                            service_key: true,
                        },
                        enabled: flags[1],
                        rate: Rate::new(burst, 1).unwrap(),
                        request_logging: flags[2],
                        capture_request_body: flags[3],
                        capture_response_body: true,
                        retries: flags[3],
                        affinity: if flags[2] {
                            Affinity::Client
                        } else {
                            Affinity::None
                        },
                        created_at: Timestamp(1),
                    })
                }
            ),
            (account(), service(), number(), any::<bool>()).prop_map(
                |(account, service, number, is_key)| {
                    let access = SecretAccess {
                        account,
                        name: None,
                        secret: SecretHash::of("x"),
                        allowed_services: BTreeSet::from([service]),
                        enabled: true,
                        created_at: Timestamp(1),
                    };
                    if is_key {
                        let id = KeyId::new(&id(number, "", 16)).unwrap();
                        StoredRecord::ServiceKey(CallerSecretRecord { id, access })
                    } else {
                        let id = ClientId::new(&id(number, "gw_ci_", 20)).unwrap();
                        StoredRecord::Credential(CallerSecretRecord { id, access })
                    }
                }
            ),
            (account(), service(), number(), 0u8..3, any::<bool>()).prop_map(
                |(account, service, number, secret, standby)| {
                    let enrollment = EnrollmentRecord {
                        id: EnrollmentId::random(),
                        secret: SecretHash::of(&format!("{number} {secret}")),
                        expires_at: Timestamp(1),
                    };
                    StoredRecord::Agent(AgentRecord {
                        id: AgentId::new(&id(number, "ag_", 20)).unwrap(),
                        account,
                        name: "a".to_owned(),
                        services: BTreeSet::from([service]),
                        status: EnrollmentStatus::Approved,
                        standby,
                        ephemeral: false,
                        absent_since: None,
                        enrollment_token: None,
                        version: None,
                        enrollment: (secret > 0).then(|| Box::new(enrollment)),
                        key: None,
                        previous_key: None,
                        certificate_not_after: None,
                        authority: None,
                        created_at: Timestamp(1),
                    })
                }
            ),
            (account(), number()).prop_map(|(account, number)| {
                StoredRecord::EnrollmentToken(EnrollmentTokenRecord {
                    id: gw_shared::id::EnrollmentTokenId::new(&id(number, "", 16)).unwrap(),
                    account,
                    secret: SecretHash::of("y"),
                    services: BTreeSet::new(),
                    approval: Approval::Auto,
                    ephemeral: false,
                    created_at: Timestamp(1),
                    expires_at: Timestamp(2),
                    uses: 1,
                    used: 0,
                    used_by: None,
                })
            }),
            number().prop_map(|number| StoredRecord::SigningKey(
                SIGNING_KEYS[number as usize - 1].clone()
            )),
        ]
    }

    fn step() -> impl Strategy<Value = Step> {
        (record(), any::<bool>()).prop_map(|(record, put)| {
            if put {
                Step::Put(record)
            } else {
                Step::Delete(record.id())
            }
        })
    }

    proptest! {
        #[test]
        fn a_changed_directory_equals_a_new_one(changes in prop::collection::vec(prop::collection::vec(step(), 1..4), 1..12)) {
            let mut records = Records::default();
            let mut directory = Directory::new(&records, &region(), WORKERS);
            for steps in changes {
                let before = directory.clone();
                let earlier = contents(&directory);
                steps.iter().for_each(|step| records.apply(step.clone()));
                directory.apply(&steps, &records, &region(), WORKERS);
                prop_assert_eq!(contents(&directory), contents(&Directory::new(&records, &region(), WORKERS)));
                prop_assert_eq!(contents(&before), earlier, "an earlier directory stays as it was");
            }
        }
    }

    #[test]
    fn a_signing_key_that_is_not_what_its_id_says_is_neither_used_nor_published() {
        let [good, bad] =
            [(); 2].map(|()| SigningKey::generate(Timestamp(1), Timestamp(1)).unwrap());
        let swapped = SigningKeyRecord {
            private_key: good.private_key.clone(),
            ..bad
        };
        let records = Records::from_iter([good.clone(), swapped].map(StoredRecord::SigningKey));
        let directory = Directory::new(&records, &region(), WORKERS);
        assert_eq!(
            directory.signing_keys.keys().collect::<Vec<_>>(),
            [&good.id]
        );
        assert_eq!(directory.refused_signing_keys(), 1);
        let published: serde_json::Value = serde_json::from_slice(directory.jwks()).unwrap();
        assert_eq!(published["keys"].as_array().unwrap().len(), 1);
        assert_eq!(published["keys"][0]["kid"], good.id.as_str());
    }
}
