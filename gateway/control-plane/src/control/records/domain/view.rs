//! Own domains as the API shows and takes them.

use gw_acme::ownership::TXT_LABEL;
use gw_shared::id::{AccountId, CertificateId, DomainName, ManagerName, ServiceId};
use gw_shared::identity::secret::Secret;
use gw_store::{DomainCertificateSource, DomainRecord, DomainState, Records};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::claim::{alias_proves, token};
use crate::control::Control;
use crate::limits::DOMAIN_GRACE;

/// A domain of a customer that leads to a service.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Domain)]
pub struct DomainView {
    /// The name, in lower case, with A-labels.
    #[schema(value_type = String)]
    pub name: DomainName,
    /// Account that it belongs to.
    #[schema(value_type = String)]
    pub account: AccountId,
    /// Service that it leads to.
    #[schema(value_type = String)]
    pub service: ServiceId,
    /// Whether DNS proves that the account controls the name.
    #[schema(value_type = DomainStatusText)]
    pub status: DomainState,
    /// Start of `status`, RFC 3339.
    #[schema(format = DateTime)]
    pub since: String,
    /// Why DNS proved nothing at the last look, or why the certificate is not served; what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finding: Option<String>,
    /// Time at which a domain without a proof is no longer served, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    pub served_until: Option<String>,
    /// The CNAME record that leads callers here. It proves control, too, if `cname_proves` says so.
    pub cname: DnsRecordView,
    /// Whether the CNAME record proves control. It does not if an account with this id was deleted
    /// before: the record may be of a customer of that account.
    #[serde(default)]
    #[schema(required = true)]
    pub cname_proves: bool,
    /// The TXT record that proves control where a CNAME record cannot be, such as at the top of a
    /// zone, or proves nothing. Without a CNAME record, address records have to lead callers here.
    pub txt: DnsRecordView,
    /// The certificate; absent until there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<DomainCertificateView>,
    /// Time at which a new certificate was asked for, RFC 3339; absent once it is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    pub renewal_requested: Option<String>,
    /// Failed orders in a row.
    pub failures: u32,
    /// Cause of the last failure and what to do; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_failure: Option<String>,
    /// What manages it by documents; absent if nothing does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub managed_by: Option<ManagerName>,
    /// RFC 3339.
    #[schema(format = DateTime)]
    pub created_at: String,
}

/// Whether DNS proves that an account controls a domain.
#[derive(ToSchema)]
#[schema(as = DomainStatus, rename_all = "snake_case")]
#[expect(dead_code, reason = "describes, is never made")]
pub(crate) enum DomainStatusText {
    /// It never did. The domain is not served.
    Pending,
    /// It does.
    Active,
    /// It does not any more. The domain is served until the time of grace is over.
    Lost,
    /// It did not for the whole time of grace. The domain is not served.
    Disabled,
}

/// A record to set in DNS.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = DnsRecord)]
pub struct DnsRecordView {
    /// Name of the record, without a final dot.
    pub name: String,
    /// Its value.
    pub value: String,
}

/// The certificate of a domain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = DomainCertificate)]
pub struct DomainCertificateView {
    /// Its origin.
    #[schema(value_type = DomainCertificateSourceText)]
    pub source: DomainCertificateSource,
    /// End of its validity, RFC 3339.
    #[schema(format = DateTime)]
    pub not_after: String,
}

/// Origin of the certificate of a domain.
#[derive(ToSchema)]
#[schema(as = DomainCertificateSource, rename_all = "snake_case")]
#[expect(dead_code, reason = "describes, is never made")]
pub(crate) enum DomainCertificateSourceText {
    /// Issued by the ACME authority, which is asked for the next one in time.
    Acme,
    /// Uploaded by the customer.
    Uploaded,
}

/// A domain to add to a service.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewDomain {
    /// The name, in lower case, with A-labels.
    #[schema(
        max_length = 253,
        pattern = "^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\\.)+[a-z]([a-z0-9-]{0,61}[a-z0-9])?$"
    )]
    pub name: String,
    /// Name of what manages it by documents; empty for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 60, pattern = "^([A-Za-z0-9][A-Za-z0-9._/-]*)?$")]
    pub managed_by: Option<String>,
}

/// A certificate to serve for a domain.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewDomainCertificate {
    /// The chain, PEM, the certificate of the domain first.
    pub chain: String,
    /// The private key, PEM.
    #[serde(with = "gw_shared::identity::secret::revealed")]
    #[schema(value_type = String)]
    pub key: Secret,
}
/// Message for a domain without a certificate.
pub(super) const NO_AUTHORITY: &str = "no authority issues its certificate: set terms_accepted in \
                                       the table [acme] of the configuration, or upload one with \
                                       `gw-gateway certificate upload`";

/// A record as the API shows it.
pub(super) fn view_of(control: &Control, records: &Records, record: &DomainRecord) -> DomainView {
    let region = control.region();
    let hostname = region.tenant_hostname(&record.account, &record.service);
    let account = records.accounts.get(&record.account);
    let is_lost = record.state == DomainState::Lost;
    let finding = record.finding.as_ref().map(|stored| {
        let latest = control.findings.lock().ok();
        let latest = latest.and_then(|it| it.get(&record.id).cloned());
        latest.unwrap_or_else(|| stored.clone())
    });
    DomainView {
        name: record.id.clone(),
        account: record.account.clone(),
        service: record.service.clone(),
        status: record.state,
        since: record.since.to_string(),
        finding: finding.or_else(|| record.unusable_certificate()),
        served_until: is_lost.then(|| record.since.after(DOMAIN_GRACE).to_string()),
        cname: DnsRecordView {
            name: record.id.to_string(),
            value: hostname.unwrap_or_default(),
        },
        cname_proves: account.is_some_and(|it| alias_proves(records, it)),
        txt: DnsRecordView {
            name: format!("{TXT_LABEL}.{}", record.id),
            value: account
                .map(|it| token(region, records, it))
                .unwrap_or_default(),
        },
        certificate: record.certificate.map(|it| DomainCertificateView {
            source: it.source,
            not_after: it.not_after.to_string(),
        }),
        renewal_requested: record.renewal_requested.map(|it| it.to_string()),
        failures: record.failures.as_ref().map_or(0, |it| it.count),
        last_failure: last_failure(control, records, record),
        managed_by: record.managed_by.clone(),
        created_at: record.created_at.to_string(),
    }
}

/// Why there is no certificate, or no newer one.
fn last_failure(control: &Control, records: &Records, record: &DomainRecord) -> Option<String> {
    if let Some(failures) = &record.failures {
        return Some(failures.reason.clone());
    }
    if record.certificate.is_some() || !record.state.is_served() {
        return None;
    }
    if !control.has_authority() {
        return Some(NO_AUTHORITY.to_owned());
    }
    // Without an account no order begins.
    let region = records.acme.get(CertificateId::region().as_str())?;
    region.failures.as_ref().map(|it| it.reason.clone())
}
