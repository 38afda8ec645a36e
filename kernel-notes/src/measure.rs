//! Clocks, cores and medians.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Core of the measured thread, and core of the thread that drives it. On a machine with one core
/// they are the same.
pub(crate) const MEASURED_CORE: usize = 0;
pub(crate) const DRIVING_CORE: usize = 1;

/// Pins the calling thread to a core.
pub(crate) fn pin(core: usize) {
    let cores = core_affinity::get_core_ids().unwrap_or_default();
    let pinned = cores
        .get(core % cores.len().max(1))
        .is_some_and(|core| core_affinity::set_for_current(*core));
    assert!(pinned, "cannot pin to core {core}");
}

/// CPU and wall time since an arbitrary start.
#[derive(Clone, Copy)]
pub(crate) struct Stamp {
    cpu: Duration,
    wall: Instant,
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Spent {
    pub(crate) cpu: Duration,
    pub(crate) wall: Duration,
}

impl Stamp {
    /// Times of the calling thread.
    pub(crate) fn thread() -> Self {
        Self {
            cpu: read(ClockId::ThreadCPUTime),
            wall: Instant::now(),
        }
    }

    /// Times of this process, all threads.
    pub(crate) fn process() -> Self {
        Self {
            cpu: read(ClockId::ProcessCPUTime),
            wall: Instant::now(),
        }
    }

    pub(crate) fn until(self, end: Self) -> Spent {
        Spent {
            cpu: end.cpu - self.cpu,
            wall: end.wall - self.wall,
        }
    }
}

pub(crate) fn thread_cpu() -> Duration {
    read(ClockId::ThreadCPUTime)
}

fn read(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

pub(crate) fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// The median; the upper one for an even number of values.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Formats values as `median (least–most)`.
pub(crate) fn spread(values: &[f64]) -> String {
    let (least, most) = values
        .iter()
        .fold((f64::MAX, f64::MIN), |(least, most), v| {
            (least.min(*v), most.max(*v))
        });
    format!("{:.2} ({least:.2}–{most:.2})", median(values.to_vec()))
}

/// Resident memory of this process, in bytes.
pub(crate) fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    line.split_whitespace()
        .next()
        .unwrap()
        .parse::<usize>()
        .unwrap()
        * 1024
}

/// Prints the first line of every report, which describes the machine.
pub(crate) fn print_machine() {
    let kernel = rustix::system::uname();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!(
        "kernel {}, {cores} cores\n",
        kernel.release().to_string_lossy()
    );
}
