//! Pages and forms of the console.

use serde_json::json;

use super::browser::{Browser, Reply};
use super::{enroll, with_fast_enrollment};
use crate::administration::assert_says;
use crate::support::agents::modified_agent;
use crate::support::agents::tunnel_frames::message;
use crate::support::eventually;
use crate::support::forms::texts;
use crate::support::peers::caller::HOST;
use crate::support::scene::Scene;

/// The id of the scene's agent.
fn agent_of(scene: &Scene) -> String {
    let [agent] = &scene.api().agents("demo")[..] else {
        panic!("the demo has one agent");
    };
    agent["agent_id"].as_str().unwrap().to_owned()
}

fn assert_secure(page: &Reply, secrets: &[&String], path: &str) {
    let shown = secrets.iter().find(|it| page.text.contains(it.as_str()));
    assert!(shown.is_none(), "{path} shows the secret {shown:?}");
    let policy = page.header("content-security-policy");
    let says = [
        "default-src 'none'",
        "script-src 'self';",
        "style-src 'self';",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    ];
    assert_says(policy, &says);
    assert!(!policy.contains("unsafe"), "{policy}");
    for (field, value) in [
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "same-origin"),
        ("cache-control", "no-store"),
    ] {
        assert_eq!(page.header(field), value, "{path}");
    }
    for inline in ["<script>", " style=", " onclick"] {
        assert!(!page.text.contains(inline), "{inline} in {path}");
    }
}

#[test]
fn every_page_requires_a_session_and_sends_security_headers() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    let mut browser = Browser::signed_in(&scene);
    let about = &scene.about;
    let agent = agent_of(&scene);
    let client = &about.client_id;
    let key = api.list("/accounts/demo/service-keys")[0]["key_id"].clone();
    let key = key.as_str().unwrap();
    let token = api.create_enrollment_token("demo", &["echo"]);
    let secrets = [
        &about.client_secret,
        &about.service_key,
        &about.admin_token,
        &token,
    ];
    let port = about.base_url.rsplit(':').next().unwrap();
    let address = format!("https://demo--echo.eu1.gw.localhost:{port}");
    for (path, holds) in [
        ("/".to_owned(), address.as_str()),
        ("/".to_owned(), "The server certificate expires in"),
        ("/accounts".to_owned(), "/accounts/demo"),
        ("/accounts/demo".to_owned(), address.as_str()),
        ("/accounts/demo/new-service".to_owned(), "Create service"),
        ("/accounts/demo/services/echo".to_owned(), address.as_str()),
        ("/accounts/demo/credentials".to_owned(), client.as_str()),
        (
            format!("/accounts/demo/credentials/{client}"),
            "Rotate secret",
        ),
        (
            "/accounts/demo/new-credentials".to_owned(),
            "Create credential",
        ),
        ("/accounts/demo/service-keys".to_owned(), key),
        (format!("/accounts/demo/service-keys/{key}"), "Disable"),
        (
            "/accounts/demo/new-service-keys".to_owned(),
            "Create service key",
        ),
        ("/accounts/demo/agents".to_owned(), agent.as_str()),
        (format!("/accounts/demo/agents/{agent}"), "Revoke agent"),
        ("/accounts/demo/new-agent".to_owned(), "Create token"),
        ("/accounts/demo/settings".to_owned(), "Delete account"),
        ("/tunnels".to_owned(), agent.as_str()),
        ("/requests".to_owned(), "Path begins with"),
        (
            "/traffic?service=demo--echo&range=24h".to_owned(),
            "<option value=\"demo--echo\" selected>",
        ),
        (
            "/traffic?service=demo--gone".to_owned(),
            "<option value=\"demo--gone\" selected>",
        ),
        ("/usage?account=demo".to_owned(), "First day, UTC"),
        ("/audit-log?account=demo".to_owned(), "account.create"),
    ] {
        let page = browser.get(&path);
        assert_eq!(page.status, 200, "{path}");
        assert_says(&page.text, &[holds]);
        assert_secure(&page, &secrets, &path);
        // Without a session the page redirects to the sign-in page.
        assert_eq!(Browser::new(&scene).get(&path).status, 303, "{path}");
    }
}

#[test]
fn unknown_addresses_and_invalid_searches_have_their_status() {
    let scene = Scene::service().agent().start();
    let mut browser = Browser::signed_in(&scene);
    for (path, status) in [
        ("/accounts/nobody", 404),
        ("/accounts/demo/services/none", 404),
        ("/accounts/demo/credentials/none", 404),
        ("/accounts/demo/agents/none", 404),
        ("/requests/019aa5c2-7e30-7c3b-8f11-2d5a4c9e1b07", 404),
        ("/requests?id=nonsense", 422),
        ("/requests?min_ms=soon", 422),
        ("/nowhere", 404),
        ("/theme", 405),
    ] {
        assert_eq!(browser.get(path).status, status, "{path}");
    }
}

#[test]
fn a_polling_script_is_told_of_the_end_of_the_session_in_a_header_field() {
    let scene = Scene::service().start();
    let mut polling = Browser::new(&scene);
    polling.extra = vec![("HX-Request", "true".to_owned())];
    let told = polling.get("/tunnels");
    assert_eq!(told.status, 401);
    assert_eq!(told.header("hx-redirect"), "/sign-in?ended=yes");
}

#[test]
fn styles_need_no_session_and_are_cached_for_long() {
    let scene = Scene::service().start();
    let mut browser = Browser::new(&scene);
    let sign_in = browser.get("/sign-in");
    let sheet = browser.get(&sign_in.between("stylesheet\" href=\"", "\""));
    assert_eq!(sheet.status, 200);
    assert_eq!(sheet.header("content-type"), "text/css; charset=utf-8");
    assert!(sheet.header("cache-control").contains("immutable"));
}

#[test]
fn the_overview_lists_the_errors_of_the_last_hour() {
    let scene = Scene::service().start();
    let mut browser = Browser::signed_in(&scene);
    let none = "No logged request of the last hour has a 5xx status.";
    assert_says(&browser.get("/").text, &[none]);
    let mut caller = scene.connect();
    caller.send(format!("GET /refused HTTP/1.1\r\nHost: {HOST}\r\n\r\n"));
    let response = caller.response();
    let link = format!("href=\"/requests/{}\"", response.header("x-gw-request-id"));
    eventually("the error is on the overview", || {
        browser.get("/").text.contains(&link).then_some(())
    });
}

#[test]
fn the_state_of_tunnels_is_shown() {
    let scene = Scene::service().agent().start();
    let mut browser = Browser::signed_in(&scene);
    let agent = format!("/accounts/demo/agents/{}", agent_of(&scene));
    for path in ["/tunnels", &agent] {
        let page = browser.get(path);
        let state = page.between("<td data-label=\"State\">", "</td>");
        let ready = "<span class=\"pill good\">ready</span>";
        assert_says(&state, &[ready, ">for "]);
    }
}

#[test]
fn lost_redundancy_is_shown() {
    let scene = Scene::service().agent().start();
    let mut browser = Browser::signed_in(&scene);
    let pages = ["/", "/accounts/demo/services/echo"];
    for page in pages {
        let page = browser.get(page).text;
        for absent in ["class=\"warning\"", "not redundant"] {
            assert!(!page.contains(absent), "{absent} in {page}");
        }
    }
    let (_, lost) = enroll(&scene, "demo", "echo", 1);
    let path = format!("/accounts/demo/agents/{}", lost[0]);
    scene.api().patch(&path, &json!({ "name": "<lost>" }));
    let pill = "<span class=\"pill warn\">not redundant</span>";
    assert_says(&browser.get("/").text, &[pill]);
    for page in pages {
        let warning = browser.get(page).between("<p class=\"warning\">", "</p>");
        let says = [
            "1 of 2 agents is ready",
            &lost[0],
            "lost&#62;): no tunnel. Remedy: ",
        ];
        assert_says(&warning, &says);
    }
}

#[test]
fn an_agent_is_renamed_and_put_on_standby() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    let mut browser = Browser::signed_in(&scene);
    let page = format!("/accounts/demo/agents/{}", agent_of(&scene));
    let kept = |name: &str| api.get(&page).body[name].clone();
    let renamed = browser.fill(&page, &page, |form| form.set("name", "edge <b>"));
    renamed.leads_to();
    let expected = (json!("edge <b>"), json!(false), json!(["echo"]));
    assert_eq!((kept("name"), kept("standby"), kept("services")), expected);
    let standby = browser.fill(&page, &page, |form| form.tick("standby", "on"));
    standby.leads_to();
    assert_eq!(kept("standby"), true);
    for shown in [&page, "/accounts/demo/agents"] {
        let shown = browser.get(shown).text;
        assert!(texts(&shown, ".pill").contains(&"standby".to_owned()));
    }
    let idle = browser.fill(&page, &page, |form| form.untick("services", "echo"));
    assert_says(&idle.error("services"), &["select at least one service"]);
    assert_eq!(kept("services"), json!(["echo"]));
}

#[test]
fn an_agent_is_revoked_and_deleted() {
    let scene = Scene::service().agent().start();
    let mut browser = Browser::signed_in(&scene);
    let agent = agent_of(&scene);
    let page = format!("/accounts/demo/agents/{agent}");
    let revoke = format!("{page}/revoke");
    let unsure = browser.fill(&page, &revoke, |form| form.set("confirm", "edge"));
    unsure.error("confirm");
    // The page of another tab, which still offers to approve the agent.
    let approve = browser.get(&page).form_token();
    let revoked = browser.send_form(&unsure.form(&revoke).set("confirm", &agent));
    assert_eq!(revoked.header("location"), format!("{page}?note=revoked"));
    for shown in [&page, "/accounts/demo/services/echo"] {
        let shown = eventually("the end of the tunnel is shown", || {
            let shown = browser.get(shown);
            let is_ended = shown.text.contains("data-label=\"Ended\"");
            is_ended.then_some(shown)
        });
        let row = shown.between("data-label=\"Ended\">", "</tr>");
        assert_says(
            &row,
            &[">agent_revoked<", "enroll it again with a new token"],
        );
    }
    let listed = browser.get("/accounts/demo/agents");
    let serves = listed.between("<td data-label=\"Serves\">", "</td>");
    assert_says(&serves, &["ago: agent_revoked</span>"]);
    let approve = browser.post(&format!("{page}/approve"), &[("form_token", &approve)]);
    assert_eq!(approve.status, 409);
    assert_says(&approve.text, &["enroll it again"]);
    let delete = format!("{page}/delete");
    let deleted = browser.fill(&page, &delete, |form| form.set("confirm", &agent));
    assert_eq!(deleted.leads_to(), "/accounts/demo/agents?note=deleted");
    assert_eq!(browser.get(&page).status, 404);
}

#[test]
fn release_keys_that_an_agent_accepts_are_shown() {
    const RELEASE_KEY: &str = "t4kjPEvqLr7T1xWmcCbXnJ0yDbdUPyDhEdbsVZ2qRpw=";
    let scene = Scene::service().agent().start();
    let agent = modified_agent::enroll(&scene);
    let mut tunnel = agent.tunnel(&scene);
    let mut browser = Browser::signed_in(&scene);
    let account = modified_agent::ACCOUNT;
    let page = format!("/accounts/{account}/agents/{}", agent.agent);
    tunnel.0.send(message(format!(
        r#"{{"type":"update","state":"ready","release_keys":["{RELEASE_KEY}"]}}"#
    )));
    let shown = format!("<span class=\"id\">{RELEASE_KEY}</span>");
    eventually("the release key is shown", || {
        browser.get(&page).text.contains(&shown).then_some(())
    });
}

#[test]
fn the_agents_of_an_enrollment_token_are_listed() {
    let scene = with_fast_enrollment();
    let mut browser = Browser::signed_in(&scene);
    let other = agent_of(&scene);
    let page = browser.get("/accounts/demo/agents");
    let link = format!("<a class=\"id\" href=\"/accounts/demo/agents/{other}\">{other}</a>");
    let listed = format!("<td data-label=\"ID\"><span class=\"id\">{other}</span>");
    assert_says(&page.text, &[&link, ">1 of 1<", &listed]);
    let (token, agents) = enroll(&scene, "demo", "echo", 61);
    let of_token = format!("/accounts/demo/agents?enrolled_with={token}");
    let page = browser.get("/accounts/demo/agents");
    let link = format!("<a href=\"{of_token}\">Show all</a>");
    assert_says(&page.text, &[&link]);
    let first = browser.get(&of_token);
    let next = first.between("<p class=\"more\"><a class=\"button\" href=\"", "\"");
    let second = browser.get(&next.replace("&amp;", "&"));
    for (page, rows) in [(first, 50), (second, 11)] {
        let shown = page.text.matches("<td data-label=\"Agent\">").count();
        assert_eq!(shown, rows);
        // The table of tokens names the other agent, too.
        assert!(!page.text.contains(&listed), "an agent of another token");
    }
    let shown = browser.get(&format!("/accounts/demo/agents/{}", agents[0]));
    assert_says(&shown.text, &[&of_token]);
}

#[test]
fn names_and_url_values_are_escaped_on_every_page() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    let mut browser = Browser::signed_in(&scene);
    let name = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>";
    let new = json!({ "name": name, "allowed_services": ["echo"], "managed_by": "git" });
    let [made, _] = ["credentials", "service-keys"]
        .map(|kind| api.post(&format!("/accounts/demo/{kind}"), &new));
    let id = made["client_id"].as_str().unwrap();
    let item = format!("/accounts/demo/credentials/{id}");
    let managed = "<dt>Managed by</dt><dd>git, whose documents";
    assert_says(&browser.get(&item).text, &[managed]);
    for path in [
        &item,
        "/accounts/demo/credentials",
        "/accounts/demo/service-keys",
        "/audit-log",
    ] {
        let page = browser.get(path).text;
        assert_says(&page, &["alert(1)"]);
        for tag in ["<script>", "<img"] {
            assert!(!page.contains(tag), "{path}: {page}");
        }
    }
    for path in [
        "/requests?path_prefix=%22%3E%3Cscript%3Ealert(1)",
        "/requests?id=%3Cscript%3Ealert(1)",
        "/audit-log?account=%22%3E%3Cscript%3Ealert(1)",
        "/traffic?service=%22%3E%3Cscript%3Ealert(1)",
        "/?note=%3Cscript%3E",
        "/accounts/%3Cscript%3E",
        "/requests/%3Cscript%3E",
    ] {
        assert!(!browser.get(path).text.contains("<script>"), "{path}");
    }
}

#[test]
fn the_theme_is_remembered() {
    let scene = Scene::service().agent().start();
    let mut browser = Browser::signed_in(&scene);
    assert!(browser.get("/").text.contains("data-theme=\"system\""));
    let set = browser.fill("/tunnels", "/theme", |form| form.press("theme", "dark"));
    assert_eq!(set.leads_to(), "/tunnels");
    assert!(browser.get("/tunnels").text.contains("data-theme=\"dark\""));
    let token = browser.get("/tunnels").form_token();
    let forged = [
        ("form_token", token.as_str()),
        ("theme", "x"),
        ("back", "https://evil.example"),
    ];
    let away = browser.post("/theme", &forged);
    assert_eq!(away.header("location"), "/");
    assert!(browser.get("/").text.contains("data-theme=\"system\""));
}
