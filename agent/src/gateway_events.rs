//! Messages between the gateway and the agent as a whole. They arrive and leave as control messages of any
//! tunnel.

use std::cell::RefCell;
use std::collections::BTreeSet;

use gw_shared::identity::enrollment::{CertificateReply, check_services};
use tokio::sync::{oneshot, watch};

/// The agent's services and its pending certificate request, shared by all its tunnels.
pub(crate) struct GatewayEvents {
    /// Host name of the region's apex, below which all services are.
    apex: String,
    /// Hostnames of the services that this agent serves.
    services: watch::Sender<BTreeSet<String>>,
    /// Certificate request (PEM) for the next tunnel that is ready.
    certificate_request: RefCell<Option<String>>,
    /// Receives the gateway's answer to the last certificate request.
    reply: RefCell<Option<oneshot::Sender<Result<CertificateReply, String>>>>,
}

impl GatewayEvents {
    pub(crate) fn new(apex: String, services: impl IntoIterator<Item = String>) -> Self {
        Self {
            apex,
            services: watch::Sender::new(services.into_iter().collect()),
            certificate_request: RefCell::default(),
            reply: RefCell::default(),
        }
    }

    /// Subscribes to the set of services.
    pub(crate) fn services(&self) -> watch::Receiver<BTreeSet<String>> {
        self.services.subscribe()
    }

    /// Sets the services that this agent serves, as assigned by the gateway. Subscribers are notified of changes only.
    pub(crate) fn set_services(&self, hostnames: Vec<String>) {
        // Without a tunnel the agent could not learn of the next change, so it keeps the services it has.
        if hostnames.is_empty() {
            return tracing::warn!(
                "the gateway no longer assigns any service to this agent; keeping the previous ones"
            );
        }
        if let Err(error) = check_services(&hostnames, &self.apex) {
            return tracing::warn!(
                %error,
                "the gateway assigns services to this agent that cannot be its own; keeping the previous ones"
            );
        }
        let new = BTreeSet::from_iter(hostnames);
        self.services.send_if_modified(|services| {
            let changed = *services != new;
            *services = new;
            changed
        });
    }

    /// Queues a certificate request for the next tunnel that is ready, and returns the receiver of its answer; an error
    /// is the gateway's message. Replaces an earlier request.
    pub(crate) fn request_certificate(
        &self,
        csr: String,
    ) -> oneshot::Receiver<Result<CertificateReply, String>> {
        let (sender, receiver) = oneshot::channel();
        self.certificate_request.replace(Some(csr));
        self.reply.replace(Some(sender));
        receiver
    }

    /// Takes the queued certificate request; the calling tunnel sends it.
    pub(crate) fn take_certificate_request(&self) -> Option<String> {
        self.certificate_request.take()
    }

    /// Delivers the gateway's answer to a certificate request.
    pub(crate) fn answer_certificate_request(&self, answer: Result<CertificateReply, String>) {
        match self.reply.take() {
            // Fails if the answer came after the time limit.
            Some(sender) => drop(sender.send(answer)),
            None => tracing::debug!("ignoring an answer to no pending certificate request"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subscribers_are_notified_only_when_the_services_change() {
        let [a, b, c] = ["a", "b", "c"].map(|id| format!("acme--{id}.eu1.example.com"));
        let events = GatewayEvents::new("eu1.example.com".to_owned(), [a.clone(), b.clone()]);
        let mut services = events.services();
        events.set_services(vec![b, a.clone(), a.clone()]);
        events.set_services(Vec::new());
        assert!(!services.has_changed().unwrap());
        events.set_services(vec![c.clone()]);
        assert!(services.has_changed().unwrap());
        assert!(services.borrow_and_update().iter().eq([&c]));
        for wrong in [
            "acme--\u{1b}[2J.eu1.example.com",
            "acme--api.us1.example.com",
            "eu1.example.com\nforged",
        ] {
            events.set_services(vec![a.clone(), wrong.to_owned()]);
        }
        events.set_services(vec![a; 501]);
        assert!(!services.has_changed().unwrap());
    }

    #[test]
    fn last_certificate_request_is_sent_once_and_gets_the_answer() {
        let events = GatewayEvents::new(String::new(), []);
        let mut first = events.request_certificate("one".into());
        let mut second = events.request_certificate("two".into());
        assert_eq!(events.take_certificate_request().as_deref(), Some("two"));
        assert_eq!(events.take_certificate_request(), None);
        events.answer_certificate_request(Err("no".into()));
        assert!(first.try_recv().is_err());
        assert_eq!(second.try_recv().unwrap(), Err("no".into()));
        events.answer_certificate_request(Err("not requested".into()));
    }
}
