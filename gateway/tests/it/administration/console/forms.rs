//! Forms of the console.

use gw_base::service::service_settings::{Kind, SETTINGS};
use gw_control_plane::control::records::{account, caller_secret, service};
use gw_shared::id::{AccountId, AgentId, ClientId};
use gw_store::{AgentRecord, StoredRecord};

use super::browser::Browser;
use crate::support::{demo, setup};

#[test]
fn an_account_is_created_changed_and_deleted_with_forms() {
    let demo = demo(None);
    let control = demo.gateway().control();
    let mut browser = Browser::signed_in(&demo);

    // The error is shown at its field, and the typed text is kept.
    let wrong = browser.submit("/accounts", "/accounts", &[("id", "NO WAY")]);
    assert_eq!(
        (wrong.status, wrong.text.contains("value=\"NO WAY\"")),
        (422, true)
    );
    assert!(
        wrong
            .between("id=\"id-error\">", "<")
            .contains("3 to 15 characters")
    );
    let made = browser.submit("/accounts", "/accounts", &[("id", "acme")]);
    assert_eq!(
        (made.status, made.header("location")),
        (303, "/accounts/acme?note=created")
    );

    let wrong = browser.submit(
        "/accounts/acme/new-service",
        "/accounts/acme",
        &[("id", "api"), ("burst", "many")],
    );
    assert!(
        wrong.status == 422
            && wrong.text.contains("value=\"many\"")
            && wrong.text.contains("id=\"burst-error\"")
    );
    let wrong = browser.submit(
        "/accounts/acme/new-service",
        "/accounts/acme",
        &[("id", "api")],
    );
    assert!(
        wrong
            .between("id=\"modes-error\">", "<")
            .contains("at least one")
    );
    assert_eq!(wrong.text.matches(" autofocus").count(), 1);
    let fields = [
        ("id", "api"),
        ("modes", "jwt"),
        ("modes", "service_key"),
        ("burst", "7"),
        ("request_logging", "on"),
    ];
    let made = browser.submit("/accounts/acme/new-service", "/accounts/acme", &fields);
    assert_eq!(
        (made.status, made.header("location")),
        (303, "/accounts/acme/services/api?note=created")
    );
    let service = service::show(control, "acme", "api").unwrap();
    assert_eq!(
        (service.burst, service.refill_per_minute, service.enabled),
        (7, 1_000_000, true)
    );
    assert!(service.request_logging && !service.capture_request_body);
    assert_eq!(
        (service.retries, service.affinity.to_string().as_str()),
        (false, "none")
    );

    let page = "/accounts/acme/services/api";
    for page in ["/accounts/acme/new-service", page] {
        let shown = browser.get(page).text;
        // A new service is enabled.
        let fields = SETTINGS
            .iter()
            .filter(|setting| setting.kind != Kind::State || !page.ends_with("/new-service"));
        for setting in fields {
            let field = format!("name=\"{}\"", setting.name);
            assert!(
                shown.contains(&field),
                "{page} has no field {}",
                setting.name
            );
        }
    }
    assert!(
        browser
            .get("/accounts/acme/new-service")
            .text
            .contains("id=\"retries\" name=\"retries\" type=\"checkbox\" value=\"on\" checked")
    );
    let fields = [
        ("modes", "service_key"),
        ("burst", "8"),
        ("refill_per_minute", "9"),
        ("capture_request_body", "on"),
    ];
    let several_agents = [
        ("retries", "on"),
        ("affinity", "header:Host"),
        ("hsts_max_age_seconds", "300"),
    ];
    let wrong = browser.submit(page, page, &[&fields[..], &several_agents].concat());
    assert!(
        wrong.status == 422
            && wrong
                .between("id=\"affinity-error\">", "<")
                .contains("host does not reach the agent")
    );
    let fields = [
        &fields[..],
        &[
            ("retries", "on"),
            ("affinity", "cookie:sid"),
            ("hsts_max_age_seconds", "300"),
        ],
    ]
    .concat();
    assert_eq!(
        browser.submit(page, page, &fields).header("location"),
        "/accounts/acme/services/api?note=saved"
    );
    let service = service::show(control, "acme", "api").unwrap();
    assert_eq!(
        (
            service.burst,
            service.refill_per_minute,
            service.enabled,
            service.modes.len()
        ),
        (8, 9, false, 1)
    );
    assert!(
        !service.request_logging && service.capture_request_body && !service.capture_response_body
    );
    assert_eq!(
        (service.retries, service.affinity.to_string().as_str()),
        (true, "cookie:sid")
    );
    assert_eq!(service.hsts_max_age_seconds, 300);
    let shown = browser.get(page).text;
    assert!(
        shown.contains("value=\"cookie:sid\"")
            && shown.contains("name=\"retries\" type=\"checkbox\" value=\"on\" checked")
    );
    assert_eq!(browser.submit(page, page, &[("modes", "jwt")]).status, 422);

    for (path, prefix) in [("credentials", "gw_cs_"), ("service-keys", "gw_sk_")] {
        let list = format!("/accounts/acme/{path}");
        let new = format!("/accounts/acme/new-{path}");
        assert_eq!(browser.submit(&new, &list, &[("name", "ci")]).status, 422);
        let made = browser.submit(&new, &list, &[("name", "ci"), ("allowed_services", "api")]);
        let secret = made.between("aria-labelledby=\"secret-title\">", "<");
        assert!(made.status == 200 && secret.starts_with(prefix), "{secret}");
        assert!(
            made.between("aria-labelledby=\"commands-title\">", "</pre>")
                .contains(&secret)
        );
        let item = made.between("data-reload=\"", "\"");
        // A repeated request returns the existing credential without a secret.
        let again = browser.submit(&new, &list, &[("name", "ci"), ("allowed_services", "api")]);
        assert_eq!(
            (again.status, again.header("location")),
            (303, format!("{item}?note=there").as_str())
        );
        let rotated = browser
            .submit(&item, &format!("{item}/rotate"), &[])
            .between("aria-labelledby=\"secret-title\">", "<");
        assert!(rotated.starts_with(prefix) && rotated != secret);
        for secret in [&secret, &rotated] {
            for page in [&item, &list, &"/audit-log".to_owned()] {
                assert!(
                    !browser.get(page).text.contains(secret.as_str()),
                    "{page} shows a secret"
                );
            }
        }
        assert_eq!(
            browser
                .submit(&item, &format!("{item}/disable"), &[])
                .status,
            303
        );
        assert!(browser.get(&item).text.contains("/enable"));
        assert_eq!(
            browser.submit(&item, &format!("{item}/enable"), &[]).status,
            303
        );
        let renamed = browser.submit(
            &item,
            &item,
            &[("name", "deploy"), ("allowed_services", "api")],
        );
        assert_eq!(renamed.status, 303);
        assert!(browser.get(&list).text.contains("deploy"));
        let nameless = browser.submit(&item, &item, &[("name", " "), ("allowed_services", "api")]);
        assert!(
            nameless.status == 422 && nameless.text.contains("id=\"name-error\""),
            "{}",
            nameless.text
        );
        let idle = browser.submit(&item, &item, &[("name", "deploy")]);
        assert!(
            idle.status == 422 && idle.text.contains("id=\"allowed_services-error\""),
            "{}",
            idle.text
        );
        let unsure = browser.submit(&item, &format!("{item}/delete"), &[("confirm", "deploy")]);
        assert!(
            unsure.status == 422
                && unsure
                    .text
                    .contains("autofocus aria-invalid=\"true\" aria-describedby=\"confirm-error\"")
        );
        let id = item.rsplit('/').next().unwrap().to_owned();
        assert_eq!(
            browser
                .submit(&item, &format!("{item}/delete"), &[("confirm", &id)])
                .status,
            303
        );
        assert_eq!(browser.get(&item).status, 404);
    }

    let wrong = browser.submit("/accounts/acme/new-agent", "/accounts/acme/new-agent", &[]);
    assert!(wrong.status == 422 && wrong.text.contains("id=\"services-error\""));
    let fields = [
        ("services", "api"),
        ("uses", "0"),
        ("expires_in", "31d"),
        ("backend_port", "0"),
    ];
    let wrong = browser.submit(
        "/accounts/acme/new-agent",
        "/accounts/acme/new-agent",
        &fields,
    );
    assert!(
        wrong.status == 422 && wrong.text.contains("value=\"31d\""),
        "{}",
        wrong.text
    );
    assert!(
        wrong
            .between("id=\"uses-error\">", "<")
            .contains("from 1 to 10000")
    );
    assert!(
        wrong
            .between("id=\"expires_in-error\">", "<")
            .contains("from 1 minute to 30 days")
    );
    assert!(
        wrong
            .between("id=\"backend_port-error\">", "<")
            .contains("from 1 to 65535")
    );
    let uses = ("uses", "50");
    let lifetime = ("expires_in", "12h");
    let port = ("backend_port", "8080");
    let fields = [
        ("services", "api"),
        ("approval", "manual"),
        ("ephemeral", "on"),
        uses,
        lifetime,
        port,
    ];
    let made = browser.submit(
        "/accounts/acme/new-agent",
        "/accounts/acme/new-agent",
        &fields,
    );
    assert!(
        made.text.contains("It works for 50 agents, until "),
        "{}",
        made.text
    );
    let tokens = control.records().enrollment_tokens;
    let record = tokens
        .values()
        .find(|token| token.account.as_str() == "acme")
        .unwrap();
    assert_eq!(
        (
            record.uses,
            record.expires_at.0 - record.created_at.0,
            record.ephemeral
        ),
        (50, 12 * 3600, true)
    );
    let token = made.between("aria-labelledby=\"secret-title\">", "<");
    let command = made.between("aria-labelledby=\"command-title\">", "</pre>");
    let end = format!(" --ca-file gw-ca.crt --token-file - &#60;&#60;&#39;END&#39;\n{token}\nEND");
    assert!(
        command.contains("\ngw-agent http 8080 --gateway https://eu1.gw.localhost:")
            && command.ends_with(&end),
        "{command}"
    );
    assert!(
        command.contains("-----BEGIN CERTIFICATE-----\n"),
        "{command}"
    );
    let agents = browser.get("/accounts/acme/agents");
    assert!(
        !agents.text.contains(&token)
            && agents
                .text
                .contains(">0 of 50 <span class=\"muted\">ephemeral</span><"),
        "{}",
        agents.text
    );
    let delete = agents.between("action=\"/accounts/acme/enrollment-tokens/", "\"");
    let path = format!("/accounts/acme/enrollment-tokens/{delete}");
    assert_eq!(
        browser.submit("/accounts/acme/agents", &path, &[]).status,
        303
    );

    assert!(!account::show(control, "acme").unwrap().capture_allowed);
    let plan = browser.submit(
        "/accounts/acme/settings",
        "/accounts/acme/settings",
        &[("capture_allowed", "on"), ("domains_max", "7")],
    );
    assert_eq!(
        plan.header("location"),
        "/accounts/acme/settings?note=saved"
    );
    let changed = account::show(control, "acme").unwrap();
    assert_eq!(
        (changed.capture_allowed, changed.domains_max.get()),
        (true, 7)
    );
    let refused = browser.submit(
        "/accounts/acme/settings",
        "/accounts/acme/settings",
        &[("domains_max", "10001")],
    );
    assert!(
        refused.status == 422
            && refused.text.contains("value=\"10001\"")
            && refused
                .text
                .contains("must be a whole number from 0 to 10000"),
        "{}",
        refused.text
    );

    let settings = browser.get("/accounts/acme/settings").text;
    assert!(
        settings.contains("Deleted with the account") && settings.contains(">api<"),
        "{settings}"
    );
    let unsure = browser.submit(page, &format!("{page}/delete"), &[("confirm", "")]);
    assert!(
        unsure.status == 422
            && unsure.text.contains("value=\"9\"")
            && unsure.text.contains("id=\"confirm-error\"")
    );
    assert_eq!(
        browser
            .submit(page, &format!("{page}/delete"), &[("confirm", "api")])
            .status,
        303
    );
    let gone = browser.submit(
        "/accounts/acme/settings",
        "/accounts/acme/delete",
        &[("confirm", "acme")],
    );
    assert_eq!(gone.header("location"), "/accounts?note=deleted");
    assert!(account::show(control, "acme").is_err());
}

#[test]
fn items_beyond_the_listed_ones_are_kept_on_save() {
    let demo = demo(None);
    let control = demo.gateway().control();
    let mut browser = Browser::signed_in(&demo);
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
    // The form as a browser sends it.
    let saved = browser.submit(
        &page,
        &page,
        &[("name", "ci"), ("allowed_services", "s500")],
    );
    assert_eq!(saved.status, 303);
    assert_eq!(
        caller_secret::show::<ClientId>(control, "many", &id)
            .unwrap()
            .allowed_services
            .len(),
        1
    );

    for _ in 0..51 {
        setup::enrollment_token(control, "many", &["s000"]);
    }
    let tokens = |page: &str| page.matches("aria-label=\"Withdraw ").count();
    let first = browser.get("/accounts/many/agents");
    assert_eq!(tokens(&first.text), 50);
    let rest = first.between("href=\"/accounts/many/agents?tokens=", "\"");
    assert_eq!(
        tokens(
            &browser
                .get(&format!("/accounts/many/agents?tokens={rest}"))
                .text
        ),
        1
    );
}

#[test]
fn an_account_with_sixty_agents_and_keys_is_deleted_with_one_form() {
    let demo = demo(None);
    let control = demo.gateway().control();
    let mut browser = Browser::signed_in(&demo);
    setup::service(control, "acme", "api");
    let (key, _) = setup::service_key(control, "acme", &["api"]);
    setup::credential(control, "acme", &["api"]);
    let of_demo = control.records().agents.into_values().next().unwrap();
    let agents: Vec<StoredRecord> = (0..60)
        .map(|_| {
            StoredRecord::Agent(AgentRecord {
                id: AgentId::random(),
                account: AccountId::new("acme").unwrap(),
                enrollment: None,
                key: None,
                ..of_demo.clone()
            })
        })
        .collect();
    control.put_all(&agents).unwrap();
    let settings = "/accounts/acme/settings";
    let shown = browser.get(settings).text;
    let row = "<td data-label=\"Kind\">agents</td>\n        <td data-label=\"Count\" \
               class=\"number\">60</td>";
    assert!(
        shown.contains(row) && shown.contains(" and 50 more"),
        "{shown}"
    );
    let unsure = browser.submit(settings, "/accounts/acme/delete", &[("confirm", "")]);
    assert_eq!(unsure.status, 422);
    assert_eq!(control.records().agents.len(), 61, "nothing was deleted");
    let gone = browser.submit(settings, "/accounts/acme/delete", &[("confirm", "acme")]);
    assert_eq!(gone.header("location"), "/accounts?note=deleted");
    let left = control.records();
    assert_eq!(
        (left.agents.len(), left.services.len()),
        (1, 1),
        "of the demo"
    );
    assert!(
        left.enrollment_tokens
            .values()
            .all(|token| token.account.as_str() != "acme")
    );
    let audit = browser.get("/audit-log?account=acme").text;
    let entry = audit.split("account.delete").nth(1).unwrap();
    for deleted in ["60", &key, "cascade"] {
        assert!(entry.contains(deleted), "no {deleted}: {entry}");
    }
}
