//! `gw-gateway audit verify` on a gateway whose database is changed while it is stopped.

use std::path::{Path, PathBuf};

use rusqlite::Connection;
use serde_json::Value;

use crate::support::processes::process::{
    Served, config_text, gw_gateway, serve, serve_command, start_logged,
};

struct Stopped {
    _folder: tempfile::TempDir,
    config: PathBuf,
    data_dir: PathBuf,
}

impl Stopped {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("gateway.toml");
        let data_dir = folder.path().join("data");
        std::fs::write(&config, config_text(&data_dir, 0)).unwrap();
        Self {
            _folder: folder,
            config,
            data_dir,
        }
    }

    fn serve(&self) -> Served {
        serve(&mut serve_command(&self.config))
    }

    fn change(&self, sql: &str) {
        Connection::open(self.data_dir.join("gw.sqlite"))
            .unwrap()
            .execute_batch(sql)
            .unwrap();
    }
}

/// Runs a command; returns its exit code, its JSON and its errors.
fn gw(served: &Served, data_dir: &Path, arguments: &str) -> (i32, Value, String) {
    let output = gw_gateway()
        .args(arguments.split(' '))
        .args([
            "--json",
            "--admin-url",
            &format!("http://{}", served.admin_address),
            "--admin-token-file",
        ])
        .arg(data_dir.join("admin.token"))
        .output()
        .unwrap();
    let json = String::from_utf8(output.stdout).unwrap();
    (
        output.status.code().unwrap(),
        json.parse().unwrap_or_default(),
        String::from_utf8(output.stderr).unwrap(),
    )
}

#[test]
fn changed_entries_and_missing_hashes_are_found_and_an_emptied_log_beside_a_noted_head() {
    let gateway = Stopped::new();
    let served = gateway.serve();
    for account in ["acme", "demo", "globex"] {
        let (code, ..) = gw(
            &served,
            &gateway.data_dir,
            &format!("account create {account}"),
        );
        assert_eq!(code, 0);
    }
    let (code, found, _) = gw(&served, &gateway.data_dir, "audit verify");
    assert_eq!((code, &found["valid"]), (0, &Value::Bool(true)), "{found}");
    let head = found["head"].as_str().unwrap().to_owned();
    let (_, entries, _) = gw(&served, &gateway.data_dir, "audit list --limit 1");
    let newest = &entries["items"][0];
    let listed = format!("{}:{}", newest["number"], newest["hash"].as_str().unwrap());
    assert_eq!(listed, head, "each entry is listed with its hash");
    drop(served);

    gateway.change("UPDATE audit SET target = 'other' WHERE target = 'demo'");
    let served = gateway.serve();
    let (code, found, errors) = gw(&served, &gateway.data_dir, "audit verify");
    let number = newest["number"].as_i64().unwrap() - 1;
    assert_eq!(
        (code, &found["problems"][0]["number"]),
        (1, &number.into()),
        "{found}"
    );
    assert_eq!(found["problem_count"], 1);
    assert!(
        errors.contains("not as the gateways have written it"),
        "{errors}"
    );
    drop(served);

    missing_hashes_are_found(&gateway);

    // An empty log is a whole chain.
    gateway.change("DELETE FROM audit WHERE number > 0");
    let served = gateway.serve();
    let (code, ..) = gw(&served, &gateway.data_dir, "audit verify");
    assert_eq!(code, 0);
    let noted = format!("audit verify --head {head}");
    let (code, found, _) = gw(&served, &gateway.data_dir, &noted);
    let expected = head.split(':').next().unwrap().parse::<i64>().unwrap();
    assert_eq!(
        (code, &found["problems"][0]["number"]),
        (1, &expected.into()),
        "{found}"
    );
    let (code, _, errors) = gw(&served, &gateway.data_dir, "audit verify --head 7:5a");
    assert!(
        code == 2 && errors.contains("64 hexadecimal digits"),
        "{errors}"
    );
}

/// Hashes that were removed are not made again.
fn missing_hashes_are_found(gateway: &Stopped) {
    gateway.change("UPDATE audit SET hash = x''");
    let (process, log) = start_logged(&mut serve_command(&gateway.config));
    log.line_with("audit log: an entry has no hash");
    drop(process);
    let served = gateway.serve();
    let (code, found, _) = gw(&served, &gateway.data_dir, "audit verify");
    assert_eq!(
        (code, &found["problem_count"]),
        (1, &found["entries"]),
        "{found}"
    );
    let problem = &found["problems"][0]["problem"];
    assert_eq!(problem, "it has no hash; gateways since 0.2 write one");
    let output = gw_gateway()
        .args(["doctor", "--config"])
        .arg(&gateway.config)
        .env("GW_ADMIN_LISTEN", served.admin_address.to_string())
        .output()
        .unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    let line = printed.lines().find(|line| line.contains("audit log"));
    assert!(
        line.unwrap().contains("entries are not as written"),
        "doctor: {printed}"
    );
    drop(served);
}
