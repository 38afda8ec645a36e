//! `gw-gateway backup` and `gw-gateway restore`.

mod running;

use std::fs::{self, File};
use std::net::SocketAddr;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use serde_json::json;

use crate::support::peers::backend;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::{config_text, gw_gateway};
use crate::support::{eventually, programs};

/// Exit code, standard output and standard error.
fn run(command: &mut Command) -> (i32, String, String) {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.code().unwrap(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

fn backup(connection: &[&str], file: &Path) -> Command {
    let mut command = gw_gateway();
    command.arg("backup").args(connection).arg(file);
    command
}

/// Options that name the administration API of a gateway and its token.
fn connection<'a>(url: &'a str, token: &'a Path) -> [&'a str; 4] {
    let token = token.to_str().unwrap();
    ["--admin-url", url, "--admin-token-file", token]
}

/// Writes a configuration with the data folder `name` beside it.
fn config(prepared: &Prepared, name: &str) -> PathBuf {
    let path = prepared.path(&format!("{name}.toml"));
    fs::write(
        &path,
        config_text(&prepared.path(name), 0)
            .replace("127.0.0.1:0\"\nworkers", "127.0.0.1:1\"\nworkers"),
    )
    .unwrap();
    path
}

fn restore(config: &Path, file: &Path) -> (i32, String, String) {
    run(gw_gateway()
        .arg("restore")
        .arg("--config")
        .arg(config)
        .arg(file))
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort_unstable();
    names
}

/// Creates the account of this number; returns the status of the answer.
fn create_account(prepared: &Prepared, admin: SocketAddr, number: usize) -> u16 {
    let account = json!({ "id": format!("load{number}") });
    let reply = prepared.api(admin).ask("POST", "/accounts", &account);
    reply.status
}

/// Backs a gateway up while requests are relayed at `address`, and accounts are created at `admin`.
/// Returns the number of accounts created before the backup, by its end, and in all.
fn back_up_under_load(
    prepared: &Prepared,
    [address, admin]: [SocketAddr; 2],
    mut backup: Command,
) -> (usize, usize, usize) {
    let created = AtomicUsize::new(0);
    let relayed = AtomicUsize::new(0);
    let is_done = AtomicBool::new(false);
    let (before, after) = thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                let number = created.load(Ordering::Relaxed);
                assert_eq!(create_account(prepared, admin, number), 201);
                created.fetch_add(1, Ordering::Relaxed);
            }
        });
        scope.spawn(|| {
            let mut caller = prepared.connect(address);
            while !is_done.load(Ordering::Relaxed) {
                caller.send(prepared.get("/"));
                assert_eq!(caller.response().status, 200);
                relayed.fetch_add(1, Ordering::Relaxed);
            }
        });
        let progress = |than: usize| {
            eventually("changes and requests go on", || {
                let [created, relayed] =
                    [&created, &relayed].map(|count| count.load(Ordering::Relaxed));
                (created > than && relayed > than).then_some(created)
            })
        };
        let before = progress(5);
        let (code, out, err) = run(&mut backup);
        let after = created.load(Ordering::Relaxed);
        progress(after + 5);
        is_done.store(true, Ordering::Relaxed);
        assert_eq!(code, 0, "{out}{err}");
        (before, after)
    });
    (before, after, created.into_inner())
}

#[test]
fn a_backup_under_load_is_restored_to_a_gateway_with_the_same_agent_and_key() {
    let prepared = Prepared::new();
    let backend = backend::answering("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello");
    let (served, agent) = prepared.start(&backend);
    let create = |admin, number| create_account(&prepared, admin, number);
    let file = prepared.path("backup.tar.zst");
    let url = format!("http://{}", served.admin_address);
    let token = prepared.path("data/admin.token");
    let connection = connection(&url, &token);
    let addresses = [served.address, served.admin_address];
    let (before, after, last) =
        back_up_under_load(&prepared, addresses, backup(&connection, &file));
    assert_eq!(mode(&file), 0o600);
    let first = prepared.path("first.tar.zst");
    let size = fs::copy(&file, &first).unwrap();
    a_file_is_replaced_on_demand_only(&connection, &file, size);
    // The same from standard output.
    let piped = prepared.path("piped.tar.zst");
    let mut command = backup(&connection, Path::new("-"));
    assert!(
        command
            .stdout(File::create(&piped).unwrap())
            .status()
            .unwrap()
            .success()
    );

    // Nothing of the first gateway is left but the backup, and the trusted authority of callers.
    drop((agent, served));
    assert_eq!(
        names(&prepared.path("data"))
            .iter()
            .filter(|name| name.ends_with(".partial"))
            .count(),
        0
    );
    let restored = config(&prepared, "restored");
    let (code, out, err) = restore(&restored, &piped);
    assert_eq!(code, 0, "{err}");
    assert!(
        out.starts_with("Restored ") && out.contains("eu1.gw.localhost"),
        "{out}"
    );
    let folder = prepared.path("restored");
    the_folder_is_private(&folder);
    let (code, _, message) = restore(&restored, &piped);
    assert!(
        code == 2 && message.contains("is not empty: it has "),
        "{message}"
    );

    let served = prepared.serve_with(&config_text(&folder, 0));
    let _agent = prepared.run_agent(served.address.port(), &backend);
    prepared.wait_for_tunnel(served.address);
    let mut caller = prepared.connect(served.address);
    caller.send(prepared.get("/"));
    assert_eq!(caller.response().status, 200);
    // 200: the account exists. The last backup has all accounts; the admin token is the same.
    assert_eq!(create(served.admin_address, last - 1), 200);
    assert_eq!(create(served.admin_address, last), 201);
    drop(served);

    // The first backup has everything that was answered before it began, and nothing from after its
    // end. The change that was not answered yet at its end may be in it.
    let (code, _, err) = restore(&config(&prepared, "first"), &first);
    assert_eq!(code, 0, "{err}");
    let served = prepared.serve_with(&config_text(&prepared.path("first"), 0));
    assert_eq!(create(served.admin_address, before - 1), 200);
    assert_eq!(create(served.admin_address, after + 1), 201);
}

fn a_file_is_replaced_on_demand_only(connection: &[&str], file: &Path, size: u64) {
    let (code, _, message) = run(&mut backup(connection, file));
    assert!(
        code == 2 && message.contains("exists; give another name, or --force"),
        "{message}"
    );
    let (code, out, err) = run(backup(connection, file).args(["--force", "--json"]));
    assert_eq!(code, 0, "{err}");
    let told: serde_json::Value = out.parse().unwrap();
    assert_eq!(told["bytes"], fs::metadata(file).unwrap().len());
    assert!(told["bytes"].as_u64().unwrap() >= size / 2);
}

fn the_folder_is_private(folder: &Path) {
    assert_eq!(
        names(folder),
        [
            "admin.token",
            "agent-ca.crt",
            "agent-ca.key",
            "dev-ca.crt",
            "dev-ca.key",
            "gw.sqlite"
        ]
    );
    assert_eq!(mode(folder), 0o700);
    assert!(
        names(folder)
            .iter()
            .all(|name| mode(&folder.join(name)) == 0o600)
    );
}

#[test]
fn changes_answered_before_a_backup_are_in_it() {
    let prepared = Prepared::new();
    let served = prepared.serve_with(&prepared.config());
    let create = |admin, id: &str| {
        let api = prepared.api(admin);
        api.ask("POST", "/accounts", &json!({ "id": id })).status
    };
    assert_eq!(create(served.admin_address, "before"), 201);
    // The token may be used after the backup, which then has it unused.
    let api = prepared.api(served.admin_address);
    api.create_enrollment_token("demo", &["echo"]);
    let url = format!("http://{}", served.admin_address);
    let file = prepared.path("backup.tar.zst");
    let token = prepared.path("data/admin.token");
    let connection = connection(&url, &token);
    assert_eq!(run(&mut backup(&connection, &file)).0, 0);
    assert_eq!(create(served.admin_address, "later"), 201);
    drop(served);
    let (code, out, err) = restore(&config(&prepared, "restored"), &file);
    assert!(
        code == 0 && out.contains(" enrollment tokens, which may have been used since."),
        "{out}{err}"
    );
    let served = prepared.serve_with(&config_text(&prepared.path("restored"), 0));
    assert_eq!(create(served.admin_address, "before"), 200);
    assert_eq!(create(served.admin_address, "later"), 201);
    let url = format!("http://{}", served.admin_address);
    let items = |command: &[&str]| {
        let mut list = gw_gateway();
        list.args(command)
            .args(self::connection(&url, &token))
            .arg("--json");
        let list: serde_json::Value = run(&mut list).1.parse().unwrap();
        list["items"].as_array().unwrap().clone()
    };
    assert!(items(&["enrollment-token", "list", "demo"]).is_empty());
    let audit = items(&["audit", "list"]);
    let actions: Vec<&str> = audit
        .iter()
        .map(|entry| entry["action"].as_str().unwrap())
        .collect();
    let expected = [
        "account.create",
        "backup.restore",
        "backup.create",
        "enrollment_token.create",
        "account.create",
    ];
    assert_eq!(actions[..5], expected);
    assert!(
        !audit[1]["detail"]["deleted_enrollment_tokens"]
            .as_array()
            .unwrap()
            .is_empty()
    );
}

#[test]
fn a_stopped_gateway_is_backed_up_and_damaged_archives_are_refused() {
    let prepared = Prepared::new();
    let config_of = |name: &str| config(&prepared, name);
    let file = prepared.path("backup.tar.zst");
    // A gateway that was never started has no admin token, and no records.
    let never = config_of("never");
    let (code, _, err) = run(&mut backup(&["--config", never.to_str().unwrap()], &file));
    let expected = format!(
        "gw-gateway: {}: it does not exist: no gateway with {} was ever started",
        prepared.path("never/gw.sqlite").display(),
        never.display()
    );
    assert!(
        code == 1 && err.starts_with(&expected) && !file.exists(),
        "{err}"
    );
    let (code, _, err) = run(&mut backup(
        &["--config", config_of("data").to_str().unwrap()],
        &file,
    ));
    assert_eq!(code, 0, "{err}");
    let whole = fs::read(&file).unwrap();
    let target = config_of("target");
    let refused = |bytes: &[u8], expected: &str| {
        let broken = prepared.path("broken");
        fs::write(&broken, bytes).unwrap();
        let (code, _, message) = restore(&target, &broken);
        assert!(code == 1 && message.contains(expected), "{message}");
        assert!(!prepared.path("target").exists());
    };
    for length in [0, 10, whole.len() / 2, whole.len() - 1] {
        refused(&whole[..length], "the archive is damaged or incomplete");
    }
    for at in [
        whole.len() / 4,
        whole.len() / 2,
        whole.len() * 3 / 4,
        whole.len() - 1,
    ] {
        let mut flipped = whole.clone();
        flipped[at] ^= 1;
        refused(&flipped, "nothing was restored");
    }
    refused(
        b"not an archive at all",
        "the archive is damaged or incomplete",
    );
    let text = fs::read_to_string(&target).unwrap();
    fs::write(&target, text.replace("eu1", "eu2")).unwrap();
    refused(
        &whole,
        "is of the region eu1.gw.localhost, and the configuration is of eu2.gw.localhost",
    );
    fs::write(&target, text).unwrap();

    // From standard input.
    let mut command = gw_gateway();
    command
        .args(["restore", "-", "--config"])
        .arg(&target)
        .stdin(Stdio::from(File::open(&file).unwrap()));
    let (code, _, err) = run(&mut command);
    assert_eq!(code, 0, "{err}");
    let served = prepared.serve_with(&config_text(&prepared.path("target"), 0));
    drop(served);
}

/// Runs a command with a file system of one page at `folder`, in a namespace. Returns its exit
/// code, the files left there, and its errors.
fn on_small_disk(folder: &Path, arguments: &[&Path]) -> (i32, String, String) {
    let script = r#"mount -t tmpfs -o size=4k,mode=700 none "$1" && shift && "$@"; code=$?;
                        ls -A "$0"; exit $code"#;
    let mut command = Command::new("unshare");
    command
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", script])
        .arg(folder)
        .arg(folder);
    run(command.arg(gw_gateway().get_program()).args(arguments))
}

#[test]
fn a_full_disk_leaves_no_half_file_and_is_named() {
    let prepared = Prepared::new();
    let config = config(&prepared, "data");
    let connection = ["--config", config.to_str().unwrap()];
    let mut command = backup(&connection, Path::new("-"));
    let full = command
        .stdout(File::create("/dev/full").unwrap())
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    let message = String::from_utf8(full.stderr).unwrap();
    assert!(
        full.status.code() == Some(1) && message.contains("standard output: No space left"),
        "{message}"
    );
    if !programs::usable(&["unshare"]) {
        return;
    }
    // Secrets, so that the archive does not become smaller than a page.
    let served = prepared.serve_with(&prepared.config());
    let api = prepared.api(served.admin_address);
    for _ in 0..64 {
        api.create_service_key("demo", &["echo"]);
    }
    drop(served);
    // For the file of the backup, and for the data folder of a restore.
    let small = prepared.path("small");
    fs::create_dir(&small).unwrap();
    let on_small_disk = |arguments: &[&Path]| on_small_disk(&small, arguments);
    let (code, left, message) = on_small_disk(&[
        Path::new("backup"),
        Path::new("--config"),
        &config,
        &small.join("file"),
    ]);
    assert!(
        code == 1 && message.contains("file: No space left"),
        "{message}"
    );
    assert_eq!(left, "");

    let file = prepared.path("backup.tar.zst");
    assert_eq!(run(&mut backup(&connection, &file)).0, 0);
    let target = self::config(&prepared, "small");
    let (code, left, message) =
        on_small_disk(&[Path::new("restore"), Path::new("--config"), &target, &file]);
    assert!(code == 1 && message.contains("No space left"), "{message}");
    assert!(
        message
            .contains("free space on the disk of data_dir and try again; nothing was restored\n"),
        "{message}"
    );
    assert_eq!(left, "");
}

#[test]
fn a_gateway_at_another_address_is_never_replaced_by_the_local_folder() {
    let prepared = Prepared::new();
    let (_held, address) = backend::refusing();
    let config = config(&prepared, "data");
    let url = format!("http://{address}");
    let file = prepared.path("backup.tar.zst");
    let connection = ["--config", config.to_str().unwrap(), "--admin-url", &url];
    let (code, _, message) = run(&mut backup(&connection, &file));
    assert!(
        code == 1 && message.contains(&format!("no response from {url}")),
        "{message}"
    );
    assert!(!file.exists());
    // The address of a configuration file is that of its gateway, whatever the environment has.
    let (code, _, message) = run(backup(&connection[..2], &file).env("GW_ADMIN_URL", &url));
    assert_eq!(code, 0, "{message}");
}

#[test]
fn only_a_regular_file_is_replaced() {
    let prepared = Prepared::new();
    let config = config(&prepared, "data");
    let file = prepared.path("file");
    let link = prepared.path("link");
    let folder = prepared.path("folder");
    fs::write(&file, "").unwrap();
    symlink("/dev/stdout", &link).unwrap();
    fs::create_dir(&folder).unwrap();
    let connection = ["--config", config.to_str().unwrap()];
    let replace = |target: &Path| run(backup(&connection, target).arg("--force"));
    for (code, _, message) in [
        replace(&link),
        replace(&folder),
        run(&mut backup(&connection, &link)),
    ] {
        assert!(
            code == 2 && message.contains("is not a regular file; give another name, or - for"),
            "{message}"
        );
    }
    assert_eq!(fs::read_link(&link).unwrap(), Path::new("/dev/stdout"));
    let (code, _, message) = replace(&file);
    assert!(
        code == 0 && fs::metadata(&file).unwrap().len() > 0,
        "{message}"
    );
}
