//! Core dumps and memory of the programs' processes: neither is for another process of the same
//! user, unless the configuration allows it.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::agents::supervised_agent::only_worker;
use crate::support::peers::backend;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process;
use crate::support::processes::process::{Running, Served, has_ended, send_signal, serve_command};
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
    let variables = command.get_envs();
    shell.envs(variables.filter_map(|(name, value)| Some((name, value?))));
    shell
}

/// Whether another process of this user can open the memory of a process.
fn is_readable(id: u32) -> bool {
    let mut open = Command::new("sh");
    open.args(["-c", &format!("exec 3< /proc/{id}/mem")]);
    succeeds(&mut as_user(&open))
}

fn succeeds(command: &mut Command) -> bool {
    command.stderr(Stdio::null()).status().unwrap().success()
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
    let raised = succeeds(&mut as_user(&Command::new("true")));
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

/// Processes of both programs, whose working folder is `folder`.
struct Processes<'a> {
    prepared: &'a Prepared,
    folder: &'a Path,
    /// Whether the configuration allows core dumps.
    allowed: bool,
}

impl Processes<'_> {
    /// Aborts the process of `id`, for which `end` waits. Checks that its memory can be read only
    /// if that is allowed, and the same of a core dump; a dump has `secret`.
    fn abort(&self, what: &str, id: u32, secret: &str, end: impl FnOnce()) {
        match no_reading() {
            Some(reason) if self.allowed => {
                programs::skipped(&format!("memory of {what}: {reason}"));
            }
            _ => assert_eq!(is_readable(id), self.allowed, "{what}"),
        }
        assert!(send_signal(id, "ABRT"));
        end();
        if let Some(reason) = no_dumps() {
            return programs::skipped(&format!("dump of {what}: {reason}"));
        }
        let found = dumps(self.folder);
        assert_eq!(found.len(), usize::from(self.allowed), "{what}");
        let has_secret = |dump: &Vec<u8>| memchr::memmem::find(dump, secret.as_bytes()).is_some();
        assert!(
            found.iter().all(has_secret),
            "{what}: not the dump of the process"
        );
        for entry in fs::read_dir(self.folder).unwrap().map(Result::unwrap) {
            fs::remove_file(entry.path()).unwrap();
        }
    }

    fn serve(&self) -> Served {
        let command = serve_command(&self.prepared.path("gateway.toml"));
        process::serve(as_user(&command).current_dir(self.folder))
    }

    /// Starts an agent; returns it with the id of its worker.
    fn run_agent(&self, gateway: &Served, backend: &str) -> (Running, u32) {
        let mut run = self
            .prepared
            .agent_command("agent", gateway.address.port(), backend);
        run.env("GW_CORE_DUMPS", self.allowed.to_string());
        let mut command = as_user(&run);
        let log = File::create(self.prepared.path("agent.log")).unwrap();
        let agent = Running::new(
            command
                .current_dir(self.folder)
                .stderr(log)
                .spawn()
                .unwrap(),
        );
        self.prepared.wait_for_tunnel(gateway.address);
        let worker = only_worker(agent.id());
        (agent, worker)
    }
}

/// Aborts each kind of process.
fn abort_all(allowed: bool) {
    let prepared = Prepared::new();
    let folder = tempfile::tempdir().unwrap();
    let config = format!("{}core_dumps = {allowed}\n", prepared.config());
    fs::write(prepared.path("gateway.toml"), config).unwrap();
    let token = fs::read_to_string(prepared.path("data/admin.token")).unwrap();
    let token = token.trim();
    let processes = Processes {
        prepared: &prepared,
        folder: folder.path(),
        allowed,
    };

    let mut gateway = processes.serve().process;
    processes.abort("the gateway", gateway.id(), token, || {
        assert_eq!(gateway.exit_code(), None);
    });

    let mut gateway = processes.serve();
    let successor = replace(gateway.process.id(), &gateway.log);
    assert_eq!(gateway.process.exit_code(), Some(0));
    processes.abort("the successor of a gateway", successor.0, token, || {
        eventually("the successor has ended", || {
            successor.has_ended().then_some(())
        });
    });

    let gateway = processes.serve();
    let backend = backend::answering("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    // Every dump contains the empty text.
    let (mut agent, worker) = processes.run_agent(&gateway, &backend);
    processes.abort("the supervisor of an agent", agent.id(), "", || {
        assert_eq!(agent.exit_code(), None);
    });
    eventually("its worker ends", || has_ended(worker).then_some(()));
    let (mut agent, worker) = processes.run_agent(&gateway, &backend);
    processes.abort("the worker of an agent", worker, "", || {
        assert_eq!(agent.exit_code(), Some(1));
    });
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
