//! Failures of the administration commands, and their exit codes.

use std::io::Read;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::{CREATED_AT, Ended, FakeApi, administer, assert_escaped, end, gw_gateway, page};

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
    assert!(
        err.starts_with(
            "gw-gateway: the gateway at {url} refuses the admin token (from GW_ADMIN_TOKEN): "
        ) && err.contains("admin.token in the data_dir"),
        "{err}"
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

    let (_closed, unused) = crate::support::peers::backend::refusing();
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
        "region = \"eu1\"\ndomain = \"example.com\"\ndata_dir = {data_dir:?}\n\
         admin_listen = \"{listen}\"\n"
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
        .map(|number| {
            json!({
                "id": format!("a{number:06}"),
                "capture_allowed": false,
                "created_at": CREATED_AT,
            })
        })
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
