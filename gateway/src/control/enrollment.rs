//! Certificates for agents: enrollment tokens, enrollment, certificate signing requests.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use gw_shared::files;
use gw_shared::id::{AccountId, AgentId, EnrollmentId, EnrollmentTokenId, ServiceId};
use gw_shared::identity::enrollment::{CertificateReply, EnrollReply, EnrollRequest, EnrollmentStatus, StatusReply};
use gw_shared::identity::secret::{Secret, SecretHash};
use gw_shared::version::VERSION;
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use super::service::{ServiceIdText, checked_list};
use super::{Actor, Control, ControlError, ControlState, Plan, account, checked_name, new_secret};
use crate::clock::Timestamp;
use crate::error::Error;
use crate::limit::Bucket;
use crate::limits;
use crate::page::{Page, PageQuery};
use crate::store::{
    AgentRecord, Approval, EnrollmentRecord, EnrollmentTokenRecord, PublicKeyHash, Record, RecordId, Records, Step,
};
use crate::tls::pki::CertificateRequest;

/// Default and longest lifetime of an enrollment token.
const TOKEN_LIFETIME: Duration = Duration::from_secs(600);
/// Time that a used or expired token stays in the list.
const TOKEN_SHOWN: Duration = Duration::from_secs(24 * 3600);
/// Time that an enrollment may wait for approval and its first certificate.
const ENROLLMENT_LIFETIME: Duration = Duration::from_secs(7 * 24 * 3600);
/// Time in which an agent can request its first certificate again if the reply was lost.
const ASK_AGAIN: Duration = Duration::from_secs(3600);
/// Time after the expiry of its certificate in which an agent can recover with its key.
const RECOVERY: Duration = Duration::from_secs(30 * 24 * 3600);
/// Interval at which an agent polls for approval.
const POLL_AFTER_SECONDS: u32 = 5;

const TOKEN_PREFIX: &str = "gw_et_";

/// Lets one agent enroll, once.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = EnrollmentToken)]
pub struct EnrollmentTokenView {
    #[schema(value_type = String)]
    pub id: EnrollmentTokenId,
    #[schema(value_type = String)]
    pub account: AccountId,
    /// What the agent will serve.
    #[schema(value_type = Vec<String>)]
    pub services: BTreeSet<ServiceId>,
    pub approval: Approval,
    #[schema(format = DateTime)]
    pub created_at: String,
    #[schema(format = DateTime)]
    pub expires_at: String,
    /// The agent that used it.
    #[schema(value_type = Option<String>)]
    pub used_by: Option<AgentId>,
}

/// An enrollment token and its text.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = NewEnrollmentTokenCreated)]
pub struct NewEnrollmentTokenView {
    #[serde(flatten)]
    pub enrollment_token: EnrollmentTokenView,
    /// `gw_et_{id}.{secret}`. Shown this once.
    pub token: String,
    /// The gateway as it knows itself: the apex of the region, and the port that it listens on.
    pub gateway_url: String,
    /// PEM of the authority that agents have to trust for the gateway; absent if the certificate is from a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_certificate: Option<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewEnrollmentToken {
    /// Services of the account that the agent will serve, at least one.
    #[schema(min_items = 1, max_items = 500, value_type = Vec<ServiceIdText>)]
    pub services: Vec<String>,
    /// Whether the agent has to wait for an administrator.
    #[serde(default)]
    pub approval: Approval,
    /// 10 minutes unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 600)]
    pub expires_in_seconds: Option<u64>,
}

/// How an agent proves that it may get a certificate.
#[derive(Debug, Clone)]
pub enum AgentProof {
    /// The secret of its enrollment, optionally with the enrollment's id.
    Enrollment { id: Option<String>, secret: Secret },
    /// A signature by the key of its last certificate.
    OldKey(AgentId),
    /// A request through a live tunnel, which is already authenticated.
    Tunnel(AgentId),
}

impl From<&EnrollmentTokenRecord> for EnrollmentTokenView {
    fn from(record: &EnrollmentTokenRecord) -> Self {
        Self {
            id: record.id.clone(),
            account: record.account.clone(),
            services: record.services.clone(),
            approval: record.approval,
            created_at: record.created_at.to_string(),
            expires_at: record.expires_at.to_string(),
            used_by: record.used_by.clone(),
        }
    }
}

impl NewEnrollmentTokenView {
    /// Adds the port that the gateway listens on to the URL.
    pub(crate) fn on_port(mut self, port: u16) -> Self {
        if port != 443 {
            self.gateway_url.push_str(&format!(":{port}"));
        }
        self
    }

    /// The shell command that enrolls an agent on its machine. The token is passed in the environment, because other
    /// users of the machine can read arguments. The command also writes the CA certificate to a file.
    pub fn command(&self) -> String {
        let Self { token, gateway_url, ca_certificate, .. } = self;
        let enroll = format!("GW_ENROLLMENT_TOKEN={token} gw-agent enroll --gateway {gateway_url}");
        match ca_certificate {
            Some(pem) => format!("cat > gw-ca.crt <<'END'\n{}\nEND\n{enroll} --ca-file gw-ca.crt", pem.trim()),
            None => enroll,
        }
    }
}

impl Control {
    /// Creates an enrollment token. Only the returned view holds its text.
    pub fn create_enrollment_token(
        &self,
        actor: &Actor,
        account: &str,
        new: &NewEnrollmentToken,
    ) -> Result<NewEnrollmentTokenView, ControlError> {
        let lifetime = new.expires_in_seconds.map_or(TOKEN_LIFETIME, Duration::from_secs);
        if lifetime.is_zero() || lifetime > TOKEN_LIFETIME {
            let message = format!("must be a whole number from 1 to {}", TOKEN_LIFETIME.as_secs());
            return Err(ControlError::invalid("expires_in_seconds", message));
        }
        let ca_certificate = self.development_ca_pem();
        self.change(actor, |records, now| {
            let account = &account::find(records, account)?.id;
            let services = checked_list(records, account, "services", &new.services)?;
            if services.is_empty() {
                return Err(ControlError::invalid("services", "must name at least one service for the agent"));
            }
            let secret = new_secret();
            let record = EnrollmentTokenRecord {
                id: EnrollmentTokenId::random(),
                account: account.clone(),
                secret: SecretHash::of(secret.reveal()),
                services,
                approval: new.approval,
                created_at: now,
                expires_at: now.after(lifetime),
                used_by: None,
            };
            Ok(Plan {
                action: "enrollment_token.create",
                account: Some(account.clone()),
                target: record.id.to_string(),
                detail: json!(new),
                output: NewEnrollmentTokenView {
                    enrollment_token: (&record).into(),
                    token: format!("{TOKEN_PREFIX}{}.{}", record.id, secret.reveal()),
                    gateway_url: self.region.base_url(),
                    ca_certificate,
                },
                steps: vec![Step::Put(Record::EnrollmentToken(record))],
            })
        })
    }

    /// The CA certificate that agents must trust; `None` if the server certificate comes from a file.
    fn development_ca_pem(&self) -> Option<String> {
        let read = files::read_text(&self.development_ca()?);
        read.inspect_err(|error| tracing::warn!(%error, "cannot read the CA certificate for the enrollment command"))
            .ok()
    }

    pub fn enrollment_tokens(
        &self,
        account: &str,
        query: &PageQuery,
    ) -> Result<Page<EnrollmentTokenView>, ControlError> {
        let state = self.state();
        let account = &account::find(&state.records, account)?.id;
        let tokens = state.records.enrollment_tokens.values().filter(|record| record.account == *account);
        Ok(Page::of(tokens, |record| record.id.as_str(), query, EnrollmentTokenView::from)?)
    }

    pub fn enrollment_token(&self, account: &str, id: &str) -> Result<EnrollmentTokenView, ControlError> {
        find_token(&self.state().records, account, id).map(EnrollmentTokenView::from)
    }

    /// Withdraws a token. An agent that used it stays enrolled.
    pub fn delete_enrollment_token(&self, actor: &Actor, account: &str, id: &str) -> Result<(), ControlError> {
        self.change(actor, |records, _| {
            let record = find_token(records, account, id)?;
            Ok(Plan {
                steps: vec![Step::Delete(RecordId::EnrollmentToken(record.id.clone()))],
                action: "enrollment_token.delete",
                account: Some(record.account.clone()),
                target: record.id.to_string(),
                detail: json!({}),
                output: (),
            })
        })
    }

    /// Enrolls an agent and marks its token as used.
    pub fn enroll(&self, request: &EnrollRequest) -> Result<EnrollReply, ControlError> {
        if request.version != VERSION {
            let theirs: String = request.version.chars().take(40).collect();
            let message =
                format!("the gateway runs version {VERSION} and the agent version {theirs}; they must be equal");
            return Err(ControlError::Refused(Error::VersionMismatch(message)));
        }
        let name = checked_name(&request.name)
            .map_err(|error| ControlError::Refused(Error::InvalidRequest(error.to_string())))?;
        let (id, secret) = parse_token(&request.token).ok_or(ControlError::Refused(Error::EnrollmentTokenInvalid))?;
        self.change(&Actor::EnrollmentToken(id.clone()), |records, now| {
            let token = records
                .enrollment_tokens
                .get(&id)
                .filter(|token| token.secret.matches(secret) && token.used_by.is_none() && now < token.expires_at)
                .ok_or(ControlError::Refused(Error::EnrollmentTokenInvalid))?;
            let status = match token.approval {
                Approval::Auto => EnrollmentStatus::Approved,
                Approval::Manual => EnrollmentStatus::Pending,
            };
            let enrollment_secret = format!("gw_es_{}", new_secret().reveal());
            let enrollment = EnrollmentRecord {
                id: EnrollmentId::random(),
                secret: SecretHash::of(&enrollment_secret),
                expires_at: now.after(ENROLLMENT_LIFETIME),
            };
            let agent_id = AgentId::random();
            let reply = EnrollReply {
                enrollment_id: enrollment.id.clone(),
                agent_id: agent_id.clone(),
                enrollment_secret,
                status,
                poll_after_seconds: POLL_AFTER_SECONDS,
            };
            let agent = AgentRecord {
                id: agent_id,
                account: token.account.clone(),
                name,
                services: token.services.clone(),
                status,
                version: Some(request.version.clone()),
                enrollment: Some(enrollment),
                key: None,
                previous_key: None,
                certificate_not_after: None,
                created_at: now,
            };
            let used = EnrollmentTokenRecord { used_by: Some(agent.id.clone()), ..token.clone() };
            Ok(Plan {
                action: "agent.enroll",
                account: Some(agent.account.clone()),
                target: agent.id.to_string(),
                detail: json!({ "name": agent.name, "services": agent.services, "status": status }),
                output: reply,
                steps: vec![Step::Put(Record::EnrollmentToken(used)), Step::Put(Record::Agent(agent))],
            })
        })
    }

    /// The status of an enrollment.
    pub fn enrollment_status(&self, id: &str, secret: &Secret) -> Result<StatusReply, ControlError> {
        let state = self.state();
        let agent = find_enrollment(&state.records, Some(id), secret, Timestamp::now())?;
        Ok(StatusReply {
            status: agent.status,
            agent_id: (agent.status == EnrollmentStatus::Approved).then(|| agent.id.clone()),
            poll_after_seconds: POLL_AFTER_SECONDS,
        })
    }

    /// Issues a certificate for the public key of a certificate signing request. Ignores everything else in the
    /// request.
    pub fn sign(&self, proof: &AgentProof, csr: &str) -> Result<CertificateReply, ControlError> {
        self.sign_at(proof, csr, Timestamp::now())
    }

    fn sign_at(&self, proof: &AgentProof, csr: &str, now: Timestamp) -> Result<CertificateReply, ControlError> {
        let agent = entitled(&self.state().records, proof, now)?.clone();
        // Counted here only for an authenticated agent: an unauthenticated request must not use up the agent's
        // allowance.
        if proof.is_proved_already() {
            self.take_issuance(agent.id.clone())?;
        }
        let request = CertificateRequest::parse(csr)
            .map_err(|error| ControlError::Refused(Error::CsrInvalid(error.to_string())))?;
        let key = PublicKeyHash::of(request.subject_public_key_info());
        check_key(&agent, proof, &key)?;
        if !proof.is_proved_already() {
            self.take_issuance(agent.id.clone())?;
        }
        let not_after = now.after(self.certificate_lifetime);
        let certificate = self.agents.issue_agent(&self.region, &agent.account, &agent.id, &request, now, not_after)?;
        self.change(&Actor::Agent(agent.id.clone()), |records, _| {
            // The record may have changed in the meantime.
            let mut agent = entitled(records, proof, now)?.clone();
            check_key(&agent, proof, &key)?;
            if agent.key.as_ref() != Some(&key) {
                agent.previous_key = agent.key.replace(key);
            }
            agent.certificate_not_after = Some(not_after);
            if let (Some(enrollment), AgentProof::Enrollment { .. }) = (&mut agent.enrollment, proof) {
                enrollment.expires_at = enrollment.expires_at.min(now.after(ASK_AGAIN));
            }
            let services = agent.services.iter().filter_map(|id| self.region.tenant_hostname(&agent.account, id));
            let reply = CertificateReply {
                certificate,
                chain: self.agents.certificate_pem().to_owned(),
                not_after: not_after.to_string(),
                agent_id: agent.id.clone(),
                services: services.collect(),
            };
            Ok(Plan {
                action: "agent.certificate",
                account: Some(agent.account.clone()),
                target: agent.id.to_string(),
                detail: json!({ "not_after": reply.not_after, "by": proof.name() }),
                output: reply,
                steps: vec![Step::Put(Record::Agent(agent))],
            })
        })
    }

    /// Takes one certificate from the allowance of an authenticated agent.
    fn take_issuance(&self, agent: AgentId) -> Result<(), ControlError> {
        let (mut state, now) = (self.state(), Instant::now());
        let ControlState { records, issuance, .. } = &mut *state;
        issuance.retain(|id, bucket| records.agents.contains_key(id) && !bucket.is_full(now));
        let bucket = issuance.entry(agent).or_insert_with(|| Bucket::new(limits::CERTIFICATES, now));
        bucket.take(now).map_err(|_| ControlError::Refused(Error::Overloaded("asked for certificates too often")))
    }

    /// Deletes expired tokens, and enrollments that expired before they were approved.
    pub(super) fn forget_old_enrollments(&self, now: Timestamp) -> Result<(), ControlError> {
        self.change(&Actor::Gateway, |records, _| {
            let tokens = records
                .enrollment_tokens
                .values()
                .filter(|token| now > token.expires_at.after(TOKEN_SHOWN))
                .map(|token| RecordId::EnrollmentToken(token.id.clone()));
            let agents = records
                .agents
                .values()
                .filter(|agent| agent.status == EnrollmentStatus::Pending)
                .filter(|agent| agent.enrollment.as_ref().is_none_or(|enrollment| now >= enrollment.expires_at))
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
}

impl AgentProof {
    /// Whether the agent is authenticated before its certificate signing request is parsed. An old key authenticates by
    /// the signature of the request; until that is verified, the request counts only against the client's address.
    fn is_proved_already(&self) -> bool {
        match self {
            Self::Enrollment { .. } | Self::Tunnel(_) => true,
            Self::OldKey(_) => false,
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Enrollment { .. } => "enrollment",
            Self::OldKey(_) => "old key",
            Self::Tunnel(_) => "tunnel",
        }
    }
}

/// The agent that a proof belongs to, if it may get a certificate at `now`.
fn entitled<'a>(records: &'a Records, proof: &AgentProof, now: Timestamp) -> Result<&'a AgentRecord, ControlError> {
    let refused = |error| Err(ControlError::Refused(error));
    let agent = match proof {
        AgentProof::Enrollment { id, secret } => find_enrollment(records, id.as_deref(), secret, now)?,
        AgentProof::OldKey(id) | AgentProof::Tunnel(id) => {
            records.agents.get(id).ok_or(ControlError::Refused(Error::AgentRevoked))?
        }
    };
    match agent.status {
        EnrollmentStatus::Revoked => return refused(Error::AgentRevoked),
        EnrollmentStatus::Pending => return refused(Error::EnrollmentPending),
        EnrollmentStatus::Approved => {}
    }
    if matches!(proof, AgentProof::OldKey(_))
        && agent.certificate_not_after.is_none_or(|not_after| now > not_after.after(RECOVERY))
    {
        return refused(Error::AgentCertificateExpired);
    }
    Ok(agent)
}

/// Checks that the proof covers this key.
fn check_key(agent: &AgentRecord, proof: &AgentProof, key: &PublicKeyHash) -> Result<(), ControlError> {
    let known = |known: &Option<PublicKeyHash>| known.as_ref() == Some(key);
    let reaches = match proof {
        // For the agent's first key, and for the same key again.
        AgentProof::Enrollment { .. } => agent.key.is_none() || known(&agent.key),
        // The request is signed by this key, so it must be the key of the last certificate or of the one before.
        AgentProof::OldKey(_) => known(&agent.key) || known(&agent.previous_key),
        AgentProof::Tunnel(_) => true,
    };
    if reaches { Ok(()) } else { Err(ControlError::Refused(Error::EnrollmentInvalid)) }
}

fn find_enrollment<'a>(
    records: &'a Records,
    id: Option<&str>,
    secret: &Secret,
    now: Timestamp,
) -> Result<&'a AgentRecord, ControlError> {
    let secret = SecretHash::of(secret.reveal());
    records
        .agents
        .values()
        .find(|agent| {
            agent.enrollment.as_ref().is_some_and(|enrollment| {
                enrollment.secret == secret
                    && id.is_none_or(|id| enrollment.id.as_str() == id)
                    && now < enrollment.expires_at
            })
        })
        .ok_or(ControlError::Refused(Error::EnrollmentInvalid))
}

fn find_token<'a>(records: &'a Records, account: &str, id: &str) -> Result<&'a EnrollmentTokenRecord, ControlError> {
    let account = &account::find(records, account)?.id;
    records
        .enrollment_tokens
        .get(id)
        .filter(|record| record.account == *account)
        .ok_or_else(|| ControlError::not_found("enrollment token", id))
}

/// Splits `gw_et_{id}.{secret}` into id and secret.
pub(crate) fn parse_token(token: &str) -> Option<(EnrollmentTokenId, &str)> {
    let (id, secret) = token.strip_prefix(TOKEN_PREFIX)?.split_once('.')?;
    Some((EnrollmentTokenId::new(id).ok()?, secret))
}
