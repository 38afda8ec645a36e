//! Slots, permits, connections and tasks.

use gw_simulated_kernel::sockets;

use super::{Checked, violated};
use crate::world::World;
use crate::world::processes::GatewayProcess;

/// A tunnel has no more requests in flight than its agent has slots.
pub(super) fn slots_bound_requests(world: &World) -> Checked {
    for (name, probe) in probes(world) {
        for tunnel in &probe.tunnels {
            if tunnel.streams_max > 0 && tunnel.open_streams > tunnel.streams_max {
                return violated(
                    "slots bound the requests in flight",
                    format!(
                        "{name}: {} streams of {} slots",
                        tunnel.open_streams, tunnel.streams_max
                    ),
                );
            }
        }
    }
    Ok(())
}

/// Some time after the last request, connections and streams, waits and handshakes are gone.
pub(super) fn nothing_is_held(world: &World) -> Checked {
    for (name, probe) in probes(world) {
        let held = [
            ("requests in flight", probe.requests_in_flight),
            ("requests of other workers", probe.crossings_served),
            // Those of other nodes and of tunnels that pass this one are kept.
            (
                "connections",
                probe.connections * usize::from(world.scenario.nodes == 1),
            ),
            ("handshakes", probe.handshakes),
            ("discards", probe.discards),
            ("waiting requests", probe.waiting.values().sum()),
            ("openings", probe.openings),
        ];
        for (what, number) in held {
            if number > 0 {
                return violated("all is given back", format!("{name} has {number} {what}"));
            }
        }
        for tunnel in &probe.tunnels {
            if tunnel.open_streams + tunnel.unread + tunnel.held > 0 {
                return violated(
                    "all is given back",
                    format!("{name} has a tunnel with {tunnel:?}"),
                );
            }
        }
    }
    for agent in world.agents.borrow().iter() {
        let probe = agent.agent().and_then(|agent| agent.probe());
        for (hostname, service) in probe.into_iter().flatten() {
            for tunnel in &service.tunnels {
                if tunnel.slots_in_use > 0 {
                    return violated(
                        "all is given back",
                        format!("the agent of {hostname} has {tunnel:?}"),
                    );
                }
            }
        }
    }
    Ok(())
}

/// Once all is quiet, the workers of a process have the sockets of its tunnels and no others. A
/// worker that has ended has no task. A tunnel may be with another worker than the one that
/// accepted it.
pub(super) fn only_tunnels_are_open(world: &World) -> Checked {
    if world.scenario.nodes > 1 {
        return Ok(());
    }
    for (process, gateway) in world.gateways.borrow().iter().enumerate() {
        let running = gateway.running();
        let open = gateway.open_connections();
        let mut tunnels = 0;
        for (number, host) in gateway.workers().iter().enumerate() {
            let probe = running.get(&number).and_then(|worker| worker.probe());
            tunnels += probe.as_ref().map_or(0, |probe| probe.tunnels.len());
            if probe.is_none() && host.tasks() > 0 {
                return violated(
                    "a worker that has ended has no tasks",
                    format!("worker {process}.{number} has {} tasks", host.tasks()),
                );
            }
        }
        if open != tunnels {
            return violated(
                "only tunnels are open",
                format!("process {process}: {open} connections, {tunnels} tunnels"),
            );
        }
    }
    Ok(())
}

/// Tasks of a tunnel, at most.
const TASKS_OF_TUNNEL: usize = 8;

/// Once all is quiet, a process has no more tasks than after its start, but for those of further
/// tunnels.
pub(super) fn tasks_end(world: &World) -> Checked {
    if world.scenario.nodes > 1 {
        return Ok(());
    }
    let (tasks_before, tunnels_before) = world.at_start.get();
    for (process, gateway) in world.gateways.borrow().iter().enumerate() {
        let (tasks, tunnels) = tasks_and_tunnels(gateway);
        let most = tasks_before + TASKS_OF_TUNNEL * tunnels.saturating_sub(tunnels_before);
        if tasks > most {
            let found = format!(
                "process {process} has {tasks} tasks and {tunnels} tunnels; {tasks_before} and \
                 {tunnels_before} at the start"
            );
            return violated("tasks end with their requests", found);
        }
    }
    Ok(())
}

/// Tasks and tunnels of the workers of a process.
pub(crate) fn tasks_and_tunnels(gateway: &GatewayProcess) -> (usize, usize) {
    let workers = gateway.workers();
    let probes = gateway.running().into_values();
    let tunnels = probes.filter_map(|worker| Some(worker.probe()?.tunnels.len()));
    let tasks = workers.iter().map(|host| host.tasks());
    (tasks.sum(), tunnels.sum())
}

/// Most bytes that one poll of a task of a worker moves: the buffers of two sockets of the
/// simulated kernel.
const BYTES_AT_ONCE: usize = 512 * 1024;
/// Most system calls on sockets that one poll of a task of a worker makes.
const CALLS_AT_ONCE: usize = 32;

/// No task of a worker holds up all others: one poll moves a bounded number of bytes, in a bounded
/// number of calls.
pub(super) fn polls_are_short(world: &World) -> Checked {
    for gateway in world.gateways.borrow().iter() {
        for host in gateway.workers() {
            let most = sockets::most_at_once(host);
            // A tunnel that passes a node has one task for both directions.
            let directions = world.scenario.nodes.min(2);
            let is_long = most.bytes > BYTES_AT_ONCE * directions;
            if is_long || most.calls > CALLS_AT_ONCE * directions {
                return violated(
                    "a task leaves time for others",
                    format!("{} did {most:?} in one poll", host.name()),
                );
            }
        }
    }
    Ok(())
}

/// No task of the product panicked.
pub(super) fn no_task_panicked() -> Checked {
    match gw_shared::runtime::contained_panics() {
        0 => Ok(()),
        panics => violated("no task panics", format!("{panics} tasks panicked")),
    }
}

pub(super) fn probes(world: &World) -> Vec<(String, gw_data_plane::support::simulation::Probe)> {
    let gateways = world.gateways.borrow();
    let workers = gateways.iter().enumerate().flat_map(|(process, gateway)| {
        let running = gateway.running().into_iter();
        running.map(move |(worker, running)| (format!("worker {process}.{worker}"), running))
    });
    workers
        .filter_map(|(name, worker)| worker.probe().map(|probe| (name, probe)))
        .collect()
}
