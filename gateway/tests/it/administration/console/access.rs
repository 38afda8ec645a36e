//! Sign-in, sessions, and requests that the console refuses.

use super::browser::Browser;
use crate::administration::assert_says;
use crate::support::forms::PageForm;
use crate::support::scene::Scene;

#[test]
fn only_the_admin_token_signs_in() {
    let scene = Scene::service().start();
    let mut browser = Browser::new(&scene);
    let turned_away = browser.get("/requests?status=5xx");
    let sign_in = "/sign-in?next=%2Frequests%3Fstatus%3D5xx";
    assert_eq!(turned_away.leads_to(), sign_in);
    let wrong = browser.sign_in("x", "/");
    assert_eq!((wrong.status, wrong.cookie("gw_session")), (401, None));
    assert!(wrong.text.contains("not the admin token"));

    let token = format!(" {}\n", scene.about.admin_token);
    let right = browser.sign_in(&token, "/requests?status=5xx");
    assert_eq!(right.leads_to(), "/requests?status=5xx");
    let (id, flags) = right.cookie("gw_session").unwrap();
    assert_eq!(id.len(), 43);
    let expected = "Path=/; HttpOnly; SameSite=Strict; Max-Age=43200";
    assert_eq!(flags, expected);
    assert_eq!(browser.get("/").status, 200);
    assert_eq!(browser.get("/sign-in").header("location"), "/");
}

#[test]
fn a_sign_in_does_not_lead_to_another_host() {
    let scene = Scene::service().start();
    let mut browser = Browser::new(&scene);
    let form_token = browser.get("/sign-in").form_token();
    let forged = [
        ("form_token", form_token.as_str()),
        ("next", "//evil.example/"),
        ("token", &scene.about.admin_token),
    ];
    assert_eq!(browser.post("/sign-in", &forged).header("location"), "/");
}

#[test]
fn signing_out_ends_the_session_of_the_browser_alone() {
    let scene = Scene::service().start();
    let mut browser = Browser::signed_in(&scene);
    let mut other = Browser::signed_in(&scene);
    let id = browser.cookies["gw_session"].clone();
    assert_ne!(other.cookies["gw_session"], id);
    assert_eq!(browser.press("/", "/sign-out").leads_to(), "/sign-in");
    browser.cookies.insert("gw_session".to_owned(), id);
    assert_eq!(browser.get("/").status, 303);
    assert_eq!(other.get("/").status, 200);
}

#[test]
fn sign_in_after_an_expired_session_returns_to_the_open_page() {
    let scene = Scene::service().start();
    let mut browser = Browser::new(&scene);
    let page = |path: &str| format!("{}{path}", scene.about.admin_url);
    browser.extra = vec![
        ("HX-Request", "true".to_owned()),
        ("HX-Current-URL", page("/accounts/demo/agents/x?note=saved")),
    ];
    let told = browser.get("/accounts/demo/agents/x");
    let sign_in = "/sign-in?next=%2Faccounts%2Fdemo%2Fagents%2Fx&ended=yes";
    assert_eq!((told.status, told.header("hx-redirect")), (401, sign_in));
    browser.extra = vec![("Referer", page("/accounts/demo/settings"))];
    let told = browser.post("/accounts/demo/agents/x/revoke", &[("form_token", "x")]);
    let sign_in = "/sign-in?next=%2Faccounts%2Fdemo%2Fsettings&ended=yes";
    assert_eq!(told.leads_to(), sign_in);
    browser.extra = vec![("Referer", "https://evil.example//evil.example/".to_owned())];
    let told = browser.post("/theme", &[]);
    assert_eq!(told.header("location"), "/sign-in?ended=yes");
    browser.extra.clear();

    // An open form stays valid when another tab opens the form or signs in.
    let form = browser.get(sign_in);
    let ended = "Your session has ended. Nothing was changed.";
    assert_says(&form.text, &[ended]);
    let other = browser.get("/sign-in");
    assert!(!other.text.contains("has ended"));
    let filled = form.form("/sign-in").set("token", &scene.about.admin_token);
    let signed_in = browser.send_form(&filled);
    assert_eq!(signed_in.header("location"), "/accounts/demo/settings");
    let again = browser.post("/sign-in", &[("next", "/tunnels")]);
    assert_eq!(again.header("location"), "/tunnels");
}

#[test]
fn a_cookie_that_the_console_did_not_issue_is_replaced() {
    let scene = Scene::service().start();
    let mut browser = Browser::new(&scene);
    let cookie = ("gw_sign_in".to_owned(), "x".to_owned());
    browser.cookies.extend([cookie]);
    assert_ne!(browser.get("/sign-in").cookie("gw_sign_in").unwrap().0, "x");
}

#[test]
fn over_https_the_session_cookie_is_secure() {
    let scene = Scene::service().start();
    let mut browser = Browser::new(&scene);
    browser.extra = vec![("X-Forwarded-Proto", "https".to_owned())];
    let right = browser.sign_in(&scene.about.admin_token, "/");
    let (_, flags) = right.cookie("__Host-gw_session").unwrap();
    let expected = "Path=/; HttpOnly; SameSite=Strict; Max-Age=43200; Secure";
    assert_eq!(flags, expected);
    assert_eq!(browser.get("/").status, 200);
}

#[test]
fn wrong_tokens_are_rate_limited_without_locking_out_the_administrator() {
    let scene = Scene::service().start();
    let mut browser = Browser::new(&scene);
    let statuses = [(); 11].map(|()| browser.sign_in("guess", "/").status);
    assert_eq!(statuses[..10], [401; 10]);
    assert_eq!(statuses[10], 429);
    let late = browser.sign_in("guess", "/");
    assert_eq!(late.status, 429);
    assert!(late.header("retry-after").parse::<u64>().unwrap() <= 7);
    // The correct token is accepted from an address with many wrong guesses.
    assert_eq!(browser.sign_in(&scene.about.admin_token, "/").status, 303);
}

#[test]
fn forms_without_a_valid_token_or_from_another_origin_are_refused() {
    let scene = Scene::service().start();
    let mut browser = Browser::signed_in(&scene);
    let form_token = browser.get("/accounts").form_token();
    let other = Browser::signed_in(&scene).get("/accounts").form_token();
    let api = scene.api();
    let accounts = || api.list("/accounts").len();
    for token in ["", "x", &other, &form_token[1..]] {
        let forged = [("form_token", token), ("id", "evil")];
        assert_eq!(browser.post("/accounts", &forged).status, 403, "{token}");
    }
    for (name, value) in [
        ("Sec-Fetch-Site", "cross-site"),
        ("Sec-Fetch-Site", "same-site"),
        ("Origin", "null"),
        ("Origin", "https://evil.example"),
    ] {
        browser.extra = vec![(name, value.to_owned())];
        let form = [("form_token", form_token.as_str()), ("id", "evil")];
        let reply = browser.post("/accounts", &form);
        assert_eq!(reply.status, 403, "{name}: {value}");
        let sign_in = [("token", scene.about.admin_token.as_str())];
        let reply = browser.post("/sign-in", &sign_in);
        assert_eq!(reply.status, 403, "{name}: {value}");
    }
    assert_eq!(accounts(), 1);

    // The console's own pages send these fields.
    let origin = scene.about.admin_url.clone();
    let same_origin = "same-origin".to_owned();
    browser.extra = vec![("Origin", origin), ("Sec-Fetch-Site", same_origin)];
    let form = [("form_token", form_token.as_str()), ("id", "good")];
    assert_eq!(browser.post("/accounts", &form).status, 303);
    assert_eq!(accounts(), 2);
    // Scripts send the token in a header field.
    browser.extra.push(("X-Gw-Form-Token", form_token));
    assert_eq!(browser.post("/accounts", &[("id", "better")]).status, 303);
}

#[test]
fn edits_of_a_form_outlive_the_session() {
    let scene = Scene::service().start();
    let mut browser = Browser::signed_in(&scene);
    let settings = "/accounts/demo/services/echo";
    let form = browser.form(settings, settings);
    let form = form
        .set("burst", "77")
        .set("refill_per_minute", "\"><script>");
    browser.cookies.remove("gw_session");
    browser.extra = vec![("Referer", format!("{}{settings}", scene.about.admin_url))];
    let mut told = browser.send_form(&form);
    browser.extra.clear();
    // A wrong token does not lose them either.
    for admin_token in ["wrong", &scene.about.admin_token] {
        assert_eq!(told.status, 401);
        assert_says(&told.text, &["Sign in"]);
        assert!(!told.text.contains("<script>"), "{}", told.text);
        let sign_in = told.form("/sign-in");
        let kept = (sign_in.values("next"), sign_in.values("kept_action"));
        assert_eq!(kept, (vec![settings], vec![settings]));
        told = browser.send_form(&sign_in.set("token", admin_token));
    }
    assert_eq!(told.status, 200, "{}", told.text);
    assert_says(&told.text, &["Your edits"]);
    assert!(!told.text.contains("<script>"), "{}", told.text);
    let again = told.form(settings);
    assert_ne!(again.values("form_token"), form.values("form_token"));
    let edits = |form: &PageForm| {
        let fields = form.sent().into_iter();
        let edits = fields.filter(|(name, _)| name != "form_token");
        edits.collect::<Vec<_>>()
    };
    assert_eq!(edits(&again), edits(&form));
    // The form is that of the new session: its mistake is shown, and its edits are in it.
    let wrong = browser.send_form(&again);
    wrong.error("refill_per_minute");
    let corrected = wrong.form(settings).set("refill_per_minute", "88");
    assert_eq!(corrected.values("burst"), ["77"]);
    let saved = browser.send_form(&corrected);
    assert_eq!(saved.header("location"), format!("{settings}?note=saved"));
}
