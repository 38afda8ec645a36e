//! Tests of plans, with documents as text and views of the API as JSON.

use serde_json::json;

use super::super::parse::parse;
use super::*;

const AGENT: &str = "ag_0123456789abcdefghij";

/// A gateway with the account `acme`, its service `api`, key `ci` and agent `edge`, which `git`
/// manages.
fn gateway() -> GatewayObjects {
    let mut gateway = GatewayObjects::default();
    for (kind, view) in [
        (
            ObjectKind::Account,
            json!({ "id": "acme", "capture_allowed": false, "managed_by": "git" }),
        ),
        (
            ObjectKind::Service,
            json!({
                "id": "api",
                "account": "acme",
                "burst": 5,
                "retries": true,
                "managed_by": "git",
            }),
        ),
        (
            ObjectKind::Key,
            json!({
                "key_id": "0123456789abcdef",
                "name": "ci",
                "allowed_services": ["api"],
                "enabled": true,
                "managed_by": "git",
            }),
        ),
        (
            ObjectKind::Agent,
            json!({
                "agent_id": AGENT,
                "name": "edge",
                "services": ["api"],
                "status": "approved",
                "standby": false,
            }),
        ),
    ] {
        gateway.insert(kind, "acme", view.as_object().unwrap().clone());
    }
    gateway
}

fn planned(text: &str, gateway: &GatewayObjects, rules: Rules) -> (Plan, Vec<String>) {
    let mut mistakes = Vec::new();
    let document = parse(&"a.toml".into(), text, None, &mut mistakes);
    let mut documents = Declarations {
        objects: document.objects,
        managers: document.managed_by.into_iter().collect(),
    };
    documents
        .objects
        .sort_by(|one, other| one.id.cmp(&other.id));
    let plan = plan(&documents, gateway, rules, &mut mistakes);
    (plan, mistakes.iter().map(Mistake::to_string).collect())
}

fn requests(plan: &Plan) -> Vec<String> {
    let change = |change: &PlannedChange| {
        let body = Value::Object(change.body.clone());
        format!("{:?} {} {body}", change.operation, change.path)
    };
    plan.changes.iter().map(change).collect()
}

const ALL: &str = "managed_by = \"git\"\n[[key]]\naccount = \"acme\"\nname = \"ci\"\n\
                   allowed_services = [\"api\"]\n[[service]]\naccount = \"acme\"\nid = \"api\"\n\
                   burst = 5\n[[account]]\nid = \"acme\"\n[[agent]]\naccount = \"acme\"\n\
                   name = \"edge\"\nstandby = false\n";

#[test]
fn what_is_as_declared_stays() {
    for rules in [
        Rules::default(),
        Rules {
            prune: true,
            take_over: true,
        },
    ] {
        let (plan, mistakes) = planned(ALL, &gateway(), rules);
        assert_eq!((requests(&plan), mistakes), (vec![], vec![]));
        assert_eq!((plan.unchanged, plan.absent.len()), (4, 0));
    }
}

#[test]
fn objects_are_created_in_order_and_only_changed_settings_are_sent() {
    let text = ALL.replace("burst = 5", "burst = 6\nretries = true")
        + "standby = true\n[[service]]\naccount = \"acme\"\nid = \"b\"\nenabled = false\n\
           [[account]]\nid = \"new\"\n[[key]]\naccount = \"new\"\nname = \"k\"\n\
           allowed_services = []\n";
    let text = text.replace("standby = false\nstandby", "standby");
    let (plan, mistakes) = planned(&text, &gateway(), Rules::default());
    assert_eq!(mistakes, [""; 0]);
    let expected = [
        r#"Create /accounts {"id":"new","managed_by":"git"}"#,
        r#"Change /accounts/acme/services/api {"burst":6}"#,
        r#"Create /accounts/acme/services {"enabled":false,"id":"b","managed_by":"git"}"#,
        concat!(
            "Create /accounts/new/service-keys ",
            r#"{"allowed_services":[],"managed_by":"git","name":"k"}"#
        ),
        &format!(r#"Change /accounts/acme/agents/{AGENT} {{"standby":true}}"#),
    ];
    assert_eq!(requests(&plan), expected);
    let burst = ChangedField {
        name: "burst",
        old: Some(5.into()),
        new: Some(6.into()),
    };
    assert_eq!(plan.changes[1].fields, [burst]);
    assert_eq!((plan.counts(), plan.unchanged), ([3, 2, 0], 2));
}

#[test]
fn only_objects_with_the_label_are_pruned_and_in_reverse_order() {
    let prune = Rules {
        prune: true,
        take_over: false,
    };
    let mut gateway = gateway();
    for (id, label) in [("b", "git"), ("c", "other"), ("d", "")] {
        let mut view = json!({ "id": id, "account": "acme" });
        if !label.is_empty() {
            view["managed_by"] = label.into();
        }
        let view = view.as_object().unwrap().clone();
        gateway.insert(ObjectKind::Service, "acme", view);
    }
    let kept = "managed_by = \"git\"\n[[account]]\nid = \"acme\"\n";
    let (plan, mistakes) = planned(kept, &gateway, prune);
    assert_eq!(mistakes, [""; 0]);
    let expected = [
        "Delete /accounts/acme/service-keys/0123456789abcdef {}",
        "Delete /accounts/acme/services/b {}",
        "Delete /accounts/acme/services/api {}",
    ];
    assert_eq!(requests(&plan), expected);

    let (_, mistakes) = planned("managed_by = \"git\"\n", &gateway, prune);
    let expected = "account acme cannot be deleted, although no document declares it: it has \
                    service acme/c, service acme/d, agent acme/ag_0123456789abcdefghij, which \
                    these documents do not manage; ";
    assert!(mistakes[0].starts_with(expected), "{mistakes:?}");

    let used =
        format!("{kept}[[key]]\naccount = \"acme\"\nname = \"ci\"\nallowed_services = [\"api\"]\n");
    let (_, mistakes) = planned(&used, &gateway, prune);
    let expected = "a.toml:4: key acme/ci: allowed_services: --prune deletes service api, which no \
                    document declares";
    assert_eq!(mistakes, [expected]);
    let (plan, _) = planned(&used, &gateway, Rules::default());
    assert_eq!(requests(&plan), [""; 0]);
}

#[test]
fn an_object_of_another_label_is_only_changed_to_take_it_over() {
    let service = "[[service]]\naccount = \"acme\"\nid = \"api\"\nburst = 5\n";
    let other = format!("managed_by = \"ops\"\n{service}");
    let (plan, mistakes) = planned(&other, &gateway(), Rules::default());
    let expected = "a.toml:2: service acme/api: managed by git, not by ops; leave it to git, or \
                    take it over with --take-over";
    assert_eq!(mistakes, [expected]);
    assert!(plan.changes.is_empty());
    let (_, mistakes) = planned(service, &gateway(), Rules::default());
    assert!(
        mistakes[0].contains("--managed-by git if these"),
        "{mistakes:?}"
    );

    let take_over = Rules {
        prune: false,
        take_over: true,
    };
    for (text, body) in [
        (other.as_str(), r#"{"managed_by":"ops"}"#),
        (service, r#"{"managed_by":""}"#),
    ] {
        let (plan, mistakes) = planned(text, &gateway(), take_over);
        assert_eq!(mistakes, [""; 0]);
        assert_eq!(
            requests(&plan),
            [format!("Change /accounts/acme/services/api {body}")]
        );
    }
}

#[test]
fn an_object_without_a_label_gets_one() {
    let mut gateway = GatewayObjects::default();
    let view = json!({ "id": "acme", "capture_allowed": false });
    gateway.insert(ObjectKind::Account, "", view.as_object().unwrap().clone());
    let text = "managed_by = \"git\"\n[[account]]\nid = \"acme\"\n";
    let (plan, mistakes) = planned(text, &gateway, Rules::default());
    assert_eq!(mistakes, [""; 0]);
    assert_eq!(
        requests(&plan),
        [r#"Change /accounts/acme {"managed_by":"git"}"#]
    );
}

#[test]
fn names_that_do_not_exist_are_reported_together() {
    let text = "[[service]]\naccount = \"acmee\"\nid = \"api\"\n[[service]]\naccount = \"other\"\n\
                id = \"api\"\n[[key]]\naccount = \"acme\"\nname = \"new\"\n\
                allowed_services = [\"apii\"]\n[[credential]]\naccount = \"acme\"\n\
                name = \"new\"\n";
    let (_, mut mistakes) = planned(text, &gateway(), Rules::default());
    mistakes.sort();
    let expected = [
        "a.toml:11: credential acme/new: it is new, and needs more keys: missing field \
         `allowed_services`",
        "a.toml:1: service acmee/api: there is no account acmee; did you mean `acme`?",
        "a.toml:4: service other/api: there is no account other; declare it: [[account]] with this \
         id",
        "a.toml:7: key acme/new: allowed_services: account acme has no service apii; did you mean \
         `api`?",
    ];
    assert_eq!(mistakes, expected);
}

#[test]
fn agents_are_found_by_name_or_id() {
    let mut gateway = gateway();
    let by = |key: &str, value: &str| {
        format!("[[agent]]\naccount = \"acme\"\n{key} = \"{value}\"\nstandby = true\n")
    };
    let request = format!(r#"Change /accounts/acme/agents/{AGENT} {{"standby":true}}"#);
    for text in [by("name", "edge"), by("id", AGENT)] {
        let (plan, mistakes) = planned(&text, &gateway, Rules::default());
        assert_eq!((requests(&plan), mistakes), (vec![request.clone()], vec![]));
    }
    let (plan, mistakes) = planned(&by("name", "egde"), &gateway, Rules::default());
    assert_eq!((requests(&plan), mistakes), (vec![], vec![]));
    assert_eq!(plan.absent[0].2, "; did you mean the agent edge?");

    let both = by("name", "edge") + &by("id", AGENT);
    let (_, mistakes) = planned(&both, &gateway, Rules::default());
    assert!(mistakes[0].contains("is there twice"), "{mistakes:?}");

    let second =
        json!({ "agent_id": "ag_1123456789abcdefghij", "name": "edge", "status": "pending" });
    let second = second.as_object().unwrap().clone();
    gateway.insert(ObjectKind::Agent, "acme", second.clone());
    let (_, mistakes) = planned(&by("name", "edge"), &gateway, Rules::default());
    assert!(
        mistakes[0].contains("2 agents have this name"),
        "{mistakes:?}"
    );
    let mut revoked = second;
    revoked.insert("status".into(), "revoked".into());
    gateway.insert(ObjectKind::Agent, "acme", revoked);
    let (plan, _) = planned(&by("name", "edge"), &gateway, Rules::default());
    assert_eq!(requests(&plan), [request]);
}

const DOMAIN: &str = "api.customer.example";

fn with_domain(label: Option<&str>) -> GatewayObjects {
    let mut gateway = gateway();
    for service in ["web", "old"] {
        let view = json!({ "id": service, "account": "acme" });
        gateway.insert(
            ObjectKind::Service,
            "acme",
            view.as_object().unwrap().clone(),
        );
    }
    let view = json!({
        "name": DOMAIN,
        "account": "acme",
        "service": "api",
        "status": "active",
        "managed_by": label,
    });
    let view = view.as_object().unwrap().clone();
    gateway.insert(ObjectKind::Domain, "acme", view);
    gateway
}

fn domain(name: &str, service: &str) -> String {
    format!("[[domain]]\naccount = \"acme\"\nname = \"{name}\"\nservice = \"{service}\"\n")
}

#[test]
fn a_domain_is_added_to_its_service_and_moves_by_an_add_to_another() {
    let git = |rest: String| format!("managed_by = \"git\"\n{rest}");
    let new = git(domain("shop.customer.example", "web"));
    let (plan, mistakes) = planned(&new, &gateway_of_git(), Rules::default());
    assert_eq!(mistakes, [""; 0]);
    let expected = concat!(
        "Create /accounts/acme/services/web/domains ",
        r#"{"managed_by":"git","name":"shop.customer.example"}"#
    );
    assert_eq!(requests(&plan), [expected]);
    assert_eq!(plan.changes[0].fields[0].name, "service");

    let (plan, mistakes) = planned(
        &git(domain(DOMAIN, "web")),
        &gateway_of_git(),
        Rules::default(),
    );
    assert_eq!(mistakes, [""; 0]);
    let expected = format!(
        r#"Change /accounts/acme/services/web/domains {{"managed_by":"git","name":"{DOMAIN}"}}"#
    );
    assert_eq!(requests(&plan), [expected]);
    assert_eq!(plan.changes[0].method, Method::POST);
    let moved = ChangedField {
        name: "service",
        old: Some("api".into()),
        new: Some("web".into()),
    };
    assert_eq!(plan.changes[0].fields, [moved]);

    let same = git(domain(DOMAIN, "api"));
    let (plan, _) = planned(&same, &gateway_of_git(), Rules::default());
    assert_eq!((requests(&plan), plan.unchanged), (vec![], 1));
    let (plan, _) = planned(&same, &with_domain(None), Rules::default());
    let expected = format!(r#"Change /accounts/acme/domains/{DOMAIN} {{"managed_by":"git"}}"#);
    assert_eq!(requests(&plan), [expected]);
    assert_eq!(plan.changes[0].method, Method::PATCH);
}

fn gateway_of_git() -> GatewayObjects {
    with_domain(Some("git"))
}

#[test]
fn a_domain_that_is_no_longer_declared_is_pruned_unless_it_moves_to_another_account() {
    let prune = Rules {
        prune: true,
        take_over: false,
    };
    let expected = format!("Delete /accounts/acme/domains/{DOMAIN} {{}}");
    let (plan, mistakes) = planned(ALL, &gateway_of_git(), prune);
    assert_eq!((requests(&plan), mistakes), (vec![expected], vec![]));
    for label in [None, Some("ops")] {
        let (plan, _) = planned(ALL, &with_domain(label), prune);
        assert_eq!(requests(&plan), [""; 0]);
    }
    let beta = "[[account]]\nid = \"beta\"\n[[service]]\naccount = \"beta\"\nid = \"web\"\n";
    let moved = domain(DOMAIN, "web").replace("acme", "beta");
    let (plan, mistakes) = planned(&format!("{ALL}{beta}{moved}"), &gateway_of_git(), prune);
    assert_eq!(mistakes, [""; 0]);
    let last = requests(&plan).pop().unwrap();
    assert!(
        last.starts_with("Create /accounts/beta/services/web/domains "),
        "{last}"
    );
}

#[test]
fn a_domain_without_its_service_is_reported() {
    let unknown = domain("shop.customer.example", "wbe");
    let nowhere = unknown.replace("service = \"wbe\"\n", "");
    for (text, expected) in [
        (
            unknown,
            "a.toml:1: domain acme/shop.customer.example: service: account acme has no service \
             wbe; did you mean `web`?",
        ),
        (
            nowhere,
            "a.toml:1: domain acme/shop.customer.example: it is new, and needs more keys: missing \
             field `service`",
        ),
    ] {
        let (_, mistakes) = planned(&text, &with_domain(None), Rules::default());
        assert_eq!(mistakes, [expected]);
    }
}
