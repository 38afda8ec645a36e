//! Slots, permits, connections and tasks.

use super::{Checked, violated};
use crate::world::World;

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
            ("connections", probe.connections),
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
        let running = gateway.running().into_iter().enumerate();
        running.map(move |(worker, running)| (format!("worker {process}.{worker}"), running))
    });
    workers
        .filter_map(|(name, worker)| worker.probe().map(|probe| (name, probe)))
        .collect()
}
