//! May this request pass: its service key, and its service's bucket.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BatchSize, Criterion};
use gw_gateway::auth::{NewServiceKey, authenticate};
use gw_gateway::hostname::Region;
use gw_gateway::limit::{Bucket, Rate};
use gw_gateway::store::{Directory, Modes, Records, ServiceRecord};
use gw_shared::http::fields::X_GW_SERVICE_KEY;
use gw_shared::id::{AccountId, ServiceId};
use http::header::{HeaderMap, HeaderName, HeaderValue};

/// Services in the directory, each with a key of its own.
const SERVICES: usize = 1000;

pub(crate) fn benches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("admission");
    group.bench_function("bucket, take", |bencher| {
        let start = Instant::now();
        let mut bucket = Bucket::new(Rate::new(1000, 60_000_000).unwrap(), start);
        let mut now = start;
        // The clock goes on, so that it is neither always full nor ever empty.
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

    let (directory, key) = directory();
    let service = Arc::clone(directory.service("acme--svc500").unwrap());
    let good = headers(&key);
    let wrong = headers(&format!("{}x", &key[..key.len() - 1]));
    group.bench_function("service key, right", |bencher| {
        let check = |headers| authenticate(&directory, &service, &headers).map(|_| headers).ok();
        assert!(check(good.clone()).is_some());
        bencher.iter_batched(|| good.clone(), check, BatchSize::SmallInput);
    });
    group.bench_function("service key, wrong secret", |bencher| {
        let check = |headers| authenticate(&directory, &service, &headers).map(|_| ()).err();
        assert!(check(wrong.clone()).is_some());
        bencher.iter_batched(|| wrong.clone(), check, BatchSize::SmallInput);
    });
    group.finish();
}

/// A directory of many services and keys, and the text of the key of `acme--svc500`.
fn directory() -> (Directory, String) {
    let account = AccountId::new("acme").unwrap();
    let (mut records, mut text) = (Records::default(), String::new());
    for number in 0..SERVICES {
        let id = ServiceId::new(&format!("svc{number}")).unwrap();
        let key = NewServiceKey::generate(account.clone(), vec![id.clone()]);
        if number == SERVICES / 2 {
            key.text.reveal().clone_into(&mut text);
        }
        records.service_keys.push(key.record);
        records.services.push(ServiceRecord {
            account: account.clone(),
            id,
            modes: Modes { jwt: true, service_key: true },
            enabled: true,
            rate: Rate::new(1000, 300).unwrap(),
        });
    }
    (Directory::new(records, &Region::new("eu1", "example.com"), 2), text)
}

fn headers(key: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for name in ["accept", "accept-encoding", "accept-language", "cookie", "referer", "user-agent"] {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_static("something of a caller"));
    }
    headers.insert(X_GW_SERVICE_KEY, HeaderValue::from_str(key).unwrap());
    headers
}
