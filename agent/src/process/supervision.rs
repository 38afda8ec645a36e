//! What the supervisor does with its workers, without I/O: which one serves, which ones start or finish their requests.

use std::time::{Duration, Instant};

use gw_shared::identity::program::SignedProgram;

use super::messages::ToWorker;
use crate::succession::Event;

/// Number of a worker, in the order in which they start.
pub(super) type WorkerId = u32;

/// Time in which a successor has to get its tunnels, and in which an updated program must not end by itself.
pub(super) const TRIAL: Duration = Duration::from_secs(60);
/// Time in which a worker answers that it expects a successor.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Time in which a worker detaches.
const DETACH_WITHIN: Duration = Duration::from_secs(2);
/// Time in which a failed successor exits.
const FAILED_ENDS_WITHIN: Duration = Duration::from_secs(10);
/// Predecessors that may still have requests. A further replacement waits until one of them has ended.
const LEAVING_MAX: usize = 4;

/// Why a worker is replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Cause {
    /// A signal: with the configuration as it is now, and with this stored program or the installed one.
    Signal(Option<SignedProgram>),
    /// The worker has stored this program.
    Update(SignedProgram),
}

#[derive(Debug)]
pub(super) enum Input {
    Event {
        worker: WorkerId,
        event: Event,
    },
    /// `code` is `None` if a signal ended the worker, or if it could not be started.
    Exited {
        worker: WorkerId,
        code: Option<u8>,
    },
    /// Replace the worker.
    Replace(Option<SignedProgram>),
    /// Finish all requests; a second time: end at once.
    Stop,
    /// Exit, and leave the worker to the next supervisor.
    Detach,
    /// A deadline may have passed.
    Time,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Start a worker with this stored program, or with the installed one.
    Start {
        worker: WorkerId,
        program: Option<SignedProgram>,
        required: Vec<String>,
    },
    Tell {
        worker: WorkerId,
        message: ToWorker,
    },
    Kill {
        worker: WorkerId,
    },
    /// Use this stored program at the next start; `None` for the installed one.
    Choose {
        program: Option<SignedProgram>,
    },
    /// Never start this program again.
    Refuse {
        program: SignedProgram,
        error: String,
    },
    Exit {
        code: u8,
    },
}

/// The workers of a supervisor.
pub(super) struct Supervision {
    started: WorkerId,
    current: Current,
    step: Step,
    /// Replacement that waits for the present one.
    next: Option<Cause>,
    /// Workers that finish their requests, each with the time at which it is killed.
    leaving: Vec<(WorkerId, Option<Instant>)>,
    is_stopping: bool,
}

/// The worker that serves.
struct Current {
    worker: WorkerId,
    program: Option<SignedProgram>,
    /// `None` once the program has proved itself.
    trial: Option<Trial>,
    has_exited: bool,
}

struct Trial {
    until: Instant,
    /// The program before.
    fallback: Option<SignedProgram>,
}

enum Step {
    Steady,
    /// The current worker was told to expect a successor.
    Announced {
        cause: Cause,
        until: Instant,
    },
    Starting {
        candidate: WorkerId,
        cause: Cause,
        until: Instant,
    },
    Detaching {
        until: Instant,
    },
}

impl Supervision {
    /// Starts the first worker, with this stored program or with the installed one.
    pub(super) fn new(program: Option<SignedProgram>, now: Instant) -> (Self, Vec<Action>) {
        let trial = program.as_ref().map(|_| Trial { until: now + TRIAL, fallback: None });
        let start = Action::Start { worker: 0, program: program.clone(), required: Vec::new() };
        let supervision = Self {
            started: 1,
            current: Current { worker: 0, program, trial, has_exited: false },
            step: Step::Steady,
            next: None,
            leaving: Vec::new(),
            is_stopping: false,
        };
        (supervision, vec![start])
    }

    /// When [`Input::Time`] is due.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let step = match &self.step {
            Step::Steady => None,
            Step::Announced { until, .. } | Step::Starting { until, .. } | Step::Detaching { until } => Some(*until),
        };
        let trial = self.current.trial.as_ref().map(|trial| trial.until);
        self.leaving.iter().filter_map(|(_, until)| *until).chain(step).chain(trial).min()
    }

    /// Returns the actions to take, in order.
    pub(super) fn handle(&mut self, input: Input, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        match input {
            Input::Event { worker, event } => self.event(worker, event, now, &mut actions),
            Input::Exited { worker, code } => self.exited(worker, code, now, &mut actions),
            Input::Replace(program) => self.replace(Cause::Signal(program), now, &mut actions),
            Input::Stop => self.stop(&mut actions),
            Input::Detach => self.detach(now, &mut actions),
            Input::Time => self.time(now, &mut actions),
        }
        actions
    }

    fn event(&mut self, worker: WorkerId, event: Event, now: Instant, actions: &mut Vec<Action>) {
        match (event, &self.step) {
            (Event::Serving { .. }, Step::Detaching { .. }) if worker == self.current.worker => {
                actions.push(Action::Exit { code: 0 });
            }
            (Event::Serving { hostnames }, Step::Announced { cause, .. }) if worker == self.current.worker => {
                let cause = cause.clone();
                let candidate = self.started;
                self.started += 1;
                let program = cause.program();
                actions.push(Action::Start { worker: candidate, program, required: hostnames });
                self.step = Step::Starting { candidate, cause, until: now + TRIAL };
            }
            (Event::Ready, Step::Starting { candidate, .. }) if worker == *candidate => {
                self.promote(now, actions);
            }
            (Event::Update { program }, _) if worker == self.current.worker => {
                self.replace(Cause::Update(program), now, actions);
            }
            _ => {}
        }
    }

    /// The candidate serves from now on.
    fn promote(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let Step::Starting { candidate, cause, .. } = std::mem::replace(&mut self.step, Step::Steady) else { return };
        let program = cause.program();
        let trial = matches!(cause, Cause::Update(_))
            .then(|| Trial { until: now + TRIAL, fallback: self.current.program.clone() });
        if let Cause::Update(program) = cause {
            tracing::info!(version = %program.version, "the agent is updated");
            actions.push(Action::Choose { program: Some(program) });
        }
        let current = Current { worker: candidate, program, trial, has_exited: false };
        let before = std::mem::replace(&mut self.current, current);
        if !before.has_exited {
            actions.push(Action::Tell { worker: before.worker, message: ToWorker::Succeeded });
            self.leaving.push((before.worker, None));
        }
        self.begin_next(now, actions);
    }

    /// The candidate does not serve: the current worker goes on.
    fn give_up(&mut self, error: &str, now: Instant, actions: &mut Vec<Action>) {
        let (Step::Starting { cause, .. } | Step::Announced { cause, .. }) =
            std::mem::replace(&mut self.step, Step::Steady)
        else {
            return;
        };
        if !self.current.has_exited {
            actions.push(Action::Tell { worker: self.current.worker, message: ToWorker::Resume });
        }
        match cause {
            Cause::Signal(_) => {
                tracing::error!(error, "the agent is not replaced, and goes on with the configuration that it has");
            }
            Cause::Update(program) => {
                let message = ToWorker::UpdateFailed { program: program.clone(), error: error.to_owned() };
                actions.push(Action::Refuse { program, error: error.to_owned() });
                actions.push(Action::Tell { worker: self.current.worker, message });
            }
        }
        self.begin_next(now, actions);
    }

    fn exited(&mut self, worker: WorkerId, code: Option<u8>, now: Instant, actions: &mut Vec<Action>) {
        self.leaving.retain(|(leaving, _)| *leaving != worker);
        if worker == self.current.worker {
            self.current.has_exited = true;
        }
        if self.is_stopping {
            if self.current.has_exited && self.leaving.is_empty() {
                actions.push(Action::Exit { code: 0 });
            }
        } else if matches!(&self.step, Step::Starting { candidate, .. } if *candidate == worker) {
            let error = match code {
                Some(code) => format!("the new process ended with exit code {code} before it had its tunnels"),
                None => "the new process crashed, or could not be started, before it had its tunnels".to_owned(),
            };
            self.give_up(&error, now, actions);
        } else if worker == self.current.worker {
            self.current_exited(code, now, actions);
        } else {
            self.begin_next(now, actions);
        }
    }

    fn current_exited(&mut self, code: Option<u8>, now: Instant, actions: &mut Vec<Action>) {
        if matches!(self.step, Step::Starting { .. }) {
            tracing::error!(code, "the agent's process ended by itself; the one that starts takes its place");
            return self.promote(now, actions);
        }
        // Exit code 2: the configuration is wrong, whatever the program.
        let trial = self.current.trial.take().filter(|trial| now < trial.until && code != Some(2));
        let (Some(trial), Some(program)) = (trial, self.current.program.take()) else {
            return actions.push(Action::Exit { code: code.unwrap_or(1) });
        };
        let error = "the updated agent ended by itself within a minute".to_owned();
        tracing::error!(version = %program.version, code, "{error}: going back to the program before");
        actions.push(Action::Refuse { program, error });
        actions.push(Action::Choose { program: trial.fallback.clone() });
        let worker = self.started;
        self.started += 1;
        actions.push(Action::Start { worker, program: trial.fallback.clone(), required: Vec::new() });
        self.current = Current { worker, program: trial.fallback, trial: None, has_exited: false };
        self.step = Step::Steady;
        self.begin_next(now, actions);
    }

    fn replace(&mut self, cause: Cause, now: Instant, actions: &mut Vec<Action>) {
        if !self.is_stopping {
            self.next = Some(cause);
            self.begin_next(now, actions);
        }
    }

    fn begin_next(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if !matches!(self.step, Step::Steady) || self.leaving.len() >= LEAVING_MAX {
            if self.next.is_some() {
                tracing::warn!("the agent's process is replaced again once earlier ones have finished their requests");
            }
            return;
        }
        if let Some(cause) = self.next.take() {
            actions.push(Action::Tell { worker: self.current.worker, message: ToWorker::ExpectSuccessor });
            self.step = Step::Announced { cause, until: now + ANSWER_WITHIN };
        }
    }

    fn stop(&mut self, actions: &mut Vec<Action>) {
        let mut workers: Vec<WorkerId> = self.leaving.iter().map(|(worker, _)| *worker).collect();
        if !self.current.has_exited {
            workers.push(self.current.worker);
        }
        if let Step::Starting { candidate, .. } = std::mem::replace(&mut self.step, Step::Steady) {
            workers.push(candidate);
            self.leaving.push((candidate, None));
        }
        if self.is_stopping {
            actions.extend(workers.into_iter().map(|worker| Action::Kill { worker }));
            actions.push(Action::Exit { code: 1 });
        } else {
            self.is_stopping = true;
            let message = |worker| Action::Tell { worker, message: ToWorker::Stop };
            actions.extend(workers.into_iter().map(message));
        }
    }

    fn detach(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.is_stopping || self.current.has_exited {
            return actions.push(Action::Exit { code: 0 });
        }
        if let Step::Starting { candidate, .. } = self.step {
            actions.push(Action::Kill { worker: candidate });
        }
        actions.push(Action::Tell { worker: self.current.worker, message: ToWorker::Detach });
        self.step = Step::Detaching { until: now + DETACH_WITHIN };
    }

    fn time(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.current.trial.as_ref().is_some_and(|trial| trial.until <= now) {
            self.current.trial = None;
        }
        for (worker, until) in &mut self.leaving {
            if until.is_some_and(|until| until <= now) {
                *until = None;
                actions.push(Action::Kill { worker: *worker });
            }
        }
        match &self.step {
            Step::Detaching { until } if *until <= now => actions.push(Action::Exit { code: 0 }),
            Step::Announced { until, .. } if *until <= now => {
                self.give_up("the agent's process does not answer", now, actions);
            }
            Step::Starting { candidate, until, .. } if *until <= now => {
                let candidate = *candidate;
                let error = format!("the new process had no tunnel within {} s", TRIAL.as_secs());
                self.give_up(&error, now, actions);
                // After the current worker has got its tunnels back.
                actions.push(Action::Tell { worker: candidate, message: ToWorker::Stop });
                self.leaving.push((candidate, Some(now + FAILED_ENDS_WITHIN)));
            }
            _ => {}
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
