//! Tests of the journal.

use std::fs;

use gw_region::RegionKey;
use gw_store::{RecordId, Revision};

use super::*;

fn sealer() -> Sealer {
    Sealer::new(&RegionKey::new([7; 32]).into()).unwrap()
}

fn at(revision: i64) -> Position {
    Position {
        origin: "region".to_owned(),
        revision: Revision(revision),
        change: format!("change {revision}"),
    }
}

fn journal(folder: &tempfile::TempDir) -> Journal {
    let reserve = Reserve::beside(folder.path().join("records.sealed"));
    Journal::new(folder.path(), sealer(), reserve)
}

/// Queues the changes that lead from one revision to the other.
fn push(journal: &Journal, from: i64, to: i64) {
    let steps = [Step::Delete(RecordId::Account("acme".parse().unwrap()))];
    (from..to).for_each(|revision| journal.push(&at(revision), &at(revision + 1), &steps, false));
}

fn write_copy(journal: &Journal, revision: i64) {
    let mut copying = journal.copy().unwrap();
    copying.begin();
    copying.finish(&at(revision)).unwrap();
}

/// The revisions that a start from a copy of `revision` knows in addition.
fn known_after(folder: &tempfile::TempDir, revision: i64) -> Vec<i64> {
    let entries = changes_after(&sealer(), &read(folder.path()).unwrap(), &at(revision));
    entries
        .iter()
        .inspect(|entry| assert_eq!(entry.steps.len(), 1))
        .map(|entry| entry.after.revision.0)
        .collect()
}

#[test]
fn flushed_changes_are_known_after_a_crash() {
    let folder = tempfile::tempdir().unwrap();
    let first = journal(&folder);
    push(&first, 1, 3);
    assert!(
        first.flush().is_err() && first.needs_copy(),
        "there is no copy yet"
    );
    write_copy(&first, 3);
    assert!(first.flush().is_ok() && !first.needs_copy());
    push(&first, 3, 6);
    assert!(first.flush().is_ok());
    assert_eq!(known_after(&folder, 3), [4, 5, 6]);
    assert_eq!(known_after(&folder, 4), [5, 6], "a later copy");
    assert!(known_after(&folder, 6).is_empty() && known_after(&folder, 2).is_empty());
    let other = Position {
        change: "other".to_owned(),
        ..at(3)
    };
    assert!(
        changes_after(&sealer(), &read(folder.path()).unwrap(), &other).is_empty(),
        "another history"
    );
    // Changes while a copy is written follow it.
    let mut copying = first.copy().unwrap();
    copying.begin();
    push(&first, 6, 7);
    assert!(first.flush().is_ok());
    push(&first, 7, 8);
    copying.finish(&at(6)).unwrap();
    assert_eq!(known_after(&folder, 6), [7]);
    assert!(first.flush().is_ok());
    assert_eq!(known_after(&folder, 6), [7, 8]);
}

#[test]
fn a_torn_or_foreign_tail_is_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let first = journal(&folder);
    write_copy(&first, 1);
    push(&first, 1, 4);
    first.flush().unwrap();
    let path = folder.path().join(FILE);
    let whole = fs::read(&path).unwrap();
    let ends: Vec<_> = whole
        .iter()
        .enumerate()
        .filter(|(_, byte)| **byte == b'\n')
        .map(|(at, _)| at + 1)
        .collect();
    for length in 0..whole.len() {
        fs::write(&path, &whole[..length]).unwrap();
        let complete = ends.iter().filter(|end| **end <= length).count();
        assert_eq!(known_after(&folder, 1).len(), complete, "{length} bytes");
    }
    // A page that did not reach the disk, and an entry twice.
    let mut damaged = whole.clone();
    damaged[ends[0]..ends[0] + 8].fill(0);
    fs::write(&path, damaged).unwrap();
    assert_eq!(known_after(&folder, 1), [2]);
    fs::write(&path, [&whole[..ends[0]], &whole].concat()).unwrap();
    assert_eq!(known_after(&folder, 1), [2]);
    fs::write(&path, &whole).unwrap();
    let other = Sealer::new(&RegionKey::new([8; 32]).into()).unwrap();
    assert!(changes_after(&other, &whole, &at(1)).is_empty());
    // The next process begins the file again: its changes need not follow those of this one.
    let next = journal(&folder);
    write_copy(&next, 1);
    assert!(known_after(&folder, 1).is_empty());
}

#[test]
fn a_replaced_history_needs_a_copy() {
    let folder = tempfile::tempdir().unwrap();
    let first = journal(&folder);
    write_copy(&first, 1);
    push(&first, 1, 3);
    first.break_off();
    push(&first, 3, 4);
    assert!(first.flush().is_err() && first.needs_copy());
    // It is replaced again while the copy is written.
    let mut copying = first.copy().unwrap();
    copying.begin();
    first.break_off();
    copying.finish(&at(4)).unwrap();
    assert!(first.flush().is_err() && first.needs_copy());
    write_copy(&first, 4);
    push(&first, 4, 5);
    assert!(first.flush().is_ok());
    assert_eq!(known_after(&folder, 4), [5]);
    // A copy that cannot be written.
    first.break_off();
    let mut copying = first.copy().unwrap();
    copying.begin();
    push(&first, 5, 6);
    drop(copying);
    assert!(first.flush().is_err() && first.needs_copy());
}

#[test]
fn a_full_disk_is_named_until_a_copy_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let first = journal(&folder);
    write_copy(&first, 1);
    let full = OpenOptions::new().append(true).open("/dev/full").unwrap();
    lock(&first.file).as_mut().unwrap().file = full;
    push(&first, 1, 2);
    assert!(first.flush().is_err() && first.is_failing());
    push(&first, 2, 3);
    assert!(
        first.flush().is_err() && first.needs_copy(),
        "the changes before it are not stored"
    );
    write_copy(&first, 3);
    first.succeeded();
    assert!(first.flush().is_ok() && !first.is_failing());
}

#[test]
fn a_revocation_that_is_not_written_asks_for_the_reserve_until_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let first = journal(&folder);
    let revoke = |revision: i64| {
        let steps = [Step::Delete(RecordId::Account("acme".parse().unwrap()))];
        first.push(&at(revision), &at(revision + 1), &steps, true);
    };
    // Before the first copy.
    revoke(1);
    assert!(first.flush().is_err() && first.has_revocation());
    write_copy(&first, 2);
    assert!(first.flush().is_ok() && !first.has_revocation());
    let full = OpenOptions::new().append(true).open("/dev/full").unwrap();
    lock(&first.file).as_mut().unwrap().file = full;
    revoke(2);
    push(&first, 3, 4);
    assert!(first.flush().is_err() && first.has_revocation());
    write_copy(&first, 4);
    push(&first, 4, 5);
    assert!(first.flush().is_ok() && !first.has_revocation());
}

#[test]
fn queue_and_file_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let first = journal(&folder);
    write_copy(&first, 1);
    let steps =
        vec![Step::Delete(RecordId::Account("acme".parse().unwrap())); limits::JOURNAL_STEPS];
    first.push(&at(1), &at(2), &steps, false);
    assert!(lock(&first.queue).entries.is_empty() && first.flush().is_err());
    write_copy(&first, 2);
    push(&first, 2, 3);
    lock(&first.file).as_mut().unwrap().length = limits::JOURNAL / 2 + 1;
    assert!(first.needs_copy() && first.flush().is_ok());
    lock(&first.file).as_mut().unwrap().length = limits::JOURNAL;
    push(&first, 3, 4);
    assert!(first.flush().is_err() && !first.is_failing());
}

#[test]
fn only_the_process_with_the_store_writes() {
    let folder = tempfile::tempdir().unwrap();
    let first = journal(&folder);
    write_copy(&first, 1);
    push(&first, 1, 3);
    first.hand_over();
    assert_eq!(
        known_after(&folder, 1),
        [2, 3],
        "the successor knows all changes"
    );
    push(&first, 3, 4);
    assert!(first.flush().is_err() && first.copy().is_none());
    // The successor has failed.
    first.take_back();
    write_copy(&first, 4);
    push(&first, 4, 5);
    assert!(first.flush().is_ok());
    assert_eq!(known_after(&folder, 4), [5]);
}

#[test]
fn concurrent_changes_are_all_stored_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let first = journal(&folder);
    write_copy(&first, 0);
    let order = Mutex::new(0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..20 {
                    {
                        let mut revision = lock(&order);
                        push(&first, *revision, *revision + 1);
                        *revision += 1;
                    }
                    first.flush().unwrap();
                }
            });
        }
    });
    assert_eq!(known_after(&folder, 0), (1..=160).collect::<Vec<_>>());
}
