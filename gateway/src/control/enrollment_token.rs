//! Enrollment tokens.

use std::collections::BTreeSet;
use std::time::Duration;

use gw_shared::files;
use gw_shared::id::{AccountId, AgentId, EnrollmentTokenId, ServiceId};
use gw_shared::identity::secret::SecretHash;
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use super::service::{ServiceIdText, checked_list};
use super::{Actor, Control, ControlError, Plan, account, new_secret};
use crate::page::{Page, PageQuery};
use crate::store::{Approval, EnrollmentTokenRecord, RecordId, Records, Step, StoredRecord};

/// Default and longest lifetime of an enrollment token.
const TOKEN_LIFETIME: Duration = Duration::from_secs(600);
/// Time that a used or expired token stays in the list.
pub(super) const TOKEN_SHOWN: Duration = Duration::from_secs(24 * 3600);

const TOKEN_PREFIX: &str = "gw_et_";

/// Lets one agent enroll, once.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = EnrollmentToken)]
pub struct EnrollmentTokenView {
    #[schema(value_type = String)]
    pub id: EnrollmentTokenId,
    #[schema(value_type = String)]
    pub account: AccountId,
    /// What the agent will serve.
    #[schema(value_type = Vec<String>)]
    pub services: BTreeSet<ServiceId>,
    pub approval: Approval,
    #[schema(format = DateTime)]
    pub created_at: String,
    #[schema(format = DateTime)]
    pub expires_at: String,
    /// The agent that used it.
    #[schema(value_type = Option<String>)]
    pub used_by: Option<AgentId>,
}

/// An enrollment token and its text.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = NewEnrollmentTokenCreated)]
pub struct NewEnrollmentTokenView {
    #[serde(flatten)]
    pub enrollment_token: EnrollmentTokenView,
    /// `gw_et_{id}.{secret}`. Shown this once.
    pub token: String,
    /// The gateway as it knows itself: the apex of the region, and the port that it listens on.
    pub gateway_url: String,
    /// PEM of the authority that agents have to trust for the gateway; absent if the certificate is from a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_certificate: Option<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewEnrollmentToken {
    /// Services of the account that the agent will serve, at least one.
    #[schema(min_items = 1, max_items = 500, value_type = Vec<ServiceIdText>)]
    pub services: Vec<String>,
    /// Whether the agent has to wait for an administrator.
    #[serde(default)]
    pub approval: Approval,
    /// 10 minutes unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 600)]
    pub expires_in_seconds: Option<u64>,
}

impl From<&EnrollmentTokenRecord> for EnrollmentTokenView {
    fn from(record: &EnrollmentTokenRecord) -> Self {
        Self {
            id: record.id.clone(),
            account: record.account.clone(),
            services: record.services.clone(),
            approval: record.approval,
            created_at: record.created_at.to_string(),
            expires_at: record.expires_at.to_string(),
            used_by: record.used_by.clone(),
        }
    }
}

impl NewEnrollmentTokenView {
    /// Adds the port that the gateway listens on to the URL.
    pub(crate) fn on_port(mut self, port: u16) -> Self {
        if port != 443 {
            self.gateway_url.push_str(&format!(":{port}"));
        }
        self
    }

    /// The shell command that enrolls an agent on its machine. The token is passed in the environment, because other
    /// users of the machine can read arguments. The command also writes the CA certificate to a file.
    pub fn command(&self) -> String {
        let Self { token, gateway_url, ca_certificate, .. } = self;
        let enroll = format!("GW_ENROLLMENT_TOKEN={token} gw-agent enroll --gateway {gateway_url}");
        match ca_certificate {
            Some(pem) => format!("cat > gw-ca.crt <<'END'\n{}\nEND\n{enroll} --ca-file gw-ca.crt", pem.trim()),
            None => enroll,
        }
    }
}

impl Control {
    /// Creates an enrollment token. Only the returned view holds its text.
    pub fn create_enrollment_token(
        &self,
        actor: &Actor,
        account: &str,
        new: &NewEnrollmentToken,
    ) -> Result<NewEnrollmentTokenView, ControlError> {
        let lifetime = new.expires_in_seconds.map_or(TOKEN_LIFETIME, Duration::from_secs);
        if lifetime.is_zero() || lifetime > TOKEN_LIFETIME {
            let message = format!("must be a whole number from 1 to {}", TOKEN_LIFETIME.as_secs());
            return Err(ControlError::invalid("expires_in_seconds", message));
        }
        let ca_certificate = self.development_ca_pem();
        self.change(actor, |records, now| {
            let account = &account::find(records, account)?.id;
            let services = checked_list(records, account, "services", &new.services)?;
            if services.is_empty() {
                return Err(ControlError::invalid("services", "must name at least one service for the agent"));
            }
            let secret = new_secret();
            let record = EnrollmentTokenRecord {
                id: EnrollmentTokenId::random(),
                account: account.clone(),
                secret: SecretHash::of(secret.reveal()),
                services,
                approval: new.approval,
                created_at: now,
                expires_at: now.after(lifetime),
                used_by: None,
            };
            Ok(Plan {
                action: "enrollment_token.create",
                account: Some(account.clone()),
                target: record.id.to_string(),
                detail: json!(new),
                output: NewEnrollmentTokenView {
                    enrollment_token: (&record).into(),
                    token: format!("{TOKEN_PREFIX}{}.{}", record.id, secret.reveal()),
                    gateway_url: self.region.base_url(),
                    ca_certificate: ca_certificate.clone(),
                },
                steps: vec![Step::Put(StoredRecord::EnrollmentToken(record))],
            })
        })
    }

    /// The CA certificate that agents must trust; `None` if the server certificate comes from a file.
    fn development_ca_pem(&self) -> Option<String> {
        let read = files::read_text(&self.development_ca()?);
        read.inspect_err(|error| tracing::warn!(%error, "cannot read the CA certificate for the enrollment command"))
            .ok()
    }

    pub fn enrollment_tokens(
        &self,
        account: &str,
        query: &PageQuery,
    ) -> Result<Page<EnrollmentTokenView>, ControlError> {
        let state = self.state();
        let account = &account::find(&state.records, account)?.id;
        let tokens = state.records.enrollment_tokens.values().filter(|record| record.account == *account);
        Ok(Page::of(tokens, |record| record.id.as_str(), query, EnrollmentTokenView::from)?)
    }

    pub fn enrollment_token(&self, account: &str, id: &str) -> Result<EnrollmentTokenView, ControlError> {
        find_token(&self.state().records, account, id).map(EnrollmentTokenView::from)
    }

    /// Withdraws a token. An agent that used it stays enrolled.
    pub fn delete_enrollment_token(&self, actor: &Actor, account: &str, id: &str) -> Result<(), ControlError> {
        self.change(actor, |records, _| {
            let record = find_token(records, account, id)?;
            Ok(Plan {
                steps: vec![Step::Delete(RecordId::EnrollmentToken(record.id.clone()))],
                action: "enrollment_token.delete",
                account: Some(record.account.clone()),
                target: record.id.to_string(),
                detail: json!({}),
                output: (),
            })
        })
    }
}

fn find_token<'a>(records: &'a Records, account: &str, id: &str) -> Result<&'a EnrollmentTokenRecord, ControlError> {
    let account = &account::find(records, account)?.id;
    records
        .enrollment_tokens
        .get(id)
        .filter(|record| record.account == *account)
        .ok_or_else(|| ControlError::not_found("enrollment token", id))
}

/// Splits `gw_et_{id}.{secret}` into id and secret.
pub(crate) fn parse_token(token: &str) -> Option<(EnrollmentTokenId, &str)> {
    let (id, secret) = token.strip_prefix(TOKEN_PREFIX)?.split_once('.')?;
    Some((EnrollmentTokenId::new(id).ok()?, secret))
}
