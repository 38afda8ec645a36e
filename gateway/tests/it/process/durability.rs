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

use crate::support::processes::process::{Served, config_text, gw_gateway, serve, serve_command};
use crate::support::programs;

/// Number of kills of the gateway; `GW_TEST_KILLS` overrides it.
const KILLS: usize = 40;
/// Gateways that are killed at the same time, each with its own data folder.
const GATEWAYS: usize = 2;
const WRITERS: usize = 3;

/// A client of the administration API of a process.
#[derive(Clone)]
struct Api {
    url: String,
    token: String,
    agent: ureq::Agent,
}

impl Api {
    fn new(address: SocketAddr, data_dir: &Path) -> Self {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(crate::support::SOON))
            .build();
        let token = fs::read_to_string(data_dir.join("admin.token")).unwrap();
        Self {
            url: format!("http://{address}/api/v1"),
            token,
            agent: config.into(),
        }
    }

    /// Status and JSON of the response, or `None` if the gateway has ended.
    fn post(&self, path: &str, body: &Value) -> Option<(u16, Value)> {
        let request = self
            .agent
            .post(format!("{}{path}", self.url))
            .header("Authorization", self.bearer());
        let mut response = request.send_json(body).ok()?;
        Some((
            response.status().as_u16(),
            response.body_mut().read_json().ok()?,
        ))
    }

    fn delete(&self, path: &str) -> Option<u16> {
        let request = self
            .agent
            .delete(format!("{}{path}", self.url))
            .header("Authorization", self.bearer());
        Some(request.call().ok()?.status().as_u16())
    }

    fn get(&self, path: &str) -> Value {
        let request = self.agent.get(format!("{}{path}", self.url));
        let mut response = request
            .header("Authorization", self.bearer())
            .call()
            .unwrap();
        response.body_mut().read_json().unwrap()
    }

    /// Every item of a collection.
    fn list(&self, path: &str) -> Vec<Value> {
        let mut items = Vec::new();
        let mut cursor = String::new();
        loop {
            let page = self.get(&format!("{path}?limit=1000{cursor}"));
            items.extend(page["items"].as_array().unwrap().iter().cloned());
            match page["next_cursor"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => return items,
            }
        }
    }

    fn bearer(&self) -> String {
        format!("Bearer {}", self.token)
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
/// third key.
fn write(api: &Api, next: &AtomicUsize, acknowledged: &Mutex<Acknowledged>, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let id = format!("s{number}");
        let Some((status, created)) = api.post("/accounts/acme/services", &json!({ "id": id }))
        else {
            return;
        };
        assert_eq!(status, 201, "{created}");
        acknowledged.lock().unwrap().services.insert(id.clone());
        let caller = json!({ "name": id, "allowed_services": [id] });
        let Some((status, created)) = api.post("/accounts/acme/credentials", &caller) else {
            return;
        };
        assert_eq!(status, 201, "{created}");
        let client_id = created["client_id"].as_str().unwrap().to_owned();
        acknowledged.lock().unwrap().credentials.insert(client_id);
        let Some((status, created)) = api.post("/accounts/acme/service-keys", &caller) else {
            return;
        };
        assert_eq!(status, 201, "{created}");
        let key_id = created["key_id"].as_str().unwrap().to_owned();
        if number.is_multiple_of(3) {
            let Some(status) = api.delete(&format!("/accounts/acme/service-keys/{key_id}")) else {
                return;
            };
            assert_eq!(status, 204);
            acknowledged.lock().unwrap().revoked.insert(key_id);
        } else {
            acknowledged.lock().unwrap().keys.insert(key_id);
        }
        if number.is_multiple_of(2) {
            // Until it is acknowledged, the change may or may not have taken effect.
            acknowledged.lock().unwrap().services.remove(&id);
            let Some(status) = api.delete(&format!("/accounts/acme/services/{id}")) else {
                return;
            };
            assert_eq!(status, 204);
            acknowledged.lock().unwrap().deleted.insert(id);
        }
    }
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
        let Served {
            process,
            admin_address,
            ..
        } = serve(&mut serve_command(&config));
        let api = Api::new(admin_address, data_dir);
        let token = token.get_or_insert_with(|| api.token.clone());
        assert_eq!(*token, api.token, "the admin token is lost");
        let (status, _) = api.post("/accounts", &json!({ "id": "acme" })).unwrap();
        assert_eq!(status, if round == 0 { 201 } else { 200 });
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
            thread::sleep(Duration::from_micros(
                2_000 + (moment as u64 * 7_919) % 30_000,
            ));
            process.signal("KILL");
            stop.store(true, Ordering::Relaxed);
        });
        drop(process);
        after(moment);
    }
    let Served {
        admin_address,
        process: _process,
        ..
    } = serve(&mut serve_command(&config));
    check(
        &Api::new(admin_address, data_dir),
        &acknowledged.lock().unwrap(),
    );
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
    let services = api.list("/accounts/acme/services");
    let keys = api.list("/accounts/acme/service-keys");
    let credentials = api.list("/accounts/acme/credentials");
    let services = ids(&services, "id");
    let key_ids = ids(&keys, "key_id");
    assert!(
        services.is_superset(&acknowledged.services),
        "a service is lost"
    );
    assert!(key_ids.is_superset(&acknowledged.keys), "a key is lost");
    assert!(
        ids(&credentials, "client_id").is_superset(&acknowledged.credentials),
        "a credential is lost"
    );
    assert!(
        services.is_disjoint(&acknowledged.deleted),
        "a deleted service is back"
    );
    assert!(
        key_ids.is_disjoint(&acknowledged.revoked),
        "a revoked key is back"
    );
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
    for entry in api.list("/audit-log") {
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
    let verified = api.get("/audit-log/verification");
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
    command.args([
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        script,
        "sh",
    ]);
    command
        .arg(&data_dir)
        .arg(gw_gateway().get_program())
        .arg(&config);
    let Served {
        process,
        admin_address,
        ..
    } = serve(&mut command);
    // The data folder as seen in the namespace, where the token file is.
    let inside = format!("/proc/{}/root{}", process.id(), data_dir.display());
    let api = Api::new(admin_address, Path::new(&inside));
    assert_eq!(
        api.post("/accounts", &json!({ "id": "acme" })).unwrap().0,
        201
    );
    let create = |number: usize| {
        let id = format!("s{number}");
        api.post("/accounts/acme/services", &json!({ "id": id }))
            .unwrap()
    };
    let mut created = 0;
    let mut refused = None;
    for number in 0..2_000 {
        let (status, body) = create(number);
        if status != 201 {
            refused = Some((status, body));
            break;
        }
        created += 1;
    }
    let (status, problem) = refused.expect("a change is refused because the disk is full");
    assert_eq!(status, 507, "{problem}");
    assert!(
        problem["detail"].as_str().unwrap().contains("full"),
        "{problem}"
    );
    // The change left no trace, and the gateway still answers reads.
    assert_eq!(api.list("/accounts/acme/services").len(), created);
    assert_eq!(create(created + 1).0, 507);
    assert_eq!(api.list("/accounts/acme/services").len(), created);
    let ready = api
        .agent
        .get(format!("http://{admin_address}/readyz"))
        .call()
        .unwrap();
    assert_eq!(ready.status().as_u16(), 200);
}
