//! Enrollment: from a token to a state folder that an agent can run with.

mod options;

use std::io;
use std::time::Duration;

use gw_shared::identity::enrollment::{CsrRequest, EnrollRequest, EnrollmentStatus};
use gw_shared::runtime::{self, Driver, DriverError};
use gw_shared::version::VERSION;
use http::StatusCode;
use rcgen::KeyPair;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

use options::{NewEnrollment, Start};
pub use options::{Options, TokenSource};

use crate::apex_client::apex::Platform;
use crate::apex_client::connection::{GatewayError, Refusal};
use crate::clock::GatewayClock;
use crate::identity::key_pair::{self, UnfitIdentity};
use crate::identity::state::{Enrollment, Pending, StateDir, StateError};
use crate::supervisor::random;
use crate::tunnel::reconnect::Backoff;

/// Longest pause between two looks at the status, whatever the gateway asks for.
const POLL_MAX: Duration = Duration::from_secs(300);

/// Pause before a request is repeated that the gateway had no room for, if it names none.
const OVERLOAD_PAUSE: Duration = Duration::from_secs(60);

/// What came of an enrollment.
#[derive(Debug)]
pub struct Enrolled {
    /// As written to the state folder.
    pub enrollment: Enrollment,
    pub state: StateDir,
    /// When the first certificate expires, RFC 3339. A running agent renews it long before.
    pub not_after: String,
}

#[derive(Debug, thiserror::Error)]
pub enum EnrollError {
    /// Nothing was sent: all that is wrong with what was given.
    #[error("enroll:{}", .0.iter().map(|mistake| format!("\n  {mistake}")).collect::<String>())]
    Usage(Vec<String>),
    #[error(
        "the enrollment token is refused ({0}): it is good once and not for long; have an administrator make a new one"
    )]
    Token(Refusal),
    #[error("the enrollment that was under way is refused ({0}): enroll again with a new token")]
    Refused(Refusal),
    #[error("an administrator has turned this enrollment down")]
    TurnedDown,
    #[error(transparent)]
    Gateway(#[from] GatewayError),
    #[error("the gateway gave no usable certificate: {0}")]
    Unfit(#[from] UnfitIdentity),
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("reactor: {0}")]
    Reactor(io::Error),
}

/// Enrolls an agent, or resumes an enrollment that was interrupted. Returns when it is complete, which can take as long
/// as an administrator takes to approve it; what it waits for is logged.
///
/// Runs a reactor on the calling thread: see [`Driver::block_on`].
pub fn enroll(options: Options) -> Result<Enrolled, EnrollError> {
    let (state, _until_the_end, start) = options.check()?;
    Driver::choose()?.block_on(run(&state, start)).map_err(EnrollError::Reactor)?
}

async fn run(state: &StateDir, start: Start) -> Result<Enrolled, EnrollError> {
    let clock = GatewayClock::default();
    let pending = match start {
        Start::New(new) => begin(state, new, &clock).await?,
        Start::Resume(pending) => *pending,
    };
    let Pending { gateway_name, gateway_host, gateway_port, gateway_ca_pem, .. } = &pending;
    let platform = platform(gateway_name, gateway_host, *gateway_port, gateway_ca_pem, &clock)?;
    let obtained = async {
        wait_for_approval(&platform, &pending).await?;
        let key = KeyPair::from_pem(&pending.key_pem).map_err(UnfitIdentity::Key)?;
        let csr = key_pair::certificate_request(&key).map_err(UnfitIdentity::Key)?;
        let request = CsrRequest { csr, agent_id: None };
        let reply = persist(Through::Outages, async || platform.sign(&request, Some(&pending.enrollment_secret)).await)
            .await
            .map_err(EnrollError::under_way)?;
        Ok((key_pair::identity_pem(&key, &reply)?, reply))
    };
    let (identity_pem, reply) = match obtained.await {
        Ok(obtained) => obtained,
        Err(error) => {
            if matches!(error, EnrollError::Refused(_) | EnrollError::TurnedDown) {
                // Resuming it would meet with the same answer.
                state.remove_pending()?;
            }
            return Err(error);
        }
    };
    let enrollment = Enrollment {
        agent_id: reply.agent_id,
        gateway_name: pending.gateway_name,
        gateway_host: pending.gateway_host,
        gateway_port: pending.gateway_port,
        services: reply.services,
    };
    state.complete(&enrollment, &identity_pem, pending.gateway_ca_pem.as_deref())?;
    Ok(Enrolled { enrollment, state: state.clone(), not_after: reply.not_after })
}

/// Trades the token, which is good once, for an enrollment; what resumes it is stored before anything else happens.
async fn begin(state: &StateDir, new: NewEnrollment, clock: &GatewayClock) -> Result<Pending, EnrollError> {
    let key_pem = KeyPair::generate().map_err(UnfitIdentity::Key)?.serialize_pem();
    let platform = platform(&new.gateway_name, &new.gateway_host, new.gateway_port, &new.gateway_ca_pem, clock)?;
    let request = EnrollRequest { token: new.token.reveal().to_owned(), name: new.name, version: VERSION.to_owned() };
    let reply = persist(Through::Overload, async || platform.enroll(&request).await).await;
    let reply = reply.map_err(|error| match error {
        GatewayError::Refused(refusal) if refusal.status == StatusCode::UNAUTHORIZED => EnrollError::Token(refusal),
        error => error.into(),
    })?;
    let pending = Pending {
        gateway_name: new.gateway_name,
        gateway_host: new.gateway_host,
        gateway_port: new.gateway_port,
        gateway_ca_pem: new.gateway_ca_pem,
        token_id: new.token_id,
        enrollment_id: reply.enrollment_id,
        agent_id: Some(reply.agent_id),
        enrollment_secret: reply.enrollment_secret,
        key_pem,
    };
    state.write_pending(&pending)?;
    Ok(pending)
}

async fn wait_for_approval(platform: &Platform<'_>, pending: &Pending) -> Result<(), EnrollError> {
    let mut told = false;
    loop {
        let reply = persist(Through::Outages, async || {
            platform.status(&pending.enrollment_id, &pending.enrollment_secret).await
        })
        .await
        .map_err(EnrollError::under_way)?;
        match reply.status {
            EnrollmentStatus::Approved => return Ok(()),
            EnrollmentStatus::Revoked => return Err(EnrollError::TurnedDown),
            EnrollmentStatus::Pending => {}
        }
        if !told {
            tracing::info!("{}; if you stop this, `gw-agent enroll` resumes it", pending.waits_for());
            told = true;
        }
        let pause = Duration::from_secs(reply.poll_after_seconds.max(1).into());
        runtime::sleep(pause.min(POLL_MAX)).await;
    }
}

fn platform<'a>(
    name: &str,
    host: &str,
    port: u16,
    ca_pem: &Option<String>,
    clock: &'a GatewayClock,
) -> Result<Platform<'a>, GatewayError> {
    let parse = |pem: &String| CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<Vec<_>, _>>();
    let authorities = ca_pem.as_ref().map(parse).transpose();
    let authorities = authorities.map_err(|error| GatewayError::Certificates(format!("gateway-ca.crt: {error}")))?;
    Platform::new(name, host, port, authorities, clock)
}

/// What a request is repeated through.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Through {
    /// The gateway has no room: it has done nothing.
    Overload,
    /// Whatever may pass by itself: the request can be repeated even if it was done and its answer lost.
    Outages,
}

/// Repeats `request` until it succeeds or fails for good.
async fn persist<R>(
    through: Through,
    mut request: impl AsyncFnMut() -> Result<R, GatewayError>,
) -> Result<R, GatewayError> {
    let mut backoff = Backoff::new();
    loop {
        let error = match request().await {
            Ok(reply) => return Ok(reply),
            Err(error) => error,
        };
        let Some(pause) = pause(&error, through, &mut backoff, random()) else { return Err(error) };
        tracing::warn!(%error, retry_in = ?pause, "enrollment goes on");
        runtime::sleep(pause).await;
    }
}

/// How long to wait before a request is repeated that met with `error`; `None` where that does not help.
fn pause(error: &GatewayError, through: Through, backoff: &mut Backoff, random: f64) -> Option<Duration> {
    match error.refusal() {
        Some(refusal) if refusal.is_overload() => Some(refusal.retry_after.unwrap_or(OVERLOAD_PAUSE)),
        _ if through == Through::Outages && error.is_passing() => Some(backoff.next_delay(random)),
        _ => None,
    }
}

impl Pending {
    /// What an administrator has to do, with both ids of the agent where both are known.
    fn waits_for(&self) -> String {
        let enrollment = &self.enrollment_id;
        match &self.agent_id {
            Some(agent) => format!(
                "waiting for an administrator to approve agent {agent} (enrollment {enrollment}): \
                 `gw-gateway agent approve ACCOUNT {agent}`, or the console's list of agents"
            ),
            None => format!("waiting for an administrator to approve enrollment {enrollment}"),
        }
    }
}

impl EnrollError {
    /// Of a request with the enrollment's own secret.
    fn under_way(error: GatewayError) -> Self {
        match error {
            GatewayError::Refused(refusal)
                if matches!(
                    refusal.status,
                    StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::NOT_FOUND | StatusCode::GONE
                ) =>
            {
                Self::Refused(refusal)
            }
            error => Self::Gateway(error),
        }
    }
}

#[cfg(test)]
mod tests;
