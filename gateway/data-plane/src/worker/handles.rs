//! The workers of a process, as other threads reach them.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use gw_base::mailbox::{Mailbox, Post};
use gw_base::tls::ServerConfigs;
use gw_base::tls::node::NodeTls;
use gw_interface::rate_limit::Level;
use gw_interface::replay::Replay;
use gw_interface::workers::{LostNode, ViewApplied, Workers};
use gw_region::View;
use gw_region::owners::ownership::WorkerId;
use gw_store::Directory;
use gw_telemetry::counters::{Scrape, WorkerReport};
use tokio::sync::mpsc::UnboundedSender;

use super::{NewView, WorkerMessage};
use crate::apex::ApexCharge;
use crate::ingress::HandedOver;
use crate::pipe;
use crate::upstream::CrossCoreRequest;

/// Time limit for the reports of all workers.
const REPORT_WITHIN: Duration = Duration::from_secs(2);

/// Mailboxes and state of all workers of a process.
pub struct WorkerHandles {
    /// Mailbox of each worker, at the index of its id.
    pub mailboxes: Vec<Mailbox<WorkerMessage>>,
    /// Share of its time that each worker was busy lately, in per mille.
    pub busy: Arc<[AtomicU32]>,
    /// How often each worker has started again after a panic.
    pub restarts: Vec<AtomicU32>,
    /// Number of workers that have panicked and do not start again.
    pub lost: AtomicUsize,
    latest: Mutex<LatestBroadcast>,
}

/// What the control plane has told all workers last, for a worker that starts again. Not used by workers.
#[derive(Default)]
struct LatestBroadcast {
    certificates: Option<Arc<ServerConfigs>>,
    node_tls: Option<Arc<NodeTls>>,
    view: Option<(u64, Arc<View>, UnboundedSender<ViewApplied>)>,
}

impl WorkerHandles {
    /// Creates the handles of workers with these mailboxes.
    pub fn new(mailboxes: Vec<Mailbox<WorkerMessage>>) -> Arc<Self> {
        let zeros = || mailboxes.iter().map(|_| AtomicU32::default());
        let busy = zeros().collect();
        let restarts = zeros().collect();
        Arc::new(Self {
            mailboxes,
            busy,
            restarts,
            lost: AtomicUsize::new(0),
            latest: Mutex::default(),
        })
    }

    /// Number of workers that run, or are about to start again.
    pub fn running(&self) -> usize {
        self.mailboxes.len() - self.lost.load(Ordering::Relaxed)
    }

    /// What was published to all workers last, for a worker that starts again.
    pub fn published(&self) -> Vec<WorkerMessage> {
        let latest = self.latest();
        let certificates = latest.certificates.clone().map(WorkerMessage::Certificates);
        let node_tls = latest.node_tls.clone().map(WorkerMessage::NodeTls);
        let view = latest.view.clone().map(|(number, view, applied)| NewView {
            number,
            view,
            applied,
        });
        let view = view.map(|view| WorkerMessage::View(Box::new(view)));
        [certificates, node_tls, view]
            .into_iter()
            .flatten()
            .collect()
    }

    fn latest(&self) -> MutexGuard<'_, LatestBroadcast> {
        // Every write is a single assignment.
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves a message for every worker. Blocks until each has room.
    pub fn tell_all(&self, message: impl Fn() -> WorkerMessage) {
        for mailbox in &self.mailboxes {
            // Fails only for a worker that has ended.
            let _ = mailbox.post_blocking(message());
        }
    }

    /// Leaves a message for one worker. Blocks until it has room.
    pub fn tell(&self, worker: WorkerId, message: WorkerMessage) {
        if let Some(mailbox) = self.mailboxes.get(worker.0) {
            // Fails only for a worker that has ended.
            let _ = mailbox.post_blocking(message);
        }
    }

    /// Asks every worker; returns the answers that arrive in time.
    pub fn ask_all<T>(&self, question: impl Fn(Sender<T>) -> WorkerMessage) -> Vec<T> {
        self.ask_all_within(REPORT_WITHIN, question)
    }

    /// As [`Self::ask_all`], with another time limit for all answers together.
    pub fn ask_all_within<T>(
        &self,
        within: Duration,
        question: impl Fn(Sender<T>) -> WorkerMessage,
    ) -> Vec<T> {
        let deadline = Instant::now() + within;
        let (reply, answers) = crossbeam_channel::bounded(self.mailboxes.len());
        self.tell_all(|| question(reply.clone()));
        drop(reply);
        std::iter::from_fn(|| answers.recv_deadline(deadline).ok()).collect()
    }
}

impl Workers for WorkerHandles {
    fn count(&self) -> usize {
        self.mailboxes.len()
    }

    fn publish_directory(&self, directory: &Arc<Directory>) {
        self.tell_all(|| WorkerMessage::Directory(Arc::clone(directory)));
    }

    fn publish_read(&self, began: Instant) {
        self.tell_all(|| WorkerMessage::RecordsRead(began));
    }

    fn publish_view(&self, number: u64, view: &Arc<View>, applied: &UnboundedSender<ViewApplied>) {
        self.latest().view = Some((number, Arc::clone(view), applied.clone()));
        self.tell_all(|| {
            WorkerMessage::View(Box::new(NewView {
                number,
                view: Arc::clone(view),
                applied: applied.clone(),
            }))
        });
    }

    fn publish_levels(&self, levels: &Arc<Vec<Level>>) {
        self.tell_all(|| WorkerMessage::NodeLevels(Arc::clone(levels)));
    }

    fn publish_node_tls(&self, tls: &Arc<NodeTls>) {
        self.latest().node_tls = Some(Arc::clone(tls));
        self.tell_all(|| WorkerMessage::NodeTls(Arc::clone(tls)));
    }

    fn end_connections(&self, lost: LostNode) {
        self.tell_all(|| WorkerMessage::NodeLost(lost));
    }

    fn publish_certificates(&self, certificates: &Arc<ServerConfigs>) {
        self.latest().certificates = Some(Arc::clone(certificates));
        self.tell_all(|| WorkerMessage::Certificates(Arc::clone(certificates)));
    }

    fn reports(&self, with_services: bool) -> Vec<WorkerReport> {
        self.ask_all(|reply| {
            WorkerMessage::Scrape(Scrape {
                reply,
                with_services,
            })
        })
    }

    fn replay(&self, owner: WorkerId, replay: Box<Replay>) -> Result<(), Box<Replay>> {
        self.post(owner, replay)
    }
}

/// Implements [`Post`] for the content of one kind of message.
macro_rules! post {
    ($content:ty, $variant:ident) => {
        impl Post<$content> for WorkerHandles {
            fn post(&self, worker: WorkerId, content: $content) -> Result<(), $content> {
                match self.mailboxes[worker.0].post(WorkerMessage::$variant(content)) {
                    Err(WorkerMessage::$variant(content)) => Err(content),
                    Ok(()) | Err(_) => Ok(()),
                }
            }
        }
    };
}

post!(Box<HandedOver>, Connection);
post!(Box<CrossCoreRequest>, Relay);
post!(Box<Replay>, Replay);
post!(Box<ApexCharge>, ChargeApex);
post!(pipe::Wake, Wake);
