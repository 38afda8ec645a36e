//! Pages and forms of the console.

use serde_json::json;

use super::browser::{Browser, Reply};
use super::{enroll, with_fast_enrollment};
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
    for part in [
        "default-src 'none'",
        "script-src 'self';",
        "style-src 'self';",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    ] {
        assert!(
            policy.contains(part) && !policy.contains("unsafe"),
            "{policy}"
        );
    }
    assert_eq!(page.header("x-content-type-options"), "nosniff");
    assert_eq!(page.header("referrer-policy"), "same-origin");
    assert_eq!(page.header("cache-control"), "no-store");
    assert!(
        !page.text.contains("<script>")
            && !page.text.contains(" style=")
            && !page.text.contains(" onclick")
    );
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
        assert_eq!(
            (page.status, page.text.contains(holds)),
            (200, true),
            "{path} has no {holds}: {}",
            page.text
        );
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
fn polling_is_told_of_the_end_of_the_session_and_assets_need_none() {
    let scene = Scene::service().agent().start();
    let mut browser = Browser::signed_in(&scene);
    // A polling script gets a redirect header instead of the sign-in form.
    let mut polling = Browser::new(&scene);
    polling.extra = vec![("HX-Request", "true".to_owned())];
    let told = polling.get("/tunnels");
    assert_eq!(
        (told.status, told.header("hx-redirect")),
        (401, "/sign-in?ended=yes")
    );
    // Styles and scripts need no session and are cached for long.
    let sheet = browser.get("/sign-in").header("location").to_owned();
    assert_eq!(sheet, "/");
    let sheet = Browser::new(&scene)
        .get("/sign-in")
        .between("stylesheet\" href=\"", "\"");
    let sheet = Browser::new(&scene).get(&sheet);
    assert_eq!(
        (sheet.status, sheet.header("content-type")),
        (200, "text/css; charset=utf-8")
    );
    assert!(sheet.header("cache-control").contains("immutable"));
}

#[test]
fn the_overview_lists_the_errors_of_the_last_hour() {
    let scene = Scene::service().agent().start();
    let mut browser = Browser::signed_in(&scene);
    assert!(
        browser
            .get("/")
            .text
            .contains("No logged request of the last hour has a 5xx status.")
    );
    let mut caller = scene.connect();
    caller.send(format!("GET /refused HTTP/1.1\r\nHost: {HOST}\r\n\r\n"));
    let link = format!(
        "href=\"/requests/{}\"",
        caller.response().header("x-gw-request-id")
    );
    eventually("the error is on the overview", || {
        browser.get("/").text.contains(&link).then_some(())
    });
}

#[test]
fn state_of_tunnels_and_lost_redundancy_are_shown() {
    let scene = Scene::service().agent().start();
    let mut browser = Browser::signed_in(&scene);
    for page in [
        "/tunnels".to_owned(),
        format!("/accounts/demo/agents/{}", agent_of(&scene)),
    ] {
        let state = browser
            .get(&page)
            .between("<td data-label=\"State\">", "</td>");
        assert!(
            state.contains("<span class=\"pill good\">ready</span>") && state.contains(">for "),
            "{page}: {state}"
        );
    }
    let service = "/accounts/demo/services/echo";
    for page in ["/", service] {
        let page = browser.get(page);
        assert!(
            !page.text.contains("class=\"warning\"") && !page.text.contains("not redundant"),
            "{}",
            page.text
        );
    }
    let (_, lost) = enroll(&scene, "demo", "echo", 1);
    let path = format!("/accounts/demo/agents/{}", lost[0]);
    scene.api().patch(&path, &json!({ "name": "<lost>" }));
    assert!(
        browser
            .get("/")
            .text
            .contains("<span class=\"pill warn\">not redundant</span>")
    );
    for page in ["/", service] {
        let warning = browser.get(page).between("<p class=\"warning\">", "</p>");
        for holds in [
            "1 of 2 agents is ready",
            &lost[0],
            "lost&#62;): no tunnel. Remedy: ",
        ] {
            assert!(warning.contains(holds), "{page} has no {holds}: {warning}");
        }
    }
}

#[test]
fn agents_are_renamed_revoked_and_deleted() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    let mut browser = Browser::signed_in(&scene);
    let agent = agent_of(&scene);
    let page = format!("/accounts/demo/agents/{agent}");
    let kept = |name: &str| api.get(&page).body[name].clone();
    let renamed = browser.fill(&page, &page, |form| form.set("name", "edge <b>"));
    assert_eq!(renamed.status, 303, "{}", renamed.text);
    let expected = (json!("edge <b>"), json!(false), json!(["echo"]));
    assert_eq!((kept("name"), kept("standby"), kept("services")), expected);
    let standby = browser.fill(&page, &page, |form| form.tick("standby", "on"));
    assert_eq!((standby.status, kept("standby")), (303, json!(true)));
    for shown in [&page, "/accounts/demo/agents"] {
        let shown = browser.get(shown).text;
        assert!(texts(&shown, ".pill").contains(&"standby".to_owned()));
    }
    let idle = browser.fill(&page, &page, |form| form.untick("services", "echo"));
    let error = idle.error("services");
    assert!(error.contains("select at least one service"), "{error}");
    assert_eq!(kept("services"), json!(["echo"]));
    let revoke = format!("{page}/revoke");
    let unsure = browser.fill(&page, &revoke, |form| form.set("confirm", "edge"));
    unsure.error("confirm");
    // The page of another tab, which still offers to approve the agent.
    let approve = browser.get(&page).form_token();
    let revoked = browser.send_form(&unsure.form(&revoke).set("confirm", &agent));
    assert_eq!(revoked.header("location"), format!("{page}?note=revoked"));
    for shown in [&page, "/accounts/demo/services/echo"] {
        let row = eventually("the end of the tunnel is shown", || {
            let shown = browser.get(shown);
            shown
                .text
                .contains("data-label=\"Ended\"")
                .then(|| shown.between("data-label=\"Ended\">", "</tr>"))
        });
        assert!(
            row.contains(">agent_revoked<") && row.contains("enroll it again with a new token"),
            "{shown}: {row}"
        );
    }
    let listed = browser
        .get("/accounts/demo/agents")
        .between("<td data-label=\"Serves\">", "</td>");
    assert!(listed.contains("ago: agent_revoked</span>"), "{listed}");
    let approve = browser.post(&format!("{page}/approve"), &[("form_token", &approve)]);
    assert_eq!(
        (approve.status, approve.text.contains("enroll it again")),
        (409, true)
    );
    let delete = format!("{page}/delete");
    let deleted = browser.fill(&page, &delete, |form| form.set("confirm", &agent));
    assert_eq!(
        deleted.header("location"),
        "/accounts/demo/agents?note=deleted"
    );
    assert_eq!(browser.get(&page).status, 404);
}

#[test]
fn release_keys_that_an_agent_accepts_are_shown() {
    const RELEASE_KEY: &str = "t4kjPEvqLr7T1xWmcCbXnJ0yDbdUPyDhEdbsVZ2qRpw=";
    let scene = Scene::service().agent().start();
    let agent = modified_agent::enroll(&scene);
    let mut tunnel = agent.tunnel(&scene);
    let mut browser = Browser::signed_in(&scene);
    let page = format!(
        "/accounts/{}/agents/{}",
        modified_agent::ACCOUNT,
        agent.agent
    );
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
    for part in [&link, ">1 of 1<", &listed] {
        assert!(page.text.contains(part), "{part}: {}", page.text);
    }
    let (token, agents) = enroll(&scene, "demo", "echo", 61);
    let of_token = format!("/accounts/demo/agents?enrolled_with={token}");
    let page = browser.get("/accounts/demo/agents");
    assert!(
        page.text
            .contains(&format!("<a href=\"{of_token}\">Show all</a>")),
        "{}",
        page.text
    );
    let first = browser.get(&of_token);
    let next = first
        .between("<p class=\"more\"><a class=\"button\" href=\"", "\"")
        .replace("&amp;", "&");
    let pages = [first, browser.get(&next)];
    let rows: Vec<usize> = pages
        .iter()
        .map(|page| page.text.matches("<td data-label=\"Agent\">").count())
        .collect();
    assert_eq!(rows, [50, 11]);
    // The table of tokens names it, too.
    assert!(
        pages.iter().all(|page| !page.text.contains(&listed)),
        "agents of other tokens are not listed"
    );
    let shown = browser.get(&format!("/accounts/demo/agents/{}", agents[0]));
    assert!(shown.text.contains(&of_token), "{}", shown.text);
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
    let shown = browser.get(&item).text;
    assert!(
        shown.contains("<dt>Managed by</dt><dd>git, whose documents"),
        "{shown}"
    );
    for path in [
        &item,
        "/accounts/demo/credentials",
        "/accounts/demo/service-keys",
        "/audit-log",
    ] {
        let page = browser.get(path);
        assert!(page.text.contains("alert(1)"), "{path}");
        assert!(
            !page.text.contains("<script>") && !page.text.contains("<img"),
            "{path}: {}",
            page.text
        );
    }
    // Values from the URL are escaped as well.
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
    assert_eq!((set.status, set.header("location")), (303, "/tunnels"));
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
