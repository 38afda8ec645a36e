//! Events of the workers of a supervisor, and its actions on them.

use gw_shared::identity::program::SignedProgram;

use crate::process::messages::ToWorker;
use crate::succession::AgentEvent;

/// Number of a worker, in the order in which they start.
pub(in crate::process) type WorkerNumber = u32;

#[derive(Debug)]
pub(in crate::process) enum Input {
    Event {
        worker: WorkerNumber,
        event: AgentEvent,
    },
    /// `code` is `None` if a signal ended the worker.
    Exited {
        worker: WorkerNumber,
        code: Option<u8>,
    },
    /// `blame` is about the program of the worker.
    NotStarted {
        worker: WorkerNumber,
        error: String,
        blame: Blame,
    },
    /// Replace the worker, by one with this stored program or with the installed one.
    Replace(Option<SignedProgram>),
    /// Finish all requests; a second time: end at once.
    Stop,
    /// Finish all requests, unless that has begun. A closed terminal sends SIGHUP twice.
    Hangup,
    /// Exit, and leave the worker to the next supervisor.
    Detach,
    /// A deadline may have passed.
    Time,
}

#[derive(Debug, PartialEq, Eq)]
pub(in crate::process) enum Action {
    /// Start a worker with this stored program, or with the installed one.
    Start {
        worker: WorkerNumber,
        program: Option<SignedProgram>,
        required: Vec<String>,
    },
    Tell {
        worker: WorkerNumber,
        message: ToWorker,
    },
    Kill {
        worker: WorkerNumber,
    },
    /// Use this stored program at the next start; `None` for the installed one. A proven program
    /// has no trial then.
    Choose {
        program: Option<SignedProgram>,
        is_proven: bool,
    },
    /// The chosen program has served for the time of its trial: others are not needed any more.
    Prove,
    /// Store that the program has failed, and tell a running worker the consequence.
    Fail {
        program: SignedProgram,
        error: String,
        blame: Blame,
        worker: Option<WorkerNumber>,
    },
    Exit {
        code: u8,
    },
}

/// What a failed update says about its program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::process) enum Blame {
    /// The program ended by itself: it is not tried again.
    Program,
    /// The cause may be elsewhere, in the network too: the program is tried again, and the failure
    /// is recorded.
    Unclear,
    /// The cause is elsewhere: the program is tried again.
    Other,
}
