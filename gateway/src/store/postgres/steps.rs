//! The steps of a change as parameters of a statement, and as JSON for the nodes that follow.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::super::{RecordId, Step, StoreError, document};
use super::sealed::Sealer;

/// The effect of a change: each record once, with its last document.
#[derive(Debug, Default)]
pub(super) struct FinalSteps {
    pub(super) put_kinds: Vec<&'static str>,
    pub(super) put_ids: Vec<String>,
    pub(super) put_documents: Vec<String>,
    pub(super) deleted_kinds: Vec<&'static str>,
    pub(super) deleted_ids: Vec<String>,
}

/// A step in `changes`.
#[derive(Serialize, Deserialize)]
struct StoredStep<'a> {
    kind: &'a str,
    id: String,
    /// `None` if the record is deleted.
    document: Option<String>,
}

impl FinalSteps {
    pub(super) fn of(steps: &[Step], sealer: &Sealer) -> Result<Self, StoreError> {
        let mut last: HashMap<(&'static str, String), Option<String>> = HashMap::new();
        for step in steps {
            let (key, written) = match step {
                Step::Put(record) => {
                    (document::key(&record.id()), Some(document::write(&sealer.seal_record(record)?)?))
                }
                Step::Delete(id) => (document::key(id), None),
            };
            last.insert(key, written);
        }
        let mut all = Self::default();
        for ((kind, id), written) in last {
            match written {
                Some(written) => {
                    all.put_kinds.push(kind);
                    all.put_ids.push(id);
                    all.put_documents.push(written);
                }
                None => {
                    all.deleted_kinds.push(kind);
                    all.deleted_ids.push(id);
                }
            }
        }
        Ok(all)
    }

    pub(super) fn to_json(&self) -> Result<String, StoreError> {
        let put = self.put_kinds.iter().zip(&self.put_ids).zip(&self.put_documents);
        let put = put.map(|((kind, id), written)| (kind, id, Some(written.clone())));
        let deleted = self.deleted_kinds.iter().zip(&self.deleted_ids).map(|(kind, id)| (kind, id, None));
        let all: Vec<StoredStep<'_>> =
            put.chain(deleted).map(|(kind, id, document)| StoredStep { kind, id: id.clone(), document }).collect();
        serde_json::to_string(&all).map_err(StoreError::corrupt)
    }
}

/// Reads the steps of one change. Opens the secrets of its records.
pub(super) fn from_json(text: &str, sealer: &Sealer) -> Result<Vec<Step>, StoreError> {
    let steps: Vec<StoredStep<'_>> = serde_json::from_str(text).map_err(StoreError::corrupt)?;
    steps
        .into_iter()
        .map(|step| match step.document {
            Some(written) => Ok(Step::Put(sealer.open_record(document::read(step.kind, &written)?)?)),
            None => Ok(Step::Delete(record_id(step.kind, &step.id)?)),
        })
        .collect()
}

fn record_id(kind: &str, id: &str) -> Result<RecordId, StoreError> {
    fn parse<T: std::str::FromStr<Err: std::fmt::Display>>(id: &str) -> Result<T, StoreError> {
        id.parse().map_err(StoreError::corrupt)
    }
    Ok(match kind {
        "account" => RecordId::Account(parse(id)?),
        "service" => {
            let (account, service) = id.split_once('/').ok_or_else(|| StoreError::Corrupt(format!("service {id}")))?;
            RecordId::Service(parse(account)?, parse(service)?)
        }
        "credential" => RecordId::Credential(parse(id)?),
        "service_key" => RecordId::ServiceKey(parse(id)?),
        "enrollment_token" => RecordId::EnrollmentToken(parse(id)?),
        "agent" => RecordId::Agent(parse(id)?),
        "signing_key" => RecordId::SigningKey(parse(id)?),
        other => return Err(StoreError::Corrupt(format!("unknown kind of record {other:?}"))),
    })
}
