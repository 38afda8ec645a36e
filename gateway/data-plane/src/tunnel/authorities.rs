//! Tunnels while the authority of agents is replaced. An agent is asked to renew its certificate.
//! Once it has one of the issuing authority, it is asked to connect again with it, and keeps the
//! tunnel until the next one is ready. When the earlier authority ends, so do the tunnels with its
//! certificates.

use std::time::{Duration, Instant};

use gw_shared::tunnel::control::ToAgent;
use gw_shared::tunnel::cut_reason::CutReason;
use gw_shared::version;

use super::Tunnels;
use super::session::Session;

/// Agents that renew in a second, on average: each certificate is a synced write to the records.
const RENEWALS_PER_SECOND: usize = 50;
/// Time in which an agent stores a certificate that was issued to it.
const STORED_WITHIN: Duration = Duration::from_secs(2);
/// Time until an agent that came back with its earlier certificate is asked to connect once more.
const ASK_AGAIN: Duration = Duration::from_secs(60);

impl Tunnels {
    /// Why a tunnel with this certificate may not be registered, by the authorities that are
    /// trusted now.
    pub(super) fn distrusted(&self, session: &Session) -> Option<CutReason> {
        let is_trusted = self
            .certificates
            .in_use()
            .authorities
            .trust(session.issuer.as_ref());
        (!is_trusted).then_some(CutReason::CertificateExpired)
    }

    /// Handles that other authorities are trusted, or another one issues.
    pub(crate) fn use_authorities(&self) {
        for session in self
            .registry
            .borrow()
            .all()
            .filter(|session| !session.is_cut())
        {
            match self.distrusted(session) {
                Some(reason) => session.cut(reason),
                None => self.want_renewal(session),
            }
        }
    }

    /// Handles that a tunnel is ready.
    pub(super) fn check_issuer(&self, session: &Session, now: Instant) {
        self.want_renewal(session);
        if self.has_renewed(session) {
            session.move_at.set(Some(now + ASK_AGAIN));
        }
    }

    /// Asks the agent to renew its certificate if it is not of the issuing authority, also if
    /// another was issued to it: the reply may be lost. Agents of the previous line renew it at
    /// their usual time.
    fn want_renewal(&self, session: &Session) {
        let configs = self.certificates.in_use();
        if let Some(authority) = configs.authorities.issuing.clone()
            && self.is_of_another_authority(session)
            && session.version.line != version::PREVIOUS
        {
            let seconds = self.directory.in_use().agents() / RENEWALS_PER_SECOND;
            let within_seconds = u32::try_from(seconds).unwrap_or(u32::MAX);
            session.send(&ToAgent::RenewalWanted {
                authority,
                within_seconds,
            });
        }
    }

    /// Asks agents that have a certificate of the issuing authority to connect again with it.
    pub(crate) fn move_renewed(&self, now: Instant) {
        if !self.certificates.in_use().authorities.are_several() {
            return;
        }
        let registry = self.registry.borrow();
        for session in registry
            .sessions()
            .filter(|session| session.takes_requests() && self.has_renewed(session))
        {
            match session.move_at.get() {
                None => session.move_at.set(Some(now + STORED_WITHIN)),
                Some(at) if now >= at => {
                    session.move_at.set(Some(now + ASK_AGAIN));
                    session.send(&ToAgent::Drain);
                }
                Some(_) => {}
            }
        }
    }

    /// Number of tunnels with a certificate of another authority than the issuing one.
    pub(crate) fn of_another_authority(&self) -> usize {
        self.registry
            .borrow()
            .all()
            .filter(|session| self.is_of_another_authority(session))
            .count()
    }

    fn is_of_another_authority(&self, session: &Session) -> bool {
        session.issuer != self.certificates.in_use().authorities.issuing
    }

    /// Whether the agent has got a certificate of the issuing authority, and not opened this tunnel
    /// with it.
    fn has_renewed(&self, session: &Session) -> bool {
        let directory = self.directory.in_use();
        let newest = directory
            .agent(session.agent.as_str())
            .and_then(|agent| agent.authority.as_ref());
        self.is_of_another_authority(session)
            && newest == self.certificates.in_use().authorities.issuing.as_ref()
    }
}
