use aws_lc_rs::signature::Ed25519KeyPair;
use gw_shared::identity::program::TARGET;

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
        assert_eq!(
            actions,
            [Action::Start {
                worker: 0,
                program,
                required: Vec::new()
            }]
        );
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
        assert_eq!(
            it.event(
                0,
                AgentEvent::Update {
                    program: update.clone()
                }
            ),
            [tell(0, ToWorker::ExpectSuccessor)]
        );
        let next = it.begin(0, Some(&update));
        (it, update, next)
    }

    fn input(&mut self, input: Input) -> Vec<Action> {
        self.supervision.handle(input, self.now)
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
        let actions = self.event(
            current,
            AgentEvent::Serving {
                hostnames: vec!["a".into()],
            },
        );
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
            (started.as_ref(), required.as_slice()),
            (program, ["a".to_owned()].as_slice())
        );
        *worker
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

fn tell(worker: WorkerNumber, message: ToWorker) -> Action {
    Action::Tell { worker, message }
}

#[test]
fn a_replaced_worker_finishes_after_its_successor_has_tunnels() {
    let mut it = Scenario::installed();
    assert_eq!(
        it.input(Input::Replace(None)),
        [tell(0, ToWorker::ExpectSuccessor)]
    );
    let next = it.begin(0, None);
    assert_eq!(it.event(0, AgentEvent::Ready), [], "not of the candidate");
    assert_eq!(
        it.event(next, AgentEvent::Ready),
        [tell(0, ToWorker::Succeeded)]
    );
    assert_eq!(
        it.input(Input::Exited {
            worker: 0,
            code: Some(0)
        }),
        []
    );
    assert_eq!(it.supervision.deadline(), None);
    // The successor is the one that ends the supervisor.
    assert_eq!(
        it.input(Input::Exited {
            worker: next,
            code: Some(3)
        }),
        [Action::Exit { code: 3 }]
    );
}

#[test]
fn a_replacement_that_fails_leaves_the_worker_serving() {
    let mut it = Scenario::installed();
    it.input(Input::Replace(None));
    let next = it.begin(0, None);
    let actions = it.input(Input::Exited {
        worker: next,
        code: Some(2),
    });
    assert_eq!(
        actions,
        [tell(0, ToWorker::Resume)],
        "a wrong configuration"
    );

    it.input(Input::Replace(None));
    let silent = it.begin(0, None);
    // The current worker opens its tunnels again before the other one stops.
    assert_eq!(
        it.wait(),
        [
            tell(silent, ToWorker::ExpectSuccessor),
            tell(0, ToWorker::Resume)
        ]
    );
    assert_eq!(it.wait(), [tell(silent, ToWorker::Stop)]);
    assert_eq!(it.wait(), [Action::Kill { worker: silent }]);
    assert_eq!(
        it.input(Input::Exited {
            worker: silent,
            code: None
        }),
        []
    );

    it.input(Input::Replace(None));
    assert_eq!(
        it.wait(),
        [tell(0, ToWorker::Resume)],
        "the worker does not answer"
    );
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
    assert_eq!(
        actions[..2],
        [
            tell(next, ToWorker::ExpectSuccessor),
            tell(0, ToWorker::Resume)
        ]
    );

    for (code, expected) in [
        (Some(7), Blame::Program),
        (None, Blame::Program),
        (Some(2), Blame::Other),
    ] {
        let (mut it, update, next) = Scenario::updating();
        let actions = it.input(Input::Exited { worker: next, code });
        assert_eq!(actions[0], tell(0, ToWorker::Resume));
        let (_, blame, worker) = failure(&actions, &update);
        assert_eq!((blame, worker), (expected, Some(0)), "{code:?}");
    }
    let (mut it, update, next) = Scenario::updating();
    let actions = it.input(Input::NotStarted {
        worker: next,
        error: "no memory".into(),
        blame: Blame::Unclear,
    });
    assert_eq!(
        failure(&actions, &update),
        ("no memory".into(), Blame::Unclear, Some(0))
    );
}

#[test]
fn an_update_waits_until_the_agent_has_tunnels() {
    let mut it = Scenario::installed();
    let update = program("9.0.0");
    it.event(
        0,
        AgentEvent::Update {
            program: update.clone(),
        },
    );
    let actions = it.event(
        0,
        AgentEvent::Serving {
            hostnames: Vec::new(),
        },
    );
    assert_eq!(actions[0], tell(0, ToWorker::Resume));
    assert_eq!(failure(&actions, &update).1, Blame::Other);
    // A new configuration does not wait: it may be the remedy.
    it.input(Input::Replace(None));
    let actions = it.event(
        0,
        AgentEvent::Serving {
            hostnames: Vec::new(),
        },
    );
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
    assert_eq!(
        it.event(next, AgentEvent::Ready),
        [chosen, tell(0, ToWorker::Succeeded)]
    );
    // A new configuration does not end the trial.
    it.input(Input::Replace(Some(update.clone())));
    let again = it.begin(next, Some(&update));
    assert_eq!(
        it.event(again, AgentEvent::Ready),
        [tell(next, ToWorker::Succeeded)]
    );
    let actions = it.input(Input::Exited {
        worker: again,
        code: None,
    });
    let (_, blame, worker) = failure(&actions, &update);
    assert_eq!((blame, worker), (Blame::Program, None));
    assert_eq!(
        actions[1],
        Action::Choose {
            program: None,
            is_proven: true
        }
    );
    assert!(matches!(actions[2], Action::Start { program: None, .. }));
    assert_eq!(it.supervision.deadline(), None, "the trial is over");
}

#[test]
fn a_program_is_proven_by_a_minute_with_tunnels() {
    let update = program("9.0.0");
    let mut it = Scenario::new(Some(update.clone()), false);
    assert_eq!(it.wait(), [], "it had no tunnel");
    it.event(0, AgentEvent::Connected);
    assert_eq!(it.wait(), [Action::Prove]);
    assert_eq!(it.supervision.deadline(), None);
    // After that, a crash ends the supervisor, and the service manager starts it again.
    assert_eq!(
        it.input(Input::Exited {
            worker: 0,
            code: None
        }),
        [Action::Exit { code: 1 }]
    );
    let mut it = Scenario::new(Some(update.clone()), true);
    assert_eq!(
        it.input(Input::Exited {
            worker: 0,
            code: None
        }),
        [Action::Exit { code: 1 }]
    );
    // So does a wrong configuration at any time.
    let mut it = Scenario::new(Some(update.clone()), false);
    assert_eq!(
        it.input(Input::Exited {
            worker: 0,
            code: Some(2)
        }),
        [Action::Exit { code: 2 }]
    );
    let mut it = Scenario::new(Some(update.clone()), false);
    let actions = it.input(Input::Exited {
        worker: 0,
        code: Some(101),
    });
    assert_eq!(failure(&actions, &update).1, Blame::Program);
}

#[test]
fn the_installed_program_runs_if_the_stored_one_cannot_be_started() {
    let mut it = Scenario::new(Some(program("9.0.0")), true);
    let actions = it.input(Input::NotStarted {
        worker: 0,
        error: "no loader".into(),
        blame: Blame::Unclear,
    });
    assert_eq!(
        actions,
        [Action::Start {
            worker: 1,
            program: None,
            required: Vec::new()
        }]
    );
    let actions = it.input(Input::NotStarted {
        worker: 1,
        error: "no memory".into(),
        blame: Blame::Unclear,
    });
    assert_eq!(actions, [Action::Exit { code: 1 }]);
}

#[test]
fn a_worker_that_crashes_while_its_successor_starts_is_followed_by_it() {
    let mut it = Scenario::installed();
    it.input(Input::Replace(None));
    let next = it.begin(0, None);
    assert_eq!(
        it.input(Input::Exited {
            worker: 0,
            code: None
        }),
        []
    );
    assert_eq!(it.event(next, AgentEvent::Ready), []);
    assert_eq!(
        it.input(Input::Exited {
            worker: next,
            code: Some(1)
        }),
        [Action::Exit { code: 1 }]
    );

    // If the successor does not serve, another worker starts in place of the first one.
    for cause in [None, Some(program("9.0.0"))] {
        let mut it = Scenario::installed();
        match &cause {
            Some(update) => it.event(
                0,
                AgentEvent::Update {
                    program: update.clone(),
                },
            ),
            None => it.input(Input::Replace(None)),
        };
        let next = it.begin(0, cause.as_ref());
        it.input(Input::Exited {
            worker: 0,
            code: None,
        });
        let actions = it.input(Input::Exited {
            worker: next,
            code: Some(7),
        });
        let start = Action::Start {
            worker: 2,
            program: None,
            required: Vec::new(),
        };
        assert_eq!(actions.last(), Some(&start), "{actions:?}");
    }
}

#[test]
fn replacements_wait_for_the_one_under_way_and_for_workers_that_finish() {
    let mut it = Scenario::installed();
    let mut current = 0;
    for _ in 0..LEAVING_MAX {
        assert_eq!(
            it.input(Input::Replace(None)),
            [tell(current, ToWorker::ExpectSuccessor)]
        );
        assert_eq!(it.input(Input::Replace(None)), [], "one is under way");
        it.supervision.next_signal = None;
        let next = it.begin(current, None);
        it.event(next, AgentEvent::Ready);
        current = next;
    }
    assert_eq!(it.input(Input::Replace(None)), [], "too many have requests");
    let actions = it.input(Input::Exited {
        worker: 0,
        code: Some(0),
    });
    assert_eq!(actions, [tell(current, ToWorker::ExpectSuccessor)]);
}

#[test]
fn a_stop_waits_for_all_workers_and_a_second_one_kills_them() {
    let mut it = Scenario::installed();
    it.input(Input::Replace(None));
    let next = it.begin(0, None);
    let stopped = it.input(Input::Stop);
    assert_eq!(
        stopped,
        [tell(0, ToWorker::Stop), tell(next, ToWorker::Stop)]
    );
    assert_eq!(
        it.input(Input::Exited {
            worker: 0,
            code: Some(0)
        }),
        []
    );
    assert_eq!(it.input(Input::Replace(None)), [], "it stops");
    assert_eq!(
        it.input(Input::Hangup),
        [],
        "a closed terminal is no second signal"
    );
    assert_eq!(
        it.input(Input::Stop),
        [Action::Kill { worker: next }, Action::Exit { code: 1 }]
    );
    assert_eq!(
        it.input(Input::Exited {
            worker: next,
            code: None
        }),
        [Action::Exit { code: 0 }]
    );
}

#[test]
fn a_detached_worker_is_left_to_the_next_supervisor() {
    let mut it = Scenario::installed();
    assert_eq!(it.input(Input::Detach), [tell(0, ToWorker::Detach)]);
    assert_eq!(
        it.event(
            0,
            AgentEvent::Serving {
                hostnames: Vec::new()
            }
        ),
        [Action::Exit { code: 0 }]
    );

    let mut it = Scenario::installed();
    it.input(Input::Replace(None));
    let next = it.begin(0, None);
    assert_eq!(
        it.input(Input::Detach),
        [tell(0, ToWorker::Detach), tell(next, ToWorker::Detach)]
    );
    assert_eq!(it.wait(), [Action::Exit { code: 0 }], "the worker hangs");
}

#[test]
fn a_reload_and_an_update_that_wait_are_both_done_with_the_new_program() {
    let (mut it, update, next) = Scenario::updating();
    let later = program("9.0.1");
    assert_eq!(it.input(Input::Replace(None)), [], "an update is under way");
    let actions = it.event(next, AgentEvent::Ready);
    assert_eq!(actions.last(), Some(&tell(next, ToWorker::ExpectSuccessor)));
    assert_eq!(
        it.event(
            next,
            AgentEvent::Update {
                program: later.clone()
            }
        ),
        [],
        "a reload is under way"
    );
    let reloaded = it.begin(next, Some(&update));
    let actions = it.event(reloaded, AgentEvent::Ready);
    assert_eq!(
        actions.last(),
        Some(&tell(reloaded, ToWorker::ExpectSuccessor))
    );
    it.begin(reloaded, Some(&later));
}

#[test]
fn a_program_that_has_crashed_is_not_proven() {
    let (mut it, update, next) = Scenario::updating();
    it.event(next, AgentEvent::Ready);
    it.input(Input::Exited {
        worker: 0,
        code: Some(0),
    });
    it.now += TRIAL / 2;
    it.input(Input::Replace(Some(update.clone())));
    let reloaded = it.begin(next, Some(&update));
    assert_eq!(
        it.input(Input::Exited {
            worker: next,
            code: None
        }),
        []
    );
    assert_eq!(it.wait(), [], "the end of the trial");
    let actions = it.input(Input::Exited {
        worker: reloaded,
        code: None,
    });
    assert!(
        matches!(
            actions.last(),
            Some(Action::Start {
                program: Some(_),
                ..
            })
        ),
        "{actions:?}"
    );
    let worker = it.supervision.current.worker;
    let actions = it.input(Input::Exited { worker, code: None });
    assert_eq!(failure(&actions, &update).1, Blame::Program);
}
