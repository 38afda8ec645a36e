//! Accounts and services that are deleted, and created again with the same name: what the log, the
//! charts and the usage show.

use std::process::Output;

use serde_json::{Value, json};

use crate::administration::console::browser::Browser;
use crate::support::admin_api::Api;
use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::peers::caller::connect_to;
use crate::support::processes::process::gw_gateway;
use crate::support::processes::region::Region;
use crate::support::request_log::{call, capture_bodies, record};
use crate::support::scene::{About, Scene};

const BODY: &str = "Content-Length: 2\r\n\r\nhi";
const SERVICE: &str = "/accounts/demo/services/echo";

fn start() -> Scene {
    let url = backend::answering("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    Scene::service().agent_to(url).start()
}

/// Sends a request whose bodies are captured; returns its id once it is in the log.
fn captured(scene: &Scene) -> String {
    let (_, id) = call(scene, &scene.request("POST /orders", BODY));
    assert_eq!(record(&scene.api(), &id)["captured_request"]["bytes"], 2);
    id
}

fn done(api: &Api, method: &str, path: &str, body: &Value) {
    let reply = api.ask(method, path, body);
    assert!((200..300).contains(&reply.status), "{reply:?}");
}

/// Requests in the usage and in the series of the last minutes.
fn counted(api: &Api, query: &str) -> [u64; 2] {
    let sum = |list: &Value| -> u64 {
        let requests = list
            .as_array()
            .unwrap()
            .iter()
            .map(|item| &item["requests"]);
        requests.map(|count| count.as_u64().unwrap()).sum()
    };
    let usage = api.get(&format!("/usage?{query}"));
    let series = api.get(&format!("/series?{query}"));
    [sum(&usage.body["items"]), sum(&series.body["points"])]
}

const QUERIES: [&str; 3] = ["account=demo&service=echo", "account=demo", ""];

/// Ids that searches with and without a service find, which are the same.
fn found(api: &Api) -> Vec<String> {
    let [of_service, of_account, all] = QUERIES.map(|query| {
        let page = api.get(&format!("/requests?apex=false&{query}")).body;
        let items = page["items"].as_array().unwrap().iter();
        let ids = items.map(|item| item["id"].as_str().unwrap().to_owned());
        ids.collect::<Vec<_>>()
    });
    assert_eq!(of_service, of_account);
    assert_eq!(of_service, all);
    all
}

/// Nothing of the request is shown, and it is not replayed.
fn is_hidden(about: &About, id: &str) {
    let api = Api::of(about);
    for path in ["", "/body/request", "/body/response"] {
        let reply = api.get(&format!("/requests/{id}{path}"));
        assert_eq!(reply.status, 404, "{path}: {reply:?}");
    }
    let replay = api.ask("POST", &format!("/requests/{id}/replay"), &json!({}));
    let detail = replay.body["detail"].as_str().unwrap();
    let reason = "made for an earlier account or service of the same name";
    assert!(replay.status == 404 && detail.contains(reason), "{detail}");
    assert!(!found(&api).contains(&id.to_owned()));
}

fn command(about: &About, arguments: &[&str]) -> Output {
    let mut command = gw_gateway();
    command
        .args(arguments)
        .env("GW_ADMIN_TOKEN", &about.admin_token);
    command
        .args(["--admin-url", &about.admin_url])
        .output()
        .unwrap()
}

#[test]
fn a_service_that_is_created_again_shows_nothing_of_the_one_before() {
    let scene = start();
    let api = scene.api();
    capture_bodies(&api);
    let earlier = [captured(&scene), captured(&scene)];
    eventually("the requests are counted", || {
        (counted(&api, QUERIES[0]) == [2, 2]).then_some(())
    });
    let first = |kind: &str, id: &str| {
        let path = format!("/accounts/demo/{kind}");
        let item = api.get(&path).body["items"][0].clone();
        format!("{path}/{}", item[id].as_str().unwrap())
    };
    let agent = first("agents", "agent_id");
    let key = first("service-keys", "key_id");

    done(&api, "DELETE", SERVICE, &Value::Null);
    let new = json!({
        "id": "echo", "capture_request_body": true, "capture_response_body": true,
    });
    done(&api, "POST", "/accounts/demo/services", &new);
    // Without a tunnel.
    done(
        &api,
        "PATCH",
        &key,
        &json!({ "allowed_services": ["echo"] }),
    );
    let (status, first) = call(&scene, &scene.request("POST /new", BODY));
    assert_eq!(status, 504);
    record(&api, &first);
    for id in &earlier {
        is_hidden(&scene.about, id);
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
    assert!(
        printed.lines().count() == 2 && printed.contains(",demo,echo,1,1,"),
        "{printed}"
    );

    // The agent serves the new one, and its tunnel to the earlier one is forgotten.
    done(&api, "PATCH", &agent, &json!({ "services": ["echo"] }));
    eventually("the agent has a tunnel", || {
        let shown = api.get(&agent).body;
        assert_eq!(shown.get("ended_tunnels"), None, "{shown}");
        (shown["tunnels"][0]["state"] == "ready").then_some(())
    });
    let second = captured(&scene);
    assert_eq!(found(&api), [second.clone(), first]);
    let replay = api.ask("POST", &format!("/requests/{second}/replay"), &json!({}));
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
fn captures_of_a_deleted_service_end_with_it_and_its_records_stay() {
    let scene = start();
    let api = scene.api();
    capture_bodies(&api);
    let id = captured(&scene);
    eventually("the request is counted", || {
        (counted(&api, QUERIES[0]) == [1, 1]).then_some(())
    });
    done(&api, "DELETE", SERVICE, &Value::Null);
    let shown = api.get(&format!("/requests/{id}")).body;
    assert_eq!(
        (&shown["path"], &shown["captured_request"]),
        (&json!("/orders"), &Value::Null)
    );
    for side in ["request", "response"] {
        let reply = api.get(&format!("/requests/{id}/body/{side}"));
        assert_eq!(reply.status, 404, "{reply:?}");
    }
    let replay = api.ask("POST", &format!("/requests/{id}/replay"), &json!({}));
    let detail = replay.body["detail"].as_str().unwrap();
    assert!(
        replay.status == 404 && detail.contains("no service demo--echo"),
        "{detail}"
    );
    assert_eq!(found(&api), [id]);
    assert_eq!(counted(&api, QUERIES[0]), [1, 1]);
}

#[test]
fn an_account_that_is_created_again_shows_nothing_of_the_one_before() {
    let scene = start();
    let api = scene.api();
    capture_bodies(&api);
    let id = captured(&scene);
    eventually("the request is counted", || {
        (counted(&api, QUERIES[0]) == [1, 1]).then_some(())
    });
    done(&api, "DELETE", "/accounts/demo?cascade=true", &Value::Null);
    let shown = api.get(&format!("/requests/{id}"));
    assert_eq!(
        (shown.status, &shown.body["captured_request"]),
        (200, &Value::Null)
    );
    let body = api.get(&format!("/requests/{id}/body/request"));
    assert_eq!(body.status, 404);

    // Already without the service.
    done(
        &api,
        "POST",
        "/accounts",
        &json!({ "id": "demo", "capture_allowed": true }),
    );
    let is_empty = || {
        is_hidden(&scene.about, &id);
        assert_eq!(found(&api), [""; 0]);
        assert_eq!(counted(&api, QUERIES[0]), [0, 0]);
        assert_eq!(counted(&api, QUERIES[1]), [0, 0]);
    };
    is_empty();
    done(
        &api,
        "POST",
        "/accounts/demo/services",
        &json!({ "id": "echo" }),
    );
    is_empty();
}

#[test]
fn no_node_of_a_region_shows_records_of_an_earlier_service() {
    let Some(region) = Region::start(2) else {
        return;
    };
    let abouts = [0, 1].map(|node| About {
        admin_url: format!("http://{}", region.node(node).admin_address),
        admin_token: region.admin_token().trim().to_owned(),
        ..region.about(node)
    });
    let apis = abouts.each_ref().map(Api::of);
    let receive = |node: usize, key: &str| {
        let mut caller = connect_to(
            &abouts[node],
            "demo--echo.eu1.gw.localhost",
            &[b"http/1.1"],
            None,
        );
        caller.send(format!(
            "GET /orders HTTP/1.1\r\nHost: demo--echo.eu1.gw.localhost\r\n\
             X-Gw-Service-Key: {key}\r\n\r\n"
        ));
        let id = caller.response().header("x-gw-request-id").to_owned();
        record(&apis[node], &id);
        id
    };
    let earlier = [0, 1].map(|node| receive(node, region.service_key()));
    for api in &apis {
        eventually("both are counted", || {
            (counted(api, QUERIES[0]) == [2, 2]).then_some(())
        });
    }
    done(&apis[0], "DELETE", SERVICE, &Value::Null);
    for api in &apis {
        assert_eq!(found(api).len(), 2);
    }
    done(
        &apis[1],
        "POST",
        "/accounts/demo/services",
        &json!({ "id": "echo" }),
    );
    let new = json!({ "allowed_services": ["echo"] });
    let key = apis[0]
        .ask("POST", "/accounts/demo/service-keys", &new)
        .body;
    let current = receive(0, key["service_key"].as_str().unwrap());
    for (api, about) in apis.iter().zip(&abouts) {
        earlier.iter().for_each(|id| is_hidden(about, id));
        assert_eq!(found(api), std::slice::from_ref(&current));
        eventually("it is counted alone", || {
            let counts = counted(api, QUERIES[0]);
            assert!(counts.iter().all(|count| *count <= 1), "{counts:?}");
            (counts == [1, 1]).then_some(())
        });
    }
}
