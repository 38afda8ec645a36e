//! From an agent's TLS connection to a registered tunnel: who is it, may it serve this service, then HTTP/2.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use bytes::BytesMut;
use gw_shared::http::RequestHead;
use gw_shared::id::AgentId;
use gw_shared::net::TlsStream;
use gw_shared::tunnel::handshake::{self, BadUpgrade, HEAD_LIMITS};

use super::session;
use crate::caller::h1;
use crate::connections::Registered;
use crate::error::Error;
use crate::hostname::Destination;
use crate::limits;
use crate::pki;
use crate::store::Service;
use crate::worker::Core;

/// Serves one tunnel, from its upgrade request to its end.
pub(crate) async fn serve(core: Rc<Core>, stream: TlsStream, peer: SocketAddr, registered: Registered) {
    registered.expect_by(Instant::now() + limits::HEAD);
    let mut buffer = BytesMut::new();
    let admitted = match h1::read_head(&stream, &mut buffer, &registered, HEAD_LIMITS).await {
        Ok(Some(head)) => admit(&core, &stream, &head),
        Ok(None) => return,
        Err(invalid) => Err(Error::invalid_head(invalid)),
    };
    let (agent, service) = match admitted {
        Ok(admitted) => admitted,
        Err(error) => {
            tracing::warn!(%peer, %error, "tunnel refused");
            return h1::refuse_and_close(&core, &stream, &error, &registered).await;
        }
    };
    let accepted = async {
        let acceptance = handshake::acceptance();
        stream.write_all(&mut [std::io::IoSlice::new(&acceptance)]).await?;
        stream.flush().await
    };
    if accepted.await.is_err() {
        return;
    }
    stream.unread(&buffer);
    // From here on the heartbeat keeps the time.
    drop(registered);
    session::run(core, stream, agent, service).await;
}

/// Decides in the order in which the answers may be known: version, certificate, agent, service.
fn admit(core: &Core, stream: &TlsStream, head: &RequestHead) -> Result<(AgentId, Arc<Service>), Error> {
    handshake::check(head).map_err(|error| match error {
        BadUpgrade::VersionMismatch { .. } => Error::VersionMismatch(error.to_string()),
        BadUpgrade::NotAnUpgrade => Error::BadRequest(error.to_string()),
    })?;
    let certificate = stream.peer_certificate().ok_or(Error::AgentCertificateRequired)?;
    let identity = pki::agent_identity(&certificate, &core.region).ok_or(Error::AgentCertificateRequired)?;
    let directory = core.directory();
    let agent = directory
        .agent(identity.agent.as_str())
        .filter(|agent| !agent.revoked && agent.account == identity.account)
        .ok_or(Error::AgentRevoked)?;
    let Destination::Tenant(label) = core.region.destination(head.authority.as_str()) else {
        return Err(Error::Misdirected);
    };
    let service = directory.service(&label).ok_or(Error::ServiceNotFound)?;
    if !agent.may_serve(service) {
        return Err(Error::AgentNotAllowed(service.hostname.clone()));
    }
    // The server name brought the connection to its owner; a Host that says otherwise is nonsense.
    if service.owner != core.id {
        return Err(Error::Misdirected);
    }
    Ok((identity.agent, Arc::clone(service)))
}
