//! Periods and time limits of the membership.

use std::time::Duration;

/// Time between two beats of a node.
pub const BEAT: Duration = Duration::from_secs(1);

/// Longest time for a call to the engine.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(1);

/// Silence after which the other nodes probe a node, on the clock of the observer. Longer than a
/// beat with a slow call.
pub const SUSPECT_AFTER: Duration = Duration::from_secs(3);

/// Silence after which a node is declared dead, on the clock of the observer.
pub const DEAD_AFTER: Duration = Duration::from_secs(5);

/// Time that an owner may admit after it sent its last successful beat, on its own clock. The rest
/// up to [`DEAD_AFTER`] allows for clocks whose rates differ by up to 20 %.
pub const LEASE: Duration = Duration::from_secs(4);

/// Time after an outage of the engine in which no node is declared dead.
pub const ENGINE_GRACE: Duration = Duration::from_secs(10);

/// Silence after which a node that refuses connections is declared dead within [`ENGINE_GRACE`].
/// Longer than the time between two beats.
pub(super) const REFUSED_DEAD_AFTER: Duration = Duration::from_millis(2_500);

/// Longest time between the starts of two successful calls of an observer that did not miss an
/// outage between them.
pub(super) const READ_GAP_MAX: Duration = Duration::from_millis(2_500);

/// Least time between two calls that messages of other nodes cause.
pub(super) const HINT_GAP: Duration = Duration::from_millis(100);

/// Time by which an acknowledgment reaches other nodes before it is written into the row: bucket
/// levels travel with it.
pub(super) const LEVELS_AHEAD: Duration = Duration::from_millis(100);

/// Least time between two attempts to join.
pub(super) const JOIN_GAP: Duration = Duration::from_millis(200);

const _: () = {
    assert!(
        LEASE.as_millis() * 6 <= DEAD_AFTER.as_millis() * 5,
        "a lease ends before its holder can be declared dead"
    );
    let cycle = BEAT.as_millis() + CALL_TIMEOUT.as_millis();
    assert!(
        READ_GAP_MAX.as_millis() > cycle,
        "slow calls are not taken for a pause"
    );
    assert!(READ_GAP_MAX.as_millis() < DEAD_AFTER.as_millis());
    assert!(
        SUSPECT_AFTER.as_millis() > cycle && SUSPECT_AFTER.as_millis() < DEAD_AFTER.as_millis()
    );
};
