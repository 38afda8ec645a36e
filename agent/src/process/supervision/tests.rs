use aws_lc_rs::signature::Ed25519KeyPair;
use gw_shared::identity::program::TARGET;

use super::*;

/// A supervision, its time, and the actions of each input.
struct Scenario {
    supervision: Supervision,
    now: Instant,
}

impl Scenario {
    fn new(program: Option<SignedProgram>) -> Self {
        let now = Instant::now();
        let (supervision, actions) = Supervision::new(program.clone(), now);
        assert_eq!(actions, [Action::Start { worker: 0, program, required: Vec::new() }]);
        Self { supervision, now }
    }

    fn input(&mut self, input: Input) -> Vec<Action> {
        self.supervision.handle(input, self.now)
    }

    fn event(&mut self, worker: WorkerId, event: Event) -> Vec<Action> {
        self.input(Input::Event { worker, event })
    }

    /// The time passes until the next deadline.
    fn wait(&mut self) -> Vec<Action> {
        self.now = self.supervision.deadline().expect("a deadline");
        self.input(Input::Time)
    }

    /// `current` announces what it serves, and the successor starts.
    fn begin(&mut self, current: WorkerId, program: Option<&SignedProgram>) -> WorkerId {
        let actions = self.event(current, Event::Serving { hostnames: vec!["a".into()] });
        let [Action::Start { worker, program: started, required }] = actions.as_slice() else { panic!("{actions:?}") };
        assert_eq!((started.as_ref(), required.as_slice()), (program, ["a".to_owned()].as_slice()));
        *worker
    }
}

fn program(version: &str) -> SignedProgram {
    SignedProgram::sign(version.parse().unwrap(), TARGET, version.as_bytes(), &Ed25519KeyPair::generate().unwrap())
}

fn tell(worker: WorkerId, message: ToWorker) -> Action {
    Action::Tell { worker, message }
}

#[test]
fn a_replaced_worker_finishes_after_its_successor_has_tunnels() {
    let mut it = Scenario::new(None);
    assert_eq!(it.input(Input::Replace(None)), [tell(0, ToWorker::ExpectSuccessor)]);
    let next = it.begin(0, None);
    assert_eq!(it.event(0, Event::Ready), [], "not of the candidate");
    assert_eq!(it.event(next, Event::Ready), [tell(0, ToWorker::Succeeded)]);
    assert_eq!(it.input(Input::Exited { worker: 0, code: Some(0) }), []);
    assert_eq!(it.supervision.deadline(), None);
    // The successor is the one that ends the supervisor.
    assert_eq!(it.input(Input::Exited { worker: next, code: Some(3) }), [Action::Exit { code: 3 }]);
}

#[test]
fn a_replacement_that_fails_leaves_the_worker_serving() {
    let mut it = Scenario::new(None);
    it.input(Input::Replace(None));
    let next = it.begin(0, None);
    let actions = it.input(Input::Exited { worker: next, code: Some(2) });
    assert_eq!(actions, [tell(0, ToWorker::Resume)], "a wrong configuration");

    it.input(Input::Replace(None));
    let silent = it.begin(0, None);
    assert_eq!(it.wait(), [tell(0, ToWorker::Resume), tell(silent, ToWorker::Stop)]);
    assert_eq!(it.wait(), [Action::Kill { worker: silent }]);
    assert_eq!(it.input(Input::Exited { worker: silent, code: None }), []);

    it.input(Input::Replace(None));
    assert_eq!(it.wait(), [tell(0, ToWorker::Resume)], "the worker does not answer");
}

#[test]
fn an_update_that_does_not_serve_is_refused_and_the_old_program_goes_on() {
    let mut it = Scenario::new(None);
    let update = program("9.0.0");
    assert_eq!(it.event(0, Event::Update { program: update.clone() }), [tell(0, ToWorker::ExpectSuccessor)]);
    let next = it.begin(0, Some(&update));
    let actions = it.wait();
    let Some(Action::Refuse { program, error }) = actions.get(1) else { panic!("{actions:?}") };
    assert!(*program == update && error.contains("60 s"), "{error}");
    let failed = ToWorker::UpdateFailed { program: update, error: error.clone() };
    assert_eq!(actions[0], tell(0, ToWorker::Resume));
    assert_eq!(actions[2..], [tell(0, failed), tell(next, ToWorker::Stop)]);
}

#[test]
fn an_updated_program_that_crashes_within_its_trial_is_replaced_by_the_one_before() {
    let mut it = Scenario::new(None);
    let update = program("9.0.0");
    it.event(0, Event::Update { program: update.clone() });
    let next = it.begin(0, Some(&update));
    let chosen = Action::Choose { program: Some(update.clone()) };
    assert_eq!(it.event(next, Event::Ready), [chosen, tell(0, ToWorker::Succeeded)]);
    let actions = it.input(Input::Exited { worker: next, code: None });
    assert!(matches!(&actions[0], Action::Refuse { program, .. } if *program == update));
    assert_eq!(actions[1], Action::Choose { program: None });
    assert!(matches!(actions[2], Action::Start { worker: 2, program: None, .. }));

    // After the trial, a crash ends the supervisor, and the service manager starts it again.
    let mut it = Scenario::new(Some(update.clone()));
    assert_eq!(it.wait(), []);
    assert_eq!(it.input(Input::Exited { worker: 0, code: None }), [Action::Exit { code: 1 }]);
    // So does a wrong configuration at any time.
    let mut it = Scenario::new(Some(update));
    assert_eq!(it.input(Input::Exited { worker: 0, code: Some(2) }), [Action::Exit { code: 2 }]);
}

#[test]
fn a_worker_that_crashes_while_its_successor_starts_is_followed_by_it() {
    let mut it = Scenario::new(None);
    it.input(Input::Replace(None));
    let next = it.begin(0, None);
    assert_eq!(it.input(Input::Exited { worker: 0, code: None }), []);
    assert_eq!(it.event(next, Event::Ready), []);
    assert_eq!(it.input(Input::Exited { worker: next, code: Some(1) }), [Action::Exit { code: 1 }]);
}

#[test]
fn replacements_wait_for_the_one_under_way_and_for_workers_that_finish() {
    let mut it = Scenario::new(None);
    let mut current = 0;
    for _ in 0..LEAVING_MAX {
        assert_eq!(it.input(Input::Replace(None)), [tell(current, ToWorker::ExpectSuccessor)]);
        assert_eq!(it.input(Input::Replace(None)), [], "one is under way");
        it.supervision.next = None;
        let next = it.begin(current, None);
        it.event(next, Event::Ready);
        current = next;
    }
    assert_eq!(it.input(Input::Replace(None)), [], "too many have requests");
    let actions = it.input(Input::Exited { worker: 0, code: Some(0) });
    assert_eq!(actions, [tell(current, ToWorker::ExpectSuccessor)]);
}

#[test]
fn a_stop_waits_for_all_workers_and_a_second_one_kills_them() {
    let mut it = Scenario::new(None);
    it.input(Input::Replace(None));
    let next = it.begin(0, None);
    let stopped = it.input(Input::Stop);
    assert_eq!(stopped, [tell(0, ToWorker::Stop), tell(next, ToWorker::Stop)]);
    assert_eq!(it.input(Input::Exited { worker: 0, code: Some(0) }), []);
    assert_eq!(it.input(Input::Replace(None)), [], "it stops");
    assert_eq!(it.input(Input::Stop), [Action::Kill { worker: next }, Action::Exit { code: 1 }]);
    assert_eq!(it.input(Input::Exited { worker: next, code: None }), [Action::Exit { code: 0 }]);
}

#[test]
fn a_detached_worker_is_left_to_the_next_supervisor() {
    let mut it = Scenario::new(None);
    assert_eq!(it.input(Input::Detach), [tell(0, ToWorker::Detach)]);
    assert_eq!(it.event(0, Event::Serving { hostnames: Vec::new() }), [Action::Exit { code: 0 }]);

    let mut it = Scenario::new(None);
    it.input(Input::Replace(None));
    let next = it.begin(0, None);
    assert_eq!(it.input(Input::Detach), [Action::Kill { worker: next }, tell(0, ToWorker::Detach)]);
    assert_eq!(it.wait(), [Action::Exit { code: 0 }], "the worker hangs");
}
