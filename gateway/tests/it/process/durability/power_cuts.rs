//! Power cuts: acknowledged changes are on the disk, and not only in memory.

use std::fs;
use std::path::Path;
use std::thread;

use rusqlite::Connection;
use serde_json::json;

use super::{GATEWAYS, api, kill_at, kills};
use crate::support::lossy_disk::{Loss, LossyDisk};
use crate::support::processes::process::{config_text, serve, serve_command};

#[test]
fn acknowledged_changes_survive_power_cuts() {
    let cuts = kills().min(50).max(kills() / 10);
    let keys: Option<usize> = thread::scope(|scope| {
        let cut = |first: usize| {
            thread::Builder::new()
                .name(thread::current().name().unwrap().to_owned())
                .spawn_scoped(scope, move || {
                    let mut disk = LossyDisk::mount()?;
                    let data_dir = disk.path().join("data");
                    let moments = (first..cuts).step_by(GATEWAYS);
                    Some(kill_at(moments, &data_dir, |moment| {
                        disk.cut_power(loss_of(moment));
                        check_databases(&data_dir);
                    }))
                })
                .unwrap()
        };
        let gateways: Vec<_> = (0..GATEWAYS).map(cut).collect();
        let keys = gateways.into_iter().map(|keys| keys.join().unwrap());
        keys.sum()
    });
    assert!(
        keys.is_none_or(|keys| keys > cuts / 4),
        "too few writes for a meaningful test: {keys:?}"
    );
}

/// Whether `GW_TEST_KILLS` asks for a full run.
pub(super) fn is_full_run() -> bool {
    kills() >= 50
}

/// Kind of loss of the power cut with this number.
pub(super) fn loss_of(cut: usize) -> Loss {
    // Each of the gateways has power cuts of all kinds.
    match (cut / GATEWAYS) % 3 {
        0 => Loss::All,
        1 => Loss::Data,
        _ => Loss::AnyPart(fastrand::Rng::with_seed(cut as u64)),
    }
}

/// Opens copies of all databases of a data folder, as SQLite finds them after a crash.
pub(super) fn check_databases(folder: &Path) {
    let copies = tempfile::tempdir().unwrap();
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for entry in entries {
        let path = entry.unwrap().path();
        if path.is_dir() {
            check_databases(&path);
        } else if path.to_str().unwrap().contains(".sqlite") {
            fs::copy(&path, copies.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    for entry in fs::read_dir(copies.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|it| it == "sqlite") {
            let database = Connection::open(&path).unwrap();
            let found: String = database
                .query_row("PRAGMA integrity_check", [], |row| row.get(0))
                .unwrap();
            assert_eq!(found, "ok", "{}", path.display());
        }
    }
}

/// Whether a gateway on this disk has all that it acknowledged after a power cut.
fn keeps_changes(mut disk: LossyDisk) -> bool {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("gateway.toml");
    let data_dir = disk.path().join("data");
    fs::write(&config, config_text(&data_dir, 0)).unwrap();
    let token = || fs::read_to_string(data_dir.join("admin.token")).unwrap();
    let account = json!({ "id": "acme" });
    let served = serve(&mut serve_command(&config));
    let token_before = token();
    let before = api(served.admin_address, &data_dir);
    before.post("/accounts", &account);
    for number in 0..5 {
        let service = json!({ "id": format!("s{number}") });
        before.post("/accounts/acme/services", &service);
    }
    served.process.signal("KILL");
    drop(served);
    disk.cut_power(Loss::All);
    let served = serve(&mut serve_command(&config));
    let api = api(served.admin_address, &data_dir);
    let status = api.ask("POST", "/accounts", &account).status;
    let services = api.list("/accounts/acme/services").len();
    status == 200 && services == 5 && token() == token_before
}

#[test]
fn a_missing_sync_shows() {
    let keeps =
        |ignores_sync: fn(&str) -> bool| LossyDisk::mount_ignoring(ignores_sync).map(keeps_changes);
    let Some(kept) = keeps(|_| false) else {
        return;
    };
    assert!(kept);
    let without_log = keeps(|name| name == "gw.sqlite-wal");
    assert_eq!(without_log, Some(false), "the log of the database");
    let without_names = keeps(|name| name == "data");
    assert_eq!(without_names, Some(false), "names in the data folder");
    let without_folder = keeps(str::is_empty);
    assert_eq!(without_folder, Some(false), "name of the data folder");
}
