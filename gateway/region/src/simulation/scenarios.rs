//! Directed schedules, one for each event in the life of a region.

use std::time::{Duration, Instant};

use super::super::engine::{Call, CallResult, NodeState, Roster, Statement};
use super::super::membership::{Membership, MembershipAction, MembershipEvent, NodeConfig};
use super::super::status::Standing;
use super::engine::FakeEngine;
use super::schedule::{Fault, Schedule};
use super::setup::{admitted, cut_engine, cut_peers, machine, region, region_with, run, started};
use super::world::World;
use crate::owners::lease::Isolation;
use crate::owners::placement::NodeSlot;
use crate::timing::CALL_TIMEOUT;

const ALL: u32 = 0xff;

fn config() -> NodeConfig {
    NodeConfig {
        slot: NodeSlot::new(0),
        session: 1,
        peer_address: ([127, 0, 0, 1], 7000).into(),
        version: "1".into(),
        isolation: Isolation::Serve,
    }
}

#[test]
fn nodes_that_start_together_share_the_services() {
    let mut world = started(3, &[]);
    run(&mut world, 4_000);
    world.has_converged().unwrap();
    assert_eq!(
        admitted(&world).iter().sum::<u32>(),
        ALL,
        "each service has one owner"
    );
    assert_eq!(world.checks.handovers_without_levels, 0);
}

#[test]
fn a_joining_node_starts_with_the_levels_of_the_owners() {
    let mut world = region(
        3,
        &[
            (0, Fault::Start(0)),
            (0, Fault::Start(1)),
            (10_000, Fault::Start(2)),
        ],
    );
    run(&mut world, 9_999);
    let before = world.checks.handovers;
    run(&mut world, 13_000);
    world.has_converged().unwrap();
    assert!(world.checks.handovers > before);
    assert_eq!(world.checks.handovers_without_levels, 0);
}

#[test]
fn a_drained_node_hands_its_services_over_and_its_slot_is_freed() {
    let drain = (5_000, Fault::Drain { by: 1, host: 0 });
    let mut world = started(3, &[drain, (9_000, Fault::Remove { by: 1 })]);
    run(&mut world, 5_000);
    let before = world.checks.handovers;
    run(&mut world, 8_999);
    assert!(
        world.hosts[0].process.is_none(),
        "the drained node has stopped"
    );
    let row = world.engine.rows().find(|row| row.slot.get() == 0).unwrap();
    assert_eq!(row.state, NodeState::Left);
    world.has_converged().unwrap();
    assert!(world.checks.handovers > before);
    assert_eq!(
        (world.checks.handovers_without_levels, world.checks.deaths),
        (0, 0)
    );
    run(&mut world, 11_000);
    assert_eq!(world.engine.rows().count(), 2);
}

#[test]
fn the_last_node_can_leave() {
    let mut world = started(1, &[(5_000, Fault::Leave(0))]);
    run(&mut world, 8_000);
    assert!(world.hosts[0].process.is_none());
    assert_eq!(world.engine.rows().next().unwrap().state, NodeState::Left);
}

#[test]
fn a_crashed_node_is_declared_dead_within_seven_seconds() {
    // The observers have been running for longer than their first grace.
    let mut world = started(3, &[(15_000, Fault::Crash(2))]);
    run(&mut world, 22_000);
    assert_eq!(world.checks.deaths, 1);
    world.has_converged().unwrap();
}

#[test]
fn a_node_that_refuses_connections_is_declared_dead_at_once_and_rejoins_if_it_lives() {
    let mut world = started(3, &[(15_000, Fault::Refused { by: 0, host: 1 })]);
    run(&mut world, 15_000);
    let session = machine(&world, 1).session();
    run(&mut world, 15_500);
    assert_eq!(world.checks.deaths, 1);
    run(&mut world, 19_000);
    world.has_converged().unwrap();
    assert_eq!(machine(&world, 1).session(), session + 1);
}

#[test]
fn a_paused_node_admits_nothing_after_its_death() {
    let mut world = started(3, &[(15_000, Fault::Pause(1)), (24_000, Fault::Resume(1))]);
    run(&mut world, 23_000);
    assert_eq!(world.checks.deaths, 1);
    run(&mut world, 28_000);
    assert_eq!(world.checks.overlaps, 0);
    world.has_converged().unwrap();
}

#[test]
fn an_outage_of_the_engine_stops_nothing() {
    for outage in [Fault::EngineDown { loses_beats: true }, Fault::EngineHung] {
        let mut world = started(3, &[(15_000, outage), (55_000, Fault::EngineUp)]);
        run(&mut world, 15_000);
        let before = admitted(&world);
        for millis in (15_000..70_000).step_by(50) {
            run(&mut world, millis);
            assert_eq!(admitted(&world), before, "at {millis} ms");
        }
        assert_eq!(world.checks.deaths, 0);
        world.has_converged().unwrap();
    }
}

#[test]
fn no_node_is_declared_dead_soon_after_an_outage() {
    for outage in [Fault::EngineDown { loses_beats: false }, Fault::EngineHung] {
        for end in (25_000..26_000).step_by(50) {
            let faults = [
                (15_000, outage),
                (20_000, Fault::Pause(2)),
                (end, Fault::EngineUp),
            ];
            let mut world = started(3, &faults);
            run(&mut world, end + 9_650);
            assert_eq!(world.checks.deaths, 0, "{outage:?} until {end} ms");
            run(&mut world, end + 13_000);
            assert_eq!(world.checks.deaths, 1);
        }
    }
}

#[test]
fn an_isolated_node_serves_on_until_it_is_connected_again() {
    let mut faults: Vec<_> = (0..3)
        .map(|host| (0, Fault::Start(host)))
        .chain(cut_peers(1, 3))
        .collect();
    faults.extend([(15_000, cut_engine(1)), (40_000, Fault::HealEngine(1))]);
    let mut world = region(3, &faults);
    run(&mut world, 39_999);
    assert_ne!(world.admitted(1), 0);
    assert_eq!(
        machine(&world, 1)
            .status(world.clock(1), 0, [].into_iter())
            .standing,
        Standing::Isolated
    );
    assert!(world.checks.overlaps > 0, "others own its services by now");
    run(&mut world, 41_300);
    let overlaps = world.checks.overlaps;
    run(&mut world, 45_000);
    assert_eq!(world.checks.overlaps, overlaps);
    world.has_converged().unwrap();
}

#[test]
fn an_isolated_node_refuses_after_the_time_that_is_configured() {
    let mut faults: Vec<_> = (0..3)
        .map(|host| (0, Fault::Start(host)))
        .chain(cut_peers(1, 3))
        .collect();
    faults.push((15_000, cut_engine(1)));
    let isolation = Isolation::Refuse {
        max_staleness: Duration::from_secs(8),
    };
    let mut world = region_with(isolation, 3, &faults);
    run(&mut world, 21_500);
    assert_ne!(world.admitted(1), 0);
    run(&mut world, 23_500);
    assert_eq!(world.admitted(1), 0);
    assert_eq!(
        machine(&world, 1)
            .status(world.clock(1), 0, [].into_iter())
            .standing,
        Standing::Suspended
    );
}

#[test]
fn an_outage_of_the_engine_does_not_isolate_nodes_that_hear_each_other() {
    let mut faults: Vec<_> = (0..3).map(|host| (0, Fault::Start(host))).collect();
    faults.push((15_000, Fault::EngineDown { loses_beats: false }));
    let isolation = Isolation::Refuse {
        max_staleness: Duration::from_secs(3),
    };
    let mut world = region_with(isolation, 3, &faults);
    run(&mut world, 40_000);
    assert_eq!(
        admitted(&world)
            .iter()
            .fold(0, |all, services| all | services),
        ALL
    );
}

#[test]
fn a_node_without_the_engine_hears_of_its_death_from_peers() {
    let mut world = started(
        3,
        &[(15_000, cut_engine(1)), (30_000, Fault::HealEngine(1))],
    );
    run(&mut world, 25_000);
    assert_eq!(world.checks.deaths, 1);
    assert_eq!(world.admitted(1), 0);
    assert_eq!(
        machine(&world, 1).view().unwrap().epoch(),
        world.engine.epoch()
    );
    run(&mut world, 34_000);
    world.has_converged().unwrap();
}

#[test]
fn a_join_waits_for_a_paused_owner_until_its_death() {
    let faults = [
        (0, Fault::Start(0)),
        (0, Fault::Start(1)),
        (15_000, Fault::Pause(0)),
        (15_100, Fault::Start(2)),
    ];
    let mut world = region(3, &faults);
    run(&mut world, 18_500);
    let view = machine(&world, 2).view().unwrap();
    assert!(view.is_member() && view.is_moving(), "{view:?}");
    run(&mut world, 23_000);
    assert!(!machine(&world, 2).view().unwrap().is_moving());
}

#[test]
fn an_acknowledgment_reaches_nodes_through_the_engine_too() {
    let mut faults = vec![
        (0, Fault::Start(0)),
        (0, Fault::Start(1)),
        (10_000, Fault::Start(2)),
    ];
    faults.extend(cut_peers(0, 3));
    faults.extend(cut_peers(1, 3));
    let mut world = region(3, &faults);
    run(&mut world, 15_000);
    world.has_converged().unwrap();
    assert!(
        world.checks.handovers_without_levels > 0,
        "levels have no other way"
    );
}

#[test]
fn a_restarted_node_takes_its_slot_back() {
    let mut world = started(3, &[(15_000, Fault::Crash(0)), (15_050, Fault::Start(0))]);
    run(&mut world, 19_000);
    world.has_converged().unwrap();
    assert_eq!(world.engine.rows().count(), 3);
}

#[test]
fn a_process_whose_slot_was_taken_stops() {
    let schedule = Schedule {
        has_twin: true,
        ..Schedule::of(3, [].into_iter())
    };
    let mut world = World::new(7, &schedule, Isolation::Serve, false);
    for (millis, host) in [(0, 0), (0, 1), (10_000, 2)] {
        world.schedule(Duration::from_millis(millis), Fault::Start(host));
    }
    run(&mut world, 14_000);
    assert!(world.hosts[0].process.is_none());
    world.has_converged().unwrap();
}

#[test]
fn lost_replies_do_not_stop_a_join() {
    for millis in (0..3_000).step_by(50) {
        let cut = (
            5_000 + millis,
            Fault::CutEngine {
                host: 1,
                requests: false,
                replies: true,
            },
        );
        let mut world = region(
            2,
            &[
                (0, Fault::Start(0)),
                (5_000, Fault::Start(1)),
                cut,
                (10_000, Fault::HealEngine(1)),
            ],
        );
        run(&mut world, 15_000);
        world.has_converged().unwrap();
    }
}

#[test]
fn a_false_epoch_causes_few_calls() {
    let mut world = started(2, &[]);
    run(&mut world, 5_000);
    let before = world.calls;
    for millis in 5_000..6_000 {
        run(&mut world, millis);
        let clock = world.clock(0);
        world.hosts[0]
            .process
            .as_mut()
            .unwrap()
            .machine
            .on(clock, MembershipEvent::Hint { epoch: 1 << 60 });
        world.drive(0);
    }
    assert!(world.calls - before <= 40, "{} calls", world.calls - before);
    run(&mut world, 12_000);
    assert_eq!(
        machine(&world, 0)
            .status(world.clock(0), 0, [].into_iter())
            .standing,
        Standing::Member
    );
}

#[test]
fn a_hint_ends_static_stability() {
    let mut faults: Vec<_> = (0..3)
        .map(|host| (0, Fault::Start(host)))
        .chain(cut_peers(1, 3))
        .collect();
    faults.push((15_000, cut_engine(1)));
    let mut world = region(3, &faults);
    run(&mut world, 25_000);
    assert_ne!(world.admitted(1), 0);
    let clock = world.clock(1);
    let epoch = world.engine.epoch();
    world.hosts[1]
        .process
        .as_mut()
        .unwrap()
        .machine
        .on(clock, MembershipEvent::Hint { epoch });
    world.drive(1);
    assert_eq!(world.admitted(1), 0);
}

#[test]
fn a_refusal_is_forgotten_when_the_node_beats_on() {
    // The observer has just started, so a refusal alone is not enough.
    let mut world = started(3, &[(5_000, Fault::Refused { by: 0, host: 1 })]);
    run(&mut world, 30_000);
    assert_eq!(world.checks.deaths, 0);
}

#[test]
fn a_node_that_crashes_soon_after_the_start_of_the_observer_is_declared_dead() {
    let mut world = started(3, &[(4_000, Fault::Crash(2))]);
    run(&mut world, 8_500);
    assert_eq!(world.checks.deaths, 1);
}

#[test]
fn a_failure_before_a_pause_extends_nothing_after_it() {
    let cut = [
        (15_000, cut_engine(1)),
        (15_900, Fault::Pause(1)),
        (30_000, Fault::Resume(1)),
    ];
    let faults: Vec<_> = (0..3)
        .map(|host| (0, Fault::Start(host)))
        .chain(cut_peers(1, 3))
        .chain(cut)
        .collect();
    let mut world = region(3, &faults);
    run(&mut world, 30_000);
    assert_eq!(world.admitted(1), 0);
    run(&mut world, 32_500);
    assert_ne!(
        world.admitted(1),
        0,
        "a call that started after the pause has failed"
    );
}

/// The next call of a machine without a world.
fn next_call(machine: &mut Membership, now: Instant) -> Option<Call> {
    std::iter::from_fn(|| machine.poll(now)).find_map(|action| match action {
        MembershipAction::Call(call) => Some(call),
        _ => None,
    })
}

#[test]
fn late_results_are_ignored() {
    let start = Instant::now();
    let late = start + CALL_TIMEOUT;
    let mut machine = Membership::new(config(), start);
    let first = next_call(&mut machine, start).unwrap();
    let second = next_call(&mut machine, late).unwrap();
    let result = CallResult::Done {
        applied: false,
        roster: Roster {
            epoch: 0,
            rows: Vec::new(),
        },
    };
    machine.on(
        late,
        MembershipEvent::Result {
            call: first.id,
            result: result.clone(),
        },
    );
    assert_eq!(
        next_call(&mut machine, late),
        None,
        "the second call is outstanding"
    );
    machine.on(
        late,
        MembershipEvent::Result {
            call: second.id,
            result,
        },
    );
    let next = next_call(&mut machine, late).unwrap();
    assert!(matches!(next.statement, Statement::Join(_)), "{next:?}");
}

#[test]
fn an_engine_that_goes_back_is_not_followed() {
    let mut world = started(2, &[]);
    run(&mut world, 5_000);
    // An outstanding call times out first.
    let now = world.clock(0) + CALL_TIMEOUT;
    let machine = &mut world.hosts[0].process.as_mut().unwrap().machine;
    let epoch = machine.roster().epoch;
    let call = next_call(machine, now).unwrap();
    let result = CallResult::Done {
        applied: true,
        roster: Roster {
            epoch: epoch - 1,
            rows: Vec::new(),
        },
    };
    machine.on(
        now,
        MembershipEvent::Result {
            call: call.id,
            result,
        },
    );
    assert_eq!(machine.roster().epoch, epoch);
    assert!(machine.status(now, 0, [].into_iter()).engine_went_back);
    assert_eq!(machine.observer.good_for(now), None);
    assert_eq!(next_call(machine, now), None, "the call counts as failed");
}

#[test]
fn every_beat_has_another_number() {
    let mut now = Instant::now();
    let mut machine = Membership::new(config(), now);
    let mut engine = FakeEngine::new();
    let mut beats = Vec::new();
    while beats.len() < 4 {
        now += CALL_TIMEOUT;
        let Some(call) = next_call(&mut machine, now) else {
            continue;
        };
        if let Statement::Beat { beat, .. } = call.statement {
            // The call is lost: the machine does not know whether the engine has the beat.
            beats.push(beat);
            continue;
        }
        let applied = engine.execute(Duration::ZERO, &call.statement);
        let result = CallResult::Done {
            applied,
            roster: engine.roster(),
        };
        machine.on(
            now,
            MembershipEvent::Result {
                call: call.id,
                result,
            },
        );
    }
    assert_eq!(beats, [1, 2, 3, 4]);
}

/// Otherwise the node would be declared dead again and again: no beat is later than the number that
/// was written.
#[test]
fn a_false_beat_is_forgotten_with_its_session() {
    let mut now = Instant::now();
    let mut machine = Membership::new(config(), now);
    let mut engine = FakeEngine::new();
    let mut is_forged = false;
    let mut beats = Vec::new();
    for _ in 0..20 {
        now += CALL_TIMEOUT;
        let Some(call) = next_call(&mut machine, now) else {
            continue;
        };
        if let Statement::Beat { session, beat, .. } = call.statement {
            beats.push((session, beat));
        }
        let applied = engine.execute(Duration::ZERO, &call.statement);
        let mut roster = engine.roster();
        if applied && !is_forged && matches!(call.statement, Statement::Beat { .. }) {
            is_forged = true;
            roster.rows[0].beat = u64::MAX / 2;
            roster.rows[0].state = NodeState::Dead;
            engine = FakeEngine::new();
        }
        machine.on(
            now,
            MembershipEvent::Result {
                call: call.id,
                result: CallResult::Done { applied, roster },
            },
        );
    }
    let of_first = beats
        .iter()
        .filter(|(session, _)| *session == beats[0].0)
        .count();
    assert_eq!(of_first, 1, "{beats:?}");
    assert_eq!(beats[1].1, 1, "{beats:?}");
}

#[test]
fn requests_of_operators_are_checked() {
    let mut world = started(2, &[]);
    run(&mut world, 5_000);
    let machine = &mut world.hosts[0].process.as_mut().unwrap().machine;
    let slot = |slot| NodeSlot::new(slot).unwrap();
    assert!(machine.drain(slot(9)).is_err());
    assert!(machine.remove(slot(9)).is_err());
    assert!(machine.remove(slot(0)).is_err(), "it is live");
}

#[test]
fn the_status_counts_services() {
    let mut world = started(3, &[]);
    run(&mut world, 5_000);
    let services = world.services.clone();
    let status = machine(&world, 0).status(world.clock(0), 5, services.iter().map(String::as_str));
    assert_eq!(
        status
            .nodes
            .iter()
            .map(|node| node.services.unwrap())
            .sum::<usize>(),
        services.len()
    );
    assert!(
        status
            .nodes
            .iter()
            .all(|node| node.revision_lag == 5 && node.state == NodeState::Live),
        "{status:?}"
    );
    assert!(!status.is_moving);
}

#[test]
fn a_node_without_an_engine_owns_nothing() {
    let now = Instant::now();
    let machine = Membership::new(config(), now);
    assert_eq!(machine.admit_until(), None);
    assert_eq!(
        machine.status(now, 0, [].into_iter()).standing,
        Standing::Outside
    );
}
