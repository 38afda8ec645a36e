//! Enrollment tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use gw_base::page::{Page, PageQuery};
use gw_interface::auth::enrollment_token::TOKEN_PREFIX;
use gw_shared::id::{AccountId, AgentId, EnrollmentTokenId, ServiceId};
use gw_shared::identity::secret::SecretHash;
use gw_shared::version::later_members::LaterMembers;
use gw_store::{Approval, EnrollmentTokenRecord, RecordId, Records, Step, StoredRecord};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use super::account;
use super::service::{ServiceIdText, checked_list};
use crate::control::{Actor, Control, ControlError, GatewayAddress, Plan, new_secret};

const LIFETIME_DEFAULT: Duration = Duration::from_secs(600);
const LIFETIME_MAX: Duration = Duration::from_secs(30 * 24 * 3600);
/// Shortest lifetime that is accepted as a text.
const LIFETIME_MIN: Duration = Duration::from_secs(60);
/// Time that an expired token stays in the list.
pub(crate) const TOKEN_SHOWN: Duration = Duration::from_secs(24 * 3600);

/// Lets agents enroll, each once.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = EnrollmentToken)]
pub struct EnrollmentTokenView {
    /// Id of the token.
    #[schema(value_type = String)]
    pub id: EnrollmentTokenId,
    /// Account that the agents will belong to.
    #[schema(value_type = String)]
    pub account: AccountId,
    /// What the agents will serve.
    #[schema(value_type = Vec<String>)]
    pub services: BTreeSet<ServiceId>,
    /// Whether an agent has to wait for an administrator.
    pub approval: Approval,
    /// Whether its agents are deleted when they have had no tunnel for an hour.
    #[serde(default)]
    pub ephemeral: bool,
    /// When the token was created, RFC 3339.
    #[schema(format = DateTime)]
    pub created_at: String,
    /// When the token expires, RFC 3339.
    #[schema(format = DateTime)]
    pub expires_at: String,
    /// Number of agents that may enroll with it.
    pub uses: u32,
    /// Number of agents that have enrolled with it.
    pub used: u32,
    /// Those of them that are not deleted; at most 100. The list of agents has all: ask with
    /// `enrollment_token`.
    #[schema(value_type = Vec<String>, max_items = 100)]
    pub agents: Vec<AgentId>,
}

/// An enrollment token and its text.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = NewEnrollmentTokenCreated)]
pub struct NewEnrollmentTokenView {
    /// The token without its text.
    #[serde(flatten)]
    pub enrollment_token: EnrollmentTokenView,
    /// `gw_et_{id}.{secret}`. Shown this once.
    pub token: String,
    /// Address of the gateway, for the agents.
    #[serde(flatten)]
    pub gateway: GatewayAddress,
}

/// An enrollment token to create.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewEnrollmentToken {
    /// Services of the account that the agents will serve, at least one.
    #[schema(min_items = 1, max_items = 500, value_type = Vec<ServiceIdText>)]
    pub services: Vec<String>,
    /// Whether an agent has to wait for an administrator.
    #[serde(default)]
    pub approval: Approval,
    /// 10 minutes unless given; at most 30 days.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 2_592_000)]
    pub expires_in_seconds: Option<u64>,
    /// Number of agents that may enroll with the token; 1 unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 10_000)]
    pub uses: Option<u32>,
    /// Delete the agents of this token when they have had no tunnel for an hour: for agents that
    /// keep no state, such as the replicas of a Deployment.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ephemeral: bool,
}

impl EnrollmentTokenView {
    /// Most agents in a view; the list of agents has all of them.
    const AGENTS_MAX: usize = 100;

    fn new(record: &EnrollmentTokenRecord, agents: Vec<AgentId>) -> Self {
        Self {
            id: record.id.clone(),
            account: record.account.clone(),
            services: record.services.clone(),
            approval: record.approval,
            ephemeral: record.ephemeral,
            created_at: record.created_at.to_string(),
            expires_at: record.expires_at.to_string(),
            uses: record.uses,
            used: record.times_used(),
            agents,
        }
    }

    /// Whether no further agent may enroll with the token.
    pub fn is_used_up(&self) -> bool {
        self.used >= self.uses
    }
}

impl NewEnrollmentToken {
    /// Most agents that may enroll with one token.
    pub const USES_MAX: u32 = 10_000;

    /// Parses a lifetime with units, such as `30d` or `1h 30m`, into seconds.
    pub fn parse_lifetime(text: &str) -> Result<u64, String> {
        let lifetime = humantime::parse_duration(text.trim()).ok();
        let lifetime = lifetime.filter(|lifetime| (LIFETIME_MIN..=LIFETIME_MAX).contains(lifetime));
        let seconds = lifetime.map(|lifetime| lifetime.as_secs());
        seconds.ok_or_else(|| {
            "must be a time from 1 minute to 30 days, such as 10m, 12h or 30d".to_owned()
        })
    }
}

impl NewEnrollmentTokenView {
    /// Adds the port that the gateway listens on to its address.
    pub(crate) fn on_port(self, port: u16) -> Self {
        Self {
            gateway: self.gateway.on_port(port),
            ..self
        }
    }

    /// The command that enrolls an agent and runs it in front of a program on `backend_port` of its
    /// machine.
    pub fn command(&self, backend_port: u16) -> String {
        self.gateway.agent_command(&self.token, backend_port)
    }
}

/// Creates an enrollment token. Only the returned view holds its text.
pub fn create(
    control: &Control,
    actor: &Actor,
    account: &str,
    new: &NewEnrollmentToken,
) -> Result<NewEnrollmentTokenView, ControlError> {
    let lifetime = new
        .expires_in_seconds
        .map_or(LIFETIME_DEFAULT, Duration::from_secs);
    if lifetime.is_zero() || lifetime > LIFETIME_MAX {
        let message = format!(
            "must be a whole number from 1 to {}",
            LIFETIME_MAX.as_secs()
        );
        return Err(ControlError::invalid("expires_in_seconds", message));
    }
    let uses = new.uses.unwrap_or(1);
    if !(1..=NewEnrollmentToken::USES_MAX).contains(&uses) {
        let message = format!(
            "must be a whole number from 1 to {}",
            NewEnrollmentToken::USES_MAX
        );
        return Err(ControlError::invalid("uses", message));
    }
    let gateway = control.gateway_address();
    control.change(actor, |records, now| {
        let account = &account::find(records, account)?.id;
        let services = checked_list(records, account, "services", &new.services)?;
        if services.is_empty() {
            return Err(ControlError::invalid(
                "services",
                "must name at least one service for the agent",
            ));
        }
        let secret = new_secret();
        let record = EnrollmentTokenRecord {
            id: EnrollmentTokenId::random(),
            account: account.clone(),
            secret: SecretHash::of(secret.reveal()),
            services,
            approval: new.approval,
            ephemeral: new.ephemeral,
            created_at: now,
            expires_at: now.after(lifetime),
            uses,
            used: 0,
            used_by: None,
            later: LaterMembers::default(),
        };
        Ok(Plan {
            action: "enrollment_token.create",
            account: Some(account.clone()),
            target: record.id.to_string(),
            detail: json!(new),
            output: NewEnrollmentTokenView {
                enrollment_token: EnrollmentTokenView::new(&record, Vec::new()),
                token: format!("{TOKEN_PREFIX}{}.{}", record.id, secret.reveal()),
                gateway: gateway.clone(),
            },
            steps: vec![Step::Put(StoredRecord::EnrollmentToken(record))],
        })
    })
}

/// Lists the enrollment tokens of an account, page by page.
pub fn list(
    control: &Control,
    account: &str,
    query: &PageQuery,
) -> Result<Page<EnrollmentTokenView>, ControlError> {
    let state = control.state();
    let account = &account::find(&state.records, account)?.id;
    let tokens = || {
        state
            .records
            .enrollment_tokens
            .values()
            .filter(|record| record.account == *account)
    };
    let agents = enrolled_agents(&state.records, tokens());
    let view = |record: &EnrollmentTokenRecord| {
        EnrollmentTokenView::new(record, agents.get(&record.id).cloned().unwrap_or_default())
    };
    Ok(Page::of(
        tokens(),
        |record| record.id.as_str(),
        query,
        view,
    )?)
}

/// Returns an enrollment token of the account. Fails with [`ControlError::NotFound`] if it does not
/// exist.
pub fn show(
    control: &Control,
    account: &str,
    id: &str,
) -> Result<EnrollmentTokenView, ControlError> {
    let state = control.state();
    let record = find_token(&state.records, account, id)?;
    let agents = enrolled_agents(&state.records, [record]).remove(&record.id);
    Ok(EnrollmentTokenView::new(record, agents.unwrap_or_default()))
}

/// Withdraws a token. Agents that used it stay enrolled.
pub fn delete(
    control: &Control,
    actor: &Actor,
    account: &str,
    id: &str,
) -> Result<(), ControlError> {
    control.change(actor, |records, _| {
        let record = find_token(records, account, id)?;
        Ok(Plan {
            steps: vec![Step::Delete(RecordId::EnrollmentToken(record.id.clone()))],
            action: "enrollment_token.delete",
            account: Some(record.account.clone()),
            target: record.id.to_string(),
            detail: json!({ "used": record.times_used(), "uses": record.uses }),
            output: (),
        })
    })
}

/// The agents that enrolled with each of the tokens and still exist, at most
/// [`EnrollmentTokenView::AGENTS_MAX`] of one token.
fn enrolled_agents<'a>(
    records: &'a Records,
    tokens: impl IntoIterator<Item = &'a EnrollmentTokenRecord>,
) -> BTreeMap<&'a EnrollmentTokenId, Vec<AgentId>> {
    // The record of an agent that enrolled at an earlier version does not name the token.
    let by_earlier_version = |token: &EnrollmentTokenRecord| {
        let agent = token.used_by.as_ref().and_then(|id| records.agents.get(id));
        agent
            .filter(|agent| agent.enrollment_token.is_none())
            .map(|agent| agent.id.clone())
            .into_iter()
            .collect()
    };
    let mut enrolled: BTreeMap<&EnrollmentTokenId, Vec<AgentId>> = tokens
        .into_iter()
        .map(|token| (&token.id, by_earlier_version(token)))
        .collect();
    for agent in records.agents.values() {
        let agents = agent
            .enrollment_token
            .as_ref()
            .and_then(|token| enrolled.get_mut(token));
        if let Some(agents) = agents.filter(|agents| agents.len() < EnrollmentTokenView::AGENTS_MAX)
        {
            agents.push(agent.id.clone());
        }
    }
    enrolled
}

fn find_token<'a>(
    records: &'a Records,
    account: &str,
    id: &str,
) -> Result<&'a EnrollmentTokenRecord, ControlError> {
    let account = &account::find(records, account)?.id;
    records
        .enrollment_tokens
        .get(id)
        .filter(|record| record.account == *account)
        .ok_or_else(|| ControlError::not_found("enrollment token", id))
}

#[cfg(test)]
mod tests {
    use gw_shared::identity::enrollment::EnrollRequest;
    use gw_shared::version::VERSION;
    use gw_store::AgentRecord;

    use super::*;
    use crate::control::identity::enrollment;
    use crate::control::tests::TemporaryControl;

    #[test]
    fn a_token_and_an_agent_of_an_earlier_version_are_shown_together() {
        let control = TemporaryControl::start(|_| {});
        let new = NewEnrollmentToken {
            services: vec!["api".to_owned()],
            ..NewEnrollmentToken::default()
        };
        let created = create(&control, &Actor::Admin, "acme", &new).unwrap();
        let id = created.enrollment_token.id;
        let request = EnrollRequest {
            token: created.token,
            name: "machine".to_owned(),
            version: VERSION.to_owned(),
        };
        let enroll = || enrollment::enroll(&control, &request);
        let agent = enroll().unwrap().agent_id;
        let records = control.records();
        let token = EnrollmentTokenRecord {
            used: 0,
            ..records.enrollment_tokens[&id].clone()
        };
        let record = AgentRecord {
            enrollment_token: None,
            ..records.agents[&agent].clone()
        };
        let earlier = [
            StoredRecord::EnrollmentToken(token),
            StoredRecord::Agent(record),
        ];
        control.put_all(&earlier).unwrap();

        let token = show(&control, "acme", id.as_str()).unwrap();
        assert_eq!((token.used, token.uses), (1, 1));
        assert_eq!(token.agents, [agent]);
        let refused = enroll().err().unwrap().to_string();
        assert!(refused.contains("used up"), "{refused}");
    }

    #[test]
    fn a_lifetime_has_units_and_bounds() {
        let seconds = NewEnrollmentToken::parse_lifetime;
        assert_eq!(
            ["1m", "90s", " 1h 30m", "30d"].map(seconds),
            [60, 90, 5400, 2_592_000].map(Ok)
        );
        for wrong in [
            "",
            "30",
            "59s",
            "31d",
            "30d 1s",
            "-1h",
            "soon",
            "999999999999999y",
        ] {
            assert!(
                seconds(wrong).unwrap_err().contains("1 minute to 30 days"),
                "{wrong}"
            );
        }
    }
}
