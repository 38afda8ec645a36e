//! The packages that `packaging/build` makes: installed in a root of their own, booted, and run.
//! The programs in them are those of this test's build.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod images;
mod parts;
#[path = "../../../shared/tests/programs/mod.rs"]
mod programs;
mod signed;
mod units;

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use gw_agent::config::ConfigError;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/packages");

/// What the root has besides Debian's essential packages and apt.
const IN_ROOT: &str = "bash-completion,curl,dbus,fish,man-db,systemd-sysv,zsh";

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_owned()
}

/// Returns whether the tests can make roots and use `programs`. If not, the calling test must
/// return.
fn usable(programs: &[&str]) -> bool {
    if std::env::var_os("GW_TEST_PACKAGES").is_some_and(|value| !value.is_empty()) {
        assert!(
            rustix::process::geteuid().is_root(),
            "the tests of packages need root"
        );
        return programs::usable(programs);
    }
    programs::skipped("runs with GW_TEST_PACKAGES=1");
    false
}

/// Runs a command to its end; its output.
fn run(command: &mut Command) -> String {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let stdout = text(&output.stdout);
    let stderr = text(&output.stderr);
    assert!(
        output.status.success(),
        "{command:?}: {}\n{stdout}\n{stderr}",
        output.status
    );
    stdout
}

/// Packages the programs of this build; the paths of the packages, which end with `ending`.
fn build(kind: &str, out: &Path, ending: &str) -> Vec<PathBuf> {
    let programs = Path::new(env!("CARGO_BIN_EXE_gw-gateway"))
        .parent()
        .unwrap();
    assert!(
        programs.join("gw-agent").exists(),
        "build the whole workspace: cargo test --workspace"
    );
    let mut command = Command::new(repository().join("packaging/build"));
    command
        .args([kind, "--profile", "dev", "--programs"])
        .arg(programs)
        .arg("--out")
        .arg(out);
    let built: Vec<PathBuf> = run(&mut command).lines().map(PathBuf::from).collect();
    assert!(built.iter().all(|path| path.exists()), "{built:?}");
    built
        .into_iter()
        .filter(|path| path.to_str().unwrap().ends_with(ending))
        .collect()
}

/// A fresh root of this machine's Debian release. Its archive is made once.
fn debian(root: &Path) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let archive = folder.join(format!("root-with-{IN_ROOT}.tar"));
    if !archive.exists() {
        let release = fs::read_to_string("/etc/os-release").unwrap();
        let name = release
            .lines()
            .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
            .unwrap();
        let whole = folder.join("root.new.tar");
        let include = format!("--include={IN_ROOT}");
        run(Command::new("mmdebstrap")
            .args(["--quiet", "--variant=apt", &include, name])
            .arg(&whole));
        fs::rename(whole, &archive).unwrap();
    }
    fs::create_dir(root).unwrap();
    run(Command::new("tar")
        .arg("--extract")
        .arg("--file")
        .arg(archive)
        .arg("--directory")
        .arg(root));
}

/// Puts the file of this folder into `/root` of the root.
fn put_script(root: &Path, name: &str) {
    let path = root.join("root").join(name);
    fs::copy(Path::new(FOLDER).join(name), &path).unwrap();
    fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
}

/// Asserts that a script has come to its end, and resets that.
fn assert_passed(root: &Path, said: &str) {
    let passed = root.join("root/passed");
    let log = fs::read_to_string(root.join("root/log")).unwrap_or_default();
    assert!(passed.exists(), "{said}\n{log}");
    fs::remove_file(passed).unwrap();
}

#[test]
fn debian_packages_install_and_serve_by_their_units() {
    if !usable(&[
        "dpkg-shlibdeps",
        "lintian",
        "mmdebstrap",
        "python3-markdown-it",
        "systemd-nspawn",
    ]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let packages = build("deb", folder.path(), ".deb");
    assert_eq!(packages.len(), 4, "{packages:?}");
    run(Command::new("lintian")
        .args(["--allow-root", "--fail-on=error,warning"])
        .args(&packages));

    let root = folder.path().join("root");
    debian(&root);
    for package in &packages {
        fs::copy(
            package,
            root.join("root").join(package.file_name().unwrap()),
        )
        .unwrap();
    }
    let chroot = |script: &str| run(Command::new("chroot").arg(&root).args(["sh", "-c", script]));
    chroot("dpkg --install /root/*.deb");
    put_script(&root, "installed.sh");
    let said = chroot("/root/installed.sh 2>/root/log || true");
    assert_passed(&root, &said);

    put_script(&root, "system.sh");
    fs::copy(
        Path::new(FOLDER).join("test.service"),
        root.join("etc/systemd/system/test.service"),
    )
    .unwrap();
    // A network of its own: the gateway's ports are free there.
    let mut boot = Command::new("timeout");
    boot.args([
        "120",
        "systemd-nspawn",
        "--quiet",
        "--register=no",
        "--keep-unit",
        "--private-network",
        "--boot",
    ]);
    boot.arg("--directory")
        .arg(&root)
        .arg("systemd.unit=test.service")
        .env("SYSTEMD_NSPAWN_UNIFIED_HIERARCHY", "1");
    let output = boot.output().unwrap();
    assert_passed(&root, &String::from_utf8_lossy(&output.stdout));
}

#[test]
fn manifests_have_the_fields_and_references_of_their_schemas() {
    if programs::usable(&["python3-yaml"]) {
        let check = Path::new(FOLDER).join("manifests.py");
        let said = run(Command::new("python3")
            .arg(check)
            .arg(repository().join("packaging")));
        let all = [
            "StatefulSet gw-gateway",
            "Deployment gw-agent",
            "Deployment gw-agent-replicas",
        ];
        assert!(
            all.iter()
                .all(|workload| said.lines().any(|line| line == *workload)),
            "{said}"
        );
    }
}

#[test]
fn configuration_files_of_the_manifests_are_valid() {
    let path = |name: &str| repository().join("packaging/kubernetes").join(name);
    let text = fs::read_to_string(path("gateway/gateway.toml")).unwrap();
    gw_interface::config::Config::parse(&text, |_| None).unwrap();
    let state = tempfile::tempdir().unwrap();
    for file in ["agent/agent.toml", "agent-replicas/agent.toml"] {
        // After all keys it looks for the enrolled agent.
        let agent = gw_agent::Config::load(
            Some(&path(file)),
            Some(state.path().to_owned()),
            &[],
            |_| None,
        );
        assert!(
            matches!(agent, Err(ConfigError::State(_))),
            "{file}: {agent:?}"
        );
    }
}
