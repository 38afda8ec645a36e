//! The steps of a change as parameters of a statement, and as JSON for the nodes that follow.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::super::{RecordId, Step, StoreError};
use super::authenticity::{Effect, RecordRow, RowCodec, SetMember};

/// Rows of `gw.records`, as parameters of a statement.
#[derive(Debug, Default)]
pub(super) struct RecordColumns {
    pub(super) kinds: Vec<&'static str>,
    pub(super) ids: Vec<String>,
    pub(super) documents: Vec<String>,
    pub(super) tags: Vec<Vec<u8>>,
}

/// The effect of a change: each record once, with its last document.
#[derive(Debug, Default)]
pub(super) struct FinalSteps {
    pub(super) put: RecordColumns,
    pub(super) deleted_kinds: Vec<&'static str>,
    pub(super) deleted_ids: Vec<String>,
    /// Name of a shared secret that is stored, sealed, or deleted if it is `None`.
    pub(super) secret: Option<(String, Option<String>)>,
    /// Effects of the change on the digest of the set.
    pub(super) effects: Vec<Effect>,
}

/// Kind of the step that stores or deletes a shared secret. Records have other kinds.
const SECRET: &str = "secret";

/// A step in `changes`.
#[derive(Serialize, Deserialize)]
struct StoredStep<'a> {
    kind: &'a str,
    id: String,
    /// `None` if the record is deleted.
    document: Option<String>,
}

impl RecordColumns {
    pub(super) fn push(&mut self, row: RecordRow) {
        self.kinds.push(row.kind);
        self.ids.push(row.id);
        self.documents.push(row.document);
        self.tags.push(row.tag.to_vec());
    }
}

impl FinalSteps {
    pub(super) fn of(steps: &[Step], codec: RowCodec<'_>) -> Result<Self, StoreError> {
        let mut last: HashMap<RecordId, Option<RecordRow>> = HashMap::new();
        for step in steps {
            let (id, row) = match step {
                Step::Put(record) => (record.id(), Some(codec.write(record)?)),
                Step::Delete(id) => (id.clone(), None),
            };
            last.insert(id, row);
        }
        let mut all = Self::default();
        for (id, row) in last {
            all.effects.push((
                SetMember::Record(id.clone()),
                row.as_ref().map(|row| row.element),
            ));
            if let Some(row) = row {
                all.put.push(row);
            } else {
                let (kind, id) = id.columns();
                all.deleted_kinds.push(kind);
                all.deleted_ids.push(id);
            }
        }
        Ok(all)
    }

    /// Stores or deletes a shared secret.
    pub(super) fn of_secret(name: &str, sealed: Option<String>, codec: RowCodec<'_>) -> Self {
        let element = sealed
            .as_ref()
            .map(|sealed| codec.authenticator.secret(codec.origin, name, sealed));
        let effects = vec![(SetMember::Secret(name.to_owned()), element)];
        Self {
            secret: Some((name.to_owned(), sealed)),
            effects,
            ..Self::default()
        }
    }

    pub(super) fn to_json(&self) -> Result<String, StoreError> {
        let put = self
            .put
            .kinds
            .iter()
            .zip(&self.put.ids)
            .zip(&self.put.documents);
        let put = put.map(|((kind, id), written)| (kind, id, Some(written.clone())));
        let deleted = self
            .deleted_kinds
            .iter()
            .zip(&self.deleted_ids)
            .map(|(kind, id)| (kind, id, None));
        let secret = self
            .secret
            .iter()
            .map(|(name, sealed)| (&SECRET, name, sealed.clone()));
        let all: Vec<StoredStep<'_>> = put
            .chain(deleted)
            .chain(secret)
            .map(|(kind, id, document)| StoredStep {
                kind,
                id: id.clone(),
                document,
            })
            .collect();
        serde_json::to_string(&all).map_err(StoreError::corrupt)
    }
}

/// Reads the authentic steps of one change. Opens the secrets of its records.
pub(super) fn from_json(
    text: &str,
    codec: RowCodec<'_>,
) -> Result<(Vec<Step>, Vec<Effect>), StoreError> {
    let stored: Vec<StoredStep<'_>> = serde_json::from_str(text).map_err(StoreError::corrupt)?;
    let mut steps = Vec::new();
    let mut effects = Vec::new();
    for StoredStep { kind, id, document } in stored {
        if kind == SECRET {
            let element =
                document.map(|sealed| codec.authenticator.secret(codec.origin, &id, &sealed));
            effects.push((SetMember::Secret(id), element));
            continue;
        }
        let Some(document) = document else {
            let id = RecordId::read(kind, &id)?;
            effects.push((SetMember::Record(id.clone()), None));
            steps.push(Step::Delete(id));
            continue;
        };
        let record = codec.open(kind, &document)?;
        let (_, element) = codec
            .authenticator
            .record(codec.origin, kind, &id, &document);
        effects.push((SetMember::Record(record.id()), Some(element)));
        steps.push(Step::Put(record));
    }
    Ok((steps, effects))
}
