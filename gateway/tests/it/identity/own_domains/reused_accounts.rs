//! Domains whose records still lead to the hostname of a deleted account.

use serde_json::{Value, json};

use super::setup::Setup;
use super::{DOMAIN, PROGRAMS};
use crate::support::programs::usable;

/// Creates the service again to which the CNAME record of the domain leads.
fn claim(setup: &Setup) -> Value {
    setup.command(&["account", "create", "other"]).unwrap();
    setup
        .command(&["service", "create", "other", "api"])
        .unwrap();
    setup
        .command(&["domain", "add", "other", "api", DOMAIN])
        .unwrap()
}

#[test]
fn a_cname_record_to_a_deleted_account_proves_nothing_for_its_successor() {
    if !usable(&PROGRAMS) {
        return;
    }
    let setup = Setup::new();
    let alias = format!("add {DOMAIN} 1 CNAME other--api.eu1.gw.localhost");
    setup.named.update(&[&alias]);
    let first = claim(&setup);
    assert_eq!(first["status"], "active", "{first}");
    assert_eq!(first["cname_proves"], true);
    setup
        .command(&["account", "delete", "other", "--cascade", "--yes"])
        .unwrap();

    let second = claim(&setup);
    assert_eq!(second["status"], "pending", "{second}");
    assert_eq!(second["cname_proves"], false);
    let finding = second["finding"].as_str().unwrap();
    assert!(
        finding.contains("an earlier account had the same id"),
        "{finding}"
    );
    let (name, token) = (&second["txt"]["name"], &second["txt"]["value"]);
    assert_ne!(token, &first["txt"]["value"]);
    let shown = format!("`{}. TXT {token}`", name.as_str().unwrap());
    assert!(finding.contains(&shown), "{finding}");

    // The token of the deleted account counts no more, that of the new one does.
    let check = || {
        let checked = setup.command(&["domain", "check", "other", DOMAIN]);
        checked.unwrap()["status"].clone()
    };
    let set = |value: &Value| {
        let name = name.as_str().unwrap();
        let add = format!("add {name} 1 TXT {value}");
        setup.named.update(&[&format!("delete {name} TXT"), &add]);
    };
    set(&first["txt"]["value"]);
    assert_eq!(check(), json!("pending"));
    set(token);
    assert_eq!(check(), json!("active"));
}
