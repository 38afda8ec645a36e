//! Commands that set up a service, run as an operator does.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::administration::{Installation, assert_says, end};
use crate::support::peers::backend;
use crate::support::peers::caller::HOST;
use crate::support::processes::process::{Running, Served, gw_agent};
use crate::support::{eventually, programs};

/// The administrator of a gateway.
struct Operator {
    installation: Installation,
    served: Served,
}

impl Operator {
    fn new() -> Self {
        let installation = Installation::new();
        let served = installation.serve();
        Self {
            installation,
            served,
        }
    }

    /// Runs a command; returns what it prints.
    fn text(&self, arguments: &str) -> String {
        let mut command = self.installation.administer(&self.served);
        end(command.args(arguments.split(' '))).done()
    }

    fn json(&self, arguments: &str) -> Value {
        self.text(&format!("{arguments} --json")).parse().unwrap()
    }

    /// A shell that runs a printed command in a folder, and that finds the program of the agent.
    fn shell(&self, printed: &str, folder: &Path) -> Command {
        let program = PathBuf::from(gw_agent().get_program());
        let programs = program.parent().unwrap().display();
        let path = format!("{programs}:{}", std::env::var("PATH").unwrap());
        // The shell becomes the agent, which the test can end.
        let printed = printed.replace("\ngw-agent ", "\nexec gw-agent ");
        let mut shell = Command::new("sh");
        shell
            .args(["-e", "-c", &printed])
            .env("PATH", path)
            .env("GW_STATE_DIR", folder.join("agent"))
            .current_dir(folder)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        shell
    }

    fn curl(&self, credential: &Value, fields: &[&str], path: &str) -> String {
        const APEX: &str = "eu1.gw.localhost";
        let port = self.served.address.port();
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--show-error", "--cacert"])
            .arg(self.installation.path("data/dev-ca.crt"));
        for host in [HOST, APEX] {
            curl.args(["--resolve", &format!("{host}:{port}:127.0.0.1")]);
        }
        for field in fields {
            curl.args(["-H", field]);
        }
        let mut host = HOST;
        if path.starts_with("/oauth") {
            host = APEX;
            let client = |name: &str| credential[name].as_str().unwrap().to_owned();
            let user = format!("{}:{}", client("client_id"), client("client_secret"));
            curl.args(["--user", &user]);
            curl.args(["--data-urlencode", "scope=account:demo service:echo"]);
        }
        end(curl.arg(format!("https://{host}:{port}{path}"))).out
    }
}

/// Uses only the programs and their commands, as an operator does.
#[test]
fn commands_alone_set_up_a_relayed_request_from_an_empty_folder() {
    if !programs::usable(&["curl"]) {
        return;
    }
    let operator = Operator::new();
    let gw = |arguments: &str| operator.json(arguments);
    gw("account create demo");
    gw("service create demo echo --burst 10");
    let key = gw("key create demo --service echo");
    let credential = gw("credential create demo --service echo --name ci");
    let backend = backend::answering("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello");
    let backend_port = backend.rsplit(':').next().unwrap();
    let create = "enrollment-token create demo --service echo --approval manual --backend-port";
    let printed = operator.text(&format!("{create} {backend_port}"));
    let before = format!("which listens on port {backend_port}:\n\n");
    let (_, pasted) = printed.split_once(&before).unwrap();
    let folder = operator.installation.path("");
    let mut agent = operator.shell(pasted, &folder).spawn().unwrap();
    let mut relayed = BufReader::new(agent.stdout.take().unwrap()).lines();
    let mut log = BufReader::new(agent.stderr.take().unwrap()).lines();
    let _agent = Running::new(agent);
    the_agent_waits_until_it_is_approved(&operator, &mut log);
    std::thread::spawn(move || log.for_each(drop));
    let port = operator.served.address.port();
    let expected = format!("https://{HOST}:{port} -> http://localhost:{backend_port}");
    assert_eq!(relayed.next().unwrap().unwrap(), expected);
    for (file, mode) in [
        ("agent", 0o700),
        ("agent/identity.pem", 0o600),
        ("agent/agent.json", 0o600),
    ] {
        let metadata = fs::metadata(folder.join(file)).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, mode, "{file}");
    }

    let curl = |fields: &[&str], path: &str| operator.curl(&credential, fields, path);
    let with_key = format!("X-Gw-Service-Key: {}", key["service_key"].as_str().unwrap());
    eventually("requests are relayed", || {
        (curl(&[&with_key], "/") == "hello").then_some(())
    });
    let minted: Value = curl(&[], "/oauth/token").parse().unwrap();
    let token = minted["access_token"].as_str().unwrap();
    let with_token = format!("X-Gw-Authorization: Bearer {token}");
    assert_eq!(curl(&[&with_token], "/"), "hello");
    assert_eq!(gw("signing-key list")["items"].as_array().unwrap().len(), 1);
    assert!(gw("audit list")["items"].as_array().unwrap().len() >= 7);
}

fn the_agent_waits_until_it_is_approved(
    operator: &Operator,
    log: &mut impl Iterator<Item = std::io::Result<String>>,
) {
    let gw = |arguments: &str| operator.json(arguments);
    let agent = eventually("the agent waits for its approval", || {
        gw("agent list demo")["items"][0]["agent_id"]
            .as_str()
            .map(str::to_owned)
    });
    let waiting = log.find_map(|line| {
        let line = line.unwrap();
        let (_, waiting) = line.split_once("waiting for an administrator")?;
        Some(waiting.to_owned())
    });
    let show = format!("agent show demo {agent}");
    let record = gw(&show);
    let ids = [&*agent, record["enrollment_id"].as_str().unwrap()];
    assert_says(&waiting.unwrap(), &ids);
    for command in ["agent list demo", &show] {
        assert_says(&operator.text(command), &ids);
    }
    let approved = gw(&format!("agent approve demo {agent}"));
    assert_eq!(approved["status"], "approved");
}

#[test]
fn the_commands_that_a_new_service_prints_relay_a_request() {
    if !programs::usable(&["curl"]) {
        return;
    }
    let operator = Operator::new();
    let backend = backend::answering("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello");
    let backend_port = backend.rsplit(':').next().unwrap();
    let created = operator.json(&format!(
        "service create acme api --create-account --with-key --with-agent --backend-port \
         {backend_port}"
    ));
    let shell = |command: &str| {
        // Each command has a folder of its own, as on a machine of its own.
        let folder = tempfile::tempdir_in(operator.installation.path("")).unwrap();
        operator.shell(created[command].as_str().unwrap(), &folder.keep())
    };
    let mut agent = shell("agent_command");
    let mut agent = agent.stderr(Stdio::inherit()).spawn().unwrap();
    let mut relayed = BufReader::new(agent.stdout.take().unwrap()).lines();
    let _agent = Running::new(agent);
    let relayed = relayed.next().unwrap().unwrap();
    let url = "https://acme--api.eu1.gw.localhost:";
    assert!(relayed.starts_with(url), "{relayed}");
    let called = end(&mut shell("curl_command"));
    assert_eq!(called.out, "hello", "{}", called.err);
}
