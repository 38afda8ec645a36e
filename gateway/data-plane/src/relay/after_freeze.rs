//! Requests that queued while the process was frozen: they are authenticated once the records were
//! read again.

use std::pin::pin;

use futures_util::future::{Either, select};
use gw_base::error::Error;
use gw_shared::http::RequestHead;

use super::{NotRelayed, Relay};
use crate::http_message::{CallerGone, RequestBody};
use crate::memory::relay::Reserved;
use crate::peer::Peer;
use crate::request_scope::RequestScope;
use crate::upstream::Opening;

/// Memory of a field besides its name and value, at most.
const FIELD: usize = 128;

impl Relay {
    /// As [`Relay::open`], after the wait.
    pub(super) async fn open_after_freeze(
        &self,
        scope: &RequestScope,
        label: &str,
        request: RequestHead,
        peer: &Peer,
        body: &mut impl RequestBody,
    ) -> Result<Opening, NotRelayed> {
        let charged = self.charge(label, &request)?;
        match select(pin!(self.upstream.tunnels.freeze.over()), pin!(body.gone())).await {
            Either::Left((waited, _)) => waited?,
            Either::Right((CallerGone, _)) => return Err(NotRelayed::TakenBack),
        }
        drop(charged);
        self.open(scope, label, request, peer, body.was_taken_back())
    }

    /// Charges the head of a request that waits to the account of its service; `None` if there is
    /// no such service.
    fn charge(&self, label: &str, request: &RequestHead) -> Result<Option<Reserved>, Error> {
        let directory = self.directory.get();
        let Some(service) = directory.service(label) else {
            return Ok(None);
        };
        let fields = request
            .headers
            .iter()
            .map(|(name, value)| name.as_str().len() + value.len() + FIELD);
        let head = request.target.as_str().len() + fields.sum::<usize>();
        self.upstream
            .tunnels
            .relay_memory
            .reserve(&service.account, head)
            .map(Some)
    }
}
