//! Certificate requests of a running agent. They leave and are answered in control messages of any
//! tunnel.

use std::cell::RefCell;

use gw_shared::identity::enrollment::CertificateReply;
use tokio::sync::oneshot;

/// The pending certificate request, shared by all tunnels of the agent.
#[derive(Default)]
pub(crate) struct CertificateRequests {
    /// Request (PEM) for the next tunnel that is ready.
    queued: RefCell<Option<String>>,
    /// Receives the gateway's answer to the last request.
    reply: RefCell<Option<oneshot::Sender<Result<CertificateReply, String>>>>,
}

impl CertificateRequests {
    /// Queues a certificate request for the next tunnel that is ready, and returns the receiver of
    /// its answer; an error is the gateway's message. Replaces an earlier request.
    pub(crate) fn queue(&self, csr: String) -> oneshot::Receiver<Result<CertificateReply, String>> {
        let (sender, receiver) = oneshot::channel();
        self.queued.replace(Some(csr));
        self.reply.replace(Some(sender));
        receiver
    }

    /// Takes the queued certificate request; the calling tunnel sends it.
    pub(crate) fn take(&self) -> Option<String> {
        self.queued.take()
    }

    /// Delivers the gateway's answer to a certificate request.
    pub(crate) fn answer(&self, answer: Result<CertificateReply, String>) {
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
    fn last_certificate_request_is_sent_once_and_gets_the_answer() {
        let requests = CertificateRequests::default();
        let mut first = requests.queue("one".into());
        let mut second = requests.queue("two".into());
        assert_eq!(requests.take().as_deref(), Some("two"));
        assert_eq!(requests.take(), None);
        requests.answer(Err("no".into()));
        assert!(first.try_recv().is_err());
        assert_eq!(second.try_recv().unwrap(), Err("no".into()));
        requests.answer(Err("not requested".into()));
    }
}
