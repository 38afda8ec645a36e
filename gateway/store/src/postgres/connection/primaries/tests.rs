use super::*;

fn primary(host: &str, timeline: u32, started: i64) -> Primary {
    Primary {
        host: host.to_owned(),
        timeline,
        system: 7,
        started,
        revision: Some(0),
    }
}

fn settings() -> PostgresSettings {
    PostgresSettings::new("postgres://gw@db1,db2/gw", None, None).unwrap()
}

/// Hosts and timelines of several primaries, and whether changes are refused for equal timelines.
fn found(settings: &PostgresSettings) -> (Vec<(String, u32)>, bool) {
    let known = settings.known().servers.clone();
    let has_several = settings.several_primaries().is_some();
    let several = known.into_iter().filter(|_| has_several);
    let several = several.map(|it| (it.host, it.timeline));
    (
        several.collect(),
        settings.refuse_equal_primaries().is_err(),
    )
}

/// Tells `to` what `from` knows.
fn tell(from: &PostgresSettings, to: &PostgresSettings) {
    to.told(from.known_primaries());
}

fn silent(host: &str) -> Vec<String> {
    vec![host.to_owned()]
}

#[test]
fn the_newest_primary_is_used_and_all_are_named() {
    let settings = settings();
    let [older, newer] = [primary("db1:5432", 1, 1), primary("db2:5432", 2, 2)];
    settings.note_all(vec![older.clone()], &[]);
    assert_eq!(found(&settings), (Vec::new(), false));
    settings.note_all(vec![older.clone(), newer.clone()], &[]);
    let both = [("db2:5432".to_owned(), 2), ("db1:5432".to_owned(), 1)];
    assert_eq!(found(&settings), (both.to_vec(), false));
    assert_eq!(settings.known_primaries()[0], newer);
    assert!(settings.note(Some(&newer)).is_ok());
    assert_eq!(found(&settings), (both.to_vec(), false));

    // The newer one does not answer now.
    settings.note_all(vec![older.clone()], &silent("db2:5432"));
    assert_eq!(found(&settings), (both.to_vec(), false));
    assert!(settings.note(Some(&older)).is_err());
    settings.note_all(vec![newer.clone()], &silent("db1:5432"));
    assert_eq!(found(&settings), (Vec::new(), false));
    settings.note_all(Vec::new(), &[]);
    assert!(settings.note(Some(&older)).is_err(), "it is remembered");

    let restarted = self::settings();
    restarted.remember(vec![newer]);
    assert!(restarted.note(Some(&older)).is_err());
    assert_eq!(found(&restarted), (both.to_vec(), false));
}

#[test]
fn another_node_tells_of_a_newer_primary() {
    let [here, there] = [settings(), settings()];
    let older = primary("db1:5432", 1, 1);
    here.note(Some(&older)).unwrap();
    here.told(Vec::new());
    there.told(vec![primary("db3:5432", 2, 2)]);
    tell(&there, &here);
    assert!(here.note(Some(&older)).is_err());
    here.note_all(vec![older.clone()], &[]);
    let several = here.several_primaries().unwrap();
    assert!(
        several.contains("db3:5432 (timeline 2) and db1:5432"),
        "{several}"
    );
    tell(&settings(), &here);
    assert_eq!(here.known_primaries()[0].timeline, 2);
}

#[test]
fn equal_timelines_are_refused_unless_they_are_of_one_server() {
    let settings = settings();
    let [first, second] = ["db1:5432", "db2:5432"].map(|host| primary(host, 3, 1));
    settings.note_all(vec![first.clone(), second], &[]);
    assert_eq!(found(&settings), (Vec::new(), false));
    let copy = primary("db2:5432", 3, 2);
    settings.note_all(vec![first.clone(), copy.clone()], &[]);
    let both = [("db1:5432".to_owned(), 3), ("db2:5432".to_owned(), 3)];
    assert_eq!(found(&settings), (both.to_vec(), true));
    let hosts = ["db1:5432", "db2:5432"].map(str::to_owned);
    settings.note_all(Vec::new(), &hosts);
    let several = found(&settings);
    assert_eq!(several, (both.to_vec(), true), "no server answers");
    settings.note_all(vec![first.clone()], &silent("db2:5432"));
    let several = found(&settings);
    assert_eq!(several, (both.to_vec(), true), "one does not answer");
    assert!(settings.note(Some(&copy)).is_err() && settings.note(Some(&first)).is_ok());

    // A restart is no other server.
    let again = primary("db1:5432", 3, 3);
    settings.note_all(vec![again.clone()], &[]);
    assert_eq!(found(&settings), (Vec::new(), false));
    assert!(settings.note(Some(&again)).is_ok());
}

#[test]
fn nodes_that_see_one_of_two_equal_primaries_each_use_the_same_one() {
    let [here, there] = [settings(), settings()];
    let [first, copy] = [primary("db1:5432", 3, 1), primary("db2:5432", 3, 2)];
    here.note(Some(&first)).unwrap();
    there.note(Some(&copy)).unwrap();
    tell(&here, &there);
    tell(&there, &here);
    for node in [&here, &there] {
        assert!(node.refuse_equal_primaries().is_err());
        assert_eq!(node.known_primaries()[0], first);
    }
    assert!(there.check_primary(Some(&copy)).is_err());
    assert!(here.check_primary(Some(&first)).is_ok());

    // What a node was told, it does not tell: the first one is stopped.
    here.note_all(Vec::new(), &[]);
    assert!(here.known().found.is_empty());
    let long_ago = Instant::now().checked_sub(TOLD_FOR).unwrap();
    there.known().told[0].1 = long_ago;
    tell(&here, &there);
    assert!(there.refuse_equal_primaries().is_ok());
    assert!(there.note(Some(&copy)).is_ok());
}

#[test]
fn servers_that_other_nodes_reach_by_one_name_all_count() {
    let [here, there, elsewhere] = [settings(), settings(), settings()];
    let ours = primary("localhost:5432", 3, 1);
    let restored = Primary {
        system: 8,
        ..primary("localhost:5432", 3, 2)
    };
    here.note(Some(&ours)).unwrap();
    there.note(Some(&restored)).unwrap();
    elsewhere.note(Some(&ours)).unwrap();
    tell(&there, &here);
    assert!(here.refuse_equal_primaries().is_err());
    tell(&elsewhere, &here);
    assert!(here.refuse_equal_primaries().is_err());
}

#[test]
fn of_equal_primaries_the_one_with_the_most_changes_is_used() {
    let settings = settings();
    let with = |host, started, revision| Primary {
        revision: Some(revision),
        ..primary(host, 3, started)
    };
    let stale = with("db2:5432", 2, 9);
    settings.note(Some(&with("db1:5432", 1, 10))).unwrap();
    settings.note_all(vec![with("db1:5432", 1, 10), stale.clone()], &[]);
    // A restart is later than the start of the copy.
    let again = with("db1:5432", 3, 10);
    settings.note_all(vec![again.clone(), stale.clone()], &[]);
    assert!(settings.check_primary(Some(&stale)).is_err());
    assert!(settings.check_primary(Some(&again)).is_ok());
    assert!(settings.refuse_equal_primaries().is_err());
}

#[test]
fn equal_primaries_count_after_a_restart_until_they_answer() {
    let [first, copy] = [primary("db1:5432", 3, 1), primary("db2:5432", 3, 2)];
    let before = settings();
    before.note_all(vec![first.clone(), copy.clone()], &[]);
    let known = before.known_primaries().into_iter();
    let remembered: Vec<_> = known.map(Primary::remembered).collect();
    for (silent_host, here) in [("db1:5432", &copy), ("db2:5432", &first)] {
        let restarted = settings();
        restarted.remember(remembered.clone());
        // Whether it is the one to use or not.
        let _ = restarted.note(Some(here));
        assert!(restarted.refuse_equal_primaries().is_err());
        restarted.note_all(vec![here.clone()], &silent(silent_host));
        assert!(restarted.refuse_equal_primaries().is_err());
        assert_eq!(restarted.known_primaries()[0].host, "db1:5432");
        // The other one has ended, or its name is not in `store` any more.
        restarted.note_all(vec![here.clone()], &[]);
        assert!(restarted.refuse_equal_primaries().is_ok());
        assert!(restarted.note(Some(here)).is_ok());
    }
}

#[test]
fn another_cluster_is_used_once_the_earlier_one_has_ended() {
    let settings = settings();
    let earlier = primary("db1:5432", 5, 1);
    let upgraded = Primary {
        system: 8,
        ..primary("db2:5432", 1, 2)
    };
    settings.note(Some(&earlier)).unwrap();
    settings.note_all(vec![earlier, upgraded.clone()], &[]);
    assert!(settings.refuse_equal_primaries().is_err() && settings.note(Some(&upgraded)).is_err());
    settings.note_all(vec![upgraded.clone()], &[]);
    assert_eq!(found(&settings), (Vec::new(), false));
    assert_eq!(settings.known_primaries()[0], upgraded);
}
