//! gRPC servers of the C core (grpcio of PyPI), which end connections by age, and those with many
//! PINGs.

use std::process::Command;
use std::time::Instant;

use super::{Bench, Figures, Missed, program, start_with_url};
use crate::enrolled::output;
use crate::failure::{Failure, ensure};
use crate::machine::process::{self, Process};
use crate::scenarios::agents::site::Pool;

const PROGRAM: &str = "grpc_age.py";
const CALLERS: usize = 16;
const CALLS: usize = 24_000;
/// Connections of the agent that the server must have seen, so that the section has tried what it
/// is for.
const CONNECTIONS_MIN: usize = 5;

pub(super) fn aged(bench: &Bench) -> Figures {
    let (_server, pool) = start(bench, "aged")?;
    let began = Instant::now();
    let mut call = caller(bench, &pool, "call")?;
    let said = output(call.args([CALLERS, CALLS].map(|it| it.to_string())))?;
    let said = String::from_utf8_lossy(&said).into_owned();
    let numbers: Vec<usize> = said.split_whitespace().flat_map(str::parse).collect();
    let [failures, calls, again, connections] = numbers[..] else {
        return Err(Failure::new(format!("not four numbers: {said}")).into());
    };
    let figures = format!(
        "C core, connections of 700 ms: {CALLS} calls in {:.1} s over {connections} connections: \
         {failures} failures, {calls} at the server, {again} of them more than once",
        began.elapsed().as_secs_f64()
    );
    ensure(
        (failures, calls, again) == (0, CALLS, 0) && connections >= CONNECTIONS_MIN,
        || figures.clone(),
    )?;
    Ok(figures)
}

pub(super) fn silent(bench: &Bench) -> Figures {
    let (_server, pool) = start(bench, "unlimited")?;
    let seconds = bench.silent_seconds;
    let mut call = caller(bench, &pool, "silent")?;
    output(call.arg(seconds.to_string()))?;
    Ok(format!(
        "C core, a stream without a message for {seconds} s: goes on, no too_many_pings"
    ))
}

/// Starts a server, and an agent for it.
fn start<'a>(bench: &'a Bench, kind: &str) -> Result<(Process, Pool<'a>), Missed> {
    let mut command = process::command(&bench.python("grpc")?, &[])?;
    command.arg(program(PROGRAM)).args(["serve", kind]);
    let (server, url) = start_with_url("grpc_age.py", &mut command)?;
    Ok((server, bench.pool(&url)?))
}

fn caller(bench: &Bench, pool: &Pool<'_>, what: &str) -> Result<Command, Missed> {
    let target = pool.targets()?[0].clone();
    let mut call = Command::new(bench.python("grpc")?);
    call.arg(program(PROGRAM))
        .args([what, &target.port.to_string(), &target.host])
        .arg(bench.site.ca_file())
        .arg(&target.service_key);
    Ok(call)
}
