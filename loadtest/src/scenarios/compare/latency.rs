//! Latency of small requests: at a constant rate, and with a backend that writes head and body apart.

use std::io::Write;

use super::Bench;
use super::figures::{Case, Column, Sample, Work};
use super::load::{Generator, Load};
use super::open_loop::{self, Schedule};
use super::peers::ANSWER;
use super::setups::{Kind, Setup};
use crate::failure::Failure;
use crate::report::{median, millis, per_mille};
use crate::sink;

const KINDS: [Kind; 6] = [
    Kind::Gw,
    Kind::Haproxy,
    Kind::Nginx,
    Kind::Rathole,
    Kind::RatholeNoise,
    Kind::Direct,
];
/// Callers whose closed loop gives HAProxy's peak, and connections of the open loop.
const CALLERS: u32 = 64;
/// Part of the peak that the open loop sends.
const PART_OF_PEAK: f64 = 0.7;

pub(super) fn at_a_constant_rate(bench: &Bench<'_>) -> Result<Vec<Case>, Failure> {
    let generator = Generator::http1()?;
    let setups = bench.start_all(&KINDS)?;
    setups
        .iter()
        .try_for_each(|setup| generator.warm_up(setup))?;
    let (rate, name) = match bench.options.rate {
        Some(rate) => (rate, format!("{rate}/s")),
        None => {
            let peak = peak(bench, &generator, &setups)?;
            let rate = (PART_OF_PEAK * peak) as u64;
            (rate, format!("{rate}/s, 70 % of HAProxy's peak"))
        }
    };
    let schedule = Schedule::new(rate.max(1), bench.options.seconds);
    let case = Case::new("latency", name, Work::Request, Column::P99);
    Ok(vec![bench.compare(&setups, case, |setup| {
        measure(setup, schedule)
    })?])
}

/// Requests per second of HAProxy with as many callers as connections of the open loop.
fn peak(bench: &Bench<'_>, generator: &Generator, setups: &[Setup]) -> Result<f64, Failure> {
    let haproxy = setups
        .iter()
        .find(|setup| setup.name == Kind::Haproxy.name());
    let haproxy = haproxy
        .ok_or_else(|| Failure::new("the rate follows HAProxy's: give --rate, or leave it in"))?;
    let load = Load {
        target: &haproxy.target,
        callers: CALLERS,
        seconds: bench.options.seconds,
    };
    let runs = (0..bench.options.rounds).map(|_| Ok(generator.run(&load)?.per_second));
    Ok(median(runs.collect::<Result<Vec<f64>, Failure>>()?))
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

/// The backend writes head and body with two calls and without TCP_NODELAY, as Python's `http.server` does, so that the
/// kernel keeps the body back until the head is acknowledged.
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
    let setups = bench.start_all_before(&KINDS, backend.port())?;
    let case = Case::new("split-writes", "1 caller", Work::Request, Column::P50);
    Ok(vec![bench.compare(&setups, case, |setup| {
        generator.measure_latency(setup, 1, bench.options.seconds)
    })?])
}
