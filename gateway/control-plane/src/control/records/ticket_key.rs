//! Keys of the session tickets of callers: a new one each day, and the one before to open what it
//! has sealed.

use gw_base::clock::Timestamp;
use gw_store::{RecordId, Records, Step, StoredRecord, TicketKeyRecord};
use serde_json::json;

use crate::control::{Actor, Control, ControlError, Plan};
use crate::limits;

/// Makes the next key when the newest one is a day old, and deletes those before the newest one.
pub(crate) fn rotate_by_age(control: &Control, now: Timestamp) -> Result<(), ControlError> {
    control.change(&Actor::Gateway, |records, _| next(records, now))
}

fn next(records: &Records, now: Timestamp) -> Result<Plan<()>, ControlError> {
    let keys = records.ticket_keys_by_generation();
    let newest = keys.first();
    if newest.is_some_and(|key| now.since(key.created_at) < limits::TICKET_KEY_AGE) {
        return Ok(Plan::already(()));
    }
    let generation = newest.map_or(1, |key| key.generation.saturating_add(1));
    let key = TicketKeyRecord::generate(generation, now)?;
    let target = key.id.to_string();
    let old = keys.iter().skip(1);
    let old = old.map(|key| Step::Delete(RecordId::TicketKey(key.id.clone())));
    Ok(Plan {
        action: "ticket_key.rotate",
        account: None,
        target,
        detail: json!({ "generation": generation }),
        output: (),
        steps: old
            .chain([Step::Put(StoredRecord::TicketKey(key))])
            .collect(),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_key_seals_for_a_day_and_is_deleted_after_two() {
        let mut records = Records::default();
        let mut at = |hours: u64| {
            let now = Timestamp(0).after(Duration::from_secs(hours * 3600));
            for step in next(&records, now).unwrap().steps {
                records.apply(step);
            }
            let keys = records.ticket_keys_by_generation();
            keys.iter().map(|key| key.generation).collect::<Vec<_>>()
        };
        assert_eq!(at(0), [1]);
        assert_eq!(at(23), [1]);
        assert_eq!(at(24), [2, 1]);
        assert_eq!(at(47), [2, 1]);
        assert_eq!(at(48), [3, 2]);
        // The gateway was off for a month, and the clock was set back.
        assert_eq!(at(24 * 30), [4, 3]);
        assert_eq!(at(24), [4, 3]);
    }
}
