//! The services that the gateway assigns to the agent, in a control message of any tunnel or with a
//! certificate.

use std::collections::BTreeSet;

use gw_shared::identity::enrollment::check_services;
use tokio::sync::watch;

/// Hostnames of the services that this agent serves.
pub(crate) struct AssignedServices {
    /// Host name of the region's apex, below which all services are.
    apex: String,
    hostnames: watch::Sender<BTreeSet<String>>,
}

impl AssignedServices {
    pub(crate) fn new(apex: String, hostnames: impl IntoIterator<Item = String>) -> Self {
        Self {
            apex,
            hostnames: watch::Sender::new(hostnames.into_iter().collect()),
        }
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<BTreeSet<String>> {
        self.hostnames.subscribe()
    }

    /// Sets the services that this agent serves, as assigned by the gateway. Subscribers are
    /// notified of changes only.
    pub(crate) fn set(&self, hostnames: Vec<String>) {
        // Without a tunnel the agent could not learn of the next change, so it keeps the services
        // it has.
        if hostnames.is_empty() {
            return tracing::warn!(
                "the gateway no longer assigns any service to this agent; keeping the previous ones"
            );
        }
        if let Err(error) = check_services(&hostnames, &self.apex) {
            return tracing::warn!(
                %error,
                "the gateway assigns services to this agent that cannot be its own; keeping the \
                 previous ones"
            );
        }
        let new = BTreeSet::from_iter(hostnames);
        self.hostnames.send_if_modified(|services| {
            let changed = *services != new;
            *services = new;
            changed
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subscribers_are_notified_only_when_the_services_change() {
        let [a, b, c] = ["a", "b", "c"].map(|id| format!("acme--{id}.eu1.example.com"));
        let assigned = AssignedServices::new("eu1.example.com".to_owned(), [a.clone(), b.clone()]);
        let mut services = assigned.subscribe();
        assigned.set(vec![b, a.clone(), a.clone()]);
        assigned.set(Vec::new());
        assert!(!services.has_changed().unwrap());
        assigned.set(vec![c.clone()]);
        assert!(services.has_changed().unwrap());
        assert!(services.borrow_and_update().iter().eq([&c]));
        for wrong in [
            "acme--\u{1b}[2J.eu1.example.com",
            "acme--api.us1.example.com",
            "eu1.example.com\nforged",
        ] {
            assigned.set(vec![a.clone(), wrong.to_owned()]);
        }
        assigned.set(vec![a; 501]);
        assert!(!services.has_changed().unwrap());
    }
}
