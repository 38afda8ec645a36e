//! Requests, their responses and their records.

use super::errors::{has_http2_backends, has_slots};
use super::{Checked, Records, each};
use crate::scenario::{Conduct, FaultKind, Framing, Method, Request, ResponseFault};
use crate::world::World;
use crate::world::ledger::{Attempt, Entry};

/// Agents that one request is sent to (docs/limits.md).
const AGENTS_MAX: usize = 3;
/// Connections to its backend that an agent tries for one request: a kept one may be closed.
const CONNECTIONS_MAX: usize = 2;

/// A caller learns how its request ended.
pub(super) fn every_request_ends(world: &World) -> Checked {
    each(world, "every request ends", |_, entry| {
        entry
            .seen
            .ended
            .is_none()
            .then(|| "its caller still waits".to_owned())
    })
}

/// A response is the one that the backend gave to this request, or an error of the gateway.
pub(super) fn response_is_that_of_the_request(world: &World) -> Checked {
    each(
        world,
        "a response belongs to its request",
        |request, entry| {
            let seen = &entry.seen;
            let status = seen.status?;
            match (seen.answer_to, &seen.own_error) {
                (Some(id), _) if id != request.id => {
                    Some(format!("got the response to request {id}"))
                }
                (Some(_), Some(error)) => Some(format!("the response of the backend has {error}")),
                (Some(_), None) if entry.attempts.is_empty() => {
                    Some("got a response that no backend gave".to_owned())
                }
                (Some(_), None) if status != request.response.status && status != 101 => {
                    Some(format!("status {status}"))
                }
                (Some(_), None) if seen.body.is_foreign => {
                    Some("got bytes of another body".to_owned())
                }
                (None, None) => Some(format!("status {status} without X-Gw-Status")),
                _ => None,
            }
        },
    )
}

/// The backend receives what the caller sent, up to where the upload was cut.
pub(super) fn upload_arrives_unchanged(world: &World) -> Checked {
    each(world, "an upload arrives unchanged", |request, entry| {
        let length = request.upload.map_or(0, |upload| upload.length);
        entry.attempts.iter().find_map(|attempt| {
            let upload = attempt.upload;
            let is_whole = upload.length == length || may_end_early(world, request, attempt);
            if upload.is_foreign {
                Some("other bytes arrived at the backend".to_owned())
            } else if attempt.upload_is_complete && !is_whole {
                Some(format!(
                    "a cut upload of {} bytes looked complete",
                    upload.length
                ))
            } else {
                None
            }
        })
    })
}

/// Whether the backend of an upgraded connection may take a cut for the end: bytes without framing
/// end as the connection does.
fn may_end_early(world: &World, request: &Request, attempt: &Attempt) -> bool {
    // When a process ends, the kernel ends its connections as if they were complete.
    let ends_agent = |kind: &FaultKind| match kind {
        FaultKind::KillAgent { agent, .. }
        | FaultKind::DrainAgent { agent, .. }
        | FaultKind::CopyAgent { agent, .. } => *agent == attempt.agent,
        _ => false,
    };
    let mut faults = world.scenario.faults.iter();
    let is_echo = request.method == Method::Upgrade && !is_in_halves(request);
    is_echo || is_in_halves(request) && faults.any(|fault| ends_agent(&fault.kind))
}

/// A request that is not idempotent reaches one backend at most. Others reach as many agents as the
/// gateway may try, each of which may try a second connection.
pub(super) fn unsafe_requests_arrive_once(world: &World) -> Checked {
    each(world, "a POST is not doubled", |request, entry| {
        let most = match request.method {
            Method::Post => 1,
            _ => AGENTS_MAX * CONNECTIONS_MAX,
        };
        // A node that is lost may have sent the head of a request whose body it has not accepted:
        // the backend has no request.
        let has_head_only = |attempt: &&Attempt| {
            world.scenario.nodes > 1 && !attempt.upload_is_complete && attempt.upload.length == 0
        };
        let whole = entry
            .attempts
            .iter()
            .filter(|attempt| !has_head_only(attempt));
        let arrivals = whole.count();
        (arrivals > most).then(|| format!("it reached backends {arrivals} times"))
    })
}

/// A response that looks complete has all bytes that the backend gave.
pub(super) fn complete_responses_are_whole(world: &World) -> Checked {
    each(world, "a complete response is whole", |request, entry| {
        let seen = &entry.seen;
        if !seen.is_complete || seen.answer_to.is_none() {
            return None;
        }
        let response = &request.response;
        let is_cut = matches!(
            response.fault,
            ResponseFault::ClosesInBody | ResponseFault::ResetsInBody
        );
        let has_body = request.method != Method::Head && response.status != 204;
        // The end of the connection is the end of such a body. A backend that answers early ends
        // its direction itself.
        let is_undetectable = response.framing == Framing::Close
            && (response.fault == ResponseFault::ClosesInBody || response.is_early);
        if is_in_halves(request) && !is_cut && !was_killed(world, entry) {
            (seen.body.length != request.response.length)
                .then(|| format!("{} bytes after the switch", seen.body.length))
        } else if request.method == Method::Upgrade {
            None
        } else if !has_body {
            (seen.body.length > 0).then(|| "it has a body".to_owned())
        } else if is_cut && !is_undetectable && response.length > 0 {
            Some("the backend cut it".to_owned())
        } else if seen.body.length != response.length
            && !is_cut
            && !(response.framing == Framing::Close && was_killed(world, entry))
        {
            Some(format!("{} of {} bytes", seen.body.length, response.length))
        } else {
            None
        }
    })
}

/// Whether a backend that got the request was killed before the end of its response. The kernel
/// ends its connections as the process would.
fn was_killed(world: &World, entry: &Entry) -> bool {
    let faults = &world.scenario.faults;
    entry.attempts.iter().any(|attempt| {
        let kills = |kind: &FaultKind| {
            matches!(
                kind,
                FaultKind::KillBackend { agent, .. } if *agent == attempt.agent
            )
        };
        attempt.answered.is_none() && faults.iter().any(|fault| kills(&fault.kind))
    })
}

/// A service key opens nothing once the change that disabled it is answered, whatever the workers
/// did meanwhile.
pub(super) fn disabled_keys_are_refused(world: &World) -> Checked {
    let disabled = world.disabled.borrow();
    each(world, "a disabled key is refused at once", |_, entry| {
        let began = entry.seen.began?;
        let arrived = entry.attempts.first()?.at;
        let was_disabled = disabled.iter().any(|(service, since, until)| {
            *service == entry.seen.service
                && began > *since
                && until.is_none_or(|until| arrived < until)
        });
        was_disabled.then(|| "it reached a backend".to_owned())
    })
}

/// Codes of requests that were opened on no tunnel, for want of one.
const NOT_OPENED: [&str; 2] = ["AGENT_UNAVAILABLE", "GW_NODE_UNAVAILABLE"];
/// Time within which a request that waits is opened once its service has a tunnel with room: those
/// before it go first.
const OPENED_WITHIN: u64 = 1_500_000_000;

/// A request that waits, wherever it does, is opened once its service has a tunnel with room.
pub(super) fn waiting_requests_are_opened(world: &World) -> Checked {
    let records = Records::of(world);
    let happened = world.happened.borrow();
    // These lose links, lines and messages of workers.
    let may_be_lost = |from: u64, to: u64| {
        happened.iter().any(|one| {
            let concerns_workers = matches!(
                one.fault,
                FaultKind::FreezeWorker { .. }
                    | FaultKind::PanicWorker { .. }
                    | FaultKind::KillGateway { .. }
                    | FaultKind::CutNodes { .. }
            );
            concerns_workers && one.began <= to && one.ended.is_none_or(|ended| ended >= from)
        })
    };
    let served = world.served.borrow();
    each(
        world,
        "a waiting request is opened once there is a tunnel",
        |request, Entry { seen, .. }| {
            let code = records.sole(request.id)?.code?;
            let (began, ended) = (seen.began?, seen.answered?);
            if !NOT_OPENED.contains(&code) || may_be_lost(began, ended) {
                return None;
            }
            let from = ended.saturating_sub(OPENED_WITHIN);
            let mut within = served.range(from..ended).peekable();
            within.peek()?;
            let had_tunnel = began < from && within.all(|(_, services)| services[seen.service]);
            had_tunnel.then(|| format!("{code}, with a tunnel since {from} at the latest"))
        },
    )
}

/// Longest time until the first byte of an answer while two nodes are cut off from each other:
/// agents whose tunnels pass the cut connect again after nine seconds.
const PAST_CUT_WITHIN: u64 = 13_000_000_000;

/// While two of three nodes are cut off from each other, requests go by the third: those that begin
/// once the tunnels do not pass the cut are answered, and none waits for long.
pub(super) fn a_cut_between_nodes_is_passed(world: &World) -> Checked {
    let scenario = &world.scenario;
    let happened = world.happened.borrow();
    let [cut] = &happened[..] else {
        return Ok(());
    };
    let is_cut = matches!(cut.fault, FaultKind::CutNodes { .. });
    let admits_all = |service: &crate::scenario::Service| {
        service.burst as usize >= scenario.requests() && service.retries
    };
    if !is_cut || scenario.nodes < 3 || !scenario.services.iter().all(admits_all) {
        return Ok(());
    }
    each(world, "a cut between nodes is passed", |request, entry| {
        let seen = &entry.seen;
        let is_safe = matches!(request.method, Method::Get | Method::Head);
        let is_benign = request.conduct == Conduct::Patient
            && request.response.fault == ResponseFault::None
            && request.response.interim == 0;
        let is_alone = scenario.callers.get(seen.caller)?.pipelined <= 1;
        if !is_safe || !is_benign || !is_alone || !has_slots(world, seen.service) {
            return None;
        }
        let (sent, answered) = (seen.head_sent?, seen.answered?);
        let delay = (request.response.delay + scenario.delay * 20).as_nanos() as u64;
        let waited = answered.saturating_sub(sent + delay);
        let is_after = sent > cut.began + PAST_CUT_WITHIN;
        match &seen.own_error {
            _ if waited > PAST_CUT_WITHIN => Some(format!("it waited {waited} ns")),
            Some(error) if is_after => Some(format!("it failed with {error}")),
            _ => None,
        }
    })
}

/// Without faults, with room for all, each request gets the response of its backend.
pub(super) fn benign_requests_succeed(world: &World) -> Checked {
    let scenario = &world.scenario;
    let slots: u32 = scenario
        .agents
        .iter()
        .map(|agent| agent.slots)
        .min()
        .unwrap_or(0);
    let at_once: usize = scenario.callers.iter().map(|caller| caller.at_once).sum();
    let has_room = at_once <= slots as usize
        && scenario
            .services
            .iter()
            .all(|service| service.burst as usize >= scenario.requests());
    let can_be_switched = !has_http2_backends(world);
    let is_benign = |request: &Request| {
        request.conduct == Conduct::Patient
            && (can_be_switched || request.method != Method::Upgrade)
            && request.response.fault == ResponseFault::None
            && (!request.response.is_early || is_in_halves(request))
    };
    let all = scenario.callers.iter().flat_map(|caller| &caller.requests);
    if !has_room || !scenario.faults.is_empty() || !all.clone().all(is_benign) {
        return Ok(());
    }
    each(
        world,
        "without faults all requests succeed",
        |request, entry| {
            if entry.seen.answer_to.is_none() || !entry.seen.is_complete {
                return Some("no complete response of the backend".to_owned());
            }
            // A slow backend may still read at the end.
            let broken = |attempt: &&Attempt| is_in_halves(request) && attempt.upload_is_broken;
            entry.attempts.iter().find(broken).map(|attempt| {
                let received = attempt.upload.length;
                format!("the backend received {received} bytes after the switch")
            })
        },
    )
}

fn is_in_halves(request: &Request) -> bool {
    request.upload.is_some_and(|upload| upload.in_halves)
}

/// Interim responses and trailers pass in both directions (docs/http.md; RFC 9110, sections 6.5 and
/// 15.2).
pub(super) fn interim_responses_and_trailers_pass(world: &World) -> Checked {
    each(
        world,
        "interim responses and trailers pass",
        |request, Entry { seen, attempts }| {
            let response = &request.response;
            let upload_has_trailers = request.upload.is_some_and(|upload| upload.has_trailers)
                && request.method != Method::Upgrade;
            let lost_trailer = |attempt: &&Attempt| {
                attempt.upload_is_complete
                    && attempt.trailer != upload_has_trailers.then_some(request.id)
            };
            if let Some(attempt) = attempts.iter().find(lost_trailer) {
                return Some(format!("the upload has trailers of {:?}", attempt.trailer));
            }
            if seen.answer_to.is_none() || !seen.is_complete || request.method == Method::Upgrade {
                return None;
            }
            if seen.interim != u32::from(response.interim) {
                return Some(format!("{} interim responses", seen.interim));
            }
            let has_body = request.method != Method::Head && response.status != 204;
            let expected = (response.has_trailers && has_body).then_some(request.id);
            (seen.trailer != expected)
                .then(|| format!("the response has trailers of {:?}", seen.trailer))
        },
    )
}
