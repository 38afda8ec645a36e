//! System calls and sleeps of a request, of callers that send requests back to back. Counting
//! system calls slows them down, so this section measures no CPU time.

use std::path::Path;

use super::Bench;
use super::figures::{Case, Column, Sample, Work};
use super::load::{Generator, Load};
use super::programs::perf;
use super::requests::name_of;
use super::setups::{Kind, Setup};
use crate::failure::Failure;
use crate::report::say;

const KINDS: [Kind; 5] = [
    Kind::Gw,
    Kind::Haproxy,
    Kind::Nginx,
    Kind::Null,
    Kind::NullTls,
];

pub(super) fn run(bench: &Bench<'_>) -> Result<Vec<Case>, Failure> {
    let perf = match perf::find() {
        Ok(perf) => perf,
        Err(failure) => {
            say(format_args!("left out: {failure}"));
            return Ok(Vec::new());
        }
    };
    let mut cases = Vec::new();
    for (version, generator, setups) in [
        ("HTTP/1.1", Generator::http1()?, bench.start_all(&KINDS)?),
        (
            "HTTP/2",
            Generator::http2()?,
            bench.start_for_http2(&KINDS)?,
        ),
    ] {
        setups
            .iter()
            .try_for_each(|setup| generator.warm_up(setup))?;
        for callers in bench.options.callers.iter().copied() {
            let name = format!("{}, {version}", name_of(callers));
            let case = Case::new("calls", name, Work::Request, Column::Calls);
            cases.push(bench.compare(&setups, case, |setup| {
                measure(bench, &perf, &generator, setup, callers)
            })?);
        }
    }
    Ok(cases)
}

fn measure(
    bench: &Bench<'_>,
    perf: &Path,
    generator: &Generator,
    setup: &Setup,
    callers: u32,
) -> Result<Sample, Failure> {
    let count = perf::Count::begin(perf, &setup.pids())?;
    let sleeps = setup.sleeps()?;
    let outcome = generator.run(&Load {
        target: &setup.target,
        callers,
        seconds: bench.options.seconds,
    })?;
    let sleeps = setup.sleeps()?.saturating_sub(sleeps);
    let calls = count.end()?;
    let each = |number: u64| number as f64 / outcome.requests as f64;
    Ok(outcome
        .sample()
        .with(Column::Calls, each(calls))
        .with(Column::Sleeps, each(sleeps)))
}
