//! Durability of changes: acknowledged changes survive a crash, and changes on a full disk are
//! refused.

mod agents;
mod backups;
mod full_disk;
mod lossy_disk;
mod power_cuts;
mod regions;
mod relays;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{fs, thread};

use serde_json::{Value, json};

use crate::support::admin_api::Api;
use crate::support::processes::process::{config_text, gw_gateway, serve, serve_command};
use crate::support::processes::successor::admin;
use crate::support::programs;

/// Number of kills of the gateway; `GW_TEST_KILLS` overrides it.
const KILLS: usize = 40;
/// Gateways that are killed at the same time, each with its own data folder.
const GATEWAYS: usize = 2;
const WRITERS: usize = 3;

/// The administration API of the gateway with this data folder.
fn api(address: SocketAddr, data_dir: &Path) -> Api {
    let token = fs::read_to_string(data_dir.join("admin.token")).unwrap();
    Api::at(address, &token)
}

/// Every item of a collection.
fn list(api: &Api, path: &str) -> Vec<Value> {
    let mut items = Vec::new();
    let mut cursor = String::new();
    loop {
        let mut page = api.get(&format!("{path}?limit=1000{cursor}")).done();
        items.append(page["items"].as_array_mut().unwrap());
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => return items,
        }
    }
}

/// Changes that the gateway has acknowledged.
#[derive(Default)]
struct Acknowledged {
    services: BTreeSet<String>,
    deleted: BTreeSet<String>,
    keys: BTreeSet<String>,
    revoked: BTreeSet<String>,
    credentials: BTreeSet<String>,
}

/// Writes until the gateway has ended: creates a service, a credential and a key for it. Deletes
/// every other service, which also removes it from the key's list in the same change, and every
/// third key. Returns `None` once the gateway has ended.
fn write(
    api: &Api,
    next: &AtomicUsize,
    acknowledged: &Mutex<Acknowledged>,
    stop: &AtomicBool,
) -> Option<()> {
    let change = |method: &str, path: String, body: &Value, status: u16| {
        let reply = api.try_ask(method, &format!("/accounts/acme{path}"), body)?;
        assert_eq!(reply.status, status, "{reply:?}");
        Some(reply.body)
    };
    let create = |kind: &str, body: &Value| change("POST", format!("/{kind}"), body, 201);
    let delete = |path: String| change("DELETE", path, &Value::Null, 204);
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    while !stop.load(Ordering::Relaxed) {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let id = format!("s{number}");
        create("services", &json!({ "id": id }))?;
        acknowledged.lock().unwrap().services.insert(id.clone());
        let caller = json!({ "name": id, "allowed_services": [id] });
        let client_id = text(&create("credentials", &caller)?["client_id"]);
        acknowledged.lock().unwrap().credentials.insert(client_id);
        let key_id = text(&create("service-keys", &caller)?["key_id"]);
        if number.is_multiple_of(3) {
            delete(format!("/service-keys/{key_id}"))?;
            acknowledged.lock().unwrap().revoked.insert(key_id);
        } else {
            acknowledged.lock().unwrap().keys.insert(key_id);
        }
        if number.is_multiple_of(2) {
            // Until it is acknowledged, the change may or may not have taken effect.
            acknowledged.lock().unwrap().services.remove(&id);
            delete(format!("/services/{id}"))?;
            acknowledged.lock().unwrap().deleted.insert(id);
        }
    }
    Some(())
}

#[test]
fn acknowledged_changes_survive_kills_and_no_change_is_partial() {
    let kills = kills();
    let keys: usize = thread::scope(|scope| {
        let kill = |first: usize| {
            scope.spawn(move || {
                let directory = tempfile::tempdir().unwrap();
                let data_dir = directory.path().join("data");
                kill_at((first..kills).step_by(GATEWAYS), &data_dir, |_| {})
            })
        };
        let gateways: Vec<_> = (0..GATEWAYS).map(kill).collect();
        let keys = gateways.into_iter().map(|keys| keys.join().unwrap());
        keys.sum()
    });
    assert!(
        keys > kills / 4,
        "too few writes for a meaningful test: {keys}"
    );
}

fn kills() -> usize {
    std::env::var("GW_TEST_KILLS").map_or(KILLS, |kills| kills.parse().unwrap())
}

/// Kills a gateway at these moments, and checks after each start that it has what it acknowledged.
/// `after` is called with the moment of each kill once the process has ended. Returns the number of
/// acknowledged keys.
fn kill_at(
    moments: impl Iterator<Item = usize>,
    data_dir: &Path,
    mut after: impl FnMut(usize),
) -> usize {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("gateway.toml");
    fs::write(&config, config_text(data_dir, 0)).unwrap();
    let next = AtomicUsize::new(0);
    let acknowledged = Mutex::new(Acknowledged::default());
    let mut token = None;
    for (round, moment) in moments.enumerate() {
        let served = serve(&mut serve_command(&config));
        let api = api(served.admin_address, data_dir);
        let found = fs::read_to_string(data_dir.join("admin.token")).unwrap();
        let token = token.get_or_insert_with(|| found.clone());
        assert_eq!(*token, found, "the admin token is lost");
        let reply = api.ask("POST", "/accounts", &json!({ "id": "acme" }));
        assert_eq!(reply.status, if round == 0 { 201 } else { 200 });
        check(&api, &acknowledged.lock().unwrap());
        let stop = Arc::new(AtomicBool::new(false));
        let keys = || acknowledged.lock().unwrap().keys.len();
        let before = keys();
        thread::scope(|scope| {
            for _ in 0..WRITERS {
                scope.spawn(|| write(&api, &next, &acknowledged, &stop));
            }
            // Every other round begins with an acknowledged key, so that there are enough on a busy
            // machine, too.
            let deadline = Instant::now() + Duration::from_secs(60);
            while round % 2 == 0 && keys() == before && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(1));
            }
            // A different moment each time, during any operation.
            let micros = 2_000 + (moment as u64 * 7_919) % 30_000;
            thread::sleep(Duration::from_micros(micros));
            served.process.signal("KILL");
            stop.store(true, Ordering::Relaxed);
        });
        drop(served);
        after(moment);
    }
    let served = serve(&mut serve_command(&config));
    let api = api(served.admin_address, data_dir);
    check(&api, &acknowledged.lock().unwrap());
    acknowledged.lock().unwrap().keys.len()
}

/// Compares the stored state with the acknowledged changes.
fn check(api: &Api, acknowledged: &Acknowledged) {
    let ids = |items: &[Value], name: &str| -> BTreeSet<String> {
        items
            .iter()
            .map(|item| item[name].as_str().unwrap().to_owned())
            .collect()
    };
    let services = ids(&list(api, "/accounts/acme/services"), "id");
    let keys = list(api, "/accounts/acme/service-keys");
    let key_ids = ids(&keys, "key_id");
    let credentials = ids(&list(api, "/accounts/acme/credentials"), "client_id");
    for (what, found, kept) in [
        ("service", &services, &acknowledged.services),
        ("key", &key_ids, &acknowledged.keys),
        ("credential", &credentials, &acknowledged.credentials),
    ] {
        assert!(found.is_superset(kept), "a {what} is lost");
    }
    for (what, found, gone) in [
        ("deleted service", &services, &acknowledged.deleted),
        ("revoked key", &key_ids, &acknowledged.revoked),
    ] {
        assert!(found.is_disjoint(gone), "a {what} is back");
    }
    // A deleted service is not on the list of its key.
    for key in &keys {
        let name = key["name"].as_str().unwrap();
        let allowed = key["allowed_services"].as_array().unwrap();
        assert_eq!(allowed.len() == 1, services.contains(name), "{key}");
    }
    check_audit_log(api, &services, &key_ids);
}

/// The audit log has exactly the changes that took effect, and its chain is whole.
fn check_audit_log(api: &Api, services: &BTreeSet<String>, keys: &BTreeSet<String>) {
    let mut created = (BTreeSet::new(), BTreeSet::new());
    let mut deleted = (BTreeSet::new(), BTreeSet::new());
    for entry in list(api, "/audit-log") {
        let target = entry["target"].as_str().unwrap().to_owned();
        let service = || {
            let label = target.split('.').next().unwrap();
            label.trim_start_matches("acme--").to_owned()
        };
        let is_new = match entry["action"].as_str().unwrap() {
            "service.create" => created.0.insert(service()),
            "service.delete" => deleted.0.insert(service()),
            "service_key.create" => created.1.insert(target),
            "service_key.delete" => deleted.1.insert(target),
            _ => true,
        };
        assert!(is_new, "{entry}");
    }
    assert_eq!(&(&created.0 - &deleted.0), services);
    assert_eq!(&(&created.1 - &deleted.1), keys);
    let verified = api.get("/audit-log/verification").body;
    assert_eq!(verified["valid"], true, "{verified}");
}

#[test]
fn a_full_disk_refuses_changes_but_not_reads() {
    if !programs::usable(&["unshare"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("gateway.toml");
    let data_dir = directory.path().join("data");
    fs::create_dir(&data_dir).unwrap();
    fs::write(&config, config_text(&data_dir, 0)).unwrap();
    // Mounts a file system of 400 KiB in a mount namespace that ends with the process.
    let script =
        r#"mount -t tmpfs -o size=400k,mode=700 none "$1" && exec "$2" serve --config "$3""#;
    let mut command = Command::new("unshare");
    command
        .args(["--user", "--map-root-user", "--mount", "sh", "-c"])
        .args([script, "sh"])
        .arg(&data_dir)
        .arg(gw_gateway().get_program())
        .arg(&config);
    let served = serve(&mut command);
    // The data folder as seen in the namespace, where the token file is.
    let inside = format!("/proc/{}/root{}", served.process.id(), data_dir.display());
    let api = api(served.admin_address, Path::new(&inside));
    api.create_account("acme");
    let create = |number: usize| {
        let service = json!({ "id": format!("s{number}") });
        api.ask("POST", "/accounts/acme/services", &service)
    };
    let (created, refused) = (0..2_000)
        .map(|number| (number, create(number)))
        .find(|(_, reply)| reply.status != 201)
        .expect("a change is refused because the disk is full");
    assert_eq!(refused.status, 507, "{refused:?}");
    let detail = refused.body["detail"].as_str().unwrap();
    assert!(detail.contains("full"), "{detail}");
    // The change left no trace, and the gateway still answers reads.
    assert_eq!(list(&api, "/accounts/acme/services").len(), created);
    assert_eq!(create(created + 1).status, 507);
    assert_eq!(list(&api, "/accounts/acme/services").len(), created);
    assert_eq!(admin(served.admin_address, "/readyz").0, 200);
}
