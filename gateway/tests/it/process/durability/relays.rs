//! Power cuts while requests are relayed: records of the request log, the usage, and revocations
//! that are durable.

use std::net::SocketAddr;
use std::path::Path;

use rusqlite::{Connection, OpenFlags};
use serde_json::json;

use super::power_cuts::{check_databases, is_full_run, loss_of};
use super::{GATEWAYS, list};
use crate::support::lossy_disk::{Loss, LossyDisk};
use crate::support::peers::backend;
use crate::support::processes::prepared::Prepared;
use crate::support::{SOON, eventually, request_log};

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
/// Requests of a round.
const REQUESTS: usize = 20;
/// How the gateway ends before the power is cut.
#[derive(Clone, Copy, PartialEq)]
enum End {
    /// It is stopped.
    Stop,
    /// It is killed at once.
    Kill,
    /// It is killed at once, and the next one when the request log is synced, without a request in
    /// between.
    KillTwice,
    /// It is killed when request log and usage are synced, which the promises of `docs` give ten
    /// seconds.
    KillLater,
}

/// Sends requests; returns their ids.
fn relay(prepared: &Prepared, address: SocketAddr) -> Vec<String> {
    let mut caller = prepared.connect(address);
    let ids = (0..REQUESTS).map(|_| {
        let response = caller.ask(prepared.get("/"));
        assert_eq!(response.status, 200);
        response.header("x-gw-request-id").to_owned()
    });
    ids.collect()
}

/// Stops or kills a gateway after requests, and cuts the power. Afterwards all that was durable is
/// there.
fn cut_after(end: End, losses: impl Iterator<Item = Loss>) {
    let Some(mut disk) = LossyDisk::mount() else {
        return;
    };
    let prepared = Prepared::new();
    let data_dir = prepared.path("data");
    disk.take(&data_dir);
    let backend = backend::answering(OK);
    let mut durable = Vec::new();
    for loss in losses {
        let (mut served, agent) = prepared.start(&backend);
        let relayed = relay(&prepared, served.address);
        let api = prepared.api(served.admin_address);
        request_log::record(&api, relayed.last().unwrap());
        drop(agent);
        match end {
            End::Stop => {
                served.process.stop();
            }
            End::Kill => {}
            End::KillTwice => {
                drop(served);
                served = prepared.serve_with(&prepared.config());
                wait_for_log(&disk);
            }
            End::KillLater => {
                wait_for_log(&disk);
                let all = (durable.len() + relayed.len()) as u64;
                eventually("the usage is stored", || {
                    (stored_usage(&data_dir) >= all).then_some(())
                });
            }
        }
        drop(served);
        disk.cut_power(loss);
        check_databases(&data_dir);
        if end != End::Kill {
            durable.extend(relayed);
        }

        let served = prepared.serve_with(&prepared.config());
        let api = prepared.api(served.admin_address);
        for id in &durable {
            let found = api.get(&format!("/requests/{id}")).body;
            assert_eq!(found["id"], **id, "{found}");
        }
        // Records that were not durable may be missing; those that exist can be read.
        list(&api, "/requests");
        // Those that waited for a tunnel are counted, too. A kill loses up to ten seconds.
        let counted = stored_usage(&data_dir) as usize;
        assert!(
            end == End::KillTwice || counted >= durable.len(),
            "{counted}"
        );
    }
}

/// Waits until the request log has nothing that a power cut would lose.
fn wait_for_log(disk: &LossyDisk) {
    eventually("the request log is synced", || {
        let unsynced = disk.unsynced();
        let is_log = |name: &String| name.starts_with("20") && !name.ends_with("-shm");
        (!unsynced.iter().any(is_log)).then_some(())
    });
}

/// Number of requests in the file of the usage.
fn stored_usage(data_dir: &Path) -> u64 {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY;
    let file = Connection::open_with_flags(data_dir.join("usage.sqlite"), flags).unwrap();
    file.busy_timeout(SOON).unwrap();
    let sum = "SELECT coalesce(sum(requests), 0) FROM usage";
    file.query_row(sum, [], |row| row.get::<_, i64>(0)).unwrap() as u64
}

#[test]
fn relayed_requests_survive_a_power_cut_after_the_gateway_was_stopped() {
    cut_after(End::Stop, losses());
}

#[test]
fn the_request_log_opens_after_a_power_cut_at_any_moment() {
    cut_after(End::Kill, losses());
}

#[test]
fn relayed_requests_survive_a_power_cut_once_they_are_synced() {
    cut_after(End::KillLater, losses());
}

#[test]
fn relayed_requests_survive_a_crash_and_a_power_cut_without_further_requests() {
    cut_after(End::KillTwice, losses());
}

/// All kinds of losses in a full run, otherwise the largest.
fn losses() -> impl Iterator<Item = Loss> {
    let cuts = if is_full_run() { 3 * GATEWAYS } else { 1 };
    (0..cuts).map(loss_of)
}

#[test]
fn a_revoked_key_stays_refused_after_a_power_cut() {
    let Some(mut disk) = LossyDisk::mount() else {
        return;
    };
    let prepared = Prepared::new();
    disk.take(&prepared.path("data"));
    let backend = backend::answering(OK);
    let (served, agent) = prepared.start(&backend);
    let path = format!("/accounts/demo/service-keys/{}", prepared.key_id());
    let api = prepared.api(served.admin_address);
    api.patch(&path, &json!({ "enabled": false }));
    drop((served, agent));
    disk.cut_power(Loss::All);
    let served = prepared.serve_with(&prepared.config());
    let mut caller = prepared.connect(served.address);
    let response = caller.ask(prepared.get("/"));
    assert_eq!(response.code(), "GW_SERVICE_KEY_INVALID");
}
