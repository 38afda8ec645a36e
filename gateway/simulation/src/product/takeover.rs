//! The end of a process of a gateway: a drain, and the takeover by another process, as
//! `gateway/src/process/stop` and `gateway/src/process/takeover` do them. The channel between the
//! two processes is left out, and so are the links of their workers.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use gw_data_plane::worker::{Succeeded, WorkerMessage};
use gw_interface::limits;
use gw_interface::rate_limit::{
    ChargeAnswer, Level, PredecessorCharge, SuccessorBuckets, SuccessorCharge,
};
use gw_region::owners::ownership;
use gw_shared::runtime;
use gw_simulated_kernel::{Host, sockets};
use gw_telemetry::counters::WorkerReport;
use tokio::sync::{mpsc, oneshot};

use super::gateway::Publisher;

/// Interval between checks for the end of the last request.
const DRAIN_TICK: Duration = Duration::from_millis(20);
/// Time for agents to end their tunnels.
const TUNNELS_END: Duration = Duration::from_secs(2);
/// Longest time that the successor may owe an answer.
const CHARGED_WITHIN: Duration = Duration::from_secs(2);
/// Interval between checks that it answers.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// What a process leaves to the next one.
#[derive(Debug, Clone, Default)]
pub struct LastStop {
    /// Levels of the buckets that are not full.
    pub levels: Vec<Level>,
    /// Number of tunnels, by label of their service.
    pub tunnels: BTreeMap<String, usize>,
}

/// Ends a process: it accepts no more connections, serves those that are open for at most `within`,
/// tells the agents to end their tunnels, and stops its workers. `has_successor` tells that another
/// process has [taken over](take_over).
pub async fn drain(
    gateway: &Publisher,
    has_successor: bool,
    within: Duration,
) -> io::Result<LastStop> {
    let tunnels = live_tunnels(gateway).await?;
    gateway.tell_all(|| WorkerMessage::Drain {
        successor: has_successor,
    })?;
    let is_idle = |report: &WorkerReport| {
        report.connections == 0 && report.crossings_served == 0 && report.node_requests == 0
    };
    let began = Instant::now();
    while !all_report(gateway, is_idle).await? && began.elapsed() < within {
        if !has_successor {
            let quiet = gateway.ask_all(WorkerMessage::ReportQuiet).await?;
            if !quiet.contains(&false) {
                gateway.tell_all(|| WorkerMessage::EndQuiet)?;
            }
        }
        runtime::sleep(DRAIN_TICK).await;
    }
    gateway.tell_all(|| WorkerMessage::End)?;
    let began = Instant::now();
    let has_no_tunnel = |report: &WorkerReport| report.tunnels.is_empty();
    while !all_report(gateway, has_no_tunnel).await? && began.elapsed() < TUNNELS_END {
        runtime::sleep(DRAIN_TICK).await;
    }
    let levels = if has_successor {
        Vec::new()
    } else {
        gateway.ask_all(WorkerMessage::ReportLevels).await?.concat()
    };
    gateway.tell_all(|| WorkerMessage::Stop)?;
    Ok(LastStop { levels, tunnels })
}

/// Whether `holds` for all workers, twice in a row: one check misses a connection that moves from
/// one worker to another.
async fn all_report(
    gateway: &Publisher,
    holds: impl Fn(&WorkerReport) -> bool,
) -> io::Result<bool> {
    for _ in 0..2 {
        if !gateway.reports(false).await?.iter().all(&holds) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Number of tunnels that take requests, by label of their service: what the next process expects
/// back.
pub async fn live_tunnels(gateway: &Publisher) -> io::Result<BTreeMap<String, usize>> {
    let mut tunnels = BTreeMap::new();
    let reports = gateway.reports(false).await?;
    for tunnel in reports.into_iter().flat_map(|report| report.tunnels) {
        if !tunnel.draining {
            *tunnels.entry(tunnel.service).or_default() += 1;
        }
    }
    let awaited = gateway.ask_all(WorkerMessage::ReportAwaited).await?;
    for service in awaited.into_iter().flatten() {
        tunnels.entry(service).or_insert(1);
    }
    Ok(tunnels)
}

/// Links the workers of `predecessor`, whose hosts are those of `from`, with those of `successor`,
/// whose hosts are those of `to`. Moves the buckets of `predecessor` to `successor`, whose workers
/// wait for their levels. From then on the successor admits the requests of both, while the
/// returned future runs. It ends with the predecessor, or when the successor does not answer. The
/// predecessor has yet to [`drain`].
pub async fn take_over(
    (predecessor, from): (&Publisher, &[Host]),
    (successor, to): (&Publisher, &[Host]),
) -> io::Result<Pin<Box<dyn Future<Output = io::Result<()>>>>> {
    for (worker, host) in from.iter().enumerate() {
        let of_successor = worker % to.len();
        let [ours, theirs] = link([*host, to[of_successor]])?;
        successor.tell(of_successor, WorkerMessage::LinkOfPredecessor(theirs))?;
        predecessor.tell(worker, WorkerMessage::LinkToSuccessor(ours))?;
    }
    let (buckets, charges) = SuccessorBuckets::new();
    let succeeded = |levels| {
        WorkerMessage::Succeeded(Box::new(Succeeded {
            buckets: buckets.clone(),
            levels,
        }))
    };
    let levels = Arc::new(predecessor.ask_all(succeeded).await?.concat());
    successor.tell_all(|| WorkerMessage::Levels(Arc::clone(&levels)))?;
    Ok(Box::pin(admit(charges, successor.clone())))
}

/// A pair of Unix sockets, one of each host.
fn link(hosts: [Host; 2]) -> io::Result<[OwnedFd; 2]> {
    let ends = sockets::pair(hosts).map_err(io::Error::from_raw_os_error)?;
    #[expect(unsafe_code, reason = "the simulated kernel gives plain numbers")]
    // SAFETY: the kernel has just opened the descriptors for this call.
    Ok(ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) }))
}

/// Leaves the charges of the predecessor to the workers of the successor that own the services.
async fn admit(charges: mpsc::Receiver<SuccessorCharge>, successor: Publisher) -> io::Result<()> {
    let (answers, mut answered) = mpsc::channel(limits::CHARGES);
    // In their order, so that they also end in it.
    let mut pending = BTreeMap::new();
    // Dropped before `pending`, so that pending requests see that the exchange has ended.
    let mut charges = charges;
    for number in 0.. {
        let Some(charge) = next(&mut charges, &mut answered, &mut pending).await else {
            break;
        };
        let charge = match charge {
            Ok(charge) => charge,
            // As the end of the exchange between the two processes.
            Err(Silent) => return Ok(()),
        };
        let service = charge.service.to_string();
        let (since, reply) = (Instant::now(), charge.reply);
        pending.insert(number, Pending { since, reply });
        let owner = ownership::owner(successor.hostname(&service), successor.workers());
        let charge = PredecessorCharge {
            service,
            number,
            answers: answers.clone(),
        };
        successor.tell(
            owner.0,
            WorkerMessage::ChargeForPredecessor(Box::new(charge)),
        )?;
    }
    Ok(())
}

/// The successor does not answer.
struct Silent;

/// A charge without an answer.
struct Pending {
    since: Instant,
    reply: oneshot::Sender<Option<Duration>>,
}

/// Passes answers on until the next charge; `None` once the predecessor has ended.
async fn next(
    charges: &mut mpsc::Receiver<SuccessorCharge>,
    answered: &mut mpsc::Receiver<ChargeAnswer>,
    pending: &mut BTreeMap<u64, Pending>,
) -> Option<Result<SuccessorCharge, Silent>> {
    loop {
        let mut check = pin!(runtime::sleep(CHECK_INTERVAL));
        let charge = std::future::poll_fn(|cx| {
            while let Poll::Ready(Some(ChargeAnswer { number, wait })) = answered.poll_recv(cx) {
                if let Some(Pending { reply, .. }) = pending.remove(&number) {
                    // Fails if the request was dropped.
                    let _ = reply.send(wait);
                }
            }
            match charges.poll_recv(cx) {
                Poll::Ready(charge) => Poll::Ready(Some(charge)),
                Poll::Pending => check.as_mut().poll(cx).map(|()| None),
            }
        })
        .await;
        if let Some(charge) = charge {
            return charge.map(Ok);
        }
        let is_late = |charge: &Pending| charge.since.elapsed() > CHARGED_WITHIN;
        if pending.values().any(is_late) {
            return Some(Err(Silent));
        }
    }
}
