//! Limits of agents and addresses.

use super::resources::probes;
use super::{Checked, violated};
use crate::world::World;

/// An agent serves no more requests of a tunnel at once than it has slots.
pub(super) fn agents_keep_to_their_slots(world: &World) -> Checked {
    for agent in world.agents.borrow().iter() {
        let probe = agent.agent().and_then(|agent| agent.probe());
        for (hostname, service) in probe.into_iter().flatten() {
            for tunnel in &service.tunnels {
                if tunnel.slots_in_use > tunnel.slots {
                    return violated(
                        "an agent serves no more requests than it has slots",
                        format!("the agent of {hostname} has {tunnel:?}"),
                    );
                }
            }
        }
    }
    Ok(())
}

/// Once all is quiet, only tunnels count as connections of their addresses, at whichever worker of
/// a process.
pub(super) fn addresses_have_slots_of_tunnels_only(world: &World) -> Checked {
    // Tunnels that pass a node count there, too.
    if world.scenario.nodes > 1 {
        return Ok(());
    }
    let probes = probes(world);
    let process = |name: &str| name.split('.').next().unwrap_or_default().to_owned();
    for name in probes.iter().map(|(name, _)| process(name)) {
        let of_process = || probes.iter().filter(|(other, _)| process(other) == name);
        let slots: usize = of_process().map(|(_, probe)| probe.address_slots).sum();
        let tunnels: usize = of_process().map(|(_, probe)| probe.tunnels.len()).sum();
        if slots > tunnels {
            return violated(
                "addresses have slots for open connections only",
                format!("{name}: {slots} slots, {tunnels} tunnels"),
            );
        }
    }
    Ok(())
}
