//! A region of several nodes: the request log and the time series, which each node keeps for
//! itself.

use std::io::{self, Write};
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use gw_shared::files;
use gw_shared::id::{RequestId, RequestIds};
use serde_json::{Value, json};

use super::OK;
use crate::administration::console::browser::Browser;
use crate::support::admin_api::Api;
use crate::support::agents::in_process::Agent;
use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::processes::nodes::Nodes;
use crate::support::processes::process;
use crate::support::processes::region::Region;
use crate::support::request_log::{assert_fields, capture_bodies, record, replay};
use crate::support::scene::About;

/// Three nodes that capture bodies, with an agent in front of a backend that answers `ok`.
struct World {
    nodes: Nodes,
    _agent: Agent,
}

impl World {
    fn start() -> Self {
        let nodes = Nodes::start(3);
        for node in 0..3 {
            capture_bodies(&nodes.api(node));
        }
        let (owner, other) = nodes.owner_and_other();
        let agent = nodes.run_agent(other, &backend::answering(OK));
        nodes.wait_for_tunnel(owner);
        Self {
            nodes,
            _agent: agent,
        }
    }

    /// Sends a request to `node` and waits for its record; returns its id.
    fn call(&self, node: usize, path: &str) -> String {
        let rest = "X-A: 1\r\nContent-Length: 5\r\n\r\nhello";
        let request = self.nodes.request(&format!("POST {path}"), rest);
        let response = self.nodes.connect(node).ask(request);
        assert_eq!(response.status, 200);
        let id = response.header("x-gw-request-id").to_owned();
        record(&self.api(node), &id);
        id
    }

    fn api(&self, node: usize) -> Api {
        self.nodes.api(node)
    }
}

fn slot(id: &str) -> u16 {
    id.parse::<RequestId>().unwrap().node_slot()
}

/// Entries of reads of bodies in the audit log of a node. The nodes of these tests do not share
/// their audit logs.
fn body_reads(api: &Api) -> usize {
    api.audit("request.read_body").len()
}

/// Ids on all pages of a search.
fn search(api: &Api, query: &str, limit: usize) -> Vec<String> {
    let mut ids = Vec::new();
    let mut cursor = String::new();
    loop {
        let path = format!("/requests?limit={limit}{query}{cursor}");
        let page = api.get(&path).done();
        let items = page["items"].as_array().unwrap();
        assert!(items.len() <= limit);
        let id = |item: &Value| item["id"].as_str().unwrap().to_owned();
        ids.extend(items.iter().map(id));
        match &page["next_cursor"] {
            Value::String(next) => cursor = format!("&cursor={next}"),
            _ => return ids,
        }
    }
}

#[test]
fn a_request_is_found_at_every_node() {
    let world = World::start();
    for received in 0..3 {
        let id = world.call(received, "/orders");
        assert_eq!(usize::from(slot(&id)), received);
        for asked in 0..3 {
            let shown = world.api(asked).get(&format!("/requests/{id}")).done();
            assert_eq!(shown["id"], *id, "{received} {asked}");
            assert_eq!(shown["status"], 200, "{received} {asked}");
        }
    }
}

#[test]
fn a_read_of_a_body_is_in_the_audit_log_of_the_node_that_was_asked() {
    let world = World::start();
    let reads = || [0, 1, 2].map(|node| body_reads(&world.api(node)));
    for received in 0..3 {
        let id = world.call(received, "/orders");
        for asked in 0..3 {
            let mut expected = reads();
            expected[asked] += 2;
            for (side, content) in [("request", b"hello".as_slice()), ("response", b"ok")] {
                let path = format!("/requests/{id}/body/{side}");
                let (headers, body) = world.api(asked).download(&path);
                assert_eq!(headers["x-gw-truncated"], "false");
                assert_eq!(body, content);
            }
            assert_eq!(reads(), expected, "{received} {asked}");
        }
    }
}

#[test]
fn the_id_of_no_request_is_found_at_no_node() {
    let world = World::start();
    let id = world.call(0, "/");
    let digit = u8::from_str_radix(&id[32..33], 16).unwrap() ^ 1;
    let other = format!("{}{digit:x}{}", &id[..32], &id[33..]);
    for asked in 0..3 {
        let unknown = world.api(asked).get(&format!("/requests/{other}"));
        assert_eq!(unknown.status, 404, "{asked}");
    }
}

#[test]
fn a_search_has_the_requests_of_all_nodes_in_order() {
    let world = World::start();
    let mut ids: Vec<String> = (0..13)
        .map(|number| world.call(number % 3, &format!("/n{}", number % 2)))
        .collect();
    ids.reverse();
    assert!(ids.is_sorted_by(|newer, older| newer > older));
    for asked in 0..3 {
        for limit in [1, 4, 13, 100] {
            assert_eq!(search(&world.api(asked), "", limit), ids, "{asked} {limit}");
        }
    }
    let odd: Vec<String> = ids.iter().rev().skip(1).step_by(2).rev().cloned().collect();
    assert_eq!(search(&world.api(1), "&path_prefix=/n1", 4), odd);
}

#[test]
fn an_invalid_filter_of_a_search_is_refused() {
    let nodes = Nodes::start(2);
    let refused = nodes.api(0).get("/requests?status=abc");
    assert_eq!(refused.status, 422);
    assert_eq!(refused.body["field"], "status");
}

#[test]
fn a_request_is_replayed_at_another_node() {
    let world = World::start();
    let id = world.call(0, "/orders?x=1");
    let api = world.api(2);
    let replayed = replay(&api, &id, &json!({ "target": "/again" }));
    assert_eq!(replayed.status, 201, "{replayed:?}");
    let replayed = replayed.body;
    let expected = json!({ "replayed_from": id, "path": "/again", "status": 200 });
    assert_fields(&replayed, &expected);
    let new = replayed["id"].as_str().unwrap();
    assert_eq!(slot(new), 2);
    let shown = world.api(1).get(&format!("/requests/{new}")).done();
    assert_eq!(shown["auth_mode"], "admin");
    let headers = |record: &Value| record["captured_request"]["headers"].clone();
    assert_eq!(headers(&shown), headers(&replayed));
    let (_, body) = api.download(&format!("/requests/{new}/body/request"));
    assert_eq!(body, b"hello");
}

/// Three nodes, each with a request, one of which does not answer.
struct Loss {
    world: World,
    /// The node that does not answer, the one that owns the service, and the one that is asked.
    lost: usize,
    owner: usize,
    asked: usize,
    /// The paths of the requests by node.
    paths: Vec<String>,
}

impl Loss {
    /// Stops a node, and waits until another one notices.
    fn of_a_node() -> Self {
        let mut world = World::start();
        let path = |node| format!("/requests/{}", world.call(node, "/orders"));
        let paths = (0..3).map(path).collect();
        let (owner, _) = world.nodes.owner_and_other();
        let [lost, asked] = [1, 2].map(|after| (owner + after) % 3);
        world.nodes.stop(lost);
        let api = world.api(asked);
        eventually("the node has stopped", || {
            (api.get("/requests").status == 503).then_some(())
        });
        Self {
            world,
            lost,
            owner,
            asked,
            paths,
        }
    }

    /// Asserts that an answer lacks the node, and says so.
    fn assert_unavailable(&self, path: &str) {
        let refused = self.world.api(self.asked).get(path);
        assert_eq!(refused.status, 503, "{path}: {refused:?}");
        let problem = &refused.body;
        assert_eq!(problem["missing_nodes"], json!([self.lost]), "{path}");
        assert_eq!(problem["type"], "urn:gw:problem:unavailable", "{path}");
        let named = format!("node {} ", self.lost);
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.starts_with(&named), "{path}: {detail}");
    }
}

#[test]
fn a_node_that_does_not_answer_is_named() {
    let loss = Loss::of_a_node();
    let api = loss.world.api(loss.asked);
    let path = loss.paths[loss.lost].as_str();
    let body = format!("{path}/body/request");
    for path in [path, &body, "/requests?limit=2", "/series"] {
        loss.assert_unavailable(path);
    }
    let replayed = api.ask("POST", &format!("{path}/replay"), &json!({}));
    assert_eq!(replayed.status, 503);
    for list in ["/requests", "/series"] {
        let partial = api.get(&format!("{list}?partial=true")).done();
        assert_eq!(partial["missing_nodes"], json!([loss.lost]), "{list}");
    }
    assert_eq!(api.list("/requests?partial=true").len(), 2);
    let about = loss.world.nodes.about(loss.asked);
    commands_name_the_node(&about, loss.lost);
    the_console_names_the_node(&about, loss.lost, path);
    api.get(&loss.paths[loss.owner]).done();
}

#[test]
fn searches_are_complete_without_a_node_that_is_no_member_but_its_requests_may_exist() {
    let mut loss = Loss::of_a_node();
    loss.world.nodes.place(&[loss.owner, loss.asked]);
    loss.assert_unavailable(&loss.paths[loss.lost]);
    let api = loss.world.api(loss.asked);
    let page = api.get("/requests").done();
    assert_eq!(page.get("missing_nodes"), None);
    let old = api.get("/requests/019aa5c2-7e30-7c3b-8f11-2d5a4c9e1b07");
    assert_eq!(old.status, 404, "older than the log: {old:?}");
}

fn commands_name_the_node(about: &About, lost: usize) {
    let search = |option: &str| {
        let mut command = process::gw_gateway();
        command.args(["request", "search", "--partial", option]);
        command
            .env("GW_ADMIN_URL", &about.admin_url)
            .env("GW_ADMIN_TOKEN", &about.admin_token);
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    };
    let listed = search("--limit=10");
    let missing = format!("\nMissing: the requests of nodes that do not answer: {lost}.\n");
    assert!(listed.ends_with(&missing), "{listed}");
    let listed: Value = serde_json::from_str(&search("--json")).unwrap();
    assert_eq!(listed["missing_nodes"], json!([lost]));
}

fn the_console_names_the_node(about: &About, lost: usize, request: &str) {
    let mut browser = Browser::at(about.admin_url.clone());
    browser.sign_in(&about.admin_token, "/");
    let missing = format!("because they do not answer: {lost}.");
    for path in ["/requests", "/"] {
        let text = browser.get(path).text;
        assert!(text.contains(&missing), "{path}: {text}");
    }
    assert_eq!(browser.get(request).status, 503);
}

#[test]
fn charts_have_the_sum_of_all_nodes() {
    let world = World::start();
    for (node, count) in [3, 2, 4].into_iter().enumerate() {
        for _ in 0..count {
            world.call(node, "/");
        }
    }
    for asked in 0..3 {
        let total = |path: &str| {
            let series = world.api(asked).get(path).done();
            let points = series["points"].as_array().unwrap().iter();
            let requests = points.map(|point| point["requests"].as_u64().unwrap());
            requests.sum::<u64>()
        };
        // Points are taken every ten seconds.
        eventually("all requests are counted", || {
            (total("/series") >= 9).then_some(())
        });
        assert_eq!(total("/series?account=demo&service=echo"), 9);
        assert_eq!(total("/series?account=other"), 0);
    }
}

#[test]
fn a_lookup_ends_while_the_archive_does_not_answer() {
    // The kernel takes the connections.
    assert_lookups_end(&TcpListener::bind("127.0.0.1:0").unwrap());
}

#[test]
fn a_lookup_ends_while_an_answer_of_the_archive_does_not_end() {
    assert_lookups_end(&slow_archive(
        "Content-Length: 1000\r\n\r\n<ListBucketResult>",
    ));
}

#[test]
fn a_lookup_ends_while_the_archive_answers_with_many_parts() {
    let page = "<ListBucketResult><IsTruncated>true</IsTruncated>\
                <NextContinuationToken>1</NextContinuationToken></ListBucketResult>";
    let length = page.len();
    let answer = format!("Connection: close\r\nContent-Length: {length}\r\n\r\n{page}");
    assert_lookups_end(&slow_archive(&answer));
}

/// A server that gives each connection the same answer after half a second, and then nothing.
fn slow_archive(answer: &str) -> TcpListener {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let accepting = listener.try_clone().unwrap();
    let answer = format!("HTTP/1.1 200 OK\r\n{answer}");
    thread::spawn(move || {
        for mut connection in accepting.incoming().flatten() {
            let answer = answer.clone();
            thread::spawn(move || {
                thread::sleep(Duration::from_millis(500));
                let _ = connection.write_all(answer.as_bytes());
                let _ = io::copy(&mut connection, &mut io::sink());
            });
        }
    });
    listener
}

/// Asserts that lookups and searches end, and say that the archive is missing.
fn assert_lookups_end(archive: &TcpListener) {
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("secret");
    files::write_private(&secret, b"secret").unwrap();
    let configuration = format!(
        "archive.url = \"s3://bucket/prefix\"\narchive.endpoint = \"http://{}\"\n\
         archive.access_key_id = \"id\"\narchive.secret_key_file = \"{}\"\n",
        archive.local_addr().unwrap(),
        secret.display()
    );
    let Some(region) = Region::start_with(1, false, &configuration) else {
        return;
    };
    let ids = RequestIds::new();
    // The node of this slot has left.
    ids.use_node_slot(500);
    let lost = ids.next_id();
    for path in [
        format!("/requests/{lost}"),
        "/requests?path_prefix=/".to_owned(),
    ] {
        let refused = region.get(0, &path);
        let detail = refused.body["detail"].as_str().unwrap_or_default();
        assert!(
            refused.status == 503 && detail.contains("the archive cannot be read"),
            "{path}: {refused:?}"
        );
    }
    let page = region.get(0, "/requests?path_prefix=/&partial=true").done();
    assert_eq!(page["missing_archive"], true, "{page}");
}
