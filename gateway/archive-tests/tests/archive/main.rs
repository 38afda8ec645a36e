//! The archive of the request log on a real S3-compatible server.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests stop at the first surprise"
)]

mod faults;
mod log;
mod server;

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use gw_gateway::Gateway;
use gw_gateway::process::doctor;
use gw_interface::config::Config;
use gw_region::{RegionKey, RegionKeys};
use gw_shared::doctor::Verdict;
use gw_shared::id::RequestId;
use gw_telemetry::request_log::archive::{Archive, ArchiveError};
use gw_telemetry::request_log::{BodyView, RequestRecord, SearchQuery, Side, Timing};
use rustls::{ClientConnection, StreamOwned};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

use self::log::{
    Clock, DAY_MS, HOUR_MS, LABEL, MORNING_MS, Node, all, captured, id, key, record, slot, write,
};
use self::server::Server;

/// Records of two services over two days, some of them captured, in several uploads.
fn write_many(node: &Node) -> Vec<RequestId> {
    let mut ids = Vec::new();
    for number in 0..600_u64 {
        let id = id(MORNING_MS - number * number * 331 % DAY_MS, number);
        let plain = if number % 7 == 0 {
            captured(id, &number.to_be_bytes(), b"")
        } else {
            record(id)
        };
        let record = RequestRecord {
            status: [Some(200), Some(404), Some(502), None][number as usize % 4],
            code: (number % 4 == 2).then_some("GW_TUNNEL_LOST"),
            timing: Timing {
                total: number * 1000,
                ..Timing::default()
            },
            ..plain
        };
        node.write(
            if number % 3 == 0 {
                "globex--shop"
            } else {
                LABEL
            },
            vec![record],
        );
        ids.push(id);
        if number % 150 == 0 {
            node.log.flush_archive().unwrap();
        }
    }
    node.log.flush_archive().unwrap();
    ids
}

fn queries() -> [SearchQuery; 10] {
    let text = |text: &str| Some(text.to_owned());
    let everything = SearchQuery::default();
    [
        everything.clone(),
        SearchQuery {
            limit: Some(7),
            ..everything.clone()
        },
        SearchQuery {
            account: text("acme"),
            ..everything.clone()
        },
        SearchQuery {
            account: text("globex"),
            service: text("shop"),
            ..everything.clone()
        },
        SearchQuery {
            status: text("5xx"),
            ..everything.clone()
        },
        SearchQuery {
            status: text("none"),
            limit: Some(1),
            ..everything.clone()
        },
        SearchQuery {
            code: text("GW_TUNNEL_LOST"),
            min_ms: Some(100),
            ..everything.clone()
        },
        SearchQuery {
            since: text("2026-11-20T22:00:00.5+01:00"),
            ..everything.clone()
        },
        SearchQuery {
            until: text("2026-11-20T22:00:00.5+01:00"),
            ..everything.clone()
        },
        SearchQuery {
            path_prefix: text("/b"),
            ..everything.clone()
        },
    ]
}

#[test]
fn the_log_of_a_node_that_is_gone_is_read_from_the_archive() {
    let server = Server::start();
    let clock = Clock::at(MORNING_MS);
    let node = Node::start(&clock, slot(7), &server.settings());
    let ids = write_many(&node);
    let queries = queries();
    let local: Vec<_> = queries
        .iter()
        .map(|query| all(query, |query| Ok(node.log.search(query)?)))
        .collect();
    assert_eq!(local[0].len(), 600);
    let views: Vec<_> = ids.iter().map(|id| node.log.show(*id).unwrap()).collect();
    let body = node.log.body(ids[7], Side::Request).unwrap();
    drop(node);

    let archive = clock.archive(&server.settings(), &key());
    for (query, local) in queries.iter().zip(&local) {
        assert_eq!(
            &all(query, |query| archive.search(slot(7), query)),
            local,
            "{query:?}"
        );
    }
    for (id, view) in ids.iter().zip(&views).step_by(41) {
        assert_eq!(&archive.show(slot(7), *id).unwrap(), view);
    }
    captured_messages_are_read(&archive, &ids, body);

    assert_eq!(archive.show(slot(8), ids[7]).unwrap(), None, "another node");
    assert_eq!(
        archive.show(slot(7), id(MORNING_MS, 9999)).unwrap(),
        None,
        "unknown"
    );
    assert_eq!(
        archive
            .show(slot(7), id(MORNING_MS - 9 * DAY_MS, 0))
            .unwrap(),
        None,
        "expired"
    );
    assert!(matches!(
        archive.search(slot(7), &SearchQuery { limit: Some(0), ..SearchQuery::default() }),
        Err(ArchiveError::Log(error)) if error.to_string().starts_with("limit: ")
    ));
    assert_eq!(archive.stats().refused, 0);
}

fn captured_messages_are_read(archive: &Archive, ids: &[RequestId], body: Option<BodyView>) {
    assert_eq!(archive.body(slot(7), ids[7], Side::Request).unwrap(), body);
    assert_eq!(body.unwrap().bytes, 7_u64.to_be_bytes());
    assert_eq!(
        archive
            .body(slot(7), ids[7], Side::Response)
            .unwrap()
            .unwrap()
            .bytes,
        b""
    );
    assert_eq!(
        archive.body(slot(7), ids[1], Side::Request).unwrap(),
        None,
        "not captured"
    );
    let replay = archive.captured(slot(7), ids[7]).unwrap().unwrap();
    assert_eq!(
        (replay.method.as_str(), replay.target.as_str()),
        ("GET", "/a/b?c")
    );
    assert_eq!(replay.request.unwrap().headers.get_all("x-a").count(), 2);
    assert!(
        archive
            .captured(slot(7), ids[1])
            .unwrap()
            .unwrap()
            .request
            .is_none()
    );
}

#[test]
fn large_bodies_and_records_of_long_requests_are_archived() {
    let server = Server::start();
    let clock = Clock::at(MORNING_MS);
    let node = Node::start(&clock, slot(0), &server.settings());
    // Random, so that they are not compressed: more than one upload.
    let body = |number: u64| {
        (0..1 << 20)
            .map(|at: u64| (at * at * 31 + number * at + (at >> 8)) as u8)
            .collect::<Vec<_>>()
    };
    let ids: Vec<_> = (0..12)
        .map(|number| id(MORNING_MS + number, number))
        .collect();
    for (number, id) in (0..).zip(&ids) {
        node.write(
            LABEL,
            vec![captured(*id, &body(number), &body(number + 100))],
        );
    }
    node.log.flush_archive().unwrap();
    // Began before all others, and ends after they are archived.
    let late = id(MORNING_MS - 3 * HOUR_MS, 0);
    node.write(LABEL, vec![captured(late, b"late", b"")]);
    node.log.flush_archive().unwrap();
    let stats = node.log.stats().archive;
    assert!(stats.bytes > 10 << 20 && stats.objects >= 6, "{stats:?}");
    assert_eq!(
        (stats.failing, stats.failures, stats.lag_seconds),
        (false, 0, 0.0)
    );
    drop(node);
    let archive = clock.archive(&server.settings(), &key());
    for (number, id) in (0..).zip(&ids) {
        let read = |side| archive.body(slot(0), *id, side).unwrap().unwrap().bytes;
        assert!(
            read(Side::Request) == body(number) && read(Side::Response) == body(number + 100),
            "{number}"
        );
    }
    assert_eq!(
        archive
            .body(slot(0), late, Side::Request)
            .unwrap()
            .unwrap()
            .bytes,
        b"late"
    );
    assert_eq!(
        all(&SearchQuery::default(), |query| archive
            .search(slot(0), query))
        .len(),
        13
    );
}

#[test]
fn two_processes_with_the_same_folder_archive_each_record_once() {
    let server = Server::start();
    let clock = Clock::at(MORNING_MS);
    let node = Node::start(&clock, slot(6), &server.settings());
    let other = node.successor(slot(6), &server.settings());
    thread::scope(|scope| {
        for (process, log) in (0..).zip([&node.log, &other]) {
            scope.spawn(move || {
                for number in 0..40 {
                    let id = id(MORNING_MS - number * 700, 2 * number + process);
                    write(log, LABEL, vec![captured(id, b"request", b"response")]);
                    log.flush_archive().unwrap();
                }
            });
        }
    });
    other.close();
    let archive = clock.archive(&server.settings(), &key());
    let found = all(&SearchQuery::default(), |query| {
        archive.search(slot(6), query)
    });
    let local = all(&SearchQuery::default(), |query| {
        Ok(node.log.search(query)?)
    });
    assert_eq!((found.len(), &found), (80, &local));
    // Both may upload the same rows, under the same name.
    assert_eq!(
        server.objects(".blocks").len(),
        server.objects(".bodies").len()
    );
}

#[test]
fn records_stay_with_the_slot_that_recorded_them() {
    let server = Server::start();
    let clock = Clock::at(MORNING_MS);
    let node = Node::start(&clock, slot(1), &server.settings());
    node.log.flush_archive().unwrap();
    let before = id(MORNING_MS, 0);
    let after = id(MORNING_MS, 1);
    // The first record makes the file, and its outbox is made by the flush.
    node.write(LABEL, vec![record(id(MORNING_MS, 2))]);
    node.log.flush_archive().unwrap();
    server.leave();
    node.write(LABEL, vec![record(before)]);
    node.log.close();
    server.come_back();
    let log = node.successor(slot(2), &server.settings());
    log.flush_archive().unwrap();
    write(&log, LABEL, vec![record(after)]);
    log.flush_archive().unwrap();
    let archive = clock.archive(&server.settings(), &key());
    assert_eq!(archive.nodes().unwrap(), [slot(1), slot(2)]);
    for (id, node, other) in [(before, slot(1), slot(2)), (after, slot(2), slot(1))] {
        assert!(archive.show(node, id).unwrap().is_some(), "{node:?}");
        assert!(archive.show(other, id).unwrap().is_none(), "{other:?}");
    }
}

#[test]
fn objects_expire_after_seven_days_by_the_clock_of_the_store_too() {
    let today_ms = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap()
        .as_millis() as u64;
    let server = Server::start();
    let clock = Clock::at(today_ms - 9 * DAY_MS);
    let node = Node::start(&clock, slot(3), &server.settings());
    let old = id(today_ms - 9 * DAY_MS, 0);
    let kept = id(today_ms - 6 * DAY_MS, 0);
    node.write(LABEL, vec![captured(old, b"a", b"b")]);
    node.log.flush_archive().unwrap();
    clock.set(today_ms - 6 * DAY_MS);
    node.write(LABEL, vec![record(kept)]);
    node.log.flush_archive().unwrap();
    drop(node);
    assert_eq!(
        (
            server.objects(".blocks").len(),
            server.objects(".bodies").len()
        ),
        (2, 1)
    );

    // A clock that is years ahead deletes only what the store's own clock lets expire, of other
    // nodes too.
    let ahead = Clock::at(today_ms + 1000 * DAY_MS);
    let other = Node::start(&ahead, slot(4), &server.settings());
    other.log.flush_archive().unwrap();
    assert_eq!(other.log.stats().archive.expired, 2);
    assert_eq!(
        (
            server.objects(".blocks").len(),
            server.objects(".bodies").len()
        ),
        (1, 0)
    );
    clock.set(today_ms);
    let archive = clock.archive(&server.settings(), &key());
    assert!(archive.show(slot(3), kept).unwrap().is_some());
    assert!(archive.show(slot(3), old).unwrap().is_none());
}

#[test]
fn the_archive_is_reached_by_tls_with_an_authority_of_its_own() {
    let server = Server::start_tls();
    let clock = Clock::at(MORNING_MS);
    let node = Node::start(&clock, slot(0), &server.settings());
    let recorded = id(MORNING_MS, 0);
    node.write(LABEL, vec![record(recorded)]);
    node.log.flush_archive().unwrap();
    let archive = clock.archive(&server.settings(), &key());
    assert!(archive.show(slot(0), recorded).unwrap().is_some());
    let mut settings = server.settings();
    settings.authorities = None;
    let error = clock
        .archive(&settings, &key())
        .show(slot(0), recorded)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("is not trusted; set archive.ca to a PEM file"),
        "{error}"
    );
}

#[test]
fn uploads_keep_to_their_bandwidth() {
    let server = Server::start();
    let clock = Clock::at(MORNING_MS);
    let mut settings = server.settings();
    settings.bytes_per_second = 100_000;
    let node = Node::start(&clock, slot(0), &settings);
    let body: Vec<u8> = (0..100_000_u64)
        .map(|at| (at * at * 31 + (at >> 8)) as u8)
        .collect();
    let began = Instant::now();
    node.write(LABEL, vec![captured(id(MORNING_MS, 0), b"", &body)]);
    node.log.flush_archive().unwrap();
    assert!(node.log.stats().archive.bytes > 100_000);
    assert!(
        began.elapsed() > Duration::from_millis(900),
        "{:?}",
        began.elapsed()
    );
}

#[test]
fn doctor_writes_reads_and_deletes_an_object() {
    let server = Server::start();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("gateway.toml");
    let key_file = folder.path().join("region.key");
    RegionKey::create(&key_file).unwrap();
    let examine = |secret| {
        let text = format!(
            "region = \"eu1\"\ndomain = \"gw.localhost\"\ndata_dir = \"{}\"\n\
             listen = \"127.0.0.1:0\"\nadmin_listen = \"127.0.0.1:0\"\nregion_key = \"{}\"\n{}",
            folder.path().join("data").display(),
            key_file.display(),
            server.configuration(folder.path(), secret)
        );
        fs::write(&file, text).unwrap();
        let out = doctor::examine(Some(&file), |_| None);
        let found = out
            .checks()
            .iter()
            .find(|finding| finding.check == "archive")
            .unwrap();
        (found.verdict, found.found.clone())
    };
    let (verdict, found) = examine(None);
    assert_eq!(verdict, Verdict::Ok, "{found}");
    assert!(server.objects("").is_empty(), "{:?}", server.objects(""));
    let (verdict, found) = examine(Some("wrong"));
    assert!(
        verdict == Verdict::Failed && found.contains("SignatureDoesNotMatch"),
        "{found}"
    );
    server.leave();
    assert_eq!(examine(None).0, Verdict::Failed);
}

#[test]
fn a_gateway_archives_its_requests_before_it_stops() {
    let server = Server::start();
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let key_file = folder.path().join("region.key");
    let key = RegionKey::create(&key_file).unwrap();
    let text = format!(
        "region = \"eu1\"\ndomain = \"gw.localhost\"\ndata_dir = \"{}\"\nlisten = \"127.0.0.1:0\"\n\
         admin_listen = \"127.0.0.1:0\"\nworkers = 1\ndrain_seconds = 5\nregion_key = \"{}\"\n{}",
        data.display(),
        key_file.display(),
        server.configuration(folder.path(), None)
    );
    let config = Config::parse(&text, |_| None).unwrap();
    let gateway = Gateway::start(&config).unwrap();
    let response = ask_apex(gateway.address(), &data.join("dev-ca.crt"));
    assert!(response.starts_with("HTTP/1.1 404 "), "{response}");
    gateway.drain();

    let archive = Archive::open(
        config.archive.as_ref().unwrap(),
        &key.into(),
        config.region.apex(),
    )
    .unwrap();
    let of_apex = SearchQuery {
        apex: Some(true),
        ..SearchQuery::default()
    };
    let found = archive.search(slot(0), &of_apex).unwrap().items;
    assert_eq!(
        found
            .iter()
            .map(|view| view.path.as_str())
            .collect::<Vec<_>>(),
        ["/nowhere"]
    );
    let id = found[0].id.parse().unwrap();
    assert_eq!(archive.show(slot(0), id).unwrap().as_ref(), found.first());
}

/// Sends a request to the apex of a gateway with a development authority.
fn ask_apex(address: SocketAddr, authority: &Path) -> String {
    let authority = CertificateDer::from_pem_file(authority).unwrap();
    let config = Arc::new(gw_bed::tls::client([authority], None, &[]));
    let connection = ClientConnection::new(config, "eu1.gw.localhost".try_into().unwrap()).unwrap();
    let mut stream = StreamOwned::new(connection, TcpStream::connect(address).unwrap());
    stream
        .write_all(b"GET /nowhere HTTP/1.1\r\nHost: eu1.gw.localhost\r\nConnection: close\r\n\r\n")
        .unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    response
}

#[test]
fn heads_of_the_audit_log_are_kept_by_hour_and_open_with_the_region_key_only() {
    let server = Server::start();
    let clock = Clock::at(MORNING_MS);
    let node = Node::start(&clock, slot(7), &server.settings());
    let head = Arc::new(Mutex::new("1:aa".to_owned()));
    let shown = Arc::clone(&head);
    let archive = node.log.archive().unwrap();
    archive.keep_audit_heads(move || Some(shown.lock().unwrap().clone()));
    let note = |text: &str| {
        *head.lock().unwrap() = text.to_owned();
        node.log.flush_archive().unwrap();
    };
    note("2:bb");
    note("3:cc");
    clock.set(MORNING_MS + HOUR_MS);
    note("3:cc");
    clock.set(MORNING_MS + 2 * HOUR_MS);
    note("4:dd");
    let read = |keys: &RegionKeys| clock.archive(&server.settings(), keys).audit_heads();
    assert_eq!(read(&key()).unwrap(), ["3:cc", "3:cc", "4:dd"]);
    let refused = read(&RegionKey::new([8; 32]).into());
    assert!(
        matches!(refused, Err(ArchiveError::Refused(_))),
        "{refused:?}"
    );
    // Beside the nodes, not as one of them.
    assert!(archive.nodes().unwrap().is_empty());
    // With the day.
    clock.set(MORNING_MS + 9 * DAY_MS);
    assert_eq!(read(&key()).unwrap(), [""; 0]);
}
