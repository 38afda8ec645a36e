//! Implementations that nobody here wrote: an OAuth client, a JWT library, a tester of HTTP interfaces. They come from
//! PyPI into an environment under `target`; Python 3 with venv is what has to be there.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests stop at the first surprise")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
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

/// A demo of its own for each test; one at a time, because they load the machine.
fn with_demo(adjust: fn(&mut Config), test: impl FnOnce(&Demo)) {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let demo = Demo::start(&Options { adjust, ..Options::default() }).unwrap();
    test(&demo);
    demo.stop();
}

#[test]
fn authlib_obtains_tokens_that_pyjwt_verifies() {
    with_demo(
        |_| {},
        |demo| {
            let about = serde_json::to_string(&demo.about).unwrap();
            run(Command::new(ENVIRONMENT.join("bin/python")).arg(Path::new(FOLDER).join("tokens.py")).arg(about));
        },
    );
}

/// The administration API does what its description says, whatever it is sent: no 5xx, no undocumented status, nothing
/// accepted or refused against the schema.
#[test]
fn schemathesis_finds_no_difference_between_the_api_and_its_description() {
    with_demo(
        |config| config.enrollment_requests = Rate::new(1000, 1000).unwrap(),
        |demo| {
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
        },
    );
}
