//! Mistakes of a first day with Gw, made on the real programs. Each message names the object, the
//! cause and what to do.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{assert_says, configured, fail};
use crate::support::eventually;
use crate::support::peers::caller::connect_to;
use crate::support::processes::postgres::Postgres;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::{Served, gw_agent, gw_gateway, serve, serve_command};

/// A gateway with the account `acme`, its service `api`, and an enrollment token.
pub(super) struct FirstDay {
    pub(super) folder: tempfile::TempDir,
    config: PathBuf,
    pub(super) served: Served,
    pub(super) token: String,
}

impl FirstDay {
    pub(super) fn new() -> Self {
        let (folder, config) = configured("");
        let served = serve(&mut serve_command(&config));
        let mut day = Self {
            folder,
            config,
            served,
            token: String::new(),
        };
        day.administer(&["account", "create", "acme"]);
        day.administer(&["service", "create", "acme", "api"]);
        let token = ["enrollment-token", "create", "acme", "--service", "api"];
        let token: serde_json::Value =
            serde_json::from_str(&day.administer(&[&token[..], &["--json"]].concat())).unwrap();
        day.token = token["token"].as_str().unwrap().to_owned();
        day
    }

    fn data(&self, name: &str) -> PathBuf {
        self.folder.path().join("data").join(name)
    }

    /// A command that asks this gateway, without a token.
    fn command(&self, words: &[&str]) -> Command {
        let mut command = gw_gateway();
        command.args(words).env(
            "GW_ADMIN_URL",
            format!("http://{}", self.served.admin_address),
        );
        command
    }

    pub(super) fn with_token(&self, words: &[&str]) -> Command {
        let mut command = self.command(words);
        command.env("GW_ADMIN_TOKEN_FILE", self.data("admin.token"));
        command
    }

    pub(super) fn administer(&self, words: &[&str]) -> String {
        let output = self.with_token(words).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{words:?}: {text}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// The error of `gw-agent enroll` with the gateway at `name` and the authority in `ca_file`.
    fn enroll(&self, name: &str, ca_file: &Path) -> String {
        let port = self.served.address.port();
        let mut command = gw_agent();
        command
            .args(["enroll", "--token", &self.token])
            .args(["--gateway", &format!("https://{name}:{port}")])
            .arg("--ca-file")
            .arg(ca_file)
            .arg("--state-dir")
            .arg(self.folder.path().join("agent"));
        fail(&mut command).1
    }
}

#[test]
fn an_agent_that_gets_the_url_of_a_service_or_another_authority() {
    let day = FirstDay::new();
    let port = day.served.address.port();
    assert_says(
        &day.enroll("acme--api.eu1.gw.localhost", &day.data("dev-ca.crt")),
        &[
            &format!(
                "--gateway: https://acme--api.eu1.gw.localhost:{port} is the URL of a service"
            ),
            &format!("use https://eu1.gw.localhost:{port}"),
        ],
    );
    assert_says(
        &day.enroll("no--such.eu1.gw.localhost", &day.data("dev-ca.crt")),
        &["is the URL of a service"],
    );
    let key = rcgen::KeyPair::generate().unwrap();
    let other = rcgen::CertificateParams::default()
        .self_signed(&key)
        .unwrap();
    let other_file = day.folder.path().join("other.crt");
    fs::write(&other_file, other.pem()).unwrap();
    assert_says(
        &day.enroll("eu1.gw.localhost", &other_file),
        &[
            &format!(
                "the gateway's certificate at eu1.gw.localhost:{port} is not trusted: no authority \
                 in --ca-file issued it"
            ),
            "its certificate, for eu1.gw.localhost, *.eu1.gw.localhost, is issued by \"CN=",
            "dev-ca.crt in data_dir",
            "which is printed with each enrollment token",
        ],
    );
}

#[test]
fn names_of_accounts_and_services_that_do_not_exist() {
    let day = FirstDay::new();
    for (words, parts) in [
        (
            &["account", "show", "acne"][..],
            &["no account acne; did you mean acme?"][..],
        ),
        (
            &["service", "create", "other", "web"],
            &["no account other; `gw-gateway account list` lists"],
        ),
        (
            &["service", "show", "acme", "apii"],
            &["no service acme--apii; did you mean api?"],
        ),
        (
            &["key", "create", "acme", "--service", "apis"],
            &["account acme has no service apis; did you mean api?"],
        ),
        (
            &["key", "create", "acme", "--service", "web"],
            &["account acme has no service web; `gw-gateway service list acme` lists"],
        ),
    ] {
        assert_says(&fail(&mut day.with_token(words)).1, parts);
    }
}

#[test]
fn an_admin_token_that_is_wrong_unreadable_or_lost() {
    let day = FirstDay::new();
    let list = ["account", "list"];
    let file = |name: &str| day.folder.path().join(name);
    let with_file = |path: &Path| {
        let mut command = day.command(&list);
        command.arg("--admin-token-file").arg(path);
        command
    };
    fs::write(file("wrong"), "wrong").unwrap();
    assert_says(
        &fail(&mut with_file(&file("wrong"))).1,
        &[
            &format!(
                "the gateway at http://{} refuses the admin token",
                day.served.admin_address
            ),
            "wrong): it is of another gateway, or an earlier one",
            "admin.token in the data_dir",
        ],
    );
    assert_says(
        &fail(&mut with_file(&file("missing"))).1,
        &["missing: No such file or directory", "--config FILE"],
    );
    assert_says(
        &fail(&mut day.command(&list)).1,
        &[
            "no admin token: set GW_ADMIN_TOKEN",
            "--admin-token-file",
            "--config /etc/gw/gateway.toml",
        ],
    );
    let token = day.data("admin.token");
    if super::programs::usable(&["unshare"]) {
        fs::set_permissions(&token, fs::Permissions::from_mode(0o000)).unwrap();
        let mut command = super::without_capabilities(&with_file(&token), &[]);
        command.env(
            "GW_ADMIN_URL",
            format!("http://{}", day.served.admin_address),
        );
        assert_says(
            &fail(&mut command).1,
            &[
                "admin.token: Permission denied",
                "the file belongs to user",
                "such as with sudo",
            ],
        );
    }
    fs::remove_file(&token).unwrap();
    let mut command = gw_gateway();
    let url = format!("http://{}", day.served.admin_address);
    command
        .args(list)
        .args(["--admin-url", &url])
        .arg("--config")
        .arg(&day.config);
    assert_says(
        &fail(&mut command).1,
        &[
            "admin.token: ",
            "it is lost: start the gateway again, which makes a new one",
        ],
    );
}

#[test]
fn a_damaged_backup() {
    let day = FirstDay::new();
    let file = day.folder.path().join("whole.backup");
    day.administer(&["backup", file.to_str().unwrap()]);
    let whole = fs::read(&file).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 0xff;
    let (_folder, config) = configured("");
    for (name, bytes) in [
        ("cut", &whole[..whole.len() / 2]),
        ("flipped", &flipped),
        ("empty", &[]),
        ("text", b"a text"),
    ] {
        let damaged = day.folder.path().join(name);
        fs::write(&damaged, bytes).unwrap();
        let mut command = gw_gateway();
        command
            .arg("restore")
            .arg(&damaged)
            .arg("--config")
            .arg(&config);
        let (code, message) = fail(&mut command);
        assert_eq!(code, 1);
        assert_says(
            &message,
            &[
                &format!(
                    "{}: the archive is damaged or incomplete: ",
                    damaged.display()
                ),
                "use another backup; nothing was restored",
            ],
        );
    }
}

/// Errors of `gw-gateway serve --check` with `more` appended to the configuration.
pub(super) fn check(more: &str) -> String {
    let (_folder, config) = configured(more);
    let (code, message) = fail(serve_command(&config).arg("--check"));
    assert_eq!(code, 2, "{message}");
    message
}

#[test]
fn configurations_that_check_refuses() {
    let (folder, config) = configured("");
    let both = ["GW_LISTEN", "GW_ADMIN_LISTEN"].map(|name| (name, "127.0.0.1:4433"));
    let (code, message) = fail(serve_command(&config).arg("--check").envs(both));
    assert_eq!(code, 2);
    assert_says(
        &message,
        &["admin_listen: 127.0.0.1:4433 is taken by listen (127.0.0.1:4433); give it another port"],
    );
    let (code, _) = fail(
        serve_command(&config)
            .arg("--check")
            .env("GW_LISTEN", "0.0.0.0:4433")
            .env("GW_ADMIN_LISTEN", "127.0.0.1:4433"),
    );
    assert_eq!(code, 2);

    let lines = fs::read_to_string(&config).unwrap().lines().count();
    assert_says(
        &check("[traces]\nendpoint = \"http://a\"\n[archive]\n[traces]\nendpoint = \"http://b\"\n"),
        &[
            &format!(
                "line {}: traces is there twice, first in line {}",
                lines + 4,
                lines + 1
            ),
            "remove one",
        ],
    );
    assert_says(
        &check("burst = 5\n"),
        &[&format!(
            "line {}: burst is there twice, first in line",
            lines + 1
        )],
    );

    let key = folder.path().join("region.key");
    fs::write(&key, "5a".repeat(32)).unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).unwrap();
    let store = "store = \"postgres://gw@127.0.0.1/gw\"\n";
    let with_key = format!("{store}region_key = \"{}\"\n", key.display());
    assert_says(
        &check(&with_key),
        &[
            &format!(
                "region_key: {}: other users can read it (mode 644)",
                key.display()
            ),
            &format!("`chmod 600 {}`", key.display()),
        ],
    );
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    assert_says(
        &check(&with_key.replace("postgres://", "mysql://")),
        &[
            "store: mysql:// is the URL of another database",
            "\"postgres://gw@db1,db2/gw\"",
        ],
    );
}

#[test]
fn a_database_that_refuses_or_is_down() {
    let mut postgres = Postgres::start();
    let url = |database: &str| postgres.url_of(database);
    let (missing, right) = (url("nowhere"), url("postgres"));
    let key = postgres.key_file();
    let start = |url: &str, more: &str| {
        let text = format!(
            "store = \"{url}\"\nregion_key = \"{}\"\n{more}",
            key.display()
        );
        let (_folder, config) = configured(&text);
        let (code, message) = fail(&mut serve_command(&config));
        assert_eq!(code, 1, "{message}");
        message
    };
    assert_says(
        &start(&missing, ""),
        &[
            "store: PostgreSQL refuses the connection: ",
            "nowhere",
            "does not exist",
            "createdb",
        ],
    );
    let password = key.with_file_name("password");
    fs::write(&password, "wrong").unwrap();
    postgres.sql("ALTER ROLE gw PASSWORD 'right'");
    let rules = postgres.sql("SHOW hba_file");
    fs::write(rules, "local all all scram-sha-256\n").unwrap();
    postgres.sql("SELECT pg_reload_conf()");
    let with_password = format!("store_password_file = \"{}\"\n", password.display());
    // The server reads its rules soon after the signal.
    eventually("the server asks for a password", || {
        start_is_refused(&start, &right).then_some(())
    });
    assert_says(
        &start(&right, ""),
        &[
            "PostgreSQL refuses the connection: ",
            "password missing",
            "store_password_file names a file that holds it",
        ],
    );
    assert_says(
        &start(&right, &with_password),
        &[
            "PostgreSQL refuses the connection: ",
            "password authentication failed for user",
            "correct the password of the user",
        ],
    );
    postgres.stop();
    assert_says(
        &start(&right, &with_password),
        &[
            "store: PostgreSQL does not answer: ",
            "start PostgreSQL",
            "hosts in `store`",
        ],
    );
}

fn start_is_refused(start: &impl Fn(&str, &str) -> String, url: &str) -> bool {
    start(url, "").contains("password missing")
}

#[test]
fn requests_that_are_refused() {
    let prepared = Prepared::new();
    let config = format!("{}enrollment_requests_per_minute = 1\n", prepared.config());
    let served = prepared.serve_with(&config);
    let rate = serde_json::json!({ "burst": 2, "refill_per_minute": 1 });
    prepared
        .api(served.admin_address)
        .change_service("demo", "echo", &rate);
    let ask = |request: String| {
        let mut caller = prepared.connect(served.address);
        caller.send(request);
        caller.response().json()["error"].clone()
    };
    let misplaced = prepared
        .get("/")
        .replace("X-Gw-Service-Key: ", "Authorization: Bearer ");
    let error = ask(misplaced);
    assert_eq!(error["code"], "GW_AUTH_REQUIRED");
    assert_says(
        error["message"].as_str().unwrap(),
        &[
            "the service key is in Authorization",
            "send it as X-Gw-Service-Key",
        ],
    );
    let limited = eventually("the service limits", || {
        let error = ask(prepared.get("/"));
        (error["code"] == "GW_RATE_LIMIT_EXCEEDED").then_some(error)
    });
    assert_eq!(limited["message"], "Rate limit exceeded");
    assert_says(
        limited["detail"].as_str().unwrap(),
        &[
            "this service admits 2 at once and 1 per minute",
            "try again in ",
            "burst or refill_per_minute",
        ],
    );
    let limited = eventually("the apex limits", || {
        let about = prepared.about(served.address);
        let mut caller = connect_to(&about, "eu1.gw.localhost", &[b"http/1.1"], None);
        caller
            .send("POST /enroll HTTP/1.1\r\nHost: eu1.gw.localhost\r\nContent-Length: 2\r\n\r\n{}");
        let error = caller.response().json()["error"].clone();
        (error["code"] == "GW_RATE_LIMIT_EXCEEDED").then_some(error)
    });
    assert_says(
        limited["message"].as_str().unwrap(),
        &["from this address, which may send 1 at once and 1 per minute"],
    );
}
