//! The rate limit admits exactly its burst and the tokens refilled meanwhile, on any number of
//! cores.

use std::path::Path;

use crate::demo::{Demo, Options};
use crate::failure::{Failure, ensure};
use crate::load;
use crate::report::say;

const CALLERS: usize = 64;
const REQUESTS: usize = 1500;
/// The product's defaults.
const BURST: usize = 1000;
const REFILL_PER_SECOND: f64 = 5.0;

pub(crate) fn run(gateway: &Path) -> Result<(), Failure> {
    let demo = Demo::start(
        gateway,
        &Options {
            rate: None,
            ..Options::default()
        },
    )?;
    let run = load::requests(&demo.target, CALLERS, REQUESTS, "/hello")?;
    let with_status = |status: u16| {
        run.answers
            .iter()
            .filter(move |(answer, _)| answer.head.status == status)
    };
    let passed = with_status(200).count();
    let limited = with_status(429).count();
    let elapsed = run.elapsed.as_secs_f64();
    // Tokens refill continuously, and this clock starts slightly after the product's last reading
    // of its own.
    let passed_max = BURST + (elapsed * REFILL_PER_SECOND).floor() as usize + 1;
    say(format_args!(
        "bucket: {passed} of {REQUESTS} requests passed and {limited} were limited, in \
         {elapsed:.2} s from {CALLERS} connections; {BURST} to {passed_max} should pass"
    ));

    let other = REQUESTS - passed - limited;
    ensure(other == 0, || {
        format!("{other} answers were neither 200 nor 429")
    })?;
    ensure((BURST..=passed_max).contains(&passed), || {
        format!("{passed} passed")
    })?;
    let waits: Vec<Option<u64>> = with_status(429)
        .map(|(answer, _)| answer.head.field("retry-after")?.parse().ok())
        .collect();
    let good = waits
        .iter()
        .flatten()
        .filter(|seconds| **seconds >= 1)
        .count();
    ensure(good == limited, || {
        format!(
            "{} times 429 without a Retry-After of 1 or more",
            limited - good
        )
    })?;
    let least = waits.iter().flatten().min();
    let most = waits.iter().flatten().max();
    if let (Some(least), Some(most)) = (least, most) {
        say(format_args!(
            "bucket: every 429 has Retry-After, {least} to {most} s"
        ));
    }
    demo.stop()
}
