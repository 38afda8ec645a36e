//! Freezes of the process, and what queued meanwhile.
//!
//! A process that is stopped for a while, by a signal, a debugger or a hypervisor, afterwards finds
//! requests on its sockets that have queued, and records in memory that other nodes may have
//! changed. A revocation that they acknowledged names this node as pending, and yet it would accept
//! the queued requests for the moment that it takes to read the changes. Each worker therefore
//! notices a gap in its own clock. What it authenticates after the gap waits until the feed has
//! read the records.
//!
//! The reactor handles sockets before timers, so the first request after a freeze may run before
//! any timer: it looks at the clock itself. A busy worker and an overloaded machine have gaps, too.
//! Each costs one read.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gw_shared::runtime;
use tokio::sync::Notify;

use crate::error::{Error, Overload};
use crate::limits;

/// Freezes that one request waits for. The process may freeze again while it waits.
const ROUNDS: usize = 2;

/// The read of the records that workers wait for. Shared by all threads.
pub struct AwaitedRead {
    base: Instant,
    /// It begins at this time or later: nanoseconds after `base`, or 0 if no worker waits.
    earliest: AtomicU64,
    /// Makes the feed read now.
    wake: Arc<Notify>,
}

impl AwaitedRead {
    /// A read for which no worker waits. `wake` makes the feed read.
    pub fn new(wake: Arc<Notify>, now: Instant) -> Self {
        Self {
            base: now,
            earliest: AtomicU64::new(0),
            wake,
        }
    }

    fn nanoseconds(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.base).as_nanos())
            .unwrap_or(u64::MAX)
            .max(1)
    }

    /// Asks for a read that begins at `earliest` or later.
    fn ask(&self, earliest: Instant) {
        self.earliest
            .fetch_max(self.nanoseconds(earliest), Ordering::Relaxed);
        self.wake.notify_one();
    }

    /// Whether workers wait for a read that began at this time. They do not any more then, and must
    /// be told.
    pub fn is_answered_by(&self, began: Instant) -> bool {
        let earliest = self.earliest.load(Ordering::Relaxed);
        let is_late_enough = earliest != 0 && earliest <= self.nanoseconds(began);
        is_late_enough
            && self
                .earliest
                .compare_exchange(earliest, 0, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }
}

/// What one worker knows about freezes of its process.
pub struct Freeze {
    /// `None` if no other process changes the records.
    read: Option<Arc<AwaitedRead>>,
    /// The worker looks at its clock before this time, unless it is frozen.
    next_look: Cell<Instant>,
    /// End of the last freeze, until the records were read or requests have waited long enough.
    ended: Cell<Option<Instant>>,
    /// Start of the last read that the feed has told.
    last_read: Cell<Option<Instant>>,
    /// Notified when the feed tells of a read.
    told: Notify,
    /// Requests and handshakes that wait.
    waiting: Cell<usize>,
}

/// Counts a request that waits until dropped.
struct Waits<'a>(&'a Cell<usize>);

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Freeze {
    /// The state of a worker that starts at `now`. Without `read`, no other process changes the
    /// records and freezes have no effect.
    pub fn new(read: Option<Arc<AwaitedRead>>, now: Instant) -> Rc<Self> {
        Rc::new(Self {
            read,
            next_look: Cell::new(now + limits::FREEZE),
            ended: Cell::default(),
            last_read: Cell::default(),
            told: Notify::new(),
            waiting: Cell::default(),
        })
    }

    /// Whether the records are not older than a freeze, so that a request may be authenticated now.
    pub fn is_over(&self, now: Instant) -> bool {
        if self.ended.get().is_none() && now < self.next_look.get() {
            return true;
        }
        self.look(now);
        self.ended.get().is_none()
    }

    /// Looks at the clock. Called more often than every `limits::FREEZE`.
    pub fn look(&self, now: Instant) {
        let Some(read) = &self.read else { return };
        if now >= self.next_look.get() {
            self.ended.set(Some(now));
            read.ask(now);
        } else if self
            .ended
            .get()
            .is_some_and(|ended| now >= ended + limits::FREEZE_WAIT)
        {
            self.ended.set(None);
        }
        self.next_look
            .set(self.next_look.get().max(now + limits::FREEZE));
    }

    /// The feed has read the records, or failed to: it began at `began`, and this worker uses what
    /// was read.
    pub fn records_were_read(&self, began: Instant, now: Instant) {
        self.look(now);
        self.last_read.set(Some(began));
        if self.ended.get().is_some_and(|ended| ended <= began) {
            self.ended.set(None);
        }
        self.told.notify_waiters();
    }

    /// Waits until [`Self::is_over`], for `limits::FREEZE_WAIT` after each freeze at most: without
    /// PostgreSQL, the records in memory count. Fails if too many requests wait.
    pub async fn over(&self) -> Result<(), Error> {
        for _ in 0..ROUNDS {
            let now = Instant::now();
            if self.is_over(now) {
                return Ok(());
            }
            let Some(ended) = self.ended.get() else {
                return Ok(());
            };
            let _counted = self.count()?;
            let left = (ended + limits::FREEZE_WAIT).saturating_duration_since(now);
            // Goes on in any case.
            let _ =
                runtime::timeout(left.max(Duration::from_millis(1)), self.read_since(ended)).await;
        }
        Ok(())
    }

    fn count(&self) -> Result<Waits<'_>, Error> {
        if self.waiting.get() >= limits::FREEZE_WAITING {
            return Err(Error::Overloaded(Overload::QueueFull));
        }
        self.waiting.set(self.waiting.get() + 1);
        Ok(Waits(&self.waiting))
    }

    /// Waits for a read that began at `earliest` or later.
    async fn read_since(&self, earliest: Instant) {
        loop {
            let told = self.told.notified();
            if self.last_read.get().is_some_and(|began| began >= earliest) {
                return;
            }
            told.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::future::{Either, select};
    use gw_shared::runtime::Driver;

    use super::*;

    const TICK: Duration = limits::DEADLINE_TICK;

    fn freeze(now: Instant) -> (Rc<Freeze>, Arc<AwaitedRead>) {
        let read = Arc::new(AwaitedRead::new(Arc::default(), now));
        (Freeze::new(Some(Arc::clone(&read)), now), read)
    }

    #[test]
    fn a_gap_is_a_freeze_whatever_runs_first_after_it() {
        let start = Instant::now();
        for timer_is_first in [true, false] {
            let (freeze, read) = freeze(start);
            freeze.look(start + TICK);
            assert!(freeze.is_over(start + 2 * TICK) && !read.is_answered_by(start + 2 * TICK));
            let thawed = start + TICK + limits::FREEZE;
            if timer_is_first {
                freeze.look(thawed);
            }
            assert!(!freeze.is_over(thawed), "{timer_is_first}");
            assert!(
                !read.is_answered_by(thawed - TICK),
                "it began before the end of the freeze"
            );
            let began = thawed + TICK;
            assert!(
                read.is_answered_by(began) && !read.is_answered_by(began),
                "told once"
            );
            freeze.records_were_read(began, began + TICK);
            assert!(freeze.is_over(began + TICK));
        }
    }

    #[test]
    fn a_worker_that_looks_in_time_never_asks_for_a_read() {
        let mut now = Instant::now();
        let (freeze, read) = freeze(Instant::now());
        for _ in 0..100 {
            now += limits::FREEZE - Duration::from_millis(1);
            assert!(freeze.is_over(now), "a request does not replace the timer");
            freeze.look(now);
        }
        assert!(!read.is_answered_by(now));
    }

    #[test]
    fn no_read_is_needed_where_no_other_process_changes_the_records() {
        let start = Instant::now();
        let freeze = Freeze::new(None, start);
        assert!(freeze.is_over(start + Duration::from_hours(1)));
    }

    #[test]
    fn a_read_that_began_before_the_next_freeze_does_not_end_it() {
        let start = Instant::now();
        let (freeze, read) = freeze(start);
        let thawed = start + 2 * limits::FREEZE;
        assert!(!freeze.is_over(thawed));
        // The message that tells of the read waited in the mailbox during the second freeze.
        let again = thawed + 2 * limits::FREEZE;
        freeze.records_were_read(thawed + TICK, again);
        assert!(!freeze.is_over(again) && read.is_answered_by(again));
        freeze.records_were_read(again, again);
        assert!(freeze.is_over(again));
    }

    #[test]
    fn requests_wait_for_a_limited_time_and_in_a_limited_number() {
        Driver::choose().unwrap().block_on(limited_waits()).unwrap();
    }

    async fn limited_waits() {
        let now = Instant::now();
        let (freeze, _read) = freeze(now.checked_sub(2 * limits::FREEZE).unwrap());
        assert!(!freeze.is_over(now));
        freeze.waiting.set(limits::FREEZE_WAITING);
        assert!(matches!(
            freeze.over().await,
            Err(Error::Overloaded(Overload::QueueFull))
        ));
        freeze.waiting.set(0);
        let ticks = pin!(async {
            loop {
                runtime::sleep(TICK).await;
                freeze.look(Instant::now());
            }
        });
        let Either::Left((waited, _)) = select(pin!(freeze.over()), ticks).await;
        assert!(
            waited.is_ok() && now.elapsed() >= limits::FREEZE_WAIT,
            "PostgreSQL does not answer"
        );
        assert!(freeze.is_over(Instant::now()));
        assert_eq!(freeze.waiting.get(), 0);
    }
}
