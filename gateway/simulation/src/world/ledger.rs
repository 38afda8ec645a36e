//! What callers and backends have seen of each request.

use std::cell::RefCell;
use std::collections::BTreeMap;

use gw_bed::body::Received;
use gw_simulated_kernel::clock::{self, Nanos};
use gw_simulated_kernel::trace;

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
    /// 100 (Continue) has arrived.
    pub has_continued: bool,
    /// When the head of the final response arrived.
    pub answered: Option<Nanos>,
    pub status: Option<u16>,
    /// `X-Gw-Request-Id`
    pub request_id: Option<String>,
    /// `X-Gw-Status`: the response is the gateway's own.
    pub own_error: Option<String>,
    /// `code` of the gateway's error, once its body has arrived.
    pub code: Option<String>,
    /// The request that the response is for, as the backend names it.
    pub answer_to: Option<u32>,
    pub body: Received,
    /// The request that the trailers of the response are for.
    pub trailer: Option<u32>,
    /// The response has ended as its framing says.
    pub is_complete: bool,
    /// When the caller had the response, or learned that there will be none.
    pub ended: Option<Nanos>,
    /// The caller left.
    pub has_left: bool,
    /// The caller lost its patience.
    pub has_given_up: bool,
}

/// A request that has arrived at a backend.
#[derive(Debug, Clone, Copy)]
pub struct Attempt {
    pub agent: usize,
    pub at: Nanos,
    pub upload: Received,
    /// The upload has ended as its framing says.
    pub upload_is_complete: bool,
    /// The connection broke after a switch of protocols, before the end of the upload.
    pub upload_is_broken: bool,
    /// The request that the trailers of the upload are for.
    pub trailer: Option<u32>,
    /// When the response was written completely.
    pub answered: Option<Nanos>,
}

#[derive(Debug, Clone, Default)]
pub struct Entry {
    pub seen: Seen,
    pub attempts: Vec<Attempt>,
}

/// All requests by their ids.
#[derive(Default)]
pub struct Ledger {
    plans: RefCell<BTreeMap<u32, Request>>,
    entries: RefCell<BTreeMap<u32, Entry>>,
}

impl Ledger {
    pub(crate) fn new(requests: impl Iterator<Item = Request>) -> Self {
        Self {
            plans: RefCell::new(requests.map(|request| (request.id, request)).collect()),
            entries: RefCell::default(),
        }
    }

    pub(crate) fn plan(&self, id: u32) -> Option<Request> {
        self.plans.borrow().get(&id).cloned()
    }

    /// Adds a request.
    pub(crate) fn add(&self, request: Request) {
        self.plans.borrow_mut().insert(request.id, request);
    }

    /// Changes what the caller of request `id` has seen.
    pub(crate) fn seen<R>(&self, id: u32, change: impl FnOnce(&mut Seen) -> R) -> R {
        change(&mut self.entries.borrow_mut().entry(id).or_default().seen)
    }

    /// Adds an arrival at a backend. Returns its number.
    pub(crate) fn arrives(&self, id: u32, agent: usize) -> usize {
        trace::line(|line| line.push_str(&format!("request {id} arrives")));
        let attempt = Attempt {
            agent,
            at: clock::now().unwrap_or(0),
            upload: Received::default(),
            upload_is_complete: false,
            upload_is_broken: false,
            trailer: None,
            answered: None,
        };
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

    /// The first value that `look` finds in the requests that have begun.
    pub fn find<R>(&self, mut look: impl FnMut(&Request, &Entry) -> Option<R>) -> Option<R> {
        let (plans, entries) = (self.plans.borrow(), self.entries.borrow());
        let mut begun = entries
            .iter()
            .filter(|(_, entry)| entry.seen.began.is_some());
        begun.find_map(|(id, entry)| look(plans.get(id)?, entry))
    }

    /// Number of requests that have begun and of which `holds`.
    pub fn count(&self, holds: impl Fn(&Entry) -> bool) -> usize {
        let mut count = 0;
        self.find(|_, entry| {
            count += usize::from(holds(entry));
            None::<()>
        });
        count
    }
}
