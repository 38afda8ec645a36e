//! `region import` and `region export`.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;

use crate::support::processes::process::{Served, config_text, gw_gateway, serve, serve_command};
use crate::support::programs;

use super::{Ended, Node, end};
use crate::support::processes::postgres::Postgres;

/// Runs an administration command against a gateway whose data folder has the admin token.
fn administer(served: &Served, data: &Path, line: &str) -> String {
    let mut command = gw_gateway();
    command
        .args(line.split(' '))
        .arg("--admin-url")
        .arg(format!("http://{}", served.admin_address));
    let Ended { code, out, err } = end(command
        .arg("--admin-token-file")
        .arg(data.join("admin.token")));
    assert_eq!((code, err.as_str()), (0, ""), "{line}");
    out
}

fn stop(mut served: Served) {
    served.process.signal("TERM");
    assert_eq!(served.process.exit_code(), Some(0));
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
    let served = serve(&mut serve_command(&config));
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
    stop(served);
}

const SETTINGS: &str = "  retries                no\n  affinity               cookie:sid\n";

#[test]
fn a_single_gateway_moves_into_a_region_and_back() {
    if !programs::usable(&["postgresql"]) {
        return;
    }
    let server = Postgres::start();
    let old = tempfile::tempdir().unwrap();
    old_gateway(old.path());
    let old_data = old.path().join("data");
    let before = fs::read(old_data.join("agent-ca.key")).unwrap();

    let node = Node::new(&server.url());
    node.succeed("init");
    let Ended { code, out, err } = node.with_folder("import", &old_data);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    let [source, destination] = digests(&out);
    assert!(source == destination && source.len() == 64, "{out}");
    assert_eq!(
        (counts(&out, "service_key"), counts(&out, "account")),
        (vec!["1".into(); 2], vec!["1".into(); 2])
    );
    assert!(out.contains("  agent-ca, admin token, dev-ca\n"), "{out}");
    let audit = counts(&out, "audit entries")[0].clone();
    assert_eq!(
        node.status()["region"]["revision"].to_string(),
        audit,
        "revisions go on after the audit log"
    );
    let sealed = server.sql("SELECT document FROM gw.records WHERE kind = 'signing_key'");
    let again = node.with_folder("import", &old_data);
    assert_eq!(
        (
            again.code,
            again
                .err
                .contains("the region is not empty; nothing was changed")
        ),
        (1, true)
    );

    // The region goes on where the gateway stopped.
    let served = serve(&mut serve_command(&node.config()));
    the_region_goes_on(&served, &node, &old_data, &before);

    // The nodes of a region may run during an export.
    let exported = node.path("exported");
    let Ended { code, out, err } = node.with_folder("export", &exported);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    let [source, destination] = digests(&out);
    assert_eq!(
        (source == destination, counts(&out, "account")[0].as_str()),
        (true, "2")
    );
    stop(served);
    let refused = node.with_folder("export", &exported);
    assert!(
        refused.code == 1 && refused.err.contains("the folder is not empty"),
        "{}",
        refused.err
    );

    // Back into another region: the same contents.
    server.sql("CREATE DATABASE second");
    let second = Node::new(&server.url_of("second"));
    second.succeed("init");
    let imported = second.with_folder("import", &exported);
    assert_eq!(digests(&imported.out), [source.clone(), source.clone()]);
    assert_ne!(sealed, "", "signing keys are sealed: {sealed}");

    a_single_gateway_serves(&node, &exported, &before, &second);
}

fn the_region_goes_on(served: &Served, node: &Node, old_data: &Path, before: &[u8]) {
    let data = node.path("data");
    assert_eq!(fs::read(data.join("agent-ca.key")).unwrap(), before);
    assert_eq!(
        fs::read(data.join("admin.token")).unwrap(),
        fs::read(old_data.join("admin.token")).unwrap()
    );
    assert!(administer(served, &data, "service list acme").contains("acme--api.eu1.gw.localhost"));
    assert!(administer(served, &data, "service show acme api").contains(SETTINGS));
    administer(served, &data, "account create more");
    let log = administer(served, &data, "audit list --limit 100");
    assert!(
        log.contains("account.delete") && log.contains("enrollment_token.create"),
        "{log}"
    );
}

/// `other` is a node whose region has the exported records.
fn a_single_gateway_serves(node: &Node, exported: &Path, before: &[u8], other: &Node) {
    let config = node.path("single.toml");
    fs::write(&config, config_text(exported, 0)).unwrap();
    let served = serve(&mut serve_command(&config));
    assert!(administer(&served, exported, "account list").contains("more"));
    assert!(administer(&served, exported, "service show acme api").contains(SETTINGS));
    assert_eq!(fs::read(exported.join("agent-ca.key")).unwrap(), before);
    let running = other.with_folder("import", exported);
    assert!(
        running
            .err
            .contains("a gateway is running with this folder; stop it first"),
        "{}",
        running.err
    );
    stop(served);
}

#[test]
fn a_folder_that_is_not_complete_is_not_imported() {
    if !programs::usable(&["postgresql"]) {
        return;
    }
    let server = Postgres::start();
    let node = Node::new(&server.url());
    node.succeed("init");
    let folder = tempfile::tempdir().unwrap();
    let missing = node.with_folder("import", folder.path());
    assert!(
        missing.code == 1 && missing.err.contains("gw.sqlite: there is no such database"),
        "{}",
        missing.err
    );
    assert_eq!(
        fs::read_dir(folder.path()).unwrap().count(),
        0,
        "nothing is created"
    );

    old_gateway(folder.path());
    let data = folder.path().join("data");
    fs::rename(
        data.join("agent-ca.crt"),
        folder.path().join("agent-ca.crt"),
    )
    .unwrap();
    let missing = node.with_folder("import", &data);
    assert!(
        missing.err.contains("agent-ca.crt: No such file"),
        "{}",
        missing.err
    );
    assert_eq!(node.status()["region"]["revision"], 0);
    fs::rename(
        folder.path().join("agent-ca.crt"),
        data.join("agent-ca.crt"),
    )
    .unwrap();
    fs::write(data.join("agent-ca.key"), "other").unwrap();
    fs::remove_file(data.join("admin.token")).unwrap();
    let imported = node.with_folder("import", &data);
    assert!(
        imported.out.contains("agent-ca, dev-ca\n"),
        "a new admin token will be made: {}",
        imported.out
    );
}

/// A user that owns a data folder. It needs no entry in /etc/passwd.
const OWNER: u32 = 23_456;

#[test]
fn root_imports_and_exports_with_the_rights_of_the_owner_of_the_folder() {
    if !programs::usable(&["postgresql"]) || !programs::is_root() {
        return;
    }
    let server = Postgres::start();
    let node = Node::new(&server.url());
    node.succeed("init");
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
    assert_eq!(
        (refused.code, refused.out.as_str()),
        (1, ""),
        "{}",
        refused.err
    );
    assert!(
        refused.err.contains("admin.token: Permission denied")
            && refused.err.contains("as root or"),
        "{}",
        refused.err
    );
    assert_eq!(server.sql("SELECT count(*) FROM gw.secrets"), "0");
    fs::rename(data.join("aside"), &token).unwrap();
    assert_eq!(node.with_folder("import", &data).code, 0);

    // A missing folder gets the owner of the one above it.
    let exported = data.join("exported");
    let Ended { code, err, .. } = node.with_folder("export", &exported);
    assert_eq!((code, err.as_str()), (0, ""));
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
    if !programs::usable(&["postgresql"]) {
        return;
    }
    let server = Postgres::start();
    let node = Node::new(&server.url());
    node.succeed("init");
    let folder = tempfile::tempdir().unwrap();
    old_gateway(folder.path());
    let key = folder.path().join("key");
    fs::write(&key, "0".repeat(64)).unwrap();
    fs::set_permissions(&key, Permissions::from_mode(0o600)).unwrap();
    stop(serve(
        serve_command(&folder.path().join("gateway.toml")).env("GW_SEAL_KEY", &key),
    ));
    let refused = node.with_folder("import", &folder.path().join("data"));
    assert!(
        refused.code == 1
            && refused
                .err
                .contains("make a backup of it (`gw-gateway backup`)"),
        "{}",
        refused.err
    );
    assert_eq!(node.status()["region"]["revision"], 0);
}

#[test]
fn an_import_that_fails_leaves_an_empty_region() {
    if !programs::usable(&["postgresql"]) {
        return;
    }
    let server = Postgres::start();
    let old = tempfile::tempdir().unwrap();
    old_gateway(old.path());
    let data = old.path().join("data");
    let node = Node::new(&server.url());
    node.succeed("init");
    // A trigger changes what is stored: the digest notices.
    server.sql(
        "CREATE FUNCTION spoil() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN NEW.target = 'spoiled'; RETURN NEW; END $$;
         CREATE TRIGGER spoil BEFORE INSERT ON gw.audit FOR EACH ROW EXECUTE FUNCTION spoil()",
    );
    let refused = node.with_folder("import", &data);
    assert!(
        refused.code == 1
            && refused
                .err
                .contains("the contents differ after they were written"),
        "{}",
        refused.err
    );
    assert_eq!(
        server.sql("SELECT revision, (SELECT count(*) FROM gw.records) FROM gw.region"),
        "0|0"
    );
    server.sql("DROP TRIGGER spoil ON gw.audit");
    assert_eq!(
        node.with_folder("import", &data).code,
        0,
        "the source is unchanged"
    );
}
