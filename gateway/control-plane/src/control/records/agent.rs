//! Enrolled agents.

use std::collections::BTreeSet;

use gw_base::page::{Page, PageQuery};
use gw_shared::id::{AccountId, AgentId, EnrollmentId, EnrollmentTokenId, ServiceId};
use gw_shared::identity::enrollment::EnrollmentStatus;
use gw_store::{AgentRecord, RecordId, Records, Step, StoredRecord};
use gw_telemetry::counters::{
    AgentUpdate, EndedTunnel, RefusedVersion, TunnelReport, WorkerReport,
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use super::account;
use super::name::NameText;
use super::service::{ServiceIdText, checked_list};
use crate::control::{Actor, Control, ControlError, Plan, checked_name};

/// A program beside a backend that keeps tunnels to the gateway.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Agent)]
pub struct AgentView {
    /// Id of the agent.
    #[schema(value_type = String)]
    pub agent_id: AgentId,
    /// The enrollment that it came by, as its own log has it.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub enrollment_id: Option<EnrollmentId>,
    /// Account that the agent belongs to.
    #[schema(value_type = String)]
    pub account: AccountId,
    /// Name for administrators.
    pub name: String,
    /// Services that the agent may serve.
    #[schema(value_type = Vec<String>)]
    pub services: BTreeSet<ServiceId>,
    /// Status of the enrollment: `pending`, `approved` or `revoked`.
    #[schema(value_type = String, example = "approved")]
    pub status: EnrollmentStatus,
    /// Whether the agent gets requests only while no other agent of the service can take them. An
    /// agent can also say so itself, in `agent.toml`.
    #[serde(default)]
    pub standby: bool,
    /// Version that runs, or that ran when the agent enrolled if it has no tunnel.
    pub version: Option<String>,
    /// Whether the agent updates itself, and how far it is; absent without a tunnel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update: Option<AgentUpdate>,
    /// Its last refused tunnel, if its version is not served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused_version: Option<RefusedVersion>,
    /// Whether the agent is deleted when it has had no tunnel for an hour: it enrolled with a token
    /// that says so.
    #[serde(default)]
    pub ephemeral: bool,
    /// When an ephemeral agent was first seen without a tunnel; absent while it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    pub absent_since: Option<String>,
    /// The last tunnel of each service that ended, of the last day.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ended_tunnels: Vec<EndedTunnel>,
    /// The token that it enrolled with, which may no longer exist.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub enrollment_token: Option<EnrollmentTokenId>,
    /// When its newest certificate expires.
    #[schema(format = DateTime)]
    pub certificate_not_after: Option<String>,
    /// When the agent enrolled, RFC 3339.
    #[schema(format = DateTime)]
    pub created_at: String,
    /// Its live tunnels, one a service.
    pub tunnels: Vec<TunnelReport>,
    /// Slots of nodes that do not answer, so that tunnels to them are missing; absent if all
    /// answer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing_nodes: Vec<u16>,
}

/// What the workers of a node report of agents.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct LiveAgents {
    /// Open tunnels.
    #[serde(rename = "list")]
    pub tunnels: Vec<TunnelReport>,
    /// Agents that were refused because of their version.
    #[serde(default)]
    pub(crate) refused_versions: Vec<RefusedVersion>,
    /// Tunnels that ended.
    #[serde(default)]
    pub ended_tunnels: Vec<EndedTunnel>,
}

/// Changes of an agent. Omitted members keep their values.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AgentChanges {
    /// Name for administrators, 1 to 100 characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<NameText>)]
    pub name: Option<String>,
    /// The agent hears of it through its tunnels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<ServiceIdText>>, max_items = 500)]
    pub services: Option<Vec<String>>,
    /// Whether the agent gets requests only while no other agent of the service can take them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standby: Option<bool>,
}

impl AgentView {
    fn new(record: &AgentRecord, live: &LiveAgents) -> Self {
        let mut view = Self {
            agent_id: record.id.clone(),
            enrollment_id: record
                .enrollment
                .as_ref()
                .map(|enrollment| enrollment.id.clone()),
            account: record.account.clone(),
            name: record.name.clone(),
            services: record.services.clone(),
            status: record.status,
            standby: record.standby,
            ephemeral: record.ephemeral,
            absent_since: record.absent_since.map(|at| at.to_string()),
            version: record.version.clone(),
            update: None,
            refused_version: None,
            ended_tunnels: Vec::new(),
            enrollment_token: record.enrollment_token.clone(),
            certificate_not_after: record.certificate_not_after.map(|at| at.to_string()),
            created_at: record.created_at.to_string(),
            tunnels: Vec::new(),
            missing_nodes: Vec::new(),
        };
        view.add(live);
        view
    }

    /// Adds what a node reports.
    pub fn add(&mut self, live: &LiveAgents) {
        let of_agent = live
            .tunnels
            .iter()
            .filter(|tunnel| tunnel.agent_id == self.agent_id.as_str());
        self.tunnels.extend(of_agent.cloned());
        // The newest tunnel tells the version that the agent runs now.
        if let Some(newest) = self.tunnels.iter().min_by_key(|tunnel| tunnel.age_seconds) {
            self.version = Some(newest.agent_version.clone());
            self.update.clone_from(&newest.update);
        }
        let of_agent = live
            .refused_versions
            .iter()
            .filter(|refused| refused.agent_id == self.agent_id.as_str());
        let last = of_agent
            .chain(&self.refused_version)
            .min_by_key(|refused| refused.seconds_ago)
            .cloned();
        self.refused_version = last;
        let of_agent = live
            .ended_tunnels
            .iter()
            .filter(|ended| ended.agent_id == self.agent_id.as_str());
        self.ended_tunnels.extend(of_agent.cloned());
        // The service may have moved between nodes or workers.
        self.ended_tunnels.sort_by(|one, other| {
            (&one.service, one.seconds_ago).cmp(&(&other.service, other.seconds_ago))
        });
        self.ended_tunnels
            .dedup_by(|older, newer| older.service == newer.service);
    }

    /// The ends of tunnels of services to which the agent has no tunnel now.
    pub fn ended_without_another(&self) -> impl Iterator<Item = &EndedTunnel> {
        let has_tunnel =
            |service: &str| self.tunnels.iter().any(|tunnel| tunnel.service == service);
        self.ended_tunnels
            .iter()
            .filter(move |ended| !has_tunnel(&ended.service))
    }
}

impl LiveAgents {
    /// Adds the tunnels and refused agents of one worker.
    pub fn add(&mut self, report: WorkerReport) {
        self.tunnels.extend(report.tunnels);
        self.refused_versions.extend(report.refused_versions);
        self.ended_tunnels.extend(report.ended_tunnels);
    }
}

/// The agents of an account; with `enrollment_token`, only those that enrolled with it.
pub fn list(
    control: &Control,
    account: &str,
    enrollment_token: Option<&str>,
    query: &PageQuery,
) -> Result<Page<AgentView>, ControlError> {
    let live = live_agents(control);
    let state = control.state();
    let account = &account::find(&state.records, account)?.id;
    let agents = state.records.agents.values().filter(|record| {
        let token = record
            .enrollment_token
            .as_ref()
            .map(EnrollmentTokenId::as_str);
        record.account == *account && (enrollment_token.is_none() || token == enrollment_token)
    });
    Ok(Page::of(
        agents,
        |record| record.id.as_str(),
        query,
        |record| AgentView::new(record, &live),
    )?)
}

/// Returns an agent of the account. Fails with [`ControlError::NotFound`] if it does not exist.
pub fn show(control: &Control, account: &str, id: &str) -> Result<AgentView, ControlError> {
    let live = live_agents(control);
    find(&control.state().records, account, id).map(|record| AgentView::new(record, &live))
}

/// Changes the name, services or standby of an agent.
pub fn change(
    control: &Control,
    actor: &Actor,
    account: &str,
    id: &str,
    changes: &AgentChanges,
) -> Result<AgentView, ControlError> {
    let name = changes.name.as_deref().map(checked_name).transpose()?;
    edit(
        control,
        actor,
        account,
        id,
        "agent.change",
        &json!(changes),
        |records, record| {
            if let Some(services) = &changes.services {
                record.services = checked_list(records, &record.account, "services", services)?;
            }
            if let Some(name) = &name {
                record.name.clone_from(name);
            }
            record.standby = changes.standby.unwrap_or(record.standby);
            Ok(())
        },
    )
}

/// Approves a pending agent, which can then get its certificate.
pub fn approve(
    control: &Control,
    actor: &Actor,
    account: &str,
    id: &str,
) -> Result<AgentView, ControlError> {
    edit(
        control,
        actor,
        account,
        id,
        "agent.approve",
        &json!({}),
        |_, record| {
            if record.status == EnrollmentStatus::Revoked {
                return Err(ControlError::Conflict(
                    "this agent is revoked; enroll it again".to_owned(),
                ));
            }
            record.status = EnrollmentStatus::Approved;
            Ok(())
        },
    )
}

/// Revokes an agent permanently: its tunnels end, and its certificate and key are refused.
pub fn revoke(
    control: &Control,
    actor: &Actor,
    account: &str,
    id: &str,
) -> Result<AgentView, ControlError> {
    edit(
        control,
        actor,
        account,
        id,
        "agent.revoke",
        &json!({}),
        |_, record| {
            record.status = EnrollmentStatus::Revoked;
            Ok(())
        },
    )
}

/// Deletes an agent. Fails with [`ControlError::NotFound`] if it does not exist.
pub fn delete(
    control: &Control,
    actor: &Actor,
    account: &str,
    id: &str,
) -> Result<(), ControlError> {
    control.change(actor, |records, _| {
        let record = find(records, account, id)?;
        Ok(Plan {
            steps: vec![Step::Delete(RecordId::Agent(record.id.clone()))],
            action: "agent.delete",
            account: Some(record.account.clone()),
            target: record.id.to_string(),
            detail: json!({ "name": record.name }),
            output: (),
        })
    })
}

fn edit(
    control: &Control,
    actor: &Actor,
    account: &str,
    id: &str,
    action: &'static str,
    detail: &serde_json::Value,
    edit: impl Fn(&Records, &mut AgentRecord) -> Result<(), ControlError>,
) -> Result<AgentView, ControlError> {
    let edited = control.change(actor, |records, _| {
        let record = find(records, account, id)?;
        let mut edited = record.clone();
        edit(records, &mut edited)?;
        if edited == *record {
            return Ok(Plan::already(edited));
        }
        Ok(Plan {
            steps: vec![Step::Put(StoredRecord::Agent(edited.clone()))],
            action,
            account: Some(edited.account.clone()),
            target: edited.id.to_string(),
            detail: detail.clone(),
            output: edited,
        })
    })?;
    Ok(AgentView::new(&edited, &live_agents(control)))
}

/// What the workers of this node report of agents.
fn live_agents(control: &Control) -> LiveAgents {
    let mut live = LiveAgents::default();
    control
        .reports()
        .into_iter()
        .for_each(|report| live.add(report));
    live
}

fn find<'a>(
    records: &'a Records,
    account: &str,
    id: &str,
) -> Result<&'a AgentRecord, ControlError> {
    let account = &account::find(records, account)?.id;
    records
        .agents
        .get(id)
        .filter(|record| record.account == *account)
        .ok_or_else(|| ControlError::not_found("agent", id))
}
