//! Agents of other release lines: served during an upgrade, otherwise refused and named. The
//! program of the previous line is built from the history of the repository where
//! `GW_TEST_PACKAGES` is set, which takes minutes. And the signatures of programs.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{fs, thread};

use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::signature::Ed25519KeyPair;
use gw_shared::identity::program::ReleaseKey;
use gw_shared::text::hexadecimal;
use gw_shared::tunnel::frame::Kind;
use gw_shared::tunnel::handshake;
use gw_shared::version::{PREVIOUS, PREVIOUS_RELEASE, VERSION, Version};
use http::Method;
use serde_json::Value;

use crate::support::agents::modified_agent;
use crate::support::agents::modified_agent::{ACCOUNT, HOST, STREAMS, Tunnel};
use crate::support::agents::tunnel_frames::{hello, last_head, ping};
use crate::support::peers::http1_peer::Response;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::{Running, config_text, gw_gateway};
use crate::support::scene::Scene;
use crate::support::{eventually, programs};

/// Asks for a tunnel as an agent of this version does. Returns the refusal, if it is refused.
fn ask(scene: &Scene, agent: &modified_agent::Enrolled, version: &str) -> Result<Tunnel, Response> {
    let request = String::from_utf8(handshake::request(HOST, None)).unwrap();
    let mut peer = agent.connection(scene);
    peer.send(request.replace(VERSION, version));
    let head = peer.response_head(&Method::GET).unwrap();
    if head.status == 101 {
        return Ok(Tunnel(peer));
    }
    let (body, trailers) = peer.body(head.framing).unwrap();
    Err(Response {
        status: head.status,
        headers: head.headers,
        body,
        trailers,
        framing: head.framing,
    })
}

#[test]
fn a_refused_version_is_named_with_agent_and_service() {
    let scene = Scene::service().agent().start();
    let agent = modified_agent::enroll(&scene);
    let api = scene.api();
    let refused_version = || {
        let view = api.agent(ACCOUNT, &agent.agent);
        view.get("refused_version").cloned()
    };
    assert_eq!(refused_version(), None);
    let previous = format!("{PREVIOUS}.0");
    let answer = ask(&scene, &agent, &previous).err().unwrap();
    assert_eq!(
        (answer.status.as_u16(), answer.code().as_str()),
        (426, "GW_VERSION_MISMATCH")
    );
    let message = answer.json()["error"]["message"].to_string();
    assert!(
        message.contains(&previous) && message.contains(VERSION),
        "{message}"
    );
    let refused = eventually("the refusal is reported", refused_version);
    for (member, expected) in [
        ("service", "mallory--evil"),
        ("agent_version", &previous),
        ("agent_id", &agent.agent),
        ("gateway_version", VERSION),
    ] {
        assert_eq!(refused[member], expected, "{refused}");
    }
    // Another patch version of the line is served, and the refusal is forgotten.
    let _tunnel = agent.tunnel(&scene);
    eventually("the refusal is forgotten", || {
        refused_version().is_none().then_some(())
    });
}

/// A scene that serves agents of the previous line too.
fn demo_for_previous() -> Scene {
    Scene::service()
        .agent()
        .configuration("agent_versions = \"previous\"\n")
        .start()
}

#[test]
fn agents_of_the_previous_line_are_served_on_request() {
    let scene = demo_for_previous();
    let agent = modified_agent::enroll(&scene);
    assert!(ask(&scene, &agent, &format!("{PREVIOUS}.7")).is_ok());
    assert_eq!(ask(&scene, &agent, "0.0.9").err().unwrap().status, 426);
}

#[test]
fn agents_of_the_previous_line_are_not_told_of_callers_connections() {
    let scene = demo_for_previous();
    let agent = modified_agent::enroll(&scene);
    for (version, is_told) in [(format!("{PREVIOUS}.0"), false), (VERSION.to_owned(), true)] {
        let mut tunnel = ask(&scene, &agent, &version).ok().unwrap();
        tunnel.0.send(hello(STREAMS));
        eventually("the tunnel is registered", || agent.report(&scene));
        let mut caller = agent.caller(&scene);
        caller.send(agent.request("GET /", "Authorization: NTLM TlRM\r\n\r\n"));
        let request = tunnel.next_of(Kind::Request).unwrap();
        let head = String::from_utf8(request.payload[4..].to_vec()).unwrap();
        assert_eq!(head.contains("x-gw-caller-connection"), is_told, "{head}");
        drop(tunnel);
        eventually("the tunnel has ended", || {
            agent.report(&scene).is_none().then_some(())
        });
    }
}

#[test]
fn agents_of_the_previous_line_get_an_upgrade_with_content_as_an_ordinary_request() {
    let scene = demo_for_previous();
    let agent = modified_agent::enroll(&scene);
    for (version, is_upgrade) in [(format!("{PREVIOUS}.0"), false), (VERSION.to_owned(), true)] {
        let mut tunnel = ask(&scene, &agent, &version).ok().unwrap();
        tunnel.0.send(hello(STREAMS));
        eventually("the tunnel is registered", || agent.report(&scene));
        let mut caller = agent.caller(&scene);
        let fields = "Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 4\r\n\r\njsonraw";
        caller.send(agent.request("POST /", fields));
        let request = tunnel.next_of(Kind::Request).unwrap();
        let head = String::from_utf8(request.payload[4..].to_vec()).unwrap();
        assert!(head.contains("content-length: 4\r\n"), "{head}");
        assert_eq!(head.contains("upgrade: tcp"), is_upgrade, "{head}");
        let mut body = tunnel.next_of(Kind::Data).unwrap();
        assert_eq!(body.payload, b"json");
        // What follows the content waits for the agent to switch. Without `Upgrade` the content is
        // all.
        if !is_upgrade && !body.end {
            body = tunnel.next_of(Kind::Data).unwrap();
            assert!(body.payload.is_empty());
        }
        assert_eq!(body.end, !is_upgrade);
        let answer = last_head(request.stream, "409", &[("content-length", "0")]);
        tunnel.0.send(answer);
        let response = caller.response();
        assert_eq!(
            (response.status.as_u16(), response.header("connection")),
            (409, "close")
        );
        drop(tunnel);
        eventually("the tunnel has ended", || {
            agent.report(&scene).is_none().then_some(())
        });
    }
}

/// Types of the messages that the agent receives until a frame of type `last`, or the end of the
/// tunnel.
fn messages_until(tunnel: &mut Tunnel, last: Option<Kind>) -> Vec<String> {
    let mut types = Vec::new();
    while let Ok(frame) = tunnel.next() {
        if frame.kind == Kind::Message {
            let message: Value = serde_json::from_slice(&frame.payload).unwrap();
            types.push(message["type"].as_str().unwrap().to_owned());
        }
        if last == Some(frame.kind) {
            break;
        }
    }
    types
}

#[test]
fn agents_of_the_previous_line_are_sent_no_messages_of_this_line() {
    let scene = demo_for_previous();
    let previous = modified_agent::enroll(&scene);
    let current = modified_agent::enroll(&scene);
    let mut tunnels = [&previous, &current].map(|agent| {
        let version = if agent.agent == previous.agent {
            format!("{PREVIOUS}.0")
        } else {
            VERSION.to_owned()
        };
        let mut tunnel = ask(&scene, agent, &version).ok().unwrap();
        tunnel.0.send(hello(STREAMS));
        eventually("the tunnel is registered", || agent.report(&scene));
        tunnel
    });
    // Each of them has another one beside it, and then ends for a reason that the agent is told.
    let before = tunnels.each_mut().map(|tunnel| {
        tunnel.0.send(ping());
        messages_until(tunnel, Some(Kind::Pong))
    });
    for agent in [&previous, &current] {
        scene.api().revoke_agent(ACCOUNT, &agent.agent);
    }
    let after = tunnels
        .each_mut()
        .map(|tunnel| messages_until(tunnel, None));
    assert_eq!(
        before,
        [
            vec!["ready", "services"],
            vec!["other_tunnels", "ready", "services"]
        ]
    );
    let told = |types: &[String], what: &str| types.iter().any(|it| it == what);
    assert!(
        told(&after[1], "ended") && !told(&after[0], "ended") && !told(&after[0], "other_tunnels"),
        "{after:?}"
    );
}

/// The agent's program as of the last commit of the previous release line. It is kept in the user's
/// cache, beside those of other commits; `None` if it is not there and not to be built.
fn previous_program() -> Option<PathBuf> {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    if !repository.join(".git").exists() {
        programs::skipped("there is no history of the repository");
        return None;
    }
    let (_, commit) = PREVIOUS_RELEASE.trim_end().split_once(' ').unwrap();
    let temporary = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    let home = variable("HOME").map(|home| home.join(".cache"));
    let cache = variable("XDG_CACHE_HOME").or(home);
    let cache = cache.map_or(temporary.to_owned(), |cache| cache.join("gw-tests"));
    let program = cache.join(format!("gw-agent-{commit}"));
    let digest_file = program.with_extension("sha256");
    let digest_of = |program: &Path| {
        let content = fs::read(program).ok()?;
        Some(hexadecimal(digest(&SHA256, &content).as_ref()))
    };
    // It is kept with its digest: another program, or half of one, is made again.
    if let (Some(found), Ok(kept)) = (digest_of(&program), fs::read_to_string(&digest_file))
        && found == kept
    {
        return Some(program);
    }
    if std::env::var_os("GW_TEST_PACKAGES").is_none_or(|value| value.is_empty()) {
        let missing = format!(
            "{} is missing: made with GW_TEST_PACKAGES=1",
            program.display()
        );
        programs::skipped(&missing);
        return None;
    }
    let built = build(
        repository,
        commit,
        &temporary.join(format!("line-{PREVIOUS}")),
    );
    fs::create_dir_all(&cache).unwrap();
    let whole = program.with_extension(std::process::id().to_string());
    fs::copy(built, &whole).unwrap();
    fs::write(&digest_file, digest_of(&whole).unwrap()).unwrap();
    fs::rename(whole, &program).unwrap();
    Some(program)
}

/// Builds the agent's program as of a commit, in `folder`.
fn build(repository: &Path, commit: &str, folder: &Path) -> PathBuf {
    let source = folder.join("source");
    fs::create_dir_all(&source).unwrap();
    let archive = folder.join("source.tar");
    let mut git = Command::new("git");
    git.current_dir(repository).args(["archive", "--output"]);
    succeed(git.arg(&archive).arg(commit));
    let mut tar = Command::new("tar");
    tar.current_dir(&source).arg("--extract").arg("--file");
    succeed(tar.arg(&archive));
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(&source);
    cargo.args(["build", "--quiet", "--locked", "--package", "gw-agent"]);
    succeed(cargo.arg("--target-dir").arg(folder.join("target")));
    folder.join("target/debug/gw-agent")
}

/// The output of a command, without white space around it.
fn succeed(command: &mut Command) -> String {
    let output = command.stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success(), "{command:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn the_previous_release_is_the_newest_of_an_earlier_line_in_the_changelog() {
    let changelog = Path::new(env!("CARGO_MANIFEST_DIR")).join("../CHANGELOG.md");
    let text = fs::read_to_string(changelog).unwrap();
    let releases = text.lines().filter_map(|line| {
        let (version, _) = line.strip_prefix("## [")?.split_once(']')?;
        version.parse::<Version>().ok()
    });
    let newest = releases
        .filter(|version| version.line < Version::own().line)
        .max();
    let (previous, _) = PREVIOUS_RELEASE.split_once(' ').unwrap();
    assert_eq!(newest, previous.parse().ok());
}

#[test]
fn the_program_of_the_previous_line_relays() {
    let Some(program) = previous_program() else {
        return;
    };
    let prepared = Prepared::new();
    let versions = "agent_versions = \"previous\"\n";
    let gateway = prepared.serve_with(&(config_text(&prepared.path("data"), 0) + versions));
    prepared.set_agent_port(gateway.address.port());
    let backend = crate::support::peers::held_backend::HeldBackend::start();
    let run = |program: &Path| {
        let mut command = Command::new(program);
        command
            .arg("run")
            .arg("--state-dir")
            .arg(prepared.path("agent"))
            .args(["--backend", &backend.url]);
        Running::new(command.stderr(Stdio::null()).spawn().unwrap())
    };
    let mut previous = run(&program);
    prepared.wait_for_tunnel(gateway.address);
    let mut caller = prepared.connect(gateway.address);
    caller.send(prepared.get("/held"));
    backend.wait_for_held();
    backend.release();
    assert_eq!(caller.response().status, 200);
    previous.signal("TERM");
    assert_eq!(previous.exit_code(), Some(0));
    // Its state is that of the next line.
    let _next = run(Path::new(
        crate::support::processes::process::gw_agent().get_program(),
    ));
    prepared.wait_for_tunnel(gateway.address);
}

#[test]
fn of_several_commands_that_make_one_release_key_only_one_prints_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("release.key");
    let start = |_| {
        let mut command = gw_gateway();
        command
            .args(["agent-program", "new-key"])
            .arg(&file)
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        command.spawn().unwrap()
    };
    let processes: Vec<_> = (0..16).map(start).collect();
    let ended = processes
        .into_iter()
        .map(|process| process.wait_with_output().unwrap());
    let printed: Vec<_> = ended
        .filter(|output| output.status.success())
        .map(|output| output.stdout)
        .collect();
    assert_eq!(printed.len(), 1);
    let printed: ReleaseKey = String::from_utf8(printed[0].clone())
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    let stored = Ed25519KeyPair::from_pkcs8(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(printed.to_string(), ReleaseKey::of(&stored).to_string());
}

#[test]
fn a_release_key_is_made_in_the_current_folder_and_never_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| {
        let out = gw_gateway()
            .arg("agent-program")
            .args(arguments)
            .current_dir(folder.path())
            .output()
            .unwrap();
        let said = String::from_utf8(if out.status.success() {
            out.stdout
        } else {
            out.stderr
        })
        .unwrap();
        (out.status.code(), said)
    };
    let (code, key) = run(&["new-key", "release.key"]);
    assert_eq!(code, Some(0), "{key}");
    key.trim().parse::<ReleaseKey>().unwrap();
    let (code, said) = run(&["new-key", "release.key"]);
    assert!(code == Some(2) && said.contains("never replaced"), "{said}");
    // A link that leads nowhere is not replaced either.
    symlink("missing", folder.path().join("link.key")).unwrap();
    let (code, said) = run(&["new-key", "link.key"]);
    assert!(code == Some(2) && said.contains("never replaced"), "{said}");
    // One of many commands at once makes the key and prints its public half.
    let at_once = ["new-key", "at-once.key"];
    let ran: Vec<_> = thread::scope(|scope| {
        let commands: Vec<_> = (0..8).map(|_| scope.spawn(|| run(&at_once))).collect();
        commands
            .into_iter()
            .map(|command| command.join().unwrap())
            .collect()
    });
    let printed: Vec<_> = ran
        .into_iter()
        .filter(|(code, _)| *code == Some(0))
        .map(|(_, said)| said)
        .collect();
    let pair =
        Ed25519KeyPair::from_pkcs8(&fs::read(folder.path().join("at-once.key")).unwrap()).unwrap();
    assert_eq!(printed, [format!("{}\n", ReleaseKey::of(&pair))]);
    fs::write(folder.path().join("gw-agent"), b"\x7fELF program").unwrap();
    let (code, said) = run(&["sign", "--key", "gw-agent", "--out", "programs", "gw-agent"]);
    assert!(
        code == Some(2) && said.contains("not a release key"),
        "{said}"
    );
}
