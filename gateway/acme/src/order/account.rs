//! The account at the authority: its key is stored before the authority learns of it.

use std::sync::PoisonError;

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use gw_shared::identity::secret::Secret;
use instant_acme::Account;
use rustls_pki_types::PrivatePkcs8KeyDer;

use super::{Orders, Progress, keep_leftovers, registration};
use crate::error::{AcmeError, problem_name};
use crate::state::{AccountState, State};

impl Orders {
    /// Makes the account, one step at a time. `None` if it is registered.
    pub(crate) async fn ready_account(
        &self,
        state: &mut State,
    ) -> Result<Option<Progress>, AcmeError> {
        let directory = &self.settings.directory;
        let is_other = |account: &AccountState| account.directory != *directory;
        if state.account.as_ref().is_none_or(is_other) {
            // An order belongs to the account, and that to its authority.
            if let Some(order) = state.order.take() {
                keep_leftovers(state, order.proofs);
            }
            state.account = Some(AccountState {
                directory: directory.clone(),
                key: registration::new_key()?,
                url: None,
            });
            return Ok(Some(Progress::Changed));
        }
        let Some(account) = state.account.as_mut().filter(|it| it.url.is_none()) else {
            return Ok(None);
        };
        let key = decoded(&account.key)?;
        let url = registration::register(&self.client, &self.settings, &key).await?;
        account.url = Some(url);
        Ok(Some(Progress::Changed))
    }

    /// The account at the authority. Reads the directory the first time.
    pub(crate) async fn account(&self, state: &State) -> Result<Account, AcmeError> {
        let unregistered =
            || AcmeError::unreachable("the account is not registered yet; it is tried again");
        let stored = state.account.as_ref().ok_or_else(unregistered)?;
        let url = stored.url.clone().ok_or_else(unregistered)?;
        if let Some(account) = self.known_account(&url) {
            return Ok(account);
        }
        let key = PrivatePkcs8KeyDer::from(decoded(&stored.key)?);
        let directory = stored.directory.clone();
        let account = Account::builder_with_http(Box::new(self.client.clone()))
            .from_parts(url.clone(), key, directory)
            .await
            .map_err(|error| self.failed("the account", &error))?;
        *self.account.lock().unwrap_or_else(PoisonError::into_inner) = Some((url, account.clone()));
        Ok(account)
    }

    fn known_account(&self, url: &str) -> Option<Account> {
        let known = self.account.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, account) = known.as_ref().filter(|(known, _)| known == url)?;
        Some(account.clone())
    }

    /// An authority that forgot the account gets it again, with the same key.
    pub(crate) fn unknown_account(
        &self,
        state: &mut State,
        action: &str,
        error: &instant_acme::Error,
    ) -> Result<Progress, AcmeError> {
        let is_unknown = problem_name(error) == Some("accountDoesNotExist");
        if let Some(account) = state.account.as_mut().filter(|_| is_unknown) {
            tracing::warn!(
                directory = account.directory,
                "acme: the authority does not know the account; it is registered again with the \
                 same key"
            );
            account.url = None;
            return Ok(Progress::Changed);
        }
        Err(self.failed(action, error))
    }
}

fn decoded(key: &Secret) -> Result<Vec<u8>, AcmeError> {
    BASE64_URL_SAFE_NO_PAD.decode(key.reveal()).map_err(|_| {
        AcmeError::refused(
            "the stored key of the account is not base64; restore a backup of the data folder",
        )
    })
}
