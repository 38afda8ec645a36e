//! Where an agent's tunnels leave what the gateway says to the whole agent, and find what one of them is to carry back.

use std::cell::RefCell;
use std::collections::BTreeSet;

use gw_shared::identity::enrollment::CertificateReply;
use tokio::sync::{oneshot, watch};

/// What the gateway answers a renewal with; an error is its own words.
pub(crate) type Answer = Result<CertificateReply, String>;

pub(crate) struct Desk {
    /// Hostnames of the services that this agent serves.
    services: watch::Sender<BTreeSet<String>>,
    /// A certificate request that waits for a tunnel.
    outgoing: RefCell<Option<String>>,
    /// Who waits for the answer.
    waiting: RefCell<Option<oneshot::Sender<Answer>>>,
}

impl Desk {
    pub(crate) fn new(services: impl IntoIterator<Item = String>) -> Self {
        Self {
            services: watch::Sender::new(services.into_iter().collect()),
            outgoing: RefCell::default(),
            waiting: RefCell::default(),
        }
    }

    /// Follows the services.
    pub(crate) fn services(&self) -> watch::Receiver<BTreeSet<String>> {
        self.services.subscribe()
    }

    /// The gateway says which services this agent serves.
    pub(crate) fn services_are(&self, hostnames: Vec<String>) {
        // Without any tunnel there would be no way to hear of the next change: keep asking for those we had.
        if hostnames.is_empty() {
            return tracing::warn!("the gateway has no service for this agent any more");
        }
        let told = BTreeSet::from_iter(hostnames);
        self.services.send_if_modified(|services| {
            let changed = *services != told;
            *services = told;
            changed
        });
    }

    /// Leaves a certificate request for the next tunnel that is ready. One at a time: the one before is forgotten.
    pub(crate) fn ask(&self, csr: String) -> oneshot::Receiver<Answer> {
        let (answer, answered) = oneshot::channel();
        self.outgoing.replace(Some(csr));
        self.waiting.replace(Some(answer));
        answered
    }

    /// Takes the request away: it becomes the caller's to carry.
    pub(crate) fn take_request(&self) -> Option<String> {
        self.outgoing.take()
    }

    /// The gateway has answered a request that some tunnel carried.
    pub(crate) fn answer(&self, answer: Answer) {
        match self.waiting.take() {
            // Fails when it came too late.
            Some(waiting) => drop(waiting.send(answer)),
            None => tracing::debug!("the gateway answered a renewal that nobody waits for"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changes_of_the_services_are_news() {
        let desk = Desk::new(["a".to_owned(), "b".to_owned()]);
        let mut services = desk.services();
        desk.services_are(vec!["b".into(), "a".into(), "b".into()]);
        desk.services_are(Vec::new());
        assert!(!services.has_changed().unwrap());
        desk.services_are(vec!["c".into()]);
        assert!(services.has_changed().unwrap());
        assert!(services.borrow_and_update().iter().eq(["c"]));
    }

    #[test]
    fn one_tunnel_carries_a_request_and_the_last_asker_has_the_answer() {
        let desk = Desk::new([]);
        let mut first = desk.ask("one".into());
        let mut second = desk.ask("two".into());
        assert_eq!(desk.take_request().as_deref(), Some("two"));
        assert_eq!(desk.take_request(), None);
        desk.answer(Err("no".into()));
        assert!(first.try_recv().is_err());
        assert_eq!(second.try_recv().unwrap(), Err("no".into()));
        desk.answer(Err("unasked".into()));
    }
}
