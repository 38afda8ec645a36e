//! Ownership of names, with records in BIND.

use gw_acme::ownership::{Ownership, look_up};

use super::programs::usable;
use super::servers::named::Named;

const SERVICE: &str = "orders.eu1.delegated.test";
const TOKEN: &str = "gw-0123456789";

#[test]
fn records_in_bind_prove_domains() {
    if !usable(&["named"]) {
        return;
    }
    let many: String = (0..40)
        .map(|number| {
            format!("_gw-domain.many TXT \"another service wants this record, too: {number}\"\n")
        })
        .collect();
    let named = Named::start(&format!(
        "alias CNAME {SERVICE}.\nCHAIN CNAME alias\nother CNAME {SERVICE}.example.test.\n\
         circle CNAME round\nround CNAME circle\n\
         _gw-domain.text TXT \"gw-01234\" \"56789\"\n_gw-domain.text TXT \"v=1\"\n\
         _gw-domain.moved CNAME proofs\nproofs TXT {TOKEN}\n\
         _gw-domain.old TXT gw-0000000000\nempty A 127.0.0.1\n*.wild TXT {TOKEN}\n\
         {many}_gw-domain.many TXT {TOKEN}\n"
    ));
    let servers = [named.address];
    let asked = |host: &str| {
        look_up(
            &servers,
            &format!("{host}.example.test"),
            Some(SERVICE),
            TOKEN,
        )
    };
    for host in ["alias", "ALIAS", "chain"] {
        assert_eq!(asked(host).unwrap(), Ownership::Cname, "{host}");
    }
    // The answer for `many` is longer than a datagram.
    for host in ["text", "moved", "wild", "many"] {
        assert_eq!(asked(host).unwrap(), Ownership::Txt, "{host}");
    }
    for (host, found) in [
        (
            "other",
            "it leads to orders.eu1.delegated.test.example.test.",
        ),
        ("circle", "circle"),
        ("old", "it has \"gw-0000000000\""),
        ("empty", "there is no CNAME record"),
        ("absent", "it does not exist"),
    ] {
        let Ownership::NotProved(reason) = asked(host).unwrap() else {
            panic!("{host}");
        };
        assert!(reason.contains(found), "{host}: {reason}");
    }
    let error = look_up(&servers, "unreachable.zone.invalid2", Some(SERVICE), TOKEN).unwrap_err();
    assert!(error.message.contains("Server Failure"), "{error}");
}
