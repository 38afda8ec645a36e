//! Replays of captured requests: relayed as any other request, with an administrator in place of
//! the caller.

use std::rc::Rc;

use bytes::Bytes;
use gw_base::error::Error;
use gw_interface::auth::Authenticated;
use gw_interface::replay::{REPLAY_FRAMING, Replay};
use gw_shared::http::{Fields, Framing, HttpVersion, Part, RequestHead};
use gw_shared::id::RequestId;
use http::Response;
use http::header::{self, HeaderValue};
use tokio::sync::oneshot;

use super::carry::{Stopped, carry};
use super::on_node::open_on_node;
use super::{Relay, conclude};
use crate::http_message::{BodyError, CallerGone, RelayedHead, RequestBody, ResponseSink};
use crate::peer::Peer;
use crate::request_scope::{RequestScope, Stage};
use crate::upstream::Opening;

impl Relay {
    /// Relays a captured request. The response is recorded and then dropped.
    pub(crate) async fn replay(self: Rc<Self>, replay: Replay) {
        let Replay {
            original,
            label,
            hostname,
            method,
            target,
            mut headers,
            body,
            caller,
            mut reply,
        } = replay;
        for name in REPLAY_FRAMING {
            headers.remove(name);
        }
        if !body.is_empty() {
            headers.insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
        }
        let framing = if body.is_empty() {
            Framing::None
        } else {
            Framing::Length(body.len() as u64)
        };
        let mut captured = ReplayBody {
            rest: Some(body),
            reply: &mut reply,
        };
        let request = RequestHead {
            method,
            target,
            authority: hostname,
            version: HttpVersion::Http11,
            headers,
            framing,
            keep_alive: true,
            expects_continue: false,
            upgrade: None,
        };
        let scope = RequestScope::begin_replay(&self.observers, &request, original, caller);
        let id = scope.id;
        let mut response = Discard::default();
        let opened = match self.open_replay(&scope, original, &label, request) {
            Ok(Opening::Opened(request)) => Ok(request),
            Ok(Opening::OnNode(request)) => {
                open_on_node(Some(&scope), *request, &mut captured, &mut response).await
            }
            Err(error) => Err(Stopped::Failed(error)),
        };
        let carried = match opened {
            Ok(request) => carry(Some(&scope), request, None, &mut captured, &mut response).await,
            Err(stopped) => Err(stopped),
        };
        let concluded = conclude(&self, &scope, carried, &mut captured, &mut response);
        scope.report(concluded.await);
        drop(scope);
        self.observers.recorder.borrow_mut().flush();
        // Fails when the administrator has left.
        let _ = reply.send(id);
    }

    fn open_replay(
        &self,
        scope: &RequestScope,
        original: RequestId,
        label: &str,
        request: RequestHead,
    ) -> Result<Opening, Error> {
        let directory = self.directory.get();
        let service = self.find(scope, &directory, label, &request)?;
        // Deleted and created again since the captured request was read.
        if original.unix_ms() < service.created_ms {
            return Err(Error::ServiceNotFound);
        }
        self.permit(service)?;
        let authenticated = Authenticated::administrator(service);
        scope.note(Stage::Authenticated(Some(&authenticated.by)));
        self.admit_and_open(
            scope,
            authenticated,
            request,
            &Peer::new(scope.client, None, None),
        )
    }
}

/// A captured body. Its caller is gone once the receiver of `reply` is dropped.
struct ReplayBody<'a> {
    rest: Option<Bytes>,
    reply: &'a mut oneshot::Sender<RequestId>,
}

impl RequestBody for ReplayBody<'_> {
    async fn part(&mut self) -> Result<Part, BodyError> {
        Ok(self
            .rest
            .take()
            .filter(|body| !body.is_empty())
            .map_or(Part::End, Part::Data))
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

/// Drops a response.
#[derive(Default)]
struct Discard {
    begun: bool,
}

impl ResponseSink for Discard {
    async fn interim(&mut self, _: RelayedHead) -> Result<(), CallerGone> {
        Ok(())
    }

    async fn head(&mut self, _: RelayedHead) -> Result<(), CallerGone> {
        self.begun = true;
        Ok(())
    }

    async fn data(&mut self, _: Bytes, _: bool) -> Result<(), CallerGone> {
        Ok(())
    }

    async fn end(&mut self, _: Option<Fields>) -> Result<(), CallerGone> {
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), CallerGone> {
        Ok(())
    }

    fn has_begun(&self) -> bool {
        self.begun
    }

    fn begin_own_response(&mut self, _: bool) {}

    async fn whole(&mut self, _: Response<Vec<u8>>) -> Result<(), CallerGone> {
        Ok(())
    }
}
