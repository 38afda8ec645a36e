//! The control plane of a simulated region: answers the jobs of workers from the records, in the
//! order in which they come.
//!
//! Agents enroll before a simulation begins. What is left are certificates: those of agents that
//! renew them, and of agents that ask whether the gateway still knows them.

use std::cell::RefCell;
use std::rc::Rc;

use gw_base::error::{Error, Overload};
use gw_base::tls::pki::CertificateRequest;
use gw_interface::control_plane::{AgentProof, ControlPlane, Job};
use gw_shared::id::AgentId;
use gw_shared::identity::enrollment::{
    CertificateReply, EnrollReply, EnrollRequest, EnrollmentStatus, StatusReply,
};
use gw_shared::identity::secret::Secret;
use gw_store::{Position, PublicKeyHash, Revision, StoredRecord};
use tokio::sync::mpsc;

use super::Region;
use super::certificates::NOT_AFTER;
use super::gateway::Publisher;

/// Answers the jobs of a gateway, and publishes the records to its workers after each change. Ends
/// with the executors of the gateway.
pub async fn serve(
    region: Rc<RefCell<Region>>,
    mut jobs: mpsc::Receiver<Job>,
    publisher: Publisher,
) {
    while let Some(job) = jobs.recv().await {
        let before = region.borrow().revision();
        job(&SimulatedControl(&region));
        let region = region.borrow();
        if region.revision() != before {
            publisher.publish(&region);
        }
    }
}

struct SimulatedControl<'a>(&'a RefCell<Region>);

impl ControlPlane for SimulatedControl<'_> {
    fn enroll(&self, _: &EnrollRequest) -> Result<EnrollReply, Error> {
        Err(Error::Overloaded(Overload::NotStored))
    }

    fn enrollment_status(&self, _: &str, _: &Secret) -> Result<StatusReply, Error> {
        Err(Error::Overloaded(Overload::NotStored))
    }

    fn sign(&self, proof: &AgentProof, csr: &str) -> Result<CertificateReply, Error> {
        let (AgentProof::OldKey(id) | AgentProof::Tunnel(id)) = proof else {
            return Err(Error::Overloaded(Overload::NotStored));
        };
        let mut region = self.0.borrow_mut();
        let mut agent = region
            .records()
            .agents
            .get(id)
            .cloned()
            .ok_or(Error::AgentUnknown)?;
        if agent.status != EnrollmentStatus::Approved {
            return Err(Error::AgentRevoked);
        }
        let request =
            CertificateRequest::parse(csr).map_err(|error| Error::CsrInvalid(error.to_string()))?;
        let key = PublicKeyHash::of(request.subject_public_key_info());
        let is_known = [&agent.key, &agent.previous_key].contains(&&Some(key.clone()));
        if matches!(proof, AgentProof::OldKey(_)) && !is_known {
            return Err(Error::AgentUnknown);
        }
        let certificates = region.certificates();
        let certificate = certificates
            .issue(&agent.account, id, &request)
            .map_err(|_| Error::Overloaded(Overload::NotStored))?;
        let reply = CertificateReply {
            certificate,
            chain: certificates.agents_authority().to_owned(),
            not_after: NOT_AFTER.to_string(),
            agent_id: id.clone(),
            services: region.hostnames(&agent),
        };
        if agent.key.as_ref() != Some(&key) {
            agent.previous_key = agent.key.replace(key);
            region.put(StoredRecord::Agent(agent));
        }
        Ok(reply)
    }

    fn forget_replaced_key(&self, agent: &AgentId, key: &PublicKeyHash) -> Result<(), Error> {
        let mut region = self.0.borrow_mut();
        let record = region.records().agents.get(agent).cloned();
        let replaced = record
            .filter(|record| record.key.as_ref() == Some(key) && record.previous_key.is_some());
        if let Some(mut record) = replaced {
            record.previous_key = None;
            region.put(StoredRecord::Agent(record));
        }
        Ok(())
    }

    fn position(&self) -> Position {
        Position {
            origin: "simulation".to_owned(),
            revision: Revision(i64::try_from(self.0.borrow().revision()).unwrap_or(i64::MAX)),
            change: String::new(),
        }
    }
}
