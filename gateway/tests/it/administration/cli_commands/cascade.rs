//! `account delete --cascade` shows what will go, and asks.

use std::io::Write;
use std::process::Stdio;

use serde_json::{Value, json};

use super::FakeApi;

const CONTENTS: &str = "GET /api/v1/accounts/acme/contents";
const DELETE: &str = "DELETE /api/v1/accounts/acme?cascade=true";

/// Runs the command with this input; returns its requests, exit code, output and errors.
fn run(options: &str, typed: &str) -> (Vec<String>, i32, String, String) {
    let kind = |count: usize, names: &[&str]| json!({ "count": count, "names": names });
    let contents = json!({
        "services": kind(1, &["api"]),
        "credentials": kind(0, &[]),
        "service_keys": kind(2, &["ci (k1)", "k2"]),
        "agents": kind(60, &["a (ag_1)"]),
        "domains": kind(0, &[]),
        "enrollment_tokens": kind(0, &[]),
    });
    let mut answers = vec![(204, Value::Null)];
    if !options.contains("--yes") {
        answers.insert(0, (200, contents));
    }
    let api = FakeApi::new(answers);
    let mut child = api
        .command(&format!("account delete acme {options}"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that does not ask may have ended.
    let _ = child.stdin.take().unwrap().write_all(typed.as_bytes());
    let output = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let code = output.status.code().unwrap();
    (api.asked(), code, text(output.stdout), text(output.stderr))
}

#[test]
fn a_cascade_is_made_after_its_confirmation_only() {
    let (asked, code, out, shown) = run("--cascade", "acme\n");
    assert_eq!(asked, [CONTENTS, DELETE], "{shown}");
    assert_eq!((code, out.as_str()), (0, "Deleted.\n"));
    let expected = "Account acme and with it:\n  1 services\n    api\n  2 service keys\n    ci \
                    (k1)\n    k2\n  60 agents\n    a (ag_1)\n    … and 59 more\n\
                    Type acme to delete all of it: ";
    assert_eq!(shown, expected);
    for typed in ["", "yes\n", "acm\n"] {
        let (asked, code, out, shown) = run("--cascade", typed);
        assert_eq!(asked, [CONTENTS], "{typed:?}");
        assert_eq!((code, out.as_str()), (1, ""), "{typed:?}");
        assert!(shown.contains("account acme was not deleted"), "{shown}");
    }
    let (asked, code, ..) = run("--cascade --yes", "");
    assert_eq!((asked, code), (vec![DELETE.to_owned()], 0));
}
