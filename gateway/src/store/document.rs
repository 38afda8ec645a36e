//! Records as they are stored: a kind, an identity and a JSON document.

use serde::de::DeserializeOwned;

use super::{RecordId, StoreError, StoredRecord};

/// The columns `kind` and `id` of a record.
pub(super) fn key(id: &RecordId) -> (&'static str, String) {
    match id {
        RecordId::Account(id) => ("account", id.to_string()),
        RecordId::Service(account, id) => ("service", format!("{account}/{id}")),
        RecordId::Credential(id) => ("credential", id.to_string()),
        RecordId::ServiceKey(id) => ("service_key", id.to_string()),
        RecordId::EnrollmentToken(id) => ("enrollment_token", id.to_string()),
        RecordId::Agent(id) => ("agent", id.to_string()),
        RecordId::SigningKey(id) => ("signing_key", id.to_string()),
        RecordId::Authority(id) => ("authority", id.to_string()),
    }
}

pub(super) fn write(record: &StoredRecord) -> Result<String, StoreError> {
    match record {
        StoredRecord::Account(record) => serde_json::to_string(record),
        StoredRecord::Service(record) => serde_json::to_string(record),
        StoredRecord::Credential(record) => serde_json::to_string(record),
        StoredRecord::ServiceKey(record) => serde_json::to_string(record),
        StoredRecord::EnrollmentToken(record) => serde_json::to_string(record),
        StoredRecord::Agent(record) => serde_json::to_string(record),
        StoredRecord::SigningKey(record) => serde_json::to_string(record),
        StoredRecord::Authority(record) => serde_json::to_string(record),
    }
    .map_err(StoreError::corrupt)
}

pub(super) fn read(kind: &str, document: &str) -> Result<StoredRecord, StoreError> {
    fn parse<T: DeserializeOwned>(kind: &str, document: &str) -> Result<T, StoreError> {
        serde_json::from_str(document)
            .map_err(|error| StoreError::Corrupt(format!("{kind}: {error}")))
    }
    Ok(match kind {
        "account" => StoredRecord::Account(parse(kind, document)?),
        "service" => StoredRecord::Service(parse(kind, document)?),
        "credential" => StoredRecord::Credential(parse(kind, document)?),
        "service_key" => StoredRecord::ServiceKey(parse(kind, document)?),
        "enrollment_token" => StoredRecord::EnrollmentToken(parse(kind, document)?),
        "agent" => StoredRecord::Agent(parse(kind, document)?),
        "signing_key" => StoredRecord::SigningKey(parse(kind, document)?),
        "authority" => StoredRecord::Authority(parse(kind, document)?),
        other => {
            return Err(StoreError::Corrupt(format!(
                "unknown kind of record {other:?}"
            )));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::super::{AgentRecord, EnrollmentTokenRecord, ServiceRecord};
    use super::*;
    use crate::affinity::Affinity;

    fn token(document: &str) -> EnrollmentTokenRecord {
        let StoredRecord::EnrollmentToken(token) = read("enrollment_token", document).unwrap()
        else {
            unreachable!()
        };
        token
    }

    #[test]
    fn an_enrollment_token_of_an_earlier_version_has_one_use() {
        let unused = format!(
            r#"{{"id":"0123456789abcdef","account":"acme","secret":"{}","services":["api"],"approval":"auto",
                "created_at":1,"expires_at":2,"used_by":null}}"#,
            "0".repeat(64)
        );
        let open = token(&unused);
        assert_eq!(
            (
                open.uses,
                open.times_used(),
                open.is_used_up(),
                open.ephemeral
            ),
            (1, 0, false, false)
        );
        let used = token(&unused.replace("null", r#""ag_0123456789abcdefghij""#));
        assert_eq!(
            (used.uses, used.times_used(), used.is_used_up()),
            (1, 1, true)
        );
    }

    #[test]
    fn a_service_of_an_earlier_version_gets_defaults_and_keeps_its_document() {
        let document = r#"{"account":"acme","id":"api","modes":{"jwt":true,"service_key":false},"enabled":true,"rate":{"burst":7,"refill_per_minute":8},"request_logging":true,"capture_request_body":false,"capture_response_body":true,"created_at":1}"#;
        let StoredRecord::Service(service) = read("service", document).unwrap() else {
            unreachable!()
        };
        assert_eq!(
            (service.retries, &service.affinity),
            (true, &Affinity::None)
        );
        assert_eq!(
            write(&StoredRecord::Service(service.clone())).unwrap(),
            document
        );
        let changed = ServiceRecord {
            retries: false,
            affinity: Affinity::Client,
            ..service
        };
        let document = write(&StoredRecord::Service(changed.clone())).unwrap();
        assert!(
            document.ends_with(r#","created_at":1,"retries":false,"affinity":"client"}"#),
            "{document}"
        );
        let StoredRecord::Service(read) = read("service", &document).unwrap() else {
            unreachable!()
        };
        assert_eq!(read, changed);
    }

    #[test]
    fn an_agent_of_an_earlier_version_has_the_default_of_later_members() {
        let document = r#"{"id":"ag_0123456789abcdefghij","account":"acme","name":"a","services":["api"],
            "status":"approved"}"#;
        let StoredRecord::Agent(AgentRecord {
            enrollment_token,
            standby,
            ephemeral,
            absent_since,
            ..
        }) = read("agent", document).unwrap()
        else {
            unreachable!()
        };
        assert_eq!(
            (enrollment_token, standby, ephemeral, absent_since),
            (None, false, false, None)
        );
    }
}
