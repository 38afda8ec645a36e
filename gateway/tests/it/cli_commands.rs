//! The administration commands against a fake API: their requests, output and exit codes.

mod agents;
mod service_access;
mod terminal;

use std::collections::VecDeque;
use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use crate::hostile_text::{assert_harmless, in_each_string};

/// An administration API with prepared answers.
struct FakeApi {
    url: String,
    /// Method, target and body (if present) of each request.
    asked: Arc<Mutex<Vec<String>>>,
}

impl FakeApi {
    /// Gives the answers in order, each a status and JSON (null for no body). Requires the token `t0ken`.
    fn new(answers: Vec<(u16, Value)>) -> Self {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&asked);
        let answers = Mutex::new(VecDeque::from(answers));
        let url = crate::support::backend::start(move |mut peer| {
            while let Ok((head, body, _)) = peer.request() {
                let header = |name| {
                    head.headers
                        .get(name)
                        .map_or("", |value| value.to_str().unwrap())
                };
                assert_eq!(header("authorization"), "Bearer t0ken");
                assert_eq!(
                    header("content-type"),
                    if body.is_empty() {
                        ""
                    } else {
                        "application/json"
                    }
                );
                let body = String::from_utf8(body).unwrap();
                seen.lock().unwrap().push(
                    format!("{} {} {body}", head.method, head.target)
                        .trim_end()
                        .to_owned(),
                );
                let (status, answer) = answers
                    .lock()
                    .unwrap()
                    .pop_front()
                    .expect("an answer is left");
                let media_type = if status < 400 {
                    "application/json"
                } else {
                    "application/problem+json"
                };
                let answer = if answer.is_null() {
                    String::new()
                } else {
                    answer.to_string()
                };
                peer.send(format!(
                    "HTTP/1.1 {status} X\r\nContent-Type: {media_type}\r\nContent-Length: {}\r\n\r\n{answer}",
                    answer.len()
                ));
            }
        });
        Self { url, asked }
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

/// `gw-gateway` with the words of `line` as arguments. Its environment has only a proxy, which it must not use.
fn gw_gateway(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gw-gateway"));
    command
        .args(line.split(' '))
        .env_clear()
        .env("HTTP_PROXY", "http://127.0.0.1:1");
    command
}

/// Exit code and output of a command.
struct Ended {
    code: i32,
    out: String,
    err: String,
}

fn end(mut command: Command) -> Ended {
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ended {
        code: output.status.code().unwrap(),
        out: text(output.stdout),
        err: text(output.stderr),
    }
}

fn administer(api: &FakeApi, line: &str) -> Ended {
    let mut command = gw_gateway(line);
    command
        .env("GW_ADMIN_URL", &api.url)
        .env("GW_ADMIN_TOKEN", "t0ken");
    end(command)
}

/// Runs a command that must succeed against `answers`; returns its requests and its output. Runs it also with hostile
/// text in each string of the answers.
fn succeed(line: &str, answers: Vec<(u16, Value)>) -> (Vec<String>, String) {
    assert_escaped(line, &answers);
    let api = FakeApi::new(answers);
    let Ended { code, out, err } = administer(&api, line);
    assert_eq!((code, err.as_str()), (0, ""), "{line}");
    (api.asked(), out)
}

/// Asserts that a command escapes hostile text in any of the answers, whether it succeeds or not.
fn assert_escaped(line: &str, answers: &[(u16, Value)]) {
    for (at, (status, answer)) in answers.iter().enumerate() {
        for hostile in in_each_string(answer) {
            let mut answers = answers.to_vec();
            answers[at] = (*status, hostile.clone());
            let Ended { code, out, err } = administer(&FakeApi::new(answers), line);
            assert_harmless(
                &format!("{line}, {hostile}, standard output"),
                out.as_bytes(),
            );
            assert_harmless(
                &format!("{line}, {hostile}, standard error"),
                err.as_bytes(),
            );
            if line.ends_with("--json") && code == 0 && !out.is_empty() {
                assert!(serde_json::from_str::<Value>(&out).is_ok(), "{line}: {out}");
            }
        }
    }
}

fn page(items: &[Value]) -> Value {
    json!({ "items": items, "next_cursor": null })
}

const CREATED_AT: &str = "2026-01-02T03:04:05Z";

#[test]
fn accounts() {
    let account =
        |id: &str| json!({ "id": id, "capture_allowed": false, "created_at": CREATED_AT });

    let (asked, out) = succeed("account create acme", vec![(201, account("acme"))]);
    assert_eq!(asked, [r#"POST /api/v1/accounts {"id":"acme"}"#]);
    assert_eq!(
        out,
        "Created:\n  account          acme\n  capture allowed  no\n  created          2026-01-02T03:04:05Z\n"
    );
    let (_, out) = succeed("account create acme", vec![(200, account("acme"))]);
    assert!(out.starts_with("Already exists, unchanged:\n"), "{out}");

    let pages = || {
        vec![
            (
                200,
                json!({ "items": [account("abc"), account("acme")], "next_cursor": "a&b" }),
            ),
            (200, page(&[account("averylongone")])),
        ]
    };
    let (asked, out) = succeed("account list", pages());
    assert_eq!(
        asked,
        [
            "GET /api/v1/accounts?limit=500",
            "GET /api/v1/accounts?limit=500&cursor=a%26b"
        ]
    );
    let table = "ACCOUNT       CAPTURE ALLOWED  CREATED\n\
                 abc           no               2026-01-02T03:04:05Z\n\
                 acme          no               2026-01-02T03:04:05Z\n\
                 averylongone  no               2026-01-02T03:04:05Z\n";
    assert_eq!(out, table);
    let (_, out) = succeed("account list --json", pages());
    let all = page(&[account("abc"), account("acme"), account("averylongone")]);
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap(), all);
    assert_eq!(
        succeed("account list", vec![(200, page(&[]))]).1,
        "No accounts.\n"
    );

    let (asked, out) = succeed("account show acme --json", vec![(200, account("acme"))]);
    assert_eq!(asked, ["GET /api/v1/accounts/acme"]);
    assert_eq!(out, format!("{}\n", account("acme")));

    let (asked, _) = succeed(
        "account change acme --capture-allowed true",
        vec![(200, account("acme"))],
    );
    assert_eq!(
        asked,
        [r#"PATCH /api/v1/accounts/acme {"capture_allowed":true}"#]
    );

    let (asked, out) = succeed("account delete acme", vec![(204, Value::Null)]);
    assert_eq!(
        (asked, out.as_str()),
        (
            vec!["DELETE /api/v1/accounts/acme".to_owned()],
            "Deleted.\n"
        )
    );
    assert_eq!(
        succeed("account delete acme --json", vec![(204, Value::Null)]).1,
        ""
    );
}

#[test]
fn requests() {
    const ID: &str = "019aa5c2-7e30-7c3b-8f11-2d5a4c9e1b07";
    let request = json!({
        "id": ID, "time": "2026-11-21T08:00:00.123Z", "account": "acme", "service": "api",
        "method": "POST", "path": "/orders", "query": "limit=5",
        "caller_address": "192.0.2.1", "protocol": "HTTP/2", "auth_mode": "jwt", "caller_id": "gw_ci_x",
        "status": 200, "code": null, "ended": "complete", "bytes_in": 3, "bytes_taken": 3, "bytes_out": 4,
        "durations_us": {
            "authenticate": 500, "wait": 500, "agent": 1000, "backend_first_byte": 6000, "response_head": 9000,
            "total": 10_000,
        },
        "agent_id": "ag_x", "replayed_from": null, "trace_id": null,
        "attempts": [{ "agent_id": "ag_y", "reason": "no_slot", "duration_us": 1500 }],
        "captured_request": { "headers": [["accept", "*/*"]], "bytes": 3, "truncated": false },
        "captured_response": { "headers": [], "bytes": 1_048_576, "truncated": true },
    });
    let (asked, out) = succeed(&format!("request show {ID}"), vec![(200, request.clone())]);
    assert_eq!(asked, [format!("GET /api/v1/requests/{ID}")]);
    for line in [
        "  request             019aa5c2-7e30-7c3b-8f11-2d5a4c9e1b07\n",
        "  target              /orders?limit=5\n",
        "  captured request    3 bytes\n",
        "  captured response   1048576 bytes, cut off\n",
        "  failed attempt      ag_y: no_slot after 1.500 ms\n",
        "  backend first byte       6.000 ms              ████████████████████████\n",
    ] {
        assert!(out.contains(line), "{line}{out}");
    }

    let (asked, out) = succeed(
        "request search --account acme --service api --status 5xx --min-ms 100 --since 2026-11-21T08:00:00Z --retried \
         --limit 2",
        vec![(200, page(std::slice::from_ref(&request)))],
    );
    let query = "limit=2&account=acme&service=api&status=5xx&retried=true&since=2026-11-21T08%3A00%3A00Z&min_ms=100";
    assert_eq!(asked, [format!("GET /api/v1/requests?{query}")]);
    assert!(
        out.starts_with("REQUEST ") && out.contains("  acme/api  200     -     10.000    POST"),
        "{out}"
    );

    let command = format!("request replay {ID} --target /orders --header Accept: --header X-A:1");
    let (asked, _) = succeed(&command, vec![(201, request)]);
    let edits = r#"{"set_headers":{"Accept":null,"X-A":"1"},"target":"/orders"}"#;
    assert_eq!(
        asked,
        [format!("POST /api/v1/requests/{ID}/replay {edits}")]
    );
}

fn service() -> Value {
    json!({
        "id": "api",
        "account": "acme",
        "hostname": "acme--api.eu1.example.com",
        "modes": ["jwt", "service_key"],
        "enabled": true,
        "burst": 1000,
        "refill_per_minute": 300,
        "request_logging": true,
        "capture_request_body": false,
        "capture_response_body": false,
        "retries": true,
        "affinity": "cookie",
        "created_at": CREATED_AT,
    })
}

#[test]
fn services() {
    let line = "service create acme api --mode jwt --mode service_key --burst 5 --refill-per-minute 6 \
                --request-logging false --capture-request-body true --capture-response-body true --retries false \
                --affinity header:X-Session --disable";
    let (asked, out) = succeed(line, vec![(201, service())]);
    let (request, body) = asked[0].split_once(" {").unwrap();
    assert_eq!(request, "POST /api/v1/accounts/acme/services");
    let expected = json!({
        "id": "api",
        "modes": ["jwt", "service_key"],
        "enabled": false,
        "burst": 5,
        "refill_per_minute": 6,
        "request_logging": false,
        "capture_request_body": true,
        "capture_response_body": true,
        "retries": false,
        "affinity": "header:x-session",
    });
    assert_eq!(
        serde_json::from_str::<Value>(&format!("{{{body}")).unwrap(),
        expected
    );
    assert!(
        out.contains("\n  hostname               acme--api.eu1.example.com\n"),
        "{out}"
    );

    let (asked, _) = succeed("service create acme api", vec![(201, service())]);
    assert_eq!(
        asked,
        [r#"POST /api/v1/accounts/acme/services {"id":"api"}"#]
    );
    let (asked, _) = succeed("service change acme api --enable", vec![(200, service())]);
    assert_eq!(
        asked,
        [r#"PATCH /api/v1/accounts/acme/services/api {"enabled":true}"#]
    );
    let (asked, _) = succeed("service change acme api --mode jwt", vec![(200, service())]);
    assert_eq!(
        asked,
        [r#"PATCH /api/v1/accounts/acme/services/api {"modes":["jwt"]}"#]
    );

    let (asked, out) = succeed("service list acme", vec![(200, page(&[service()]))]);
    assert_eq!(asked, ["GET /api/v1/accounts/acme/services?limit=500"]);
    let table = "\
SERVICE  HOSTNAME                   MODES             ENABLED  BURST  REFILL PER MINUTE  REQUEST LOGGING
api      acme--api.eu1.example.com  jwt, service_key  yes      1000   300                yes
";
    assert_eq!(out, table);
    let (asked, out) = succeed("service show acme api", vec![(200, service())]);
    assert_eq!(asked, ["GET /api/v1/accounts/acme/services/api"]);
    assert!(
        out.contains("\n  capture response body  no\n  retries                yes\n  affinity               cookie\n"),
        "{out}"
    );
    let (asked, _) = succeed("service delete acme api", vec![(204, Value::Null)]);
    assert_eq!(asked, ["DELETE /api/v1/accounts/acme/services/api"]);
}

#[test]
fn credentials() {
    const ID: &str = "gw_ci_0123456789abcdefghij";
    let credential = |secret: Option<&str>| {
        let mut view = json!({
            "client_id": ID,
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
    };
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
        &format!("credential rotate-secret acme {ID}"),
        vec![(200, credential(Some("gw_cs_2")))],
    );
    assert_eq!(
        asked,
        [format!(
            "POST /api/v1/accounts/acme/credentials/{ID}/rotate-secret"
        )]
    );
    assert!(
        out.contains("  client secret  gw_cs_2\nThe secret is shown only this once"),
        "{out}"
    );
    let line = format!("credential change acme {ID} --service b --name deploy --disable");
    let (asked, _) = succeed(&line, vec![(200, credential(None))]);
    let body = r#"{"allowed_services":["b"],"enabled":false,"name":"deploy"}"#;
    assert_eq!(
        asked,
        [format!(
            "PATCH /api/v1/accounts/acme/credentials/{ID} {body}"
        )]
    );
    let (asked, out) = succeed(
        "credential list acme",
        vec![(200, page(&[credential(None)]))],
    );
    assert_eq!(asked, ["GET /api/v1/accounts/acme/credentials?limit=500"]);
    assert!(
        out.starts_with("CLIENT ID                   NAME  SERVICES  ENABLED  CREATED\n"),
        "{out}"
    );
    let (asked, _) = succeed(
        &format!("credential show acme {ID}"),
        vec![(200, credential(None))],
    );
    assert_eq!(
        asked,
        [format!("GET /api/v1/accounts/acme/credentials/{ID}")]
    );
    let (asked, _) = succeed(
        &format!("credential delete acme {ID}"),
        vec![(204, Value::Null)],
    );
    assert_eq!(
        asked,
        [format!("DELETE /api/v1/accounts/acme/credentials/{ID}")]
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
    let table = "KEY ID            NAME  SERVICES  ENABLED  CREATED\n\
                 0123456789abcdef  -     api       no       2026-01-02T03:04:05Z\n";
    assert_eq!(out, table);
    let (asked, _) = succeed(&format!("key delete acme {ID}"), vec![(204, Value::Null)]);
    assert_eq!(
        asked,
        [format!("DELETE /api/v1/accounts/acme/service-keys/{ID}")]
    );
}

#[test]
fn enrollment_tokens() {
    const ID: &str = "0123456789abcdef";
    let token = |text: Option<&str>| {
        let mut view = json!({
            "id": ID,
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
    };
    let text = format!("gw_et_{ID}.s");
    let create =
        "enrollment-token create acme --service api --approval manual --expires-in-seconds 60";
    let created = (201, token(Some(&text)));
    let body = r#"{"approval":"manual","expires_in_seconds":60,"services":["api"]}"#;
    let request = &*format!("POST /api/v1/accounts/acme/enrollment-tokens {body}");

    let (asked, out) = succeed(create, vec![created.clone()]);
    assert_eq!(asked, [request]);
    let line = format!(
        "\nGW_ENROLLMENT_TOKEN={text} gw-agent http 3000 --gateway https://eu1.example.com:8443\n"
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
        out.ends_with(&format!("={text} gw-agent http 80 --gateway https://gw\n")),
        "{out}"
    );
    let (asked, out) = succeed(&format!("{create} --json"), vec![created.clone()]);
    assert_eq!(
        (asked, out),
        (vec![request.to_owned()], format!("{}\n", created.1))
    );

    let (_, out) = succeed(
        "enrollment-token list acme",
        vec![(200, page(&[token(None)]))],
    );
    let table = "ID                SERVICES  APPROVAL  EXPIRES               USED     EPHEMERAL\n\
                 0123456789abcdef  api       manual    2026-01-02T03:14:05Z  2 of 50  yes\n";
    assert_eq!(out, table);
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
        let (asked, _) = succeed(&line, vec![created.clone()]);
        let body = format!(r#"{{"approval":"auto",{member}"services":["api"],"uses":50}}"#);
        assert_eq!(
            asked,
            [format!(
                "POST /api/v1/accounts/acme/enrollment-tokens {body}"
            )]
        );
    }
    let (asked, out) = succeed(
        &format!("enrollment-token show acme {ID}"),
        vec![(200, token(None))],
    );
    assert!(
        out.contains("  agents     ag_0123456789abcdefghij, ag_1123456789abcdefghij\n"),
        "{out}"
    );
    assert_eq!(
        asked,
        [format!("GET /api/v1/accounts/acme/enrollment-tokens/{ID}")]
    );
    let (asked, _) = succeed(
        &format!("enrollment-token delete acme {ID}"),
        vec![(204, Value::Null)],
    );
    assert_eq!(
        asked,
        [format!(
            "DELETE /api/v1/accounts/acme/enrollment-tokens/{ID}"
        )]
    );
}

#[test]
fn signing_keys() {
    let kid = "k".repeat(43);
    let key = json!({ "kid": kid, "status": "next", "created_at": CREATED_AT, "active_from": CREATED_AT });
    let (asked, out) = succeed(
        "signing-key list",
        vec![(200, page(std::slice::from_ref(&key)))],
    );
    assert_eq!(asked, ["GET /api/v1/signing-keys?limit=500"]);
    assert!(out.contains("  next    2026-01-02T03:04:05Z  "), "{out}");
    let (asked, _) = succeed("signing-key rotate", vec![(201, key.clone())]);
    assert_eq!(
        asked,
        [r#"POST /api/v1/signing-keys/rotate {"immediately":false}"#]
    );
    let (asked, _) = succeed("signing-key rotate --immediately", vec![(201, key)]);
    assert_eq!(
        asked,
        [r#"POST /api/v1/signing-keys/rotate {"immediately":true}"#]
    );
    let (asked, _) = succeed(
        &format!("signing-key delete {kid}"),
        vec![(204, Value::Null)],
    );
    assert_eq!(asked, [format!("DELETE /api/v1/signing-keys/{kid}")]);
}

#[test]
fn audit_log_stops_at_its_limit() {
    let entry = |number: u32| {
        json!({
            "number": number, "at": CREATED_AT, "actor": "admin", "action": "service.create", "account": "acme",
            "target": "acme--api.eu1.example.com", "detail": { "burst": number },
        })
    };
    let pages = || {
        vec![
            (
                200,
                json!({ "items": [entry(9), entry(8)], "next_cursor": "8" }),
            ),
            (200, json!({ "items": [entry(7)], "next_cursor": "7" })),
        ]
    };
    let (asked, out) = succeed("audit --account acme --limit 3", pages());
    let first = "GET /api/v1/audit-log?limit=3&account=acme";
    assert_eq!(
        asked,
        [first, "GET /api/v1/audit-log?limit=1&account=acme&cursor=8"]
    );
    let last = r#"2026-01-02T03:04:05Z  admin  service.create  acme     acme--api.eu1.example.com  {"burst":7}"#;
    assert_eq!(out.lines().last(), Some(last));
    let (_, out) = succeed("audit --limit 3 --json", pages());
    let expected = json!({ "items": [entry(9), entry(8), entry(7)], "next_cursor": "7" });
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap(), expected);
}

#[test]
fn failures_print_the_reason_and_exit_with_1() {
    let fail = |line: &str, status: u16, answer: Value| {
        assert_escaped(line, &[(status, answer.clone())]);
        let api = FakeApi::new(vec![(status, answer)]);
        let Ended { code, out, err } = administer(&api, line);
        assert_eq!((code, out.as_str()), (1, ""), "{line}");
        err.replace(&api.url, "{url}")
    };
    let problem = |status: u16, detail: &str, field: Option<&str>| {
        let mut problem =
            json!({ "type": "about:blank", "title": "T", "status": status, "detail": detail });
        if let Some(field) = field {
            problem["field"] = field.into();
        }
        problem
    };
    let err = fail(
        "account show acme",
        404,
        problem(404, "no account acme", None),
    );
    assert_eq!(err, "gw-gateway: no account acme\n");
    let err = fail(
        "account show acme --json",
        404,
        problem(404, "no account acme", None),
    );
    assert_eq!(err, "gw-gateway: no account acme\n");
    let message = "account acme has no service b";
    let err = fail(
        "key create acme --service b",
        422,
        problem(422, message, Some("allowed_services")),
    );
    assert_eq!(
        err,
        "gw-gateway: allowed_services: account acme has no service b\n"
    );
    let err = fail("account list", 401, problem(401, "no", None));
    assert_eq!(
        err,
        "gw-gateway: the gateway at {url} refuses the admin token (from GW_ADMIN_TOKEN)\n"
    );
    for status in [302, 404, 500] {
        let err = fail("account list", status, json!("what?"));
        assert!(
            err.contains("is not the admin listener of a gateway"),
            "{err}"
        );
    }
    let err = fail("account list", 200, json!("what?"));
    assert!(
        err.starts_with("gw-gateway: cannot parse the response of the gateway: "),
        "{err}"
    );

    let (_closed, unused) = crate::support::backend::refusing();
    let mut command = gw_gateway(&format!("account list --admin-url http://{unused}"));
    command.env("GW_ADMIN_TOKEN", "t0ken");
    let Ended { code, err, .. } = end(command);
    assert_eq!(code, 1);
    assert!(
        err.starts_with(&format!("gw-gateway: no response from http://{unused}: ")),
        "{err}"
    );
}

#[test]
fn invalid_arguments_exit_with_2() {
    let usage = |command: Command, expected: &str| {
        let Ended { code, out, err } = end(command);
        assert_eq!((code, out.as_str()), (2, ""));
        assert!(err.contains(expected), "{expected:?} in {err}");
    };
    usage(
        gw_gateway("account list"),
        "no admin token: set GW_ADMIN_TOKEN, or",
    );
    usage(
        gw_gateway("account create ACME"),
        "3 to 15 characters of a-z and 0-9",
    );
    usage(
        gw_gateway("service change acme api --affinity header:host"),
        "host does not reach the agent",
    );
    usage(
        gw_gateway("account list --config nowhere.toml"),
        "nowhere.toml: ",
    );
    usage(
        gw_gateway("account list --admin-token-file nowhere"),
        "cannot read the admin token: nowhere: ",
    );
    let mut ftp = gw_gateway("account list --admin-url ftp://eu1.example.com");
    ftp.env("GW_ADMIN_TOKEN", "t0ken");
    usage(
        ftp,
        "is not a URL such as http://127.0.0.1:9080 or https://",
    );
    let mut nothing = gw_gateway("service change acme api");
    nothing.env("GW_ADMIN_TOKEN", "t0ken");
    usage(nothing, "nothing to change");
}

#[test]
fn the_configuration_file_supplies_address_and_token() {
    let api = FakeApi::new(vec![(200, page(&[]))]);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gateway.toml");
    let data_dir = directory.path().join("data");
    let listen = api.url.trim_start_matches("http://");
    let text = format!(
        "region = \"eu1\"\ndomain = \"example.com\"\ndata_dir = {data_dir:?}\nadmin_listen = \"{listen}\"\n"
    );
    std::fs::write(&path, text).unwrap();
    std::fs::create_dir(&data_dir).unwrap();
    std::fs::write(data_dir.join("admin.token"), "t0ken\n").unwrap();
    let mut command = gw_gateway("account list --config");
    command.arg(&path);
    let Ended { code, out, err } = end(command);
    assert_eq!(
        (code, out.as_str(), err.as_str()),
        (0, "No accounts.\n", "")
    );
}

#[test]
fn a_closed_output_pipe_is_not_a_failure() {
    // More output than a pipe holds, and a reader that does not read.
    let accounts: Vec<Value> = (0..10_000)
        .map(|number| json!({ "id": format!("a{number:06}"), "capture_allowed": false, "created_at": CREATED_AT }))
        .collect();
    let api = FakeApi::new(vec![(200, page(&accounts))]);
    let mut command = gw_gateway("account list");
    command
        .env("GW_ADMIN_URL", &api.url)
        .env("GW_ADMIN_TOKEN", "t0ken");
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut [0; 100]).unwrap();
    drop(out);
    let output = child.wait_with_output().unwrap();
    assert_eq!(
        (output.status.code(), output.stderr.as_slice()),
        (Some(0), &b""[..])
    );
}
