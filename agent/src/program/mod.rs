//! Agent programs: the gateway's offers, and the programs that this agent has stored.

pub(crate) mod executable;
pub(crate) mod stored;

use std::cell::{Cell, RefCell};

use gw_shared::identity::program::{ReleaseKeys, SignedProgram, TARGET, UpdateReport, UpdateState};
use gw_shared::version::Version;
use tokio::sync::{Notify, watch};

use self::stored::{UpdateRecord, cut};

/// The agent's updates, shared by its tunnels.
pub(crate) struct Updates {
    /// `None` if the agent does not update itself.
    release_keys: Option<ReleaseKeys>,
    report: RefCell<UpdateReport>,
    pub(crate) offer: watch::Sender<Option<SignedProgram>>,
    /// The stored program that runs; `None` for the installed one.
    running: Option<SignedProgram>,
    /// Version and SHA-256 of programs that are not tried again.
    refused: RefCell<Vec<(Version, String)>>,
    /// Lowest version that is accepted.
    floor: Cell<Option<Version>>,
    /// Notified when the supervisor has given a program up that may be tried again.
    pub(crate) retry: Notify,
}

impl Updates {
    /// `running` is the stored program that runs; `None` for the installed one.
    pub(crate) fn new(
        release_keys: Option<ReleaseKeys>,
        running: Option<SignedProgram>,
        record: &UpdateRecord,
    ) -> Self {
        let last = record
            .failed
            .last()
            .filter(|last| last.version > Version::own());
        let (state, version, error) = match (&release_keys, last) {
            (None, _) => (UpdateState::Off, None, None),
            (Some(_), None) => (UpdateState::Ready, None, None),
            (Some(_), Some(last)) => (
                UpdateState::Failed,
                Some(last.version),
                Some(cut(&last.error)),
            ),
        };
        let report = UpdateReport {
            state,
            release_keys: release_keys.clone(),
            version,
            error,
        };
        let refused = record.failed.iter().filter(|failed| failed.is_refused);
        let refused = refused
            .map(|failed| (failed.version, failed.sha256.clone()))
            .collect();
        let report = RefCell::new(report);
        let refused = RefCell::new(refused);
        let offer = watch::Sender::default();
        let floor = Cell::new(record.floor);
        let retry = Notify::new();
        Self {
            release_keys,
            report,
            offer,
            running,
            refused,
            floor,
            retry,
        }
    }

    /// Progress, as it is reported to the gateway.
    pub(crate) fn report(&self) -> UpdateReport {
        self.report.borrow().clone()
    }

    /// Takes the gateway's offer.
    pub(crate) fn offered(&self, programs: Vec<SignedProgram>) {
        let Some(keys) = &self.release_keys else {
            return;
        };
        // A program that was signed with a newer version than it has would otherwise be run again
        // and again.
        let runs = |program: &SignedProgram| self.running.as_ref() == Some(program);
        let is_new = |program: &SignedProgram| {
            program.supersedes(Version::own()) && !runs(program) && !self.is_refused(program)
        };
        let Some(program) = programs
            .into_iter()
            .find(|program| program.target == TARGET)
        else {
            return tracing::warn!(
                platform = TARGET,
                "the gateway has no program for this architecture"
            );
        };
        if !is_new(&program) {
            return;
        }
        if let Err(error) = program
            .verify(keys)
            .and_then(|()| program.verify_floor(self.floor.get()))
        {
            tracing::error!(version = %program.version, %error, "the offered program is refused");
            return self.retry_later(&program, &format!("the program is refused: {error}"));
        }
        self.floor.set(self.floor.get().max(program.minimum));
        self.offer.send_if_modified(|offer| {
            let is_other = offer.as_ref() != Some(&program);
            *offer = Some(program);
            is_other
        });
    }

    /// Does not try the program again, logs the reason and reports it to the gateway.
    pub(crate) fn refuse(&self, program: &SignedProgram, error: &str) {
        let version = program.version;
        tracing::error!(%version, error, "the agent is not updated to this program");
        self.refused
            .borrow_mut()
            .push((version, program.sha256.clone()));
        self.retry_later(program, error);
    }

    /// The supervisor could not run the program.
    pub(crate) fn given_up(&self, program: &SignedProgram, error: &str, is_refused: bool) {
        if is_refused {
            return self.refuse(program, error);
        }
        self.retry_later(program, error);
        self.retry.notify_one();
    }

    pub(crate) fn release_keys(&self) -> Option<&ReleaseKeys> {
        self.release_keys.as_ref()
    }

    /// Reports that an update is under way.
    pub(crate) fn begin(&self, program: &SignedProgram) {
        self.set_report(UpdateState::Updating, program.version, None);
    }

    /// Reports an error after which the update is tried again.
    pub(crate) fn retry_later(&self, program: &SignedProgram, error: &str) {
        self.set_report(UpdateState::Failed, program.version, Some(cut(error)));
    }

    fn set_report(&self, state: UpdateState, version: Version, error: Option<String>) {
        let release_keys = self.release_keys.clone();
        self.report.replace(UpdateReport {
            state,
            release_keys,
            version: Some(version),
            error,
        });
    }

    fn is_refused(&self, program: &SignedProgram) -> bool {
        self.refused
            .borrow()
            .iter()
            .any(|(version, sha256)| *sha256 == program.sha256 && *version == program.version)
    }
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::signature::Ed25519KeyPair;
    use gw_shared::identity::program::ReleaseKey;

    use super::*;

    fn signed(version: &str, key: &Ed25519KeyPair) -> SignedProgram {
        SignedProgram::sign(version.parse().unwrap(), TARGET, b"program", key)
    }

    /// Updates of an agent with the release key `key`.
    fn updates(key: &Ed25519KeyPair, record: &UpdateRecord) -> Updates {
        Updates::new(Some(ReleaseKey::of(key).into()), None, record)
    }

    #[test]
    fn only_a_newer_program_with_the_right_signature_is_accepted() {
        let pair = Ed25519KeyPair::generate().unwrap();
        let other = Ed25519KeyPair::generate().unwrap();
        let updates = updates(&pair, &UpdateRecord::default());
        let mut offers = updates.offer.subscribe();
        let mut accepted = |program: SignedProgram| {
            updates.offered(vec![program]);
            let is_new = offers.has_changed().unwrap();
            offers.mark_unchanged();
            is_new
        };
        let tampered = SignedProgram {
            version: "999.0.1".parse().unwrap(),
            ..signed("999.0.0", &pair)
        };
        let foreign = SignedProgram::sign("999.0.2".parse().unwrap(), "vax", b"program", &pair);
        for (name, program, is_new) in [
            (
                "the same version",
                signed(&Version::own().to_string(), &pair),
                false,
            ),
            ("an older version", signed("0.0.1", &pair), false),
            ("another key", signed("999.0.0", &other), false),
            ("a newer version", signed("999.0.0", &pair), true),
            (
                "the offer of another tunnel",
                signed("999.0.0", &pair),
                false,
            ),
            ("a changed version", tampered, false),
            ("another target", foreign, false),
        ] {
            assert_eq!(accepted(program), is_new, "{name}");
        }
        assert_eq!(updates.report().state, UpdateState::Failed);
    }

    #[test]
    fn a_refused_program_is_not_tried_again_and_is_reported() {
        let pair = Ed25519KeyPair::generate().unwrap();
        let program = signed("999.0.0", &pair);
        let takes_offer = |updates: &Updates| {
            updates.offered(vec![program.clone()]);
            updates.offer.borrow().is_some()
        };
        let first = updates(&pair, &UpdateRecord::default());
        first.given_up(&program, "it does not start", true);
        assert!(!takes_offer(&first));
        let mut record = UpdateRecord::default();
        // Blocked tunnels never refuse it for good.
        for (error, is_refused) in [("it has no tunnel", false); 9]
            .into_iter()
            .chain([("it crashed", true)])
        {
            record.add_failure(&program, error, is_refused);
            let restarted = updates(&pair, &record);
            let report = restarted.report();
            assert_eq!(report.state, UpdateState::Failed);
            assert_eq!(report.error.as_deref(), Some(error));
            assert_eq!(takes_offer(&restarted), !is_refused);
        }
    }

    #[test]
    fn programs_below_the_floor_are_not_accepted() {
        let pair = Ed25519KeyPair::generate().unwrap();
        let [older, floor, newer, newest] =
            ["999.0.0", "999.0.1", "999.0.2", "999.0.3"].map(|text| text.parse().unwrap());
        let record = UpdateRecord {
            floor: Some(floor),
            ..UpdateRecord::default()
        };
        let updates = updates(&pair, &record);
        let accepted = |minimum, version| {
            let described = SignedProgram::describe(version, TARGET, b"program");
            let program = SignedProgram {
                minimum,
                ..described
            };
            updates.offered(vec![program.signed(&pair)]);
            let offer = updates.offer.borrow();
            offer.as_ref().is_some_and(|offer| offer.version == version)
        };
        assert!(!accepted(None, older));
        let error = updates.report().error.unwrap();
        assert!(error.contains("older than 999.0.1"), "{error}");
        assert!(accepted(None, floor), "the program that was lost");
        assert!(accepted(Some(newer), newest));
        assert!(
            !accepted(None, floor),
            "the release key requires a newer one"
        );
        assert!(accepted(None, newer));
    }

    #[test]
    fn an_older_program_is_accepted_where_the_release_key_permits_it() {
        let pair = Ed25519KeyPair::generate().unwrap();
        let own = Version::own();
        let later = Version {
            patch: own.patch + 1,
            ..own
        };
        let older: Version = "0.0.1".parse().unwrap();
        let record = UpdateRecord {
            floor: Some(own),
            ..UpdateRecord::default()
        };
        let accepted = |replaces| {
            let updates = updates(&pair, &record);
            let described = SignedProgram::describe(older, TARGET, b"program");
            let program = SignedProgram {
                replaces,
                ..described
            };
            updates.offered(vec![program.signed(&pair)]);
            updates.offer.borrow().is_some()
        };
        assert!(!accepted(None), "no older program comes back by itself");
        assert!(!accepted(Some("0.0.2".parse().unwrap())), "of another one");
        assert!(accepted(Some(own)) && accepted(Some(later)));
    }

    #[test]
    fn the_program_that_runs_is_not_fetched_again() {
        let pair = Ed25519KeyPair::generate().unwrap();
        let program = signed("999.0.0", &pair);
        let keys = Some(ReleaseKey::of(&pair).into());
        let updates = Updates::new(keys, Some(program.clone()), &UpdateRecord::default());
        updates.offered(vec![program]);
        assert!(updates.offer.borrow().is_none());
        assert_eq!(updates.report().state, UpdateState::Ready);
    }

    #[test]
    fn an_agent_without_updates_takes_no_offer() {
        let updates = Updates::new(None, None, &UpdateRecord::default());
        let key = Ed25519KeyPair::generate().unwrap();
        updates.offered(vec![signed("999.0.0", &key)]);
        assert!(updates.offer.borrow().is_none());
        assert_eq!(updates.report().state, UpdateState::Off);
    }
}
