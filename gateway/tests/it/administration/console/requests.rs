//! Recorded requests in the console: search, display and replay.

use std::sync::mpsc;
use std::time::Duration;

use gw_shared::http::head::RequestHead;
use serde_json::json;

use super::browser::Browser;
use crate::support::agents::scripted::{Scripted, answered, refused_unsent};
use crate::support::eventually;
use crate::support::forms::PageForm;
use crate::support::peers::backend;
use crate::support::peers::caller::HOST;
use crate::support::request_log::record;
use crate::support::scene::Scene;

#[test]
fn recorded_requests_are_found_shown_and_replayed() {
    let scene = Scene::service().agent().start();
    let mut browser = Browser::signed_in(&scene);
    let capture = json!({ "capture_request_body": true, "capture_response_body": true });
    scene.api().change_service("demo", "echo", &capture);
    let mut caller = scene.connect();
    let key = &scene.about.service_key;
    let mut send = |method: &str, target: &str, body: &str| {
        let length = body.len();
        caller.send(format!(
            "{method} {target} HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n\
             Content-Type: text/html\r\nContent-Length: {length}\r\n\r\n{body}"
        ));
        caller.response().header("x-gw-request-id").to_owned()
    };
    let body = "<script>alert(1)</script>";
    let id = send("POST", "/orders?q=%3Cb%3E", body);
    let page = eventually("the request is in the log", || {
        Some(browser.get(&format!("/requests/{id}"))).filter(|page| page.status == 200)
    });
    for holds in [
        "alert(1)",
        "/orders?q=",
        "demo--echo",
        "backend first byte",
        "service key",
        "<rect class=\"backend\"",
        "25 B",
    ] {
        assert!(page.text.contains(holds), "no {holds}: {}", page.text);
    }
    assert!(!page.text.contains("<script>"), "{}", page.text);
    assert!(!page.text.contains(key.as_str()));
    let raw = browser.get(&format!("/requests/{id}/body/request"));
    assert_eq!(
        (raw.text.as_str(), raw.header("content-type")),
        (body, "application/octet-stream")
    );
    assert!(raw.header("content-disposition").starts_with("attachment"));
    assert_eq!(
        Browser::new(&scene)
            .get(&format!("/requests/{id}/body/request"))
            .status,
        303
    );

    the_request_is_searched(&mut browser, &id);
    the_request_is_replayed(&mut browser, &id);
}

fn the_request_is_searched(browser: &mut Browser, id: &str) {
    // The search box of every page accepts an id in upper case.
    let found = browser.get(&format!("/requests?id=+{}+", id.to_uppercase()));
    assert_eq!(found.header("location"), format!("/requests/{id}"));
    for (query, finds) in [
        ("path_prefix=%2Forders&account=demo&service=echo", true),
        ("since=2020-01-01&min_ms=0&status=2xx", true),
        ("path_prefix=%2Fnone", false),
        ("until=2020-01-01+00:00", false),
    ] {
        assert_eq!(
            browser.get(&format!("/requests?{query}")).text.contains(id),
            finds,
            "{query}"
        );
    }
    let wrong = browser.get("/requests?status=many&account=demo");
    assert!(
        wrong.status == 422
            && wrong.text.contains("id=\"status-error\"")
            && wrong.text.contains("value=\"many\"")
    );
    // Each mistake is at its field.
    let query = "status=many&since=soon&path_prefix=x&min_ms=-&service=echo";
    let wrong = browser.get(&format!("/requests?{query}"));
    assert_eq!(wrong.status, 422);
    for field in ["account", "status", "since", "path_prefix", "min_ms"] {
        let error = format!("id=\"{field}-error\"");
        assert!(wrong.text.contains(&error), "no {error}: {}", wrong.text);
    }
}

fn the_request_is_replayed(browser: &mut Browser, id: &str) {
    let address = format!("/requests/{id}/replay");
    let form = browser.get(&address);
    assert!(
        form.text.contains("value=\"/orders?q=%3Cb%3E\"")
            && form.text.contains("content-type: text/html")
    );
    let form = form
        .form(&address)
        .set("method", "PUT")
        .set("target", "/again");
    let wrong = browser.send_form(&form.set("headers", "no colon"));
    wrong.error("headers");
    let form = wrong.form(&address);
    assert_eq!(form.values("target"), ["/again"]);
    let form = form.set("headers", "x-a: 1").set("body_from", "text");
    let replayed = browser.send_form(&form.set("body", "new"));
    assert_eq!(replayed.status, 303, "{}", replayed.text);
    let page = browser.get(replayed.header("location"));
    assert_eq!(page.status, 200);
    for holds in [
        "Replayed.",
        "/again",
        "PUT",
        &format!("href=\"/requests/{id}\""),
        "administrator (replay)",
    ] {
        assert!(page.text.contains(holds), "no {holds}: {}", page.text);
    }
    assert!(
        page.text
            .contains("<pre tabindex=\"0\" aria-label=\"Body of the Request\">new</pre>"),
        "{}",
        page.text
    );
}

/// Heads and bodies of the requests that a backend has got.
type Requests = mpsc::Receiver<(RequestHead, Vec<u8>)>;

#[test]
fn a_replay_changes_only_the_edited_parts() {
    let (seen, requests) = mpsc::channel();
    let scene = Scene::service()
        .agent_to(backend::start(move |mut peer| {
            while let Ok((head, body, _)) = peer.request() {
                seen.send((head, body)).unwrap();
                peer.send("HTTP/1.1 204 No Content\r\n\r\n");
            }
        }))
        .start();
    let mut browser = Browser::signed_in(&scene);
    let mut caller = scene.connect();
    let key = scene.about.service_key.clone();
    let mut call = |browser: &mut Browser| {
        let fields = b"X-Bytes: \xff\xfe\r\nX-A: 1\r\nCookie: a=b\r\nContent-Type: text/plain\r\n\
                       Content-Length: 6";
        let head = format!("OPTIONS * HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n");
        caller.send([head.as_bytes(), fields, b"\r\n\r\na\r\nb\r\n"].concat());
        let page = format!("/requests/{}", caller.response().header("x-gw-request-id"));
        eventually("the request is in the log", || {
            Some(browser.get(&page)).filter(|page| page.status == 200)
        });
        requests.recv_timeout(crate::support::SOON).unwrap();
        page
    };
    let page = call(&mut browser);
    what_was_not_captured_is_not_replayed(&mut browser, &page);

    let capture = json!({ "capture_request_body": true });
    scene.api().change_service("demo", "echo", &capture);
    let page = call(&mut browser);
    let address = format!("{page}/replay");
    let shown = browser.get(&page).text;
    assert!(shown.contains(&format!("href=\"{address}\"")), "{shown}");
    a_field_and_the_body_are_edited(&mut browser, &address, &requests);
    a_preview_sends_nothing(&mut browser, &address, &requests);
    reads_and_replays_are_audited(&scene, &mut browser, &address);
}

fn what_was_not_captured_is_not_replayed(browser: &mut Browser, page: &str) {
    let unkept = browser.get(page).text;
    assert!(
        !unkept.contains("/replay\"") && unkept.contains("cannot be replayed"),
        "{unkept}"
    );
    let body = browser.get(&format!("{page}/body/request"));
    assert!(
        body.status == 404 && body.text.contains("was not captured"),
        "{}",
        body.text
    );
    let body = browser.get("/requests/019aa5c2-7e30-7c3b-8f11-2d5a4c9e1b07/body/request");
    assert!(
        body.status == 404 && body.text.contains("is not in the log"),
        "{}",
        body.text
    );
    let address = format!("{page}/replay");
    let token = browser.get("/").form_token();
    let forged = [
        ("form_token", token.as_str()),
        ("method", "GET"),
        ("target", "/"),
    ];
    for reply in [browser.get(&address), browser.post(&address, &forged)] {
        assert!(
            reply.status == 409 && reply.text.contains("capture_request_body was off"),
            "{}",
            reply.text
        );
    }
}

fn a_field_and_the_body_are_edited(browser: &mut Browser, address: &str, requests: &Requests) {
    let form = browser.form(address, address);
    let headers = form.values("headers")[0].to_owned();
    assert!(
        headers.contains("x-a: 1") && !headers.contains("cookie"),
        "{headers}"
    );
    let form = form.set("headers", &headers.replace("x-a: 1", "x-a: 2"));
    let form = form.set("body_from", "text").set("body", "a\nc\n");
    let replayed = browser.send_form(&form);
    assert_eq!(replayed.status, 303, "{}", replayed.text);
    let (head, body) = requests.recv_timeout(crate::support::SOON).unwrap();
    assert_eq!(
        (head.method.as_str(), head.target.as_str(), body.as_slice()),
        ("OPTIONS", "*", b"a\r\nc\r\n".as_slice())
    );
    assert_eq!(
        (
            head.headers["x-a"].as_bytes(),
            head.headers["x-bytes"].as_bytes()
        ),
        (b"2".as_slice(), b"\xff\xfe".as_slice())
    );
}

fn a_preview_sends_nothing(browser: &mut Browser, address: &str, requests: &Requests) {
    // An edited body is sent even if the recorded body is selected; a preview sends nothing.
    let edited = |form: PageForm| form.set("headers", "").set("body", "a\nd\n");
    let preview = browser.fill(address, address, |form| {
        edited(form).press("action", "preview")
    });
    assert_eq!(preview.status, 200);
    assert!(
        preview.text.contains("edited, 6 B") && preview.text.contains("value=\"text\" checked"),
        "{}",
        preview.text
    );
    assert!(requests.try_recv().is_err());
    assert_eq!(browser.fill(address, address, edited).status, 303);
    assert_eq!(
        requests.recv_timeout(crate::support::SOON).unwrap().1,
        b"a\r\nd\r\n"
    );
}

fn reads_and_replays_are_audited(scene: &Scene, browser: &mut Browser, address: &str) {
    // The form, and a page with the body, are audited as reads; sending the form is audited as a
    // replay.
    let id = address
        .trim_start_matches("/requests/")
        .trim_end_matches("/replay");
    let audited = || {
        let mut entries = scene.api().list("/audit-log?account=demo&limit=500");
        entries.retain(|entry| entry["target"] == id);
        entries
    };
    let before = audited().len();
    for page in [
        address,
        address.trim_end_matches("/replay"),
        &address.replace("/replay", "/body/request"),
    ] {
        assert_eq!(browser.get(page).status, 200);
    }
    let entries = audited();
    assert_eq!(entries.len(), before + 3);
    assert!(
        entries[..3]
            .iter()
            .all(|entry| entry["action"] == "request.read_body" && entry["actor"] == "admin")
    );
    assert_eq!(
        entries
            .iter()
            .filter(|entry| entry["action"] == "request.replay")
            .count(),
        2
    );
}

#[test]
fn failed_attempts_are_found_and_shown() {
    let names = ["one", "two", "three"];
    let scene = Scene::service().enrolled(&names).start();
    let scripted = Scripted::new();
    for (at, name) in names.iter().enumerate() {
        scripted.serve(at, scene.tunnel(name), |tunnel, attempt| {
            tunnel.0.send(if attempt.nth < 2 {
                refused_unsent(attempt.stream, "GW_BACKEND_UNREACHABLE")
            } else {
                answered(attempt, 0, b"")
            });
            true
        });
    }
    let mut caller = scene.connect();
    let [id, plain_id] = [(); 2].map(|()| {
        caller.send(scene.get("/"));
        let response = caller.response();
        assert_eq!(response.status, 200);
        response.header("x-gw-request-id").to_owned()
    });
    let api = scene.gateway.api();
    record(&api, &plain_id);
    let recorded = record(&api, &id);
    let attempts = recorded["attempts"].as_array().unwrap();
    assert_eq!(attempts.len(), 2);

    let url = format!("http://{}", scene.gateway.admin_address());
    let mut browser = Browser::at(url);
    let token = scene.gateway.admin_token();
    assert_eq!(browser.sign_in(&token, "/").status, 303);
    let all = browser.get("/requests").text;
    assert!(
        all.contains(&plain_id) && all.contains(&id) && all.contains("2 failed attempts"),
        "{all}"
    );
    let found = browser.get("/requests?retried=on").text;
    assert!(!found.contains(&plain_id) && found.contains(&id), "{found}");
    let table = browser
        .get(&format!("/requests/{id}"))
        .between("<table class=\"list\" id=\"attempt-table\">", "</table>");
    for attempt in attempts {
        let took = Duration::from_micros(attempt["duration_us"].as_u64().unwrap());
        let took = if took.as_millis() == 0 {
            format!("{took:?}")
        } else {
            format!("{took:.1?}")
        };
        let agent = attempt["agent_id"].as_str().unwrap();
        for holds in [agent, "backend_unreachable", &took] {
            assert!(table.contains(holds), "no {holds}: {table}");
        }
    }
    assert_ne!(attempts[0]["agent_id"], attempts[1]["agent_id"]);
    assert!(
        !browser
            .get(&format!("/requests/{plain_id}"))
            .text
            .contains("attempt-table")
    );
}

#[test]
fn a_refused_request_shows_what_its_code_means_and_others_the_names_of_key_and_agent() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    let mut browser = Browser::signed_in(&scene);
    let keys = "/accounts/demo/service-keys";
    let key_id = api.list(keys)[0]["key_id"].as_str().unwrap().to_owned();
    let named = json!({ "name": "deploy <key>" });
    api.patch(&format!("{keys}/{key_id}"), &named);
    let mut caller = scene.connect();
    let mut page_of = |key: &str| {
        caller.send(format!(
            "GET / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n\r\n"
        ));
        let page = format!("/requests/{}", caller.response().header("x-gw-request-id"));
        eventually("the request is in the log", || {
            Some(browser.get(&page).text).filter(|text| text.contains("Request ID"))
        })
    };
    let right = page_of(&scene.about.service_key);
    let agents = api.agents("demo");
    let agent = agents[0]["name"].as_str().unwrap();
    for holds in ["deploy &#60;key&#62;", &key_id, agent] {
        assert!(right.contains(holds), "no {holds}: {right}");
    }
    assert!(!right.contains("guide-title"), "{right}");
    let wrong = page_of("gw_sk_0123456789abcdef.x");
    for holds in [
        "What GW_SERVICE_KEY_INVALID means",
        "There is no such key, its secret is wrong, or it is disabled.",
    ] {
        assert!(wrong.contains(holds), "no {holds}: {wrong}");
    }
}
