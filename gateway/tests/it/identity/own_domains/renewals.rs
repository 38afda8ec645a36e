//! Certificates of own domains that an administrator orders.

use serde_json::Value;

use super::DOMAIN;
use super::setup::{Pair, Setup};
use crate::support::eventually;

impl Setup {
    fn renew(&self) -> Result<Value, String> {
        self.command(&["certificate", "renew", "demo", DOMAIN])
    }

    /// Waits until the ordered certificate is there.
    fn await_renewal(&self, before: &Value) -> Value {
        eventually("the renewed certificate", || {
            let shown = self.show(DOMAIN);
            let is_there = shown.get("renewal_requested").is_none();
            (is_there && shown["certificate"] != *before).then(|| shown["certificate"].clone())
        })
    }
}

#[test]
fn a_certificate_is_renewed_on_request_also_in_place_of_an_uploaded_one() {
    let Some(setup) = Setup::new() else {
        return;
    };
    let unknown = setup.renew().unwrap_err();
    assert!(unknown.contains("domain list demo"), "{unknown}");
    setup.add(DOMAIN).unwrap();
    let refused = setup.renew().unwrap_err();
    assert!(refused.contains("DNS does not prove it"), "{refused}");
    setup.serve(DOMAIN);
    let config = setup.caller(&[b"http/1.1"]);
    let mut caller = setup.connect(&config, DOMAIN).unwrap();

    let first = setup.show(DOMAIN)["certificate"].clone();
    let orders = setup.pebble.count("orders in the db");
    let asked = setup.renew().unwrap();
    assert!(asked["renewal_requested"].is_string(), "{asked}");
    let second = setup.await_renewal(&first);
    assert_eq!(setup.pebble.count("orders in the db"), orders + 1);
    assert_eq!(setup.ask(&mut caller, DOMAIN), 200);

    setup.upload(DOMAIN, &Pair::write(&setup.prepared, DOMAIN, |_| {}));
    setup.trust_authority();
    let uploaded = setup.show(DOMAIN)["certificate"].clone();
    setup.renew().unwrap();
    let third = setup.await_renewal(&uploaded);
    assert_eq!(third["source"], "acme");
    assert_ne!(third, second);
    setup.await_certificate(DOMAIN);
    assert_eq!(setup.ask(&mut caller, DOMAIN), 200);
}
