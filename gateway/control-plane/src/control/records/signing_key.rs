//! Keys that sign access tokens: published before they sign, and until the last token they signed
//! has expired.

use std::time::Duration;

use crate::limits;
use gw_base::clock::Timestamp;
use gw_base::page::{Page, PageQuery};
use gw_shared::id::SigningKeyId;
use gw_store::{RecordId, Records, SigningKey, SigningKeyRecord, Step, StoredRecord};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use crate::control::{Actor, Control, ControlError, Plan};

/// Time that a new key is published before it signs. Longer than the `max-age` of the JWKS, so that
/// every cache has it.
const PUBLISHED_AHEAD: Duration = Duration::from_secs(600);

/// A key that signs access tokens.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = SigningKey)]
pub struct SigningKeyView {
    /// RFC 7638 thumbprint, as in the JWKS.
    #[schema(value_type = String)]
    pub kid: SigningKeyId,
    /// Whether the key does not sign yet, signs, or signs no longer.
    pub status: SigningKeyStatus,
    /// When the key was created, RFC 3339.
    #[schema(format = DateTime)]
    pub created_at: String,
    /// When it signs from.
    #[schema(format = DateTime)]
    pub active_from: String,
}

/// Status of a signing key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SigningKeyStatus {
    /// Published, not signing yet.
    Next,
    /// Signs new access tokens.
    Active,
    /// Published until the tokens it signed have expired.
    Retired,
}

/// How to go to a new key.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Rotation {
    /// Sign with a new key now, although verifiers may not know it yet, and delete the key that
    /// waits: for when keys are in the wrong hands.
    #[serde(default)]
    pub immediately: bool,
}

/// Creates the key that follows the active one; returns the waiting key if there is one.
/// `immediately` always creates a key and deletes the waiting one, which was stored beside the
/// active key and is stolen with it.
pub fn rotate(
    control: &Control,
    actor: &Actor,
    rotation: &Rotation,
) -> Result<SigningKeyView, ControlError> {
    control.change(actor, |records, now| {
        let mut waiting = records
            .signing_keys
            .values()
            .filter(|key| key.active_from > now);
        if !rotation.immediately {
            return match waiting.next() {
                Some(key) => Ok(Plan::already(view(records, key, now))),
                None => Ok(rotated(
                    records,
                    SigningKey::generate(now, now.after(PUBLISHED_AHEAD))?,
                    now,
                )),
            };
        }
        // Must be later than every key that signs already, even if that key was created in the same
        // second.
        let signing = records
            .signing_keys
            .values()
            .map(|key| key.active_from)
            .filter(|from| *from <= now);
        let active_from = signing
            .max()
            .map_or(now, |latest| now.max(latest.after(Duration::from_secs(1))));
        let deleted: Vec<SigningKeyId> = waiting.map(|key| key.id.clone()).collect();
        let mut plan = rotated(records, SigningKey::generate(now, active_from)?, now);
        if !deleted.is_empty() {
            plan.detail["deleted"] = json!(deleted);
        }
        plan.steps.extend(
            deleted
                .into_iter()
                .map(|id| Step::Delete(RecordId::SigningKey(id))),
        );
        Ok(plan)
    })
}

pub(crate) fn rotate_by_age(control: &Control, now: Timestamp) -> Result<(), ControlError> {
    control.change(&Actor::Gateway, |records, _| {
        let newest = records
            .signing_keys
            .values()
            .map(|key| key.active_from)
            .max();
        let active_from = match (newest, control.signing_key_rotation) {
            (None, _) => now,
            (Some(newest), Some(age)) if now.since(newest) >= age => now.after(PUBLISHED_AHEAD),
            (Some(_), _) => return Ok(Plan::already(())),
        };
        let Plan {
            steps,
            action,
            account,
            target,
            detail,
            ..
        } = rotated(records, SigningKey::generate(now, active_from)?, now);
        Ok(Plan {
            steps,
            action,
            account,
            target,
            detail,
            output: (),
        })
    })
}

/// Deletes the keys whose last token has expired.
pub(crate) fn forget_old(control: &Control, now: Timestamp) -> Result<(), ControlError> {
    control.change(&Actor::Gateway, |records, _| {
        let old: Vec<SigningKeyId> = records
            .signing_keys
            .values()
            .filter(|key| is_forgotten(records, key, now))
            .map(|key| key.id.clone())
            .collect();
        Ok(Plan {
            action: "signing_key.retire",
            account: None,
            target: old
                .iter()
                .map(SigningKeyId::as_str)
                .collect::<Vec<_>>()
                .join(" "),
            detail: json!({}),
            output: (),
            steps: old
                .into_iter()
                .map(|id| Step::Delete(RecordId::SigningKey(id)))
                .collect(),
        })
    })
}

/// Lists the signing keys, page by page.
pub fn list(control: &Control, query: &PageQuery) -> Result<Page<SigningKeyView>, ControlError> {
    let state = control.state();
    let now = Timestamp::now();
    let records = &state.records;
    Ok(Page::of(
        records.signing_keys.values(),
        |key| key.id.as_str(),
        query,
        |key| view(records, key, now),
    )?)
}

/// Withdraws a key that no longer signs. Tokens signed by it are refused from now on.
pub fn delete(control: &Control, actor: &Actor, kid: &str) -> Result<(), ControlError> {
    control.change(actor, |records, now| {
        let key = records
            .signing_keys
            .get(kid)
            .ok_or_else(|| ControlError::not_found("signing key", kid))?;
        if status(records, key, now) == SigningKeyStatus::Active {
            return Err(ControlError::Conflict(
                "this key is active; rotate with `immediately` first".to_owned(),
            ));
        }
        Ok(Plan {
            steps: vec![Step::Delete(RecordId::SigningKey(key.id.clone()))],
            action: "signing_key.delete",
            account: None,
            target: kid.to_owned(),
            detail: json!({}),
            output: (),
        })
    })
}

fn rotated(records: &Records, record: SigningKeyRecord, now: Timestamp) -> Plan<SigningKeyView> {
    Plan {
        action: "signing_key.rotate",
        account: None,
        target: record.id.to_string(),
        detail: json!({ "active_from": record.active_from.to_string() }),
        output: view(records, &record, now),
        steps: vec![Step::Put(StoredRecord::SigningKey(record))],
    }
}

/// The time at which the next key replaces `key`, if there is a next key.
fn superseded_at(records: &Records, key: &SigningKeyRecord) -> Option<Timestamp> {
    let order = |key: &SigningKeyRecord| (key.active_from, key.id.clone());
    records
        .signing_keys
        .values()
        .filter(|other| order(other) > order(key))
        .map(|other| other.active_from)
        .min()
}

/// Whether every token of `key` has expired. Assumes the longest lifetime that can be configured,
/// because the configured lifetime may have been longer in the past.
fn is_forgotten(records: &Records, key: &SigningKeyRecord, now: Timestamp) -> bool {
    superseded_at(records, key).is_some_and(|at| now > at.after(limits::TOKEN_LIFETIME_MAX))
}

fn status(records: &Records, key: &SigningKeyRecord, now: Timestamp) -> SigningKeyStatus {
    if key.active_from > now {
        SigningKeyStatus::Next
    } else if superseded_at(records, key).is_some_and(|at| at <= now) {
        SigningKeyStatus::Retired
    } else {
        SigningKeyStatus::Active
    }
}

fn view(records: &Records, key: &SigningKeyRecord, now: Timestamp) -> SigningKeyView {
    SigningKeyView {
        kid: key.id.clone(),
        status: status(records, key, now),
        created_at: key.created_at.to_string(),
        active_from: key.active_from.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(records: &mut Records, active_from: i64) -> SigningKeyRecord {
        let key = SigningKey::generate(Timestamp(0), Timestamp(active_from)).unwrap();
        records.put(StoredRecord::SigningKey(key.clone()));
        key
    }

    #[test]
    fn a_key_is_published_then_active_then_retired_then_deleted() {
        let mut records = Records::default();
        let first = key(&mut records, 0);
        let second = key(&mut records, 1000);
        let at = |now| {
            (
                status(&records, &first, Timestamp(now)),
                status(&records, &second, Timestamp(now)),
            )
        };
        assert_eq!(at(999), (SigningKeyStatus::Active, SigningKeyStatus::Next));
        assert_eq!(
            at(1000),
            (SigningKeyStatus::Retired, SigningKeyStatus::Active)
        );
        let last_token_expires = 1000 + limits::TOKEN_LIFETIME_MAX.as_secs().cast_signed();
        assert!(!is_forgotten(
            &records,
            &first,
            Timestamp(last_token_expires)
        ));
        assert!(is_forgotten(
            &records,
            &first,
            Timestamp(last_token_expires + 1)
        ));
        assert!(!is_forgotten(&records, &second, Timestamp(i64::MAX)));
    }
}
