//! Hosts, links and the engine on virtual time.

mod actions;
mod calls;
mod faults;
mod links;
mod primaries;
mod records;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::engine::{Call, CallResult, NodeState};
use super::super::membership::{Membership, MembershipAction, MembershipEvent, NodeMessage};
use super::attempts::{OwnerAttempts, Retry};
use super::engine::{EngineMode, FakeEngine};
use super::flaws::Flaws;
use super::schedule::{Fault, Schedule};
use crate::membership::carried::CarriedMembership;
use crate::owners::lease::Isolation;
use crate::owners::placement::NodeSlot;
use crate::owners::view::{ArrivedFrom, Decision, View};
use crate::random::Random;
use links::{Certificate, Links};
use primaries::{KnownPrimaries, OlderPrimary};
use records::{RecordsEvent, SimulatedRecords};

/// Longest time until the workers of a host use a new view.
pub(super) const WORKER_DELAY: Duration = Duration::from_millis(50);

/// Interval at which a node with a wrong clock looks at it again before it goes live.
const CLOCK_CHECK: Duration = Duration::from_secs(1);

/// Something that happens at a time.
#[derive(Debug)]
enum Work {
    Wake {
        host: usize,
        at: Duration,
    },
    /// The request of a call reaches the engine.
    Execute {
        host: usize,
        process: u64,
        generation: u64,
        call: Call,
    },
    Answer {
        host: usize,
        process: u64,
        call: u64,
        executed: Duration,
        result: CallResult,
    },
    Deliver {
        to: usize,
        from: usize,
        shown: Certificate,
        state: NodeMessage,
    },
    /// Something happens to the records of a host, by this process if the number is not 0.
    Records {
        host: usize,
        process: u64,
        event: RecordsEvent,
    },
    /// The workers use a view.
    Applied {
        host: usize,
        process: u64,
        view: Arc<View>,
    },
    Input {
        host: usize,
        process: u64,
        event: MembershipEvent,
    },
    Fault(Fault),
    LookForPrimaries {
        host: usize,
    },
    Request(SimulatedRequest),
    Forwarded {
        to: u128,
        request: SimulatedRequest,
    },
}

/// A request on its way to the owner of its service.
#[derive(Debug, Clone)]
struct SimulatedRequest {
    ingress: usize,
    process: u64,
    service: usize,
    attempts: OwnerAttempts,
    forwards: u32,
    epoch: u64,
}

/// One process of a host.
#[derive(Debug)]
pub(super) struct Process {
    number: u64,
    /// It continues the membership of the last process.
    pub(super) is_resumed: bool,
    pub(super) machine: Membership,
    /// The view that the workers use.
    pub(super) view: Option<Arc<View>>,
    /// Session of the machine when the workers got their view.
    pub(super) session: u128,
    /// Services that the workers admit by the view, while the lease lasts.
    pub(super) services: u32,
    pub(super) admit_until: Option<Instant>,
    /// When the workers use the last view that was published.
    pub(super) apply_at: Duration,
    is_handing_over: bool,
    /// Execution of the last call whose answer arrived, and the arrival.
    pub(super) last_answer: (Duration, Duration),
    /// Start of the last call without an answer.
    pub(super) failed: Option<Duration>,
    /// A call is outstanding since then.
    called: Duration,
    /// When another node's answer named an epoch after that of the workers' view.
    pub(super) hinted: Option<(u64, Duration)>,
    /// When another node first told of an epoch after that of the workers' view.
    pub(super) told: Option<(u64, Duration)>,
    /// Last acknowledged epoch that arrived directly from each session.
    pub(super) levels: BTreeMap<u128, u64>,
}

#[derive(Debug)]
pub(super) struct Host {
    pub(super) process: Option<Process>,
    pub(super) is_paused: bool,
    /// Start of the last pause, and its end.
    paused: Duration,
    pub(super) resumed: Duration,
    inbox: VecDeque<Work>,
    /// Rate of the clock against true time, in parts per million.
    drift: i64,
    slot: Option<NodeSlot>,
    /// Seconds by which the wall clock is ahead.
    clock_error: i64,
    /// Membership of the last process, for one that starts without the engine.
    carried: Option<CarriedMembership>,
    pub(super) links: Links,
    primaries: KnownPrimaries,
    pub(super) requests_pass: bool,
    pub(super) replies_pass: bool,
    is_slow: bool,
    /// Last time that the host or its link to the engine was disturbed.
    pub(super) disturbed: Duration,
    wake: Option<Duration>,
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) now: Duration,
    base: Instant,
    random: Random,
    /// The primary, the newest of two.
    pub(super) engine: FakeEngine,
    /// The other one of two primaries.
    pub(super) older: Option<OlderPrimary>,
    /// There were two primaries at some time.
    pub(super) was_split: bool,
    pub(super) hosts: Vec<Host>,
    links_cut: Vec<Vec<bool>>,
    loss: u64,
    queue: BinaryHeap<Reverse<(Duration, u64, usize)>>,
    works: Vec<Option<Work>>,
    free: Vec<usize>,
    sequence: u64,
    processes: u64,
    isolation: Isolation,
    pub(super) flaws: Flaws,
    records: SimulatedRecords,
    pub(super) services: Vec<String>,
    /// Messages between nodes were lost, delayed or cut at some time.
    pub(super) peers_disturbed: bool,
    pub(super) falsely_refused: Vec<u128>,
    pub(super) answered: u64,
    pub(super) calls: u64,
    pub(super) trace: Option<Vec<String>>,
    pub(super) violation: Option<String>,
    pub(super) checks: super::checks::Coverage,
}

impl World {
    pub(super) fn new(seed: u64, schedule: &Schedule, isolation: Isolation, trace: bool) -> Self {
        let mut random = Random::new(seed ^ 0x9876);
        let host = |index: usize, random: &mut Random| {
            let has_slot = index == 0 || schedule.has_twin || random.percent(80);
            let is_twin = schedule.has_twin && index + 1 == schedule.hosts;
            let slot = if is_twin { 0 } else { index as u16 };
            Host {
                process: None,
                is_paused: false,
                paused: Duration::ZERO,
                resumed: Duration::ZERO,
                inbox: VecDeque::new(),
                drift: random.below(60_000) as i64 - 30_000,
                slot: has_slot.then(|| NodeSlot::new(slot).unwrap()),
                clock_error: 0,
                carried: None,
                links: Links::default(),
                primaries: KnownPrimaries::default(),
                requests_pass: true,
                replies_pass: true,
                is_slow: false,
                disturbed: Duration::ZERO,
                wake: None,
            }
        };
        let hosts: Vec<Host> = (0..schedule.hosts)
            .map(|index| host(index, &mut random))
            .collect();
        let mut world = Self {
            now: Duration::ZERO,
            base: Instant::now(),
            engine: FakeEngine::new(),
            older: None,
            was_split: false,
            links_cut: vec![vec![false; hosts.len()]; hosts.len()],
            hosts,
            loss: 0,
            queue: BinaryHeap::new(),
            works: Vec::new(),
            free: Vec::new(),
            sequence: 0,
            processes: 0,
            isolation,
            flaws: Flaws::default(),
            records: SimulatedRecords::new(seed, schedule.hosts),
            services: (0..8)
                .map(|n| format!("acme{n}--api.eu1.example.com"))
                .collect(),
            peers_disturbed: false,
            falsely_refused: Vec::new(),
            answered: 0,
            calls: 0,
            trace: trace.then(Vec::new),
            violation: None,
            checks: super::checks::Coverage::default(),
            random,
        };
        for (at, fault) in &schedule.faults {
            world.push(*at, Work::Fault(*fault));
        }
        for (at, host) in &schedule.revocations {
            world.revoke(*at, *host);
        }
        for _ in 0..20 {
            world.add_request();
        }
        world
    }

    /// A request for a random service at a random host.
    fn add_request(&mut self) {
        let at = self.random.millis(1_000, 21_000);
        let ingress = self.random.index(self.hosts.len());
        let service = self.random.index(8);
        let request = SimulatedRequest {
            ingress,
            process: 0,
            service,
            attempts: OwnerAttempts::new(),
            forwards: 0,
            epoch: 0,
        };
        self.push(at, Work::Request(request));
    }

    /// Runs until `end`, or until a check fails.
    pub(super) fn run_until(&mut self, end: Duration) {
        while self.violation.is_none()
            && let Some(Reverse((at, _, index))) = self.queue.peek().copied()
            && at <= end
        {
            self.queue.pop();
            self.now = at;
            let work = self.works[index].take();
            self.free.push(index);
            work.into_iter().for_each(|work| self.step(work));
        }
        if self.violation.is_none() {
            self.now = end;
        }
    }

    pub(super) fn schedule(&mut self, at: Duration, fault: Fault) {
        self.push(at, Work::Fault(fault));
    }

    fn push(&mut self, at: Duration, work: Work) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.works.push(None);
            self.works.len() - 1
        });
        self.works[index] = Some(work);
        self.sequence += 1;
        self.queue.push(Reverse((at, self.sequence, index)));
    }

    pub(super) fn note(&mut self, text: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            let line = format!("{:9.3} {}", self.now.as_secs_f64(), text());
            trace.push(line);
        }
    }

    pub(super) fn fail(&mut self, text: &str) {
        self.note(|| format!("VIOLATION {text}"));
        self.violation
            .get_or_insert(format!("at {:.3} s: {text}", self.now.as_secs_f64()));
    }

    /// The time on the clock of a host.
    pub(super) fn clock(&self, host: usize) -> Instant {
        let micros = self.now.as_micros() as i64;
        self.base
            + Duration::from_micros((micros + micros * self.hosts[host].drift / 1_000_000) as u64)
    }

    fn true_time(&self, host: usize, clock: Instant) -> Duration {
        let micros = clock.saturating_duration_since(self.base).as_micros() as i64;
        Duration::from_micros(
            (micros * 1_000_000 / (1_000_000 + self.hosts[host].drift)) as u64 + 2,
        )
    }

    fn process(&mut self, host: usize, number: u64) -> Option<&mut Process> {
        self.hosts[host]
            .process
            .as_mut()
            .filter(|process| process.number == number)
    }

    fn step(&mut self, work: Work) {
        let host = match &work {
            Work::Fault(fault) => return self.fault(*fault),
            Work::Execute {
                host,
                process,
                call,
                ..
            } => {
                let (host, process, call) = (*host, *process, call.id);
                if !self.at_server(host, |world| world.execute(work)) {
                    self.refuse_call(host, process, call);
                }
                return;
            }
            Work::LookForPrimaries { host } => return self.look_for_primaries(*host),
            Work::Request(request) if request.process == 0 => request.ingress,
            Work::Forwarded { to, .. } => match self.host_of(*to) {
                Some(host) => host,
                None => return,
            },
            Work::Wake { host, at } => {
                if self.hosts[*host].wake != Some(*at) || self.hosts[*host].is_paused {
                    return;
                }
                self.hosts[*host].wake = None;
                *host
            }
            Work::Request(request) => request.ingress,
            Work::Deliver { to, .. } => *to,
            Work::Answer { host, .. }
            | Work::Applied { host, .. }
            | Work::Input { host, .. }
            | Work::Records { host, .. } => *host,
        };
        if self.hosts[host].is_paused {
            self.hosts[host].inbox.push_back(work);
            return;
        }
        self.handle(host, work);
        self.drive(host);
    }

    pub(super) fn host_of(&self, session: u128) -> Option<usize> {
        let has = |host: &Host| {
            host.process
                .as_ref()
                .is_some_and(|process| process.machine.session() == session)
        };
        self.hosts.iter().position(has)
    }

    fn handle(&mut self, host: usize, work: Work) {
        let clock = self.clock(host);
        match work {
            Work::Answer {
                process,
                call,
                executed,
                result,
                ..
            } => {
                let now = self.now;
                let Some(process) = self.process(host, process) else {
                    return;
                };
                if matches!(result, CallResult::Done { .. }) {
                    process.last_answer = process.last_answer.max((executed, now));
                }
                process
                    .machine
                    .on(clock, MembershipEvent::Result { call, result });
                self.check_answer(host);
            }
            Work::Deliver {
                from, shown, state, ..
            } => self.deliver(host, from, shown, state),
            Work::Records { process, event, .. } => self.records_event(host, process, event),
            Work::Applied { process, view, .. } => self.apply(host, process, &view),
            Work::Input {
                process,
                event: MembershipEvent::Ready,
                ..
            } if self.clock_is_wrong(host) && !self.flaws.ignores_clock => {
                self.push(
                    self.now + CLOCK_CHECK,
                    Work::Input {
                        host,
                        process,
                        event: MembershipEvent::Ready,
                    },
                );
            }
            Work::Input { process, event, .. } => {
                let now = self.now;
                if matches!(event, MembershipEvent::Ready) {
                    self.hosts[host].links.began_with_wrong_clock = self.clock_is_wrong(host);
                }
                let Some(process) = self.process(host, process) else {
                    return;
                };
                if let (MembershipEvent::Hint { epoch }, Some(view)) = (&event, &process.view)
                    && *epoch > view.epoch()
                {
                    process.hinted.get_or_insert((*epoch, now));
                }
                process.machine.on(clock, event);
            }
            Work::Request(request) => self.request(host, request),
            Work::Forwarded { request, .. } => self.forwarded(host, request),
            Work::Wake { .. }
            | Work::Execute { .. }
            | Work::Fault(_)
            | Work::LookForPrimaries { .. } => {}
        }
    }

    fn deliver(&mut self, host: usize, from: usize, shown: Certificate, state: NodeMessage) {
        if self.hosts[host].process.is_none() {
            return;
        }
        self.answer_with_primary(host, from);
        if self.is_refused(host, from, shown, &state) {
            return;
        }
        let clock = self.clock(host);
        let now = self.now;
        let Some(process) = &mut self.hosts[host].process else {
            return;
        };
        let epoch = state.roster.epoch;
        if process
            .view
            .as_ref()
            .is_some_and(|view| epoch > view.epoch())
            && process.told.is_none()
        {
            process.told = Some((epoch, now));
        }
        let levels = process.levels.entry(state.session).or_default();
        *levels = state.acknowledged.max(*levels);
        process.machine.on(clock, MembershipEvent::Message(state));
    }

    fn apply(&mut self, host: usize, number: u64, view: &Arc<View>) {
        let clock = self.clock(host);
        let services = self.services.iter().enumerate().filter(|(_, name)| {
            matches!(
                view.decide(name, ArrivedFrom::Caller, true),
                Decision::Admit
            )
        });
        let services = services.fold(0, |all, (index, _)| all | 1 << index);
        let Some(process) = self.process(host, number) else {
            return;
        };
        let before = process.view.replace(Arc::clone(view));
        process.services = services;
        process.session = process.machine.session();
        process.told = process.told.filter(|(epoch, _)| view.epoch() < *epoch);
        process.hinted = process.hinted.filter(|(epoch, _)| view.epoch() < *epoch);
        process.machine.on(
            clock,
            MembershipEvent::Applied {
                epoch: view.epoch(),
            },
        );
        self.check_view(host, before.as_deref(), view);
    }
}
