//! Faults of machines, processes and paths, and acts of administrators.

use std::rc::Rc;
use std::time::Duration;

use gw_base::service::rate::Rate;
use gw_data_plane::worker::WorkerMessage;
use gw_shared::identity::enrollment::EnrollmentStatus;
use gw_shared::runtime;
use gw_simulated_kernel::{clock, network, trace};

use super::processes::GatewayProcess;
use super::{Happened, World, gateway_machine, machine};
use crate::product::{SetupError, takeover};
use crate::scenario::FaultKind;

/// Longest drain of a process with a successor.
const DRAIN: Duration = Duration::from_secs(30);

/// Lets a fault happen, and returns once it is over.
pub(crate) async fn happen(world: &Rc<World>, fault: FaultKind) {
    trace::line(|line| line.push_str(&format!("{fault:?}")));
    let number = {
        let mut happened = world.happened.borrow_mut();
        happened.push(Happened {
            fault,
            began: clock::now().unwrap_or(0),
            ended: None,
        });
        happened.len() - 1
    };
    if let Err(error) = try_happen(world, fault).await {
        // A fault that cannot happen would make the simulation check less than it says.
        panic!("{fault:?}: {error}");
    }
    world.happened.borrow_mut()[number].ended = clock::now();
    trace::line(|line| line.push_str(&format!("{fault:?} is over")));
}

async fn try_happen(world: &Rc<World>, fault: FaultKind) -> Result<(), SetupError> {
    match fault {
        FaultKind::KillAgent { agent, back_after } => {
            world.agents.borrow()[agent].kill();
            runtime::sleep(back_after).await;
            restart_agent(world, agent)?;
        }
        FaultKind::FreezeAgent { agent, lasts } => {
            let host = world.agents.borrow()[agent].host();
            if let Some(host) = host {
                host.freeze(true);
                runtime::sleep(lasts).await;
                host.freeze(false);
            }
        }
        FaultKind::CopyAgent { agent, lasts } => {
            let copy = world.agents.borrow()[agent].copy(world)?;
            copy.start_at(world, machine(4, agent), "copy")?;
            runtime::sleep(lasts).await;
            copy.kill();
        }
        FaultKind::DrainAgent { agent, back_after } => {
            drain_agent(world, agent).await;
            runtime::sleep(back_after).await;
            restart_agent(world, agent)?;
        }
        FaultKind::CutAgent { agent, lasts } => {
            let (agent, gateway) = (machine(2, agent), gateway_machine());
            network::cut(agent, gateway, true);
            runtime::sleep(lasts).await;
            network::cut(agent, gateway, false);
        }
        FaultKind::CutBackend { agent, lasts } => {
            let (agent, backend) = (machine(2, agent), machine(3, agent));
            network::cut(agent, backend, true);
            runtime::sleep(lasts).await;
            network::cut(agent, backend, false);
        }
        FaultKind::KillBackend { agent, back_after } => {
            let host = world.backends.borrow()[agent];
            host.kill();
            runtime::sleep(back_after).await;
            let is_started = !world.backends.borrow()[agent].is_dead();
            if !is_started {
                let backend = world.start_backend(agent)?;
                world.backends.borrow_mut()[agent] = backend;
            }
        }
        FaultKind::CutCaller { caller, lasts } => {
            let (caller, gateway) = (machine(1, caller), gateway_machine());
            network::cut(caller, gateway, true);
            runtime::sleep(lasts).await;
            network::cut(caller, gateway, false);
        }
        FaultKind::FreezeWorker { worker, lasts } => {
            let gateway = world.serving(world.scenario.faulty_node());
            if let Some(gateway) = gateway {
                let host = gateway.workers()[worker];
                host.freeze(true);
                runtime::sleep(lasts).await;
                host.freeze(false);
            }
        }
        FaultKind::DisableKey { service, lasts } => disable_key(world, service, lasts).await?,
        FaultKind::RevokeAgent { agent, lasts } => {
            if is_revoked_twice(world, agent) {
                return Ok(());
            }
            let id = world.agent_plan(agent).id()?;
            let set = |status| {
                let mut region = world.region.borrow_mut();
                region.change_agent(&id, |record| record.status = status)
            };
            set(EnrollmentStatus::Revoked)?;
            publish(world);
            runtime::sleep(lasts).await;
            set(EnrollmentStatus::Approved)?;
            publish(world);
        }
        FaultKind::ChangeRate { service, burst } => {
            let path = world.services[service].path.clone();
            world
                .region
                .borrow_mut()
                .change_service(&path, |settings| {
                    let per_minute = settings.rate.refill_per_minute.get();
                    settings.rate = Rate::new(burst, per_minute).unwrap_or(settings.rate);
                })?;
            publish(world);
        }
        FaultKind::TakeOver => take_over(world).await?,
        FaultKind::PanicWorker { worker } => {
            let gateway = world.serving(world.scenario.faulty_node());
            if let Some(gateway) = gateway.filter(|gateway| !gateway.is_dead()) {
                gateway.panic_worker(world, worker)?;
            }
        }
        FaultKind::KillGateway { back_after } => {
            let gateway = world.serving(world.scenario.faulty_node());
            if let Some(gateway) = gateway.filter(|gateway| !gateway.is_dead()) {
                gateway.kill();
                lose_node(world, gateway.node)?;
                runtime::sleep(back_after).await;
                world.nodes.borrow_mut().change(gateway.node, true, false);
                GatewayProcess::start(world, gateway.node, None)?;
                publish_views(world);
            }
        }
        FaultKind::CutNodes { one, other, lasts } => {
            let (one, other) = (machine(5, one), machine(5, other));
            network::cut(one, other, true);
            runtime::sleep(lasts).await;
            network::cut(one, other, false);
        }
        FaultKind::LeaveNode { node, back_after } => {
            let set = |is_member| {
                world.nodes.borrow_mut().change(node, is_member, false);
                publish_views(world);
            };
            set(false);
            runtime::sleep(back_after).await;
            set(true);
        }
        FaultKind::JumpClock { by, forward } => clock::jump_wall_clock(by, forward),
    }
    Ok(())
}

/// Whether another fault has revoked the agent, which then ends the revocation.
fn is_revoked_twice(world: &World, agent: usize) -> bool {
    let happened = world.happened.borrow();
    let revocations = happened.iter().filter(|one| {
        let is_of_agent =
            |fault| matches!(fault, FaultKind::RevokeAgent { agent: of, .. } if of == agent);
        one.ended.is_none() && is_of_agent(one.fault)
    });
    revocations.count() > 1
}

fn restart_agent(world: &Rc<World>, agent: usize) -> Result<(), SetupError> {
    let agents = world.agents.borrow();
    // Two faults may have ended it.
    if agents[agent].host().is_none() {
        agents[agent].start(world)?;
    }
    Ok(())
}

async fn drain_agent(world: &Rc<World>, agent: usize) {
    let agent = Rc::clone(&world.agents.borrow()[agent]);
    agent.drain().await;
}

fn publish(world: &World) {
    let region = world.region.borrow();
    let gateways = world.gateways.borrow();
    for gateway in gateways.iter().filter(|gateway| !gateway.is_dead()) {
        gateway.gateway.publisher().publish(&region);
    }
}

/// Publishes the members of the region to the process of each node that serves.
fn publish_views(world: &World) {
    let serving = (0..world.scenario.nodes).filter_map(|node| world.serving(node));
    for gateway in serving.filter(|gateway| !gateway.is_dead()) {
        let nodes = world.nodes.borrow();
        nodes.publish(gateway.node, gateway.gateway.publisher());
    }
}

/// The process of a node has ended, and refuses connections: the others declare it dead.
fn lose_node(world: &World, node: usize) -> Result<(), SetupError> {
    let lost = world.nodes.borrow_mut().change(node, false, true);
    publish_views(world);
    for other in (0..world.scenario.nodes).filter(|other| *other != node) {
        if let Some(gateway) = world.serving(other) {
            let publisher = gateway.gateway.publisher();
            publisher.tell_all(|| WorkerMessage::NodeLost(lost))?;
        }
    }
    Ok(())
}

async fn disable_key(world: &World, service: usize, lasts: Duration) -> Result<(), SetupError> {
    let is_disabled = |(of, _, until): &(usize, _, Option<_>)| *of == service && until.is_none();
    if world.disabled.borrow().iter().any(is_disabled) {
        return Ok(());
    }
    let key = world.services[service].key_id.clone();
    world.region.borrow_mut().enable_key(&key, false)?;
    publish(world);
    let now = clock::now().unwrap_or(0);
    let number = {
        let mut disabled = world.disabled.borrow_mut();
        disabled.push((service, now, None));
        disabled.len() - 1
    };
    runtime::sleep(lasts).await;
    world.disabled.borrow_mut()[number].2 = clock::now();
    world.region.borrow_mut().enable_key(&key, true)?;
    publish(world);
    Ok(())
}

async fn take_over(world: &Rc<World>) -> Result<(), SetupError> {
    let predecessor = world.serving(world.scenario.faulty_node());
    let Some(predecessor) = predecessor.filter(|gateway| !gateway.is_dead()) else {
        return Ok(());
    };
    // A gateway refuses a second successor until its predecessor has ended.
    if world.is_taken_over.replace(true) {
        return Ok(());
    }
    let publisher = predecessor.gateway.publisher();
    let tunnels = takeover::live_tunnels(publisher).await?;
    let successor = GatewayProcess::start(world, predecessor.node, Some(tunnels))?;
    let (from, to) = (predecessor.workers(), successor.workers());
    let taking = takeover::take_over((publisher, &from), (successor.gateway.publisher(), &to));
    let admitting = taking.await?;
    runtime::spawn(async move {
        // Ends with the predecessor.
        drop(admitting.await);
    });
    takeover::drain(publisher, true, DRAIN).await?;
    world.is_taken_over.set(false);
    Ok(())
}
