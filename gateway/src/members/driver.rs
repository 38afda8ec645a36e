//! The loop that runs the membership of this node: carries the statements of [`Membership`] to PostgreSQL, its messages
//! to other nodes and its views to the workers.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TrySendError, bounded, select, unbounded};
use gw_shared::files;
use tokio::sync::oneshot;

pub(crate) use super::outbox::Delivery;
use super::messages::StateMessage;
use super::outbox::Outbox;
use crate::control::{Control, ViewApplied};
use crate::rate_limit::Level;
use crate::region::{
    Action, AdmissionLease, Call, CallResult, Event, Member, Membership, NodeConfig, NodeSlot, NodeState, PeerState,
    RegionStatus, StopReason, View,
};
use crate::store::PostgresStore;

/// File in the data folder with the slot of this node, so that it keeps its slot over a restart.
const SLOT_FILE: &str = "node-slot";
/// Longest wait for the last messages before the membership ends.
const LAST_MESSAGES: Duration = Duration::from_secs(1);
/// Longest wait for an answer of the loop.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// Sends messages to other nodes without waiting.
pub(crate) trait Messenger: Send {
    /// Reports the outcome to `inputs`.
    fn send(&self, to: &Member, message: StateMessage, inputs: &RegionInputs);
}

/// What the loop starts with.
pub(crate) struct MembersSetup {
    pub(crate) control: Arc<Control>,
    pub(crate) store: PostgresStore,
    pub(crate) node: NodeConfig,
    pub(crate) lease: Arc<AdmissionLease>,
    pub(crate) messenger: Box<dyn Messenger>,
    pub(crate) data_dir: PathBuf,
}

enum Input {
    Event(Event),
    /// A message of a node whose slot and session were checked. The sender is dropped when the levels are in use.
    Message(StateMessage, oneshot::Sender<()>),
    Delivered { to: Member, delivery: Delivery },
    Status(Sender<RegionStatus>),
    Leave,
    End,
}

/// Where other threads tell the loop what happened. Cheap to clone; never blocks.
#[derive(Clone)]
pub(crate) struct RegionInputs(Sender<Input>);

impl RegionInputs {
    /// A peer names a later epoch.
    pub(crate) fn hint(&self, epoch: u64) {
        self.send(Input::Event(Event::Hint { epoch }));
    }

    /// Passes on the message of a node whose slot and session were checked. The returned channel ends when the message
    /// was used.
    pub(crate) fn message(&self, message: StateMessage) -> oneshot::Receiver<()> {
        let (used, until_used) = oneshot::channel();
        self.send(Input::Message(message, used));
        until_used
    }

    pub(crate) fn delivered(&self, to: Member, delivery: Delivery) {
        self.send(Input::Delivered { to, delivery });
    }

    /// The region as this node sees it; `None` if the loop does not answer.
    pub(crate) fn status(&self) -> Option<RegionStatus> {
        let (reply, answer) = bounded(1);
        self.send(Input::Status(reply));
        answer.recv_timeout(ANSWER_WITHIN).ok()
    }

    fn send(&self, input: Input) {
        // Fails when the loop has ended. Unbounded: each sender waits for its answer before it sends again, or has one
        // input at most under way for each node.
        let _ = self.0.send(input);
    }
}

/// The running loop. Ends when this is dropped, without leaving the region.
pub(crate) struct Members {
    inputs: RegionInputs,
    stopped: Receiver<StopReason>,
    thread: Option<JoinHandle<()>>,
}

impl Members {
    /// Starts the loop. The node joins the region; it serves other nodes already.
    pub(crate) fn start(setup: MembersSetup) -> io::Result<Self> {
        let MembersSetup { control, store, mut node, lease, messenger, data_dir } = setup;
        let slot_file = data_dir.join(SLOT_FILE);
        node.slot = read_slot(&slot_file)?;
        let (sender, inputs) = unbounded();
        let sender = RegionInputs(sender);
        // One call at a time.
        let (calls, waiting) = bounded(1);
        let results = sender.clone();
        std::thread::Builder::new()
            .name("gw-nodes-table".to_owned())
            .spawn(move || serve_calls(store, &waiting, &results))?;
        let (stopped, stop) = bounded(1);
        let driver = Driver {
            machine: Membership::new(node, Instant::now()),
            known_slot: None,
            control,
            lease,
            slot_file,
            calls,
            inputs,
            sender: sender.clone(),
            publications: Publications::new(),
            outbox: Outbox::default(),
            messenger,
            stopped,
        };
        let thread = std::thread::Builder::new().name("gw-members".to_owned()).spawn(move || driver.run())?;
        Ok(Self { inputs: sender, stopped: stop, thread: Some(thread) })
    }

    pub(crate) fn inputs(&self) -> &RegionInputs {
        &self.inputs
    }

    /// Resolves when the membership has ended by itself: the node was drained, or another process took its slot.
    pub(crate) fn stopped(&self) -> &Receiver<StopReason> {
        &self.stopped
    }

    /// Leaves the region: the services of this node move to other nodes. Returns when they have, or after `within`.
    pub(crate) fn leave(&self, within: Duration) {
        self.inputs.send(Input::Leave);
        match self.stopped.recv_timeout(within) {
            Ok(_) | Err(RecvTimeoutError::Disconnected) => {}
            Err(RecvTimeoutError::Timeout) => {
                tracing::warn!("the node has not left the region in time: the others notice that it has ended");
            }
        }
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        self.inputs.send(Input::End);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of the membership panicked");
        }
    }
}

/// Runs statements until the loop ends.
fn serve_calls(mut store: PostgresStore, calls: &Receiver<Call>, results: &RegionInputs) {
    let mut has_failed = false;
    for Call { id, statement } in calls {
        let result = match store.run(&statement) {
            Ok((applied, roster)) => CallResult::Done { applied, roster },
            Err(error) => {
                if !std::mem::replace(&mut has_failed, true) {
                    tracing::warn!(%error, "cannot reach the table of nodes: working with the known members");
                }
                results.send(Input::Event(Event::Result { call: id, result: CallResult::Failed }));
                continue;
            }
        };
        if std::mem::replace(&mut has_failed, false) {
            tracing::info!("the table of nodes is reached again");
        }
        results.send(Input::Event(Event::Result { call: id, result }));
    }
}

fn read_slot(path: &Path) -> io::Result<Option<NodeSlot>> {
    if !path.exists() {
        return Ok(None);
    }
    let text = files::read_text(path)?;
    let slot = text.trim().parse().ok().and_then(NodeSlot::new);
    let problem = || format!("{}: {:?} is not a slot from 0 to {}", path.display(), text.trim(), NodeSlot::MAX);
    slot.map(Some).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, problem()))
}

struct Driver {
    machine: Membership,
    /// The slot in the file.
    known_slot: Option<NodeSlot>,
    control: Arc<Control>,
    lease: Arc<AdmissionLease>,
    slot_file: PathBuf,
    calls: Sender<Call>,
    inputs: Receiver<Input>,
    sender: RegionInputs,
    publications: Publications,
    outbox: Outbox,
    messenger: Box<dyn Messenger>,
    stopped: Sender<StopReason>,
}

impl Driver {
    fn run(mut self) {
        self.machine.on(Instant::now(), Event::Ready);
        let mut stop = None;
        loop {
            let reason = self.act();
            if let Some(reason) = reason {
                stop = Some((reason, Instant::now() + LAST_MESSAGES));
            }
            self.lease.set(self.machine.admit_until());
            if let Some((reason, until)) = stop
                && (self.outbox.is_idle() || Instant::now() >= until)
            {
                stop = None;
                let _ = self.stopped.try_send(reason);
            }
            let now = Instant::now();
            let deadline = self.machine.next_deadline().into_iter().chain(stop.map(|(_, until)| until)).min();
            let wait = deadline.map_or(ANSWER_WITHIN, |deadline| deadline.saturating_duration_since(now));
            select! {
                recv(self.inputs) -> input => match input {
                    Ok(Input::End) | Err(_) => return self.lease.set(None),
                    Ok(input) => self.on(input),
                },
                recv(self.publications.applied) -> applied => applied.into_iter().for_each(|applied| self.applied(applied)),
                default(wait) => {}
            }
        }
    }

    /// Does what the machine asks for. Returns the reason once the membership has ended.
    fn act(&mut self) -> Option<StopReason> {
        let revision = u64::try_from(self.control.revision().0).unwrap_or(0);
        self.machine.on(Instant::now(), Event::Revision(revision));
        if self.machine.state() == Some(NodeState::Draining) {
            self.machine.on(Instant::now(), Event::HandedOver);
        }
        let mut stop = None;
        while let Some(action) = self.machine.poll(Instant::now()) {
            match action {
                Action::Call(call) => self.call(call),
                Action::Publish(view) => self.publish(view),
                Action::Tell(state) => self.tell(&state),
                Action::Stop(reason) => {
                    tracing::warn!(?reason, "this node has left its region");
                    stop = Some(reason);
                }
            }
        }
        stop
    }

    fn on(&mut self, input: Input) {
        let now = Instant::now();
        match input {
            Input::Event(event) => self.machine.on(now, event),
            Input::Message(StateMessage { state, levels }, used) => {
                if !levels.is_empty() {
                    self.control.publish_levels(&Arc::new(levels));
                }
                self.machine.on(now, Event::Peer(state));
                drop(used);
            }
            Input::Delivered { to, delivery } => self.delivered(&to, delivery, now),
            Input::Status(reply) => {
                let revision = u64::try_from(self.control.revision().0).unwrap_or(0);
                let directory = self.control.directory();
                let hostnames = directory.services().map(|service| &*service.hostname);
                // Fails if the answer comes too late.
                let _ = reply.try_send(self.machine.status(now, revision, hostnames));
            }
            Input::Leave => self.machine.leave(),
            Input::End => {}
        }
    }

    fn call(&self, call: Call) {
        if let Err(TrySendError::Full(call) | TrySendError::Disconnected(call)) = self.calls.try_send(call) {
            // An earlier call has not ended yet.
            self.sender.send(Input::Event(Event::Result { call: call.id, result: CallResult::Failed }));
        }
    }

    fn publish(&mut self, view: Arc<View>) {
        self.keep_slot(view.placement().here());
        log_view(&view);
        let epoch = view.epoch();
        let (number, applied) = self.publications.begin(Arc::clone(&view), self.control.workers());
        if let Err(error) = self.control.publish_view(number, &view, self.machine.session(), &applied) {
            tracing::error!(%error, epoch, "the workers cannot use the members of this epoch");
        }
    }

    fn keep_slot(&mut self, slot: NodeSlot) {
        if self.known_slot == Some(slot) {
            return;
        }
        match files::write_private(&self.slot_file, format!("{}\n", slot.get()).as_bytes()) {
            Ok(()) => self.known_slot = Some(slot),
            Err(error) => tracing::error!(path = %self.slot_file.display(), %error, "cannot store the slot of this node"),
        }
    }

    fn applied(&mut self, applied: ViewApplied) {
        let now = Instant::now();
        let Some((view, is_last)) = self.publications.applied(applied.number) else { return };
        for level in applied.levels {
            let hostname = format!("{}.{}", level.service, self.control.region().apex());
            if let Some(owner) = view.placement().owning_member(&hostname) {
                self.outbox.add_level(owner.session, level, now);
            }
        }
        if is_last {
            self.machine.on(now, Event::Applied { epoch: view.epoch() });
        }
    }

    fn tell(&mut self, state: &PeerState) {
        let rows = &state.roster.rows;
        self.outbox.retain(|session| rows.iter().any(|row| row.session == session));
        for row in rows.iter().filter(|row| row.session != state.session && !row.state.is_over()) {
            self.send(&row.member(), state);
        }
    }

    fn send(&mut self, to: &Member, state: &PeerState) {
        if let Some(message) = self.outbox.message(to, state, Instant::now()) {
            self.messenger.send(to, message, &self.sender);
        }
    }

    fn delivered(&mut self, to: &Member, delivery: Delivery, now: Instant) {
        let (waiting, has_gone) = self.outbox.ended(to.session, delivery);
        if has_gone {
            tracing::warn!(node = to.slot.get(), address = %to.peer_address, "another node does not listen any more");
            self.machine.on(now, Event::Refused { slot: to.slot, session: to.session });
        }
        if let Some((to, state)) = waiting {
            self.send(&to, &state);
        }
    }
}

fn log_view(view: &View) {
    let members: Vec<u16> = view.placement().members().iter().map(|member| member.slot.get()).collect();
    let node = view.placement().here().get();
    tracing::info!(node, epoch = view.epoch(), ?members, moving = view.is_moving(), "members of the region");
}

/// Views that not all workers use yet, the oldest first.
struct Publications {
    next: u64,
    sender: Sender<ViewApplied>,
    applied: Receiver<ViewApplied>,
    open: VecDeque<Publication>,
}

struct Publication {
    number: u64,
    view: Arc<View>,
    workers_left: usize,
}

impl Publications {
    fn new() -> Self {
        let (sender, applied) = unbounded();
        Self { next: 1, sender, applied, open: VecDeque::new() }
    }

    /// Returns the number of the publication, and where the workers answer.
    fn begin(&mut self, view: Arc<View>, workers: usize) -> (u64, Sender<ViewApplied>) {
        let number = self.next;
        self.next += 1;
        self.open.push_back(Publication { number, view, workers_left: workers });
        (number, self.sender.clone())
    }

    /// One worker uses the view with this number. Returns the view, and whether all workers use it now.
    fn applied(&mut self, number: u64) -> Option<(Arc<View>, bool)> {
        let publication = self.open.iter_mut().find(|open| open.number == number)?;
        publication.workers_left = publication.workers_left.saturating_sub(1);
        let (view, is_last) = (Arc::clone(&publication.view), publication.workers_left == 0);
        if is_last {
            // Each worker uses views in order.
            self.open.retain(|open| open.number > number);
        }
        Some((view, is_last))
    }
}
