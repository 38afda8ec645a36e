//! Commands for credentials, service keys and enrollment tokens.

use serde_json::{Value, json};

use super::{CREATED_AT, assert_requests, json_of, page, succeed};
use crate::administration::assert_says;

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
fn the_secret_of_a_credential_is_printed_when_it_is_made() {
    let create = "credential create acme --service api --service b --name ci";
    let (_, out) = succeed(create, vec![(201, credential(Some("gw_cs_1")))]);
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
    assert!(out.starts_with("Already exists, unchanged:"), "{out}");
    assert!(out.ends_with("Use rotate-secret to replace it.\n"), "{out}");
    let rotate = format!("credential rotate-secret acme {CLIENT_ID}");
    let (_, out) = succeed(&rotate, vec![(200, credential(Some("gw_cs_2")))]);
    assert_says(
        &out,
        &["  client secret  gw_cs_2\nThe secret is shown only this once"],
    );
}

#[test]
fn commands_for_credentials_have_their_requests() {
    let table = r#"
      credential create acme --service api --service b --name ci
         POST /accounts/acme/credentials {"allowed_services":["api","b"],"name":"ci"}
      credential rotate-secret acme {id}
         POST /accounts/acme/credentials/{id}/rotate-secret
      credential change acme {id} --service b --name n --disable
         PATCH /accounts/acme/credentials/{id} {"allowed_services":["b"],"enabled":false,"name":"n"}
      credential list acme
         GET /accounts/acme/credentials?limit=500
      credential show acme {id}
         GET /accounts/acme/credentials/{id}
      credential delete acme {id}
         DELETE /accounts/acme/credentials/{id}"#;
    assert_requests(&credential(None), CLIENT_ID, table);
    let (_, out) = succeed(
        "credential list acme",
        vec![(200, page(&[credential(None)]))],
    );
    let header = "CLIENT ID                   NAME  SERVICES  ENABLED  MANAGED BY  CREATED\n";
    assert!(out.starts_with(header), "{out}");
}

#[test]
fn commands_for_keys_have_their_requests() {
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
    let table = r#"
        key create acme --service api
            POST /accounts/acme/service-keys {"allowed_services":["api"]}
        key rotate-secret acme {id}
            POST /accounts/acme/service-keys/{id}/rotate-secret
        key change acme {id} --enable
            PATCH /accounts/acme/service-keys/{id} {"enabled":true}
        key delete acme {id}
            DELETE /accounts/acme/service-keys/{id}"#;
    let text = format!("gw_sk_{ID}.s");
    assert_requests(&key(Some(&text)), ID, table);
    let create = "key create acme --service api";
    let (_, out) = succeed(create, vec![(201, key(Some(&text)))]);
    let says = format!("  service key  {text}\nThe secret is shown only this once");
    assert_says(&out, &[&says]);
    let (_, out) = succeed(&format!("{create} --json"), vec![(201, key(Some(&text)))]);
    assert_eq!(json_of(&out)["service_key"], *text);
    let (_, out) = succeed("key list acme", vec![(200, page(&[key(None)]))]);
    let table = "KEY ID            NAME  SERVICES  ENABLED  MANAGED BY  CREATED\n\
                 0123456789abcdef  -     api       no       -           2026-01-02T03:04:05Z\n";
    assert_eq!(out, table);
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
    let body = r#"{"approval":"manual","expires_in_seconds":60,"services":["api"]}"#;
    let request = format!("POST /api/v1/accounts/acme/enrollment-tokens {body}");
    let command = |port: u16, gateway: &str| {
        format!("\ngw-agent http {port} --gateway {gateway} --token-file - <<'END'\n{text}\nEND\n")
    };

    let (asked, out) = succeed(create, vec![created()]);
    assert_eq!(asked, [&*request]);
    assert_says(
        &out,
        &["The token is shown only this once, and works for 50 agents."],
    );
    let default = command(3000, "https://eu1.example.com:8443");
    assert!(out.ends_with(&default), "{out}");
    let other = format!("{create} --gateway-url https://gw --backend-port 80");
    let (_, out) = succeed(&other, vec![created()]);
    assert!(out.ends_with(&command(80, "https://gw")), "{out}");
    let (asked, out) = succeed(&format!("{create} --json"), vec![created()]);
    assert_eq!(asked, [request]);
    assert_eq!(out, format!("{}\n", created().1));
}

#[test]
fn enrollment_tokens_are_listed_shown_and_deleted() {
    let table = r#"
        enrollment-token show acme {id}
            GET /accounts/acme/enrollment-tokens/{id}
        enrollment-token delete acme {id}
            DELETE /accounts/acme/enrollment-tokens/{id}"#;
    assert_requests(&token(None), TOKEN_ID, table);
    let (_, out) = succeed(
        "enrollment-token list acme",
        vec![(200, page(&[token(None)]))],
    );
    let table = "ID                SERVICES  APPROVAL  EXPIRES               USED     EPHEMERAL\n\
                 0123456789abcdef  api       manual    2026-01-02T03:14:05Z  2 of 50  yes\n";
    assert_eq!(out, table);
    let show = format!("enrollment-token show acme {TOKEN_ID}");
    let (_, out) = succeed(&show, vec![(200, token(None))]);
    assert_says(
        &out,
        &["  agents     ag_0123456789abcdefghij, ag_1123456789abcdefghij\n"],
    );
}

#[test]
fn enrollment_tokens_are_created_with_the_chosen_lifetime_and_uses() {
    for (options, member) in [
        (" --expires-in 30d", r#""expires_in_seconds":2592000,"#),
        (" --expires-in 90m", r#""expires_in_seconds":5400,"#),
        ("", ""),
        (" --ephemeral", r#""ephemeral":true,"#),
    ] {
        let line = format!("enrollment-token create acme --service api --uses 50{options}");
        let (asked, _) = succeed(&line, vec![created()]);
        let body = format!(r#"{{"approval":"auto",{member}"services":["api"],"uses":50}}"#);
        let request = format!("POST /api/v1/accounts/acme/enrollment-tokens {body}");
        assert_eq!(asked, [request], "{options}");
    }
}
