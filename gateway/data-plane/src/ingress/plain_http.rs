//! Plain HTTP (`listen_http`): redirects to https, and answers to challenges of an ACME authority
//! (HTTP-01, RFC 8555 §8.3). Nothing else is served.

use std::fmt::Write;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Instant;

use gw_base::error::{Error, request_id_value};
use gw_base::service::hostname::{Destination, Region, host_name};
use gw_shared::http::RequestHead;
use gw_shared::http::fields::X_GW_REQUEST_ID;
use gw_store::Directory;
use http::header::{self, HeaderValue};
use http::{Method, Response, StatusCode};

use super::acceptor::Entrance;
use super::{Arrival, Ingress};
use crate::connections::handshakes::Handshakes;
use crate::{http1, limits};

/// Beginning of the path of a challenge, before its token.
const CHALLENGE_PATH: &str = "/.well-known/acme-challenge/";
/// Most characters of a token, several times those of known authorities.
const TOKEN_MAX: usize = 256;
/// Ports of http and https that a URL leaves out.
const HTTP_PORT: u16 = 80;
const HTTPS_PORT: u16 = 443;

/// The listener in plain HTTP of one worker.
pub(super) struct PlainHttp {
    /// Port of this listener.
    port: u16,
    /// Port of the listener for callers.
    https_port: u16,
    /// Connections whose request has not arrived.
    pub(super) unanswered: Rc<Handshakes>,
}

impl PlainHttp {
    /// `None` without a listener.
    pub(super) fn of(
        listeners: &[std::net::TcpListener],
        callers: &[std::net::TcpListener],
    ) -> Option<Self> {
        let port = |listeners: &[std::net::TcpListener]| {
            let address = listeners.first()?.local_addr().ok()?;
            Some(address.port())
        };
        Some(Self {
            port: port(listeners)?,
            https_port: port(callers)?,
            unanswered: Handshakes::new(
                limits::PLAIN_CONNECTIONS,
                limits::PLAIN_CONNECTIONS_PER_ADDRESS,
            ),
        })
    }

    /// Answers a request. `name` is the name of this region that its host denotes.
    fn answer(
        &self,
        request: &RequestHead,
        name: Option<&str>,
        key_authorization: impl FnOnce(&str, &str) -> Option<Vec<u8>>,
    ) -> Result<Response<Vec<u8>>, Error> {
        let name = name.ok_or(Error::Misdirected)?;
        let token = request.target.path().strip_prefix(CHALLENGE_PATH);
        if let Some(token) = token
            && matches!(request.method, Method::GET | Method::HEAD)
        {
            let found = Some(token).filter(|token| is_token(token));
            return Ok(challenge(
                found.and_then(|token| key_authorization(name, token)),
            ));
        }
        self.redirect(request, name)
    }

    /// Redirects to the same path and query at `name`. The name and the port are of the
    /// configuration, not of the request.
    fn redirect(&self, request: &RequestHead, name: &str) -> Result<Response<Vec<u8>>, Error> {
        let mut location = format!("https://{name}");
        let port = self.public_https_port(request.authority.port_u16());
        if port != HTTPS_PORT {
            // Writing to a string does not fail.
            let _ = write!(location, ":{port}");
        }
        let target = match request.target.as_str() {
            // OPTIONS for the whole server (RFC 9112 §3.2.4).
            "*" => "",
            target => target,
        };
        // A target of the absolute form may have no path.
        if !target.starts_with('/') {
            location.push('/');
        }
        for byte in target.bytes() {
            if byte.is_ascii_graphic() {
                location.push(char::from(byte));
            } else {
                let _ = write!(location, "%{byte:02X}");
            }
        }
        let location = HeaderValue::try_from(location)
            .map_err(|_| Error::BadRequest("request target".to_owned()))?;
        let mut response = Response::new(Vec::new());
        *response.status_mut() = StatusCode::PERMANENT_REDIRECT;
        response.headers_mut().insert(header::LOCATION, location);
        Ok(response)
    }

    /// Port at which clients reach the listener for callers. A client that names the port of this
    /// listener connects without a mapping of ports; with one, only the usual ports are known.
    fn public_https_port(&self, requested: Option<u16>) -> u16 {
        if requested.unwrap_or(HTTP_PORT) == self.port {
            self.https_port
        } else {
            HTTPS_PORT
        }
    }
}

impl Ingress {
    /// Answers one request in plain HTTP, and closes.
    pub(super) async fn greet_plain(self: Rc<Self>, fd: OwnedFd, peer: SocketAddr) {
        let Some(plain) = &self.acceptor.plain_http else {
            return;
        };
        let Some(arrival) = self.arrive(fd, peer, Entrance::PlainHttp).await else {
            return;
        };
        let Arrival {
            socket,
            received: mut buffer,
            guard,
            ..
        } = arrival;
        let head =
            http1::read_head_or_refuse(&socket, &mut buffer, &guard, limits::PLAIN_HEAD).await;
        guard.has_shaken_hands();
        guard.expect_by(Instant::now() + limits::LINGER);
        let mut is_head = false;
        let answer = match head {
            Ok(None) => return,
            Ok(Some(request)) => {
                is_head = request.method == Method::HEAD;
                let directory = self.directory.get();
                let name = name_of(&self.region, &directory, request.authority.as_str());
                plain.answer(&request, name.as_deref(), |name, token| {
                    let authorization = directory.domain(name)?.key_authorization(token)?;
                    Some(authorization.as_bytes().to_vec())
                })
            }
            Err(refused) => Err(Error::invalid_head(refused.invalid)),
        };
        let id = self.router.observers.ids.next_id();
        let mut response = answer.unwrap_or_else(|error| error.response(id));
        response
            .headers_mut()
            .insert(X_GW_REQUEST_ID, request_id_value(id));
        let response = http1::closing_response(response, is_head);
        drop(buffer);
        if socket
            .send_all(&mut [IoSlice::new(&response)])
            .await
            .is_ok()
        {
            drop(response);
            http1::linger(&socket, &guard).await;
        }
    }
}

/// The name of this region, or the own domain, that a host denotes, in lower case and without a
/// port; `None` for other hosts.
fn name_of(region: &Region, directory: &Directory, host: &str) -> Option<String> {
    match region.destination(host) {
        Destination::Apex => Some(region.apex().to_owned()),
        Destination::Tenant(label) => label
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
            .then(|| format!("{label}.{}", region.apex())),
        Destination::Elsewhere => {
            let domain = directory.domain(&host_name(host))?;
            domain.is_served.then(|| domain.name.to_string())
        }
    }
}

/// Whether a token has the characters of base64url (RFC 8555 §8.3).
fn is_token(text: &str) -> bool {
    (1..=TOKEN_MAX).contains(&text.len())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
}

fn challenge(key_authorization: Option<Vec<u8>>) -> Response<Vec<u8>> {
    let (status, kind, body) = match key_authorization {
        Some(found) => (StatusCode::OK, "application/octet-stream", found),
        None => (
            StatusCode::NOT_FOUND,
            "text/plain",
            b"No challenge with this token is open for this name.\n".to_vec(),
        ),
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use gw_shared::http::head;

    use super::*;

    fn plain(port: u16, https_port: u16) -> PlainHttp {
        PlainHttp {
            port,
            https_port,
            unanswered: Handshakes::new(1, 1),
        }
    }

    fn answer_of(plain: &PlainHttp, head: &str) -> Result<Response<Vec<u8>>, Error> {
        let head = Bytes::from(head.to_owned());
        let request = head::parse_request(&head, limits::PLAIN_HEAD).unwrap();
        let region = Region::new("eu1", "example.com");
        let name = name_of(&region, &Directory::default(), request.authority.as_str());
        plain.answer(&request, name.as_deref(), |name, token| {
            (token == "known").then(|| format!("{name} {token}").into_bytes())
        })
    }

    /// The redirect of a GET for `target` at `host`.
    fn location(plain: &PlainHttp, target: &str, host: &str) -> String {
        let head = format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n");
        let response = answer_of(plain, &head).unwrap();
        assert_eq!(response.status(), 308);
        response.headers()[header::LOCATION]
            .to_str()
            .unwrap()
            .to_owned()
    }

    #[test]
    fn a_redirect_keeps_path_and_query_and_takes_the_name_from_the_configuration() {
        let plain = plain(80, 443);
        for (target, host, expected) in [
            ("/", "eu1.example.com", "https://eu1.example.com/"),
            (
                "/a/../b%20c?d=e&f=/?",
                "ACME--API.eu1.Example.com.:80",
                "https://acme--api.eu1.example.com/a/../b%20c?d=e&f=/?",
            ),
            (
                "//elsewhere.example/",
                "eu1.example.com",
                "https://eu1.example.com//elsewhere.example/",
            ),
            (
                "/\\elsewhere.example",
                "eu1.example.com:80",
                "https://eu1.example.com/\\elsewhere.example",
            ),
            (
                "http://acme--api.eu1.example.com?q=1",
                "elsewhere.example",
                "https://acme--api.eu1.example.com/?q=1",
            ),
            ("/é", "eu1.example.com", "https://eu1.example.com/%C3%A9"),
        ] {
            assert_eq!(location(&plain, target, host), expected);
        }
        let options = "OPTIONS * HTTP/1.1\r\nHost: eu1.example.com\r\n\r\n";
        let response = answer_of(&plain, options).unwrap();
        assert_eq!(
            response.headers()[header::LOCATION],
            "https://eu1.example.com/"
        );
    }

    #[test]
    fn the_port_is_that_of_the_listener_unless_ports_are_mapped() {
        let host = "eu1.example.com";
        for (http, https, port, expected) in [
            (80, 443, "", ""),
            (80, 8443, "", ":8443"),
            (8080, 8443, ":8080", ":8443"),
            (8080, 443, ":8080", ""),
            // Port 80 of the client leads to 8080.
            (8080, 8443, "", ""),
            (8080, 8443, ":80", ""),
            (8080, 8443, ":9999", ""),
        ] {
            assert_eq!(
                location(&plain(http, https), "/", &format!("{host}{port}")),
                format!("https://{host}{expected}/"),
                "{http} {https} {port}"
            );
        }
    }

    #[test]
    fn other_hosts_are_misdirected() {
        for host in [
            "example.com",
            "a.b.eu1.example.com",
            "eu1.example.com.elsewhere.example",
            "a_b.eu1.example.com",
            "a!b.eu1.example.com",
            "127.0.0.1",
        ] {
            let head = format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n");
            assert_eq!(
                answer_of(&plain(80, 443), &head).unwrap_err(),
                Error::Misdirected,
                "{host}"
            );
        }
    }

    #[test]
    fn challenges_are_answered_for_names_of_the_region() {
        let ask = |method: &str, token: &str, host: &str| {
            let head = format!("{method} {CHALLENGE_PATH}{token} HTTP/1.1\r\nHost: {host}\r\n\r\n");
            answer_of(&plain(80, 443), &head)
        };
        let host = "acme--api.eu1.example.com";
        let found = ask("GET", "known", host).unwrap();
        assert_eq!(
            (found.status().as_u16(), &found.body()[..]),
            (200, &b"acme--api.eu1.example.com known"[..])
        );
        let long = "a".repeat(TOKEN_MAX + 1);
        for token in ["unknown", "", "known/", "kno.wn", "%6bnown", &long] {
            assert_eq!(ask("HEAD", token, host).unwrap().status(), 404, "{token}");
        }
        assert_eq!(ask("POST", "known", host).unwrap().status(), 308);
        assert_eq!(
            ask("GET", "known", "example.com").unwrap_err(),
            Error::Misdirected
        );
    }
}
