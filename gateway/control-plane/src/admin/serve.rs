//! The admin listener: accepts connections, does the TLS handshake where a certificate is
//! configured, and serves HTTP/1.1.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use crate::limits::{self, ADMIN_BODIES, ADMIN_BODY};
use axum::Router;
use axum::extract::{ConnectInfo, Request};
use axum::http::{Extensions, HeaderName, HeaderValue, StatusCode};
use axum::middleware::map_request;
use axum::response::IntoResponse;
use gw_base::tls::admin::AdminTls;
use gw_interface::rate_limit::{Claimant, TaskPlace, TaskPlaces};
use gw_shared::net::tls::{SPEAK_TLS, in_words};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::problem::Problem;
use super::{Admin, ephemeral_agents, router};
use crate::http_server::{self, NO_ROOM, with_bounded_bodies};

/// First byte of a TLS handshake (RFC 8446 §5.1: ContentType).
const TLS_HANDSHAKE: u8 = 22;
/// Pause after a connection could not be accepted, for example for lack of descriptors.
const ACCEPT_AGAIN: Duration = Duration::from_secs(1);

/// What connections are served with.
#[derive(Clone)]
struct AdminServing {
    router: Router,
    tls: Option<Arc<AdminTls>>,
    /// Becomes `true` when connections are to end after their running request.
    closing: watch::Receiver<bool>,
}

/// Why a connection has no session.
#[derive(Debug, thiserror::Error)]
enum NoSession {
    #[error("plain HTTP on a listener with TLS")]
    PlainHttp,
    #[error("no handshake in time")]
    TimedOut,
    #[error("handshake: {0}")]
    Handshake(#[from] io::Error),
}

/// Serves the admin listener until `stopped` resolves, then finishes running requests.
pub async fn serve(
    listener: TcpListener,
    tls: Option<Arc<AdminTls>>,
    admin: Admin,
    stopped: impl Future<Output = ()>,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let mut deleting = pin!(ephemeral_agents::keep_deleting(admin.clone()));
    let within = limits::ADMIN_BODY_WITHIN;
    let router = router(admin);
    let no_room = || Problem::new(StatusCode::SERVICE_UNAVAILABLE, NO_ROOM).into_response();
    let mut router = with_bounded_bodies(router, ADMIN_BODY, ADMIN_BODIES, within, no_room);
    if tls.is_some() {
        router = router.layer(map_request(over_https));
    }
    let (close, closing) = watch::channel(false);
    let serving = AdminServing {
        router,
        tls,
        closing,
    };
    let mut tasks = JoinSet::new();
    let places = TaskPlaces::new(
        limits::ADMIN_CONNECTIONS,
        limits::ADMIN_CONNECTIONS_PER_ADDRESS,
    );
    let mut stopped = pin!(stopped);
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, from)) => {
                    let place = places.take(Claimant::Address(from.ip().into()));
                    tasks.spawn(serving.clone().serve(stream, from, place));
                }
                Err(error) => {
                    tracing::error!(%error, "the admin listener cannot accept a connection");
                    sleep(ACCEPT_AGAIN).await;
                }
            },
            Some(ended) = tasks.join_next() => check(ended),
            () = &mut deleting => {}
            () = &mut stopped => break,
        }
    }
    drop(listener);
    close.send_replace(true);
    while let Some(ended) = tasks.join_next().await {
        check(ended);
    }
    Ok(())
}

/// Keeps the place of the connection of an authenticated request: it is the last to give way to
/// others.
pub(super) fn keep_place(of_request: &Extensions) {
    if let Some(place) = of_request.get::<Arc<TaskPlace>>() {
        place.keep();
    }
}

fn check(ended: Result<(), JoinError>) {
    if let Err(error) = ended {
        tracing::error!(%error, "a connection to the admin listener panicked");
    }
}

impl AdminServing {
    /// Serves a connection until it ends or has to give way. Requests of an administrator keep its
    /// place.
    async fn serve(self, stream: TcpStream, from: SocketAddr, place: TaskPlace) {
        let place = Arc::new(place);
        let mut extensions = Extensions::new();
        extensions.insert(ConnectInfo(from));
        extensions.insert(Arc::clone(&place));
        tokio::select! {
            biased;
            () = place.lost() => tracing::debug!(%from,
                "connection to the admin listener gave way to a later one"),
            () = self.serve_with(extensions, stream, from) => {}
        }
    }

    async fn serve_with(self, extensions: Extensions, stream: TcpStream, from: SocketAddr) {
        if let Err(error) = set_options(&stream) {
            return tracing::debug!(%from, %error, "connection to the admin listener ended");
        }
        let router = self.router;
        let head = limits::ADMIN_HEAD;
        let idle = limits::IDLE;
        let closing = self.closing;
        let ended = match self.tls {
            None => {
                http_server::serve_connection(stream, router, extensions, head, idle, closing).await
            }
            Some(tls) => {
                let mut stopping = closing.clone();
                let accepted = tokio::select! {
                    accepted = timeout(limits::HANDSHAKE, handshake(stream, &tls)) => accepted,
                    _ = stopping.wait_for(|is_closing| *is_closing) => return,
                };
                match accepted.unwrap_or(Err(NoSession::TimedOut)) {
                    Ok(stream) => {
                        http_server::serve_connection(
                            stream, router, extensions, head, idle, closing,
                        )
                        .await
                    }
                    Err(error) => {
                        return tracing::debug!(%from, %error,
                            "connection to the admin listener refused");
                    }
                }
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%from, %error, "connection to the admin listener ended");
        }
    }
}

fn set_options(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    // Also ends a connection whose client takes no byte of a response.
    socket2::SockRef::from(stream).set_tcp_user_timeout(Some(limits::ADMIN_DEAD_AFTER))
}

async fn handshake(
    mut stream: TcpStream,
    tls: &AdminTls,
) -> Result<TlsStream<TcpStream>, NoSession> {
    let mut first = [0];
    if stream.peek(&mut first).await? == 1 && first[0] != TLS_HANDSHAKE {
        refuse_plain_http(&mut stream).await?;
        return Err(NoSession::PlainHttp);
    }
    let accepted = TlsAcceptor::from(tls.config()).accept(stream).await;
    Ok(accepted.map_err(in_words)?)
}

/// Answers a request in plain HTTP. Reads what the client sends before and after that, so that a
/// TCP reset does not destroy the answer.
async fn refuse_plain_http(stream: &mut TcpStream) -> io::Result<()> {
    let mut discarded = vec![0; limits::ADMIN_HEAD];
    let _ = stream.read(&mut discarded).await?;
    stream.write_all(SPEAK_TLS).await?;
    stream.shutdown().await?;
    let rest = async { while let Ok(1..) = stream.read(&mut discarded).await {} };
    // Fails if the client sends for longer.
    let _ = timeout(limits::LINGER, rest).await;
    Ok(())
}

/// Marks a request that came over TLS as one over https. A proxy that says what its client uses is
/// believed: a false value only gets cookies that the browser does not return.
async fn over_https(mut request: Request) -> Request {
    const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
    request
        .headers_mut()
        .entry(FORWARDED_PROTO)
        .or_insert(HeaderValue::from_static("https"));
    request
}
