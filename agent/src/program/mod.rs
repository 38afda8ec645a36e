//! Agent programs: the gateway's offers, and the programs that this agent has stored.

pub(crate) mod stored;

use std::cell::RefCell;

use gw_shared::identity::program::{ReleaseKey, SignedProgram, TARGET, UpdateReport, UpdateState};
use gw_shared::version::Version;
use tokio::sync::watch;

use self::stored::{FailedProgram, UpdateRecord};

/// The agent's updates, shared by its tunnels.
pub(crate) struct Updates {
    /// `None` if the agent does not update itself.
    key: Option<ReleaseKey>,
    report: RefCell<UpdateReport>,
    pub(crate) offer: watch::Sender<Option<SignedProgram>>,
    /// The stored program that runs, if it is not the installed one.
    current: Option<SignedProgram>,
    /// Programs that are not tried again.
    failed: RefCell<Vec<FailedProgram>>,
}

impl Updates {
    pub(crate) fn new(key: Option<ReleaseKey>, record: UpdateRecord) -> Self {
        let UpdateRecord { current, failed } = record;
        let last = failed.last().filter(|last| last.version > Version::own());
        let report = match (key, last) {
            (None, _) => UpdateReport { state: UpdateState::Off, version: None, error: None },
            (Some(_), None) => UpdateReport { state: UpdateState::Ready, version: None, error: None },
            (Some(_), Some(last)) => failure(last.version, &last.error),
        };
        let (report, failed) = (RefCell::new(report), RefCell::new(failed));
        Self { key, report, offer: watch::Sender::default(), current, failed }
    }

    /// Progress, as it is reported to the gateway.
    pub(crate) fn report(&self) -> UpdateReport {
        self.report.borrow().clone()
    }

    /// Takes the gateway's offer.
    pub(crate) fn offered(&self, programs: Vec<SignedProgram>) {
        let Some(key) = &self.key else { return };
        // A program that was signed with a newer version than it has would otherwise be run again and again.
        let runs = |program: &SignedProgram| self.current.as_ref() == Some(program);
        let is_new =
            |program: &SignedProgram| program.version > Version::own() && !runs(program) && !self.has_failed(program);
        let Some(program) = programs.into_iter().find(|program| program.target == TARGET) else {
            return tracing::warn!(target = TARGET, "the gateway has no program for this architecture");
        };
        if !is_new(&program) {
            return;
        }
        if let Err(error) = program.verify(key) {
            tracing::error!(version = %program.version, %error, "the offered program is refused");
            return self.retry_later(&program, &format!("the program is refused: {error}"));
        }
        self.offer.send_if_modified(|offer| {
            let is_other = offer.as_ref() != Some(&program);
            *offer = Some(program);
            is_other
        });
    }

    /// Does not try the program again, logs the reason and reports it to the gateway.
    pub(crate) fn fail(&self, program: &SignedProgram, error: &str) {
        let version = program.version;
        tracing::error!(%version, error, "the agent is not updated");
        self.failed.borrow_mut().push(FailedProgram {
            version,
            sha256: program.sha256.clone(),
            error: error.to_owned(),
        });
        self.retry_later(program, error);
    }

    /// Reports that an update is under way.
    pub(crate) fn begin(&self, program: &SignedProgram) {
        let version = Some(program.version);
        self.report.replace(UpdateReport { state: UpdateState::Updating, version, error: None });
    }

    /// Reports an error after which the update is tried again.
    pub(crate) fn retry_later(&self, program: &SignedProgram, error: &str) {
        self.report.replace(failure(program.version, error));
    }

    fn has_failed(&self, program: &SignedProgram) -> bool {
        self.failed.borrow().iter().any(|failed| failed.sha256 == program.sha256 && failed.version == program.version)
    }
}

fn failure(version: Version, error: &str) -> UpdateReport {
    let error: String = error.chars().take(UpdateReport::ERROR_MAX / 4).collect();
    UpdateReport { state: UpdateState::Failed, version: Some(version), error: Some(error) }
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::signature::Ed25519KeyPair;

    use super::*;

    fn signed(version: &str, key: &Ed25519KeyPair) -> SignedProgram {
        SignedProgram::sign(version.parse().unwrap(), TARGET, b"program", key)
    }

    #[test]
    fn only_a_newer_program_with_the_right_signature_is_accepted() {
        let (pair, other) = (Ed25519KeyPair::generate().unwrap(), Ed25519KeyPair::generate().unwrap());
        let updates = Updates::new(Some(ReleaseKey::of(&pair)), UpdateRecord::default());
        let mut offers = updates.offer.subscribe();
        let mut accepted = |program: SignedProgram| {
            updates.offered(vec![program]);
            let is_new = offers.has_changed().unwrap();
            offers.mark_unchanged();
            is_new
        };
        assert!(!accepted(signed(&Version::own().to_string(), &pair)), "the same version");
        assert!(!accepted(signed("0.0.1", &pair)), "an older version");
        assert!(!accepted(signed("999.0.0", &other)), "another key");
        assert!(accepted(signed("999.0.0", &pair)));
        assert!(!accepted(signed("999.0.0", &pair)), "the same offer of another tunnel");
        assert_eq!(updates.report().state, UpdateState::Failed, "the offer by another key");
        let tampered = SignedProgram { version: "999.0.1".parse().unwrap(), ..signed("999.0.0", &pair) };
        assert!(!accepted(tampered));
        let foreign = SignedProgram::sign("999.0.2".parse().unwrap(), "vax", b"program", &pair);
        assert!(!accepted(foreign));
    }

    #[test]
    fn a_failed_program_is_not_tried_again_and_is_reported() {
        let pair = Ed25519KeyPair::generate().unwrap();
        let program = signed("999.0.0", &pair);
        let updates = Updates::new(Some(ReleaseKey::of(&pair)), UpdateRecord::default());
        updates.fail(&program, "it does not start");
        updates.offered(vec![program.clone()]);
        assert_eq!(*updates.offer.borrow(), None);
        let failed = updates.failed.take();
        let restarted = Updates::new(Some(ReleaseKey::of(&pair)), UpdateRecord { current: None, failed });
        restarted.offered(vec![program]);
        assert_eq!(*restarted.offer.borrow(), None);
        let report = restarted.report();
        assert_eq!((report.state, report.error.as_deref()), (UpdateState::Failed, Some("it does not start")));
    }

    #[test]
    fn the_program_that_runs_is_not_fetched_again() {
        let pair = Ed25519KeyPair::generate().unwrap();
        let program = signed("999.0.0", &pair);
        let record = UpdateRecord { current: Some(program.clone()), failed: Vec::new() };
        let updates = Updates::new(Some(ReleaseKey::of(&pair)), record);
        updates.offered(vec![program]);
        assert_eq!((updates.offer.borrow().clone(), updates.report().state), (None, UpdateState::Ready));
    }

    #[test]
    fn an_agent_without_updates_takes_no_offer() {
        let updates = Updates::new(None, UpdateRecord::default());
        updates.offered(vec![signed("999.0.0", &Ed25519KeyPair::generate().unwrap())]);
        assert_eq!((updates.offer.borrow().clone(), updates.report().state), (None, UpdateState::Off));
    }
}
