//! Failures of the administration commands, and their exit codes.

use std::fs;
use std::io::Read;
use std::process::Stdio;

use serde_json::{Value, json};

use super::{FakeApi, account, administer, assert_escaped, end, gw_gateway, page};
use crate::administration::{Installation, assert_says};
use crate::support::peers::backend;

fn problem(status: u16, detail: &str) -> Value {
    json!({ "type": "about:blank", "title": "T", "status": status, "detail": detail })
}

#[test]
fn failures_print_the_reason_and_exit_with_1() {
    let missing = problem(404, "no account acme");
    let mut of_field = problem(422, "account acme has no service b");
    of_field["field"] = "allowed_services".into();
    let refused =
        "gw-gateway: the gateway at {url} refuses the admin token (from GW_ADMIN_TOKEN): ";
    let other_server = "is not the admin listener of a gateway";
    let unknown = json!("what?");
    for (line, status, answer, says) in [
        (
            "account show acme",
            404,
            &missing,
            &["gw-gateway: no account acme\n"][..],
        ),
        (
            "account show acme --json",
            404,
            &missing,
            &["gw-gateway: no account acme\n"],
        ),
        (
            "key create acme --service b",
            422,
            &of_field,
            &["gw-gateway: allowed_services: account acme has no service b\n"],
        ),
        (
            "account list",
            401,
            &problem(401, "no"),
            &[refused, "admin.token in the data_dir"],
        ),
        ("account list", 302, &unknown, &[other_server]),
        ("account list", 404, &unknown, &[other_server]),
        ("account list", 500, &unknown, &[other_server]),
        (
            "account list",
            200,
            &unknown,
            &["gw-gateway: cannot parse the response of the gateway: "],
        ),
    ] {
        assert_escaped(line, &[(status, answer.clone())]);
        let api = FakeApi::new(vec![(status, answer.clone())]);
        let ended = administer(&api, line);
        assert_eq!((ended.code, ended.out.as_str()), (1, ""), "{line}");
        let err = ended.err.replace(&api.url, "{url}");
        assert_says(&err, says);
    }
}

#[test]
fn an_address_without_a_gateway_is_named() {
    let (_closed, unused) = backend::refusing();
    let mut command = gw_gateway(&format!("account list --admin-url http://{unused}"));
    let ended = end(command.env("GW_ADMIN_TOKEN", "t0ken"));
    let says = format!("gw-gateway: no response from http://{unused}: ");
    ended.assert_failed(1, &[&says]);
}

#[test]
fn invalid_arguments_exit_with_2() {
    for (line, token, says) in [
        (
            "account list",
            None,
            "no admin token: set GW_ADMIN_TOKEN, or",
        ),
        (
            "account create ACME",
            None,
            "3 to 15 characters of a-z and 0-9",
        ),
        (
            "service change acme api --affinity header:host",
            None,
            "host does not reach the agent",
        ),
        ("account list --config nowhere.toml", None, "nowhere.toml: "),
        (
            "account list --admin-token-file nowhere",
            None,
            "cannot read the admin token: nowhere: ",
        ),
        (
            "account list --admin-url ftp://eu1.example.com",
            Some("t0ken"),
            "is not a URL such as http://127.0.0.1:9080 or https://",
        ),
        (
            "service change acme api",
            Some("t0ken"),
            "nothing to change",
        ),
    ] {
        let mut command = gw_gateway(line);
        let ended = end(command.envs(token.map(|token| ("GW_ADMIN_TOKEN", token))));
        assert_eq!(ended.out, "", "{line}");
        ended.assert_failed(2, &[says]);
    }
}

#[test]
fn the_configuration_file_supplies_address_and_token() {
    let api = FakeApi::new(vec![(200, page(&[]))]);
    let installation = Installation::new();
    fs::create_dir(installation.path("data")).unwrap();
    fs::write(installation.path("data/admin.token"), "t0ken\n").unwrap();
    let mut command = gw_gateway("account list --config");
    let listen = format!(
        "admin_listen = \"{}\"",
        api.url.trim_start_matches("http://")
    );
    let text = fs::read_to_string(installation.config()).unwrap();
    let text = text.replace("admin_listen = \"127.0.0.1:0\"", &listen);
    fs::write(installation.config(), text).unwrap();
    let ended = end(command.arg(installation.config()));
    assert_eq!(
        (ended.out.as_str(), ended.err.as_str()),
        ("No accounts.\n", "")
    );
    assert_eq!(ended.code, 0);
}

#[test]
fn a_closed_output_pipe_is_not_a_failure() {
    // More output than a pipe holds, and a reader that does not read.
    let accounts = (0..10_000).map(|number| account(&format!("a{number:06}")));
    let accounts: Vec<Value> = accounts.collect();
    let api = FakeApi::new(vec![(200, page(&accounts))]);
    let mut command = api.command("account list");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut [0; 100]).unwrap();
    drop(out);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(output.stderr, b"");
}
