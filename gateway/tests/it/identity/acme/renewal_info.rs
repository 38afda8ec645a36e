//! Renewal information (ARI, RFC 9773) of an authority, which Pebble 2.4 does not have: the front
//! adds it.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use serde_json::{Value, json};
use time::OffsetDateTime;
use x509_parser::extensions::ParsedExtension;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::Prepared;
use crate::support::acme_front::{Answer, Front, Kind, Request, Verdict};
use crate::support::eventually;

const DAY: i64 = 24 * 60 * 60;
/// Seconds after which the gateway may ask again.
const ASK_AGAIN: &str = "21600";

/// The identifier of a certificate (RFC 9773 §4.1).
fn id_of(certificate: &[u8]) -> String {
    let (_, certificate) = X509Certificate::from_der(certificate).unwrap();
    let extensions = certificate.extensions().iter();
    let key = extensions
        .filter_map(|extension| match extension.parsed_extension() {
            ParsedExtension::AuthorityKeyIdentifier(found) => found.key_identifier.clone(),
            _ => None,
        })
        .next()
        .unwrap();
    let [key, serial] =
        [key.0, certificate.raw_serial()].map(|bytes| BASE64_URL_SAFE_NO_PAD.encode(bytes));
    format!("{key}.{serial}")
}

/// A window that begins and ends these days from now.
fn window(start: i64, end: i64) -> Value {
    let now = OffsetDateTime::now_utc().unix_timestamp();
    let at = |days: i64| {
        let seconds = u64::try_from(now + days * DAY).unwrap();
        humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(seconds)).to_string()
    };
    json!({ "suggestedWindow": { "start": at(start), "end": at(end) } })
}

/// Offers renewal information: for the first certificate that is asked about, a window that has
/// passed.
fn offer(front: &Front) {
    let url = front.renewal_info();
    let first = Arc::<Mutex<Option<String>>>::default();
    front.set(move |request: &Request| match request.kind {
        Kind::Directory => {
            let url = url.clone();
            Verdict::Change(Box::new(move |directory| {
                directory["renewalInfo"] = url.into();
            }))
        }
        Kind::RenewalInfo => {
            let mut first = first.lock().unwrap();
            let first = first.get_or_insert_with(|| request.path.clone());
            let info = match *first == request.path {
                true => window(-2, -1),
                false => window(50, 52),
            };
            Verdict::Answer(Answer::json(&info).with("Retry-After", ASK_AGAIN))
        }
        // An authority repeats the member in its answer (RFC 9773 §5).
        Kind::NewOrder => {
            let replaced = request.payload.get("replaces").cloned();
            Verdict::Change(Box::new(move |order| {
                if let Some(replaced) = replaced {
                    order["replaces"] = replaced;
                }
            }))
        }
        _ => Verdict::Forward,
    });
}

#[test]
fn a_window_that_has_passed_renews_a_fresh_certificate_once() {
    let Some((prepared, front)) = Prepared::with_front() else {
        return;
    };
    offer(&front);
    let served = prepared.serve();
    let first = prepared.await_certificate(&served, &[]);
    // The first certificate may be in use for a moment only.
    let asked = |count: usize| {
        front.await_different(Kind::RenewalInfo, count);
        let asked = front.requests(Kind::RenewalInfo);
        let mut known = BTreeSet::new();
        let mut ids: Vec<String> = asked
            .iter()
            .map(|request| request.path.replace("/renewalInfo/", ""))
            .collect();
        ids.retain(|id| known.insert(id.clone()));
        ids
    };
    let ids = asked(2);
    let second = eventually("the renewed certificate", || {
        let now = prepared.await_certificate(&served, &[]);
        (id_of(&now) == ids[1]).then_some(now)
    });
    assert!(ids.contains(&id_of(&first)), "{ids:?}");
    let orders = front.requests(Kind::NewOrder);
    let replaced: Vec<&Value> = orders
        .iter()
        .map(|order| &order.payload["replaces"])
        .collect();
    assert_eq!(replaced, [&Value::Null, &json!(ids[0])]);

    // The window of the second certificate lies ahead: the next order is the one that is asked for.
    prepared.await_valid(&served);
    prepared.command(&served, "renew");
    prepared.await_certificate(&served, &second);
    asked(3);
    let orders = front.requests(Kind::NewOrder);
    assert_eq!(orders.len(), 3, "{orders:?}");
    assert_eq!(orders[2].payload["replaces"], json!(ids[1]));
    assert_eq!(prepared.certificate(&served)["failures"], 0);
    assert_eq!(prepared.pebble.count("orders in the db"), 3);
}
