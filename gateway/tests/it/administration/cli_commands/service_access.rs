//! A service that is created with its key and its agent.

use serde_json::{Value, json};

use super::{CREATED_AT, Ended, FakeApi, account, administer, json_of, service, succeed};
use crate::administration::assert_says;

/// The answers to a service with account, key and token.
fn answers_of_access() -> Vec<(u16, Value)> {
    let key = json!({
        "key_id": "0123456789abcdef",
        "account": "acme",
        "name": null,
        "allowed_services": ["api"],
        "enabled": true,
        "created_at": CREATED_AT,
        "service_key": "gw_sk_0123456789abcdef.s",
    });
    let address =
        json!({ "gateway_url": "https://eu1.example.com:8443", "ca_certificate": "PEM\n" });
    let token = json!({
        "id": "1123456789abcdef",
        "account": "acme",
        "services": ["api"],
        "approval": "auto",
        "created_at": CREATED_AT,
        "expires_at": "2026-01-02T03:14:05Z",
        "uses": 1,
        "used": 0,
        "agents": [],
        "token": "gw_et_1123456789abcdef.t",
        "gateway_url": "https://eu1.example.com:8443",
        "ca_certificate": "PEM\n",
    });
    vec![
        (200, account("acme")),
        (201, service()),
        (200, address),
        (201, key),
        (201, token),
    ]
}

const WRITE_AUTHORITY: &str = "cat > gw-ca.crt <<'END'\nPEM\nEND\n";
const AGENT_COMMAND: &str = "cat > gw-ca.crt <<'END'\nPEM\nEND\n\
                             gw-agent http 8080 --gateway https://eu1.example.com:8443 --ca-file \
                             gw-ca.crt --token-file - <<'END'\ngw_et_1123456789abcdef.t\nEND";
const CURL_COMMAND: &str = "cat > gw-ca.crt <<'END'\nPEM\nEND\ncurl -sS --cacert gw-ca.crt \
    https://acme--api.eu1.example.com:8443/ \\\n  -H 'X-Gw-Service-Key: gw_sk_0123456789abcdef.s'";

const LINE: &str =
    "service create acme api --create-account --with-key --with-agent --backend-port 8080";

#[test]
fn a_service_with_access_is_printed_with_its_commands() {
    let (asked, out) = succeed(LINE, answers_of_access());
    assert_eq!(
        asked,
        [
            r#"POST /api/v1/accounts {"id":"acme"}"#,
            r#"POST /api/v1/accounts/acme/services {"id":"api"}"#,
            "GET /api/v1/gateway",
            r#"POST /api/v1/accounts/acme/service-keys {"allowed_services":["api"]}"#,
            concat!(
                "POST /api/v1/accounts/acme/enrollment-tokens ",
                r#"{"approval":"auto","services":["api"]}"#
            ),
        ]
    );
    let alone = |command: &str| command.strip_prefix(WRITE_AUTHORITY).unwrap().to_owned();
    let says = [
        "Created:\n  service ",
        "  service key  gw_sk_0123456789abcdef.s\n",
        &format!("listens on port 8080:\n\n{}\n", alone(AGENT_COMMAND)),
        &format!("Call the service:\n\n{}\n", alone(CURL_COMMAND)),
    ];
    assert_says(&out, &says);
    // Both commands need the file, which is printed once.
    assert_eq!(out.matches(WRITE_AUTHORITY).count(), 1, "{out}");
    let of_key = answers_of_access()[..4].to_vec();
    let (_, out) = succeed(
        "service create acme api --create-account --with-key",
        of_key,
    );
    assert_says(&out, &[CURL_COMMAND]);
}

#[test]
fn a_service_with_access_is_one_object_in_json() {
    let (_, out) = succeed(&format!("{LINE} --json"), answers_of_access());
    let mut expected = service();
    for (member, value) in [
        ("key_id", "0123456789abcdef"),
        ("service_key", "gw_sk_0123456789abcdef.s"),
        ("enrollment_token_id", "1123456789abcdef"),
        ("enrollment_token", "gw_et_1123456789abcdef.t"),
        ("agent_command", AGENT_COMMAND),
        ("curl_command", CURL_COMMAND),
    ] {
        expected[member] = value.into();
    }
    assert_eq!(json_of(&out), expected);

    let line = "service create acme api --with-key --gateway-url https://gw:444 --json";
    let (asked, out) = succeed(line, answers_of_access()[1..4].to_vec());
    assert_eq!(asked.len(), 3);
    let out = json_of(&out);
    let url = " https://acme--api.eu1.example.com:444/ ";
    assert_says(out["curl_command"].as_str().unwrap(), &[url]);
    assert_eq!(out.get("enrollment_token"), None);
    assert_eq!(out.get("agent_command"), None);
}

#[test]
fn a_failure_between_the_parts_of_access_names_both_sides_and_loses_no_secret() {
    let line = "service create acme api --create-account --with-key --with-agent --json";
    let problem =
        json!({ "type": "about:blank", "title": "T", "status": 507, "detail": "the disk is full" });
    let fail = |steps: usize, says: &str| {
        let mut answers = answers_of_access();
        answers.truncate(steps);
        answers.push((507, problem.clone()));
        let Ended { code, out, err } = administer(&FakeApi::new(answers), line);
        let expected = format!("gw-gateway: the disk is full{says}\n");
        assert_eq!((code, err), (1, expected));
        out
    };
    assert_eq!(fail(0, ""), "");
    let missing = "not created: service acme--api, service key, enrollment token";
    assert_eq!(fail(1, &format!("; in place: account acme; {missing}")), "");
    let missing = "not created: service key, enrollment token";
    let out = fail(
        3,
        &format!("; in place: account acme, service acme--api; {missing}"),
    );
    assert_eq!(json_of(&out), service());
    let made = "in place: account acme, service acme--api, service key";
    let out = fail(4, &format!("; {made}; not created: enrollment token"));
    assert_eq!(json_of(&out)["service_key"], "gw_sk_0123456789abcdef.s");
}

#[test]
fn a_key_that_no_caller_could_use_is_not_created() {
    let line = "service create acme api --mode jwt --with-key";
    let refused = administer(&FakeApi::new(Vec::new()), line);
    refused.assert_failed(2, &["mode service_key"]);
    let mut of_jwt = answers_of_access()[1..3].to_vec();
    of_jwt[0].1["modes"] = json!(["jwt"]);
    let refused = administer(&FakeApi::new(of_jwt), "service create acme api --with-key");
    assert_eq!(refused.code, 1);
    let expected = "in place: service acme--api; not created: service key\n";
    assert!(refused.err.ends_with(expected), "{refused:?}");
}
