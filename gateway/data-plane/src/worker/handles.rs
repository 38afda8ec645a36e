//! The workers of a process, as other threads reach them.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
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
    publications: Publications,
    latest: Mutex<LatestBroadcast>,
    /// Links of the predecessor's workers for workers that start again, each with the number of its
    /// worker there.
    links: Mutex<Vec<(usize, OwnedFd)>>,
}

/// Number of publications. A worker compares it with the last one that it has used, for each
/// request: no other value shares its cache lines.
#[derive(Default)]
#[repr(align(128))]
struct Publications(AtomicU64);

/// What the control plane has published last, each with the number of its publication. Workers read
/// it: a publication waits for no worker, and a worker that is late or starts again uses the latest
/// of each kind and no older one.
#[derive(Default)]
struct LatestBroadcast {
    directory: Option<(u64, Arc<Directory>)>,
    certificates: Option<(u64, Arc<ServerConfigs>)>,
    node_tls: Option<(u64, Arc<NodeTls>)>,
    view: Option<(u64, NewView)>,
    records_read: Option<(u64, Instant)>,
}

impl LatestBroadcast {
    /// What was published after `seen`, as messages in the order in which a worker handles them.
    fn since(&self, seen: u64) -> Vec<WorkerMessage> {
        fn newer<T: Clone>(published: &Option<(u64, T)>, seen: u64) -> Option<T> {
            let (number, content) = published.as_ref()?;
            (*number > seen).then(|| content.clone())
        }
        [
            newer(&self.directory, seen).map(WorkerMessage::Directory),
            newer(&self.certificates, seen).map(WorkerMessage::Certificates),
            newer(&self.node_tls, seen).map(WorkerMessage::NodeTls),
            newer(&self.view, seen).map(|view| WorkerMessage::View(Box::new(view))),
            // Last: it says that the directory is in use.
            newer(&self.records_read, seen).map(WorkerMessage::RecordsRead),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
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
            publications: Publications::default(),
            latest: Mutex::default(),
            links: Mutex::default(),
        })
    }

    /// Keeps links of the predecessor for workers that start again, in place of those before: each
    /// with the number of its worker there.
    pub fn keep_links(&self, links: Vec<(usize, OwnedFd)>) {
        *self.links() = links;
    }

    /// Gives a worker that has started again the next links of those workers of the predecessor
    /// whose links it has served.
    pub fn link_again(&self, worker: WorkerId) {
        let mut linked = HashSet::new();
        let mut links = self.links();
        let is_next = |link: &mut (usize, OwnedFd)| {
            link.0 % self.mailboxes.len() == worker.0 && linked.insert(link.0)
        };
        for (_, link) in links.extract_if(.., is_next) {
            // A worker without room has no use for it: it does not turn.
            let _ = self.mailboxes[worker.0].post(WorkerMessage::LinkOfPredecessor(link));
        }
    }

    fn links(&self) -> MutexGuard<'_, Vec<(usize, OwnedFd)>> {
        // A single change.
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of workers that run, or are about to start again.
    pub fn running(&self) -> usize {
        self.mailboxes.len() - self.lost.load(Ordering::Relaxed)
    }

    /// What was published after the publication `seen`, only the latest of each kind, with the
    /// number of the last publication. `None` if there is nothing newer.
    pub(super) fn published_since(&self, seen: u64) -> Option<(u64, Vec<WorkerMessage>)> {
        // Ordered with the queue of a mailbox: see `publish`.
        if self.publications.0.load(Ordering::SeqCst) == seen {
            return None;
        }
        let latest = self.latest();
        let number = self.publications.0.load(Ordering::Relaxed);
        Some((number, latest.since(seen)))
    }

    /// Makes `change`, which has the number of the publication, and tells every worker to look at
    /// it. Never blocks: callers hold locks of the control plane.
    fn publish(&self, change: impl FnOnce(&mut LatestBroadcast, u64)) {
        {
            let mut latest = self.latest();
            let number = self.publications.0.load(Ordering::Relaxed) + 1;
            change(&mut latest, number);
            self.publications.0.store(number, Ordering::SeqCst);
        }
        for mailbox in &self.mailboxes {
            // A worker without room here looks before it handles the next message, and one that
            // starts again before the first.
            let _ = mailbox.post(WorkerMessage::Published);
        }
    }

    fn latest(&self) -> MutexGuard<'_, LatestBroadcast> {
        // No change can panic.
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves a message for every worker. Blocks until each has room, once those that have room
    /// have their message.
    pub fn tell_all(&self, message: impl Fn() -> WorkerMessage) {
        for (mailbox, message) in self.tell_those_with_room(message) {
            // Fails only for a worker that has ended.
            let _ = mailbox.post_blocking(message);
        }
    }

    /// Leaves a message for every worker with room for it. Returns the others.
    fn tell_those_with_room(
        &self,
        message: impl Fn() -> WorkerMessage,
    ) -> Vec<(&Mailbox<WorkerMessage>, WorkerMessage)> {
        let post = |mailbox| {
            let full = Mailbox::post(mailbox, message()).err()?;
            Some((mailbox, full))
        };
        self.mailboxes.iter().filter_map(post).collect()
    }

    /// Leaves a message for one worker. Blocks until it has room.
    pub fn tell(&self, worker: WorkerId, message: WorkerMessage) {
        if let Some(mailbox) = self.mailboxes.get(worker.0) {
            // Fails only for a worker that has ended.
            let _ = mailbox.post_blocking(message);
        }
    }

    /// Asks every worker; returns the answers that arrive in time. A worker with a full mailbox is
    /// not asked: it could not answer in time.
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
        drop(self.tell_those_with_room(|| question(reply.clone())));
        drop(reply);
        std::iter::from_fn(|| answers.recv_deadline(deadline).ok()).collect()
    }
}

impl Workers for WorkerHandles {
    fn count(&self) -> usize {
        self.mailboxes.len()
    }

    fn publish_directory(&self, directory: &Arc<Directory>) {
        self.publish(|latest, number| latest.directory = Some((number, Arc::clone(directory))));
    }

    fn publish_read(&self, began: Instant) {
        self.publish(|latest, number| latest.records_read = Some((number, began)));
    }

    fn publish_view(&self, number: u64, view: &Arc<View>, applied: &UnboundedSender<ViewApplied>) {
        let view = NewView {
            number,
            view: Arc::clone(view),
            applied: applied.clone(),
        };
        self.publish(|latest, number| latest.view = Some((number, view)));
    }

    fn publish_levels(&self, levels: &Arc<Vec<Level>>) {
        self.tell_all(|| WorkerMessage::NodeLevels(Arc::clone(levels)));
    }

    fn publish_node_tls(&self, tls: &Arc<NodeTls>) {
        self.publish(|latest, number| latest.node_tls = Some((number, Arc::clone(tls))));
    }

    fn end_connections(&self, lost: LostNode) {
        self.tell_all(|| WorkerMessage::NodeLost(lost));
    }

    fn publish_certificates(&self, certificates: &Arc<ServerConfigs>) {
        self.publish(|latest, number| {
            latest.certificates = Some((number, Arc::clone(certificates)));
        });
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

#[cfg(test)]
mod tests {
    use gw_base::mailbox::{Inbox, mailbox};

    use super::*;

    /// The directories, and whether there was anything else.
    fn directories(published: Option<(u64, Vec<WorkerMessage>)>) -> Vec<Arc<Directory>> {
        let (_, messages) = published.unwrap_or_default();
        let directory = |message| match message {
            WorkerMessage::Directory(directory) => directory,
            _ => panic!("not a directory"),
        };
        messages.into_iter().map(directory).collect()
    }

    fn two_workers() -> (Arc<WorkerHandles>, [Inbox<WorkerMessage>; 2]) {
        let (first, first_inbox) = mailbox(1);
        let (second, second_inbox) = mailbox(1);
        (
            WorkerHandles::new(vec![first, second]),
            [first_inbox, second_inbox],
        )
    }

    #[test]
    fn a_publication_waits_for_no_worker_and_a_late_worker_uses_the_latest() {
        let (handles, [hanging, other]) = two_workers();
        handles.mailboxes[0]
            .post(WorkerMessage::EndQuiet)
            .unwrap_or_else(|_| panic!("full"));
        let published: Vec<Arc<Directory>> = (0..3).map(|_| Arc::default()).collect();
        // Returns, although the first worker has no room and reads nothing.
        for directory in &published {
            handles.publish_directory(directory);
        }
        assert!(matches!(other.try_next(), Some(WorkerMessage::Published)));
        // The message before it is the last one that the hanging worker gets: it looks there.
        assert!(matches!(hanging.try_next(), Some(WorkerMessage::EndQuiet)));
        assert!(hanging.try_next().is_none());
        let used = directories(handles.published_since(0));
        assert!(matches!(&used[..], [used] if Arc::ptr_eq(used, &published[2])));
    }

    #[test]
    fn what_a_worker_has_used_is_not_used_again() {
        let (handles, _inboxes) = two_workers();
        assert!(handles.published_since(0).is_none());
        handles.publish_directory(&Arc::default());
        let (first, _) = handles.published_since(0).unwrap();
        assert!(handles.published_since(first).is_none());
        handles.publish_read(Instant::now());
        let (second, messages) = handles.published_since(first).unwrap();
        assert!(matches!(messages[..], [WorkerMessage::RecordsRead(_)]));
        // A worker that starts again uses everything, and the read last.
        let (number, messages) = handles.published_since(0).unwrap();
        assert_eq!(number, second);
        assert!(matches!(
            messages[..],
            [WorkerMessage::Directory(_), WorkerMessage::RecordsRead(_)]
        ));
    }

    #[test]
    fn a_worker_without_room_is_not_asked() {
        let (handles, [_hanging, other]) = two_workers();
        handles.mailboxes[0]
            .post(WorkerMessage::EndQuiet)
            .unwrap_or_else(|_| panic!("full"));
        let answering =
            std::thread::spawn(move || match other.next_within(Duration::from_secs(30)) {
                Some(WorkerMessage::ReportQuiet(reply)) => reply.send(true).unwrap(),
                _ => panic!("not asked"),
            });
        assert_eq!(
            handles.ask_all_within(Duration::from_secs(30), WorkerMessage::ReportQuiet),
            [true]
        );
        answering.join().unwrap();
    }
}
