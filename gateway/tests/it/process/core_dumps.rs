//! Core dumps and memory of the programs' processes: neither is for another process of the same
//! user, unless the configuration allows it.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::peers::backend;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process;
use crate::support::processes::process::{
    Running, Served, children, gw_agent, has_ended, send_signal, serve_command,
};
use crate::support::processes::successor::replace;
use crate::support::{eventually, programs};

/// Runs a program and its children with core dumps up to any size, and without the right of root to
/// read the memory of all processes.
const SHELL: &str = r#"ulimit -c unlimited && exec "$@""#;

fn as_user(command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", SHELL, "sh"]);
    if rustix::process::geteuid().is_root() {
        shell.args(["setpriv", "--bounding-set=-sys_ptrace", "--"]);
    }
    shell.arg(command.get_program()).args(command.get_args());
    shell.envs(
        command
            .get_envs()
            .filter_map(|(name, value)| Some((name, value?))),
    );
    shell
}

/// Whether another process of this user can open the memory of a process.
fn is_readable(id: u32) -> bool {
    let mut open = Command::new("sh");
    open.args(["-c", &format!("exec 3< /proc/{id}/mem")]);
    as_user(&open)
        .stderr(Stdio::null())
        .status()
        .unwrap()
        .success()
}

/// Why nothing can be seen of core dumps here.
fn no_dumps() -> Option<String> {
    let pattern = fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap_or_default();
    if pattern.starts_with('|') || pattern.contains('/') {
        return Some(format!(
            "core dumps are not written to the working folder: kernel.core_pattern={}",
            pattern.trim()
        ));
    }
    let raised = as_user(&Command::new("true"))
        .stderr(Stdio::null())
        .status()
        .unwrap()
        .success();
    (!raised).then(|| "the limit of core dumps (ulimit -c) cannot be raised".to_owned())
}

/// Why the memory of a process that allows it cannot be read.
fn no_reading() -> Option<String> {
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    (!matches!(scope.trim(), "" | "0"))
        .then(|| format!("kernel.yama.ptrace_scope={}", scope.trim()))
}

/// Core dumps in `folder`.
fn dumps(folder: &Path) -> Vec<Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(Result::unwrap);
    let cores = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("core"));
    cores.map(|core| fs::read(core.path()).unwrap()).collect()
}

/// Aborts the process of `id`, for which `end` waits. Checks that its memory can be read only if
/// that is `allowed`, and the same of a core dump; a dump has `secret`.
fn abort(
    what: &str,
    id: u32,
    folder: &Path,
    allowed: bool,
    secret: Option<&str>,
    end: impl FnOnce(),
) {
    match no_reading() {
        Some(reason) if allowed => programs::skipped(&format!("memory of {what}: {reason}")),
        _ => assert_eq!(is_readable(id), allowed, "{what}"),
    }
    assert!(send_signal(id, "ABRT"));
    end();
    if let Some(reason) = no_dumps() {
        return programs::skipped(&format!("dump of {what}: {reason}"));
    }
    let found = dumps(folder);
    assert_eq!(found.len(), usize::from(allowed), "{what}");
    let has =
        |dump: &Vec<u8>, secret: &str| memchr::memmem::find(dump, secret.as_bytes()).is_some();
    assert!(
        found
            .iter()
            .all(|dump| secret.is_none_or(|secret| has(dump, secret))),
        "{what}: not the dump of the process"
    );
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        fs::remove_file(entry.path()).unwrap();
    }
}

/// Starts an agent; returns it with the id of its worker.
fn run_agent(
    prepared: &Prepared,
    gateway: &Served,
    backend: &str,
    folder: &Path,
    allowed: bool,
) -> (Running, u32) {
    let mut run = gw_agent();
    run.args(["run", "--backend", backend, "--state-dir"])
        .arg(prepared.path("agent"));
    run.env("GW_CORE_DUMPS", allowed.to_string());
    let log = File::create(prepared.path("agent.log")).unwrap();
    let agent = Running::new(
        as_user(&run)
            .current_dir(folder)
            .stderr(log)
            .spawn()
            .unwrap(),
    );
    prepared.wait_for_tunnel(gateway.address);
    let worker = eventually("the agent has one worker", || {
        <[u32; 1]>::try_from(children(agent.id())).ok()
    });
    (agent, worker[0])
}

/// Aborts each kind of process.
fn abort_all(allowed: bool) {
    let prepared = Prepared::new();
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let config = format!("{}core_dumps = {allowed}\n", prepared.config());
    fs::write(prepared.path("gateway.toml"), config).unwrap();
    let serve = || {
        process::serve(as_user(&serve_command(&prepared.path("gateway.toml"))).current_dir(folder))
    };
    let token = fs::read_to_string(prepared.path("data/admin.token")).unwrap();
    let token = Some(token.trim());

    let Served { mut process, .. } = serve();
    abort("the gateway", process.id(), folder, allowed, token, || {
        assert_eq!(process.exit_code(), None);
    });

    let Served {
        mut process, log, ..
    } = serve();
    let successor = replace(process.id(), &log);
    assert_eq!(process.exit_code(), Some(0));
    abort(
        "the successor of a gateway",
        successor.0,
        folder,
        allowed,
        token,
        || {
            eventually("the successor has ended", || {
                successor.has_ended().then_some(())
            });
        },
    );

    let gateway = serve();
    let backend = backend::answering("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    prepared.set_agent_port(gateway.address.port());
    let run_agent = || run_agent(&prepared, &gateway, &backend, folder, allowed);
    let (mut agent, worker) = run_agent();
    abort(
        "the supervisor of an agent",
        agent.id(),
        folder,
        allowed,
        None,
        || assert_eq!(agent.exit_code(), None),
    );
    eventually("its worker ends", || has_ended(worker).then_some(()));
    let (mut agent, worker) = run_agent();
    abort(
        "the worker of an agent",
        worker,
        folder,
        allowed,
        None,
        || assert_eq!(agent.exit_code(), Some(1)),
    );
}

#[test]
fn no_process_leaves_a_core_dump_or_shows_its_memory() {
    if !programs::usable(&["setpriv"]) {
        return;
    }
    abort_all(false);
}

/// Shows that the test above sees dumps and readable memory where there are any.
#[test]
fn core_dumps_can_be_allowed() {
    if !programs::usable(&["setpriv"]) {
        return;
    }
    abort_all(true);
}
