//! `gw-gateway apply`, `diff` and `export` on gateways.

mod api;
mod own_domains;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::{Ended, Installation, assert_says, end};
use crate::support::admin_api::Api;
use crate::support::processes::process::{Served, gw_agent};

/// A gateway with a folder, in which its commands run.
struct Gateway {
    installation: Installation,
    served: Served,
}

impl Gateway {
    fn new() -> Self {
        Self::with("")
    }

    /// A gateway whose configuration has `more`.
    fn with(more: &str) -> Self {
        let installation = Installation::with(more);
        let served = installation.serve();
        Self {
            installation,
            served,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.installation.path(name)
    }

    fn run(&self, words: &[&str]) -> Ended {
        let mut command = self.installation.administer(&self.served);
        end(command.args(words).current_dir(self.path("")))
    }

    /// Runs `apply` with these words.
    fn apply(&self, words: &str) -> Ended {
        let words: Vec<&str> = ["apply"].into_iter().chain(words.split(' ')).collect();
        self.run(&words)
    }

    /// The output of a command that succeeds.
    fn succeed(&self, words: &[&str]) -> String {
        self.run(words).done()
    }

    fn json(&self, words: &[&str]) -> Value {
        serde_json::from_str(&self.succeed(&[words, &["--json"]].concat())).unwrap()
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    fn export(&self) -> String {
        self.succeed(&["export"])
    }

    /// Enrolls an agent with this name for the service `acme--shop`.
    fn enroll(&self, name: &str) {
        let create = ["enrollment-token", "create", "acme", "--service", "shop"];
        let token = self.json(&create);
        let port = self.served.address.port();
        let mut command = gw_agent();
        command
            .args(["enroll", "--name", name])
            .args(["--token", token["token"].as_str().unwrap()])
            .args(["--gateway", &format!("https://eu1.gw.localhost:{port}")])
            .arg("--ca-file")
            .arg(self.path("data/dev-ca.crt"))
            .arg("--state-dir")
            .arg(self.path(name));
        end(&mut command).done();
    }

    /// The newest entries of the audit log: action, target and detail.
    fn audit(&self, number: usize) -> Vec<(String, String, Value)> {
        let list = self.json(&["audit", "list", "--limit", &number.to_string()]);
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let entries = list["items"].as_array().unwrap().iter().map(|entry| {
            let detail = entry["detail"].clone();
            (text(&entry["action"]), text(&entry["target"]), detail)
        });
        entries.collect()
    }
}

/// A gateway with an object of every kind, none of whose settings has its default. Returns its
/// secrets, too.
fn full_gateway() -> (Gateway, Vec<String>) {
    let gateway = Gateway::new();
    let run = |line: &str, more: &[&str]| {
        let words: Vec<&str> = line.split(' ').chain(more.iter().copied()).collect();
        gateway.json(&words)
    };
    run("account create acme --capture-allowed true", &[]);
    run("account create beta", &[]);
    run(
        "service create acme shop --mode service_key --burst 7 --refill-per-minute 8 \
         --request-logging false --capture-request-body true --capture-response-body true \
         --retries false --affinity header:X-Session --hsts-max-age-seconds 300 --disable",
        &[],
    );
    run("service create acme web", &[]);
    run("service create beta api", &[]);
    let credential = run(
        "credential create acme --service web --name ci --disable",
        &[],
    );
    let key = run(
        "key create acme --service web --service shop --disable --name",
        &["it's \"mine\" \u{fc}"],
    );
    gateway.enroll("edge 1");
    let agents = gateway.json(&["agent", "list", "acme"]);
    let agent = agents["items"][0]["agent_id"].as_str().unwrap();
    let change = format!("agent change acme {agent} --service web --service shop --standby true");
    run(&change, &[]);
    let secrets = [&credential["client_secret"], &key["service_key"]];
    let secrets = secrets.map(|secret| secret.as_str().unwrap().to_owned());
    (gateway, secrets.into())
}

#[test]
fn an_export_applied_to_an_empty_gateway_gives_the_same_export() {
    let (one, secrets) = full_gateway();
    one.write("unlabelled.toml", &one.export());
    one.succeed(&["apply", "-f", "unlabelled.toml", "--managed-by", "git/shop"]);
    let exported = one.export();
    for secret in &secrets {
        let secret = secret.rsplit(['.', '_']).next().unwrap();
        assert!(secret.len() > 40, "{secret}");
        assert!(!exported.contains(secret), "{exported}");
    }
    let table: toml::Table = exported.parse().unwrap();
    let shop = serde_json::to_value(&table["service"][0]).unwrap();
    let openapi = Api::at(one.served.admin_address, "").get("/openapi.json");
    let schemas = &openapi.done()["components"]["schemas"];
    let mut settings = schemas["ServiceChanges"]["properties"].clone();
    settings.as_object_mut().unwrap().remove("managed_by");
    let defaults = one.json(&["service", "show", "acme", "web"]);
    for name in settings.as_object().unwrap().keys() {
        assert!(!shop[name].is_null(), "{name} is missing in {exported}");
        assert_ne!(shop[name], defaults[name], "{name} has its default");
    }
    assert_eq!(table["agent"].as_array().unwrap().len(), 1);
    assert_eq!(exported.matches("managed_by = \"git/shop\"").count(), 7);

    let two = Gateway::new();
    two.write("all.toml", &exported);
    let apply = ["apply", "-f", "all.toml", "--print-secrets"];
    let out = two.succeed(&apply);
    let says = [
        "! agent acme/edge 1 (all.toml:",
        "key acme/it's \"mine\" \u{fc}: id ",
        ", secret gw_sk_",
        "7 to create, 0 to change, 0 to delete, 0 unchanged.",
    ];
    assert_says(&out, &says);
    assert!(out.ends_with("Made 7 changes.\n"), "{out}");
    two.enroll("edge 1");
    assert_says(&two.succeed(&apply), &["    standby: false → true\n"]);
    assert_eq!(two.export(), exported);
    assert_eq!(two.succeed(&apply), "No difference in 8 objects.\n");
    assert_eq!(two.run(&["diff", "-f", "all.toml"]).code, 0);
    let of_beta = two.succeed(&["export", "--account", "beta"]);
    assert_says(&of_beta, &["\"beta\""]);
    assert!(!of_beta.contains("acme"), "{of_beta}");
    assert_eq!(two.json(&["export"])["service"][0]["burst"], 7);
}

const SHOP: &str = "managed_by = \"git\"\n\n[[account]]\nid = \"acme\"\n\n[[service]]\n\
                    account = \"acme\"\nid = \"shop\"\nburst = 5\n\n[[key]]\naccount = \"acme\"\n\
                    name = \"ci\"\nallowed_services = [\"shop\"]\n";

const OPS: &str = "managed_by = \"ops\"\n[[service]]\naccount = \"acme\"\nid = \"web\"\n";

#[test]
fn a_plan_is_shown_and_not_made() {
    let gateway = Gateway::new();
    let empty = gateway.export();
    gateway.write("a.toml", SHOP);
    let shown = gateway.apply("-f a.toml --dry-run").done();
    let expected = "+ account acme (a.toml:3)\n    managed_by: \"git\"\n\
                    + service acme/shop (a.toml:6)\n    burst: 5\n    managed_by: \"git\"\n\
                    + key acme/ci (a.toml:11)\n    allowed_services: [\"shop\"]\n    managed_by: \
                    \"git\"\n3 to create, 0 to change, 0 to delete, 0 unchanged.\n";
    assert_eq!(shown, expected);
    let Ended { code, out, err } = gateway.run(&["diff", "-f", "a.toml"]);
    assert_eq!((code, out.as_str()), (1, expected));
    let expected = "gw-gateway: the gateway is not as the documents say: 3 objects to create, 0 to \
                    change, 0 to delete\n";
    assert_eq!(err, expected);
    let plan = gateway.json(&["apply", "-f", "a.toml", "--dry-run"]);
    assert_eq!(plan["changes"][1]["fields"]["burst"]["new"], 5);
    assert_eq!(plan["changes"][1]["line"], 6);
    // The secret would be on no terminal and in no file.
    let refused = gateway.apply("-f a.toml");
    refused.assert_failed(2, &["add --secrets-dir DIR"]);
    assert_eq!(gateway.export(), empty);
}

#[test]
fn nothing_changes_before_every_document_is_right() {
    let gateway = Gateway::new();
    let empty = gateway.export();
    gateway.write("a.toml", SHOP);
    let wrong = "[[service]]\naccount = \"acme\"\nid = \"web\"\nbrust = 5\nburst = 0\n";
    gateway.write("b.toml", wrong);
    for command in ["apply", "diff"] {
        let Ended { code, out, err } = gateway.run(&[command, "-f", "a.toml", "-f", "b.toml"]);
        assert_eq!((code, out.as_str()), (2, ""));
        let expected = "gw-gateway: 2 mistakes in the documents; nothing was changed:\n  b.toml:4: \
                        service acme/web: no key brust; did you mean `burst`?\n  b.toml:5: service \
                        acme/web: burst: at least 1\n";
        assert_eq!(err, expected);
    }
    // A mistake that only the records of the gateway show.
    gateway.write("b.toml", "[[service]]\naccount = \"acne\"\nid = \"web\"\n");
    let Ended { code, err, .. } = gateway.apply("-f a.toml -f b.toml --print-secrets");
    let expected = "gw-gateway: 1 mistake in the documents; nothing was changed:\n  b.toml:1: \
                    service acne/web: there is no account acne; did you mean `acme`?\n";
    assert_eq!((code, err.as_str()), (2, expected));
    assert_eq!(gateway.export(), empty);
    assert_eq!(gateway.run(&["diff", "-f", "nowhere.toml"]).code, 2);
}

#[test]
fn secrets_go_to_new_files_and_the_audit_log_names_document_and_revision() {
    let gateway = Gateway::new();
    fs::create_dir(gateway.path("docs")).unwrap();
    gateway.write("docs/sh\u{fc}p.toml", SHOP);
    let apply = [
        "apply",
        "-f",
        "docs",
        "--revision",
        "4f1c 2",
        "--secrets-dir",
        "secrets",
    ];
    let out = gateway.succeed(&apply);
    let secret = gateway.path("secrets/acme.key.ci");
    let text = fs::read_to_string(&secret).unwrap();
    assert!(text.starts_with("gw_sk_"), "{text}");
    assert!(!out.contains(text.trim()), "{out}");
    let mode = fs::metadata(&secret).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let applied = json!({ "file": "docs/sh%C3%BCp.toml", "revision": "4f1c 2" });
    let entries = gateway.audit(3);
    let expected = ["service_key.create", "service.create", "account.create"];
    for ((action, _, detail), expected) in entries.iter().zip(expected) {
        assert_eq!(action, expected);
        assert_eq!(detail["applied"], applied, "{action}");
    }
    assert_eq!(entries.len(), 3);
    assert_eq!(entries[1].2["burst"], 5);

    assert_eq!(gateway.succeed(&apply), "No difference in 3 objects.\n");
    assert_eq!(gateway.audit(3), entries);

    // A key of the same name would overwrite the file.
    let keys = gateway.json(&["key", "list", "acme"]);
    let key = keys["items"][0]["key_id"].as_str().unwrap();
    gateway.succeed(&["key", "delete", "acme", key]);
    let held = "secrets/acme.key.ci exists, and may hold a secret";
    gateway.run(&apply).assert_failed(2, &[held]);
    assert_eq!(fs::read_to_string(&secret).unwrap(), text);
    assert_eq!(gateway.json(&["key", "list", "acme"])["items"], json!([]));
    let made = gateway.json(&["apply", "-f", "docs", "--print-secrets"]);
    let change = &made["changes"][0];
    assert_eq!(change["made"], true);
    let secret = change["secret"].as_str().unwrap();
    assert!(secret.starts_with("gw_sk_"), "{made}");
    let applied = json!({ "file": "docs/sh%C3%BCp.toml" });
    assert_eq!(gateway.audit(1)[0].2["applied"], applied);
}

/// A gateway with the objects of both documents and a service of neither.
fn with_three_owners() -> Gateway {
    let gateway = Gateway::new();
    gateway.write("shop.toml", SHOP);
    gateway.write("ops.toml", OPS);
    gateway
        .apply("-f shop.toml -f ops.toml --print-secrets")
        .done();
    gateway.succeed(&["service", "create", "acme", "manual"]);
    let only_account = "managed_by = \"git\"\n[[account]]\nid = \"acme\"\n";
    gateway.write("shop.toml", only_account);
    gateway
}

#[test]
fn only_own_objects_are_deleted() {
    let gateway = with_three_owners();
    gateway
        .apply("-f shop.toml --prune --yes --revision 2")
        .done();
    let entries = gateway.audit(2);
    let actions = [&*entries[0].0, &*entries[1].0];
    assert_eq!(actions, ["service.delete", "service_key.delete"]);
    let applied = json!({ "file": "shop.toml", "revision": "2" });
    assert_eq!(entries[0].2["applied"], applied);
    let services = gateway.json(&["service", "list", "acme"]);
    let services = services["items"].as_array().unwrap().iter();
    let labels: BTreeMap<_, _> = services
        .map(|service| {
            (
                service["id"].as_str().unwrap(),
                service["managed_by"].as_str(),
            )
        })
        .collect();
    let expected = BTreeMap::from([("manual", None), ("web", Some("ops"))]);
    assert_eq!(labels, expected);

    // An account that has objects of others stays.
    let refused = gateway.apply("-f /dev/null --managed-by git --prune --yes");
    let says = ["account acme cannot be deleted", "service acme/manual"];
    refused.assert_failed(2, &says);
}

#[test]
fn nothing_is_deleted_without_prune_and_confirmation() {
    let gateway = with_three_owners();
    let before = gateway.export();
    let out = gateway.apply("-f shop.toml").done();
    assert_eq!(out, "No difference in 1 objects.\n");
    let refused = gateway.apply("-f shop.toml --prune");
    let deletions = "- key acme/ci\n- service acme/shop\n";
    assert!(refused.out.starts_with(deletions), "{refused:?}");
    let says = [
        "Type yes to make these changes and delete 2 objects: ",
        "the deletions were not confirmed",
    ];
    refused.assert_failed(1, &says);
    assert_eq!(gateway.export(), before);
    let refused = gateway.apply("-f /dev/null --prune");
    refused.assert_failed(2, &["--prune deletes objects with the label"]);
}

#[test]
fn an_object_of_another_label_is_taken_over_on_demand_only() {
    let gateway = with_three_owners();
    gateway.write("ops.toml", &OPS.replace("ops", "git"));
    let refused = gateway.apply("-f ops.toml");
    let says = "ops.toml:2: service acme/web: managed by ops, not by git; leave it to ops, or take \
                it over with --take-over";
    refused.assert_failed(2, &[says]);
    let out = gateway.apply("-f ops.toml --take-over").done();
    assert_says(&out, &["    managed_by: \"ops\" → \"git\"\n"]);
}
