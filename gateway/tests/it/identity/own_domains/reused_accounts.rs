//! Domains whose records still lead to the hostname of a deleted account.

use serde_json::{Value, json};

use super::DOMAIN;
use super::setup::Setup;

/// Creates the service again to which the CNAME record of the domain leads.
fn claim(setup: &Setup) -> Value {
    setup.api().create_service("other", "api");
    setup.add_to(["other", "api"], DOMAIN).unwrap()
}

#[test]
fn a_cname_record_to_a_deleted_account_proves_nothing_for_its_successor() {
    let Some(setup) = Setup::new() else {
        return;
    };
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

    // The token of the deleted account proves nothing. That of the new account proves the domain.
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
