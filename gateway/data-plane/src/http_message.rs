//! One request and its response, between the connection of a caller (of any HTTP version) and the
//! code that serves it.

use std::cell::RefCell;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, UNIX_EPOCH};

use crate::limits;
use bytes::Bytes;
use gw_shared::clock;
use gw_shared::http::{Fields, InvalidBody, Part, UpgradeProtocol};
use gw_shared::id::AgentId;
use gw_shared::runtime;
use gw_shared::tunnel::timing::AgentTiming;
use http::header::{self, HeaderName, HeaderValue};
use http::{Response, StatusCode};

pub(crate) use gw_telemetry::outcome::{AttemptFailure, Outcome};

/// Memory of fields: their text, and an entry for each.
pub(crate) fn size_of_fields(fields: &Fields) -> usize {
    let entry = size_of::<(HeaderName, HeaderValue)>();
    fields
        .iter()
        .map(|(name, value)| name.as_str().len() + value.len() + entry)
        .sum()
}

/// A stream that was opened for a request.
#[derive(Debug, Clone)]
pub struct OpenedStream {
    /// Time at which the stream was opened.
    pub at: Instant,
    /// Agent at the other end of the tunnel.
    pub agent: AgentId,
}

/// An attempt that brought no response: on a tunnel of a service with several, or at the node that
/// owned the service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FailedAttempt {
    /// `None` if the node was lost before it had named the agent.
    pub(crate) agent: Option<AgentId>,
    pub(crate) reason: AttemptFailure,
    /// From the opening of the stream, or the failure to open one, to the failure.
    pub(crate) took: Duration,
}

/// How far a request has got upstream.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    pub(crate) stream: Option<OpenedStream>,
    /// Set by the owner of the service, for a request that crosses cores.
    pub(crate) stream_at_owner: Option<Arc<OnceLock<OpenedStream>>>,
    /// Reported by the agent with its response.
    pub(crate) timing: Option<AgentTiming>,
    /// Attempts before `stream`, or all of them if the request failed.
    pub(crate) failed_attempts: Box<[FailedAttempt]>,
    /// Present if the service has moved, for a request of another node, which sends it to the next
    /// owner.
    pub(crate) moved: Option<Moved>,
}

/// A service has moved before a request reached a tunnel of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moved {
    /// As in [`Authenticated`](gw_interface::auth::Authenticated).
    pub(crate) waited: Option<Duration>,
    /// The service has not moved. The request is to wait here without its body, which can then be
    /// sent elsewhere if this node is lost.
    pub(crate) is_still_here: bool,
}

impl Moved {
    /// A request that has not waited yet, and is to wait at the owner without its body.
    pub(crate) const STILL_HERE: Self = Self {
        waited: None,
        is_still_here: true,
    };
}

impl Progress {
    /// The stream on the tunnel, once it is open.
    pub(crate) fn opened(&self) -> Option<&OpenedStream> {
        self.stream
            .as_ref()
            .or_else(|| self.stream_at_owner.as_ref()?.get())
    }

    /// Number of agents whose attempts failed.
    pub(crate) fn agents_failed(&self) -> usize {
        let attempts = &self.failed_attempts;
        let is_first = |at: usize| {
            attempts[..at]
                .iter()
                .all(|earlier| earlier.agent != attempts[at].agent)
        };
        (0..attempts.len()).filter(|at| is_first(*at)).count()
    }
}

/// Head of a relayed response, fields cleaned for the next hop.
#[derive(Debug)]
pub struct RelayedHead {
    /// Status code of the response.
    pub status: StatusCode,
    /// Header fields for the next hop.
    pub headers: Fields,
    /// Data or trailers follow.
    pub has_body: bool,
    /// The backend has switched to this protocol: the body is its direction of the connection.
    pub upgrade: Option<UpgradeProtocol>,
}

impl RelayedHead {
    /// An interim response between nodes: the body of the request may follow.
    pub(crate) fn acceptance() -> Self {
        Self {
            status: StatusCode::CONTINUE,
            headers: Fields::new(),
            has_body: false,
            upgrade: None,
        }
    }
}

/// The caller closed the connection, or cannot be written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallerGone;

/// Why a request body ended early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BodyError {
    Gone,
    Malformed(InvalidBody),
}

/// The body of a request.
pub(crate) trait RequestBody {
    /// The next part; [`Part::End`] repeatedly once the body is complete.
    async fn part(&mut self) -> Result<Part, BodyError>;
    /// Whether the part just returned was the last.
    fn is_done(&self) -> bool;
    /// Resolves when the caller is gone. Can be dropped and called again.
    async fn gone(&mut self) -> CallerGone;
    /// Whether the caller has already reset the request, as far as that is known without I/O.
    fn was_taken_back(&mut self) -> bool {
        false
    }
    /// Whether a caller that is gone has broken a body off on purpose: it has reset its connection,
    /// or its stream.
    fn is_reset(&mut self) -> bool {
        false
    }
    /// Receives the rest of the body and drops it. Other tasks have a turn after each
    /// [`limits::DISCARDED_PER_TURN`]. Fails if the caller sends nothing for `pause`, if there is
    /// one.
    async fn discard(&mut self, pause: Option<Duration>) -> Result<(), BodyError> {
        let mut discarded = 0;
        loop {
            let part = match pause {
                Some(pause) => runtime::timeout(pause, self.part())
                    .await
                    .unwrap_or(Err(BodyError::Gone)),
                None => self.part().await,
            };
            match part? {
                Part::Data(data) => discarded += data.len() + limits::DISCARDED_PART,
                Part::Trailers(_) => {}
                Part::End => return Ok(()),
            }
            if discarded >= limits::DISCARDED_PER_TURN {
                discarded = 0;
                runtime::yield_now().await;
            }
        }
    }
    /// After an upgrade: further bytes are the caller's direction of the other protocol, until it
    /// ends.
    fn switch_protocols(&mut self);
}

/// Writer of the response to one request.
pub(crate) trait ResponseSink {
    /// Sends an interim response (1xx) at once, if the version of the caller has them.
    async fn interim(&mut self, head: RelayedHead) -> Result<(), CallerGone>;
    /// Writes the final head. With [`RelayedHead::upgrade`], later data belongs to the other
    /// protocol.
    async fn head(&mut self, head: RelayedHead) -> Result<(), CallerGone>;
    /// Writes a piece of the body; `last` announces that neither data nor trailers follow.
    async fn data(&mut self, data: Bytes, last: bool) -> Result<(), CallerGone>;
    /// Completes the response and sends the rest of it.
    async fn end(&mut self, trailers: Option<Fields>) -> Result<(), CallerGone>;
    /// Sends the written data.
    async fn flush(&mut self) -> Result<(), CallerGone>;
    /// Bytes of the response that were written and are still in this process. The agent gets no
    /// credit for them yet. 0 if another charge covers them.
    fn unsent(&self) -> usize {
        0
    }
    /// Whether the response was sent to its end, so that the caller misses nothing of it: over
    /// HTTP/1.1, a body of the announced length ends before its stream does. `false` for an
    /// upgraded connection, and for a sink that passes the response on.
    fn is_whole(&self) -> bool {
        false
    }
    /// Notes how far the request has got, before its final head. Of use to a sink that passes it
    /// on.
    fn progress(&mut self, _progress: Progress) {}
    /// Notes the bytes of the request body that the backend took, if known. Follows [`Self::end`].
    /// It is of use to a sink that passes it on.
    async fn uploaded(&mut self, _taken: Option<u64>) -> Result<(), CallerGone> {
        Ok(())
    }
    /// Whether the caller announced `Expect: 100-continue`, got no 100, and has sent nothing of the
    /// body, which may then never come (RFC 9110 §10.1.1).
    fn has_withheld_body(&self) -> bool {
        false
    }
    /// Whether a final head was written: another response is impossible then.
    fn has_begun(&self) -> bool;
    /// Announces a response of the gateway itself, an error or not: the caller has a time limit to
    /// read it. If the rest of the request cannot be told from a following request, the connection
    /// closes.
    fn begin_own_response(&mut self, request_is_readable: bool);

    /// Writes a whole response of the gateway.
    async fn whole(&mut self, response: Response<Vec<u8>>) -> Result<(), CallerGone> {
        let (parts, body) = response.into_parts();
        let head = RelayedHead {
            status: parts.status,
            headers: parts.headers.into(),
            has_body: !body.is_empty(),
            upgrade: None,
        };
        self.head(head).await?;
        self.data(body.into(), true).await?;
        self.end(None).await
    }
}

thread_local! {
    /// Seconds since the Unix epoch, and that time as a value of `Date`.
    static DATE: RefCell<(u64, HeaderValue)> =
        const { RefCell::new((0, HeaderValue::from_static(""))) };
}

/// Adds `Date` to a response that has none (RFC 9110 §6.6.1).
pub(crate) fn set_date(headers: &mut Fields) {
    if !headers.contains(header::DATE) {
        headers.append(header::DATE, date());
    }
}

/// The value of `Date`.
fn date() -> HeaderValue {
    let now = clock::now();
    let seconds = now
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    DATE.with_borrow_mut(|date| {
        if date.0 != seconds
            && let Ok(value) = HeaderValue::try_from(httpdate::fmt_http_date(now))
        {
            *date = (seconds, value);
        }
        date.1.clone()
    })
}

/// Adds `Date` to a response of the gateway.
pub(crate) fn dated(mut response: Response<Vec<u8>>) -> Response<Vec<u8>> {
    response
        .headers_mut()
        .entry(header::DATE)
        .or_insert_with(date);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_are_counted_once() {
        let agents = [AgentId::random(), AgentId::random()];
        let failed = |agent: usize| FailedAttempt {
            agent: Some(agents[agent].clone()),
            reason: AttemptFailure::NoSlot,
            took: Duration::ZERO,
        };
        let count = |attempts: &[usize]| {
            let failed_attempts = attempts.iter().map(|agent| failed(*agent)).collect();
            Progress {
                failed_attempts,
                ..Progress::default()
            }
            .agents_failed()
        };
        assert_eq!(
            [count(&[]), count(&[0]), count(&[0, 0]), count(&[0, 1, 0])],
            [0, 1, 1, 2]
        );
    }
}
