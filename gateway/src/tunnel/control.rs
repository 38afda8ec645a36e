//! Control messages of a tunnel, at the gateway.

use std::rc::Rc;
use std::time::Instant;

use gw_shared::runtime;
use gw_shared::text::error_line;
use gw_shared::tunnel::control::{InvalidMessage, ToAgent, decode};

use super::Tunnels;
use super::openings::Opening;
use super::replaced_keys;
use super::session::Session;
use crate::clock::Timestamp;
use crate::limits;
use crate::rate_limit::Bucket;
use crate::store::PublicKeyHash;

/// Registers the tunnel once the agent has sent its HELLO, then handles its messages until the tunnel ends.
/// `key` is that of the certificate that the tunnel was opened with.
pub(super) async fn serve(tunnels: Rc<Tunnels>, session: Rc<Session>, opening: Opening, key: PublicKeyHash) {
    if let Err(error) = exchange(&tunnels, &session, opening, key).await {
        if !session.is_cut() {
            let error = error_line(&error);
            tracing::warn!(agent = %session.agent, %error, "control messages failed: tunnel cut");
        }
        // A tunnel without control messages can be neither drained nor replaced.
        session.cut();
    }
}

#[derive(Debug, thiserror::Error)]
enum ControlError {
    #[error(transparent)]
    Message(#[from] InvalidMessage),
    #[error("{0}")]
    Refused(crate::error::Error),
    #[error("the agent did not send its HELLO")]
    NoHello,
    #[error("the agent may no longer serve this service")]
    NotAllowed,
    #[error("the agent sends too many messages")]
    TooMany,
}

async fn exchange(
    tunnels: &Rc<Tunnels>,
    session: &Rc<Session>,
    opening: Opening,
    key: PublicKeyHash,
) -> Result<(), ControlError> {
    let hello = runtime::timeout(limits::HEAD, session.tunnel.hello()).await.map_err(|_| ControlError::NoHello)?;
    if hello.is_none() {
        // The tunnel has ended.
        return Ok(());
    }
    // Since the handshake, the records may have changed and the connection may have ended.
    if !session.is_allowed(&tunnels.directory.get(), Timestamp::now()) || !session.takes_requests() {
        return Err(ControlError::NotAllowed);
    }
    tunnels.registry.borrow_mut().insert(session).map_err(ControlError::Refused)?;
    drop(opening);
    replaced_keys::used(tunnels, &session.agent, key);
    session.send(&ToAgent::Ready { agent_id: session.agent.to_string(), generation: session.generation });
    session.announce_services(&tunnels.directory.get());
    session.flow.announce();
    tunnels.waiting.look_again(&session.service.label);
    if let Some(offer) = tunnels.releases.offer(&session.agent, session.version) {
        session.send(&offer);
    }
    tracing::info!(
        agent = %session.agent, service = %session.service.label, generation = session.generation, "tunnel ready"
    );
    if tunnels.lifecycle.is_draining() {
        session.send(&ToAgent::Drain);
    }
    let mut rate = Bucket::new(limits::CONTROL_MESSAGES, Instant::now());
    while let Some(message) = session.tunnel.message().await {
        rate.take(Instant::now()).map_err(|_| ControlError::TooMany)?;
        session.receive(tunnels, decode(&message)?);
    }
    Ok(())
}
