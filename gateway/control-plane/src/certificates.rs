//! Orders certificates at an ACME authority, for the region and for own domains: one node of the
//! region at a time, under a lease. All processes use what the records have. Also looks whether DNS
//! still proves own domains.

mod domain_orders;
mod lease;
mod places;
mod proofs;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use gw_acme::schedule::{Failures, Situation, Validity, Window};
use gw_acme::{
    AcmeError, ChallengeKind, FailureKind, Hook, Orders, Progress, Proof, Publisher, RenewalInfo,
    Rfc2136, State,
};
use gw_base::clock::Timestamp;
use gw_base::process::background::Tasks;
use gw_base::tls::certificate::Pair;
use gw_interface::config::{AcmeConfig, Challenge};
use gw_shared::identity::secret::Secret;
use gw_store::{AcmeFailures, AcmeRecord};
use tokio::time::sleep;

use self::domain_orders::{DomainOrders, OrdersByProof, Steps};
use self::lease::Lease;
use crate::admin::Admin;
use crate::control::records::certificate::parsed;
use crate::control::{Control, ControlError};
use crate::limits::{CERTIFICATE_LOOK_EVERY, CERTIFICATE_STORE_RETRY};

/// Time after which the authority is asked again for renewal information that it did not give.
const ASK_AGAIN: Duration = Duration::from_secs(6 * 60 * 60);

/// Orders the certificate of the region, and registers the account for all orders.
struct Keeper {
    control: Arc<Control>,
    orders: Orders,
    tasks: Tasks,
    lease: Lease,
    /// Renewal information, and the certificate and time for which it counts.
    window: Option<KnownWindow>,
}

struct KnownWindow {
    chain: String,
    window: Option<Window>,
    until: Timestamp,
}

/// Proofs that the listeners answer: they are in the records, which all processes of the region
/// use.
struct Listeners {
    kind: ChallengeKind,
    admin: Admin,
    tasks: Tasks,
}

/// Starts to order certificates, to renew them, and to look whether DNS proves own domains.
/// `answers_http` says whether there is a listener in plain HTTP.
pub fn keep(admin: &Admin, acme: Option<&AcmeConfig>, answers_http: bool, tasks: &Tasks) {
    let control = &admin.control;
    proofs::look(control, tasks);
    let Some(acme) = acme else {
        return;
    };
    let listeners = |kind| -> Arc<dyn Publisher> {
        Arc::new(Listeners {
            kind,
            admin: admin.clone(),
            tasks: tasks.clone(),
        })
    };
    let in_handshakes = listeners(ChallengeKind::TlsAlpn01);
    let publisher: Arc<dyn Publisher> = match &acme.challenge {
        Some(Challenge::Rfc2136(settings)) => Arc::new(Rfc2136::new(settings.clone())),
        Some(Challenge::Hook(settings)) => Arc::new(Hook::new(settings.clone())),
        Some(Challenge::TlsAlpn) | None => Arc::clone(&in_handshakes),
    };
    let lease = Lease::new(admin);
    let orders = |publisher| Orders::new(acme.settings.clone(), publisher);
    let over_http = answers_http.then(|| orders(listeners(ChallengeKind::Http01)));
    let of_domains = OrdersByProof {
        in_handshakes: orders(in_handshakes),
        over_http,
    };
    let steps = Steps::new(control, of_domains, tasks, lease.clone());
    tasks.spawn_until_stopped(
        "certificates of own domains",
        DomainOrders::new(steps).run(),
    );
    let mut keeper = Keeper {
        control: Arc::clone(control),
        orders: orders(publisher),
        tasks: tasks.clone(),
        lease,
        window: None,
    };
    tasks.spawn_until_stopped("the certificate of the region", async move {
        loop {
            let wait = keeper.step().await;
            tokio::select! {
                () = sleep(wait) => {}
                () = keeper.control.certificates_changed() => {}
            }
        }
    });
}

impl Keeper {
    /// Makes one step if one is due, and returns the time until the next one.
    async fn step(&mut self) -> Duration {
        // Another process takes over, and orders from then on.
        if !self.control.has_store() {
            return CERTIFICATE_STORE_RETRY;
        }
        let now = Timestamp::now();
        let record = self.control.acme_record();
        if self.lease.is_elsewhere(&record, now) {
            return CERTIFICATE_STORE_RETRY;
        }
        let mut state = match parsed(&record) {
            Ok(state) => state,
            Err(error) => {
                tracing::error!(%error, "no certificate can be ordered");
                return CERTIFICATE_LOOK_EVERY;
            }
        };
        // Without names, only the account is needed, for own domains.
        if self.orders.names().is_empty() && self.orders.has_account(&state) {
            return CERTIFICATE_LOOK_EVERY;
        }
        let next = self.next_attempt(&record, &state, now).await;
        if next > now {
            return next.since(now).min(CERTIFICATE_LOOK_EVERY);
        }
        if !self.lease.is_held(&record, now) {
            return self.store("certificate.lease", now, |_| {}).await;
        }
        let progress = match self.orders.names().is_empty() {
            true => self.orders.register(&mut state).await,
            false => self.orders.advance(&mut state, now).await,
        };
        self.note(progress, state).await
    }

    /// Stores the result of a step, and returns the time until the next one.
    async fn note(&self, progress: Result<Progress, AcmeError>, state: State) -> Duration {
        let now = Timestamp::now();
        let state = match json(&state) {
            Ok(state) => state,
            Err(error) => {
                tracing::error!(%error, "the state of an order is not stored; please report it");
                return CERTIFICATE_LOOK_EVERY;
            }
        };
        match progress {
            Ok(Progress::Wait(wait)) => wait,
            Ok(Progress::Changed) => {
                self.store("certificate.order", now, move |record| {
                    record.state = state.clone();
                    // Attempts that cost nothing count until the authority answers.
                    let is_over = |it: &mut AcmeFailures| it.kind == "unreachable";
                    record.failures.take_if(is_over);
                })
                .await
            }
            Ok(Progress::Issued) => {
                self.store("certificate.issue", now, move |record| {
                    record.state = state.clone();
                    record.failures = None;
                    record.renewal_requested = None;
                })
                .await
            }
            Ok(Progress::GivenUp(error)) | Err(error) => {
                tracing::warn!(%error, "no certificate of the ACME authority; it is tried again");
                self.store("certificate.failure", now, move |record| {
                    record.state = state.clone();
                    let count = record.failures.as_ref().map_or(0, |it| it.count);
                    record.failures = Some(failures(&error, count.saturating_add(1), now));
                })
                .await
            }
        }
    }

    /// Changes the stored record, and extends the lease with it.
    async fn store(
        &self,
        action: &'static str,
        now: Timestamp,
        update: impl Fn(&mut AcmeRecord) + Send + 'static,
    ) -> Duration {
        let control = Arc::clone(&self.control);
        let lease = self.lease.clone();
        let stored = move || {
            control.store_acme(action, |record| {
                lease.check(record, now)?;
                update(record);
                lease.extend(record, now);
                Ok(())
            })
        };
        match self.tasks.blocking("a step of an order", stored).await {
            Some(Ok(())) => Duration::ZERO,
            Some(Err(error)) => {
                tracing::warn!(%error,
                    "a step of the order of a certificate is not stored; it is made again");
                CERTIFICATE_STORE_RETRY
            }
            None => CERTIFICATE_STORE_RETRY,
        }
    }

    async fn next_attempt(
        &mut self,
        record: &AcmeRecord,
        state: &State,
        now: Timestamp,
    ) -> Timestamp {
        let failures = record.failures.as_ref().map(known_failures);
        let chain = state.certificate.as_ref().map(|it| it.chain.as_str());
        // Orders of own domains need the account, too.
        let is_due = state.order.is_some()
            || record.renewal_requested.is_some()
            || !self.orders.has_account(state);
        let certificate = state.certificate.as_ref();
        let wanted = certificate.filter(|it| it.names == self.orders.names() && !is_due);
        let validity = wanted.and_then(|it| {
            let pair = Pair::from_pem(&it.chain, it.key.reveal()).ok()?;
            let (not_before, not_after) = pair.first_validity()?;
            Some(Validity {
                not_before,
                not_after,
            })
        });
        let window = match validity {
            Some(_) => self.window(state, chain.unwrap_or_default(), now).await,
            None => None,
        };
        let situation = Situation {
            validity,
            window,
            failures,
            seed: seed(chain.unwrap_or_default()),
        };
        situation.next_attempt(now)
    }

    /// Renewal information for the certificate in use.
    async fn window(&mut self, state: &State, chain: &str, now: Timestamp) -> Option<Window> {
        let known = self.window.as_ref();
        if let Some(known) = known.filter(|known| known.chain == chain && known.until > now) {
            return known.window;
        }
        let (window, ask_again) = match self.orders.renewal_info(state).await {
            Ok(RenewalInfo::Window { window, ask_again }) => (Some(window), ask_again),
            Ok(RenewalInfo::NotOffered) => (None, ASK_AGAIN),
            Err(error) => {
                tracing::info!(%error,
                    "no renewal information: the window before counts, or two thirds of the \
                     lifetime");
                let known = known.filter(|known| known.chain == chain);
                (known.and_then(|known| known.window), ASK_AGAIN)
            }
        };
        self.window = Some(KnownWindow {
            chain: chain.to_owned(),
            window,
            until: now.after(ask_again),
        });
        window
    }
}

#[async_trait]
impl Publisher for Listeners {
    fn kind(&self) -> ChallengeKind {
        self.kind
    }

    /// The record has the proofs already.
    async fn publish(&self, _: &[Proof]) -> Result<(), AcmeError> {
        Ok(())
    }

    /// Whether all live nodes, and all workers of this one, use the record with the proofs.
    async fn is_visible(&self, _: &[Proof]) -> Result<bool, AcmeError> {
        let position = self.admin.control.position();
        let (_, behind) = self.admin.nodes_behind(&position).await;
        if !behind.is_empty() {
            return Ok(false);
        }
        // A report follows what was published before.
        let control = Arc::clone(&self.admin.control);
        let reports = self
            .tasks
            .blocking("reports of the workers", move || control.reports().len());
        Ok(reports.await == Some(self.admin.control.workers()))
    }

    /// The record loses the proofs with its next change.
    async fn withdraw(&self, _: &[Proof]) -> Result<(), AcmeError> {
        Ok(())
    }
}

fn failures(error: &AcmeError, count: u32, now: Timestamp) -> AcmeFailures {
    let kind = match error.kind {
        FailureKind::Unreachable => "unreachable",
        FailureKind::RateLimited => "rate_limited",
        FailureKind::Refused => "refused",
        FailureKind::Proof => "proof",
    };
    AcmeFailures {
        count,
        last: now,
        kind: kind.to_owned(),
        retry_after_seconds: error.retry_after.map(|time| time.as_secs()),
        reason: error.message.clone(),
    }
}

/// Stored failures, as the schedule takes them.
fn known_failures(stored: &AcmeFailures) -> Failures {
    Failures {
        count: stored.count,
        last: stored.last,
        kind: kind(&stored.kind),
        retry_after: stored.retry_after_seconds.map(Duration::from_secs),
    }
}

fn kind(name: &str) -> FailureKind {
    match name {
        "unreachable" => FailureKind::Unreachable,
        "rate_limited" => FailureKind::RateLimited,
        "proof" => FailureKind::Proof,
        // Also what a later version writes: the longest waits.
        _ => FailureKind::Refused,
    }
}

/// A state as it is stored.
fn json(state: &State) -> Result<Secret, ControlError> {
    serde_json::to_string(state)
        .map(Secret::new)
        .map_err(|error| ControlError::Conflict(format!("state of the orders: not JSON: {error}")))
}

/// A number that stays the same for a chain.
fn seed(chain: &str) -> u64 {
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, chain.as_bytes());
    let mut seed = [0; 8];
    seed.copy_from_slice(&digest.as_ref()[..8]);
    u64::from_le_bytes(seed)
}
