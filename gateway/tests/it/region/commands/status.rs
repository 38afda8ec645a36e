//! `gw-gateway region status`.

use std::fs;

use serde_json::{Value, json};

use super::{Node, assert_says, run, stored_status};
use crate::support::eventually;
use crate::support::processes::postgres::Postgres;
use crate::support::processes::region::Region;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The lines about a node whose configuration names no port of its admin listener.
const STOPPED: &str = "This node:\n its process does not answer: admin_listen has port 0, so the \
                       port is not known; give the address with --admin-url";

/// The words of a line. A word in the place of one in angle brackets is replaced by that one.
fn words(line: &str, pattern: &str) -> String {
    let mut pattern = pattern.split_whitespace();
    let replaced = line.split_whitespace().map(|word| match pattern.next() {
        Some(any) if any.starts_with('<') => any,
        _ => word,
    });
    replaced.collect::<Vec<_>>().join(" ")
}

/// Compares each line of `text` with that of a pattern, in which a word in angle brackets such as
/// `<time>` stands for any word. The width of columns is left out.
#[track_caller]
fn assert_lines(text: &str, pattern: &str) {
    let patterns = pattern.lines().chain(std::iter::repeat(""));
    let lines: Vec<String> = text
        .lines()
        .zip(patterns)
        .map(|(line, pattern)| words(line, pattern))
        .collect();
    let expected: Vec<String> = pattern.lines().map(|line| words(line, "")).collect();
    assert_eq!(lines, expected, "{text}");
}

/// The lines about the database and the region. The server has no standby.
fn facts(server: &Postgres, revision: &str, last_change: &str) -> String {
    let socket = server.socket();
    let folder = socket.parent().unwrap().display();
    let version = server.sql("SHOW server_version");
    let id = server.sql("SELECT id FROM gw.region");
    format!(
        "Database:
           store               postgres://gw@{folder}/postgres
           address             -
           version             {version}
           primary             yes
           standby             none
           standbys connected  0
         Region:
           region                   eu1.gw.localhost
           region id                {id}
           region key of this node  equal
           revision                 {revision}
           last change              {last_change}
           schema                   5
           feature level            1\n"
    )
}

/// The lines about the nodes of a region, which are live and have all changes.
fn nodes(region: &Region) -> String {
    let line = |node: usize| {
        let slot = &region.status(node)["node"];
        let address = region.peer_listen(node);
        format!("{slot}  live  {VERSION}  {address}  0  0  in use\n")
    };
    let mut lines: Vec<String> = (0..region.nodes.len()).map(line).collect();
    lines.sort();
    format!(
        "Nodes:
           NODE  STATE  VERSION  ADDRESS  EPOCHS BEHIND  CHANGES BEHIND  REGION KEYS\n{}",
        lines.concat()
    )
}

#[test]
fn each_line_of_the_status_of_a_healthy_region_is_as_expected() {
    let Some(region) = Region::start(3) else {
        return;
    };
    region.api(0).create_account("acme");
    eventually("every node has all changes, and shows its key", || {
        let has_all = |node: &Value| node["epoch_lag"] == 0 && node["revision_lag"] == 0;
        let is_done = |node: &Value| has_all(node) && node["keys"] == json!(["in use"]);
        let status = stored_status(&region, 0);
        let nodes = status["nodes"].as_array().unwrap();
        nodes.iter().all(is_done).then_some(())
    });
    let revision = region.postgres.sql("SELECT revision FROM gw.region");
    let change = "<time> by admin on <machine>, account.create";
    let facts = facts(&region.postgres, &revision, change);
    let nodes = nodes(&region);
    let entries = region.postgres.sql("SELECT count(*) FROM gw.audit");
    let slot = &region.status(0)["node"];
    let expected = format!(
        "{facts}{nodes}\
         Records:
           KIND              COUNT      BYTES
           account           2          <bytes>
           enrollment_token  1          <bytes>
           service           1          <bytes>
           service_key       1          <bytes>
           signing_key       1          <bytes>
           ticket_key        1          <bytes>
           audit             {entries}  <bytes>
         This node:
           node      {slot}
           standing  member"
    );
    assert_lines(&run(&region, 0, &["status"]).done(), &expected);
}

#[test]
fn the_status_of_an_empty_region_has_no_change() {
    let Some((server, node)) = Node::with_region() else {
        return;
    };
    let status = node.status();
    assert_eq!(status["region"]["revision"], 0);
    assert_eq!(status["last_change"], Value::Null);
    assert_eq!(status["key_problem"], Value::Null);
    assert_eq!(status["engine"]["is_primary"], true);
    assert_eq!(status["engine"]["replication"], "none");
    let out = node.succeed("status");
    let facts = facts(&server, "0", "-");
    let records = "Records:\n KIND COUNT BYTES\n audit 0 0\n";
    assert_lines(&out, &format!("{facts}{records}{STOPPED}"));
}

#[test]
fn the_status_names_engine_region_records_and_the_last_change() {
    let Some((server, node)) = Node::with_region() else {
        return;
    };
    server.sql(
        "BEGIN; UPDATE gw.region SET revision = 7;
         INSERT INTO gw.records VALUES ('account', 'acme', '{}', 7, ''),
             ('account', 'b', '{1}', 7, ''),
             ('agent', 'x', '', 7, '');
         INSERT INTO gw.audit VALUES (7, 1795234532, 'admin', 'account.create', NULL, 'acme', '{}');
         INSERT INTO gw.changes VALUES (7, gen_random_uuid(), 'node1', now(), '', ''); COMMIT",
    );
    let records = json!([
        { "kind": "account", "count": 2, "bytes": 5 },
        { "kind": "agent", "count": 1, "bytes": 0 },
        { "kind": "audit", "count": 1, "bytes": 2 },
    ]);
    assert_eq!(node.status()["records"], records);
    let out = node.succeed("status");
    let change = "2026-11-21T04:15:32Z by admin on node1, account.create";
    let facts = facts(&server, "7", change);
    let records = "Records:\n KIND COUNT BYTES\n account 2 5\n agent 1 0\n audit 1 2\n";
    assert_lines(&out, &format!("{facts}{records}{STOPPED}"));
}

#[test]
fn the_status_of_a_region_does_not_need_its_key() {
    let Some((_server, node)) = Node::with_region() else {
        return;
    };
    fs::remove_file(node.path("region.key")).unwrap();
    let status = node.status();
    let problem = status["key_problem"].as_str().unwrap();
    assert_says(problem, &["No such file"]);
}
