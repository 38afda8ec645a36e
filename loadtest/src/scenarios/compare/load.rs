//! Closed loops of many callers: their load generators and results.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::figures::{Column, Sample, Work};
use super::programs::{h2load, wrk};
use super::setups::Setup;
use crate::client::Target;
use crate::failure::{Failure, ensure};
use crate::machine::process::Process;

/// Load generator.
pub(super) enum Generator {
    /// HTTP/1.1.
    Wrk(PathBuf),
    /// HTTP/2, or HTTP/1.1 with the service in the ClientHello.
    H2load { path: PathBuf, http1: bool },
}

/// Load of one run.
pub(super) struct Load<'a> {
    pub(super) target: &'a Target,
    pub(super) callers: u32,
    pub(super) seconds: u32,
}

/// Results of one run.
#[derive(Debug, PartialEq)]
pub(super) struct Outcome {
    pub(super) requests: u64,
    pub(super) per_second: f64,
    /// Median and 99th percentile, if the load generator reports them.
    pub(super) latency_ms: Option<(f64, f64)>,
    /// Responses other than 2xx and 3xx.
    pub(super) refused: u64,
    pub(super) socket_errors: u64,
}

/// Time beyond the run for connecting and printing the report.
const PATIENCE: Duration = Duration::from_secs(30);
const WARM_UP_SECONDS: u32 = 1;
const WARM_UP_CALLERS: u32 = 16;

impl Generator {
    pub(super) fn http1() -> Result<Self, Failure> {
        wrk::find().map(Self::Wrk)
    }

    pub(super) fn http2() -> Result<Self, Failure> {
        Ok(Self::H2load {
            path: h2load::find()?,
            http1: false,
        })
    }

    /// HTTP/1.1 callers whose connections a worker can hand over to the owner of the service.
    pub(super) fn http1_with_server_name() -> Result<Self, Failure> {
        Ok(Self::H2load {
            path: h2load::find()?,
            http1: true,
        })
    }

    pub(super) fn run(&self, load: &Load<'_>) -> Result<Outcome, Failure> {
        match self {
            Self::Wrk(path) => wrk::run(path, load),
            Self::H2load { path, http1 } => h2load::run(path, load, *http1),
        }
    }

    /// Fills pools and pages in code.
    pub(super) fn warm_up(&self, setup: &Setup) -> Result<(), Failure> {
        let load = Load {
            target: &setup.target,
            callers: WARM_UP_CALLERS,
            seconds: WARM_UP_SECONDS,
        };
        self.run(&load)
            .map_err(|failure| Failure::during(&setup.name, failure))?;
        Ok(())
    }

    /// Runs the load on a setup.
    pub(super) fn measure(
        &self,
        setup: &Setup,
        callers: u32,
        seconds: u32,
    ) -> Result<Sample, Failure> {
        let (outcome, cpu) = setup.spend(|target| {
            self.run(&Load {
                target,
                callers,
                seconds,
            })
        })?;
        let requests = outcome.requests as f64;
        Ok(outcome.sample().with_cpu(cpu, Work::Request, requests))
    }
}

impl Outcome {
    pub(super) fn sample(&self) -> Sample {
        let sample = Sample::default()
            .with_failures(self.refused + self.socket_errors)
            .with(Column::Rate, self.per_second);
        match self.latency_ms {
            Some((p50, p99)) => sample.with(Column::P50, p50).with(Column::P99, p99),
            None => sample,
        }
    }
}

/// Output of `command`, which runs for about `seconds`.
pub(super) fn output(
    name: &'static str,
    command: &mut Command,
    seconds: u32,
) -> Result<String, Failure> {
    finish(
        Process::spawn(name, command.stdin(Stdio::null()).stdout(Stdio::piped()))?,
        name,
        seconds,
    )
}

/// Output of a program that runs for about `seconds`.
pub(super) fn finish(
    mut process: Process,
    name: &'static str,
    seconds: u32,
) -> Result<String, Failure> {
    let status = process.wait(Duration::from_secs(seconds.into()) + PATIENCE)?;
    ensure(status.is_some_and(|status| status.success()), || {
        format!("{name} failed: {status:?}")
    })?;
    let mut text = String::new();
    process
        .take_stdout()
        .ok_or_else(|| Failure::new(format!("{name} has no output")))?
        .read_to_string(&mut text)?;
    Ok(text)
}
