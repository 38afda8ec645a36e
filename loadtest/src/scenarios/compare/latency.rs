//! Latency of small requests: at a constant rate, and with a backend that writes head and body
//! apart.

use std::io::Write;

use super::figures::{Case, Column, Row, Sample, Work};
use super::load::{Generator, Load};
use super::open_loop::{self, Schedule};
use super::peers::ANSWER;
use super::setups::{Kind, Setup};
use super::{Bench, take_turns};
use crate::failure::Failure;
use crate::report::{median, millis, per_mille};
use crate::sink;

/// Callers whose closed loop gives the peak of a setup, and connections of the open loop.
const CALLERS: u32 = 64;
/// Part of its peak that the open loop sends to a setup.
const PART_OF_PEAK: f64 = 0.7;

fn kinds() -> Vec<Kind> {
    [&Kind::HTTP1[..], &[Kind::Direct]].concat()
}

pub(super) fn at_a_constant_rate(bench: &Bench<'_>) -> Result<Vec<Case>, Failure> {
    let generator = Generator::http1()?;
    let setups = bench.start_all(&kinds())?;
    setups
        .iter()
        .try_for_each(|setup| generator.warm_up(setup))?;
    let (rates, name) = match bench.options.rate {
        Some(rate) => (vec![rate; setups.len()], format!("{rate}/s")),
        None => (
            rates(bench, &generator, &setups)?,
            "70 % of its peak".to_owned(),
        ),
    };
    let subjects: Vec<(&Setup, Schedule)> = setups
        .iter()
        .zip(rates)
        .map(|(setup, rate)| (setup, Schedule::new(rate.max(1), bench.options.seconds)))
        .collect();
    let rounds = take_turns(bench.options.rounds, &subjects, |(setup, schedule)| {
        measure(setup, *schedule)
    })?;
    let rows = setups.iter().zip(rounds).map(|(setup, rounds)| Row {
        setup: setup.name.clone(),
        rounds,
    });
    let case = Case::new("latency", name, Work::Request, Column::P99);
    Ok(vec![case.with_rows(rows.collect())])
}

/// Requests per second for each setup: a part of those that it serves to as many callers as
/// connections of the open loop.
fn rates(bench: &Bench<'_>, generator: &Generator, setups: &[Setup]) -> Result<Vec<u64>, Failure> {
    let peaks = take_turns(bench.options.rounds, setups, |setup| {
        let load = Load {
            target: &setup.target,
            callers: CALLERS,
            seconds: bench.options.seconds,
        };
        Ok(generator.run(&load)?.per_second)
    })?;
    let rate = |peaks| (PART_OF_PEAK * median(peaks)) as u64;
    Ok(peaks.into_iter().map(rate).collect())
}

fn measure(setup: &Setup, schedule: Schedule) -> Result<Sample, Failure> {
    let (outcome, cpu) =
        setup.spend(|target| open_loop::run(target, CALLERS as usize, schedule))?;
    let percentile = |thousandths| millis(per_mille(&outcome.sorted, thousandths));
    Ok(Sample::default()
        .with_failures(outcome.refused)
        .with_cpu(cpu, Work::Request, schedule.requests as f64)
        .with(
            Column::Rate,
            schedule.requests as f64 / outcome.elapsed.as_secs_f64(),
        )
        .with(Column::P50, percentile(500))
        .with(Column::P99, percentile(990))
        .with(Column::P999, percentile(999)))
}

/// The backend writes head and body with two calls and without TCP_NODELAY, as Python's
/// `http.server` does, so that the kernel keeps the body back until the head is acknowledged.
pub(super) fn with_split_writes(bench: &Bench<'_>) -> Result<Vec<Case>, Failure> {
    let backend = sink::listen("split-writes", |_, length, socket| {
        if length > 0 {
            return Err(std::io::ErrorKind::Unsupported.into());
        }
        socket.write_all(
            format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n",
                ANSWER.len()
            )
            .as_bytes(),
        )?;
        socket.write_all(ANSWER.as_bytes())
    })?;
    let generator = Generator::http1()?;
    let setups = bench.start_all_before(&kinds(), backend.port())?;
    let case = Case::new("split-writes", "1 caller", Work::Request, Column::P50);
    Ok(vec![bench.compare(&setups, case, |setup| {
        // Without CPU time: there are too few requests for its resolution of 10 ms.
        let load = Load {
            target: &setup.target,
            callers: 1,
            seconds: bench.options.seconds,
        };
        Ok(generator.run(&load)?.sample())
    })?])
}
