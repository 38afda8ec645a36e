//! What passes between the agent's thread and its process, so that one process can follow another
//! without failing a request: the successor's tunnels replace those of its predecessor, which then
//! finishes its requests.

use gw_shared::identity::program::SignedProgram;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};

/// Whether another process of this agent takes over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Succession {
    /// This process serves alone.
    None,
    /// A successor starts: tunnels that it replaces are not opened again.
    Expected,
    /// A successor serves: this process only finishes its requests.
    Done,
}

/// Event in the agent's thread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum AgentEvent {
    /// Answer to the announcement of a successor: hostnames of the services that have a tunnel.
    Serving { hostnames: Vec<String> },
    /// The services that the predecessor served have a tunnel here.
    Ready,
    /// The first tunnel is ready.
    Connected,
    /// The successor has replaced all tunnels.
    Displaced,
    /// The gateway has deleted the record of this agent.
    Deleted,
    /// The program was downloaded and checked, and is in the state folder.
    Update { program: SignedProgram },
}

/// Command to the agent's thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LifecycleCommand {
    /// A successor starts. Answered with [`AgentEvent::Serving`], and with
    /// [`AgentEvent::Displaced`] once no tunnel is left.
    ExpectSuccessor,
    /// The successor has failed: serve again.
    Resume,
    /// A successor serves.
    Succeeded,
    /// The supervisor could not run the program. If it is refused, it is not tried again.
    UpdateFailed {
        program: SignedProgram,
        error: String,
        is_refused: bool,
    },
}

/// Sends events to the process. Without a receiver they are dropped.
#[derive(Debug, Clone)]
pub(crate) struct AgentEvents(mpsc::UnboundedSender<AgentEvent>);

impl AgentEvents {
    pub(crate) fn new() -> (Self, mpsc::UnboundedReceiver<AgentEvent>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (Self(sender), receiver)
    }

    pub(crate) fn send(&self, event: AgentEvent) {
        // Fails if the process is ending.
        let _ = self.0.send(event);
    }
}

/// The current [`Succession`], for the tasks of the agent's thread.
#[derive(Debug)]
pub(crate) struct SuccessionWatch(watch::Sender<Succession>);

impl Default for SuccessionWatch {
    fn default() -> Self {
        Self(watch::Sender::new(Succession::None))
    }
}

impl SuccessionWatch {
    pub(crate) fn set(&self, succession: Succession) {
        self.0.send_replace(succession);
    }

    /// Whether another process of this agent takes over or has done so.
    pub(crate) fn has_successor(&self) -> bool {
        *self.0.borrow() != Succession::None
    }

    /// Waits until no successor is starting.
    pub(crate) async fn wait_until_unexpected(&self) {
        // The sender is this watch.
        let _ = self
            .0
            .subscribe()
            .wait_for(|now| *now != Succession::Expected)
            .await;
    }

    /// Waits until `reached`.
    pub(crate) async fn wait_for(&self, reached: Succession) {
        // The sender is this watch.
        let _ = self.0.subscribe().wait_for(|now| *now == reached).await;
    }
}
