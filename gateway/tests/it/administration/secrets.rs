//! Secrets stay out of the data folder, the request log and the program's log.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::{assert_says, end};
use crate::support::apex;
use crate::support::peers::caller::HOST;
use crate::support::processes::process::{gw_gateway, start_demo};
use crate::support::programs;
use crate::support::request_log::{call, capture_bodies, record};
use crate::support::scene::Scene;

/// Requests that carry secrets in their own fields, as wrong values, in the query and in other
/// fields.
fn requests_with_secrets(key: &str, client_secret: &str, token: &str) -> [String; 5] {
    let good = format!("GET / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n");
    [
        format!("{good}X-Other: {key}\r\nX-Secret: {client_secret}\r\n\r\n"),
        format!(
            "{}X-Token: {token}\r\n\r\n",
            good.replace("GET / ", &format!("GET /?t={token} "))
        ),
        format!(
            "{}\r\n",
            good.replace("GET / ", &format!("GET /?k={key}&s={client_secret} "))
        ),
        format!("GET / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}x\r\n\r\n"),
        format!("GET / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Authorization: Bearer {token}\r\n\r\n"),
    ]
}

#[test]
fn no_secret_is_written_to_the_data_folder() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::service().agent().data_dir(folder.path()).start();
    let api = scene.api();
    // Responses are not captured, because the echo repeats the request.
    let capture = json!({ "capture_request_body": true });
    api.change_service("demo", "echo", &capture);
    let (_, key) = api.create_service_key("demo", &["echo"]);
    let (client_id, client_secret) = api.create_credential("demo", &["echo"]);
    let scope = "account:demo service:echo";
    let token = apex::token(&scene, &client_id, &client_secret, scope).json();
    let token = token["access_token"].as_str().unwrap();
    let requests = requests_with_secrets(&key, &client_secret, token);
    let ids = requests.map(|request| call(&scene, &request).1);
    ids.iter().for_each(|id| drop(record(&api, id)));
    let secret_of_key = key.split_once('.').unwrap().1;
    let signature = token.rsplit_once('.').unwrap().1;
    for secret in [secret_of_key, client_secret.as_str(), signature] {
        let found = files_with(folder.path(), secret);
        assert!(found.is_empty(), "{secret} is in {found:?}");
    }
}

#[test]
fn no_secret_is_logged_at_debug_level() {
    if !programs::usable(&["curl"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let mut command = gw_gateway();
    command
        .env("GW_LOG", "debug")
        .stderr(File::create(&log).unwrap());
    let (mut demo, about) = start_demo(
        command
            .args(["demo", "--data-dir"])
            .arg(folder.path().join("data")),
    );
    let of = |name: &str| about[name].as_str().unwrap().to_owned();
    let client_id = of("client_id");
    let client_secret = of("client_secret");
    let key = of("service_key");
    let base = of("base_url");
    let tenant = of("tenant_url");
    let curl = |arguments: &[&str]| curl(&about, arguments);
    let form = format!(
        "client_id={client_id}&client_secret={client_secret}&scope=account:demo service:echo"
    );
    let minted: Value =
        serde_json::from_str(&curl(&["--data", &form, &format!("{base}/oauth/token")])).unwrap();
    let token = minted["access_token"].as_str().unwrap();
    for version in ["--http1.1", "--http2"] {
        let with_key = format!("X-Gw-Service-Key: {key}");
        let with_token = format!("X-Gw-Authorization: Bearer {token}");
        let secrets = format!("/?key={key}&secret={client_secret}");
        // Right values, wrong values, and secrets in the wrong place.
        for (field, path, says) in [
            (&*with_key, "/hello", "\"target\""),
            (&with_token, "/hello", "\"target\""),
            (&format!("{with_key}x"), "/", "GW_SERVICE_KEY_INVALID"),
            (&format!("{with_token}x"), "/", "GW_TOKEN_INVALID"),
            ("Accept: */*", &*secrets, "GW_AUTH_REQUIRED"),
        ] {
            let answer = curl(&[version, "-H", field, &format!("{tenant}{path}")]);
            assert_says(&answer, &[says]);
        }
    }
    demo.signal("TERM");
    assert_eq!(demo.exit_code(), Some(0));
    let log = fs::read_to_string(log).unwrap();
    assert!(log.contains("admitting"), "{log}");
    for secret in [
        key.split_once('.').unwrap().1,
        client_secret.as_str(),
        token,
        &of("admin_token"),
    ] {
        let line = log.lines().find(|line| line.contains(secret));
        assert!(line.is_none(), "{line:?}");
    }
}

/// Runs `curl` with the authority and the names of the demo.
fn curl(about: &Value, arguments: &[&str]) -> String {
    let of = |name: &str| about[name].as_str().unwrap();
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--show-error", "--cacert", of("ca_file")]);
    for url in [of("base_url"), of("tenant_url")] {
        let name = url.trim_start_matches("https://");
        curl.args(["--resolve", &format!("{name}:127.0.0.1")]);
    }
    end(curl.args(arguments)).done()
}

/// Files under `folder` that contain `text`.
fn files_with(folder: &Path, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            found.extend(files_with(&path, text));
        } else {
            let bytes = fs::read(&path).unwrap();
            if memchr::memmem::find(&bytes, text.as_bytes()).is_some() {
                found.push(path.display().to_string());
            }
        }
    }
    found
}

#[test]
fn secrets_in_any_encoding_and_the_admin_token_are_masked() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    capture_bodies(&api);
    let admin = &scene.about.admin_token;
    let encoded = |text: &str| -> String {
        let bytes = text.bytes();
        bytes.map(|byte| format!("%{byte:02x}")).collect()
    };
    let key = "gw_sk_abcdef.hiddenhidden";
    for (query, kept) in [
        (
            format!("k={}+b", encoded(key)),
            format!("k={}***+b", encoded("gw_sk_abcdef.")),
        ),
        (
            format!("k=gw%5Fsk%5Fabcdef%2Ehid{}", encoded("den")),
            "k=gw%5Fsk%5Fabcdef%2E***".to_owned(),
        ),
        (format!("t={admin}&b"), "t=gw_admin.***&b".to_owned()),
        (
            format!("t=Bearer%20{}", encoded(admin)),
            "t=Bearer%20gw_admin.***".to_owned(),
        ),
    ] {
        let line = format!("GET /hello?{query}");
        let request = scene.request(&line, &format!("X-A: {query}\r\n\r\n"));
        let (_, id) = call(&scene, &request);
        let record = record(&api, &id);
        assert_eq!(record["query"], kept);
        let headers = record["captured_request"]["headers"].as_array().unwrap();
        assert!(headers.contains(&json!(["x-a", kept])), "{headers:?}");
        // A replay would send a different request.
        let replayed = api.ask("POST", &format!("/requests/{id}/replay"), &json!({}));
        assert_eq!(replayed.status, 409, "{replayed:?}");
    }
}
