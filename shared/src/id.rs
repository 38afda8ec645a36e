//! Identifiers: a type for each, checked once when it is parsed.

use std::borrow::Borrow;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize, Serializer};
use uuid::Uuid;

use crate::clock;

/// Text that is not a valid identifier of the expected kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{found:?} is not {expected}")]
pub struct InvalidId {
    found: String,
    expected: &'static str,
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident, $expected:literal, $valid:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            pub fn new(text: &str) -> Result<Self, InvalidId> {
                let valid: fn(&str) -> bool = $valid;
                if valid(text) {
                    Ok(Self(text.into()))
                } else {
                    Err(InvalidId { found: text.chars().take(80).collect(), expected: $expected })
                }
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;
            fn try_from(text: String) -> Result<Self, InvalidId> {
                Self::new(&text)
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.0.as_ref().to_owned()
            }
        }

        impl std::str::FromStr for $name {
            type Err = InvalidId;
            fn from_str(text: &str) -> Result<Self, InvalidId> {
                Self::new(text)
            }
        }
    };
}

text_id!(
    /// Id of an account: the part of a tenant hostname before the first `--`.
    AccountId,
    "an account id: 3 to 15 characters of a-z and 0-9",
    |text| {
        (3..=15).contains(&text.len())
            && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
    }
);

text_id!(
    /// Id of a service of an account: the part of a tenant hostname's first label after the first
    /// `--`.
    ServiceId,
    "a service id: a-z, 0-9 and inner hyphens, at most 58 characters",
    |text| {
        text.len() <= 58
            && !text.starts_with('-')
            && !text.ends_with('-')
            && !text.is_empty()
            && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    }
);

impl ServiceId {
    /// A lower bound for ranges of ids: sorts before every valid id, and is none itself.
    pub fn lower_bound() -> Self {
        Self("".into())
    }
}

text_id!(
    /// Id of the certificates that an authority issues for the same names: `region` for those of
    /// the region.
    CertificateId,
    "the id of a certificate: 1 to 253 characters of a-z, 0-9, hyphens and dots",
    |text| {
        (1..=253).contains(&text.len())
            && text.bytes().all(|b| {
                b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.'
            })
    }
);

impl CertificateId {
    /// Id of the certificates of the region.
    pub fn region() -> Self {
        Self("region".into())
    }
}

text_id!(
    /// Name of a domain in lower case, with A-labels (RFC 5890 §2.3.2.1).
    DomainName,
    "the name of a domain: at least two labels of a-z, 0-9 and inner hyphens, the last one with a \
     letter first, such as api.example.com; write other letters as A-labels (xn--)",
    is_domain_name
);

/// Whether `text` is a host name of at least two labels (RFC 1123 §2.1), in lower case and without
/// a final dot.
fn is_domain_name(text: &str) -> bool {
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    };
    // As that of each top-level domain; an IPv4 address ends with a digit.
    let begins_with_letter = |label: &str| label.starts_with(|c: char| c.is_ascii_lowercase());
    text.len() <= 253
        && text.split('.').all(is_label)
        && text
            .rsplit_once('.')
            .is_some_and(|(_, last)| begins_with_letter(last))
}

text_id!(
    /// Id of an agent, made by the gateway: `ag_` and 20 characters of base62.
    AgentId,
    "an agent id: `ag_` and 20 characters of A-Z, a-z and 0-9",
    |text| random_id_has_form(text, "ag_", 20)
);

text_id!(
    /// Public half of a service key `gw_sk_{keyId}.{secret}`: 16 characters of base62.
    KeyId,
    "a service key id: 16 characters of A-Z, a-z and 0-9",
    |text| random_id_has_form(text, "", 16)
);

text_id!(
    /// Id of an OAuth client of an account: `gw_ci_` and 20 characters of base62.
    ClientId,
    "a client id: `gw_ci_` and 20 characters of A-Z, a-z and 0-9",
    |text| random_id_has_form(text, "gw_ci_", 20)
);

text_id!(
    /// Public half of an enrollment token `gw_et_{id}.{secret}`: 16 characters of base62.
    EnrollmentTokenId,
    "an enrollment token id: 16 characters of A-Z, a-z and 0-9",
    |text| random_id_has_form(text, "", 16)
);

text_id!(
    /// Id of an agent's enrollment: `en_` and 20 characters of base62.
    EnrollmentId,
    "an enrollment id: `en_` and 20 characters of A-Z, a-z and 0-9",
    |text| random_id_has_form(text, "en_", 20)
);

text_id!(
    /// Id of a token-signing key: the SHA-256 thumbprint of its public half (RFC 7638) as 43
    /// characters of base64url.
    SigningKeyId,
    "a signing key id: 43 characters of A-Z, a-z, 0-9, `-` and `_`",
    |text| {
        text.len() == 43
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    }
);

text_id!(
    /// Id of an authority of agents and nodes: the subject key identifier of its certificate (RFC
    /// 5280 §4.2.1.2), which the certificates that it issues name. Lowercase hexadecimal digits.
    AuthorityId,
    "an id of an authority: 40 characters of 0-9 and a-f",
    |text| text.len() == 40 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
);

text_id!(
    /// Id of a key of session tickets: 16 characters of base62.
    TicketKeyId,
    "an id of a ticket key: 16 characters of A-Z, a-z and 0-9",
    |text| random_id_has_form(text, "", 16)
);

text_id!(
    /// Name of what manages a record by documents, such as a repository or a team.
    ManagerName,
    "a name of a manager: 1 to 60 characters of A-Z, a-z, 0-9 and `._/-`, the first a letter or \
     digit",
    |text| {
        text.len() <= 60
            && text.starts_with(|first: char| first.is_ascii_alphanumeric())
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._/-".contains(&b))
    }
);

impl AuthorityId {
    /// The id from a key identifier; `None` if it does not have 20 bytes.
    pub fn of_key_identifier(identifier: &[u8]) -> Option<Self> {
        Self::new(
            &identifier
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect::<String>(),
        )
        .ok()
    }
}

/// Longest label of a DNS name (RFC 1035 §2.3.4).
const LABEL_MAX: usize = 63;

/// `{account}--{service}`, if it fits a DNS label.
pub fn tenant_label(account: &AccountId, service: &ServiceId) -> Option<String> {
    let label = format!("{account}--{service}");
    (label.len() <= LABEL_MAX).then_some(label)
}

/// Splits a tenant label. An account id has no hyphen, so the first `--` separates the two.
pub fn split_tenant_label(label: &str) -> Option<(AccountId, ServiceId)> {
    if label.len() > LABEL_MAX {
        return None;
    }
    let (account, service) = label.split_once("--")?;
    Some((AccountId::new(account).ok()?, ServiceId::new(service).ok()?))
}

macro_rules! random_id {
    ($name:ident, $prefix:literal, $length:literal) => {
        impl $name {
            /// Makes a random id.
            pub fn random() -> Self {
                Self(format!("{}{}", $prefix, random_base62($length)).into())
            }
        }
    };
}

random_id!(AgentId, "ag_", 20);
random_id!(KeyId, "", 16);
random_id!(ClientId, "gw_ci_", 20);
random_id!(EnrollmentTokenId, "", 16);
random_id!(EnrollmentId, "en_", 20);
random_id!(TicketKeyId, "", 16);

fn random_id_has_form(text: &str, prefix: &str, length: usize) -> bool {
    text.strip_prefix(prefix).is_some_and(|random| {
        random.len() == length && random.bytes().all(|b| b.is_ascii_alphanumeric())
    })
}

/// Length of a generated secret: 43 base62 characters hold 256 bits.
pub const SECRET_LENGTH: usize = 43;

/// Draws `length` characters evenly from A-Z, a-z, 0-9: 5.95 bits each, so 43 characters have 256
/// bits.
pub fn random_base62(length: usize) -> String {
    const ALPHABET: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let mut text = String::with_capacity(length);
    let mut random = [0u8; 64];
    while text.len() < length {
        // The system's generator does not fail once the process has started. An id must never lack
        // randomness.
        if aws_lc_rs::rand::fill(&mut random).is_err() {
            std::process::abort();
        }
        // Bytes from 248 up would make the first characters more likely than the others.
        let letters = random
            .iter()
            .filter(|byte| **byte < 248)
            .map(|byte| char::from(ALPHABET[usize::from(byte % 62)]));
        text.extend(letters.take(length - text.len()));
    }
    text
}

/// Makes request ids: UUIDv7 (RFC 9562 §5.7), in order of creation on one thread. The last 10 bits
/// are the slot of the node in its region; 0 until a slot is set.
///
/// One per thread: `Uuid::now_v7()` shares one counter behind a lock.
pub struct RequestIds {
    context: RefCell<uuid::ContextV7>,
    latest_ms: Cell<u64>,
    node_slot: Cell<u16>,
}

/// Bits of a request id that are the slot of a node. A counter of 42 bits and 22 random bits are
/// before them.
const NODE_SLOT_MASK: u128 = 0x3ff;

/// Largest step back of the clock that ids ignore, to stay in order. A larger one they follow.
const SET_BACK_MS: u64 = 1000;

impl RequestIds {
    pub fn new() -> Self {
        Self {
            context: RefCell::new(uuid::ContextV7::new()),
            latest_ms: Cell::new(0),
            node_slot: Cell::new(0),
        }
    }

    /// Makes ids of the node in this slot from now on. Slots have 10 bits.
    pub fn use_node_slot(&self, slot: u16) {
        self.node_slot.set(slot);
    }

    pub fn next_id(&self) -> RequestId {
        self.next_at(clock::now())
    }

    fn next_at(&self, now: SystemTime) -> RequestId {
        let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let now_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        if now_ms + SET_BACK_MS < self.latest_ms.get() {
            // A context never goes back: all ids would have the same millisecond until the clock
            // catches up.
            self.context.replace(uuid::ContextV7::new());
        }
        let timestamp = uuid::Timestamp::from_unix(
            &*self.context.borrow(),
            since.as_secs(),
            since.subsec_nanos(),
        );
        let random = Uuid::new_v7(timestamp).as_u128();
        let slot = u128::from(self.node_slot.get()) & NODE_SLOT_MASK;
        let id = RequestId(Uuid::from_u128(random & !NODE_SLOT_MASK | slot));
        self.latest_ms.set(id.unix_ms());
        id
    }
}

impl Default for RequestIds {
    fn default() -> Self {
        Self::new()
    }
}

/// Id of a request, as sent in `X-Gw-Request-Id`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(Uuid);

impl RequestId {
    /// Makes an id of 16 bytes; `None` if they are not a UUIDv7.
    pub fn from_bytes(bytes: [u8; 16]) -> Option<Self> {
        let uuid = Uuid::from_bytes(bytes);
        (uuid.get_version_num() == 7).then_some(Self(uuid))
    }

    /// Smallest id of a millisecond since the Unix epoch.
    pub fn first_of_ms(unix_ms: u64) -> Self {
        Self(uuid::Builder::from_unix_timestamp_millis(unix_ms, &[0; 10]).into_uuid())
    }

    /// Bytes that sort like the ids: in order of creation.
    pub fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }

    /// Time of creation in milliseconds since the Unix epoch: the first 48 bits.
    pub fn unix_ms(self) -> u64 {
        (self.0.as_u128() >> 80) as u64
    }

    /// Slot of the node that received the request: the last 10 bits.
    pub fn node_slot(self) -> u16 {
        (self.0.as_u128() & NODE_SLOT_MASK) as u16
    }

    /// Writes the 36 characters of the text form into `buffer`.
    pub fn encode(self, buffer: &mut [u8; 36]) -> &str {
        self.0.hyphenated().encode_lower(buffer)
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.hyphenated().fmt(f)
    }
}

impl Serialize for RequestId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::str::FromStr for RequestId {
    type Err = InvalidId;

    /// Parses the 36 characters of the text form, in upper or lower case.
    fn from_str(text: &str) -> Result<Self, InvalidId> {
        let id = (text.len() == 36)
            .then(|| Uuid::try_parse(text).ok())
            .flatten();
        id.and_then(|id| Self::from_bytes(id.into_bytes()))
            .ok_or_else(|| InvalidId {
                found: text.chars().take(80).collect(),
                expected: "a request id: a UUIDv7 like 019aa5c2-7e30-7c3b-8f11-2d5a4c9e1b07",
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_with_a_wrong_form_are_refused() {
        for good in ["abc", "0a1", "abcdefghijklmno"] {
            assert!(AccountId::new(good).is_ok(), "{good}");
        }
        for bad in ["ab", "abcdefghijklmnop", "Abc", "a-b", "", "abc\u{e4}"] {
            assert!(AccountId::new(bad).is_err(), "{bad}");
        }
        for good in ["a", "a-b", "a--b", "0"] {
            assert!(ServiceId::new(good).is_ok(), "{good}");
        }
        for bad in ["", "-a", "a-", "A", "a.b", "a_b"] {
            assert!(ServiceId::new(bad).is_err(), "{bad}");
        }
        for good in ["a", "git.example.com/shop", "Team-1_x", &"a".repeat(60)] {
            assert!(ManagerName::new(good).is_ok(), "{good}");
        }
        for bad in ["", "-a", "a b", "a\u{e4}", &"a".repeat(61)] {
            assert!(ManagerName::new(bad).is_err(), "{bad}");
        }
        let message = AccountId::new("X").unwrap_err().to_string();
        let expected = "\"X\" is not an account id: 3 to 15 characters of a-z and 0-9";
        assert_eq!(message, expected);
    }

    #[test]
    fn random_ids_are_valid_and_differ() {
        assert!(AgentId::new(AgentId::random().as_str()).is_ok());
        assert!(KeyId::new(KeyId::random().as_str()).is_ok());
        assert!(ClientId::new(ClientId::random().as_str()).is_ok());
        assert!(EnrollmentTokenId::new(EnrollmentTokenId::random().as_str()).is_ok());
        assert!(EnrollmentId::new(EnrollmentId::random().as_str()).is_ok());
        assert!(SigningKeyId::new(&random_base62(43)).is_ok() && SigningKeyId::new("x").is_err());
        let authority = AuthorityId::of_key_identifier(&[0xab; 20]).unwrap();
        assert_eq!(authority.as_str(), "ab".repeat(20));
        assert!(AuthorityId::new("AB").is_err());
        assert_eq!(AuthorityId::of_key_identifier(&[1; 19]), None);
        assert_ne!(random_base62(43), random_base62(43));
        assert_eq!(random_base62(200).len(), 200);
    }

    #[test]
    fn request_ids_follow_a_clock_that_is_set_back_far() {
        let ids = RequestIds::new();
        let at = |unix_ms| UNIX_EPOCH + std::time::Duration::from_millis(unix_ms);
        let future = ids.next_at(at(2_000_000_000_000));
        // A small step back keeps the order.
        let next = ids.next_at(at(1_999_999_999_100));
        assert!(next > future && next.unix_ms() == 2_000_000_000_000);
        let back = ids.next_at(at(1_800_000_000_000));
        assert_eq!(back.unix_ms(), 1_800_000_000_000);
        assert!(ids.next_at(at(1_800_000_000_000)) > back);
    }

    #[test]
    fn request_ids_name_a_node_and_keep_their_order() {
        let ids = RequestIds::new();
        let mut made = Vec::new();
        for slot in [0, 1023, 5, 0, 731] {
            ids.use_node_slot(slot);
            made.extend((0..100).map(|_| ids.next_id()));
            assert!(made.iter().rev().take(100).all(|id| id.node_slot() == slot));
        }
        assert!(made.is_sorted_by(|one, next| one < next));
        assert_eq!(RequestId::first_of_ms(7).node_slot(), 0);
    }

    #[test]
    fn request_ids_are_in_order_of_creation() {
        let ids = RequestIds::new();
        let made: Vec<_> = (0..1000).map(|_| ids.next_id()).collect();
        assert!(made.is_sorted());
        let mut buffer = [0; 36];
        assert_eq!(made[0].encode(&mut buffer), made[0].to_string());
        assert_eq!(&made[0].to_string()[14..15], "7");
        assert_eq!(made[0].to_string().to_uppercase().parse(), Ok(made[0]));
        assert_eq!(RequestId::from_bytes(*made[0].as_bytes()), Some(made[0]));
        let first = RequestId::first_of_ms(made[0].unix_ms());
        assert!(first <= made[0] && RequestId::first_of_ms(made[0].unix_ms() + 1) > made[0]);
        assert_eq!(first.to_string().parse(), Ok(first));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        assert!(now.as_millis() - u128::from(made[0].unix_ms()) < 60_000);
        for bad in [
            "",
            "x",
            "019aa5c2-7e30-4c3b-8f11-2d5a4c9e1b07",
            "019aa5c27e307c3b8f112d5a4c9e1b07",
        ] {
            assert!(bad.parse::<RequestId>().is_err(), "{bad}");
        }
    }
}
