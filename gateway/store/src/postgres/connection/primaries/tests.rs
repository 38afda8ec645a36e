use super::*;

fn primary(host: &str, timeline: u32, started: &str) -> Primary {
    Primary {
        host: host.to_owned(),
        timeline,
        started: started.to_owned(),
    }
}

fn settings() -> PostgresSettings {
    PostgresSettings::new("postgres://gw@db1,db2/gw", None, None).unwrap()
}

/// Hosts and timelines of several primaries, and whether changes are refused for equal timelines.
fn found(settings: &PostgresSettings) -> (Vec<(String, u32)>, bool) {
    let known = settings.known().clone();
    let has_several = settings.several_primaries().is_some();
    let several = known.into_iter().filter(|_| has_several);
    let several = several.map(|it| (it.host, it.timeline));
    (
        several.collect(),
        settings.refuse_equal_primaries().is_err(),
    )
}

#[test]
fn the_newest_primary_is_used_and_all_are_named() {
    let settings = settings();
    let [older, newer] = [primary("db1:5432", 1, "a"), primary("db2:5432", 2, "b")];
    settings.note_all(vec![older.clone()]);
    assert_eq!(found(&settings), (Vec::new(), false));
    settings.note_all(vec![older.clone(), newer.clone()]);
    let both = [("db2:5432".to_owned(), 2), ("db1:5432".to_owned(), 1)];
    assert_eq!(found(&settings), (both.to_vec(), false));
    assert_eq!(settings.newest_primary(), Some(newer.clone()));
    assert!(settings.note(Some(&newer)).is_ok());

    // The newer one does not answer now.
    settings.note_all(vec![older.clone()]);
    assert_eq!(found(&settings), (both.to_vec(), false));
    assert!(settings.note(Some(&older)).is_err());
    settings.note_all(vec![newer]);
    assert_eq!(found(&settings), (Vec::new(), false));
    settings.note_all(Vec::new());
    assert!(settings.note(Some(&older)).is_err(), "it is remembered");
}

#[test]
fn another_node_tells_of_a_newer_primary() {
    let settings = settings();
    let older = primary("db1:5432", 1, "a");
    settings.note(Some(&older)).unwrap();
    let tell = |primary: &Primary| settings.told(&serde_json::to_vec(primary).unwrap());
    settings.told(b"null");
    tell(&primary("db3:5432", 2, ""));
    assert!(settings.note(Some(&older)).is_err());
    settings.note_all(vec![older.clone()]);
    let several = settings.several_primaries().unwrap();
    assert!(
        several.contains("db3:5432 (timeline 2) and db1:5432"),
        "{several}"
    );
    tell(&older);
    assert_eq!(settings.newest_primary().unwrap().timeline, 2);
}

#[test]
fn equal_timelines_are_refused_unless_they_are_of_one_server() {
    let settings = settings();
    let [first, second] = ["db1:5432", "db2:5432"].map(|host| primary(host, 3, "a"));
    settings.note_all(vec![first.clone(), second]);
    assert_eq!(found(&settings), (Vec::new(), false));
    settings.note_all(vec![first, primary("db2:5432", 3, "b")]);
    let both = [("db1:5432".to_owned(), 3), ("db2:5432".to_owned(), 3)];
    assert_eq!(found(&settings), (both.to_vec(), true));
    settings.note_all(Vec::new());
    assert_eq!(found(&settings), (both.to_vec(), true), "no server answers");
}

#[test]
fn each_promotion_begins_later_epochs() {
    let epochs = [1, 2, 3].map(|timeline| primary("db1:5432", timeline, "a").first_epoch());
    assert_eq!(epochs, [0, 1 << 31, 2 << 31]);
    assert!(i64::try_from(primary("db1:5432", u32::MAX, "a").first_epoch()).is_ok());
}
