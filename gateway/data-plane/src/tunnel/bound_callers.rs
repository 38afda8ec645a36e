//! Callers' connections whose requests go to one agent, because the agent has connections to its
//! backends for each of them.

use std::collections::HashMap;
use std::time::Instant;

use gw_shared::http::caller_connection::CallerName;
use gw_shared::id::AgentId;

use crate::limits;
use crate::memory::relay::Reserved;

/// The named callers' connections of one service.
#[derive(Default)]
pub(super) struct BoundCallers(HashMap<CallerName, BoundCaller>);

struct BoundCaller {
    agent: AgentId,
    used: Instant,
    _memory: Reserved,
}

/// Memory of one caller's connection.
pub(super) const SIZE: usize = 2 * size_of::<(CallerName, BoundCaller)>();

impl BoundCallers {
    /// The agent that the last request of this connection went to.
    pub(super) fn agent_of(&self, caller: CallerName, now: Instant) -> Option<&AgentId> {
        let bound = self.0.get(&caller)?;
        bound.is_used(now).then_some(&bound.agent)
    }

    /// Records that a request of this connection goes to `agent`. The longest idle connection is
    /// forgotten if there are too many. `reserve` charges a new one: without memory, its requests
    /// may go to any agent.
    pub(super) fn bind(
        &mut self,
        caller: CallerName,
        agent: &AgentId,
        reserve: impl FnOnce() -> Option<Reserved>,
        now: Instant,
    ) {
        if let Some(bound) = self.0.get_mut(&caller) {
            bound.used = now;
            bound.agent.clone_from(agent);
            return;
        }
        if self.0.len() >= limits::BOUND_CALLERS
            && let Some(longest_idle) = self.0.iter().min_by_key(|(_, bound)| bound.used)
        {
            let longest_idle = *longest_idle.0;
            self.0.remove(&longest_idle);
        }
        if let Some(memory) = reserve() {
            let bound = BoundCaller {
                agent: agent.clone(),
                used: now,
                _memory: memory,
            };
            self.0.insert(caller, bound);
        }
    }

    /// Forgets connections that have been idle for too long, and returns the memory of a table that
    /// was larger.
    pub(super) fn forget(&mut self, now: Instant) {
        self.0.retain(|_, bound| bound.is_used(now));
        if self.0.capacity() > 4 * self.0.len() {
            self.0.shrink_to_fit();
        }
    }
}

impl BoundCaller {
    fn is_used(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.used) < limits::IDLE
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;
    use std::sync::Arc;
    use std::time::Duration;

    use gw_region::owners::ownership::WorkerId;
    use gw_shared::http::caller_connection::CallerConnection;

    use super::*;
    use crate::memory::relay::RelayMemory;
    use crate::memory::sockets::{SocketBudget, SocketMemory};

    fn name() -> CallerName {
        CallerConnection::name_randomly().name().unwrap()
    }

    fn memory(budget: usize) -> Rc<RelayMemory> {
        let sockets = Arc::new(SocketBudget::new(budget, 1));
        RelayMemory::new(budget, SocketMemory::new(WorkerId(0), sockets))
    }

    #[test]
    fn a_connection_keeps_its_agent_until_it_is_idle_for_long() {
        let memory = memory(1024 * 1024);
        let reserve = || memory.spare(&"demo".parse().unwrap(), SIZE);
        let [one, other] = [AgentId::random(), AgentId::random()];
        let (caller, start) = (name(), Instant::now());
        let mut callers = BoundCallers::default();
        callers.bind(caller, &one, reserve, start);
        let later = start + limits::IDLE / 2;
        assert_eq!(callers.agent_of(caller, later), Some(&one));
        assert_eq!(callers.agent_of(name(), later), None);
        callers.bind(caller, &other, reserve, later);
        let end = later + limits::IDLE;
        let before = end.checked_sub(Duration::from_millis(1)).unwrap();
        callers.forget(before);
        assert_eq!(callers.agent_of(caller, before), Some(&other));
        assert_eq!(callers.agent_of(caller, end), None);
        assert_eq!(memory.charged(), SIZE);
        callers.forget(end);
        assert_eq!(memory.charged(), 0);
        assert_eq!(callers.0.capacity(), 0);
    }

    #[test]
    fn the_longest_idle_of_too_many_connections_is_forgotten() {
        let memory = memory(64 * 1024 * 1024);
        let reserve = || memory.spare(&"demo".parse().unwrap(), SIZE);
        let (agent, start) = (AgentId::random(), Instant::now());
        let names: Vec<_> = (0..=limits::BOUND_CALLERS).map(|_| name()).collect();
        let mut callers = BoundCallers::default();
        for (number, caller) in names.iter().enumerate() {
            // The first one is used all the time.
            let now = start + Duration::from_micros(number as u64);
            callers.bind(names[0], &agent, reserve, now);
            callers.bind(*caller, &agent, reserve, now);
        }
        assert_eq!(memory.charged(), limits::BOUND_CALLERS * SIZE);
        let is_kept = |at: usize| callers.agent_of(names[at], start).is_some();
        assert_eq!([0, 1, 2].map(is_kept), [true, false, true]);
        callers.bind(name(), &agent, || None, start);
        assert_eq!(memory.charged(), (limits::BOUND_CALLERS - 1) * SIZE);
    }
}
