use gw_shared::id::AccountId;

use super::*;

fn authenticator(byte: u8) -> Authenticator {
    Authenticator::new(&RegionKey::new([byte; 32]))
}

fn at(revision: i64, change: &str) -> Position {
    Position {
        origin: "region".to_owned(),
        revision: Revision(revision),
        change: change.to_owned(),
    }
}

fn id(name: &str) -> SetMember {
    SetMember::Record(RecordId::Account(AccountId::new(name).unwrap()))
}

#[test]
fn a_tag_binds_every_part_and_their_borders() {
    let good = authenticator(1).record("region", "agent", "ab", "{}");
    assert_eq!(good, authenticator(1).record("region", "agent", "ab", "{}"));
    for other in [
        authenticator(2).record("region", "agent", "ab", "{}"),
        authenticator(1).record("other", "agent", "ab", "{}"),
        authenticator(1).record("region", "account", "ab", "{}"),
        authenticator(1).record("region", "agent", "a", "b{}"),
        authenticator(1).record("region", "agent", "ab", "{ }"),
    ] {
        assert_ne!(other.0, good.0);
        assert_ne!(other.1, good.1);
    }
    let change = authenticator(1).change(&at(1, "a"), &at(2, "b"), "[]");
    for (before, after, steps) in [
        (at(1, "x"), at(2, "b"), "[]"),
        (at(1, "a"), at(3, "b"), "[]"),
        (at(1, "a"), at(2, "c"), "[]"),
        (at(1, "a"), at(2, "b"), "[1]"),
    ] {
        assert_ne!(authenticator(1).change(&before, &after, steps), change);
    }
    let region = authenticator(1).region(&at(1, "a"), 7);
    for (position, sum) in [(at(2, "a"), 7), (at(1, "b"), 7), (at(1, "a"), 8)] {
        assert_ne!(authenticator(1).region(&position, sum), region);
    }
    assert!(is_tag(&region, &region) && !is_tag(&region, &region[..15]) && !is_tag(&region, &[]));
}

#[test]
fn the_digest_is_that_of_the_set_however_it_came_about() {
    let mut direct = RecordSet::at(at(9, "z"));
    direct.add(id("one"), 1);
    direct.add(id("two"), 22);
    let known = KnownRecords::default();
    known.load(RecordSet::at(at(0, "")), 0);
    let changes: [Vec<Effect>; 3] = [
        vec![(id("one"), Some(1)), (id("two"), Some(2))],
        vec![(id("three"), Some(4)), (id("two"), Some(22))],
        vec![(id("three"), None), (id("never"), None)],
    ];
    let mut before = at(0, "");
    for (number, effects) in (1..).zip(changes) {
        let after = at(number, "change");
        let announced = known.sum_after(&before, &effects).unwrap();
        known.apply(&before, &after, effects.clone());
        // A second time, it changes nothing.
        known.apply(&before, &after, effects);
        assert_eq!(known.lock().set.as_ref().unwrap().sum(), announced);
        before = after;
    }
    assert_eq!(known.lock().set.as_ref().unwrap().sum(), direct.sum());
}

#[test]
fn a_set_of_another_history_is_forgotten() {
    let with = |position| {
        let known = KnownRecords::default();
        known.load(RecordSet::at(position), 0);
        known
    };
    // At the position, between it and the newest change, at the newest, and after it.
    for known in [at(5, "e"), at(6, "f"), at(7, "g"), at(8, "h")] {
        assert!(with(known).covers(&at(5, "e"), &at(7, "g"), 0));
    }
    let elsewhere = Position {
        origin: "other".to_owned(),
        ..at(5, "e")
    };
    for known in [at(4, "d"), at(5, "x"), at(7, "x"), elsewhere] {
        let known = with(known);
        assert!(!known.covers(&at(5, "e"), &at(7, "g"), 0));
        assert!(known.lock().set.is_none());
    }
    // A set that is ahead is kept, because the records follow; one that is behind is loaded
    // again.
    let ahead = with(at(6, "f"));
    let behind = with(at(4, "d"));
    for known in [&ahead, &behind, &KnownRecords::default()] {
        assert_eq!(known.sum_after(&at(5, "e"), &[]), None);
    }
    assert!(ahead.lock().set.is_some() && behind.lock().set.is_none());
    ahead.load(RecordSet::at(at(5, "e")), 0);
    assert_eq!(
        ahead.lock().set.as_ref().unwrap().position,
        at(6, "f"),
        "the newer one is kept"
    );
}
