use std::collections::BTreeMap;

use gw_region::random::Random;

use super::*;

#[derive(Debug, Clone, Copy)]
struct Tunnel {
    tier: HealthTier,
    is_standby: bool,
    in_flight: usize,
    slots: usize,
    millis: u64,
    key: u64,
}

impl Candidate for Tunnel {
    fn tier(&self, _: bool, _: Instant) -> HealthTier {
        self.tier
    }

    fn is_standby(&self) -> bool {
        self.is_standby
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn slots(&self) -> usize {
        self.slots
    }

    fn latency(&self, _: Instant) -> Duration {
        Duration::from_millis(self.millis)
    }

    fn key(&self) -> u64 {
        self.key
    }
}

const READY: Tunnel = Tunnel {
    tier: HealthTier::Ready,
    is_standby: false,
    in_flight: 0,
    slots: 128,
    millis: 10,
    key: 0,
};
const STANDBY: Tunnel = Tunnel {
    is_standby: true,
    ..READY
};
const PROBE: Tunnel = Tunnel {
    tier: HealthTier::Probe,
    ..READY
};
const IMPAIRED: Tunnel = Tunnel {
    tier: HealthTier::Impaired,
    ..READY
};
const FIRST: Wanted = Wanted {
    session: None,
    is_first: true,
    is_repeatable: true,
};
const LATER: Wanted = Wanted {
    is_first: false,
    ..FIRST
};

fn full(tunnel: Tunnel) -> Tunnel {
    Tunnel {
        in_flight: tunnel.slots,
        ..tunnel
    }
}

/// Number of times that each candidate is chosen in 1,000 choices.
fn shares(candidates: &[Tunnel], wanted: Wanted) -> Vec<usize> {
    let mut random = Random::new(7);
    let now = Instant::now();
    let mut shares = vec![0; candidates.len()];
    for _ in 0..1000 {
        match choose(candidates, |_| true, wanted, now, &mut || random.unit()) {
            Choice::Tunnel(index) => shares[index] += 1,
            none => panic!("{none:?}: {candidates:?}"),
        }
    }
    shares
}

fn outcome(candidates: &[Tunnel], wanted: Wanted) -> Choice {
    choose(candidates, |_| true, wanted, Instant::now(), &mut || 0.0)
}

#[test]
fn the_best_class_with_a_free_slot_takes_the_request() {
    let classes = [
        READY,
        STANDBY,
        PROBE,
        Tunnel {
            is_standby: true,
            ..PROBE
        },
    ];
    for best in 0..classes.len() {
        let mut candidates = classes;
        candidates[..best]
            .iter_mut()
            .for_each(|tunnel| *tunnel = full(*tunnel));
        candidates.reverse();
        assert_eq!(
            outcome(&candidates, LATER),
            Choice::Tunnel(candidates.len() - 1 - best)
        );
    }
    let impaired_standby = Tunnel {
        is_standby: true,
        ..IMPAIRED
    };
    assert_eq!(
        outcome(&[impaired_standby, IMPAIRED], LATER),
        Choice::Tunnel(1)
    );
    assert_eq!(
        outcome(&[impaired_standby, full(IMPAIRED)], LATER),
        Choice::Tunnel(0)
    );
}

#[test]
fn an_impaired_candidate_is_no_spare_room_of_full_ones() {
    for other in [READY, STANDBY, PROBE] {
        assert_eq!(outcome(&[IMPAIRED, full(other)], FIRST), Choice::Full);
        assert_eq!(outcome(&[IMPAIRED, other], LATER), Choice::Tunnel(1));
    }
    assert_eq!(
        outcome(&[IMPAIRED], FIRST),
        Choice::Tunnel(0),
        "a service is never closed by its own health"
    );
    assert_eq!(outcome(&[full(IMPAIRED)], FIRST), Choice::Full);
    assert_eq!(outcome(&[], FIRST), Choice::NoCandidate);
    let none = choose(&[READY], |_| false, FIRST, Instant::now(), &mut || 0.0);
    assert_eq!(none, Choice::NoCandidate);
}

#[test]
fn candidates_that_may_not_take_the_request_are_left_out() {
    let candidates = [READY, READY, Tunnel { key: 1, ..READY }];
    let mut random = Random::new(1);
    for wanted in [
        FIRST,
        LATER,
        Wanted {
            session: Some(3),
            ..FIRST
        },
    ] {
        let now = Instant::now();
        for _ in 0..100 {
            let chosen = choose(
                &candidates,
                |tunnel| tunnel.key == 1,
                wanted,
                now,
                &mut || random.unit(),
            );
            assert_eq!(chosen, Choice::Tunnel(2));
        }
    }
}

#[test]
fn the_less_loaded_of_two_random_candidates_is_chosen() {
    let equal = shares(&[READY; 4], FIRST);
    assert!(
        equal.iter().all(|share| (200..300).contains(share)),
        "{equal:?}"
    );
    let slow = Tunnel {
        millis: 30,
        ..READY
    };
    assert_eq!(shares(&[slow, READY], FIRST), [0, 1000]);
    let busy = |in_flight| Tunnel { in_flight, ..READY };
    assert_eq!(
        shares(&[slow, busy(3)], FIRST),
        [1000, 0],
        "30 × 1 is less than 10 × 4"
    );
    assert_eq!(shares(&[slow, busy(1)], FIRST), [0, 1000]);
    let three = shares(&[slow, READY, READY], FIRST);
    assert!(
        three[0] == 0 && three[1] > 400 && three[2] > 400,
        "{three:?}"
    );
    assert_eq!(
        shares(&[full(READY), slow], FIRST),
        [0, 1000],
        "only candidates with free slots are compared"
    );
    let unmeasured = |in_flight| Tunnel {
        millis: 0,
        in_flight,
        ..READY
    };
    assert_eq!(
        shares(&[unmeasured(1), unmeasured(0)], FIRST),
        [0, 1000],
        "without latencies the load decides"
    );
}

#[test]
fn a_due_probe_is_a_first_attempt() {
    assert_eq!(outcome(&[READY, PROBE], FIRST), Choice::Tunnel(1));
    assert_eq!(outcome(&[READY, PROBE], LATER), Choice::Tunnel(0));
    assert_eq!(outcome(&[READY, full(PROBE)], FIRST), Choice::Tunnel(0));
    let standby = Tunnel {
        is_standby: true,
        ..PROBE
    };
    assert_eq!(
        outcome(&[READY, standby], FIRST),
        Choice::Tunnel(0),
        "a standby is probed when it is needed"
    );
    assert_eq!(outcome(&[IMPAIRED, standby], FIRST), Choice::Tunnel(1));
}

fn four() -> [Tunnel; 4] {
    ["ag_1", "ag_2", "ag_3", "ag_4"].map(|id| Tunnel {
        key: ownership::fnv1a(id.as_bytes()),
        ..READY
    })
}

fn sessions(candidates: &[Tunnel], removed: Option<u64>) -> BTreeMap<u64, u64> {
    let now = Instant::now();
    let of = |session: u64| {
        let wanted = Wanted {
            session: Some(ownership::fnv1a(&session.to_le_bytes())),
            ..FIRST
        };
        let may_take = |tunnel: &Tunnel| Some(tunnel.key) != removed;
        match choose(candidates, may_take, wanted, now, &mut || 0.0) {
            Choice::Tunnel(index) => candidates[index].key,
            none => panic!("{none:?}"),
        }
    };
    (0..1000).map(|session| (session, of(session))).collect()
}

#[test]
fn the_loss_of_an_agent_moves_only_its_own_sessions() {
    let mut candidates = four();
    let before = sessions(&candidates, None);
    for lost in candidates {
        let own = before.values().filter(|key| **key == lost.key).count();
        assert!((200..300).contains(&own), "{own}");
        let after = sessions(&candidates, Some(lost.key));
        for (session, key) in &before {
            assert_eq!(after[session] == *key, *key != lost.key);
        }
        let mut taken_over = BTreeMap::new();
        after
            .iter()
            .filter(|(session, _)| before[session] == lost.key)
            .for_each(|(_, key)| {
                *taken_over.entry(*key).or_insert(0) += 1;
            });
        assert!(
            taken_over.len() == 3 && taken_over.values().all(|count| *count > 40),
            "spread: {taken_over:?}"
        );
    }
    candidates.reverse();
    assert_eq!(
        sessions(&candidates, None),
        before,
        "the order of tunnels does not matter"
    );
    candidates[1].tier = HealthTier::Probe;
    assert_eq!(
        sessions(&candidates, None),
        before,
        "a session probes its own agent"
    );
}

#[test]
fn a_session_leaves_an_overloaded_agent() {
    let wanted = |session: u64| Wanted {
        session: Some(session),
        ..FIRST
    };
    let chosen = |candidates: &[Tunnel], session| match outcome(candidates, wanted(session)) {
        Choice::Tunnel(index) => index,
        none => panic!("{none:?}"),
    };
    for session in 0..100 {
        let mut candidates = four();
        let own = chosen(&candidates, session);
        for (others, in_flight, stays) in [
            (0, 1, true),
            (0, 31, true),
            (0, 32, false),
            // The mean with this request is 100.25, the bound 126.
            (91, 127, false),
            (92, 124, true),
            (40, 54, true),
            (40, 55, false),
        ] {
            candidates
                .iter_mut()
                .for_each(|tunnel| tunnel.in_flight = others);
            candidates[own].in_flight = in_flight;
            assert_eq!(
                chosen(&candidates, session) == own,
                stays,
                "{others} {in_flight}"
            );
        }
        candidates[own] = full(candidates[own]);
        assert_ne!(chosen(&candidates, session), own);
        candidates
            .iter_mut()
            .for_each(|tunnel| tunnel.in_flight = 0);
        candidates[own].is_standby = true;
        assert_ne!(chosen(&candidates, session), own, "standby last");
    }
    let mut all_full = four().map(full);
    assert_eq!(outcome(&all_full, wanted(1)), Choice::Full);
    all_full[2].in_flight = 127;
    assert_eq!(chosen(&all_full, 1), 2);
}
