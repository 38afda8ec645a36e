//! Deletion of ephemeral agents, such as the pods of a Deployment, an hour after their last tunnel.
//!
//! The hour is counted from `absent_since` of the record: written once when an agent has lost its
//! last tunnel, and removed when it has one again. So it goes on where it was after the gateway was
//! replaced or restarted, and an agent that stays connected costs no change.

use std::collections::BTreeSet;
use std::time::Duration;

use gw_base::clock::Timestamp;
use gw_shared::id::AccountId;
use gw_shared::identity::enrollment::EnrollmentStatus;
use gw_store::{AgentRecord, RecordId, Records, Step, StoredRecord};
use serde_json::json;

use crate::control::{Actor, Control, ControlError, Plan};

/// Time without a tunnel after which an ephemeral agent is deleted.
const DELETED_AFTER: Duration = Duration::from_secs(3600);
/// Agents that the audit entry of a deletion names.
const NAMED_AGENTS: usize = 100;

/// Whether there are agents that [`note_absent`] and [`delete_absent`] look at.
pub fn exist(control: &Control) -> bool {
    control.look_at(|records| ephemeral_agents(records).next().is_some())
}

/// Notes which ephemeral agents have lost their last tunnel, and which have one again. `connected`
/// are the ids of all agents with a tunnel, to any node.
pub fn note_absent(
    control: &Control,
    connected: &BTreeSet<String>,
    now: Timestamp,
) -> Result<(), ControlError> {
    control.change(&Actor::Gateway, |records, _| {
        let changed = ephemeral_agents(records).filter_map(|agent| {
            let absent_since = absent_since(agent, connected, now);
            (absent_since != agent.absent_since).then(|| AgentRecord {
                absent_since,
                ..agent.clone()
            })
        });
        let steps: Vec<Step> = changed.map(StoredRecord::Agent).map(Step::Put).collect();
        Ok(Plan {
            action: "agent.note_absence",
            account: None,
            target: format!("{} ephemeral agents", steps.len()),
            detail: json!({}),
            output: (),
            steps,
        })
    })
}

/// Deletes the ephemeral agents that have had no tunnel for an hour.
pub fn delete_absent(
    control: &Control,
    connected: &BTreeSet<String>,
    now: Timestamp,
) -> Result<(), ControlError> {
    let accounts: BTreeSet<AccountId> = control.look_at(|records| {
        ended(records, connected, now)
            .map(|agent| agent.account.clone())
            .collect()
    });
    for account in accounts {
        control.change(&Actor::Gateway, |records, _| {
            let ended: Vec<&AgentRecord> = ended(records, connected, now)
                .filter(|agent| agent.account == account)
                .collect();
            let named: Vec<&str> = ended
                .iter()
                .take(NAMED_AGENTS)
                .map(|agent| agent.id.as_str())
                .collect();
            Ok(Plan {
                action: "agent.expire",
                account: Some(account.clone()),
                target: format!("{} ephemeral agents", ended.len()),
                detail: json!({ "agents": named }),
                output: (),
                steps: ended
                    .iter()
                    .map(|agent| Step::Delete(RecordId::Agent(agent.id.clone())))
                    .collect(),
            })
        })?;
    }
    Ok(())
}

/// Ephemeral agents that may have tunnels. An agent that waits for approval has none yet, and
/// expires with its enrollment. A revoked one stays: without its record, it could enroll again with
/// its token.
fn ephemeral_agents(records: &Records) -> impl Iterator<Item = &AgentRecord> {
    let agents = records.agents.values();
    agents.filter(|agent| agent.ephemeral && agent.status == EnrollmentStatus::Approved)
}

/// Since when the agent has no tunnel; `None` if it has one.
fn absent_since(
    agent: &AgentRecord,
    connected: &BTreeSet<String>,
    now: Timestamp,
) -> Option<Timestamp> {
    if connected.contains(agent.id.as_str()) {
        return None;
    }
    // A later time than now is of a clock that was set back since.
    Some(agent.absent_since.map_or(now, |since| since.min(now)))
}

/// Agents to delete.
fn ended<'a>(
    records: &'a Records,
    connected: &'a BTreeSet<String>,
    now: Timestamp,
) -> impl Iterator<Item = &'a AgentRecord> {
    let is_ended = move |agent: &&AgentRecord| {
        let is_connected = connected.contains(agent.id.as_str());
        !is_connected
            && agent
                .absent_since
                .is_some_and(|since| now.since(since) >= DELETED_AFTER)
    };
    ephemeral_agents(records).filter(is_ended)
}
