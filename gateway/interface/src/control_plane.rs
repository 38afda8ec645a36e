//! What workers ask of the control plane, and the queue of their requests.

use crate::limits;
use gw_base::error::{Error, Overload};
use gw_shared::id::AgentId;
use gw_shared::identity::enrollment::{CertificateReply, EnrollReply, EnrollRequest, StatusReply};
use gw_shared::identity::secret::Secret;
use gw_store::{Position, PublicKeyHash};
use tokio::sync::{mpsc, oneshot};

/// Changes and questions of agents. The methods block.
///
/// A trait with one implementor, `Control`: the data plane must not import the control plane.
pub trait ControlPlane {
    /// Adds an agent that waits for its approval, or that an enrollment token approves.
    fn enroll(&self, request: &EnrollRequest) -> Result<EnrollReply, Error>;
    /// State of the enrollment `id`, for the agent that has its secret.
    fn enrollment_status(&self, id: &str, secret: &Secret) -> Result<StatusReply, Error>;
    /// Issues a certificate for the public key of a certificate signing request. Ignores everything
    /// else in the request.
    fn sign(&self, proof: &AgentProof, csr: &str) -> Result<CertificateReply, Error>;
    /// Forgets the key before `key`, which a tunnel of the agent has used: the agent has the new
    /// certificate on its disk. Without effect if the record has changed since.
    fn forget_replaced_key(&self, agent: &AgentId, key: &PublicKeyHash) -> Result<(), Error>;
    /// Position of the newest change.
    fn position(&self) -> Position;
}

/// How an agent proves that it may get a certificate.
#[derive(Debug, Clone)]
pub enum AgentProof {
    /// The secret of its enrollment, optionally with the enrollment's id.
    Enrollment {
        /// Id of the enrollment, if the agent sent it.
        id: Option<String>,
        /// Secret of the enrollment.
        secret: Secret,
    },
    /// A signature by the key of its last certificate.
    OldKey(AgentId),
    /// A request through a live tunnel, which is already authenticated.
    Tunnel(AgentId),
}

impl AgentProof {
    /// Whether the agent is authenticated before its certificate signing request is parsed. An old
    /// key authenticates by the signature of the request; until that is verified, the request
    /// counts only against the client's address.
    pub fn is_proved_already(&self) -> bool {
        match self {
            Self::Enrollment { .. } | Self::Tunnel(_) => true,
            Self::OldKey(_) => false,
        }
    }

    /// Name of the proof, as the audit log has it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Enrollment { .. } => "enrollment",
            Self::OldKey(_) => "old key",
            Self::Tunnel(_) => "tunnel",
        }
    }
}

/// A request of a worker.
pub type Job = Box<dyn FnOnce(&dyn ControlPlane) + Send>;

/// Submits jobs. Cheap to clone; submitting never blocks.
#[derive(Clone)]
pub struct Executor(mpsc::Sender<Job>);

/// An executor, and the queue of the jobs that are submitted to it.
pub fn executor() -> (Executor, mpsc::Receiver<Job>) {
    let (sender, receiver) = mpsc::channel(limits::CONTROL_JOBS);
    (Executor(sender), receiver)
}

impl Executor {
    /// Runs `work` and waits for its result. Fails at once when the queue is full.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn ControlPlane) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let (reply, answer) = oneshot::channel();
        let work = Box::new(move |control: &dyn ControlPlane| {
            // The task that waits may have been cancelled.
            let _ = reply.send(work(control));
        });
        self.0
            .try_send(work)
            .map_err(|_| Error::Overloaded(Overload::QueueFull))?;
        // The sender is dropped when the work panics or the gateway stops.
        answer
            .await
            .map_err(|_| Error::Overloaded(Overload::JobDropped))?
    }
}
