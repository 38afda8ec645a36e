//! Interoperability with other implementations: an OAuth client, a JWT library, a tester of HTTP
//! APIs, and clients and servers of HTTP, gRPC and WebSocket on both sides of the relay. Python
//! packages are installed from PyPI into an environment under `target`, and a browser driver and a
//! server from npm. Requirements: Python 3 with venv, Node.js with npm, nginx, Chromium, curl.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

#[allow(dead_code, reason = "shared with other tests")]
#[path = "it/support/mod.rs"]
mod support;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{LazyLock, Mutex, PoisonError};

use support::agents::in_process::Agent;
use support::peers::http2_caller;
use support::scene::{Plan, Scene};
use support::{SOON, programs};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/interop");

/// The Python environment, created again when `requirements.txt` changes.
static ENVIRONMENT: LazyLock<PathBuf> = LazyLock::new(|| {
    let environment = Path::new(env!("CARGO_TARGET_TMPDIR")).join("interop-venv");
    let wanted = Path::new(FOLDER).join("requirements.txt");
    let installed = environment.join("requirements.txt");
    if fs::read(&wanted).ok() != fs::read(&installed).ok() {
        run(Command::new("python3")
            .args(["-m", "venv", "--clear"])
            .arg(&environment));
        run(Command::new(environment.join("bin/pip"))
            .args(["install", "--quiet", "--no-compile", "--requirement"])
            .arg(&wanted));
        fs::copy(&wanted, &installed).unwrap();
    }
    environment
});

fn run(command: &mut Command) {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}\n{}\n{}",
        text(&output.stdout),
        text(&output.stderr)
    );
}

/// Command that runs a Python program of the tests.
fn python(program: &str) -> Command {
    let mut command = Command::new(ENVIRONMENT.join("bin/python"));
    command.arg(Path::new(FOLDER).join(program));
    command
}

/// Runs a test with its own scene, one test at a time, because they load the machine.
fn with_scene(plan: Plan, test: impl FnOnce(&Scene)) {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let scene = plan.start();
    test(&scene);
    scene.stop();
}

/// A backend served by a program of the tests, killed on drop.
struct Backend {
    process: Child,
    url: String,
}

impl Backend {
    fn start(command: &mut Command) -> Self {
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut url = String::new();
        BufReader::new(process.stdout.take().unwrap())
            .read_line(&mut url)
            .unwrap();
        Self {
            process,
            url: url.trim_end().to_owned(),
        }
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

/// Runs a test with an agent in front of `backend`, and with the JSON of what `gw-gateway demo`
/// prints.
fn with_relay(backend: &Backend, slots: Option<u32>, test: impl FnOnce(&Scene, &str)) {
    let plan = Scene::service().agent_to(&backend.url);
    let plan = match slots {
        Some(slots) => plan.slots(slots),
        None => plan,
    };
    with_scene(plan, |scene| {
        test(scene, &serde_json::to_string(&scene.about).unwrap());
    });
}

/// Runs a program twice: as the backend, and as the caller in front of the relay.
fn through_the_relay(program: &str, slots: Option<u32>) {
    let backend = Backend::start(python(program).arg("serve"));
    with_relay(&backend, slots, |_, about| {
        run(python(program).args(["call", about]));
    });
}

/// Starts a real server with these `limits` behind the relay and runs `program` in front of it.
fn with_server(program: &str, server: &str, limits: [&str; 2], arguments: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("seen");
    let backend = Backend::start(
        python(program)
            .args(["serve", server])
            .arg(&log)
            .args(limits),
    );
    with_relay(&backend, None, |_, about| {
        let arguments: Vec<&str> = arguments
            .iter()
            .map(|it| {
                if *it == LOG {
                    log.to_str().unwrap()
                } else {
                    it
                }
            })
            .collect();
        run(python(program)
            .args(["call", about, server])
            .args(arguments));
    });
}

/// Placeholder for the path of the file to which a server logs requests.
const LOG: &str = "LOG";

#[test]
fn httpx_aiohttp_and_curl_talk_to_uvicorn() {
    if !programs::usable(&["python3", "curl"]) {
        return;
    }
    through_the_relay("http_calls.py", None);
}

#[test]
fn grpc_calls_of_every_kind_pass_unchanged() {
    if !programs::usable(&["python3"]) {
        return;
    }
    through_the_relay("grpc_calls.py", None);
}

#[test]
fn websocket_messages_and_close_codes_pass_unchanged() {
    if !programs::usable(&["python3"]) {
        return;
    }
    through_the_relay("websocket_calls.py", Some(1100));
}

#[test]
fn websocket_protocol_errors_match_a_direct_connection() {
    if !programs::usable(&["python3"]) {
        return;
    }
    let backend = Backend::start(python("websocket_cases.py").arg("serve"));
    with_relay(&backend, None, |_, about| {
        run(python("websocket_cases.py").args(["call", about, &backend.url]));
    });
}

#[test]
fn relay_and_server_agree_on_where_messages_end() {
    if !programs::usable(&["python3", "nginx", "node"]) {
        return;
    }
    for server in SERVERS {
        with_server("differential.py", server, ["1000", "60"], &[LOG]);
    }
}

/// Configuration of an nginx that declines all requests without reading bodies and keeps
/// connections open.
const DECLINING_NGINX: &str = r#"
daemon off;
master_process off;
pid FOLDER/nginx.pid;
error_log FOLDER/nginx.err info;
events { worker_connections 1024; }
http {
  access_log off;
  client_body_temp_path FOLDER/body;
  proxy_temp_path FOLDER/proxy;
  fastcgi_temp_path FOLDER/fastcgi;
  uwsgi_temp_path FOLDER/uwsgi;
  scgi_temp_path FOLDER/scgi;
  server {
    listen unix:FOLDER/nginx.sock;
    location / { return 404 "$request_method $request_uri"; }
  }
}
"#;

/// nginx drains an announced body after its answer; here such a body would be the next request.
#[test]
fn nginx_gets_no_body_of_a_declined_extended_connect() {
    if !programs::usable(&["nginx"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().display().to_string();
    fs::write(
        folder.path().join("nginx.conf"),
        DECLINING_NGINX.replace("FOLDER", &path),
    )
    .unwrap();
    let start = format!("echo unix:{path}/nginx.sock; exec nginx -c {path}/nginx.conf");
    let backend = Backend::start(Command::new("sh").args(["-c", &start]));
    with_relay(&backend, None, |scene, _| {
        http2_caller::on_a_reactor(async {
            let caller = http2_caller::connect(scene).await;
            // nginx may still be starting.
            while caller.get("/").await.status != 404 {
                gw_shared::runtime::sleep(std::time::Duration::from_millis(20)).await;
            }
            for _ in 0..20 {
                let request = caller
                    .request(&::http::Method::CONNECT, "/chat")
                    .header("content-length", "40");
                let request = request.extension(h2::ext::Protocol::from_static("websocket"));
                let (response, _upload) = caller.begin(request, false).await;
                assert_eq!(http2_caller::whole(response).await.body, b"GET /chat");
                let next = caller.get("/next").await;
                assert_eq!(
                    (next.status.as_u16(), next.body.as_slice()),
                    (404, b"GET /next".as_slice())
                );
            }
        });
    });
}

/// Sends `GW_TEST_KEEPALIVE_REQUESTS` requests to each server.
#[test]
fn servers_that_close_idle_connections_fail_no_request() {
    if !programs::usable(&["python3", "nginx", "node"]) {
        return;
    }
    let requests =
        std::env::var("GW_TEST_KEEPALIVE_REQUESTS").unwrap_or_else(|_| "2000".to_owned());
    for server in SERVERS {
        // uvicorn's timeout has a resolution of one second.
        let idle = if server == "uvicorn" { "0" } else { "0.01" };
        with_server("keepalive.py", server, ["50", idle], &[idle, &requests]);
    }
}

const SERVERS: [&str; 3] = ["nginx", "node", "uvicorn"];

#[test]
fn fetch_http2_and_chromium_talk_to_node() {
    if !programs::usable(&["node", "npm", "chromium"]) {
        return;
    }
    let modules = node_modules("interop-node", &["playwright-core@1.64.1"]);
    let program = Path::new(FOLDER).join("node_calls.cjs");
    let backend = Backend::start(Command::new("node").arg(&program).arg("serve"));
    with_relay(&backend, None, |scene, about| {
        run(Command::new("node")
            .arg(&program)
            .args(["call", about])
            .env("NODE_PATH", modules)
            .env("NODE_EXTRA_CA_CERTS", &scene.about.ca_file));
    });
}

/// The modules of these packages of npm, in a folder of this name.
fn node_modules(folder: &str, packages: &[&str]) -> PathBuf {
    let prefix = Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder);
    let modules = prefix.join("node_modules");
    let is_installed = |package: &&str| modules.join(package.split('@').next().unwrap()).exists();
    if !packages.iter().all(is_installed) {
        let quiet = [
            "install",
            "--silent",
            "--no-package-lock",
            "--no-fund",
            "--no-audit",
        ];
        run(Command::new("npm")
            .args(quiet)
            .arg("--prefix")
            .arg(&prefix)
            .args(packages));
    }
    modules
}

/// A command for two requests on one connection of HTTP/1.1.
fn curl_twice(scene: &Scene) -> Command {
    let url = &scene.about.tenant_url;
    let mut command = Command::new("curl");
    command
        .args(["--silent", "--show-error", "--http1.1", "--header"])
        .arg(format!("X-Gw-Service-Key: {}", scene.about.service_key))
        .args(["--write-out", "%{http_code} %{num_connects}\n", "--cacert"])
        .arg(&scene.about.ca_file)
        .args([url, url]);
    command
}

/// NTLM authenticates connections: 200 handshakes of 8 users at once, at two servers behind two
/// agents.
#[test]
fn curl_authenticates_by_ntlm_at_express() {
    if !programs::usable(&["node", "npm", "curl"]) {
        return;
    }
    let modules = node_modules("interop-ntlm", &["express@5.3.0", "express-ntlm@2.7.0"]);
    let server = || {
        let program = Path::new(FOLDER).join("ntlm_server.cjs");
        Backend::start(Command::new("node").arg(program).env("NODE_PATH", &modules))
    };
    let servers = [server(), server()];
    with_relay(&servers[0], None, |scene, _| {
        let state = tempfile::tempdir().unwrap();
        scene.enroll("demo", &["echo"], state.path());
        let _agent = Agent::start(state.path().to_owned(), &servers[1].url);
        let began = std::time::Instant::now();
        while scene.tunnels().len() != 2 {
            assert!(began.elapsed() < SOON, "the second agent has no tunnel");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let said = |command: &mut Command| {
            let output = command.output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        std::thread::scope(|scope| {
            for number in 0..8 {
                scope.spawn(move || {
                    let user = format!("user{number}:secret");
                    for (method, content) in [("GET", &[][..]), ("POST", &["--data", "content"])] {
                        for _ in 0..13 {
                            let mut command = curl_twice(scene);
                            command.args(["--ntlm", "--user", &user]).args(content);
                            let expected = format!("{method} user{number}\n");
                            let expected = format!("{expected}200 1\n{expected}200 0\n");
                            assert_eq!(said(&mut command), expected);
                        }
                        assert_eq!(said(&mut curl_twice(scene)), "401 1\n401 0\n");
                    }
                });
            }
        });
    });
}

#[test]
fn authlib_obtains_tokens_that_pyjwt_verifies() {
    if !programs::usable(&["python3"]) {
        return;
    }
    with_scene(Scene::service().agent(), |scene| {
        run(python("tokens.py").arg(serde_json::to_string(&scene.about).unwrap()));
    });
}

/// Constraints between parameters that OpenAPI cannot express: a service needs its account, and a
/// range must not end before its start.
const BETWEEN_PARAMETERS: &str = r#"
[[operations]]
include-path = ["/requests", "/series", "/usage"]
checks.positive_data_acceptance.expected-statuses = ["2xx", "422"]
"#;

/// Checks the administration API against its description: no 5xx, no undocumented status, and no
/// request accepted or refused against the schema.
#[test]
fn schemathesis_confirms_the_api_description() {
    if !programs::usable(&["python3"]) {
        return;
    }
    let configuration = "enrollment_requests_per_minute = 1000\n";
    with_scene(
        Scene::service().agent().configuration(configuration),
        |scene| {
            let api = scene.api();
            let folder = tempfile::tempdir().unwrap();
            // First with generated values, then with existing resources.
            let existing = format!(
                "[parameters]\naccount = \"demo\"\nservice = \"echo\"\nagent = \"{}\"\n\
                 client_id = \"{}\"\nkey_id = \"{}\"\n",
                api.agents("demo")[0]["agent_id"].as_str().unwrap(),
                scene.about.client_id,
                api.list("/accounts/demo/service-keys")[0]["key_id"]
                    .as_str()
                    .unwrap(),
            );
            for (parameters, phases) in [
                ("", "coverage,fuzzing,stateful"),
                (existing.as_str(), "coverage,fuzzing"),
            ] {
                let config = folder.path().join("schemathesis.toml");
                fs::write(&config, format!("{parameters}{BETWEEN_PARAMETERS}")).unwrap();
                let api = format!("{}/api/v1", scene.about.admin_url);
                run(Command::new(ENVIRONMENT.join("bin/schemathesis"))
                    .arg("--config-file")
                    .arg(&config)
                    .args(["run", &format!("{api}/openapi.json"), "--url", &api])
                    .args([
                        "--header",
                        &format!("Authorization: Bearer {}", scene.about.admin_token),
                    ])
                    .args([
                        "--checks",
                        "all",
                        "--max-examples",
                        "30",
                        "--seed",
                        "1",
                        "--no-color",
                    ])
                    .args(["--phases", phases])
                    .current_dir(folder.path()));
            }
        },
    );
}
