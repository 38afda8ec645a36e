//! Keys of agents that a renewal has replaced. The record of an agent keeps the key of the
//! certificate before, in case that the agent never gets the new certificate. Once a tunnel has
//! used the new one, the control plane forgets that key.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use crate::limits;
use gw_shared::id::AgentId;
use gw_shared::runtime;
use gw_store::PublicKeyHash;

use crate::tunnel::Tunnels;

/// Agents of one worker that have used their new key, for the control plane.
#[derive(Default)]
pub(crate) struct ReplacedKeys {
    /// With the key that was used.
    waiting: RefCell<BTreeMap<AgentId, PublicKeyHash>>,
    is_running: Cell<bool>,
}

/// Takes note that a tunnel of the agent was opened with `key`. Has the control plane forget the
/// key before it, if there is one. Never waits: if too many agents wait already, the next tunnel of
/// this one tries again.
pub(crate) fn used(tunnels: &Rc<Tunnels>, agent: &AgentId, key: PublicKeyHash) {
    let directory = tunnels.directory.get();
    if directory
        .agent(agent.as_str())
        .and_then(|agent| agent.replacing_key.as_ref())
        != Some(&key)
    {
        return;
    }
    let keys = &tunnels.replaced_keys;
    let mut waiting = keys.waiting.borrow_mut();
    if waiting.len() < limits::REPLACED_KEYS {
        waiting.insert(agent.clone(), key);
    }
    if !keys.is_running.replace(true) {
        runtime::spawn(forget(Rc::clone(tunnels)));
    }
}

/// Has the keys forgotten, one at a time, so that enrollments and renewals wait for one of them at
/// most.
async fn forget(tunnels: Rc<Tunnels>) {
    let keys = &tunnels.replaced_keys;
    let next = || keys.waiting.borrow_mut().pop_first();
    while let Some((agent, key)) = next() {
        let id = agent.clone();
        if let Err(error) = tunnels
            .executor
            .run(move |control| control.forget_replaced_key(&id, &key))
            .await
        {
            tracing::warn!(
                %agent, %error,
                "the replaced key of an agent still signs certificate requests; the agent's next \
                 tunnel tries again"
            );
            // As for this agent: the store is away, or another process has it.
            keys.waiting.borrow_mut().clear();
        }
    }
    keys.is_running.set(false);
}
