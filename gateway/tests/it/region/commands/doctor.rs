//! `gw-gateway doctor` with a store on PostgreSQL.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use super::{Ended, Node, assert_says, end};
use crate::support::doctor::{self, Findings, OF_NODE, of_development, with};
use crate::support::processes::postgres::Postgres;
use crate::support::processes::process::{gw_gateway, serve, serve_command};
use crate::support::{eventually, programs};

/// A complaint: the check, its verdict, words of what it found and of the advice.
type Complaint = (&'static str, &'static str, &'static str, &'static str);

/// Each configuration of these tests has this complaint.
const CERTIFICATE: Complaint = (
    "certificate",
    "warning",
    "issued by the development authority",
    "set tls_certificate",
);
const NO_STANDBY: Complaint = (
    "store: standby",
    "warning",
    "none is connected",
    "add a synchronous standby",
);

/// Runs `doctor` of a node. Compares all that it complains of with `expected` and [`CERTIFICATE`].
#[track_caller]
fn examine(node: &Node, expected: &[Complaint]) -> Findings {
    let found = doctor::examine(gw_gateway().args(["doctor", "--config"]).arg(node.config()));
    let expected = [expected, &[CERTIFICATE]].concat();
    let verdicts: Vec<(&str, &str)> = expected.iter().map(|it| (it.0, it.1)).collect();
    found.assert_complaints(&verdicts);
    for (check, _, words, advice) in expected {
        let finding = found.of(check);
        assert_says(&finding.found, &[words]);
        assert_says(&finding.advice, &[advice]);
    }
    found
}

#[test]
fn doctor_looks_at_the_region_and_its_key() {
    let Some((_server, node)) = Node::with_database() else {
        return;
    };
    let no_key = (
        "region key",
        "failed",
        "region.key: No such file",
        "copy the key from another node",
    );
    let no_region = (
        "region",
        "failed",
        "holds no region",
        "`gw-gateway region init`",
    );
    examine(&node, &[no_key, NO_STANDBY, no_region]);

    node.succeed("init");
    let found = examine(&node, &[NO_STANDBY]);
    let of_store = [
        "store: notifications",
        "store",
        "store: version",
        "store: primary",
        "store: durability",
        "store: standby",
        "store: clock",
        "region",
        "region key",
        "records",
    ];
    let mut checks = of_development(&with(&OF_NODE, "secrets at rest", &of_store));
    // The data folder does not exist yet.
    checks.retain(|check| !["reserve", "request log"].contains(check));
    let complaints = [NO_STANDBY, CERTIFICATE].map(|it| (it.0, it.1));
    found.assert(&checks, &complaints);
    for (check, words) in [
        ("region", "eu1.gw.localhost, revision 0, schema 5"),
        ("region key", "is the key of the region"),
        ("records", "0 records, all authentic"),
    ] {
        assert_says(&found.of(check).found, &[words]);
    }

    node.write_another_key();
    let another_key = (
        "region key",
        "failed",
        "differs from the key of the other nodes",
        "copy the key",
    );
    examine(&node, &[NO_STANDBY, another_key]);
    node.edit("\"eu1\"", "\"us2\"");
    let another_region = (
        "region",
        "failed",
        "belongs to eu1.gw.localhost, but this node is of us2",
        "correct `region`",
    );
    examine(&node, &[NO_STANDBY, another_region, another_key]);
}

#[test]
fn doctor_finds_records_that_a_gateway_has_not_written() {
    let Some((server, node)) = Node::with_region() else {
        return;
    };
    server.sql("INSERT INTO gw.records VALUES ('account', 'acme', '{}', 1, '')");
    let forged = (
        "records",
        "failed",
        "account acme",
        "`gw-gateway region repair`",
    );
    examine(&node, &[NO_STANDBY, forged]);
}

#[test]
fn doctor_finds_a_password_that_other_users_can_read() {
    let Some((server, node)) = Node::with_region() else {
        return;
    };
    let password = node.path("password");
    fs::write(&password, "secret\n").unwrap();
    let setting = format!("store_password_file = {password:?}\n");
    node.configure(&server.url(), &setting);
    let readable = (
        "store_password_file",
        "failed",
        "other users can read it (mode 644)",
        "chmod 600",
    );
    for (mode, complaints) in [(0o644, &[readable, NO_STANDBY][..]), (0o600, &[NO_STANDBY])] {
        fs::set_permissions(&password, fs::Permissions::from_mode(mode)).unwrap();
        let found = examine(&node, complaints);
        assert_says(&found.of("store_password_file").found, &["password"]);
    }
}

#[test]
fn doctor_says_why_a_store_cannot_be_used() {
    let Some((mut server, node)) = Node::with_region() else {
        return;
    };
    server.sql("CREATE ROLE denied LOGIN");
    let url = server.url();
    let of_user = |name: &str| url.replace("gw@", &format!("{name}@"));
    let no_database = (
        "store",
        "failed",
        "database \"none\" does not exist",
        "createdb",
    );
    let no_role = (
        "store",
        "failed",
        "role \"other\" does not exist",
        "createuser",
    );
    let no_permission = (
        "region",
        "failed",
        "permission denied for schema gw",
        "give the schema gw",
    );
    for (store, complaints) in [
        (server.url_of("none"), &[no_database][..]),
        (of_user("other"), &[no_role]),
        (of_user("denied"), &[NO_STANDBY, no_permission]),
    ] {
        node.configure(&store, "");
        examine(&node, complaints);
    }
    node.configure(&url, "");
    server.stop();
    let stopped = (
        "store",
        "failed",
        "error connecting to server",
        "start PostgreSQL",
    );
    examine(&node, &[stopped]);
}

#[test]
fn doctor_warns_of_a_store_that_can_lose_changes() {
    let Some((server, node)) = Node::with_region() else {
        return;
    };
    server.sql("ALTER ROLE gw SET synchronous_commit = off");
    let loses = (
        "store: durability",
        "warning",
        "a crash can lose",
        "set both to on",
    );
    examine(&node, &[loses, NO_STANDBY]);
}

#[test]
fn a_pool_of_connections_is_found() {
    if !programs::usable(&["pgbouncer"]) {
        return;
    }
    let Some((server, node)) = Node::with_region() else {
        return;
    };
    let (pool, url) = server.pool("transaction");
    node.configure(&url, "");
    let words = "a connection pool gives the sessions of this node to others, such as PgBouncer \
                 with pool_mode = transaction";
    let pooled = (
        "store: notifications",
        "failed",
        words,
        "pool_mode = session",
    );
    // Also while other clients use the connections.
    for _ in 0..3 {
        examine(&node, &[pooled]);
        let Ended { code, out, .. } = node.region("join");
        assert_eq!(code, 1, "{out}");
        assert_says(&out, &[words]);
        let Ended { code, err, .. } = end(&mut serve_command(&node.config()));
        assert_eq!(code, 1, "{err}");
        assert_says(&err, &[words, "or set pool_mode = session"]);
    }
    drop(pool);
    let (_pool, url) = server.pool("session");
    node.configure(&url, "");
    examine(&node, &[NO_STANDBY]);
    drop(serve(&mut serve_command(&node.config())));
}

#[test]
fn doctor_tells_how_a_standby_follows() {
    let Some((mut primary, node)) = Node::with_region() else {
        return;
    };
    let mut standby = primary.standby();
    let connected = |count: &str| {
        eventually("the standby is noticed", || {
            (primary.sql("SELECT count(*) FROM pg_stat_replication") == count).then_some(())
        });
    };
    connected("1");
    let asynchronous = (
        "store: standby",
        "warning",
        "asynchronous; 1 connected: a failover can lose",
        "ANY 1 (*)",
    );
    examine(&node, &[asynchronous]);
    assert_eq!(node.status()["engine"]["replication"], "asynchronous");
    primary.sql("ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'");
    primary.sql("SELECT pg_reload_conf()");
    eventually("the standby is synchronous", || {
        (primary.sql("SELECT sync_state FROM pg_stat_replication") == "quorum").then_some(())
    });
    assert_synchronous(&node);
    without_pg_monitor(&primary, &node);

    standby.stop();
    connected("0");
    let missing = (
        "store: standby",
        "failed",
        "changes are not acknowledged",
        "start the standby",
    );
    examine(&node, &[missing]);

    // After the loss of the primary, before a standby is promoted.
    standby.resume();
    primary.stop();
    node.configure(&standby.url(), "");
    let no_primary = (
        "store: primary",
        "failed",
        "only standbys answer",
        "pg_ctl promote",
    );
    let found = examine(&node, &[no_primary]);
    assert_eq!(found.of("store").verdict, "ok");
}

#[track_caller]
fn assert_synchronous(node: &Node) {
    let found = examine(node, &[]);
    let standby = &found.of("store: standby").found;
    assert_says(standby, &["synchronous; 1 connected"]);
}

/// A user that is not in `pg_monitor` does not see the state of standbys.
fn without_pg_monitor(primary: &Postgres, node: &Node) {
    primary.sql(
        "CREATE ROLE plain LOGIN; GRANT USAGE ON SCHEMA gw TO plain; GRANT SELECT ON ALL TABLES IN \
         SCHEMA gw TO plain",
    );
    node.configure(&primary.url().replace("gw@", "plain@"), "");
    assert_synchronous(node);
    node.configure(&primary.url(), "");
}
