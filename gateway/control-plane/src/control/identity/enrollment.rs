//! Enrollment of agents.

use std::time::Duration;

use gw_base::clock::Timestamp;
use gw_base::error::Error;
use gw_interface::auth::enrollment_token::parse_token;
use gw_shared::id::{AgentId, EnrollmentId};
use gw_shared::identity::enrollment::{EnrollReply, EnrollRequest, EnrollmentStatus, StatusReply};
use gw_shared::identity::secret::{Secret, SecretHash};
use gw_shared::version::later_members::LaterMembers;
use gw_store::{
    AgentRecord, Approval, Directory, EnrollmentRecord, EnrollmentTokenRecord, RecordId, Records,
    Step, StoredRecord,
};
use serde_json::json;

use crate::control::records::enrollment_token::TOKEN_SHOWN;
use crate::control::{Actor, Control, ControlError, Plan, checked_name, new_secret};

/// Time that an enrollment may wait for approval and its first certificate.
const ENROLLMENT_LIFETIME: Duration = Duration::from_secs(7 * 24 * 3600);
/// Interval at which an agent polls for approval.
const POLL_AFTER_SECONDS: u32 = 5;

/// Enrolls an agent and counts the use of its token.
pub fn enroll(control: &Control, request: &EnrollRequest) -> Result<EnrollReply, ControlError> {
    control
        .agent_versions
        .check(&request.version)
        .map_err(|mismatch| ControlError::Refused(Error::VersionMismatch(mismatch.to_string())))?;
    let name = checked_name(&request.name)
        .map_err(|error| ControlError::Refused(Error::InvalidRequest(error.to_string())))?;
    let refused = |state| ControlError::Refused(Error::EnrollmentTokenInvalid(state));
    let (id, secret) = parse_token(&request.token).ok_or(refused("unknown or deleted"))?;
    control.change(&Actor::EnrollmentToken(id.clone()), |records, now| {
        let token = records
            .enrollment_tokens
            .get(&id)
            .filter(|token| token.secret.matches(secret));
        let token = token.ok_or(refused("unknown or deleted"))?;
        if token.is_used_up() {
            return Err(refused("used up"));
        }
        if now >= token.expires_at {
            return Err(refused("expired"));
        }
        let enrollment_secret = format!("gw_es_{}", new_secret().reveal());
        let enrollment = EnrollmentRecord {
            id: EnrollmentId::random(),
            secret: SecretHash::of(&enrollment_secret),
            expires_at: now.after(ENROLLMENT_LIFETIME),
            later: LaterMembers::default(),
        };
        let enrollment_id = enrollment.id.clone();
        let agent = new_agent(token, &name, &request.version, enrollment, now);
        let reply = EnrollReply {
            enrollment_id,
            agent_id: agent.id.clone(),
            enrollment_secret,
            status: agent.status,
            poll_after_seconds: POLL_AFTER_SECONDS,
        };
        let used = EnrollmentTokenRecord {
            used: token.times_used() + 1,
            used_by: Some(agent.id.clone()),
            ..token.clone()
        };
        Ok(Plan {
            action: "agent.enroll",
            account: Some(agent.account.clone()),
            target: agent.id.to_string(),
            detail: json!({
                "name": agent.name,
                "services": agent.services,
                "status": agent.status,
                "use": used.used,
                "uses": used.uses,
            }),
            output: reply,
            steps: vec![
                Step::Put(StoredRecord::EnrollmentToken(used)),
                Step::Put(StoredRecord::Agent(agent)),
            ],
        })
    })
}

/// The agent that enrolls with `token`.
fn new_agent(
    token: &EnrollmentTokenRecord,
    name: &str,
    version: &str,
    enrollment: EnrollmentRecord,
    now: Timestamp,
) -> AgentRecord {
    AgentRecord {
        id: AgentId::random(),
        account: token.account.clone(),
        name: name.to_owned(),
        services: token.services.clone(),
        status: match token.approval {
            Approval::Auto => EnrollmentStatus::Approved,
            Approval::Manual => EnrollmentStatus::Pending,
        },
        standby: false,
        ephemeral: token.ephemeral,
        absent_since: None,
        enrollment_token: Some(token.id.clone()),
        version: Some(version.to_owned()),
        enrollment: Some(Box::new(enrollment)),
        key: None,
        previous_key: None,
        certificate_not_after: None,
        authority: None,
        created_at: now,
        later: LaterMembers::default(),
    }
}

/// The status of an enrollment.
pub fn status(control: &Control, id: &str, secret: &Secret) -> Result<StatusReply, ControlError> {
    let state = control.state();
    let agent = enrolled(&state.directory, secret)?;
    let agent = of_enrollment(&state.records, &agent, Some(id), secret, Timestamp::now())?;
    Ok(StatusReply {
        status: agent.status,
        agent_id: (agent.status == EnrollmentStatus::Approved).then(|| agent.id.clone()),
        poll_after_seconds: POLL_AFTER_SECONDS,
    })
}

/// Deletes expired tokens, and enrollments that expired before they were approved.
pub(crate) fn forget_old(control: &Control, now: Timestamp) -> Result<(), ControlError> {
    control.change(&Actor::Gateway, |records, _| {
        let tokens = records
            .enrollment_tokens
            .values()
            .filter(|token| now > token.expires_at.after(TOKEN_SHOWN))
            .map(|token| RecordId::EnrollmentToken(token.id.clone()));
        let agents = records
            .agents
            .values()
            .filter(|agent| agent.status == EnrollmentStatus::Pending)
            .filter(|agent| {
                agent
                    .enrollment
                    .as_ref()
                    .is_none_or(|enrollment| now >= enrollment.expires_at)
            })
            .map(|agent| RecordId::Agent(agent.id.clone()));
        let old: Vec<RecordId> = tokens.chain(agents).collect();
        Ok(Plan {
            action: "enrollment.expire",
            account: None,
            target: format!("{} records", old.len()),
            detail: json!({}),
            output: (),
            steps: old.into_iter().map(Step::Delete).collect(),
        })
    })
}

/// Finds the agent by the secret of its enrollment, which may have expired.
pub(crate) fn enrolled(directory: &Directory, secret: &Secret) -> Result<AgentId, ControlError> {
    let agent = directory.enrolled(&SecretHash::of(secret.reveal()));
    agent
        .cloned()
        .ok_or(ControlError::Refused(Error::EnrollmentInvalid))
}

/// The agent `agent`, if its enrollment is in force and has this secret, and this id if one is
/// given.
pub(crate) fn of_enrollment<'a>(
    records: &'a Records,
    agent: &AgentId,
    id: Option<&str>,
    secret: &Secret,
    now: Timestamp,
) -> Result<&'a AgentRecord, ControlError> {
    let is_proved = |enrollment: &EnrollmentRecord| {
        #[cfg(test)]
        tests::EXAMINED.with(|examined| examined.set(examined.get() + 1));
        enrollment.secret.matches(secret.reveal())
            && id.is_none_or(|id| enrollment.id.as_str() == id)
            && now < enrollment.expires_at
    };
    let agent = records
        .agents
        .get(agent)
        .filter(|agent| agent.enrollment.as_deref().is_some_and(is_proved));
    agent.ok_or(ControlError::Refused(Error::EnrollmentInvalid))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use gw_base::service::hostname::Region;
    use gw_shared::id::AccountId;

    use super::*;

    thread_local! {
        /// Enrollments that were compared with a secret.
        pub(crate) static EXAMINED: Cell<usize> = const { Cell::new(0) };
    }

    fn records(agents: usize) -> Records {
        let agents = (0..agents).map(|number| {
            let secret = SecretHash::of(&number.to_string());
            let enrollment = EnrollmentRecord {
                id: EnrollmentId::random(),
                secret,
                expires_at: Timestamp(10),
                later: LaterMembers::default(),
            };
            StoredRecord::Agent(AgentRecord {
                id: AgentId::random(),
                account: AccountId::new("acme").unwrap(),
                name: number.to_string(),
                services: Default::default(),
                status: EnrollmentStatus::Pending,
                standby: false,
                ephemeral: false,
                absent_since: None,
                enrollment_token: None,
                version: None,
                enrollment: Some(Box::new(enrollment)),
                key: None,
                previous_key: None,
                certificate_not_after: None,
                authority: None,
                created_at: Timestamp(1),
                later: LaterMembers::default(),
            })
        });
        agents.collect()
    }

    /// Name of the agent that proves itself by `secret`, and the enrollments that were examined for
    /// it.
    fn find(
        records: &Records,
        directory: &Directory,
        secret: &str,
        id: Option<&str>,
        now: i64,
    ) -> (Option<String>, usize) {
        EXAMINED.set(0);
        let secret = Secret::new(secret.to_owned());
        let found = enrolled(directory, &secret);
        let found = found
            .and_then(|agent| of_enrollment(records, &agent, id, &secret, Timestamp(now)).cloned());
        (found.ok().map(|agent| agent.name), EXAMINED.get())
    }

    #[test]
    fn one_enrollment_is_examined_however_many_agents_there_are() {
        for agents in [10, 100_000] {
            let records = records(agents);
            let directory = Directory::new(&records, &Region::new("eu1", "example.com"), 1);
            for number in [0, agents / 2, agents - 1] {
                let name = number.to_string();
                assert_eq!(
                    find(&records, &directory, &name, None, 9),
                    (Some(name), 1),
                    "of {agents}"
                );
            }
            assert_eq!(
                find(&records, &directory, "unknown", None, 9),
                (None, 0),
                "of {agents}"
            );
        }
    }

    #[test]
    fn an_enrollment_is_found_by_its_secret_and_id_until_it_expires() {
        let records = records(2);
        let directory = Directory::new(&records, &Region::new("eu1", "example.com"), 1);
        let id = |name: &str| {
            let agent = records
                .agents
                .values()
                .find(|agent| agent.name == name)
                .unwrap();
            agent.enrollment.as_ref().unwrap().id.to_string()
        };
        let find = |secret, id: Option<&str>, now| find(&records, &directory, secret, id, now).0;
        assert_eq!(find("0", Some(&id("0")), 9).as_deref(), Some("0"));
        assert_eq!(find("0", Some(&id("1")), 9), None);
        assert_eq!(find("0", None, 10), None);
    }
}
