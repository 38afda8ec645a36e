//! `gw-gateway apply`, `diff` and `export` on gateways.

mod api;
mod own_domains;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::support::admin_api::Api;
use crate::support::processes::process::{
    Served, config_text, gw_agent, gw_gateway, serve, serve_command,
};

/// A gateway with a folder, in which its commands run.
struct Gateway {
    folder: tempfile::TempDir,
    served: Served,
}

/// Exit code and output of a command.
struct Ended {
    code: i32,
    out: String,
    err: String,
}

impl Gateway {
    fn new() -> Self {
        Self::with("")
    }

    /// A gateway whose configuration has `more`.
    fn with(more: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("gateway.toml");
        let text = config_text(&folder.path().join("data"), 0);
        fs::write(&config, text + more).unwrap();
        let served = serve(&mut serve_command(&config));
        Self { folder, served }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn run(&self, words: &[&str]) -> Ended {
        let mut command = gw_gateway();
        command
            .args(words)
            .current_dir(self.folder.path())
            .env(
                "GW_ADMIN_URL",
                format!("http://{}", self.served.admin_address),
            )
            .env("GW_ADMIN_TOKEN_FILE", self.path("data/admin.token"));
        let output = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Ended {
            code: output.status.code().unwrap(),
            out: text(output.stdout),
            err: text(output.stderr),
        }
    }

    /// The output of a command that succeeds.
    fn succeed(&self, words: &[&str]) -> String {
        let Ended { code, out, err } = self.run(words);
        assert_eq!(code, 0, "{words:?}: {err}");
        out
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
        let output = command.output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{err}");
    }

    /// The newest entries of the audit log: action, target and detail.
    fn audit(&self, number: usize) -> Vec<(String, String, Value)> {
        let list = self.json(&["audit", "list", "--limit", &number.to_string()]);
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        list["items"]
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| {
                let detail = entry["detail"].clone();
                (text(&entry["action"]), text(&entry["target"]), detail)
            })
            .collect()
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
        assert!(
            secret.len() > 40 && !exported.contains(secret),
            "{exported}"
        );
    }
    let table: toml::Table = exported.parse().unwrap();
    let shop = serde_json::to_value(&table["service"][0]).unwrap();
    let openapi: Value = Api::at(one.served.admin_address, "")
        .get("/openapi.json")
        .done();
    let mut settings = openapi["components"]["schemas"]["ServiceChanges"]["properties"].clone();
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
    assert!(out.contains("! agent acme/edge 1 (all.toml:"), "{out}");
    assert!(
        out.contains("key acme/it's \"mine\" \u{fc}: id ") && out.contains(", secret gw_sk_"),
        "{out}"
    );
    assert!(
        out.contains("7 to create, 0 to change, 0 to delete, 0 unchanged."),
        "{out}"
    );
    assert!(out.ends_with("Made 7 changes.\n"), "{out}");
    two.enroll("edge 1");
    let out = two.succeed(&apply);
    assert!(out.contains("    standby: false → true\n"), "{out}");
    assert_eq!(two.export(), exported);
    assert_eq!(two.succeed(&apply), "No difference in 8 objects.\n");
    assert_eq!(two.run(&["diff", "-f", "all.toml"]).code, 0);
    let of_beta = two.succeed(&["export", "--account", "beta"]);
    assert!(
        of_beta.contains("\"beta\"") && !of_beta.contains("acme"),
        "{of_beta}"
    );
    assert_eq!(two.json(&["export"])["service"][0]["burst"], 7);
}

const SHOP: &str = "managed_by = \"git\"\n\n[[account]]\nid = \"acme\"\n\n[[service]]\n\
                    account = \"acme\"\nid = \"shop\"\nburst = 5\n\n[[key]]\naccount = \"acme\"\n\
                    name = \"ci\"\nallowed_services = [\"shop\"]\n";

const OPS: &str = "managed_by = \"ops\"\n[[service]]\naccount = \"acme\"\nid = \"web\"\n";

#[test]
fn nothing_changes_before_every_document_is_right() {
    let gateway = Gateway::new();
    let empty = gateway.export();
    gateway.write("a.toml", SHOP);
    let shown = gateway.succeed(&["apply", "-f", "a.toml", "--dry-run"]);
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
    let Ended { code, err, .. } = gateway.run(&["apply", "-f", "a.toml"]);
    assert!(code == 2 && err.contains("add --secrets-dir DIR"), "{err}");

    gateway.write(
        "b.toml",
        "[[service]]\naccount = \"acme\"\nid = \"web\"\nbrust = 5\nburst = 0\n",
    );
    for command in ["apply", "diff"] {
        let Ended { code, out, err } = gateway.run(&[command, "-f", "a.toml", "-f", "b.toml"]);
        assert_eq!((code, out.as_str()), (2, ""));
        let expected = "gw-gateway: 2 mistakes in the documents; nothing was changed:\n  b.toml:4: \
                        service acme/web: no key brust; did you mean `burst`?\n  b.toml:5: service \
                        acme/web: burst: at least 1\n";
        assert_eq!(err, expected);
    }
    // What only the gateway shows to be wrong.
    gateway.write("b.toml", "[[service]]\naccount = \"acne\"\nid = \"web\"\n");
    let Ended { code, err, .. } =
        gateway.run(&["apply", "-f", "a.toml", "-f", "b.toml", "--print-secrets"]);
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
    assert!(
        text.starts_with("gw_sk_") && !out.contains(text.trim()),
        "{out}"
    );
    let mode = fs::metadata(&secret).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let applied = json!({ "file": "docs/sh%C3%BCp.toml", "revision": "4f1c 2" });
    let entries = gateway.audit(3);
    let actions: Vec<&str> = entries.iter().map(|(action, ..)| action.as_str()).collect();
    assert_eq!(
        actions,
        ["service_key.create", "service.create", "account.create"]
    );
    for (action, _, detail) in &entries {
        assert_eq!(detail["applied"], applied, "{action}");
    }
    assert_eq!(entries[1].2["burst"], 5);

    assert_eq!(gateway.succeed(&apply), "No difference in 3 objects.\n");
    assert_eq!(gateway.audit(3), entries);

    // A key of the same name would overwrite the file.
    let keys = gateway.json(&["key", "list", "acme"]);
    let key = keys["items"][0]["key_id"].as_str().unwrap();
    gateway.succeed(&["key", "delete", "acme", key]);
    let Ended { code, err, .. } = gateway.run(&apply);
    assert!(
        code == 2 && err.contains("secrets/acme.key.ci exists, and may hold a secret"),
        "{err}"
    );
    assert_eq!(fs::read_to_string(&secret).unwrap(), text);
    assert_eq!(gateway.json(&["key", "list", "acme"])["items"], json!([]));
    let made = gateway.json(&["apply", "-f", "docs", "--print-secrets"]);
    let change = &made["changes"][0];
    assert_eq!(change["made"], true);
    assert!(
        change["secret"].as_str().unwrap().starts_with("gw_sk_"),
        "{made}"
    );
    assert_eq!(
        gateway.audit(1)[0].2["applied"],
        json!({ "file": "docs/sh%C3%BCp.toml" })
    );
}

#[test]
fn only_own_objects_are_deleted_and_only_with_prune() {
    let gateway = Gateway::new();
    gateway.write("shop.toml", SHOP);
    gateway.write("ops.toml", OPS);
    gateway.succeed(&[
        "apply",
        "-f",
        "shop.toml",
        "-f",
        "ops.toml",
        "--print-secrets",
    ]);
    gateway.succeed(&["service", "create", "acme", "manual"]);
    let before = gateway.export();

    let prune = ["apply", "-f", "shop.toml", "--prune"];
    nothing_is_deleted_without_prune_and_confirmation(&gateway, &prune, &before);

    gateway.succeed(&[&prune[..], &["--yes", "--revision", "2"]].concat());
    let entries = gateway.audit(2);
    let actions: Vec<&str> = entries.iter().map(|(action, ..)| action.as_str()).collect();
    assert_eq!(actions, ["service.delete", "service_key.delete"]);
    let applied = json!({ "file": "shop.toml", "revision": "2" });
    assert_eq!(entries[0].2["applied"], applied);
    let services = gateway.json(&["service", "list", "acme"]);
    let labels: BTreeMap<&str, Option<&str>> = services["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|service| {
            (
                service["id"].as_str().unwrap(),
                service["managed_by"].as_str(),
            )
        })
        .collect();
    assert_eq!(
        labels,
        BTreeMap::from([("manual", None), ("web", Some("ops"))])
    );

    // An account that has objects of others stays.
    let Ended { code, err, .. } = gateway.run(&[
        "apply",
        "-f",
        "/dev/null",
        "--managed-by",
        "git",
        "--prune",
        "--yes",
    ]);
    assert!(
        code == 2
            && err.contains("account acme cannot be deleted")
            && err.contains("service acme/manual"),
        "{err}"
    );
}

fn nothing_is_deleted_without_prune_and_confirmation(
    gateway: &Gateway,
    prune: &[&str],
    before: &str,
) {
    // Without --prune nothing is deleted, and without confirmation neither.
    gateway.write(
        "shop.toml",
        "managed_by = \"git\"\n[[account]]\nid = \"acme\"\n",
    );
    assert_eq!(
        gateway.succeed(&["apply", "-f", "shop.toml"]),
        "No difference in 1 objects.\n"
    );
    let Ended { code, out, err } = gateway.run(prune);
    assert_eq!(code, 1);
    assert!(
        out.starts_with("- key acme/ci\n- service acme/shop\n"),
        "{out}"
    );
    assert!(
        err.contains("Type yes to make these changes and delete 2 objects: "),
        "{err}"
    );
    assert!(err.contains("the deletions were not confirmed"), "{err}");
    assert_eq!(gateway.export(), before);
    let Ended { code, err, .. } = gateway.run(&["apply", "-f", "/dev/null", "--prune"]);
    assert!(
        code == 2 && err.contains("--prune deletes objects with the label"),
        "{err}"
    );
}

#[test]
fn an_object_of_another_label_is_taken_over_on_demand_only() {
    let gateway = Gateway::new();
    gateway.write("shop.toml", SHOP);
    gateway.write("ops.toml", OPS);
    gateway.succeed(&[
        "apply",
        "-f",
        "shop.toml",
        "-f",
        "ops.toml",
        "--print-secrets",
    ]);
    gateway.write("ops.toml", &OPS.replace("ops", "git"));
    let take = ["apply", "-f", "ops.toml"];
    let Ended { code, err, .. } = gateway.run(&take);
    let expected = "ops.toml:2: service acme/web: managed by ops, not by git; leave it to ops, or \
                    take it over with --take-over";
    assert!(code == 2 && err.contains(expected), "{err}");
    let out = gateway.succeed(&[&take[..], &["--take-over"]].concat());
    assert!(out.contains("    managed_by: \"ops\" → \"git\"\n"), "{out}");
}
