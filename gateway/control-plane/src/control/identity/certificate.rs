//! Certificates for agents: the proof that an agent may get one, the check of its key, and the
//! issuing.

use std::time::{Duration, Instant};

use gw_base::clock::Timestamp;
use gw_base::error::{Error, Overload};
use gw_base::tls::pki::CertificateRequest;
use gw_interface::control_plane::AgentProof;
use gw_shared::id::AgentId;
use gw_shared::identity::enrollment::{CertificateReply, EnrollmentStatus};
use gw_store::{AgentRecord, PublicKeyHash, Records, Step, StoredRecord};
use serde_json::json;

use super::enrollment::{enrolled, of_enrollment};
use crate::control::{Actor, Control, ControlError, Plan};

/// Time in which an agent can request its first certificate again if the reply was lost.
const ASK_AGAIN: Duration = Duration::from_secs(3600);
/// Time after the expiry of its certificate in which an agent can recover with its key.
const RECOVERY: Duration = Duration::from_secs(30 * 24 * 3600);

/// Issues a certificate for the public key of a certificate signing request. Ignores everything
/// else in the request.
pub fn sign(
    control: &Control,
    proof: &AgentProof,
    csr: &str,
) -> Result<CertificateReply, ControlError> {
    sign_at(control, proof, csr, Timestamp::now())
}

fn sign_at(
    control: &Control,
    proof: &AgentProof,
    csr: &str,
    now: Timestamp,
) -> Result<CertificateReply, ControlError> {
    let id = agent_of(control, proof)?;
    let agent = entitled(&control.state().records, &id, proof, now)?.clone();
    // Counted here only for an authenticated agent: an unauthenticated request must not use up the
    // agent's allowance.
    if proof.is_proved_already() {
        take_issuance(control, agent.id.clone())?;
    }
    let request = CertificateRequest::parse(csr)
        .map_err(|error| ControlError::Refused(Error::CsrInvalid(error.to_string())))?;
    let key = PublicKeyHash::of(request.subject_public_key_info());
    check_key(&agent, proof, &key)?;
    if !proof.is_proved_already() {
        take_issuance(control, agent.id.clone())?;
    }
    let not_after = now.after(control.certificate_lifetime);
    let authorities = control.authorities();
    let issuing = &authorities.issuing;
    let certificate = issuing.issue_agent(
        &control.region,
        &agent.account,
        &agent.id,
        &request,
        now,
        not_after,
    )?;
    control.change(&Actor::Agent(agent.id.clone()), |records, _| {
        // The record may have changed in the meantime.
        let mut agent = entitled(records, &id, proof, now)?.clone();
        check_key(&agent, proof, &key)?;
        if agent.key.as_ref() != Some(&key) {
            agent.previous_key = agent.key.replace(key.clone());
        }
        agent.certificate_not_after = Some(not_after);
        agent.authority.clone_from(&authorities.trusted.issuing);
        if let (Some(enrollment), AgentProof::Enrollment { .. }) = (&mut agent.enrollment, proof) {
            enrollment.expires_at = enrollment.expires_at.min(now.after(ASK_AGAIN));
        }
        let services = agent
            .services
            .iter()
            .filter_map(|id| control.region.tenant_hostname(&agent.account, id));
        let reply = CertificateReply {
            certificate: certificate.clone(),
            chain: issuing.certificate_pem().to_owned(),
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
            steps: vec![Step::Put(StoredRecord::Agent(agent))],
        })
    })
}

/// Forgets the key before `key`, which a tunnel of the agent has used: the agent has the new
/// certificate on its disk. Without effect if the record has changed since.
pub(crate) fn forget_replaced_key(
    control: &Control,
    agent: &AgentId,
    key: &PublicKeyHash,
) -> Result<(), ControlError> {
    control.change(&Actor::Gateway, |records, _| {
        let record = records
            .agents
            .get(agent)
            .filter(|record| record.key.as_ref() == Some(key));
        let Some(record) = record.filter(|record| record.previous_key.is_some()) else {
            return Ok(Plan::already(()));
        };
        Ok(Plan {
            action: "agent.forget_key",
            account: Some(record.account.clone()),
            target: record.id.to_string(),
            detail: json!({}),
            output: (),
            steps: vec![Step::Put(StoredRecord::Agent(AgentRecord {
                previous_key: None,
                ..record.clone()
            }))],
        })
    })
}

/// The agent that a proof names by its id or by the secret of its enrollment.
fn agent_of(control: &Control, proof: &AgentProof) -> Result<AgentId, ControlError> {
    match proof {
        AgentProof::Enrollment { secret, .. } => enrolled(&control.state().directory, secret),
        AgentProof::OldKey(id) | AgentProof::Tunnel(id) => Ok(id.clone()),
    }
}

/// Takes one certificate from the allowance of an authenticated agent.
fn take_issuance(control: &Control, agent: AgentId) -> Result<(), ControlError> {
    let taken = control.state().issuance.take(agent, Instant::now());
    taken.map_err(|_| ControlError::Refused(Error::Overloaded(Overload::Certificates)))
}

/// The agent `id` that a proof belongs to, if it may get a certificate at `now`.
fn entitled<'a>(
    records: &'a Records,
    id: &AgentId,
    proof: &AgentProof,
    now: Timestamp,
) -> Result<&'a AgentRecord, ControlError> {
    let refused = |error| Err(ControlError::Refused(error));
    let agent = match proof {
        AgentProof::Enrollment {
            id: enrollment,
            secret,
        } => of_enrollment(records, id, enrollment.as_deref(), secret, now)?,
        AgentProof::OldKey(_) | AgentProof::Tunnel(_) => records
            .agents
            .get(id)
            .ok_or(ControlError::Refused(Error::AgentUnknown))?,
    };
    match agent.status {
        EnrollmentStatus::Revoked => return refused(Error::AgentRevoked),
        EnrollmentStatus::Pending => return refused(Error::EnrollmentPending),
        EnrollmentStatus::Approved => {}
    }
    if matches!(proof, AgentProof::OldKey(_))
        && agent
            .certificate_not_after
            .is_none_or(|not_after| now > not_after.after(RECOVERY))
    {
        return refused(Error::AgentCertificateExpired);
    }
    Ok(agent)
}

/// Checks that the proof covers this key.
fn check_key(
    agent: &AgentRecord,
    proof: &AgentProof,
    key: &PublicKeyHash,
) -> Result<(), ControlError> {
    let known = |known: &Option<PublicKeyHash>| known.as_ref() == Some(key);
    let reaches = match proof {
        // For the agent's first key, and for the same key again.
        AgentProof::Enrollment { .. } => agent.key.is_none() || known(&agent.key),
        // The request is signed by this key, so it must be the key of the last certificate or of
        // the one before.
        AgentProof::OldKey(_) => known(&agent.key) || known(&agent.previous_key),
        AgentProof::Tunnel(_) => true,
    };
    if reaches {
        Ok(())
    } else {
        Err(ControlError::Refused(Error::EnrollmentInvalid))
    }
}

#[cfg(test)]
mod tests {
    use gw_interface::rate_limit::ClientLimits;

    use super::*;
    use crate::limits::CERTIFICATES;

    #[test]
    fn an_agent_that_asks_all_day_gets_twenty_certificates_and_four_an_hour() {
        let mut issuance: ClientLimits<AgentId> = ClientLimits::new(CERTIFICATES);
        let (agent, start) = (AgentId::random(), Instant::now());
        let seconds = 0..=24 * 3600;
        let issued = seconds.filter(|second| {
            let now = start + Duration::from_secs(*second);
            issuance.take(agent.clone(), now).is_ok()
        });
        assert_eq!(issued.count(), 20 + 24 * 4);
    }
}
