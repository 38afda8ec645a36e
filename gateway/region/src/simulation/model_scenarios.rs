//! Scenarios of records, connections and clocks. Each one runs on hosts in order, and on hosts with
//! the fault that its check is there to find.

use std::time::Duration;

use super::flaws::Flaws;
use super::schedule::Fault;
use super::setup::{cut_engine, cut_peers, region, run, started};
use super::world::World;

/// Seeds of random schedules among which one shows a flaw.
const SEEDS: u64 = 400;

fn with(mut world: World, flaws: Flaws, revocations: &[(u64, usize)]) -> World {
    world.flaws = flaws;
    revocations
        .iter()
        .for_each(|(millis, host)| world.revoke(Duration::from_millis(*millis), *host));
    world
}

/// What the checks find until then.
fn violation(mut world: World, millis: u64) -> String {
    world.run_until(Duration::from_millis(millis));
    world.violation.unwrap_or_default()
}

fn assert_finds(found: &str, expected: &str) {
    assert!(found.contains(expected), "{found:?}");
}

fn has_rejoined(later: &[(u64, Fault)]) -> World {
    let faults = [(15_000, Fault::Pause(1)), (24_000, Fault::Resume(1))];
    started(3, &[&faults, later].concat())
}

#[test]
fn a_node_that_has_rejoined_is_heard() {
    let mut world = has_rejoined(&[]);
    run(&mut world, 40_000);
    assert_eq!(world.checks.deaths, 1);
    let flaws = Flaws {
        keeps_connections: true,
        ..Flaws::default()
    };
    assert_finds(
        &violation(with(has_rejoined(&[]), flaws, &[]), 40_000),
        "refuses the messages of host 1",
    );
}

#[test]
fn a_node_that_has_rejoined_leaves_with_its_levels() {
    let rejoined = || has_rejoined(&[(25_000, Fault::Leave(1))]);
    run(&mut rejoined(), 30_000);
    let flaws = Flaws {
        keeps_connections: true,
        ..Flaws::default()
    };
    assert_finds(
        &violation(with(rejoined(), flaws, &[]), 30_000),
        "without levels",
    );
}

#[test]
fn a_node_that_was_paused_goes_on_with_its_levels() {
    let paused = || started(3, &[(15_000, Fault::Pause(1)), (19_700, Fault::Resume(1))]);
    let mut world = paused();
    run(&mut world, 25_000);
    assert_eq!(world.checks.deaths, 0);
    let flaws = Flaws {
        forgets_levels: true,
        ..Flaws::default()
    };
    assert_finds(
        &violation(with(paused(), flaws, &[]), 25_000),
        "more than one burst",
    );
}

fn with_wrong_clock(error: i64, until: u64) -> World {
    let wrong = [
        (0, Fault::Clock { host: 1, error }),
        (until, Fault::Clock { host: 1, error: 0 }),
    ];
    region(
        3,
        &[
            &wrong[..],
            &[
                (0, Fault::Start(0)),
                (0, Fault::Start(1)),
                (0, Fault::Start(2)),
            ],
        ]
        .concat(),
    )
}

#[test]
fn a_node_goes_live_once_its_clock_is_right() {
    for error in [-86_400, -3_600, 3_600, 86_400] {
        let mut world = with_wrong_clock(error, 10_000);
        run(&mut world, 9_999);
        assert_eq!(world.admitted(1), 0);
        run(&mut world, 14_000);
        world.has_converged().unwrap();
        let flaws = Flaws {
            ignores_clock: true,
            ..Flaws::default()
        };
        assert_finds(
            &violation(with(with_wrong_clock(error, 10_000), flaws, &[]), 9_999),
            "goes live with a wrong clock",
        );
    }
}

#[test]
fn a_clock_that_was_ahead_shuts_no_node_out() {
    // The clock steps while the node runs, and is right again when the node has taken its next
    // certificate.
    let stepped = || {
        let rejoin = [(15_000, Fault::Pause(1)), (24_000, Fault::Resume(1))];
        let step = |at, error| (at, Fault::Clock { host: 1, error });
        started(
            3,
            &[&rejoin[..], &[step(10_000, 3_600), step(28_000, 0)]].concat(),
        )
    };
    let mut world = stepped();
    run(&mut world, 40_000);
    world.has_converged().unwrap();
    let flaws = Flaws {
        certifies_by_own_clock: true,
        ..Flaws::default()
    };
    assert_finds(
        &violation(with(stepped(), flaws, &[]), 40_000),
        "refuses the messages of host 1",
    );
}

#[test]
fn only_a_node_of_the_same_history_acknowledges_a_change() {
    let changes = [(6_000, 0), (6_100, 0), (6_200, 0), (6_300, 0), (12_000, 0)];
    let failover = || {
        let outage = [
            (10_500, Fault::EngineDown { loses_beats: false }),
            (10_500, Fault::LoseChanges(3)),
        ];
        started(
            3,
            &[
                &[(10_000, cut_engine(1))],
                &outage[..],
                &[(11_000, Fault::EngineUp)],
            ]
            .concat(),
        )
    };
    let mut world = with(failover(), Flaws::default(), &changes);
    run(&mut world, 15_000);
    assert_ne!(world.admitted(1), 0, "the node without the engine serves");
    assert_eq!(world.revoked(), (5, 1), "it is named");
    let flaws = Flaws {
        compares_numbers: true,
        ..Flaws::default()
    };
    assert_finds(
        &violation(with(failover(), flaws, &changes), 15_000),
        "host 1 accepts the key",
    );
}

#[test]
fn a_node_that_starts_without_the_engine_has_all_that_it_acknowledged() {
    let crashed = || {
        let crash = [
            (10_050, Fault::EngineDown { loses_beats: false }),
            (10_100, Fault::Crash(1)),
        ];
        started(3, &[&crash[..], &[(10_500, Fault::StartAlone(1))]].concat())
    };
    let mut world = with(crashed(), Flaws::default(), &[(10_000, 0)]);
    run(&mut world, 20_000);
    assert_ne!(world.admitted(1), 0, "the node serves by its copy");
    assert_eq!(world.revoked(), (1, 0));
    let flaws = Flaws {
        forgets_journal: true,
        ..Flaws::default()
    };
    assert_finds(
        &violation(with(crashed(), flaws, &[(10_000, 0)]), 20_000),
        "host 1 accepts the key",
    );
}

#[test]
fn a_dead_node_that_serves_is_named() {
    let isolated = || {
        let starts = (0..3).map(|host| (0, Fault::Start(host)));
        region(
            3,
            &starts
                .chain(cut_peers(1, 3))
                .chain([(15_000, cut_engine(1))])
                .collect::<Vec<_>>(),
        )
    };
    let mut world = with(isolated(), Flaws::default(), &[(25_000, 0)]);
    run(&mut world, 40_000);
    assert_ne!(world.admitted(1), 0, "it serves beside the next owner");
    assert_eq!((world.checks.deaths, world.revoked()), (1, (1, 1)));
    let flaws = Flaws {
        omits_dead: true,
        ..Flaws::default()
    };
    assert_finds(
        &violation(with(isolated(), flaws, &[(25_000, 0)]), 40_000),
        "host 1 accepts the key",
    );
}

#[test]
fn a_change_is_answered_across_cuts_in_one_direction() {
    let cuts = [
        Fault::CutPeer { from: 0, to: 1 },
        Fault::CutPeer { from: 1, to: 0 },
        Fault::CutEngine {
            host: 1,
            requests: false,
            replies: true,
        },
        Fault::CutEngine {
            host: 1,
            requests: true,
            replies: false,
        },
    ];
    for cut in cuts {
        let mut world = with(started(3, &[(8_000, cut)]), Flaws::default(), &[(9_000, 0)]);
        run(&mut world, 12_000);
        assert_eq!(world.revoked(), (1, 1), "{cut:?}");
        let flaws = Flaws {
            waits_for_all: true,
            ..Flaws::default()
        };
        let found = violation(
            with(started(3, &[(8_000, cut)]), flaws, &[(9_000, 0)]),
            12_000,
        );
        assert_finds(&found, "change 1 is not answered");
    }
}

#[test]
fn requests_that_queued_in_a_freeze_are_checked_by_the_changes_after_it() {
    let frozen = || started(3, &[(15_000, Fault::Pause(1)), (18_000, Fault::Resume(1))]);
    let mut world = with(frozen(), Flaws::default(), &[(16_000, 0)]);
    run(&mut world, 25_000);
    assert_eq!(
        (world.checks.deaths, world.revoked()),
        (0, (1, 1)),
        "its lease held"
    );
    let flaws = Flaws {
        trusts_memory: true,
        ..Flaws::default()
    };
    assert_finds(
        &violation(with(frozen(), flaws, &[(16_000, 0)]), 25_000),
        "queued in a freeze",
    );
}

/// Host 1 goes on at the earlier primary, while a standby is promoted for the other two.
fn two_primaries(later: &[(u64, Fault)]) -> World {
    let promote = Fault::Promote {
        older: 0b010,
        reach: 0,
    };
    started(3, &[&[(15_000, promote)], later].concat())
}

#[test]
fn a_node_at_the_older_primary_stands_outside_until_it_stops() {
    let revocations = [(20_000, 1)];
    let mut world = with(
        two_primaries(&[(40_000, Fault::Demote)]),
        Flaws::default(),
        &revocations,
    );
    run(&mut world, 39_999);
    assert_eq!(world.admitted(1), 0, "the others own its services");
    assert_eq!(world.revoked(), (0, 0), "it makes no change");
    assert_eq!((world.checks.deaths, world.checks.overlaps), (1, 0));
    run(&mut world, 45_000);
    world.has_converged().unwrap();
    let flaws = flawed(|flaws| flaws.uses_first_primary = true);
    assert_finds(
        &violation(with(two_primaries(&[]), flaws, &revocations), 30_000),
        "uses the older primary",
    );
    let flaws = flawed(|flaws| flaws.tells_no_primary = true);
    assert_finds(
        &violation(with(two_primaries(&[]), flaws, &revocations), 30_000),
        "was told of the newer one",
    );
}

#[test]
fn members_of_a_newer_primary_have_later_epochs() {
    let cut = || {
        let later: Vec<_> = cut_peers(1, 3).map(|(_, fault)| (14_000, fault)).collect();
        let heal = [(40_000, Fault::Demote)];
        two_primaries(&[&later[..], &heal].concat())
    };
    let mut world = with(cut(), Flaws::default(), &[]);
    run(&mut world, 39_999);
    assert_ne!(world.admitted(1), 0, "it knows the older primary alone");
    assert!(world.checks.overlaps > 0);
    run(&mut world, 50_000);
    world.has_converged().unwrap();
    let flaws = flawed(|flaws| flaws.keeps_epochs = true);
    let mut world = with(cut(), flaws, &[]);
    world.run_until(Duration::from_millis(50_000));
    let found = world.violation.clone();
    let found = found.or_else(|| world.has_converged().err());
    assert_finds(&found.unwrap(), "epoch");
}

#[test]
fn a_newer_primary_that_no_node_has_used_is_followed() {
    // The epoch at the older one has gone on.
    let promote = Fault::Promote {
        older: 0b111,
        reach: 0,
    };
    let faults = [
        (15_000, promote),
        (16_000, Fault::Leave(2)),
        (20_000, Fault::Demote),
    ];
    let mut world = started(3, &faults);
    run(&mut world, 19_999);
    let older = world.older.as_ref().unwrap();
    assert!(older.engine.epoch() > world.engine.epoch());
    run(&mut world, 40_000);
    world.has_converged().unwrap();
    let flaws = flawed(|flaws| flaws.keeps_epochs = true);
    let mut world = with(started(3, &faults), flaws, &[]);
    world.run_until(Duration::from_millis(40_000));
    assert!(world.has_converged().unwrap_err().contains("is at epoch"));
}

fn flawed(add: impl FnOnce(&mut Flaws)) -> Flaws {
    let mut flaws = Flaws::default();
    add(&mut flaws);
    flaws
}

#[test]
fn random_schedules_find_each_flaw() {
    let flaws = [
        (
            flawed(|flaws| flaws.keeps_connections = true),
            "refuses the messages",
        ),
        (
            flawed(|flaws| {
                flaws.certifies_by_own_clock = true;
                flaws.ignores_clock = true;
            }),
            "refuses the messages",
        ),
        (
            flawed(|flaws| flaws.forgets_levels = true),
            "more than one burst",
        ),
        (flawed(|flaws| flaws.ignores_clock = true), "wrong clock"),
        (
            flawed(|flaws| flaws.compares_numbers = true),
            "accepts the key",
        ),
        (
            flawed(|flaws| flaws.forgets_journal = true),
            "accepts the key",
        ),
        (flawed(|flaws| flaws.omits_dead = true), "accepts the key"),
        (
            flawed(|flaws| flaws.waits_for_all = true),
            "is not answered",
        ),
        (
            flawed(|flaws| flaws.trusts_memory = true),
            "queued in a freeze",
        ),
        (
            flawed(|flaws| flaws.uses_first_primary = true),
            "uses the older primary",
        ),
        (
            flawed(|flaws| flaws.tells_no_primary = true),
            "was told of the newer one",
        ),
        (flawed(|flaws| flaws.keeps_epochs = true), "epoch"),
    ];
    for (flaws, expected) in flaws {
        let finds =
            |seed| super::run(seed, flaws, false).is_err_and(|found| found.contains(expected));
        assert!((1..=SEEDS).any(finds), "{flaws:?}");
    }
}
