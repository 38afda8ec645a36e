//! Sign-in, sessions, and requests that the console refuses.

use super::browser::Browser;
use crate::support::forms::PageForm;
use crate::support::scene::Scene;

#[test]
fn only_the_admin_token_signs_in_and_signing_out_ends_it() {
    let scene = Scene::service().agent().start();
    let mut browser = Browser::new(&scene);
    let turned_away = browser.get("/requests?status=5xx");
    assert_eq!(
        (turned_away.status, turned_away.header("location")),
        (303, "/sign-in?next=%2Frequests%3Fstatus%3D5xx")
    );
    let wrong = browser.sign_in("x", "/");
    assert_eq!((wrong.status, wrong.cookie("gw_session")), (401, None));
    assert!(wrong.text.contains("not the admin token"));

    let right = browser.sign_in(
        &format!(" {}\n", scene.about.admin_token),
        "/requests?status=5xx",
    );
    assert_eq!(
        (right.status, right.header("location")),
        (303, "/requests?status=5xx")
    );
    let (id, flags) = right.cookie("gw_session").unwrap();
    assert_eq!(
        (id.len(), flags.as_str()),
        (43, "Path=/; HttpOnly; SameSite=Strict; Max-Age=43200")
    );
    assert_eq!(browser.get("/").status, 200);
    assert_eq!(browser.get("/sign-in").header("location"), "/");

    // A redirect target on another host is replaced by the start page.
    let mut other = Browser::new(&scene);
    let form_token = other.get("/sign-in").form_token();
    let forged = [
        ("form_token", form_token.as_str()),
        ("next", "//evil.example/"),
        ("token", &scene.about.admin_token),
    ];
    assert_eq!(other.post("/sign-in", &forged).header("location"), "/");
    assert_ne!(other.cookies["gw_session"], id);

    let out = browser.press("/", "/sign-out");
    assert_eq!((out.status, out.header("location")), (303, "/sign-in"));
    browser.cookies.insert("gw_session".to_owned(), id);
    assert_eq!(browser.get("/").status, 303);
    assert_eq!(other.get("/").status, 200);
}

#[test]
fn sign_in_after_an_expired_session_returns_to_the_open_page() {
    let scene = Scene::service().agent().start();
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
    assert_eq!((told.status, told.header("location")), (303, sign_in));
    browser.extra = vec![("Referer", "https://evil.example//evil.example/".to_owned())];
    assert_eq!(
        browser.post("/theme", &[]).header("location"),
        "/sign-in?ended=yes"
    );
    browser.extra.clear();

    // An open form stays valid when another tab opens the form or signs in.
    let form = browser.get(sign_in);
    assert!(
        form.text
            .contains("Your session has ended. Nothing was changed.")
    );
    let other = browser.get("/sign-in");
    assert!(!other.text.contains("has ended"));
    let filled = form.form("/sign-in").set("token", &scene.about.admin_token);
    let signed_in = browser.send_form(&filled);
    assert_eq!(signed_in.header("location"), "/accounts/demo/settings");
    assert_eq!(
        browser
            .post("/sign-in", &[("next", "/tunnels")])
            .header("location"),
        "/tunnels"
    );
    // A cookie that the console did not issue is replaced.
    let mut browser = Browser::new(&scene);
    browser
        .cookies
        .insert("gw_sign_in".to_owned(), "x".to_owned());
    assert_ne!(browser.get("/sign-in").cookie("gw_sign_in").unwrap().0, "x");
}

#[test]
fn over_https_the_session_cookie_is_secure() {
    let scene = Scene::service().agent().start();
    let mut browser = Browser::new(&scene);
    browser.extra = vec![("X-Forwarded-Proto", "https".to_owned())];
    let right = browser.sign_in(&scene.about.admin_token, "/");
    let (_, flags) = right.cookie("__Host-gw_session").unwrap();
    assert_eq!(
        flags,
        "Path=/; HttpOnly; SameSite=Strict; Max-Age=43200; Secure"
    );
    assert_eq!(browser.get("/").status, 200);
}

#[test]
fn wrong_tokens_are_rate_limited_without_locking_out_the_administrator() {
    let scene = Scene::service().agent().start();
    let mut browser = Browser::new(&scene);
    let statuses: Vec<u16> = (0..11)
        .map(|_| browser.sign_in("guess", "/").status)
        .collect();
    assert_eq!((&statuses[..10], statuses[10]), ([401; 10].as_slice(), 429));
    let late = browser.sign_in("guess", "/");
    assert_eq!(
        (
            late.status,
            late.header("retry-after").parse::<u64>().unwrap() <= 7
        ),
        (429, true)
    );
    // The correct token is accepted from an address with many wrong guesses.
    assert_eq!(browser.sign_in(&scene.about.admin_token, "/").status, 303);
}

#[test]
fn forms_without_a_valid_token_or_from_another_origin_are_refused() {
    let scene = Scene::service().agent().start();
    let mut browser = Browser::signed_in(&scene);
    let form_token = browser.get("/accounts").form_token();
    let api = scene.api();
    let accounts = || api.list("/accounts").len();

    // Without the session's form token, with the token of another session, and with a foreign
    // origin.
    let other = Browser::signed_in(&scene).get("/accounts").form_token();
    for token in ["", "x", &other, &form_token[1..]] {
        assert_eq!(
            browser
                .post("/accounts", &[("form_token", token), ("id", "evil")])
                .status,
            403,
            "{token}"
        );
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
        assert_eq!(
            browser
                .post("/sign-in", &[("token", &scene.about.admin_token)])
                .status,
            403
        );
    }
    assert_eq!(accounts(), 1);

    // The console's own pages send these fields.
    let origin = scene.about.admin_url.clone();
    browser.extra = vec![
        ("Origin", origin),
        ("Sec-Fetch-Site", "same-origin".to_owned()),
    ];
    assert_eq!(
        browser
            .post("/accounts", &[("form_token", &form_token), ("id", "good")])
            .status,
        303
    );
    assert_eq!(accounts(), 2);
    // Scripts send the token in a header field.
    browser.extra.push(("X-Gw-Form-Token", form_token));
    assert_eq!(browser.post("/accounts", &[("id", "better")]).status, 303);
}

#[test]
fn edits_of_a_form_outlive_the_session() {
    let scene = Scene::service().agent().start();
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
        assert!(
            told.text.contains("Sign in") && !told.text.contains("<script>"),
            "{}",
            told.text
        );
        let sign_in = told.form("/sign-in");
        let kept = (sign_in.values("next"), sign_in.values("kept_action"));
        assert_eq!(kept, (vec![settings], vec![settings]));
        told = browser.send_form(&sign_in.set("token", admin_token));
    }
    assert_eq!(told.status, 200, "{}", told.text);
    assert!(
        told.text.contains("Your edits") && !told.text.contains("<script>"),
        "{}",
        told.text
    );
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
