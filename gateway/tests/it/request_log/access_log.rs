//! The access log: its fields, rotation, takeover, standard output and a full disk.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::support::apex::APEX;
use crate::support::doctor::{OF_NODE, examine, of_development, with};
use crate::support::peers::backend;
use crate::support::peers::caller::HOST;
use crate::support::peers::held_backend::HeldBackend;
use crate::support::processes::kept_connection::KeptConnection;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process;
use crate::support::processes::process::{Log, Served, gw_gateway, serve_command};
use crate::support::processes::successor::replace;
use crate::support::request_log::{assert_fields, call, capture_bodies, record};
use crate::support::scene::Scene;
use crate::support::{SOON, eventually, programs};

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";

/// The complete lines of a file.
fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect()
}

/// Waits for the line of a request.
fn line(path: &Path, id: &str) -> Value {
    eventually("the request is in the access log", || {
        lines(path).into_iter().find(|line| line["id"] == id)
    })
}

/// A scene that captures, with an access log in `folder`, and the path of the log.
fn scene_with_log(folder: &Path) -> (Scene, PathBuf) {
    let path = folder.join("access.jsonl");
    let backend = "HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngone";
    let scene = Scene::service()
        .agent_to(backend::answering(backend))
        .data_dir(folder)
        .configuration(format!("access_log = {path:?}\n"))
        .start();
    capture_bodies(&scene.api());
    (scene, path)
}

#[test]
fn every_request_has_a_line_with_the_fields_of_its_record() {
    let folder = tempfile::tempdir().unwrap();
    let (scene, path) = scene_with_log(folder.path());
    let api = scene.api();
    let key = &scene.about.service_key;
    let post = format!("POST /orders/7?limit=5&key={key}");
    let status = "GET /enroll/status?enrollment_id=en_1&x=hidden";
    let requests = [
        scene.request(&post, "Content-Length: 3\r\n\r\nabc"),
        format!("GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n"),
        format!("{status} HTTP/1.1\r\nHost: {APEX}\r\n\r\n"),
    ];
    let ids = requests.map(|request| call(&scene, &request).1);
    for id in &ids {
        let recorded = record(&api, id);
        let shown = gw_gateway()
            .args(["request", "show", id, "--json"])
            .env("GW_ADMIN_URL", &scene.about.admin_url)
            .env("GW_ADMIN_TOKEN", &scene.about.admin_token)
            .output()
            .unwrap();
        let mut shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
        assert_eq!(shown, recorded);
        for captured in ["captured_request", "captured_response"] {
            shown.as_object_mut().unwrap().remove(captured).unwrap();
        }
        assert_eq!(line(&path, id), shown);
    }
    // A line is counted after it is written.
    eventually("all lines are counted", || {
        let written = scene.metrics().count("gw_access_log_written_total");
        (written == lines(&path).len() as u64).then_some(())
    });
    assert_eq!(scene.metrics().count("gw_access_log_dropped_total"), 0);
    let text = fs::read_to_string(&path).unwrap();
    let secret = key.split('.').nth(1).unwrap();
    for part in [secret, "hidden", "captured"] {
        assert!(!text.contains(part), "{part}: {text}");
    }
    scene.stop();
}

#[test]
fn requests_outside_the_request_log_have_lines() {
    let folder = tempfile::tempdir().unwrap();
    let (scene, path) = scene_with_log(folder.path());
    let api = scene.api();
    api.change_service("demo", "echo", &json!({ "request_logging": false }));
    let post = scene.request("POST /unlogged", "Content-Length: 2\r\n\r\nhi");
    let (_, unlogged) = call(&scene, &post);
    let key_id = scene.about.service_key.trim_start_matches("gw_sk_");
    let expected = json!({
        "account": "demo",
        "service": "echo",
        "status": 404,
        "path": "/unlogged",
        "caller_id": key_id.split('.').next().unwrap(),
        "bytes_in": 2,
        "bytes_taken": 2,
    });
    assert_fields(&line(&path, &unlogged), &expected);
    let reply = api.get(&format!("/requests/{unlogged}"));
    assert_eq!(reply.status, 404, "{reply:?}");

    let other_host = "GET /?secret=hidden HTTP/1.1\r\nHost: other.example.com\r\n\r\n";
    let (_, stray) = call(&scene, other_host);
    let expected = json!({ "service": "", "code": "GW_MISDIRECTED", "query": "secret=***" });
    assert_fields(&line(&path, &stray), &expected);
    let (_, invalid) = call(&scene, "GET /%zz HTTP/1.1\r\nHost: a b\r\n\r\n");
    assert_eq!(line(&path, &invalid)["code"], "GW_BAD_REQUEST");
    let text = fs::read_to_string(&path).unwrap();
    for part in ["hidden", "captured"] {
        assert!(!text.contains(part), "{part}: {text}");
    }
}

/// Sends a request; returns its id.
fn ask(prepared: &Prepared, address: SocketAddr) -> String {
    let mut caller = prepared.connect(address);
    caller.send(prepared.get("/"));
    let response = caller.response();
    assert_eq!(response.status, 200);
    response.header("x-gw-request-id").to_owned()
}

/// The configuration of a gateway with an access log at `path`.
fn config_with(prepared: &Prepared, path: &Path) -> String {
    format!("{}access_log = {path:?}\n", prepared.config())
}

#[test]
fn a_rotated_file_is_left_alone() {
    let prepared = Prepared::new();
    let path = prepared.path("access.jsonl");
    let rotated = prepared.path("access.jsonl.1");
    let served = prepared.serve_with(&config_with(&prepared, &path));
    let _agent = prepared.run_agent(served.address.port(), &backend::answering(OK));
    prepared.wait_for_tunnel(served.address);
    let first = ask(&prepared, served.address);
    line(&path, &first);
    fs::rename(&path, &rotated).unwrap();
    served.process.signal("HUP");
    served.log.line_with("access log reopened");
    let second = ask(&prepared, served.address);
    line(&path, &second);
    let has = |id: &str| lines(&rotated).iter().any(|line| line["id"] == id);
    assert!(has(&first));
    assert!(!has(&second));
}

#[test]
fn a_successor_appends_to_the_same_file() {
    let prepared = Prepared::new();
    let path = prepared.path("access.jsonl");
    let Served {
        mut process,
        address,
        admin_address: _,
        log,
    } = prepared.serve_with(&config_with(&prepared, &path));
    let _port = process::hold(address);
    let backend = HeldBackend::start();
    let _agent = prepared.run_agent(address.port(), &backend.url);
    prepared.wait_for_tunnel(address);
    let mut kept = KeptConnection::begin(prepared.connect(address), &prepared.get("/"));
    let successor = replace(process.id(), &log);
    let by_successor = eventually("the successor answers", || {
        let mut caller = prepared.connect(address);
        caller.send(prepared.get("/"));
        let response = caller.response();
        (response.status == 200).then(|| response.header("x-gw-request-id").to_owned())
    });
    let by_first = kept.ask(&prepared.get("/"));
    let by_first = by_first.header("x-gw-request-id").to_owned();
    drop(kept);
    assert_eq!(process.exit_code(), Some(0));
    for id in [&by_successor, &by_first] {
        line(&path, id);
    }
    successor.stop();
    let found = lines(&path);
    let ids: BTreeSet<String> = found.iter().map(|line| line["id"].to_string()).collect();
    assert_eq!(found.len(), ids.len(), "no line is written twice");
}

#[test]
fn lines_go_to_standard_output() {
    let prepared = Prepared::new();
    let config = config_with(&prepared, Path::new("stdout"));
    fs::write(prepared.path("gateway.toml"), config).unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    let served = process::serve(serve_command(&prepared.path("gateway.toml")).stdout(writer));
    let _agent = prepared.run_agent(served.address.port(), &backend::answering(OK));
    prepared.wait_for_tunnel(served.address);
    let id = ask(&prepared, served.address);
    let (sender, lines) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(reader).lines().map_while(Result::ok) {
            let _ = sender.send(serde_json::from_str::<Value>(&line).unwrap());
        }
    });
    while lines.recv_timeout(SOON).unwrap()["id"] != id {}
}

/// A gateway with a file system of 256 KiB at `folder`, in a mount namespace that ends with it.
fn serve_on_a_small_disk(prepared: &Prepared, folder: &Path) -> Command {
    let script = r#"mount -t tmpfs -o size=256k,mode=700 none "$1" && shift && exec "$@""#;
    let mut command = Command::new("unshare");
    command
        .args(["--user", "--map-root-user", "--mount"])
        .args(["sh", "-c", script, "sh"])
        .arg(folder)
        .arg(gw_gateway().get_program())
        .args(["serve", "--config"])
        .arg(prepared.path("gateway.toml"));
    command
}

#[test]
fn a_full_disk_loses_lines_only_while_it_is_full() {
    if !programs::usable(&["unshare"]) {
        return;
    }
    let prepared = Prepared::new();
    let folder = prepared.path("logs");
    fs::create_dir(&folder).unwrap();
    let path = folder.join("access.jsonl");
    let config = config_with(&prepared, &path);
    fs::write(prepared.path("gateway.toml"), config).unwrap();
    let served = process::serve(&mut serve_on_a_small_disk(&prepared, &folder));
    let _agent = prepared.run_agent(served.address.port(), &backend::answering(OK));
    prepared.wait_for_tunnel(served.address);
    let inside = |path: &Path| {
        let root = format!("/proc/{}/root", served.process.id());
        Path::new(&root).join(path.strip_prefix("/").unwrap())
    };
    let before = ask(&prepared, served.address);
    line(&inside(&path), &before);

    let filler = inside(&folder.join("filler"));
    let mut file = fs::File::create(&filler).unwrap();
    while file.write_all(&[0; 512]).is_ok() {}
    let metric = |name: &str| served.metrics().count(name);
    // The last page of the file may have room for some lines.
    eventually("a line is lost", || {
        ask(&prepared, served.address);
        (metric("gw_access_log_dropped_total") > 0).then_some(())
    });
    assert_eq!(metric("gw_access_log_failing"), 1);
    the_failure_is_logged_and_found(&prepared, &served.log, &path, &inside(&path));

    drop(file);
    fs::remove_file(&filler).unwrap();
    eventually("lines are written again", || {
        ask(&prepared, served.address);
        (metric("gw_access_log_failing") == 0).then_some(())
    });
    served.log.line_with(": records are written again\"");
    // The last line before the disk was full may be cut off. The next one begins on a line of its
    // own.
    let after = ask(&prepared, served.address);
    let text = eventually("the line of the last request", || {
        let text = fs::read_to_string(inside(&path)).unwrap();
        (text.ends_with('\n') && text.contains(&after)).then_some(text)
    });
    at_most_one_line_is_cut(&text, [&before, &after]);
}

/// `inside` is `path` for processes in another mount namespace.
fn the_failure_is_logged_and_found(prepared: &Prepared, log: &Log, path: &Path, inside: &Path) {
    let failure = log.line_with(": writing fails; records are lost until it succeeds\"");
    let failure: Value = serde_json::from_str(&failure).unwrap();
    let text = |member: &str| failure[member].as_str().unwrap();
    let message = text("message");
    assert!(message.contains(path.to_str().unwrap()), "{failure}");
    assert!(text("error").contains("free some space"), "{failure}");
    let config = prepared.path("doctor.toml");
    fs::write(&config, config_with(prepared, inside)).unwrap();
    let looked = examine(gw_gateway().args(["doctor", "--config"]).arg(config));
    let checks = of_development(&with(&OF_NODE, "request log", &["access_log"]));
    looked.assert(
        &checks,
        &[("access_log", "failed"), ("certificate", "warning")],
    );
    let found = &looked.of("access_log").found;
    assert!(found.contains("no lines are written"), "{found}");
}

fn at_most_one_line_is_cut(text: &str, ids: [&str; 2]) {
    let parsed = text.lines().map(serde_json::from_str::<Value>);
    let whole: Vec<Value> = parsed.filter_map(Result::ok).collect();
    assert!(text.lines().count() - whole.len() <= 1, "{text}");
    for id in ids {
        assert!(whole.iter().any(|line| line["id"] == id), "{id}: {text}");
    }
}

#[test]
fn a_path_that_cannot_be_opened_is_named_at_the_start() {
    let prepared = Prepared::new();
    let config = config_with(&prepared, Path::new("/nowhere/access.jsonl"));
    fs::write(prepared.path("gateway.toml"), config).unwrap();
    let mut command = serve_command(&prepared.path("gateway.toml"));
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    let expected = "access_log: cannot append to /nowhere/access.jsonl: No such file or directory";
    assert!(text.contains(expected), "{text}");
}
