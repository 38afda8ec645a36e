//! The control stream of a tunnel, at the gateway.

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
use super::session::{ProtocolViolation, Session};
use crate::clock::Timestamp;
use crate::limit::Bucket;
use crate::limits;

/// Opens the control stream, registers the tunnel once the agent has answered, then exchanges messages until the stream
/// ends.
pub(super) async fn serve(tunnels: Rc<Tunnels>, session: Rc<Session>, opening: Opening) {
    let ended = match open(&session) {
        Ok((response, sender)) => {
            let receiving = pin!(receive(&tunnels, &session, response, opening));
            let sending = pin!(send(&session, sender));
            match select(receiving, sending).await {
                Either::Left((ended, _)) => ended,
                Either::Right((Err(error), _)) => Err(error),
            }
        }
        Err(error) => Err(error.into()),
    };
    match ended {
        // The agent drains: running requests may finish.
        Ok(()) if !session.takes_requests() => {}
        // A tunnel without a control stream can be neither drained nor replaced.
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
enum ControlStreamError {
    #[error(transparent)]
    Http2(#[from] h2::Error),
    #[error(transparent)]
    Message(#[from] InvalidMessage),
    #[error(transparent)]
    ProtocolViolation(#[from] ProtocolViolation),
    #[error("{0}")]
    Refused(crate::error::Error),
    #[error("the agent did not answer the control stream")]
    NoAnswer,
    #[error("the agent may no longer serve this service")]
    NotAllowed,
    #[error("the agent answered with status {0}")]
    Status(http::StatusCode),
    #[error("the agent sends too many messages")]
    TooMany,
    #[error("the agent does not read its control stream")]
    NotRead,
    #[error("the agent has closed the control stream")]
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

/// Receives messages until the agent ends the stream.
async fn receive(
    tunnels: &Rc<Tunnels>,
    session: &Rc<Session>,
    response: ResponseFuture,
    opening: Opening,
) -> Result<(), ControlStreamError> {
    let response =
        runtime::timeout(limits::HEAD, answer(response)).await.map_err(|_| ControlStreamError::NoAnswer)??;
    if !response.status().is_success() {
        return Err(ControlStreamError::Status(response.status()));
    }
    // Since the handshake, the records may have changed and the connection may have ended.
    if !session.is_allowed(&tunnels.directory.get(), Timestamp::now()) || !session.takes_requests() {
        return Err(ControlStreamError::NotAllowed);
    }
    tunnels.registry.borrow_mut().insert(session).map_err(ControlStreamError::Refused)?;
    drop(opening);
    session.send(&ToAgent::Ready { agent_id: session.agent.to_string(), generation: session.generation });
    session.announce_services(&tunnels.directory.get());
    session.flow.send_window(session);
    tracing::info!(
        agent = %session.agent, service = %session.service.label, generation = session.generation, "tunnel ready"
    );
    if tunnels.lifecycle.is_draining() {
        session.send(&ToAgent::Drain);
    }
    let (mut body, mut decoder) = (response.into_body(), Decoder::new(TO_GATEWAY_MAX));
    let mut rate = Bucket::new(limits::CONTROL_MESSAGES, Instant::now());
    while let Ok(Received::Data(data)) = std::future::poll_fn(|cx| stream::poll_receive(&mut body, cx)).await {
        stream::release(&mut body, data.len());
        decoder.push(&data);
        while let Some(message) = decoder.next_message()? {
            rate.take(Instant::now()).map_err(|_| ControlStreamError::TooMany)?;
            session.receive(tunnels, message)?;
        }
    }
    Ok(())
}

/// The agent's final response to the control stream. An interim response is an error.
async fn answer(mut response: ResponseFuture) -> Result<http::Response<h2::RecvStream>, ControlStreamError> {
    match std::future::poll_fn(|cx| response.poll_informational(cx)).await {
        Some(interim) => Err(ControlStreamError::Status(interim?.status())),
        None => Ok(response.await?),
    }
}

/// Sends queued messages as fast as the agent reads them.
async fn send(session: &Session, mut sender: SendStream<Bytes>) -> Result<Infallible, ControlStreamError> {
    loop {
        let line = session.outbox.next().await;
        let bytes = line.len();
        let sent = runtime::timeout(limits::CONTROL_TAKEN_WITHIN, stream::send(&mut sender, line, false)).await;
        sent.map_err(|_| ControlStreamError::NotRead)?.map_err(|_| ControlStreamError::Ended)?;
        session.outbox.sent(bytes);
    }
}
