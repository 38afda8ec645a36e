//! Commands that set up a service, run as an operator does.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::support::peers::backend;
use crate::support::peers::caller::HOST;
use crate::support::processes::process::{
    Running, Served, config_text, gw_agent, gw_gateway, serve, serve_command,
};
use crate::support::{eventually, programs};

/// The administrator of a gateway.
struct Operator {
    data_dir: PathBuf,
    admin_address: SocketAddr,
}

impl Operator {
    /// Runs a command; returns what it prints.
    fn text(&self, arguments: &str) -> String {
        let output = gw_gateway()
            .args(arguments.split(' '))
            .args([
                "--admin-url",
                &format!("http://{}", self.admin_address),
                "--admin-token-file",
            ])
            .arg(self.data_dir.join("admin.token"))
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{arguments}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, arguments: &str) -> Value {
        self.text(&format!("{arguments} --json")).parse().unwrap()
    }
}

/// A path with the folder of the agent's program.
fn path_with_agent() -> String {
    let program = PathBuf::from(gw_agent().get_program());
    let folder = program.parent().unwrap().display();
    format!("{folder}:{}", std::env::var("PATH").unwrap())
}

/// Uses only the programs and their commands, as an operator does.
#[test]
fn commands_alone_set_up_a_relayed_request_from_an_empty_folder() {
    if !programs::usable(&["curl"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("gateway.toml");
    let data_dir = directory.path().join("data");
    std::fs::write(&config, config_text(&data_dir, 0)).unwrap();
    let Served {
        process: _gateway,
        address,
        admin_address,
        ..
    } = serve(&mut serve_command(&config));
    let operator = Operator {
        data_dir: data_dir.clone(),
        admin_address,
    };
    let gw = |arguments: &str| operator.json(arguments);
    gw("account create demo");
    gw("service create demo echo --burst 10");
    let key = gw("key create demo --service echo")["service_key"]
        .as_str()
        .unwrap()
        .to_owned();
    let credential = gw("credential create demo --service echo --name ci");
    let backend = backend::answering("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello");
    let backend_port = backend.rsplit(':').next().unwrap();
    let mut agent = start_as_printed(&operator, directory.path(), backend_port);
    let mut relayed = BufReader::new(agent.stdout.take().unwrap()).lines();
    let mut log = BufReader::new(agent.stderr.take().unwrap()).lines();
    let _agent = Running::new(agent);
    the_agent_waits_until_it_is_approved(&operator, &mut log);
    std::thread::spawn(move || log.for_each(drop));
    let port = address.port();
    assert_eq!(
        relayed.next().unwrap().unwrap(),
        format!("https://{HOST}:{port} -> http://localhost:{backend_port}")
    );
    let state = directory.path().join("agent");
    let modes = |path: &Path| {
        use std::os::unix::fs::PermissionsExt;
        std::fs::metadata(path).unwrap().permissions().mode() & 0o777
    };
    assert_eq!(
        (
            modes(&state),
            modes(&state.join("identity.pem")),
            modes(&state.join("agent.json"))
        ),
        (0o700, 0o600, 0o600)
    );

    let curl = |fields: &[&str], path: &str| curl(&data_dir, port, &credential, fields, path);
    let with_key = format!("X-Gw-Service-Key: {key}");
    eventually("requests are relayed", || {
        (curl(&[&with_key], "/") == "hello").then_some(())
    });
    let minted: Value = serde_json::from_str(&curl(&[], "/oauth/token")).unwrap();
    let with_token = format!(
        "X-Gw-Authorization: Bearer {}",
        minted["access_token"].as_str().unwrap()
    );
    assert_eq!(curl(&[&with_token], "/"), "hello");
    assert_eq!(gw("signing-key list")["items"].as_array().unwrap().len(), 1);
    assert!(gw("audit list")["items"].as_array().unwrap().len() >= 7);
}

/// Creates an enrollment token, and starts the agent with the command that is printed with it.
fn start_as_printed(operator: &Operator, folder: &Path, backend_port: &str) -> Child {
    let create = "enrollment-token create demo --service echo --approval manual --backend-port";
    let printed = operator.text(&format!("{create} {backend_port}"));
    let (_, pasted) = printed
        .split_once(&format!("which listens on port {backend_port}:\n\n"))
        .unwrap();
    // The shell becomes the agent, which the test can end.
    let pasted = pasted.replace("\ngw-agent ", "\nexec gw-agent ");
    Command::new("sh")
        .args(["-e", "-c", &pasted])
        .env("PATH", path_with_agent())
        .env("GW_STATE_DIR", folder.join("agent"))
        .current_dir(folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
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
        line.unwrap()
            .split_once("waiting for an administrator")
            .map(|it| it.1.to_owned())
    });
    let waiting = waiting.unwrap();
    let record = gw(&format!("agent show demo {agent}"));
    let enrollment = record["enrollment_id"].as_str().unwrap().to_owned();
    assert!(
        waiting.contains(&agent) && waiting.contains(&enrollment),
        "{waiting}"
    );
    for shown in [
        "agent list demo".to_owned(),
        format!("agent show demo {agent}"),
    ] {
        let shown = operator.text(&shown);
        assert!(
            shown.contains(&agent) && shown.contains(&enrollment),
            "{shown}"
        );
    }
    assert_eq!(
        gw(&format!("agent approve demo {agent}"))["status"],
        "approved"
    );
}

fn curl(data_dir: &Path, port: u16, credential: &Value, fields: &[&str], path: &str) -> String {
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--show-error", "--cacert"])
        .arg(data_dir.join("dev-ca.crt"));
    for host in [HOST, "eu1.gw.localhost"] {
        curl.args(["--resolve", &format!("{host}:{port}:127.0.0.1")]);
    }
    for field in fields {
        curl.args(["-H", field]);
    }
    let host = if path.starts_with("/oauth") {
        "eu1.gw.localhost"
    } else {
        HOST
    };
    if path.starts_with("/oauth") {
        let client = |name: &str| credential[name].as_str().unwrap().to_owned();
        curl.args([
            "--user",
            &format!("{}:{}", client("client_id"), client("client_secret")),
        ]);
        curl.args(["--data-urlencode", "scope=account:demo service:echo"]);
    }
    let output = curl
        .arg(format!("https://{host}:{port}{path}"))
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_commands_that_a_new_service_prints_relay_a_request() {
    if !programs::usable(&["curl"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("gateway.toml");
    let data_dir = directory.path().join("data");
    std::fs::write(&config, config_text(&data_dir, 0)).unwrap();
    let Served {
        process: _gateway,
        admin_address,
        ..
    } = serve(&mut serve_command(&config));
    let backend = backend::answering("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello");
    let output = gw_gateway()
        .args(
            "service create acme api --create-account --with-key --with-agent --json \
               --backend-port"
                .split(' '),
        )
        .args([
            backend.rsplit(':').next().unwrap(),
            "--admin-url",
            &format!("http://{admin_address}"),
        ])
        .arg("--admin-token-file")
        .arg(data_dir.join("admin.token"))
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let created: Value = serde_json::from_slice(&output.stdout).unwrap();
    let path = path_with_agent();
    let shell = |command: &str| {
        // Each command has a folder of its own, as on a machine of its own.
        let folder = tempfile::tempdir_in(directory.path()).unwrap().keep();
        let mut shell = Command::new("sh");
        shell
            .args(["-e", "-c", command])
            .env("PATH", &path)
            .env("GW_STATE_DIR", folder.join("state"))
            .current_dir(folder);
        shell
    };
    let command = |name: &str| created[name].as_str().unwrap().to_owned();
    // The shell becomes the agent, which the test can end.
    let mut agent = shell(&command("agent_command").replace("\ngw-agent ", "\nexec gw-agent "));
    let mut agent = agent.stdout(Stdio::piped()).spawn().unwrap();
    let mut relayed = BufReader::new(agent.stdout.take().unwrap()).lines();
    let _agent = Running::new(agent);
    let relayed = relayed.next().unwrap().unwrap();
    assert!(
        relayed.starts_with("https://acme--api.eu1.gw.localhost:"),
        "{relayed}"
    );
    let called = shell(&command("curl_command")).output().unwrap();
    assert_eq!(
        String::from_utf8_lossy(&called.stdout),
        "hello",
        "{}",
        String::from_utf8_lossy(&called.stderr)
    );
}
