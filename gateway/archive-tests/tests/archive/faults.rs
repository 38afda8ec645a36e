//! Interrupted uploads, stores that are away or refuse, and changed objects.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use gw_region::RegionKey;
use gw_shared::id::RequestId;
use gw_shared::identity::secret::Secret;
use gw_telemetry::request_log::archive::{Archive, ArchiveError};
use gw_telemetry::request_log::{SearchQuery, Side};

use super::log::{Clock, HOUR_MS, LABEL, MORNING_MS, Node, all, captured, id, key, record, slot};
use super::server::Server;

#[test]
fn an_upload_that_was_interrupted_is_finished_after_a_restart() {
    let server = Server::start();
    let clock = Clock::at(MORNING_MS);
    let mut node = Node::start(&clock, slot(1), &server.settings());
    node.log.flush_archive().unwrap();
    // Two hours with bodies: four objects, of which one is written.
    server.leave_after(1);
    let ids: Vec<_> = (0..4)
        .map(|number| id(MORNING_MS - number % 2 * HOUR_MS, number))
        .collect();
    for id in &ids {
        node.write(LABEL, vec![captured(*id, b"request", b"response")]);
    }
    assert!(node.log.flush_archive().is_err());
    let first = server.objects(".bodies");
    assert_eq!((first.len(), server.objects(".blocks").len()), (1, 0));
    // More records before the restart, which belong to the next upload.
    let more = id(MORNING_MS, 100);
    node.write(LABEL, vec![record(more)]);
    let began = Instant::now();
    node.restart(&server.settings());
    assert!(
        began.elapsed() < Duration::from_secs(30),
        "a store that is away does not hold up the stop"
    );
    server.come_back();
    node.log.flush_archive().unwrap();
    assert!(
        first.is_subset(&server.objects(".bodies")) && server.objects(".bodies").len() == 2,
        "the same names"
    );
    assert_eq!(server.objects(".blocks").len(), 3);
    let archive = clock.archive(&server.settings(), &key());
    let found = all(&SearchQuery::default(), |query| {
        archive.search(slot(1), query)
    });
    let found: Vec<_> = found.iter().map(|view| view.id.clone()).collect();
    let expected: BTreeSet<_> = ids.iter().chain([&more]).map(ToString::to_string).collect();
    assert_eq!(
        found,
        expected.into_iter().rev().collect::<Vec<_>>(),
        "each once"
    );
    // Nothing is uploaded again.
    let objects = server.objects(".blocks");
    node.restart(&server.settings());
    node.log.flush_archive().unwrap();
    assert_eq!(server.objects(".blocks"), objects);
}

#[test]
fn records_wait_while_the_store_is_away() {
    let server = Server::start();
    let clock = Clock::at(MORNING_MS);
    let node = Node::start(&clock, slot(2), &server.settings());
    node.log.flush_archive().unwrap();
    server.leave();
    let recorded = id(MORNING_MS, 0);
    node.write(LABEL, vec![record(recorded)]);
    let error = node.log.flush_archive().unwrap_err().to_string();
    assert!(
        error.starts_with("archive: cannot write eu1.example.com/2026-11-21/0002/04/"),
        "{error}"
    );
    // One failure is not an alarm.
    assert!(node.log.flush_archive().is_err());
    let stats = node.log.stats().archive;
    assert!(
        stats.failing && stats.failures > 0 && stats.lag_seconds > 0.0,
        "{stats:?}"
    );
    assert!(
        node.log.show(recorded).unwrap().is_some(),
        "the local log does not depend on the store"
    );
    let archive = clock.archive(&server.settings(), &key());
    assert!(matches!(
        archive.show(slot(2), recorded),
        Err(ArchiveError::Store { .. })
    ));
    server.come_back();
    node.log.flush_archive().unwrap();
    let stats = node.log.stats().archive;
    assert_eq!(
        (stats.failing, stats.lag_seconds, stats.objects),
        (false, 0.0, 1)
    );
    assert!(archive.show(slot(2), recorded).unwrap().is_some());
}

#[test]
fn wrong_credentials_and_a_missing_bucket_are_named() {
    let server = Server::start();
    let clock = Clock::at(MORNING_MS);
    let mut settings = server.settings();
    settings.secret_key = Secret::new("another".to_owned());
    let node = Node::start(&clock, slot(0), &settings);
    node.write(LABEL, vec![record(id(MORNING_MS, 0))]);
    let error = node.log.flush_archive().unwrap_err().to_string();
    assert!(
        error.contains("SignatureDoesNotMatch") && !error.contains("another"),
        "{error}"
    );
    assert!(server.objects("").is_empty());

    let mut settings = server.settings();
    settings.bucket = "missing".to_owned();
    let archive = clock.archive(&settings, &key());
    let error = archive
        .search(slot(0), &SearchQuery::default())
        .unwrap_err()
        .to_string();
    assert!(error.contains("NoSuchBucket"), "{error}");
}

/// The file of the newest object whose name ends with `suffix`.
fn newest_object(server: &Server, suffix: &str) -> PathBuf {
    let name = server.objects(suffix).pop_last().unwrap();
    server.objects_folder().join(name)
}

#[test]
fn a_changed_object_is_refused_and_named() {
    let server = Server::start();
    let clock = Clock::at(MORNING_MS);
    let node = Node::start(&clock, slot(5), &server.settings());
    let whole = id(MORNING_MS - HOUR_MS, 0);
    let changed = id(MORNING_MS, 0);
    for id in [whole, changed] {
        node.write(LABEL, vec![captured(id, b"request", b"response")]);
    }
    node.log.flush_archive().unwrap();
    drop(node);
    let path = |suffix| newest_object(&server, suffix);
    let plain = fs::read(path(".bodies")).unwrap();
    assert!(
        !plain.windows(7).any(|bytes| bytes == b"request"),
        "bodies are encrypted"
    );

    // A body, then the records of the newer hour.
    let mut bytes = plain;
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path(".bodies"), bytes).unwrap();
    let archive = clock.archive(&server.settings(), &key());
    a_changed_body_is_refused(&archive, changed);
    let mut bytes = fs::read(path(".blocks")).unwrap();
    bytes[20] ^= 1;
    fs::write(path(".blocks"), bytes).unwrap();
    let archive = clock.archive(&server.settings(), &key());
    changed_records_are_refused(&server, &archive, changed, whole);

    // An object under the name of another, and another key.
    fs::copy(
        server
            .objects_folder()
            .join(server.objects(".blocks").pop_first().unwrap()),
        path(".blocks"),
    )
    .unwrap();
    assert!(matches!(
        archive.show(slot(5), changed),
        Err(ArchiveError::Refused(_))
    ));
    let archive = clock.archive(&server.settings(), &RegionKey::new([8; 32]).into());
    assert!(matches!(
        archive.show(slot(5), whole),
        Err(ArchiveError::Refused(_))
    ));
}

fn a_changed_body_is_refused(archive: &Archive, changed: RequestId) {
    assert_eq!(
        archive
            .body(slot(5), changed, Side::Request)
            .unwrap()
            .unwrap()
            .bytes,
        b"request"
    );
    let error = archive
        .body(slot(5), changed, Side::Response)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains(".bodies: does not open with the region key"),
        "{error}"
    );
}

fn changed_records_are_refused(
    server: &Server,
    archive: &Archive,
    changed: RequestId,
    whole: RequestId,
) {
    let name = server.objects(".blocks").pop_last().unwrap();
    let error = archive.show(slot(5), changed).unwrap_err().to_string();
    assert_eq!(
        error,
        format!(
            "archive: {name}: does not open with the region key: it was changed, or is of another \
             region"
        )
    );
    let found = archive.search(slot(5), &SearchQuery::default()).unwrap();
    assert_eq!(
        found
            .items
            .iter()
            .map(|view| view.id.clone())
            .collect::<Vec<_>>(),
        [whole.to_string()],
        "skipped"
    );
    assert_eq!(archive.stats().refused, 2);
}
