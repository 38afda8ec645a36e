//! What a request and its answer carry between nodes beyond the messages of the tunnel protocol.

use std::time::{Duration, Instant};

use crate::limits;
use bytes::Bytes;
use gw_base::error::{Error, Overload};
use gw_base::principal::Principal;
use gw_base::service::hostname::host_name;
use gw_interface::auth;
use gw_shared::error_code::{AgentErrorCode, ErrorCode};
use gw_shared::http::{Fields, Framing, InvalidHead};
use gw_shared::id::{AgentId, ClientId, KeyId};
use gw_shared::text::printable;
use gw_shared::tunnel::head::{self, OutboundRequest, Refusal};
use gw_shared::tunnel::timing::{AgentTiming, micros};
use gw_shared::tunnel::{frame, window};
use gw_store::Service;
use http::StatusCode;
use http::header::{self, HeaderName, HeaderValue};

use crate::http_message::{AttemptFailure, FailedAttempt, OpenedStream, Progress};

/// Originator of a request, as the node of the caller has authenticated it.
const PRINCIPAL: HeaderName = HeaderName::from_static("x-gw-node-principal");
/// Label of the service, for a request that names an own domain.
const SERVICE: HeaderName = HeaderName::from_static("x-gw-node-service");
/// Milliseconds that the request has waited at earlier owners of its service, which have admitted
/// it.
const WAITED: HeaderName = HeaderName::from_static("x-gw-node-waited-ms");
/// Mark of a request that a node passes on which is not the owner.
pub(crate) const PASS_ON: HeaderName = HeaderName::from_static("x-gw-node-pass-on");
/// Mark of a request of which an attempt was lost with another node: a backend may have received
/// it.
pub(crate) const LOST_BEFORE: HeaderName = HeaderName::from_static("x-gw-node-lost-before");
/// Agent whose tunnel carries the request.
const AGENT: HeaderName = HeaderName::from_static("x-gw-node-agent");
/// Microseconds since the request was opened on that tunnel.
const OPENED: HeaderName = HeaderName::from_static("x-gw-node-opened-us");
/// Failed attempts before: agent, reason and microseconds of each, separated by commas.
const ATTEMPTS: HeaderName = HeaderName::from_static("x-gw-node-attempts");

/// In place of the agent of an attempt that was lost with another node.
const NO_AGENT: &str = "-";

/// Code of a refusal by a node that does not own the service. The message is the epoch of its
/// placement. A request that was admitted and has waited there has the milliseconds behind it.
const NOT_OWNER: &str = "NOT_OWNER";
/// Code of a refusal by a process that ends: another process of the node, or a later one, serves
/// the request. The message has the milliseconds that an admitted request has waited there, or is
/// empty.
const ENDING: &str = "ENDING";
/// Code of a refusal by an owner that has admitted the request, which has to wait. The node of the
/// caller sends it again, and its body after the acceptance: a body that is not sent is not lost
/// with the owner.
const WAITS: &str = "WAITS";

/// Most attempts that are read from a notice.
const ATTEMPTS_MAX: usize = 8;

/// Absent duration.
const ABSENT: u32 = u32::MAX;

/// Whether the node of the caller sends the body only after the owner has accepted the request.
/// Without a body, or with a short one, it can send the request to another node instead. A caller
/// that waits for 100 from the backend sends no body before. A request that has waited may wait
/// again.
pub(crate) fn waits_for_acceptance(framing: Framing, is_upgrade: bool, headers: &Fields) -> bool {
    let is_short = framing
        .content_length()
        .is_some_and(|length| length <= u64::from(window::LEAST));
    is_upgrade
        || framing.has_body()
            && (!is_short || headers.contains(header::EXPECT) || headers.contains(WAITED))
}

/// Adds the originator to the fields of a request.
pub(crate) fn put_principal(request: &mut OutboundRequest, by: &Principal) {
    let text = match by {
        Principal::Client(id) => format!("client {id}"),
        Principal::ServiceKey(id) => format!("key {id}"),
        Principal::Admin => "admin".to_owned(),
    };
    // Identifiers are visible ASCII.
    if let Ok(value) = HeaderValue::try_from(text) {
        request.headers.insert(PRINCIPAL, value);
    }
}

/// Adds the label of the service to a request that does not name its hostname, but an own domain.
pub(crate) fn put_service(request: &mut OutboundRequest, service: &Service) {
    if *host_name(request.authority.as_str()) == *service.hostname {
        return;
    }
    // A label is visible ASCII.
    if let Ok(value) = HeaderValue::from_str(&service.label) {
        request.headers.insert(SERVICE, value);
    }
}

/// Removes the label of the service from the fields of a request.
pub(crate) fn take_service(headers: &mut Fields) -> Option<String> {
    let label = headers.remove(SERVICE)?;
    label.to_str().ok().map(str::to_owned)
}

/// Removes the originator from the fields of a request; `None` if there is no valid one.
pub(crate) fn take_principal(headers: &mut Fields) -> Option<Principal> {
    let value = headers.remove(PRINCIPAL)?;
    let text = value.to_str().ok()?;
    match text.split_once(' ') {
        Some(("client", id)) => ClientId::new(id).ok().map(Principal::Client),
        Some(("key", id)) => KeyId::new(id).ok().map(Principal::ServiceKey),
        None if text == "admin" => Some(Principal::Admin),
        _ => None,
    }
}

/// Says in the fields of a request how long it has waited since it was admitted.
pub(crate) fn put_waited(request: &mut OutboundRequest, waited: Option<Duration>) {
    match waited {
        Some(waited) => {
            let waited = HeaderValue::from(millis(waited));
            request.headers.insert(WAITED, waited);
        }
        None => drop(request.headers.remove(WAITED)),
    }
}

/// Removes the time that an admitted request has waited from its fields.
pub(crate) fn take_waited(headers: &mut Fields) -> Option<Duration> {
    parse_millis(headers.remove(WAITED)?.to_str().ok()?)
}

fn millis(waited: Duration) -> u64 {
    u64::try_from(waited.as_millis()).unwrap_or(u64::MAX)
}

fn parse_millis(text: &str) -> Option<Duration> {
    text.parse().ok().map(Duration::from_millis)
}

/// What the owner of a service tells the node of the caller before it answers.
#[derive(Debug, Default)]
pub(crate) struct Notice {
    /// The tunnel that carries the request.
    pub(crate) opened: Option<OpenedStream>,
    pub(crate) failed_attempts: Box<[FailedAttempt]>,
}

/// Appends an interim response that tells the node of the caller that the request is accepted, and
/// the progress of it.
pub(crate) fn write_notice(out: &mut Vec<u8>, progress: &Progress) {
    let mut headers = Fields::new();
    let describe = |failed: &FailedAttempt| {
        let agent = failed.agent.as_ref().map_or(NO_AGENT, AgentId::as_str);
        let (reason, took) = (failed.reason.as_str(), micros(failed.took));
        format!("{agent} {reason} {took}")
    };
    let attempts: Vec<_> = progress.failed_attempts.iter().map(describe).collect();
    if let Ok(attempts) = HeaderValue::try_from(attempts.join(","))
        && !attempts.is_empty()
    {
        headers.insert(ATTEMPTS, attempts);
    }
    if let Some(opened) = progress.opened() {
        // Identifiers are visible ASCII.
        if let Ok(agent) = HeaderValue::from_str(opened.agent.as_str()) {
            headers.insert(AGENT, agent);
        }
        headers.insert(OPENED, HeaderValue::from(micros(opened.at.elapsed())));
    }
    head::write_interim(out, StatusCode::CONTINUE, &headers);
}

/// The notice in an interim response of the owner; `None` if it is another interim response.
pub(crate) fn parse_notice(payload: &Bytes) -> Option<Notice> {
    let head = head::parse_interim(payload).ok()?;
    read_notice(&head.headers, Instant::now())
}

/// The content of a notice; `None` if the interim response is not one. Backends cannot send these
/// fields.
pub(crate) fn read_notice(headers: &Fields, now: Instant) -> Option<Notice> {
    let text = |name| headers.get(name)?.to_str().ok();
    let agent = text(AGENT).and_then(|agent| AgentId::new(agent).ok());
    let since = text(OPENED)
        .and_then(|since| since.parse().ok())
        .map(Duration::from_micros);
    let opened = agent.zip(since);
    let opened = opened.map(|(agent, since)| OpenedStream {
        at: now.checked_sub(since).unwrap_or(now),
        agent,
    });
    let attempts = text(ATTEMPTS).unwrap_or_default();
    let failed_attempts: Box<[_]> = attempts
        .split(',')
        .take(ATTEMPTS_MAX)
        .filter_map(read_attempt)
        .collect();
    (opened.is_some() || !failed_attempts.is_empty()).then_some(Notice {
        opened,
        failed_attempts,
    })
}

fn read_attempt(text: &str) -> Option<FailedAttempt> {
    let mut parts = text.split(' ');
    let agent = match parts.next()? {
        NO_AGENT => None,
        agent => Some(AgentId::new(agent).ok()?),
    };
    let reason = AttemptFailure::parse(parts.next()?)?;
    let took = Duration::from_micros(parts.next()?.parse().ok()?);
    Some(FailedAttempt {
        agent,
        reason,
        took,
    })
}

/// Timing as RESPONSE and REFUSED carry it.
pub(crate) fn timing_or_absent(timing: Option<AgentTiming>) -> AgentTiming {
    timing.unwrap_or(AgentTiming {
        agent_us: ABSENT,
        backend_first_byte_us: None,
    })
}

pub(crate) fn timing(received: AgentTiming, whole: Duration) -> Option<AgentTiming> {
    (received.agent_us != ABSENT).then(|| received.within(whole))
}

/// Answer of a node in place of a response.
#[derive(Debug, PartialEq)]
pub(crate) enum Refused {
    /// The node does not own the service by its placement of this epoch.
    NotOwner {
        epoch: u64,
        waited: Option<Duration>,
    },
    /// The process ends. The next link goes to its successor, if there is one.
    Ending {
        waited: Option<Duration>,
    },
    /// The request has to wait, and came with its whole body.
    Waits,
    Error(Error),
}

/// Appends the payload of a REFUSED.
pub(crate) fn write_refusal(out: &mut Vec<u8>, timing: Option<AgentTiming>, refused: &Refused) {
    let (code, message) = match refused {
        Refused::NotOwner {
            epoch,
            waited: None,
        } => (NOT_OWNER, epoch.to_string()),
        Refused::NotOwner {
            epoch,
            waited: Some(waited),
        } => (NOT_OWNER, format!("{epoch} {}", millis(*waited))),
        Refused::Ending { waited } => {
            let waited = waited.map(|waited| millis(waited).to_string());
            (ENDING, waited.unwrap_or_default())
        }
        Refused::Waits => (WAITS, String::new()),
        Refused::Error(error) => {
            let code = match error {
                Error::NodeUnavailable => ErrorCode::Overloaded,
                error => error.outcome().2,
            };
            let message = match error {
                Error::NodeUnavailable => SUSPENDED.to_owned(),
                Error::RateLimited { retry_after } => retry_after.as_micros().to_string(),
                Error::Overloaded(reason) => reason.as_str().to_owned(),
                Error::AuthModeNotAllowed(kind) => (*kind).to_owned(),
                Error::TunnelLost => LOST.to_owned(),
                Error::NodeLost => NODE_LOST.to_owned(),
                Error::TunnelProtocol => String::new(),
                other => other.to_string(),
            };
            (code.as_str(), message)
        }
    };
    head::write_refusal(out, timing_or_absent(timing), false, code, &message);
}

/// Message of an error that means that the tunnel was lost.
const LOST: &str = "lost";
/// Message of an error that means that the link to the owner was lost.
const NODE_LOST: &str = "node lost";
/// Message of an overload that means that the node is not sure to own the service. A node of the
/// previous version takes it for an overload.
const SUSPENDED: &str = "suspended";

pub(crate) fn read_refusal(refusal: &Refusal) -> Refused {
    let message = printable(&refusal.message, limits::AGENT_MESSAGE);
    if &refusal.code[..] == NOT_OWNER.as_bytes() {
        let (epoch, waited) = message.split_once(' ').unwrap_or((&message, ""));
        return Refused::NotOwner {
            epoch: epoch.parse().unwrap_or(0),
            waited: parse_millis(waited),
        };
    }
    if &refusal.code[..] == ENDING.as_bytes() {
        return Refused::Ending {
            waited: parse_millis(&message),
        };
    }
    if &refusal.code[..] == WAITS.as_bytes() {
        return Refused::Waits;
    }
    Refused::Error(error(&refusal.code, &message).unwrap_or(Error::TunnelProtocol))
}

/// The error with this code and message; `None` if an owner does not answer with it.
fn error(code: &[u8], message: &str) -> Option<Error> {
    Some(match ErrorCode::parse(std::str::from_utf8(code).ok()?)? {
        ErrorCode::RateLimitExceeded => Error::RateLimited {
            retry_after: message
                .parse()
                .map_or(Duration::from_secs(1), Duration::from_micros),
        },
        ErrorCode::AuthModeNotAllowed => Error::AuthModeNotAllowed(
            [auth::TOKENS, auth::KEYS]
                .into_iter()
                .find(|kind| *kind == message)?,
        ),
        ErrorCode::CredentialRevoked => Error::CredentialRevoked,
        ErrorCode::ServiceKeyInvalid => Error::ServiceKeyInvalid,
        ErrorCode::ServiceKeyNotAllowed => Error::ServiceKeyNotAllowed,
        ErrorCode::ServiceNotFound => Error::ServiceNotFound,
        ErrorCode::ServiceDisabled => Error::ServiceDisabled,
        ErrorCode::HeadersTooLarge => {
            Error::HeadersTooLarge(InvalidHead::HeadTooLarge(frame::REQUEST_HEAD.head))
        }
        ErrorCode::AgentUnavailable => Error::AgentUnavailable,
        ErrorCode::Overloaded if message == SUSPENDED => Error::NodeUnavailable,
        ErrorCode::Overloaded => Error::Overloaded(Overload::from_owner(message)),
        ErrorCode::RelayError if message == LOST => Error::TunnelLost,
        ErrorCode::RelayError if message == NODE_LOST => Error::NodeLost,
        ErrorCode::AgentConcurrencyLimit
        | ErrorCode::BackendUnreachable
        | ErrorCode::BackendTls
        | ErrorCode::BackendReset
        | ErrorCode::BackendInvalidResponse => {
            Error::from_agent(AgentErrorCode::parse(code), message)
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use gw_shared::tunnel::response::InvalidResponse;

    use super::*;

    fn passed_on(refused: &Refused, timing: Option<AgentTiming>) -> (Refused, Option<AgentTiming>) {
        let mut payload = Vec::new();
        write_refusal(&mut payload, timing, refused);
        let refusal = head::parse_refusal(payload.into()).unwrap();
        (
            read_refusal(&refusal),
            self::timing(refusal.timing, Duration::from_secs(60)),
        )
    }

    #[test]
    fn every_answer_of_an_owner_passes_unchanged() {
        let errors = [
            Error::RateLimited {
                retry_after: Duration::from_micros(1_234_567),
            },
            Error::AuthModeNotAllowed(auth::KEYS),
            Error::AuthModeNotAllowed(auth::TOKENS),
            Error::CredentialRevoked,
            Error::ServiceKeyInvalid,
            Error::ServiceKeyNotAllowed,
            Error::ServiceNotFound,
            Error::ServiceDisabled,
            Error::HeadersTooLarge(InvalidHead::HeadTooLarge(frame::REQUEST_HEAD.head)),
            Error::AgentUnavailable,
            Error::NodeUnavailable,
            Error::TunnelLost,
            Error::NodeLost,
            Error::TunnelProtocol,
            Error::AgentConcurrencyLimit,
            Error::from_agent(Some(AgentErrorCode::BackendTls), "unknown issuer"),
            Error::from_agent(Some(AgentErrorCode::BackendUnreachable), "refused"),
            Error::from_agent(Some(AgentErrorCode::BackendReset), "closed"),
            Error::invalid_response(InvalidResponse::Malformed),
        ];
        let timing = Some(AgentTiming {
            agent_us: 5,
            backend_first_byte_us: Some(70),
        });
        for error in errors
            .into_iter()
            .chain(Overload::of_owners().map(Error::Overloaded))
        {
            let (passed, _) = passed_on(&Refused::Error(error.clone()), None);
            assert_eq!(passed, Refused::Error(error));
        }
        for waited in [
            None,
            Some(Duration::ZERO),
            Some(Duration::from_millis(4_321)),
        ] {
            let epoch = u64::MAX;
            let (passed, _) = passed_on(&Refused::NotOwner { epoch, waited }, None);
            assert_eq!(passed, Refused::NotOwner { epoch, waited });
            let (passed, _) = passed_on(&Refused::Ending { waited }, None);
            assert_eq!(passed, Refused::Ending { waited });
        }
        assert_eq!(passed_on(&Refused::Waits, None).0, Refused::Waits);
        assert_eq!(
            passed_on(&Refused::Error(Error::AgentUnavailable), timing).1,
            timing
        );
    }

    #[test]
    fn other_codes_are_errors_of_the_protocol() {
        for code in ["", "GW_X", "GW_MISDIRECTED", "GW_AUTH_MODE_NOT_ALLOWED"] {
            let refusal = Refusal {
                timing: AgentTiming::default(),
                unsent: false,
                code: Bytes::copy_from_slice(code.as_bytes()),
                message: Bytes::from_static(b"text"),
            };
            assert_eq!(
                read_refusal(&refusal),
                Refused::Error(Error::TunnelProtocol),
                "{code}"
            );
        }
    }

    #[test]
    fn principals_pass_and_others_are_refused() {
        let fields = |value: &'static str| -> Fields {
            std::iter::once((PRINCIPAL, HeaderValue::from_static(value))).collect()
        };
        for by in [
            Principal::Client(ClientId::random()),
            Principal::ServiceKey(KeyId::random()),
            Principal::Admin,
        ] {
            let mut request = OutboundRequest {
                method: http::Method::GET,
                target: http::uri::PathAndQuery::from_static("/"),
                authority: http::uri::Authority::from_static("a"),
                headers: Fields::new(),
                framing: Framing::None,
                upgrade: None,
                caller_connection: None,
            };
            put_principal(&mut request, &by);
            assert_eq!(take_principal(&mut request.headers), Some(by));
            let waited = Some(Duration::from_millis(1_500));
            put_waited(&mut request, waited);
            put_waited(&mut request, waited);
            assert_eq!(take_waited(&mut request.headers), waited);
            put_waited(&mut request, waited);
            put_waited(&mut request, None);
            assert!(request.headers.is_empty());
        }
        for value in ["", "admin x", "key", "key ../x", "client", "other x"] {
            assert_eq!(take_principal(&mut fields(value)), None, "{value}");
        }
    }

    #[test]
    fn notices_carry_the_tunnel() {
        let agent = AgentId::random();
        let now = Instant::now();
        let failed_attempts: Box<[_]> = AttemptFailure::ALL
            .into_iter()
            .rev()
            .take(3)
            .map(|reason| FailedAttempt {
                agent: (reason != AttemptFailure::NodeLost).then(AgentId::random),
                reason,
                took: Duration::from_micros(1_500),
            })
            .collect();
        let stream = Some(OpenedStream {
            at: now,
            agent: agent.clone(),
        });
        let passed_on = |stream: Option<OpenedStream>, failed_attempts: &[FailedAttempt]| {
            let mut out = Vec::new();
            let failed_attempts = failed_attempts.into();
            write_notice(
                &mut out,
                &Progress {
                    stream,
                    failed_attempts,
                    ..Progress::default()
                },
            );
            let headers = head::parse_interim(&out.into()).unwrap().headers;
            read_notice(&headers, now + Duration::from_secs(1))
        };
        let notice = passed_on(stream.clone(), &[]).unwrap();
        let opened = notice.opened.unwrap();
        assert!(opened.agent == agent && opened.at <= now + Duration::from_secs(1));
        assert!(notice.failed_attempts.is_empty());
        assert_eq!(
            passed_on(stream, &failed_attempts).unwrap().failed_attempts,
            failed_attempts
        );
        assert_eq!(
            passed_on(None, &failed_attempts).unwrap().failed_attempts,
            failed_attempts
        );
        assert!(passed_on(None, &[]).is_none());
        assert!(read_notice(&Fields::new(), now).is_none());
    }

    #[test]
    fn long_bodies_and_upgrades_wait_for_acceptance() {
        let least = u64::from(window::LEAST);
        for (framing, waits) in [
            (Framing::None, false),
            (Framing::Length(0), false),
            (Framing::Length(least), false),
            (Framing::Length(least + 1), true),
            (Framing::Chunked, true),
        ] {
            let none = Fields::new();
            assert_eq!(
                waits_for_acceptance(framing, false, &none),
                waits,
                "{framing:?}"
            );
            assert!(waits_for_acceptance(framing, true, &none));
            let expects =
                std::iter::once((header::EXPECT, HeaderValue::from_static("100-continue")))
                    .collect();
            assert_eq!(
                waits_for_acceptance(framing, false, &expects),
                framing.has_body()
            );
        }
    }
}
