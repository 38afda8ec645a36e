//! Pace at which refusals leave a worker: callers of one account that send again at once take no
//! time from other accounts.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use gw_base::error::Error;
use gw_shared::id::AccountId;

use super::Relay;
use crate::limits;
use crate::memory::relay::Reserved;
use crate::request_scope::RequestScope;

/// Places of refusals, in the order of their requests. No I/O, no clock.
#[derive(Default)]
pub(crate) struct RefusalPace {
    /// Time of the next place of each account.
    next: HashMap<AccountId, Instant>,
    /// Number of entries at which those of the past are removed.
    removed_at: usize,
}

impl RefusalPace {
    /// Takes the next place of the account and returns the time until then. Places that were not
    /// taken are kept for a moment.
    fn take(&mut self, account: &AccountId, now: Instant) -> Duration {
        const LEAST: usize = 64;
        let kept = limits::REFUSAL_INTERVAL * limits::REFUSALS_AT_ONCE;
        let first = now.checked_sub(kept).unwrap_or(now);
        if self.next.len() >= self.removed_at {
            self.next.retain(|_, next| *next > first);
            self.removed_at = LEAST.max(2 * self.next.len());
        }
        let next = self.next.entry(account.clone()).or_insert(first);
        let place = (*next).clamp(first, now + limits::REFUSAL_WAIT);
        *next = place + limits::REFUSAL_INTERVAL;
        place.saturating_duration_since(now)
    }
}

impl Relay {
    /// The time until a refusal leaves, and the charge for it; `None` if it leaves now. The head of
    /// the request was dropped.
    pub(super) fn refusal_wait(
        &self,
        scope: &RequestScope,
        error: &Error,
    ) -> Option<(Duration, Reserved)> {
        let account = &scope.service.get().filter(|_| error.is_cheap())?.account;
        let wait = self.refusals.borrow_mut().take(account, Instant::now());
        let memory = &self.upstream.tunnels.relay_memory;
        // Callers without a credential can cause them: half of the share is left to requests.
        let charge = || memory.spare(account, limits::WAITING_REFUSAL);
        (!wait.is_zero())
            .then(charge)?
            .map(|charged| (wait, charged))
    }
}
