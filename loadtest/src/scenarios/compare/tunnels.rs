//! Idle tunnels: CPU time per request beside them, their memory in the gateway and that of an agent
//! with many.

use std::time::Duration;

use super::figures::{Case, Column, Row, Sample, Work};
use super::load::Generator;
use super::setups::{Kind, Setup, product};
use super::{Bench, LOAD_CORE};
use crate::agents::{self, Agent, Plan};
use crate::demo::Demo;
use crate::failure::Failure;
use crate::machine::procfs;

const ACCOUNT: &str = "demo";
/// Most services of one agent, a limit of enrollment tokens.
const SERVICES_PER_AGENT: usize = 500;
/// Tunnels of the agent whose memory is measured.
const TUNNELS_OF_AGENT: usize = 100;
const CALLERS: u32 = 64;

/// Time after which buffers of handshakes are released.
const SETTLES: Duration = Duration::from_secs(2);

pub(super) fn run(bench: &Bench<'_>) -> Result<Vec<Case>, Failure> {
    let count = bench.options.tunnels as usize;
    let generator = Generator::http1()?;
    let start = || Demo::start(bench.gateway, &product(bench.site.backend_port()));
    let few = start()?;
    let many = start()?;
    // Before the tunnels, so that the memory of services is not counted.
    let services = 0..TUNNELS_OF_AGENT + count;
    let services: Vec<String> = services.map(|it| format!("service-{it}")).collect();
    let created = services
        .iter()
        .try_for_each(|id| many.api.create_service(ACCOUNT, id));
    created?;
    let (of_agent, of_gateway) = services.split_at(TUNNELS_OF_AGENT);
    let agent = connect(bench, &many, of_agent)?;
    std::thread::sleep(SETTLES);
    let agent_memory = agent.proportional_memory()?;
    let before = procfs::proportional_memory(many.pid())?;
    let agents = of_gateway
        .chunks(SERVICES_PER_AGENT)
        .map(|services| connect(bench, &many, services));
    let _agents = agents.collect::<Result<Vec<_>, _>>()?;
    std::thread::sleep(SETTLES);
    let more = procfs::proportional_memory(many.pid())?.saturating_sub(before);

    let setups = [
        Setup::of_demo(Kind::Gw.name(), few),
        Setup::of_demo("gw, idle tunnels", many),
    ];
    setups
        .iter()
        .try_for_each(|setup| generator.warm_up(setup))?;
    let name = format!("1 and {} tunnels", 1 + services.len());
    let case = Case::new("tunnels", name, Work::Request, Column::Cpu);
    let requests = bench.compare(&setups, case, |setup| {
        generator.measure(setup, CALLERS, bench.options.seconds)
    })?;
    let memory = |name: String, bytes: f64| {
        let rounds = vec![Sample::default().with(Column::Bytes, bytes)];
        Case::new("tunnels", name, Work::Idle, Column::Bytes).with_rows(vec![Row {
            setup: Kind::Gw.name().to_owned(),
            rounds,
        }])
    };
    Ok(vec![
        requests,
        memory(
            "idle tunnel, gateway".to_owned(),
            more as f64 / count as f64,
        ),
        memory(
            format!("agent with {TUNNELS_OF_AGENT} tunnels"),
            agent_memory as f64,
        ),
    ])
}

fn connect(bench: &Bench<'_>, demo: &Demo, services: &[String]) -> Result<Agent, Failure> {
    let plan = Plan {
        cores: vec![LOAD_CORE],
        ..Plan::new(bench.site.backend_url())
    };
    agents::connect(bench.gateway, demo, ACCOUNT, services, plan)
}
