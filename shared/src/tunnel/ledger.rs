//! Memory for the streams of tunnels, in bytes: charged before it is granted, and shared by the
//! parties that use it.

use std::cell::Cell;
use std::rc::Rc;

/// Memory that several parties share.
#[derive(Debug)]
pub struct Ledger {
    total: Cell<usize>,
    charged: Cell<usize>,
}

/// Share of one party: at most half of what the other parties leave. So one party alone has half of
/// the memory, parties that compete have equal shares, and there is always some left for another
/// one.
#[derive(Debug)]
pub struct Share {
    ledger: Rc<Ledger>,
    charged: Cell<usize>,
}

/// Bytes that are charged to a share until dropped.
#[derive(Debug)]
pub struct Reserved {
    share: Rc<Share>,
    bytes: usize,
}

impl Reserved {
    /// Charges `bytes` more, as [`Share::spare`]. Changes nothing and returns false if there is no
    /// room.
    #[must_use]
    pub fn grow(&mut self, bytes: usize) -> bool {
        self.grow_within(self.share.left_beyond_least(), bytes)
    }

    /// As [`Self::grow`], as [`Share::reserve`].
    #[must_use]
    pub fn grow_with_reserve(&mut self, bytes: usize) -> bool {
        self.grow_within(self.share.left(), bytes)
    }

    fn grow_within(&mut self, room: usize, bytes: usize) -> bool {
        let has_room = room >= bytes;
        if has_room {
            self.share.charge(0, bytes);
            self.bytes += bytes;
        }
        has_room
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.share.charge(self.bytes, 0);
    }
}

impl Ledger {
    pub fn new(total: usize) -> Rc<Self> {
        Rc::new(Self {
            total: Cell::new(total),
            charged: Cell::new(0),
        })
    }

    /// Changes the total. What is charged stays charged, even if it is more.
    pub fn set_total(&self, total: usize) {
        self.total.set(total);
    }

    pub fn total(&self) -> usize {
        self.total.get()
    }

    /// Bytes that are charged to all shares.
    pub fn charged(&self) -> usize {
        self.charged.get()
    }

    /// A new share, to which nothing is charged.
    pub fn share(self: &Rc<Self>) -> Rc<Share> {
        Rc::new(Share {
            ledger: Rc::clone(self),
            charged: Cell::new(0),
        })
    }
}

impl Share {
    /// A share of `bytes` that competes with no other.
    pub fn alone(bytes: usize) -> Rc<Self> {
        Ledger::new(bytes.saturating_mul(2)).share()
    }

    /// Most bytes that may be charged.
    fn most(&self) -> usize {
        let others = self.ledger.charged.get() - self.charged.get();
        self.ledger.total.get().saturating_sub(others) / 2
    }

    /// Bytes that are charged.
    pub fn charged(&self) -> usize {
        self.charged.get()
    }

    /// Bytes that may still be charged.
    pub fn left(&self) -> usize {
        self.most().saturating_sub(self.charged.get())
    }

    /// Bytes that may still be charged for what a stream can do without: windows and queues beyond
    /// the least. They use at most half of the share, so that the other half has room for further
    /// streams.
    pub fn left_beyond_least(&self) -> usize {
        (self.most() / 2).saturating_sub(self.charged.get())
    }

    /// Charges `bytes` until the result is dropped; `None` if there is no room.
    pub fn reserve(self: &Rc<Self>, bytes: usize) -> Option<Reserved> {
        (self.left() >= bytes).then(|| self.charged_until_dropped(bytes))
    }

    /// As [`Self::reserve`], for what a stream can do without: see [`Self::left_beyond_least`].
    pub fn spare(self: &Rc<Self>, bytes: usize) -> Option<Reserved> {
        (self.left_beyond_least() >= bytes).then(|| self.charged_until_dropped(bytes))
    }

    fn charged_until_dropped(self: &Rc<Self>, bytes: usize) -> Reserved {
        self.charge(0, bytes);
        Reserved {
            share: Rc::clone(self),
            bytes,
        }
    }

    /// Charges `after` bytes in place of `before`, whether or not there is room.
    pub fn charge(&self, before: usize, after: usize) {
        let change = after.wrapping_sub(before);
        for charged in [&self.charged, &self.ledger.charged] {
            charged.set(charged.get().wrapping_add(change));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_half_of_what_others_leave() {
        let ledger = Ledger::new(1000);
        let one = ledger.share();
        let two = ledger.share();
        assert_eq!((one.left(), one.left_beyond_least()), (500, 250));
        one.charge(0, 500);
        assert_eq!((one.left(), one.left_beyond_least()), (0, 0));
        assert_eq!((two.left(), ledger.charged()), (250, 500));
        two.charge(0, 250);
        assert_eq!((one.left(), two.left(), ledger.share().left()), (0, 0, 125));
        // Both end at a third.
        for _ in 0..100 {
            for share in [&one, &two] {
                share.charge(10, 0);
                share.charge(0, share.left().min(20));
            }
        }
        assert_eq!((one.charged(), two.charged()), (333, 333));
    }

    #[test]
    fn reserved_bytes_are_charged_until_dropped() {
        let share = Share::alone(1000);
        let reserved = share.reserve(400).unwrap();
        let mut spare = share.spare(60).unwrap();
        assert!(spare.grow(40) && !spare.grow(1) && share.spare(1).is_none());
        assert_eq!(share.charged(), 500);
        drop(share.reserve(500).unwrap());
        assert!(share.reserve(501).is_none());
        drop(spare);
        assert_eq!(share.charged(), 400);
        drop(reserved);
        assert_eq!(share.charged(), 0);
    }

    #[test]
    fn many_shares_never_hold_more_than_the_total() {
        let ledger = Ledger::new(1000);
        let shares: Vec<_> = (0..20).map(|_| ledger.share()).collect();
        for share in shares.iter().chain(&shares) {
            share.charge(0, share.left());
        }
        assert!(ledger.charged() <= ledger.total());
    }

    #[test]
    fn a_smaller_total_leaves_nothing_until_enough_is_free() {
        let ledger = Ledger::new(1000);
        let share = ledger.share();
        share.charge(0, 400);
        ledger.set_total(600);
        assert_eq!((share.left(), share.left_beyond_least()), (0, 0));
        share.charge(400, 290);
        assert_eq!(share.left(), 10);
    }

    #[test]
    fn a_share_that_is_alone_has_all_of_it() {
        let share = Share::alone(100);
        assert_eq!((share.left(), share.left_beyond_least()), (100, 50));
        assert!(Share::alone(usize::MAX).left() >= usize::MAX / 2);
    }
}
