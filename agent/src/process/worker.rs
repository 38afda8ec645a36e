//! The worker: runs the agent, and gives way to its successor when the supervisor says so.

use std::io;
use std::os::fd::AsFd;
use std::sync::mpsc::Sender;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::sync::mpsc::UnboundedReceiver;

use super::messages::{MessageReceiver, ToWorker, send};
use crate::config::Config;
use crate::lifecycle::{self, AgentHandle, StartError, Supervised};
use crate::succession::{AgentEvent, LifecycleCommand};
use crate::tunnel::RelayedService;

/// Time in which the next supervisor has to start a successor of a detached worker.
const SUCCEEDED_WITHIN: Duration = Duration::from_secs(30);

/// Runs the agent until the supervisor ends it. The link to the supervisor is standard input.
pub(super) async fn work(
    config: Config,
    relayed: Option<Sender<RelayedService>>,
) -> Result<(), WorkError> {
    let link = std::os::unix::net::UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    link.set_nonblocking(true)?;
    let (reader, mut writer) = UnixStream::from_std(link)?.into_split();
    let mut messages = MessageReceiver::new(reader);
    let Some(ToWorker::Start {
        required,
        program,
        release_keys,
    }) = messages.next().await
    else {
        return Err(WorkError::NoSupervisor);
    };
    let (agent, mut events) = lifecycle::start_supervised(
        config,
        relayed,
        Supervised {
            required,
            program,
            release_keys,
        },
    )?;
    loop {
        let message = tokio::select! {
            message = messages.next() => message,
            event = events.recv() => {
                let event = event.ok_or(WorkError::AgentEnded)?;
                // Fails if the supervisor has ended, which its next message says.
                let _ = send(&mut writer, &event).await;
                continue;
            }
        };
        match message {
            Some(ToWorker::ExpectSuccessor) => agent.command(LifecycleCommand::ExpectSuccessor),
            Some(ToWorker::Resume) => agent.command(LifecycleCommand::Resume),
            Some(ToWorker::UpdateFailed {
                program,
                error,
                is_refused,
            }) => {
                agent.command(LifecycleCommand::UpdateFailed {
                    program,
                    error,
                    is_refused,
                });
            }
            Some(ToWorker::Succeeded) => {
                agent.command(LifecycleCommand::Succeeded);
                return drain(agent).await;
            }
            Some(ToWorker::Detach) => {
                agent.command(LifecycleCommand::ExpectSuccessor);
                while let Some(event) = events.recv().await {
                    // Fails if the supervisor has ended.
                    let _ = send(&mut writer, &event).await;
                    if matches!(event, AgentEvent::Serving { .. }) {
                        break;
                    }
                }
                return serve_until_displaced(agent, events).await;
            }
            Some(ToWorker::Start { .. }) => {}
            // `None`: the supervisor has crashed or was killed.
            Some(ToWorker::Stop) | None => return drain(agent).await,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub(super) enum WorkError {
    #[error(transparent)]
    Start(#[from] StartError),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("`--supervised` is for processes that `gw-agent run` starts")]
    NoSupervisor,
    #[error("the agent's thread ended; see the log for the reason")]
    AgentEnded,
}

/// Serves until another process of this agent has replaced all tunnels, for a limited time.
async fn serve_until_displaced(
    agent: AgentHandle,
    mut events: UnboundedReceiver<AgentEvent>,
) -> Result<(), WorkError> {
    tracing::info!(
        "the agent is restarted: this process serves until the next one has its tunnels"
    );
    let displaced = async {
        while events
            .recv()
            .await
            .is_some_and(|event| event != AgentEvent::Displaced)
        {}
    };
    if tokio::time::timeout(SUCCEEDED_WITHIN, displaced)
        .await
        .is_err()
    {
        tracing::error!(
            "no process has followed this one within {SUCCEEDED_WITHIN:?}; its service ends"
        );
    }
    drain(agent).await
}

/// Finishes the running requests.
async fn drain(agent: AgentHandle) -> Result<(), WorkError> {
    // The thread of the agent logs its own panic.
    drop(tokio::task::spawn_blocking(|| agent.drain()).await);
    Ok(())
}
