//! A caller that speaks HTTP/2: several requests at once on a connection.

use std::cell::{Cell, RefCell};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{Either, select};
use gw_shared::runtime;
use gw_simulated_kernel::clock;
use h2::client::SendRequest;
use http::{HeaderMap, HeaderName, HeaderValue, Method as HttpMethod, Request as HttpRequest};
use tokio::sync::Semaphore;

use super::caller::{Caller, PATIENCE, send_upload};
use super::message::TRAILER;
use crate::scenario::{Conduct, Method, Request};

/// Interval between checks for the end of all requests.
const TICK: Duration = Duration::from_millis(5);

/// The connection that new requests use.
type Current = Rc<RefCell<Option<SendRequest<Bytes>>>>;

pub(crate) async fn run(caller: &Rc<Caller>) {
    let current: Current = Rc::default();
    let permits = Arc::new(Semaphore::new(caller.plan.at_once));
    let running = Rc::new(Cell::new(0));
    for request in caller.plan.requests.clone() {
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else {
            return;
        };
        running.set(running.get() + 1);
        let (caller, current, running) =
            (Rc::clone(caller), Rc::clone(&current), Rc::clone(&running));
        let pause = caller.plan.pause;
        runtime::spawn(async move {
            let exchange = Exchange {
                caller: &caller,
                request: &request,
                current: &current,
            };
            let exchanged = runtime::timeout(PATIENCE, exchange.run()).await;
            if caller.seen(&request, |seen| seen.began.is_some()) {
                caller.seen(&request, |seen| seen.has_given_up = exchanged.is_err());
                caller.ended(&request);
            }
            running.set(running.get() - 1);
            drop(permit);
        });
        if pause > Duration::ZERO {
            runtime::sleep(pause).await;
        }
    }
    while running.get() > 0 {
        runtime::sleep(TICK).await;
    }
}

struct Exchange<'a> {
    caller: &'a Rc<Caller>,
    request: &'a Request,
    current: &'a Current,
}

impl Exchange<'_> {
    async fn run(&self) -> io::Result<()> {
        let Request {
            id,
            method,
            upload,
            conduct,
            ..
        } = self.request;
        let mut connection = self.connection().await?;
        let name = match method {
            Method::Get | Method::Upgrade => HttpMethod::GET,
            Method::Head => HttpMethod::HEAD,
            Method::Post => HttpMethod::POST,
            Method::Put => HttpMethod::PUT,
        };
        let mut head = HttpRequest::builder()
            .method(name)
            .uri(format!("https://{}/r/{id}", self.caller.hostname))
            .header("x-gw-service-key", &self.caller.service_key);
        if let Some(upload) = upload.filter(|upload| !upload.is_chunked) {
            head = head.header("content-length", upload.length);
        }
        for (name, value) in self.caller.session() {
            head = head.header(name, value);
        }
        let head = head.body(()).map_err(io::Error::other)?;
        self.caller.begins(self.request);
        let ends = upload.is_none();
        let (response, mut stream) = match connection.send_request(head, ends) {
            Ok(sent) => sent,
            Err(error) => {
                self.current.take();
                return Err(io::Error::other(error));
            }
        };
        let now = clock::now();
        self.caller.seen(self.request, |seen| seen.head_sent = now);
        if *conduct == Conduct::LeavesEarly || *conduct == Conduct::HalfHead {
            let half = upload.map_or(0, |upload| upload.length / 2);
            let sent = runtime::timeout(Duration::from_secs(1), self.upload(&mut stream, half));
            drop(sent.await);
            self.caller.seen(self.request, |seen| seen.has_left = true);
            stream.send_reset(h2::Reason::CANCEL);
            return Ok(());
        }
        let download = std::pin::pin!(self.download(response));
        let Some(upload) = upload else {
            return download.await;
        };
        let uploads = std::pin::pin!(async {
            self.upload(&mut stream, upload.length).await?;
            let end = match upload.has_trailers {
                true => stream.send_trailers(trailers(*id)),
                false => stream.send_data(Bytes::new(), true),
            };
            end.map_err(io::Error::other)
        });
        match select(uploads, download).await {
            Either::Left((_, download)) => download.await,
            Either::Right((downloaded, _)) => downloaded,
        }
    }

    /// The connection that works, or a new one.
    async fn connection(&self) -> io::Result<SendRequest<Bytes>> {
        let kept = self.current.borrow().clone();
        if let Some(kept) = kept
            && let Ok(ready) = kept.ready().await
        {
            return Ok(ready);
        }
        let stream = self.caller.connect().await?;
        let (requests, connection) = h2::client::handshake(stream)
            .await
            .map_err(io::Error::other)?;
        runtime::spawn(async move {
            // The requests of the connection see its end.
            drop(connection.await);
        });
        *self.current.borrow_mut() = Some(requests.clone());
        requests.ready().await.map_err(io::Error::other)
    }

    async fn upload(&self, stream: &mut h2::SendStream<Bytes>, length: usize) -> io::Result<()> {
        send_upload(self.request, length, async |data: Vec<u8>| {
            gw_shared::http2::stream::send(stream, data.into(), false)
                .await
                .map_err(|_| io::ErrorKind::ConnectionReset.into())
        })
        .await
    }

    async fn download(&self, mut response: h2::client::ResponseFuture) -> io::Result<()> {
        let response = std::future::poll_fn(|cx| {
            while let Poll::Ready(Some(Ok(_))) = response.poll_informational(cx) {
                self.caller.seen(self.request, |seen| seen.interim += 1);
            }
            Pin::new(&mut response).poll(cx)
        })
        .await
        .map_err(io::Error::other)?;
        let (head, mut stream) = response.into_parts();
        let field = |name: &str| head.headers.get(name)?.to_str().ok();
        self.caller
            .answered(self.request, head.status.as_u16(), field);
        let Request {
            response, conduct, ..
        } = self.request;
        let mut error = Vec::new();
        while let Some(data) = stream.data().await {
            let data = data.map_err(io::Error::other)?;
            self.caller.received(self.request, &data, &mut error);
            let received = self.caller.seen(self.request, |seen| seen.body.length);
            if *conduct == Conduct::LeavesInResponse && received >= response.length / 2 {
                self.caller.seen(self.request, |seen| seen.has_left = true);
                return Ok(());
            }
            if let Conduct::SlowReader(pause) = conduct {
                runtime::sleep(*pause).await;
            }
            stream
                .flow_control()
                .release_capacity(data.len())
                .map_err(io::Error::other)?;
        }
        let trailers = stream.trailers().await.map_err(io::Error::other)?;
        let trailer = trailers.and_then(|trailers| {
            let id = trailers.get(TRAILER)?.to_str().ok()?;
            id.parse().ok()
        });
        self.caller
            .seen(self.request, |seen| seen.trailer = trailer);
        self.caller.complete(self.request, &error);
        Ok(())
    }
}

/// Trailers of the message of request `id`.
pub(crate) fn trailers(id: u32) -> HeaderMap {
    HeaderMap::from_iter([(HeaderName::from_static(TRAILER), HeaderValue::from(id))])
}
