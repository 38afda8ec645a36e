//! Orders certificates of own domains. Proofs are in the handshakes of the listener (RFC 8737), or in responses of the listener
//! in plain HTTP (RFC 8555 §8.3) if there is one and the authority has refused the former.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use gw_acme::schedule::{Situation, Validity};
use gw_acme::{AcmeError, Certificate, FailureKind, OrderState, Orders, Progress, State};
use gw_base::clock::Timestamp;
use gw_base::process::background::Tasks;
use gw_base::tls::certificate::Pair;
use gw_shared::id::DomainName;
use gw_store::{
    AcmeRecord, DomainCertificate, DomainCertificateSource, DomainChallenge, DomainChallengeKind,
    DomainMaterial, DomainOrder, DomainRecord, DomainState, Records, ServedPair,
};
use tokio::time::sleep;

use super::lease::Lease;
use super::{failures, known_failures};
use crate::control::records::certificate::parsed;
use crate::control::records::domain::{self, sealed};
use crate::control::{Control, ControlError};
use crate::limits::{
    CERTIFICATE_LOOK_EVERY, CERTIFICATE_STORE_RETRY, DOMAIN_CERTIFICATE_BYTES, DOMAIN_ORDERS,
};

/// Time for which no order goes on after the authority was not reached.
const UNREACHABLE_PAUSE: Duration = Duration::from_secs(10);
/// Longest time for which no order goes on after a rate limit. The limit may concern one name only.
const RATE_LIMITED_PAUSE: Duration = Duration::from_secs(10 * 60);
/// Time until the next order of a domain that DNS did not prove when it was due.
const UNPROVED_PAUSE: Duration = Duration::from_secs(5 * 60);

/// Orders of this process.
pub(super) struct DomainOrders {
    control: Arc<Control>,
    /// Orders with proofs in handshakes.
    orders: Orders,
    /// Orders with proofs in plain HTTP; `None` without a listener for it.
    over_http: Option<Orders>,
    tasks: Tasks,
    lease: Lease,
    /// Time of the next step of orders that wait.
    waits: HashMap<DomainName, Timestamp>,
    /// Time until which the authority is left alone.
    paused: Timestamp,
}

impl DomainOrders {
    pub(super) fn new(
        control: &Arc<Control>,
        orders: Orders,
        over_http: Option<Orders>,
        tasks: &Tasks,
        lease: Lease,
    ) -> Self {
        Self {
            control: Arc::clone(control),
            orders,
            over_http,
            tasks: tasks.clone(),
            lease,
            waits: HashMap::new(),
            paused: Timestamp(0),
        }
    }

    /// Orders certificates until the tasks stop.
    pub(super) async fn run(mut self) {
        let mut changed = self.control.domains_changed();
        loop {
            let wait = self.step().await;
            tokio::select! {
                () = sleep(wait) => {}
                _ = changed.changed() => {}
            }
        }
    }

    /// Makes one step of each order that is due, and returns the time until the next one.
    async fn step(&mut self) -> Duration {
        if !self.control.has_store() {
            return CERTIFICATE_STORE_RETRY;
        }
        let now = Timestamp::now();
        if self.paused > now {
            return self.paused.since(now).min(CERTIFICATE_LOOK_EVERY);
        }
        let region = self.control.acme_record();
        if let Some(wait) = self.lease.of_another(&region, now) {
            return wait.min(CERTIFICATE_LOOK_EVERY);
        }
        // The task for the certificate of the region registers the account, and reports what is wrong with its record.
        let account = parsed(&region)
            .ok()
            .filter(|it| self.orders.has_account(it));
        let Some(account) = account else {
            return CERTIFICATE_STORE_RETRY;
        };
        let control = Arc::clone(&self.control);
        let (due, next) = control.look_at(|records| {
            self.waits
                .retain(|name, _| records.domains.contains_key(name));
            self.due(records, now)
        });
        if due.is_empty() {
            let wait = next.map_or(CERTIFICATE_LOOK_EVERY, |next| next.since(now));
            return wait.clamp(Duration::from_secs(1), CERTIFICATE_LOOK_EVERY);
        }
        if !self.lease.is_held(&region, now) && !self.extend_lease(now).await {
            return CERTIFICATE_STORE_RETRY;
        }
        for record in due {
            self.advance(&account, record).await;
            if self.paused > now {
                break;
            }
        }
        Duration::ZERO
    }

    /// The domains whose order goes on or begins now, and the time at which the next one is due.
    fn due(&self, records: &Records, now: Timestamp) -> (Vec<DomainRecord>, Option<Timestamp>) {
        let is_begun = |it: &&DomainRecord| it.order.is_some();
        let running = records.domains.values().filter(is_begun).count();
        let mut room = DOMAIN_ORDERS.saturating_sub(running);
        let (mut due, mut next) = (Vec::new(), None::<Timestamp>);
        for record in records.domains.values().filter(|it| may_order(it)) {
            let at = self.next_step(record, now);
            let has_room = record.order.is_some() || room > 0;
            if at <= now && has_room {
                room = room.saturating_sub(usize::from(record.order.is_none()));
                due.push(record.clone());
            } else if at > now {
                next = Some(next.map_or(at, |next| next.min(at)));
            }
        }
        (due, next)
    }

    fn next_step(&self, record: &DomainRecord, now: Timestamp) -> Timestamp {
        let wait = self.waits.get(&record.id).copied().unwrap_or(now);
        if record.order.is_some() {
            return wait;
        }
        let validity = record.certificate.map(|it| Validity {
            not_before: it.not_before,
            not_after: it.not_after,
        });
        let failures = record.failures.as_ref().map(known_failures);
        let situation = Situation {
            validity,
            window: None,
            failures,
            seed: seed(record),
        };
        situation.next_attempt(now).max(wait)
    }

    /// Makes the next step of the order of a domain.
    async fn advance(&mut self, region: &State, record: DomainRecord) {
        let now = Timestamp::now();
        let name = record.id.clone();
        if record.order.is_none() && !self.is_proved(&name).await {
            // The domain is still active if its DNS servers did not answer.
            self.waits.insert(name, now.after(UNPROVED_PAUSE));
            return;
        }
        let mut state = match state_of(region, &record) {
            Ok(state) => state,
            Err(error) => {
                tracing::error!(domain = %name, %error, "the certificate of an own domain cannot be ordered; remove the domain, and add it again");
                self.waits.insert(name, now.after(CERTIFICATE_LOOK_EVERY));
                return;
            }
        };
        let orders = match (self.challenge_kind(&record), &self.over_http) {
            (DomainChallengeKind::Http, Some(over_http)) => over_http,
            _ => &self.orders,
        };
        let orders = orders.of_names(vec![name.to_string()]);
        let progress = orders.advance(&mut state, now).await;
        if !orders.has_account(&state) {
            return self.lose_account(&state, now).await;
        }
        match progress {
            Ok(Progress::Wait(wait)) => drop(self.waits.insert(name, now.after(wait))),
            Ok(Progress::Changed) => self.store(&record, "domain.order", state, |_| {}).await,
            Ok(Progress::Issued) if size(&state) > DOMAIN_CERTIFICATE_BYTES => {
                let error = AcmeError::new(
                    FailureKind::Refused,
                    format!(
                        "certificate of {name}: chain and key have {} bytes, and may have {DOMAIN_CERTIFICATE_BYTES}; choose an authority with a shorter chain",
                        size(&state)
                    ),
                );
                // The certificate before stays in use.
                let Ok(State { certificate, .. }) = state_of(region, &record) else {
                    return;
                };
                state.certificate = certificate;
                self.note_failure(&record, state, error, now).await;
            }
            Ok(Progress::Issued) => {
                let forget_failures = |record: &mut DomainRecord| record.failures = None;
                self.store(&record, "domain.issue", state, forget_failures)
                    .await;
            }
            Ok(Progress::GivenUp(error)) | Err(error) => {
                self.note_failure(&record, state, error, now).await;
            }
        }
    }

    /// The kind of proof of an order: that of the challenge under way, or in plain HTTP for each second order. A terminator of TLS
    /// before the gateway lets only plain HTTP pass.
    fn challenge_kind(&self, record: &DomainRecord) -> DomainChallengeKind {
        let challenge = record.order.as_ref().and_then(|it| it.challenge.as_ref());
        let refused = record.failures.as_ref().filter(|it| it.kind == "refused");
        match (challenge, &self.over_http) {
            (Some(challenge), _) => challenge.kind,
            (None, Some(_)) if refused.is_some_and(|it| it.count % 2 == 1) => {
                DomainChallengeKind::Http
            }
            (None, _) => DomainChallengeKind::TlsAlpn,
        }
    }

    async fn note_failure(
        &mut self,
        record: &DomainRecord,
        state: State,
        error: AcmeError,
        now: Timestamp,
    ) {
        tracing::warn!(domain = %record.id, %error, "no certificate for an own domain; it is tried again");
        if let Some(pause) = pause_of_all(&error) {
            self.paused = now.after(pause);
        }
        let known = record.failures.as_ref();
        // An authority that is away is noted once for each domain.
        if error.kind == FailureKind::Unreachable
            && known.is_some_and(|it| it.kind == "unreachable")
        {
            return;
        }
        let count = known.map_or(0, |it| it.count).saturating_add(1);
        let note = move |record: &mut DomainRecord| {
            record.failures = Some(failures(&error, count, now));
        };
        self.store(record, "domain.failure", state, note).await;
    }

    /// Whether DNS proves the domain right now. Stores what it says.
    async fn is_proved(&self, name: &DomainName) -> bool {
        let control = Arc::clone(&self.control);
        let name = name.clone();
        let look = move || domain::look(&control, &name);
        let looked = self.tasks.blocking("a look at DNS", look).await;
        matches!(looked, Some(Ok(true)))
    }

    /// Stores a step that was made with `before`, unless the domain has another certificate or holder since.
    async fn store(
        &mut self,
        before: &DomainRecord,
        action: &'static str,
        state: State,
        update: impl Fn(&mut DomainRecord) + Send + 'static,
    ) {
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
        self.waits.remove(name);
        if let Some(Err(error)) = self.tasks.blocking("a step of an order", stored).await {
            tracing::warn!(domain = %name, %error, "a step of the order of a certificate is not stored; it is made again");
            self.waits.insert(
                name.clone(),
                Timestamp::now().after(CERTIFICATE_STORE_RETRY),
            );
        }
    }

    async fn extend_lease(&self, now: Timestamp) -> bool {
        let lease = self.lease.clone();
        self.store_region("certificate.lease", move |record| {
            lease.check(record, now)?;
            lease.extend(record, now);
            Ok(())
        })
        .await
    }

    /// Stores that the authority does not know the account any more: it is registered again for the region.
    async fn lose_account(&self, state: &State, now: Timestamp) {
        let account = state.account.clone();
        let lease = self.lease.clone();
        self.store_region("certificate.account", move |record| {
            lease.check(record, now)?;
            let mut region = parsed(record)?;
            region.account.clone_from(&account);
            record.state = super::json(&region)?;
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

/// Whether the gateway orders certificates for a domain. It begins none for a domain that DNS does not prove now.
fn may_order(record: &DomainRecord) -> bool {
    let is_uploaded = record
        .certificate
        .is_some_and(|it| it.source == DomainCertificateSource::Uploaded);
    !is_uploaded && (record.order.is_some() || record.state == DomainState::Active)
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
        names: vec![record.id.to_string()],
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

/// Writes order and certificate into the record.
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
    if let Some(served) = &served {
        let validity = Pair::from_pem(&served.chain, served.key.reveal())
            .ok()
            .and_then(|pair| pair.first_validity());
        record.certificate = validity.map(|(not_before, not_after)| DomainCertificate {
            not_before,
            not_after,
            source: DomainCertificateSource::Acme,
        });
    }
    let order = order.map(serde_json::to_value).transpose();
    let material = DomainMaterial {
        served,
        order: order.map_err(|error| ControlError::Conflict(format!("order: {error}")))?,
        ..DomainMaterial::default()
    };
    record.material = Arc::new(sealed(&material)?);
    Ok(())
}

/// Time for which no order goes on after `error`.
fn pause_of_all(error: &AcmeError) -> Option<Duration> {
    match error.kind {
        FailureKind::Unreachable => Some(UNREACHABLE_PAUSE),
        FailureKind::RateLimited => {
            let asked = error.retry_after.unwrap_or(RATE_LIMITED_PAUSE);
            Some(asked.min(RATE_LIMITED_PAUSE))
        }
        FailureKind::Refused | FailureKind::Proof => None,
    }
}

/// A number that stays the same for a certificate.
fn seed(record: &DomainRecord) -> u64 {
    let end = record.certificate.map_or(0, |it| it.not_after.0);
    let bytes = record.id.as_str().bytes();
    // FNV-1a: the schedule mixes the bits.
    bytes
        .chain(end.to_le_bytes())
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
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
        let pauses = [None, Some(30), Some(24 * 60 * 60)].map(|it| pause_of_all(&limited(it)));
        assert_eq!(
            pauses,
            [
                RATE_LIMITED_PAUSE,
                Duration::from_secs(30),
                RATE_LIMITED_PAUSE
            ]
            .map(Some)
        );
        let refused = AcmeError::new(FailureKind::Refused, "no such name".to_owned());
        assert_eq!(pause_of_all(&refused), None);
    }
}
