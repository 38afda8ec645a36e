//! Updates of the agent's own program. The gateway offers a program of its version; the agent
//! downloads it, checks the signature by its release key, stores it, and asks the supervisor to run
//! it.

mod download;

use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{Either, select};
use gw_shared::identity::program::{InvalidProgram, SignedProgram};
use gw_shared::runtime;
use tokio::sync::oneshot;

use crate::backoff::{Backoff, random};
use crate::identity::state::StateDir;
use crate::program::stored::{self, ReservedFile};
use crate::succession::{AgentEvent, Succession};
use crate::tunnel::AgentContext;
use crate::tunnel::dial::DialError;

/// Agents that get the offer at the same time begin their downloads spread over this time.
const SPREAD: Duration = Duration::from_secs(5);
/// First and longest time after which a program is tried again that the supervisor has given up for
/// a cause that may be outside of the program. The time doubles, so that the agent is updated at
/// the latest after twice the time of an outage; and no outage keeps it from the program for ever,
/// since an attacker on the network can cause one.
const RETRY_AFTER: [Duration; 2] = [Duration::from_mins(1), Duration::from_hours(1)];

/// Why a program was not stored.
#[derive(Debug, thiserror::Error)]
enum UpdateError {
    #[error("cannot download the program: {0}")]
    Download(#[from] DialError),
    #[error("the program is refused: {0}")]
    Invalid(#[from] InvalidProgram),
    #[error("cannot store the program in {path}: {error}")]
    Store { path: String, error: io::Error },
    #[error(
        "cannot start the thread that stores the program: the limit on threads or memory is reached"
    )]
    Thread,
}

/// Downloads each offered program and tells the supervisor, which runs it. Returns when a successor
/// serves.
pub(crate) async fn keep_updated(agent: &Rc<AgentContext>) {
    select(
        pin!(agent.succession.wait_for(Succession::Done)),
        pin!(follow_offers(agent)),
    )
    .await;
}

async fn follow_offers(agent: &Rc<AgentContext>) {
    let mut offers = agent.updates.offer.subscribe();
    let mut retries = retries();
    loop {
        let pause = match select(pin!(offers.changed()), pin!(agent.updates.retry.notified())).await
        {
            Either::Left((Ok(()), _)) => {
                retries.reset();
                SPREAD.mul_f64(random())
            }
            // The sender lives as long as the agent.
            Either::Left((Err(_), _)) => return,
            Either::Right(_) => retries.next_delay(1.0),
        };
        // The retries of one program do not delay the next one.
        match select(pin!(runtime::sleep(pause)), pin!(offers.changed())).await {
            Either::Left(_) => {}
            Either::Right((Ok(()), _)) => {
                retries.reset();
                runtime::sleep(SPREAD.mul_f64(random())).await;
            }
            Either::Right((Err(_), _)) => return,
        }
        let Some(program) = offers.borrow_and_update().clone() else {
            continue;
        };
        let mut backoff = Backoff::default();
        while !offers.has_changed().unwrap_or(true) {
            agent.updates.begin(&program);
            let error = match fetch(agent, &program).await {
                Ok(()) => {
                    agent.events.send(AgentEvent::Update { program });
                    break;
                }
                Err(UpdateError::Invalid(error)) => {
                    agent
                        .updates
                        .refuse(&program, &format!("the program is refused: {error}"));
                    break;
                }
                Err(error) => error,
            };
            let retry_in = backoff.next_delay(random());
            tracing::warn!(version = %program.version, %error, ?retry_in,
                "cannot update the agent yet");
            agent.updates.retry_later(&program, &error.to_string());
            runtime::sleep(retry_in).await;
        }
    }
}

fn retries() -> Backoff {
    let [first, longest] = RETRY_AFTER;
    Backoff::between(first, longest)
}

/// Downloads, checks and stores a program, unless it was stored before.
async fn fetch(agent: &AgentContext, program: &SignedProgram) -> Result<(), UpdateError> {
    let reserved = {
        let program = program.clone();
        let state = agent.config.state.clone();
        let keys = agent.updates.release_keys().cloned();
        on_thread(move || {
            if keys.is_some_and(|keys| stored::read(&state, &program, &keys).is_ok()) {
                return Ok(None);
            }
            ReservedFile::new(&state, &program)
                .map(Some)
                .map_err(|error| not_stored(&state, error))
        })
        .await?
    };
    let Some(file) = reserved else { return Ok(()) };
    let content = download::download(agent, program).await?;
    let program = program.clone();
    let state = agent.config.state.clone();
    let store = move || {
        program.verify_content(&content)?;
        file.store(&content)
            .map_err(|error| not_stored(&state, error))
    };
    on_thread(store).await
}

fn not_stored(state: &StateDir, error: io::Error) -> UpdateError {
    UpdateError::Store {
        path: stored::folder(state).display().to_string(),
        error,
    }
}

/// Runs `work` on a thread of its own: hashing and synced writes take too long for the reactor.
async fn on_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, UpdateError> + Send + 'static,
) -> Result<T, UpdateError> {
    let (sender, receiver) = oneshot::channel();
    let run = move || drop(sender.send(work()));
    std::thread::Builder::new()
        .name("gw-update".into())
        .spawn(run)
        .map_err(|_| UpdateError::Thread)?;
    receiver.await.unwrap_or(Err(UpdateError::Thread))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_tried_again_after_a_minute_and_at_last_every_hour() {
        let mut retries = retries();
        let minutes: Vec<u64> = (0..9)
            .map(|_| retries.next_delay(1.0).as_secs() / 60)
            .collect();
        assert_eq!(minutes, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
    }
}
