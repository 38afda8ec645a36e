//! Messages between supervisor and worker: a JSON object in each line of a Unix socket, which is
//! the worker's standard input. Both may be of different releases, so either ignores messages that
//! it does not know.

use std::io;

use gw_shared::identity::program::{ReleaseKeys, SignedProgram};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

/// Message from supervisor to worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum ToWorker {
    /// The first message. `required` are the services for which the predecessor has tunnels,
    /// `program` is the stored program that runs, if it is not the installed one, and
    /// `release_keys` are the keys by which the supervisor accepts programs: an updated worker may
    /// be built with others.
    Start {
        required: Vec<String>,
        #[serde(default)]
        program: Option<SignedProgram>,
        #[serde(default)]
        release_keys: Option<ReleaseKeys>,
    },
    /// A successor starts: say which services have a tunnel.
    ExpectSuccessor,
    /// The successor has failed: open the tunnels again that it has replaced.
    Resume,
    /// A successor serves: finish the requests and exit.
    Succeeded,
    /// Finish the requests and exit.
    Stop,
    /// The supervisor exits now, and the next one starts a successor: serve until it has replaced
    /// all tunnels.
    Detach,
    /// The program does not serve. If it is refused, it is not tried again.
    UpdateFailed {
        program: SignedProgram,
        error: String,
        #[serde(default)]
        is_refused: bool,
    },
}

/// Sends a message. Fails if the other end has gone.
pub(super) async fn send(link: &mut OwnedWriteHalf, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    link.write_all(&line).await
}

/// Receives messages.
pub(super) struct MessageReceiver(tokio::io::Lines<BufReader<OwnedReadHalf>>);

impl MessageReceiver {
    pub(super) fn new(link: OwnedReadHalf) -> Self {
        Self(BufReader::new(link).lines())
    }

    /// The next message that this release knows; `None` when the other end has gone.
    pub(super) async fn next<M: DeserializeOwned>(&mut self) -> Option<M> {
        loop {
            let line = self.0.next_line().await.ok()??;
            match serde_json::from_str(&line) {
                Ok(message) => return Some(message),
                Err(error) => {
                    tracing::debug!(%error, "ignoring a message between the agent's processes");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::signature::Ed25519KeyPair;
    use gw_shared::identity::program::{ReleaseKey, TARGET};
    use gw_shared::version::Version;

    use super::*;
    use crate::later_member::pass;
    use crate::succession::AgentEvent;

    #[test]
    fn messages_take_a_member_of_a_later_version() {
        let pair = Ed25519KeyPair::generate().unwrap();
        let program = SignedProgram::sign(Version::own(), TARGET, b"program", &pair);
        let start = ToWorker::Start {
            required: vec!["a".into()],
            program: Some(program.clone()),
            release_keys: Some(ReleaseKey::of(&pair).into()),
        };
        assert_eq!(pass(&start, &[]), ["/program"]);
        let failed = ToWorker::UpdateFailed {
            program: program.clone(),
            error: "e".into(),
            is_refused: true,
        };
        assert_eq!(pass(&failed, &[]), ["/program"]);
        for message in [
            ToWorker::ExpectSuccessor,
            ToWorker::Resume,
            ToWorker::Succeeded,
            ToWorker::Stop,
            ToWorker::Detach,
        ] {
            assert_eq!(pass(&message, &[]), [""; 0]);
        }
        let update = AgentEvent::Update { program };
        assert_eq!(pass(&update, &[]), ["/program"]);
        let hostnames = vec!["a".into()];
        for event in [
            AgentEvent::Serving { hostnames },
            AgentEvent::Ready,
            AgentEvent::Connected,
            AgentEvent::Displaced,
            AgentEvent::Deleted,
        ] {
            assert_eq!(pass(&event, &[]), [""; 0]);
        }
    }
}
