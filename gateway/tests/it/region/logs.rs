//! A region of several nodes: the request log and the time series, which each node keeps for
//! itself.

use std::io::{self, Write};
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use gw_shared::files;
use gw_shared::id::{RequestId, RequestIds};
use serde_json::{Value, json};

use crate::administration::console::browser::Browser;
use crate::support::admin_api::Api;
use crate::support::agents::in_process::Agent;
use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::processes::nodes::Nodes;
use crate::support::processes::process;
use crate::support::processes::region::Region;
use crate::support::request_log::{capture_bodies, record};
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
        let agent = nodes.run_agent(
            other,
            &backend::start(|mut peer| {
                while peer.request().is_ok() {
                    peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
                }
            }),
        );
        nodes.wait_for_tunnel(owner);
        Self {
            nodes,
            _agent: agent,
        }
    }

    /// Sends a request to `node` and waits for its record; returns its id.
    fn call(&self, node: usize, path: &str) -> String {
        let mut caller = self.nodes.connect(node);
        caller.send(self.nodes.request(
            &format!("POST {path}"),
            "X-A: 1\r\nContent-Length: 5\r\n\r\nhello",
        ));
        let response = caller.response();
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
        let page = api.get(&format!("/requests?limit={limit}{query}{cursor}"));
        assert_eq!(page.status, 200, "{page:?}");
        let items = page.body["items"].as_array().unwrap();
        assert!(items.len() <= limit);
        ids.extend(
            items
                .iter()
                .map(|item| item["id"].as_str().unwrap().to_owned()),
        );
        match &page.body["next_cursor"] {
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
            let api = world.api(asked);
            let shown = api.get(&format!("/requests/{id}"));
            assert_eq!(
                (shown.status, &shown.body["id"], &shown.body["status"]),
                (200, &json!(id), &json!(200))
            );
            let before: Vec<usize> = (0..3).map(|node| body_reads(&world.api(node))).collect();
            for (side, content) in [("request", b"hello".as_slice()), ("response", b"ok")] {
                let (headers, body) = api.download(&format!("/requests/{id}/body/{side}"));
                assert_eq!(
                    (&headers["x-gw-truncated"], body.as_slice()),
                    (&"false".parse().unwrap(), content)
                );
            }
            for (node, before) in before.into_iter().enumerate() {
                let more = if node == asked { 2 } else { 0 };
                assert_eq!(
                    body_reads(&world.api(node)),
                    before + more,
                    "{received} {asked} {node}"
                );
            }
        }
    }
    // The id of no request.
    let id = world.call(0, "/");
    let other = format!(
        "{}{:x}{}",
        &id[..32],
        u8::from_str_radix(&id[32..33], 16).unwrap() ^ 1,
        &id[33..]
    );
    for asked in 0..3 {
        let unknown = world.api(asked).get(&format!("/requests/{other}"));
        assert_eq!(unknown.status, 404);
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
    let refused = world.api(0).get("/requests?status=abc");
    assert_eq!(
        (refused.status, &refused.body["field"]),
        (422, &json!("status"))
    );
}

#[test]
fn a_request_is_replayed_at_another_node() {
    let world = World::start();
    let id = world.call(0, "/orders?x=1");
    let api = world.api(2);
    let replayed = api.ask(
        "POST",
        &format!("/requests/{id}/replay"),
        &json!({ "target": "/again" }),
    );
    assert_eq!(
        (replayed.status, &replayed.body["replayed_from"]),
        (201, &json!(id)),
        "{replayed:?}"
    );
    let new = replayed.body["id"].as_str().unwrap();
    assert_eq!(
        (slot(new), &replayed.body["path"], &replayed.body["status"]),
        (2, &json!("/again"), &json!(200))
    );
    let shown = world.api(1).get(&format!("/requests/{new}"));
    assert_eq!(
        (shown.status, &shown.body["auth_mode"]),
        (200, &json!("admin"))
    );
    assert_eq!(
        shown.body["captured_request"]["headers"],
        replayed.body["captured_request"]["headers"]
    );
    let (_, body) = api.download(&format!("/requests/{new}/body/request"));
    assert_eq!(body, b"hello");
}

#[test]
fn a_node_that_does_not_answer_is_named() {
    let mut world = World::start();
    let ids: Vec<String> = (0..3).map(|node| world.call(node, "/orders")).collect();
    let (owner, _) = world.nodes.owner_and_other();
    let lost = (owner + 1) % 3;
    world.nodes.stop(lost);
    let asked = (owner + 2) % 3;
    let about = world.nodes.about(asked);
    let api = world.api(asked);
    eventually("the node has stopped", || {
        (api.get("/requests").status == 503).then_some(())
    });
    let path = format!("/requests/{}", ids[lost]);
    let unavailable = |path: &str| {
        let refused = api.get(path);
        assert_eq!(
            (refused.status, &refused.body["missing_nodes"]),
            (503, &json!([lost])),
            "{path}: {refused:?}"
        );
        assert_eq!(refused.body["type"], "urn:gw:problem:unavailable");
        let named = format!("node {lost} ");
        assert!(
            refused.body["detail"].as_str().unwrap().starts_with(&named),
            "{refused:?}"
        );
    };
    for path in [
        path.as_str(),
        &format!("{path}/body/request"),
        "/requests?limit=2",
        "/series",
    ] {
        unavailable(path);
    }
    assert_eq!(
        api.ask("POST", &format!("{path}/replay"), &json!({}))
            .status,
        503
    );
    let partial = api.get("/requests?partial=true");
    assert_eq!(
        (partial.status, &partial.body["missing_nodes"]),
        (200, &json!([lost]))
    );
    assert_eq!(partial.body["items"].as_array().unwrap().len(), 2);
    commands_name_the_node(&about, lost);
    the_console_names_the_node(&about, lost, &path);
    let partial = api.get("/series?partial=true");
    assert_eq!(
        (partial.status, &partial.body["missing_nodes"]),
        (200, &json!([lost]))
    );
    assert_eq!(api.get(&format!("/requests/{}", ids[owner])).status, 200);

    // It is no member any more: searches are complete without it, but its requests are not known to
    // be gone.
    world.nodes.place(&[owner, asked]);
    unavailable(&path);
    let page = api.get("/requests");
    assert_eq!((page.status, page.body.get("missing_nodes")), (200, None));
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
    assert!(
        listed.ends_with(&format!(
            "\nMissing: the requests of nodes that do not answer: {lost}.\n"
        )),
        "{listed}"
    );
    let listed: Value = serde_json::from_str(&search("--json")).unwrap();
    assert_eq!(listed["missing_nodes"], json!([lost]));
}

fn the_console_names_the_node(about: &About, lost: usize, request: &str) {
    let mut browser = Browser::at(about.admin_url.clone());
    browser.sign_in(&about.admin_token, "/");
    for page in ["/requests", "/"] {
        let page = browser.get(page);
        assert!(
            page.text
                .contains(&format!("because they do not answer: {lost}.")),
            "{}",
            page.text
        );
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
            let points = series["points"].as_array().unwrap();
            points
                .iter()
                .map(|point| point["requests"].as_u64().unwrap())
                .sum::<u64>()
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
    let page = region.get(0, "/requests?path_prefix=/&partial=true");
    assert_eq!(
        (page.status, &page.body["missing_archive"]),
        (200, &json!(true)),
        "{page:?}"
    );
}
