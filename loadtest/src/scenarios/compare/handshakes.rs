//! CPU time of new connections, with one request on each.

use std::time::{Duration, Instant};

use super::Bench;
use super::figures::{Case, Column, Sample, Work};
use super::load::Generator;
use super::setups::{Kind, Setup};
use crate::callers::{Callers, Load, Methods};
use crate::client::Target;
use crate::failure::{Failure, wait_until};

/// Callers, each with one connection after the other.
const CALLERS: u32 = 8;
const CONNECTIONS: usize = 2000;
const CONNECTED_WITHIN: Duration = Duration::from_secs(120);

pub(super) fn run(bench: &Bench<'_>) -> Result<Vec<Case>, Failure> {
    let generator = Generator::http1()?;
    let setups = bench.start_all(&Kind::HTTP1)?;
    setups
        .iter()
        .try_for_each(|setup| generator.warm_up(setup))?;
    let case = Case::new(
        "handshakes",
        format!("{CALLERS} callers"),
        Work::Connection,
        Column::Cpu,
    );
    Ok(vec![bench.compare(&setups, case, measure)?])
}

fn measure(setup: &Setup) -> Result<Sample, Failure> {
    let start = Instant::now();
    let (connections, cpu) = setup.spend(connect_all)?;
    let seconds = start.elapsed().as_secs_f64();
    let sample = Sample::default().with_cpu(cpu, Work::Connection, connections);
    Ok(sample.with(Column::Rate, connections / seconds))
}

/// Makes connections with one request on each. Returns their number.
fn connect_all(target: &Target) -> Result<f64, Failure> {
    let callers = Callers::send(&Load {
        targets: vec![target.clone()],
        callers: CALLERS,
        rate: None,
        methods: Methods::Get,
        per_connection: 1,
    });
    let late = || "the connections take too long".to_owned();
    wait_until(CONNECTED_WITHIN, late, || Ok(callers.sent() >= CONNECTIONS))?;
    let outcome = callers.stop()?;
    match outcome.failed.first() {
        Some(failed) => Err(Failure::new(failed.what.to_string())),
        None => Ok(outcome.answered.len() as f64),
    }
}
