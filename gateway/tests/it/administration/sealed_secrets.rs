//! Secrets of the data folder of a single gateway, sealed with a key that systemd hands over.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::access_tokens::signing_keys::stored;
use super::{Ended, assert_says, end};
use crate::support::admin_api::Api;
use crate::support::peers::backend;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process;
use crate::support::processes::process::{Served, config_text, gw_gateway, serve_command};
use crate::support::processes::successor::replace;

/// A prepared data folder, whose secrets are not sealed, and a folder with the credential.
struct Folder {
    prepared: Prepared,
    token: String,
}

impl Folder {
    fn new() -> Self {
        let prepared = Prepared::new();
        let token = fs::read_to_string(prepared.path("data/admin.token"))
            .unwrap()
            .trim()
            .to_owned();
        let folder = Self { prepared, token };
        folder.credential("credentials", 7);
        folder.configure("gateway.toml", "data");
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.prepared.path(name)
    }

    /// Puts a key into a folder such as systemd makes for a unit.
    fn credential(&self, folder: &str, byte: u8) -> PathBuf {
        fs::create_dir_all(self.path(folder)).unwrap();
        let key = self.path(folder).join("seal-key");
        fs::write(&key, [byte; 32]).unwrap();
        fs::set_permissions(&key, fs::Permissions::from_mode(0o400)).unwrap();
        key
    }

    fn configure(&self, file: &str, data: &str) {
        fs::write(self.path(file), config_text(&self.path(data), 0)).unwrap();
    }

    fn serve(&self, file: &str, credentials: Option<&str>) -> Served {
        process::serve(&mut self.with(serve_command(&self.path(file)), credentials))
    }

    fn with(&self, mut command: Command, credentials: Option<&str>) -> Command {
        command.envs(credentials.map(|folder| ("CREDENTIALS_DIRECTORY", self.path(folder))));
        command
    }

    /// `gw-gateway` with the words of `line` and the configuration file.
    fn run(&self, line: &str, file: &str, credentials: Option<&str>) -> Ended {
        let mut command = gw_gateway();
        command
            .args(line.split(' '))
            .arg("--config")
            .arg(self.path(file));
        end(&mut self.with(command, credentials))
    }

    /// Private signing keys as they are stored.
    fn signing_keys(&self) -> Vec<String> {
        let keys = stored(&self.path("data")).into_iter();
        keys.map(|key| key["private_key"].as_str().unwrap().to_owned())
            .collect()
    }

    /// Asserts that no file of the data folder has one of these texts.
    fn assert_without(&self, secrets: &[String]) {
        for entry in fs::read_dir(self.path("data")).unwrap().map(Result::unwrap) {
            let Ok(bytes) = fs::read(entry.path()) else {
                continue;
            };
            for secret in secrets {
                let found = memchr::memmem::find(&bytes, secret.as_bytes());
                assert_eq!(found, None, "{} has a secret", entry.path().display());
            }
        }
    }
}

fn stop(mut served: Served) {
    served.process.signal("TERM");
    assert_eq!(served.process.exit_code(), Some(0));
}

fn create_account(served: &Served, token: &str, id: &str) -> u16 {
    Api::at(served.admin_address, token)
        .ask("POST", "/accounts", &json!({ "id": id }))
        .status
}

/// A line of the private key in a PEM file.
fn line_of(path: &Path) -> String {
    fs::read_to_string(path)
        .unwrap()
        .lines()
        .nth(1)
        .unwrap()
        .to_owned()
}

#[test]
fn existing_secrets_are_sealed_in_place_and_the_gateway_goes_on() {
    let folder = Folder::new();
    let mut secrets = folder.signing_keys();
    secrets.extend([
        folder.token.clone(),
        line_of(&folder.path("data/agent-ca.key")),
    ]);
    assert_eq!(secrets.len(), 3);

    let served = folder.serve("gateway.toml", Some("credentials"));
    let backend = backend::answering("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    let _agent = folder.prepared.run_agent(served.address.port(), &backend);
    folder.prepared.wait_for_tunnel(served.address);
    assert_eq!(create_account(&served, &folder.token, "one"), 201);
    Api::at(served.admin_address, &folder.token)
        .post("/signing-keys/rotate", &json!({ "immediately": true }));
    folder.assert_without(&secrets);

    // A successor opens them, too.
    let successor = replace(served.process.id(), &served.log);
    assert_eq!(create_account(&served, &folder.token, "two"), 201);
    folder.prepared.wait_for_tunnel(served.address);
    successor.stop();
    drop(served);
    let keys = folder.signing_keys();
    assert!(
        keys.len() == 2 && keys.iter().all(|key| key.starts_with("gw-sealed:")),
        "{keys:?}"
    );
    folder.assert_without(&secrets);

    // The key may also be in a file that the configuration names.
    let key = folder.credential("elsewhere", 7);
    let text = format!(
        "seal_key = \"{}\"\n{}",
        key.display(),
        config_text(&folder.path("data"), 0)
    );
    fs::write(folder.path("named.toml"), text).unwrap();
    let served = folder.serve("named.toml", None);
    assert_eq!(create_account(&served, &folder.token, "three"), 201);
    stop(served);
}

#[test]
fn sealed_secrets_need_their_key_and_the_error_names_the_remedy() {
    let folder = Folder::new();
    folder.credential("others", 8);
    stop(folder.serve("gateway.toml", Some("credentials")));
    let before = folder.signing_keys();

    for (credentials, says) in [
        (
            None,
            &["is sealed", "LoadCredentialEncrypted=seal-key:"][..],
        ),
        (Some("others"), &["does not open with this key"]),
    ] {
        let refused = folder.run("serve", "gateway.toml", credentials);
        assert_ne!(refused.code, 0);
        assert_says(&refused.err, says);
    }
    assert_eq!(folder.signing_keys(), before);

    let served = folder.serve("gateway.toml", Some("credentials"));
    let text = config_text(&folder.path("data"), 0).replace(
        "admin_listen = \"127.0.0.1:0\"",
        &format!("admin_listen = \"{}\"", served.admin_address),
    );
    fs::write(folder.path("client.toml"), text).unwrap();
    let listed = folder.run("account list", "client.toml", Some("credentials"));
    assert_says(&listed.done(), &["demo"]);
    let refused = folder.run("account list", "client.toml", None);
    refused.assert_failed(2, &["admin.token is sealed", "seal_key"]);
    for (credentials, verdict, start) in [
        (Some("credentials"), "ok", "sealed with /"),
        (None, "failed", "store: admin.token is sealed"),
    ] {
        let examined = folder.run("doctor --json", "client.toml", credentials);
        let examined: Value = examined.out.parse().unwrap();
        let mut checks = examined["checks"].as_array().unwrap().iter();
        let check = checks.find(|check| check["check"] == "secrets at rest");
        let check = check.unwrap();
        assert_eq!(check["verdict"], verdict, "{check}");
        let found = check["found"].as_str().unwrap();
        assert!(found.starts_with(start), "{check}");
    }
}

/// A backup has the secrets unsealed, so that it leads back to a gateway without a key.
#[test]
fn a_backup_is_restored_without_the_key() {
    let folder = Folder::new();
    stop(folder.serve("gateway.toml", Some("credentials")));
    let backup = |file: &str, credentials| {
        let line = format!("backup {}", folder.path(file).display());
        folder.run(&line, "gateway.toml", credentials)
    };
    // Nothing listens at the port of the configuration, so the command reads the folder.
    let text = config_text(&folder.path("data"), 0)
        .replace("127.0.0.1:0\"\nworkers", "127.0.0.1:1\"\nworkers");
    fs::write(folder.path("gateway.toml"), text).unwrap();
    let refused = backup("none.zst", None);
    assert_ne!(refused.code, 0);
    assert_says(&refused.err, &["is sealed"]);
    assert!(!folder.path("none.zst").exists());
    backup("stopped.zst", Some("credentials")).done();

    // A running gateway makes such a backup, too.
    folder.configure("gateway.toml", "data");
    let served = folder.serve("gateway.toml", Some("credentials"));
    let mut running = gw_gateway();
    running
        .arg("backup")
        .arg(folder.path("running.zst"))
        .env("GW_ADMIN_TOKEN", &folder.token);
    running.env("GW_ADMIN_URL", format!("http://{}", served.admin_address));
    assert!(running.status().unwrap().success());
    stop(served);

    for file in ["stopped", "running"] {
        let config = format!("{file}.toml");
        folder.configure(&config, file);
        let line = format!("restore {}", folder.path(&format!("{file}.zst")).display());
        folder.run(&line, &config, None).done();
        let token = fs::read_to_string(folder.path(file).join("admin.token")).unwrap();
        assert_eq!(token.trim(), folder.token);
        let served = folder.serve(&config, None);
        assert_eq!(create_account(&served, &folder.token, "more"), 201);
        stop(served);
        // It can be sealed again.
        let served = folder.serve(&config, Some("credentials"));
        assert_eq!(create_account(&served, &folder.token, "evenmore"), 201);
        stop(served);
        let key = fs::read_to_string(folder.path(file).join("agent-ca.key"));
        assert!(key.unwrap().starts_with("gw-sealed:"));
    }
}
