//! Accounts and services that had the same name one after the other.

use super::Directory;

/// Which account and service a record was made for, beside those that have the names now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Incarnation {
    /// Those that have the names now; also of requests to the apex.
    Current,
    /// The account or the service was deleted, and its name is free.
    Deleted,
    /// An account or a service that was deleted, and whose name was given again.
    Earlier,
}

/// The label of the service that counts under `key`, which is `{label}@{created_ms}`. Other keys
/// have no `@`.
pub fn label_of(key: &str) -> &str {
    key.split_once('@').map_or(key, |(label, _)| label)
}

impl Directory {
    /// Returns which account and service a record of `unix_ms` was made for. Its label is
    /// `{account}--{service}`, or empty for the apex. All that shows records or counts asks this
    /// function.
    pub fn incarnation(&self, label: &str, unix_ms: u64) -> Incarnation {
        let Some((account, _)) = label.split_once("--") else {
            return Incarnation::Current;
        };
        let account = self.accounts.get(account).copied();
        let service = self.service(label).map(|service| service.created_ms);
        if account
            .max(service)
            .is_some_and(|created| unix_ms < created)
        {
            Incarnation::Earlier
        } else if account.and(service).is_some() {
            Incarnation::Current
        } else {
            Incarnation::Deleted
        }
    }

    /// Whether the service with this label exists and was created at `created_ms`.
    pub fn is_service(&self, label: &str, created_ms: u64) -> bool {
        self.service(label)
            .is_some_and(|service| service.created_ms == created_ms)
    }

    /// Whether the counts with this key are shown: see [`label_of`].
    pub fn shows_counts(&self, key: &str) -> bool {
        let (label, created_ms) = key.split_once('@').unwrap_or((key, ""));
        self.incarnation(label, created_ms.parse().unwrap_or(0)) != Incarnation::Earlier
    }
}
