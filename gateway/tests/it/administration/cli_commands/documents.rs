//! `apply` stops at the first change that is refused, and says what is made.

use serde_json::{Value, json};

use super::{CREATED_AT, Ended, FakeApi, administer, assert_escaped, page, service, succeed};

const DOCUMENT: &str = "[[account]]\nid = \"acme\"\n[[service]]\naccount = \"acme\"\nid = \"api\"\n\
                        [[key]]\naccount = \"acme\"\nname = \"ci\"\nallowed_services = [\"api\"]\n";

fn answers() -> Vec<(u16, Value)> {
    let account = json!({ "id": "acme", "capture_allowed": false, "created_at": CREATED_AT });
    let problem = json!({ "title": "T", "detail": "the disk is full", "status": 507 });
    vec![(200, page(&[])), (201, account), (507, problem)]
}

#[test]
fn an_export_reads_every_list() {
    let account = json!({ "id": "acme", "capture_allowed": false, "created_at": CREATED_AT });
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
        account,
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
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["key"][0]["allowed_services"], json!(["api"]));
}

#[test]
fn an_application_stops_at_the_first_failure_and_says_what_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.toml");
    std::fs::write(&file, DOCUMENT).unwrap();
    let line = format!("apply --print-secrets --revision 1 -f {}", file.display());
    assert_escaped(&line, &answers());
    let api = FakeApi::new(answers());
    let Ended { code, out, err } = administer(&api, &line);
    assert_eq!(code, 1);
    assert!(
        out.ends_with("3 to create, 0 to change, 0 to delete, 0 unchanged.\n"),
        "{out}"
    );
    let expected = "gw-gateway: service acme/api: the disk is full; the other changes are not \
                    made, and applying again goes on with them:\n  made: create account acme\n  \
                    not made: create service acme/api\n  not made: create key acme/ci\n";
    assert_eq!(err, expected);
    let asked = [
        "GET /api/v1/accounts?limit=500",
        r#"POST /api/v1/accounts {"id":"acme"}"#,
        r#"POST /api/v1/accounts/acme/services {"id":"api"}"#,
    ];
    assert_eq!(api.asked(), asked);

    let api = FakeApi::new(answers());
    let Ended { code, out, .. } = administer(&api, &format!("{line} --json"));
    let shown: Value = serde_json::from_str(&out).unwrap();
    let made: Vec<&Value> = shown["changes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|change| &change["made"])
        .collect();
    assert_eq!(
        (code, made),
        (1, vec![&json!(true), &json!(false), &json!(false)])
    );
}
