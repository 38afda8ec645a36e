//! Tests of records of all kinds.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use gw_base::clock::Timestamp;
use gw_base::service::affinity::Affinity;
use gw_base::service::rate::Rate;
use gw_base::service::service_settings::{Modes, ServiceSettings};
use gw_shared::id::{AccountId, AgentId, EnrollmentId, ServiceId};
use gw_shared::identity::enrollment::EnrollmentStatus;
use gw_shared::identity::secret::SecretHash;
use proptest::prelude::*;
use proptest::sample::select;

use super::*;

const WORKERS: usize = 3;

/// Services in samples of records.
pub(super) fn services() -> BTreeSet<ServiceId> {
    ["api", "b--c"].map(|id| id.parse().unwrap()).into()
}

fn region() -> Region {
    Region::new("eu1", "example.com")
}

#[test]
fn compact_maps_have_the_same_records() {
    for count in [0, 1, 2, 1000] {
        let numbers: BTreeMap<u32, u32> = (0..count).map(|number| (number, number)).collect();
        let mut compacted = numbers.clone();
        compact(&mut compacted);
        assert_eq!(compacted, numbers);
    }
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
        .agents
        .iter()
        .for_each(|(id, agent)| add("agent", id, format!("{agent:?}")));
    directory
        .agents
        .enrollments
        .iter()
        .for_each(|(secret, agent)| add("enrollment", &secret.as_bytes(), format!("{agent:?}")));
    directory
        .signing_keys
        .keys
        .values()
        .for_each(|key| add("signing key", &key.id, key.active_from.to_string()));
    add("jwks", &"", format!("{:?}", directory.jwks()));
    all
}

static SIGNING_KEYS: LazyLock<[SigningKeyRecord; 3]> =
    LazyLock::new(|| [(); 3].map(|()| SigningKey::generate(Timestamp(1), Timestamp(1)).unwrap()));

fn account() -> impl Strategy<Value = AccountId> {
    select(vec!["abc", "abd", "b00"]).prop_map(|id| AccountId::new(id).unwrap())
}

fn service() -> impl Strategy<Value = ServiceId> {
    select(vec!["0", "api", "zz"]).prop_map(|id| ServiceId::new(id).unwrap())
}

fn number() -> impl Strategy<Value = u64> {
    select(vec![1u64, 2, 3])
}

fn id(number: u64, prefix: &str, length: usize) -> String {
    format!("{prefix}{}", number.to_string().repeat(length))
}

fn account_record() -> impl Strategy<Value = StoredRecord> {
    (account(), any::<bool>(), 0..200u32).prop_map(|(id, capture_allowed, domains_max)| {
        StoredRecord::Account(AccountRecord {
            id,
            capture_allowed,
            domains_max: domains_max.try_into().unwrap(),
            created_at: Timestamp(1),
            created_ms: None,
            managed_by: None,
            later: Default::default(),
        })
    })
}

fn service_record() -> impl Strategy<Value = StoredRecord> {
    (account(), service(), any::<[bool; 4]>(), 1u32..9).prop_map(|(account, id, flags, burst)| {
        StoredRecord::Service(ServiceRecord {
            account,
            id,
            settings: ServiceSettings {
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
                hsts_max_age_seconds: burst - 1,
            },
            created_at: Timestamp(1),
            created_ms: None,
            managed_by: None,
            later: Default::default(),
        })
    })
}

fn caller_secret() -> impl Strategy<Value = StoredRecord> {
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
                StoredRecord::ServiceKey(CallerSecretRecord {
                    id,
                    access,
                    managed_by: None,
                    later: Default::default(),
                })
            } else {
                let id = ClientId::new(&id(number, "gw_ci_", 20)).unwrap();
                StoredRecord::Credential(CallerSecretRecord {
                    id,
                    access,
                    managed_by: None,
                    later: Default::default(),
                })
            }
        },
    )
}

fn agent() -> impl Strategy<Value = StoredRecord> {
    (account(), service(), number(), 0u8..3, any::<bool>()).prop_map(
        |(account, service, number, secret, standby)| {
            let enrollment = EnrollmentRecord {
                id: EnrollmentId::random(),
                secret: SecretHash::of(&format!("{number} {secret}")),
                expires_at: Timestamp(1),
                later: Default::default(),
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
                later: Default::default(),
            })
        },
    )
}

fn enrollment_token() -> impl Strategy<Value = StoredRecord> {
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
            later: Default::default(),
        })
    })
}

fn signing_key() -> impl Strategy<Value = StoredRecord> {
    number().prop_map(|number| StoredRecord::SigningKey(SIGNING_KEYS[number as usize - 1].clone()))
}

/// Records with few identities, so that steps replace and delete each other's records.
fn record() -> impl Strategy<Value = StoredRecord> {
    prop_oneof![
        account_record(),
        service_record(),
        caller_secret(),
        agent(),
        enrollment_token(),
        signing_key(),
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
    fn a_changed_directory_equals_a_new_one(
        changes in prop::collection::vec(prop::collection::vec(step(), 1..4), 1..12),
    ) {
        let mut records = Records::default();
        let mut directory = Directory::new(&records, &region(), WORKERS);
        for steps in changes {
            let before = directory.clone();
            let earlier = contents(&directory);
            steps.iter().for_each(|step| records.apply(step.clone()));
            directory.apply(&steps, &records, &region(), WORKERS);
            prop_assert_eq!(
                contents(&directory),
                contents(&Directory::new(&records, &region(), WORKERS))
            );
            prop_assert_eq!(contents(&before), earlier, "an earlier directory stays as it was");
        }
    }
}

#[test]
fn records_keep_members_of_a_later_version() {
    for record in StoredRecord::samples() {
        let (kind, _) = record.id().columns();
        // The outermost object names the kind. Members of a record are only added to the record
        // itself, which keeps them.
        let path = format!("/{kind}");
        let kept = later_member::pass(&record, &[""]);
        let expected = match &record {
            StoredRecord::Agent(_) => vec![path.clone(), format!("{path}/enrollment")],
            _ => vec![path.clone()],
        };
        assert_eq!(kept, expected);
        assert_eq!(
            later_member::pass(&Step::Put(record), &["", "/put"])[0],
            format!("/put{path}")
        );
    }
}

#[path = "../../../../shared/tests/later_member/mod.rs"]
mod later_member;
