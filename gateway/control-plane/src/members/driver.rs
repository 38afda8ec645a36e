//! The task that runs the membership of this node: carries the statements of [`Membership`] to
//! PostgreSQL, its messages to other nodes and its views to the workers.
//!
//! A turn of its loop may block: it writes a file, and waits for room in the mailboxes of the
//! workers. It runs as [`block_in_place`], so that other tasks go on meanwhile. Statements have a
//! thread of their own: a lease ends within seconds, and must not wait for a thread that blocks for
//! another purpose.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::limits;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TrySendError, bounded};
use gw_base::clock::ClockDifference;
use gw_base::process::background;
use gw_base::process::background::Tasks;
use gw_interface::workers::ViewApplied;
use gw_region::{
    Call, CallResult, CarriedMembership, Isolation, Member, Membership, MembershipAction,
    MembershipEvent, NodeConfig, NodeMessage, NodeRow, NodeSlot, NodeState, RegionSignals,
    Statement, StopReason, View,
};
use gw_store::{PostgresStore, StoreError};
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::block_in_place;
use tokio::time::timeout;

use super::clock_gate::ClockGate;
use super::inputs::{ANSWER_WITHIN, RegionInput, RegionInputs};
use super::messages::StateMessage;
use super::messenger;
use super::node_file::NodeFile;
use super::outbox::{Delivery, MessageOutbox};
use super::pending::DeadNodes;
use super::probes::Probes;
use super::publications::Publications;
use super::refusals::{RefusalChange, SessionRefusals};
use crate::control::Control;

/// Longest wait for the last messages before the membership ends.
const LAST_MESSAGES: Duration = Duration::from_secs(1);
/// Least time between two messages to all nodes because of a broken link.
const TELL_AGAIN: Duration = Duration::from_millis(50);
/// Name of the task.
const NAME: &str = "the membership";
/// What the loop starts with.
pub struct MembersSetup {
    /// Tasks of the process, which the loop joins.
    pub tasks: Tasks,
    /// Control plane of this process.
    pub control: Arc<Control>,
    /// Database that the nodes of the region share.
    pub store: PostgresStore,
    /// What the node is told about itself.
    pub node: NodeConfig,
    /// Membership that an earlier process has handed over.
    pub carried: Option<CarriedMembership>,
    /// Lease of this node, and what its workers learn from other nodes.
    pub signals: Arc<RegionSignals>,
    /// Data folder, with the file of the node.
    pub data_dir: PathBuf,
    /// Called when the node has a slot, and again if it gets another.
    pub on_slot: Box<dyn Fn(NodeSlot) + Send>,
}

/// The running loop. Ends when this is dropped, without leaving the region.
pub struct Members {
    inputs: RegionInputs,
    stopped: Receiver<StopReason>,
    ended: Arc<Notify>,
    tasks: Tasks,
}

impl Members {
    /// Starts the loop. The node joins the region; it serves other nodes already.
    pub fn start(setup: MembersSetup) -> io::Result<Self> {
        let MembersSetup {
            tasks,
            control,
            mut store,
            mut node,
            carried,
            signals,
            data_dir,
            on_slot,
        } = setup;
        let file = NodeFile::open(&data_dir)?;
        node.slot = file.slot();
        let carried = carried.or_else(|| membership_in(&file, &mut store));
        let max_staleness = match node.isolation {
            Isolation::Serve => None,
            Isolation::Refuse { max_staleness } => Some(max_staleness),
        };
        let now = Instant::now();
        let machine = match carried {
            Some(carried) => Membership::resume(node, carried, now),
            None => Membership::new(node, now),
        };
        let (sender, inputs) = unbounded_channel();
        let sender = RegionInputs(sender);
        // One call at a time.
        let (calls, waiting) = bounded(1);
        let results = sender.clone();
        tasks.thread("gw-nodes-table", move || {
            serve_calls(store, &waiting, &results);
        })?;
        let (stopped, stop) = bounded(1);
        let ended = Arc::new(Notify::new());
        let driver = MembershipLoop {
            tasks: tasks.clone(),
            machine,
            file,
            last_told: None,
            on_slot,
            slot: None,
            control,
            signals,
            named_epoch: 0,
            went_back: false,
            calls,
            inputs,
            sender: sender.clone(),
            publications: Publications::new(),
            outbox: MessageOutbox::new(max_staleness),
            dead: DeadNodes::default(),
            refusals: SessionRefusals::default(),
            probes: Probes::default(),
            clock_gate: ClockGate::default(),
            stop: None,
            stopped,
            ended: Arc::clone(&ended),
        };
        tasks.spawn(NAME, driver.run_contained(Arc::clone(&ended)));
        Ok(Self {
            inputs: sender,
            stopped: stop,
            ended,
            tasks,
        })
    }

    /// Passes events and messages to the loop.
    pub fn inputs(&self) -> &RegionInputs {
        &self.inputs
    }

    /// Notified when the membership has ended by itself: the node was drained, another process took
    /// its slot, or the task panicked.
    pub fn ended(&self) -> &Arc<Notify> {
        &self.ended
    }

    /// Whether the membership has ended without a reason: its task panicked. Asked once, after
    /// [`Self::ended`].
    pub fn has_failed(&self) -> bool {
        self.stopped.try_recv().is_err()
    }

    /// Ends the loop without leaving the region. Returns what another process needs to continue;
    /// until then this process admits by the members that it knows.
    pub fn hand_over(self) -> Option<CarriedMembership> {
        let (reply, answer) = bounded(1);
        self.inputs.send(RegionInput::HandOver(reply));
        answer.recv_timeout(ANSWER_WITHIN).ok().flatten()
    }

    /// Leaves the region: the services of this node move to other nodes. Returns when they have, or
    /// after `within`.
    pub fn leave(&self, within: Duration) {
        self.inputs.send(RegionInput::Leave);
        match self.stopped.recv_timeout(within) {
            Ok(_) | Err(RecvTimeoutError::Disconnected) => {}
            Err(RecvTimeoutError::Timeout) => {
                tracing::warn!(
                    "the node has not left the region in time: the others notice that it has ended"
                );
            }
        }
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        self.tasks.stop(limits::MEMBERSHIP_END);
    }
}

/// Runs statements until the loop ends.
fn serve_calls(mut store: PostgresStore, calls: &Receiver<Call>, results: &RegionInputs) {
    let mut has_failed = false;
    for Call { id, statement } in calls {
        let is_synchronous = statement.is_synchronous();
        let run = || store.run(&statement);
        let result = background::contained("a statement on the table of nodes", run)
            .unwrap_or_else(|| {
                Err(StoreError::Corrupt(
                    "a row made the reader panic".to_owned(),
                ))
            });
        let result = match result {
            Ok((applied, roster)) => CallResult::Done { applied, roster },
            Err(error) => {
                if !std::mem::replace(&mut has_failed, true) {
                    tracing::warn!(%error,
                        "cannot reach the table of nodes: working with the known members");
                }
                results.send(RegionInput::Event(MembershipEvent::Result {
                    call: id,
                    result: CallResult::Failed,
                }));
                continue;
            }
        };
        // Reads and beats also succeed while a synchronous standby is missing.
        if has_failed && is_synchronous {
            has_failed = false;
            tracing::info!("the table of nodes is reached again");
        }
        results.send(RegionInput::Event(MembershipEvent::Result {
            call: id,
            result,
        }));
    }
}

/// The membership of the last process of this node, if the primary does not answer. Otherwise this
/// process joins with a session of its own.
fn membership_in(file: &NodeFile, store: &mut PostgresStore) -> Option<CarriedMembership> {
    let carried = file.membership()?;
    match store.run(&Statement::Read) {
        Err(error @ (StoreError::Unavailable(_) | StoreError::SeveralPrimaries(_))) => {
            tracing::error!(%error, epoch = carried.roster.epoch,
                "starting as the member that this node was");
            Some(carried)
        }
        Ok(_) | Err(_) => None,
    }
}

/// What the loop has waited for.
enum Next {
    Input(Option<RegionInput>),
    Applied(ViewApplied),
    LinkBroke,
    /// The tasks of this process stop.
    Stopping,
}

struct MembershipLoop {
    tasks: Tasks,
    machine: Membership,
    file: NodeFile,
    /// The last message to all nodes, and when it was sent.
    last_told: Option<(NodeMessage, Instant)>,
    on_slot: Box<dyn Fn(NodeSlot) + Send>,
    /// The slot that was passed to `on_slot`.
    slot: Option<NodeSlot>,
    control: Arc<Control>,
    signals: Arc<RegionSignals>,
    /// The last epoch that workers have passed on.
    named_epoch: u64,
    /// The engine's last answer was older than what this node knows.
    went_back: bool,
    calls: Sender<Call>,
    inputs: UnboundedReceiver<RegionInput>,
    sender: RegionInputs,
    publications: Publications,
    outbox: MessageOutbox,
    dead: DeadNodes,
    refusals: SessionRefusals,
    probes: Probes,
    clock_gate: ClockGate,
    /// Why the membership has ended, and until when its last messages may take, until both are
    /// told.
    stop: Option<(StopReason, Instant)>,
    stopped: Sender<StopReason>,
    ended: Arc<Notify>,
}

impl MembershipLoop {
    /// Runs, and notifies `panicked` after a panic.
    async fn run_contained(self, panicked: Arc<Notify>) {
        if background::contained_task(NAME, self.run()).await.is_none() {
            // The lease ends within seconds, and the other nodes take over.
            tracing::error!("this node stops: its membership has ended");
            panicked.notify_one();
        }
    }

    async fn run(mut self) {
        let tasks = self.tasks.clone();
        let mut next = None;
        loop {
            let wait = block_in_place(|| self.turn(next.take()));
            let event = async {
                tokio::select! {
                    input = self.inputs.recv() => Next::Input(input),
                    Some(applied) = self.publications.applied.recv() => Next::Applied(applied),
                    () = self.signals.broken_link() => Next::LinkBroke,
                    () = tasks.stopping().cancelled() => Next::Stopping,
                }
            };
            next = match timeout(wait, event).await.ok() {
                Some(Next::Stopping | Next::Input(None)) => return self.signals.set(None),
                Some(Next::Input(Some(RegionInput::HandOver(reply)))) => {
                    // The next process has the buckets: it decides for this one, too.
                    self.signals.set_endless();
                    block_in_place(|| self.keep_primaries());
                    let _ = reply.try_send(self.machine.carry(Instant::now()));
                    return;
                }
                next => next,
            };
        }
    }

    /// Handles what has happened, if anything, and does what is due. Returns the time until
    /// something else is due.
    fn turn(&mut self, next: Option<Next>) -> Duration {
        match next {
            Some(Next::Input(Some(input))) => self.on(input),
            Some(Next::Applied(applied)) => self.applied(applied),
            Some(Next::LinkBroke) => self.tell_again(),
            Some(Next::Input(None) | Next::Stopping) | None => {}
        }
        if self.clock_gate.opens(ClockDifference::now()) {
            self.machine.on(Instant::now(), MembershipEvent::Ready);
        }
        if let Some(reason) = self.act() {
            self.stop = Some((reason, Instant::now() + LAST_MESSAGES));
        }
        self.signals.set(self.machine.admit_until());
        self.signals
            .set_suspended(self.machine.is_stale(Instant::now()));
        self.keep_primaries();
        self.log_went_back();
        let probe_due = self
            .probes
            .run(&self.tasks, &self.machine, &self.control, &self.sender);
        if let Some((reason, until)) = self.stop
            && (self.outbox.is_idle() || Instant::now() >= until)
        {
            self.stop = None;
            let _ = self.stopped.try_send(reason);
            self.ended.notify_one();
        }
        let now = Instant::now();
        let deadline = self
            .machine
            .next_deadline()
            .into_iter()
            .chain(self.stop.map(|(_, until)| until))
            .chain(probe_due)
            .min();
        deadline.map_or(ANSWER_WITHIN, |deadline| {
            deadline.saturating_duration_since(now)
        })
    }

    fn keep_primaries(&mut self) {
        let source = self.control.postgres_source();
        let known = source.map(|source| source.settings.known_primaries());
        self.file.keep_primaries(known.unwrap_or_default());
    }

    fn log_went_back(&mut self) {
        let went_back = self.machine.engine_went_back();
        match (std::mem::replace(&mut self.went_back, went_back), went_back) {
            (false, true) => tracing::error!(
                "PostgreSQL has older members than this node knows: it was restored, or is not the \
                 primary any more; after a restore, stop all nodes, then start them"
            ),
            (true, false) => {
                tracing::info!("PostgreSQL has the members that this node knows again");
            }
            _ => {}
        }
    }

    /// Does what the machine asks for. Returns the reason once the membership has ended.
    fn act(&mut self) -> Option<StopReason> {
        let revision = u64::try_from(self.control.revision().0).unwrap_or(0);
        self.machine
            .on(Instant::now(), MembershipEvent::Revision(revision));
        let epoch = self.signals.named_epoch();
        if std::mem::replace(&mut self.named_epoch, epoch) != epoch {
            self.machine
                .on(Instant::now(), MembershipEvent::Hint { epoch });
        }
        if self.machine.state() == Some(NodeState::Draining) {
            self.machine.on(Instant::now(), MembershipEvent::HandedOver);
        }
        let mut stop = None;
        while let Some(action) = self.machine.poll(Instant::now()) {
            match action {
                MembershipAction::Call(call) => self.call(call),
                MembershipAction::Publish(view) => self.publish(&view),
                MembershipAction::Tell(state) => self.tell(&state),
                MembershipAction::Stop(reason) => {
                    tracing::warn!(?reason, "this node has left its region");
                    if let Some(slot) = self.machine.slot() {
                        self.file.keep(slot, None);
                    }
                    stop = Some(reason);
                }
            }
        }
        stop
    }

    fn on(&mut self, input: RegionInput) {
        let now = Instant::now();
        match input {
            RegionInput::Event(event) => self.machine.on(now, event),
            RegionInput::Message(
                StateMessage {
                    state,
                    levels,
                    max_staleness,
                },
                used,
            ) => {
                self.dead
                    .told(state.session, max_staleness, self.machine.roster());
                self.refusals.heard(state.session, now);
                if !levels.is_empty() {
                    self.control.publish_levels(&Arc::new(levels));
                }
                self.machine.on(now, MembershipEvent::Message(state));
                drop(used);
            }
            RegionInput::Delivered { to, delivery } => self.delivered(&to, &delivery, now),
            RegionInput::Probed(session, verdict) => self.probes.ended(now, session, verdict),
            RegionInput::Status(reply) => {
                let revision = u64::try_from(self.control.revision().0).unwrap_or(0);
                let mut status = self.machine.status(now, revision, std::iter::empty());
                self.refusals.show(
                    &mut status,
                    self.machine.roster(),
                    self.machine.session(),
                    now,
                );
                // Fails if the answer comes too late.
                let _ = reply.try_send(status);
            }
            RegionInput::Others(newer, reply) => {
                let others = self.dead.others(
                    self.machine.roster(),
                    newer.as_ref(),
                    self.machine.session(),
                    now,
                );
                let _ = reply.try_send(others);
            }
            RegionInput::Leave => self.machine.leave(),
            RegionInput::HandOver(_) => {}
        }
    }

    fn call(&self, call: Call) {
        if let Err(TrySendError::Full(call) | TrySendError::Disconnected(call)) =
            self.calls.try_send(call)
        {
            // An earlier call has not ended yet.
            self.sender
                .send(RegionInput::Event(MembershipEvent::Result {
                    call: call.id,
                    result: CallResult::Failed,
                }));
        }
    }

    fn publish(&mut self, view: &Arc<View>) {
        let slot = view.placement().here();
        if self.slot.replace(slot) != Some(slot) {
            (self.on_slot)(slot);
        }
        self.file.keep(slot, self.machine.carry(Instant::now()));
        log_view(view);
        let epoch = view.epoch();
        let (number, applied) = self
            .publications
            .begin(Arc::clone(view), self.control.workers());
        if let Err(error) =
            self.control
                .publish_view(number, view, self.machine.session(), &applied)
        {
            tracing::error!(%error, epoch, "the workers cannot use the members of this epoch");
        }
    }

    fn applied(&mut self, applied: ViewApplied) {
        let now = Instant::now();
        let Some((view, is_last)) = self.publications.applied(applied.number, applied.worker)
        else {
            return;
        };
        for level in applied.levels {
            let hostname = format!("{}.{}", level.service, self.control.region().apex());
            if let Some(owner) = view.placement().owning_member(&hostname) {
                self.outbox.add_level(owner.session, level, now);
            }
        }
        if is_last {
            self.machine.on(
                now,
                MembershipEvent::Applied {
                    epoch: view.epoch(),
                },
            );
        }
    }

    /// Finds out at once whether the other nodes still listen. At most once in [`TELL_AGAIN`].
    fn tell_again(&mut self) {
        let Some((state, at)) = self.last_told.clone() else {
            return;
        };
        if at.elapsed() >= TELL_AGAIN {
            self.tell(&state);
        }
    }

    fn tell(&mut self, state: &NodeMessage) {
        self.last_told = Some((state.clone(), Instant::now()));
        let rows = &state.roster.rows;
        self.dead.note(&state.roster, Instant::now());
        self.refusals.retain(&state.roster);
        self.outbox
            .retain(|session| rows.iter().any(|row| row.session == session));
        // A node that was declared dead may live, and learns of it from the other nodes if it does
        // not reach PostgreSQL.
        let listens = |row: &&NodeRow| row.session != state.session && row.state != NodeState::Left;
        for row in rows.iter().filter(listens) {
            self.send(&row.member(), state);
        }
    }

    fn send(&mut self, to: &Member, state: &NodeMessage) {
        if let Some(message) = self.outbox.message(to, state, Instant::now()) {
            messenger::send(&self.tasks, &self.control, to, message, &self.sender);
        }
    }

    fn delivered(&mut self, to: &Member, delivery: &Delivery, now: Instant) {
        let node = to.slot.get();
        let address = to.peer_address;
        match self.refusals.note(to.session, delivery, now) {
            Some(RefusalChange::Lasts(reason)) => {
                tracing::warn!(node, %address, reason = &*reason,
                    "another node refuses the messages of this one");
            }
            Some(RefusalChange::Ended) => {
                tracing::info!(node, %address,
                    "another node accepts the messages of this one again");
            }
            None => {}
        }
        let (waiting, has_gone) = self.outbox.ended(to.session, delivery);
        if has_gone {
            let told = self
                .last_told
                .as_ref()
                .and_then(|(state, _)| state.roster.slot(to.slot));
            // A node that was declared dead is told until its row is removed, in case that it
            // lives.
            if told.is_none_or(|row| row.session != to.session || !row.state.is_over()) {
                tracing::warn!(node, %address, "another node does not listen any more");
            }
            self.machine.on(
                now,
                MembershipEvent::Refused {
                    slot: to.slot,
                    session: to.session,
                },
            );
        }
        if let Some((to, state)) = waiting {
            self.send(&to, &state);
        }
    }
}

fn log_view(view: &View) {
    let members = view.placement().members().iter();
    let members: Vec<u16> = members.map(|member| member.slot.get()).collect();
    let node = view.placement().here().get();
    tracing::info!(
        node,
        epoch = view.epoch(),
        ?members,
        moving = view.is_moving(),
        "members of the region"
    );
}
