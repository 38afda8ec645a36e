//! A table of mistakes of a first day, typed as they are written there. Each is refused with an
//! exit code that is not 0, and the message names the object, the cause and what to do.

use std::fs;
use std::process::Command;

use super::first_day::{FirstDay, check, refusal};
use super::{Installation, assert_says, end, region_certificate, self_signed};
use crate::support::peers::backend;
use crate::support::peers::caller::HOST;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::{gw_agent, start_logged};

/// The table.
const MISTAKES: &str = include_str!("mistakes.txt");

struct Mistake {
    typed: &'static str,
    /// Exit code of a command, or code of an error.
    code: &'static str,
    /// Parts of the message.
    says: Vec<&'static str>,
}

/// The mistakes of a section.
fn mistakes(section: &str) -> Vec<Mistake> {
    let (_, rest) = MISTAKES.split_once(&format!("\n[{section}]\n")).unwrap();
    let lines: Vec<_> = rest.lines().take_while(|line| !line.is_empty()).collect();
    let pairs = lines.chunks(2).map(|pair| {
        let (code, says) = pair[1].trim().split_once(": ").unwrap();
        Mistake {
            typed: pair[0],
            code,
            says: says.split(" | ").collect(),
        }
    });
    pairs.collect()
}

impl FirstDay {
    fn filled(&self, text: &str) -> String {
        text.replace("{port}", &self.served.address.port().to_string())
            .replace("{admin}", &self.served.admin_address.to_string())
            .replace("{token}", &self.token)
    }

    /// A command in the folder of the day.
    fn typed(&self, line: &str) -> Command {
        let line = self.filled(line);
        let mut words = line.split(' ');
        let mut command = match words.next() {
            Some("gw-agent") => gw_agent(),
            _ => self.installation.administer(&self.served),
        };
        command.args(words).current_dir(self.installation.path(""));
        command
    }

    fn refuses(&self, line: &str, code: i32, says: &[&str]) {
        let ended = end(&mut self.typed(line));
        assert_eq!(ended.code, code, "{line}: {ended:?}");
        let says: Vec<String> = says.iter().map(|part| self.filled(part)).collect();
        let says: Vec<&str> = says.iter().map(String::as_str).collect();
        assert_says(&ended.err, &says);
    }

    fn refuses_all(&self, section: &str) {
        for Mistake { typed, code, says } in mistakes(section) {
            self.refuses(typed, code.parse().unwrap(), &says);
        }
    }
}

#[test]
fn command_lines() {
    let day = FirstDay::new();
    day.refuses_all("gateway");
    day.refuses_all("agent");
}

#[test]
fn command_lines_that_are_taken_as_they_are_meant() {
    let day = FirstDay::new();
    day.administer("service create acme web");
    day.administer("key create acme --service api,web");
    let port = day.served.admin_address.port();
    let line =
        format!("gw-gateway account list --admin-url http://console.gw.localhost:{port}/api/v1");
    end(&mut day.typed(&line)).done();
}

const ENROLL: &str =
    "gw-agent enroll --gateway https://eu1.gw.localhost:{port} --token {token} --state-dir";

#[test]
fn options_of_an_enrollment() {
    let day = FirstDay::new();
    let right = [
        ("--state-dir", "a"),
        ("--gateway", "https://eu1.gw.localhost:{port}"),
        ("--token", "{token}"),
        ("--ca-file", "data/dev-ca.crt"),
    ];
    for Mistake { typed, code, says } in mistakes("enroll") {
        let mut line = format!("gw-agent enroll {typed}");
        for (option, value) in right {
            if !typed.starts_with(option) {
                line += &format!(" {option} {value}");
            }
        }
        day.refuses(&line, code.parse().unwrap(), &says);
    }
    let untrusted = [
        "certificate at eu1.gw.localhost:{port} is not trusted",
        "--ca-file",
        "dev-ca.crt",
    ];
    day.refuses(&format!("{ENROLL} a"), 1, &untrusted);
}

#[test]
fn state_and_configuration_of_an_agent() {
    let day = FirstDay::new();
    let file = |name: &str| day.installation.path(name);
    let enrolled = format!("{ENROLL} enrolled --ca-file data/dev-ca.crt");
    end(&mut day.typed(&enrolled)).done();
    for (name, text) in [
        (
            "named.toml",
            "[backends]\napi = \"http://127.0.0.1:3000\"\n",
        ),
        ("number.toml", "backend = 3000\n"),
        ("unknown.toml", "gateway = \"https://eu1.gw.localhost\"\n"),
    ] {
        fs::write(file(name), format!("state_dir = \"enrolled\"\n{text}")).unwrap();
    }
    day.refuses_all("enrolled");

    const RUN: &str = "gw-agent run --state-dir enrolled --backend http://127.0.0.1:3000";
    const AGAIN: &str = "`gw-agent enroll --force`";
    fs::rename(file("enrolled/identity.pem"), file("kept")).unwrap();
    day.refuses(RUN, 2, &["enrolled/identity.pem does not exist", AGAIN]);
    fs::rename(file("kept"), file("enrolled/identity.pem")).unwrap();
    fs::write(file("enrolled/agent.json"), "{").unwrap();
    day.refuses(RUN, 2, &["enrolled/agent.json is damaged", AGAIN]);
}

#[test]
fn a_backend_that_is_not_running() {
    let day = FirstDay::new();
    let (_held, address) = backend::refusing();
    let line = format!("{ENROLL} a --ca-file data/dev-ca.crt")
        .replace("enroll", &format!("http {}", address.port()));
    let (_agent, log) = start_logged(&mut day.typed(&line));
    let warning = log.line_with("the backend does not take connections");
    let url = format!("http://localhost:{}", address.port());
    let remedy = "start it, or correct its address";
    assert_says(&warning, &[&url, "Connection refused", remedy]);
}

#[test]
fn lines_of_a_configuration() {
    for Mistake { typed, says, .. } in mistakes("configuration") {
        check(&format!("{}\n", typed.replace("\\n", "\n")), &says);
    }
}

/// A certificate as `openssl req -x509` makes it.
#[test]
fn a_certificate_of_an_authority() {
    let files = tempfile::tempdir().unwrap();
    let mut params = region_certificate();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let installation = Installation::with(&self_signed(files.path(), &params));
    let says = [
        "CA:TRUE",
        "basicConstraints=critical,CA:FALSE",
        "openssl req -x509",
        "tls_certificate: ",
        "server.crt: ",
    ];
    let ended = end(installation.serve_command().arg("--check"));
    assert_eq!(ended.code, 0, "{ended:?}");
    assert_says(&ended.err, &says);

    let served = installation.serve();
    let gateway = format!("https://eu1.gw.localhost:{}", served.address.port());
    let mut enroll = gw_agent();
    enroll
        .args(["enroll", "--token", "gw_et_0123456789abcdef.x"])
        .args(["--gateway", &gateway])
        .arg("--ca-file")
        .arg(files.path().join("server.crt"))
        .arg("--state-dir")
        .arg(files.path().join("agent"));
    // Agents that have this certificate in their file trust it.
    end(&mut enroll).assert_failed(1, &["the gateway refused the enrollment token"]);
}

#[test]
fn requests_of_callers() {
    let prepared = Prepared::new();
    let served = prepared.serve_with(&prepared.config());
    for Mistake { typed, code, says } in mistakes("callers") {
        let typed = typed.replace("{key}", prepared.service_key());
        let mut fields = typed.split(" & ");
        let host = fields.next().unwrap();
        let fields: String = fields.map(|field| format!("{field}\r\n")).collect();
        let request = format!("GET / HTTP/1.1\r\nHost: {host}\r\n{fields}\r\n");
        let error = refusal(&prepared, &served, host, &request);
        assert_eq!(error["code"], code, "{typed}: {error}");
        assert_says(error["message"].as_str().unwrap(), &says);
    }
    let request = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let error = refusal(&prepared, &served, HOST, request);
    assert_eq!(error["code"], "GW_MISDIRECTED");
    let says = [
        "this host is not served here",
        "check the URL, its DNS and the Host field",
    ];
    assert_says(error["message"].as_str().unwrap(), &says);
}
