//! Memory of thousands of idle and stalled connections in the product and in the kernel: it is
//! bounded and released, and other accounts are not slowed down.

use std::any::Any;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::agents::{self, Agent, Plan};
use crate::client::{Stream, Target};
use crate::demo::{Demo, Options};
use crate::failure::{Failure, ensure};
use crate::http2::{self, NO_WINDOW};
use crate::machine::procfs;
use crate::machine::procfs::Memory;
use crate::report::{mebibytes, millis, say};
use crate::scenarios::compare::{LARGE, MEGABYTE, Site};
use crate::{load, metrics};

/// Idle connections, half of them HTTP/2.
const IDLE: usize = 10_000;
/// Downloads that callers do not read, each on its own connection, and as streams. The demo has the
/// agent in its process, so 10,000 connections would exceed the common limit of 20,000 descriptors.
const STALLED: usize = 9_000;
const STALLED_STREAMS: usize = 10_000;
const STREAMS: usize = 100;
/// Responses of 1 MB that callers do not read.
const UNREAD: usize = 4_000;
/// Tunnels besides the demo's own.
const TUNNELS: usize = 100;
/// The demo's account, and another account whose latency must not change.
const ACCOUNT: &str = "demo";
const OTHER_ACCOUNT: &str = "other";
const OTHER_SERVICE: &str = "api";
/// Number of loopback addresses that connections come from.
const SOURCES: usize = 4;
/// Receive buffer in bytes of callers that do not read, small because it is not memory of the
/// product.
const RECEIVE_BUFFER: usize = 4096;
/// Timeout for opening all connections.
const OPEN_WITHIN: Duration = Duration::from_secs(60);
/// Time for downloads to fill all buffers between backend and caller.
const STALLS_AFTER: Duration = Duration::from_secs(10);
/// Time for the product to release memory, and the allowed remainder.
const BACK_WITHIN: Duration = Duration::from_secs(10);
const BACK_TO: u64 = 64 * 1024 * 1024;
const TICK: Duration = Duration::from_millis(500);
/// Callers and requests of the other account in one measurement, and the largest allowed ratio of
/// latencies.
const CALLERS: u32 = 4;
const REQUESTS: usize = 2000;
const SLOWER_MAX: u32 = 2;
/// Noise only increases latencies, so the best of several attempts counts.
const ATTEMPTS: usize = 3;

/// Workers of the demo. Each reports the limit of all.
const WORKERS: u64 = 2;

/// Runs all scenarios; with `short`, a tenth of each.
pub(crate) fn run(gateway: &Path, short: bool) -> Result<(), Failure> {
    gw_shared::runtime::raise_open_file_limit();
    let site = Site::with_frugal_backend()?;
    let _backend = site.start_backend()?;
    let scenarios: [(&str, usize, Open<'_>); 5] = [
        ("idle connections", IDLE, &|demo, count| {
            idle(&demo.target, count)
        }),
        ("stalled downloads, HTTP/1.1", STALLED, &|demo, count| {
            stalled(&demo.target, LARGE, count)
        }),
        (
            "stalled downloads, HTTP/2",
            STALLED_STREAMS,
            &|demo, count| stalled_http2(&demo.target, count),
        ),
        ("unread answers of 1 MB", UNREAD, &|demo, count| {
            stalled(&demo.target, MEGABYTE, count)
        }),
        ("tunnels", TUNNELS, &|demo, count| {
            let services: Vec<String> = (0..count).map(|it| format!("service-{it}")).collect();
            let created = services
                .iter()
                .try_for_each(|id| demo.api.create_service(ACCOUNT, id));
            created?;
            let plan = Plan::new(site.backend_url());
            let agent = agents::connect(gateway, demo, ACCOUNT, &services, plan)?;
            Ok(Box::new(agent))
        }),
    ];
    let mut failed = Vec::new();
    for (name, count, open) in scenarios {
        let slots = u32::try_from(STALLED_STREAMS + 1).ok();
        let options = Options {
            slots,
            backend: Some(site.backend_url()),
            ..Options::default()
        };
        let demo = Demo::start(gateway, &options)?;
        let (other, agent) = start_other(gateway, &demo, &site.backend_url())?;
        let count = if short { count / 10 } else { count };
        let wrong = measure(&demo, &other, name, count, open)?;
        failed.extend(wrong.into_iter().map(|wrong| format!("{name}: {wrong}")));
        drop(agent);
        demo.stop()?;
    }
    ensure(failed.is_empty(), || failed.join("; "))
}

/// Connections or processes that hold memory in the product until dropped.
type Held = Box<dyn Any>;
type Open<'a> = &'a dyn Fn(&Demo, usize) -> Result<Held, Failure>;

/// Creates a service of another account, with its own agent.
fn start_other(gateway: &Path, demo: &Demo, backend: &str) -> Result<(Target, Agent), Failure> {
    let services = [OTHER_SERVICE.to_owned()];
    demo.api.create_account(OTHER_ACCOUNT)?;
    demo.api.create_service(OTHER_ACCOUNT, OTHER_SERVICE)?;
    let key = demo.api.create_key(OTHER_ACCOUNT, "other", &services)?;
    let agent = agents::connect(gateway, demo, OTHER_ACCOUNT, &services, Plan::new(backend))?;
    let target = demo.target_of(OTHER_ACCOUNT, OTHER_SERVICE, &key.secret)?;
    Ok((target, agent))
}

/// Measures before, during and after; returns the failures.
fn measure(
    demo: &Demo,
    other: &Target,
    name: &str,
    count: usize,
    open: Open<'_>,
) -> Result<Vec<String>, Failure> {
    demo.target.connect()?.ask("/hello")?;
    let resident = || Memory::of(demo.pid()).map(|memory| memory.resident);
    let quiet = latency(other)?;
    let before = resident()?;
    let kernel_before = procfs::tcp_memory()?;
    let opening = Instant::now();
    let (held, most) = watching_kernel_memory(demo, || open(demo, count))?;
    let opened = opening.elapsed();
    let at = resident()?;
    let (beside, most_later) = watching_kernel_memory(demo, || latency(other))?;
    let most = most.or(most_later);
    drop(held);
    let closed = Instant::now();
    let is_back = |after: u64| after <= before + BACK_TO;
    let is_kernel_back = |after: u64| after <= kernel_before + BACK_TO;
    let (after, kernel_after) = released(&resident, |after, kernel_after| {
        is_back(after) && is_kernel_back(kernel_after)
    })?;
    let limit = metrics::read(&demo.admin_url, "gw_connections_kernel_limit_bytes")? / WORKERS;
    say(format_args!(
        "{count} {name}, open after {:.0} s: resident {:.1} MiB before, {:.1} with them ({:.1} \
         KiB each), {:.1} {:.0} s after; kernel memory of callers' connections at most {:.1} \
         of {:.1} MiB, of all TCP at most {:.1}, {:.1} after; another account's p99 {:.2} ms \
         quiet, {:.2} ms beside ({:.2})",
        opened.as_secs_f64(),
        mebibytes(before),
        mebibytes(at),
        at.saturating_sub(before) as f64 / 1024.0 / count as f64,
        mebibytes(after),
        closed.elapsed().as_secs_f64(),
        mebibytes(most.callers),
        mebibytes(limit),
        mebibytes(most.machine),
        mebibytes(kernel_after),
        millis(quiet),
        millis(beside),
        beside.as_secs_f64() / quiet.as_secs_f64(),
    ));
    say_ended(demo)?;
    let checks = [
        (
            opened <= OPEN_WITHIN + STALLS_AFTER,
            "connections were not open in time",
        ),
        (is_back(after), "memory is not released"),
        (
            is_kernel_back(kernel_after),
            "kernel memory is not released",
        ),
        (most.callers <= limit, "kernel memory exceeds the limit"),
        (
            beside <= quiet * SLOWER_MAX,
            "callers of another account are slowed down",
        ),
    ];
    Ok(checks
        .into_iter()
        .filter(|(holds, _)| !holds)
        .map(|(_, wrong)| wrong.to_owned())
        .collect())
}

/// Prints how many connections the gateway has ended, by reason.
fn say_ended(demo: &Demo) -> Result<(), Failure> {
    let ended = metrics::reasons(&demo.admin_url)?;
    if !ended.is_empty() {
        say(format_args!("  {ended}"));
    }
    Ok(())
}

/// Resident memory and memory of TCP once they are back, or after the longest wait for that.
fn released(
    resident: &impl Fn() -> Result<u64, Failure>,
    are_back: impl Fn(u64, u64) -> bool,
) -> Result<(u64, u64), Failure> {
    let began = Instant::now();
    loop {
        let after = resident()?;
        let kernel_after = procfs::tcp_memory()?;
        if are_back(after, kernel_after) || began.elapsed() >= BACK_WITHIN {
            return Ok((after, kernel_after));
        }
        std::thread::sleep(TICK);
    }
}

/// Best p99 of several attempts of small requests of the other account, each of which must
/// succeed.
fn latency(other: &Target) -> Result<Duration, Failure> {
    let mut best = Duration::MAX;
    for _ in 0..ATTEMPTS {
        let (_, _, p99) = load::requests(other, CALLERS, REQUESTS)?.figures();
        best = best.min(p99);
    }
    Ok(best)
}

/// Runs `work` and returns the peak of kernel memory during it.
fn watching_kernel_memory<T>(
    demo: &Demo,
    work: impl FnOnce() -> Result<T, Failure>,
) -> Result<(T, KernelMemory), Failure> {
    let done = AtomicBool::new(false);
    let callers = AtomicU64::new(0);
    let machine = AtomicU64::new(0);
    let admin_url = &demo.admin_url;
    let watch = || {
        while !done.load(Ordering::Relaxed) {
            // A failed scrape on a busy machine is skipped.
            if let Ok(bytes) = metrics::read(admin_url, "gw_connections_kernel_bytes") {
                callers.fetch_max(bytes, Ordering::Relaxed);
            }
            machine.fetch_max(procfs::tcp_memory().unwrap_or(0), Ordering::Relaxed);
            std::thread::sleep(TICK);
        }
    };
    let result = std::thread::scope(|scope| {
        scope.spawn(watch);
        let result = work();
        done.store(true, Ordering::Relaxed);
        result
    })?;
    Ok((
        result,
        KernelMemory {
            callers: callers.into_inner(),
            machine: machine.into_inner(),
        },
    ))
}

/// Peak of the bytes in kernel socket buffers.
#[derive(Clone, Copy)]
struct KernelMemory {
    /// Callers' connections, as measured by the product.
    callers: u64,
    /// All TCP sockets of the machine.
    machine: u64,
}

impl KernelMemory {
    fn or(self, other: Self) -> Self {
        Self {
            callers: self.callers.max(other.callers),
            machine: self.machine.max(other.machine),
        }
    }
}

fn idle(target: &Target, count: usize) -> Result<Held, Failure> {
    let open = |number: usize| {
        let source = 1 + number % SOURCES;
        if number.is_multiple_of(2) {
            return target.open_from(source, &[b"http/1.1"]);
        }
        http2::begin(target.open_from(source, &[b"h2"])?, &[])
    };
    let streams: Vec<Stream> = (0..count).map(open).collect::<Result<_, _>>()?;
    Ok(Box::new(streams))
}

fn stalled(target: &Target, path: &str, count: usize) -> Result<Held, Failure> {
    let target = &target.with_receive_buffer(RECEIVE_BUFFER);
    let host = &target.host;
    let key = &target.service_key;
    let open = |number: usize| {
        let mut stream = target.open_from(1 + number % SOURCES, &[b"http/1.1"])?;
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: {host}\r\nX-Gw-Service-Key: {key}\r\n\r\n"
        )?;
        stream.flush()?;
        let mut status = [0; 12];
        stream.read_exact(&mut status)?;
        ensure(status == *b"HTTP/1.1 200", || {
            format!("download {number}: {}", String::from_utf8_lossy(&status))
        })?;
        Ok(stream)
    };
    let streams: Vec<Stream> = (0..count).map(open).collect::<Result<_, Failure>>()?;
    std::thread::sleep(STALLS_AFTER);
    Ok(Box::new(streams))
}

fn stalled_http2(target: &Target, count: usize) -> Result<Held, Failure> {
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
    let streams: Vec<Stream> = (0..count.div_ceil(STREAMS))
        .map(open)
        .collect::<Result<_, Failure>>()?;
    std::thread::sleep(STALLS_AFTER);
    Ok(Box::new(streams))
}
