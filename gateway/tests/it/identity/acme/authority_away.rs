//! An authority that is away for the whole last third of a certificate's lifetime.

use std::fs;
use std::process::Command;
use std::time::Instant;

use time::OffsetDateTime;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::{APEX, Connection, PATH, Prepared, RENEWED_WITHIN};
use crate::administration::console::browser::Browser;
use crate::support::acme_servers::pebble::Options;
use crate::support::doctor::{doctor_of, examine};
use crate::support::eventually;
use crate::support::processes::process::Served;

/// Lifetime of certificates: the renewal is due 2 to 3 seconds before the end of the last third.
const LIFETIME_SECONDS: u64 = 9;

/// Verdict and finding of `doctor` about the certificate.
fn doctor(prepared: &Prepared, served: &Served) -> (String, String) {
    let found = examine(&mut doctor_of(&prepared.path("gateway.toml"), served));
    let certificate = found.of("certificate");
    (certificate.verdict.clone(), certificate.found.clone())
}

/// Whether a caller that does not look at the certificate is answered.
fn serves(served: &Served) -> bool {
    let port = served.address.port();
    let status = Command::new("curl")
        .args(["--silent", "--insecure", "--output", "/dev/null"])
        .args(["--max-time", "5"])
        .args(["--resolve", &format!("{APEX}:{port}:127.0.0.1")])
        .arg(format!("https://{APEX}:{port}{PATH}"))
        .status()
        .unwrap();
    status.success()
}

/// When a certificate expires, in seconds since 1970.
fn end_of(certificate: &[u8]) -> i64 {
    let (_, certificate) = X509Certificate::from_der(certificate).unwrap();
    certificate.validity().not_after.timestamp()
}

#[test]
fn the_alarms_grow_while_the_authority_is_away_for_the_whole_last_third() {
    let short = |options: &mut Options| options.lifetime_seconds = LIFETIME_SECONDS;
    let Some(mut prepared) = Prepared::with(0, short, "") else {
        return;
    };
    let served = prepared.serve();
    prepared.await_certificate(&served, &[]);
    prepared.pebble.stop();
    let mut connection = Connection::open(&prepared, served.address).unwrap();
    let old = connection.certificate();
    let expiry = "gw_server_certificate_expiry_timestamp_seconds";
    assert_eq!(served.metrics().sum(expiry) as i64, end_of(&old));
    let failures = || served.metrics().sum("gw_certificate_order_failures");

    eventually("a failed renewal", || (failures() >= 1.0).then_some(()));
    let (verdict, found) = doctor(&prepared, &served);
    assert_ne!(verdict, "ok", "{found}");
    assert!(found.contains("the last order failed: "), "{found}");
    assert!(found.contains(&prepared.pebble.directory()), "{found}");
    eventually("the end of the certificate", || {
        assert_eq!(connection.request(), 200);
        (OffsetDateTime::now_utc().unix_timestamp() > end_of(&old)).then_some(())
    });
    eventually("another failed renewal", || {
        (failures() >= 2.0).then_some(())
    });
    assert_eq!(prepared.certificate(&served)["status"], "expired");
    let (verdict, found) = doctor(&prepared, &served);
    assert_eq!(verdict, "failed", "{found}");
    assert!(found.contains("expired on "), "{found}");
    let token = fs::read_to_string(prepared.path("data/admin.token")).unwrap();
    let mut browser = Browser::at(format!("http://{}", served.admin_address));
    assert_eq!(browser.sign_in(token.trim(), "/").status, 303);
    let overview = browser.get("/").text;
    for part in ["expired on ", "orders failed"] {
        assert!(overview.contains(part), "{part}: {overview}");
    }
    assert!(serves(&served), "the old certificate stays in use");
    assert_eq!(connection.request(), 200);

    prepared.pebble.start_again();
    let began = Instant::now();
    prepared.root();
    let renewed = eventually("a renewed certificate", || {
        Some(Connection::open(&prepared, served.address)?.certificate())
    });
    assert!(began.elapsed() < RENEWED_WITHIN, "{:?}", began.elapsed());
    assert!(end_of(&renewed) > end_of(&old));
    eventually("no failure any more", || (failures() == 0.0).then_some(()));
    assert_eq!(connection.request(), 200);
}
