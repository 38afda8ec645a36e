//! Certificates of own domains: uploaded ones, and orders of new ones.

use std::sync::Arc;

use gw_base::clock::Timestamp;
use gw_base::tls::certificate::Pair;
use gw_shared::id::DomainName;
use gw_store::{
    DomainCertificate, DomainCertificateSource, DomainMaterial, DomainState, ServedPair, Step,
    StoredRecord,
};
use serde_json::json;

use super::view::{DomainView, NO_AUTHORITY, NewDomainCertificate, view_of};
use super::{find, sealed};
use crate::control::{Actor, Control, ControlError, Plan};
use crate::limits::DOMAIN_CERTIFICATE_BYTES;

/// Serves this certificate for a domain. The gateway orders none for it then.
pub fn upload(
    control: &Control,
    actor: &Actor,
    account: &str,
    name: &str,
    new: &NewDomainCertificate,
) -> Result<DomainView, ControlError> {
    let size = new.chain.len() + new.key.reveal().len();
    if size > DOMAIN_CERTIFICATE_BYTES {
        let message = format!(
            "chain and key have {size} bytes, and may have {DOMAIN_CERTIFICATE_BYTES}; leave out \
             the root and other certificates that clients do not need"
        );
        return Err(ControlError::invalid("chain", message));
    }
    control.change(actor, |records, now| {
        let mut record = find(records, account, name)?.clone();
        let served = ServedPair {
            chain: new.chain.clone(),
            key: new.key.clone(),
        };
        let certificate = checked_pair(&record.id, &served, now)?;
        record.certificate = Some(certificate);
        record.failures = None;
        record.renewal_requested = None;
        record.order = None;
        record.material = Arc::new(sealed(&DomainMaterial {
            served: Some(served),
            ..DomainMaterial::default()
        })?);
        Ok(Plan {
            action: "domain.certificate",
            account: Some(record.account.clone()),
            target: record.id.to_string(),
            detail: json!({ "not_after": certificate.not_after.to_string() }),
            output: view_of(control, records, &record),
            steps: vec![Step::Put(StoredRecord::Domain(record))],
        })
    })
}

/// Checks an uploaded certificate: names, key and validity.
fn checked_pair(
    name: &DomainName,
    served: &ServedPair,
    now: Timestamp,
) -> Result<DomainCertificate, ControlError> {
    let invalid = |message: String| ControlError::invalid("chain", message);
    let pair = Pair::from_pem(&served.chain, served.key.reveal()).map_err(invalid)?;
    if let Some(problem) = pair.does_not_serve(name.as_str()) {
        return Err(ControlError::invalid("chain", problem));
    }
    if let Some(untimely) = pair.untimely(now) {
        return Err(ControlError::invalid("chain", untimely));
    }
    let (not_before, not_after) = pair.first_validity().ok_or_else(|| {
        ControlError::invalid("chain", "the first certificate has no validity".to_owned())
    })?;
    Ok(DomainCertificate {
        not_before,
        not_after,
        source: DomainCertificateSource::Uploaded,
    })
}

/// Orders a new certificate for a domain now, also for one with an uploaded certificate. The one
/// before stays in use until it is there.
pub fn renew(
    control: &Control,
    actor: &Actor,
    account: &str,
    name: &str,
) -> Result<DomainView, ControlError> {
    let refused = |reason: &str| ControlError::Conflict(format!("domain {name}: {reason}"));
    if !control.has_authority() {
        return Err(refused(NO_AUTHORITY));
    }
    control.change(actor, |records, now| {
        let mut record = find(records, account, name)?.clone();
        if record.state != DomainState::Active {
            return Err(refused(
                "no certificate is ordered, because DNS does not prove it; set its record and look \
                 again with `gw-gateway domain check`",
            ));
        }
        record.renewal_requested = Some(now);
        // An administrator knows more than the waits after failures.
        record.failures = None;
        Ok(Plan {
            action: "domain.renew",
            account: Some(record.account.clone()),
            target: record.id.to_string(),
            detail: json!({ "service": record.service }),
            output: view_of(control, records, &record),
            steps: vec![Step::Put(StoredRecord::Domain(record))],
        })
    })
}
