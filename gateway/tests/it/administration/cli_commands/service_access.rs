//! A service that is created with its key and its agent.

use serde_json::{Value, json};

use super::{CREATED_AT, Ended, FakeApi, administer, service, succeed};

/// The answers to a service with account, key and token.
fn answers_of_access() -> Vec<(u16, Value)> {
    let account = json!({ "id": "acme", "capture_allowed": false, "created_at": CREATED_AT });
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
        (200, account),
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

#[test]
fn a_service_with_access_is_printed_with_its_commands() {
    let line =
        "service create acme api --create-account --with-key --with-agent --backend-port 8080";
    let (asked, out) = succeed(line, answers_of_access());
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
    for part in [
        "Created:\n  service ".to_owned(),
        "  service key  gw_sk_0123456789abcdef.s\n".to_owned(),
        format!("listens on port 8080:\n\n{}\n", alone(AGENT_COMMAND)),
        format!("Call the service:\n\n{}\n", alone(CURL_COMMAND)),
    ] {
        assert!(out.contains(&part), "{part} in {out}");
    }
    // Both commands need the file, which is printed once.
    assert_eq!(out.matches(WRITE_AUTHORITY).count(), 1, "{out}");
    let mut of_key = answers_of_access();
    of_key.pop();
    let line_of_key = line.split(" --with-agent").next().unwrap();
    let (_, out) = succeed(line_of_key, of_key);
    assert!(out.contains(CURL_COMMAND), "{out}");
    let (_, out) = succeed(&format!("{line} --json"), answers_of_access());
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
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap(), expected);

    let of_key = answers_of_access()[1..4].to_vec();
    let (asked, out) = succeed(
        "service create acme api --with-key --gateway-url https://gw:444 --json",
        of_key,
    );
    let out: Value = serde_json::from_str(&out).unwrap();
    assert!(
        out["curl_command"]
            .as_str()
            .unwrap()
            .contains(" https://acme--api.eu1.example.com:444/ "),
        "{out}"
    );
    assert_eq!(
        (
            asked.len(),
            out.get("enrollment_token"),
            out.get("agent_command")
        ),
        (3, None, None)
    );
}

#[test]
fn a_failure_between_the_parts_of_access_names_both_sides_and_loses_no_secret() {
    let line = "service create acme api --create-account --with-key --with-agent --json";
    let problem =
        json!({ "type": "about:blank", "title": "T", "status": 507, "detail": "the disk is full" });
    let fail = |steps: usize| {
        let mut answers = answers_of_access();
        answers.truncate(steps);
        answers.push((507, problem.clone()));
        let Ended { code, out, err } = administer(&FakeApi::new(answers), line);
        assert_eq!(code, 1);
        (out, err)
    };
    assert_eq!(
        fail(0),
        (String::new(), "gw-gateway: the disk is full\n".to_owned())
    );
    let missing = "not created: service acme--api, service key, enrollment token";
    let expected = format!("gw-gateway: the disk is full; in place: account acme; {missing}\n");
    assert_eq!(fail(1), (String::new(), expected));
    let (out, err) = fail(3);
    let missing = "not created: service key, enrollment token";
    let expected = format!(
        "gw-gateway: the disk is full; in place: account acme, service acme--api; {missing}\n"
    );
    assert_eq!(
        (serde_json::from_str::<Value>(&out).unwrap(), err),
        (service(), expected)
    );
    let (out, err) = fail(4);
    let out: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(out["service_key"], "gw_sk_0123456789abcdef.s");
    let done = "account acme, service acme--api, service key";
    let expected =
        format!("gw-gateway: the disk is full; in place: {done}; not created: enrollment token\n");
    assert_eq!(err, expected);

    // A key that no caller could use is not created.
    let refused = administer(
        &FakeApi::new(Vec::new()),
        "service create acme api --mode jwt --with-key",
    );
    assert!(
        refused.code == 2 && refused.err.contains("mode service_key"),
        "{}",
        refused.err
    );
    let mut of_jwt = answers_of_access()[1..3].to_vec();
    of_jwt[0].1["modes"] = json!(["jwt"]);
    let refused = administer(&FakeApi::new(of_jwt), "service create acme api --with-key");
    let expected = "in place: service acme--api; not created: service key\n";
    assert!(
        refused.code == 1 && refused.err.ends_with(expected),
        "{}",
        refused.err
    );
}
