//! Steps of the orders of own domains. Proofs are in the handshakes of the listener (RFC 8737), or
//! in responses of the listener in plain HTTP (RFC 8555 §8.3) if there is one and the authority has
//! refused the former.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gw_acme::{
    AcmeError, Admission, Certificate, FailureKind, OrderState, Orders, Progress, State,
};
use gw_base::clock::Timestamp;
use gw_base::process::background::Tasks;
use gw_base::tls::certificate::Pair;
use gw_shared::id::DomainName;
use gw_store::{
    AcmeRecord, DomainCertificate, DomainCertificateSource, DomainChallenge, DomainChallengeKind,
    DomainMaterial, DomainOrder, DomainRecord, DomainState, ServedPair,
};
use tokio::time::sleep;

use super::renewal_windows::KnownWindow;
use crate::certificates::lease::Lease;
use crate::certificates::{failures, json};
use crate::control::records::certificate::parsed;
use crate::control::records::domain::{self, sealed};
use crate::control::{Control, ControlError};
use crate::limits::{CERTIFICATE_LOOK_EVERY, CERTIFICATE_STORE_RETRY, DOMAIN_CERTIFICATE_BYTES};

/// Time for which no step is made after the authority was not reached.
const UNREACHABLE_PAUSE: Duration = Duration::from_secs(10);
/// Longest time for which other orders wait. A rate limit may concern one name only.
const RATE_LIMITED_PAUSE: Duration = Duration::from_secs(10 * 60);
/// Time until the next order of a domain that DNS did not prove when it was due.
const UNPROVED_PAUSE: Duration = Duration::from_secs(5 * 60);

/// Steps of orders, which run beside each other.
pub(in crate::certificates) struct Steps {
    control: Arc<Control>,
    orders: OrdersByProof,
    tasks: Tasks,
    lease: Lease,
    /// Time until which the authority is left alone, as a [`Timestamp`].
    paused: AtomicI64,
    admission: Mutex<Admission>,
}

/// Orders by the place of their proofs.
pub(in crate::certificates) struct OrdersByProof {
    pub(in crate::certificates) in_handshakes: Orders,
    /// `None` without a listener for plain HTTP.
    pub(in crate::certificates) over_http: Option<Orders>,
}

/// Time of the next step of an order.
enum Next {
    After(Duration),
    /// No step is made before this time. Others may take the place meanwhile.
    NotBefore(Timestamp),
}

impl OrdersByProof {
    fn of_domain(&self, domain: &DomainName) -> Self {
        let names = || vec![domain.to_string()];
        Self {
            in_handshakes: self.in_handshakes.of_names(names()),
            over_http: self.over_http.as_ref().map(|it| it.of_names(names())),
        }
    }
}

impl Steps {
    pub(in crate::certificates) fn new(
        control: &Arc<Control>,
        orders: OrdersByProof,
        tasks: &Tasks,
        lease: Lease,
    ) -> Self {
        Self {
            control: Arc::clone(control),
            orders,
            tasks: tasks.clone(),
            lease,
            paused: AtomicI64::new(0),
            admission: Mutex::default(),
        }
    }

    pub(super) fn control(&self) -> &Arc<Control> {
        &self.control
    }

    pub(super) fn admission(&self) -> MutexGuard<'_, Admission> {
        let admission = self.admission.lock();
        admission.unwrap_or_else(PoisonError::into_inner)
    }

    /// The account at the authority if this process may order now, or else the time until it may.
    pub(super) fn account(&self, now: Timestamp) -> Result<State, Duration> {
        if !self.control.has_store() {
            return Err(CERTIFICATE_STORE_RETRY);
        }
        let paused = Timestamp(self.paused.load(Ordering::Relaxed));
        if paused > now {
            return Err(paused.since(now));
        }
        let region = self.control.acme_record();
        if self.lease.is_elsewhere(&region, now) {
            return Err(CERTIFICATE_STORE_RETRY);
        }
        // The task for the certificate of the region registers the account, and logs errors of its
        // record.
        let account = parsed(&region).ok();
        account
            .filter(|it| self.orders.in_handshakes.has_account(it))
            .ok_or(CERTIFICATE_STORE_RETRY)
    }

    /// Takes the lease, or extends it if its end is near. Returns whether this process has it.
    pub(super) async fn hold_lease(&self, now: Timestamp) -> bool {
        if self.lease.is_held(&self.control.acme_record(), now) {
            return true;
        }
        let lease = self.lease.clone();
        self.store_region("certificate.lease", move |record| {
            lease.check(record, now)?;
            lease.extend(record, now);
            Ok(())
        })
        .await
    }

    /// Asks the authority when it wants the certificate of the domain renewed.
    pub(super) async fn ask_window(&self, record: &DomainRecord) -> KnownWindow {
        let now = Timestamp::now();
        let state = self
            .account(now)
            .ok()
            .and_then(|account| state_of(&account, record).ok());
        let answer = match &state {
            Some(state) => self.orders.in_handshakes.renewal_info(state).await,
            None => return KnownWindow::new(record.certificate, None, now),
        };
        if let Err(error) = &answer {
            tracing::info!(domain = %record.id, %error,
                "no renewal information: the window before counts, or two thirds of the lifetime");
        }
        KnownWindow::new(record.certificate, answer.ok(), now)
    }

    /// Makes the steps of a domain's order one after another, until it ends, fails, or cannot go
    /// on. Begins an order if there is none. Returns the time before which no further step is made.
    pub(super) async fn run(self: Arc<Self>, name: DomainName) -> Timestamp {
        let orders = self.orders.of_domain(&name);
        let mut is_begun = false;
        loop {
            let now = Timestamp::now();
            let Ok(account) = self.account(now) else {
                return now;
            };
            let record = self.control.look_at(|records| {
                records
                    .domains
                    .get(&name)
                    .filter(|it| may_order(it))
                    .cloned()
            });
            // The domain may be removed, or get a certificate in another way.
            let Some(record) = record.filter(|it| it.order.is_some() || !is_begun) else {
                return now;
            };
            is_begun = true;
            match self.advance(&orders, &account, record).await {
                Next::After(wait) => sleep(wait).await,
                Next::NotBefore(time) => return time,
            }
        }
    }

    /// Makes the next step of the order of a domain.
    async fn advance(&self, orders: &OrdersByProof, region: &State, record: DomainRecord) -> Next {
        let now = Timestamp::now();
        let name = &record.id;
        if record.order.is_none() && !self.is_proved(name).await {
            // The domain is still active if its DNS servers did not answer.
            return Next::NotBefore(now.after(UNPROVED_PAUSE));
        }
        let mut state = match state_of(region, &record) {
            Ok(state) => state,
            Err(error) => {
                tracing::error!(domain = %name, %error,
                    "the certificate of an own domain cannot be ordered; remove the domain, and \
                     add it again");
                return Next::NotBefore(now.after(CERTIFICATE_LOOK_EVERY));
            }
        };
        let orders = match (self.challenge_kind(&record), &orders.over_http) {
            (DomainChallengeKind::Http, Some(over_http)) => over_http,
            _ => &orders.in_handshakes,
        };
        let is_new = state.order.is_none();
        if is_new && let Err(next) = self.admission().begin(&record.account, now) {
            return Next::NotBefore(next);
        }
        let progress = orders.advance(&mut state, now).await;
        if is_new && state.order.is_none() {
            self.admission().take_back(&record.account);
        }
        if !orders.has_account(&state) {
            self.lose_account(&state, now).await;
            return Next::NotBefore(now.after(CERTIFICATE_STORE_RETRY));
        }
        match progress {
            Ok(Progress::Wait(wait)) => Next::After(wait),
            Ok(Progress::Changed) => self.store(&record, "domain.order", state, |_| {}).await,
            Ok(Progress::Issued) if size(&state) > DOMAIN_CERTIFICATE_BYTES => {
                let error = AcmeError::new(
                    FailureKind::Refused,
                    format!(
                        "certificate of {name}: chain and key have {} bytes, and may have \
                         {DOMAIN_CERTIFICATE_BYTES}; choose an authority with a shorter chain",
                        size(&state)
                    ),
                );
                // The certificate before stays in use.
                let before = state_of(region, &record).ok();
                state.certificate = before.and_then(|it| it.certificate);
                self.note_failure(&record, state, error).await
            }
            Ok(Progress::Issued) => {
                let certificate = state.certificate.as_ref().and_then(issued);
                let finish = move |record: &mut DomainRecord| {
                    record.certificate = certificate;
                    record.failures = None;
                    record.renewal_requested = None;
                };
                self.store(&record, "domain.issue", state, finish).await
            }
            Ok(Progress::GivenUp(error)) => self.note_failure(&record, state, error).await,
            // An authority that is away is noted once for each domain.
            Err(error) if error.kind == FailureKind::Unreachable && is_noted(&record) => {
                self.pause(&record, &error, now);
                Next::NotBefore(now)
            }
            Err(error) => self.note_failure(&record, state, error).await,
        }
    }

    /// The kind of proof of an order: that of the challenge under way, or in plain HTTP for each
    /// second order. A terminator of TLS before the gateway lets only plain HTTP pass.
    fn challenge_kind(&self, record: &DomainRecord) -> DomainChallengeKind {
        let challenge = record.order.as_ref().and_then(|it| it.challenge.as_ref());
        let refused = record.failures.as_ref().filter(|it| it.kind == "refused");
        match (challenge, &self.orders.over_http) {
            (Some(challenge), _) => challenge.kind,
            (None, Some(_)) if refused.is_some_and(|it| it.count % 2 == 1) => {
                DomainChallengeKind::Http
            }
            (None, _) => DomainChallengeKind::TlsAlpn,
        }
    }

    async fn note_failure(&self, record: &DomainRecord, state: State, error: AcmeError) -> Next {
        // The waits count from here: the step may have taken long.
        let now = Timestamp::now();
        tracing::warn!(domain = %record.id, %error,
            "no certificate for an own domain; it is tried again");
        self.pause(record, &error, now);
        let known = record.failures.as_ref();
        let count = known.map_or(0, |it| it.count).saturating_add(1);
        let note = move |record: &mut DomainRecord| {
            record.failures = Some(failures(&error, count, now));
        };
        match self.store(record, "domain.failure", state, note).await {
            Next::After(_) => Next::NotBefore(now),
            not_stored => not_stored,
        }
    }

    /// Leaves the authority alone for a while if it does not answer. After a rate limit, orders
    /// that have begun go on.
    fn pause(&self, record: &DomainRecord, error: &AcmeError, now: Timestamp) {
        let until = now.after(pause_after(error));
        match error.kind {
            FailureKind::Unreachable => drop(self.paused.fetch_max(until.0, Ordering::Relaxed)),
            FailureKind::RateLimited => {
                let (account, name) = (&record.account, &record.id);
                self.admission().limit(account, name, until, now);
            }
            FailureKind::Refused | FailureKind::Proof => {}
        }
    }

    /// Looks DNS up, stores the finding, and returns whether it proves the domain.
    async fn is_proved(&self, name: &DomainName) -> bool {
        let control = Arc::clone(&self.control);
        let name = name.clone();
        let look = move || domain::look(&control, &name);
        let looked = self.tasks.blocking("a look at DNS", look).await;
        matches!(looked, Some(Ok(true)))
    }

    /// Stores a step that was made with `before`, unless the domain has another certificate or
    /// holder since. The next step follows at once if it is stored.
    async fn store(
        &self,
        before: &DomainRecord,
        action: &'static str,
        state: State,
        update: impl Fn(&mut DomainRecord) + Send + 'static,
    ) -> Next {
        let control = Arc::clone(&self.control);
        let lease = self.lease.clone();
        let kind = self.challenge_kind(before);
        let name = &before.id;
        let (id, holder) = (name.clone(), before.account.clone());
        let material = Arc::clone(&before.material);
        let stored = move || {
            control.store_domain(&id, action, |region, record, now| {
                lease.check(region, now)?;
                // Another node that looks at DNS writes the record again, with the same material.
                let is_as_before = record.material.reveal() == material.reveal();
                if record.account != holder || !is_as_before {
                    let message = "it has another certificate or holder since".to_owned();
                    return Err(ControlError::Conflict(message));
                }
                write_state(record, &state, kind)?;
                update(record);
                Ok(())
            })
        };
        match self.tasks.blocking("a step of an order", stored).await {
            Some(Ok(())) => return Next::After(Duration::ZERO),
            Some(Err(error)) => {
                tracing::warn!(domain = %name, %error,
                    "a step of the order of a certificate is not stored; it is made again");
            }
            None => {}
        }
        Next::NotBefore(Timestamp::now().after(CERTIFICATE_STORE_RETRY))
    }

    /// Stores that the authority does not know the account any more: it is registered again for the
    /// region.
    async fn lose_account(&self, state: &State, now: Timestamp) {
        let account = state.account.clone();
        let lease = self.lease.clone();
        self.store_region("certificate.account", move |record| {
            lease.check(record, now)?;
            let mut region = parsed(record)?;
            region.account.clone_from(&account);
            record.state = json(&region)?;
            Ok(())
        })
        .await;
    }

    async fn store_region(
        &self,
        action: &'static str,
        update: impl Fn(&mut AcmeRecord) -> Result<(), ControlError> + Send + 'static,
    ) -> bool {
        let control = Arc::clone(&self.control);
        let stored = move || control.store_acme(action, update);
        match self.tasks.blocking("a step of an order", stored).await {
            Some(Ok(())) => true,
            Some(Err(error)) => {
                tracing::warn!(%error, "a step of an order is not stored; it is made again");
                false
            }
            None => false,
        }
    }
}

/// Whether the gateway orders certificates for a domain. It begins none for a domain that DNS does
/// not prove now, and replaces an uploaded one only on request.
pub(super) fn may_order(record: &DomainRecord) -> bool {
    let is_wanted = !is_uploaded(record) || record.renewal_requested.is_some();
    is_wanted && (record.order.is_some() || record.state == DomainState::Active)
}

fn is_uploaded(record: &DomainRecord) -> bool {
    let certificate = record.certificate;
    certificate.is_some_and(|it| it.source == DomainCertificateSource::Uploaded)
}

/// Whether the record says that the authority is away.
fn is_noted(record: &DomainRecord) -> bool {
    let failures = record.failures.as_ref();
    failures.is_some_and(|it| it.kind == "unreachable")
}

/// Bytes of chain and key.
fn size(state: &State) -> usize {
    let certificate = state.certificate.as_ref();
    certificate.map_or(0, |it| it.chain.len() + it.key.reveal().len())
}

/// The state of a domain's order, with the account of the region.
fn state_of(region: &State, record: &DomainRecord) -> Result<State, String> {
    let material: DomainMaterial = serde_json::from_str(record.material.reveal())
        .map_err(|error| format!("its material is not JSON of this version: {error}"))?;
    let order = material.order.map(serde_json::from_value::<OrderState>);
    let certificate = material.served.map(|served| Certificate {
        // The authority does not know an uploaded certificate, so that an order does not replace it
        // there.
        names: match is_uploaded(record) {
            true => Vec::new(),
            false => vec![record.id.to_string()],
        },
        chain: served.chain,
        key: served.key,
        received: record.created_at,
    });
    Ok(State {
        account: region.account.clone(),
        order: order
            .transpose()
            .map_err(|error| format!("its order is not JSON of this version: {error}"))?,
        certificate,
        ..State::default()
    })
}

/// An issued certificate as the record describes it.
fn issued(certificate: &Certificate) -> Option<DomainCertificate> {
    let pair = Pair::from_pem(&certificate.chain, certificate.key.reveal()).ok()?;
    let (not_before, not_after) = pair.first_validity()?;
    Some(DomainCertificate {
        not_before,
        not_after,
        source: DomainCertificateSource::Acme,
    })
}

/// Writes order, chain and key into the record.
fn write_state(
    record: &mut DomainRecord,
    state: &State,
    kind: DomainChallengeKind,
) -> Result<(), ControlError> {
    let challenge = |value: &str| DomainChallenge {
        kind,
        value: value.into(),
    };
    let order = state.order.as_ref();
    record.order = order.map(|order| DomainOrder {
        began: order.began,
        challenge: order.proofs.first().map(|proof| challenge(&proof.value)),
    });
    let served = state.certificate.as_ref().map(|certificate| ServedPair {
        chain: certificate.chain.clone(),
        key: certificate.key.clone(),
    });
    let order = order.map(serde_json::to_value).transpose();
    let material = DomainMaterial {
        served,
        order: order.map_err(|error| ControlError::Conflict(format!("order: {error}")))?,
        ..DomainMaterial::default()
    };
    record.material = Arc::new(sealed(&material)?);
    Ok(())
}

/// Time for which other orders wait after `error`. A limit of requests for nonces has no problem
/// document, as if the authority did not answer.
fn pause_after(error: &AcmeError) -> Duration {
    let pause = match error.kind {
        FailureKind::Unreachable => UNREACHABLE_PAUSE,
        _ => RATE_LIMITED_PAUSE,
    };
    let asked = error.retry_after.unwrap_or(pause);
    asked.clamp(UNREACHABLE_PAUSE, RATE_LIMITED_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_limit_of_one_name_does_not_stop_others_for_long() {
        let limited = |seconds: Option<u64>| AcmeError {
            retry_after: seconds.map(Duration::from_secs),
            ..AcmeError::new(FailureKind::RateLimited, "too many certificates".to_owned())
        };
        let pauses = [None, Some(30), Some(24 * 60 * 60)].map(|it| pause_after(&limited(it)));
        assert_eq!(
            pauses,
            [
                RATE_LIMITED_PAUSE,
                Duration::from_secs(30),
                RATE_LIMITED_PAUSE
            ]
        );
        let away = |seconds| AcmeError {
            retry_after: Some(Duration::from_secs(seconds)),
            ..AcmeError::new(FailureKind::Unreachable, "it answered 429".to_owned())
        };
        assert_eq!(pause_after(&away(0)), UNREACHABLE_PAUSE);
        assert_eq!(pause_after(&away(90)), Duration::from_secs(90));
    }
}
