//! Regions and faults of directed schedules.

use std::time::Duration;

use super::super::membership::Membership;
use super::schedule::{Fault, Schedule};
use super::world::World;
use crate::owners::lease::Isolation;

/// A region of hosts that start together, with these faults.
pub(super) fn region(hosts: usize, faults: &[(u64, Fault)]) -> World {
    region_with(Isolation::Serve, hosts, faults)
}

pub(super) fn region_with(isolation: Isolation, hosts: usize, faults: &[(u64, Fault)]) -> World {
    let faults = faults
        .iter()
        .map(|(millis, fault)| (Duration::from_millis(*millis), *fault));
    World::new(7, &Schedule::of(hosts, faults), isolation, false)
}

pub(super) fn started(hosts: usize, faults: &[(u64, Fault)]) -> World {
    let starts = (0..hosts).map(|host| (0, Fault::Start(host)));
    region(
        hosts,
        &starts.chain(faults.iter().copied()).collect::<Vec<_>>(),
    )
}

pub(super) fn run(world: &mut World, millis: u64) {
    world.run_until(Duration::from_millis(millis));
    assert_eq!(world.violation, None);
}

pub(super) fn admitted(world: &World) -> Vec<u32> {
    (0..world.hosts.len())
        .map(|host| world.admitted(host))
        .collect()
}

pub(super) fn machine(world: &World, host: usize) -> &Membership {
    &world.hosts[host].process.as_ref().unwrap().machine
}

pub(super) fn cut_engine(host: usize) -> Fault {
    Fault::CutEngine {
        host,
        requests: true,
        replies: true,
    }
}

pub(super) fn cut_peers(host: usize, hosts: usize) -> impl Iterator<Item = (u64, Fault)> {
    let peers = (0..hosts).filter(move |peer| *peer != host);
    peers
        .flat_map(move |peer| {
            [
                Fault::CutPeer {
                    from: host,
                    to: peer,
                },
                Fault::CutPeer {
                    from: peer,
                    to: host,
                },
            ]
        })
        .map(|fault| (5_000, fault))
}
