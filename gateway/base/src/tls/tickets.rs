//! Session tickets of callers (RFC 8446 §4.6.1), sealed with keys that all nodes of a region have:
//! a caller resumes at each of them, and after a restart.

use std::fmt;
use std::sync::Arc;

use aws_lc_rs::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey};
use gw_shared::id::TicketKeyId;
use rustls::ProtocolVersion;
use rustls::server::ProducesTickets;

/// Bytes of the secret of a ticket key: a key of AES-256-GCM.
pub const TICKET_SECRET_LENGTH: usize = 32;
/// Seconds for which a caller keeps a ticket. Its key opens tickets for at least as long after it
/// has sealed the last one.
const LIFETIME: u32 = 24 * 3600;
/// The use of the keys, to which each ticket is bound.
const PURPOSE: &[u8] = b"gw tickets of callers 1";

/// The keys of session tickets, the one that seals first. Without a key there are no tickets. Each
/// ticket has a random nonce: a key may seal 2³² tickets (NIST SP 800-38D §8.3), 24,000 a second
/// for two days.
#[derive(Clone, Default)]
pub struct TicketKeys(Arc<[TicketKey]>);

struct TicketKey {
    id: TicketKeyId,
    key: RandomizedNonceKey,
}

impl TicketKeys {
    /// Uses these keys, the newest first. A secret that does not have [`TICKET_SECRET_LENGTH`]
    /// bytes is left out.
    pub fn new<'a>(keys: impl IntoIterator<Item = (TicketKeyId, &'a [u8])>) -> Self {
        let usable = |(id, secret): (TicketKeyId, &[u8])| {
            let key = RandomizedNonceKey::new(&AES_256_GCM, secret).ok()?;
            Some(TicketKey { id, key })
        };
        Self(keys.into_iter().filter_map(usable).collect())
    }
}

impl PartialEq for TicketKeys {
    fn eq(&self, other: &Self) -> bool {
        self.0
            .iter()
            .map(|key| &key.id)
            .eq(other.0.iter().map(|key| &key.id))
    }
}

impl fmt::Debug for TicketKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.0.iter().map(|key| &key.id))
            .finish()
    }
}

impl ProducesTickets for TicketKeys {
    fn enabled(&self) -> bool {
        !self.0.is_empty()
    }

    fn lifetime(&self) -> u32 {
        LIFETIME
    }

    /// The nonce, the ciphertext and the tag. `None` for a session of TLS 1.2, which resumes
    /// without a key exchange: a stolen ticket key would open recorded connections. A resumption of
    /// TLS 1.3 exchanges keys (`psk_dhe_ke`, RFC 8446 §4.2.9).
    fn encrypt(&self, plain: &[u8]) -> Option<Vec<u8>> {
        if version(plain)? != ProtocolVersion::TLSv1_3 {
            return None;
        }
        let mut sealed = plain.to_vec();
        let nonce = self
            .0
            .first()?
            .key
            .seal_in_place_append_tag(Aad::from(PURPOSE), &mut sealed)
            .ok()?;
        Some([&nonce.as_ref()[..], &sealed].concat())
    }

    fn decrypt(&self, ticket: &[u8]) -> Option<Vec<u8>> {
        let (nonce, ciphertext) = ticket.split_at_checked(NONCE_LEN)?;
        self.0.iter().find_map(|TicketKey { key, .. }| {
            // A failed attempt leaves no ciphertext.
            let mut opened = ciphertext.to_vec();
            let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
            let length = key
                .open_in_place(nonce, Aad::from(PURPOSE), &mut opened)
                .ok()?
                .len();
            opened.truncate(length);
            Some(opened)
        })
    }
}

/// Version of the protocol in a session as rustls encodes it: behind the server name, if there is
/// one.
fn version(session: &[u8]) -> Option<ProtocolVersion> {
    let rest = match session {
        [0, rest @ ..] => rest,
        [1, length, rest @ ..] => rest.get(usize::from(*length)..)?,
        _ => return None,
    };
    let [high, low] = *rest.first_chunk()?;
    Some(ProtocolVersion::from(u16::from_be_bytes([high, low])))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TLS12: [u8; 2] = [3, 3];
    const TLS13: [u8; 2] = [3, 4];

    fn keys(numbers: &[u8]) -> TicketKeys {
        let ids: Vec<_> = numbers.iter().map(|_| TicketKeyId::random()).collect();
        let secrets: Vec<_> = numbers
            .iter()
            .map(|number| [*number; TICKET_SECRET_LENGTH])
            .collect();
        TicketKeys::new(
            ids.into_iter()
                .zip(secrets.iter().map(<[u8; TICKET_SECRET_LENGTH]>::as_slice)),
        )
    }

    fn session(name: &str, version: [u8; 2]) -> Vec<u8> {
        let mut session = vec![1, name.len() as u8];
        session.extend_from_slice(name.as_bytes());
        session.extend_from_slice(&version);
        session.extend_from_slice(b"the rest of the session");
        session
    }

    #[test]
    fn a_ticket_opens_with_its_key_while_the_key_is_one_of_the_two() {
        let plain = session("acme--api.eu1.example.com", TLS13);
        let ticket = keys(&[1]).encrypt(&plain).unwrap();
        assert_ne!(
            keys(&[1]).encrypt(&plain).unwrap(),
            ticket,
            "a new nonce each time"
        );
        assert_eq!(keys(&[1]).decrypt(&ticket).unwrap(), plain, "another node");
        assert_eq!(
            keys(&[2, 1]).decrypt(&ticket).unwrap(),
            plain,
            "the next day"
        );
        assert_eq!(keys(&[3, 2]).decrypt(&ticket), None, "the day after");
        let mut changed = ticket.clone();
        *changed.last_mut().unwrap() ^= 1;
        for broken in [&changed[..], &ticket[..NONCE_LEN], &ticket[1..], b""] {
            assert_eq!(keys(&[1]).decrypt(broken), None);
        }
    }

    #[test]
    fn sessions_of_tls_1_2_and_configurations_without_a_key_have_no_tickets() {
        let keys = keys(&[1]);
        assert!(keys.enabled() && !TicketKeys::default().enabled());
        assert!(keys.encrypt(&session("", TLS13)).is_some());
        assert!(keys.encrypt(&[0, 3, 4]).is_some());
        for other in [
            &session("name", TLS12)[..],
            &[0, 3, 3],
            &[1, 200, 3, 4],
            &[2, 3, 4],
            b"",
        ] {
            assert_eq!(keys.encrypt(other), None, "{other:?}");
        }
        assert_eq!(TicketKeys::default().encrypt(&[0, 3, 4]), None);
    }

    #[test]
    fn a_secret_of_another_length_is_no_key() {
        let id = TicketKeyId::random();
        assert!(!TicketKeys::new([(id, &[1u8; 16][..])]).enabled());
    }
}
