//! `apply` stops at the first change that is refused, and says what is made.

use serde_json::{Value, json};

use super::{CREATED_AT, FakeApi, account, administer, assert_escaped, json_of, page};
use super::{service, succeed};

const DOCUMENT: &str = "[[account]]\nid = \"acme\"\n[[service]]\naccount = \"acme\"\nid = \"api\"\n\
                        [[key]]\naccount = \"acme\"\nname = \"ci\"\nallowed_services = [\"api\"]\n";

fn answers() -> Vec<(u16, Value)> {
    let problem = json!({ "title": "T", "detail": "the disk is full", "status": 507 });
    vec![(200, page(&[])), (201, account("acme")), (507, problem)]
}

#[test]
fn an_export_reads_every_list() {
    let secret = |id: &str| {
        json!({
            id: "x",
            "account": "acme",
            "name": "ci",
            "allowed_services": ["api"],
            "enabled": true,
            "created_at": CREATED_AT,
        })
    };
    let agent = json!({
        "agent_id": "ag_1",
        "name": "edge",
        "services": ["api"],
        "status": "approved",
        "standby": false,
    });
    let domain = json!({ "name": "api.customer.example", "service": "api", "status": "pending" });
    let lists = [
        account("acme"),
        service(),
        domain,
        secret("client_id"),
        secret("key_id"),
        agent,
    ];
    let answers = lists.map(|item| (200, page(&[item])));
    let (asked, out) = succeed("export", answers.to_vec());
    let collections = [
        "services",
        "domains",
        "credentials",
        "service-keys",
        "agents",
    ];
    let of_account = |name| format!("GET /api/v1/accounts/acme/{name}?limit=500");
    let mut expected = vec!["GET /api/v1/accounts?limit=500".to_owned()];
    expected.extend(collections.map(of_account));
    assert_eq!(asked, expected);
    for line in [
        "[[account]]",
        "[[service]]",
        "[[domain]]",
        "service = \"api\"",
        "[[credential]]",
        "[[key]]",
        "[[agent]]",
        "affinity = \"cookie\"",
        "managed_by = \"git\"",
        "standby = false",
    ] {
        assert!(out.lines().any(|printed| printed == line), "{line}\n{out}");
    }
    let (_, out) = succeed("export --json", answers.to_vec());
    assert_eq!(json_of(&out)["key"][0]["allowed_services"], json!(["api"]));
}

#[test]
fn an_application_stops_at_the_first_failure_and_says_what_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.toml");
    std::fs::write(&file, DOCUMENT).unwrap();
    let line = format!("apply --print-secrets --revision 1 -f {}", file.display());
    assert_escaped(&line, &answers());
    let api = FakeApi::new(answers());
    let ended = administer(&api, &line);
    assert_eq!(ended.code, 1);
    let counts = "3 to create, 0 to change, 0 to delete, 0 unchanged.\n";
    assert!(ended.out.ends_with(counts), "{ended:?}");
    let expected = "gw-gateway: service acme/api: the disk is full; the other changes are not \
                    made, and applying again goes on with them:\n  made: create account acme\n  \
                    not made: create service acme/api\n  not made: create key acme/ci\n";
    assert_eq!(ended.err, expected);
    let asked = [
        "GET /api/v1/accounts?limit=500",
        r#"POST /api/v1/accounts {"id":"acme"}"#,
        r#"POST /api/v1/accounts/acme/services {"id":"api"}"#,
    ];
    assert_eq!(api.asked(), asked);

    let ended = administer(&FakeApi::new(answers()), &format!("{line} --json"));
    assert_eq!(ended.code, 1);
    let shown = json_of(&ended.out);
    let made = shown["changes"].as_array().unwrap().iter();
    let made: Vec<_> = made.map(|change| &change["made"]).collect();
    assert_eq!(made, [true, false, false]);
}
