//! Text from outside in the outputs of both programs: no terminal obeys it, and it forges no line.
//!
//! The tests here run a real agent at a gateway of an attacker. The commands of the gateway call
//! [`in_each_string`] with each answer of the tests in `cli_commands`, so that each string of each
//! record is hostile once.

mod gateway;

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

use self::gateway::{HostileGateway, Reply};
use super::assert_says;
use crate::support::agents::tunnel_frames::message;
use crate::support::eventually;
use crate::support::processes::process::{Running, gw_agent};

/// Line ends that forge a line, and what a terminal obeys: C0, DEL, C1, controls of direction,
/// separators.
pub(crate) const HOSTILE: &str = "\r\nforged\x1b[2J\x07\n\nforged\x7f\u{85}\u{9b}2J\u{200e}\
    \u{202e}\u{2066}\u{2028}forged\u{2029}";
const SERVICE: &str = "acme--api.eu1.gw.localhost";
const TOKEN: &str = "gw_et_0123456789abcdef.secret";

/// Checks one output of a program that has read [`HOSTILE`].
pub(crate) fn assert_harmless(what: &str, output: &[u8]) {
    let text = std::str::from_utf8(output).unwrap_or_else(|_| panic!("{what}: {output:?}"));
    let is_obeyed = |c: char| {
        c.is_control() && c != '\n'
            || matches!(
                c,
                '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
            )
    };
    assert!(!text.contains(is_obeyed), "{what}: {text:?}");
    let is_forged = |line: &str| line.trim_start().starts_with("forged");
    assert!(!text.lines().any(is_forged), "{what}: {text:?}");
}

/// Copies of `value`, in each of which another string is hostile.
pub(crate) fn in_each_string(value: &Value) -> Vec<Value> {
    let copies = |key: String, inner: &Value| {
        let replaced = |hostile: Value| {
            let mut copy = value.clone();
            *copy.pointer_mut(&key).unwrap() = hostile;
            copy
        };
        in_each_string(inner)
            .into_iter()
            .map(replaced)
            .collect::<Vec<_>>()
    };
    match value {
        Value::String(text) => vec![format!("{text}{HOSTILE}").into()],
        Value::Array(list) => (0..)
            .zip(list)
            .flat_map(|(at, inner)| copies(format!("/{at}"), inner))
            .collect(),
        Value::Object(map) => map
            .iter()
            .flat_map(|(key, inner)| copies(format!("/{key}"), inner))
            .collect(),
        _ => Vec::new(),
    }
}

/// A folder for the agent, with the certificate of the attacker's gateway.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new(gateway: &HostileGateway) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("ca.pem"), &gateway.ca_pem).unwrap();
        Self(folder)
    }

    fn state(&self) -> std::path::PathBuf {
        self.0.path().join("state")
    }

    /// `gw-agent` with the words of `line` and the state folder.
    fn agent(&self, line: &str) -> Command {
        let mut command = gw_agent();
        command
            .args(line.split(' '))
            .arg("--state-dir")
            .arg(self.state())
            .env("GW_LOG", "debug")
            .stdin(Stdio::null());
        command
    }

    /// `gw-agent` with `line` and the options of an enrollment.
    fn enrolling(&self, line: &str, gateway: &HostileGateway) -> Command {
        let mut command = self.agent(line);
        command
            .args(["--gateway", &gateway.url, "--token", TOKEN])
            .arg("--ca-file")
            .arg(self.0.path().join("ca.pem"));
        command
    }
}

/// Runs a command to its end. Returns its exit code and standard error.
fn end(what: &str, command: &mut Command) -> (Option<i32>, String, Output) {
    let output = command.output().unwrap();
    assert_harmless(&format!("{what}, standard output"), &output.stdout);
    assert_harmless(&format!("{what}, standard error"), &output.stderr);
    (
        output.status.code(),
        String::from_utf8(output.stderr.clone()).unwrap(),
        output,
    )
}

fn refusal() -> Value {
    json!({
        "error": { "code": format!("GW_X{HOSTILE}"), "message": HOSTILE, "request_id": HOSTILE },
    })
}

#[test]
fn answers_to_an_enrollment_are_escaped_and_its_services_checked() {
    let good = HostileGateway::enrolling(&[SERVICE]);
    let [enroll, status, csr] = &good[..] else {
        unreachable!()
    };
    let refused = |path: &'static str, code| (path, Reply::json(code, &refusal()));
    let raw = Reply::Raw(format!("HTTP/1.1 200 {HOSTILE}\r\n\r\n{HOSTILE}"));
    let mut attacks = vec![
        vec![refused("/enroll", 401)],
        vec![refused("/enroll", 403)],
        vec![refused("/enroll", 500)],
        vec![enroll.clone(), refused("/enroll/status", 404)],
        vec![enroll.clone(), status.clone(), refused("/csr", 403)],
        vec![("/enroll", raw)],
    ];
    for (path, reply) in &good {
        for hostile in in_each_string(reply.value()) {
            // The replies to the requests before are good.
            let before = good.iter().take_while(|(before, _)| before != path);
            let attack = before.cloned().chain([(*path, Reply::json(200, &hostile))]);
            attacks.push(attack.collect());
        }
    }
    let long = format!("acme--{}.eu1.gw.localhost", "x".repeat(60));
    for services in [
        &["acme--api.us1.example.com"][..],
        &[&long],
        &[SERVICE; 501],
    ] {
        let reply = HostileGateway::enrolling(services).pop().unwrap();
        attacks.push(vec![enroll.clone(), status.clone(), reply]);
    }
    assert!(matches!(csr.1, Reply::Certificate(..)));
    for attack in attacks {
        let what = format!("{attack:?}");
        let gateway = HostileGateway::start(attack, Vec::new());
        let folder = Folder::new(&gateway);
        let (code, error, _) = end(&what, &mut folder.enrolling("enroll", &gateway));
        let is_enrolled = folder.state().join("agent.json").exists();
        assert_eq!(code == Some(0), is_enrolled, "{what}: {error}");
        if is_enrolled {
            // Nothing of the hostile text was stored for later.
            assert_harmless(&what, &fs::read(folder.state().join("agent.json")).unwrap());
        }
    }
}

/// What `gw-agent http` logs while the gateway sends `messages` on its tunnel, up to a message that
/// ends it.
fn relay(messages: &[Value]) -> (Folder, HostileGateway, String) {
    let last = json!({ "type": HOSTILE });
    let frames = messages
        .iter()
        .chain([&last])
        .map(|value| message(value.to_string()))
        .collect();
    let gateway = HostileGateway::start(HostileGateway::enrolling(&[SERVICE]), frames);
    let folder = Folder::new(&gateway);
    let [out, log] = ["out", "log"].map(|name| folder.0.path().join(name));
    let mut command = folder.enrolling("http 1", &gateway);
    command
        .stdout(fs::File::create(&out).unwrap())
        .stderr(fs::File::create(&log).unwrap());
    let mut agent = Running::new(command.spawn().unwrap());
    let read = |path: &Path| fs::read(path).unwrap();
    eventually("the agent closes the tunnel", || {
        String::from_utf8_lossy(&read(&log))
            .contains("closing the tunnel")
            .then_some(())
    });
    agent.signal("TERM");
    agent.exit_code();
    assert_harmless("http, standard output", &read(&out));
    assert_harmless("http, standard error", &read(&log));
    let log = String::from_utf8(read(&log)).unwrap();
    // The agent may have opened another tunnel since, which brings the same messages.
    let (of_tunnel, _) = log.split_once("closing the tunnel").unwrap();
    (folder, gateway, of_tunnel.to_owned())
}

#[test]
fn messages_on_a_tunnel_are_escaped_and_their_services_checked() {
    let names = |names: &[&str]| json!({ "type": "services", "hostnames": names });
    let hostile = format!("acme--api{HOSTILE}.eu1.gw.localhost");
    let program = json!({
        "version": "99.0.0", "target": HOSTILE, "size": 1, "sha256": HOSTILE, "signature": HOSTILE,
    });
    let (folder, _, log) = relay(&[
        json!({ "type": "ready", "agent_id": HOSTILE, "generation": 1 }),
        names(&[SERVICE, &hostile]),
        names(&["acme--api.us1.example.com"]),
        names(&[SERVICE; 501]),
        json!({ "type": "renewal_refused", "message": HOSTILE }),
        json!({ "type": "programs", "programs": [program] }),
    ]);
    let refused = log.matches("cannot be its own; keeping the previous ones");
    assert_eq!(refused.count(), 3, "{log}");
    let stored: Value =
        serde_json::from_slice(&fs::read(folder.state().join("agent.json")).unwrap()).unwrap();
    assert_eq!(stored["services"], json!([SERVICE]));
}

#[test]
fn doctor_and_run_escape_refusals_and_stored_names() {
    let (folder, gateway, _) = relay(&[]);
    gateway.refuse_tunnels_with(Reply::json(403, &refusal()));
    let (code, _, output) = end(
        "doctor",
        &mut folder.agent("doctor --backend http://127.0.0.1:1"),
    );
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(code, Some(1), "{text}");
    assert_says(&text, &[r"GW_X\u{d}\u{a}forged\u{1b}[2J"]);
    let (_, _, output) = end(
        "doctor --json",
        &mut folder.agent("doctor --json --backend http://127.0.0.1:1"),
    );
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(found["checks"].as_array().unwrap().len() > 3, "{found}");

    // As an earlier version may have stored it.
    let path = folder.state().join("agent.json");
    let mut stored: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    stored["services"] = json!([format!("acme--api{HOSTILE}.eu1.gw.localhost")]);
    fs::write(&path, stored.to_string()).unwrap();
    for line in [
        "run --backend http://127.0.0.1:1",
        "doctor --backend http://127.0.0.1:1",
    ] {
        let (code, error, output) = end(line, &mut folder.agent(line));
        let said = error + &String::from_utf8(output.stdout).unwrap();
        assert_ne!(code, Some(0), "{line}: {said}");
        assert_says(&said, &["is not the hostname of a service"]);
    }
}
