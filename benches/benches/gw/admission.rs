//! Admission of a request: service key or token, and the bucket of the service.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BatchSize, BenchmarkGroup, Criterion};
use gw_base::clock::Timestamp;
use gw_base::service::hostname::Region;
use gw_base::service::rate::Rate;
use gw_base::service::service_settings::ServiceSettings;
use gw_data_plane::support::bench::LabelCounts;
use gw_interface::auth::jwt::Claims;
use gw_interface::auth::{Checks, VerifiedTokens, authenticate};
use gw_interface::rate_limit::Bucket;
use gw_shared::http::Fields;
use gw_shared::http::fields::{X_GW_AUTHORIZATION, X_GW_SERVICE_KEY};
use gw_shared::id::{AccountId, ClientId, KeyId, ServiceId};
use gw_shared::identity::secret::SecretHash;
use gw_store::{
    CallerSecretRecord, Directory, Records, SecretAccess, ServiceRecord, SigningKey, StoredRecord,
};
use http::header::{HeaderName, HeaderValue};

/// Number of services in the directory, each with its own key.
const SERVICES: usize = 1000;
/// A secret as long as an issued one.
const SECRET: &str = "0123456789abcdefghijABCDEFGHIJ0123456789abc";

pub(crate) fn benches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("admission");
    bench_bucket(&mut group);

    let counts = LabelCounts::new(SERVICES);
    let mut number = 0;
    group.bench_function("count a request of one of 1000 services", |bencher| {
        bencher.iter(|| {
            number += 7;
            counts.count(black_box(number));
        });
    });

    let world = World::new();
    let service = Arc::clone(world.directory.service("acme--svc500").unwrap());
    let mut tokens = VerifiedTokens::default();
    let check = |headers: &Fields, tokens: &mut VerifiedTokens| {
        let checks = Checks {
            directory: &world.directory,
            issuer: ISSUER,
            service: &service,
            now: Timestamp::now,
            may_verify: || Ok(()),
        };
        authenticate(checks, tokens, headers).is_ok()
    };
    let good = headers(&X_GW_SERVICE_KEY, &world.key);
    let wrong = headers(
        &X_GW_SERVICE_KEY,
        &format!("{}x", &world.key[..world.key.len() - 1]),
    );
    let token = headers(
        &X_GW_AUTHORIZATION,
        &format!("Bearer {}", world.token(Timestamp::now())),
    );
    assert!(check(&good, &mut tokens) && !check(&wrong, &mut tokens) && check(&token, &mut tokens));
    group.bench_function("service key, right", |bencher| {
        bencher.iter(|| check(&good, &mut tokens));
    });
    group.bench_function("service key, wrong secret", |bencher| {
        bencher.iter(|| check(&wrong, &mut tokens));
    });
    group.bench_function("token, verified before", |bencher| {
        bencher.iter(|| check(&token, &mut tokens));
    });
    group.bench_function("token, new", |bencher| {
        bencher.iter_batched_ref(
            VerifiedTokens::default,
            |tokens| check(&token, tokens),
            BatchSize::SmallInput,
        );
    });
    group.bench_function("token, minted", |bencher| {
        bencher.iter(|| world.token(Timestamp::now()));
    });
    group.finish();
}

fn bench_bucket(group: &mut BenchmarkGroup<'_, WallTime>) {
    group.bench_function("bucket, take", |bencher| {
        let start = Instant::now();
        let mut bucket = Bucket::new(Rate::new(1000, 60_000_000).unwrap(), start);
        let mut now = start;
        // The clock advances, so the bucket is neither always full nor ever empty.
        bencher.iter(|| {
            now += Duration::from_micros(1);
            bucket.take(black_box(now))
        });
    });
    group.bench_function("bucket, refuse", |bencher| {
        let now = Instant::now();
        let mut bucket = Bucket::new(Rate::new(1, 1).unwrap(), now);
        bucket.take(now).unwrap();
        bencher.iter(|| bucket.take(black_box(now)).unwrap_err());
    });
}

const ISSUER: &str = "https://eu1.example.com";

/// A directory of services, each with a key and a credential, and the secrets of `acme--svc500`.
struct World {
    directory: Directory,
    key: String,
    client: ClientId,
}

impl World {
    fn new() -> Self {
        let account = AccountId::new("acme").unwrap();
        let mut records = Records::default();
        let now = Timestamp::now();
        let key_id = KeyId::random();
        let client = ClientId::random();
        for number in 0..SERVICES {
            let id = ServiceId::new(&format!("svc{number}")).unwrap();
            let access = SecretAccess {
                account: account.clone(),
                name: None,
                secret: SecretHash::of(SECRET),
                allowed_services: [id.clone()].into(),
                enabled: true,
                created_at: now,
            };
            let wanted = number == SERVICES / 2;
            let key_id = if wanted {
                key_id.clone()
            } else {
                KeyId::random()
            };
            let client = if wanted {
                client.clone()
            } else {
                ClientId::random()
            };
            records.put(StoredRecord::ServiceKey(CallerSecretRecord {
                id: key_id,
                access: access.clone(),
                managed_by: None,
                later: Default::default(),
            }));
            records.put(StoredRecord::Credential(CallerSecretRecord {
                id: client,
                access,
                managed_by: None,
                later: Default::default(),
            }));
            records.put(StoredRecord::Service(ServiceRecord {
                account: account.clone(),
                id,
                settings: ServiceSettings::default(),
                created_at: now,
                created_ms: None,
                managed_by: None,
                later: Default::default(),
            }));
        }
        records.put(StoredRecord::SigningKey(
            SigningKey::generate(now, now).unwrap(),
        ));
        let directory = Directory::new(&records, &Region::new("eu1", "example.com"), 2);
        Self {
            directory,
            key: format!("gw_sk_{key_id}.{SECRET}"),
            client,
        }
    }

    /// A token as minted by the token endpoint.
    fn token(&self, now: Timestamp) -> String {
        let service = self.directory.service("acme--svc500").unwrap();
        let claims = Claims::new(
            ISSUER,
            &self.client,
            service,
            now,
            Duration::from_secs(3600),
        );
        claims
            .signed_by(self.directory.active_signing_key(now).unwrap())
            .unwrap()
    }
}

fn headers(name: &HeaderName, value: &str) -> Fields {
    let mut headers = Fields::new();
    for name in [
        "accept",
        "accept-encoding",
        "accept-language",
        "cookie",
        "referer",
        "user-agent",
    ] {
        headers.insert(
            HeaderName::from_static(name),
            HeaderValue::from_static("something of a caller"),
        );
    }
    headers.insert(name.clone(), HeaderValue::from_str(value).unwrap());
    headers
}
