//! Implementations that nobody here wrote: an OAuth client, a JWT library, a tester of HTTP interfaces; clients and servers
//! of HTTP, gRPC and WebSocket with the relay between them. They come from PyPI into an environment under `target`;
//! Python 3 with venv is what has to be there.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests stop at the first surprise")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{LazyLock, Mutex, PoisonError};

use gw_gateway::config::Config;
use gw_gateway::demo::{Demo, Options};
use gw_gateway::limit::Rate;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/interop");

/// The environment, made once for each content of `requirements.txt`.
static ENVIRONMENT: LazyLock<PathBuf> = LazyLock::new(|| {
    let environment = Path::new(env!("CARGO_TARGET_TMPDIR")).join("interop-venv");
    let (wanted, installed) = (Path::new(FOLDER).join("requirements.txt"), environment.join("requirements.txt"));
    if fs::read(&wanted).ok() != fs::read(&installed).ok() {
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&environment));
        run(Command::new(environment.join("bin/pip")).args(["install", "--quiet", "--requirement"]).arg(&wanted));
        fs::copy(&wanted, &installed).unwrap();
    }
    environment
});

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command:?}\n{}\n{}", text(&output.stdout), text(&output.stderr));
}

/// Python with one of our programs.
fn python(program: &str) -> Command {
    let mut command = Command::new(ENVIRONMENT.join("bin/python"));
    command.arg(Path::new(FOLDER).join(program));
    command
}

/// A demo of its own for each test; one at a time, because they load the machine.
fn with_demo(options: &Options, test: impl FnOnce(&Demo)) {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let demo = Demo::start(options).unwrap();
    test(&demo);
    demo.stop();
}

/// A backend that a program of ours serves; it ends with this.
struct Backend {
    process: Child,
    url: String,
}

impl Backend {
    fn start(command: &mut Command) -> Self {
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut url = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut url).unwrap();
        Self { process, url: url.trim_end().to_owned() }
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

/// Runs a program as the backend, and again as the caller in front of the relay.
fn through_the_relay(program: &str, options: Options) {
    let backend = Backend::start(python(program).arg("serve"));
    let rate = Rate::new(1_000_000, 1_000_000).unwrap();
    let options = Options { backend: Some(backend.url.clone()), rate, workers: 2, ..options };
    with_demo(&options, |demo| run(python(program).arg("call").arg(serde_json::to_string(&demo.about).unwrap())));
}

#[test]
fn httpx_aiohttp_and_curl_get_what_uvicorn_sends() {
    through_the_relay("http_calls.py", Options::default());
}

#[test]
fn grpc_calls_of_every_kind_are_as_without_a_relay() {
    through_the_relay("grpc_calls.py", Options::default());
}

#[test]
fn a_thousand_websockets_keep_messages_and_close_codes() {
    through_the_relay("websocket_calls.py", Options { slots: Some(1100), ..Options::default() });
}

#[test]
fn authlib_obtains_tokens_that_pyjwt_verifies() {
    with_demo(&Options::default(), |demo| {
        run(python("tokens.py").arg(serde_json::to_string(&demo.about).unwrap()));
    });
}

/// The administration API does what its description says, whatever it is sent: no 5xx, no undocumented status, nothing
/// accepted or refused against the schema.
#[test]
fn schemathesis_finds_no_difference_between_the_api_and_its_description() {
    let adjust = |config: &mut Config| config.enrollment_requests = Rate::new(1000, 1000).unwrap();
    with_demo(&Options { adjust, ..Options::default() }, |demo| {
        let control = demo.gateway().control();
        let records = control.records();
        let folder = tempfile::tempdir().unwrap();
        // First with whatever it makes up and then finds, then with what there is.
        let existing = format!(
            "[parameters]\naccount = \"demo\"\nservice = \"echo\"\nagent = \"{}\"\nclient_id = \"{}\"\nkey_id = \"{}\"\n",
            records.agents.keys().next().unwrap(),
            records.credentials.keys().next().unwrap(),
            records.service_keys.keys().next().unwrap(),
        );
        for (parameters, phases) in [("", "coverage,fuzzing,stateful"), (existing.as_str(), "coverage,fuzzing")] {
            let config = folder.path().join("schemathesis.toml");
            fs::write(&config, parameters).unwrap();
            let api = format!("{}/api/v1", demo.about.admin_url);
            run(Command::new(ENVIRONMENT.join("bin/schemathesis"))
                .arg("--config-file")
                .arg(&config)
                .args(["run", &format!("{api}/openapi.json"), "--url", &api])
                .args(["--header", &format!("Authorization: Bearer {}", demo.about.admin_token)])
                .args(["--checks", "all", "--max-examples", "30", "--seed", "1", "--no-color"])
                .args(["--phases", phases])
                .current_dir(folder.path()));
        }
    });
}
