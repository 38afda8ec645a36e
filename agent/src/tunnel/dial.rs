//! Opening a tunnel: connect, TLS, upgrade; with a new certificate if the gateway says that the old one has expired.

use std::time::Duration;

use bytes::BytesMut;
use gw_shared::error_code::ErrorCode;
use gw_shared::net::TlsStream;
use gw_shared::runtime;
use gw_shared::tunnel::{self, handshake};
use http::StatusCode;
use http::header::WWW_AUTHENTICATE;

use crate::apex_client::connection::{self, GatewayError};
use crate::clock::GatewayClock;
use crate::config::Config;
use crate::identity::recovery::{self, RecoveryError};
use crate::identity::state::{Identity, StateError, UnfitIdentity};
use crate::supervisor::Agent;

/// From name resolution to accepted upgrade.
const TIME_LIMIT: Duration = Duration::from_secs(20);

/// Why there is no tunnel.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    #[error(transparent)]
    Gateway(#[from] GatewayError),
    #[error("an administrator has revoked this agent; to serve again it must be enrolled anew with `gw-agent enroll`")]
    Revoked,
    #[error(transparent)]
    Recovery(#[from] RecoveryError),
    #[error(transparent)]
    State(#[from] StateError),
    #[error("the agent's identity: {0}")]
    Identity(#[from] UnfitIdentity),
}

/// Opens a tunnel for the service at `hostname`. Everything is looked up anew: addresses, certificates.
///
/// Whether the certificate has expired is for the gateway to say: its clock counts, and ours may be wrong.
pub(crate) async fn dial(agent: &Agent, hostname: &str) -> Result<TlsStream, DialError> {
    let identity = agent.config.state.identity()?;
    match open(&agent.config, hostname, &identity, &agent.clock).await {
        Err(DialError::Gateway(error)) if error.says_certificate_expired() => {
            let identity = recovery::recover(agent, &identity).await?;
            open(&agent.config, hostname, &identity, &agent.clock).await
        }
        // Its services changed while it had no tunnel to hear of it: a certificate comes with the list.
        Err(DialError::Gateway(error)) if error.says_not_allowed() => match recovery::recover(agent, &identity).await {
            Ok(_) | Err(RecoveryError::TooSoon(_)) => Err(error.into()),
            Err(other) => Err(other.into()),
        },
        result => result,
    }
}

/// Asks for a tunnel with this identity, and nothing else.
pub(crate) async fn open(
    config: &Config,
    hostname: &str,
    identity: &Identity,
    clock: &GatewayClock,
) -> Result<TlsStream, DialError> {
    let (state, to) = (&config.state, &config.enrollment);
    let tls = connection::client_config(state.gateway_authorities()?, Some(identity), tunnel::ALPN)?;
    let opened = async {
        let stream = connection::open(&to.gateway_host, to.gateway_port, hostname, tls).await?;
        upgrade(&stream, hostname, identity, clock).await?;
        Ok(stream)
    };
    runtime::timeout(TIME_LIMIT, opened).await.map_err(|_| GatewayError::TimedOut(TIME_LIMIT))?
}

async fn upgrade(
    stream: &TlsStream,
    hostname: &str,
    identity: &Identity,
    clock: &GatewayClock,
) -> Result<(), DialError> {
    let mut buffer = BytesMut::new();
    let mut answer = connection::exchange(stream, &handshake::request(hostname, None), &mut buffer).await?;
    clock.hear(&answer.headers);
    // A gateway that asks for no client certificate in TLS asks for a proof here. Once: a second 401 is a refusal.
    if answer.status == StatusCode::UNAUTHORIZED
        && let Some(field) = answer.headers.get(WWW_AUTHENTICATE)
        && let Some(challenge) = field.to_str().ok().and_then(handshake::parse_challenge)
    {
        let proof = identity.prove(hostname, challenge)?;
        answer = connection::exchange(stream, &handshake::request(hostname, Some(&proof)), &mut buffer).await?;
    }
    if answer.status == StatusCode::SWITCHING_PROTOCOLS {
        // The gateway speaks first on the new protocol: its beginning may have come along.
        stream.unread(&buffer);
        return Ok(());
    }
    let refusal = answer.refusal();
    Err(match refusal.code {
        Some(ErrorCode::AgentRevoked) => DialError::Revoked,
        _ => GatewayError::Refused(refusal).into(),
    })
}

impl DialError {
    pub(crate) fn says_certificate_expired(&self) -> bool {
        matches!(self, Self::Gateway(error) if error.says_certificate_expired())
    }

    /// Somebody has to do something about it.
    pub(crate) fn needs_a_hand(&self) -> bool {
        matches!(self, Self::Revoked | Self::Recovery(RecoveryError::Refused(_)))
    }

    /// Another attempt may succeed without anything being done, as soon as the gateway is back.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Self::Gateway(error) | Self::Recovery(RecoveryError::Gateway(error)) => error.is_passing(),
            _ => false,
        }
    }

    /// How long the gateway asks us to stay away.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Gateway(error) | Self::Recovery(RecoveryError::Gateway(error)) => error.refusal()?.retry_after,
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use gw_shared::identity::enrollment::CsrRequest;
    use gw_shared::runtime::Driver;

    use super::*;
    use crate::fake_gateway::{self, Authority, HOSTNAME, LONG_AGO, NOW, Request, json, refusal};

    const ACCEPTED: &str = "HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: gw-tunnel\r\n\r\nPRI";

    /// What came of a dial with a certificate valid in these years: the first bytes of the tunnel, or the error; and
    /// the start lines of the requests that the gateway got.
    fn dial_once(
        years: std::ops::Range<i32>,
        answer: impl FnMut(&Authority, &Request) -> String + Send + 'static,
    ) -> (Result<String, DialError>, Vec<String>) {
        dial_times(1, years, answer)
    }

    /// Result of the last of several dials.
    fn dial_times(
        times: usize,
        years: std::ops::Range<i32>,
        mut answer: impl FnMut(&Authority, &Request) -> String + Send + 'static,
    ) -> (Result<String, DialError>, Vec<String>) {
        let (authority, directory) = (Authority::new(), tempfile::tempdir().unwrap());
        let authority = std::sync::Arc::new(authority);
        let (seen, requests) = mpsc::channel();
        let port = fake_gateway::serve(&authority, {
            let authority = std::sync::Arc::clone(&authority);
            move |request| {
                seen.send(request.head.lines().next().unwrap().to_owned()).unwrap();
                answer(&authority, request)
            }
        });
        let agent = fake_gateway::agent(directory.path(), &authority, &authority.identity_pem(years), port);
        let dialled = Driver::choose().unwrap().block_on(async {
            for _ in 1..times {
                assert!(dial(&agent, HOSTNAME).await.is_err());
            }
            let stream = dial(&agent, HOSTNAME).await?;
            let mut first = [0; 3];
            let read = std::future::poll_fn(|cx| stream.poll_read(cx, &mut first)).await.unwrap();
            Ok(String::from_utf8(first[..read].to_vec()).unwrap())
        });
        (dialled.unwrap(), requests.try_iter().collect())
    }

    fn certify(authority: &Authority, request: &Request) -> String {
        certify_for(authority, request, NOW)
    }

    fn certify_for(authority: &Authority, request: &Request, years: std::ops::Range<i32>) -> String {
        let request: CsrRequest = serde_json::from_slice(&request.body).unwrap();
        assert!(request.agent_id.is_some());
        json(200, "", &authority.certify(&request.csr, years))
    }

    #[test]
    fn what_follows_the_acceptance_belongs_to_the_tunnel() {
        let (dialled, requests) = dial_once(NOW, |_, _| ACCEPTED.into());
        assert_eq!((dialled.unwrap().as_str(), requests.len()), ("PRI", 1));
    }

    #[test]
    fn a_challenge_is_answered_once_on_the_same_connection() {
        let challenge = "www-authenticate: Gw-Agent challenge=\"drawn\"\r\n";
        let (dialled, requests) = dial_once(NOW, move |_, request| {
            if request.head.contains("authorization: Gw-Agent certificate=") {
                ACCEPTED.into()
            } else {
                refusal(401, challenge, "GW_AGENT_CERTIFICATE_REQUIRED")
            }
        });
        assert_eq!((dialled.unwrap().as_str(), requests.len()), ("PRI", 2));

        let refuse = move |_: &Authority, _: &Request| refusal(401, challenge, "GW_AGENT_CERTIFICATE_REQUIRED");
        let (dialled, requests) = dial_once(NOW, refuse);
        assert!(matches!(dialled, Err(DialError::Gateway(GatewayError::Refused(_)))));
        assert_eq!(requests.len(), 2);
    }

    #[test]
    fn a_certificate_that_expired_by_our_clock_is_tried_first() {
        let (dialled, requests) = dial_once(LONG_AGO, |authority, request| {
            if request.head.starts_with("POST /csr ") { certify(authority, request) } else { ACCEPTED.into() }
        });
        assert_eq!(dialled.unwrap(), "PRI");
        assert_eq!(requests, ["GET /tunnel HTTP/1.1"]);
    }

    #[test]
    fn a_gateway_that_holds_every_certificate_for_expired_is_asked_for_one_in_some_minutes() {
        let (dialled, requests) = dial_times(3, LONG_AGO, |authority, request| {
            if request.head.starts_with("POST /csr ") {
                // Of the same years: its clock, or ours, is wrong by as much.
                certify_for(authority, request, LONG_AGO)
            } else {
                refusal(401, "", "GW_AGENT_CERTIFICATE_EXPIRED")
            }
        });
        let last = dialled.unwrap_err();
        assert!(matches!(last, DialError::Recovery(RecoveryError::TooSoon(_))) && !last.needs_a_hand(), "{last}");
        assert_eq!(requests.iter().filter(|line| line.starts_with("POST /csr ")).count(), 1, "{requests:?}");
        assert_eq!(requests.iter().filter(|line| line.starts_with("GET /tunnel ")).count(), 4, "{requests:?}");
    }

    #[test]
    fn an_answer_tells_the_gateways_time() {
        let (authority, directory) = (Authority::new(), tempfile::tempdir().unwrap());
        let port = fake_gateway::serve(&authority, |_| {
            "HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: gw-tunnel\r\n\
             date: Sun, 06 Nov 1994 08:49:37 GMT\r\n\r\n"
                .into()
        });
        let agent = fake_gateway::agent(directory.path(), &authority, &authority.identity_pem(NOW), port);
        Driver::choose().unwrap().block_on(async { drop(dial(&agent, HOSTNAME).await.unwrap()) }).unwrap();
        let said = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        assert!(agent.clock.known().unwrap().duration_since(said).unwrap() < Duration::from_secs(60));
    }

    #[test]
    fn the_gateway_can_say_that_it_has_expired() {
        let mut replaced = false;
        let (dialled, requests) = dial_once(NOW, move |authority, request| {
            if request.head.starts_with("POST /csr ") {
                replaced = true;
                certify(authority, request)
            } else if replaced {
                ACCEPTED.into()
            } else {
                refusal(401, "", "GW_AGENT_CERTIFICATE_EXPIRED")
            }
        });
        assert_eq!(dialled.unwrap(), "PRI");
        assert_eq!(requests, ["GET /tunnel HTTP/1.1", "POST /csr HTTP/1.1", "GET /tunnel HTTP/1.1"]);
    }

    #[test]
    fn what_nobody_but_an_administrator_can_help_is_told_apart() {
        let (late, _) = dial_once(LONG_AGO, |_, _| refusal(401, "", "GW_AGENT_CERTIFICATE_EXPIRED"));
        let late = late.unwrap_err();
        assert!(late.needs_a_hand() && late.to_string().contains("--force"), "{late}");
        let (revoked, _) = dial_once(NOW, |_, _| refusal(401, "", "GW_AGENT_REVOKED"));
        assert!(revoked.unwrap_err().needs_a_hand());
        let (busy, _) = dial_once(NOW, |_, _| refusal(503, "retry-after: 9\r\n", "GW_OVERLOADED"));
        let busy = busy.unwrap_err();
        assert!(!busy.needs_a_hand() && busy.retry_after() == Some(Duration::from_secs(9)));
    }
}
