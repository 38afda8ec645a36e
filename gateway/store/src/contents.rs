//! The contents of a store, for a move to another store.

use std::collections::BTreeMap;

use serde::Serialize;

use super::audit_chain::TextDigest;
use super::{AuditHead, AuditQuery, NumberedEntry, Revision, Store, StoreError, StoredRecord};

/// Entries of the audit log that are read at once.
const PAGE: usize = 5_000;

/// All records as of one revision, and the audit log up to it.
#[derive(Debug)]
pub struct Contents {
    /// Revision of the store that the contents were read at.
    pub revision: Revision,
    /// Records of all kinds, in the order of their kinds and identities.
    pub records: Vec<StoredRecord>,
    /// The oldest first.
    pub audit: Vec<NumberedEntry>,
}

/// Numbers and digest of the contents of a store. Two stores with the same summary have the same
/// contents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ContentsSummary {
    /// Number of records by kind. A kind without records is left out.
    pub records: BTreeMap<&'static str, usize>,
    /// Number of entries of the audit log.
    pub audit_entries: usize,
    /// The newest entry of the audit log.
    pub audit_head: Option<AuditHead>,
    /// SHA-256 of all records and all audit entries, in hexadecimal.
    pub sha256: String,
}

impl Contents {
    /// Reads a store. Other nodes may change its records meanwhile: an entry of the audit log has
    /// the number of its revision, so that later ones can be left out.
    pub fn read(store: &mut dyn Store) -> Result<Self, StoreError> {
        let snapshot = store.load()?;
        let mut audit = Vec::new();
        let mut before = snapshot.position.revision.0.saturating_add(1);
        loop {
            let page = store.audit_log(&AuditQuery {
                account: None,
                before: Some(before),
                limit: PAGE,
            })?;
            let Some(oldest) = page.last() else { break };
            before = oldest.number;
            audit.extend(page);
        }
        audit.reverse();
        Ok(Self {
            revision: snapshot.position.revision,
            records: snapshot.records.into_vec(),
            audit,
        })
    }

    /// Returns the number of records and audit entries, and the digest of all of them. Fails if a
    /// record cannot be encoded.
    pub fn summary(&self) -> Result<ContentsSummary, StoreError> {
        let mut digest = TextDigest::new();
        let mut documents = Vec::with_capacity(self.records.len());
        for record in &self.records {
            let (kind, id) = record.id().columns();
            documents.push((kind, id, record.document()?));
        }
        documents.sort_unstable();
        let mut records = BTreeMap::new();
        for (kind, id, document) in &documents {
            [*kind, id.as_str(), document.as_str()]
                .into_iter()
                .for_each(|part| digest.add(part));
            *records.entry(*kind).or_default() += 1;
        }
        for entry in &self.audit {
            digest.add(&entry.digest.to_string());
            digest.add(&entry.hash.to_string());
        }
        Ok(ContentsSummary {
            records,
            audit_entries: self.audit.len(),
            audit_head: self.audit.last().map(NumberedEntry::head),
            sha256: digest.finish(),
        })
    }
}

impl ContentsSummary {
    /// Error text for contents with the summary `written` that should have this one.
    pub fn difference(&self, written: &Self) -> String {
        format!("the contents differ after they were written: {written:?} in place of {self:?}")
    }
}

#[cfg(test)]
mod tests {
    use gw_base::clock::Timestamp;
    use gw_shared::id::AccountId;

    use super::super::{AccountRecord, AuditEntry, AuditHash, Position, SqliteStore, Step};
    use super::*;

    fn account(name: &str) -> StoredRecord {
        StoredRecord::Account(AccountRecord {
            id: AccountId::new(name).unwrap(),
            capture_allowed: false,
            domains_max: Default::default(),
            created_at: Timestamp(1),
            created_ms: None,
            managed_by: None,
            later: Default::default(),
        })
    }

    fn entry(target: &str) -> AuditEntry {
        AuditEntry {
            at: Timestamp(7),
            actor: "admin".to_owned(),
            action: "account.create".into(),
            account: None,
            target: target.to_owned(),
            detail: serde_json::json!({ "b": 1.5, "a": ["it's", null] }),
        }
    }

    fn store(folder: &tempfile::TempDir, name: &str) -> SqliteStore {
        SqliteStore::open(&folder.path().join(name)).unwrap()
    }

    #[test]
    fn contents_move_to_another_database_with_their_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let mut old = store(&folder, "old");
        for name in ["acme", "other"] {
            old.commit(
                &Position::default(),
                &[Step::Put(account(name))],
                &entry(name),
            )
            .unwrap();
        }
        let contents = Contents::read(&mut old).unwrap();
        assert_eq!(
            contents
                .audit
                .iter()
                .map(|entry| entry.number)
                .collect::<Vec<_>>(),
            [1, 2]
        );
        let mut new = store(&folder, "new");
        new.fill(&contents).unwrap();
        let moved = Contents::read(&mut new).unwrap();
        assert_eq!(
            (moved.revision, moved.summary().unwrap()),
            (Revision(2), contents.summary().unwrap())
        );
        assert!(new.fill(&contents).is_err(), "the database is not empty");
        assert_eq!(
            new.commit(&Position::default(), &[], &entry("next"))
                .unwrap()
                .revision,
            Revision(3)
        );
    }

    #[test]
    fn an_audit_log_of_several_pages_is_read_completely() {
        let folder = tempfile::tempdir().unwrap();
        let mut before = AuditHash::default();
        let entries = (1..=2 * PAGE as i64 + 3).map(|number| {
            let next = NumberedEntry::new(number, entry("x"), before);
            before = next.hash;
            next
        });
        let contents = Contents {
            revision: Revision(0),
            records: Vec::new(),
            audit: entries.collect(),
        };
        let mut store = store(&folder, "gw.sqlite");
        store.fill(&contents).unwrap();
        assert_eq!(Contents::read(&mut store).unwrap().audit, contents.audit);
    }

    #[test]
    fn every_difference_changes_the_digest() {
        let contents = |name: &str, number, target: &str| {
            let audit = vec![NumberedEntry::new(
                number,
                entry(target),
                AuditHash::default(),
            )];
            Contents {
                revision: Revision(1),
                records: vec![account(name)],
                audit,
            }
            .summary()
            .unwrap()
        };
        let summary = contents("acme", 1, "x");
        assert_eq!(
            (
                summary.records["account"],
                summary.audit_entries,
                summary.sha256.len()
            ),
            (1, 1, 64)
        );
        assert_eq!(summary, contents("acme", 1, "x"));
        for other in [
            contents("acma", 1, "x"),
            contents("acme", 2, "x"),
            contents("acme", 1, "y"),
        ] {
            assert_ne!(other.sha256, summary.sha256);
        }
    }

    #[test]
    fn the_order_of_records_does_not_matter() {
        let of = |names: [&str; 2]| {
            Contents {
                revision: Revision(1),
                records: names.map(account).into(),
                audit: Vec::new(),
            }
            .summary()
            .unwrap()
        };
        assert_eq!(of(["acme", "other"]), of(["other", "acme"]));
    }
}
