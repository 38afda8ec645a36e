//! The chain of the audit log: each entry holds the hash of the one before, so that an entry that
//! was changed, added or removed later shows.
//!
//! The hash of an entry is `SHA-256(hash of the entry before, digest)`, with 32 zero bytes before
//! the first entry. The digest is the SHA-256 of number, time, actor, action, account, target and
//! detail as they are stored, each as text after its length (64 bits, big-endian). PostgreSQL
//! computes the same in a trigger: see `postgres/schema.rs`.
//!
//! The chain has no key. One that was computed again from a changed entry on is valid in itself. It
//! shows beside a head that was noted before.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use aws_lc_rs::digest::{Context, Digest, SHA256};
use gw_shared::text::hexadecimal;
use serde::{Deserialize, Serialize};

use super::{NumberedEntry, Revision};

/// Action of the only entry whose number may be more than one after the entry before.
const REPAIR: &str = "region.repair";
/// Most problems that are named.
const NAMED_MAX: usize = 20;

/// Hash of an entry of the audit log and of all entries before it.
#[derive(Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct AuditHash([u8; 32]);

/// The hash of one entry, which vouches for the entries before it. Written as `NUMBER:HASH`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct AuditHead {
    /// Number of the entry.
    pub number: i64,
    /// Hash of the entry.
    pub hash: AuditHash,
}

/// The text is not the number of an entry, a colon, and 64 hexadecimal digits.
#[derive(Debug, thiserror::Error)]
#[error("must be the number of an entry, a colon, and its hash of 64 hexadecimal digits")]
pub struct InvalidHead;

impl AuditHash {
    /// Hash of an entry with `digest` after the entry with the hash `self`.
    pub fn then(self, digest: Self) -> Self {
        let mut chained = Context::new(&SHA256);
        chained.update(&self.0);
        chained.update(&digest.0);
        Self::of(&chained.finish())
    }

    /// A stored hash. Bytes of another length are no hash of a gateway, and become one that no
    /// entry has.
    pub(super) fn stored(bytes: &[u8]) -> Self {
        Self(bytes.try_into().unwrap_or_default())
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    fn of(digest: &Digest) -> Self {
        Self::stored(digest.as_ref())
    }
}

impl fmt::Display for AuditHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hexadecimal(&self.0))
    }
}

impl fmt::Debug for AuditHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl FromStr for AuditHash {
    type Err = InvalidHead;

    fn from_str(text: &str) -> Result<Self, InvalidHead> {
        let mut hash = Self::default();
        if text.len() != 2 * hash.0.len() || !text.is_ascii() {
            return Err(InvalidHead);
        }
        for (byte, digits) in hash.0.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let digit = |digit: u8| char::from(digit).to_digit(16).ok_or(InvalidHead);
            *byte = (digit(digits[0])? * 16 + digit(digits[1])?) as u8;
        }
        Ok(hash)
    }
}

impl fmt::Display for AuditHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.number, self.hash)
    }
}

impl FromStr for AuditHead {
    type Err = InvalidHead;

    fn from_str(text: &str) -> Result<Self, InvalidHead> {
        let (number, hash) = text.split_once(':').ok_or(InvalidHead)?;
        if number.len() > 18 || !number.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(InvalidHead);
        }
        Ok(Self {
            number: number.parse().map_err(|_| InvalidHead)?,
            hash: hash.parse()?,
        })
    }
}

/// Conversions for serde.
macro_rules! as_text {
    ($($name:ty),*) => {$(
        impl From<$name> for String {
            fn from(value: $name) -> Self {
                value.to_string()
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidHead;

            fn try_from(text: String) -> Result<Self, InvalidHead> {
                text.parse()
            }
        }
    )*};
}

as_text!(AuditHash, AuditHead);

/// The columns of an entry, as they are stored.
pub(super) struct StoredColumns<'a> {
    pub(super) number: i64,
    pub(super) at: i64,
    pub(super) actor: &'a str,
    pub(super) action: &'a str,
    pub(super) account: Option<&'a str>,
    pub(super) target: &'a str,
    pub(super) detail: &'a str,
}

impl StoredColumns<'_> {
    pub(super) fn digest(&self) -> AuditHash {
        let mut texts = TextDigest::new();
        texts.add(&self.number.to_string());
        texts.add(&self.at.to_string());
        for text in [
            self.actor,
            self.action,
            self.account.unwrap_or_default(),
            self.target,
            self.detail,
        ] {
            texts.add(text);
        }
        AuditHash::of(&texts.0.finish())
    }
}

/// SHA-256 of texts.
pub(super) struct TextDigest(Context);

impl TextDigest {
    pub(super) fn new() -> Self {
        Self(Context::new(&SHA256))
    }

    /// Adds a text and its length, so that the borders of texts count.
    pub(super) fn add(&mut self, text: &str) {
        self.0.update(&(text.len() as u64).to_be_bytes());
        self.0.update(text.as_bytes());
    }

    pub(super) fn finish(self) -> String {
        hexadecimal(self.0.finish().as_ref())
    }
}

/// Follows the chain from the newest entry to the first.
#[derive(Debug, Default)]
pub struct AuditCheck {
    /// Entry after the next page.
    later: Option<NumberedEntry>,
    /// Heads that were noted, which entries have not been compared with.
    noted: BTreeMap<i64, Vec<AuditHash>>,
    findings: AuditFindings,
}

/// What a check of the chain has found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct AuditFindings {
    /// Number of entries.
    pub entries: u64,
    /// The newest entry; `None` if there is none.
    pub head: Option<AuditHead>,
    /// Number of noted heads that were compared.
    pub noted: usize,
    /// Number of problems.
    pub count: u64,
    /// The first of them, the newest entry first: the number of the entry and the problem.
    pub problems: Vec<(i64, &'static str)>,
}

impl AuditCheck {
    /// A check that also compares the chain with heads that were noted earlier.
    pub fn new(noted: impl IntoIterator<Item = AuditHead>) -> Self {
        let mut check = Self::default();
        for head in noted {
            let hashes = check.noted.entry(head.number).or_default();
            if !hashes.contains(&head.hash) {
                hashes.push(head.hash);
                check.findings.noted += 1;
            }
        }
        check
    }

    /// Adds the entries before those of the last page, the newest first. The first page begins with
    /// the newest entry.
    pub fn add(&mut self, page: Vec<NumberedEntry>) {
        for entry in page {
            let head = entry.head();
            self.findings.head.get_or_insert(head);
            self.findings.entries += 1;
            let missing = self.noted.split_off(&(head.number + 1));
            self.missing(missing);
            if let Some(noted) = self.noted.remove(&head.number)
                && noted.iter().any(|hash| *hash != head.hash)
            {
                self.problem(
                    head.number,
                    "the entry, or one before it, is not as it was when its hash was noted",
                );
            }
            if let Some(later) = self.later.take() {
                self.follows(&later, head);
            }
            self.later = Some(entry);
        }
    }

    /// Ends the check after the first entry of the log. `newest` is the revision of the records:
    /// each change has an entry.
    pub fn finish(mut self, newest: Revision) -> AuditFindings {
        let head = self.findings.head.unwrap_or_default().number;
        // An empty log that was moved into a region has revision 1.
        if head < newest.0 && (head, newest.0) != (0, 1) {
            self.problem(
                newest.0,
                "the log ends before this entry, of the last change",
            );
        }
        if let Some(first) = self.later.take() {
            self.follows(&first, AuditHead::default());
        }
        let missing = std::mem::take(&mut self.noted);
        self.missing(missing);
        self.findings
    }

    fn follows(&mut self, entry: &NumberedEntry, before: AuditHead) {
        if entry.hash == AuditHash::default() {
            self.problem(entry.number, "it has no hash; gateways since 0.2 write one");
        } else if entry.hash != before.hash.then(entry.digest) {
            self.problem(
                entry.number,
                "its hash is not that of its values after the entry before: the entry was changed \
                 or added, or the one before it was changed or removed",
            );
        } else if entry.number != before.number + 1
            && before.number != 0
            && entry.entry.action != REPAIR
        {
            self.problem(entry.number, "entries before it are missing");
        }
    }

    /// Reports noted heads whose entries are not there.
    fn missing(&mut self, noted: BTreeMap<i64, Vec<AuditHash>>) {
        let newest = self.findings.head.unwrap_or_default().number;
        for number in noted.into_keys() {
            self.problem(
                number,
                if number > newest {
                    "the log ends before this entry, whose hash was noted"
                } else {
                    "the entry is missing, and its hash was noted"
                },
            );
        }
    }

    fn problem(&mut self, number: i64, problem: &'static str) {
        self.findings.count += 1;
        if self.findings.problems.len() < NAMED_MAX {
            self.findings.problems.push((number, problem));
        }
    }
}

#[cfg(test)]
mod tests {
    use gw_base::clock::Timestamp;

    use super::super::AuditEntry;
    use super::*;

    fn entry(action: &str) -> AuditEntry {
        AuditEntry {
            at: Timestamp(7),
            actor: "admin".to_owned(),
            action: action.to_owned().into(),
            account: None,
            target: "x".to_owned(),
            detail: serde_json::json!({ "a": 1 }),
        }
    }

    /// Entries with these numbers, the oldest first.
    fn chain(numbers: &[i64]) -> Vec<NumberedEntry> {
        let mut before = AuditHash::default();
        numbers
            .iter()
            .map(|number| {
                let next = NumberedEntry::new(*number, entry("put"), before);
                before = next.hash;
                next
            })
            .collect()
    }

    fn check(entries: &[NumberedEntry], noted: &[AuditHead]) -> AuditFindings {
        let mut check = AuditCheck::new(noted.iter().copied());
        for page in entries.rchunks(3) {
            check.add(page.iter().rev().cloned().collect());
        }
        check.finish(Revision(entries.last().map_or(0, |last| last.number)))
    }

    fn numbers(findings: &AuditFindings) -> Vec<i64> {
        assert_eq!(findings.count, findings.problems.len() as u64);
        findings
            .problems
            .iter()
            .map(|(number, _)| *number)
            .collect()
    }

    #[test]
    fn a_chain_as_it_was_written_has_no_problems() {
        let entries = chain(&[1, 2, 3, 4, 5, 6, 7]);
        let heads: Vec<AuditHead> = entries.iter().map(NumberedEntry::head).collect();
        let findings = check(&entries, &heads);
        assert_eq!((findings.entries, findings.noted), (7, 7));
        assert_eq!(findings.head, heads.last().copied());
        assert_eq!(numbers(&findings), [0; 0]);
        assert_eq!(check(&[], &[]), AuditFindings::default());
    }

    #[test]
    fn a_change_an_addition_and_a_removal_show_at_their_places() {
        let entries = chain(&[1, 2, 3, 4, 5, 6, 7]);
        let mut changed = entries.clone();
        changed[3] = NumberedEntry {
            hash: changed[3].hash,
            ..NumberedEntry::new(4, entry("other"), AuditHash::default())
        };
        assert_eq!(numbers(&check(&changed, &[])), [4]);
        for at in 0..6 {
            let mut removed = entries.clone();
            removed.remove(at);
            assert_eq!(numbers(&check(&removed, &[])), [at as i64 + 2]);
        }
        let mut added = entries.clone();
        added.push(NumberedEntry::new(8, entry("put"), AuditHash::default()));
        assert_eq!(numbers(&check(&added, &[])), [8]);
    }

    #[test]
    fn numbers_have_no_gap_but_for_a_repair() {
        let mut entries = chain(&[1, 2, 5]);
        assert_eq!(numbers(&check(&entries, &[])), [5]);
        entries[2] = NumberedEntry::new(5, entry(REPAIR), entries[1].hash);
        assert_eq!(numbers(&check(&entries, &[])), [0; 0]);
    }

    #[test]
    fn a_chain_that_was_computed_again_or_cut_shows_beside_a_noted_head() {
        let genuine = chain(&[1, 2, 3, 4, 5, 6]);
        let noted: Vec<AuditHead> = [1, 3, 5].map(|at| genuine[at].head()).into();
        let mut forged: Vec<NumberedEntry> = genuine[..2].to_vec();
        for number in 3..=6 {
            let before = forged.last().unwrap().hash;
            forged.push(NumberedEntry::new(number, entry("forged"), before));
        }
        assert_eq!(numbers(&check(&forged, &[])), [0; 0]);
        assert_eq!(numbers(&check(&forged, &noted)), [6, 4]);
        assert_eq!(numbers(&check(&genuine[..4], &noted)), [6]);
        assert_eq!(numbers(&check(&[], &noted)), [2, 4, 6]);
        let ends = |newest| numbers(&AuditCheck::default().finish(Revision(newest)));
        assert_eq!((ends(0), ends(1), ends(2)), (vec![], vec![], vec![2]));
    }

    #[test]
    fn heads_are_written_and_read_as_text() {
        let head = chain(&[7])[0].head();
        assert_eq!(head.to_string().parse::<AuditHead>().unwrap(), head);
        let hash = head.hash.to_string();
        for broken in [
            "",
            "7",
            ":",
            "7:",
            &hash,
            &format!("x:{hash}"),
            &format!("7:{hash}0"),
            &format!("7:+{}", &hash[1..]),
        ] {
            assert!(broken.parse::<AuditHead>().is_err(), "{broken}");
        }
    }
}
