//! An order as steps. Each step makes one change of the state, which the caller stores before the
//! next one, so that a process that is killed anywhere goes on with the same account, order and
//! keys.

mod account;
mod finalize;
mod registration;
mod renewal_info;

use std::sync::{Arc, Mutex};
use std::time::Duration;

pub use self::renewal_info::RenewalInfo;
use gw_base::clock::Timestamp;
use instant_acme::{
    Account, AuthorizationStatus, ChallengeStatus, ChallengeType, Identifier, NewOrder, Order,
    OrderStatus,
};

use crate::error::{AcmeError, FailureKind, NoAnswer, failure, problem_name, short_name};
use crate::http::AuthorityClient;
use crate::limits::{LEFTOVERS_MAX, ORDER_WITHIN, POLL_EVERY, POLL_EVERY_MAX, VISIBLE_WITHIN};
use crate::proof::{ChallengeKind, Proof, Publisher};
use crate::settings::Settings;
use crate::state::{Certificate, GivenUp, OrderState, State};

/// Result of one step.
#[derive(Debug)]
pub enum Progress {
    /// The state has changed. It must be stored before the next step.
    Changed,
    /// The state is as before. The next step makes sense after this time.
    Wait(Duration),
    /// The state has a new certificate. It must be stored; the order is done.
    Issued,
    /// The order is given up for this reason. The state must be stored.
    GivenUp(AcmeError),
}

/// Orders certificates of one authority.
pub struct Orders {
    settings: Settings,
    client: AuthorityClient,
    publisher: Arc<dyn Publisher>,
    /// The account in use, by its URL, so that not every step reads the directory.
    account: Mutex<Option<(String, Account)>>,
}

impl Orders {
    /// Orders with these settings, whose proofs `publisher` publishes.
    pub fn new(settings: Settings, publisher: Arc<dyn Publisher>) -> Self {
        let client = AuthorityClient::new(settings.authorities.as_ref());
        Self {
            settings,
            client,
            publisher,
            account: Mutex::default(),
        }
    }

    /// As these orders, for other names. They may run beside these.
    pub fn of_names(&self, names: Vec<String>) -> Self {
        Self {
            settings: Settings {
                names,
                ..self.settings.clone()
            },
            client: self.client.beside(),
            publisher: Arc::clone(&self.publisher),
            account: Mutex::default(),
        }
    }

    /// Whether `state` has an account that is registered at the authority.
    pub fn has_account(&self, state: &State) -> bool {
        let account = state.account.as_ref();
        account.is_some_and(|it| it.directory == self.settings.directory && it.url.is_some())
    }

    /// Registers the account, one step at a time. [`Progress::Wait`] once it is registered.
    pub async fn register(&self, state: &mut State) -> Result<Progress, AcmeError> {
        let changed = self.ready_account(state).await?;
        Ok(changed.unwrap_or(Progress::Wait(POLL_EVERY_MAX)))
    }

    /// Names of the certificates.
    pub fn names(&self) -> &[String] {
        &self.settings.names
    }

    /// Makes the next step of the order in `state`, or begins one. A failure may have changed the
    /// state, too: it must be stored in any case.
    pub async fn advance(&self, state: &mut State, now: Timestamp) -> Result<Progress, AcmeError> {
        if let Some(changed) = self.ready_account(state).await? {
            return Ok(changed);
        }
        let Some(order) = &mut state.order else {
            return self.begin(state, now).await;
        };
        if order.given_up.is_none() {
            order.given_up = self.reason_to_give_up(order, now);
        }
        if order.given_up.is_some() {
            return Ok(self.give_up(state).await);
        }
        if order.chain.is_some() {
            return Ok(self.complete(state, now).await);
        }
        self.advance_order(state, now).await
    }

    async fn begin(&self, state: &mut State, now: Timestamp) -> Result<Progress, AcmeError> {
        let account = self.account(state).await?;
        let names = self.settings.names.clone();
        let identifiers: Vec<Identifier> = names.iter().cloned().map(Identifier::Dns).collect();
        let chain = state.certificate.as_ref().filter(|it| it.names == names);
        let replaced = chain.and_then(Certificate::id);
        let replacement = match replaced {
            Some(replaced) => {
                let request = NewOrder::new(&identifiers).replaces(replaced);
                Some(account.new_order(&request).await)
            }
            None => None,
        };
        let ordered = match replacement {
            Some(Err(error)) if !is_refused_for_replaces(&error) => Err(error),
            Some(Ok(order)) => Ok(order),
            // The authority offers no renewal information, or counts the certificate as replaced
            // already.
            Some(Err(_)) | None => account.new_order(&NewOrder::new(&identifiers)).await,
        };
        let order = match ordered {
            Ok(order) => order,
            Err(error) => return self.unknown_account(state, "new order", &error),
        };
        state.order = Some(OrderState {
            names,
            began: now,
            url: order.url().to_owned(),
            directory: self.settings.directory.clone(),
            proofs: Vec::new(),
            published: None,
            is_visible: false,
            key: None,
            chain: None,
            given_up: None,
        });
        Ok(Progress::Changed)
    }

    async fn advance_order(
        &self,
        state: &mut State,
        now: Timestamp,
    ) -> Result<Progress, AcmeError> {
        let account = self.account(state).await?;
        let Some(stored) = &mut state.order else {
            return Ok(Progress::Changed);
        };
        let mut order = match account.order(stored.url.clone()).await {
            Ok(order) => order,
            Err(error) => return self.unknown_order(state, &error),
        };
        match order.state().status {
            OrderStatus::Pending => self.prove(stored, &mut order, now).await,
            OrderStatus::Ready => self.finalize(stored, &mut order).await,
            OrderStatus::Processing => Ok(self.wait()),
            OrderStatus::Valid => self.download(stored, &mut order).await,
            OrderStatus::Invalid => Ok(self.refused(stored, &mut order).await),
        }
    }

    async fn refused(&self, stored: &mut OrderState, order: &mut Order) -> Progress {
        stored.given_up = Some(GivenUp {
            reason: self.refused_proofs(order).await,
            is_refusal: true,
        });
        Progress::Changed
    }

    /// Publishes the proofs of an order; once they are visible, tells the authority.
    async fn prove(
        &self,
        stored: &mut OrderState,
        order: &mut Order,
        now: Timestamp,
    ) -> Result<Progress, AcmeError> {
        let is_told = stored.is_visible;
        let proofs = match self.proofs(order, is_told).await {
            Ok(proofs) => proofs,
            Err(error) => {
                // A challenge that is refused before the authority answers that it is ready has its
                // error in that answer.
                let state = order.refresh().await;
                if state.is_ok_and(|state| state.status == OrderStatus::Invalid) {
                    return Ok(self.refused(stored, order).await);
                }
                return Err(error);
            }
        };
        if is_told {
            return Ok(self.wait());
        }
        // Stored before they are published, so that they are withdrawn whatever happens.
        if stored.proofs != proofs {
            stored.proofs = proofs;
            stored.published = None;
            return Ok(Progress::Changed);
        }
        let Some(published) = stored.published else {
            self.publisher.publish(&proofs).await?;
            stored.published = Some(now);
            return Ok(Progress::Changed);
        };
        if self.publisher.is_visible(&proofs).await? {
            stored.is_visible = true;
            return Ok(Progress::Changed);
        }
        let waited = now.since(published);
        if waited > VISIBLE_WITHIN {
            let names: Vec<&str> = proofs.iter().map(|proof| proof.name.as_str()).collect();
            stored.given_up = Some(GivenUp {
                reason: format!(
                    "proofs for {}: not visible {} s after they were published; check that the \
                     servers in dns_servers serve the zone and follow its primary server",
                    names.join(", "),
                    VISIBLE_WITHIN.as_secs()
                ),
                is_refusal: true,
            });
            return Ok(Progress::Changed);
        }
        // Less and less often: each look asks several DNS servers.
        Ok(Progress::Wait(
            (waited / 8).clamp(POLL_EVERY, POLL_EVERY_MAX),
        ))
    }

    /// The proofs that the authority still waits for. With `tell`, tells it that they are
    /// published.
    async fn proofs(&self, order: &mut Order, tell: bool) -> Result<Vec<Proof>, AcmeError> {
        let kind = match self.publisher.kind() {
            ChallengeKind::Dns01 => ChallengeType::Dns01,
            ChallengeKind::TlsAlpn01 => ChallengeType::TlsAlpn01,
            ChallengeKind::Http01 => ChallengeType::Http01,
        };
        let mut proofs = Vec::new();
        let mut authorizations = order.authorizations();
        while let Some(authorization) = authorizations.next().await {
            let mut authorization =
                authorization.map_err(|error| self.failed("an authorization", &error))?;
            if authorization.status != AuthorizationStatus::Pending {
                continue;
            }
            let Identifier::Dns(name) = authorization.identifier().identifier.clone() else {
                continue;
            };
            let Some(mut challenge) = authorization.challenge(kind.clone()) else {
                return Err(AcmeError::refused(format!(
                    "authorization of {name} at {}: the authority offers no {kind:?}; choose \
                     another acme.challenge: a wildcard needs DNS",
                    self.settings.directory
                )));
            };
            if tell && challenge.status == ChallengeStatus::Pending {
                challenge
                    .set_ready()
                    .await
                    .map_err(|error| self.failed("a challenge", &error))?;
            }
            let authorization = challenge.key_authorization();
            let value = match kind {
                ChallengeType::Http01 => authorization.as_str().to_owned(),
                _ => authorization.dns_value(),
            };
            proofs.push(Proof { name, value });
        }
        proofs.sort();
        Ok(proofs)
    }

    async fn complete(&self, state: &mut State, now: Timestamp) -> Progress {
        let Some(order) = state.order.take() else {
            return Progress::Changed;
        };
        let (Some(chain), Some(key)) = (order.chain, order.key) else {
            return Progress::Changed;
        };
        self.withdraw(state, order.proofs).await;
        state.certificate = Some(Certificate {
            names: order.names,
            chain,
            key,
            received: now,
        });
        Progress::Issued
    }

    fn reason_to_give_up(&self, order: &OrderState, now: Timestamp) -> Option<GivenUp> {
        let (reason, is_refusal) = if order.names != self.settings.names {
            let names = order.names.join(", ");
            (
                format!("order for {names}: other names are configured now"),
                false,
            )
        } else if !order.directory.is_empty() && order.directory != self.settings.directory {
            (
                format!(
                    "order {}: another authority is configured now; a new order follows",
                    order.url
                ),
                false,
            )
        } else if order.chain.is_none() && now.since(order.began) > ORDER_WITHIN {
            let (url, minutes) = (&order.url, ORDER_WITHIN.as_secs() / 60);
            (
                format!("order {url}: not issued after {minutes} minutes; a new order follows"),
                true,
            )
        } else {
            return None;
        };
        Some(GivenUp { reason, is_refusal })
    }

    async fn give_up(&self, state: &mut State) -> Progress {
        let Some(order) = state.order.take() else {
            return Progress::Changed;
        };
        self.withdraw(state, order.proofs).await;
        let (reason, kind) = match order.given_up {
            Some(GivenUp {
                reason,
                is_refusal: true,
            }) => (reason, FailureKind::Refused),
            Some(GivenUp { reason, .. }) => (reason, FailureKind::Unreachable),
            None => return Progress::Changed,
        };
        Progress::GivenUp(AcmeError::new(kind, reason))
    }

    /// Withdraws these proofs and those that are left over. Keeps them for the next order if that
    /// fails.
    async fn withdraw(&self, state: &mut State, proofs: Vec<Proof>) {
        let mut all = std::mem::take(&mut state.leftovers);
        all.extend(proofs);
        if all.is_empty() {
            return;
        }
        if let Err(error) = self.publisher.withdraw(&all).await {
            tracing::warn!(%error,
                "acme: proofs of an order are not withdrawn; the next order tries it again");
            keep_leftovers(state, all);
        }
    }

    /// The reasons for which the authority refused proofs.
    async fn refused_proofs(&self, order: &mut Order) -> String {
        let mut reasons = Vec::new();
        if let Some(error) = &order.state().error {
            reasons.push(error.to_string());
        }
        let mut authorizations = order.authorizations();
        while let Some(Ok(authorization)) = authorizations.next().await {
            let name = authorization.identifier().to_string();
            for challenge in &authorization.challenges {
                if let Some(error) = &challenge.error {
                    let detail = error.detail.as_deref().unwrap_or("no detail");
                    reasons.push(format!("{name}: {}: {detail}", short_name(error)));
                }
            }
        }
        if reasons.is_empty() {
            reasons.push("it does not say why".to_owned());
        }
        format!(
            "order at {}: refused: {}; check that the authority reaches the proof: the TXT record \
             below _acme-challenge, or this gateway on port 443",
            self.settings.directory,
            reasons.join("; ")
        )
    }

    fn unknown_order(
        &self,
        state: &mut State,
        error: &instant_acme::Error,
    ) -> Result<Progress, AcmeError> {
        let instant_acme::Error::Api(problem) = error else {
            return Err(self.failed("the order", error));
        };
        let is_lost = match short_name(problem) {
            "accountDoesNotExist" => true,
            "malformed" | "unauthorized" => matches!(problem.status, Some(403 | 404)),
            _ => problem.status == Some(404),
        };
        let Some(order) = state.order.as_mut().filter(|_| is_lost) else {
            return self.unknown_account(state, "the order", error);
        };
        order.given_up = Some(GivenUp {
            reason: format!(
                "order {}: the authority does not know it: {problem}; a new order follows",
                order.url
            ),
            is_refusal: false,
        });
        // Also registers the account again if that is what the authority forgot.
        self.unknown_account(state, "the order", error)
            .or(Ok(Progress::Changed))
    }

    fn failed(&self, action: &str, error: &instant_acme::Error) -> AcmeError {
        failure(action, &self.settings.directory, error)
            .with_retry_after(self.client.take_retry_after())
    }

    fn wait(&self) -> Progress {
        let asked = self.client.take_retry_after().unwrap_or(POLL_EVERY);
        Progress::Wait(asked.clamp(POLL_EVERY, POLL_EVERY_MAX))
    }
}

fn keep_leftovers(state: &mut State, proofs: Vec<Proof>) {
    state.leftovers.extend(proofs);
    let surplus = state.leftovers.len().saturating_sub(LEFTOVERS_MAX);
    state.leftovers.drain(..surplus);
}

fn is_refused_for_replaces(error: &instant_acme::Error) -> bool {
    matches!(
        error,
        instant_acme::Error::Unsupported(_) | instant_acme::Error::Other(_)
    ) && !is_no_answer(error)
        || matches!(problem_name(error), Some("alreadyReplaced" | "malformed"))
}

fn is_no_answer(error: &instant_acme::Error) -> bool {
    match error {
        instant_acme::Error::Other(error) => error.is::<NoAnswer>(),
        _ => false,
    }
}
