//! Updates of the agent's program: offered by the gateway, signed with a release key, run without a
//! failed request.

mod power_cuts;
mod roll_back;

use std::fs::{self, File};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::{self, JoinHandle};

use aws_lc_rs::signature::Ed25519KeyPair;
use gw_shared::identity::program::{ReleaseKey, SignedProgram, TARGET};
use gw_shared::version::Version;
use rustix::fs::inotify;
use serde_json::{Value, json};

use crate::support::agents::supervised_agent::{Agent, administer, configuration, only_worker};
use crate::support::eventually;
use crate::support::peers::held_backend::HeldBackend;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::{Running, Served, children, gw_agent};
use crate::support::programs::usable;

/// Path of the program for this machine in a folder, and of its description.
fn program_files(folder: &Path) -> (PathBuf, PathBuf) {
    let program = folder.join(format!("gw-agent-{TARGET}"));
    let description = program.with_extension("json");
    (program, description)
}

/// A release key, and programs signed with it that the gateway of `prepared` offers.
struct Release<'a> {
    prepared: &'a Prepared,
    key: Ed25519KeyPair,
}

impl<'a> Release<'a> {
    fn new(prepared: &'a Prepared) -> Self {
        let key = Ed25519KeyPair::generate().unwrap();
        Self { prepared, key }
    }

    /// Offers `content` as the program of the next patch version.
    fn offer(&self, content: &[u8]) -> SignedProgram {
        self.offer_as(later(1), content)
    }

    fn offer_as(&self, version: Version, content: &[u8]) -> SignedProgram {
        let signed = SignedProgram::sign(version, TARGET, content, &self.key);
        self.put(&signed, content);
        signed
    }

    fn put(&self, signed: &SignedProgram, content: &[u8]) {
        let folder = self.prepared.path("data/agent-programs");
        fs::create_dir_all(&folder).unwrap();
        let (program, description) = program_files(&folder);
        fs::write(program, content).unwrap();
        fs::write(description, serde_json::to_vec(signed).unwrap()).unwrap();
    }

    /// Stores a program as one that has been downloaded and has served; its file.
    fn store(&self, content: &[u8]) -> (SignedProgram, PathBuf) {
        let signed = self.offer(content);
        let folder = self.prepared.path("agent/programs");
        fs::create_dir_all(&folder).unwrap();
        let digest = &signed.sha256[..16];
        let file = folder.join(format!("gw-agent-{}-{digest}", signed.version));
        fs::write(&file, content).unwrap();
        let record = json!({"current": signed, "is_proven": true});
        fs::write(self.prepared.path("agent/update.json"), record.to_string()).unwrap();
        (signed, file)
    }

    fn public(&self) -> String {
        ReleaseKey::of(&self.key).to_string()
    }

    /// The configuration of an agent that updates itself.
    fn configuration(&self, url: &str) -> String {
        accepting(url, &[self])
    }
}

/// The configuration of an agent that accepts programs of these releases.
fn accepting(url: &str, releases: &[&Release<'_>]) -> String {
    let keys: Vec<String> = releases.iter().map(|release| release.public()).collect();
    format!(
        "{}update = \"auto\"\nupdate_key = {keys:?}\n",
        configuration(url)
    )
}

/// The version that is later than that of this build by this number of patches.
fn later(patches: u16) -> Version {
    let own = Version::own();
    Version {
        patch: own.patch + patches,
        ..own
    }
}

/// The agent's own program, as a stand-in for that of a later version.
fn program() -> Vec<u8> {
    fs::read(gw_agent().get_program()).unwrap()
}

/// Asserts that the only worker runs the program that is installed.
#[track_caller]
fn assert_runs_installed(agent: &Running) {
    let worker = only_worker(agent.id());
    let program = fs::read_link(format!("/proc/{worker}/exe")).unwrap();
    assert_eq!(program, PathBuf::from(gw_agent().get_program()));
}

/// Files of the programs that the agent has stored.
fn stored_programs(prepared: &Prepared) -> Vec<PathBuf> {
    let files = fs::read_dir(prepared.path("agent/programs")).unwrap();
    files.map(|file| file.unwrap().path()).collect()
}

/// The record of the agent's updates.
fn update_record(prepared: &Prepared) -> Value {
    let record = fs::read(prepared.path("agent/update.json")).unwrap();
    serde_json::from_slice(&record).unwrap()
}

/// Waits until the agent reports an update that failed for this reason.
fn await_failure(it: &Agent<'_>, reason: &str) {
    eventually(reason, || {
        let update = &it.view()["update"];
        let error = update["error"].as_str()?;
        (update["state"] == "failed" && error.contains(reason)).then_some(())
    });
}

/// Waits until a stored program is the only one that runs; the worker.
fn wait_for_stored(agent: &Running, program: &SignedProgram) -> u32 {
    let in_memory = PathBuf::from(format!("/memfd:gw-agent-{} (deleted)", program.version));
    eventually("the stored program runs", || {
        let [worker] = <[u32; 1]>::try_from(children(agent.id())).ok()?;
        (fs::read_link(format!("/proc/{worker}/exe")).ok()? == in_memory).then_some(worker)
    })
}

#[test]
fn an_agent_updates_itself_without_a_failed_request() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let release = Release::new(&prepared);
    let signed = release.offer(&program());
    let gateway = prepared.serve_with(&prepared.config());
    let it = Agent::of(&prepared, &gateway);
    let mut agent = it.start(&it.configure(&configuration(&backend.url)));
    // A reload turns updates on.
    let config = it.configure(&release.configuration(&backend.url));
    let updated = it.while_calling(|| {
        agent.signal("HUP");
        wait_for_stored(&agent, &signed)
    });
    let [file] = <[_; 1]>::try_from(stored_programs(&prepared)).unwrap();
    let mode = fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    let version = signed.version.to_string();
    assert!(file.to_str().unwrap().contains(&version), "{file:?}");
    let of_process = |part: &str| fs::read_to_string(format!("/proc/{updated}/{part}")).unwrap();
    assert_eq!(of_process("comm"), "gw-agent\n");
    let arguments = of_process("cmdline");
    assert!(arguments.starts_with("gw-agent\0run\0"), "{arguments}");
    eventually("the agent reports that it takes updates", || {
        (it.view()["update"]["state"] == "ready").then_some(())
    });

    // The next start uses the program.
    agent.stop();
    let mut agent = it.start(&config);
    wait_for_stored(&agent, &signed);
    agent.stop();
    let mut changed = fs::read(&file).unwrap();
    *changed.last_mut().unwrap() ^= 1;
    fs::remove_file(&file).unwrap();
    fs::write(&file, changed).unwrap();
    // A changed program is not used, but downloaded again.
    let agent = it.start(&config);
    it.wait_for_log("using the installed one");
    wait_for_stored(&agent, &signed);
}

#[test]
fn a_program_that_does_not_serve_is_given_up_without_a_failed_request() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let release = Release::new(&prepared);
    // `false` exits with code 1.
    release.offer(&fs::read("/bin/false").unwrap());
    let gateway = prepared.serve_with(&prepared.config());
    let it = Agent::of(&prepared, &gateway);
    let agent = it.start(&it.configure(&release.configuration(&backend.url)));
    let worker = only_worker(agent.id());
    it.while_calling(|| await_failure(&it, "exit code 1"));
    assert_eq!(only_worker(agent.id()), worker, "the same worker goes on");
    assert!(stored_programs(&prepared).is_empty());
    it.while_calling(|| {});
}

#[test]
fn programs_by_another_key_are_refused() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let [release, other] = [(); 2].map(|()| Release::new(&prepared));
    other.offer(&program());
    let gateway = prepared.serve_with(&prepared.config());
    let it = Agent::of(&prepared, &gateway);
    let agent = it.start(&it.configure(&release.configuration(&backend.url)));
    await_failure(&it, "signature");
    assert_runs_installed(&agent);
    assert!(!prepared.path("agent/programs").exists());
}

/// The number of agents, and how many of them accept each of two keys.
fn progress(prepared: &Prepared, gateway: &Served, keys: [&Release<'_>; 2]) -> (u64, u64, u64) {
    let counted = administer(prepared, gateway, &["agent", "progress"]);
    let counted: Value = serde_json::from_slice(&counted).unwrap();
    let accept = |release: &Release<'_>| counted["release_keys"][release.public()].as_u64();
    let [first, second] = keys.map(|release| accept(release).unwrap_or(0));
    (counted["agents"].as_u64().unwrap(), first, second)
}

#[test]
fn a_release_key_is_replaced_by_another_one() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let [old, new] = [(); 2].map(|()| Release::new(&prepared));
    let gateway_with_offer = |offered: &Release<'_>, version: u16| {
        let signed = offered.offer_as(later(version), &program());
        (signed, prepared.serve_with(&prepared.config()))
    };
    let wait_for_progress = |what: &str, gateway: &Served, expected| {
        eventually(what, || {
            (progress(&prepared, gateway, [&old, &new]) == expected).then_some(())
        });
    };

    // Agents accept the old key only, then both, while the old one signs.
    let (first, gateway) = gateway_with_offer(&old, 1);
    let it = Agent::of(&prepared, &gateway);
    let mut agent = it.start(&it.configure(&accepting(&backend.url, &[&old])));
    wait_for_stored(&agent, &first);
    wait_for_progress("the agent reports its key", &gateway, (1, 1, 0));
    it.while_calling(|| {
        it.configure(&accepting(&backend.url, &[&old, &new]));
        agent.signal("HUP");
        wait_for_progress("the agent accepts both keys", &gateway, (1, 1, 1));
    });
    wait_for_stored(&agent, &first);
    agent.stop();
    drop(gateway);

    // The new key signs, and the old one is withdrawn.
    let (second, gateway) = gateway_with_offer(&new, 2);
    let it = Agent::of(&prepared, &gateway);
    let config = it.configure(&accepting(&backend.url, &[&old, &new]));
    let mut agent = it.start(&config);
    wait_for_stored(&agent, &second);
    it.while_calling(|| {
        it.configure(&accepting(&backend.url, &[&new]));
        agent.signal("HUP");
        wait_for_progress("the agent accepts the new key only", &gateway, (1, 0, 1));
    });
    wait_for_stored(&agent, &second);
    agent.stop();
    drop(gateway);

    // The old key signs nothing any more, and the program by the new one is kept.
    let (_, gateway) = gateway_with_offer(&old, 3);
    let it = Agent::of(&prepared, &gateway);
    let agent = it.start(&config);
    await_failure(&it, "signature");
    wait_for_stored(&agent, &second);
    let listed = administer(&prepared, &gateway, &["agent", "list", "demo"]);
    let listed = String::from_utf8(listed).unwrap();
    assert!(listed.contains(&new.public()), "{listed}");
    assert!(!listed.contains(&old.public()), "{listed}");
}

#[test]
fn an_older_program_than_the_release_key_requires_is_not_run() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let release = Release::new(&prepared);
    // The program does not serve. The version that it requires is in force nevertheless.
    let failing = fs::read("/bin/false").unwrap();
    let signed = SignedProgram {
        minimum: Some(later(2)),
        ..SignedProgram::describe(later(2), TARGET, &failing)
    }
    .signed(&release.key);
    release.put(&signed, &failing);
    let start = |gateway: &Served| {
        let it = Agent::of(&prepared, gateway);
        it.start(&it.configure(&release.configuration(&backend.url)))
    };
    let failure_is = |reason: &str| {
        let gateway = prepared.serve_with(&prepared.config());
        let agent = start(&gateway);
        await_failure(&Agent::of(&prepared, &gateway), reason);
        assert_runs_installed(&agent);
    };
    failure_is("exit code 1");
    release.offer(&program());
    let is_older = format!("older than {}", later(2));
    failure_is(&is_older);
    assert!(stored_programs(&prepared).is_empty());
    // A program that was stored before is not run either.
    let mut record = update_record(&prepared);
    let (stored, _) = release.store(&program());
    record["current"] = json!(stored);
    fs::write(prepared.path("agent/update.json"), record.to_string()).unwrap();
    failure_is(&is_older);
    let replacement = SignedProgram::sign(later(2), TARGET, &program(), &release.key);
    release.put(&replacement, &program());
    let gateway = prepared.serve_with(&prepared.config());
    wait_for_stored(&start(&gateway), &replacement);
}

/// Replaces `file` by `program` as soon as it has been read `times` times.
fn swap_after_reads(file: &Path, program: PathBuf, times: usize) -> JoinHandle<()> {
    let watch = inotify::init(inotify::CreateFlags::CLOEXEC).unwrap();
    let reads = inotify::WatchFlags::CLOSE_NOWRITE;
    inotify::add_watch(&watch, file.parent().unwrap(), reads).unwrap();
    let file = file.to_owned();
    thread::spawn(move || {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(&watch, &mut buffer);
        let read = file.file_name().unwrap().as_bytes();
        let mut reads = 0;
        while reads < times {
            let event = events.next().unwrap();
            let is_of_file = event.file_name().is_some_and(|it| it.to_bytes() == read);
            reads += usize::from(is_of_file);
        }
        fs::rename(program, &file).unwrap();
    })
}

#[test]
fn a_stored_program_that_is_swapped_after_its_check_is_not_run() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let release = Release::new(&prepared);
    let (signed, file) = release.store(&program());
    let gateway = prepared.serve_with(&prepared.config());
    let it = Agent::of(&prepared, &gateway);
    let other = prepared.path("other");
    let ran = prepared.path("ran");
    let script = format!("#!/bin/sh\ntouch {}\nsleep 100\n", ran.display());
    fs::write(&other, script).unwrap();
    fs::set_permissions(&other, fs::Permissions::from_mode(0o700)).unwrap();
    // The supervisor reads the program when it chooses it, and when it starts it.
    let swapped = swap_after_reads(&file, other, 2);
    let config = it.configure(&release.configuration(&backend.url));
    let mut agent = Running::new(it.command(&config).spawn().unwrap());
    swapped.join().unwrap();
    eventually("a program runs", || {
        assert!(
            !ran.exists(),
            "the agent runs a program that it has not checked"
        );
        let [worker] = <[u32; 1]>::try_from(children(agent.id())).ok()?;
        let name = fs::read_to_string(format!("/proc/{worker}/comm")).ok()?;
        (name == "gw-agent\n").then_some(())
    });
    assert!(
        !ran.exists(),
        "the agent runs a program that it has not checked"
    );
    wait_for_stored(&agent, &signed);
    prepared.wait_for_tunnel(gateway.address);
    agent.stop();
    // At the next start, the swapped file is found and the installed program runs.
    let _agent = it.start(&config);
    it.wait_for_log("using the installed one");
    assert!(!ran.exists());
}

#[test]
fn where_memory_may_not_be_executed_root_uses_a_file_without_a_name() {
    // The setting belongs to a PID namespace, since Linux 6.3.
    if !usable(&["unshare"]) || !Path::new("/proc/sys/vm/memfd_noexec").exists() {
        return;
    }
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let release = Release::new(&prepared);
    release.store(&program());
    let gateway = prepared.serve_with(&prepared.config());
    let it = Agent::of(&prepared, &gateway);
    let run = it.command(&it.configure(&release.configuration(&backend.url)));
    let mut command = Command::new("unshare");
    let script = "echo 2 >/proc/sys/vm/memfd_noexec && exec \"$@\"";
    command
        .args(["--user", "--map-root-user", "--pid", "--fork"])
        .args(["--kill-child", "--mount-proc", "sh", "-c", script, "sh"])
        .arg(run.get_program())
        .args(run.get_args());
    let log = File::options()
        .append(true)
        .create(true)
        .open(prepared.path("agent.log"))
        .unwrap();
    let _agent = Running::new(command.stdin(Stdio::null()).stderr(log).spawn().unwrap());
    it.wait_for_log("memory may not be executed");
    prepared.wait_for_tunnel(gateway.address);
    assert_eq!(stored_programs(&prepared).len(), 1, "the copy has no name");
}
