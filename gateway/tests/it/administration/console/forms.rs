//! Forms of the console: what they create, change, refuse and delete.

use serde_json::json;

use super::browser::Browser;
use super::{enroll, with_fast_enrollment};
use crate::support::forms::{PageForm, attributes, texts};
use crate::support::scene::Scene;

#[test]
fn an_account_is_created_changed_and_deleted() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    let mut browser = Browser::signed_in(&scene);
    // The error is shown at its field, and the typed text is kept.
    let wrong = browser.fill("/accounts", "/accounts", |form| form.set("id", "NO WAY"));
    let error = wrong.error("id");
    assert!(error.contains("3 to 15 characters"), "{error}");
    assert_eq!(wrong.form("/accounts").values("id"), ["NO WAY"]);
    let corrected = wrong.form("/accounts").set("id", "acme");
    let made = browser.send_form(&corrected);
    assert_eq!(made.leads_to(), "/accounts/acme?note=created");
    assert_eq!(api.get("/accounts/acme").body["capture_allowed"], false);

    let settings = "/accounts/acme/settings";
    let refused = browser.fill(settings, settings, |form| form.set("domains_max", "10001"));
    let error = refused.error("domains_max");
    assert!(error.contains("must be a whole number from 0 to 10000"));
    assert_eq!(refused.form(settings).values("domains_max"), ["10001"]);
    let changed = refused.form(settings).set("domains_max", "7");
    let changed = browser.send_form(&changed.tick("capture_allowed", "on"));
    assert_eq!(changed.leads_to(), "/accounts/acme/settings?note=saved");
    let account = api.get("/accounts/acme").body;
    let plan = (&account["capture_allowed"], &account["domains_max"]);
    assert_eq!(plan, (&json!(true), &json!(7)));

    api.create_service("acme", "api");
    let shown = browser.get(settings);
    let contents = texts(&shown.text, "section tbody td");
    assert_eq!(contents, ["services", "1", "api"]);
    let delete = "/accounts/acme/delete";
    let gone = browser.fill(settings, delete, |form| form.set("confirm", "acme"));
    assert_eq!(gone.leads_to(), "/accounts?note=deleted");
    assert_eq!(api.get("/accounts/acme").status, 404);
}

#[test]
fn a_service_is_created_changed_and_deleted() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    let mut browser = Browser::signed_in(&scene);
    let (new, list) = ("/accounts/demo/new-service", "/accounts/demo");
    let default = browser.form(new, list);
    assert_eq!(default.values("modes"), ["jwt", "service_key"]);
    assert_eq!(default.values("retries"), ["on"]);
    let form = default.set("id", "api").set("burst", "many");
    let wrong = browser.send_form(&form);
    assert_eq!(wrong.form(list).values("burst"), ["many"]);
    wrong.error("burst");
    let form = wrong.form(list).set("burst", "7").untick("modes", "jwt");
    let wrong = browser.send_form(&form.untick("modes", "service_key"));
    let error = wrong.error("modes");
    assert!(error.contains("at least one"), "{error}");
    assert_eq!(texts(&wrong.text, "[autofocus]").len(), 1);
    let form = wrong.form(list).untick("retries", "on");
    let form = form.tick("modes", "jwt").tick("modes", "service_key");
    let made = browser.send_form(&form);
    let page = "/accounts/demo/services/api";
    assert_eq!(made.leads_to(), format!("{page}?note=created"));
    let mut service = api.get(page).body;
    for (name, value) in [
        ("burst", json!(7)),
        ("refill_per_minute", json!(1_000_000)),
        ("enabled", json!(true)),
        ("retries", json!(false)),
        ("affinity", json!("none")),
        ("modes", json!(["jwt", "service_key"])),
    ] {
        assert_eq!(service[name], value, "{name}");
    }

    // A refused change keeps what was typed and changes nothing.
    let form = browser.form(page, page).set("affinity", "header:Host");
    let wrong = browser.send_form(&form.set("burst", "8"));
    let error = wrong.error("affinity");
    assert!(error.contains("host does not reach the agent"), "{error}");
    assert_eq!(wrong.form(page).values("burst"), ["8"]);
    assert_eq!(api.get(page).body, service);
    let saved = browser.send_form(&wrong.form(page).set("affinity", "cookie:sid"));
    assert_eq!(saved.leads_to(), format!("{page}?note=saved"));
    service["burst"] = json!(8);
    service["affinity"] = json!("cookie:sid");
    assert_eq!(api.get(page).body, service);
    let counts = ["burst", "refill_per_minute", "hsts_max_age_seconds"];
    for name in counts {
        let form = browser.form(page, page).set(name, " ");
        let wrong = browser.send_form(&form).error(name);
        assert!(wrong.contains("must be at least"), "{name}: {wrong}");
    }

    let delete = format!("{page}/delete");
    let unsure = browser.press(page, &delete);
    assert_eq!(unsure.error("confirm"), "type api to confirm");
    assert_eq!(unsure.form(page).values("burst"), ["8"]);
    let gone = browser.send_form(&unsure.form(&delete).set("confirm", "api"));
    assert_eq!(gone.leads_to(), "/accounts/demo?note=deleted");
    assert_eq!(api.get(page).status, 404);
}

#[test]
fn credentials_and_service_keys_are_created_changed_and_deleted() {
    let scene = Scene::service().agent().start();
    let mut browser = Browser::signed_in(&scene);
    for (path, prefix) in [("credentials", "gw_cs_"), ("service-keys", "gw_sk_")] {
        let list = format!("/accounts/demo/{path}");
        let new = format!("/accounts/demo/new-{path}");
        let named = |form: PageForm| form.set("name", "two");
        browser.fill(&new, &list, named).error("allowed_services");
        let filled = |form| named(form).tick("allowed_services", "echo");
        let made = browser.fill(&new, &list, filled);
        assert_eq!(made.status, 200, "{}", made.text);
        let secret = made.text_of("#secret");
        assert!(secret.starts_with(prefix), "{secret}");
        assert!(made.text_of("#commands").contains(&secret));
        let item = attributes(&made.text, "[data-reload]", "data-reload").remove(0);
        // A repeated request returns the existing credential without a secret.
        let again = browser.fill(&new, &list, filled);
        assert_eq!(again.leads_to(), format!("{item}?note=there"));
        let rotated = browser.press(&item, &format!("{item}/rotate"));
        let rotated = rotated.text_of("#secret");
        assert!(rotated.starts_with(prefix) && rotated != secret);
        for secret in [&secret, &rotated] {
            for page in [&item, &list, "/audit-log"] {
                let page = browser.get(page).text;
                assert!(!page.contains(secret.as_str()), "{page}");
            }
        }
        for (action, state) in [("disable", "disabled"), ("enable", "enabled")] {
            let changed = browser.press(&item, &format!("{item}/{action}"));
            assert_eq!(changed.leads_to(), format!("{item}?note=saved"));
            assert_eq!(browser.get(&item).text_of("h1"), format!("two {state}"));
        }
        let renamed = browser.fill(&item, &item, |form| form.set("name", "deploy"));
        assert_eq!(renamed.leads_to(), format!("{item}?note=saved"));
        assert!(browser.get(&list).text.contains("deploy"));
        browser
            .fill(&item, &item, |form| form.set("name", " "))
            .error("name");
        browser
            .fill(&item, &item, |form| form.untick("allowed_services", "echo"))
            .error("allowed_services");
        let delete = format!("{item}/delete");
        let unsure = browser.fill(&item, &delete, |form| form.set("confirm", "deploy"));
        unsure.error("confirm");
        let focused = attributes(&unsure.text, "[autofocus]", "aria-describedby");
        assert_eq!(focused, ["confirm-error"]);
        let id = item.rsplit('/').next().unwrap();
        let gone = browser.send_form(&unsure.form(&delete).set("confirm", id));
        assert_eq!(gone.leads_to(), format!("{list}?note=deleted"));
        assert_eq!(browser.get(&item).status, 404);
    }
}

#[test]
fn an_enrollment_token_is_created_and_withdrawn() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    let mut browser = Browser::signed_in(&scene);
    let page = "/accounts/demo/new-agent";
    browser.press(page, page).error("services");
    let wrong = browser.fill(page, page, |form| {
        let form = form.tick("services", "echo").set("uses", "0");
        form.set("expires_in", "31d").set("backend_port", "0")
    });
    assert_eq!(wrong.form(page).values("expires_in"), ["31d"]);
    for (field, error) in [
        ("uses", "from 1 to 10000"),
        ("expires_in", "from 1 minute to 30 days"),
        ("backend_port", "from 1 to 65535"),
    ] {
        let shown = wrong.error(field);
        assert!(shown.contains(error), "{shown}");
    }
    let form = wrong.form(page).set("uses", "50").set("expires_in", "12h");
    let form = form.set("approval", "manual").tick("ephemeral", "on");
    let made = browser.send_form(&form.set("backend_port", "8080"));
    let about = made.text_of(".once .warning");
    assert!(about.contains("It works for 50 agents, until "), "{about}");
    let token = made.text_of("#secret");
    let command = made.text_of("#command");
    let end = format!(" --ca-file gw-ca.crt --token-file - <<'END'\n{token}\nEND");
    assert!(
        command.contains("\ngw-agent http 8080 --gateway https://eu1.gw.localhost:")
            && command.contains("-----BEGIN CERTIFICATE-----\n")
            && command.ends_with(&end),
        "{command}"
    );
    let listed = api.get("/accounts/demo/enrollment-tokens").body;
    let mut tokens = listed["items"].as_array().unwrap().iter();
    let record = tokens.find(|token| token["uses"] == 50).unwrap();
    let kept = (&record["ephemeral"], &record["approval"]);
    assert_eq!(kept, (&json!(true), &json!("manual")));
    let time = |name: &str| humantime::parse_rfc3339(record[name].as_str().unwrap()).unwrap();
    let lifetime = time("expires_at").duration_since(time("created_at"));
    assert_eq!(lifetime.unwrap().as_secs(), 12 * 3600);

    let agents = browser.get("/accounts/demo/agents");
    assert!(!agents.text.contains(&token));
    let used = texts(&agents.text, "[data-label=Used]");
    assert!(used.contains(&"0 of 50 ephemeral".to_owned()), "{used:?}");
    let id = record["id"].as_str().unwrap();
    let withdraw = format!("/accounts/demo/enrollment-tokens/{id}/delete");
    let withdrawn = browser.press("/accounts/demo/agents", &withdraw);
    assert_eq!(withdrawn.leads_to(), "/accounts/demo/agents?note=deleted");
}

#[test]
fn items_beyond_the_listed_ones_are_kept_on_save() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    let mut browser = Browser::signed_in(&scene);
    api.create_account("many");
    for number in 0..502 {
        let new = json!({ "id": format!("s{number:03}") });
        api.post("/accounts/many/services", &new);
    }
    let (id, _) = api.create_credential("many", &["s500"]);
    let page = format!("/accounts/many/credentials/{id}");
    let shown = browser.get(&page);
    assert!(shown.text.contains("has more services"));
    let boxes = attributes(&shown.text, "[name=allowed_services]", "value");
    assert!(boxes.contains(&"s000".to_owned()));
    assert_eq!(shown.form(&page).values("allowed_services"), ["s500"]);
    let new = browser.get("/accounts/many/new-credentials").text;
    assert!(!new.contains("value=\"s500\"") && new.contains("has more services"));
    let saved = browser.fill(&page, &page, |form| form.set("name", "ci"));
    assert_eq!(saved.leads_to(), format!("{page}?note=saved"));
    let credential = api.get(&page).body;
    assert_eq!(credential["allowed_services"], json!(["s500"]));

    for _ in 0..51 {
        api.create_enrollment_token("many", &["s000"]);
    }
    let first = browser.get("/accounts/many/agents").text;
    let next = attributes(&first, "a[rel=next]", "href").remove(0);
    let rest = browser.get(&next).text;
    let tokens = |page: &str| texts(page, "form[action*=enrollment-tokens]").len();
    assert_eq!([tokens(&first), tokens(&rest)], [50, 1]);
}

#[test]
fn an_account_with_sixty_agents_and_keys_is_deleted_with_one_form() {
    let scene = with_fast_enrollment();
    let api = scene.api();
    let mut browser = Browser::signed_in(&scene);
    api.create_service("acme", "api");
    let (key, _) = api.create_service_key("acme", &["api"]);
    api.create_credential("acme", &["api"]);
    enroll(&scene, "acme", "api", 60);
    let settings = "/accounts/acme/settings";
    let shown = browser.get(settings).text;
    let contents = texts(&shown, "section tbody td");
    let at = contents.iter().position(|text| text == "agents").unwrap();
    assert_eq!(contents[at + 1], "60");
    assert!(contents[at + 2].ends_with(" and 50 more"), "{contents:?}");
    let delete = "/accounts/acme/delete";
    let unsure = browser.press(settings, delete);
    unsure.error("confirm");
    let all = "/accounts/acme/agents?limit=100";
    assert_eq!(api.list(all).len(), 60, "nothing was deleted");
    let gone = browser.send_form(&unsure.form(delete).set("confirm", "acme"));
    assert_eq!(gone.leads_to(), "/accounts?note=deleted");
    let audit = browser.get("/audit-log?account=acme").text;
    let entry = audit.split("account.delete").nth(1).unwrap();
    let entry = entry.split("</tr>").next().unwrap();
    for deleted in ["60", &key, "cascade"] {
        assert!(entry.contains(deleted), "no {deleted}: {entry}");
    }
    // An account of the same name begins with nothing.
    assert_eq!(api.get("/accounts/acme").status, 404);
    api.create_account("acme");
    for kind in [
        "agents",
        "services",
        "credentials",
        "service-keys",
        "enrollment-tokens",
    ] {
        let count = |account: &str| api.list(&format!("/accounts/{account}/{kind}")).len();
        assert_eq!((count("acme"), count("demo")), (0, 1), "{kind}");
    }
}
