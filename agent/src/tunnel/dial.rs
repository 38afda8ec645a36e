//! Opening a tunnel: connect, TLS, HTTP/1.1 upgrade. Replaces the certificate if the gateway
//! reports it as expired.

use std::time::Duration;

use bytes::BytesMut;
use gw_shared::error_code::ErrorCode;
use gw_shared::identity::enrollment::BODY_MAX;
use gw_shared::net::TlsStream;
use gw_shared::runtime;
use gw_shared::tunnel::handshake::Proof;
use gw_shared::tunnel::{self, handshake};
use http::StatusCode;
use http::header::WWW_AUTHENTICATE;

use crate::apex_client::connection::{self, Reply};
use crate::apex_client::error::GatewayError;
use crate::clock::GatewayClock;
use crate::config::Config;
use crate::identity::recovery::RecoveryError;
use crate::identity::state::StateError;
use crate::identity::{Identity, UnfitIdentity};
use crate::tunnel::AgentContext;

/// Time limit from name resolution to the accepted upgrade.
const TIME_LIMIT: Duration = Duration::from_secs(20);

/// Why a tunnel could not be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    #[error(transparent)]
    Gateway(#[from] GatewayError),
    #[error(
        "an administrator has revoked this agent; enroll it again with a new token and `gw-agent \
         enroll --force`"
    )]
    Revoked,
    #[error(transparent)]
    Recovery(#[from] RecoveryError),
    #[error(transparent)]
    State(#[from] StateError),
    #[error("the agent's identity cannot be used: {0}")]
    Identity(#[from] UnfitIdentity),
}

/// Opens a tunnel for the service at `hostname`. Every call resolves the gateway's name and reads
/// the identity again.
///
/// The gateway decides whether the certificate has expired, because the local clock may be wrong.
pub(crate) async fn dial(agent: &AgentContext, hostname: &str) -> Result<TlsStream, DialError> {
    let identity = agent.certificates.identity_for_tunnel()?;
    match open(&agent.config, hostname, &identity, &agent.clock).await {
        Err(DialError::Gateway(error)) if error.is_certificate_expired() => {
            let identity = agent.certificates.recover(&identity).await?;
            open(&agent.config, hostname, &identity, &agent.clock).await
        }
        // The services may have changed while the agent had no tunnel. The reply to a certificate
        // request lists them. It also decides whether the record of the agent was deleted: a worker
        // may not have the newest records.
        Err(DialError::Gateway(error)) if error.is_not_in_records() => {
            match agent.certificates.recover(&identity).await {
                Ok(_) | Err(RecoveryError::TooSoon(_)) => Err(error.into()),
                Err(other) => Err(other.into()),
            }
        }
        result => result,
    }
}

/// Opens a tunnel with this identity, without recovery.
pub(crate) async fn open(
    config: &Config,
    hostname: &str,
    identity: &Identity,
    clock: &GatewayClock,
) -> Result<TlsStream, DialError> {
    let state = &config.state;
    let to = &config.enrollment;
    let tls = connection::client_config(
        state.gateway_authorities()?,
        Some(identity.client_auth()),
        tunnel::ALPN,
    )?;
    let opened = async {
        let stream = connection::open(
            &config.proxies,
            &to.gateway_host,
            to.gateway_port,
            hostname,
            tls,
        )
        .await?;
        upgrade(&stream, hostname, identity, clock).await?;
        Ok(stream)
    };
    runtime::timeout(TIME_LIMIT, opened)
        .await
        .map_err(|_| GatewayError::TimedOut(TIME_LIMIT))?
}

async fn upgrade(
    stream: &TlsStream,
    hostname: &str,
    identity: &Identity,
    clock: &GatewayClock,
) -> Result<(), DialError> {
    let mut buffer = BytesMut::new();
    let request = |proof: Option<&Proof>| handshake::request(hostname, proof);
    let answer = authenticated(stream, hostname, identity, request, BODY_MAX, &mut buffer).await?;
    clock.set_from_headers(&answer.headers);
    if answer.status == StatusCode::SWITCHING_PROTOCOLS {
        // The gateway sends first after the upgrade, so the buffer may contain the beginning of its
        // preface.
        stream.unread(&buffer);
        return Ok(());
    }
    let refusal = answer.refusal();
    Err(match refusal.code {
        Some(ErrorCode::AgentRevoked) => DialError::Revoked,
        _ => GatewayError::Refused(refusal).into(),
    })
}

/// Sends the request that `request` makes, and again with a proof if the gateway asks for one. The
/// body of the answer may have `body_max` bytes.
pub(crate) async fn authenticated(
    stream: &TlsStream,
    hostname: &str,
    identity: &Identity,
    request: impl Fn(Option<&Proof>) -> Vec<u8>,
    body_max: usize,
    buffer: &mut BytesMut,
) -> Result<Reply, DialError> {
    let answer = connection::exchange_up_to(stream, &request(None), body_max, buffer).await?;
    // A gateway that does not request the client certificate in TLS sends a challenge here, once: a
    // second 401 is a refusal.
    if answer.status == StatusCode::UNAUTHORIZED
        && let Some(field) = answer.headers.get(WWW_AUTHENTICATE)
        && let Some(challenge) = field.to_str().ok().and_then(handshake::parse_challenge)
    {
        let proof = identity.prove(hostname, challenge)?;
        return Ok(
            connection::exchange_up_to(stream, &request(Some(&proof)), body_max, buffer).await?,
        );
    }
    Ok(answer)
}

impl DialError {
    pub(crate) fn is_certificate_expired(&self) -> bool {
        matches!(self, Self::Gateway(error) if error.is_certificate_expired())
    }

    /// Whether the error persists until an administrator intervenes.
    pub(crate) fn needs_intervention(&self) -> bool {
        matches!(
            self,
            Self::Revoked | Self::Recovery(RecoveryError::Refused(_) | RecoveryError::Deleted)
        )
    }

    /// Whether the gateway does not have a record of this agent any more.
    pub(crate) fn is_deleted(&self) -> bool {
        matches!(self, Self::Recovery(RecoveryError::Deleted))
    }

    /// Whether another attempt may succeed as soon as the gateway is available again.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Gateway(error) | Self::Recovery(RecoveryError::Gateway(error)) => {
                error.is_transient()
            }
            _ => false,
        }
    }

    /// Whether another node of the gateway may open the tunnel: the node that was reached cannot
    /// serve for the moment.
    pub(crate) fn is_of_one_node(&self) -> bool {
        let Self::Gateway(error) = self else {
            return false;
        };
        error.refusal().and_then(|refusal| refusal.code) == Some(ErrorCode::NodeUnavailable)
    }

    /// Least time until the next attempt, as requested by the gateway.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Gateway(error) | Self::Recovery(RecoveryError::Gateway(error)) => {
                error.refusal()?.retry_after
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::{Arc, mpsc};
    use std::{fs, thread};

    use gw_shared::identity::enrollment::CsrRequest;
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;
    use crate::fake_gateway::{self, Authority, HOSTNAME, LONG_AGO, NOW, Request, json, refusal};
    use crate::testing::block_on;

    const ACCEPTED: &str = "HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: gw-tunnel\r\n\r\nabc";

    /// Dials with a certificate that is valid in `years`. Returns the first bytes of the tunnel or
    /// the error, and the start lines of the requests that the gateway received.
    fn dial_once(
        years: Range<i32>,
        answer: impl FnMut(&Authority, &Request) -> String + Send + 'static,
    ) -> (Result<String, DialError>, Vec<String>) {
        dial_times(1, years, answer)
    }

    /// Dials several times and returns the result of the last dial.
    fn dial_times(
        times: usize,
        years: Range<i32>,
        mut answer: impl FnMut(&Authority, &Request) -> String + Send + 'static,
    ) -> (Result<String, DialError>, Vec<String>) {
        let authority = Arc::new(Authority::new());
        let (seen, requests) = mpsc::channel();
        let of_gateway = Arc::clone(&authority);
        let port = fake_gateway::serve(&authority, move |request| {
            let start_line = request.head.lines().next().unwrap();
            seen.send(start_line.to_owned()).unwrap();
            answer(&of_gateway, request)
        });
        let (_directory, agent) = fake_gateway::agent(&authority, years, port);
        let dialled = block_on(async {
            for _ in 1..times {
                assert!(dial(&agent, HOSTNAME).await.is_err());
            }
            let stream = dial(&agent, HOSTNAME).await?;
            let mut first = [0; 3];
            let read = std::future::poll_fn(|cx| stream.poll_read(cx, &mut first)).await;
            Ok(String::from_utf8(first[..read.unwrap()].to_vec()).unwrap())
        });
        (dialled, requests.try_iter().collect())
    }

    fn certify(authority: &Authority, request: &Request) -> String {
        certify_for(authority, request, NOW)
    }

    fn certify_for(authority: &Authority, request: &Request, years: Range<i32>) -> String {
        let request: CsrRequest = serde_json::from_slice(&request.body).unwrap();
        assert!(request.agent_id.is_some());
        json(200, "", &authority.certify(&request.csr, years))
    }

    #[test]
    fn an_identity_that_may_not_be_on_the_disk_opens_no_tunnel() {
        let authority = Authority::new();
        let (seen, requests) = mpsc::channel();
        let port = fake_gateway::serve(&authority, move |_| {
            seen.send(()).unwrap();
            ACCEPTED.into()
        });
        let (directory, agent) = fake_gateway::agent(&authority, NOW, port);
        // fsync(2) of a named pipe fails.
        let path = directory.path().join("identity.pem");
        let pem = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let writer = thread::spawn(move || fs::write(path, pem).unwrap());
        let refused = block_on(async { dial(&agent, HOSTNAME).await.err() });
        writer.join().unwrap();
        let error = refused.map(|error| error.to_string()).unwrap_or_default();
        assert!(
            error.contains("identity.pem: cannot make sure that the file is on the disk"),
            "{error}"
        );
        // The gateway got no request.
        assert!(requests.try_recv().is_err());
    }

    #[test]
    fn bytes_after_the_101_response_belong_to_the_tunnel() {
        let (dialled, requests) = dial_once(NOW, |_, _| ACCEPTED.into());
        assert_eq!((dialled.unwrap().as_str(), requests.len()), ("abc", 1));
    }

    /// The gateway's challenge of an agent.
    fn challenge() -> String {
        let field = "www-authenticate: Gw-Agent challenge=\"drawn\"\r\n";
        refusal(401, field, "GW_AGENT_CERTIFICATE_REQUIRED")
    }

    #[test]
    fn challenge_is_answered_on_the_same_connection() {
        let (dialled, requests) = dial_once(NOW, |_, request| {
            let proof = "authorization: Gw-Agent certificate=";
            match request.head.contains(proof) {
                true => ACCEPTED.into(),
                false => challenge(),
            }
        });
        assert_eq!((dialled.unwrap().as_str(), requests.len()), ("abc", 2));
    }

    #[test]
    fn a_second_challenge_is_a_refusal() {
        let (dialled, requests) = dial_once(NOW, |_, _| challenge());
        assert!(matches!(
            dialled,
            Err(DialError::Gateway(GatewayError::Refused(_)))
        ));
        assert_eq!(requests.len(), 2);
    }

    #[test]
    fn certificate_expired_by_the_local_clock_is_still_used() {
        let (dialled, requests) = dial_once(LONG_AGO, |authority, request| {
            if request.head.starts_with("POST /csr ") {
                certify(authority, request)
            } else {
                ACCEPTED.into()
            }
        });
        assert_eq!(dialled.unwrap(), "abc");
        assert_eq!(requests, ["GET /tunnel HTTP/1.1"]);
    }

    #[test]
    fn certificate_requests_are_rate_limited_if_the_gateway_rejects_every_certificate() {
        let (dialled, requests) = dial_times(3, LONG_AGO, |authority, request| {
            if request.head.starts_with("POST /csr ") {
                // The new certificate has expired too, because one of the clocks is wrong.
                certify_for(authority, request, LONG_AGO)
            } else {
                refusal(401, "", "GW_AGENT_CERTIFICATE_EXPIRED")
            }
        });
        let last = dialled.unwrap_err();
        assert!(
            matches!(last, DialError::Recovery(RecoveryError::TooSoon(_)))
                && !last.needs_intervention(),
            "{last}"
        );
        for (start, count) in [("POST /csr ", 1), ("GET /tunnel ", 4)] {
            let found = requests.iter().filter(|line| line.starts_with(start));
            assert_eq!(found.count(), count, "{requests:?}");
        }
    }

    #[test]
    fn answers_set_the_gateway_clock() {
        let authority = Authority::new();
        let port = fake_gateway::serve(&authority, |_| {
            "HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: gw-tunnel\r\n\
             date: Sun, 06 Nov 1994 08:49:37 GMT\r\n\r\n"
                .into()
        });
        let (_directory, agent) = fake_gateway::agent(&authority, NOW, port);
        block_on(async { drop(dial(&agent, HOSTNAME).await.unwrap()) });
        let date = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        let since = agent.clock.known().unwrap().duration_since(date).unwrap();
        assert!(since < Duration::from_secs(60));
    }

    #[test]
    fn certificate_expired_by_the_gateways_clock_is_replaced() {
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
        assert_eq!(dialled.unwrap(), "abc");
        assert_eq!(
            requests,
            [
                "GET /tunnel HTTP/1.1",
                "POST /csr HTTP/1.1",
                "GET /tunnel HTTP/1.1"
            ]
        );
    }

    fn unknown() -> String {
        refusal(401, "", "GW_AGENT_UNKNOWN")
    }

    #[test]
    fn an_agent_is_deleted_if_the_records_of_the_gateway_do_not_have_it() {
        // An agent that was away for long has a certificate that has expired.
        for code in ["GW_AGENT_UNKNOWN", "GW_AGENT_CERTIFICATE_EXPIRED"] {
            let (dialled, requests) = dial_once(NOW, move |_, request| {
                match request.head.starts_with("GET /tunnel ") {
                    true => refusal(401, "", code),
                    false => unknown(),
                }
            });
            let deleted = dialled.unwrap_err();
            assert!(
                deleted.is_deleted() && deleted.needs_intervention(),
                "{deleted}"
            );
            assert_eq!(requests, ["GET /tunnel HTTP/1.1", "POST /csr HTTP/1.1"]);
        }
    }

    /// A worker that does not have the newest records proves nothing.
    #[test]
    fn an_agent_that_gets_a_certificate_is_not_deleted() {
        let (dialled, _) = dial_once(NOW, |authority, request| {
            match request.head.starts_with("POST /csr ") {
                true => certify(authority, request),
                false => unknown(),
            }
        });
        let error = dialled.unwrap_err();
        assert!(
            !error.is_deleted() && !error.needs_intervention(),
            "{error}"
        );
    }

    /// The error of a gateway that refuses all requests.
    fn refused(
        years: Range<i32>,
        status: u16,
        fields: &'static str,
        code: &'static str,
    ) -> DialError {
        let (dialled, _) = dial_once(years, move |_, _| refusal(status, fields, code));
        dialled.unwrap_err()
    }

    #[test]
    fn errors_that_need_an_administrator_are_recognised() {
        let late = refused(LONG_AGO, 401, "", "GW_AGENT_CERTIFICATE_EXPIRED");
        assert!(
            late.needs_intervention() && late.to_string().contains("--force"),
            "{late}"
        );
        assert!(refused(NOW, 401, "", "GW_AGENT_REVOKED").needs_intervention());
    }

    #[test]
    fn errors_that_pass_are_of_the_gateway_or_of_one_node() {
        let busy = refused(NOW, 503, "retry-after: 9\r\n", "GW_OVERLOADED");
        assert!(!busy.needs_intervention() && busy.retry_after() == Some(Duration::from_secs(9)));
        assert!(!busy.is_of_one_node());
        let suspended = refused(NOW, 503, "retry-after: 1\r\n", "GW_NODE_UNAVAILABLE");
        assert!(suspended.is_of_one_node());
    }
}
