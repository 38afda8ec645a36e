//! Mistakes of operators: each message names the object, the cause and a remedy.

mod first_day;
mod typed;

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::support::processes::process::{Served, config_text, gw_gateway, serve, serve_command};
use crate::support::{SOON, programs};

/// Exit code and standard error.
fn fail(command: &mut Command) -> (i32, String) {
    let output = command.output().unwrap();
    (
        output.status.code().unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    )
}

fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "no {part:?} in: {message}");
    }
}

/// A folder with a configuration whose data folder is `data` below it; `more` is appended.
fn configured(more: &str) -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("gateway.toml");
    fs::write(
        &file,
        format!("{}{more}", config_text(&folder.path().join("data"), 0)),
    )
    .unwrap();
    (folder, file)
}

fn doctor(config: &Path) -> Command {
    let mut command = gw_gateway();
    command.arg("doctor").arg("--config").arg(config);
    command
}

/// `command` without any capability, also if the tests run as root. `namespaces` are further
/// options of unshare(1).
fn without_capabilities(command: &Command, namespaces: &[&str]) -> Command {
    let mut wrapped = Command::new("unshare");
    wrapped
        .arg("--user")
        .args(namespaces)
        .arg(command.get_program())
        .args(command.get_args());
    wrapped
}

#[test]
fn a_data_folder_that_cannot_be_used() {
    if !programs::usable(&["unshare"]) {
        return;
    }
    let (folder, config) = configured("");
    let data = folder.path().join("data");
    let named = format!("data_dir {}: ", data.display());
    fs::create_dir(&data).unwrap();
    fs::set_permissions(&data, fs::Permissions::from_mode(0o000)).unwrap();
    let (code, message) = fail(&mut without_capabilities(&serve_command(&config), &[]));
    assert_eq!(code, 1);
    assert_says(
        &message,
        &[
            &named,
            "Permission denied",
            "its mode is 0000",
            &format!("`chmod 700 {}`", data.display()),
        ],
    );
    let output = without_capabilities(&doctor(&config), &[])
        .output()
        .unwrap();
    assert_says(
        &String::from_utf8(output.stdout).unwrap(),
        &["FAILED   data_dir"],
    );

    fs::remove_dir(&data).unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o500)).unwrap();
    let (code, message) = fail(&mut without_capabilities(&serve_command(&config), &[]));
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
    assert_eq!(code, 1);
    assert_says(
        &message,
        &[
            &named,
            "it cannot be created: Permission denied",
            "install -d -m 0700 -o ",
        ],
    );

    fs::write(&data, "").unwrap();
    assert_says(
        &fail(&mut serve_command(&config)).1,
        &[&named, "it is not a folder", "name a folder"],
    );
}

#[test]
fn a_full_disk() {
    if !programs::usable(&["unshare"]) {
        return;
    }
    let (folder, config) = configured("");
    let data = folder.path().join("data");
    fs::create_dir(&data).unwrap();
    // Mounts a file system without free space in a mount namespace that ends with the process.
    let script = r#"mount -t tmpfs -o size=64k,mode=700 none "$1" &&
                    cat /dev/zero >"$1/filler" 2>/dev/null
                    shift && exec "$@""#;
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
        .arg(&data);
    command
        .arg(gw_gateway().get_program())
        .arg("serve")
        .arg("--config")
        .arg(&config);
    let (code, message) = fail(&mut command);
    assert_eq!(code, 1);
    let df = format!("`df -h {}`", data.display());
    assert_says(
        &message,
        &[
            &format!("data_dir {}: the disk is full", data.display()),
            &df,
            "then start again",
        ],
    );
}

#[test]
fn a_second_gateway_on_one_data_folder() {
    let (folder, config) = configured("");
    let first = serve(&mut serve_command(&config));
    let (code, message) = fail(&mut serve_command(&config));
    assert_eq!(code, 1);
    let data = folder.path().join("data");
    let holder = format!(
        "data_dir {}: process {} (",
        data.display(),
        first.process.id()
    );
    assert_says(
        &message,
        &[
            &holder,
            ") uses it",
            "stop that process",
            "SIGUSR2",
            "another folder in data_dir",
        ],
    );
}

#[test]
fn an_address_that_cannot_be_bound() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let holder = format!("process {} (", std::process::id());
    let (_folder, config) = configured("");
    for key in ["listen", "admin_listen"] {
        let variable = format!("GW_{}", key.to_ascii_uppercase());
        let (code, message) = fail(serve_command(&config).env(&variable, address.to_string()));
        assert_eq!(code, 1);
        let found = format!("{key}: cannot listen on {address}: Address already in use");
        assert_says(
            &message,
            &[&found, &holder, "stop it, or configure another port"],
        );
        let output = doctor(&config)
            .env(&variable, address.to_string())
            .output()
            .unwrap();
        assert_says(
            &String::from_utf8(output.stdout).unwrap(),
            &[&holder, "another program listens there"],
        );
    }
    drop(taken);
    let both = address.to_string();
    let (_, message) = fail(
        serve_command(&config)
            .env("GW_LISTEN", &both)
            .env("GW_ADMIN_LISTEN", &both),
    );
    assert_says(
        &message,
        &[
            "admin_listen: ",
            " is taken by listen (",
            "give it another port",
        ],
    );
    let (_, message) = fail(serve_command(&config).env("GW_LISTEN", "192.0.2.1:4433"));
    assert_says(
        &message,
        &[
            "listen: cannot listen on 192.0.2.1:4433",
            "an address of this machine",
        ],
    );

    if !programs::usable(&["unshare"]) {
        return;
    }
    // A network namespace of its own, where low ports need a capability whatever the settings of
    // this machine are.
    let mut command = without_capabilities(&serve_command(&config), &["--net"]);
    let (code, message) = fail(
        command
            .env("GW_LISTEN", "0.0.0.0:443")
            .env("GW_ADMIN_LISTEN", "0.0.0.0:9080"),
    );
    assert_eq!(code, 1);
    assert_says(
        &message,
        &[
            "listen: cannot listen on 0.0.0.0:443: Permission denied",
            "AmbientCapabilities=CAP_NET_BIND_SERVICE",
            "setcap cap_net_bind_service=+ep",
            "a port from 1024 on",
        ],
    );
}

#[test]
fn a_configuration_that_cannot_be_read() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("gateway.toml");
    for mut command in [serve_command(&missing), doctor(&missing)] {
        let output = command.output().unwrap();
        let text =
            String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
        let found = format!(
            "{}: cannot be read: No such file or directory",
            missing.display()
        );
        assert_says(&text, &[&found, "--config", "`gw-gateway init`"]);
    }
    let (code, message) = fail(&mut serve_command(folder.path()));
    assert_eq!(code, 2);
    assert_says(&message, &["Is a directory", "name a file with --config"]);
}

#[test]
fn a_variable_that_does_not_exist() {
    let (_folder, config) = configured("");
    let output = serve_command(&config)
        .arg("--check")
        .env("GW_LISTNE", "x")
        .env("GW_WORKERS", "1")
        .output()
        .unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_says(
        &message,
        &["warning: GW_LISTNE: no such variable; did you mean `GW_LISTEN`?"],
    );
    assert!(!message.contains("GW_WORKERS"), "{message}");
    // A start logs it before anything else can fail.
    let (_, log) = fail(
        serve_command(&config)
            .env("GW_LISTNE", "x")
            .env("GW_LISTEN", "192.0.2.1:4433"),
    );
    assert_says(&log, &["\"level\":\"WARN\"", "GW_LISTNE: no such variable"]);
}

/// Writes a certificate for the region and its key, valid from `from` to `until`; returns the keys
/// of the configuration.
fn certificate(folder: &Path, from: i32, until: i32) -> String {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::new([
        "eu1.gw.localhost".to_owned(),
        "*.eu1.gw.localhost".to_owned(),
    ])
    .unwrap();
    (params.not_before, params.not_after) = (
        rcgen::date_time_ymd(from, 1, 1),
        rcgen::date_time_ymd(until, 1, 1),
    );
    let [certificate_file, key_file] = ["server.crt", "server.key"].map(|name| folder.join(name));
    fs::write(&certificate_file, params.self_signed(&key).unwrap().pem()).unwrap();
    fs::write(&key_file, key.serialize_pem()).unwrap();
    format!(
        "tls_certificate = \"{}\"\ntls_key = \"{}\"\n",
        certificate_file.display(),
        key_file.display()
    )
}

#[test]
fn a_certificate_and_a_clock_that_disagree() {
    let files = tempfile::tempdir().unwrap();
    for (from, until, found) in [
        (1990, 2001, "expired on 2001-01-01"),
        (2190, 2200, "not valid before 2190-01-01"),
    ] {
        let (_folder, config) = configured(&certificate(files.path(), from, until));
        let output = serve_command(&config).arg("--check").output().unwrap();
        let warning = String::from_utf8(output.stderr).unwrap();
        assert_says(
            &warning,
            &[
                "tls_certificate: ",
                "server.crt: ",
                found,
                "and the clock says 20",
                "set the clock",
            ],
        );
    }
}

#[test]
fn a_key_that_may_not_be_read() {
    if !programs::usable(&["unshare"]) {
        return;
    }
    let files = tempfile::tempdir().unwrap();
    let (_folder, config) = configured(&certificate(files.path(), 1990, 2190));
    let key = files.path().join("server.key");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o000)).unwrap();
    for arguments in [&["--check"][..], &[]] {
        let (code, message) = fail(&mut without_capabilities(
            serve_command(&config).args(arguments),
            &[],
        ));
        assert_eq!(code, 2);
        let found = format!(
            "tls_key: {}: cannot be read: Permission denied",
            key.display()
        );
        assert_says(&message, &[&found, "has to be able to read it"]);
    }
}

/// Sends `request` in plain HTTP; returns head and body of the answer.
fn plain_http(address: SocketAddr, request: &[u8]) -> (String, Value) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.write_all(request).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (
        head.to_ascii_lowercase(),
        serde_json::from_str(body).unwrap(),
    )
}

#[test]
fn a_port_of_the_other_protocol() {
    let (_folder, config) = configured("");
    let Served {
        process: _gateway,
        address,
        admin_address,
        ..
    } = serve(&mut serve_command(&config));
    let post = [
        b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 50000\r\n\r\n".as_slice(),
        &[b'x'; 50_000],
    ]
    .concat();
    for request in [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".as_slice(), &post] {
        let (head, body) = plain_http(address, request);
        assert!(head.starts_with("http/1.1 400 "), "{head}");
        let id = body["error"]["request_id"].as_str().unwrap();
        let fields = [
            &format!("x-gw-request-id: {id}"),
            "x-gw-status: badrequest",
            "connection: close",
        ];
        assert_says(&head, &fields.map(|field| field as &str));
        assert_eq!(body["error"]["code"], "GW_BAD_REQUEST");
        assert_says(body["error"]["message"].as_str().unwrap(), &["https"]);
    }
    let mut list = gw_gateway();
    list.args([
        "account",
        "list",
        "--admin-url",
        &format!("https://{admin_address}"),
    ])
    .env("GW_ADMIN_TOKEN", "x");
    let (code, message) = fail(&mut list);
    assert_ne!(code, 0);
    assert_says(
        &message,
        &[
            &format!("https://{admin_address}"),
            "it does not speak TLS; use http://",
        ],
    );
}

#[test]
fn a_changed_configuration_is_named_on_a_reload() {
    let (folder, config) = configured("");
    let Served { process, log, .. } = serve(&mut serve_command(&config));
    let path = config.display().to_string();
    let line = |level: &str, text: &str| {
        log.find(|line| {
            let is_it = line["level"] == level && line["message"].as_str()?.contains(text);
            is_it.then(|| line.clone())
        })
    };
    let used = fs::read_to_string(&config).unwrap();
    fs::write(
        &config,
        used.replace("workers = 2", "workers = 1") + "drain_seconds = 3\n",
    )
    .unwrap();
    process.signal("HUP");
    let changed = line(
        "WARN",
        "the configuration file has changed: SIGHUP reads only certificates, SIGUSR2 applies",
    );
    assert_eq!(
        (changed["keys"].as_str(), changed["path"].as_str()),
        (Some("drain_seconds, workers"), Some(&*path))
    );
    line("INFO", "certificates reloaded");

    fs::write(&config, format!("{used}wrokers = 1\n")).unwrap();
    process.signal("HUP");
    let mistakes = line(
        "ERROR",
        "has mistakes: the one read at the start stays in use",
    );
    assert_says(
        mistakes["mistakes"].as_str().unwrap(),
        &["wrokers: no such key"],
    );
    line("INFO", "certificates reloaded");

    fs::remove_file(&config).unwrap();
    process.signal("HUP");
    line("ERROR", "gateway.toml: cannot be read: No such file");
    line("INFO", "certificates reloaded");

    // Nothing is said about a file that is the same again.
    fs::write(&config, &used).unwrap();
    process.signal("HUP");
    log.find(|line| {
        let message = line["message"].as_str()?;
        assert!(!message.contains("configuration"), "{message}");
        (message == "certificates reloaded").then_some(())
    });
    drop(folder);
}
