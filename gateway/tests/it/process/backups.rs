//! `gw-gateway backup` and `gw-gateway restore`.

mod running;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use serde_json::json;

use crate::support::admin_api::Api;
use crate::support::peers::backend;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::{Served, config_text, gw_gateway};
use crate::support::{eventually, programs};

const HELLO: &str = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello";

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

fn backup(connection: &[impl AsRef<OsStr>], file: &Path) -> Command {
    let mut command = gw_gateway();
    command.arg("backup").args(connection).arg(file);
    command
}

/// Options that name the administration API of a gateway and its token.
fn connection(prepared: &Prepared, served: &Served) -> [String; 4] {
    let url = format!("http://{}", served.admin_address);
    let token = prepared.path("data/admin.token").display().to_string();
    [
        "--admin-url".to_owned(),
        url,
        "--admin-token-file".to_owned(),
        token,
    ]
}

/// Options that name the configuration of a gateway that does not run.
fn of_stopped(config: &Path) -> [&str; 2] {
    ["--config", config.to_str().unwrap()]
}

/// Writes a configuration with the data folder `name` beside it.
fn config(prepared: &Prepared, name: &str) -> PathBuf {
    let path = prepared.path(&format!("{name}.toml"));
    let text = config_text(&prepared.path(name), 0);
    let text = text.replace("127.0.0.1:0\"\nworkers", "127.0.0.1:1\"\nworkers");
    fs::write(&path, text).unwrap();
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

/// Creates an account; returns the status of the answer.
fn create_account(api: &Api, id: &str) -> u16 {
    api.ask("POST", "/accounts", &json!({ "id": id })).status
}

/// Backs a gateway up while requests are relayed, and accounts are created. Returns the number of
/// accounts created before the backup, and by its end.
fn back_up_under_load(prepared: &Prepared, served: &Served, mut backup: Command) -> (usize, usize) {
    let created = AtomicUsize::new(0);
    let relayed = AtomicUsize::new(0);
    let is_done = AtomicBool::new(false);
    let api = prepared.api(served.admin_address);
    let address = served.address;
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                let id = format!("load{}", created.load(Ordering::Relaxed));
                assert_eq!(create_account(&api, &id), 201);
                created.fetch_add(1, Ordering::Relaxed);
            }
        });
        scope.spawn(|| {
            let mut caller = prepared.connect(address);
            while !is_done.load(Ordering::Relaxed) {
                assert_eq!(caller.ask(prepared.get("/")).status, 200);
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
    })
}

#[test]
fn a_backup_under_load_has_all_changes_from_before_it_and_none_from_after_it() {
    let prepared = Prepared::new();
    let (served, agent) = prepared.start(&backend::answering(HELLO));
    let file = prepared.path("backup.tar.zst");
    let command = backup(&connection(&prepared, &served), &file);
    let (before, after) = back_up_under_load(&prepared, &served, command);
    assert_eq!(mode(&file), 0o600);
    drop((agent, served));
    let partial = |name: &String| name.ends_with(".partial");
    assert!(!names(&prepared.path("data")).iter().any(partial));

    // The change that was not answered yet at its end may be in it.
    let (code, _, message) = restore(&config(&prepared, "restored"), &file);
    assert_eq!(code, 0, "{message}");
    let served = prepared.serve_with(&config_text(&prepared.path("restored"), 0));
    let api = prepared.api(served.admin_address);
    let create = |number| create_account(&api, &format!("load{number}"));
    assert_eq!([before - 1, after + 1].map(create), [200, 201]);
}

#[test]
fn a_restored_gateway_has_the_same_agent_keys_and_accounts() {
    let prepared = Prepared::new();
    let backend = backend::answering(HELLO);
    let (served, agent) = prepared.start(&backend);
    assert_eq!(
        create_account(&prepared.api(served.admin_address), "before"),
        201
    );
    // From standard output.
    let piped = prepared.path("piped.tar.zst");
    let mut command = backup(&connection(&prepared, &served), Path::new("-"));
    command.stdout(File::create(&piped).unwrap());
    assert!(command.status().unwrap().success());

    // Only the backup and the authority that callers trust are left of the first gateway.
    drop((agent, served));
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
    assert_eq!(caller.ask(prepared.get("/")).status, 200);
    // 200: the account exists. The admin token is the same.
    let api = prepared.api(served.admin_address);
    let create = |id| create_account(&api, id);
    assert_eq!(["before", "later"].map(create), [200, 201]);
}

#[test]
fn the_file_of_a_backup_is_replaced_on_demand_only() {
    let prepared = Prepared::new();
    let served = prepared.serve_with(&prepared.config());
    let connection = connection(&prepared, &served);
    let file = prepared.path("backup.tar.zst");
    assert_eq!(run(&mut backup(&connection, &file)).0, 0);
    let size = fs::metadata(&file).unwrap().len();
    let (code, _, message) = run(&mut backup(&connection, &file));
    assert!(
        code == 2 && message.contains("exists; give another name, or --force"),
        "{message}"
    );
    let (code, out, err) = run(backup(&connection, &file).args(["--force", "--json"]));
    assert_eq!(code, 0, "{err}");
    let told: serde_json::Value = out.parse().unwrap();
    assert_eq!(told["bytes"], fs::metadata(&file).unwrap().len());
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
fn a_restore_deletes_unused_enrollment_tokens_and_names_them_in_the_audit_log() {
    let prepared = Prepared::new();
    let served = prepared.serve_with(&prepared.config());
    let api = prepared.api(served.admin_address);
    assert_eq!(create_account(&api, "before"), 201);
    // The token may be used after the backup, in which it is unused.
    api.create_enrollment_token("demo", &["echo"]);
    let file = prepared.path("backup.tar.zst");
    let command = &mut backup(&connection(&prepared, &served), &file);
    assert_eq!(run(command).0, 0);
    assert_eq!(create_account(&api, "later"), 201);
    drop(served);
    let (code, out, err) = restore(&config(&prepared, "restored"), &file);
    assert!(
        code == 0 && out.contains(" enrollment tokens, which may have been used since."),
        "{out}{err}"
    );
    let served = prepared.serve_with(&config_text(&prepared.path("restored"), 0));
    let api = prepared.api(served.admin_address);
    let create = |id| create_account(&api, id);
    assert_eq!(["before", "later"].map(create), [200, 201]);
    let tokens = api.list("/accounts/demo/enrollment-tokens");
    assert!(tokens.is_empty(), "{tokens:?}");
    let audit = api.list("/audit-log");
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
    let deleted = audit[1]["detail"]["deleted_enrollment_tokens"].as_array();
    assert!(!deleted.unwrap().is_empty());
}

#[test]
fn a_gateway_that_was_never_started_is_not_backed_up() {
    let prepared = Prepared::new();
    let file = prepared.path("backup.tar.zst");
    let never = config(&prepared, "never");
    let (code, _, err) = run(&mut backup(&of_stopped(&never), &file));
    let expected = format!(
        "gw-gateway: {}: it does not exist: no gateway with {} was ever started",
        prepared.path("never/gw.sqlite").display(),
        never.display()
    );
    assert!(
        code == 1 && err.starts_with(&expected) && !file.exists(),
        "{err}"
    );
}

/// The file of a backup of a gateway that does not run.
fn backup_of_stopped(prepared: &Prepared) -> PathBuf {
    let file = prepared.path("backup.tar.zst");
    let source = config(prepared, "data");
    let (code, _, message) = run(&mut backup(&of_stopped(&source), &file));
    assert_eq!(code, 0, "{message}");
    file
}

#[test]
fn a_stopped_gateway_is_backed_up_and_restored_from_standard_input() {
    let prepared = Prepared::new();
    let file = backup_of_stopped(&prepared);
    let mut command = gw_gateway();
    command
        .args(["restore", "-", "--config"])
        .arg(config(&prepared, "target"))
        .stdin(Stdio::from(File::open(file).unwrap()));
    let (code, _, err) = run(&mut command);
    assert_eq!(code, 0, "{err}");
    prepared.serve_with(&config_text(&prepared.path("target"), 0));
}

/// Asserts that an archive is refused with this message, and that nothing of it is restored.
fn assert_refused(prepared: &Prepared, target: &Path, archive: &[u8], expected: &str) {
    let broken = prepared.path("broken");
    fs::write(&broken, archive).unwrap();
    let (code, _, message) = restore(target, &broken);
    assert!(code == 1 && message.contains(expected), "{message}");
    assert!(!prepared.path("target").exists());
}

#[test]
fn damaged_archives_are_refused() {
    const DAMAGED: &str = "the archive is damaged or incomplete";
    let prepared = Prepared::new();
    let whole = fs::read(backup_of_stopped(&prepared)).unwrap();
    let target = config(&prepared, "target");
    let refused =
        |archive: &[u8], expected: &str| assert_refused(&prepared, &target, archive, expected);
    let end = whole.len();
    for length in [0, 10, end / 2, end - 1] {
        refused(&whole[..length], DAMAGED);
    }
    for at in [end / 4, end / 2, end * 3 / 4, end - 1] {
        let mut flipped = whole.clone();
        flipped[at] ^= 1;
        refused(&flipped, "nothing was restored");
    }
    refused(b"not an archive at all", DAMAGED);
}

#[test]
fn an_archive_of_another_region_is_refused() {
    let prepared = Prepared::new();
    let whole = fs::read(backup_of_stopped(&prepared)).unwrap();
    let target = config(&prepared, "target");
    let text = fs::read_to_string(&target).unwrap();
    fs::write(&target, text.replace("eu1", "eu2")).unwrap();
    let expected =
        "is of the region eu1.gw.localhost, and the configuration is of eu2.gw.localhost";
    assert_refused(&prepared, &target, &whole, expected);
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
fn a_backup_to_full_standard_output_says_so() {
    let prepared = Prepared::new();
    let config = config(&prepared, "data");
    let full = backup(&of_stopped(&config), Path::new("-"))
        .stdout(File::create("/dev/full").unwrap())
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    let message = String::from_utf8(full.stderr).unwrap();
    assert!(
        full.status.code() == Some(1) && message.contains("standard output: No space left"),
        "{message}"
    );
}

#[test]
fn a_full_disk_leaves_no_half_file_and_is_named() {
    if !programs::usable(&["unshare"]) {
        return;
    }
    let prepared = Prepared::new();
    // Secrets, so that the archive does not become smaller than a page.
    let served = prepared.serve_with(&prepared.config());
    let api = prepared.api(served.admin_address);
    for _ in 0..64 {
        api.create_service_key("demo", &["echo"]);
    }
    drop(served);
    let file = backup_of_stopped(&prepared);
    // For the file of the backup, and for the data folder of a restore.
    let small = prepared.path("small");
    fs::create_dir(&small).unwrap();
    let remedy = "free space on the disk of data_dir and try again; nothing was restored\n";
    for (command, data, file, parts) in [
        (
            "backup",
            "data",
            small.join("file"),
            ["file: No space left"; 2],
        ),
        ("restore", "small", file, ["No space left", remedy]),
    ] {
        let config = config(&prepared, data);
        let command = [Path::new(command), Path::new("--config"), &config, &file];
        let (code, left, message) = on_small_disk(&small, &command);
        assert!(
            code == 1 && parts.iter().all(|part| message.contains(part)),
            "{message}"
        );
        assert_eq!(left, "");
    }
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
    // The address in a configuration file takes precedence over the environment.
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
    let connection = of_stopped(&config);
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
