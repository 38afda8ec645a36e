//! Replacement of a certificate that has expired. The gateway issues a new one for the same key, up
//! to 30 days after.

use std::time::Duration;

use gw_shared::error_code::ErrorCode;
use gw_shared::identity::enrollment::CsrRequest;

use crate::apex_client::ApexClient;
use crate::apex_client::error::{ErrorReply, GatewayError};
use crate::identity::certificate::{self, Identity, UnfitIdentity};
use crate::identity::renewal::CertificateManager;
use crate::identity::state::StateError;

#[derive(Debug, thiserror::Error)]
pub(crate) enum RecoveryError {
    #[error(
        "the gateway does not know this agent: its record was deleted, as that of an ephemeral \
         agent is after an hour without a tunnel; enroll it again with a token (`gw-agent enroll \
         --force`). `gw-agent run` and `gw-agent http` do so themselves if they have one"
    )]
    Deleted,
    #[error(
        "the agent's certificate has expired and the gateway issues no other ({0}): enroll this \
         agent again with `gw-agent enroll --force`"
    )]
    Refused(ErrorReply),
    #[error("the agent's certificate has expired and cannot be replaced now: {0}")]
    Gateway(#[from] GatewayError),
    #[error("the agent's certificate has expired and the new one cannot be used: {0}")]
    Unfit(#[from] UnfitIdentity),
    #[error(transparent)]
    State(#[from] StateError),
    #[error(
        "the gateway does not accept the certificate that it has just issued; the agent requests \
         the next one in {} seconds",
        .0.as_secs()
    )]
    TooSoon(Duration),
}

impl CertificateManager {
    /// Replaces the `expired` identity, unless another tunnel of this agent has done so meanwhile.
    /// The rate limit of [`RequestInterval`](super::request_interval::RequestInterval) applies
    /// however often the gateway refuses.
    pub(crate) async fn recover(&self, expired: &Identity) -> Result<Identity, RecoveryError> {
        let _one_at_a_time = self.recovery.lock().await;
        let state = &self.state;
        let to = &self.enrollment;
        let identity = state.identity()?;
        if identity.certificate != expired.certificate {
            return Ok(identity);
        }
        let wait = self.request_interval.wait();
        if !wait.is_zero() {
            return Err(RecoveryError::TooSoon(wait));
        }
        let key = identity.key_pair()?;
        let csr = certificate::certificate_request(&key).map_err(UnfitIdentity::Key)?;
        let authorities = state.gateway_authorities()?;
        let name = &to.gateway_name;
        let host = &to.gateway_host;
        let port = to.gateway_port;
        let apex = ApexClient::new(name, host, port, &self.proxies, authorities, &self.clock)?;
        let request = CsrRequest {
            csr,
            agent_id: Some(to.agent_id.clone()),
        };
        let reply = apex
            .sign(&request, None)
            .await
            .map_err(|error| match error {
                GatewayError::Refused(refusal) if refusal.code == Some(ErrorCode::AgentUnknown) => {
                    RecoveryError::Deleted
                }
                GatewayError::Refused(refusal) if refusal.is_final() => {
                    RecoveryError::Refused(refusal)
                }
                error => RecoveryError::Gateway(error),
            })?;
        // Recorded before the certificate is checked: the gateway has issued it in any case.
        self.request_interval.record(None);
        state.write_identity(&certificate::identity_pem(&key, &reply)?)?;
        tracing::info!(
            not_after = reply.not_after,
            "the gateway has issued another certificate for the same key"
        );
        self.services.set(reply.services);
        let identity = state.identity()?;
        self.request_interval
            .record(identity.time_left(&self.clock)?);
        Ok(identity)
    }
}
