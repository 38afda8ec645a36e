//! `gw-gateway demo`: starts a demo and prints how to reach it.

use std::io::{self, Write};

use gw_gateway::config::workers_or_cores;
use gw_gateway::demo::{Demo, DemoError, Options};
use gw_gateway::rate::Rate;
use gw_shared::telemetry::logging::{self, LogFormat};
use gw_shared::telemetry::trace::Settings;

use super::arguments::DemoArguments;
use gw_shared::command::Failure;

/// Runs the demo until a signal stops it.
pub(crate) fn run(arguments: DemoArguments) -> Result<(), Failure> {
    logging::start(LogFormat::Text, "warn");
    let rate = Rate::new(arguments.burst, arguments.refill_per_minute)
        .ok_or_else(|| Failure::Usage("--burst and --refill-per-minute must be at least 1".to_owned()))?;
    let options = Options {
        port: arguments.port,
        admin_port: arguments.admin_port,
        backend: arguments.backend,
        data_dir: arguments.data_dir,
        workers: workers_or_cores(arguments.workers),
        rate,
        traces: traces_of_environment()?,
        ..Options::default()
    };
    let demo = Demo::start(&options).map_err(|error| match error {
        DemoError::Agent(_) => Failure::Usage(error.to_string()),
        _ => Failure::Run(error.to_string()),
    })?;
    let mut out = io::stdout().lock();
    let written = if arguments.json {
        serde_json::to_writer(&mut out, &demo.about).map_err(io::Error::from).and_then(|()| writeln!(out))
    } else {
        demo.about.write_hints(&mut out)
    };
    written.and_then(|()| out.flush()).map_err(|error| Failure::Run(error.to_string()))?;
    drop(out);
    demo.run_until_stopped().map_err(|error| Failure::Run(error.to_string()))
}

/// Settings of the export of spans, from the environment: a demo has no configuration file.
fn traces_of_environment() -> Result<Option<Settings>, Failure> {
    let mut errors = Vec::new();
    let settings = Settings::resolve(None, None, &|name| std::env::var(name).ok(), &mut errors);
    if errors.is_empty() { Ok(settings) } else { Err(Failure::Usage(errors.join("; "))) }
}
