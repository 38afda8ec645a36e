//! Recorded requests in the console: search, display and replay.

use std::sync::mpsc;
use std::time::Duration;

use gw_shared::http::head::RequestHead;
use serde_json::json;

use super::browser::Browser;
use crate::administration::assert_says;
use crate::support::SOON;
use crate::support::agents::scripted::{Scripted, answered, refused_unsent};
use crate::support::eventually;
use crate::support::forms::PageForm;
use crate::support::peers::backend;
use crate::support::peers::caller::HOST;
use crate::support::request_log::{call, capture_bodies, record};
use crate::support::scene::Scene;

const BODY: &str = "<script>alert(1)</script>";

/// A scene with a request whose body is [`BODY`], a signed-in browser, and the id of the request.
fn recorded() -> (Scene, Browser, String) {
    let scene = Scene::service().agent().start();
    let mut browser = Browser::signed_in(&scene);
    capture_bodies(&scene.api());
    scene.api().await_workers();
    let length = BODY.len();
    let rest = format!("Content-Type: text/html\r\nContent-Length: {length}\r\n\r\n{BODY}");
    let (_, id) = call(&scene, &scene.request("POST /orders?q=%3Cb%3E", &rest));
    eventually("the request is in the log", || {
        let page = browser.get(&format!("/requests/{id}"));
        (page.status == 200).then_some(())
    });
    (scene, browser, id)
}

#[test]
fn a_recorded_request_is_shown() {
    let (scene, mut browser, id) = recorded();
    let page = browser.get(&format!("/requests/{id}")).text;
    let says = [
        "alert(1)",
        "/orders?q=",
        "demo--echo",
        "backend first byte",
        "service key",
        "<rect class=\"backend\"",
        "25 B",
    ];
    assert_says(&page, &says);
    for hidden in ["<script>", &scene.about.service_key] {
        assert!(!page.contains(hidden), "{hidden} in {page}");
    }
    let body = format!("/requests/{id}/body/request");
    let raw = browser.get(&body);
    assert_eq!(raw.text, BODY);
    assert_eq!(raw.header("content-type"), "application/octet-stream");
    assert!(raw.header("content-disposition").starts_with("attachment"));
    assert_eq!(Browser::new(&scene).get(&body).status, 303);
}

#[test]
fn a_recorded_request_is_found() {
    let (_scene, mut browser, id) = recorded();
    // The search box of every page accepts an id in upper case.
    let found = browser.get(&format!("/requests?id=+{}+", id.to_uppercase()));
    assert_eq!(found.header("location"), format!("/requests/{id}"));
    for (query, finds) in [
        ("path_prefix=%2Forders&account=demo&service=echo", true),
        ("since=2020-01-01&min_ms=0&status=2xx", true),
        ("path_prefix=%2Fnone", false),
        ("until=2020-01-01+00:00", false),
    ] {
        let found = browser.get(&format!("/requests?{query}")).text;
        assert_eq!(found.contains(&id), finds, "{query}");
    }
}

#[test]
fn each_mistake_of_a_search_is_at_its_field() {
    let scene = Scene::service().start();
    let mut browser = Browser::signed_in(&scene);
    let wrong = browser.get("/requests?status=many&account=demo");
    assert_eq!(wrong.status, 422);
    assert_says(&wrong.text, &["id=\"status-error\"", "value=\"many\""]);
    let query = "status=many&since=soon&path_prefix=x&min_ms=-&service=echo";
    let wrong = browser.get(&format!("/requests?{query}"));
    assert_eq!(wrong.status, 422);
    for field in ["account", "status", "since", "path_prefix", "min_ms"] {
        assert_says(&wrong.text, &[&format!("id=\"{field}-error\"")]);
    }
}

#[test]
fn a_recorded_request_is_replayed() {
    let (_scene, mut browser, id) = recorded();
    let address = format!("/requests/{id}/replay");
    let form = browser.get(&address);
    let says = ["value=\"/orders?q=%3Cb%3E\"", "content-type: text/html"];
    assert_says(&form.text, &says);
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
    let page = browser.get(replayed.leads_to());
    assert_eq!(page.status, 200);
    let says = [
        "Replayed.",
        "/again",
        "PUT",
        &format!("href=\"/requests/{id}\""),
        "administrator (replay)",
        "<pre tabindex=\"0\" aria-label=\"Body of the Request\">new</pre>",
    ];
    assert_says(&page.text, &says);
}

/// Heads and bodies of the requests that a backend has got.
type Requests = mpsc::Receiver<(RequestHead, Vec<u8>)>;

/// A backend that reports its requests, and the page of one that it has got.
struct Replay {
    scene: Scene,
    browser: Browser,
    requests: Requests,
    page: String,
    /// Address of the form that replays the request.
    address: String,
}

impl Replay {
    /// Records a request, with its body if `captured`.
    fn of(captured: bool) -> Self {
        let (seen, requests) = mpsc::channel();
        let url = backend::start(move |mut peer| {
            while let Ok((head, body, _)) = peer.request() {
                seen.send((head, body)).unwrap();
                peer.send("HTTP/1.1 204 No Content\r\n\r\n");
            }
        });
        let scene = Scene::service().agent_to(url).start();
        let mut browser = Browser::signed_in(&scene);
        let capture = json!({ "capture_request_body": captured });
        scene.api().change_service("demo", "echo", &capture);
        let mut caller = scene.connect();
        let fields = b"X-Bytes: \xff\xfe\r\nX-A: 1\r\nCookie: a=b\r\nContent-Type: text/plain\r\n\
                       Content-Length: 6\r\n\r\na\r\nb\r\n";
        let head = scene.request("OPTIONS *", "");
        caller.send([head.as_bytes(), fields].concat());
        let page = format!("/requests/{}", caller.response().header("x-gw-request-id"));
        eventually("the request is in the log", || {
            (browser.get(&page).status == 200).then_some(())
        });
        requests.recv_timeout(SOON).unwrap();
        Self {
            scene,
            browser,
            requests,
            address: format!("{page}/replay"),
            page,
        }
    }
}

#[test]
fn a_request_without_its_body_is_not_replayed() {
    let Replay {
        browser,
        page,
        address,
        ..
    } = &mut Replay::of(false);
    let unkept = browser.get(page).text;
    assert!(!unkept.contains("/replay\""), "{unkept}");
    assert_says(&unkept, &["cannot be replayed"]);
    let unknown = "/requests/019aa5c2-7e30-7c3b-8f11-2d5a4c9e1b07";
    for (request, says) in [
        (page.as_str(), "was not captured"),
        (unknown, "is not in the log"),
    ] {
        let body = browser.get(&format!("{request}/body/request"));
        assert_eq!(body.status, 404, "{}", body.text);
        assert_says(&body.text, &[says]);
    }
    let token = browser.get("/").form_token();
    let forged = [
        ("form_token", token.as_str()),
        ("method", "GET"),
        ("target", "/"),
    ];
    for reply in [browser.get(address), browser.post(address, &forged)] {
        assert_eq!(reply.status, 409, "{}", reply.text);
        assert_says(&reply.text, &["capture_request_body was off"]);
    }
}

#[test]
fn a_replay_changes_only_the_edited_parts() {
    let Replay {
        browser,
        requests,
        page,
        address,
        ..
    } = &mut Replay::of(true);
    let shown = browser.get(page).text;
    assert_says(&shown, &[&format!("href=\"{address}\"")]);
    let form = browser.form(address, address);
    let headers = form.values("headers")[0].to_owned();
    assert_says(&headers, &["x-a: 1"]);
    assert!(!headers.contains("cookie"), "{headers}");
    let form = form.set("headers", &headers.replace("x-a: 1", "x-a: 2"));
    let form = form.set("body_from", "text").set("body", "a\nc\n");
    browser.send_form(&form).leads_to();
    let (head, body) = requests.recv_timeout(SOON).unwrap();
    assert_eq!(
        (head.method.as_str(), head.target.as_str()),
        ("OPTIONS", "*")
    );
    assert_eq!(body, b"a\r\nc\r\n");
    assert_eq!(head.headers["x-a"].as_bytes(), b"2");
    assert_eq!(head.headers["x-bytes"].as_bytes(), b"\xff\xfe");
}

/// An edited body is sent even if the recorded body is selected.
#[test]
fn a_preview_shows_the_edited_body_and_sends_nothing() {
    let Replay {
        browser,
        requests,
        address,
        ..
    } = &mut Replay::of(true);
    let edited = |form: PageForm| form.set("headers", "").set("body", "a\nd\n");
    let preview = browser.fill(address, address, |form| {
        edited(form).press("action", "preview")
    });
    assert_eq!(preview.status, 200);
    assert_says(&preview.text, &["edited, 6 B", "value=\"text\" checked"]);
    assert!(requests.try_recv().is_err());
    browser.fill(address, address, edited).leads_to();
    let (_, body) = requests.recv_timeout(SOON).unwrap();
    assert_eq!(body, b"a\r\nd\r\n");
}

#[test]
fn the_form_of_a_replay_and_pages_with_the_body_are_audited_as_reads() {
    let Replay {
        scene,
        browser,
        page,
        address,
        ..
    } = &mut Replay::of(true);
    let id = page.trim_start_matches("/requests/");
    let audited = |action: &str| {
        let mut entries = scene.api().audit(action);
        entries.retain(|entry| entry["target"] == id);
        entries
    };
    let before = audited("request.read_body").len();
    for read in [&*page, &*address, &format!("{page}/body/request")] {
        assert_eq!(browser.get(read).status, 200, "{read}");
    }
    let reads = audited("request.read_body");
    assert_eq!(reads.len(), before + 3);
    assert!(
        reads.iter().all(|entry| entry["actor"] == "admin"),
        "{reads:?}"
    );
    assert_eq!(audited("request.replay").len(), 0);
    browser.press(address, address).leads_to();
    assert_eq!(audited("request.replay").len(), 1);
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
    let api = scene.api();
    record(&api, &plain_id);
    let recorded = record(&api, &id);
    let attempts = recorded["attempts"].as_array().unwrap();
    assert_eq!(attempts.len(), 2);

    let mut browser = Browser::signed_in(&scene);
    let all = browser.get("/requests").text;
    assert_says(&all, &[&plain_id, &id, "2 failed attempts"]);
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
        assert_says(&table, &[agent, "backend_unreachable", &took]);
    }
    assert_ne!(attempts[0]["agent_id"], attempts[1]["agent_id"]);
    let plain = browser.get(&format!("/requests/{plain_id}")).text;
    assert!(!plain.contains("attempt-table"), "{plain}");
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
    assert_says(&right, &["deploy &#60;key&#62;", &key_id, agent]);
    assert!(!right.contains("guide-title"), "{right}");
    let wrong = page_of("gw_sk_0123456789abcdef.x");
    let says = [
        "What GW_SERVICE_KEY_INVALID means",
        "There is no such key, its secret is wrong, or it is disabled.",
    ];
    assert_says(&wrong, &says);
}
