//! `gw-gateway audit verify` on a gateway whose database is changed while it is stopped.

use rusqlite::Connection;
use serde_json::Value;

use crate::administration::{Installation, assert_says, end};
use crate::support::doctor::{OF_NODE, examine, of_development, with};
use crate::support::processes::process::{Served, start_logged};

/// A gateway that has created three accounts and has ended.
struct Stopped {
    installation: Installation,
    /// The newest entry of the audit log.
    newest: Value,
    /// The head of the log, as `audit verify` printed it.
    head: String,
}

impl Stopped {
    fn new() -> Self {
        let installation = Installation::new();
        let served = installation.serve();
        for account in ["acme", "demo", "globex"] {
            let (code, ..) = gw(&installation, &served, &format!("account create {account}"));
            assert_eq!(code, 0);
        }
        let (code, found, _) = gw(&installation, &served, "audit verify");
        assert_eq!((code, &found["valid"]), (0, &Value::Bool(true)), "{found}");
        let head = found["head"].as_str().unwrap().to_owned();
        let (_, entries, _) = gw(&installation, &served, "audit list --limit 1");
        let newest = entries["items"][0].clone();
        let listed = format!("{}:{}", newest["number"], newest["hash"].as_str().unwrap());
        assert_eq!(listed, head, "each entry is listed with its hash");
        drop(served);
        Self {
            installation,
            newest,
            head,
        }
    }

    fn change(&self, sql: &str) {
        let store = Connection::open(self.installation.path("data/gw.sqlite")).unwrap();
        store.execute_batch(sql).unwrap();
    }
}

/// Runs a command; returns its exit code, its JSON and its errors.
fn gw(installation: &Installation, served: &Served, line: &str) -> (i32, Value, String) {
    let mut command = installation.administer(served);
    let ended = end(command.args(line.split(' ')).arg("--json"));
    let json = ended.out.parse().unwrap_or_default();
    (ended.code, json, ended.err)
}

#[test]
fn a_changed_entry_is_found() {
    let gateway = Stopped::new();
    gateway.change("UPDATE audit SET target = 'other' WHERE target = 'demo'");
    let served = gateway.installation.serve();
    let (code, found, errors) = gw(&gateway.installation, &served, "audit verify");
    assert_eq!((code, &found["problem_count"]), (1, &1.into()), "{found}");
    let number = gateway.newest["number"].as_i64().unwrap() - 1;
    assert_eq!(found["problems"][0]["number"], number, "{found}");
    assert_says(&errors, &["not as the gateways have written it"]);
}

/// Hashes that were removed are not made again.
#[test]
fn missing_hashes_are_found() {
    let gateway = Stopped::new();
    gateway.change("UPDATE audit SET hash = x''");
    let (process, log) = start_logged(&mut gateway.installation.serve_command());
    log.line_with("audit log: an entry has no hash");
    drop(process);
    let served = gateway.installation.serve();
    let (code, found, _) = gw(&gateway.installation, &served, "audit verify");
    assert_eq!((code, &found["problem_count"]), (1, &found["entries"]));
    let problem = &found["problems"][0]["problem"];
    assert_eq!(problem, "it has no hash; gateways since 0.2 write one");
    let mut doctor = gateway.installation.doctor();
    let looked = examine(doctor.env("GW_ADMIN_LISTEN", served.admin_address.to_string()));
    let checks = of_development(&with(&OF_NODE, "services", &["audit log"]));
    looked.assert(
        &checks,
        &[("certificate", "warning"), ("audit log", "warning")],
    );
    let found = &looked.of("audit log").found;
    assert!(found.contains("entries are not as written"), "{found}");
}

/// An empty log is a whole chain.
#[test]
fn an_emptied_log_is_found_beside_a_noted_head() {
    let gateway = Stopped::new();
    gateway.change("DELETE FROM audit WHERE number > 0");
    let served = gateway.installation.serve();
    let verify = |line: &str| gw(&gateway.installation, &served, line);
    assert_eq!(verify("audit verify").0, 0);
    let (code, found, _) = verify(&format!("audit verify --head {}", gateway.head));
    let problem = (code, &found["problems"][0]["number"]);
    assert_eq!(problem, (1, &gateway.newest["number"]), "{found}");
    let (code, _, errors) = verify("audit verify --head 7:5a");
    assert_eq!(code, 2);
    assert_says(&errors, &["64 hexadecimal digits"]);
}
