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

#[cfg(test)]
mod tests {
    use gw_shared::id::AgentId;
    use gw_shared::version::later_members::LaterMembers;
    use gw_store::AuditQuery;

    use super::*;
    use crate::control::AuditEntryView;
    use crate::control::changes::audit;
    use crate::control::tests::TemporaryControl;

    const NOON: i64 = 1_800_000_000;
    const HOUR: i64 = 3600;

    /// A control plane, and what the job does with it.
    struct Job(TemporaryControl);

    impl Job {
        fn new() -> Self {
            Self(TemporaryControl::start(|_| {}))
        }

        /// Stores an approved ephemeral agent after `change`; its id.
        fn put(&self, change: fn(&mut AgentRecord)) -> String {
            let mut agent = AgentRecord {
                id: AgentId::random(),
                account: AccountId::new("acme").unwrap(),
                name: "pod".to_owned(),
                services: BTreeSet::new(),
                status: EnrollmentStatus::Approved,
                standby: false,
                ephemeral: true,
                absent_since: None,
                enrollment_token: None,
                version: None,
                enrollment: None,
                key: None,
                previous_key: None,
                certificate_not_after: None,
                authority: None,
                created_at: Timestamp(1),
                later: LaterMembers::default(),
            };
            change(&mut agent);
            let id = agent.id.to_string();
            self.0.put(&StoredRecord::Agent(agent)).unwrap();
            id
        }

        fn sweep(&self, connected: &BTreeSet<String>, now: i64) {
            note_absent(&self.0, connected, Timestamp(now)).unwrap();
            delete_absent(&self.0, connected, Timestamp(now)).unwrap();
        }

        fn agents(&self) -> BTreeSet<String> {
            let agents = self.0.records().agents;
            agents.into_keys().map(|id| id.to_string()).collect()
        }

        /// The entries of the audit log with this action, newest first.
        fn logged(&self, action: &str) -> Vec<AuditEntryView> {
            let query = AuditQuery {
                account: None,
                before: None,
                limit: 100,
            };
            let mut log = audit::list(&self.0, &query).unwrap().items;
            log.retain(|entry| entry.action == action);
            log
        }
    }

    #[test]
    fn replicas_are_gone_an_hour_after_they_have_ended() {
        let job = Job::new();
        let replicas: BTreeSet<String> = (0..3).map(|_| job.put(|_| {})).collect();
        // While they are connected, time does not matter.
        job.sweep(&replicas, NOON);
        job.sweep(&replicas, NOON + 5 * HOUR);
        assert_eq!(job.agents(), replicas);

        let ended = NOON + 6 * HOUR;
        for (now, left) in [(ended, 3), (ended + HOUR - 1, 3), (ended + HOUR, 0)] {
            job.sweep(&BTreeSet::new(), now);
            assert_eq!(job.agents().len(), left, "at {now}");
        }
        let entries = job.logged("agent.expire");
        let [entry] = entries.as_slice() else {
            panic!("{entries:?}");
        };
        assert_eq!(
            (entry.actor.as_str(), entry.account.as_deref()),
            ("gateway", Some("acme"))
        );
        assert_eq!(entry.detail["agents"], json!(replicas));
    }

    #[test]
    fn only_approved_ephemeral_agents_without_a_tunnel_are_deleted() {
        let job = Job::new();
        let absent = job.put(|_| {});
        let returning = job.put(|_| {});
        let before_the_clock_was_set_back =
            job.put(|agent| agent.absent_since = Some(Timestamp(NOON + 9 * HOUR)));
        let kept = [
            job.put(|agent| agent.ephemeral = false),
            job.put(|agent| agent.status = EnrollmentStatus::Revoked),
            job.put(|agent| agent.status = EnrollmentStatus::Pending),
        ];
        let notes = || job.logged("agent.note_absence").len();

        let connected = BTreeSet::from([returning.clone()]);
        job.sweep(&BTreeSet::new(), NOON);
        job.sweep(&connected, NOON + HOUR - 1);
        assert_eq!(job.agents().len(), 6);
        job.sweep(&connected, NOON + HOUR);
        let left = job.agents();
        assert!(
            !left.contains(&absent) && !left.contains(&before_the_clock_was_set_back),
            "{left:?}"
        );

        // The hour of an agent that came back begins again, and nothing is written while nothing
        // changes.
        let noted = NOON + 2 * HOUR;
        job.sweep(&BTreeSet::new(), noted);
        let noted_before = notes();
        job.sweep(&BTreeSet::new(), noted + HOUR - 1);
        assert_eq!(
            (notes(), job.agents().contains(&returning)),
            (noted_before, true)
        );
        job.sweep(&BTreeSet::new(), noted + HOUR);
        assert_eq!(job.agents(), BTreeSet::from(kept));
    }
}
