//! Accounts and services that are deleted, and created again with the same name: what the log, the
//! charts and the usage show.

use std::process::Output;

use serde_json::{Value, json};

use crate::administration::console::browser::Browser;
use crate::support::admin_api::Api;
use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::peers::caller::HOST;
use crate::support::processes::process::gw_gateway;
use crate::support::processes::region::Region;
use crate::support::request_log::{assert_fields, call, capture_bodies, record, replay};
use crate::support::scene::{About, Scene};

const BODY: &str = "Content-Length: 2\r\n\r\nhi";
const SERVICES: &str = "/accounts/demo/services";
const SERVICE: &str = "/accounts/demo/services/echo";

fn start() -> Scene {
    let url = backend::answering("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    let scene = Scene::service().agent_to(url).start();
    capture_bodies(&scene.api());
    scene
}

/// Sends a request whose bodies are captured; returns its id once it is in the log.
fn captured(scene: &Scene) -> String {
    let (_, id) = call(scene, &scene.request("POST /orders", BODY));
    assert_eq!(record(&scene.api(), &id)["captured_request"]["bytes"], 2);
    id
}

/// Requests in the usage and in the series of the last minutes.
fn counted(api: &Api, query: &str) -> [u64; 2] {
    let sum = |path: &str, member: &str| -> u64 {
        let reply = api.get(&format!("{path}?{query}")).body;
        let requests = reply[member].as_array().unwrap().iter();
        requests.map(|it| it["requests"].as_u64().unwrap()).sum()
    };
    [sum("/usage", "items"), sum("/series", "points")]
}

/// Waits until the requests of the service are counted.
fn await_counted(api: &Api, requests: u64) {
    eventually("the requests are counted", || {
        (counted(api, QUERIES[0]) == [requests; 2]).then_some(())
    });
}

const QUERIES: [&str; 3] = ["account=demo&service=echo", "account=demo", ""];

/// Ids that searches with and without a service find, which are the same.
fn found(api: &Api) -> Vec<String> {
    let [of_service, of_account, all] = QUERIES.map(|query| {
        let items = api.list(&format!("/requests?apex=false&{query}"));
        let ids = items.iter().map(|item| item["id"].as_str().unwrap());
        ids.map(str::to_owned).collect::<Vec<_>>()
    });
    assert_eq!(of_service, of_account);
    assert_eq!(of_service, all);
    all
}

/// Asserts that nothing of the request is shown, and that it is not replayed.
fn assert_hidden(api: &Api, id: &str) {
    for path in ["", "/body/request", "/body/response"] {
        let reply = api.get(&format!("/requests/{id}{path}"));
        assert_eq!(reply.status, 404, "{path}: {reply:?}");
    }
    let reason = "made for an earlier account or service of the same name";
    assert_not_replayed(api, id, reason);
    assert!(!found(api).contains(&id.to_owned()));
}

fn assert_not_replayed(api: &Api, id: &str, reason: &str) {
    let replay = replay(api, id, &json!({}));
    let detail = replay.body["detail"].as_str().unwrap();
    assert!(replay.status == 404 && detail.contains(reason), "{detail}");
}

fn command(about: &About, arguments: &[&str]) -> Output {
    gw_gateway()
        .args(arguments)
        .env("GW_ADMIN_TOKEN", &about.admin_token)
        .args(["--admin-url", &about.admin_url])
        .output()
        .unwrap()
}

#[test]
fn a_service_that_is_created_again_shows_nothing_of_the_one_before() {
    let scene = start();
    let api = scene.api();
    let earlier = [captured(&scene), captured(&scene)];
    await_counted(&api, 2);
    let first = |kind: &str, id: &str| {
        let path = format!("/accounts/demo/{kind}");
        format!("{path}/{}", api.list(&path)[0][id].as_str().unwrap())
    };
    let agent = first("agents", "agent_id");
    let key = first("service-keys", "key_id");

    api.delete(SERVICE);
    let new = json!({
        "id": "echo", "capture_request_body": true, "capture_response_body": true,
    });
    api.post(SERVICES, &new);
    // The service has no tunnel yet.
    api.patch(&key, &json!({ "allowed_services": ["echo"] }));
    let (status, first) = call(&scene, &scene.request("POST /new", BODY));
    assert_eq!(status, 504);
    record(&api, &first);
    for id in &earlier {
        assert_hidden(&api, id);
        let shown = command(&scene.about, &["request", "show", id]);
        assert_eq!(shown.status.code(), Some(1), "{shown:?}");
    }
    assert_eq!(found(&api), std::slice::from_ref(&first));
    for query in QUERIES {
        eventually("the request is counted alone", || {
            let [usage, series] = counted(&api, query);
            assert!(usage <= 1, "{query}: {usage}");
            // The sum of the whole gateway has all services.
            let all = if query.is_empty() { 3 } else { 1 };
            assert!(series <= all, "{query}: {series}");
            (usage == 1 && series == all).then_some(())
        });
    }
    let printed = command(&scene.about, &["usage", "--csv"]).stdout;
    let printed = String::from_utf8(printed).unwrap();
    assert_eq!(printed.lines().count(), 2, "{printed}");
    assert!(printed.contains(",demo,echo,1,1,"), "{printed}");

    // The agent serves the new one, and its tunnel to the earlier one is forgotten.
    api.patch(&agent, &json!({ "services": ["echo"] }));
    eventually("the agent has a tunnel", || {
        let shown = api.get(&agent).body;
        assert_eq!(shown.get("ended_tunnels"), None, "{shown}");
        (shown["tunnels"][0]["state"] == "ready").then_some(())
    });
    let second = captured(&scene);
    assert_eq!(found(&api), [second.clone(), first]);
    let replay = replay(&api, &second, &json!({}));
    assert_eq!(replay.status, 201, "{replay:?}");

    the_console_shows_nothing_of_the_one_before(&scene, &earlier[0], &second);
}

fn the_console_shows_nothing_of_the_one_before(scene: &Scene, earlier: &str, second: &str) {
    let mut browser = Browser::signed_in(scene);
    let page = browser.get("/requests").text;
    assert!(page.contains(second) && !page.contains(earlier));
    for path in ["", "/replay", "/body/request"] {
        let page = browser.get(&format!("/requests/{earlier}{path}"));
        assert_eq!(page.status, 404, "{path}: {}", page.text);
    }
    let page = browser.get("/usage").text;
    assert!(!page.contains(">5<"), "{page}");
}

#[test]
fn a_deleted_service_keeps_its_records_without_captures() {
    let scene = start();
    let api = scene.api();
    let id = captured(&scene);
    await_counted(&api, 1);
    api.delete(SERVICE);
    let shown = api.get(&format!("/requests/{id}")).body;
    let expected = json!({ "path": "/orders", "captured_request": null });
    assert_fields(&shown, &expected);
    for side in ["request", "response"] {
        let reply = api.get(&format!("/requests/{id}/body/{side}"));
        assert_eq!(reply.status, 404, "{reply:?}");
    }
    assert_not_replayed(&api, &id, "no service demo--echo");
    assert_eq!(found(&api), [id]);
    assert_eq!(counted(&api, QUERIES[0]), [1, 1]);
}

#[test]
fn an_account_that_is_created_again_shows_nothing_of_the_one_before() {
    let scene = start();
    let api = scene.api();
    let id = captured(&scene);
    await_counted(&api, 1);
    api.delete("/accounts/demo?cascade=true");
    let shown = api.get(&format!("/requests/{id}")).done();
    assert_eq!(shown["captured_request"], Value::Null);
    let body = api.get(&format!("/requests/{id}/body/request"));
    assert_eq!(body.status, 404);

    let is_empty = || {
        assert_hidden(&api, &id);
        assert_eq!(found(&api), [""; 0]);
        assert_eq!(counted(&api, QUERIES[0]), [0, 0]);
        assert_eq!(counted(&api, QUERIES[1]), [0, 0]);
    };
    // The account alone hides it, without the service.
    api.create_account("demo");
    is_empty();
    api.post(SERVICES, &json!({ "id": "echo" }));
    is_empty();
}

#[test]
fn no_node_of_a_region_shows_records_of_an_earlier_service() {
    let Some(region) = Region::start(2) else {
        return;
    };
    let apis = [0, 1].map(|node| region.api(node));
    let receive = |node: usize, key: &str| {
        let mut caller = region.connect(node);
        caller.send(format!(
            "GET /orders HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n\r\n"
        ));
        let id = caller.response().header("x-gw-request-id").to_owned();
        record(&apis[node], &id);
        id
    };
    let earlier = [0, 1].map(|node| receive(node, region.service_key()));
    for api in &apis {
        await_counted(api, 2);
    }
    apis[0].delete(SERVICE);
    for api in &apis {
        assert_eq!(found(api).len(), 2);
    }
    apis[1].post(SERVICES, &json!({ "id": "echo" }));
    let (_, key) = apis[0].create_service_key("demo", &["echo"]);
    let current = receive(0, &key);
    for api in &apis {
        earlier.iter().for_each(|id| assert_hidden(api, id));
        assert_eq!(found(api), std::slice::from_ref(&current));
        eventually("it is counted alone", || {
            let counts = counted(api, QUERIES[0]);
            assert!(counts.iter().all(|count| *count <= 1), "{counts:?}");
            (counts == [1, 1]).then_some(())
        });
    }
}
