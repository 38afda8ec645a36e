//! What thousands of connections that do nothing hold, and that the product gives it back.

use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::client::{Stream, Target};
use crate::demo::{Demo, Options};
use crate::failure::{Failure, ensure};
use crate::http2::{self, NO_WINDOW};
use crate::procfs::Memory;
use crate::report::{mebibytes, say};

/// Idle connections, half of them HTTP/2.
const IDLE: usize = 10_000;
/// Downloads that nobody reads. The demo has agent and backend in its process: each takes three of its descriptors.
const STALLED: usize = 4_000;
const STREAMS: usize = 100;
const DOWNLOAD: &str = "/bytes/100000000";
/// Loopback addresses that connections come from.
const SOURCES: usize = 4;
/// How long downloads take to fill whatever is between backend and caller.
const STALLS_AFTER: Duration = Duration::from_secs(10);
/// How long the product has to give memory back, and to how near where it began.
const BACK_WITHIN: Duration = Duration::from_secs(60);
const BACK_TO: u64 = 64 * 1024 * 1024;
const TICK: Duration = Duration::from_millis(500);

pub(crate) fn run(gateway: &Path) -> Result<(), Failure> {
    rustix::process::setrlimit(rustix::process::Resource::Nofile, {
        let mut limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        limit.current = limit.maximum;
        limit
    })
    .map_err(|error| Failure::during("raising the limit of open files", error))?;
    let mut failed = Vec::new();
    let mut scenario = |name: &'static str, count: usize, open: &dyn Fn(&Target) -> Result<Vec<Stream>, Failure>| {
        if !held_and_given_back(gateway, name, count, open)? {
            failed.push(name);
        }
        Ok::<(), Failure>(())
    };
    scenario("idle connections", IDLE, &|target| idle(target))?;
    scenario("stalled downloads, HTTP/1.1", STALLED, &|target| {
        (0..STALLED).map(|number| stalled(target, number)).collect()
    })?;
    scenario("stalled downloads, HTTP/2", STALLED, &|target| {
        (0..STALLED / STREAMS).map(|_| stalled_http2(target)).collect()
    })?;
    ensure(failed.is_empty(), || format!("memory is not given back after: {}", failed.join(", ")))
}

/// Measures a fresh product before, during and after.
fn held_and_given_back(
    gateway: &Path,
    name: &str,
    count: usize,
    open: &dyn Fn(&Target) -> Result<Vec<Stream>, Failure>,
) -> Result<bool, Failure> {
    let slots = u32::try_from(STALLED + 1).unwrap_or(u32::MAX);
    let demo = Demo::start(gateway, &Options { slots: Some(slots), ..Options::default() })?;
    demo.target.connect()?.ask("/hello")?;
    let resident = || Memory::of(demo.pid()).map(|memory| memory.resident);
    let before = resident()?;
    let streams = open(&demo.target)?;
    let at = resident()?;
    // Whoever means well is served beside them.
    let answer = demo.target.connect()?.ask("/hello");
    ensure(answer.is_ok_and(|answer| answer.head.status == 200), || "nobody else is served".to_owned())?;
    drop(streams);
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
    demo.stop()?;
    Ok(after <= before + BACK_TO)
}

fn idle(target: &Target) -> Result<Vec<Stream>, Failure> {
    (0..IDLE)
        .map(|number| {
            let source = 1 + number % SOURCES;
            if number % 2 == 0 {
                return target.open_from(source, &[b"http/1.1"]);
            }
            http2::begin(target.open_from(source, &[b"h2"])?, &[])
        })
        .collect()
}

fn stalled(target: &Target, number: usize) -> Result<Stream, Failure> {
    let mut stream = target.open_from(1 + number % SOURCES, &[b"http/1.1"])?;
    let (host, key) = (&target.host, &target.service_key);
    write!(stream, "GET {DOWNLOAD} HTTP/1.1\r\nHost: {host}\r\nX-Gw-Service-Key: {key}\r\n\r\n")?;
    stream.flush()?;
    let mut status = [0; 12];
    stream.read_exact(&mut status)?;
    ensure(status == *b"HTTP/1.1 200", || format!("download {number}: {}", String::from_utf8_lossy(&status)))?;
    if number + 1 == STALLED {
        std::thread::sleep(STALLS_AFTER);
    }
    Ok(stream)
}

fn stalled_http2(target: &Target) -> Result<Stream, Failure> {
    let mut stream = http2::begin(target.open(&[b"h2"])?, NO_WINDOW)?;
    for number in 0..STREAMS {
        let id = 2 * u32::try_from(number).unwrap_or_default() + 1;
        let block = http2::request("GET", &target.host, DOWNLOAD, Some(&target.service_key));
        stream.write_all(&http2::headers(id, http2::END_STREAM, &block))?;
    }
    stream.flush()?;
    std::thread::sleep(STALLS_AFTER / (STALLED / STREAMS) as u32);
    Ok(stream)
}
