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

use super::hostile_text::{assert_harmless, in_each_string};
use super::{Ended, assert_says, end};
use crate::support::peers::backend;

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
        let url = backend::start(move |mut peer| {
            while let Ok((head, body, _)) = peer.request() {
                let header = |name| {
                    let value = head.headers.get(name);
                    value.map_or("", |value| value.to_str().unwrap())
                };
                assert_eq!(header("authorization"), "Bearer t0ken");
                let media_type = if body.is_empty() {
                    ""
                } else {
                    "application/json"
                };
                assert_eq!(header("content-type"), media_type);
                let body = String::from_utf8(body).unwrap();
                let request = format!("{} {} {body}", head.method, head.target);
                seen.lock().unwrap().push(request.trim_end().to_owned());
                let answer = answers.lock().unwrap().pop_front();
                let (status, answer) = answer.expect("an answer is left");
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

    /// `gw-gateway` with the words of `line` as arguments, for this API.
    fn command(&self, line: &str) -> Command {
        let mut command = gw_gateway(line);
        command
            .env("GW_ADMIN_URL", &self.url)
            .env("GW_ADMIN_TOKEN", "t0ken");
        command
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

fn administer(api: &FakeApi, line: &str) -> Ended {
    end(&mut api.command(line))
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
            let what = format!("{line}, {hostile}");
            assert_harmless(&format!("{what}, standard output"), out.as_bytes());
            assert_harmless(&format!("{what}, standard error"), err.as_bytes());
            if line.ends_with("--json") && code == 0 && !out.is_empty() {
                assert!(serde_json::from_str::<Value>(&out).is_ok(), "{line}: {out}");
            }
        }
    }
}

/// Runs each command of `table` against `record`, and compares its request with the line that
/// follows the command. `{id}` in both is the id of the record.
fn assert_requests(record: &Value, id: &str, table: &str) {
    let table = table.trim().replace("{id}", id);
    let lines: Vec<&str> = table.lines().map(str::trim).collect();
    for pair in lines.chunks(2) {
        let [line, request] = pair else {
            panic!("no request of the command: {pair:?}");
        };
        let (method, target) = request.split_once(' ').unwrap();
        let answer = match method {
            "DELETE" => (204, Value::Null),
            _ if target.contains("?limit=") => (200, page(std::slice::from_ref(record))),
            _ => (200, record.clone()),
        };
        let (asked, _) = succeed(line, vec![answer]);
        assert_eq!(asked, [format!("{method} /api/v1{target}")], "{line}");
    }
}

fn json_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn page(items: &[Value]) -> Value {
    json!({ "items": items, "next_cursor": null })
}

const CREATED_AT: &str = "2026-01-02T03:04:05Z";

fn account(id: &str) -> Value {
    json!({ "id": id, "capture_allowed": false, "created_at": CREATED_AT })
}

#[test]
fn commands_for_accounts_have_their_requests() {
    let table = r#"
        account create acme
            POST /accounts {"id":"acme"}
        account show acme
            GET /accounts/acme
        account change acme --capture-allowed true --domains-max 7
            PATCH /accounts/acme {"capture_allowed":true,"domains_max":7}
        account delete acme
            DELETE /accounts/acme"#;
    assert_requests(&account("acme"), "acme", table);
}

#[test]
fn an_account_is_printed_as_text_or_json() {
    let printed = |line: &str, status, answer| succeed(line, vec![(status, answer)]).1;
    let created = "Created:\n  account          acme\n  capture allowed  no\n  \
                   managed by       -\n  created          2026-01-02T03:04:05Z\n  \
                   domains max      100\n";
    let acme = || account("acme");
    assert_eq!(printed("account create acme", 201, acme()), created);
    let existing = printed("account create acme", 200, acme());
    assert!(
        existing.starts_with("Already exists, unchanged:\n"),
        "{existing}"
    );
    let shown = printed("account show acme --json", 200, acme());
    assert_eq!(shown, format!("{}\n", acme()));
    assert_eq!(
        printed("account delete acme", 204, Value::Null),
        "Deleted.\n"
    );
    assert_eq!(printed("account delete acme --json", 204, Value::Null), "");
}

#[test]
fn a_list_has_the_items_of_all_pages() {
    let pages = || {
        let first = json!({ "items": [account("abc"), account("acme")], "next_cursor": "a&b" });
        vec![(200, first), (200, page(&[account("averylongone")]))]
    };
    let (asked, out) = succeed("account list", pages());
    let first = "GET /api/v1/accounts?limit=500";
    assert_eq!(asked, [first, &format!("{first}&cursor=a%26b")]);
    let table = "ACCOUNT       CAPTURE ALLOWED  MANAGED BY  CREATED\n\
                 abc           no               -           2026-01-02T03:04:05Z\n\
                 acme          no               -           2026-01-02T03:04:05Z\n\
                 averylongone  no               -           2026-01-02T03:04:05Z\n";
    assert_eq!(out, table);
    let all = page(&[account("abc"), account("acme"), account("averylongone")]);
    assert_eq!(json_of(&succeed("account list --json", pages()).1), all);
    let (_, out) = succeed("account list", vec![(200, page(&[]))]);
    assert_eq!(out, "No accounts.\n");
}

const REQUEST_ID: &str = "019aa5c2-7e30-7c3b-8f11-2d5a4c9e1b07";

fn request() -> Value {
    json!({
        "id": REQUEST_ID,
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
    })
}

#[test]
fn requests_are_shown_and_replayed() {
    let table = r#"
      request show {id}
        GET /requests/{id}
      request replay {id} --target /orders --header Accept: --header X-A:1
        POST /requests/{id}/replay {"set_headers":{"Accept":null,"X-A":"1"},"target":"/orders"}"#;
    assert_requests(&request(), REQUEST_ID, table);
    let (_, out) = succeed(
        &format!("request show {REQUEST_ID}"),
        vec![(200, request())],
    );
    let says = [
        "  request             019aa5c2-7e30-7c3b-8f11-2d5a4c9e1b07\n",
        "  target              /orders?limit=5\n",
        "  captured request    3 bytes\n",
        "  captured response   1048576 bytes, cut off\n",
        "  failed attempt      ag_y: no_slot after 1.500 ms\n",
        "  backend first byte       6.000 ms              ████████████████████████\n",
    ];
    assert_says(&out, &says);
}

#[test]
fn requests_are_searched() {
    let (asked, out) = succeed(
        "request search --account acme --service api --status 5xx --min-ms 100 --since \
         2026-11-21T08:00:00Z --retried --limit 2",
        vec![(200, page(&[request()]))],
    );
    let query = "limit=2&account=acme&min_ms=100&retried=true&service=api&\
                 since=2026-11-21T08%3A00%3A00Z&status=5xx";
    assert_eq!(asked, [format!("GET /api/v1/requests?{query}")]);
    assert!(out.starts_with("REQUEST "), "{out}");
    assert_says(&out, &["  acme/api  200     -     10.000    POST"]);
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
    assert_eq!(json_of(&format!("{{{body}")), expected);
    assert_says(
        &out,
        &["\n  hostname               acme--api.eu1.example.com\n"],
    );
}

#[test]
fn commands_for_services_have_their_requests() {
    let table = r#"
        service create acme api
            POST /accounts/acme/services {"id":"api"}
        service change acme api --enable
            PATCH /accounts/acme/services/api {"enabled":true}
        service change acme api --mode jwt
            PATCH /accounts/acme/services/api {"modes":["jwt"]}
        service list acme
            GET /accounts/acme/services?limit=500
        service show acme api
            GET /accounts/acme/services/api
        service delete acme api
            DELETE /accounts/acme/services/api"#;
    assert_requests(&service(), "api", table);
}

#[test]
fn services_are_printed() {
    let (_, out) = succeed("service list acme", vec![(200, page(&[service()]))]);
    let table = "\
SERVICE  HOSTNAME                   MANAGED BY  MODES             ENABLED  BURST  \
    REFILL PER MINUTE  REQUEST LOGGING
api      acme--api.eu1.example.com  git         jwt, service_key  yes      1000   \
    300                yes
";
    assert_eq!(out, table);
    let (_, out) = succeed("service show acme api", vec![(200, service())]);
    let says = "\n  capture response body  no\n  retries                yes\n  \
                affinity               cookie\n";
    assert_says(&out, &[says]);
}

#[test]
fn commands_for_signing_keys_have_their_requests() {
    let kid = "k".repeat(43);
    let key = json!({
        "kid": kid,
        "status": "next",
        "created_at": CREATED_AT,
        "active_from": CREATED_AT,
    });
    let table = r#"
        signing-key list
            GET /signing-keys?limit=500
        signing-key rotate
            POST /signing-keys/rotate {"immediately":false}
        signing-key rotate --immediately
            POST /signing-keys/rotate {"immediately":true}
        signing-key delete {id}
            DELETE /signing-keys/{id}"#;
    assert_requests(&key, &kid, table);
    let (_, out) = succeed("signing-key list", vec![(200, page(&[key]))]);
    assert_says(&out, &["  next    2026-01-02T03:04:05Z  "]);
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
        let page = |items: &[Value], next: &str| {
            let page = json!({ "items": items, "next_cursor": next });
            (200, page)
        };
        vec![page(&[entry(9), entry(8)], "8"), page(&[entry(7)], "7")]
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
    assert_eq!(json_of(&out), expected);
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
    let whole = found(true, json!([]));
    let (asked, out) = succeed(
        &format!("audit verify --head {head}"),
        vec![(200, whole.clone())],
    );
    let request = format!("GET /api/v1/audit-log/verification?heads={head}");
    assert_eq!(asked, [request]);
    assert_says(&out, &["valid           yes", &head]);

    let problem = json!([{ "number": 3, "problem": "its hash is another one" }]);
    let wrong = found(false, problem);
    let api = FakeApi::new(vec![(200, wrong.clone())]);
    let ended = administer(&api, "audit verify");
    assert_eq!(api.asked(), ["GET /api/v1/audit-log/verification"]);
    ended.assert_failed(1, &["1 problems"]);
    assert!(
        ended.out.ends_with("entry 3: its hash is another one\n"),
        "{ended:?}"
    );
    assert_escaped("audit verify", &[(200, wrong)]);

    let mut unread = whole;
    unread["archive_error"] = "the bucket is gone".into();
    let ended = administer(&FakeApi::new(vec![(200, unread)]), "audit verify");
    ended.assert_failed(1, &["the bucket is gone"]);
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
    assert!(header.starts_with("DATE"), "{out}");
    assert!(header.ends_with("BYTES OUT"), "{out}");
    assert_eq!(lines.count(), 2, "{out}");
}
