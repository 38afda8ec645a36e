//! Secrets that all nodes share: sealed rows, part of the set of records that the region
//! authenticates.

use std::time::Instant;

use gw_base::clock::Timestamp;

use super::super::{AuditEntry, History, Position, Store, StoreError};
use super::authenticity::{SetMember, forged_secret};
use super::connection::engine::{CALL, SqlSession};
use super::steps::FinalSteps;
use super::{COMMIT, PostgresStore, WithDeadline, column, read_position};

/// Attempts to store a secret while other nodes make changes.
const ATTEMPTS: usize = 32;

pub(super) const FIND_SECRET: &str = "SELECT sealed FROM gw.secrets WHERE name = $1";

/// The secret, and the position that it is of.
const FIND_AT_POSITION: &str = "
    SELECT id::text, revision, coalesce(last_change::text, ''),
        (SELECT sealed FROM gw.secrets WHERE name = $1), key_check
    FROM gw.region";

impl PostgresStore {
    /// A secret that all nodes share; stores `create()` if there is none. `create` may run without
    /// being stored: another node may be faster.
    pub fn shared_secret<E: From<StoreError>>(
        &mut self,
        name: &str,
        create: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<Vec<u8>, E> {
        if let Some(secret) = self.find_secret(name)? {
            return Ok(secret);
        }
        let created = create()?;
        for _ in 0..ATTEMPTS {
            match self.change_secret(name, Some(&created)) {
                Ok(()) => return Ok(created),
                Err(StoreError::Stale) => {
                    self.load()?;
                    if let Some(secret) = self.find_secret(name)? {
                        return Ok(secret);
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(StoreError::Stale.into())
    }

    /// A secret that all nodes share; `None` if the region does not have it yet. Reads the records
    /// until they are of the same position, because only with them an earlier secret is noticed.
    pub fn find_secret(&mut self, name: &str) -> Result<Option<Vec<u8>>, StoreError> {
        for _ in 0..ATTEMPTS {
            let known = self.known_position()?;
            let find = async |session: &mut SqlSession| {
                session.client.query_one(FIND_AT_POSITION, &[&name]).await
            };
            let row = self.checked()?.call(CALL, find)?;
            let position = read_position(&row)?;
            if position != known {
                // A load of all records may take longer than other nodes need for the next change.
                if !matches!(self.changes_after(&known)?, History::Changes(_)) {
                    self.load()?;
                }
                continue;
            }
            let sealed: Option<&str> = column(&row, 3)?;
            let key = self.keys.named(column(&row, 4)?)?;
            let element =
                sealed.map(|sealed| key.authenticator.secret(&position.origin, name, sealed));
            if element
                != self
                    .source
                    .known
                    .element(&SetMember::Secret(name.to_owned()))
            {
                return Err(forged_secret(name));
            }
            return sealed
                .map(|sealed| key.sealer.open(name, sealed))
                .transpose();
        }
        Err(StoreError::Stale)
    }

    /// Deletes a secret that all nodes share. The next node that starts makes another one.
    pub fn forget_secret(&mut self, name: &str) -> Result<(), StoreError> {
        self.load()?;
        self.change_secret(name, None)
    }

    /// Stores or deletes a secret as a change of its own.
    fn change_secret(&mut self, name: &str, secret: Option<&[u8]>) -> Result<(), StoreError> {
        let after = self.known_position()?;
        let key = self.keys.in_use();
        let sealed = secret
            .map(|secret| key.sealer.seal(name, secret))
            .transpose()?;
        let action = if sealed.is_some() {
            "region.secret.create"
        } else {
            "region.secret.delete"
        };
        let entry = AuditEntry {
            at: Timestamp::now(),
            actor: "gateway".to_owned(),
            action: action.into(),
            account: None,
            target: name.to_owned(),
            detail: serde_json::json!({}),
        };
        let steps = FinalSteps::of_secret(name, sealed, key.codec(&after.origin));
        let deadline = Instant::now() + COMMIT;
        WithDeadline::until(deadline, self)
            .0
            .commit_by(deadline, &after, steps, &key, &entry)
            .map(drop)
    }

    /// The position of the known records; loads them if they are not known.
    fn known_position(&mut self) -> Result<Position, StoreError> {
        match self.source.known.position() {
            Some(position) => Ok(position),
            None => self.load().map(|loaded| loaded.position),
        }
    }
}
