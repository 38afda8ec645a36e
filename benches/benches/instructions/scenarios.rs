//! The relayed requests and responses.

use std::cell::Cell;
use std::rc::Rc;

use bytes::Bytes;
use gw_agent::support::bench::CannedBackend;
use gw_data_plane::support::http1_caller::Http1Caller;
use gw_data_plane::support::memory_worker::{HOST, MemoryWorker, SERVICE_KEY};
use gw_shared::runtime::{self, Driver};
use tokio::sync::oneshot;

use crate::http2_caller::Http2Caller;
use crate::world;

/// Requests of one kind, relayed one after another by each of a number of callers.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// Requests at once: connections of HTTP/1.1, or streams of one connection of HTTP/2.
    callers: u32,
    /// Relayed before the measurement: connections, buffers and tables have their size then.
    warm_up: u32,
    /// Measured requests. A multiple of the records that the request log takes at once.
    pub(crate) requests: u32,
    request: RequestKind,
    response_body: usize,
}

enum RequestKind {
    Http1 { fields: usize, body: usize },
    Http2,
}

const SMALL: usize = 98;

/// All scenarios, in the order of the report.
pub(crate) const ALL: [Scenario; 7] = [
    Scenario {
        name: "get",
        callers: 1,
        warm_up: 512,
        requests: 2048,
        request: RequestKind::Http1 { fields: 4, body: 0 },
        response_body: SMALL,
    },
    Scenario {
        name: "get-30-fields",
        callers: 1,
        warm_up: 512,
        requests: 2048,
        request: RequestKind::Http1 {
            fields: 30,
            body: 0,
        },
        response_body: SMALL,
    },
    Scenario {
        name: "get-64-at-once",
        callers: 64,
        warm_up: 512,
        requests: 2048,
        request: RequestKind::Http1 { fields: 4, body: 0 },
        response_body: SMALL,
    },
    Scenario {
        name: "get-http2",
        callers: 1,
        warm_up: 512,
        requests: 2048,
        request: RequestKind::Http2,
        response_body: SMALL,
    },
    Scenario {
        name: "get-http2-64-at-once",
        callers: 64,
        warm_up: 512,
        requests: 2048,
        request: RequestKind::Http2,
        response_body: SMALL,
    },
    Scenario {
        name: "post-1-kib",
        callers: 1,
        warm_up: 512,
        requests: 2048,
        request: RequestKind::Http1 {
            fields: 6,
            body: 1024,
        },
        response_body: SMALL,
    },
    Scenario {
        name: "download-256-kib",
        callers: 1,
        warm_up: 128,
        requests: 512,
        request: RequestKind::Http1 { fields: 4, body: 0 },
        response_body: 256 * 1024,
    },
];

/// Relays the requests of a scenario. `begin` is called between the warm-up and the measured
/// requests.
pub(crate) fn relay(scenario: &'static Scenario, begin: fn()) {
    // Not io_uring, which valgrind does not know. The reactor only runs the tasks: there is no I/O.
    let driver = Driver::Epoll {
        reason: "benchmark".to_owned(),
    };
    let relayed = driver.block_on(async {
        let gateway = world::start(&scenario.backend()).await;
        match scenario.request {
            RequestKind::Http1 { fields, body } => {
                let request = http1_request(fields, body);
                scenario
                    .relay_http1(&gateway, &request, scenario.warm_up)
                    .await;
                begin();
                scenario
                    .relay_http1(&gateway, &request, scenario.requests)
                    .await;
            }
            RequestKind::Http2 => {
                let mut caller = Http2Caller::new(&gateway);
                scenario.relay_http2(&mut caller, scenario.warm_up).await;
                begin();
                scenario.relay_http2(&mut caller, scenario.requests).await;
            }
        }
        assert_eq!(gateway.open_streams(), 0);
    });
    relayed.unwrap();
}

impl Scenario {
    fn backend(&self) -> CannedBackend {
        let mut response = format!(
            "HTTP/1.1 200 OK\r\nServer: nginx\r\nDate: Sun, 22 Nov 2026 10:00:00 GMT\r\n\
             Content-Type: text/plain\r\nContent-Length: {}\r\nConnection: keep-alive\r\n\r\n",
            self.response_body
        )
        .into_bytes();
        response.resize(response.len() + self.response_body, b'x');
        let body_length = match self.request {
            RequestKind::Http1 { body, .. } => body,
            RequestKind::Http2 => 0,
        };
        CannedBackend {
            response: response.into(),
            body_length,
            connections: self.callers,
        }
    }

    async fn relay_http1(
        &'static self,
        gateway: &Rc<MemoryWorker>,
        request: &Bytes,
        requests: u32,
    ) {
        let left = Rc::new(Cell::new(self.callers));
        let (done, wait) = oneshot::channel();
        let done = Rc::new(Cell::new(Some(done)));
        for _ in 0..self.callers {
            let mut caller = Http1Caller::new(gateway);
            let request = request.clone();
            let left = Rc::clone(&left);
            let done = Rc::clone(&done);
            runtime::spawn(async move {
                for _ in 0..requests / self.callers {
                    let response = caller.relay(&request).await.unwrap();
                    assert!(
                        response.starts_with(b"HTTP/1.1 200 OK\r\n")
                            && response.len() > self.response_body,
                        "{}",
                        String::from_utf8_lossy(response)
                    );
                }
                left.set(left.get() - 1);
                if left.get() == 0 {
                    done.take().unwrap().send(()).unwrap();
                }
            });
        }
        // Only the callers hold it now: the wait fails if one panicked.
        drop(done);
        wait.await.unwrap();
    }

    async fn relay_http2(&self, caller: &mut Http2Caller, requests: u32) {
        for _ in 0..requests / self.callers {
            let bytes = caller.relay(self.callers).await;
            assert_eq!(bytes, Some(self.response_body * self.callers as usize));
        }
    }
}

/// A request with so many fields in all.
fn http1_request(fields: usize, body: usize) -> Bytes {
    let (method, length) = if body > 0 {
        ("POST", format!("{body}"))
    } else {
        ("GET", String::new())
    };
    let first = [
        ("Host", HOST),
        ("User-Agent", "curl/8.14.1"),
        ("Accept", "*/*"),
        ("X-Gw-Service-Key", SERVICE_KEY),
        ("Content-Type", "application/json"),
        ("Content-Length", &length),
    ];
    let mut request = format!("{method} /hello?name=you HTTP/1.1\r\n");
    for (name, value) in first
        .iter()
        .chain(&BROWSER)
        .filter(|(_, value)| !value.is_empty())
        .take(fields)
    {
        request.push_str(&format!("{name}: {value}\r\n"));
    }
    request.push_str("\r\n");
    let mut request = request.into_bytes();
    request.resize(request.len() + body, b'x');
    request.into()
}

/// Fields of a browser behind a content delivery network, and of an application.
const BROWSER: [(&str, &str); 25] = [
    ("Cache-Control", "max-age=0"),
    (
        "sec-ch-ua",
        "\"Chromium\";v=\"142\", \"Google Chrome\";v=\"142\", \"Not_A Brand\";v=\"99\"",
    ),
    ("sec-ch-ua-mobile", "?0"),
    ("sec-ch-ua-platform", "\"Linux\""),
    ("sec-ch-ua-arch", "\"x86\""),
    ("Upgrade-Insecure-Requests", "1"),
    ("Sec-Fetch-Site", "same-origin"),
    ("Sec-Fetch-Mode", "navigate"),
    ("Sec-Fetch-User", "?1"),
    ("Sec-Fetch-Dest", "document"),
    (
        "Referer",
        "https://acme--api.bench.localhost/accounts/42/orders?page=3&sort=created_at",
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
    ("X-Real-IP", "203.0.113.77"),
    (
        "Cookie",
        "session=a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2",
    ),
    ("X-Request-Start", "t=1795341600.123"),
    ("Via", "1.1 edge"),
    ("Pragma", "no-cache"),
];
