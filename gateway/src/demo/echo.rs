//! The demo's backend: an ordinary HTTP server on tokio that echoes requests.

use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, Request};
use axum::http::{StatusCode, header};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use futures_util::stream::{self, Stream, StreamExt};
use serde::Deserialize;
use serde_json::json;

/// Bytes of one chunk of `/bytes/N`.
const PIECE: usize = 64 * 1024;
/// Longest request body that `/` echoes.
const ECHO_MAX: usize = 1024 * 1024;

/// Starts the backend on a free port. It runs as long as the process.
pub fn start() -> io::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    listener.set_nonblocking(true)?;
    std::thread::Builder::new()
        .name("gw-echo".into())
        .spawn(move || {
            let served = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .and_then(|runtime| {
                    runtime.block_on(async {
                        let listener = tokio::net::TcpListener::from_std(listener)?;
                        axum::serve(listener, router()).await
                    })
                });
            if let Err(error) = served {
                tracing::error!(%error, "the echo backend ended");
            }
        })?;
    Ok(address)
}

fn router() -> Router {
    Router::new()
        .route("/bytes/{count}", get(bytes))
        .route("/slow", any(slow))
        .route("/sse", get(events))
        .route("/status/{code}", any(status))
        .fallback(echo)
}

/// Method, target, headers and body of the request, as JSON.
async fn echo(request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let Ok(body) = axum::body::to_bytes(body, ECHO_MAX).await else {
        return (
            StatusCode::PAYLOAD_TOO_LARGE,
            "the echo backend accepts bodies up to 1 MiB\n",
        )
            .into_response();
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let headers: Vec<[String; 2]> = parts
        .headers
        .iter()
        .map(|(name, value)| [name.to_string(), text(value.as_bytes())])
        .collect();
    let seen = json!({
        "method": parts.method.as_str(),
        "target": parts.uri.path_and_query().map_or("", |target| target.as_str()),
        "headers": headers,
        "body": text(&body),
    });
    (
        [(header::CONTENT_TYPE, "application/json")],
        format!("{seen:#}\n"),
    )
        .into_response()
}

/// `count` bytes, each the low byte of its position.
async fn bytes(Path(count): Path<u64>) -> Response {
    let pattern: Bytes = (0..PIECE)
        .map(|position| position as u8)
        .collect::<Vec<u8>>()
        .into();
    let pieces = stream::unfold(count, move |left| {
        let piece = pattern.slice(..PIECE.min(usize::try_from(left).unwrap_or(PIECE)));
        let left_after = left - piece.len() as u64;
        std::future::ready((left > 0).then_some((Ok::<_, Infallible>(piece), left_after)))
    });
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_LENGTH, count.to_string()),
    ];
    (headers, Body::from_stream(pieces)).into_response()
}

#[derive(Deserialize)]
struct Slow {
    #[serde(default)]
    ms: u64,
}

async fn slow(Query(Slow { ms }): Query<Slow>) -> String {
    tokio::time::sleep(Duration::from_millis(ms)).await;
    format!("slept {ms} ms\n")
}

/// One event a second, without end.
async fn events() -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let ticks = stream::unfold(0u64, |number| async move {
        if number > 0 {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        Some((number, number + 1))
    });
    Sse::new(ticks.map(|number| {
        Ok(Event::default()
            .id(number.to_string())
            .data(format!("tick {number}")))
    }))
}

async fn status(Path(code): Path<u16>) -> Response {
    match StatusCode::from_u16(code) {
        // No content, and no Content-Length, which an empty body would have (RFC 9110, section
        // 8.6).
        Ok(status @ (StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)) => (
            status,
            Body::from_stream(stream::empty::<Result<Bytes, Infallible>>()),
        )
            .into_response(),
        Ok(status @ StatusCode::RESET_CONTENT) => status.into_response(),
        // An interim status cannot be a final response.
        Ok(status) if !status.is_informational() => (status, format!("{status}\n")).into_response(),
        _ => (StatusCode::NOT_FOUND, "give a status from 200 to 999\n").into_response(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpStream;

    use super::*;

    #[test]
    fn a_status_without_content_keeps_the_connection_usable() {
        let stream = TcpStream::connect(start().unwrap()).unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut response = |code: u16| {
            write!(&stream, "GET /status/{code} HTTP/1.1\r\nHost: echo\r\n\r\n").unwrap();
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") {
                assert_ne!(reader.read_line(&mut head).unwrap(), 0, "{head}");
            }
            assert!(head.starts_with(&format!("HTTP/1.1 {code} ")), "{head}");
            let length = head
                .lines()
                .find_map(|line| line.strip_prefix("content-length: "))
                .map(|length| length.parse::<usize>().unwrap());
            let mut body = vec![0; length.unwrap_or_default()];
            reader.read_exact(&mut body).unwrap();
            assert!(!head.contains("transfer-encoding"), "{head}");
            (length, String::from_utf8(body).unwrap())
        };
        // A length, or bytes of a body, would be taken for those of the next response.
        for (code, length) in [(204, None), (304, None), (205, Some(0))] {
            assert_eq!(response(code), (length, String::new()));
        }
        assert_eq!(response(404), (Some(14), "404 Not Found\n".to_owned()));
    }
}
