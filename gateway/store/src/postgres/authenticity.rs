//! Authentication of the records in PostgreSQL with a key derived from the region key: write access
//! to the database does not suffice to change them.
//!
//! - A row of `gw.records` has a tag over its columns. A row that was changed or added is refused.
//! - A row of `gw.changes` has a tag over its columns and over the change before it, so that
//!   changes follow each other as they were committed.
//! - `gw.region` has a tag over its position and over the set of all records and shared secrets. A
//!   load of all records notices a row that was removed, or replaced by an earlier version of
//!   itself.
//! - A row of `gw.nodes` has a tag over slot, session and address, so that nodes connect only to
//!   addresses that a node has written. The state of a node changes too often for a tag.
//! - What a node tells another one of the servers of PostgreSQL has a tag, so that the certificate
//!   of a node does not suffice to end all changes.
//!
//! A database that was rolled back as a whole is authentic, as after the restore of a backup.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::hmac;
use gw_region::{NodeRow, NodeSlot, RegionKey};
use gw_shared::text::{hexadecimal, printable};

use super::super::{Position, RecordId, Revision, Sealer, StoreError, StoredRecord};

/// Name of the derived key.
const PURPOSE: &str = "gw records 1";
/// Rows that an error names.
const NAMED_ROWS: usize = 5;
/// Longest name of a row in an error, in bytes: the writer of a refused row chooses it.
const NAME_MAX: usize = 100;

/// Authenticates a row: the first half of an HMAC-SHA-256.
pub(super) type Tag = [u8; 16];

/// A row's part in the digest of the set: the second half of the HMAC. Never stored, because a
/// known element would help to find other sets with the same digest.
pub(super) type Element = u128;

/// A row of the set: a record, or a secret that all nodes share, by its name.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum SetMember {
    Record(RecordId),
    Secret(String),
}

/// A row that a change has written, or `None` for one that it has deleted.
pub(super) type Effect = (SetMember, Option<Element>);

/// Makes and verifies tags.
pub struct Authenticator(hmac::Key);

/// Writes and reads rows of `gw.records`.
#[derive(Clone, Copy)]
pub(super) struct RowCodec<'a> {
    pub(super) sealer: &'a Sealer,
    pub(super) authenticator: &'a Authenticator,
    /// UUID of the region.
    pub(super) origin: &'a str,
}

/// The columns of a row of `gw.records`.
pub(super) struct RecordRow {
    pub(super) kind: &'static str,
    pub(super) id: String,
    pub(super) document: String,
    pub(super) tag: Tag,
    pub(super) element: Element,
}

impl Authenticator {
    /// Derives the key of the tags from a region key.
    pub fn new(key: &RegionKey) -> Self {
        Self(key.derive(PURPOSE))
    }

    /// Authenticates a row of `gw.records` in the region `origin`.
    pub(super) fn record(
        &self,
        origin: &str,
        kind: &str,
        id: &str,
        document: &str,
    ) -> (Tag, Element) {
        self.sign(&[
            b"record",
            origin.as_bytes(),
            kind.as_bytes(),
            id.as_bytes(),
            document.as_bytes(),
        ])
    }

    /// The element of a row of `gw.secrets`, which needs no tag: its secret is sealed.
    pub(super) fn secret(&self, origin: &str, name: &str, sealed: &str) -> Element {
        self.sign(&[
            b"secret",
            origin.as_bytes(),
            name.as_bytes(),
            sealed.as_bytes(),
        ])
        .1
    }

    /// Authenticates a row of `gw.changes`: the steps that lead from one position to the next.
    pub(super) fn change(&self, before: &Position, after: &Position, steps: &str) -> Tag {
        let Position {
            origin,
            revision,
            change,
        } = after;
        let revision = revision.0.to_be_bytes();
        let parts = [
            origin.as_bytes(),
            before.change.as_bytes(),
            &revision,
            change.as_bytes(),
            steps.as_bytes(),
        ];
        self.sign(&[&[&b"change"[..]], &parts[..]].concat()).0
    }

    /// Authenticates the row of `gw.region`: its position, and the digest of the set of records.
    pub(super) fn region(&self, position: &Position, sum: Element) -> Tag {
        let Position {
            origin,
            revision,
            change,
        } = position;
        let revision = revision.0.to_be_bytes();
        let sum = sum.to_be_bytes();
        self.sign(&[
            b"region",
            origin.as_bytes(),
            &revision,
            change.as_bytes(),
            &sum,
        ])
        .0
    }

    /// Authenticates the identity of a node in `gw.nodes`: the session of a node and the address of
    /// its `peer_listen`.
    pub(super) fn node(&self, slot: NodeSlot, session: u128, peer_address: SocketAddr) -> Tag {
        let slot = slot.get().to_be_bytes();
        let session = session.to_be_bytes();
        self.sign(&[
            b"node",
            &slot,
            &session,
            peer_address.to_string().as_bytes(),
        ])
        .0
    }

    /// Whether slot, session and address of a row are as a node has written them.
    pub fn has_written(&self, row: &NodeRow) -> bool {
        is_tag(
            &self.node(row.slot, row.session, row.peer_address),
            &row.tag,
        )
    }

    /// Shows that the process of a node has this key: it binds slot, session and version. A process
    /// that joins has another session. One that replaces another by SIGUSR2 has the same, and until
    /// its first beat, the row has the proofs of the one before.
    pub(super) fn proof(&self, slot: NodeSlot, session: u128, version: &str) -> Tag {
        self.sign(&[
            b"key",
            &slot.get().to_be_bytes(),
            &session.to_be_bytes(),
            version.as_bytes(),
        ])
        .0
    }

    /// Authenticates the answer of a node to the `message` of another one: which primaries it
    /// knows.
    pub fn tag_of_answer(&self, message: &[u8], answer: &[u8]) -> String {
        hexadecimal(&self.sign(&[b"answer", message, answer]).0)
    }

    /// Whether a process with this key has answered the `message`.
    pub fn has_answered(&self, message: &[u8], answer: &[u8], tag: &[u8]) -> bool {
        verify_slices_are_equal(self.tag_of_answer(message, answer).as_bytes(), tag).is_ok()
    }

    fn sign(&self, parts: &[&[u8]]) -> (Tag, Element) {
        let mut message = Vec::with_capacity(parts.iter().map(|part| 8 + part.len()).sum());
        for part in parts {
            // With its length, so that the borders of parts count.
            message.extend((part.len() as u64).to_be_bytes());
            message.extend(*part);
        }
        let signed = hmac::sign(&self.0, &message);
        let mut tag = Tag::default();
        let mut element = [0; size_of::<Element>()];
        let (first, second) = signed.as_ref().split_at(tag.len());
        tag.copy_from_slice(first);
        element.copy_from_slice(second);
        (tag, Element::from_be_bytes(element))
    }
}

pub(super) fn is_tag(expected: &Tag, found: &[u8]) -> bool {
    verify_slices_are_equal(expected, found).is_ok()
}

impl RowCodec<'_> {
    /// The row of a record, with its secrets sealed.
    pub(super) fn write(&self, record: &StoredRecord) -> Result<RecordRow, StoreError> {
        let (kind, id) = record.id().columns();
        let document = self.sealer.seal_record(record)?.document()?;
        let (tag, element) = self.authenticator.record(self.origin, kind, &id, &document);
        Ok(RecordRow {
            kind,
            id,
            document,
            tag,
            element,
        })
    }

    /// Reads a document that is authentic.
    pub(super) fn open(&self, kind: &str, document: &str) -> Result<StoredRecord, StoreError> {
        self.sealer.open_record(StoredRecord::read(kind, document)?)
    }
}

/// The digest of all records at a position, and what is needed to compute the next one.
pub(super) struct RecordSet {
    position: Position,
    elements: HashMap<SetMember, Element>,
    /// Elements that are not in the map yet: it is made by the first change, not by a start that
    /// loads a million records.
    loaded: Vec<(SetMember, Element)>,
    /// Exclusive or of all elements.
    sum: Element,
}

impl RecordSet {
    /// The empty set.
    pub(super) fn at(position: Position) -> Self {
        Self {
            position,
            elements: HashMap::new(),
            loaded: Vec::new(),
            sum: 0,
        }
    }

    /// Adds a row that the set does not have.
    pub(super) fn add(&mut self, member: SetMember, element: Element) {
        self.sum ^= element;
        self.loaded.push((member, element));
    }

    fn elements(&mut self) -> &mut HashMap<SetMember, Element> {
        self.elements.extend(std::mem::take(&mut self.loaded));
        &mut self.elements
    }

    pub(super) fn sum(&self) -> Element {
        self.sum
    }

    /// The digest after these effects. Each row occurs once.
    fn sum_after(&mut self, effects: &[Effect]) -> Element {
        let before = self.sum;
        let elements = self.elements();
        effects.iter().fold(before, |sum, (member, element)| {
            sum ^ element.unwrap_or_default() ^ elements.get(member).copied().unwrap_or_default()
        })
    }

    fn apply(&mut self, after: &Position, effects: Vec<Effect>) {
        for (member, element) in effects {
            let earlier = match element {
                Some(element) => self.elements().insert(member, element),
                None => self.elements().remove(&member),
            };
            self.sum ^= element.unwrap_or_default() ^ earlier.unwrap_or_default();
        }
        self.position = after.clone();
    }
}

/// The set of records that this process knows, shared by its connections.
#[derive(Clone, Default)]
pub struct KnownRecords(Arc<Mutex<Known>>);

#[derive(Default)]
struct Known {
    /// `None` until all records were loaded.
    set: Option<RecordSet>,
    /// Index of the region key that the set's elements are of.
    key: usize,
    /// The tables had tags before: tables without tags are not trusted any more.
    had_tags: bool,
    /// Version of the tables, if it is too new for this program.
    newer_schema: Option<usize>,
}

impl KnownRecords {
    fn lock(&self) -> MutexGuard<'_, Known> {
        // A set that a panic left between two changes has another position than the records: it is
        // loaded again.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that this node has seen tables with tags.
    pub fn expect_tags(&self) {
        self.lock().had_tags = true;
    }

    pub(super) fn had_tags(&self) -> bool {
        self.lock().had_tags
    }

    /// Notes the version of the tables, if it is too new for this program. Returns what was noted
    /// before.
    pub(super) fn note_newer_schema(&self, found: Option<usize>) -> Option<usize> {
        std::mem::replace(&mut self.lock().newer_schema, found)
    }

    /// Version of the tables, if it is too new for this program.
    pub(super) fn newer_schema(&self) -> Option<usize> {
        self.lock().newer_schema
    }

    /// Uses a set that was loaded with the region key at index `key`, unless a newer one of the
    /// same region is known.
    pub(super) fn load(&self, loaded: RecordSet, key: usize) {
        let mut known = self.lock();
        known.had_tags = true;
        let is_newer = |known: &RecordSet| {
            known.position.origin == loaded.position.origin
                && known.position.revision > loaded.position.revision
        };
        if !known.set.as_ref().is_some_and(is_newer) {
            known.set = Some(loaded);
            known.key = key;
        }
    }

    /// The position of the set.
    pub(super) fn position(&self) -> Option<Position> {
        self.lock().set.as_ref().map(|set| set.position.clone())
    }

    /// The element of a row of the set; `None` if the set does not have it, or is not known.
    pub(super) fn element(&self, member: &SetMember) -> Option<Element> {
        let known = self.lock();
        let set = known.set.as_ref()?;
        // A start asks for the secrets, which were loaded last: the map is not needed for them.
        let loaded = set
            .loaded
            .iter()
            .rev()
            .find(|(loaded, _)| loaded == member)
            .map(|(_, element)| *element);
        loaded.or_else(|| set.elements.get(member).copied())
    }

    /// Forgets the set: it is not of the history of the database.
    pub(super) fn forget(&self) {
        self.lock().set = None;
    }

    /// Whether the set is at `position` or at a later one, and of the region key at index `key`.
    /// Otherwise, forgets it. Another connection of this process may be ahead of `newest`; if the
    /// database has lost those changes, the records follow and are then replaced.
    pub(super) fn covers(&self, position: &Position, newest: &Position, key: usize) -> bool {
        let mut known = self.lock();
        let is_of_key = known.key == key;
        let covers = is_of_key
            && known
                .set
                .as_ref()
                .is_some_and(|RecordSet { position: at, .. }| {
                    let is_between =
                        position.revision < at.revision && at.revision < newest.revision;
                    let is_ahead = at.revision > newest.revision;
                    at.origin == newest.origin
                        && (at == position || at == newest || is_between || is_ahead)
                });
        if !covers {
            known.set = None;
        }
        covers
    }

    /// The digest after a change at `after`; `None` if the set is at another position.
    pub(super) fn sum_after(&self, after: &Position, effects: &[Effect]) -> Option<Element> {
        let mut known = self.lock();
        let set = known.set.as_mut()?;
        if set.position == *after {
            return Some(set.sum_after(effects));
        }
        // Another connection of this process may be ahead, and its records follow. A set that is
        // behind is of no use.
        if set.position.revision <= after.revision {
            known.set = None;
        }
        None
    }

    /// Applies a change, unless it is applied already.
    pub(super) fn apply(&self, before: &Position, after: &Position, effects: Vec<Effect>) {
        if let Some(set) = &mut self.lock().set
            && set.position == *before
        {
            set.apply(after, effects);
        }
    }
}

/// Rows that are not authentic, for the error.
#[derive(Default)]
pub(super) struct RefusedRows {
    names: Vec<String>,
    count: usize,
}

impl RefusedRows {
    pub(super) fn add(&mut self, kind: &str, id: &str) {
        self.count += 1;
        if self.names.len() < NAMED_ROWS {
            self.names
                .push(printable(format!("{kind} {id}").as_bytes(), NAME_MAX));
        }
    }

    /// Fails if there are any.
    pub(super) fn check(self) -> Result<(), StoreError> {
        if self.count == 0 {
            return Ok(());
        }
        let more = if self.count > self.names.len() {
            ", …"
        } else {
            ""
        };
        let what = format!(
            "{} rows of gw.records have no valid tag ({}{more})",
            self.count,
            self.names.join(", ")
        );
        Err(StoreError::Forged {
            what,
            count: self.count,
        })
    }
}

/// The error of a change that has no valid tag.
pub(super) fn forged_change(revision: Revision) -> StoreError {
    StoreError::Forged {
        what: format!("the row {} of gw.changes has no valid tag", revision.0),
        count: 1,
    }
}

/// The error of a node that has no valid tag.
pub(super) fn forged_node(slot: NodeSlot) -> StoreError {
    StoreError::Forged {
        what: format!("the row {} of gw.nodes has no valid tag", slot.get()),
        count: 1,
    }
}

/// The error of a shared secret that is not the one of the set.
pub(super) fn forged_secret(name: &str) -> StoreError {
    StoreError::Forged {
        what: format!("the row {name:?} of gw.secrets is an earlier one, or was removed"),
        count: 1,
    }
}

/// The error of a set of records that is not the one of its position.
pub(super) fn forged_set(revision: Revision) -> StoreError {
    let what = format!(
        "the rows of gw.records and gw.secrets are not those of revision {}: some were removed, or \
         replaced by earlier versions",
        revision.0
    );
    StoreError::Forged { what, count: 1 }
}

#[cfg(test)]
mod tests;
