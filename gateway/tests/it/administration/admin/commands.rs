//! Commands that set up a service, run as an operator does.

use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::peers::backend;
use crate::support::peers::caller::HOST;
use crate::support::processes::process::{
    Running, Served, config_text, gw_agent, gw_gateway, serve, serve_command,
};
use crate::support::{eventually, programs};

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
    let gw_as_a_person = |arguments: &str| -> String {
        let output = gw_gateway()
            .args(arguments.split(' '))
            .args([
                "--admin-url",
                &format!("http://{admin_address}"),
                "--admin-token-file",
            ])
            .arg(data_dir.join("admin.token"))
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{arguments}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    };
    let gw = |arguments: &str| -> Value {
        gw_as_a_person(&format!("{arguments} --json"))
            .parse()
            .unwrap()
    };
    gw("account create demo");
    gw("service create demo echo --burst 10");
    let key = gw("key create demo --service echo")["service_key"]
        .as_str()
        .unwrap()
        .to_owned();
    let credential = gw("credential create demo --service echo --name ci");
    let backend = backend::answering("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello");
    let backend_port = backend.rsplit(':').next().unwrap();
    // Runs the printed command in a shell whose path has the agent's program.
    let create = "enrollment-token create demo --service echo --approval manual --backend-port";
    let printed = gw_as_a_person(&format!("{create} {backend_port}"));
    let (_, pasted) = printed
        .split_once(&format!("which listens on port {backend_port}:\n\n"))
        .unwrap();
    // The shell becomes the agent, which the test can end.
    let pasted = pasted.replace("\ngw-agent ", "\nexec gw-agent ");
    let agent_program = std::path::PathBuf::from(gw_agent().get_program());
    let path = format!(
        "{}:{}",
        agent_program.parent().unwrap().display(),
        std::env::var("PATH").unwrap()
    );
    let state = directory.path().join("agent");
    let mut enrolling = Command::new("sh");
    enrolling
        .args(["-e", "-c", &pasted])
        .env("PATH", path)
        .env("GW_STATE_DIR", &state)
        .current_dir(directory.path());
    let mut enrolling = enrolling
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut relayed =
        std::io::BufRead::lines(std::io::BufReader::new(enrolling.stdout.take().unwrap()));
    let agent = eventually("the agent waits for its approval", || {
        gw("agent list demo")["items"][0]["agent_id"]
            .as_str()
            .map(str::to_owned)
    });
    let mut log =
        std::io::BufRead::lines(std::io::BufReader::new(enrolling.stderr.take().unwrap()));
    let _agent = Running::new(enrolling);
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
        let shown = gw_as_a_person(&shown);
        assert!(
            shown.contains(&agent) && shown.contains(&enrollment),
            "{shown}"
        );
    }
    assert_eq!(
        gw(&format!("agent approve demo {agent}"))["status"],
        "approved"
    );
    std::thread::spawn(move || log.for_each(drop));
    let relayed = relayed.next().unwrap().unwrap();
    assert_eq!(
        relayed,
        format!(
            "https://{HOST}:{} -> http://localhost:{backend_port}",
            address.port()
        )
    );
    let modes = |path: &std::path::Path| {
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

    let curl = |fields: &[&str], path: &str| {
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--show-error", "--cacert"])
            .arg(data_dir.join("dev-ca.crt"));
        for host in [HOST, "eu1.gw.localhost"] {
            curl.args(["--resolve", &format!("{host}:{}:127.0.0.1", address.port())]);
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
            .arg(format!("https://{host}:{}{path}", address.port()))
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
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
    let agent_program = std::path::PathBuf::from(gw_agent().get_program());
    let path = format!(
        "{}:{}",
        agent_program.parent().unwrap().display(),
        std::env::var("PATH").unwrap()
    );
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
    let mut relayed =
        std::io::BufRead::lines(std::io::BufReader::new(agent.stdout.take().unwrap()));
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
