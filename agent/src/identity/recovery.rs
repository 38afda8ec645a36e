//! A certificate that expired while the agent was away: the gateway replaces it for the same key, for 30 days.

use std::time::Duration;

use gw_shared::identity::enrollment::CsrRequest;
use http::StatusCode;

use crate::apex_client::apex::Platform;
use crate::apex_client::connection::{GatewayError, Refusal};
use crate::identity::key_pair::{self, Identity, UnfitIdentity};
use crate::identity::state::StateError;
use crate::supervisor::Agent;

#[derive(Debug, thiserror::Error)]
pub(crate) enum RecoveryError {
    #[error(
        "the agent's certificate has expired and the gateway issues no other ({0}): enroll this agent anew with \
         `gw-agent enroll --force`"
    )]
    Refused(Refusal),
    #[error("the agent's certificate has expired and cannot be replaced now: {0}")]
    Gateway(#[from] GatewayError),
    #[error("the agent's certificate has expired and the new one cannot be used: {0}")]
    Unfit(#[from] UnfitIdentity),
    #[error(transparent)]
    State(#[from] StateError),
    #[error(
        "the gateway does not take the certificate that it issued moments ago; the next is asked for in {} seconds",
        .0.as_secs()
    )]
    TooSoon(Duration),
}

/// Replaces the `expired` identity, unless another tunnel of this agent has done so meanwhile. At most once in some
/// minutes, however often the gateway refuses.
pub(crate) async fn recover(agent: &Agent, expired: &Identity) -> Result<Identity, RecoveryError> {
    let _one_at_a_time = agent.recovering.lock().await;
    let (state, to) = (&agent.config.state, &agent.config.enrollment);
    let identity = state.identity()?;
    if identity.certificate != expired.certificate {
        return Ok(identity);
    }
    let wait = agent.issuance.wait();
    if !wait.is_zero() {
        return Err(RecoveryError::TooSoon(wait));
    }
    let key = identity.key_pair()?;
    let csr = key_pair::certificate_request(&key).map_err(UnfitIdentity::Key)?;
    let authorities = state.gateway_authorities()?;
    let platform = Platform::new(&to.gateway_name, &to.gateway_host, to.gateway_port, authorities, &agent.clock)?;
    let request = CsrRequest { csr, agent_id: Some(to.agent_id.clone()) };
    let reply = platform.sign(&request, None).await.map_err(|error| match error {
        GatewayError::Refused(refusal) if is_final(&refusal) => RecoveryError::Refused(refusal),
        error => RecoveryError::Gateway(error),
    })?;
    // Counted even if it cannot be used: it was issued.
    agent.issuance.issued(None);
    state.write_identity(&key_pair::identity_pem(&key, &reply)?)?;
    tracing::info!(not_after = reply.not_after, "the gateway has issued another certificate for the same key");
    agent.desk.services_are(reply.services);
    let identity = state.identity()?;
    agent.issuance.issued(identity.time_left(&agent.clock)?);
    Ok(identity)
}

/// Trying again will not help.
fn is_final(refusal: &Refusal) -> bool {
    matches!(
        refusal.status,
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::NOT_FOUND | StatusCode::GONE
    )
}
