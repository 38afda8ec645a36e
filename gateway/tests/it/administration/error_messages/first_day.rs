//! Mistakes of a first day with Gw, made on the real programs. Each message names the object, the
//! cause and what to do.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::{Installation, assert_says, end, set_mode, without_capabilities};
use crate::administration::Ended;
use crate::support::apex::APEX;
use crate::support::peers::caller::{HOST, connect_to};
use crate::support::processes::postgres::Postgres;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::{Served, gw_agent, gw_gateway};
use crate::support::{eventually, programs};

/// A gateway with the account `acme`, its service `api`, and an enrollment token.
pub(super) struct FirstDay {
    pub(super) installation: Installation,
    pub(super) served: Served,
    pub(super) token: String,
}

impl FirstDay {
    pub(super) fn new() -> Self {
        let installation = Installation::new();
        let served = installation.serve();
        let mut day = Self {
            installation,
            served,
            token: String::new(),
        };
        day.administer("account create acme");
        day.administer("service create acme api");
        let token = day.administer("enrollment-token create acme --service api --json");
        let token: Value = token.parse().unwrap();
        day.token = token["token"].as_str().unwrap().to_owned();
        day
    }

    fn url(&self) -> String {
        format!("http://{}", self.served.admin_address)
    }

    /// `gw-gateway account list` at this gateway, without a token.
    fn list(&self) -> Command {
        let mut command = gw_gateway();
        command.args(["account", "list"]);
        command.env("GW_ADMIN_URL", self.url());
        command
    }

    /// Runs a command of the administration.
    pub(super) fn run(&self, line: &str) -> Ended {
        let mut command = self.installation.administer(&self.served);
        end(command.args(line.split(' ')))
    }

    pub(super) fn administer(&self, line: &str) -> String {
        self.run(line).done()
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
            .arg(self.installation.path("agent"));
        end(&mut command).err
    }
}

#[test]
fn an_agent_that_gets_the_url_of_a_service() {
    let day = FirstDay::new();
    let port = day.served.address.port();
    let authority = day.installation.path("data/dev-ca.crt");
    let service = "acme--api.eu1.gw.localhost";
    let says = [
        &*format!("--gateway: https://{service}:{port} is the URL of a service"),
        &format!("use https://eu1.gw.localhost:{port}"),
    ];
    assert_says(&day.enroll(service, &authority), &says);
    let unknown = day.enroll("no--such.eu1.gw.localhost", &authority);
    assert_says(&unknown, &["is the URL of a service"]);
}

#[test]
fn an_agent_that_gets_another_authority() {
    let day = FirstDay::new();
    let port = day.served.address.port();
    let key = rcgen::KeyPair::generate().unwrap();
    let other = rcgen::CertificateParams::default().self_signed(&key);
    let file = day.installation.path("other.crt");
    fs::write(&file, other.unwrap().pem()).unwrap();
    let untrusted = format!(
        "the gateway's certificate at eu1.gw.localhost:{port} is not trusted: no authority in \
         --ca-file issued it"
    );
    let says = [
        &*untrusted,
        "its certificate, for eu1.gw.localhost, *.eu1.gw.localhost, is issued by \"CN=",
        "dev-ca.crt in data_dir",
        "which is printed with each enrollment token",
    ];
    assert_says(&day.enroll("eu1.gw.localhost", &file), &says);
}

#[test]
fn names_of_accounts_and_services_that_do_not_exist() {
    let day = FirstDay::new();
    for (line, says) in [
        ("account show acne", "no account acne; did you mean acme?"),
        (
            "service create other web",
            "no account other; `gw-gateway account list` lists",
        ),
        (
            "service show acme apii",
            "no service acme--apii; did you mean api?",
        ),
        (
            "key create acme --service apis",
            "account acme has no service apis; did you mean api?",
        ),
        (
            "key create acme --service web",
            "account acme has no service web; `gw-gateway service list acme` lists",
        ),
    ] {
        assert_says(&day.run(line).err, &[says]);
    }
}

#[test]
fn an_admin_token_that_is_wrong_unreadable_or_lost() {
    let day = FirstDay::new();
    let file = |name: &str| day.installation.path(name);
    let with_file = |path: &Path| {
        let mut command = day.list();
        command.arg("--admin-token-file").arg(path);
        command
    };
    fs::write(file("wrong"), "wrong").unwrap();
    let says = [
        &*format!("the gateway at {} refuses the admin token", day.url()),
        "wrong): it is of another gateway, or an earlier one",
        "admin.token in the data_dir",
    ];
    assert_says(&end(&mut with_file(&file("wrong"))).err, &says);
    let says = ["missing: No such file or directory", "--config FILE"];
    assert_says(&end(&mut with_file(&file("missing"))).err, &says);
    let says = [
        "no admin token: set GW_ADMIN_TOKEN",
        "--admin-token-file",
        "--config /etc/gw/gateway.toml",
    ];
    assert_says(&end(&mut day.list()).err, &says);
    let token = file("data/admin.token");
    if programs::usable(&["unshare"]) {
        set_mode(&token, 0o000);
        let mut command = without_capabilities(&with_file(&token), &[]);
        let says = [
            "admin.token: Permission denied",
            "the file belongs to user",
            "such as with sudo",
        ];
        assert_says(&end(command.env("GW_ADMIN_URL", day.url())).err, &says);
    }
    fs::remove_file(&token).unwrap();
    let mut command = day.list();
    // With the option: a configuration file goes before the variable.
    command.args(["--admin-url", &day.url()]);
    command.arg("--config").arg(day.installation.config());
    let lost = "it is lost: start the gateway again, which makes a new one";
    assert_says(&end(&mut command).err, &["admin.token: ", lost]);
}

#[test]
fn a_damaged_backup() {
    let day = FirstDay::new();
    let file = day.installation.path("whole.backup");
    day.administer(&format!("backup {}", file.display()));
    let whole = fs::read(&file).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 0xff;
    let empty = Installation::new();
    for (name, bytes) in [
        ("cut", &whole[..whole.len() / 2]),
        ("flipped", &flipped),
        ("empty", &[]),
        ("text", b"a text"),
    ] {
        let damaged = empty.path(name);
        fs::write(&damaged, bytes).unwrap();
        let mut restore = gw_gateway();
        restore.arg("restore").arg(&damaged);
        let ended = end(restore.arg("--config").arg(empty.config()));
        let path = damaged.display();
        let found = format!("{path}: the archive is damaged or incomplete: ");
        ended.assert_failed(1, &[&found, "use another backup; nothing was restored"]);
    }
}

/// Asserts that `gw-gateway serve --check` refuses a configuration to which `more` is appended.
pub(super) fn check(more: &str, says: &[&str]) {
    let installation = Installation::with(more);
    end(installation.serve_command().arg("--check")).assert_failed(2, says);
}

#[test]
fn one_address_for_both_listeners() {
    for listen in ["127.0.0.1:4433", "0.0.0.0:4433"] {
        let installation = Installation::new();
        let mut check = installation.serve_command();
        check.arg("--check").env("GW_LISTEN", listen);
        let taken = format!("admin_listen: 127.0.0.1:4433 is taken by listen ({listen}); ");
        let ended = end(check.env("GW_ADMIN_LISTEN", "127.0.0.1:4433"));
        ended.assert_failed(2, &[&taken, "give it another port"]);
    }
}

#[test]
fn a_table_or_a_key_that_is_in_a_configuration_twice() {
    let text = fs::read_to_string(Installation::new().config()).unwrap();
    let first = text.lines().count() + 1;
    let table = format!(
        "line {}: traces is there twice, first in line {first}",
        first + 3
    );
    check(
        "[traces]\nendpoint = \"http://a\"\n[archive]\n[traces]\nendpoint = \"http://b\"\n",
        &[&table, "remove one"],
    );
    let key = format!("line {first}: burst is there twice, first in line");
    check("burst = 5\n", &[&key]);
}

#[test]
fn a_region_key_that_others_can_read_and_a_store_of_another_kind() {
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("region.key");
    let path = key.display();
    fs::write(&key, "5a".repeat(32)).unwrap();
    set_mode(&key, 0o644);
    let region = |store: &str| format!("store = \"{store}\"\nregion_key = {key:?}\n");
    let found = format!("region_key: {path}: other users can read it (mode 644)");
    let remedy = format!("`chmod 600 {path}`");
    check(&region("postgres://gw@127.0.0.1/gw"), &[&found, &remedy]);
    set_mode(&key, 0o600);
    let says = [
        "store: mysql:// is the URL of another database",
        "\"postgres://gw@db1,db2/gw\"",
    ];
    check(&region("mysql://gw@127.0.0.1/gw"), &says);
}

#[test]
fn a_database_that_refuses_or_is_down() {
    let mut postgres = Postgres::start();
    let url = |database: &str| postgres.url_of(database);
    let (missing, right) = (url("nowhere"), url("postgres"));
    let key = postgres.key_file();
    let start = |url: &str, more: &str| {
        let text = format!("store = \"{url}\"\nregion_key = {key:?}\n{more}");
        let ended = end(&mut Installation::with(&text).serve_command());
        ended.assert_failed(1, &[]);
        ended.err
    };
    let says = [
        "store: PostgreSQL refuses the connection: ",
        "nowhere",
        "does not exist",
        "createdb",
    ];
    assert_says(&start(&missing, ""), &says);
    let password = key.with_file_name("password");
    fs::write(&password, "wrong").unwrap();
    postgres.sql("ALTER ROLE gw PASSWORD 'right'");
    let rules = postgres.sql("SHOW hba_file");
    fs::write(rules, "local all all scram-sha-256\n").unwrap();
    postgres.sql("SELECT pg_reload_conf()");
    let with_password = format!("store_password_file = {password:?}\n");
    // The server reads its rules soon after the signal.
    let refused = eventually("the server asks for a password", || {
        Some(start(&right, "")).filter(|message| message.contains("password missing"))
    });
    let says = [
        "PostgreSQL refuses the connection: ",
        "store_password_file names a file that holds it",
    ];
    assert_says(&refused, &says);
    let says = [
        "PostgreSQL refuses the connection: ",
        "password authentication failed for user",
        "correct the password of the user",
    ];
    assert_says(&start(&right, &with_password), &says);
    postgres.stop();
    let says = [
        "store: PostgreSQL does not answer: ",
        "start PostgreSQL",
        "hosts in `store`",
    ];
    assert_says(&start(&right, &with_password), &says);
}

/// The error in the answer to a request at a new connection.
pub(super) fn refusal(prepared: &Prepared, served: &Served, host: &str, request: &str) -> Value {
    let about = prepared.about(served.address);
    let mut caller = connect_to(&about, host, &[b"http/1.1"], None);
    caller.send(request);
    caller.response().json()["error"].clone()
}

#[test]
fn a_service_key_in_another_field() {
    let prepared = Prepared::new();
    let served = prepared.serve_with(&prepared.config());
    let request = prepared.get("/");
    let misplaced = request.replace("X-Gw-Service-Key: ", "Authorization: Bearer ");
    let error = refusal(&prepared, &served, HOST, &misplaced);
    assert_eq!(error["code"], "GW_AUTH_REQUIRED");
    let says = [
        "the service key is in Authorization",
        "send it as X-Gw-Service-Key",
    ];
    assert_says(error["message"].as_str().unwrap(), &says);
}

#[test]
fn requests_over_the_limits_of_a_service_and_of_the_apex() {
    let prepared = Prepared::new();
    let config = format!("{}enrollment_requests_per_minute = 1\n", prepared.config());
    let served = prepared.serve_with(&config);
    let rate = json!({ "burst": 2, "refill_per_minute": 1 });
    let api = prepared.api(served.admin_address);
    api.change_service("demo", "echo", &rate);
    let limited = |host: &str, request: &str| {
        eventually("requests are limited", || {
            let error = refusal(&prepared, &served, host, request);
            (error["code"] == "GW_RATE_LIMIT_EXCEEDED").then_some(error)
        })
    };
    let of_service = limited(HOST, &prepared.get("/"));
    assert_eq!(of_service["message"], "Rate limit exceeded");
    let says = [
        "this service admits 2 at once and 1 per minute",
        "try again in ",
        "burst or refill_per_minute",
    ];
    assert_says(of_service["detail"].as_str().unwrap(), &says);
    let enroll = format!("POST /enroll HTTP/1.1\r\nHost: {APEX}\r\nContent-Length: 2\r\n\r\n{{}}");
    let of_apex = limited(APEX, &enroll);
    let says = "from this address, which may send 1 at once and 1 per minute";
    assert_says(of_apex["message"].as_str().unwrap(), &[says]);
}
