//! CPU time per request of callers that send requests back to back.

use super::Bench;
use super::figures::{Case, Column, Work};
use super::load::Generator;
use super::setups::{Kind, Setup, product_with_workers};
use crate::demo::Demo;
use crate::failure::Failure;

const HTTP1: [Kind; 10] = [
    Kind::Gw,
    Kind::GwJwt,
    Kind::GwH2c,
    Kind::GwUnix,
    Kind::Haproxy,
    Kind::Nginx,
    Kind::Rathole,
    Kind::RatholeNoise,
    Kind::Null,
    Kind::NullTls,
];
/// Peers that speak HTTP/2 with callers.
const HTTP2: [Kind; 6] = [
    Kind::Gw,
    Kind::GwJwt,
    Kind::Haproxy,
    Kind::Nginx,
    Kind::Null,
    Kind::NullTls,
];
/// Callers of the product with several workers.
const CALLERS_OF_WORKERS: u32 = 64;

pub(super) fn http1(bench: &Bench<'_>) -> Result<Vec<Case>, Failure> {
    let callers = bench.options.callers.iter().copied();
    run(
        bench,
        "http1",
        &Generator::http1()?,
        &bench.start_all(&HTTP1)?,
        callers,
    )
}

pub(super) fn http2(bench: &Bench<'_>) -> Result<Vec<Case>, Failure> {
    let callers = bench
        .options
        .callers
        .iter()
        .copied()
        .filter(|callers| *callers > 1);
    let setups = bench.start_for_http2(&HTTP2)?;
    run(bench, "http2", &Generator::http2()?, &setups, callers)
}

/// One worker and two, both with two cores.
pub(super) fn workers(bench: &Bench<'_>) -> Result<Vec<Case>, Failure> {
    let start = |(name, workers)| {
        let options = product_with_workers(bench.site.backend_port(), workers);
        Ok(Setup::of_demo(name, Demo::start(bench.gateway, &options)?))
    };
    let setups = [(Kind::Gw.name(), 1), ("gw, 2 workers", 2)]
        .into_iter()
        .map(start);
    let setups = setups.collect::<Result<Vec<_>, Failure>>()?;
    let generators = [
        ("HTTP/1.1", Generator::http1_with_server_name()?),
        ("HTTP/2", Generator::http2()?),
    ];
    let case = |(version, generator): &(&str, Generator)| {
        setups
            .iter()
            .try_for_each(|setup| generator.warm_up(setup))?;
        let name = format!("{CALLERS_OF_WORKERS} callers, {version}");
        let case = Case::new("workers", name, Work::Request, Column::Cpu);
        bench.compare(&setups, case, |setup| {
            generator.measure(setup, CALLERS_OF_WORKERS, bench.options.seconds)
        })
    };
    generators.iter().map(case).collect()
}

fn run(
    bench: &Bench<'_>,
    section: &'static str,
    generator: &Generator,
    setups: &[Setup],
    callers: impl Iterator<Item = u32>,
) -> Result<Vec<Case>, Failure> {
    setups
        .iter()
        .try_for_each(|setup| generator.warm_up(setup))?;
    let case = |callers| {
        let case = Case::new(section, name_of(callers), Work::Request, Column::Cpu);
        bench.compare(setups, case, |setup| {
            generator.measure(setup, callers, bench.options.seconds)
        })
    };
    callers.map(case).collect()
}

pub(super) fn name_of(callers: u32) -> String {
    match callers {
        1 => "1 caller".to_owned(),
        callers => format!("{callers} callers"),
    }
}
