//! Every field of every form: changed alone, and read back.

use std::collections::BTreeSet;

use serde_json::json;

use super::browser::{Browser, Reply};
use crate::administration::assert_says;
use crate::support::forms::{self, PageForm};
use crate::support::scene::Scene;

/// How a field is changed.
#[derive(Debug, Clone, Copy)]
enum To {
    /// Typed or chosen.
    Text(&'static str),
    /// The box with this value is ticked if it is not, and the other way round.
    Box(&'static str),
}

use To::{Box, Text};

/// A form with another value for each of its fields.
struct Fields {
    /// Page with the form.
    page: String,
    action: String,
    fields: Vec<(&'static str, To)>,
}

fn fields(page: &str, action: &str, fields: &[(&'static str, To)]) -> Fields {
    Fields {
        page: page.to_owned(),
        action: action.to_owned(),
        fields: fields.to_vec(),
    }
}

impl To {
    fn apply(self, form: PageForm, name: &str) -> PageForm {
        match self {
            Text(text) => form.set(name, text),
            Box(value) if form.values(name).contains(&value) => form.untick(name, value),
            Box(value) => form.tick(name, value),
        }
    }

    /// Whether the form has a field as [`Self::apply`] has left it in `sent`.
    fn is_in(self, form: &PageForm, sent: &PageForm, name: &str) -> bool {
        match self {
            Text(text) => form.values(name) == [text],
            Box(_) => form.values(name) == sent.values(name),
        }
    }
}

const ACCOUNT: &[(&str, To)] = &[("capture_allowed", Box("on")), ("domains_max", Text("7"))];
const CALLER_SECRET: &[(&str, To)] = &[
    ("name", Text("deploy <b>")),
    ("allowed_services", Box("other")),
];
const AGENT: &[(&str, To)] = &[
    ("name", Text("edge <b>")),
    ("services", Box("other")),
    ("standby", Box("on")),
];
const SERVICE: &[(&str, To)] = &[
    ("enabled", Box("on")),
    ("modes", Box("jwt")),
    ("hsts_max_age_seconds", Text("300")),
    ("burst", Text("8")),
    ("refill_per_minute", Text("9")),
    ("retries", Box("on")),
    ("affinity", Text("cookie:sid")),
    ("request_logging", Box("on")),
    ("capture_request_body", Box("on")),
    ("capture_response_body", Box("on")),
];
const NEW_TOKEN: &[(&str, To)] = &[
    ("services", Box("other")),
    ("uses", Text("50")),
    ("expires_in", Text("12h")),
    ("backend_port", Text("9090")),
    ("ephemeral", Box("on")),
    ("approval", Text("manual")),
];

/// Forms that search, with a value for each field.
fn filters() -> Vec<Fields> {
    let search = &[
        ("account", Text("demo")),
        ("service", Text("echo")),
        ("status", Text("5xx")),
        ("code", Text("GW_TIMEOUT")),
        ("path_prefix", Text("/a")),
        ("caller_id", Text("gw_sk_0123456789abcdef")),
        ("since", Text("2026-11-21 04:15")),
        ("until", Text("2026-11-21 05:00")),
        ("min_ms", Text("7")),
        ("apex", Box("on")),
        ("retried", Box("on")),
    ];
    let usage = &[
        ("account", Text("demo")),
        ("service", Text("echo")),
        ("since", Text("2026-11-01")),
        ("until", Text("2026-11-30")),
    ];
    let traffic = &[("service", Text("demo--echo")), ("range", Text("7d"))];
    vec![
        fields("/requests", "/requests", search),
        fields("/usage", "/usage", usage),
        fields("/traffic", "/traffic", traffic),
        fields("/audit-log", "/audit-log", &[("account", Text("demo"))]),
    ]
}

/// A signed-in browser at a scene whose account has two services and one of each other record.
struct Console {
    browser: Browser,
    credential: String,
    service_key: String,
    agent: String,
    token: String,
}

const DOMAIN: &str = "/accounts/demo/domains/api.customer.test";

fn console(scene: &Scene) -> Console {
    let api = scene.api();
    let create = |path: &str, body| {
        let made = api.ask("POST", path, &body);
        assert_eq!(made.status, 201, "{path}: {}", made.body);
        made.location
    };
    create("/accounts/demo/services", json!({ "id": "other" }));
    let domains = "/accounts/demo/services/echo/domains";
    create(domains, json!({ "name": "api.customer.test" }));
    let services = json!({ "services": ["echo"] });
    let token = create("/accounts/demo/enrollment-tokens", services);
    let first = |collection: &str, id: &str| {
        let listed = api.get(&format!("/accounts/demo/{collection}")).body;
        let id = listed["items"][0][id].as_str().unwrap().to_owned();
        format!("/accounts/demo/{collection}/{id}")
    };
    Console {
        browser: Browser::signed_in(scene),
        credential: first("credentials", "client_id"),
        service_key: first("service-keys", "key_id"),
        agent: first("agents", "agent_id"),
        token: token.trim_start_matches("/api/v1").to_owned(),
    }
}

impl Console {
    /// Forms that change a record, on the page that shows it.
    fn edits(&self) -> Vec<Fields> {
        let same = |page: &str, of| fields(page, page, of);
        vec![
            same("/accounts/demo/settings", ACCOUNT),
            same("/accounts/demo/services/echo", SERVICE),
            same(&self.credential, CALLER_SECRET),
            same(&self.service_key, CALLER_SECRET),
            same(&self.agent, AGENT),
        ]
    }

    /// Forms that create a record.
    fn creations() -> Vec<Fields> {
        let account = [&[("id", Text("acme"))], ACCOUNT].concat();
        // A new service is enabled.
        let service = [&[("id", Text("web"))], &SERVICE[1..]].concat();
        let domain = &[("name", Text("shop.customer.test"))];
        let page = "/accounts/demo/services/other";
        vec![
            fields("/accounts", "/accounts", &account),
            fields("/accounts/demo/new-service", "/accounts/demo", &service),
            fields(page, &format!("{page}/domains"), domain),
            fields(
                "/accounts/demo/new-credentials",
                "/accounts/demo/credentials",
                CALLER_SECRET,
            ),
            fields(
                "/accounts/demo/new-service-keys",
                "/accounts/demo/service-keys",
                CALLER_SECRET,
            ),
            fields(
                "/accounts/demo/new-agent",
                "/accounts/demo/new-agent",
                NEW_TOKEN,
            ),
        ]
    }

    /// Forms without a field that a record keeps: other tests send them, named beside each.
    fn others(&self) -> BTreeSet<String> {
        let Self {
            credential,
            service_key,
            agent,
            token,
            ..
        } = self;
        let mut actions: Vec<String> = [
            // fields.rs: a_request_is_found_by_its_id_from_every_page
            "/requests",
            // pages.rs: the_theme_is_remembered
            "/theme",
            // access.rs: signing_out_ends_the_session_of_the_browser_alone
            "/sign-out",
            // forms.rs
            "/accounts/demo/delete",
            "/accounts/demo/services/echo/delete",
            "/accounts/demo/services/other",
            "/accounts/demo/services/other/delete",
            "/accounts/demo/services/echo/domains",
        ]
        .map(str::to_owned)
        .into();
        for (item, parts) in [
            // forms.rs
            (credential, &["/disable", "/rotate", "/delete"][..]),
            (service_key, &["/disable", "/rotate", "/delete"]),
            (token, &["/delete"]),
            // pages.rs: an_agent_is_revoked_and_deleted
            (agent, &["/revoke"]),
            // own_domains.rs
            (
                &DOMAIN.to_owned(),
                &["/check", "/certificate/renew", "/certificate", "/delete"],
            ),
        ] {
            actions.extend(parts.iter().map(|part| format!("{item}{part}")));
        }
        actions.into_iter().collect()
    }
}

/// All pages that links lead to, with their paths.
fn all_pages(browser: &mut Browser) -> Vec<(String, Reply)> {
    let mut seen = BTreeSet::from(["/".to_owned()]);
    let mut open = vec!["/".to_owned()];
    let mut pages = Vec::new();
    while let Some(path) = open.pop() {
        let page = browser.get(&path);
        assert_eq!(page.status, 200, "{path}: {}", page.text);
        for link in forms::attributes(&page.text, "a[href^='/']", "href") {
            let path = link.split(['?', '#']).next().unwrap_or_default().to_owned();
            if seen.insert(path.clone()) {
                open.push(path);
            }
        }
        pages.push((path, page));
    }
    pages
}

#[test]
fn every_form_of_the_console_is_tested() {
    let scene = Scene::service().agent().start();
    let mut console = console(&scene);
    let mut known = console.others();
    let tables = [console.edits(), Console::creations(), filters()];
    known.extend(tables.into_iter().flatten().map(|form| form.action));
    let mut found = BTreeSet::new();
    let browser = &mut console.browser;
    for (path, page) in all_pages(browser) {
        for form in forms::forms(&page.text) {
            let action = form.action;
            assert!(known.contains(&action), "{path}: {action}");
            if form.is_post && found.insert(action.clone()) {
                // Without its token it is refused, and without a session it leads to the sign-in.
                assert_eq!(browser.post(&action, &[]).status, 403, "{action}");
                let sign_in = Browser::new(&scene).post(&action, &[]);
                assert_eq!(sign_in.header("location"), "/sign-in?ended=yes", "{action}");
            }
            found.insert(action);
        }
    }
    let absent: Vec<&String> = known.difference(&found).collect();
    assert!(absent.is_empty(), "on no page: {absent:?}");
}

#[test]
fn each_field_of_a_record_is_changed_alone_and_read_back() {
    let scene = Scene::service().agent().start();
    let mut console = console(&scene);
    let edits = console.edits();
    let Console { browser, .. } = &mut console;
    for Fields {
        page,
        action,
        fields,
    } in edits
    {
        let shown = browser.form(&page, &action).names();
        let tested: Vec<&str> = fields.iter().map(|(name, _)| *name).collect();
        assert_eq!(shown, tested, "fields of {page}");
        for (name, to) in &fields {
            let before = browser.form(&page, &action);
            let changed = to.apply(browser.form(&page, &action), name);
            let saved = browser.send_form(&changed);
            let note = format!("{page}?note=saved");
            assert_eq!(saved.header("location"), note, "{name}: {}", saved.text);
            let after = browser.form(&page, &action);
            assert!(to.is_in(&after, &changed, name), "{page}: {name} to {to:?}");
            assert_ne!(after.values(name), before.values(name), "{page}: {name}");
            for other in shown.iter().filter(|other| other != name) {
                let values = (before.values(other), after.values(other));
                assert_eq!(values.0, values.1, "{page}: {other} with {name}");
            }
        }
    }
}

#[test]
fn each_field_of_a_new_record_is_in_the_record() {
    let scene = Scene::service().agent().start();
    let Console { mut browser, .. } = console(&scene);
    for Fields {
        page,
        action,
        fields,
    } in Console::creations()
    {
        let empty = browser.form(&page, &action);
        let tested: Vec<&str> = fields.iter().map(|(name, _)| *name).collect();
        assert_eq!(empty.names(), tested, "fields of {page}");
        let filled = |form: PageForm| {
            let changes = fields.iter();
            changes.fold(form, |form, (name, to)| to.apply(form, name))
        };
        let sent = filled(browser.form(&page, &action));
        let made = browser.send_form(&sent);
        if action == "/accounts/demo/new-agent" {
            token_is_as_sent(&mut browser, &made);
            continue;
        }
        let mut record = match made.status {
            303 => made.header("location").to_owned(),
            _ => forms::attributes(&made.text, "[data-reload]", "data-reload").remove(0),
        };
        record = record.trim_end_matches("?note=created").to_owned();
        if record == "/accounts/acme" {
            record += "/settings";
        }
        if record.contains("/domains/") {
            let heading = browser.get(&record).text_of("h1");
            assert!(heading.starts_with("shop.customer.test "), "{heading}");
            continue;
        }
        let kept = browser.form(&record, &record);
        for (name, to) in fields.iter().filter(|(name, _)| *name != "id") {
            assert!(to.is_in(&kept, &sent, name), "{record}: {name} to {to:?}");
        }
    }
}

/// Compares a page with a new enrollment token, and the list of tokens, with [`NEW_TOKEN`].
fn token_is_as_sent(browser: &mut Browser, made: &Reply) {
    let command = made.text_of("#command");
    assert!(command.contains("gw-agent http 9090 "), "{command}");
    let list = browser.get("/accounts/demo/agents");
    let mut rows = forms::texts(&list.text, "tbody tr");
    rows.retain(|row| row.contains("ephemeral"));
    let [row] = rows.try_into().ok().unwrap();
    assert_says(&row, &["other", "by hand", "in 12", "0 of 50"]);
}

#[test]
fn each_field_of_a_search_is_kept_on_its_page() {
    let scene = Scene::service().agent().start();
    let mut browser = Browser::signed_in(&scene);
    for Fields {
        page,
        action,
        fields,
    } in filters()
    {
        // The search for an id, in the frame of each page, may have the same address.
        let of_search = |reply: &Reply| {
            let forms = forms::forms(&reply.text).into_iter();
            let mut forms = forms.filter(|form| form.action == action);
            forms.next_back().unwrap()
        };
        let shown = of_search(&browser.get(&page)).names();
        let tested: Vec<&str> = fields.iter().map(|(name, _)| *name).collect();
        assert_eq!(shown, tested, "fields of {page}");
        for (name, to) in &fields {
            let form = to.apply(of_search(&browser.get(&page)), name);
            let found = browser.send_form(&form);
            let shown = of_search(&found);
            assert!(to.is_in(&shown, &form, name), "{page}: {name} to {to:?}");
        }
    }
}

#[test]
fn a_request_is_found_by_its_id_from_every_page() {
    const ID: &str = "019aa5c2-7e30-7c3b-8f11-2d5a4c9e1b07";
    let scene = Scene::service().agent().start();
    let mut browser = Browser::signed_in(&scene);
    for (path, page) in all_pages(&mut browser) {
        let form = page.form("/requests").set("id", ID);
        let found = browser.send_form(&form);
        let expected = format!("/requests/{ID}");
        assert_eq!(found.header("location"), expected, "{path}");
    }
}

#[test]
fn an_error_of_a_field_without_a_place_is_at_the_top_of_the_page() {
    let scene = Scene::service().agent().start();
    let mut browser = Browser::signed_in(&scene);
    for (address, field) in [
        ("/requests?id=nonsense", "id"),
        ("/requests?cursor=nonsense", "cursor"),
        ("/requests?apex=on&account=demo", "apex"),
        ("/usage?cursor=nonsense", "cursor"),
    ] {
        let page = browser.get(address);
        assert_eq!(page.status, 422, "{address}");
        let error = page.text_of("main > [role=alert]");
        assert!(
            error.starts_with(&format!("{field}: ")),
            "{address}: {error}"
        );
    }
}
