//! The successor's side while the predecessor drains: it sends changes, and admits the
//! predecessor's requests.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use crate::limits;
use crossbeam_channel::{Receiver, bounded};
use gw_base::process::background::{self, Tasks};
use gw_control_plane::control::{Control, ForFollower, MissingChanges};
use gw_data_plane::worker::{WorkerHandles, WorkerMessage};
use gw_interface::rate_limit::{ChargeAnswer, Level, PredecessorCharge, levels};
use gw_region::owners::ownership;
use gw_store::{History, Position, Revision, StoreError};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::channel::{Channel, MessageReader, MessageWriter};
use super::message::TakeoverMessage;
use super::{TakeoverError, start_exchange};

/// Starts a thread that sends changes after `position` to the predecessor and admits its requests.
/// It sends the workers [`WorkerMessage::Levels`], which they wait for. The returned channel
/// disconnects when the predecessor has ended.
pub(super) fn start(
    tasks: &Tasks,
    channel: Channel,
    position: Position,
    control: Arc<Control>,
    handles: Arc<WorkerHandles>,
) -> Result<Receiver<Infallible>, TakeoverError> {
    let (alive, ended) = bounded(0);
    let predecessor = rustix::process::getppid();
    start_exchange(tasks, channel, move |tasks, mut reader, mut writer| {
        let exchange = || {
            let levels = tasks.block_until_stopped(levels(&mut reader))?;
            let levels = Arc::new(levels.unwrap_or_else(|error| {
                tracing::warn!(%error,
                    "the predecessor sent no levels of rate limits: all limits start full");
                Vec::new()
            }));
            handles.tell_all(|| WorkerMessage::Levels(Arc::clone(&levels)));
            // Before the task starts: this may read the store, which blocks.
            let first = control.changes_for_follower(&position);
            let apex = control.region().apex();
            tasks.block_until_stopped(async {
                let led = lead(&mut reader, &mut writer, position, first, apex, &handles);
                let Err(error) = led.await;
                end(&mut writer, &error).await;
            })
        };
        background::contained("the exchange with the predecessor", exchange);
        drop((reader, writer));
        // Until its end the predecessor may serve callers by earlier records, or those of another
        // history.
        control.acknowledge(Revision(0));
        while rustix::process::getppid() == predecessor && !tasks.stopping().is_cancelled() {
            std::thread::sleep(Duration::from_millis(100));
        }
        control.keep_no_changes();
        handles.keep_links(Vec::new());
        drop(alive);
    })?;
    Ok(ended)
}

async fn levels(reader: &mut MessageReader) -> Result<Vec<Level>, TakeoverError> {
    match timeout(limits::TAKEOVER_STEP, reader.next()).await {
        Ok(Ok(TakeoverMessage::Levels { levels })) => Ok(levels::bounded(levels)),
        Ok(Ok(other)) => Err(other.unexpected()),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(TakeoverError::Silent),
    }
}

/// Exchanges messages until the predecessor has ended, or cannot be told of all changes any more.
async fn lead(
    reader: &mut MessageReader,
    writer: &mut MessageWriter,
    position: Position,
    first: Result<(History, ForFollower), StoreError>,
    apex: &str,
    handles: &WorkerHandles,
) -> Result<Infallible, TakeoverError> {
    let (answers, mut answered) = mpsc::channel(limits::CHARGES);
    let (first, later) = first?;
    let mut changed = later.watch_changes().ok_or(TakeoverError::FollowsNone)?;
    let mut news = News::after(position);
    news.add(first)?;
    loop {
        news.write_to(writer, &later)?;
        tokio::select! {
            message = reader.next() => match message? {
                TakeoverMessage::Charge { number, service } => {
                    let answers = answers.clone();
                    admit(PredecessorCharge { service, number, answers }, apex, handles);
                }
                TakeoverMessage::Applied { revision } => later.acknowledge(revision),
                other => return Err(other.unexpected()),
            },
            Some(ChargeAnswer { number, wait }) = answered.recv() => {
                let wait_ms = wait.map(|wait| {
                    u64::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(u64::MAX)
                });
                writer.push(&TakeoverMessage::Answer { number, wait_ms })?;
            }
            change = changed.changed() => {
                change.map_err(|_| TakeoverError::FollowsNone)?;
                news.is_due = true;
            }
            sent = writer.send(), if writer.has_unsent() => sent?,
        }
    }
}

/// Leaves a request of the predecessor for the worker that owns its service.
fn admit(charge: PredecessorCharge, apex: &str, handles: &WorkerHandles) {
    let host = format!("{}.{apex}", charge.service);
    let owner = ownership::owner(host, handles.mailboxes.len());
    handles.tell(owner, WorkerMessage::ChargeForPredecessor(Box::new(charge)));
}

/// Tells the predecessor why it gets nothing any more.
async fn end(writer: &mut MessageWriter, error: &TakeoverError) {
    if matches!(error, TakeoverError::Ended) {
        return tracing::info!("the predecessor has ended");
    }
    tracing::warn!(%error,
        "the exchange with the predecessor ends: changes are pending at this node until it has \
         ended");
    let reason = error.to_string();
    let sent = timeout(limits::TAKEOVER_STEP, async {
        writer.push(&TakeoverMessage::End { reason })?;
        while writer.has_unsent() {
            writer.send().await?;
        }
        Ok::<_, TakeoverError>(())
    });
    // If this fails, the predecessor still sees the end of the channel.
    let _ = sent.await;
}

/// What the predecessor does not know yet.
struct News {
    /// Position that the predecessor reaches with `messages`.
    position: Position,
    messages: VecDeque<TakeoverMessage>,
    /// The records may have changed after `position`.
    is_due: bool,
}

impl News {
    fn after(position: Position) -> Self {
        Self {
            position,
            messages: VecDeque::new(),
            // The records may have changed since `changed` was subscribed to.
            is_due: true,
        }
    }

    /// Adds messages to `writer` while it has room. Answers that come later go between them.
    fn write_to(
        &mut self,
        writer: &mut MessageWriter,
        later: &ForFollower,
    ) -> Result<(), TakeoverError> {
        while writer.has_room() {
            if let Some(message) = self.messages.pop_front() {
                writer.push(&message)?;
            } else if std::mem::take(&mut self.is_due) {
                self.add(later.changes_after(&self.position))?;
            } else {
                break;
            }
        }
        Ok(())
    }

    fn add(&mut self, history: History) -> Result<(), TakeoverError> {
        let History::Changes(changes) = history else {
            let after = self.position.revision;
            return Err(MissingChanges { after }.into());
        };
        self.is_due |= !changes.is_empty();
        for (position, steps) in changes {
            let steps = steps.into_iter().map(|step| TakeoverMessage::Step { step });
            self.messages.extend(steps);
            self.position = position.clone();
            self.messages
                .push_back(TakeoverMessage::Change { position });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::os::unix::net::UnixStream;

    use futures_util::FutureExt;
    use gw_base::clock::Timestamp;
    use gw_base::mailbox::{Inbox, mailbox};
    use gw_base::process::background::Background;
    use gw_base::service::hostname::Region;
    use gw_data_plane::worker::WorkerMessage;
    use gw_interface::config::Config;
    use gw_interface::rate_limit::SuccessorBuckets;
    use gw_shared::id::AccountId;
    use gw_store::{
        AccountRecord, AuditEntry, SqliteStore, Step, Store, StoreSource, StoredRecord,
    };
    use tempfile::TempDir;
    use tokio::runtime::{Builder, Runtime};

    use super::super::{Predecessor, Successor};
    use super::*;

    /// The control plane of a process, and the mailbox of its only worker.
    struct Process {
        control: Arc<Control>,
        handles: Arc<WorkerHandles>,
        worker: Inbox<WorkerMessage>,
        background: Background,
    }

    fn runtime() -> Runtime {
        Builder::new_current_thread().build().unwrap()
    }

    fn start(folder: &TempDir) -> Process {
        let (mailbox, worker) = mailbox(64);
        let handles = WorkerHandles::new(vec![mailbox]);
        let background = Background::start().unwrap();
        let config = Config::new(Region::new("eu1", "gw.localhost"), folder.path().to_owned());
        Process {
            control: Arc::new(Control::open(&config, handles.clone(), background.tasks()).unwrap()),
            handles,
            worker,
            background,
        }
    }

    impl Process {
        /// Waits until this process gets no more changes.
        fn follows_no_more(&self) {
            self.control.acknowledge(Revision(0));
            runtime().block_on(self.control.followed_to(Revision(1)));
        }

        /// Waits until the records have reached `revision`.
        fn has_reached(&self, revision: Revision) {
            let mut applied = self.control.applied_revision();
            runtime()
                .block_on(applied.wait_for(|applied| *applied >= revision))
                .unwrap();
        }

        /// The predecessor's half of the exchange.
        fn hand_over(&self, channel: Channel) {
            let mut successor = Successor::without_process(channel);
            successor.wait_until_ready().unwrap();
            successor
                .give_store(BTreeMap::new(), None, self.control.position())
                .unwrap();
            let (_buckets, charges) = SuccessorBuckets::new();
            // Fails if the successor has ended the exchange already.
            let tasks = self.background.tasks();
            if successor
                .follow(Vec::new(), charges, &self.control, &tasks)
                .is_err()
            {
                self.control.keep_no_changes();
            }
        }

        fn create_account(&self, name: &str) {
            self.control.put(&account(name)).unwrap();
        }
    }

    fn account(name: &str) -> StoredRecord {
        let id = AccountId::new(name).unwrap();
        StoredRecord::Account(AccountRecord {
            id,
            capture_allowed: false,
            domains_max: Default::default(),
            created_at: Timestamp(1),
            created_ms: None,
            managed_by: None,
            later: Default::default(),
        })
    }

    fn accounts(process: &Process) -> Vec<AccountId> {
        process.control.records().accounts.into_keys().collect()
    }

    fn channels() -> (Channel, Predecessor) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (
            Channel::new(ours).unwrap(),
            Predecessor::new(Channel::new(theirs).unwrap(), Vec::new()),
        )
    }

    /// Starts a process that takes over from `old`. Calls `between` while neither has the store.
    fn take_over(old: &Process, folder: &TempDir, between: impl FnOnce()) -> Process {
        let (channel, mut predecessor) = channels();
        old.control.close_store();
        std::thread::scope(|scope| {
            scope.spawn(|| old.hand_over(channel));
            predecessor.take_store().unwrap();
            between();
            let new = start(folder);
            if let Some(revision) = predecessor.used_revision() {
                new.control.acknowledge(revision);
            }
            new.create_account("early");
            let tasks = new.background.tasks();
            predecessor
                .serving(&new.control, &new.handles, &tasks)
                .unwrap();
            new
        })
    }

    #[test]
    fn changes_reach_all_predecessors_of_a_chain() {
        let folder = tempfile::tempdir().unwrap();
        let first = start(&folder);
        first.create_account("first");
        let second = take_over(&first, &folder, || ());
        second.create_account("second");
        first.has_reached(second.control.revision());
        let third = take_over(&second, &folder, || ());
        third.create_account("third");
        for process in [&first, &second] {
            process.has_reached(third.control.revision());
            assert_eq!(accounts(process), accounts(&third));
            assert_eq!(process.control.position(), third.control.position());
        }
        // Ends the exchange, as the end of the process does.
        third.control.keep_no_changes();
        first.follows_no_more();
        second.follows_no_more();
    }

    #[test]
    fn a_change_is_followed_once_the_predecessor_uses_it() {
        let folder = tempfile::tempdir().unwrap();
        let first = start(&folder);
        let second = take_over(&first, &folder, || ());
        let runtime = runtime();
        for name in ["second", "third"] {
            second.create_account(name);
            let revision = second.control.revision();
            runtime.block_on(second.control.followed_to(revision));
            assert_eq!(first.control.revision(), revision);
        }
        let next = Revision(second.control.revision().0 + 1);
        let mut waits = Box::pin(second.control.followed_to(next));
        let is_over = waits.as_mut().now_or_never().is_some();
        assert!(!is_over, "a change that there is not");
        // No change is awaited once the predecessor has ended.
        second.control.keep_no_changes();
        runtime.block_on(waits);
    }

    #[test]
    fn a_predecessor_that_ends_at_once_has_sent_its_levels() {
        let folder = tempfile::tempdir().unwrap();
        let old = start(&folder);
        let (channel, mut predecessor) = channels();
        old.control.close_store();
        // Its threads end before they do anything.
        old.background.tasks().stopping().cancel();
        std::thread::scope(|scope| {
            scope.spawn(|| old.hand_over(channel));
            predecessor.take_store().unwrap();
            let successor = predecessor.channel().unwrap();
            let serving = TakeoverMessage::Serving { acknowledge: false };
            successor.send(&serving).unwrap();
            let levels = TakeoverMessage::Levels { levels: Vec::new() };
            successor.expect(&levels).unwrap();
        });
    }

    #[test]
    fn a_predecessor_that_misses_a_change_gets_no_later_ones() {
        let folder = tempfile::tempdir().unwrap();
        let first = start(&folder);
        let second = take_over(&first, &folder, || {
            let mut store = SqliteStore::open(&StoreSource::sqlite_in(folder.path())).unwrap();
            let entry = AuditEntry {
                at: Timestamp(1),
                actor: "test".to_owned(),
                action: "test".into(),
                account: None,
                target: String::new(),
                detail: serde_json::Value::Null,
            };
            store
                .commit(
                    &Position::default(),
                    &[Step::Put(account("missed"))],
                    &entry,
                )
                .unwrap();
        });
        first.follows_no_more();
        assert_eq!(accounts(&first), []);
        assert_eq!(accounts(&second).len(), 2);
    }

    #[test]
    fn a_predecessor_of_another_database_gets_no_changes() {
        let [folder, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let first = start(&folder);
        let same = start(&other);
        assert_eq!(first.control.revision(), same.control.revision());
        drop(same);
        let _second = take_over(&first, &other, || ());
        first.follows_no_more();
    }

    #[test]
    fn a_change_of_any_size_is_sent_in_steps_and_applied_as_one() {
        let folder = tempfile::tempdir().unwrap();
        let first = start(&folder);
        let second = take_over(&first, &folder, || ());
        // Few long records, and many short ones.
        let text = |number: usize| format!("account{number:08}");
        let long = |number| {
            let StoredRecord::Account(account) = account(&text(number)) else {
                unreachable!()
            };
            let services = (0..500)
                .map(|number| format!("{number:0>56}").parse().unwrap())
                .collect();
            StoredRecord::ServiceKey(gw_store::CallerSecretRecord {
                id: gw_shared::id::KeyId::random(),
                access: gw_store::SecretAccess {
                    account: account.id,
                    name: None,
                    secret: gw_shared::identity::secret::SecretHash::of("x"),
                    allowed_services: services,
                    enabled: true,
                    created_at: Timestamp(1),
                },
                managed_by: None,
                later: Default::default(),
            })
        };
        let records: Vec<_> = (0..100)
            .map(long)
            .chain((0..5000).map(|number| account(&text(number))))
            .collect();
        first.has_reached(second.control.revision());
        while first.worker.try_next().is_some() {}
        second.control.put_all(&records).unwrap();
        first.has_reached(second.control.revision());
        let ours = first.control.records();
        assert_eq!((ours.service_keys.len(), ours.accounts.len()), (100, 5001));
        // One new directory for the whole change.
        assert!(matches!(
            first.worker.try_next(),
            Some(WorkerMessage::Published)
        ));
        assert!(first.worker.try_next().is_none());
    }
}
