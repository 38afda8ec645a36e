//! The administration commands against a fake API: their requests, output and exit codes.

mod agents;
mod cascade;
mod documents;
mod failures;
mod healthy;
mod secrets;
mod service_access;
mod terminal;

use std::collections::VecDeque;
use std::process::Command;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use crate::administration::hostile_text::{assert_harmless, in_each_string};

/// An administration API with prepared answers.
struct FakeApi {
    url: String,
    /// Method, target and body (if present) of each request.
    asked: Arc<Mutex<Vec<String>>>,
}

impl FakeApi {
    /// Gives the answers in order, each a status and JSON (null for no body). Requires the token
    /// `t0ken`.
    fn new(answers: Vec<(u16, Value)>) -> Self {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&asked);
        let answers = Mutex::new(VecDeque::from(answers));
        let url = crate::support::peers::backend::start(move |mut peer| {
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
                    "HTTP/1.1 {status} X\r\nContent-Type: {media_type}\r\nContent-Length: {}\r\n\
                     \r\n{answer}",
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

/// `gw-gateway` with the words of `line` as arguments. Its environment has only a proxy, which it
/// must not use.
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

/// Runs a command that must succeed against `answers`; returns its requests and its output. Runs it
/// also with hostile text in each string of the answers.
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
        "Created:\n  account          acme\n  capture allowed  no\n  managed by       -\n  \
         created          2026-01-02T03:04:05Z\n  domains max      100\n"
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
    let table = "ACCOUNT       CAPTURE ALLOWED  MANAGED BY  CREATED\n\
                 abc           no               -           2026-01-02T03:04:05Z\n\
                 acme          no               -           2026-01-02T03:04:05Z\n\
                 averylongone  no               -           2026-01-02T03:04:05Z\n";
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
        "account change acme --capture-allowed true --domains-max 7",
        vec![(200, account("acme"))],
    );
    assert_eq!(
        asked,
        [r#"PATCH /api/v1/accounts/acme {"capture_allowed":true,"domains_max":7}"#]
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
        "id": ID,
        "time": "2026-11-21T08:00:00.123Z",
        "account": "acme",
        "service": "api",
        "method": "POST",
        "path": "/orders",
        "query": "limit=5",
        "caller_address": "192.0.2.1",
        "protocol": "HTTP/2",
        "auth_mode": "jwt",
        "caller_id": "gw_ci_x",
        "status": 200,
        "code": null,
        "ended": "complete",
        "bytes_in": 3,
        "bytes_taken": 3,
        "bytes_out": 4,
        "durations_us": {
            "authenticate": 500,
            "wait": 500,
            "agent": 1000,
            "backend_first_byte": 6000,
            "response_head": 9000,
            "total": 10_000,
        },
        "agent_id": "ag_x",
        "replayed_from": null,
        "trace_id": null,
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
        "request search --account acme --service api --status 5xx --min-ms 100 --since \
         2026-11-21T08:00:00Z --retried --limit 2",
        vec![(200, page(std::slice::from_ref(&request)))],
    );
    let query = "limit=2&account=acme&min_ms=100&retried=true&service=api&\
                 since=2026-11-21T08%3A00%3A00Z&status=5xx";
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
        "hsts_max_age_seconds": 0,
        "managed_by": "git",
        "created_at": CREATED_AT,
    })
}

#[test]
fn services_are_created_with_their_settings() {
    let line = "service create acme api --mode jwt --mode service_key --burst 5 \
                --refill-per-minute 6 --request-logging false --capture-request-body true \
                --capture-response-body true --retries false --affinity header:X-Session \
                --hsts-max-age-seconds 300 --disable";
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
        "hsts_max_age_seconds": 300,
    });
    assert_eq!(
        serde_json::from_str::<Value>(&format!("{{{body}")).unwrap(),
        expected
    );
    assert!(
        out.contains("\n  hostname               acme--api.eu1.example.com\n"),
        "{out}"
    );
}

#[test]
fn services_are_changed_listed_shown_and_deleted() {
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
SERVICE  HOSTNAME                   MANAGED BY  MODES             ENABLED  BURST  \
    REFILL PER MINUTE  REQUEST LOGGING
api      acme--api.eu1.example.com  git         jwt, service_key  yes      1000   \
    300                yes
";
    assert_eq!(out, table);

    let (asked, out) = succeed("service show acme api", vec![(200, service())]);
    assert_eq!(asked, ["GET /api/v1/accounts/acme/services/api"]);
    assert!(
        out.contains(
            "\n  capture response body  no\n  retries                yes\n  affinity               \
             cookie\n"
        ),
        "{out}"
    );
    let (asked, _) = succeed("service delete acme api", vec![(204, Value::Null)]);
    assert_eq!(asked, ["DELETE /api/v1/accounts/acme/services/api"]);
}

#[test]
fn signing_keys() {
    let kid = "k".repeat(43);
    let key = json!({
        "kid": kid,
        "status": "next",
        "created_at": CREATED_AT,
        "active_from": CREATED_AT,
    });
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
            "number": number,
            "at": CREATED_AT,
            "actor": "admin",
            "action": "service.create",
            "account": "acme",
            "target": "acme--api.eu1.example.com",
            "detail": { "burst": number },
            "hash": "5a".repeat(32),
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
    let (asked, out) = succeed("audit list --account acme --limit 3", pages());
    let first = "GET /api/v1/audit-log?limit=3&account=acme";
    assert_eq!(
        asked,
        [first, "GET /api/v1/audit-log?limit=1&account=acme&cursor=8"]
    );
    let last = "2026-01-02T03:04:05Z  admin  service.create  acme     acme--api.eu1.example.com  \
                {\"burst\":7}";
    assert_eq!(out.lines().last(), Some(last));
    let (_, out) = succeed("audit list --limit 3 --json", pages());
    let expected = json!({ "items": [entry(9), entry(8), entry(7)], "next_cursor": "7" });
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap(), expected);
}

#[test]
fn the_check_of_the_audit_log_tells_what_is_wrong() {
    let head = format!("7:{}", "5a".repeat(32));
    let found = |valid: bool, problems: Value| {
        json!({
            "valid": valid, "entries": 7, "head": head, "compared_heads": 2, "archive_error": null,
            "problem_count": problems.as_array().unwrap().len(), "problems": problems,
        })
    };
    let line = format!("audit verify --head {head}");
    let (asked, out) = succeed(&line, vec![(200, found(true, json!([])))]);
    assert_eq!(
        asked,
        [format!("GET /api/v1/audit-log/verification?heads={head}")]
    );
    assert!(
        out.contains("valid           yes") && out.contains(&head),
        "{out}"
    );
    let wrong = found(
        false,
        json!([{ "number": 3, "problem": "its hash is another one" }]),
    );
    let api = FakeApi::new(vec![(200, wrong.clone())]);
    let Ended { code, out, err } = administer(&api, "audit verify");
    assert_eq!(api.asked(), ["GET /api/v1/audit-log/verification"]);
    assert!(
        code == 1 && out.ends_with("entry 3: its hash is another one\n"),
        "{out}"
    );
    assert!(err.contains("1 problems"), "{err}");
    assert_escaped("audit verify", &[(200, wrong)]);
    let mut unread = found(true, json!([]));
    unread["archive_error"] = "the bucket is gone".into();
    let Ended { code, err, .. } = administer(&FakeApi::new(vec![(200, unread)]), "audit verify");
    assert!(code == 1 && err.contains("the bucket is gone"), "{err}");
}

#[test]
fn usage_is_a_table_or_lines_of_values() {
    let row = |date: &str, account: Option<&str>| {
        json!({
            "date": date,
            "account": account,
            "service": account.map(|_| "api"),
            "requests": 12,
            "refusals": 1,
            "bytes_in": 340,
            "bytes_out": 5600,
        })
    };
    let pages = || {
        let first = json!({
            "items": [row("2026-11-21", Some("acme"))],
            "next_cursor": "2026-11-21/acme--api",
        });
        vec![(200, first), (200, page(&[row("2026-11-20", None)]))]
    };
    let (asked, out) = succeed("usage --since 2026-11-20 --csv", pages());
    let next = "GET /api/v1/usage?limit=500&since=2026-11-20&cursor=2026-11-21%2Facme--api";
    assert_eq!(
        asked,
        ["GET /api/v1/usage?limit=500&since=2026-11-20", next]
    );
    let expected = "date,account,service,requests,refusals,bytes_in,bytes_out\n\
                    2026-11-21,acme,api,12,1,340,5600\n2026-11-20,,,12,1,340,5600\n";
    assert_eq!(out, expected);
    let (_, out) = succeed("usage", pages());
    let mut lines = out.lines();
    let header = lines.next().unwrap();
    assert!(
        header.starts_with("DATE") && header.ends_with("BYTES OUT"),
        "{out}"
    );
    assert_eq!(lines.count(), 2, "{out}");
}
