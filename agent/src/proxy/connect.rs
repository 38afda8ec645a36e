//! Connections through a proxy: CONNECT (RFC 9110 §9.3.6).

use std::io::{self, IoSlice};
use std::net::Ipv6Addr;
use std::time::Duration;

use bytes::BytesMut;
use gw_shared::http::{HeadLimits, InvalidHead, head};
use gw_shared::identity::secret::Secret;
use gw_shared::net::{Socket, resolve};
use gw_shared::runtime;
use http::{Method, StatusCode};

use super::settings::Proxy;

/// Bounds on the head of the proxy's answer.
const HEAD_LIMITS: HeadLimits = HeadLimits {
    head: 8 * 1024,
    fields: 64,
    target: 0,
};
/// Most interim answers (1xx) before the final one.
const INTERIM_MAX: usize = 8;
/// Time limit from the resolution of the proxy's name to its answer. Shorter than the limits of
/// exchanges with the gateway, so that the error names the proxy.
const TIME_LIMIT: Duration = Duration::from_secs(9);

/// Why there is no connection through a proxy. `proxy` and `target` are `HOST:PORT`.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    #[error(
        "the proxy at {proxy} cannot be reached: {error}; check `proxy` ({from}) and that the \
         proxy runs"
    )]
    Unreachable {
        proxy: String,
        from: String,
        error: io::Error,
    },
    #[error(
        "the proxy at {proxy} did not connect to {target} within {0:?}; check that it reaches that \
         host and port",
        TIME_LIMIT
    )]
    TimedOut { proxy: String, target: String },
    #[error(
        "the proxy at {proxy} requires a user and password ({status}): write {from} as \
         http://USER:PASSWORD@HOST:PORT, or http://USER@HOST:PORT with `proxy_password_file`"
    )]
    CredentialsRequired {
        proxy: String,
        from: String,
        status: StatusCode,
    },
    #[error(
        "the proxy at {proxy} does not accept the user and password of {from} ({status}): correct \
         them; bytes other than letters and digits are written as %XX there"
    )]
    CredentialsRefused {
        proxy: String,
        from: String,
        status: StatusCode,
    },
    #[error("the proxy at {proxy} refused a connection to {target}: it answered {status}; \
             {}", advice(*.status))]
    Refused {
        proxy: String,
        target: String,
        status: StatusCode,
    },
    #[error(
        "the proxy at {proxy} did not answer CONNECT with valid HTTP: {error}; check that {from} \
         is an HTTP proxy"
    )]
    Head {
        proxy: String,
        from: String,
        error: InvalidHead,
    },
    #[error(
        "the proxy at {proxy} closed the connection before it answered CONNECT {target}; its log \
         may say why"
    )]
    Closed { proxy: String, target: String },
    #[error(
        "the proxy at {proxy} sent bytes before the connection to {target} was used; it is no \
         proxy for CONNECT"
    )]
    Early { proxy: String, target: String },
}

fn advice(status: StatusCode) -> &'static str {
    match status.as_u16() {
        403 | 405 => "its administrator must allow CONNECT to that host and port",
        500..=599 => "check that the proxy resolves that name and reaches that port",
        _ => "its log may say why",
    }
}

impl ProxyError {
    /// Whether another attempt may succeed without any intervention.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::TimedOut { .. } | Self::Closed { .. } => true,
            Self::Refused { status, .. } => status.is_server_error(),
            _ => false,
        }
    }
}

impl Proxy {
    /// Connects to `host`, which the proxy resolves, and `port`.
    pub(crate) async fn connect(&self, host: &str, port: u16) -> Result<Socket, ProxyError> {
        let target = authority(host, port);
        let connected = runtime::timeout(TIME_LIMIT, self.tunnel(&target)).await;
        connected.unwrap_or_else(|_| {
            Err(ProxyError::TimedOut {
                proxy: self.to_string(),
                target,
            })
        })
    }

    async fn tunnel(&self, target: &str) -> Result<Socket, ProxyError> {
        let unreachable = |error| ProxyError::Unreachable {
            proxy: self.to_string(),
            from: self.source.clone(),
            error,
        };
        let addresses = resolve::resolve_cached(&self.host, self.port)
            .await
            .map_err(unreachable)?;
        let socket = resolve::connect_any(&addresses, None)
            .await
            .map_err(unreachable)?;
        let credentials = self.authorization.as_ref();
        let field = credentials
            .map(|value| format!("Proxy-Authorization: {}\r\n", value.reveal()))
            .map(Secret::new);
        let field = field.as_ref().map_or("", Secret::reveal);
        let request = Secret::new(format!(
            "CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{field}\r\n"
        ));
        // An error of sending is followed by the end of the connection, unless the proxy has
        // answered already.
        let _ = socket
            .send_all(&mut [IoSlice::new(request.reveal().as_bytes())])
            .await;
        let status = self.answer(&socket, target).await?;
        let proxy = self.to_string();
        let from = self.source.clone();
        let target = target.to_owned();
        match status {
            _ if status.is_success() => Ok(socket),
            // Some proxies, such as tinyproxy, answer 401 to a wrong password.
            StatusCode::PROXY_AUTHENTICATION_REQUIRED | StatusCode::UNAUTHORIZED => {
                Err(match credentials {
                    Some(_) => ProxyError::CredentialsRefused {
                        proxy,
                        from,
                        status,
                    },
                    None => ProxyError::CredentialsRequired {
                        proxy,
                        from,
                        status,
                    },
                })
            }
            _ => Err(ProxyError::Refused {
                proxy,
                target,
                status,
            }),
        }
    }

    /// Reads the answer to CONNECT. Its fields say nothing about a body if it is successful.
    async fn answer(&self, socket: &Socket, target: &str) -> Result<StatusCode, ProxyError> {
        let invalid = |error| ProxyError::Head {
            proxy: self.to_string(),
            from: self.source.clone(),
            error,
        };
        let mut buffer = BytesMut::new();
        for _ in 0..=INTERIM_MAX {
            // An error of the connection is an end, too.
            let head = head::read_head(&mut buffer, HEAD_LIMITS, |cx, buffer| {
                socket
                    .poll_recv_buf(cx, buffer)
                    .map(|received| Ok(received.unwrap_or(0)))
            });
            let Some(head) = head.await.map_err(invalid)? else {
                return Err(ProxyError::Closed {
                    proxy: self.to_string(),
                    target: target.to_owned(),
                });
            };
            let status = head::parse_response(&head, &Method::CONNECT, HEAD_LIMITS)
                .map_err(invalid)?
                .status;
            // The gateway never sends first, so further bytes are not the gateway's.
            if status.is_success() && !buffer.is_empty() {
                return Err(ProxyError::Early {
                    proxy: self.to_string(),
                    target: target.to_owned(),
                });
            }
            if !status.is_informational() {
                return Ok(status);
            }
        }
        Err(invalid(InvalidHead::Syntax("too many interim answers")))
    }
}

/// `HOST:PORT`, with brackets around an IPv6 address.
fn authority(host: &str, port: u16) -> String {
    if host.parse::<Ipv6Addr>().is_ok() {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;
    use std::thread;

    use super::super::ProxySettings;
    use super::*;
    use crate::testing::block_on;

    /// Connects to `gateway.test:443` through a proxy that answers with `answer` and closes.
    /// Returns the request that the proxy received, and the error.
    fn connect(userinfo: &str, answer: &[u8]) -> (String, Result<(), String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{userinfo}{}", listener.local_addr().unwrap());
        let answer = answer.to_vec();
        let proxy = thread::spawn(move || {
            let mut reader = BufReader::new(listener.accept().unwrap().0);
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") && reader.read_line(&mut head).unwrap() > 0 {}
            // Fails if the agent has given up.
            let _ = reader.get_mut().write_all(&answer);
            head
        });
        let environment = |name: &str| (name == "GW_PROXY").then(|| url.clone());
        let settings = ProxySettings::of_environment(&environment).unwrap();
        let connected = block_on(async {
            let proxy = settings.for_host("gateway.test", 443).unwrap();
            let connected = proxy.connect("gateway.test", 443).await;
            connected.map(drop).map_err(|error| error.to_string())
        });
        (proxy.join().unwrap(), connected)
    }

    #[test]
    fn request_has_the_name_and_the_credentials() {
        let (request, connected) = connect(
            "user:p%40ss@",
            b"HTTP/1.0 200 Connection established\r\nVia: x\r\n\r\n",
        );
        assert_eq!(connected, Ok(()));
        assert_eq!(
            request,
            "CONNECT gateway.test:443 HTTP/1.1\r\nHost: gateway.test:443\r\n\
             Proxy-Authorization: Basic dXNlcjpwQHNz\r\n\r\n"
        );
        let answer = b"HTTP/1.1 103 x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n";
        let (request, connected) = connect("", answer);
        assert_eq!(connected, Ok(()));
        assert!(!request.contains("Proxy-Authorization"));
        assert_eq!(
            [authority("::1", 1), authority("[::1]", 1)],
            ["[::1]:1", "[::1]:1"]
        );
    }

    #[test]
    fn refusals_name_the_proxy_the_status_and_the_remedy() {
        let [no_user, wrong_user] = [
            "requires a user and password",
            "does not accept the user and password",
        ];
        for (userinfo, status, expected) in [
            ("", "1.1 407", &[no_user, "407", "GW_PROXY"][..]),
            ("u:p@", "1.1 407", &[wrong_user, "407", "GW_PROXY"]),
            ("u:p@", "1.0 401", &[wrong_user, "401"]),
            (
                "",
                "1.1 403",
                &["403 Forbidden", "gateway.test:443", "allow CONNECT"],
            ),
            (
                "",
                "1.1 502",
                &["502 Bad Gateway", "gateway.test:443", "resolves"],
            ),
            ("", "1.1 504", &["504 Gateway Timeout", "gateway.test:443"]),
            ("", "1.1 302", &["302 Found"]),
        ] {
            let answer = format!("HTTP/{status} x\r\nLocation: /\r\n\r\n");
            let error = connect(userinfo, answer.as_bytes()).1.unwrap_err();
            assert!(error.starts_with("the proxy at 127.0.0.1:"), "{error}");
            for part in expected {
                assert!(error.contains(part), "{part}: {error}");
            }
        }
    }

    #[test]
    fn answers_that_are_not_of_a_proxy_are_errors() {
        let interim = b"HTTP/1.1 100 x\r\n\r\n".repeat(INTERIM_MAX + 1);
        for (answer, expected) in [
            (&b""[..], "closed the connection"),
            (b"HTTP/1.1 200 OK\r\n", "closed the connection"),
            (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "valid HTTP"),
            (b"HTTP/1.1 200 OK\r\n\r\nhello", "sent bytes before"),
            (&[b'a'; 16 * 1024], "larger than 8192 bytes"),
            (&interim, "too many interim answers"),
        ] {
            let error = connect("", answer).1.unwrap_err();
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }
}
