//! CPU time of new connections, with one request on each.

use std::time::Instant;

use super::Bench;
use super::figures::{Case, Column, Sample, Work};
use super::load::Generator;
use super::setups::{Kind, Setup};
use crate::client::Target;
use crate::failure::{Failure, ensure};
use crate::latency::joined;

/// Callers, each with one connection after the other.
const CALLERS: usize = 8;
const CONNECTIONS_PER_CALLER: usize = 250;

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
    let connections = (CALLERS * CONNECTIONS_PER_CALLER) as f64;
    let start = Instant::now();
    let ((), cpu) = setup.spend(connect_all)?;
    let seconds = start.elapsed().as_secs_f64();
    let sample = Sample::default().with_cpu(cpu, Work::Connection, connections);
    Ok(sample.with(Column::Rate, connections / seconds))
}

fn connect_all(target: &Target) -> Result<(), Failure> {
    let call = |caller: usize| {
        for _ in 0..CONNECTIONS_PER_CALLER {
            // Each caller has an address and thus ports of its own.
            let answer = target.connect_from(1 + caller)?.ask("/")?;
            ensure(answer.head.status == 200, || {
                format!("status {}", answer.head.status)
            })?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let callers = (0..CALLERS)
            .map(|caller| scope.spawn(move || call(caller)))
            .collect();
        joined(callers).collect()
    })
}
