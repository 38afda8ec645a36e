//! The access log: its fields, rotation, takeover, standard output and a full disk.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::support::peers::backend;
use crate::support::peers::caller::HOST;
use crate::support::peers::held_backend::HeldBackend;
use crate::support::processes::kept_connection::KeptConnection;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process;
use crate::support::processes::process::{Served, gw_gateway, serve_command};
use crate::support::processes::successor::{admin, replace};
use crate::support::request_log::{call, capture_bodies, record};
use crate::support::scene::Scene;
use crate::support::{SOON, eventually, programs};

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";

/// The whole lines of a file.
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

#[test]
fn every_request_has_a_line_with_the_fields_of_its_record() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.jsonl");
    let scene = Scene::service()
        .agent_to(backend::answering(
            "HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngone",
        ))
        .data_dir(&folder.path().to_owned())
        .configuration(format!("access_log = {path:?}\n"))
        .start();
    let api = scene.api();
    capture_bodies(&api);
    let key = &scene.about.service_key;
    let post = scene.request(
        &format!("POST /orders/7?limit=5&key={key}"),
        "Content-Length: 3\r\n\r\nabc",
    );
    let apex =
        "GET /enroll/status?enrollment_id=en_1&x=hidden HTTP/1.1\r\nHost: eu1.gw.localhost\r\n\r\n";
    let ids = [
        post.as_str(),
        &format!("GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n"),
        apex,
    ]
    .map(|sent| call(&scene, sent).1);
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

    requests_that_the_request_log_does_not_have_have_lines(&scene, &path);

    let expected = format!("gw_access_log_written_total {}\n", lines(&path).len());
    // A line is counted after it is written.
    let metrics = eventually("all lines are counted", || {
        let (_, metrics) = admin(scene.admin_address(), "/metrics");
        Some(metrics).filter(|metrics| metrics.contains(&expected))
    });
    assert!(
        metrics.contains("gw_access_log_dropped_total 0\n"),
        "{metrics}"
    );
    let text = fs::read_to_string(&path).unwrap();
    let secret = key.split('.').nth(1).unwrap();
    assert!(
        !text.contains(secret) && !text.contains("hidden") && !text.contains("captured"),
        "{text}"
    );
    scene.stop();
}

/// Requests of a service without the request log, and of no service.
fn requests_that_the_request_log_does_not_have_have_lines(scene: &Scene, path: &Path) {
    let api = scene.api();
    let key = &scene.about.service_key;
    assert_eq!(
        api.ask(
            "PATCH",
            "/accounts/demo/services/echo",
            &json!({ "request_logging": false })
        )
        .status,
        200
    );
    let unlogged = eventually("the service is not logged", || {
        let (_, id) = call(
            scene,
            &scene.request("POST /unlogged", "Content-Length: 2\r\n\r\nhi"),
        );
        line(path, &id);
        (api.get(&format!("/requests/{id}")).status == 404).then_some(id)
    });
    let unlogged = line(path, &unlogged);
    let key_id = key.trim_start_matches("gw_sk_").split('.').next().unwrap();
    for (field, value) in [
        ("account", json!("demo")),
        ("service", json!("echo")),
        ("status", json!(404)),
        ("path", json!("/unlogged")),
        ("caller_id", json!(key_id)),
        ("bytes_in", json!(2)),
        ("bytes_taken", json!(2)),
    ] {
        assert_eq!(unlogged[field], value, "{field}");
    }
    let (_, stray) = call(
        scene,
        "GET /?secret=hidden HTTP/1.1\r\nHost: other.example.com\r\n\r\n",
    );
    let stray = line(path, &stray);
    assert_eq!(
        (&stray["service"], &stray["code"], &stray["query"]),
        (&json!(""), &json!("GW_MISDIRECTED"), &json!("secret=***"))
    );
    let (_, invalid) = call(scene, "GET /%zz HTTP/1.1\r\nHost: a b\r\n\r\n");
    assert_eq!(line(path, &invalid)["code"], "GW_BAD_REQUEST");
}

/// Sends a request; returns its id.
fn ask(prepared: &Prepared, address: SocketAddr) -> String {
    let mut caller = prepared.connect(address);
    caller.send(prepared.get("/"));
    let response = caller.response();
    assert_eq!(response.status, 200);
    response.header("x-gw-request-id").to_owned()
}

#[test]
fn a_rotated_file_is_left_alone_and_a_successor_appends_to_the_same_file() {
    let prepared = Prepared::new();
    let path = prepared.path("access.jsonl");
    let rotated = prepared.path("access.jsonl.1");
    let config = format!("{}access_log = \"{}\"\n", prepared.config(), path.display());
    let Served {
        mut process,
        address,
        admin_address: _,
        log,
    } = prepared.serve_with(&config);
    let _port = process::hold(address);
    let backend = HeldBackend::start();
    let _agent = prepared.run_agent(address.port(), &backend.url);
    prepared.wait_for_tunnel(address);
    let first = ask(&prepared, address);
    line(&path, &first);
    fs::rename(&path, &rotated).unwrap();
    process.signal("HUP");
    log.find(|line| (line["message"] == "access log reopened").then_some(()));
    let second = ask(&prepared, address);
    line(&path, &second);
    assert!(
        lines(&rotated)
            .iter()
            .any(|line| line["id"] == first.as_str())
    );
    assert!(
        !lines(&rotated)
            .iter()
            .any(|line| line["id"] == second.as_str())
    );

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
    let found: Vec<Value> = lines(&path);
    let ids: BTreeSet<String> = lines(&path)
        .iter()
        .map(|line| line["id"].to_string())
        .collect();
    assert_eq!(found.len(), ids.len(), "no line is written twice");
}

#[test]
fn lines_go_to_standard_output() {
    let prepared = Prepared::new();
    fs::write(
        prepared.path("gateway.toml"),
        format!("{}access_log = \"stdout\"\n", prepared.config()),
    )
    .unwrap();
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
        .args([
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            script,
            "sh",
        ])
        .arg(folder)
        .arg(gw_gateway().get_program())
        .arg("serve")
        .arg("--config")
        .arg(prepared.path("gateway.toml"));
    command
}

/// A line of the log whose message ends with `end`.
fn message(line: &Value, end: &str) -> Option<Value> {
    line["message"]
        .as_str()?
        .ends_with(end)
        .then_some(line.clone())
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
    let config = format!("{}access_log = \"{}\"\n", prepared.config(), path.display());
    fs::write(prepared.path("gateway.toml"), config).unwrap();
    let mut command = serve_on_a_small_disk(&prepared, &folder);
    let Served {
        process,
        address,
        admin_address,
        log,
    } = process::serve(&mut command);
    let _agent = prepared.run_agent(address.port(), &backend::answering(OK));
    prepared.wait_for_tunnel(address);
    let inside = |path: &Path| {
        let root = format!("/proc/{}/root", process.id());
        Path::new(&root).join(path.strip_prefix("/").unwrap())
    };
    let before = ask(&prepared, address);
    line(&inside(&path), &before);

    let filler = inside(&folder.join("filler"));
    let mut file = fs::File::create(&filler).unwrap();
    while file.write_all(&[0; 512]).is_ok() {}
    let metric = |name: &str| {
        let (_, metrics) = admin(admin_address, "/metrics");
        let line = metrics
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
            .unwrap();
        line.parse::<u64>().unwrap()
    };
    // The last page of the file may have room for some lines.
    eventually("a line is lost", || {
        ask(&prepared, address);
        (metric("gw_access_log_dropped_total") > 0).then_some(())
    });
    assert_eq!(metric("gw_access_log_failing"), 1);
    the_failure_is_logged_and_found(&prepared, &log, &path, &inside(&path));

    drop(file);
    fs::remove_file(&filler).unwrap();
    eventually("lines are written again", || {
        ask(&prepared, address);
        (metric("gw_access_log_failing") == 0).then_some(())
    });
    log.find(|line| message(line, ": records are written again"));
    // The last line before the disk was full may be cut off. The next one begins on a line of its
    // own.
    let after = ask(&prepared, address);
    let text = eventually("the line of the last request", || {
        let text = fs::read_to_string(inside(&path)).unwrap();
        (text.ends_with('\n') && text.contains(&after)).then_some(text)
    });
    at_most_one_line_is_cut(&text, [&before, &after]);
}

/// `inside` is `path` for processes in another mount namespace.
fn the_failure_is_logged_and_found(
    prepared: &Prepared,
    log: &process::Log,
    path: &Path,
    inside: &Path,
) {
    let failure =
        log.find(|line| message(line, ": writing fails; records are lost until it succeeds"));
    assert!(
        failure["message"]
            .as_str()
            .unwrap()
            .contains(path.to_str().unwrap()),
        "{failure}"
    );
    assert!(
        failure["error"]
            .as_str()
            .unwrap()
            .contains("free some space"),
        "{failure}"
    );
    let config = format!(
        "{}access_log = \"{}\"\n",
        prepared.config(),
        inside.display()
    );
    fs::write(prepared.path("doctor.toml"), config).unwrap();
    let mut doctor = gw_gateway();
    doctor.args(["doctor", "--config"]);
    let found = doctor.arg(prepared.path("doctor.toml")).output().unwrap();
    let found = String::from_utf8(found.stdout).unwrap();
    assert!(found.contains("no lines are written"), "{found}");
}

fn at_most_one_line_is_cut(text: &str, ids: [&str; 2]) {
    let (whole, cut): (Vec<_>, Vec<_>) = text
        .lines()
        .map(serde_json::from_str::<Value>)
        .partition(|line| line.is_ok());
    assert!(cut.len() <= 1, "{text}");
    for id in ids {
        assert!(
            whole.iter().any(|line| line.as_ref().unwrap()["id"] == id),
            "{text}"
        );
    }
}

#[test]
fn a_path_that_cannot_be_opened_is_named_at_the_start() {
    let prepared = Prepared::new();
    let config = format!(
        "{}access_log = \"/nowhere/access.jsonl\"\n",
        prepared.config()
    );
    fs::write(prepared.path("gateway.toml"), config).unwrap();
    let output = serve_command(&prepared.path("gateway.toml"))
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text.contains(
            "access_log: cannot append to /nowhere/access.jsonl: No such file or directory"
        ),
        "{text}"
    );
}
