//! Handshake of a tunnel: authenticates the agent on its TLS connection, authorises it for the
//! service, then starts the tunnel.

pub(super) mod openings;
pub(super) mod replaced_keys;

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use crate::limits;
use bytes::{Bytes, BytesMut};
use gw_base::clock::{self, Timestamp};
use gw_base::error::{Error, Overload};
use gw_base::service::hostname::Destination;
use gw_base::tls::pki;
use gw_shared::http::{ConnectionField, Fields, Framing, RequestHead, head};
use gw_shared::id::{AccountId, AgentId, AuthorityId, SECRET_LENGTH, random_base62};
use gw_shared::identity::enrollment::EnrollmentStatus;
use gw_shared::net::TlsStream;
use gw_shared::runtime;
use gw_shared::tunnel::handshake::{self, BadUpgrade, HEAD_LIMITS, Proof, Purpose};
use gw_shared::version::{VERSION, Version, VersionMismatch};
use gw_store::{PublicKeyHash, Service};
use http::StatusCode;
use http::header::{self, HeaderValue};
use rustls::CertificateError;
use rustls_pki_types::CertificateDer;

use super::session::{self, Party};
use super::{Tunnels, Via, downloads};
use crate::connections::ConnectionGuard;
use crate::http_message::dated;
use crate::http1;

/// Serves the upgrade request on a connection of an agent, and starts the tunnel. `via` is the node
/// that splices the connection, if any.
pub(crate) async fn serve(
    tunnels: Rc<Tunnels>,
    stream: TlsStream,
    peer: SocketAddr,
    via: Option<Via>,
    guard: ConnectionGuard,
) {
    guard.expect_by(Instant::now() + limits::HEAD);
    let begin = |agent| {
        let openings = Rc::clone(tunnels.registry.borrow().openings());
        openings.begin(agent, stream.closer(), &tunnels.directory.get())
    };
    // From here on a revocation ends the connection, if the agent has sent a certificate.
    let identity = stream
        .peer_certificate()
        .and_then(|certificate| pki::agent_identity(&certificate, &tunnels.region));
    let known = identity.map(|identity| begin(identity.agent));
    let mut buffer = BytesMut::new();
    let Some(admitted) = authenticate(&tunnels, &stream, &mut buffer, &guard).await else {
        return;
    };
    let Admission {
        agent,
        key,
        issuer,
        service,
        version,
        purpose,
    } = match admitted {
        Ok(admission) => admission,
        Err(error) => {
            log_refusal(&tunnels, peer, &error);
            return refuse(&tunnels, &stream, &error, &guard).await;
        }
    };
    let opening = known.unwrap_or_else(|| begin(agent.clone()));
    opening.set_service(&service);
    if let Purpose::Program(sha256) = purpose {
        return send_program(
            &tunnels,
            &stream,
            (&agent, &service.account),
            &sha256,
            &guard,
        )
        .await;
    }
    if accept(&stream).await.is_err() {
        return;
    }
    stream.unread(&buffer);
    // From here on the heartbeat replaces the deadline.
    drop(guard);
    // A new task: the tunnel does not keep the memory of the handshake.
    runtime::spawn(session::run(
        tunnels,
        stream,
        Party {
            agent,
            key,
            issuer,
            version,
            service,
        },
        opening,
        via,
    ));
}

async fn accept(stream: &TlsStream) -> io::Result<()> {
    let acceptance = handshake::acceptance();
    stream.write_all(&mut [IoSlice::new(&acceptance)]).await?;
    stream.flush().await
}

/// Reads the upgrade request and checks it; challenges an agent without a certificate. `None` if
/// the agent has closed the connection.
async fn authenticate(
    tunnels: &Tunnels,
    stream: &TlsStream,
    buffer: &mut BytesMut,
    guard: &ConnectionGuard,
) -> Option<Result<Admission, Error>> {
    let upgrade = read_upgrade(tunnels, stream, buffer, guard).await?;
    let admitted = upgrade.and_then(|head| admit(tunnels, stream, &head, None));
    let Err(challenged @ Error::AgentChallenge { challenge }) = &admitted else {
        return Some(admitted);
    };
    let response = dated(challenged.response(tunnels.ids.next_id()));
    http1::write_response(stream, response, ConnectionField::Persists)
        .await
        .ok()?;
    let upgrade = read_upgrade(tunnels, stream, buffer, guard).await?;
    Some(upgrade.and_then(|head| admit(tunnels, stream, &head, Some(challenge))))
}

/// Warns about known agents only, and at a limited rate, so that neither others nor a modified
/// agent can fill the log.
fn log_refusal(tunnels: &Tunnels, peer: SocketAddr, error: &Error) {
    let is_unknown_agent = matches!(
        error,
        Error::AgentCertificateRequired | Error::BadRequest(_) | Error::HeadersTooLarge(_)
    );
    let is_logged = matches!(error, Error::VersionMismatch(_));
    if !is_unknown_agent && !is_logged && tunnels.may_log_refusal() {
        tracing::warn!(%peer, %error, "tunnel refused");
    } else {
        tracing::debug!(%peer, %error, "tunnel refused");
    }
}

/// Reads the head of an upgrade request, which may have queued while this process was frozen.
/// `None` if the agent has closed the connection.
async fn read_upgrade(
    tunnels: &Tunnels,
    stream: &TlsStream,
    buffer: &mut BytesMut,
    guard: &ConnectionGuard,
) -> Option<Result<RequestHead, Error>> {
    let head = http1::read_head(stream, buffer, guard, HEAD_LIMITS).await;
    guard.has_shaken_hands();
    let head = match head {
        Ok(head) => head?,
        Err(error) => return Some(Err(Error::invalid_head(error))),
    };
    Some(tunnels.freeze.over().await.map(|()| head))
}

/// Answers with an error and closes the connection.
async fn refuse(tunnels: &Tunnels, stream: &TlsStream, error: &Error, guard: &ConnectionGuard) {
    tunnels.counters.refused(error);
    guard.expect_by(Instant::now() + limits::LINGER);
    let response = dated(error.response(tunnels.ids.next_id()));
    // Fails if the agent has closed the connection. The connection closes in any case.
    let _ = http1::write_response(stream, response, ConnectionField::Close).await;
    http1::linger(stream, guard).await;
}

/// An agent that may have what it asks for.
struct Admission {
    agent: AgentId,
    /// Key of its certificate.
    key: PublicKeyHash,
    /// Authority that has issued the certificate.
    issuer: Option<AuthorityId>,
    service: Arc<Service>,
    version: Version,
    purpose: Purpose,
}

/// Checks version, certificate, agent and service. In this order, so that an answer reveals nothing
/// before the authentication that it requires.
fn admit(
    tunnels: &Tunnels,
    stream: &TlsStream,
    head: &RequestHead,
    challenge: Option<&str>,
) -> Result<Admission, Error> {
    let request = handshake::check(head, tunnels.releases.served).map_err(|error| match error {
        BadUpgrade::VersionMismatch(mismatch) => refuse_version(tunnels, stream, head, &mismatch),
        BadUpgrade::NotAnUpgrade => Error::BadRequest(error.to_string()),
    })?;
    let certificate = match stream.peer_certificate() {
        Some(verified) => verified,
        None if tunnels.agent_mtls => return Err(Error::AgentCertificateRequired),
        None => proved_certificate(head, challenge)?,
    };
    let issuer = issuer(tunnels, &certificate)?;
    let identity = pki::agent_identity(&certificate, &tunnels.region)
        .ok_or(Error::AgentCertificateRequired)?;
    let key = pki::subject_public_key_info(&certificate).ok_or(Error::AgentCertificateRequired)?;
    let directory = tunnels.directory.get();
    let agent = directory
        .agent(identity.agent.as_str())
        .ok_or(Error::AgentUnknown)?;
    if agent.status != EnrollmentStatus::Approved || agent.account != identity.account {
        return Err(Error::AgentRevoked);
    }
    if agent.is_expired(Timestamp::now()) {
        return Err(Error::AgentCertificateExpired);
    }
    let Destination::Tenant(label) = tunnels.region.destination(head.authority.as_str()) else {
        return Err(Error::Misdirected);
    };
    let not_allowed = || Error::AgentNotAllowed(head.authority.to_string());
    let service = directory.service(&label).ok_or_else(not_allowed)?;
    if !agent.may_serve(service) {
        return Err(Error::AgentNotAllowed(service.hostname.to_string()));
    }
    // The server name has routed the connection to the owner of its service. `Host` names another
    // service.
    if service.owner != tunnels.worker {
        return Err(Error::Misdirected);
    }
    // The agent is to find the next owner through another node.
    if tunnels.is_suspended() {
        return Err(Error::NodeUnavailable);
    }
    let now = Instant::now();
    tunnels.take_admission(now)?;
    tunnels
        .registry
        .borrow()
        .openings()
        .admit(&identity.agent, service, now)?;
    Ok(Admission {
        agent: identity.agent,
        key: PublicKeyHash::of(&key),
        issuer,
        service: Arc::clone(service),
        version: request.version,
        purpose: request.purpose,
    })
}

/// The error for a version that is not served. Names the agent and its service if it has sent its
/// certificate, for the log and for administrators.
fn refuse_version(
    tunnels: &Tunnels,
    stream: &TlsStream,
    head: &RequestHead,
    mismatch: &VersionMismatch,
) -> Error {
    let certificate = stream.peer_certificate();
    let identity =
        certificate.and_then(|certificate| pki::agent_identity(&certificate, &tunnels.region));
    let directory = tunnels.directory.get();
    if let Some(identity) = identity
        && let Destination::Tenant(label) = tunnels.region.destination(head.authority.as_str())
        && let Some(service) = directory.service(&label)
        && directory
            .agent(identity.agent.as_str())
            .is_some_and(|agent| agent.may_serve(service))
    {
        let agent = &identity.agent;
        let service_label = &service.label;
        let agent_version = &mismatch.agent;
        if tunnels.may_log_refusal() {
            tracing::warn!(
                %agent, service = %service_label, agent_version, gateway_version = VERSION,
                "tunnel refused: the agent's version is not served; install another version of \
                 gw-agent or, during an upgrade, set agent_versions = \"previous\""
            );
        }
        let mut registry = tunnels.registry.borrow_mut();
        registry.refused_version(agent, service, agent_version.clone(), Instant::now());
    } else if tunnels.may_log_refusal() {
        tracing::warn!(
            agent_version = mismatch.agent,
            gateway_version = VERSION,
            "tunnel refused: version not served"
        );
    }
    Error::VersionMismatch(mismatch.to_string())
}

/// Sends the program with this SHA-256 to an agent, and closes the connection.
async fn send_program(
    tunnels: &Tunnels,
    stream: &TlsStream,
    (agent, account): (&AgentId, &AccountId),
    sha256: &str,
    guard: &ConnectionGuard,
) {
    let Some(program) = tunnels.releases.program(sha256) else {
        let error =
            Error::BadRequest("this gateway has no agent program with this SHA-256".to_owned());
        return refuse(tunnels, stream, &error, guard).await;
    };
    let Some(download) = tunnels.downloads.begin(agent, account, stream.closer()) else {
        return refuse(
            tunnels,
            stream,
            &Error::Overloaded(Overload::Programs),
            guard,
        )
        .await;
    };
    match write_program(stream, program, guard).await {
        Ok(()) => {
            drop(download);
            tracing::info!(%agent, sha256, "sent the agent a program");
            http1::linger(stream, guard).await;
        }
        // The agent has closed the connection, or was too slow, or gave way.
        Err(error) => tracing::debug!(%agent, %error, "could not send the agent a program"),
    }
}

async fn write_program(
    stream: &TlsStream,
    program: &Bytes,
    guard: &ConnectionGuard,
) -> io::Result<()> {
    let content_type = (
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/octet-stream"),
    );
    let headers = Fields::from_iter([content_type]);
    let mut out = Vec::with_capacity(256);
    let framing = Framing::Length(program.len() as u64);
    head::write_response(
        &mut out,
        StatusCode::OK,
        &headers,
        framing,
        ConnectionField::Close,
    );
    let start = Instant::now();
    let mut sent = 0;
    for chunk in std::iter::once(out.as_slice()).chain(program.chunks(limits::PROGRAM_CHUNK)) {
        let due = downloads::due(start, sent, program.len());
        guard.expect_by(due.min(Instant::now() + limits::PROGRAM_CHUNK_WITHIN));
        sent += chunk.len();
        stream.write_all(&mut [IoSlice::new(chunk)]).await?;
    }
    stream.flush().await
}

/// The authority that has issued the certificate, by those that are trusted now: others may have
/// been at the TLS handshake.
fn issuer(
    tunnels: &Tunnels,
    certificate: &CertificateDer<'_>,
) -> Result<Option<AuthorityId>, Error> {
    let configs = tunnels.certificates.get();
    configs
        .agents
        .issuer(certificate, clock::unix_time())
        .map(Option::<&AuthorityId>::cloned)
        .map_err(|error| match error {
            rustls::Error::InvalidCertificate(
                CertificateError::Expired | CertificateError::ExpiredContext { .. },
            ) => Error::AgentCertificateExpired,
            _ => Error::AgentCertificateRequired,
        })
}

/// The certificate from a proof of an agent without a client certificate, which is not verified
/// yet: the agent has signed the challenge of this connection with the key of the certificate.
fn proved_certificate(
    head: &RequestHead,
    challenge: Option<&str>,
) -> Result<CertificateDer<'static>, Error> {
    let proof = head
        .headers
        .get(header::AUTHORIZATION)
        .and_then(|value| Proof::parse(value.to_str().ok()?));
    let (Some(challenge), Some(proof)) = (challenge, proof) else {
        // Only the first request of a connection gets a challenge.
        return Err(match challenge {
            None => Error::AgentChallenge {
                challenge: random_base62(SECRET_LENGTH),
            },
            Some(_) => Error::AgentCertificateRequired,
        });
    };
    let certificate = CertificateDer::from(proof.certificate);
    let message = handshake::challenge_message(head.authority.as_str(), challenge);
    if pki::verify_signature(&certificate, &message, &proof.signature) {
        Ok(certificate)
    } else {
        Err(Error::AgentCertificateRequired)
    }
}
