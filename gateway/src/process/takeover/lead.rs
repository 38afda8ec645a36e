//! The successor's threads while the predecessor drains.

use std::convert::Infallible;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, at, bounded, never, select};

use super::channel::Channel;
use super::message::TakeoverMessage;
use super::{LINE_MAX, TakeoverError};
use crate::control::{Control, MissingChanges};
use crate::limits;
use crate::ownership;
use crate::rate_limit::{PredecessorCharge, levels};
use crate::store::{History, Position, Step};
use crate::worker::{self, Peers};

/// Shortest time between two copies of all records.
const RECORDS_INTERVAL: Duration = Duration::from_millis(100);
/// Most steps in one message.
const PART_STEPS: usize = 1024;
/// Longest message with several steps. A longer one would delay answers, which follow it.
const PART_BYTES: u64 = 1024 * 1024;

/// Starts threads that send changes after `position` to the predecessor, or all records if it is `None`, and admit its
/// requests. Sends the workers [`worker::WorkerMessage::Levels`], which they wait for. The returned channel disconnects
/// when the predecessor has ended.
pub(super) fn lead(
    channel: Channel,
    position: Option<Position>,
    control: &Arc<Control>,
    peers: &Arc<Peers>,
) -> Result<Receiver<Infallible>, TakeoverError> {
    let socket = channel.socket().try_clone()?;
    let (replies, answers) = bounded(limits::CHARGES);
    let (alive, ended) = bounded::<Infallible>(0);
    let reading = Arc::clone(control);
    let workers = Arc::clone(peers);
    std::thread::Builder::new()
        .name("gw-predecessor".to_owned())
        .spawn(move || {
            let error = receive_from_predecessor(channel, &replies, &reading, &workers);
            tracing::info!(%error, "the predecessor has ended");
            drop(alive);
        })?;
    let control = Arc::clone(control);
    let predecessor = ended.clone();
    std::thread::Builder::new().name("gw-changes".to_owned()).spawn(move || {
        let mut sender = Sending::new(&socket, &control, answers, position);
        if let Err(error) = sender.run(&predecessor) {
            tracing::warn!(%error, "cannot send changes to the predecessor: it accepts no more requests");
            sender.fail(&error);
        }
        // Ends the other thread too.
        let _ = socket.shutdown(Shutdown::Both);
        control.keep_no_changes();
    })?;
    Ok(ended)
}

fn receive_from_predecessor(
    mut channel: Channel,
    replies: &Sender<TakeoverMessage>,
    control: &Control,
    peers: &Peers,
) -> TakeoverError {
    let levels = match channel.receive() {
        Ok(TakeoverMessage::Levels { levels }) => Ok(levels::bounded(levels)),
        Ok(other) => Err(TakeoverError::Unexpected(format!("{other:?}"))),
        Err(error) => Err(error),
    };
    let (levels, failed) = match levels {
        Ok(levels) => (levels, None),
        Err(error) => {
            tracing::warn!(%error, "the predecessor sent no levels of rate limits: all limits start full");
            (Vec::new(), Some(error))
        }
    };
    let levels = Arc::new(levels);
    peers.tell_all(|| worker::WorkerMessage::Levels(Arc::clone(&levels)));
    if let Some(error) = failed {
        // The predecessor sees the end and accepts no more requests.
        let _ = channel.socket().shutdown(Shutdown::Both);
        return error;
    }
    if let Err(error) = channel.socket().set_read_timeout(None) {
        return error.into();
    }
    loop {
        match channel.receive() {
            Ok(TakeoverMessage::Charge { number, service }) => {
                let owner = ownership::owner(
                    format!("{service}.{}", control.region().apex()),
                    control.workers(),
                );
                let replies = replies.clone();
                let answer = Box::new(move |wait: Option<Duration>| {
                    let wait_ms = wait.map(|wait| {
                        u64::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(u64::MAX)
                    });
                    // Fails if the predecessor has ended.
                    let _ = replies.try_send(TakeoverMessage::Charged { number, wait_ms });
                });
                peers.tell(
                    owner,
                    worker::WorkerMessage::ChargeForPredecessor(Box::new(PredecessorCharge {
                        service,
                        answer,
                    })),
                );
            }
            Ok(other) => return TakeoverError::Unexpected(format!("{other:?}")),
            Err(error) => return error,
        }
    }
}

/// The sending end of the exchange.
struct Sending<'a> {
    socket: &'a UnixStream,
    control: &'a Control,
    /// Answers to requests of the predecessor.
    answers: Receiver<TakeoverMessage>,
    /// Position that the predecessor has reached; `None` if it reads no changes.
    position: Option<Position>,
    /// Messages that are not written yet.
    lines: Vec<u8>,
    /// Longest message. The predecessor reads no longer one.
    line_max: u64,
}

impl<'a> Sending<'a> {
    fn new(
        socket: &'a UnixStream,
        control: &'a Control,
        answers: Receiver<TakeoverMessage>,
        position: Option<Position>,
    ) -> Self {
        Self {
            socket,
            control,
            answers,
            position,
            lines: Vec::new(),
            line_max: LINE_MAX,
        }
    }

    /// Sends changes and answers until the predecessor has ended, or this process gets no changes any more.
    fn run(&mut self, ended: &Receiver<Infallible>) -> Result<(), TakeoverError> {
        let Some(changed) = self.control.watch_changes() else {
            return Ok(());
        };
        let interval = if self.position.is_some() {
            Duration::ZERO
        } else {
            RECORDS_INTERVAL
        };
        if let Some(position) = self.position.clone() {
            self.send_change(&position, &[])?;
        }
        // The records may have changed since the predecessor closed the store.
        let mut due = Some(Instant::now());
        let mut sent = None;
        loop {
            let timer = due.map_or_else(never, at);
            select! {
                recv(self.answers) -> answer => {
                    let Ok(answer) = answer else { return Ok(()) };
                    answer.write_to(&mut self.lines)?;
                    self.flush()?;
                }
                recv(changed) -> changed => {
                    if changed.is_err() {
                        return Ok(());
                    }
                    let earliest = sent.map_or_else(Instant::now, |sent: Instant| sent + interval);
                    due.get_or_insert(earliest);
                }
                recv(timer) -> _ => {
                    self.send_news()?;
                    (due, sent) = (None, Some(Instant::now()));
                }
                recv(ended) -> _ => return Ok(()),
            }
        }
    }

    /// Sends what the predecessor does not know yet. Fails if it cannot know it: the exchange has to end then.
    fn send_news(&mut self) -> Result<(), TakeoverError> {
        let Some(mut position) = self.position.clone() else {
            let records = self.control.records().into_vec();
            TakeoverMessage::Records { records }.write_within(&mut self.lines, self.line_max)?;
            return self.flush();
        };
        loop {
            let changes = match self.control.changes_after(&position)? {
                History::Changes(changes) if changes.is_empty() => break,
                History::Changes(changes) => changes,
                History::Forgotten | History::Replaced => {
                    return Err(MissingChanges {
                        after: position.revision,
                    }
                    .into());
                }
            };
            for (next, steps) in changes {
                self.send_change(&next, &steps)?;
                position = next;
            }
        }
        self.position = Some(position);
        Ok(())
    }

    /// Sends a change that leads to `position`, in as many messages as it takes. Answers go between them.
    fn send_change(&mut self, position: &Position, steps: &[Step]) -> Result<(), TakeoverError> {
        let mut rest = steps;
        loop {
            let (part, later) = rest.split_at(rest.len().min(PART_STEPS));
            rest = later;
            self.write_part(part, rest.is_empty().then_some(position))?;
            self.flush()?;
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    fn write_part(
        &mut self,
        steps: &[Step],
        position: Option<&Position>,
    ) -> Result<(), TakeoverError> {
        let most = if steps.len() > 1 {
            PART_BYTES
        } else {
            self.line_max
        };
        let message = TakeoverMessage::Change {
            steps: steps.to_vec(),
            position: position.cloned(),
        };
        match message.write_within(&mut self.lines, most) {
            Err(TakeoverError::TooLong) if steps.len() > 1 => {
                let (first, second) = steps.split_at(steps.len() / 2);
                self.write_part(first, None)?;
                self.write_part(second, position)
            }
            written => written,
        }
    }

    /// Writes `lines` with the answers that already wait.
    fn flush(&mut self) -> Result<(), TakeoverError> {
        while let Ok(answer) = self.answers.try_recv() {
            answer.write_to(&mut self.lines)?;
        }
        self.socket.write_all(&self.lines)?;
        self.lines.clear();
        Ok(())
    }

    /// Tells the predecessor why it gets nothing any more.
    fn fail(&mut self, error: &TakeoverError) {
        self.lines.clear();
        // If this fails, the predecessor still sees that the exchange ends.
        let _ = TakeoverMessage::Failed {
            reason: error.to_string(),
        }
        .write_to(&mut self.lines);
        let _ = self.socket.write_all(&self.lines);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::os::unix::net::UnixStream;

    use gw_shared::id::AccountId;
    use tempfile::TempDir;

    use super::super::{Predecessor, Successor};
    use super::*;
    use crate::clock::Timestamp;
    use crate::config::Config;
    use crate::hostname::Region;
    use crate::mailbox::{Inbox, mailbox};
    use crate::rate_limit::SuccessorBuckets;
    use crate::store::{
        AccountRecord, AuditEntry, Revision, SqliteStore, Store, StoreSource, StoredRecord,
    };
    use crate::worker::WorkerMessage;

    /// The control plane of a process, and the mailbox of its only worker.
    struct Process {
        control: Arc<Control>,
        peers: Arc<Peers>,
        worker: Inbox<WorkerMessage>,
    }

    fn start(folder: &TempDir) -> Process {
        let (mailbox, worker) = mailbox(64);
        let peers = Peers::new(vec![mailbox]);
        let config = Config::new(Region::new("eu1", "gw.localhost"), folder.path().to_owned());
        Process {
            control: Arc::new(Control::open(&config, peers.clone()).unwrap()),
            peers,
            worker,
        }
    }

    impl Process {
        /// Waits until the worker gets a message for which `holds`.
        fn is_told(&self, holds: impl Fn(&WorkerMessage) -> bool) {
            while !holds(&self.worker.next()) {}
        }

        fn is_told_to_end(&self) {
            self.is_told(|message| matches!(message, WorkerMessage::End));
        }

        /// Waits until the records have reached `revision`.
        fn has_reached(&self, revision: Revision) {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .build()
                .unwrap();
            let mut applied = self.control.applied_revision();
            runtime
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
            let (_, charges) = SuccessorBuckets::new();
            // Fails if the successor has ended the exchange already.
            if successor
                .follow(Vec::new(), charges, &self.control, &self.peers)
                .is_err()
            {
                self.peers.tell_all(|| WorkerMessage::End);
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
            created_at: Timestamp(1),
        })
    }

    fn accounts(process: &Process) -> Vec<AccountId> {
        process.control.records().accounts.into_keys().collect()
    }

    fn channels() -> (Channel, Predecessor) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (
            Channel::new(ours).unwrap(),
            Predecessor::new(Channel::new(theirs).unwrap()),
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
            new.create_account("early");
            predecessor.serving(&new.control, &new.peers).unwrap();
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
        first.is_told_to_end();
        second.is_told_to_end();
    }

    #[test]
    fn a_predecessor_that_misses_a_change_ends() {
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
        first.is_told_to_end();
        assert_eq!(accounts(&first), []);
        assert_eq!(accounts(&second).len(), 2);
    }

    #[test]
    fn a_predecessor_of_another_database_ends() {
        let [folder, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let first = start(&folder);
        let same = start(&other);
        assert_eq!(first.control.revision(), same.control.revision());
        drop(same);
        let _second = take_over(&first, &other, || ());
        first.is_told_to_end();
    }

    #[test]
    fn a_predecessor_without_a_position_gets_all_records() {
        let folder = tempfile::tempdir().unwrap();
        let (channel, mut predecessor) = channels();
        let mut channel = channel;
        channel
            .socket_mut()
            .write_all(
                b"{\"type\":\"store\",\"tunnels\":{}}\n{\"type\":\"levels\",\"levels\":[]}\n",
            )
            .unwrap();
        predecessor.take_store().unwrap();
        let new = start(&folder);
        predecessor.serving(&new.control, &new.peers).unwrap();
        channel.expect(&TakeoverMessage::Ready).unwrap();
        channel.expect(&TakeoverMessage::Serving).unwrap();
        let mut received = |name: &str| loop {
            let TakeoverMessage::Records { records } = channel.receive().unwrap() else {
                panic!("all records")
            };
            let is_in = |record: &StoredRecord| matches!(record, StoredRecord::Account(found) if found.id.as_str() == name);
            if name.is_empty() || records.iter().any(is_in) {
                return;
            }
        };
        received("");
        new.create_account("acme");
        received("acme");
    }

    #[test]
    fn records_that_do_not_fit_into_a_message_end_the_exchange_with_an_older_predecessor() {
        let folder = tempfile::tempdir().unwrap();
        let new = start(&folder);
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (_replies, answers) = bounded(1);
        let (_alive, ended) = bounded(0);
        let mut sending = Sending::new(&ours, &new.control, answers, None);
        sending.line_max = 100;
        let error = sending.run(&ended).unwrap_err();
        assert!(matches!(error, TakeoverError::TooLong), "{error}");
        sending.fail(&error);
        let reason = Channel::new(theirs).unwrap().receive().unwrap_err();
        assert!(
            matches!(&reason, TakeoverError::Failed(reason) if reason.contains("longer than")),
            "{reason}"
        );
    }

    #[test]
    fn a_change_of_any_size_is_sent_in_parts_and_applied_as_one() {
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
            StoredRecord::ServiceKey(crate::store::CallerSecretRecord {
                id: gw_shared::id::KeyId::random(),
                access: crate::store::SecretAccess {
                    account: account.id,
                    name: None,
                    secret: gw_shared::identity::secret::SecretHash::of("x"),
                    allowed_services: services,
                    enabled: true,
                    created_at: Timestamp(1),
                },
            })
        };
        let records: Vec<_> = (0..100)
            .map(long)
            .chain((0..5000).map(|number| account(&text(number))))
            .collect();
        let steps: Vec<_> = records.iter().cloned().map(Step::Put).collect();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (_replies, answers) = bounded(1);
        let receiving = std::thread::spawn(move || {
            let mut channel = Channel::new(theirs).unwrap();
            let mut parts = 0;
            let mut received = 0;
            loop {
                let TakeoverMessage::Change { steps, position } = channel.receive().unwrap() else {
                    panic!()
                };
                (parts, received) = (parts + 1, received + steps.len());
                if position.is_some() {
                    return (parts, received);
                }
            }
        });
        Sending::new(&ours, &second.control, answers, None)
            .send_change(&Position::default(), &steps)
            .unwrap();
        let (parts, received) = receiving.join().unwrap();
        assert!(parts >= 8, "{parts}");
        assert_eq!(received, steps.len());

        first.has_reached(second.control.revision());
        while first.worker.try_next().is_some() {}
        second.control.put_all(&records).unwrap();
        first.has_reached(second.control.revision());
        let ours = first.control.records();
        assert_eq!((ours.service_keys.len(), ours.accounts.len()), (100, 5001));
        // One new directory for the whole change.
        assert!(matches!(
            first.worker.try_next(),
            Some(WorkerMessage::Directory(_))
        ));
        assert!(first.worker.try_next().is_none());
    }
}
