use aws_lc_rs::signature::Ed25519KeyPair;
use gw_shared::identity::program::TARGET;

use super::ToWorker::{ExpectSuccessor, Resume, Succeeded};
use super::*;

/// A supervision, its time, and the actions of each input.
struct Scenario {
    supervision: Supervision,
    now: Instant,
}

impl Scenario {
    fn new(program: Option<SignedProgram>, is_proven: bool) -> Self {
        let now = Instant::now();
        let (supervision, actions) = Supervision::new(program.clone(), is_proven, now);
        assert_eq!(actions, [start(0, program)]);
        Self { supervision, now }
    }

    /// Starts with the installed program.
    fn installed() -> Self {
        Self::new(None, false)
    }

    /// Starts with the installed program and an update of it. Returns the update and its worker.
    fn updating() -> (Self, SignedProgram, WorkerNumber) {
        let mut it = Self::installed();
        let update = program("9.0.0");
        assert_eq!(it.offer(0, &update), [tell(0, ExpectSuccessor)]);
        let next = it.begin(0, Some(&update));
        (it, update, next)
    }

    fn input(&mut self, input: Input) -> Vec<Action> {
        self.supervision.handle(input, self.now)
    }

    fn exited(&mut self, worker: WorkerNumber, code: Option<u8>) -> Vec<Action> {
        self.input(Input::Exited { worker, code })
    }

    fn not_started(&mut self, worker: WorkerNumber, error: &str) -> Vec<Action> {
        self.input(Input::NotStarted {
            worker,
            error: error.into(),
            blame: Blame::Unclear,
        })
    }

    fn serving(&mut self, worker: WorkerNumber, hostnames: &[&str]) -> Vec<Action> {
        let hostnames = hostnames.iter().map(ToString::to_string).collect();
        self.event(worker, AgentEvent::Serving { hostnames })
    }

    fn offer(&mut self, worker: WorkerNumber, program: &SignedProgram) -> Vec<Action> {
        let program = program.clone();
        self.event(worker, AgentEvent::Update { program })
    }

    fn ready(&mut self, worker: WorkerNumber) -> Vec<Action> {
        self.event(worker, AgentEvent::Ready)
    }

    fn replace(&mut self, program: Option<SignedProgram>) -> Vec<Action> {
        self.input(Input::Replace(program))
    }

    fn event(&mut self, worker: WorkerNumber, event: AgentEvent) -> Vec<Action> {
        self.input(Input::Event { worker, event })
    }

    /// The time passes until the next deadline.
    fn wait(&mut self) -> Vec<Action> {
        self.now = self.supervision.deadline().expect("a deadline");
        self.input(Input::Time)
    }

    /// `current` announces what it serves, and the successor starts.
    fn begin(&mut self, current: WorkerNumber, program: Option<&SignedProgram>) -> WorkerNumber {
        let actions = self.serving(current, &["a"]);
        let [
            Action::Start {
                worker,
                program: started,
                required,
            },
        ] = actions.as_slice()
        else {
            panic!("{actions:?}")
        };
        assert_eq!(
            (started.as_ref(), &required[..]),
            (program, &["a".to_owned()][..])
        );
        *worker
    }

    /// As [`Self::begin`], after a reload.
    fn reload(&mut self) -> WorkerNumber {
        self.replace(None);
        self.begin(0, None)
    }
}

fn program(version: &str) -> SignedProgram {
    SignedProgram::sign(
        version.parse().unwrap(),
        TARGET,
        version.as_bytes(),
        &Ed25519KeyPair::generate().unwrap(),
    )
}

fn start(worker: WorkerNumber, program: Option<SignedProgram>) -> Action {
    Action::Start {
        worker,
        program,
        required: Vec::new(),
    }
}

fn tell(worker: WorkerNumber, message: ToWorker) -> Action {
    Action::Tell { worker, message }
}

#[test]
fn a_replaced_worker_finishes_after_its_successor_has_tunnels() {
    let mut it = Scenario::installed();
    assert_eq!(it.replace(None), [tell(0, ExpectSuccessor)]);
    let next = it.begin(0, None);
    assert_eq!(it.ready(0), [], "not of the candidate");
    assert_eq!(it.ready(next), [tell(0, Succeeded)]);
    assert_eq!(it.exited(0, Some(0)), []);
    assert_eq!(it.supervision.deadline(), None);
    // The successor is the one that ends the supervisor.
    assert_eq!(it.exited(next, Some(3)), [Action::Exit { code: 3 }]);
}

#[test]
fn a_replacement_that_fails_leaves_the_worker_serving() {
    let mut it = Scenario::installed();
    let next = it.reload();
    let actions = it.exited(next, Some(2));
    assert_eq!(actions, [tell(0, Resume)], "a wrong configuration");
}

#[test]
fn a_replacement_that_never_serves_is_stopped_and_then_killed() {
    let mut it = Scenario::installed();
    let silent = it.reload();
    // The current worker opens its tunnels again before the other one stops.
    assert_eq!(it.wait(), [tell(silent, ExpectSuccessor), tell(0, Resume)]);
    assert_eq!(it.wait(), [tell(silent, ToWorker::Stop)]);
    assert_eq!(it.wait(), [Action::Kill { worker: silent }]);
    assert_eq!(it.exited(silent, None), []);
}

#[test]
fn a_worker_that_does_not_answer_a_reload_resumes() {
    let mut it = Scenario::installed();
    it.replace(None);
    assert_eq!(it.wait(), [tell(0, Resume)]);
}

/// The only failure among `actions`: its error, and what it says about `program`.
fn failure(actions: &[Action], program: &SignedProgram) -> (String, Blame, Option<WorkerNumber>) {
    let failures = actions.iter().filter_map(|action| match action {
        Action::Fail {
            program: failed,
            error,
            blame,
            worker,
        } if failed == program => Some((error.clone(), *blame, *worker)),
        _ => None,
    });
    let failures: Vec<_> = failures.collect();
    let [failure] = failures.as_slice() else {
        panic!("{actions:?}")
    };
    failure.clone()
}

#[test]
fn an_update_that_does_not_serve_is_given_up_and_the_old_program_goes_on() {
    let (mut it, update, next) = Scenario::updating();
    let actions = it.wait();
    let (error, blame, worker) = failure(&actions, &update);
    assert!(
        error.contains("60 s") && blame == Blame::Unclear && worker == Some(0),
        "{actions:?}"
    );
    assert_eq!(actions[..2], [tell(next, ExpectSuccessor), tell(0, Resume)]);
}

#[test]
fn an_update_that_exits_is_to_blame_unless_its_configuration_is_wrong() {
    for (code, expected) in [
        (Some(7), Blame::Program),
        (None, Blame::Program),
        (Some(2), Blame::Other),
    ] {
        let (mut it, update, next) = Scenario::updating();
        let actions = it.exited(next, code);
        assert_eq!(actions[0], tell(0, Resume));
        let (_, blame, worker) = failure(&actions, &update);
        assert_eq!((blame, worker), (expected, Some(0)), "{code:?}");
    }
}

#[test]
fn an_update_that_does_not_start_may_not_be_to_blame() {
    let (mut it, update, next) = Scenario::updating();
    let actions = it.not_started(next, "no memory");
    let expected = ("no memory".into(), Blame::Unclear, Some(0));
    assert_eq!(failure(&actions, &update), expected);
}

#[test]
fn an_update_waits_until_the_agent_has_tunnels() {
    let mut it = Scenario::installed();
    let update = program("9.0.0");
    it.offer(0, &update);
    let actions = it.serving(0, &[]);
    assert_eq!(actions[0], tell(0, Resume));
    assert_eq!(failure(&actions, &update).1, Blame::Other);
}

#[test]
fn a_new_configuration_does_not_wait_for_tunnels() {
    let mut it = Scenario::installed();
    it.replace(None);
    let actions = it.serving(0, &[]);
    assert!(
        matches!(&actions[..], [Action::Start { .. }]),
        "{actions:?}"
    );
}

#[test]
fn an_updated_program_that_crashes_within_its_trial_is_replaced_by_the_one_before() {
    let (mut it, update, next) = Scenario::updating();
    let chosen = Action::Choose {
        program: Some(update.clone()),
        is_proven: false,
    };
    assert_eq!(it.ready(next), [chosen, tell(0, Succeeded)]);
    // A new configuration does not end the trial.
    it.replace(Some(update.clone()));
    let again = it.begin(next, Some(&update));
    assert_eq!(it.ready(again), [tell(next, Succeeded)]);
    let actions = it.exited(again, None);
    let (_, blame, worker) = failure(&actions, &update);
    assert_eq!((blame, worker), (Blame::Program, None));
    let chosen = Action::Choose {
        program: None,
        is_proven: true,
    };
    assert_eq!(actions[1], chosen);
    assert!(matches!(actions[2], Action::Start { program: None, .. }));
    assert_eq!(it.supervision.deadline(), None, "the trial is over");
}

#[test]
fn a_program_is_proven_by_a_minute_with_tunnels() {
    let update = program("9.0.0");
    let mut it = Scenario::new(Some(update), false);
    assert_eq!(it.wait(), [], "it had no tunnel");
    it.event(0, AgentEvent::Connected);
    assert_eq!(it.wait(), [Action::Prove]);
    assert_eq!(it.supervision.deadline(), None);
    // After that, a crash ends the supervisor, and the service manager starts it again.
    assert_eq!(it.exited(0, None), [Action::Exit { code: 1 }]);
}

#[test]
fn the_supervisor_ends_with_a_proven_program_or_a_wrong_configuration() {
    for (is_proven, exit, code) in [(true, None, 1), (false, Some(2), 2)] {
        let mut it = Scenario::new(Some(program("9.0.0")), is_proven);
        assert_eq!(it.exited(0, exit), [Action::Exit { code }], "{exit:?}");
    }
}

#[test]
fn a_program_that_crashes_at_its_start_is_to_blame() {
    let update = program("9.0.0");
    let mut it = Scenario::new(Some(update.clone()), false);
    let actions = it.exited(0, Some(101));
    assert_eq!(failure(&actions, &update).1, Blame::Program);
}

#[test]
fn the_installed_program_runs_if_the_stored_one_cannot_be_started() {
    let mut it = Scenario::new(Some(program("9.0.0")), true);
    let actions = it.not_started(0, "no loader");
    assert_eq!(actions, [start(1, None)]);
    let actions = it.not_started(1, "no memory");
    assert_eq!(actions, [Action::Exit { code: 1 }]);
}

#[test]
fn a_worker_that_crashes_while_its_successor_starts_is_followed_by_it() {
    let mut it = Scenario::installed();
    let next = it.reload();
    assert_eq!(it.exited(0, None), []);
    assert_eq!(it.ready(next), []);
    assert_eq!(it.exited(next, Some(1)), [Action::Exit { code: 1 }]);
}

#[test]
fn another_worker_starts_if_a_worker_and_its_successor_have_crashed() {
    for cause in [None, Some(program("9.0.0"))] {
        let mut it = Scenario::installed();
        match &cause {
            Some(update) => it.offer(0, update),
            None => it.replace(None),
        };
        let next = it.begin(0, cause.as_ref());
        it.exited(0, None);
        let actions = it.exited(next, Some(7));
        let start = start(2, None);
        assert_eq!(actions.last(), Some(&start), "{actions:?}");
    }
}

#[test]
fn replacements_wait_for_the_one_under_way_and_for_workers_that_finish() {
    let mut it = Scenario::installed();
    let mut current = 0;
    for _ in 0..LEAVING_MAX {
        assert_eq!(it.replace(None), [tell(current, ExpectSuccessor)]);
        assert_eq!(it.replace(None), [], "one is under way");
        it.supervision.next_signal = None;
        let next = it.begin(current, None);
        it.ready(next);
        current = next;
    }
    assert_eq!(it.replace(None), [], "too many have requests");
    let actions = it.exited(0, Some(0));
    assert_eq!(actions, [tell(current, ExpectSuccessor)]);
}

#[test]
fn a_stop_waits_for_all_workers_and_a_second_one_kills_them() {
    let mut it = Scenario::installed();
    let next = it.reload();
    let stopped = it.input(Input::Stop);
    assert_eq!(
        stopped,
        [tell(0, ToWorker::Stop), tell(next, ToWorker::Stop)]
    );
    assert_eq!(it.exited(0, Some(0)), []);
    assert_eq!(it.replace(None), [], "it stops");
    assert_eq!(
        it.input(Input::Hangup),
        [],
        "a closed terminal is no second signal"
    );
    assert_eq!(
        it.input(Input::Stop),
        [Action::Kill { worker: next }, Action::Exit { code: 1 }]
    );
    assert_eq!(it.exited(next, None), [Action::Exit { code: 0 }]);
}

#[test]
fn a_detached_worker_is_left_to_the_next_supervisor() {
    let mut it = Scenario::installed();
    assert_eq!(it.input(Input::Detach), [tell(0, ToWorker::Detach)]);
    assert_eq!(it.serving(0, &[]), [Action::Exit { code: 0 }]);
}

#[test]
fn a_worker_that_hangs_does_not_keep_a_detached_supervisor() {
    let mut it = Scenario::installed();
    let next = it.reload();
    assert_eq!(
        it.input(Input::Detach),
        [tell(0, ToWorker::Detach), tell(next, ToWorker::Detach)]
    );
    assert_eq!(it.wait(), [Action::Exit { code: 0 }]);
}

#[test]
fn a_reload_and_an_update_that_wait_are_both_done_with_the_new_program() {
    let (mut it, update, next) = Scenario::updating();
    let later = program("9.0.1");
    assert_eq!(it.replace(None), [], "an update is under way");
    let actions = it.ready(next);
    assert_eq!(actions.last(), Some(&tell(next, ExpectSuccessor)));
    assert_eq!(it.offer(next, &later), [], "a reload is under way");
    let reloaded = it.begin(next, Some(&update));
    let actions = it.ready(reloaded);
    assert_eq!(actions.last(), Some(&tell(reloaded, ExpectSuccessor)));
    it.begin(reloaded, Some(&later));
}

#[test]
fn a_program_that_has_crashed_is_not_proven() {
    let (mut it, update, next) = Scenario::updating();
    it.ready(next);
    it.exited(0, Some(0));
    it.now += TRIAL / 2;
    it.replace(Some(update.clone()));
    let reloaded = it.begin(next, Some(&update));
    assert_eq!(it.exited(next, None), []);
    assert_eq!(it.wait(), [], "the end of the trial");
    let actions = it.exited(reloaded, None);
    let Some(Action::Start { program, .. }) = actions.last() else {
        panic!("{actions:?}")
    };
    assert!(program.is_some());
    let worker = it.supervision.current.worker;
    let actions = it.exited(worker, None);
    assert_eq!(failure(&actions, &update).1, Blame::Program);
}
