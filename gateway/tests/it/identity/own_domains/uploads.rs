//! Domains with an uploaded certificate.

mod keys;

use rcgen::CertificateParams;
use time::{Duration, OffsetDateTime};

use super::setup::{Pair, Setup};
use super::{DOMAIN, OTHER};
use crate::support::acme_front::{Kind, Verdict, keep_pending};

/// Validity of a certificate that is due for renewal.
fn in_its_last_third(params: &mut CertificateParams) {
    let now = OffsetDateTime::now_utc();
    params.not_before = now - Duration::days(60);
    params.not_after = now + Duration::days(10);
}

#[test]
fn no_order_begins_after_an_upload_until_the_domain_is_added_again() {
    let Some(setup) = Setup::new() else {
        return;
    };
    setup.add(DOMAIN).unwrap();
    let pair = Pair::write(&setup.prepared, DOMAIN, in_its_last_third);
    setup.upload(DOMAIN, &pair);
    setup.lead_here(DOMAIN);
    assert_eq!(setup.check(DOMAIN)["status"], "active");
    // An upload ends an open order.
    setup.front.set(keep_pending);
    setup.lead_here(OTHER);
    setup.add(OTHER).unwrap();
    setup.front.await_different(Kind::Challenge, 1);
    let pair = Pair::write(&setup.prepared, OTHER, in_its_last_third);
    setup.upload(OTHER, &pair);
    setup.front.set(|_| Verdict::Forward);

    // The gateway begins and ends the order of a third domain meanwhile.
    setup.trust_authority();
    setup.serve("a.customer.test");
    assert!(setup.front.orders_of(DOMAIN).is_empty());
    assert_eq!(setup.front.orders_of(OTHER).len(), 1);
    assert_eq!(setup.front.requests(Kind::Certificate).len(), 1);
    for domain in [DOMAIN, OTHER] {
        let shown = setup.show(domain);
        assert_eq!(shown["certificate"]["source"], "uploaded", "{shown}");
        setup.remove(domain);
        setup.add(domain).unwrap();
        setup.await_certificate(domain);
    }
    assert_eq!(setup.front.orders_of(DOMAIN).len(), 1);
    assert_eq!(setup.front.orders_of(OTHER).len(), 2);
}
