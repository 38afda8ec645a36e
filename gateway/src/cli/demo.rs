//! `gw-gateway demo`: starts a demo and prints how to reach it. Also the processes that a demo of
//! several nodes starts.

use std::io::{self, StdoutLock, Write};
use std::path::Path;

use gw_base::service::rate::Rate;
use gw_gateway::StartError;
use gw_gateway::demo::nodes::{self, NodesDemo, NodesError, NodesOptions};
use gw_gateway::demo::{Demo, DemoError, Options};
use gw_interface::config::workers_or_cores;
use gw_local_region::{User, become_program, end_with};
use gw_shared::command::Failure;
use gw_shared::config::Keys;
use gw_shared::process::core_dump;
use gw_shared::telemetry::logging::{self, LogFormat};
use gw_shared::telemetry::trace::CollectorSettings;
use rustix::process::Signal;
use serde::Serialize;

use super::arguments::{DemoArguments, DemoPart, PartArguments};

/// Runs the demo until a signal stops it.
pub(crate) fn run(arguments: DemoArguments) -> Result<(), Failure> {
    core_dump::allow(core_dumps_of_environment()?).map_err(Failure::run)?;
    logging::start(LogFormat::Text, tracing::Level::WARN);
    let rate = Rate::new(arguments.burst, arguments.refill_per_minute).ok_or_else(|| {
        Failure::Usage("--burst and --refill-per-minute must be at least 1".to_owned())
    })?;
    if let Some(nodes) = arguments.nodes {
        return run_nodes(nodes.into(), rate, arguments);
    }
    if arguments.store.is_some() {
        let message = "--store: only with --nodes, whose nodes share the database; a demo without \
                       --nodes has one gateway, which keeps its records in --data-dir";
        return Err(Failure::Usage(message.to_owned()));
    }
    let options = Options {
        port: arguments.port,
        admin_port: arguments.admin_port,
        backend: arguments.backend,
        host_header: arguments.host_header,
        data_dir: arguments.data_dir,
        workers: workers_or_cores(arguments.workers),
        rate,
        traces: traces_of_environment()?,
    };
    let demo = Demo::start(&options).map_err(|error| match error {
        DemoError::Agent(_) => Failure::Usage(error.to_string()),
        DemoError::Gateway(StartError::Listen(_)) => Failure::Run(format!(
            "{error}: --port for listen, --admin-port for admin_listen; 0 is a free one"
        )),
        _ => Failure::Run(error.to_string()),
    })?;
    print(arguments.json, &demo.about, |out| {
        demo.about.write_hints(out)
    })?;
    Ok(demo.run_until_stopped()?)
}

fn run_nodes(nodes: usize, rate: Rate, arguments: DemoArguments) -> Result<(), Failure> {
    let options = NodesOptions {
        parts: gw_local_region::Options {
            nodes,
            store: arguments.store,
            port: arguments.port,
            admin_port: arguments.admin_port,
            data_dir: arguments.data_dir,
        },
        backend: arguments.backend,
        host_header: arguments.host_header,
        workers: arguments.workers,
        rate,
    };
    let failed = |error| match error {
        NodesError::Usage(message) => Failure::Usage(message),
        error => Failure::run(error),
    };
    let demo = NodesDemo::start(&options).map_err(failed)?;
    print(arguments.json, &demo.about, |out| {
        demo.about.write_hints(out)
    })?;
    demo.run_until_stopped().map_err(failed)
}

/// Prints `about` as a line of JSON, or the hints.
fn print(
    as_json: bool,
    about: &impl Serialize,
    write_hints: impl FnOnce(&mut StdoutLock<'static>) -> io::Result<()>,
) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    let written = if as_json {
        serde_json::to_writer(&mut out, about)
            .map_err(io::Error::from)
            .and_then(|()| writeln!(out))
    } else {
        write_hints(&mut out)
    };
    written
        .and_then(|()| out.flush())
        .map_err(|error| Failure::Run(format!("standard output: {error}")))
}

/// Runs a process of a demo of several nodes. `serve` runs a node.
pub(crate) fn run_part(
    arguments: PartArguments,
    serve: impl FnOnce(&Path) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let PartArguments { parent, part } = arguments;
    match part {
        DemoPart::Node { config } => {
            end_with(parent, Signal::KILL).map_err(Failure::run)?;
            serve(&config)
        }
        DemoPart::Agent => {
            end_with(parent, Signal::KILL).map_err(Failure::run)?;
            logging::start(LogFormat::Text, tracing::Level::INFO);
            nodes::run_agent().map_err(Failure::run)
        }
        DemoPart::Program {
            user,
            group,
            program,
            arguments,
        } => {
            let user = user.zip(group).map(|(id, group)| User { id, group });
            let error = become_program(parent, user, &program, &arguments);
            Err(Failure::Run(format!(
                "cannot run {}: {error}",
                program.display()
            )))
        }
    }
}

/// Whether core dumps are allowed, from the environment: a demo has no configuration file.
fn core_dumps_of_environment() -> Result<bool, Failure> {
    let environment = |name: &str| std::env::var(name).ok();
    let mut keys =
        Keys::parse("", &environment).map_err(|errors| Failure::Usage(errors.to_string()))?;
    let are_allowed = core_dump::take(&mut keys);
    if keys.errors.is_empty() {
        Ok(are_allowed)
    } else {
        Err(Failure::Usage(keys.errors.join("; ")))
    }
}

/// Settings of the export of spans, likewise.
fn traces_of_environment() -> Result<Option<CollectorSettings>, Failure> {
    let mut errors = Vec::new();
    let settings =
        CollectorSettings::resolve(None, None, &|name| std::env::var(name).ok(), &mut errors);
    if errors.is_empty() {
        Ok(settings)
    } else {
        Err(Failure::Usage(errors.join("; ")))
    }
}
