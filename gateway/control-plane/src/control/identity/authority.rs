//! The authority of agents and nodes, and its replacement while they run: another one is trusted
//! first, issues once every node trusts it, and the earlier one ends when nothing uses it any more.

use std::sync::{Arc, PoisonError};

use gw_base::clock::Timestamp;
use gw_base::service::affinity::AffinityKey;
use gw_base::tls::agents::TrustedAuthorities;
use gw_base::tls::node::NodeTls;
use gw_base::tls::pki::{self, Authority, NodeIdentity};
use gw_base::tls::{ServerConfigs, TlsError};
use gw_shared::id::{AccountId, AgentId, AuthorityId};
use gw_shared::identity::enrollment::EnrollmentStatus;
use gw_shared::identity::secret::Secret;
use gw_shared::version::later_members::LaterMembers;
use gw_store::{
    AgentRecord, AuthorityRecord, AuthorityRole, RecordId, Records, Step, StoreError, StoredRecord,
};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use crate::control::{Actor, Control, ControlError, Plan};

/// Common name of the authorities.
pub(crate) const COMMON_NAME: &str = "Gw agents";

/// Most agents that are named.
const NAMED_AGENTS: usize = 100;

/// The authorities in use.
pub(crate) struct Authorities {
    pub(crate) issuing: Arc<Authority>,
    pub(crate) trusted: TrustedAuthorities,
}

/// The authorities of agents and nodes, and what still uses the earlier one.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = AgentCa)]
pub struct AgentCaView {
    /// The authorities, ordered by role.
    pub authorities: Vec<AuthorityView>,
    /// Slots of nodes of the region that do not use the last change yet: the next authority issues
    /// once they do.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits_for_nodes: Vec<u16>,
    /// Approved agents with a certificate that has not expired.
    pub agents: usize,
    /// Those of them whose newest certificate was issued by another authority than the issuing one.
    pub agents_left: usize,
    /// The first hundred of those.
    pub left: Vec<LeftAgent>,
    /// Open tunnels that agents opened with a certificate of another authority than the issuing
    /// one.
    pub tunnels_left: usize,
    /// Slots of nodes of the region whose own certificate is of another authority than the issuing
    /// one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes_left: Vec<u16>,
    /// Slots of nodes that do not answer, so that their tunnels are missing; absent if all answer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing_nodes: Vec<u16>,
}

/// An authority of agents and nodes.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = AgentCaAuthority)]
pub struct AuthorityView {
    /// The subject key identifier of its certificate.
    #[schema(value_type = String)]
    pub id: AuthorityId,
    /// What the authority is used for.
    pub role: AuthorityRole,
    /// When its certificate expires, RFC 3339.
    #[schema(format = DateTime)]
    pub not_after: Option<String>,
    /// Its certificate, PEM.
    pub certificate: String,
}

/// An agent whose newest certificate is of another authority than the issuing one.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct LeftAgent {
    /// Account that the agent belongs to.
    #[schema(value_type = String)]
    pub account: AccountId,
    /// Id of the agent.
    #[schema(value_type = String)]
    pub agent_id: AgentId,
    /// Name for administrators.
    pub name: String,
    /// When that certificate expires. The agent renews it long before if it is connected.
    #[schema(format = DateTime)]
    pub certificate_not_after: Option<String>,
}

/// How to replace the authority.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AuthorityReplacement {
    /// End all others now and have a new one issue: for when their keys are in the wrong hands.
    /// Tunnels end, and agents ask for other certificates with their keys.
    #[serde(default)]
    pub immediately: bool,
}

/// How to end the earlier authority.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AuthorityEnd {
    /// End it although agents, tunnels or nodes still use it: their requests are aborted, and
    /// agents ask for other certificates with their keys.
    #[serde(default)]
    pub force: bool,
}

impl Authorities {
    /// The authorities in the records; without any, `first`.
    pub(crate) fn of(records: &Records, first: &Arc<Authority>) -> Result<Self, ControlError> {
        if records.authorities.is_empty() {
            let trusted = vec![identified(first.certificate_pem())?];
            let trusted = TrustedAuthorities {
                issuing: trusted[0].0.clone(),
                trusted,
                ended: Vec::new(),
            };
            return Ok(Self {
                issuing: Arc::clone(first),
                trusted,
            });
        }
        let Some((issuing, key)) = find(records, AuthorityRole::Issuing)
            .and_then(|record| record.private_key.as_ref().map(|key| (record, key)))
        else {
            return Err(StoreError::Corrupt(
                "no authority of agents has the role `issuing` and a key".to_owned(),
            )
            .into());
        };
        let others = [AuthorityRole::Next, AuthorityRole::Earlier]
            .into_iter()
            .filter_map(|role| find(records, role));
        let trusted = [issuing]
            .into_iter()
            .chain(others)
            .map(|record| identified(&record.certificate));
        let ended = records
            .authorities
            .values()
            .filter(|record| record.role == AuthorityRole::Ended);
        let ended = ended
            .map(|record| Ok(identified(&record.certificate)?.1))
            .collect::<Result<_, TlsError>>()?;
        Ok(Self {
            issuing: Arc::new(Authority::from_pem(&issuing.certificate, key)?),
            trusted: TrustedAuthorities {
                issuing: Some(issuing.id.clone()),
                trusted: trusted.collect::<Result<_, _>>()?,
                ended,
            },
        })
    }

    /// TLS configurations for other nodes, with a new certificate for this node.
    fn node_tls(
        &self,
        control: &Control,
        node: NodeIdentity,
    ) -> Result<Arc<NodeTls>, ControlError> {
        let issued = self.issuing.issue_node(&control.region, node)?;
        Ok(Arc::new(NodeTls::new(
            &self.trusted.certificates(),
            &issued,
        )?))
    }
}

fn identified(pem: &str) -> Result<(Option<AuthorityId>, CertificateDer<'static>), TlsError> {
    let certificate = CertificateDer::from_pem_slice(pem.as_bytes());
    let certificate = certificate.map_err(|error| TlsError::Pem {
        path: "agents' authority".into(),
        error,
    })?;
    Ok((pki::authority_id(&certificate), certificate))
}

impl Control {
    /// Signs the affinity cookies of all services. Derived from the key of the first authority of
    /// agents, which is as secret, is the same at all nodes, moves with backups and to other
    /// stores, and stays when the authority is replaced.
    pub fn affinity_key(&self) -> AffinityKey {
        AffinityKey::new(self.first_authority.derive(AffinityKey::PURPOSE))
    }

    pub(crate) fn authorities(&self) -> Arc<Authorities> {
        Arc::clone(
            &self
                .authorities
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        )
    }

    /// The authority that issues certificates now.
    pub(crate) fn issuing_authority(&self) -> Option<AuthorityId> {
        self.authorities().trusted.issuing.clone()
    }

    /// Uses the authorities in `records` from now on, for new connections of agents and nodes.
    /// Workers have the TLS configurations before a change counts as applied.
    pub(crate) fn use_authorities(&self, records: &Records) {
        if let Err(error) = self.try_use_authorities(records) {
            tracing::error!(%error,
                "the stored authorities of agents cannot be used: the ones before stay in use");
        }
    }

    fn try_use_authorities(&self, records: &Records) -> Result<(), ControlError> {
        let authorities = Arc::new(Authorities::of(records, &self.first_authority)?);
        if authorities.trusted == self.authorities().trusted {
            return Ok(());
        }
        let publish = |configs: &Arc<ServerConfigs>| self.workers.publish_certificates(configs);
        self.tls.trust(authorities.trusted.clone(), publish)?;
        let certified = self
            .certified_node
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        certified.map_or(Ok(()), |node| self.certify(&authorities, node))?;
        // Last: after a failure, the next change of the records tries again.
        *self
            .authorities
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = authorities;
        Ok(())
    }

    /// Issues a certificate for this process as `node`, and publishes it.
    pub(crate) fn certify(
        &self,
        authorities: &Authorities,
        node: NodeIdentity,
    ) -> Result<(), ControlError> {
        let tls = authorities.node_tls(self, node)?;
        self.local_node().use_tls(Arc::clone(&tls));
        self.workers.publish_node_tls(&tls);
        Ok(())
    }
}

/// Makes the next authority, which is trusted and does not issue; without effect if there is one.
pub fn add(control: &Control, actor: &Actor) -> Result<(), ControlError> {
    let (next, key) = Authority::generate(COMMON_NAME)?;
    control.change(actor, |records, now| {
        if find(records, AuthorityRole::Next).is_some() {
            return Ok(Plan::already(()));
        }
        if let Some(earlier) = find(records, AuthorityRole::Earlier) {
            return Err(ControlError::Conflict(format!(
                "the authority {} is being replaced already: end it first (`gw-gateway agent-ca \
                 finish`)",
                earlier.id
            )));
        }
        let mut steps: Vec<_> = forgotten(control, records, now)?.map(forget).collect();
        if records.authorities.is_empty() {
            let first = &control.first_authority;
            steps.push(put(record(
                first,
                first.key_pem(),
                AuthorityRole::Issuing,
                now,
            )?));
        }
        let next = record(&next, key.clone(), AuthorityRole::Next, now)?;
        let target = next.id.to_string();
        steps.push(put(next));
        Ok(plan("agent_ca.add", target, json!({}), steps))
    })
}

/// Ends all authorities and has a new one issue.
pub(crate) fn replace_now(control: &Control, actor: &Actor) -> Result<(), ControlError> {
    let (new, key) = Authority::generate(COMMON_NAME)?;
    control.change(actor, |records, now| {
        let first = records
            .authorities
            .is_empty()
            .then_some(&control.first_authority);
        let first = first
            .map(|first| record(first, first.key_pem(), AuthorityRole::Issuing, now))
            .transpose()?;
        let steps = records
            .authorities
            .values()
            .chain(&first)
            .filter_map(|before| match before.role {
                AuthorityRole::Issuing | AuthorityRole::Earlier => {
                    Some(put(with_role(before, AuthorityRole::Ended)))
                }
                AuthorityRole::Next => Some(forget(before)),
                AuthorityRole::Ended => None,
            });
        let new = record(&new, key.clone(), AuthorityRole::Issuing, now)?;
        let target = new.id.to_string();
        let steps = forgotten(control, records, now)?
            .map(forget)
            .chain(steps)
            .chain([put(new)])
            .collect();
        Ok(plan("agent_ca.replace_now", target, json!({}), steps))
    })
}

/// Has the next authority issue from now on; without effect if there is none. Every node must trust
/// it.
pub(crate) fn switch(control: &Control, actor: &Actor) -> Result<(), ControlError> {
    control.change(actor, |records, _| {
        let Some(next) = find(records, AuthorityRole::Next) else {
            return Ok(Plan::already(()));
        };
        let issuing = AuthorityRecord {
            role: AuthorityRole::Issuing,
            ..next.clone()
        };
        let earlier = find(records, AuthorityRole::Issuing);
        // It issues nothing any more.
        let earlier = earlier.map(|record| with_role(record, AuthorityRole::Earlier));
        let detail = json!({ "replaces": earlier.as_ref().map(|record| record.id.clone()) });
        let target = issuing.id.to_string();
        let steps = earlier.into_iter().chain([issuing]).map(put).collect();
        Ok(plan("agent_ca.switch", target, detail, steps))
    })
}

/// Ends the earlier authority. Without `force`, refuses while an agent has a certificate of it that
/// has not expired.
pub(crate) fn end(
    control: &Control,
    actor: &Actor,
    end: &AuthorityEnd,
) -> Result<(), ControlError> {
    control.change(actor, |records, now| {
        let Some(earlier) = find(records, AuthorityRole::Earlier) else {
            let next =
                find(records, AuthorityRole::Next).map_or("no authority is being replaced", |_| {
                    "the next authority does not issue yet: run `gw-gateway agent-ca replace` \
                     again"
                });
            return Err(ControlError::Conflict(next.to_owned()));
        };
        let left = left(records, now).count();
        if left > 0 && !end.force {
            return Err(ControlError::Conflict(format!(
                "{left} agents have certificates of the earlier authority that have not expired \
                 (see `gw-gateway agent-ca status`): wait until they have renewed them, or force it"
            )));
        }
        let ended = put(with_role(earlier, AuthorityRole::Ended));
        let steps = forgotten(control, records, now)?
            .map(forget)
            .chain([ended])
            .collect();
        let detail = json!({ "forced": end.force, "agents_left": left });
        Ok(plan("agent_ca.end", earlier.id.to_string(), detail, steps))
    })
}

/// The authorities that have ended and of which no agent has a certificate.
fn forgotten<'a>(
    control: &Control,
    records: &'a Records,
    now: Timestamp,
) -> Result<impl Iterator<Item = &'a AuthorityRecord>, ControlError> {
    let first = identified(control.first_authority.certificate_pem())?.0;
    let ended = records
        .authorities
        .values()
        .filter(|record| record.role == AuthorityRole::Ended);
    Ok(ended.filter(move |ended| !has_agents(records, ended, first.as_ref(), now)))
}

/// The authorities, and the agents that have certificates of the earlier one. What the workers of
/// nodes know is left empty.
pub fn show(control: &Control) -> Result<AgentCaView, ControlError> {
    let state = control.state();
    let now = Timestamp::now();
    let records = &state.records;
    let mut authorities: Vec<&AuthorityRecord> = records.authorities.values().collect();
    authorities.sort_by_key(|record| record.role as u8);
    let first = match authorities.is_empty() {
        true => Some(record(
            &control.first_authority,
            Secret::new(String::new()),
            AuthorityRole::Issuing,
            now,
        )?),
        false => None,
    };
    let named = |agent: &AgentRecord| LeftAgent {
        account: agent.account.clone(),
        agent_id: agent.id.clone(),
        name: agent.name.clone(),
        certificate_not_after: agent.certificate_not_after.map(|at| at.to_string()),
    };
    Ok(AgentCaView {
        authorities: authorities.into_iter().chain(&first).map(view).collect(),
        waits_for_nodes: Vec::new(),
        agents: records
            .agents
            .values()
            .filter(|agent| is_certified(agent, now))
            .count(),
        agents_left: left(records, now).count(),
        left: left(records, now).take(NAMED_AGENTS).map(named).collect(),
        tunnels_left: 0,
        nodes_left: Vec::new(),
        missing_nodes: Vec::new(),
    })
}

impl AgentCaView {
    /// The authority with this role.
    pub fn with_role(&self, role: AuthorityRole) -> Option<&AuthorityView> {
        self.authorities
            .iter()
            .find(|authority| authority.role == role)
    }
}

fn find(records: &Records, role: AuthorityRole) -> Option<&AuthorityRecord> {
    records
        .authorities
        .values()
        .find(|record| record.role == role)
}

/// Whether the agent has a certificate that has not expired.
fn is_certified(agent: &AgentRecord, now: Timestamp) -> bool {
    agent.status == EnrollmentStatus::Approved
        && agent
            .certificate_not_after
            .is_some_and(|not_after| not_after > now)
}

/// The agents whose newest certificate has not expired and is of another authority than the issuing
/// one. Agents with an expired one do not depend on its authority: they get another with their key
/// as proof.
fn left(records: &Records, now: Timestamp) -> impl Iterator<Item = &AgentRecord> {
    let replaced = find(records, AuthorityRole::Earlier).and(find(records, AuthorityRole::Issuing));
    let certified = records
        .agents
        .values()
        .filter(move |agent| is_certified(agent, now));
    certified.filter(move |agent| {
        replaced.is_some_and(|issuing| agent.authority.as_ref() != Some(&issuing.id))
    })
}

/// Whether the newest certificate of an agent is of this authority and has not expired: the agent
/// recovers only while its certificate counts as expired, not as one of a stranger. Certificates
/// without a known authority are of the `first` one.
fn has_agents(
    records: &Records,
    authority: &AuthorityRecord,
    first: Option<&AuthorityId>,
    now: Timestamp,
) -> bool {
    let mut certified = records
        .agents
        .values()
        .filter(|agent| is_certified(agent, now));
    certified.any(|agent| agent.authority.as_ref().or(first) == Some(&authority.id))
}

/// The record of an authority that issues no more, or has ended.
fn with_role(record: &AuthorityRecord, role: AuthorityRole) -> AuthorityRecord {
    AuthorityRecord {
        role,
        private_key: None,
        ..record.clone()
    }
}

fn record(
    authority: &Authority,
    key: Secret,
    role: AuthorityRole,
    created_at: Timestamp,
) -> Result<AuthorityRecord, ControlError> {
    let certificate = authority.certificate_pem().to_owned();
    let id = identified(&certificate)?.0.ok_or_else(|| {
        let problem =
            "agent-ca.crt has no subject key identifier of 20 bytes, so that it cannot be replaced \
             while agents run";
        ControlError::Conflict(problem.to_owned())
    })?;
    Ok(AuthorityRecord {
        id,
        role,
        certificate,
        private_key: Some(key),
        created_at,
        later: LaterMembers::default(),
    })
}

fn put(record: AuthorityRecord) -> Step {
    Step::Put(StoredRecord::Authority(record))
}

fn forget(record: &AuthorityRecord) -> Step {
    Step::Delete(RecordId::Authority(record.id.clone()))
}

fn plan(
    action: &'static str,
    target: String,
    detail: serde_json::Value,
    steps: Vec<Step>,
) -> Plan<()> {
    Plan {
        steps,
        action,
        account: None,
        target,
        detail,
        output: (),
    }
}

fn view(record: &AuthorityRecord) -> AuthorityView {
    let certificate = CertificateDer::from_pem_slice(record.certificate.as_bytes()).ok();
    AuthorityView {
        id: record.id.clone(),
        role: record.role,
        not_after: certificate
            .and_then(|certificate| pki::not_after(&certificate))
            .map(|at| at.to_string()),
        certificate: record.certificate.clone(),
    }
}
