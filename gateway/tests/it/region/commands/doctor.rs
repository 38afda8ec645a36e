//! `gw-gateway doctor` with a store on PostgreSQL.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use super::{Ended, Node, end};
use crate::support::doctor::{self, Finding, Findings};
use crate::support::processes::postgres::Postgres;
use crate::support::processes::process::{gw_gateway, serve, serve_command};
use crate::support::{eventually, programs};

/// Runs `doctor` of a node.
fn examine(node: &Node) -> Findings {
    doctor::examine(gw_gateway().args(["doctor", "--config"]).arg(node.config()))
}

/// Asserts verdict and words of a check.
fn assert_finding(finding: &Finding, expected: &str, words: &str, remedy: &str) {
    let Finding {
        verdict,
        found,
        advice,
        ..
    } = finding;
    assert!(
        verdict == expected && found.contains(words) && advice.contains(remedy),
        "{finding:?}"
    );
}

#[test]
fn doctor_looks_at_the_region_and_its_key() {
    if !programs::usable(&["postgresql"]) {
        return;
    }
    let server = Postgres::start();
    let node = Node::new(&server.url());
    let look = examine(&node);
    assert_finding(
        look.of("region key"),
        "failed",
        "region.key: No such file",
        "copy the key from another node",
    );
    assert_finding(
        look.of("region"),
        "failed",
        "holds no region",
        "`gw-gateway region init`",
    );

    node.succeed("init");
    let look = examine(&node);
    for check in [
        "store",
        "store: version",
        "store: primary",
        "store: durability",
        "store: notifications",
    ] {
        assert_eq!(look.of(check).verdict, "ok", "{:?}", look.of(check));
    }
    assert_finding(
        look.of("region"),
        "ok",
        "eu1.gw.localhost, revision 0, schema 5",
        "",
    );
    assert_finding(look.of("region key"), "ok", "is the key of the region", "");
    assert_finding(look.of("records"), "ok", "0 records, all authentic", "");
    server.sql("INSERT INTO gw.records VALUES ('account', 'acme', '{}', 1, '')");
    assert_finding(
        examine(&node).of("records"),
        "failed",
        "account acme",
        "`gw-gateway region repair`",
    );
    server.sql("DELETE FROM gw.records");
    assert_finding(
        look.of("store: standby"),
        "warning",
        "none is connected",
        "add a synchronous standby",
    );

    doctor_looks_at_the_files_of_password_and_key(&server, &node);

    let text = fs::read_to_string(node.config())
        .unwrap()
        .replace("\"eu1\"", "\"us2\"");
    fs::write(node.config(), text).unwrap();
    let look = examine(&node);
    assert_finding(
        look.of("region"),
        "failed",
        "belongs to eu1.gw.localhost, but this node is of us2",
        "correct `region`",
    );
}

fn doctor_looks_at_the_files_of_password_and_key(server: &Postgres, node: &Node) {
    let password = node.path("password");
    fs::write(&password, "secret\n").unwrap();
    fs::set_permissions(&password, fs::Permissions::from_mode(0o644)).unwrap();
    node.configure(
        &server.url(),
        &format!("store_password_file = \"{}\"\n", password.display()),
    );
    fs::write(node.path("region.key"), "5a".repeat(32)).unwrap();
    let look = examine(node);
    assert_finding(
        look.of("store_password_file"),
        "failed",
        "other users can read it (mode 644)",
        "chmod 600",
    );
    assert_finding(
        look.of("region key"),
        "failed",
        "differs from the key of the other nodes",
        "copy the key",
    );
    fs::set_permissions(&password, fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(examine(node).of("store_password_file").verdict, "ok");
}

#[test]
fn doctor_says_why_a_store_cannot_be_used() {
    if !programs::usable(&["postgresql"]) {
        return;
    }
    let mut server = Postgres::start();
    let node = Node::new(&server.url());
    node.succeed("init");
    node.configure(&server.url_of("none"), "");
    assert_finding(
        examine(&node).of("store"),
        "failed",
        "database \"none\" does not exist",
        "createdb",
    );
    node.configure(&server.url().replace("gw@", "other@"), "");
    assert_finding(
        examine(&node).of("store"),
        "failed",
        "role \"other\" does not exist",
        "createuser",
    );

    server.sql("CREATE ROLE other LOGIN");
    assert_finding(
        examine(&node).of("region"),
        "failed",
        "permission denied for schema gw",
        "give the schema gw",
    );

    server.sql("ALTER ROLE gw SET synchronous_commit = off");
    node.configure(&server.url(), "");
    assert_finding(
        examine(&node).of("store: durability"),
        "warning",
        "a crash can lose",
        "set both to on",
    );
    server.stop();
    assert_finding(
        examine(&node).of("store"),
        "failed",
        "error connecting to server",
        "start PostgreSQL",
    );
}

#[test]
fn a_pool_of_connections_is_found() {
    if !programs::usable(&["pgbouncer", "postgresql"]) {
        return;
    }
    let server = Postgres::start();
    let node = Node::new(&server.url());
    node.succeed("init");
    let (pool, url) = server.pool("transaction");
    node.configure(&url, "");
    let words = "a connection pool gives the sessions of this node to others, such as PgBouncer \
                 with pool_mode = transaction";
    // Also while other clients use the connections.
    for _ in 0..3 {
        assert_finding(
            examine(&node).of("store: notifications"),
            "failed",
            words,
            "pool_mode = session",
        );
        let Ended { code, out, .. } = node.region("join");
        assert!(code == 1 && out.contains(words), "{out}");
        let Ended { code, err, .. } = end(&mut serve_command(&node.config()));
        assert!(
            code == 1 && err.contains(words) && err.contains("or set pool_mode = session"),
            "{err}"
        );
    }
    drop(pool);
    let (_pool, url) = server.pool("session");
    node.configure(&url, "");
    assert_eq!(examine(&node).of("store: notifications").verdict, "ok");
    drop(serve(&mut serve_command(&node.config())));
}

#[test]
fn doctor_tells_how_a_standby_follows() {
    if !programs::usable(&["postgresql"]) {
        return;
    }
    let mut primary = Postgres::start();
    let node = Node::new(&primary.url());
    node.succeed("init");
    let mut standby = primary.standby();
    let connected = |count: &str| {
        eventually("the standby is noticed", || {
            (primary.sql("SELECT count(*) FROM pg_stat_replication") == count).then_some(())
        });
    };
    connected("1");
    let look = examine(&node);
    assert_finding(
        look.of("store: standby"),
        "warning",
        "asynchronous; 1 connected: a failover can lose",
        "ANY 1 (*)",
    );
    assert_eq!(node.status()["engine"]["replication"], "asynchronous");
    primary.sql("ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'");
    primary.sql("SELECT pg_reload_conf()");
    eventually("the standby is synchronous", || {
        (primary.sql("SELECT sync_state FROM pg_stat_replication") == "quorum").then_some(())
    });
    assert_finding(
        examine(&node).of("store: standby"),
        "ok",
        "synchronous; 1 connected",
        "",
    );
    a_user_without_pg_monitor_does_not_see_the_state_of_standbys(&primary, &node);

    standby.stop();
    connected("0");
    assert_finding(
        examine(&node).of("store: standby"),
        "failed",
        "changes are not acknowledged",
        "start the standby",
    );

    // After the loss of the primary, before a standby is promoted.
    standby.resume();
    primary.stop();
    node.configure(&standby.url(), "");
    let look = examine(&node);
    assert_eq!(look.of("store").verdict, "ok");
    assert_finding(
        look.of("store: primary"),
        "failed",
        "only standbys answer",
        "pg_ctl promote",
    );
}

fn a_user_without_pg_monitor_does_not_see_the_state_of_standbys(primary: &Postgres, node: &Node) {
    primary.sql(
        "CREATE ROLE plain LOGIN; GRANT USAGE ON SCHEMA gw TO plain; GRANT SELECT ON ALL TABLES IN \
         SCHEMA gw TO plain",
    );
    node.configure(&primary.url().replace("gw@", "plain@"), "");
    let look = examine(node);
    assert_finding(
        look.of("store: standby"),
        "ok",
        "synchronous; 1 connected",
        "",
    );
    assert_eq!(look.of("region key").verdict, "ok");
    node.configure(&primary.url(), "");
}
