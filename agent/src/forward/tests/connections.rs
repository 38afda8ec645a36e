//! Connections to backends: how they are opened, selected and used again.

pub(super) mod alpn;
mod connecting;
mod reuse;
mod server_names;

use super::*;

/// The backend's end of a connection with TLS; `None` if the agent ends the handshake.
async fn accept_tls(connection: TcpStream, config: Arc<ServerConfig>) -> Option<TlsStream> {
    let socket = Socket::from_fd(connection.into()).unwrap();
    let stream = TlsStream::new(socket, UnbufferedServerConnection::new(config).unwrap());
    stream.handshake().await.ok()?;
    Some(stream)
}

/// Sends bytes over TLS.
async fn send_tls(stream: &TlsStream, bytes: &[u8]) {
    let mut pieces = [std::io::IoSlice::new(bytes)];
    stream.write_all(&mut pieces).await.unwrap();
    stream.flush().await.unwrap();
}

/// Receives over TLS until the received bytes end with `end`.
async fn receive_tls(stream: &TlsStream, end: &[u8]) {
    let mut received = bytes::BytesMut::new();
    while !received.ends_with(end) {
        std::future::poll_fn(|cx| stream.poll_read_buf(cx, &mut received))
            .await
            .unwrap();
    }
}
