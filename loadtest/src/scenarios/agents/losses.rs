//! Agents and tunnels that are lost.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::site::{Plan, Site};
use super::table::{Row, seconds};
use super::wire::Wire;
use crate::backend::Received;
use crate::callers::{Failed, Methods, Outcome};
use crate::failure::Failure;
use crate::report::millis;

const CALLERS: u32 = 64;
/// Duration of each request, so that some are in flight.
const DELAY: Duration = Duration::from_millis(20);
const LOSSES: usize = 4;
/// Load around a loss.
const AROUND: Duration = Duration::from_secs(3);
/// Sockets of a killed process close a moment after its end, and the gateway notices it a moment
/// later.
const MOMENT: Duration = Duration::from_millis(100);
/// Rate of `cut`, in requests per second, and callers enough for requests that wait for a tunnel.
const RATE: u32 = 300;
const CALLERS_OF_RATE: u32 = 300;

/// Agents are killed in turns.
pub(super) fn kill(site: &Site) -> Result<Vec<Row>, Failure> {
    let received = Received::default();
    let backend = received.backend(DELAY, "ok")?;
    let mut pool = site.pool(vec![Plan::new(&backend.url), Plan::new(&backend.url)])?;
    let calls = pool.call(CALLERS, None, Methods::GetAndPost)?;
    let mut kills = Vec::new();
    for number in 0..LOSSES {
        std::thread::sleep(AROUND);
        kills.push(Instant::now());
        pool.agents[number % 2].kill()?;
        std::thread::sleep(AROUND);
        pool.agents[number % 2].start()?;
        pool.wait_for_tunnels(2)?;
    }
    let outcome = calls.stop()?;
    let gets = outcome
        .failed
        .iter()
        .filter(|failed| !failed.is_post)
        .count()
        + outcome.sent_again;
    let (in_flight, others) = around(&outcome, &kills);
    let (_, twice) = received.posts();
    Ok(vec![
        Row::new(format!("kill, {CALLERS} callers, {LOSSES} kills"), &outcome)
            .check(gets == 0, format!("{gets} GETs failed"))
            .check(
                others == 0,
                format!("POSTs: {in_flight} in flight at a killed agent failed, {others} others"),
            )
            .check(twice == 0, format!("{twice} POSTs twice at a backend")),
    ])
}

/// An agent is stopped for less time than the gateway waits until it cuts the tunnel.
pub(super) fn stop(site: &Site) -> Result<Vec<Row>, Failure> {
    const STOPPED: Duration = Duration::from_secs(12);
    const AVOIDED_AFTER: Duration = Duration::from_secs(3);
    const ANSWERED_WITHIN: Duration = Duration::from_secs(4);
    /// Latency that only requests at the stopped agent have.
    const LONG: Duration = Duration::from_secs(1);
    const SERVES_WITHIN: Duration = Duration::from_secs(60);
    let received = Received::default();
    let [stopped, other] = [
        received.backend(DELAY, "ok")?,
        received.backend(DELAY, "ok")?,
    ];
    let pool = site.pool(vec![Plan::new(&stopped.url), Plan::new(&other.url)])?;
    let calls = pool.call(CALLERS, None, Methods::Get)?;
    std::thread::sleep(AROUND);
    let began = Instant::now();
    pool.agents[0].signal(Signal::STOP);
    std::thread::sleep(STOPPED);
    pool.agents[0].signal(Signal::CONT);
    let continued = Instant::now();
    // Those that it held reach its backend at once.
    std::thread::sleep(LONG);
    let before = stopped.requests();
    while stopped.requests() < before + CALLERS as usize && continued.elapsed() < SERVES_WITHIN {
        std::thread::sleep(MOMENT);
    }
    let back = continued.elapsed();
    let outcome = calls.stop()?;
    let slowest = |from: Instant, to: Instant| {
        outcome
            .durations(from, to)
            .last()
            .copied()
            .unwrap_or_default()
    };
    let held = slowest(began - AROUND, began + AVOIDED_AFTER);
    let later = slowest(began + AVOIDED_AFTER, continued);
    let late = outcome
        .durations(began - AROUND, continued)
        .iter()
        .filter(|took| **took > LONG)
        .count();
    Ok(vec![
        Row::new(format!("stop, {CALLERS} callers"), &outcome)
            .check_no_failure(&outcome)
            .check(
                held <= ANSWERED_WITHIN,
                format!("{late} GETs held, the slowest {:.1} s", seconds(held)),
            )
            .check(
                later <= LONG,
                format!("slowest that began 3 s later {:.0} ms", millis(later)),
            )
            .check(
                back < SERVES_WITHIN,
                format!("serves again {:.0} s after it continued", seconds(back)),
            ),
    ])
}

/// The tunnel of the only agent is cut.
pub(super) fn cut(site: &Site) -> Result<Vec<Row>, Failure> {
    let received = Received::default();
    let backend = received.backend(DELAY, "ok")?;
    let wire = Wire::start(site.ports()[0])?;
    let pool = site.pool(vec![Plan {
        port: Some(wire.port),
        ..Plan::new(&backend.url)
    }])?;
    let calls = pool.call(CALLERS_OF_RATE, Some(RATE), Methods::GetAndPost)?;
    let mut cuts = Vec::new();
    for _ in 0..LOSSES {
        std::thread::sleep(AROUND);
        cuts.push(Instant::now());
        wire.cut();
    }
    std::thread::sleep(AROUND);
    let outcome = calls.stop()?;
    drop(pool);
    let (in_flight, others) = around(&outcome, &cuts);
    let began_after = |failed: &&Failed| {
        cuts.iter()
            .any(|cut| failed.began > *cut && failed.began <= *cut + MOMENT)
    };
    let began_after = outcome.failed.iter().filter(began_after).count();
    let (_, twice) = received.posts();
    Ok(vec![
        Row::new(format!("cut, {RATE} requests/s, {LOSSES} cuts"), &outcome)
            .check(
                others == 0,
                format!("{in_flight} in flight on the tunnel failed, {others} others"),
            )
            .note(format!(
                "{began_after} of them began in the {:.0} ms after the cut",
                millis(MOMENT)
            ))
            .check(
                outcome.sent_again == 0,
                format!("{} connections of callers ended", outcome.sent_again),
            )
            .check(twice == 0, format!("{twice} POSTs twice at a backend")),
    ])
}

/// Failed requests that were in flight at a loss, and others.
fn around(outcome: &Outcome, losses: &[Instant]) -> (usize, usize) {
    let in_flight = |failed: &&Failed| {
        losses
            .iter()
            .any(|at| failed.began <= *at + MOMENT && failed.ended >= *at)
    };
    let count = outcome.failed.iter().filter(in_flight).count();
    (count, outcome.failed.len() - count)
}
