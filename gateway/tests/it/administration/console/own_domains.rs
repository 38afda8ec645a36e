//! Own domains in the console.

use gw_bed::dns::{self, Answer};
use rcgen::{CertificateParams, KeyPair};

use super::browser::Browser;
use crate::administration::assert_says;
use crate::support::forms::PageForm;
use crate::support::processes::prepared::Prepared;

const SERVICE: &str = "/accounts/demo/services/echo";
const NAME: &str = "api.customer.test";
const DOMAIN: &str = "/accounts/demo/domains/api.customer.test";

#[test]
fn a_domain_is_added_checked_given_a_certificate_and_removed_with_forms() {
    let prepared = Prepared::new();
    let config = prepared.config();
    let dns = dns::serve(|_, _| Answer::Error(dns::NAME_ERROR));
    let served = prepared.serve_with(&format!("{config}dns_servers = [\"{dns}\"]\n"));
    let token = std::fs::read_to_string(prepared.path("data/admin.token")).unwrap();
    let mut browser = Browser::at(format!("http://{}", served.admin_address));
    assert_eq!(browser.sign_in(token.trim(), "/").leads_to(), "/");
    let add = format!("{SERVICE}/domains");

    wrong_names_are_refused(&mut browser, &add);
    let forged = browser.post(&add, &[("form_token", "x"), ("name", NAME)]);
    assert_eq!(forged.status, 403);
    let named = |form: PageForm| form.set("name", NAME);
    let made = browser.fill(SERVICE, &add, named);
    assert_eq!(made.leads_to(), format!("{DOMAIN}?note=created"));
    let again = browser.fill(SERVICE, &add, named);
    assert!(again.header("location").ends_with("?note=there"));

    let record = format!("{NAME} CNAME demo--echo.eu1.gw.localhost");
    let service = browser.get(SERVICE).text;
    assert_says(&service, &[DOMAIN, &record, "waiting for DNS"]);
    let page = browser.get(DOMAIN);
    // Before it is served, nothing has failed.
    assert!(!page.text.contains("no authority issues"), "{}", page.text);
    assert_eq!(
        page.between("aria-labelledby=\"cname-title\">", "<"),
        record
    );
    let txt = page.between("aria-labelledby=\"txt-title\">", "<");
    assert!(txt.contains(" TXT gw-"), "{txt}");
    assert_says(&page.text, &["DNS does not show"]);
    let checked = browser.press(DOMAIN, &format!("{DOMAIN}/check"));
    assert_eq!(checked.leads_to(), format!("{DOMAIN}?note=checked"));

    let mut stranger = Browser::at(format!("http://{}", served.admin_address));
    assert_eq!(stranger.get(DOMAIN).status, 303);
    // A form without a session is kept for the time after the sign-in, but not a private key.
    let fields = [("chain", "x"), ("private_key", "not-shown")];
    let kept = stranger.post(&format!("{DOMAIN}/certificate"), &fields);
    assert!(kept.status == 303 && !kept.text.contains("not-shown"));

    let renewed = browser.press(DOMAIN, &format!("{DOMAIN}/certificate/renew"));
    assert_eq!(renewed.status, 422);
    assert_says(&renewed.text, &["no authority issues its certificate"]);
    certificates_are_uploaded(&mut browser);
    quota_is_shown(&mut browser);

    the_domain_is_removed(&mut browser);
}

fn wrong_names_are_refused(browser: &mut Browser, add: &str) {
    for (name, error) in [
        ("NO WAY", "at least two labels"),
        ("<b>.test", "at least two labels"),
        ("shop.eu1.gw.localhost", "is a name of the region"),
    ] {
        let wrong = browser.fill(SERVICE, add, |form| form.set("name", name));
        let shown = wrong.error("name");
        assert!(shown.contains(error), "{shown}");
        assert!(!wrong.text.contains("<b>.test"), "{}", wrong.text);
        assert_eq!(wrong.form(add).values("name"), [name]);
        // The settings of the service are shown as they are stored.
        assert_eq!(wrong.form(SERVICE).values("burst"), ["1000000"]);
    }
}

fn the_domain_is_removed(browser: &mut Browser) {
    let delete = format!("{DOMAIN}/delete");
    let unsure = browser.fill(DOMAIN, &delete, |form| form.set("confirm", "api"));
    assert!(unsure.error("confirm").contains(NAME), "{}", unsure.text);
    let gone = browser.fill(DOMAIN, &delete, |form| form.set("confirm", NAME));
    assert_eq!(gone.leads_to(), format!("{SERVICE}?note=deleted"));
    assert!(!browser.get(SERVICE).text.contains(NAME));
    for path in [DOMAIN, "/accounts/demo/domains/none.test"] {
        assert_eq!(browser.get(path).status, 404);
    }
}

fn certificates_are_uploaded(browser: &mut Browser) {
    let upload = format!("{DOMAIN}/certificate");
    let pair = |name: &str, days: i64| {
        let mut parameters = CertificateParams::new([name.to_owned()]).unwrap();
        parameters.not_after = time::OffsetDateTime::now_utc() + time::Duration::days(days);
        let key = KeyPair::generate().unwrap();
        let certificate = parameters.self_signed(&key).unwrap();
        (certificate.pem(), key.serialize_pem())
    };
    let (other, other_key) = pair("shop.customer.test", 90);
    let wrong = browser.fill(DOMAIN, &upload, |form| {
        form.set("chain", &other).set("private_key", &other_key)
    });
    let error = wrong.error("chain");
    assert!(error.contains("and not for api.customer.test"), "{error}");
    let typed = wrong.form(&upload);
    assert_eq!(typed.values("chain"), [other.as_str()]);
    assert!(!wrong.text.contains("PRIVATE KEY"), "{}", wrong.text);

    let (chain, key) = pair(NAME, 3);
    let uploaded = browser.send_form(&typed.set("chain", &chain).set("private_key", &key));
    assert_eq!(uploaded.leads_to(), format!("{DOMAIN}?note=uploaded"));
    let page = browser.get(DOMAIN).text;
    assert_says(&page, &[">uploaded<"]);
    assert!(!page.contains("PRIVATE KEY"), "{page}");
    // It ends within a week.
    for address in ["/", SERVICE] {
        let page = browser.get(address).text;
        let warning = format!("the certificate of the own domain {NAME} ends at ");
        assert!(page.contains(&warning), "{page}");
    }
}

fn quota_is_shown(browser: &mut Browser) {
    let settings = "/accounts/demo/settings";
    let saved = browser.fill(settings, settings, |form| form.set("domains_max", "1"));
    assert_eq!(saved.status, 303);
    let full = browser.fill(SERVICE, &format!("{SERVICE}/domains"), |form| {
        form.set("name", "shop.customer.test")
    });
    let says = "account demo has 1 domains, and may have 1";
    assert_says(&full.error("name"), &[says]);
}
