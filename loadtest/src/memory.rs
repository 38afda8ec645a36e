//! What thousands of connections that do nothing hold, and that the product gives it back.

use std::any::Any;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::client::{Stream, Target};
use crate::compare::{LARGE, Site};
use crate::demo::{Demo, Options};
use crate::failure::{Failure, ensure};
use crate::http2::{self, NO_WINDOW};
use crate::metrics;
use crate::process::{self, Process};
use crate::procfs::Memory;
use crate::report::{mebibytes, say};

/// Idle connections, half of them HTTP/2.
const IDLE: usize = 10_000;
/// Downloads that nobody reads, each on a connection of its own, and as streams. The demo has the agent in its process:
/// 20,000 descriptors, which is what many machines allow, are not enough for 10,000 of the former.
const STALLED: usize = 9_000;
const STALLED_STREAMS: usize = 10_000;
const STREAMS: usize = 100;
/// Tunnels besides the demo's own.
const TUNNELS: usize = 100;
const TUNNELS_WITHIN: Duration = Duration::from_secs(30);
/// The demo's account.
const ACCOUNT: &str = "demo";
/// Loopback addresses that connections come from.
const SOURCES: usize = 4;
/// How long downloads take to fill whatever is between backend and caller.
const STALLS_AFTER: Duration = Duration::from_secs(10);
/// How long the product has to give memory back, and to how near where it began.
const BACK_WITHIN: Duration = Duration::from_secs(60);
const BACK_TO: u64 = 64 * 1024 * 1024;
const TICK: Duration = Duration::from_millis(500);

pub(crate) fn run(gateway: &Path) -> Result<(), Failure> {
    gw_shared::runtime::raise_open_file_limit();
    let site = Site::with_backend_alone()?;
    let _backend = site.start_backend()?;
    let scenarios: [(&str, usize, Open<'_>); 4] = [
        ("idle connections", IDLE, &|demo| idle(&demo.target)),
        ("stalled downloads, HTTP/1.1", STALLED, &|demo| stalled(&demo.target)),
        ("stalled downloads, HTTP/2", STALLED_STREAMS, &|demo| stalled_http2(&demo.target)),
        ("tunnels", TUNNELS, &|demo| tunnels(gateway, demo, &site.backend_url())),
    ];
    let mut failed = Vec::new();
    for (name, count, open) in scenarios {
        let slots = u32::try_from(STALLED_STREAMS + 1).ok();
        let options = Options { slots, backend: Some(site.backend_url()), ..Options::default() };
        let demo = Demo::start(gateway, &options)?;
        if !held_and_given_back(&demo, name, count, open)? {
            failed.push(name);
        }
        demo.stop()?;
    }
    ensure(failed.is_empty(), || format!("memory is not given back after: {}", failed.join(", ")))
}

/// What holds memory in the product until it is dropped.
type Held = Box<dyn Any>;
type Open<'a> = &'a dyn Fn(&Demo) -> Result<Held, Failure>;

/// Measures a fresh product before, during and after.
fn held_and_given_back(demo: &Demo, name: &str, count: usize, open: Open<'_>) -> Result<bool, Failure> {
    demo.target.connect()?.ask("/hello")?;
    let resident = || Memory::of(demo.pid()).map(|memory| memory.resident);
    let before = resident()?;
    let held = open(demo)?;
    let at = resident()?;
    // Whoever means well is served beside them.
    let answer = demo.target.connect()?.ask("/hello");
    ensure(answer.is_ok_and(|answer| answer.head.status == 200), || "nobody else is served".to_owned())?;
    drop(held);
    let closed = Instant::now();
    let mut after = resident()?;
    while after > before + BACK_TO && closed.elapsed() < BACK_WITHIN {
        std::thread::sleep(TICK);
        after = resident()?;
    }
    say(format_args!(
        "{count} {name}: {:.1} MiB before, {:.1} MiB with them ({:.1} KiB each), {:.1} MiB {:.0} s after",
        mebibytes(before),
        mebibytes(at),
        at.saturating_sub(before) as f64 / 1024.0 / count as f64,
        mebibytes(after),
        closed.elapsed().as_secs_f64(),
    ));
    Ok(after <= before + BACK_TO)
}

fn idle(target: &Target) -> Result<Held, Failure> {
    let open = |number: usize| {
        let source = 1 + number % SOURCES;
        if number.is_multiple_of(2) {
            return target.open_from(source, &[b"http/1.1"]);
        }
        http2::begin(target.open_from(source, &[b"h2"])?, &[])
    };
    let streams: Vec<Stream> = (0..IDLE).map(open).collect::<Result<_, _>>()?;
    Ok(Box::new(streams))
}

fn stalled(target: &Target) -> Result<Held, Failure> {
    let (host, key) = (&target.host, &target.service_key);
    let open = |number: usize| {
        let mut stream = target.open_from(1 + number % SOURCES, &[b"http/1.1"])?;
        write!(stream, "GET {LARGE} HTTP/1.1\r\nHost: {host}\r\nX-Gw-Service-Key: {key}\r\n\r\n")?;
        stream.flush()?;
        let mut status = [0; 12];
        stream.read_exact(&mut status)?;
        ensure(status == *b"HTTP/1.1 200", || format!("download {number}: {}", String::from_utf8_lossy(&status)))?;
        Ok(stream)
    };
    let streams: Vec<Stream> = (0..STALLED).map(open).collect::<Result<_, Failure>>()?;
    std::thread::sleep(STALLS_AFTER);
    Ok(Box::new(streams))
}

fn stalled_http2(target: &Target) -> Result<Held, Failure> {
    let open = |_| {
        let mut stream = http2::begin(target.open(&[b"h2"])?, NO_WINDOW)?;
        for number in 0..STREAMS {
            let id = 2 * u32::try_from(number).unwrap_or_default() + 1;
            let block = http2::request("GET", &target.host, LARGE, Some(&target.service_key));
            stream.write_all(&http2::headers(id, http2::END_STREAM, &block))?;
        }
        stream.flush()?;
        Ok(stream)
    };
    let streams: Vec<Stream> = (0..STALLED_STREAMS / STREAMS).map(open).collect::<Result<_, Failure>>()?;
    std::thread::sleep(STALLS_AFTER);
    Ok(Box::new(streams))
}

/// One more agent that serves many services: it keeps a tunnel for each.
fn tunnels(gateway: &Path, demo: &Demo, backend: &str) -> Result<Held, Failure> {
    let services: Vec<String> = (0..TUNNELS).map(|number| format!("service-{number}")).collect();
    for service in &services {
        administer(gateway, demo, &["service", "create", ACCOUNT, service])?;
    }
    let mut create = vec!["enrollment-token", "create", ACCOUNT];
    create.extend(services.iter().flat_map(|service| ["--service", service]));
    let token = administer(gateway, demo, &create)?;
    let token = token["token"].as_str().ok_or_else(|| Failure::new(format!("no token in {token}")))?;

    let agent = gateway.with_file_name("gw-agent");
    let folder = tempfile::Builder::new().prefix("gw-loadtest-").tempdir()?;
    let mut enroll = Command::new(&agent);
    enroll.args(["enroll", "--gateway", &demo.base_url, "--ca-file"]).arg(&demo.ca_file);
    enroll.arg("--state-dir").arg(folder.path()).env("GW_ENROLLMENT_TOKEN", token);
    output(&mut enroll)?;
    let mut run = process::command(&agent, None)?;
    run.args(["run", "--backend", backend, "--state-dir"])
        .arg(folder.path())
        .stdin(Stdio::null())
        .stderr(Stdio::null());
    let process = Process::spawn("gw-agent", &mut run)?.with_folder(folder);

    let deadline = Instant::now() + TUNNELS_WITHIN;
    while metrics::read(&demo.admin_url, "gw_tunnels")? <= TUNNELS as u64 {
        ensure(Instant::now() < deadline, || format!("not {TUNNELS} tunnels within {TUNNELS_WITHIN:?}"))?;
        std::thread::sleep(TICK);
    }
    Ok(Box::new(process))
}

/// What the product's command-line client says, as JSON.
fn administer(gateway: &Path, demo: &Demo, arguments: &[&str]) -> Result<Value, Failure> {
    let mut command = Command::new(gateway);
    command.args(arguments).arg("--json");
    command.env("GW_ADMIN_URL", &demo.admin_url).env("GW_ADMIN_TOKEN", &demo.admin_token);
    serde_json::from_slice(&output(&mut command)?).map_err(|error| Failure::during("reading the client's JSON", error))
}

fn output(command: &mut Command) -> Result<Vec<u8>, Failure> {
    let output = command.output().map_err(|error| Failure::during(format!("{command:?}"), error))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure(output.status.success(), || format!("{command:?}: {}: {said}", output.status))?;
    Ok(output.stdout)
}
