//! A backend that speaks HTTP/2.

use std::net::TcpListener;
use std::thread;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use http::{HeaderMap, Request, Response};

/// Starts an HTTP/2 backend that answers with the URI, the body length and the number of trailers
/// of the request, and sends trailers. Returns its URL.
pub(crate) fn http2() -> String {
    start(async |request, mut respond| {
        let uri = request.uri().clone();
        let mut body = request.into_body();
        let mut length = 0;
        while let Some(data) = body.data().await {
            let data = data.unwrap();
            length += data.len();
            body.flow_control().release_capacity(data.len()).unwrap();
        }
        let fields = body
            .trailers()
            .await
            .unwrap()
            .map_or(0, |trailers| trailers.len());
        let mut stream = respond.send_response(Response::new(()), false).unwrap();
        let text = format!("{uri} {length} {fields}");
        stream.send_data(Bytes::from(text), false).unwrap();
        let trailers = [("grpc-status".parse().unwrap(), "0".parse().unwrap())];
        stream
            .send_trailers(HeaderMap::from_iter(trailers))
            .unwrap();
    })
}

/// Starts an HTTP/2 backend that answers each request by `serve`. Returns its URL.
pub(crate) fn start<F>(serve: F) -> String
where
    F: AsyncFn(Request<RecvStream>, SendResponse<Bytes>) + Clone + Send + 'static,
{
    start_noting(serve, |_| {})
}

/// As [`start`]; calls `note` with each connection that it accepts.
pub(crate) fn start_noting<F>(
    serve: F,
    note: impl Fn(&tokio::net::TcpStream) + Send + 'static,
) -> String
where
    F: AsyncFn(Request<RecvStream>, SendResponse<Bytes>) + Clone + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("h2c://{}", listener.local_addr().unwrap());
    listener.set_nonblocking(true).unwrap();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let local = tokio::task::LocalSet::new();
        local.block_on(&runtime, async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            loop {
                let accepted = listener.accept().await.unwrap().0;
                note(&accepted);
                let serve = serve.clone();
                tokio::task::spawn_local(async move {
                    let mut connection = h2::server::handshake(accepted).await.unwrap();
                    while let Some(Ok((request, respond))) = connection.accept().await {
                        let serve = serve.clone();
                        tokio::task::spawn_local(async move { serve(request, respond).await });
                    }
                });
            }
        });
    });
    url
}
