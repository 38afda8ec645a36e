//! Keys of the session tickets of callers. They reach the workers as TLS configurations.

use aws_lc_rs::rand;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use gw_base::clock::Timestamp;
use gw_base::tls::tickets::{TICKET_SECRET_LENGTH, TicketKeys};
use gw_shared::id::TicketKeyId;
use gw_shared::identity::secret::Secret;
use gw_shared::version::later_members::LaterMembers;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use super::{RecordId, RecordKind, Records, Step, StoredRecord};

/// A key that seals session tickets while its generation is the newest, and opens them while it is
/// one of the two newest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TicketKeyRecord {
    /// Random id.
    pub id: TicketKeyId,
    /// One more than that of the key before.
    pub generation: u64,
    /// 32 random bytes, base64url.
    #[serde(with = "gw_shared::identity::secret::revealed")]
    pub secret: Secret,
    /// Time of creation.
    pub created_at: Timestamp,
    /// Members of a later version.
    #[serde(flatten)]
    pub later: LaterMembers,
}

impl TicketKeyRecord {
    /// Generates a key. Fails without random numbers.
    pub fn generate(
        generation: u64,
        now: Timestamp,
    ) -> Result<Self, aws_lc_rs::error::Unspecified> {
        let mut secret = Zeroizing::new([0; TICKET_SECRET_LENGTH]);
        rand::fill(&mut *secret)?;
        Ok(Self {
            id: TicketKeyId::random(),
            generation,
            secret: Secret::new(URL_SAFE_NO_PAD.encode(secret.as_slice())),
            created_at: now,
            later: LaterMembers::default(),
        })
    }
}

impl RecordKind for TicketKeyRecord {
    type Id = TicketKeyId;
    type Index = ();

    const HAS_SECRET: bool = true;

    fn id(&self) -> TicketKeyId {
        self.id.clone()
    }

    fn secret_mut(&mut self) -> Option<&mut Secret> {
        Some(&mut self.secret)
    }

    #[cfg(test)]
    fn sample() -> Self {
        Self {
            id: TicketKeyId::new(&"t".repeat(16)).unwrap(),
            generation: 2,
            secret: Secret::new("secret".into()),
            created_at: Timestamp(1),
            later: LaterMembers::default(),
        }
    }
}

impl Records {
    /// The ticket keys, the newest first.
    pub fn ticket_keys_by_generation(&self) -> Vec<&TicketKeyRecord> {
        let mut keys: Vec<_> = self.ticket_keys.values().collect();
        keys.sort_by_key(|key| std::cmp::Reverse(key.generation));
        keys
    }

    /// The keys that seal and open tickets now: those of the two newest generations.
    pub fn usable_ticket_keys(&self) -> TicketKeys {
        let newest = self.ticket_keys_by_generation().into_iter().take(2);
        let secrets: Vec<_> = newest
            .filter_map(|key| {
                let secret = URL_SAFE_NO_PAD.decode(key.secret.reveal()).ok()?;
                Some((key.id.clone(), Zeroizing::new(secret)))
            })
            .collect();
        TicketKeys::new(
            secrets
                .iter()
                .map(|(id, secret)| (id.clone(), secret.as_slice())),
        )
    }
}

impl Step {
    /// Whether the step changes the keys of session tickets.
    pub fn is_of_ticket_key(&self) -> bool {
        matches!(
            self,
            Self::Put(StoredRecord::TicketKey(_)) | Self::Delete(RecordId::TicketKey(_))
        )
    }
}

#[cfg(test)]
mod tests {
    use rustls::server::ProducesTickets;

    use super::*;

    #[test]
    fn the_newest_generation_seals_and_the_two_newest_open() {
        let mut records = Records::default();
        let mut put = |generation| {
            let key = TicketKeyRecord::generate(generation, Timestamp(0)).unwrap();
            records.put(StoredRecord::TicketKey(key));
            records.usable_ticket_keys()
        };
        let session = [0, 3, 4, 1, 2];
        // 10 sorts after 9 as a number.
        let first = put(9);
        let ticket = first.encrypt(&session).unwrap();
        let second = put(10);
        assert_ne!(first, second);
        assert_eq!(second.decrypt(&ticket).unwrap(), session);
        let later = second.encrypt(&session).unwrap();
        assert_eq!(first.decrypt(&later), None);
        let third = put(11);
        assert_eq!(third.decrypt(&ticket), None);
        assert_eq!(third.decrypt(&later).unwrap(), session);
    }
}
