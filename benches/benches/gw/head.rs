//! Request heads: search for the end, and parsing.

use bytes::{Bytes, BytesMut};
use criterion::{Criterion, Throughput};
use gw_shared::http::head::parse_request;
use gw_shared::http::{HeadLimits, HeadScanner};
use std::hint::black_box;

/// Limits of the gateway.
const LIMITS: HeadLimits = HeadLimits {
    head: 32 * 1024,
    fields: 100,
    target: 8 * 1024,
};

pub(crate) fn benches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("head");
    for (name, head) in [
        ("curl", Bytes::from_static(CURL)),
        ("browser, 25 fields", browser().into()),
    ] {
        group.throughput(Throughput::Bytes(head.len() as u64));
        group.bench_function(format!("parse, {name}"), |bencher| {
            bencher.iter(|| parse_request(black_box(&head), LIMITS).unwrap());
        });
        group.bench_function(format!("find end and parse, {name}"), |bencher| {
            // The copy out of the receive buffer is part of the measurement, as in the gateway.
            bencher.iter(|| {
                let mut buffer = BytesMut::from(black_box(&head[..]));
                let end = HeadScanner::default()
                    .find_end(&mut buffer, LIMITS)
                    .unwrap()
                    .unwrap();
                parse_request(&buffer.split_to(end).freeze(), LIMITS).unwrap()
            });
        });
    }
    group.finish();
}

const CURL: &[u8] = b"GET /hello?name=you HTTP/1.1\r\n\
    Host: demo--echo.eu1.example.com\r\n\
    User-Agent: curl/8.14.1\r\n\
    Accept: */*\r\n\
    X-Gw-Service-Key: gw_sk_0123456789abcdef.0123456789abcdefghijklmnopqrstuvwxyzABCDEFG\r\n\r\n";

/// Head of a browser's request behind a content delivery network: 25 fields, 2 KiB.
fn browser() -> Vec<u8> {
    const FIELDS: [(&str, &str); 24] = [
        ("Host", "demo--echo.eu1.example.com"),
        ("Connection", "keep-alive"),
        ("Cache-Control", "max-age=0"),
        (
            "sec-ch-ua",
            "\"Chromium\";v=\"142\", \"Google Chrome\";v=\"142\", \"Not_A Brand\";v=\"99\"",
        ),
        ("sec-ch-ua-mobile", "?0"),
        ("sec-ch-ua-platform", "\"Linux\""),
        ("sec-ch-ua-arch", "\"x86\""),
        ("Upgrade-Insecure-Requests", "1"),
        (
            "User-Agent",
            "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) \
             Chrome/142.0.0.0 Safari/537.36",
        ),
        (
            "Accept",
            "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8",
        ),
        ("Sec-Fetch-Site", "same-origin"),
        ("Sec-Fetch-Mode", "navigate"),
        ("Sec-Fetch-User", "?1"),
        ("Sec-Fetch-Dest", "document"),
        (
            "Referer",
            "https://demo--echo.eu1.example.com/accounts/42/orders?page=3&sort=created_at",
        ),
        ("Accept-Encoding", "gzip, deflate, br, zstd"),
        ("Accept-Language", "en-GB,en;q=0.9,de;q=0.8"),
        ("If-None-Match", "W/\"5f3-18c2a7d4e10\""),
        ("If-Modified-Since", "Tue, 17 Nov 2026 08:12:31 GMT"),
        ("DNT", "1"),
        ("Priority", "u=0, i"),
        ("X-Forwarded-For", "203.0.113.77, 198.51.100.4"),
        ("X-Requested-With", "XMLHttpRequest"),
        (
            "traceparent",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        ),
    ];
    let mut head =
        b"GET /accounts/42/orders/1871?expand=lines&expand=customer HTTP/1.1\r\n".to_vec();
    for (name, value) in FIELDS {
        head.extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
    }
    head.extend_from_slice(format!("Cookie: session={}\r\n\r\n", "a1B2".repeat(200)).as_bytes());
    head
}
