//! What the supervisor does with its workers, without I/O: which one serves, which ones start or
//! finish their requests.

mod actions;

use std::time::{Duration, Instant};

use gw_shared::identity::program::SignedProgram;

pub(super) use self::actions::{Action, Blame, Input, WorkerNumber};
use super::messages::ToWorker;
use crate::succession::AgentEvent;

/// Time in which a successor has to get its tunnels, and in which an updated program must not end
/// by itself.
pub(super) const TRIAL: Duration = Duration::from_secs(60);
/// Time in which a worker answers that it expects a successor.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Time in which a worker detaches.
const DETACH_WITHIN: Duration = Duration::from_secs(2);
/// Time in which the current worker opens its tunnels again after its successor has failed.
const RESUMED_WITHIN: Duration = Duration::from_secs(5);
/// Time in which a failed successor exits.
const FAILED_ENDS_WITHIN: Duration = Duration::from_secs(10);
/// Predecessors that may still have requests. A further replacement waits until one of them has
/// ended.
const LEAVING_MAX: usize = 4;

/// Why a worker is replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Cause {
    /// A signal: with the configuration as it is now, and with this stored program or the installed
    /// one.
    Signal(Option<SignedProgram>),
    /// The worker has stored this program.
    Update(SignedProgram),
}

/// The workers of a supervisor.
pub(super) struct Supervision {
    started: WorkerNumber,
    current: CurrentWorker,
    step: ReplacementStep,
    /// Replacement because of a signal that waits for the present one. Comes before `next_update`.
    next_signal: Option<Option<SignedProgram>>,
    /// Update that waits.
    next_update: Option<SignedProgram>,
    /// Workers that finish their requests, and successors that have failed.
    leaving: Vec<Leaving>,
    is_stopping: bool,
    /// Time of the input that is being handled.
    now: Instant,
    /// Actions that follow from it so far.
    actions: Vec<Action>,
}

struct Leaving {
    worker: WorkerNumber,
    /// What is done to a successor that has failed, and when.
    then: Option<(Instant, WorkerEnd)>,
}

#[derive(Clone, Copy)]
enum WorkerEnd {
    Stop,
    Kill,
}

/// The worker that serves.
struct CurrentWorker {
    worker: WorkerNumber,
    program: Option<SignedProgram>,
    /// `None` for the installed program, and once a stored one is proven.
    trial: Option<Trial>,
    /// Whether it has had a tunnel.
    is_connected: bool,
    has_exited: bool,
}

#[derive(Clone)]
struct Trial {
    until: Instant,
    /// The program before.
    fallback: Option<SignedProgram>,
}

enum ReplacementStep {
    Steady,
    /// The current worker was told to expect a successor.
    Announced {
        cause: Cause,
        until: Instant,
    },
    Starting {
        candidate: WorkerNumber,
        cause: Cause,
        until: Instant,
    },
    Detaching {
        until: Instant,
    },
}

impl Supervision {
    /// Starts the first worker, with this stored program or with the installed one.
    pub(super) fn new(
        program: Option<SignedProgram>,
        is_proven: bool,
        now: Instant,
    ) -> (Self, Vec<Action>) {
        let trial = program.as_ref().filter(|_| !is_proven).map(|_| Trial {
            until: now + TRIAL,
            fallback: None,
        });
        let start = Action::Start {
            worker: 0,
            program: program.clone(),
            required: Vec::new(),
        };
        let supervision = Self {
            started: 1,
            current: CurrentWorker {
                worker: 0,
                program,
                trial,
                is_connected: false,
                has_exited: false,
            },
            step: ReplacementStep::Steady,
            next_signal: None,
            next_update: None,
            leaving: Vec::new(),
            is_stopping: false,
            now,
            actions: Vec::new(),
        };
        (supervision, vec![start])
    }

    /// When [`Input::Time`] is due.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let step = match &self.step {
            ReplacementStep::Steady => None,
            ReplacementStep::Announced { until, .. }
            | ReplacementStep::Starting { until, .. }
            | ReplacementStep::Detaching { until } => Some(*until),
        };
        let trial = self.current.trial.as_ref().map(|trial| trial.until);
        self.leaving
            .iter()
            .filter_map(|leaving| leaving.then)
            .map(|(at, _)| at)
            .chain(step)
            .chain(trial)
            .min()
    }

    /// Returns the actions to take, in order.
    pub(super) fn handle(&mut self, input: Input, now: Instant) -> Vec<Action> {
        self.now = now;
        match input {
            Input::Event { worker, event } => self.event(worker, event),
            Input::Exited { worker, code } => self.exited(worker, code),
            Input::NotStarted {
                worker,
                error,
                blame,
            } => self.not_started(worker, &error, blame),
            Input::Replace(program) => {
                self.next_signal = Some(program);
                self.begin_next();
            }
            Input::Hangup if self.is_stopping => {}
            Input::Stop | Input::Hangup => self.stop(),
            Input::Detach => self.detach(),
            Input::Time => self.time(),
        }
        std::mem::take(&mut self.actions)
    }

    fn event(&mut self, worker: WorkerNumber, event: AgentEvent) {
        match (event, &self.step) {
            (AgentEvent::Serving { .. }, ReplacementStep::Detaching { .. })
                if worker == self.current.worker =>
            {
                self.exit(0);
            }
            (
                AgentEvent::Serving { hostnames },
                ReplacementStep::Announced {
                    cause: Cause::Update(_),
                    ..
                },
            ) if worker == self.current.worker && hostnames.is_empty() => {
                let error = "the agent has no tunnel at the moment, so it cannot be seen whether \
                             the new program gets one";
                self.give_up(error, Blame::Other);
            }
            (AgentEvent::Serving { hostnames }, ReplacementStep::Announced { cause, .. })
                if worker == self.current.worker =>
            {
                let cause = cause.clone();
                let candidate = self.start(cause.program(), hostnames);
                self.step = ReplacementStep::Starting {
                    candidate,
                    cause,
                    until: self.now + TRIAL,
                };
            }
            (AgentEvent::Ready, ReplacementStep::Starting { candidate, .. })
                if worker == *candidate =>
            {
                self.promote();
            }
            (AgentEvent::Connected, _) if worker == self.current.worker => {
                self.current.is_connected = true;
            }
            (AgentEvent::Update { program }, _) if worker == self.current.worker => {
                self.next_update = Some(program);
                self.begin_next();
            }
            _ => {}
        }
    }

    /// The candidate serves from now on.
    fn promote(&mut self) {
        let ReplacementStep::Starting {
            candidate, cause, ..
        } = std::mem::replace(&mut self.step, ReplacementStep::Steady)
        else {
            return;
        };
        let program = cause.program();
        let trial = match &cause {
            Cause::Update(_) => Some(Trial {
                until: self.now + TRIAL,
                fallback: self.current.program.clone(),
            }),
            Cause::Signal(program) => self
                .current
                .trial
                .clone()
                .filter(|_| *program == self.current.program),
        };
        if let Cause::Update(program) = &cause {
            tracing::info!(version = %program.version, "the agent is updated");
            self.actions.push(Action::Choose {
                program: Some(program.clone()),
                is_proven: false,
            });
            // A replacement that waits was asked for when the program before was the chosen one.
            if let Some(next) = &mut self.next_signal {
                *next = Some(program.clone());
            }
        }
        // An update is ready only with tunnels.
        let is_connected = matches!(cause, Cause::Update(_)) || self.current.is_connected;
        let current = CurrentWorker {
            worker: candidate,
            program,
            trial,
            is_connected,
            has_exited: false,
        };
        let before = std::mem::replace(&mut self.current, current);
        if !before.has_exited {
            self.tell(before.worker, ToWorker::Succeeded);
            self.leave(before.worker, None);
        }
        self.begin_next();
    }

    /// The candidate does not serve: the current worker goes on.
    fn give_up(&mut self, error: &str, blame: Blame) {
        let (ReplacementStep::Starting { cause, .. } | ReplacementStep::Announced { cause, .. }) =
            std::mem::replace(&mut self.step, ReplacementStep::Steady)
        else {
            return;
        };
        if !self.current.has_exited {
            self.tell(self.current.worker, ToWorker::Resume);
        }
        match cause {
            Cause::Signal(_) => {
                tracing::error!(
                    error,
                    "the agent is not replaced, and goes on with the configuration that it has"
                );
            }
            Cause::Update(program) => {
                let worker = (!self.current.has_exited).then_some(self.current.worker);
                self.actions.push(Action::Fail {
                    program,
                    error: error.to_owned(),
                    blame,
                    worker,
                });
            }
        }
        if self.current.has_exited {
            let program = self.current.program.clone();
            self.start_current(program);
        }
        self.begin_next();
    }

    /// Starts a worker in place of the current one, which has exited.
    fn start_current(&mut self, program: Option<SignedProgram>) {
        let worker = self.start(program.clone(), Vec::new());
        let trial = self
            .current
            .trial
            .take()
            .filter(|_| program == self.current.program);
        self.current = CurrentWorker {
            worker,
            program,
            trial,
            is_connected: false,
            has_exited: false,
        };
        self.step = ReplacementStep::Steady;
    }

    /// Starts a worker with this stored program, or with the installed one.
    fn start(&mut self, program: Option<SignedProgram>, required: Vec<String>) -> WorkerNumber {
        let worker = self.started;
        self.started += 1;
        self.actions.push(Action::Start {
            worker,
            program,
            required,
        });
        worker
    }

    fn tell(&mut self, worker: WorkerNumber, message: ToWorker) {
        self.actions.push(Action::Tell { worker, message });
    }

    fn exit(&mut self, code: u8) {
        self.actions.push(Action::Exit { code });
    }

    fn leave(&mut self, worker: WorkerNumber, then: Option<(Instant, WorkerEnd)>) {
        self.leaving.push(Leaving { worker, then });
    }

    fn exited(&mut self, worker: WorkerNumber, code: Option<u8>) {
        self.leaving.retain(|leaving| leaving.worker != worker);
        if worker == self.current.worker {
            self.current.has_exited = true;
        }
        if self.is_stopping {
            if self.current.has_exited && self.leaving.is_empty() {
                self.exit(0);
            }
        } else if matches!(self.step, ReplacementStep::Detaching { .. }) {
            if self.current.has_exited {
                self.exit(0);
            }
        } else if matches!(
            &self.step,
            ReplacementStep::Starting { candidate, .. } if *candidate == worker
        ) {
            let (error, blame) = match code {
                // The configuration is wrong, whatever the program.
                Some(2) => (
                    "the configuration is refused; see the log of the agent".to_owned(),
                    Blame::Other,
                ),
                Some(code) => {
                    let error = format!(
                        "the new process ended with exit code {code} before it had its tunnels"
                    );
                    (error, Blame::Program)
                }
                None => (
                    "the new process crashed before it had its tunnels".to_owned(),
                    Blame::Program,
                ),
            };
            self.give_up(&error, blame);
        } else if worker == self.current.worker {
            self.current_exited(code);
        } else {
            self.begin_next();
        }
    }

    fn current_exited(&mut self, code: Option<u8>) {
        if matches!(self.step, ReplacementStep::Starting { .. }) {
            return tracing::error!(
                code,
                "the agent's process ended by itself, while another one starts in its place"
            );
        }
        // Exit code 2: the configuration is wrong, whatever the program.
        let trial = self.current.trial.clone().filter(|_| code != Some(2));
        let (Some(trial), Some(program)) = (trial, self.current.program.clone()) else {
            return self.exit(code.unwrap_or(1));
        };
        let error = "the updated agent ended by itself within a minute".to_owned();
        tracing::error!(version = %program.version, code,
            "{error}: going back to the program before");
        self.actions.push(Action::Fail {
            program,
            error,
            blame: Blame::Program,
            worker: None,
        });
        self.actions.push(Action::Choose {
            program: trial.fallback.clone(),
            is_proven: true,
        });
        self.start_current(trial.fallback);
        self.begin_next();
    }

    fn not_started(&mut self, worker: WorkerNumber, error: &str, blame: Blame) {
        if matches!(&self.step, ReplacementStep::Starting { candidate, .. } if *candidate == worker)
        {
            self.give_up(error, blame);
        } else if worker != self.current.worker || self.is_stopping {
            self.exited(worker, None);
        } else if self.current.program.is_some() {
            tracing::error!("using the installed program instead");
            self.start_current(None);
        } else {
            self.exit(1);
        }
    }

    fn begin_next(&mut self) {
        if self.is_stopping {
            return;
        }
        if !matches!(self.step, ReplacementStep::Steady) || self.leaving.len() >= LEAVING_MAX {
            if self.next_signal.is_some() || self.next_update.is_some() {
                tracing::warn!(
                    "the agent's process is replaced again once earlier ones have finished their \
                     requests"
                );
            }
            return;
        }
        let next = self.next_signal.take().map(Cause::Signal);
        if let Some(cause) = next.or_else(|| self.next_update.take().map(Cause::Update)) {
            self.tell(self.current.worker, ToWorker::ExpectSuccessor);
            self.step = ReplacementStep::Announced {
                cause,
                until: self.now + ANSWER_WITHIN,
            };
        }
    }

    fn stop(&mut self) {
        let mut workers: Vec<_> = self.leaving.iter().map(|leaving| leaving.worker).collect();
        if !self.current.has_exited {
            workers.push(self.current.worker);
        }
        if let ReplacementStep::Starting { candidate, .. } =
            std::mem::replace(&mut self.step, ReplacementStep::Steady)
        {
            workers.push(candidate);
            self.leave(candidate, None);
        }
        for worker in workers {
            if self.is_stopping {
                self.actions.push(Action::Kill { worker });
            } else {
                self.tell(worker, ToWorker::Stop);
            }
        }
        if self.is_stopping {
            self.exit(1);
        }
        self.is_stopping = true;
    }

    fn detach(&mut self) {
        let current = (!self.current.has_exited).then_some(self.current.worker);
        // It may have replaced tunnels of the current worker already.
        let candidate = match self.step {
            ReplacementStep::Starting { candidate, .. } => Some(candidate),
            _ => None,
        };
        if self.is_stopping || current.or(candidate).is_none() {
            return self.exit(0);
        }
        for worker in current.into_iter().chain(candidate) {
            self.tell(worker, ToWorker::Detach);
        }
        let until = self.now + DETACH_WITHIN;
        self.step = ReplacementStep::Detaching { until };
    }

    fn time(&mut self) {
        self.end_trial();
        for leaving in &mut self.leaving {
            let worker = leaving.worker;
            match leaving.then {
                Some((at, WorkerEnd::Stop)) if at <= self.now => {
                    self.actions.push(Action::Tell {
                        worker,
                        message: ToWorker::Stop,
                    });
                    leaving.then = Some((self.now + FAILED_ENDS_WITHIN, WorkerEnd::Kill));
                }
                Some((at, WorkerEnd::Kill)) if at <= self.now => {
                    self.actions.push(Action::Kill { worker });
                    leaving.then = None;
                }
                _ => {}
            }
        }
        match &self.step {
            ReplacementStep::Detaching { until } if *until <= self.now => self.exit(0),
            ReplacementStep::Announced { until, .. } if *until <= self.now => {
                self.give_up("the agent's process does not answer", Blame::Other);
            }
            ReplacementStep::Starting {
                candidate, until, ..
            } if *until <= self.now => {
                let candidate = *candidate;
                // The current worker replaces the tunnels that the candidate has got, and only then
                // the candidate stops.
                self.tell(candidate, ToWorker::ExpectSuccessor);
                self.leave(
                    candidate,
                    Some((self.now + RESUMED_WITHIN, WorkerEnd::Stop)),
                );
                let error = format!(
                    "the new process did not have all tunnels within {} s",
                    TRIAL.as_secs()
                );
                self.give_up(&error, Blame::Unclear);
            }
            _ => {}
        }
    }

    fn end_trial(&mut self) {
        let Some(trial) = self
            .current
            .trial
            .as_mut()
            .filter(|trial| trial.until <= self.now)
        else {
            return;
        };
        if self.current.is_connected && !self.current.has_exited {
            self.current.trial = None;
            self.actions.push(Action::Prove);
        } else {
            trial.until = self.now + TRIAL;
        }
    }
}

impl Cause {
    /// The stored program that is to run; `None` for the installed one.
    fn program(&self) -> Option<SignedProgram> {
        match self {
            Self::Signal(program) => program.clone(),
            Self::Update(program) => Some(program.clone()),
        }
    }
}

#[cfg(test)]
mod tests;
