//! The control stream of a tunnel, gateway's end.

use std::rc::Rc;

use gw_shared::runtime;
use gw_shared::tunnel::control::{AUTHORITY, Decoder, InvalidMessage, ToAgent};
use gw_shared::tunnel::stream::{self, Received};
use http::{Request, Uri, Version};

use super::session::Session;
use crate::clock::Timestamp;
use crate::limits;
use crate::worker::Core;

/// Opens the control stream, lets requests onto the tunnel once the agent has answered, then listens until it ends.
pub(super) async fn serve(core: Rc<Core>, session: Rc<Session>) {
    match converse(&core, &session).await {
        // The agent has said that it leaves: what still runs may end.
        Ok(()) if !session.takes_requests() => {}
        // Without its control stream a tunnel can be neither drained nor replaced.
        Ok(()) => session.cut(),
        Err(error) => {
            tracing::warn!(agent = %session.agent, %error, "control stream failed: tunnel cut");
            session.cut();
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum ControlError {
    #[error(transparent)]
    Http2(#[from] h2::Error),
    #[error(transparent)]
    Message(#[from] InvalidMessage),
    #[error("{0}")]
    Refused(crate::error::Error),
    #[error("the agent did not answer")]
    NoAnswer,
    #[error("the agent may not serve this service any more")]
    NotAllowed,
    #[error("the agent answered {0}")]
    Status(http::StatusCode),
}

async fn converse(core: &Rc<Core>, session: &Rc<Session>) -> Result<(), ControlError> {
    let mut head = Request::new(());
    *head.method_mut() = http::Method::POST;
    *head.uri_mut() = Uri::from_static("https://gw.control/");
    debug_assert_eq!(head.uri().authority().map(http::uri::Authority::as_str), Some(AUTHORITY));
    *head.version_mut() = Version::HTTP_2;
    let (response, sender) = session.open_control(head)?;
    session.set_control(sender);
    let response = runtime::timeout(limits::HEAD, response).await.map_err(|_| ControlError::NoAnswer)??;
    if !response.status().is_success() {
        return Err(ControlError::Status(response.status()));
    }
    // The records may have changed since the handshake, and the connection may have ended already.
    if !session.is_allowed(&core.directory(), Timestamp::now()) || !session.takes_requests() {
        return Err(ControlError::NotAllowed);
    }
    core.tunnels.borrow_mut().insert(session).map_err(ControlError::Refused)?;
    session.tell(&ToAgent::Ready { agent_id: session.agent.to_string(), generation: session.generation });
    session.announce_services(&core.directory());
    session.pace.tell(session);
    tracing::info!(
        agent = %session.agent, service = %session.service.label, generation = session.generation, "tunnel ready"
    );
    if core.is_draining() {
        session.tell(&ToAgent::Drain);
    }
    let (mut body, mut decoder) = (response.into_body(), Decoder::default());
    while let Ok(Received::Data(data)) = std::future::poll_fn(|cx| stream::poll_receive(&mut body, cx)).await {
        stream::release(&mut body, data.len());
        decoder.push(&data);
        while let Some(message) = decoder.next_message()? {
            session.hear(core, message);
        }
    }
    Ok(())
}
