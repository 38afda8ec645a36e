//! `gw-gateway init`: three commands to a relayed request, and what it refuses.

use std::fs;
use std::io::{BufRead, BufReader, Lines};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::{ChildStdout, Command, Output, Stdio};

use crate::support::peers::backend;
use crate::support::peers::caller::connect_to;
use crate::support::processes::prepared::about;
use crate::support::processes::process::{
    Running, Served, gw_agent, gw_gateway, serve, serve_command,
};
use crate::support::processes::successor::{admin, replace};
use crate::support::programs;

const HOST: &str = "acme--api.eu1.gw.localhost";

/// User that owns a data folder. It needs no entry in /etc/passwd.
const OWNER: u32 = 23_456;

/// `gw-gateway init` with all files in `folder`, and ports of the kernel's choice.
fn init(folder: &Path) -> Command {
    let mut command = gw_gateway();
    command
        .args(["init", "--listen", "127.0.0.1:0"])
        .args(["--admin-listen", "127.0.0.1:0", "--config"])
        .arg(folder.join("gateway.toml"))
        .arg("--data-dir")
        .arg(folder.join("data"))
        .stdin(Stdio::null())
        .env_remove("SUDO_USER");
    command
}

/// Exit code and text of `init` with these options.
fn init_with(folder: &Path, options: &[&str]) -> (Option<i32>, String) {
    end(&init(folder).args(options).output().unwrap())
}

/// Starts a gateway with `init --serve`.
fn serve_init(folder: &Path) -> Served {
    let mut command = init(folder);
    command
        .args(["--account", "acme", "--serve"])
        .env("GW_LOG_FORMAT", "json")
        .stdout(Stdio::null());
    serve(&mut command)
}

/// A folder that other users can enter, with a data folder of another user.
fn owned_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let data = folder.path().join("data");
    fs::create_dir(&data).unwrap();
    chown(&data, Some(OWNER), Some(OWNER)).unwrap();
    folder
}

/// Whether `init` without `--serve` would install a service: as root, where systemd runs. The
/// calling test must return.
fn would_install() -> bool {
    let would = rustix::process::geteuid().is_root() && Path::new("/run/systemd/system").exists();
    if would {
        programs::skipped("systemd runs; gateway/tests/packages boots a system for init");
    }
    would
}

/// Code and text of a process that has ended.
fn end(output: &Output) -> (Option<i32>, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.code(),
        text(&output.stdout) + &text(&output.stderr),
    )
}

/// Reads lines until one contains `part`; returns that line.
fn line_with(lines: &mut Lines<BufReader<ChildStdout>>, part: &str) -> String {
    let mut seen = Vec::new();
    for line in lines {
        let line = line.unwrap();
        if line.contains(part) {
            return line.trim().to_owned();
        }
        seen.push(line);
    }
    panic!("no line with {part}: {seen:#?}");
}

/// Runs a line that a program has printed, in a shell in `folder` that finds the programs of this
/// build.
fn shell(folder: &Path, script: &str) -> Command {
    let agent = gw_agent();
    let built = Path::new(agent.get_program()).parent().unwrap();
    let path = std::env::var("PATH").unwrap();
    let mut command = Command::new("sh");
    command
        .args(["-c", script])
        .current_dir(folder)
        .stdin(Stdio::null())
        .env("PATH", format!("{}:{path}", built.display()))
        .env("GW_STATE_DIR", folder.join("agent"));
    command
}

/// Starts a program. Returns it with the lines of its standard output.
fn piped(command: &mut Command) -> (Running, Lines<BufReader<ChildStdout>>) {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    (Running::new(child), lines)
}

#[test]
fn three_commands_relay_a_request() {
    let folder = tempfile::tempdir().unwrap();
    let backend = backend::answering("HTTP/1.1 204 X\r\n\r\n");
    let port = backend.rsplit(':').next().unwrap();

    // The first command serves, and prints the others.
    let (mut gateway, mut lines) =
        piped(init(folder.path()).args(["--account", "acme", "--serve"]));
    let part = "service create acme api --with-key --with-agent";
    let second = line_with(&mut lines, part);
    let (code, created) = end(&shell(folder.path(), &second).output().unwrap());
    assert_eq!(code, Some(0), "{created}");
    let secret = |prefix: &str| {
        let is_part = |it: char| it.is_ascii_alphanumeric() || "._-".contains(it);
        let (_, rest) = created
            .split_once(prefix)
            .unwrap_or_else(|| panic!("no {prefix}: {created}"));
        format!("{prefix}{}", rest.split(|it| !is_part(it)).next().unwrap())
    };
    let key = secret("gw_sk_");
    let token = secret("gw_et_");

    // The last one is for a program on port 3000.
    let last = line_with(&mut lines, "gw-agent http 3000 ");
    let first = line_with(&mut lines, "The first request, GET https://acme--api.");
    assert!(
        first.ends_with("is answered: 502 Bad Gateway GW_SERVICE_NOT_FOUND"),
        "{first}"
    );
    // The second command has printed the lines that write the file for the last one, for a user
    // that cannot read data_dir.
    let (_, authority) = created.split_once("cat > gw-ca.crt").unwrap();
    let (pem, _) = authority.split_once("\nEND\n").unwrap();
    let write = format!("cat > gw-ca.crt{pem}\nEND\n");
    assert_eq!(
        end(&shell(folder.path(), &write).output().unwrap()),
        (Some(0), String::new())
    );
    assert!(last.contains(" --ca-file gw-ca.crt "), "{last}");
    let last = last.replace("http 3000", &format!("http {port}"));
    let last = format!("exec {last} <<END\n{token}\nEND\n");
    let (_agent, mut lines) = piped(&mut shell(folder.path(), &last));
    let line = line_with(&mut lines, HOST);
    assert!(
        line.ends_with(&format!("-> http://localhost:{port}")),
        "{line}"
    );

    let status = call(&line, &key, &folder.path().join("gw-ca.crt"));
    assert_eq!(status, 204);
    gateway.stop();
}

/// Sends a request to the address in the line that an agent has printed. Returns its status.
fn call(line: &str, key: &str, authority: &Path) -> u16 {
    let (url, _) = line.split_once(" -> ").unwrap();
    let (_, port) = url.rsplit_once(':').unwrap();
    let address = format!("127.0.0.1:{port}").parse().unwrap();
    let about = about(address, key, authority.to_owned());
    let request = format!("GET / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n\r\n");
    let response = connect_to(&about, HOST, &[b"http/1.1"], None).ask(request);
    response.status.as_u16()
}

#[test]
fn init_without_an_account_creates_nothing() {
    if would_install() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (code, said) = init_with(folder.path(), &[]);
    assert!(
        code == Some(2) && said.contains("--account: missing"),
        "{said}"
    );
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn init_creates_a_valid_configuration_and_names_the_next_command() {
    if would_install() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (code, said) = init_with(folder.path(), &["--account", "acme"]);
    assert_eq!(code, Some(0), "{said}");
    let config = folder.path().join("gateway.toml");
    for part in [
        "gateway.toml: created.",
        "Account acme: created.",
        &format!("gw-gateway serve --config {}", config.display()),
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let check = serve_command(&config).arg("--check").output().unwrap();
    assert_eq!(end(&check), (Some(0), String::new()));
}

#[test]
fn a_repeated_init_replaces_a_configuration_on_demand_only() {
    if would_install() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let with = |options: &[&str]| {
        let account = ["--account", "acme"];
        init_with(folder.path(), &[&account, options].concat())
    };
    let (code, said) = with(&[]);
    assert_eq!(code, Some(0), "{said}");
    let config = folder.path().join("gateway.toml");
    let text = fs::read_to_string(&config).unwrap();
    let (code, said) = with(&[]);
    assert!(
        code == Some(0) && said.matches("unchanged").count() == 2,
        "{said}"
    );
    let (code, said) = with(&["--domain", "example.com"]);
    assert!(
        code == Some(2) && said.contains(config.to_str().unwrap()) && said.contains("--force"),
        "{said}"
    );
    assert_eq!(fs::read_to_string(&config).unwrap(), text);
    let (code, said) = with(&["--domain", "example.com", "--force"]);
    assert!(
        code == Some(0) && said.contains("gateway.toml: replaced.") && said.contains("certbot"),
        "{said}"
    );
}

#[test]
fn a_gateway_that_init_serves_can_be_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let mut served = serve_init(folder.path());
    let successor = replace(served.process.id(), &served.log);
    assert_eq!(served.process.exit_code(), Some(0));
    // The successor does not set anything up again.
    let arguments = fs::read_to_string(format!("/proc/{}/cmdline", successor.0)).unwrap();
    let config = folder.path().join("gateway.toml");
    let expected = format!("\0serve\0--config\0{}\0", config.display());
    assert!(arguments.ends_with(&expected), "{arguments:?}");
    assert_eq!(admin(served.admin_address, "/readyz").0, 200);
    successor.stop();
}

#[test]
fn an_account_of_a_running_gateway_is_created_by_its_api() {
    if would_install() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let served = serve_init(folder.path());
    // Another configuration of the same records, with the port that the kernel has chosen.
    let mut second = gw_gateway();
    second
        .args(["init", "--account", "other", "--admin-listen"])
        .arg(served.admin_address.to_string())
        .arg("--config")
        .arg(folder.path().join("other.toml"))
        .arg("--data-dir")
        .arg(folder.path().join("data"))
        .stdin(Stdio::null());
    let (code, said) = end(&second.output().unwrap());
    assert!(
        code == Some(0) && said.contains("Created:\n  account          other"),
        "{said}"
    );
    served
        .log
        .find(|line| (line["action"] == "account.create").then_some(()));
}

#[test]
fn root_creates_files_with_the_rights_of_the_owner_of_the_data_folder() {
    if would_install() || !programs::is_root() {
        return;
    }
    let folder = owned_folder();
    let (code, said) = init_with(folder.path(), &["--account", "acme"]);
    assert!(
        code == Some(0) && said.contains("Account acme: created."),
        "{said}"
    );
    let owners: Vec<u32> = fs::read_dir(folder.path().join("data"))
        .unwrap()
        .map(|file| file.unwrap().metadata().unwrap().uid())
        .collect();
    assert!(
        !owners.is_empty() && owners.iter().all(|owner| *owner == OWNER),
        "{owners:?}"
    );
}

/// The cause that `init --serve` names for a first request that fails. The gateway serves.
fn cause(options: &[&str]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let mut command = init(folder.path());
    command.args(["--account", "acme", "--serve"]).args(options);
    let (mut gateway, mut lines) = piped(&mut command);
    let failed = line_with(&mut lines, "The first request, GET https://acme--api.");
    assert!(
        failed.ends_with("fails as it would for a caller:"),
        "{failed}"
    );
    let cause = lines.next().unwrap().unwrap();
    gateway.stop();
    cause
}

#[test]
fn a_first_request_with_a_self_signed_certificate_fails_for_that() {
    let files = tempfile::tempdir().unwrap();
    let [certificate, key] = ["certificate.pem", "key.pem"].map(|name| files.path().join(name));
    let names = ["eu1.gw.localhost", "*.eu1.gw.localhost"].map(str::to_owned);
    let pair = rcgen::generate_simple_self_signed(names).unwrap();
    fs::write(&certificate, pair.cert.pem()).unwrap();
    fs::write(&key, pair.signing_key.serialize_pem()).unwrap();
    let said = cause(&[
        "--tls-certificate",
        certificate.to_str().unwrap(),
        "--tls-key",
        key.to_str().unwrap(),
    ]);
    assert!(
        said.contains("is self-signed and is not trusted; tls_certificate must hold all issuers"),
        "{said}"
    );
}

#[test]
fn a_first_request_to_a_name_that_does_not_resolve_fails_for_that() {
    // A name that never resolves (RFC 6761, section 6.4).
    let said = cause(&["--domain", "gw.invalid"]);
    assert!(
        said.contains("acme--api.eu1.gw.invalid does not resolve: ")
            && said.contains("add the DNS records"),
        "{said}"
    );
}

#[test]
fn a_gateway_that_root_serves_has_the_rights_of_the_owner_of_the_data_folder() {
    if !programs::is_root() {
        return;
    }
    let folder = owned_folder();
    let data = folder.path().join("data");
    let mut command = init(folder.path());
    let (mut gateway, mut lines) = piped(command.args(["--account", "acme", "--serve"]));
    line_with(&mut lines, "The gateway has the rights of user 23456");
    let first = line_with(&mut lines, "The first request");
    assert!(first.contains("is answered: 502"), "{first}");
    let status = fs::read_to_string(format!("/proc/{}/status", gateway.id())).unwrap();
    let users = status
        .lines()
        .find_map(|line| line.strip_prefix("Uid:"))
        .unwrap();
    // Real, effective, saved, of the file system.
    let users: Vec<&str> = users.split_whitespace().collect();
    assert_eq!(users, ["0", "23456", "0", "23456"]);
    gateway.stop();

    let mut unseen = vec![data.clone()];
    let mut files = 0;
    while let Some(path) = unseen.pop() {
        let found = fs::metadata(&path).unwrap();
        assert_eq!(found.uid(), OWNER, "{}", path.display());
        files += usize::from(found.is_file());
        if found.is_dir() {
            let entries = fs::read_dir(path).unwrap();
            unseen.extend(entries.map(|entry| entry.unwrap().path()));
        }
    }
    assert!(data.join("admin.token").exists() && files > 2, "{files}");
}
