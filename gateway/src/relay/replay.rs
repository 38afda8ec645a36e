//! Requests that were kept, relayed again: the way of every other, but that an administrator stands in for the caller.

use std::net::IpAddr;
use std::rc::Rc;

use bytes::Bytes;
use gw_shared::http::{Framing, Part, RequestHead, Version};
use gw_shared::id::RequestId;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::uri::{Authority, PathAndQuery};
use http::{Method, Response};
use tokio::sync::oneshot;

use super::{Exchange, find, refuse, set_out, stream};
use crate::auth::Authenticated;
use crate::client_address::Peer;
use crate::downstream::{BodyError, CallerGone, RequestBody, ResponseSink};
use crate::error::Error;
use crate::request_scope::Journey;
use crate::upstream::ResponseHead;
use crate::worker::Core;

/// Fields of a replayed request that follow from its body, whatever was kept.
pub(crate) const REPLAY_FRAMING: [HeaderName; 3] = [header::EXPECT, header::TRANSFER_ENCODING, header::CONTENT_LENGTH];

/// What to send, for whom.
pub(crate) struct Replay {
    pub(crate) original: RequestId,
    /// Label of the service, and the host that is asked for it.
    pub(crate) label: String,
    pub(crate) hostname: Authority,
    pub(crate) method: Method,
    pub(crate) target: PathAndQuery,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// Who sent the original.
    pub(crate) caller: IpAddr,
    /// Told the id of the new request once that has ended. Who no longer waits for it has left, as a caller can.
    pub(crate) reply: oneshot::Sender<RequestId>,
}

/// Relays it. The response goes to the log, and nowhere else.
pub(crate) async fn replay(core: Rc<Core>, replay: Replay) {
    let Replay { original, label, hostname, method, target, mut headers, body, caller, mut reply } = replay;
    for name in REPLAY_FRAMING {
        headers.remove(name);
    }
    if !body.is_empty() {
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
    }
    let framing = if body.is_empty() { Framing::None } else { Framing::Length(body.len() as u64) };
    let mut kept = Kept { rest: Some(body), reply: &mut reply };
    let request = RequestHead {
        method,
        target,
        authority: hostname,
        version: Version::Http11,
        headers,
        framing,
        keep_alive: true,
        expects_continue: false,
        upgrade: None,
    };
    let journey = Journey::again(&core, &request, original, caller);
    let id = journey.id;
    let outcome = match open(&journey, &label, request) {
        Ok(exchange) => stream(&journey, exchange, &mut kept, &mut Discard::default()).await,
        Err(error) => refuse(&journey, &error, &mut Discard::default()).await,
    };
    journey.ends(outcome);
    drop(journey);
    core.recorder.borrow_mut().flush();
    // Whoever asked may have left.
    let _ = reply.send(id);
}

fn open(journey: &Journey, label: &str, request: RequestHead) -> Result<Exchange, Error> {
    let directory = journey.core.directory();
    let service = find(journey, &directory, label, &request)?;
    let authenticated = Authenticated::administrator(service);
    journey.authenticated(Some(&authenticated.by));
    set_out(journey, authenticated, request, &Peer::new(journey.client, None))
}

/// A body that is here already, of somebody who waits.
struct Kept<'a> {
    rest: Option<Bytes>,
    reply: &'a mut oneshot::Sender<RequestId>,
}

impl RequestBody for Kept<'_> {
    async fn part(&mut self) -> Result<Part, BodyError> {
        Ok(self.rest.take().filter(|body| !body.is_empty()).map_or(Part::End, Part::Data))
    }

    fn is_done(&self) -> bool {
        self.rest.is_none()
    }

    async fn gone(&mut self) -> CallerGone {
        self.reply.closed().await;
        CallerGone
    }

    fn switch_protocols(&mut self) {}
}

/// Takes a response and shows it nobody.
#[derive(Default)]
struct Discard {
    begun: bool,
}

impl ResponseSink for Discard {
    async fn interim(&mut self, _: ResponseHead) -> Result<(), CallerGone> {
        Ok(())
    }

    async fn head(&mut self, _: ResponseHead) -> Result<(), CallerGone> {
        self.begun = true;
        Ok(())
    }

    async fn data(&mut self, _: Bytes, _: bool) -> Result<(), CallerGone> {
        Ok(())
    }

    async fn end(&mut self, _: Option<HeaderMap>) -> Result<(), CallerGone> {
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), CallerGone> {
        Ok(())
    }

    fn has_begun(&self) -> bool {
        self.begun
    }

    fn begin_refusal(&mut self, _: bool) {}

    async fn whole(&mut self, _: Response<Vec<u8>>) -> Result<(), CallerGone> {
        Ok(())
    }
}
