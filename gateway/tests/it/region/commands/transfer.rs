//! `region import` and `region export`.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;

use super::{Node, assert_says, end};
use crate::support::processes::process::{Served, config_text, gw_gateway, serve, serve_command};
use crate::support::programs;

/// Runs an administration command against a gateway whose data folder has the admin token.
#[track_caller]
fn administer(served: &Served, data: &Path, line: &str) -> String {
    let mut command = gw_gateway();
    command
        .args(line.split(' '))
        .arg("--admin-url")
        .arg(format!("http://{}", served.admin_address));
    command.arg("--admin-token-file");
    end(command.arg(data.join("admin.token"))).done()
}

/// The digests of source and destination that a command printed.
fn digests(out: &str) -> [String; 2] {
    ["source", "destination"].map(|of| {
        let line = out
            .lines()
            .find_map(|line| line.trim().strip_prefix(&format!("SHA-256 of {of}")))
            .unwrap();
        line.trim().to_owned()
    })
}

/// The value of a count that a command printed, for source and destination.
fn counts(out: &str, kind: &str) -> Vec<String> {
    let line = out
        .lines()
        .find_map(|line| line.trim().strip_prefix(kind))
        .unwrap_or_else(|| panic!("{kind}: {out}"));
    line.split_whitespace().map(str::to_owned).collect()
}

/// A stopped gateway on SQLite with some records.
fn old_gateway(folder: &Path) {
    let config = folder.join("gateway.toml");
    let data = folder.join("data");
    fs::write(&config, config_text(&data, 0)).unwrap();
    let mut served = serve(&mut serve_command(&config));
    for line in [
        "account create acme",
        "account create other",
        "service create acme api --retries false --affinity cookie:sid",
        "credential create acme --service api --name ci",
        "key create acme --service api",
        "enrollment-token create acme --service api",
        "account delete other",
    ] {
        administer(&served, &data, line);
    }
    served.process.stop();
}

const SETTINGS: &str = "  retries                no\n  affinity               cookie:sid\n";

#[test]
fn a_single_gateway_moves_into_a_region_and_back() {
    let Some((server, node)) = Node::with_region() else {
        return;
    };
    let old = tempfile::tempdir().unwrap();
    old_gateway(old.path());
    let old_data = old.path().join("data");
    let before = fs::read(old_data.join("agent-ca.key")).unwrap();

    let out = node.with_folder("import", &old_data).done();
    let [source, destination] = digests(&out);
    assert!(source == destination && source.len() == 64, "{out}");
    for kind in ["service_key", "account"] {
        assert_eq!(counts(&out, kind), ["1", "1"], "{kind}");
    }
    assert_says(&out, &["  agent-ca, admin token, dev-ca\n"]);
    let audit = counts(&out, "audit entries")[0].clone();
    let revision = node.status()["region"]["revision"].to_string();
    assert_eq!(revision, audit, "revisions go on after the audit log");
    let sealed = server.sql("SELECT document FROM gw.records WHERE kind = 'signing_key'");
    assert_ne!(sealed, "", "signing keys are sealed");
    let not_empty = "the region is not empty; nothing was changed";
    let again = node.with_folder("import", &old_data);
    again.assert_failed(1, &[not_empty]);

    // The region goes on where the gateway stopped.
    let mut served = serve(&mut serve_command(&node.config()));
    the_region_goes_on(&served, &node, &old_data, &before);

    // The nodes of a region may run during an export.
    let exported = node.path("exported");
    let out = node.with_folder("export", &exported).done();
    let [source, destination] = digests(&out);
    assert_eq!(source, destination);
    assert_eq!(counts(&out, "account")[0], "2");
    served.process.stop();
    let refused = node.with_folder("export", &exported);
    refused.assert_failed(1, &["the folder is not empty"]);

    // Back into another region: the same contents.
    server.sql("CREATE DATABASE second");
    let second = Node::new(&server.url_of("second"));
    second.succeed("init");
    let out = second.with_folder("import", &exported).done();
    assert_eq!(digests(&out), [source.clone(), source]);

    a_single_gateway_serves(&node, &exported, &before, &second);
}

fn the_region_goes_on(served: &Served, node: &Node, old_data: &Path, before: &[u8]) {
    let data = node.path("data");
    assert_eq!(fs::read(data.join("agent-ca.key")).unwrap(), before);
    let token = |data: &Path| fs::read(data.join("admin.token")).unwrap();
    assert_eq!(token(&data), token(old_data));
    let services = administer(served, &data, "service list acme");
    assert_says(&services, &["acme--api.eu1.gw.localhost"]);
    let service = administer(served, &data, "service show acme api");
    assert_says(&service, &[SETTINGS]);
    administer(served, &data, "account create more");
    let log = administer(served, &data, "audit list --limit 100");
    assert_says(&log, &["account.delete", "enrollment_token.create"]);
}

/// `other` is a node whose region has the exported records.
fn a_single_gateway_serves(node: &Node, exported: &Path, before: &[u8], other: &Node) {
    let config = node.path("single.toml");
    fs::write(&config, config_text(exported, 0)).unwrap();
    let mut served = serve(&mut serve_command(&config));
    let accounts = administer(&served, exported, "account list");
    assert_says(&accounts, &["more"]);
    let service = administer(&served, exported, "service show acme api");
    assert_says(&service, &[SETTINGS]);
    assert_eq!(fs::read(exported.join("agent-ca.key")).unwrap(), before);
    let runs = "a gateway is running with this folder; stop it first";
    let refused = other.with_folder("import", exported);
    refused.assert_failed(1, &[runs]);
    served.process.stop();
}

#[test]
fn a_folder_that_is_not_complete_is_not_imported() {
    let Some((_server, node)) = Node::with_region() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let refused = node.with_folder("import", folder.path());
    refused.assert_failed(1, &["gw.sqlite: there is no such database"]);
    let files = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(files, 0, "nothing is created");

    old_gateway(folder.path());
    let data = folder.path().join("data");
    fs::remove_file(data.join("agent-ca.crt")).unwrap();
    let refused = node.with_folder("import", &data);
    refused.assert_failed(1, &["agent-ca.crt: No such file"]);
    assert_eq!(node.status()["region"]["revision"], 0);
}

#[test]
fn a_folder_without_an_admin_token_is_imported() {
    let Some((_server, node)) = Node::with_region() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    old_gateway(folder.path());
    let data = folder.path().join("data");
    // The contents of the key are not looked at.
    fs::write(data.join("agent-ca.key"), "other").unwrap();
    fs::remove_file(data.join("admin.token")).unwrap();
    let imported = node.with_folder("import", &data).done();
    // The region makes another token.
    assert_says(&imported, &["agent-ca, dev-ca\n"]);
}

/// A user that owns a data folder. It needs no entry in /etc/passwd.
const OWNER: u32 = 23_456;

#[test]
fn root_imports_and_exports_with_the_rights_of_the_owner_of_the_folder() {
    if !programs::is_root() {
        return;
    }
    let Some((server, node)) = Node::with_region() else {
        return;
    };
    let old = tempfile::tempdir().unwrap();
    // The owner has to reach the folder.
    fs::set_permissions(old.path(), Permissions::from_mode(0o755)).unwrap();
    old_gateway(old.path());
    let data = old.path().join("data");
    let owned = |path: &Path| chown(path, Some(OWNER), Some(OWNER)).unwrap();
    fs::read_dir(&data)
        .unwrap()
        .for_each(|entry| owned(&entry.unwrap().path()));
    owned(&data);

    // The owner puts a link to a file of root in place of a secret.
    let token = data.join("admin.token");
    let secret = old.path().join("of-root");
    fs::write(&secret, "secret-of-root\n").unwrap();
    fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
    fs::rename(&token, data.join("aside")).unwrap();
    symlink(&secret, &token).unwrap();
    let refused = node.with_folder("import", &data);
    refused.assert_failed(1, &["admin.token: Permission denied", "as root or"]);
    assert_eq!(server.sql("SELECT count(*) FROM gw.secrets"), "0");
    fs::rename(data.join("aside"), &token).unwrap();
    node.with_folder("import", &data).done();

    // A missing folder gets the owner of the one above it.
    let exported = data.join("exported");
    node.with_folder("export", &exported).done();
    let made = fs::read_dir(&exported)
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().uid());
    assert!(
        made.chain([fs::metadata(&exported).unwrap().uid()])
            .all(|user| user == OWNER)
    );
}

#[test]
fn a_folder_with_sealed_secrets_is_refused() {
    let Some((_server, node)) = Node::with_region() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    old_gateway(folder.path());
    let key = folder.path().join("key");
    fs::write(&key, "0".repeat(64)).unwrap();
    fs::set_permissions(&key, Permissions::from_mode(0o600)).unwrap();
    let mut command = serve_command(&folder.path().join("gateway.toml"));
    serve(command.env("GW_SEAL_KEY", &key)).process.stop();
    let refused = node.with_folder("import", &folder.path().join("data"));
    refused.assert_failed(1, &["make a backup of it (`gw-gateway backup`)"]);
    assert_eq!(node.status()["region"]["revision"], 0);
}

#[test]
fn an_import_that_fails_leaves_an_empty_region() {
    let Some((server, node)) = Node::with_region() else {
        return;
    };
    let old = tempfile::tempdir().unwrap();
    old_gateway(old.path());
    let data = old.path().join("data");
    // A trigger changes what is stored: the digest notices.
    server.sql(
        "CREATE FUNCTION spoil() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN NEW.target = 'spoiled'; RETURN NEW; END $$;
         CREATE TRIGGER spoil BEFORE INSERT ON gw.audit FOR EACH ROW EXECUTE FUNCTION spoil()",
    );
    let refused = node.with_folder("import", &data);
    refused.assert_failed(1, &["the contents differ after they were written"]);
    let contents = "SELECT revision, (SELECT count(*) FROM gw.records) FROM gw.region";
    assert_eq!(server.sql(contents), "0|0");
    server.sql("DROP TRIGGER spoil ON gw.audit");
    // The source is unchanged.
    node.with_folder("import", &data).done();
}
