//! The control stream of a tunnel, gateway's end.

use std::convert::Infallible;
use std::pin::pin;
use std::rc::Rc;
use std::time::Instant;

use bytes::Bytes;
use futures_util::future::{Either, select};
use gw_shared::runtime;
use gw_shared::tunnel::control::{AUTHORITY, Decoder, InvalidMessage, TO_GATEWAY_MAX, ToAgent};
use gw_shared::tunnel::stream::{self, Received};
use gw_shared::tunnel::text::error_line;
use h2::SendStream;
use h2::client::ResponseFuture;
use http::{Request, Uri, Version};

use super::Tunnels;
use super::openings::Opening;
use super::session::{Misconduct, Session};
use crate::clock::Timestamp;
use crate::limit::Bucket;
use crate::limits;

/// Opens the control stream, lets requests onto the tunnel once the agent has answered, then talks until it ends.
pub(super) async fn serve(tunnels: Rc<Tunnels>, session: Rc<Session>, opening: Opening) {
    let ended = match open(&session) {
        Ok((response, sender)) => {
            let hears = pin!(hear(&tunnels, &session, response, opening));
            let tells = pin!(tell(&session, sender));
            match select(hears, tells).await {
                Either::Left((ended, _)) => ended,
                Either::Right((Err(error), _)) => Err(error),
            }
        }
        Err(error) => Err(error.into()),
    };
    match ended {
        // The agent has said that it leaves: what still runs may end.
        Ok(()) if !session.takes_requests() => {}
        // Without its control stream a tunnel can be neither drained nor replaced.
        Ok(()) => session.cut(),
        Err(error) => {
            if !session.is_cut() {
                let error = error_line(&error);
                tracing::warn!(agent = %session.agent, %error, "control stream failed: tunnel cut");
            }
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
    #[error(transparent)]
    Misconduct(#[from] Misconduct),
    #[error("{0}")]
    Refused(crate::error::Error),
    #[error("the agent did not answer")]
    NoAnswer,
    #[error("the agent may not serve this service any more")]
    NotAllowed,
    #[error("the agent answered {0}")]
    Status(http::StatusCode),
    #[error("the agent sends too many messages")]
    TooMany,
    #[error("the agent does not read its messages")]
    NotRead,
    #[error("the agent has ended it")]
    Ended,
}

fn open(session: &Session) -> Result<(ResponseFuture, SendStream<Bytes>), h2::Error> {
    let mut head = Request::new(());
    *head.method_mut() = http::Method::POST;
    *head.uri_mut() = Uri::from_static("https://gw.control/");
    debug_assert_eq!(head.uri().authority().map(http::uri::Authority::as_str), Some(AUTHORITY));
    *head.version_mut() = Version::HTTP_2;
    session.open_control(head)
}

/// Listens until the agent ends the stream.
async fn hear(
    tunnels: &Rc<Tunnels>,
    session: &Rc<Session>,
    response: ResponseFuture,
    opening: Opening,
) -> Result<(), ControlError> {
    let response = runtime::timeout(limits::HEAD, answer(response)).await.map_err(|_| ControlError::NoAnswer)??;
    if !response.status().is_success() {
        return Err(ControlError::Status(response.status()));
    }
    // The records may have changed since the handshake, and the connection may have ended already.
    if !session.is_allowed(&tunnels.directory.get(), Timestamp::now()) || !session.takes_requests() {
        return Err(ControlError::NotAllowed);
    }
    tunnels.registry.borrow_mut().insert(session).map_err(ControlError::Refused)?;
    drop(opening);
    session.tell(&ToAgent::Ready { agent_id: session.agent.to_string(), generation: session.generation });
    session.announce_services(&tunnels.directory.get());
    session.flow.tell(session);
    tracing::info!(
        agent = %session.agent, service = %session.service.label, generation = session.generation, "tunnel ready"
    );
    if tunnels.lifecycle.is_draining() {
        session.tell(&ToAgent::Drain);
    }
    let (mut body, mut decoder) = (response.into_body(), Decoder::new(TO_GATEWAY_MAX));
    let mut rate = Bucket::new(limits::CONTROL_MESSAGES, Instant::now());
    while let Ok(Received::Data(data)) = std::future::poll_fn(|cx| stream::poll_receive(&mut body, cx)).await {
        stream::release(&mut body, data.len());
        decoder.push(&data);
        while let Some(message) = decoder.next_message()? {
            rate.take(Instant::now()).map_err(|_| ControlError::TooMany)?;
            session.hear(tunnels, message)?;
        }
    }
    Ok(())
}

/// The agent's answer to the control stream. An interim one is none.
async fn answer(mut response: ResponseFuture) -> Result<http::Response<h2::RecvStream>, ControlError> {
    match std::future::poll_fn(|cx| response.poll_informational(cx)).await {
        Some(interim) => Err(ControlError::Status(interim?.status())),
        None => Ok(response.await?),
    }
}

/// Sends what the agent is told, as fast as it reads.
async fn tell(session: &Session, mut sender: SendStream<Bytes>) -> Result<Infallible, ControlError> {
    loop {
        let line = session.outbox.next().await;
        let bytes = line.len();
        let sent = runtime::timeout(limits::CONTROL_TAKEN_WITHIN, stream::send(&mut sender, line, false)).await;
        sent.map_err(|_| ControlError::NotRead)?.map_err(|_| ControlError::Ended)?;
        session.outbox.sent(bytes);
    }
}
