//! Reading a ClientHello before the TLS configuration is chosen.

use std::io::{self, IoSlice, Write};
use std::task::{Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use rustls::server::UnbufferedServerConnection;

use super::session::invalid;
use super::stream::{SCRATCH_BUFFER, TlsStream};
use crate::net::socket::Socket;

/// Server name and ALPN protocols of a ClientHello (RFC 6066 §3, RFC 7301).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientHello {
    pub server_name: Option<String>,
    pub alpn: Vec<Vec<u8>>,
}

/// A connection whose ClientHello has been read and not answered: it can still move to another
/// thread, as socket and bytes.
pub struct Greeting {
    pub socket: Socket,
    /// All bytes received so far: a whole ClientHello and possibly more.
    pub received: Bytes,
    pub hello: ClientHello,
}

/// Most bytes of a ClientHello. Post-quantum key shares take 1.2 KiB, a resumption ticket a little
/// more.
pub const CLIENT_HELLO_MAX: usize = 16 * 1024;

/// Response to a plain HTTP request on an https port without errors of its own.
pub const SPEAK_TLS: &[u8] =
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: 34\r\n\
connection: close\r\n\r\nThis port speaks https, not http.\n";
/// Longest pause of a client whose plain HTTP request is read and dropped after the answer. The
/// time limit of the handshake includes it.
const PLAIN_HTTP_PAUSE: Duration = Duration::from_secs(1);

impl Greeting {
    /// Reads a ClientHello from `socket`; `received` are the bytes that have already been read.
    /// Answers anything else with the alert of RFC 8446 §6.2, or plain HTTP with `plain_answer`.
    pub async fn read(
        socket: Socket,
        mut received: BytesMut,
        plain_answer: impl FnOnce() -> Vec<u8>,
    ) -> io::Result<Self> {
        if received.is_empty() {
            receive(&socket, &mut received).await?;
        }
        loop {
            match parse_client_hello(&received) {
                Ok(Some(accepted)) => {
                    let hello = accepted.client_hello();
                    let hello = ClientHello {
                        server_name: hello.server_name().map(str::to_owned),
                        alpn: hello
                            .alpn()
                            .into_iter()
                            .flatten()
                            .map(<[u8]>::to_vec)
                            .collect(),
                    };
                    return Ok(Self {
                        socket,
                        received: received.freeze(),
                        hello,
                    });
                }
                Ok(None) if received.len() < CLIENT_HELLO_MAX => {
                    receive(&socket, &mut received).await?;
                }
                Ok(None) => {
                    return Err(io::Error::new(
                        io::ErrorKind::InvalidData,
                        "ClientHello too long",
                    ));
                }
                Err((error, mut alert)) => {
                    // A capital letter is no content type of TLS, but the first byte of an HTTP
                    // method.
                    if received[0].is_ascii_uppercase() {
                        drop(socket.try_send(&[IoSlice::new(&plain_answer())]));
                        // Closing with unread bytes would send a reset, which can destroy the
                        // answer.
                        socket.closer().linger(PLAIN_HTTP_PAUSE).await;
                    } else {
                        drop(alert.write_all(&mut NonBlocking(&socket)));
                    }
                    return Err(invalid(error));
                }
            }
        }
    }

    /// Completes the handshake as a server with `config`.
    pub async fn accept(
        self,
        config: std::sync::Arc<rustls::ServerConfig>,
    ) -> io::Result<TlsStream> {
        let session = UnbufferedServerConnection::new(config).map_err(invalid)?;
        let stream = TlsStream::new(self.socket, session);
        // The session decrypts in place. Nothing else refers to the bytes, so this does not copy
        // them.
        stream.start(&mut BytesMut::from(self.received))?;
        stream.handshake().await?;
        Ok(stream)
    }
}

/// Lets rustls write an alert to a socket without waiting.
struct NonBlocking<'a>(&'a Socket);

impl Write for NonBlocking<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_send(&[IoSlice::new(bytes)])
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Receives once; at least one byte.
async fn receive(socket: &Socket, received: &mut BytesMut) -> io::Result<()> {
    let count = std::future::poll_fn(|cx| {
        SCRATCH_BUFFER.with_borrow_mut(|scratch| {
            let count = ready!(socket.poll_recv(cx, &mut scratch[..CLIENT_HELLO_MAX]))?;
            received.extend_from_slice(&scratch[..count]);
            Poll::Ready(io::Result::Ok(count))
        })
    })
    .await?;
    if count == 0 {
        Err(io::ErrorKind::UnexpectedEof.into())
    } else {
        Ok(())
    }
}

fn parse_client_hello(
    mut received: &[u8],
) -> Result<Option<rustls::server::Accepted>, (rustls::Error, rustls::server::AcceptedAlert)> {
    let mut acceptor = rustls::server::Acceptor::default();
    while !received.is_empty() {
        if !matches!(acceptor.read_tls(&mut received), Ok(1..)) {
            break;
        }
    }
    acceptor.accept()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{block_on, connect};

    #[test]
    fn other_bytes_get_an_alert_and_plain_http_gets_a_response() {
        for (sent, is_http) in [
            (&b"ssh-2.0-not-tls\r\n"[..], false),
            (b"GET / HTTP/1.1\r\n\r\n", true),
        ] {
            block_on(async {
                let (socket, accepted) = connect().await;
                let accepted = Socket::from_fd(accepted.into()).unwrap();
                socket.send_all(&mut [IoSlice::new(sent)]).await.unwrap();
                // The rest of a request is read until the client ends it.
                socket.shutdown_write();
                let answer = || b"speak https".to_vec();
                let greeting = Greeting::read(accepted, BytesMut::new(), answer).await;
                assert!(greeting.is_err());
                let mut buffer = BytesMut::new();
                let received = std::future::poll_fn(|cx| socket.poll_recv_buf(cx, &mut buffer));
                received.await.unwrap();
                match is_http {
                    true => assert_eq!(&buffer[..], b"speak https"),
                    // Content type 21: alert (RFC 8446 §5.1).
                    false => assert_eq!(buffer[0], 21),
                }
            });
        }
    }
}
