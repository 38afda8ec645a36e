//! One relayed request on its service's owner: the way up for its body and the way down for the response.
//!
//! On the owner itself both are the tunnel's stream. From another worker they are pipes to a task on the owner, which
//! does there what would have been done here. Who relays does not see the difference.

mod response;

use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::Bytes;
use futures_util::future::{Either, select};
use gw_shared::http::UpgradeProtocol;
use gw_shared::id::AgentId;
use gw_shared::runtime;
use gw_shared::tunnel::incoming::Incoming;
use gw_shared::tunnel::stream;
use gw_shared::tunnel::timing::AgentTiming;
use http::{HeaderMap, Request, StatusCode};

use self::response::{Asked, FromTunnel};
use crate::auth::Authenticated;
use crate::error::Error;
use crate::limit::{self, Admitted};
use crate::limits;
use crate::mailbox::Message;
use crate::pipe::{self, Closed, Frame};
use crate::tunnel::session::InFlight;
use crate::worker::Core;

/// Head of a relayed response, fields cleaned for the next hop.
#[derive(Debug)]
pub(crate) struct ResponseHead {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    /// Data or trailers follow. Known before they arrive.
    pub(crate) has_body: bool,
    /// The backend has switched to this protocol: its half of that follows.
    pub(crate) upgrade: Option<UpgradeProtocol>,
}

/// How far a request has got beyond this worker.
#[derive(Debug, Default)]
pub(crate) struct Passage {
    /// When its stream on the tunnel was open.
    opened: Option<Opened>,
    /// Where the owner notes that, of a request that crosses.
    noted: Option<Arc<OnceLock<Opened>>>,
    /// As the agent tells with its answer.
    pub(crate) timing: Option<AgentTiming>,
}

/// A stream on a tunnel was opened.
#[derive(Debug, Clone)]
pub(crate) struct Opened {
    pub(crate) at: Instant,
    pub(crate) agent: AgentId,
}

impl Passage {
    pub(crate) fn here(opened: Opened) -> Self {
        Self { opened: Some(opened), ..Self::default() }
    }

    /// The stream on the tunnel, if it was opened, here or by the owner.
    pub(crate) fn opened(&self) -> Option<&Opened> {
        self.opened.as_ref().or_else(|| self.noted.as_ref()?.get())
    }
}

/// The head of a response, or why there is none.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) passage: Passage,
    pub(crate) head: Result<ResponseHead, Error>,
}

/// A request under way.
pub(crate) struct Exchange {
    pub(crate) upload: Upload,
    pub(crate) response: PendingResponse,
}

/// Where the request body goes.
pub(crate) enum Upload {
    Tunnel(h2::SendStream<Bytes>),
    Across(pipe::Sender),
    /// The request has none; its stream was ended with its head.
    None,
}

/// Where the response will come from.
pub(crate) enum PendingResponse {
    Tunnel(FromTunnel),
    Across {
        pipe: pipe::Receiver,
        opened: Arc<OnceLock<Opened>>,
        /// The final one, once it has come.
        answer: Option<Box<Answer>>,
    },
}

/// A response body on its way.
pub(crate) struct Download {
    source: Source,
    /// Arrived with the head.
    first: Option<Frame>,
}

/// Where a response body comes from.
enum Source {
    Tunnel {
        body: Incoming,
        _in_flight: InFlight,
    },
    Across(pipe::Receiver),
    /// It has none.
    Nothing,
}

/// A request on its way to the worker that owns its service.
pub(crate) struct Crossing {
    request: Authenticated,
    head: Request<()>,
    upload: Option<pipe::Receiver>,
    response: pipe::Sender,
    opened: Arc<OnceLock<Opened>>,
}

/// Admits the request and opens it on its service's tunnel, wherever those are.
pub(crate) fn open(core: &Core, request: Authenticated, head: Request<()>, has_body: bool) -> Result<Exchange, Error> {
    let owner = request.service.owner;
    // Elsewhere or not, what may have to wait for its bucket is opened by a task of its own.
    if owner == core.id && core.buckets.borrow().are_here() {
        let admitted = core.buckets.borrow_mut().admit(request, Instant::now())?;
        return open_here(core, &admitted, head, has_body);
    }
    let (ours, theirs) = (core.mailbox(core.id), core.mailbox(owner));
    let (upload_in, upload_out) = has_body.then(|| pipe::pipe(ours, theirs)).unzip();
    let (response_in, response_out) = pipe::pipe(theirs, ours);
    let opened = Arc::default();
    let crossing = Crossing { request, head, upload: upload_out, response: response_in, opened: Arc::clone(&opened) };
    theirs.post(Message::Relay(Box::new(crossing))).map_err(|_| Error::Overloaded("overloaded"))?;
    core.counters.crossings.increment();
    Ok(Exchange {
        upload: upload_in.map_or(Upload::None, Upload::Across),
        response: PendingResponse::Across { pipe: response_out, opened, answer: None },
    })
}

fn open_here(core: &Core, admitted: &Admitted, head: Request<()>, has_body: bool) -> Result<Exchange, Error> {
    let session = core.tunnels.borrow().pick(admitted)?;
    let asked = Asked::by(&head);
    let (response, upload, in_flight) = session.open(head, !has_body)?;
    Ok(Exchange {
        upload: if has_body { Upload::Tunnel(upload) } else { Upload::None },
        response: PendingResponse::Tunnel(FromTunnel::new(response, in_flight, asked)),
    })
}

/// The owner's part of a request that crosses.
pub(crate) fn serve_crossing(core: &Rc<Core>, crossing: Crossing) {
    if core.crossings_served.get() >= limits::CROSSING_RELAYS {
        runtime::spawn(refuse_crossing(crossing.response, Error::Overloaded("overloaded")));
        return;
    }
    core.crossings_served.set(core.crossings_served.get() + 1);
    let served = ServedCrossing(Rc::clone(core));
    runtime::spawn(async move {
        let Crossing { request, head, upload, response, opened } = crossing;
        let admitted = limit::admit(&served.0, request).await;
        match admitted.and_then(|admitted| open_here(&served.0, &admitted, head, upload.is_some())) {
            Ok(exchange) => {
                if let Some(here) = exchange.response.passage().opened {
                    // Noted once: a request crosses once.
                    let _ = opened.set(here);
                }
                carry(exchange, upload, response).await;
            }
            Err(error) => refuse_crossing(response, error).await,
        }
    });
}

/// Counts down however its task ends.
struct ServedCrossing(Rc<Core>);

impl Drop for ServedCrossing {
    fn drop(&mut self) {
        self.0.crossings_served.set(self.0.crossings_served.get() - 1);
    }
}

async fn refuse_crossing(mut response: pipe::Sender, error: Error) {
    // The caller's worker may have given up: then nobody needs to know.
    let answer = Answer { passage: Passage::default(), head: Err(error) };
    let _ = response.send(Frame::Head(Box::new(answer))).await;
}

/// Carries both bodies between pipes and tunnel until the response is complete or nobody wants it any more. Of another
/// protocol, both halves are carried to their ends.
async fn carry(exchange: Exchange, upload: Option<pipe::Receiver>, mut response: pipe::Sender) {
    let up = std::pin::pin!(async {
        if let Some(body) = upload {
            carry_up(body, exchange.upload).await;
        }
    });
    let down = std::pin::pin!(carry_down(exchange.response, &mut response));
    // What is left of the stream is dropped with this task, which resets it.
    match select(down, up).await {
        Either::Left((Ok(Completed { switched: Some(download) }), up)) => {
            up.await;
            drop(download);
        }
        Either::Left(_) => {}
        Either::Right(((), down)) => drop(down.await),
    }
}

async fn carry_up(mut body: pipe::Receiver, mut upload: Upload) {
    loop {
        let sent = match body.receive().await {
            Ok(Frame::Data(data)) => upload.send(data, false).await,
            Ok(Frame::Trailers(trailers)) => {
                let _ = upload.finish(Some(trailers)).await;
                return;
            }
            Ok(Frame::End) => {
                let _ = upload.finish(None).await;
                return;
            }
            Ok(Frame::Head(_) | Frame::Broken(_)) => return,
            Err(Closed) => {
                upload.abort();
                return;
            }
        };
        if sent.is_err() {
            return;
        }
    }
}

/// A response was carried to its end.
struct Completed {
    /// What keeps the stream among those in flight, where the response was the backend's half of another protocol.
    switched: Option<Download>,
}

async fn carry_down(mut response: PendingResponse, pipe: &mut pipe::Sender) -> Result<Completed, Closed> {
    while let Some(interim) = or_closed(pipe, response.interim()).await? {
        let answer = Box::new(Answer { passage: Passage::default(), head: Ok(interim) });
        response.gather_while(pipe.send(Frame::Head(answer))).await?;
    }
    let (passage, received) = or_closed(pipe, response.head()).await?;
    let (head, mut download) = match received {
        Ok(received) => received,
        Err(error) => {
            pipe.send(Frame::Head(Box::new(Answer { passage, head: Err(error) }))).await?;
            return Ok(Completed { switched: None });
        }
    };
    let switched = head.upgrade.is_some();
    let answer = Box::new(Answer { passage, head: Ok(head) });
    download.gather_while(pipe.send(Frame::Head(answer))).await?;
    loop {
        let frame = or_closed(pipe, std::future::poll_fn(|cx| download.poll_frame(cx))).await?;
        let frame = frame.unwrap_or_else(|error| Frame::Broken(Box::new(error)));
        let (bytes, last) = match &frame {
            Frame::Data(data) => (data.len(), false),
            Frame::End => (0, true),
            Frame::Head(_) | Frame::Trailers(_) => (0, false),
            Frame::Broken(_) => {
                pipe.send(frame).await?;
                return Err(Closed);
            }
        };
        download.gather_while(pipe.send(frame)).await?;
        download.release(bytes);
        if last {
            return Ok(Completed { switched: switched.then_some(download) });
        }
    }
}

async fn or_closed<T>(pipe: &pipe::Sender, future: impl Future<Output = T>) -> Result<T, Closed> {
    match select(std::pin::pin!(future), std::pin::pin!(pipe.closed())).await {
        Either::Left((value, _)) => Ok(value),
        Either::Right(((), _)) => Err(Closed),
    }
}

impl Upload {
    /// Sends data as fast as the agent takes it; with `last`, ends the body.
    pub(crate) async fn send(&mut self, data: Bytes, last: bool) -> Result<(), Closed> {
        match self {
            Self::Tunnel(stream) => stream::send(stream, data, last).await.map_err(|_| Closed),
            Self::Across(pipe) => {
                pipe.send(Frame::Data(data)).await?;
                if last { pipe.send(Frame::End).await } else { Ok(()) }
            }
            Self::None => Err(Closed),
        }
    }

    pub(crate) async fn finish(&mut self, trailers: Option<HeaderMap>) -> Result<(), Closed> {
        match self {
            Self::Tunnel(stream) => stream::finish(stream, trailers).map_err(|_| Closed),
            Self::Across(pipe) => pipe.send(trailers.map_or(Frame::End, Frame::Trailers)).await,
            Self::None => Ok(()),
        }
    }

    /// Tells the agent that the rest will not come: the backend must not take what it has for the whole.
    pub(crate) fn abort(self) {
        match self {
            Self::Tunnel(mut stream) => stream.send_reset(h2::Reason::CANCEL),
            // Dropped without an end, which says it.
            Self::Across(_) | Self::None => {}
        }
    }
}

impl PendingResponse {
    /// The next interim response (1xx); `None` once [`Self::head`] has something to say. No time limit: the backend may
    /// take as long as it likes.
    pub(crate) async fn interim(&mut self) -> Option<ResponseHead> {
        match self {
            Self::Tunnel(response) => response.interim().await,
            Self::Across { pipe, answer, .. } => match pipe.receive().await {
                Ok(Frame::Head(received)) => match *received {
                    Answer { head: Ok(interim), .. } if interim.status.is_informational() => Some(interim),
                    last => {
                        *answer = Some(Box::new(last));
                        None
                    }
                },
                Ok(_) | Err(Closed) => None,
            },
        }
    }

    /// Waits for `passing_on` an interim response. What arrives behind that one is bounded meanwhile.
    pub(crate) async fn gather_while<T>(&mut self, passing_on: impl Future<Output = T>) -> T {
        match self {
            Self::Tunnel(response) => match select(std::pin::pin!(passing_on), std::pin::pin!(response.gather())).await
            {
                Either::Left((passed_on, _)) => passed_on,
                Either::Right((never, _)) => match never {},
            },
            Self::Across { .. } => passing_on.await,
        }
    }

    /// How far the request has got, as far as this worker knows.
    pub(crate) fn passage(&self) -> Passage {
        match self {
            Self::Tunnel(response) => response.passage(),
            Self::Across { opened, .. } => Passage { noted: Some(Arc::clone(opened)), ..Passage::default() },
        }
    }

    /// Waits for the final head; to be called when there are no more interim ones. A response that is seen to be broken
    /// behind its head is an error still: nothing of it was passed on.
    pub(crate) async fn head(self) -> (Passage, Result<(ResponseHead, Download), Error>) {
        let (passage, received) = self.receive_head().await;
        let begun = match received {
            Ok((head, source)) => Download::begin(source).await.map(|download| (head, download)),
            Err(error) => Err(error),
        };
        (passage, begun)
    }

    async fn receive_head(self) -> (Passage, Result<(ResponseHead, Source), Error>) {
        match self {
            Self::Tunnel(response) => response.head().await,
            Self::Across { pipe, answer: Some(answer), .. } => {
                (answer.passage, answer.head.map(|head| (head, Source::Across(pipe))))
            }
            Self::Across { answer: None, .. } => (self.passage(), Err(Error::TunnelLost)),
        }
    }
}

impl Download {
    /// Takes the first frame, if it is there: an error if the body is broken already.
    async fn begin(source: Source) -> Result<Self, Error> {
        let mut download = Self { source, first: None };
        if let Poll::Ready(first) = futures_util::poll!(std::future::poll_fn(|cx| download.poll_frame(cx))) {
            download.first = Some(first?);
        }
        Ok(download)
    }

    /// The next frame of the body. An error means that it was cut short, and says why.
    pub(crate) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Result<Frame, Error>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Ok(first));
        }
        match &mut self.source {
            Source::Tunnel { body, .. } => response::poll_frame(body, cx),
            Source::Across(pipe) => Poll::Ready(match ready!(pipe.poll_receive(cx)) {
                Ok(Frame::Broken(error)) => Err(*error),
                Ok(frame) => Ok(frame),
                Err(Closed) => Err(Error::TunnelLost),
            }),
            Source::Nothing => Poll::Ready(Ok(Frame::End)),
        }
    }

    /// Whether the frame just received was the last that carries something, as far as that is known already.
    pub(crate) fn is_done(&self) -> bool {
        match &self.source {
            Source::Tunnel { body, .. } => body.is_done(),
            Source::Across(_) => false,
            Source::Nothing => true,
        }
    }

    /// Waits for the next hop to take a piece. Later pieces are gathered meanwhile, in no more memory than their bytes.
    pub(crate) async fn gather_while<T>(&mut self, passing_on: impl Future<Output = T>) -> T {
        match &mut self.source {
            Source::Tunnel { body, .. } => body.gather_while(passing_on).await,
            Source::Across(_) | Source::Nothing => passing_on.await,
        }
    }

    /// Reports that `bytes` of the body were passed on, so that as many more may come.
    pub(crate) fn release(&mut self, bytes: usize) {
        match &mut self.source {
            Source::Tunnel { body, .. } if bytes > 0 => body.release(bytes),
            // A pipe gives credit when its frames are received.
            Source::Tunnel { .. } | Source::Across(_) | Source::Nothing => {}
        }
    }
}
