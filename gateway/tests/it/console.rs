//! The console as browsers see it on the wire: who gets in, what is refused, what pages hold and do not hold.

use std::collections::BTreeMap;
use std::sync::mpsc;

use gw_gateway::config::Config;
use gw_gateway::control::{Actor, NewCallerSecret, ServiceChanges};
use gw_gateway::demo::{Demo, Options};
use gw_gateway::store::{AuditQuery, CredentialRecord, ServiceKeyRecord};

use crate::caller::{HOST, connect};
use crate::{backend, demo, eventually, options, setup};

/// What came back.
struct Reply {
    status: u16,
    headers: http::HeaderMap,
    text: String,
}

impl Reply {
    fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    /// The value of the cookie that is set, and what is said of it.
    fn cookie(&self, name: &str) -> Option<(String, String)> {
        let set = self.headers.get_all("set-cookie").iter().map(|value| value.to_str().unwrap());
        let (value, rest) = set.filter_map(|set| set.strip_prefix(name)?.strip_prefix('=')?.split_once("; ")).next()?;
        Some((value.to_owned(), rest.to_owned()))
    }

    /// What the first form of the page proves itself with.
    fn form_token(&self) -> String {
        self.between("name=\"form_token\" value=\"", "\"")
    }

    fn between(&self, before: &str, after: &str) -> String {
        let (_, rest) = self.text.split_once(before).unwrap_or_else(|| panic!("no {before}: {}", self.text));
        rest.split_once(after).unwrap().0.to_owned()
    }
}

/// A browser: cookies, and the fields that browsers send.
struct Browser {
    base: String,
    cookies: BTreeMap<String, String>,
    /// Sent with each request.
    extra: Vec<(&'static str, String)>,
}

impl Browser {
    fn new(demo: &Demo) -> Self {
        Self { base: demo.about.admin_url.clone(), cookies: BTreeMap::new(), extra: Vec::new() }
    }

    /// One that has signed in.
    fn signed_in(demo: &Demo) -> Self {
        let mut browser = Self::new(demo);
        let reply = browser.sign_in(&demo.about.admin_token, "/");
        assert_eq!((reply.status, reply.header("location")), (303, "/"));
        browser
    }

    fn sign_in(&mut self, token: &str, next: &str) -> Reply {
        let form_token = self.get("/sign-in").form_token();
        self.post("/sign-in", &[("form_token", &form_token), ("next", next), ("token", token)])
    }

    fn get(&mut self, path: &str) -> Reply {
        self.send("GET", path, None)
    }

    fn post(&mut self, path: &str, fields: &[(&str, &str)]) -> Reply {
        let body = form_urlencoded::Serializer::new(String::new()).extend_pairs(fields).finish();
        self.send("POST", path, Some(body))
    }

    /// Sends a form of a page that has it.
    fn submit(&mut self, page: &str, path: &str, fields: &[(&str, &str)]) -> Reply {
        let form_token = self.get(page).form_token();
        self.post(path, &[&[("form_token", form_token.as_str())], fields].concat())
    }

    fn send(&mut self, method: &str, path: &str, body: Option<String>) -> Reply {
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .timeout_global(Some(crate::SOON))
            .build()
            .into();
        let mut request = http::Request::builder().method(method).uri(format!("{}{path}", self.base));
        if !self.cookies.is_empty() {
            let pairs: Vec<String> = self.cookies.iter().map(|(name, value)| format!("{name}={value}")).collect();
            request = request.header("Cookie", pairs.join("; "));
        }
        if body.is_some() {
            request = request.header("Content-Type", "application/x-www-form-urlencoded");
        }
        for (name, value) in &self.extra {
            request = request.header(*name, value);
        }
        let mut response = match body {
            Some(body) => agent.run(request.body(body).unwrap()).unwrap(),
            None => agent.run(request.body(()).unwrap()).unwrap(),
        };
        let text = response.body_mut().read_to_string().unwrap();
        let reply = Reply { status: response.status().as_u16(), headers: response.headers().clone(), text };
        for name in ["gw_session", "gw_sign_in", "gw_theme", "__Host-gw_session", "__Host-gw_sign_in"] {
            if let Some((value, _)) = reply.cookie(name) {
                self.cookies.insert(name.to_owned(), value);
            }
        }
        reply
    }
}

#[test]
fn only_the_admin_token_signs_in_and_signing_out_ends_it() {
    let demo = demo(None);
    let mut browser = Browser::new(&demo);
    let turned_away = browser.get("/requests?status=5xx");
    assert_eq!((turned_away.status, turned_away.header("location")), (303, "/sign-in?next=%2Frequests%3Fstatus%3D5xx"));
    let wrong = browser.sign_in("x", "/");
    assert_eq!((wrong.status, wrong.cookie("gw_session")), (401, None));
    assert!(wrong.text.contains("not the admin token"));

    let right = browser.sign_in(&format!(" {}\n", demo.about.admin_token), "/requests?status=5xx");
    assert_eq!((right.status, right.header("location")), (303, "/requests?status=5xx"));
    let (id, flags) = right.cookie("gw_session").unwrap();
    assert_eq!((id.len(), flags.as_str()), (43, "Path=/; HttpOnly; SameSite=Strict; Max-Age=43200"));
    assert_eq!(browser.get("/").status, 200);
    assert_eq!(browser.get("/sign-in").header("location"), "/");

    // Elsewhere than here is not gone to.
    let mut other = Browser::new(&demo);
    assert_eq!(other.sign_in(&demo.about.admin_token, "//evil.example/").header("location"), "/");
    assert_ne!(other.cookies["gw_session"], id);

    let out = browser.submit("/", "/sign-out", &[]);
    assert_eq!((out.status, out.header("location")), (303, "/sign-in"));
    browser.cookies.insert("gw_session".to_owned(), id);
    assert_eq!(browser.get("/").status, 303);
    assert_eq!(other.get("/").status, 200);
}

#[test]
fn whose_session_ends_comes_back_to_the_page_that_is_open() {
    let demo = demo(None);
    let mut browser = Browser::new(&demo);
    let page = |path: &str| format!("{}{path}", demo.about.admin_url);
    browser.extra =
        vec![("HX-Request", "true".to_owned()), ("HX-Current-URL", page("/accounts/demo/agents/x?note=saved"))];
    let told = browser.get("/accounts/demo/agents/x");
    let sign_in = "/sign-in?next=%2Faccounts%2Fdemo%2Fagents%2Fx&ended=yes";
    assert_eq!((told.status, told.header("hx-redirect")), (401, sign_in));
    browser.extra = vec![("Referer", page("/accounts/demo/settings"))];
    let told = browser.post("/accounts/demo/delete", &[("confirm", "demo")]);
    let sign_in = "/sign-in?next=%2Faccounts%2Fdemo%2Fsettings&ended=yes";
    assert_eq!((told.status, told.header("location")), (303, sign_in));
    browser.extra = vec![("Referer", "https://evil.example//evil.example/".to_owned())];
    assert_eq!(browser.post("/theme", &[]).header("location"), "/sign-in?ended=yes");
    browser.extra.clear();

    // A form that is open goes on being accepted when another tab opens one, or signs in.
    let form = browser.get(sign_in);
    assert!(form.text.contains("Your session has ended. Nothing was changed."));
    let other = browser.get("/sign-in");
    assert!(!other.text.contains("has ended"));
    let next = form.between("name=\"next\" value=\"", "\"");
    let fields = [("form_token", form.form_token()), ("next", next), ("token", demo.about.admin_token.clone())];
    let fields = fields.each_ref().map(|(name, value)| (*name, value.as_str()));
    assert_eq!(browser.post("/sign-in", &fields).header("location"), "/accounts/demo/settings");
    assert_eq!(browser.post("/sign-in", &[("next", "/tunnels")]).header("location"), "/tunnels");
    // What is no id of ours goes with no form.
    let mut browser = Browser::new(&demo);
    browser.cookies.insert("gw_sign_in".to_owned(), "x".to_owned());
    assert_ne!(browser.get("/sign-in").cookie("gw_sign_in").unwrap().0, "x");
}

#[test]
fn behind_https_the_cookie_never_leaves_it() {
    let demo = demo(None);
    let mut browser = Browser::new(&demo);
    browser.extra = vec![("X-Forwarded-Proto", "https".to_owned())];
    let right = browser.sign_in(&demo.about.admin_token, "/");
    let (_, flags) = right.cookie("__Host-gw_session").unwrap();
    assert_eq!(flags, "Path=/; HttpOnly; SameSite=Strict; Max-Age=43200; Secure");
    assert_eq!(browser.get("/").status, 200);
}

#[test]
fn guesses_are_few_and_keep_nobody_out() {
    let demo = demo(None);
    let mut browser = Browser::new(&demo);
    let statuses: Vec<u16> = (0..11).map(|_| browser.sign_in("guess", "/").status).collect();
    assert_eq!((&statuses[..10], statuses[10]), ([401; 10].as_slice(), 429));
    let late = browser.sign_in("guess", "/");
    assert_eq!((late.status, late.header("retry-after").parse::<u64>().unwrap() <= 7), (429, true));
    // The administrator may come from the same address as who guesses.
    assert_eq!(browser.sign_in(&demo.about.admin_token, "/").status, 303);
}

#[test]
fn forms_of_other_pages_change_nothing() {
    let demo = demo(None);
    let mut browser = Browser::signed_in(&demo);
    let form_token = browser.get("/accounts").form_token();
    let accounts = || demo.gateway().control().records().accounts.len();

    // Without the token of the session's forms, with another session's, with somebody else's page as the origin.
    let other = Browser::signed_in(&demo).get("/accounts").form_token();
    for token in ["", "x", &other, &form_token[1..]] {
        assert_eq!(browser.post("/accounts", &[("form_token", token), ("id", "evil")]).status, 403, "{token}");
    }
    for (name, value) in [
        ("Sec-Fetch-Site", "cross-site"),
        ("Sec-Fetch-Site", "same-site"),
        ("Origin", "null"),
        ("Origin", "https://evil.example"),
    ] {
        browser.extra = vec![(name, value.to_owned())];
        let reply = browser.post("/accounts", &[("form_token", &form_token), ("id", "evil")]);
        assert_eq!(reply.status, 403, "{name}: {value}");
        assert_eq!(browser.post("/sign-in", &[("token", &demo.about.admin_token)]).status, 403);
    }
    assert_eq!(accounts(), 1);

    // Every address that changes something asks for it.
    browser.extra.clear();
    for path in [
        "/accounts",
        "/accounts/demo",
        "/accounts/demo/delete",
        "/accounts/demo/settings",
        "/accounts/demo/services/echo",
        "/accounts/demo/services/echo/delete",
        "/accounts/demo/credentials",
        "/accounts/demo/credentials/x",
        "/accounts/demo/credentials/x/rotate",
        "/accounts/demo/credentials/x/enable",
        "/accounts/demo/credentials/x/disable",
        "/accounts/demo/credentials/x/delete",
        "/accounts/demo/service-keys",
        "/accounts/demo/service-keys/x/rotate",
        "/accounts/demo/agents/x",
        "/accounts/demo/agents/x/approve",
        "/accounts/demo/agents/x/revoke",
        "/accounts/demo/agents/x/delete",
        "/accounts/demo/new-agent",
        "/accounts/demo/enrollment-tokens/x/delete",
        "/requests/x/replay",
        "/theme",
        "/sign-out",
    ] {
        assert_eq!(browser.post(path, &[]).status, 403, "{path}");
        assert_eq!(Browser::new(&demo).post(path, &[]).header("location"), "/sign-in?ended=yes", "{path}");
    }
    // As its own pages send it.
    let origin = demo.about.admin_url.clone();
    browser.extra = vec![("Origin", origin), ("Sec-Fetch-Site", "same-origin".to_owned())];
    assert_eq!(browser.post("/accounts", &[("form_token", &form_token), ("id", "good")]).status, 303);
    assert_eq!(accounts(), 2);
    // Or by script.
    browser.extra.push(("X-Gw-Form-Token", form_token));
    assert_eq!(browser.post("/accounts", &[("id", "better")]).status, 303);
}

#[test]
fn names_that_lead_here_but_are_not_ours_get_nothing() {
    let adjust = |config: &mut Config| config.admin_hosts = vec!["console.example.com".to_owned()];
    let demo = Demo::start(&Options { adjust, ..options(None) }).unwrap();
    for (host, status) in [
        ("evil.example:9080", 421),
        ("127.0.0.1.evil.example", 421),
        ("console.example.com", 200),
        ("localhost:1", 200),
        ("eu1.gw.localhost", 200),
    ] {
        let mut browser = Browser::new(&demo);
        browser.extra = vec![("Host", host.to_owned())];
        assert_eq!(browser.get("/sign-in").status, status, "{host}");
    }
}

#[test]
fn every_page_answers_and_is_guarded() {
    let demo = demo(None);
    let (control, mut browser) = (demo.gateway().control(), Browser::signed_in(&demo));
    let records = control.records();
    let (agent, client, key) = (
        records.agents.keys().next().unwrap(),
        records.credentials.keys().next().unwrap(),
        records.service_keys.keys().next().unwrap(),
    );
    let token = setup::enrollment_token(control, "demo", &["echo"]);
    for (path, holds) in [
        ("/".to_owned(), "demo--echo.eu1.gw.localhost"),
        ("/accounts".to_owned(), "/accounts/demo"),
        ("/accounts/demo".to_owned(), "/accounts/demo/services/echo"),
        ("/accounts/demo/new-service".to_owned(), "Create service"),
        ("/accounts/demo/services/echo".to_owned(), "https://demo--echo.eu1.gw.localhost"),
        ("/accounts/demo/credentials".to_owned(), client.as_str()),
        (format!("/accounts/demo/credentials/{client}"), "Rotate secret"),
        ("/accounts/demo/new-credentials".to_owned(), "Create credential"),
        ("/accounts/demo/service-keys".to_owned(), key.as_str()),
        (format!("/accounts/demo/service-keys/{key}"), "Disable"),
        ("/accounts/demo/new-service-keys".to_owned(), "Create service key"),
        ("/accounts/demo/agents".to_owned(), agent.as_str()),
        (format!("/accounts/demo/agents/{agent}"), "Revoke agent"),
        ("/accounts/demo/new-agent".to_owned(), "Create token"),
        ("/accounts/demo/settings".to_owned(), "Delete account"),
        ("/tunnels".to_owned(), agent.as_str()),
        ("/requests".to_owned(), "Path begins with"),
        ("/traffic?service=demo--echo&range=24h".to_owned(), "<option value=\"demo--echo\" selected>"),
        ("/traffic?service=demo--gone".to_owned(), "<option value=\"demo--gone\" selected>"),
        ("/audit-log?account=demo".to_owned(), "account.create"),
    ] {
        let page = browser.get(&path);
        assert_eq!((page.status, page.text.contains(holds)), (200, true), "{path} has no {holds}: {}", page.text);
        let policy = page.header("content-security-policy");
        for part in [
            "default-src 'none'",
            "script-src 'self';",
            "style-src 'self';",
            "frame-ancestors 'none'",
            "base-uri 'none'",
        ] {
            assert!(policy.contains(part) && !policy.contains("unsafe"), "{policy}");
        }
        assert_eq!(page.header("x-content-type-options"), "nosniff");
        assert_eq!(page.header("referrer-policy"), "same-origin");
        assert_eq!(page.header("cache-control"), "no-store");
        assert!(!page.text.contains("<script>") && !page.text.contains(" style=") && !page.text.contains(" onclick"));
        for secret in [&demo.about.client_secret, &demo.about.service_key, &demo.about.admin_token, &token] {
            assert!(!page.text.contains(secret.as_str()), "{path} shows a secret");
        }
        // Nothing of it without a session.
        assert_eq!(Browser::new(&demo).get(&path).status, 303, "{path}");
    }
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
    // Who polls is told where to go, instead of a form in the wrong place.
    let mut polling = Browser::new(&demo);
    polling.extra = vec![("HX-Request", "true".to_owned())];
    let told = polling.get("/tunnels");
    assert_eq!((told.status, told.header("hx-redirect")), (401, "/sign-in?ended=yes"));
    // Style and scripts are for everybody, and for long.
    let sheet = browser.get("/sign-in").header("location").to_owned();
    assert_eq!(sheet, "/");
    let sheet = Browser::new(&demo).get("/sign-in").between("stylesheet\" href=\"", "\"");
    let sheet = Browser::new(&demo).get(&sheet);
    assert_eq!((sheet.status, sheet.header("content-type")), (200, "text/css; charset=utf-8"));
    assert!(sheet.header("cache-control").contains("immutable"));
}

#[test]
fn the_overview_has_the_errors_of_the_last_hour() {
    let demo = demo(None);
    let mut browser = Browser::signed_in(&demo);
    assert!(browser.get("/").text.contains("No logged request of the last hour has a 5xx status."));
    let mut caller = connect(&demo);
    caller.send(format!("GET /refused HTTP/1.1\r\nHost: {HOST}\r\n\r\n"));
    let link = format!("href=\"/requests/{}\"", caller.response().header("x-gw-request-id"));
    eventually("the error is on the overview", || browser.get("/").text.contains(&link).then_some(()));
}

#[test]
fn an_account_is_filled_used_and_emptied_by_forms_alone() {
    let demo = demo(None);
    let (control, mut browser) = (demo.gateway().control(), Browser::signed_in(&demo));

    // What is wrong is said by the field, and what was typed stays.
    let wrong = browser.submit("/accounts", "/accounts", &[("id", "NO WAY")]);
    assert_eq!((wrong.status, wrong.text.contains("value=\"NO WAY\"")), (422, true));
    assert!(wrong.between("id=\"id-error\">", "<").contains("3 to 15 characters"));
    let made = browser.submit("/accounts", "/accounts", &[("id", "acme")]);
    assert_eq!((made.status, made.header("location")), (303, "/accounts/acme?note=created"));

    let wrong = browser.submit("/accounts/acme/new-service", "/accounts/acme", &[("id", "api"), ("burst", "many")]);
    assert!(wrong.status == 422 && wrong.text.contains("value=\"many\"") && wrong.text.contains("id=\"burst-error\""));
    let wrong = browser.submit("/accounts/acme/new-service", "/accounts/acme", &[("id", "api")]);
    assert!(wrong.between("id=\"modes-error\">", "<").contains("at least one"));
    assert_eq!(wrong.text.matches(" autofocus").count(), 1);
    let fields = [("id", "api"), ("modes", "jwt"), ("modes", "service_key"), ("burst", "7"), ("request_logging", "on")];
    let made = browser.submit("/accounts/acme/new-service", "/accounts/acme", &fields);
    assert_eq!((made.status, made.header("location")), (303, "/accounts/acme/services/api?note=created"));
    let service = control.service("acme", "api").unwrap();
    assert_eq!((service.burst, service.refill_per_minute, service.enabled), (7, 1_000_000, true));
    assert!(service.request_logging && !service.capture_request_body);

    let page = "/accounts/acme/services/api";
    let fields = [("modes", "service_key"), ("burst", "8"), ("refill_per_minute", "9"), ("capture_request_body", "on")];
    assert_eq!(browser.submit(page, page, &fields).header("location"), "/accounts/acme/services/api?note=saved");
    let service = control.service("acme", "api").unwrap();
    assert_eq!((service.burst, service.refill_per_minute, service.enabled, service.modes.len()), (8, 9, false, 1));
    assert!(!service.request_logging && service.capture_request_body && !service.capture_response_body);
    assert_eq!(browser.submit(page, page, &[("modes", "jwt")]).status, 422);

    for (path, prefix) in [("credentials", "gw_cs_"), ("service-keys", "gw_sk_")] {
        let (list, new) = (format!("/accounts/acme/{path}"), format!("/accounts/acme/new-{path}"));
        assert_eq!(browser.submit(&new, &list, &[("name", "ci")]).status, 422);
        let made = browser.submit(&new, &list, &[("name", "ci"), ("allowed_services", "api")]);
        let secret = made.between("aria-labelledby=\"secret-title\">", "<");
        assert!(made.status == 200 && secret.starts_with(prefix), "{secret}");
        assert!(made.between("aria-labelledby=\"commands-title\">", "</pre>").contains(&secret));
        let item = made.between("data-reload=\"", "\"");
        // The same again is what is there, and no second secret.
        let again = browser.submit(&new, &list, &[("name", "ci"), ("allowed_services", "api")]);
        assert_eq!((again.status, again.header("location")), (303, format!("{item}?note=there").as_str()));
        let rotated =
            browser.submit(&item, &format!("{item}/rotate"), &[]).between("aria-labelledby=\"secret-title\">", "<");
        assert!(rotated.starts_with(prefix) && rotated != secret);
        for secret in [&secret, &rotated] {
            for page in [&item, &list, &"/audit-log".to_owned()] {
                assert!(!browser.get(page).text.contains(secret.as_str()), "{page} shows a secret");
            }
        }
        assert_eq!(browser.submit(&item, &format!("{item}/disable"), &[]).status, 303);
        assert!(browser.get(&item).text.contains("/enable"));
        assert_eq!(browser.submit(&item, &format!("{item}/enable"), &[]).status, 303);
        let renamed = browser.submit(&item, &item, &[("name", "deploy"), ("allowed_services", "api")]);
        assert_eq!(renamed.status, 303);
        assert!(browser.get(&list).text.contains("deploy"));
        let nameless = browser.submit(&item, &item, &[("name", " "), ("allowed_services", "api")]);
        assert!(nameless.status == 422 && nameless.text.contains("id=\"name-error\""), "{}", nameless.text);
        let idle = browser.submit(&item, &item, &[("name", "deploy")]);
        assert!(idle.status == 422 && idle.text.contains("id=\"allowed_services-error\""), "{}", idle.text);
        let unsure = browser.submit(&item, &format!("{item}/delete"), &[("confirm", "deploy")]);
        assert!(
            unsure.status == 422
                && unsure.text.contains("autofocus aria-invalid=\"true\" aria-describedby=\"confirm-error\"")
        );
        let id = item.rsplit('/').next().unwrap().to_owned();
        assert_eq!(browser.submit(&item, &format!("{item}/delete"), &[("confirm", &id)]).status, 303);
        assert_eq!(browser.get(&item).status, 404);
    }

    let wrong = browser.submit("/accounts/acme/new-agent", "/accounts/acme/new-agent", &[]);
    assert!(wrong.status == 422 && wrong.text.contains("id=\"services-error\""));
    let fields = [("services", "api"), ("approval", "manual")];
    let made = browser.submit("/accounts/acme/new-agent", "/accounts/acme/new-agent", &fields);
    let token = made.between("aria-labelledby=\"secret-title\">", "<");
    let enroll = made.between("aria-labelledby=\"enroll-title\">", "</pre>");
    let line = format!("GW_ENROLLMENT_TOKEN={token} gw-agent enroll --gateway https://eu1.gw.localhost:");
    assert!(enroll.contains(&line) && enroll.ends_with(" --ca-file gw-ca.crt"), "{enroll}");
    assert!(enroll.contains("-----BEGIN CERTIFICATE-----\n"), "{enroll}");
    assert!(made.text.contains("gw-agent run --backend "));
    let agents = browser.get("/accounts/acme/agents");
    assert!(!agents.text.contains(&token));
    let delete = agents.between("action=\"/accounts/acme/enrollment-tokens/", "\"");
    let path = format!("/accounts/acme/enrollment-tokens/{delete}");
    assert_eq!(browser.submit("/accounts/acme/agents", &path, &[]).status, 303);

    assert!(!control.account("acme").unwrap().capture_allowed);
    let plan = browser.submit("/accounts/acme/settings", "/accounts/acme/settings", &[("capture_allowed", "on")]);
    assert_eq!(plan.header("location"), "/accounts/acme/settings?note=saved");
    assert!(control.account("acme").unwrap().capture_allowed);

    let busy = browser.submit("/accounts/acme/settings", "/accounts/acme/delete", &[("confirm", "acme")]);
    assert!(busy.status == 422 && busy.text.contains("still has services"));
    let unsure = browser.submit(page, &format!("{page}/delete"), &[("confirm", "")]);
    assert!(
        unsure.status == 422 && unsure.text.contains("value=\"9\"") && unsure.text.contains("id=\"confirm-error\"")
    );
    assert_eq!(browser.submit(page, &format!("{page}/delete"), &[("confirm", "api")]).status, 303);
    let gone = browser.submit("/accounts/acme/settings", "/accounts/acme/delete", &[("confirm", "acme")]);
    assert_eq!(gone.header("location"), "/accounts?note=deleted");
    assert!(control.account("acme").is_err());
}

#[test]
fn agents_are_renamed_revoked_and_forgotten() {
    let demo = demo(None);
    let (control, mut browser) = (demo.gateway().control(), Browser::signed_in(&demo));
    let agent = control.records().agents.keys().next().unwrap().to_string();
    let page = format!("/accounts/demo/agents/{agent}");
    let renamed = browser.submit(&page, &page, &[("name", "edge <b>"), ("services", "echo")]);
    assert_eq!((renamed.status, control.agent("demo", &agent).unwrap().name.as_str()), (303, "edge <b>"));
    let idle = browser.submit(&page, &page, &[("name", "edge")]);
    assert!(idle.status == 422 && idle.text.contains("id=\"services-error\""), "{}", idle.text);
    assert_eq!(control.agent("demo", &agent).unwrap().services.len(), 1);
    assert_eq!(browser.submit(&page, &format!("{page}/revoke"), &[("confirm", "edge")]).status, 422);
    let revoked = browser.submit(&page, &format!("{page}/revoke"), &[("confirm", &agent)]);
    assert_eq!(revoked.header("location"), format!("{page}?note=revoked"));
    let approve = browser.submit(&page, &format!("{page}/approve"), &[]);
    assert_eq!((approve.status, approve.text.contains("enroll it again")), (409, true));
    let deleted = browser.submit(&page, &format!("{page}/delete"), &[("confirm", &agent)]);
    assert_eq!(deleted.header("location"), "/accounts/demo/agents?note=deleted");
    assert_eq!(browser.get(&page).status, 404);
}

#[test]
fn what_is_beyond_a_list_stays() {
    let demo = demo(None);
    let (control, mut browser) = (demo.gateway().control(), Browser::signed_in(&demo));
    for number in 0..502 {
        setup::service(control, "many", &format!("s{number:03}"));
    }
    let (id, _) = setup::credential(control, "many", &["s500"]);
    let page = format!("/accounts/many/credentials/{id}");
    let form = browser.get(&page).text;
    assert!(
        form.contains("value=\"s500\" checked")
            && form.contains("value=\"s000\"")
            && form.contains("has more services")
    );
    let new = browser.get("/accounts/many/new-credentials").text;
    assert!(!new.contains("value=\"s500\"") && new.contains("has more services"));
    // As a browser sends it.
    let saved = browser.submit(&page, &page, &[("name", "ci"), ("allowed_services", "s500")]);
    assert_eq!(saved.status, 303);
    assert_eq!(control.caller_secret::<CredentialRecord>("many", &id).unwrap().allowed_services.len(), 1);

    for _ in 0..51 {
        setup::enrollment_token(control, "many", &["s000"]);
    }
    let tokens = |page: &str| page.matches("aria-label=\"Withdraw ").count();
    let first = browser.get("/accounts/many/agents");
    assert_eq!(tokens(&first.text), 50);
    let rest = first.between("href=\"/accounts/many/agents?tokens=", "\"");
    assert_eq!(tokens(&browser.get(&format!("/accounts/many/agents?tokens={rest}")).text), 1);
}

#[test]
fn names_are_text_wherever_they_are_shown() {
    let demo = demo(None);
    let (control, mut browser) = (demo.gateway().control(), Browser::signed_in(&demo));
    let name = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>";
    let new = NewCallerSecret { name: Some(name.to_owned()), allowed_services: vec!["echo".to_owned()], enabled: None };
    control.create_caller_secret::<CredentialRecord>(&Actor::Admin, "demo", &new).unwrap();
    control.create_caller_secret::<ServiceKeyRecord>(&Actor::Admin, "demo", &new).unwrap();
    let item = |records: &gw_gateway::store::Records| {
        let named = records.credentials.values().find(|record| record.access.name.as_deref() == Some(name));
        format!("/accounts/demo/credentials/{}", named.unwrap().id)
    };
    let item = item(&control.records());
    for path in [&item, "/accounts/demo/credentials", "/accounts/demo/service-keys", "/audit-log"] {
        let page = browser.get(path);
        assert!(page.text.contains("alert(1)"), "{path}");
        assert!(!page.text.contains("<script>") && !page.text.contains("<img"), "{path}: {}", page.text);
    }
    // What comes with the address, too.
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
fn light_and_dark_are_remembered() {
    let demo = demo(None);
    let mut browser = Browser::signed_in(&demo);
    assert!(browser.get("/").text.contains("data-theme=\"system\""));
    let set = browser.submit("/tunnels", "/theme", &[("theme", "dark"), ("back", "/tunnels")]);
    assert_eq!((set.status, set.header("location")), (303, "/tunnels"));
    assert!(browser.get("/tunnels").text.contains("data-theme=\"dark\""));
    let away = browser.submit("/tunnels", "/theme", &[("theme", "x"), ("back", "https://evil.example")]);
    assert_eq!(away.header("location"), "/");
    assert!(browser.get("/").text.contains("data-theme=\"system\""));
}

#[test]
fn requests_are_found_shown_and_made_again() {
    let demo = demo(None);
    let (control, mut browser) = (demo.gateway().control(), Browser::signed_in(&demo));
    let capture = ServiceChanges {
        capture_request_body: Some(true),
        capture_response_body: Some(true),
        ..ServiceChanges::default()
    };
    control.change_service(&Actor::Admin, "demo", "echo", &capture).unwrap();
    let mut caller = connect(&demo);
    let key = &demo.about.service_key;
    let mut send = |method: &str, target: &str, body: &str| {
        let length = body.len();
        caller.send(format!(
            "{method} {target} HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\nContent-Type: text/html\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        ));
        caller.response().header("x-gw-request-id").to_owned()
    };
    let body = "<script>alert(1)</script>";
    // Captures begin when the workers have heard of it.
    let (id, page) = eventually("a request is kept with its body", || {
        let id = send("POST", "/orders?q=%3Cb%3E", body);
        let kept = || Some(browser.get(&format!("/requests/{id}"))).filter(|page| page.status == 200);
        let page = eventually("the request is in the log", kept);
        page.text.contains("alert(1)").then_some((id, page))
    });
    for holds in ["/orders?q=", "demo--echo", "backend first byte", "service key", "<rect class=\"backend\"", "25 B"] {
        assert!(page.text.contains(holds), "no {holds}: {}", page.text);
    }
    assert!(!page.text.contains("<script>"), "{}", page.text);
    assert!(!page.text.contains(key.as_str()));
    let raw = browser.get(&format!("/requests/{id}/body/request"));
    assert_eq!((raw.text.as_str(), raw.header("content-type")), (body, "application/octet-stream"));
    assert!(raw.header("content-disposition").starts_with("attachment"));
    assert_eq!(Browser::new(&demo).get(&format!("/requests/{id}/body/request")).status, 303);

    // The box on every page, in whatever case the id was copied.
    let found = browser.get(&format!("/requests?id=+{}+", id.to_uppercase()));
    assert_eq!(found.header("location"), format!("/requests/{id}"));
    for (query, finds) in [
        ("path_prefix=%2Forders&account=demo&service=echo", true),
        ("since=2020-01-01&min_ms=0&status=2xx", true),
        ("path_prefix=%2Fnone", false),
        ("until=2020-01-01+00:00", false),
    ] {
        assert_eq!(browser.get(&format!("/requests?{query}")).text.contains(&id), finds, "{query}");
    }
    let wrong = browser.get("/requests?status=many&account=demo");
    assert!(wrong.status == 422 && wrong.text.contains("id=\"status-error\"") && wrong.text.contains("value=\"many\""));

    let address = format!("/requests/{id}/replay");
    let form = browser.get(&address);
    assert!(form.text.contains("value=\"/orders?q=%3Cb%3E\"") && form.text.contains("content-type: text/html"));
    let fields = [("method", "PUT"), ("target", "/again"), ("headers", "no colon"), ("body_from", "recorded")];
    let wrong = browser.submit(&address, &address, &fields);
    assert!(
        wrong.status == 422 && wrong.text.contains("id=\"headers-error\"") && wrong.text.contains("value=\"/again\"")
    );
    let fields =
        [("method", "PUT"), ("target", "/again"), ("headers", "x-a: 1"), ("body_from", "text"), ("body", "new")];
    let replayed = browser.submit(&address, &address, &fields);
    assert_eq!(replayed.status, 303, "{}", replayed.text);
    let page = browser.get(replayed.header("location"));
    assert_eq!(page.status, 200);
    for holds in ["Replayed.", "/again", "PUT", &format!("href=\"/requests/{id}\""), "administrator (replay)"] {
        assert!(page.text.contains(holds), "no {holds}: {}", page.text);
    }
    assert!(page.text.contains("<pre tabindex=\"0\" aria-label=\"Body of the Request\">new</pre>"), "{}", page.text);
}

#[test]
fn a_replay_changes_what_was_edited_and_nothing_else() {
    let (seen, requests) = mpsc::channel();
    let demo = demo(Some(backend::start(move |mut peer| {
        while let Ok((head, body, _)) = peer.request() {
            seen.send((head, body)).unwrap();
            peer.send("HTTP/1.1 204 No Content\r\n\r\n");
        }
    })));
    let (control, mut browser) = (demo.gateway().control(), Browser::signed_in(&demo));
    let (mut caller, key) = (connect(&demo), demo.about.service_key.clone());
    let mut call = |browser: &mut Browser| {
        let fields = b"X-Bytes: \xff\xfe\r\nX-A: 1\r\nCookie: a=b\r\nContent-Type: text/plain\r\nContent-Length: 6";
        let head = format!("OPTIONS * HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n");
        caller.send([head.as_bytes(), fields, b"\r\n\r\na\r\nb\r\n"].concat());
        let page = format!("/requests/{}", caller.response().header("x-gw-request-id"));
        eventually("the request is in the log", || Some(browser.get(&page)).filter(|page| page.status == 200));
        requests.recv_timeout(crate::SOON).unwrap();
        page
    };
    let page = call(&mut browser);
    let unkept = browser.get(&page).text;
    assert!(!unkept.contains("/replay\"") && unkept.contains("cannot be replayed"), "{unkept}");
    let body = browser.get(&format!("{page}/body/request"));
    assert!(body.status == 404 && body.text.contains("was not captured"), "{}", body.text);
    let body = browser.get("/requests/019aa5c2-7e30-7c3b-8f11-2d5a4c9e1b07/body/request");
    assert!(body.status == 404 && body.text.contains("is not in the log"), "{}", body.text);
    let address = format!("{page}/replay");
    for reply in [browser.get(&address), browser.submit("/", &address, &[("method", "GET"), ("target", "/")])] {
        assert!(reply.status == 409 && reply.text.contains("capture_request_body was off"), "{}", reply.text);
    }

    let capture = ServiceChanges { capture_request_body: Some(true), ..ServiceChanges::default() };
    control.change_service(&Actor::Admin, "demo", "echo", &capture).unwrap();
    // Captures begin when the workers have heard of it.
    let address = eventually("a request is kept that can be replayed", || {
        let page = call(&mut browser);
        let address = format!("{page}/replay");
        browser.get(&page).text.contains(&format!("href=\"{address}\"")).then_some(address)
    });
    let form = browser.get(&address);
    let headers = form.between("aria-describedby=\"headers-hint\">\n", "</textarea>");
    assert!(headers.contains("x-a: 1") && !headers.contains("cookie"), "{headers}");
    let headers = headers.replace("x-a: 1", "x-a: 2").replace('\n', "\r\n");
    let fields = [
        ("method", "OPTIONS"),
        ("target", "*"),
        ("headers", headers.as_str()),
        ("body_from", "text"),
        ("body", "a\r\nc\r\n"),
    ];
    let replayed = browser.submit(&address, &address, &fields);
    assert_eq!(replayed.status, 303, "{}", replayed.text);
    let (head, body) = requests.recv_timeout(crate::SOON).unwrap();
    assert_eq!(
        (head.method.as_str(), head.target.as_str(), body.as_slice()),
        ("OPTIONS", "*", b"a\r\nc\r\n".as_slice())
    );
    assert_eq!(
        (head.headers["x-a"].as_bytes(), head.headers["x-bytes"].as_bytes()),
        (b"2".as_slice(), b"\xff\xfe".as_slice())
    );

    // An edited text is sent although the recorded body is selected; a preview sends nothing.
    let fields =
        [("method", "OPTIONS"), ("target", "*"), ("headers", ""), ("body_from", "recorded"), ("body", "a\r\nd\r\n")];
    let preview = browser.submit(&address, &address, &[&fields[..], &[("action", "preview")]].concat());
    assert_eq!(preview.status, 200);
    assert!(
        preview.text.contains("edited, 6 B") && preview.text.contains("value=\"text\" checked"),
        "{}",
        preview.text
    );
    assert!(requests.try_recv().is_err());
    assert_eq!(browser.submit(&address, &address, &fields).status, 303);
    assert_eq!(requests.recv_timeout(crate::SOON).unwrap().1, b"a\r\nd\r\n");

    // Showing the form, or a page with the body, is a read; sending it is a replay.
    let id = address.trim_start_matches("/requests/").trim_end_matches("/replay");
    let audited = || {
        let query = AuditQuery { account: Some("demo".to_owned()), before: None, limit: 500 };
        let mut entries = control.audit_log(&query).unwrap().items;
        entries.retain(|entry| entry.target == id);
        entries
    };
    let before = audited().len();
    for page in [address.as_str(), address.trim_end_matches("/replay"), &address.replace("/replay", "/body/request")] {
        assert_eq!(browser.get(page).status, 200);
    }
    let entries = audited();
    assert_eq!(entries.len(), before + 3);
    assert!(entries[..3].iter().all(|entry| entry.action == "request.read_body" && entry.actor == "admin"));
    assert_eq!(entries.iter().filter(|entry| entry.action == "request.replay").count(), 2);
}
