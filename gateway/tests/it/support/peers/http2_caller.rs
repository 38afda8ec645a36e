//! HTTP/2 callers, built on the h2 crate and a reactor on the test's thread.

use std::future::poll_fn;
use std::net::SocketAddr;

use bytes::Bytes;
use gw_shared::net::{Socket, TlsStream};
use gw_shared::runtime::{self, Driver};
use h2::client::{Builder, ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::{HeaderMap, Method, Request, StatusCode};

use super::SOON;
use super::caller::{self, HOST};
use crate::support::scene::{About, Scene};

/// Runs `test` on a reactor; panics if it takes longer than [`SOON`].
pub(crate) fn on_a_reactor<T>(test: impl Future<Output = T>) -> T {
    Driver::choose()
        .unwrap()
        .block_on(async {
            runtime::timeout(SOON, test)
                .await
                .expect("the test ends in time")
        })
        .unwrap()
}

/// One HTTP/2 connection.
pub(crate) struct Connection {
    pub(crate) requests: SendRequest<Bytes>,
    key: String,
    /// Result of the connection, available once it has ended.
    pub(crate) ended: tokio::sync::oneshot::Receiver<Result<(), h2::Error>>,
}

/// A response with its whole body.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
}

impl Response {
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap())
    }
}

/// A TLS connection to the gateway that has negotiated `h2` and sent nothing yet.
pub(crate) async fn tls(about: &About) -> TlsStream {
    let port: u16 = about.base_url.rsplit(':').next().unwrap().parse().unwrap();
    let socket = Socket::connect(SocketAddr::from(([127, 0, 0, 1], port)), None)
        .await
        .unwrap();
    let stream = TlsStream::new(socket, caller::unbuffered_session(about, HOST, &[b"h2"]));
    stream.handshake().await.unwrap();
    assert!(stream.speaks(b"h2"));
    stream
}

pub(crate) async fn connect(scene: &Scene) -> Connection {
    connect_with(scene, &Builder::new()).await
}

pub(crate) async fn connect_with(scene: &Scene, builder: &Builder) -> Connection {
    connect_to(&scene.about, builder).await
}

pub(crate) async fn connect_to(about: &About, builder: &Builder) -> Connection {
    let (requests, connection) = builder.handshake(tls(about).await).await.unwrap();
    let (end, ended) = tokio::sync::oneshot::channel();
    runtime::spawn(async move { drop(end.send(connection.await)) });
    Connection {
        requests,
        key: about.service_key.clone(),
        ended,
    }
}

impl Connection {
    /// A request for the scene's service, with its key.
    pub(crate) fn request(&self, method: &Method, target: &str) -> http::request::Builder {
        let uri = format!("https://{HOST}{target}");
        Request::builder()
            .method(method.clone())
            .uri(uri)
            .header("x-gw-service-key", &self.key)
    }

    /// Sends a request head.
    pub(crate) async fn begin(
        &self,
        request: http::request::Builder,
        end: bool,
    ) -> (ResponseFuture, SendStream<Bytes>) {
        let mut requests = self.requests.clone().ready().await.unwrap();
        requests
            .send_request(request.body(()).unwrap(), end)
            .unwrap()
    }

    /// Sends a request without a body and reads the whole response.
    pub(crate) async fn fetch(&self, request: http::request::Builder) -> Response {
        let (response, _) = self.begin(request, true).await;
        whole(response).await
    }

    pub(crate) async fn get(&self, target: &str) -> Response {
        self.fetch(self.request(&Method::GET, target)).await
    }
}

pub(crate) async fn whole(response: ResponseFuture) -> Response {
    let (parts, mut stream) = response.await.unwrap().into_parts();
    let mut body = Vec::new();
    while let Some(data) = data(&mut stream).await {
        body.extend_from_slice(&data);
    }
    Response {
        status: parts.status,
        headers: parts.headers,
        body,
    }
}

/// The next piece of a body; `None` at its end.
pub(crate) async fn data(stream: &mut RecvStream) -> Option<Bytes> {
    loop {
        let data = poll_fn(|cx| stream.poll_data(cx)).await?.unwrap();
        stream.flow_control().release_capacity(data.len()).unwrap();
        if !data.is_empty() {
            return Some(data);
        }
    }
}
