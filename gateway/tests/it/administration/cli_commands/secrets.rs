//! Commands for credentials, service keys and enrollment tokens.

use serde_json::{Value, json};

use super::{CREATED_AT, page, succeed};

const CLIENT_ID: &str = "gw_ci_0123456789abcdefghij";

fn credential(secret: Option<&str>) -> Value {
    let mut view = json!({
        "client_id": CLIENT_ID,
        "account": "acme",
        "name": "ci",
        "allowed_services": ["api", "b"],
        "enabled": true,
        "created_at": CREATED_AT,
    });
    if let Some(secret) = secret {
        view["client_secret"] = secret.into();
    }
    view
}

#[test]
fn credentials_are_created_and_their_secrets_replaced() {
    let create = "credential create acme --service api --service b --name ci";

    let (asked, out) = succeed(create, vec![(201, credential(Some("gw_cs_1")))]);
    assert_eq!(
        asked,
        [r#"POST /api/v1/accounts/acme/credentials {"allowed_services":["api","b"],"name":"ci"}"#]
    );
    let expected = "Created:\n  \
                    client id      gw_ci_0123456789abcdefghij\n  \
                    name           ci\n  \
                    services       api, b\n  \
                    enabled        yes\n  \
                    managed by     -\n  \
                    created        2026-01-02T03:04:05Z\n  \
                    client secret  gw_cs_1\n\
                    The secret is shown only this once. Store it now.\n";
    assert_eq!(out, expected);
    let (_, out) = succeed(create, vec![(200, credential(None))]);
    assert!(
        out.starts_with("Already exists, unchanged:")
            && out.ends_with("Use rotate-secret to replace it.\n"),
        "{out}"
    );

    let (asked, out) = succeed(
        &format!("credential rotate-secret acme {CLIENT_ID}"),
        vec![(200, credential(Some("gw_cs_2")))],
    );
    assert_eq!(
        asked,
        [format!(
            "POST /api/v1/accounts/acme/credentials/{CLIENT_ID}/rotate-secret"
        )]
    );
    assert!(
        out.contains("  client secret  gw_cs_2\nThe secret is shown only this once"),
        "{out}"
    );
}

#[test]
fn credentials_are_changed_listed_shown_and_deleted() {
    let line = format!("credential change acme {CLIENT_ID} --service b --name deploy --disable");
    let (asked, _) = succeed(&line, vec![(200, credential(None))]);
    let body = r#"{"allowed_services":["b"],"enabled":false,"name":"deploy"}"#;
    assert_eq!(
        asked,
        [format!(
            "PATCH /api/v1/accounts/acme/credentials/{CLIENT_ID} {body}"
        )]
    );
    let (asked, out) = succeed(
        "credential list acme",
        vec![(200, page(&[credential(None)]))],
    );
    assert_eq!(asked, ["GET /api/v1/accounts/acme/credentials?limit=500"]);
    assert!(
        out.starts_with(
            "CLIENT ID                   NAME  SERVICES  ENABLED  MANAGED BY  CREATED\n"
        ),
        "{out}"
    );
    let (asked, _) = succeed(
        &format!("credential show acme {CLIENT_ID}"),
        vec![(200, credential(None))],
    );
    assert_eq!(
        asked,
        [format!("GET /api/v1/accounts/acme/credentials/{CLIENT_ID}")]
    );
    let (asked, _) = succeed(
        &format!("credential delete acme {CLIENT_ID}"),
        vec![(204, Value::Null)],
    );
    assert_eq!(
        asked,
        [format!(
            "DELETE /api/v1/accounts/acme/credentials/{CLIENT_ID}"
        )]
    );
}

#[test]
fn keys() {
    const ID: &str = "0123456789abcdef";
    let key = |text: Option<&str>| {
        let mut view = json!({
            "key_id": ID,
            "account": "acme",
            "name": null,
            "allowed_services": ["api"],
            "enabled": false,
            "created_at": CREATED_AT,
        });
        if let Some(text) = text {
            view["service_key"] = text.into();
        }
        view
    };
    let text = format!("gw_sk_{ID}.s");
    let (asked, out) = succeed(
        "key create acme --service api",
        vec![(201, key(Some(&text)))],
    );
    assert_eq!(
        asked,
        [r#"POST /api/v1/accounts/acme/service-keys {"allowed_services":["api"]}"#]
    );
    assert!(
        out.contains(&format!(
            "  service key  {text}\nThe secret is shown only this once"
        )),
        "{out}"
    );
    let (_, out) = succeed(
        "key create acme --service api --json",
        vec![(201, key(Some(&text)))],
    );
    assert_eq!(
        serde_json::from_str::<Value>(&out).unwrap()["service_key"],
        *text
    );
    let (asked, _) = succeed(
        &format!("key rotate-secret acme {ID}"),
        vec![(200, key(Some(&text)))],
    );
    assert_eq!(
        asked,
        [format!(
            "POST /api/v1/accounts/acme/service-keys/{ID}/rotate-secret"
        )]
    );
    let (asked, _) = succeed(
        &format!("key change acme {ID} --enable"),
        vec![(200, key(None))],
    );
    assert_eq!(
        asked,
        [format!(
            r#"PATCH /api/v1/accounts/acme/service-keys/{ID} {{"enabled":true}}"#
        )]
    );
    let (_, out) = succeed("key list acme", vec![(200, page(&[key(None)]))]);
    let table = "KEY ID            NAME  SERVICES  ENABLED  MANAGED BY  CREATED\n\
                 0123456789abcdef  -     api       no       -           2026-01-02T03:04:05Z\n";
    assert_eq!(out, table);
    let (asked, _) = succeed(&format!("key delete acme {ID}"), vec![(204, Value::Null)]);
    assert_eq!(
        asked,
        [format!("DELETE /api/v1/accounts/acme/service-keys/{ID}")]
    );
}

const TOKEN_ID: &str = "0123456789abcdef";

fn token(text: Option<&str>) -> Value {
    let mut view = json!({
        "id": TOKEN_ID,
        "account": "acme",
        "services": ["api"],
        "approval": "manual",
        "ephemeral": true,
        "created_at": CREATED_AT,
        "expires_at": "2026-01-02T03:14:05Z",
        "uses": 50,
        "used": 2,
        "agents": ["ag_0123456789abcdefghij", "ag_1123456789abcdefghij"],
    });
    if let Some(text) = text {
        view["token"] = text.into();
        view["gateway_url"] = "https://eu1.example.com:8443".into();
    }
    view
}

/// The answer to a request for a new token.
fn created() -> (u16, Value) {
    (201, token(Some(&format!("gw_et_{TOKEN_ID}.s"))))
}

#[test]
fn enrollment_tokens_are_created_with_the_command_of_the_agent() {
    let text = format!("gw_et_{TOKEN_ID}.s");
    let create =
        "enrollment-token create acme --service api --approval manual --expires-in-seconds 60";
    let created = created();
    let body = r#"{"approval":"manual","expires_in_seconds":60,"services":["api"]}"#;
    let request = &*format!("POST /api/v1/accounts/acme/enrollment-tokens {body}");

    let (asked, out) = succeed(create, vec![created.clone()]);
    assert_eq!(asked, [request]);
    let line = format!(
        "\ngw-agent http 3000 --gateway https://eu1.example.com:8443 --token-file - <<'END'\n\
         {text}\nEND\n"
    );
    assert!(
        out.contains("The token is shown only this once, and works for 50 agents.")
            && out.ends_with(&line),
        "{out}"
    );
    let (_, out) = succeed(
        &format!("{create} --gateway-url https://gw --backend-port 80"),
        vec![created.clone()],
    );
    assert!(
        out.ends_with(&format!(
            "\ngw-agent http 80 --gateway https://gw --token-file - <<'END'\n{text}\nEND\n"
        )),
        "{out}"
    );
    let (asked, out) = succeed(&format!("{create} --json"), vec![created.clone()]);
    assert_eq!(
        (asked, out),
        (vec![request.to_owned()], format!("{}\n", created.1))
    );
}

#[test]
fn enrollment_tokens_are_listed_shown_and_deleted() {
    let (_, out) = succeed(
        "enrollment-token list acme",
        vec![(200, page(&[token(None)]))],
    );
    let table = "ID                SERVICES  APPROVAL  EXPIRES               USED     EPHEMERAL\n\
                 0123456789abcdef  api       manual    2026-01-02T03:14:05Z  2 of 50  yes\n";
    assert_eq!(out, table);
    let (asked, out) = succeed(
        &format!("enrollment-token show acme {TOKEN_ID}"),
        vec![(200, token(None))],
    );
    assert!(
        out.contains("  agents     ag_0123456789abcdefghij, ag_1123456789abcdefghij\n"),
        "{out}"
    );
    assert_eq!(
        asked,
        [format!(
            "GET /api/v1/accounts/acme/enrollment-tokens/{TOKEN_ID}"
        )]
    );
    let (asked, _) = succeed(
        &format!("enrollment-token delete acme {TOKEN_ID}"),
        vec![(204, Value::Null)],
    );
    assert_eq!(
        asked,
        [format!(
            "DELETE /api/v1/accounts/acme/enrollment-tokens/{TOKEN_ID}"
        )]
    );
}

#[test]
fn enrollment_tokens_are_created_with_the_chosen_lifetime_and_uses() {
    for (option, member) in [
        (
            "--expires-in 30d --uses 50",
            r#""expires_in_seconds":2592000,"#,
        ),
        (
            "--expires-in 90m --uses 50",
            r#""expires_in_seconds":5400,"#,
        ),
        ("--uses 50", ""),
        ("--uses 50 --ephemeral", r#""ephemeral":true,"#),
    ] {
        let line = format!("enrollment-token create acme --service api {option}");
        let (asked, _) = succeed(&line, vec![created()]);
        let body = format!(r#"{{"approval":"auto",{member}"services":["api"],"uses":50}}"#);
        assert_eq!(
            asked,
            [format!(
                "POST /api/v1/accounts/acme/enrollment-tokens {body}"
            )]
        );
    }
}
