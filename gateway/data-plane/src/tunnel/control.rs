//! Control messages of a tunnel, at the gateway.

use std::rc::Rc;
use std::time::Instant;

use crate::limits;
use gw_base::clock::Timestamp;
use gw_interface::rate_limit::Bucket;
use gw_shared::runtime;
use gw_shared::text::error_line;
use gw_shared::tunnel::control::{ToAgent, decode};
use gw_shared::tunnel::cut_reason::CutReason;
use gw_shared::version;
use gw_store::PublicKeyHash;

use super::Tunnels;
use super::handshake::openings::TunnelOpening;
use super::handshake::replaced_keys;
use super::session::Session;

/// State of the service in the last `other_tunnels` message to an agent. The default is what an
/// agent assumes before the first one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Told {
    /// The service has tunnels of other agents.
    pub(super) others: bool,
    /// The agent may repeat safe requests: the setting `retries`.
    pub(super) retries: bool,
}

impl Default for Told {
    fn default() -> Self {
        Self {
            others: false,
            retries: true,
        }
    }
}

impl Session {
    /// Sends `other_tunnels` if `change` changes the state. Agents of the previous line do not know
    /// the message.
    pub(super) fn tell_of_service(&self, change: impl FnOnce(&mut Told)) {
        let mut told = self.told.get();
        change(&mut told);
        if self.told.replace(told) != told && self.version.line != version::PREVIOUS {
            let Told { others, retries } = told;
            self.send(&ToAgent::OtherTunnels {
                exist: others,
                retries,
            });
        }
    }
}

/// Registers the tunnel once the agent has sent its HELLO, then handles its messages until the
/// tunnel ends. `key` is that of the certificate that the tunnel was opened with.
pub(super) async fn serve(
    tunnels: Rc<Tunnels>,
    session: Rc<Session>,
    opening: TunnelOpening,
    key: PublicKeyHash,
) {
    if let Err(reason) = exchange(&tunnels, &session, opening, key).await {
        // A tunnel without control messages can be neither drained nor replaced.
        session.cut(reason);
    }
}

async fn exchange(
    tunnels: &Rc<Tunnels>,
    session: &Rc<Session>,
    opening: TunnelOpening,
    key: PublicKeyHash,
) -> Result<(), CutReason> {
    let hello = runtime::timeout(limits::HEAD, session.tunnel.hello())
        .await
        .map_err(|_| CutReason::NoHello)?;
    if hello.is_none() || !session.takes_requests() {
        // The tunnel has ended.
        return Ok(());
    }
    // The records may have changed since the handshake.
    let not_allowed = session.not_allowed(&tunnels.directory.get(), Timestamp::now());
    if let Some(reason) = not_allowed.or_else(|| tunnels.distrusted(session)) {
        return Err(reason);
    }
    tunnels
        .registry
        .borrow_mut()
        .insert(session, Instant::now())?;
    drop(opening);
    replaced_keys::used(tunnels, &session.agent, key);
    session.send_ready();
    tunnels.check_issuer(session, Instant::now());
    session.announce_services(&tunnels.directory.get());
    session.flow.announce();
    tunnels.waiting.look_again(&session.service.label);
    if let Some(offer) = tunnels.releases.offer(&session.agent, session.version) {
        session.send(&offer);
    }
    tracing::info!(
        agent = %session.agent,
        service = %session.service.label,
        generation = session.generation,
        "tunnel ready"
    );
    if tunnels.lifecycle.is_draining() {
        session.send(&ToAgent::Drain);
    }
    // The service may have moved to another node since the handshake.
    if tunnels.is_elsewhere(&session.service) {
        session.relocate();
    }
    let mut rate = Bucket::new(limits::CONTROL_MESSAGES, Instant::now());
    while let Some(message) = session.tunnel.message().await {
        rate.take(Instant::now())
            .map_err(|_| CutReason::TooManyMessages)?;
        let message = decode(&message).map_err(|error| {
            tracing::warn!(agent = %session.agent, error = error_line(&error),
                "invalid control message");
            CutReason::InvalidMessage
        })?;
        session.receive(tunnels, message);
    }
    Ok(())
}
