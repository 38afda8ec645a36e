//! Updates of the agent's own program. The gateway offers a program of its version; the agent downloads it, checks the
//! signature by its release key, stores it, and asks the supervisor to run it.

mod download;

use std::io;
use std::rc::Rc;
use std::time::Duration;

use gw_shared::identity::program::{InvalidProgram, SignedProgram};
use gw_shared::runtime;
use tokio::sync::oneshot;

use crate::backoff::{Backoff, random};
use crate::config::Config;
use crate::program::stored::{self, StoredProgram};
use crate::succession::Event;
use crate::tunnel::Agent;
use crate::tunnel::dial::DialError;

/// Agents that get the offer at the same time begin their downloads spread over this time.
const SPREAD: Duration = Duration::from_secs(5);

/// Why a program was not stored.
#[derive(Debug, thiserror::Error)]
enum UpdateError {
    #[error("cannot download the program: {0}")]
    Download(#[from] DialError),
    #[error("the program is refused: {0}")]
    Invalid(#[from] InvalidProgram),
    #[error("cannot store the program in {path}: {error}")]
    Store { path: String, error: io::Error },
    #[error("cannot start the thread that stores the program")]
    Thread,
}

/// Downloads each offered program and tells the supervisor, which runs it. Never returns.
pub(crate) async fn keep_updated(agent: &Rc<Agent>) {
    let mut offers = agent.updates.offer.subscribe();
    loop {
        // The sender lives as long as the agent.
        if offers.changed().await.is_err() {
            return std::future::pending().await;
        }
        let Some(program) = offers.borrow_and_update().clone() else { continue };
        runtime::sleep(SPREAD.mul_f64(random())).await;
        let mut backoff = Backoff::default();
        while !offers.has_changed().unwrap_or(true) {
            agent.updates.begin(&program);
            let error = match fetch(agent, &program).await {
                Ok(stored) => {
                    agent.events.send(Event::Update { program: stored.description });
                    break;
                }
                Err(UpdateError::Invalid(error)) => {
                    agent.updates.fail(&program, &format!("the program is refused: {error}"));
                    break;
                }
                Err(error) => error,
            };
            let retry_in = backoff.next_delay(random());
            tracing::warn!(version = %program.version, %error, ?retry_in, "cannot update the agent yet");
            agent.updates.retry_later(&program, &error.to_string());
            runtime::sleep(retry_in).await;
        }
    }
}

/// Downloads, checks and stores a program.
async fn fetch(agent: &Agent, program: &SignedProgram) -> Result<StoredProgram, UpdateError> {
    let content = download::download(agent, program.size).await?;
    let (sender, receiver) = oneshot::channel();
    let (program, config) = (program.clone(), agent.config.clone());
    // Hashing and synced writes take too long for the reactor.
    let store = move || drop(sender.send(store(&config, &program, &content)));
    std::thread::Builder::new().name("gw-update".into()).spawn(store).map_err(|_| UpdateError::Thread)?;
    receiver.await.unwrap_or(Err(UpdateError::Thread))
}

fn store(config: &Config, program: &SignedProgram, content: &[u8]) -> Result<StoredProgram, UpdateError> {
    program.verify_content(content)?;
    StoredProgram::write(&config.state, program, content).map_err(|error| {
        let path = stored::folder(&config.state).display().to_string();
        UpdateError::Store { path, error }
    })
}
