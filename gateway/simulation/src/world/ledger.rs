//! What callers and backends have seen of each request.

use std::cell::RefCell;
use std::collections::BTreeMap;

use gw_simulated_kernel::clock::Nanos;

use super::body::Received;
use crate::scenario::Request;

/// A request as its caller sees it.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    pub caller: usize,
    pub service: usize,
    /// When the first byte was sent.
    pub began: Option<Nanos>,
    /// When the head was sent completely.
    pub head_sent: Option<Nanos>,
    /// Interim responses.
    pub interim: u32,
    pub status: Option<u16>,
    /// `X-Gw-Status`: the response is the gateway's own.
    pub own_error: Option<String>,
    /// The request that the response is for, as the backend names it.
    pub answer_to: Option<u32>,
    pub body: Received,
    /// The response has ended as its framing says.
    pub is_complete: bool,
    /// When the caller had the response, or learned that there will be none.
    pub ended: Option<Nanos>,
    /// The caller left.
    pub has_left: bool,
}

/// A request that has arrived at a backend.
#[derive(Debug, Clone, Copy)]
pub struct Attempt {
    pub agent: usize,
    pub at: Nanos,
    pub upload: Received,
    /// The upload has ended as its framing says.
    pub upload_is_complete: bool,
    /// The response was written completely.
    pub is_answered: bool,
}

#[derive(Debug, Clone, Default)]
pub struct Entry {
    pub seen: Seen,
    pub attempts: Vec<Attempt>,
}

/// All requests by their ids.
#[derive(Default)]
pub struct Ledger {
    plans: BTreeMap<u32, Request>,
    entries: RefCell<BTreeMap<u32, Entry>>,
}

impl Ledger {
    pub(crate) fn new(requests: impl Iterator<Item = Request>) -> Self {
        Self {
            plans: requests.map(|request| (request.id, request)).collect(),
            entries: RefCell::default(),
        }
    }

    pub fn plan(&self, id: u32) -> Option<&Request> {
        self.plans.get(&id)
    }

    /// Changes what the caller of request `id` has seen.
    pub(crate) fn seen<R>(&self, id: u32, change: impl FnOnce(&mut Seen) -> R) -> R {
        change(&mut self.entries.borrow_mut().entry(id).or_default().seen)
    }

    /// Adds an arrival at a backend. Returns its number.
    pub(crate) fn arrived(&self, id: u32, attempt: Attempt) -> usize {
        let mut entries = self.entries.borrow_mut();
        let attempts = &mut entries.entry(id).or_default().attempts;
        attempts.push(attempt);
        attempts.len() - 1
    }

    pub(crate) fn attempt(&self, id: u32, number: usize, change: impl FnOnce(&mut Attempt)) {
        if let Some(entry) = self.entries.borrow_mut().get_mut(&id)
            && let Some(attempt) = entry.attempts.get_mut(number)
        {
            change(attempt);
        }
    }

    /// All requests that have begun, with their plans.
    pub fn entries(&self) -> Vec<(Request, Entry)> {
        let entries = self.entries.borrow();
        let with_plan =
            |(id, entry): (&u32, &Entry)| Some((self.plans.get(id)?.clone(), entry.clone()));
        let begun = entries
            .iter()
            .filter(|(_, entry)| entry.seen.began.is_some());
        begun.filter_map(with_plan).collect()
    }
}
