//! The certificate of a running agent, and its renewal through the tunnels before it expires. Open
//! tunnels keep the certificate that they were opened with; new ones use the renewed certificate.

use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use futures_util::future::select;
use gw_shared::id::AuthorityId;
use gw_shared::identity::enrollment::CertificateReply;
use gw_shared::runtime;
use gw_shared::text::error_line;
use rcgen::KeyPair;
use rustls_pki_types::CertificateDer;
use tokio::sync::{Mutex, Notify};

use crate::backoff::{Backoff, random};
use crate::clock::GatewayClock;
use crate::identity::certificate::{self, Identity, UnfitIdentity, ValidityPeriod};
use crate::identity::certificate_requests::CertificateRequests;
use crate::identity::request_interval::RequestInterval;
use crate::identity::state::{Enrollment, StateDir, StateError};
use crate::proxy::ProxySettings;
use crate::services::AssignedServices;

/// Time limit of an answer, from when the request was queued for a tunnel.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// Longest sleep before the clock is read again: it may have been set, or the machine suspended.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
enum RenewalError {
    #[error("no tunnel delivered an answer within {ANSWER_WITHIN:?}")]
    NoAnswer,
    #[error("the gateway refused: {}", error_line(.0))]
    Refused(String),
    #[error("the new certificate cannot be used: {0}")]
    Unfit(#[from] UnfitIdentity),
    #[error(transparent)]
    State(#[from] StateError),
}

/// A renewal before its time, because another authority issues certificates now.
struct WantedRenewal {
    authority: AuthorityId,
    at: Instant,
}

enum RenewalOutcome {
    NotDue(Duration),
    Renewed(CertificateReply),
}

/// Replaces the certificate in the state folder: [`keep_fresh`](Self::keep_fresh) through the
/// tunnels, [`recover`](Self::recover) through the apex.
pub(crate) struct CertificateManager {
    pub(super) state: StateDir,
    pub(super) enrollment: Enrollment,
    pub(super) proxies: ProxySettings,
    pub(super) clock: Rc<GatewayClock>,
    pub(super) services: Rc<AssignedServices>,
    pub(crate) requests: CertificateRequests,
    pub(super) request_interval: RequestInterval,
    /// Certificate that is known to be on the disk.
    durable: RefCell<Option<CertificateDer<'static>>>,
    /// Held while an expired certificate is being replaced.
    pub(super) recovery: Mutex<()>,
    /// Expiry of the current certificate, as last read.
    pub(crate) expiry: Cell<Option<SystemTime>>,
    pub(crate) renewals: Cell<u64>,
    pub(crate) failed_renewals: Cell<u64>,
    /// An early renewal that the gateway wants.
    wanted: RefCell<Option<WantedRenewal>>,
    /// Ends the wait for the next renewal.
    look_again: Notify,
}

impl CertificateManager {
    pub(crate) fn new(
        state: StateDir,
        enrollment: Enrollment,
        proxies: ProxySettings,
        clock: Rc<GatewayClock>,
        services: Rc<AssignedServices>,
    ) -> Self {
        Self {
            state,
            enrollment,
            proxies,
            clock,
            services,
            requests: CertificateRequests::default(),
            request_interval: RequestInterval::default(),
            durable: RefCell::default(),
            recovery: Mutex::default(),
            expiry: Cell::default(),
            renewals: Cell::default(),
            failed_renewals: Cell::default(),
            wanted: RefCell::default(),
            look_again: Notify::new(),
        }
    }

    /// The identity for a tunnel, read each time, because renewal replaces it while the agent runs.
    /// It is on the disk: once a tunnel has used its key, the gateway forgets the key before it,
    /// which a crash of the machine must not bring back.
    pub(crate) fn identity_for_tunnel(&self) -> Result<Identity, StateError> {
        let identity = self
            .state
            .durable_identity(self.durable.borrow().as_ref())?;
        self.durable.replace(Some(identity.certificate.clone()));
        Ok(identity)
    }

    /// Renews the certificate after a random part of `within`, unless `authority` has issued it.
    pub(crate) fn renew_within(&self, authority: AuthorityId, within: Duration) {
        let mut wanted = self.wanted.borrow_mut();
        // Every tunnel gets the message.
        if wanted
            .as_ref()
            .is_none_or(|wanted| wanted.authority != authority)
        {
            *wanted = Some(WantedRenewal {
                authority,
                at: Instant::now() + within.mul_f64(random()),
            });
            self.look_again.notify_one();
        }
    }

    /// Renews the certificate whenever it is due. Never returns.
    pub(crate) async fn keep_fresh(&self) {
        // Both are drawn once per certificate. A new random number at every check would make an
        // early renewal more likely with each check; with the same key, the answer to a request
        // that timed out is still useful.
        let mut jitter = random();
        let mut key = None;
        let mut backoff = Backoff::default();
        loop {
            match self.renew_if_due(jitter, &mut key).await {
                Ok(RenewalOutcome::NotDue(wait)) => {
                    let wait = pin!(runtime::sleep(wait.min(CHECK_INTERVAL)));
                    select(wait, pin!(self.look_again.notified())).await;
                }
                Ok(RenewalOutcome::Renewed(reply)) => {
                    tracing::info!(not_after = reply.not_after, "certificate renewed");
                    self.renewals.set(self.renewals.get() + 1);
                    self.services.set(reply.services);
                    (jitter, key) = (random(), None);
                    backoff.reset();
                }
                Err(error) => {
                    let delay = backoff.next_delay(random());
                    tracing::warn!(%error, retry_in = ?delay, "certificate not renewed");
                    self.failed_renewals.set(self.failed_renewals.get() + 1);
                    runtime::sleep(delay).await;
                }
            }
        }
    }

    async fn renew_if_due(
        &self,
        jitter: f64,
        key: &mut Option<KeyPair>,
    ) -> Result<RenewalOutcome, RenewalError> {
        // Read each time, because recovery may have replaced it.
        let identity = self.state.identity()?;
        let validity = identity.validity()?;
        self.expiry.set(Some(validity.not_after));
        let mut due = due(validity, jitter)
            .duration_since(self.clock.now())
            .unwrap_or_default();
        let wanted = self
            .wanted
            .borrow()
            .as_ref()
            .map(|wanted| (wanted.authority.clone(), wanted.at));
        if let Some((authority, at)) = wanted
            && identity.authority().as_ref() != Some(&authority)
        {
            due = due.min(at.saturating_duration_since(Instant::now()));
        }
        // The rate limit applies as well, in case the gateway's clock is wrong.
        let wait = due.max(self.request_interval.wait());
        if !wait.is_zero() {
            return Ok(RenewalOutcome::NotDue(wait));
        }
        let key = match key {
            Some(key) => key,
            None => key.insert(KeyPair::generate().map_err(UnfitIdentity::Key)?),
        };
        let csr = certificate::certificate_request(key).map_err(UnfitIdentity::Key)?;
        let answer = self.requests.queue(csr);
        let reply = match runtime::timeout(ANSWER_WITHIN, answer).await {
            Ok(Ok(answer)) => answer.map_err(RenewalError::Refused)?,
            Ok(Err(_)) | Err(_) => return Err(RenewalError::NoAnswer),
        };
        // Recorded before the certificate is checked: the gateway has issued it in any case.
        self.request_interval.record(None);
        self.state
            .write_identity(&certificate::identity_pem(key, &reply)?)?;
        let identity = self.state.identity()?;
        self.request_interval
            .record(identity.time_left(&self.clock)?);
        self.expiry.set(Some(identity.validity()?.not_after));
        Ok(RenewalOutcome::Renewed(reply))
    }
}

/// The time to renew a certificate: after 60 to 73 % of its lifetime, depending on `random` (0 to
/// 1), so that agents that were enrolled together do not renew together.
fn due(validity: ValidityPeriod, random: f64) -> SystemTime {
    let lifetime = validity
        .not_after
        .duration_since(validity.not_before)
        .unwrap_or_default();
    validity.not_before + lifetime.mul_f64(0.6 + random.clamp(0.0, 1.0) * 2.0 / 15.0)
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use futures_util::future::Either;
    use tempfile::TempDir;

    use super::*;
    use crate::fake_gateway::{self, Authority, LONG_AGO, NOW};
    use crate::testing::block_on;

    /// The certificates of an agent with one that is valid in `years`, and its state folder.
    fn certificates(authority: &Authority, years: Range<i32>) -> (TempDir, CertificateManager) {
        let (directory, agent) = fake_gateway::agent(authority, years, 0);
        (directory, agent.certificates)
    }

    #[test]
    fn renewal_is_due_after_about_two_thirds_of_the_lifetime() {
        let not_before = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let day = Duration::from_secs(24 * 3600);
        let validity = ValidityPeriod {
            not_before,
            not_after: not_before + day,
        };
        let share = |random| {
            let after = due(validity, random).duration_since(not_before).unwrap();
            after.as_secs_f64() / day.as_secs_f64()
        };
        for (random, expected) in [(0.5, 2.0 / 3.0), (0.0, 0.6), (7.0, 0.6 + 2.0 / 15.0)] {
            assert!((share(random) - expected).abs() < 1e-6, "{random}");
        }
        let backwards = ValidityPeriod {
            not_before,
            not_after: not_before - day,
        };
        // An invalid period is due at once.
        assert_eq!(due(backwards, 0.5), not_before);
    }

    #[test]
    fn renewal_is_due_by_the_gateways_clock() {
        let authority = Authority::new();
        let (_directory, certificates) = certificates(&authority, LONG_AGO);
        let identity = certificates.state.identity().unwrap();
        let issued = identity.validity().unwrap().not_before;
        let outcome = || {
            block_on(async {
                // Without a tunnel the renewal request stays queued.
                let renewal = pin!(async { certificates.renew_if_due(0.5, &mut None).await });
                match select(renewal, pin!(runtime::yield_now())).await {
                    Either::Left((outcome, _)) => Some(outcome.unwrap()),
                    Either::Right(_) => None,
                }
            })
        };
        // By the local clock it expired years ago; by the gateway's it was issued an hour ago.
        let clock = &certificates.clock;
        clock.set(issued + Duration::from_hours(1), SystemTime::now());
        assert!(matches!(outcome(), Some(RenewalOutcome::NotDue(_))));
        assert_eq!(certificates.requests.take(), None);
        // Expired by the gateway's clock too.
        clock.set(SystemTime::now(), SystemTime::now());
        assert!(outcome().is_none() && certificates.requests.take().is_some());
        // A certificate has just been issued.
        certificates.request_interval.record(None);
        assert!(matches!(outcome(), Some(RenewalOutcome::NotDue(_))));
    }

    #[test]
    fn a_certificate_of_another_authority_is_renewed_when_the_gateway_says_so() {
        let [authority, next] = [(); 2].map(|()| Authority::new());
        let (_directory, certificates) = certificates(&authority, NOW);
        let identity = |authority: &Authority| {
            Identity::from_pem(authority.identity_pem(NOW).as_bytes()).unwrap()
        };
        let [current, next_id] =
            [&authority, &next].map(|authority| identity(authority).authority().unwrap());
        let renewed = async |key: &mut Option<KeyPair>| {
            let renewal = pin!(certificates.renew_if_due(0.5, key));
            let answer = pin!(async {
                while certificates.requests.take().is_none_or(|csr| {
                    certificates.requests.answer(Ok(next.certify(&csr, NOW)));
                    true
                }) {
                    runtime::yield_now().await;
                }
            });
            match select(renewal, answer).await {
                Either::Left((outcome, _)) => {
                    matches!(outcome.unwrap(), RenewalOutcome::Renewed(_))
                }
                Either::Right(_) => false,
            }
        };
        block_on(async {
            assert!(!renewed(&mut None).await, "not asked");
            certificates.renew_within(current.clone(), Duration::ZERO);
            assert!(!renewed(&mut None).await, "of this authority already");
            certificates.renew_within(next_id.clone(), Duration::from_hours(1));
            certificates.renew_within(next_id.clone(), Duration::ZERO);
            assert!(!renewed(&mut None).await, "the time is drawn once");
            certificates.renew_within(current.clone(), Duration::ZERO);
            certificates.renew_within(next_id.clone(), Duration::ZERO);
            assert!(renewed(&mut None).await);
            assert_eq!(
                certificates.state.identity().unwrap().authority(),
                Some(next_id)
            );
            assert!(!renewed(&mut None).await, "once");
        });
    }

    #[test]
    fn only_a_due_certificate_is_replaced_and_with_a_new_key() {
        let authority = Authority::new();
        let (_directory, certificates) = certificates(&authority, LONG_AGO);
        let before = certificates.state.identity().unwrap();
        let mut key = None;
        // Plays a tunnel: refuses the first request and answers the second like the gateway.
        let attempt = async |key: &mut Option<KeyPair>, refuse: bool| {
            let answer = async {
                let csr = certificates.requests.take().unwrap();
                certificates.requests.answer(match refuse {
                    true => Err("later".into()),
                    false => Ok(authority.certify(&csr, NOW)),
                });
            };
            futures_util::join!(certificates.renew_if_due(0.5, key), answer).0
        };
        block_on(async {
            let refused = attempt(&mut key, true).await;
            assert!(matches!(refused, Err(RenewalError::Refused(_))));
            assert!(key.is_some(), "the key is kept for the next attempt");
            let renewed = attempt(&mut key, false).await;
            assert!(matches!(renewed, Ok(RenewalOutcome::Renewed(_))));
            assert!(matches!(
                certificates.renew_if_due(0.5, &mut key).await,
                Ok(RenewalOutcome::NotDue(_))
            ));
        });
        let after = certificates.state.identity().unwrap();
        assert_ne!(after.certificate, before.certificate);
        assert_ne!(after.key.secret_der(), before.key.secret_der());
        assert_eq!(certificates.requests.take(), None);
    }
}
