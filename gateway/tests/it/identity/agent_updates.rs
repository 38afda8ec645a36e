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

impl Release<'_> {
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
        let file = folder.join(format!(
            "gw-agent-{}-{}",
            signed.version,
            &signed.sha256[..16]
        ));
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

fn executable(worker: u32) -> PathBuf {
    fs::read_link(format!("/proc/{worker}/exe")).unwrap()
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
    let release = Release {
        prepared: &prepared,
        key: Ed25519KeyPair::generate().unwrap(),
    };
    let signed = release.offer(&program());
    let gateway = prepared.serve_with(&prepared.config());
    let it = Agent {
        prepared: &prepared,
        gateway: &gateway,
    };
    let mut agent = it.start(&it.configure(&configuration(&backend.url)));
    // A reload turns updates on.
    let config = it.configure(&release.configuration(&backend.url));
    let updated = it.while_calling(|| {
        agent.signal("HUP");
        wait_for_stored(&agent, &signed)
    });
    let file = fs::read_dir(prepared.path("agent/programs"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    assert_eq!(
        fs::metadata(&file).unwrap().permissions().mode() & 0o777,
        0o700
    );
    assert!(
        file.to_str().unwrap().contains(&signed.version.to_string()),
        "{file:?}"
    );
    let name = fs::read_to_string(format!("/proc/{updated}/comm")).unwrap();
    let arguments = fs::read_to_string(format!("/proc/{updated}/cmdline")).unwrap();
    assert!(
        name == "gw-agent\n" && arguments.starts_with("gw-agent\0run\0"),
        "{name} {arguments}"
    );
    eventually("the agent reports that it takes updates", || {
        (it.view()["update"]["state"] == "ready").then_some(())
    });

    // The next start uses the program, unless it was changed.
    agent.signal("TERM");
    assert_eq!(agent.exit_code(), Some(0));
    let mut agent = it.start(&config);
    wait_for_stored(&agent, &signed);
    agent.signal("TERM");
    assert_eq!(agent.exit_code(), Some(0));
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
    let release = Release {
        prepared: &prepared,
        key: Ed25519KeyPair::generate().unwrap(),
    };
    // Exits with code 1.
    release.offer(&fs::read("/bin/false").unwrap());
    let gateway = prepared.serve_with(&prepared.config());
    let it = Agent {
        prepared: &prepared,
        gateway: &gateway,
    };
    let agent = it.start(&it.configure(&release.configuration(&backend.url)));
    let worker = only_worker(agent.id());
    let update = it.while_calling(|| {
        eventually("the agent reports the failure", || {
            Some(it.view()["update"].clone()).filter(|update| update["state"] == "failed")
        })
    });
    assert!(
        update["error"].as_str().unwrap().contains("exit code 1"),
        "{update}"
    );
    assert_eq!(only_worker(agent.id()), worker, "the same worker goes on");
    assert_eq!(
        fs::read_dir(prepared.path("agent/programs"))
            .unwrap()
            .count(),
        0,
        "the program is removed"
    );
    it.while_calling(|| {});
}

#[test]
fn programs_by_another_key_are_refused() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let release = Release {
        prepared: &prepared,
        key: Ed25519KeyPair::generate().unwrap(),
    };
    let other = Release {
        prepared: &prepared,
        key: Ed25519KeyPair::generate().unwrap(),
    };
    other.offer(&program());
    let gateway = prepared.serve_with(&prepared.config());
    let it = Agent {
        prepared: &prepared,
        gateway: &gateway,
    };
    let agent = it.start(&it.configure(&release.configuration(&backend.url)));
    let update = eventually("the agent reports the failure", || {
        Some(it.view()["update"].clone()).filter(|update| update["state"] == "failed")
    });
    assert!(
        update["error"].as_str().unwrap().contains("signature"),
        "{update}"
    );
    assert_eq!(
        executable(only_worker(agent.id())),
        PathBuf::from(gw_agent().get_program())
    );
    assert!(
        !prepared.path("agent/programs").exists(),
        "nothing was stored"
    );
}

/// The number of agents, and how many of them accept each of two keys.
fn progress(prepared: &Prepared, gateway: &Served, keys: [&Release<'_>; 2]) -> (u64, u64, u64) {
    let counted: Value =
        serde_json::from_slice(&administer(prepared, gateway, &["agent", "progress"])).unwrap();
    let [first, second] = keys.map(|release| {
        counted["release_keys"][release.public()]
            .as_u64()
            .unwrap_or(0)
    });
    (counted["agents"].as_u64().unwrap(), first, second)
}

#[test]
fn a_release_key_is_replaced_by_another_one() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let [old, new] = [(); 2].map(|()| Release {
        prepared: &prepared,
        key: Ed25519KeyPair::generate().unwrap(),
    });
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
    let it = Agent {
        prepared: &prepared,
        gateway: &gateway,
    };
    let mut agent = it.start(&it.configure(&accepting(&backend.url, &[&old])));
    wait_for_stored(&agent, &first);
    wait_for_progress("the agent reports its key", &gateway, (1, 1, 0));
    it.while_calling(|| {
        it.configure(&accepting(&backend.url, &[&old, &new]));
        agent.signal("HUP");
        wait_for_progress("the agent accepts both keys", &gateway, (1, 1, 1));
    });
    wait_for_stored(&agent, &first);
    agent.signal("TERM");
    assert_eq!(agent.exit_code(), Some(0));
    drop(gateway);

    // The new key signs, and the old one is withdrawn.
    let (second, gateway) = gateway_with_offer(&new, 2);
    let it = Agent {
        prepared: &prepared,
        gateway: &gateway,
    };
    let config = it.configure(&accepting(&backend.url, &[&old, &new]));
    let mut agent = it.start(&config);
    wait_for_stored(&agent, &second);
    it.while_calling(|| {
        it.configure(&accepting(&backend.url, &[&new]));
        agent.signal("HUP");
        wait_for_progress("the agent accepts the new key only", &gateway, (1, 0, 1));
    });
    wait_for_stored(&agent, &second);
    agent.signal("TERM");
    assert_eq!(agent.exit_code(), Some(0));
    drop(gateway);

    // The old key signs nothing any more, and the program by the new one is kept.
    let (_, gateway) = gateway_with_offer(&old, 3);
    let it = Agent {
        prepared: &prepared,
        gateway: &gateway,
    };
    let agent = it.start(&config);
    the_offer_is_refused(&it, &agent, &second);
    let listed =
        String::from_utf8(administer(&prepared, &gateway, &["agent", "list", "demo"])).unwrap();
    assert!(
        listed.contains(&new.public()) && !listed.contains(&old.public()),
        "{listed}"
    );
}

fn the_offer_is_refused(it: &Agent<'_>, agent: &Running, stored: &SignedProgram) {
    eventually("the agent reports the refusal", || {
        it.view()["update"]["error"]
            .as_str()?
            .contains("signature")
            .then_some(())
    });
    wait_for_stored(agent, stored);
}

#[test]
fn an_older_program_than_the_release_key_requires_is_not_run() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let release = Release {
        prepared: &prepared,
        key: Ed25519KeyPair::generate().unwrap(),
    };
    // It does not serve, and its requirement holds nevertheless.
    let failing = fs::read("/bin/false").unwrap();
    let signed = SignedProgram {
        minimum: Some(later(2)),
        ..SignedProgram::describe(later(2), TARGET, &failing)
    }
    .signed(&release.key);
    release.put(&signed, &failing);
    let failure_at = |gateway: &Served, part: &str| {
        let it = Agent {
            prepared: &prepared,
            gateway,
        };
        let agent = it.start(&it.configure(&release.configuration(&backend.url)));
        eventually(part, || {
            it.view()["update"]["error"]
                .as_str()
                .filter(|error| error.contains(part))
                .map(drop)
        });
        assert_eq!(
            executable(only_worker(agent.id())),
            PathBuf::from(gw_agent().get_program())
        );
    };
    failure_at(&prepared.serve_with(&prepared.config()), "exit code 1");
    release.offer(&program());
    failure_at(
        &prepared.serve_with(&prepared.config()),
        &format!("older than {}", later(2)),
    );
    assert_eq!(
        fs::read_dir(prepared.path("agent/programs"))
            .unwrap()
            .count(),
        0,
        "nothing was stored"
    );
    // Nor is one that was stored before.
    let mut record: Value =
        serde_json::from_slice(&fs::read(prepared.path("agent/update.json")).unwrap()).unwrap();
    let (stored, _) = release.store(&program());
    record["current"] = json!(stored);
    fs::write(prepared.path("agent/update.json"), record.to_string()).unwrap();
    failure_at(
        &prepared.serve_with(&prepared.config()),
        &format!("older than {}", later(2)),
    );
    let replacement = SignedProgram::sign(later(2), TARGET, &program(), &release.key);
    release.put(&replacement, &program());
    let gateway = prepared.serve_with(&prepared.config());
    let it = Agent {
        prepared: &prepared,
        gateway: &gateway,
    };
    wait_for_stored(
        &it.start(&it.configure(&release.configuration(&backend.url))),
        &replacement,
    );
}

/// Replaces `file` by `program` as soon as it has been read `times` times.
fn swap_after_reads(file: &Path, program: PathBuf, times: usize) -> JoinHandle<()> {
    let watch = inotify::init(inotify::CreateFlags::CLOEXEC).unwrap();
    inotify::add_watch(
        &watch,
        file.parent().unwrap(),
        inotify::WatchFlags::CLOSE_NOWRITE,
    )
    .unwrap();
    let file = file.to_owned();
    thread::spawn(move || {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(&watch, &mut buffer);
        let mut reads = 0;
        while reads < times {
            let event = events.next().unwrap();
            reads += usize::from(
                event
                    .file_name()
                    .is_some_and(|name| name.to_bytes() == file.file_name().unwrap().as_bytes()),
            );
        }
        fs::rename(program, file).unwrap();
    })
}

#[test]
fn a_stored_program_that_is_swapped_after_its_check_is_not_run() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let release = Release {
        prepared: &prepared,
        key: Ed25519KeyPair::generate().unwrap(),
    };
    let (signed, file) = release.store(&program());
    let gateway = prepared.serve_with(&prepared.config());
    let it = Agent {
        prepared: &prepared,
        gateway: &gateway,
    };
    let other = prepared.path("other");
    let ran = prepared.path("ran");
    fs::write(
        &other,
        format!("#!/bin/sh\ntouch {}\nsleep 100\n", ran.display()),
    )
    .unwrap();
    fs::set_permissions(&other, fs::Permissions::from_mode(0o700)).unwrap();
    // The supervisor reads the program when it chooses it, and when it starts it.
    let swapped = swap_after_reads(&file, other, 2);
    let mut agent = Running::new(
        it.command(&it.configure(&release.configuration(&backend.url)))
            .spawn()
            .unwrap(),
    );
    swapped.join().unwrap();
    let started = eventually("a program runs", || {
        if ran.exists() {
            return Some(false);
        }
        let [worker] = <[u32; 1]>::try_from(children(agent.id())).ok()?;
        fs::read_to_string(format!("/proc/{worker}/comm"))
            .ok()
            .filter(|name| name == "gw-agent\n")
            .map(|_| true)
    });
    assert!(
        started && !ran.exists(),
        "the agent runs a program that it has not checked"
    );
    wait_for_stored(&agent, &signed);
    prepared.wait_for_tunnel(gateway.address);
    agent.signal("TERM");
    assert_eq!(agent.exit_code(), Some(0));
    // At the next start, the swapped file is found and the installed program runs.
    let agent = it.start(&it.prepared.path("agent.toml"));
    it.wait_for_log("using the installed one");
    drop(agent);
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
    let release = Release {
        prepared: &prepared,
        key: Ed25519KeyPair::generate().unwrap(),
    };
    let (_, file) = release.store(&program());
    let gateway = prepared.serve_with(&prepared.config());
    let it = Agent {
        prepared: &prepared,
        gateway: &gateway,
    };
    let run = it.command(&it.configure(&release.configuration(&backend.url)));
    let mut command = Command::new("unshare");
    command.args([
        "--user",
        "--map-root-user",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "sh",
        "-c",
    ]);
    command.args(["echo 2 >/proc/sys/vm/memfd_noexec && exec \"$@\"", "sh"]);
    command.arg(run.get_program()).args(run.get_args());
    let log = File::options()
        .append(true)
        .create(true)
        .open(prepared.path("agent.log"))
        .unwrap();
    let _agent = Running::new(command.stdin(Stdio::null()).stderr(log).spawn().unwrap());
    it.wait_for_log("memory may not be executed");
    prepared.wait_for_tunnel(gateway.address);
    assert_eq!(
        fs::read_dir(file.parent().unwrap()).unwrap().count(),
        1,
        "the copy has no name"
    );
}
