//! How many requests one tunnel may have at the backend at a time.

use std::cell::Cell;
use std::rc::Rc;

/// Slots when nothing else is said.
pub(crate) const DEFAULT_SLOTS: u32 = 128;

/// Name of the variable that says something else.
pub const VARIABLE: &str = "GW_AGENT_MAX_CONCURRENT_BACKEND_REQUESTS";

/// The number of slots that `value` of the variable means; `Err` with the default if it means none.
pub(crate) fn parse(value: Option<&str>) -> Result<u32, u32> {
    match value {
        None => Ok(DEFAULT_SLOTS),
        Some(text) => text.trim().parse().ok().filter(|slots| (1..=1_000_000).contains(slots)).ok_or(DEFAULT_SLOTS),
    }
}

/// The slots of one tunnel.
pub(crate) struct Slots {
    total: u32,
    in_use: Rc<Cell<u32>>,
}

/// A slot in use; free again when dropped, however its request ended.
pub(crate) struct Slot(Rc<Cell<u32>>);

impl Slots {
    pub(crate) fn new(total: u32) -> Self {
        Self { total, in_use: Rc::default() }
    }

    pub(crate) fn take(&self) -> Option<Slot> {
        if self.in_use.get() >= self.total {
            return None;
        }
        self.in_use.set(self.in_use.get() + 1);
        Some(Slot(Rc::clone(&self.in_use)))
    }

    pub(crate) fn total(&self) -> u32 {
        self.total
    }

    pub(crate) fn in_use(&self) -> u32 {
        self.in_use.get()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_a_positive_number_means_128() {
        assert_eq!(parse(None), Ok(128));
        assert_eq!(parse(Some(" 7 ")), Ok(7));
        for invalid in ["", "0", "-5", "many", "1.5", "99999999999"] {
            assert_eq!(parse(Some(invalid)), Err(128), "{invalid:?}");
        }
    }

    #[test]
    fn slots_run_out_and_come_back() {
        let slots = Slots::new(2);
        let (first, _second) = (slots.take().unwrap(), slots.take().unwrap());
        assert!(slots.take().is_none());
        drop(first);
        assert_eq!(slots.in_use(), 1);
        assert!(slots.take().is_some());
    }
}
