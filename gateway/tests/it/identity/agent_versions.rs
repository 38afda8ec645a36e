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
use serde_json::{Value, json};

use crate::support::agents::modified_agent;
use crate::support::agents::modified_agent::{ACCOUNT, Enrolled, HOST, STREAMS, Tunnel};
use crate::support::agents::tunnel_frames::{hello, last_head, ping};
use crate::support::peers::held_backend::HeldBackend;
use crate::support::peers::http1_peer::Response;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::{Running, gw_gateway};
use crate::support::request_log::assert_fields;
use crate::support::scene::Scene;
use crate::support::{eventually, programs};

/// Asks for a tunnel as an agent of this version does. Returns the refusal, if it is refused.
fn ask(scene: &Scene, agent: &Enrolled, version: &str) -> Result<Tunnel, Response> {
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

/// A tunnel of an agent of this version, which the gateway has registered.
fn tunnel_of(scene: &Scene, agent: &Enrolled, version: &str) -> Tunnel {
    let mut tunnel = ask(scene, agent, version).ok().unwrap();
    tunnel.0.send(hello(STREAMS));
    eventually("the tunnel is registered", || agent.report(scene));
    tunnel
}

/// Ends a tunnel, and waits until the gateway knows of it.
fn end(scene: &Scene, agent: &Enrolled, tunnel: Tunnel) {
    drop(tunnel);
    eventually("the tunnel has ended", || {
        agent.report(scene).is_none().then_some(())
    });
}

/// A version of the previous line.
fn previous() -> String {
    format!("{PREVIOUS}.0")
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
    let answer = ask(&scene, &agent, &previous()).err().unwrap();
    assert_eq!(answer.status, 426);
    assert_eq!(answer.code(), "GW_VERSION_MISMATCH");
    let message = answer.json()["error"]["message"].to_string();
    for version in [&*previous(), VERSION] {
        assert!(message.contains(version), "{message}");
    }
    let refused = eventually("the refusal is reported", refused_version);
    let expected = json!({
        "service": "mallory--evil",
        "agent_version": previous(),
        "agent_id": agent.agent,
        "gateway_version": VERSION,
    });
    assert_fields(&refused, &expected);
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
    for (version, is_told) in [(&*previous(), false), (VERSION, true)] {
        let mut tunnel = tunnel_of(&scene, &agent, version);
        let mut caller = agent.caller(&scene);
        caller.send(agent.request("GET /", "Authorization: NTLM TlRM\r\n\r\n"));
        let request = tunnel.next_of(Kind::Request).unwrap();
        let head = String::from_utf8(request.payload[4..].to_vec()).unwrap();
        assert_eq!(head.contains("x-gw-caller-connection"), is_told, "{head}");
        end(&scene, &agent, tunnel);
    }
}

#[test]
fn agents_of_the_previous_line_get_an_upgrade_with_content_as_an_ordinary_request() {
    let scene = demo_for_previous();
    let agent = modified_agent::enroll(&scene);
    for (version, is_upgrade) in [(&*previous(), false), (VERSION, true)] {
        let mut tunnel = tunnel_of(&scene, &agent, version);
        let mut caller = agent.caller(&scene);
        let fields = "Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 4\r\n\r\njsonraw";
        caller.send(agent.request("POST /", fields));
        let request = tunnel.next_of(Kind::Request).unwrap();
        let head = String::from_utf8(request.payload[4..].to_vec()).unwrap();
        assert!(head.contains("content-length: 4\r\n"), "{head}");
        assert_eq!(head.contains("upgrade: tcp"), is_upgrade, "{head}");
        let mut body = tunnel.next_of(Kind::Data).unwrap();
        assert_eq!(body.payload, b"json");
        // The bytes after the content wait until the agent switches. Without `Upgrade` the request
        // ends with the content.
        if !is_upgrade && !body.end {
            body = tunnel.next_of(Kind::Data).unwrap();
            assert!(body.payload.is_empty());
        }
        assert_eq!(body.end, !is_upgrade);
        let answer = last_head(request.stream, "409", &[("content-length", "0")]);
        tunnel.0.send(answer);
        let response = caller.response();
        assert_eq!(response.status, 409);
        assert_eq!(response.header("connection"), "close");
        end(&scene, &agent, tunnel);
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
    let agents = [(); 2].map(|()| modified_agent::enroll(&scene));
    let mut tunnels = [
        tunnel_of(&scene, &agents[0], &previous()),
        tunnel_of(&scene, &agents[1], VERSION),
    ];
    // Each agent has another one beside it. Then its tunnel is ended for a reason.
    let before = tunnels.each_mut().map(|tunnel| {
        tunnel.0.send(ping());
        messages_until(tunnel, Some(Kind::Pong))
    });
    for agent in &agents {
        scene.api().revoke_agent(ACCOUNT, &agent.agent);
    }
    let after = tunnels
        .each_mut()
        .map(|tunnel| messages_until(tunnel, None));
    assert_eq!(before[0], ["ready", "services"]);
    assert_eq!(before[1], ["other_tunnels", "ready", "services"]);
    let told = |types: &[String], what: &str| types.iter().any(|it| it == what);
    assert!(told(&after[1], "ended"), "{after:?}");
    assert!(!told(&after[0], "ended"), "{after:?}");
    assert!(!told(&after[0], "other_tunnels"), "{after:?}");
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
        let missing = format!("{program:?} is missing: made with GW_TEST_PACKAGES=1");
        programs::skipped(&missing);
        return None;
    }
    let folder = temporary.join(format!("line-{PREVIOUS}"));
    let built = build(repository, commit, &folder);
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
    let gateway = prepared.serve_with(&(prepared.config() + versions));
    prepared.set_agent_port(gateway.address.port());
    let backend = HeldBackend::start();
    let mut command = Command::new(&program);
    command
        .arg("run")
        .arg("--state-dir")
        .arg(prepared.path("agent"));
    command
        .args(["--backend", &backend.url])
        .stderr(Stdio::null());
    let mut previous = Running::new(command.spawn().unwrap());
    prepared.wait_for_tunnel(gateway.address);
    let mut caller = prepared.connect(gateway.address);
    caller.send(prepared.get("/held"));
    backend.wait_for_held();
    backend.release();
    assert_eq!(caller.response().status, 200);
    previous.stop();
    // An agent of this line uses the same state.
    let _next = prepared.run_agent(gateway.address.port(), &backend.url);
    prepared.wait_for_tunnel(gateway.address);
}

/// Runs `gw-gateway agent-program` in a folder. Returns its exit code and output.
fn agent_program(folder: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let output = gw_gateway()
        .arg("agent-program")
        .args(arguments)
        .current_dir(folder)
        .output()
        .unwrap();
    let printed = match output.status.success() {
        true => output.stdout,
        false => output.stderr,
    };
    (output.status.code(), String::from_utf8(printed).unwrap())
}

#[test]
fn a_release_key_is_made_in_the_current_folder_and_never_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (code, key) = agent_program(folder, &["new-key", "release.key"]);
    assert_eq!(code, Some(0), "{key}");
    key.trim().parse::<ReleaseKey>().unwrap();
    // A link that leads nowhere is not replaced either.
    symlink("missing", folder.join("link.key")).unwrap();
    fs::write(folder.join("gw-agent"), b"\x7fELF program").unwrap();
    let signs = ["sign", "--key", "gw-agent", "--out", "programs", "gw-agent"];
    for (arguments, reason) in [
        (&["new-key", "release.key"][..], "never replaced"),
        (&["new-key", "link.key"], "never replaced"),
        (&signs, "not a release key"),
    ] {
        let (code, said) = agent_program(folder, arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {said}");
        assert!(said.contains(reason), "{arguments:?}: {said}");
    }
}

#[test]
fn of_several_commands_that_make_one_release_key_only_one_prints_it() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let arguments = ["new-key", "release.key"];
    let ended: Vec<_> = thread::scope(|scope| {
        let run = || agent_program(folder, &arguments);
        let commands: Vec<_> = (0..16).map(|_| scope.spawn(run)).collect();
        let ended = commands.into_iter().map(|command| command.join().unwrap());
        ended.collect()
    });
    let printed = ended.iter().filter(|(code, _)| *code == Some(0));
    let printed: Vec<_> = printed.map(|(_, key)| key).collect();
    let stored = fs::read(folder.join("release.key")).unwrap();
    let stored = Ed25519KeyPair::from_pkcs8(&stored).unwrap();
    assert_eq!(printed, [&format!("{}\n", ReleaseKey::of(&stored))]);
}
