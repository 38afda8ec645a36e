//! Own domains in documents.

use super::{Gateway, assert_says};
use gw_bed::dns::{self, Answer};

const SERVICES: &str = "managed_by = \"git\"\n[[account]]\nid = \"acme\"\ndomains_max = 2\n\
                        [[service]]\naccount = \"acme\"\nid = \"api\"\n[[service]]\n\
                        account = \"acme\"\nid = \"web\"\n";

fn domain(service: &str) -> String {
    format!(
        "[[domain]]\naccount = \"acme\"\nname = \"api.customer.test\"\nservice = \"{service}\"\n"
    )
}

#[test]
fn a_domain_is_added_labelled_and_removed_and_moves_only_with_a_proof() {
    let dns = dns::serve(|_, _| Answer::Error(dns::NAME_ERROR));
    let gateway = Gateway::with(&format!("dns_servers = [\"{dns}\"]\n"));
    gateway.write("services.toml", SERVICES);
    gateway.write("domains.toml", &domain("api"));
    let both = ["apply", "-f", "services.toml", "-f", "domains.toml"];
    let out = gateway.succeed(&both);
    let expected =
        "+ domain acme/api.customer.test (domains.toml:1)\n    service: \"api\"\n4 to create, ";
    assert!(out.contains(expected), "{out}");
    assert_eq!(gateway.succeed(&both), "No difference in 4 objects.\n");
    let (action, target, detail) = gateway.audit(1).remove(0);
    assert_eq!((&*action, &*target), ("domain.add", "api.customer.test"));
    assert_eq!(detail["applied"]["file"], "domains.toml");

    let label = ["apply", "-f", "domains.toml", "--managed-by", "git"];
    let out = gateway.succeed(&label);
    assert_says(&out, &["    managed_by: none → \"git\"\n"]);
    assert_eq!(gateway.audit(1)[0].0, "domain.change");
    let exported = gateway.export();
    let labelled = format!("{}managed_by = \"git\"\n", domain("api"));
    assert_says(&exported, &[&labelled]);
    gateway.write("all.toml", &exported);
    let out = gateway.apply("-f all.toml").done();
    assert_eq!(out, "No difference in 4 objects.\n");

    gateway.write("domains.toml", &domain("web"));
    let refused = gateway.run(&label);
    assert_says(&refused.out, &["    service: \"api\" → \"web\"\n"]);
    refused.assert_failed(1, &["another service has it, so a proof is needed"]);
    gateway.write("domains.toml", &domain("wbe"));
    let unknown = "account acme has no service wbe; did you mean `web`?";
    gateway.run(&label).assert_failed(2, &[unknown]);
    let beta = domain("web").replace("acme", "beta");
    gateway.write("domains.toml", &format!("{}{beta}", domain("web")));
    let refused = gateway.run(&["diff", "-f", "domains.toml"]);
    let expected = "domains.toml:5: domain beta/api.customer.test is also declared as domain \
                    acme/api.customer.test, at domains.toml:1; leave it to one account";
    refused.assert_failed(2, &[expected]);

    let out = gateway.apply("-f services.toml --prune --yes").done();
    let removed = "- domain acme/api.customer.test\n";
    assert!(out.starts_with(removed), "{out}");
    assert!(!gateway.export().contains("[[domain]]"));
}
