//! Callers that mean ill beside one that means well: the latter must not notice much.

mod attacks;

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Pid;
use rustix::thread::{CpuSet, gettid, sched_setaffinity};

use self::attacks::{ATTACKS, Attack};
use crate::demo::{Demo, Options as DemoOptions};
use crate::failure::{Failure, ensure};
use crate::latency::{Latency, joined};
use crate::metrics;
use crate::process;
use crate::procfs;
use crate::report::{millis, say};

/// The gateway's worker has this core; callers, agent and backend have the other, as they would have machines of their
/// own: it is the gateway that is attacked.
const GATEWAY_CORE: usize = 0;
const CALLERS_CORE: usize = 1;
/// More than attackers who have a key can have requests at a time: who has the last slot is another matter.
const SLOTS: u32 = 1024;
/// From an attack's beginning to the measurement beside it.
const BUILDS_UP: Duration = Duration::from_millis(500);
/// Noise only ever adds: the best of several attempts is nearest to the truth, on both sides.
const ATTEMPTS: usize = 3;
/// Most that an attack may slow others down.
const SLOWER_MAX: u32 = 2;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only attacks whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// Length of each measurement.
    #[arg(long, default_value_t = 3)]
    seconds: u64,
}

pub(crate) fn run(gateway: &Path, options: &Options) -> Result<(), Failure> {
    let attacks: Vec<&Attack> = ATTACKS.iter().filter(|attack| attack.name.contains(&options.only)).collect();
    ensure(!attacks.is_empty(), || format!("no attack is called {}", options.only))?;
    pin_to(None, CALLERS_CORE)?;
    let mut failed = Vec::new();
    for attack in attacks {
        // Each against a fresh product: the budgets of one must not end another.
        let with = DemoOptions { workers: 1, core: Some(GATEWAY_CORE), slots: Some(SLOTS), ..Default::default() };
        let demo = Demo::start(gateway, &with)?;
        arrange(demo.pid())?;
        if let Err(failure) = beside(&demo, attack, Duration::from_secs(options.seconds)) {
            say(format_args!("{}: {failure}", attack.name));
            failed.push(attack.name);
        }
        demo.stop()?;
    }
    ensure(failed.is_empty(), || format!("failed: {}", failed.join(", ")))
}

/// What one attack does to the callers that mean well.
fn beside(demo: &Demo, attack: &Attack, length: Duration) -> Result<(), Failure> {
    // Warm: pools filled, code paged in.
    measure(demo, length / 3)?;
    let (mut quiet, mut attacked) = (Latency::MAX, Latency::MAX);
    let (rounds, ended) = (AtomicU64::new(0), AtomicU64::new(0));
    for _ in 0..ATTEMPTS {
        quiet = quiet.min(measure(demo, length)?);
        let stop = AtomicBool::new(false);
        let cpu = procfs::cpu(demo.pid());
        let began = Instant::now();
        let beside_it = std::thread::scope(|scope| {
            let attackers: Vec<_> = (0..attack.attackers)
                .map(|number| {
                    let (stop, rounds, ended) = (&stop, &rounds, &ended);
                    scope.spawn(move || {
                        schedule(gettid(), Class::Leftovers)?;
                        while !stop.load(Ordering::Relaxed) {
                            rounds.fetch_add(1, Ordering::Relaxed);
                            // A failure is what should come of it: the product ended the connection.
                            if (attack.run)(&demo.target, number, stop).is_err() {
                                ended.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                        Ok(())
                    })
                })
                .collect();
            std::thread::sleep(BUILDS_UP);
            let measured = measure(demo, length);
            stop.store(true, Ordering::Relaxed);
            joined(attackers).collect::<Result<(), _>>().and(measured)
        })?;
        let busy = procfs::cpu(demo.pid()).saturating_sub(cpu).as_secs_f64() / began.elapsed().as_secs_f64();
        say(format_args!(
            "{}: p50 {:.2} ms, p99 {:.2} ms beside it (product {:.0} % busy)",
            attack.name,
            millis(beside_it.p50),
            millis(beside_it.p99),
            busy * 100.0
        ));
        attacked = attacked.min(beside_it);
    }
    let ratio = attacked.p99_over(quiet);
    say(format_args!(
        "{}: best p99 {:.2} ms quiet, {:.2} ms beside it ({ratio:.2} times); {} rounds, {} ended by the product; {}",
        attack.name,
        millis(quiet.p99),
        millis(attacked.p99),
        rounds.into_inner(),
        ended.into_inner(),
        metrics::reasons(&demo.admin_url)?,
    ));
    ensure(ratio <= f64::from(SLOWER_MAX), || format!("p99 is {ratio:.1} times the quiet one"))
}

/// How callers fare that have a machine of their own, as far as one can be had here.
fn measure(demo: &Demo, length: Duration) -> Result<Latency, Failure> {
    let callers = || {
        // The threads of the callers inherit it.
        schedule(gettid(), Class::Callers)?;
        Latency::measure(&demo.target, length)
    };
    std::thread::scope(|scope| scope.spawn(callers).join())
        .unwrap_or_else(|_| Err(Failure::new("the callers' thread panicked")))
}

/// What a thread gets of its core. All share two cores that would have a dozen, and the kernel lets an ordinary thread
/// finish its slice of some milliseconds before it looks at another: that would be measured, and not the product.
#[derive(Clone, Copy)]
enum Class {
    /// Whenever it wants (`SCHED_FIFO`).
    Callers,
    /// Whenever no caller wants it.
    Backend,
    /// Whenever neither of them wants it: gateway and agent.
    Product,
    /// Whatever nobody else wants (`SCHED_IDLE`): attackers.
    Leftovers,
}

fn schedule(thread: Pid, class: Class) -> Result<(), Failure> {
    let policy = match class {
        Class::Callers => ["--fifo", "--pid", "3"],
        Class::Backend => ["--fifo", "--pid", "2"],
        Class::Product => ["--fifo", "--pid", "1"],
        Class::Leftovers => ["--idle", "--pid", "0"],
    };
    let chrt = process::find("chrt", "util-linux")?;
    let status = Command::new(chrt).args(policy).arg(thread.as_raw_nonzero().to_string()).status()?;
    ensure(status.success(), || format!("chrt ended with {status}: as root?"))
}

fn pin_to(thread: Option<Pid>, core: usize) -> Result<(), Failure> {
    let mut cores = CpuSet::new();
    cores.set(core);
    sched_setaffinity(thread, &cores).map_err(|error| Failure::during("pinning a thread", error))
}

/// Leaves the gateway's core to its worker, the demo runs agent and backend in the same process; and has all who are on
/// a request's way run when they are wanted.
fn arrange(process: u32) -> Result<(), Failure> {
    for (thread, name) in procfs::threads(process)? {
        let is_worker = name.starts_with("gw-worker");
        if !is_worker {
            pin_to(Some(thread), CALLERS_CORE)?;
        }
        match name.as_str() {
            "gw-echo" => schedule(thread, Class::Backend)?,
            name if is_worker || name == "gw-agent" => schedule(thread, Class::Product)?,
            // Not on a request's way.
            _ => {}
        }
    }
    Ok(())
}
