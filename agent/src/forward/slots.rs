//! Limit of concurrent requests per tunnel.

use std::cell::{Cell, RefCell};
use std::num::IntErrorKind;
use std::rc::Rc;
use std::task::{Poll, Waker};

/// Default number of slots.
pub(crate) const DEFAULT_SLOTS: u32 = 128;

/// Environment variable that sets the number of slots.
pub const VARIABLE: &str = "GW_AGENT_MAX_CONCURRENT_BACKEND_REQUESTS";

/// Parses the value of [`VARIABLE`]. Returns the default as `Err` if it is not a positive number. A
/// free slot needs no memory, so any number is valid; numbers above `u32::MAX` mean `u32::MAX`.
pub(crate) fn parse(value: Option<&str>) -> Result<u32, u32> {
    let Some(text) = value else {
        return Ok(DEFAULT_SLOTS);
    };
    let digits = text.trim();
    match digits.parse() {
        Ok(0) => Err(DEFAULT_SLOTS),
        Ok(slots) => Ok(slots),
        Err(error) => {
            let is_number = digits
                .strip_prefix('+')
                .unwrap_or(digits)
                .bytes()
                .all(|byte| byte.is_ascii_digit());
            if *error.kind() == IntErrorKind::PosOverflow && is_number {
                Ok(u32::MAX)
            } else {
                Err(DEFAULT_SLOTS)
            }
        }
    }
}

/// The slots of one tunnel.
pub(crate) struct Slots {
    total: u32,
    used: Rc<UsedSlots>,
}

#[derive(Default)]
struct UsedSlots {
    count: Cell<u32>,
    /// Task to wake when the count reaches 0.
    waiting: RefCell<Option<Waker>>,
}

/// A slot in use, freed on drop.
pub(crate) struct Slot(Rc<UsedSlots>);

impl Slots {
    pub(crate) fn new(total: u32) -> Self {
        Self {
            total,
            used: Rc::default(),
        }
    }

    pub(crate) fn take(&self) -> Option<Slot> {
        if self.in_use() >= self.total {
            return None;
        }
        self.used.count.set(self.in_use() + 1);
        Some(Slot(Rc::clone(&self.used)))
    }

    pub(crate) fn total(&self) -> u32 {
        self.total
    }

    pub(crate) fn in_use(&self) -> u32 {
        self.used.count.get()
    }

    /// Resolves when no slot is in use. Only one task may wait at a time.
    pub(crate) async fn all_free(&self) {
        std::future::poll_fn(|cx| {
            if self.in_use() == 0 {
                return Poll::Ready(());
            }
            self.used.waiting.replace(Some(cx.waker().clone()));
            Poll::Pending
        })
        .await;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let left = self.0.count.get() - 1;
        self.0.count.set(left);
        if left == 0
            && let Some(waiting) = self.0.waiting.take()
        {
            waiting.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Wake};

    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn invalid_numbers_fall_back_to_128() {
        assert_eq!(parse(None), Ok(128));
        assert_eq!(parse(Some(" 7 ")), Ok(7));
        let beyond = ["-99999999999", "99999999999 requests", "99999999999x"];
        for invalid in ["", "0", "-5", "many", "1.5"].into_iter().chain(beyond) {
            assert_eq!(parse(Some(invalid)), Err(128), "{invalid:?}");
        }
    }

    #[test]
    fn large_numbers_are_accepted_up_to_the_maximum() {
        assert_eq!(parse(Some("1000001")), Ok(1_000_001));
        assert_eq!(parse(Some("4294967295")), Ok(u32::MAX));
        assert_eq!(parse(Some("99999999999")), Ok(u32::MAX));
        assert_eq!(parse(Some("+99999999999")), Ok(u32::MAX));
    }

    #[test]
    fn slots_are_exhausted_and_freed() {
        let slots = Slots::new(2);
        let first = slots.take().unwrap();
        let _second = slots.take().unwrap();
        assert!(slots.take().is_none());
        drop(first);
        assert_eq!(slots.in_use(), 1);
        assert!(slots.take().is_some());
    }

    #[test]
    fn last_freed_slot_wakes_the_waiting_task() {
        let slots = Slots::new(2);
        let first = slots.take().unwrap();
        let second = slots.take().unwrap();
        let (waker, woken) = counting_waker();
        let mut all_free = pin!(slots.all_free());
        let mut cx = Context::from_waker(&waker);
        assert!(all_free.as_mut().poll(&mut cx).is_pending());
        drop(first);
        assert_eq!(woken.load(Ordering::Relaxed), 0);
        drop(second);
        assert_eq!(woken.load(Ordering::Relaxed), 1);
        assert!(all_free.as_mut().poll(&mut cx).is_ready());
        assert!(slots.all_free().now_or_never().is_some());
    }

    /// A waker and the number of its wake-ups.
    fn counting_waker() -> (Waker, Arc<AtomicUsize>) {
        struct Counting(Arc<AtomicUsize>);
        impl Wake for Counting {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let count = Arc::default();
        (Arc::new(Counting(Arc::clone(&count))).into(), count)
    }
}
