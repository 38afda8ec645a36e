//! Virtual time. It stands still while no simulation advances it.

use std::cell::Cell;
use std::time::Duration;

/// Virtual time since the begin of a simulation, in nanoseconds.
pub type Nanos = u64;

/// Monotonic clock at the begin of a simulation, so that the product can subtract days from it.
const MONOTONIC_AT_START: Nanos = 1_000_000_000_000_000;
/// Wall clock at the begin of a simulation: 2026-01-01T00:00:00Z.
const WALL_AT_START: Nanos = 1_767_225_600_000_000_000;

thread_local! {
    static NOW: Cell<Option<Nanos>> = const { Cell::new(None) };
    /// What was added to the wall clock.
    static WALL_JUMP: Cell<i64> = const { Cell::new(0) };
}

/// Time since the begin of the simulation of this thread; `None` on other threads.
pub fn now() -> Option<Nanos> {
    NOW.get()
}

/// As [`now`], zero on other threads.
pub(crate) fn elapsed() -> Nanos {
    NOW.get().unwrap_or(0)
}

/// Makes this thread a thread of a simulation, at time zero.
pub(crate) fn start() {
    NOW.set(Some(0));
    WALL_JUMP.set(0);
}

/// Makes this thread an ordinary one.
pub(crate) fn stop() {
    NOW.set(None);
}

/// Advances the time. A time in the past changes nothing.
pub(crate) fn advance_to(time: Nanos) {
    NOW.set(NOW.get().map(|now| now.max(time)));
}

/// Sets the wall clock forward or back. The monotonic clock continues.
pub fn jump_wall_clock(by: Duration, forward: bool) {
    let by = i64::try_from(by.as_nanos()).unwrap_or(i64::MAX);
    WALL_JUMP.set(WALL_JUMP.get() + if forward { by } else { -by });
}

/// Value of the clock `id` of clock_gettime(2) on a thread of a simulation.
pub(crate) fn read(id: libc::clockid_t) -> Option<Nanos> {
    let elapsed = NOW.get()?;
    Some(match id {
        libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE => {
            (WALL_AT_START + elapsed).saturating_add_signed(WALL_JUMP.get())
        }
        // A tenth of the time is busy.
        libc::CLOCK_THREAD_CPUTIME_ID | libc::CLOCK_PROCESS_CPUTIME_ID => elapsed / 10,
        _ => MONOTONIC_AT_START + elapsed,
    })
}
