//! Enrollment: turns a token into a state folder with which an agent can run.

mod ensure;
mod options;

use std::io;
use std::time::Duration;

use gw_shared::config::unknown_in_environment;
use gw_shared::error_code::ErrorCode;
use gw_shared::identity::enrollment::{
    CsrRequest, EnrollRequest, EnrollmentStatus, InvalidServices, check_services,
};
use gw_shared::net::tls::pem;
use gw_shared::runtime::{self, Driver, DriverError};
use gw_shared::version::VERSION;
use gw_shared::version::later_members::LaterMembers;
use http::StatusCode;
use rcgen::KeyPair;

pub use ensure::ensure_enrolled;
pub use options::{EnrollmentOptions, TokenSource};
use options::{NewEnrollment, Start};

use crate::apex_client::ApexClient;
use crate::apex_client::error::{ErrorReply, GatewayError};
use crate::backoff::{Backoff, random};
use crate::clock::GatewayClock;
use crate::identity::certificate::{self, UnfitIdentity};
use crate::identity::state::{Enrollment, PendingEnrollment, StateDir, StateError};
use crate::proxy::ProxySettings;
use crate::tls;

/// Longest pause between two polls of the status, whatever the gateway requests.
const POLL_MAX: Duration = Duration::from_secs(300);

/// Pause to which polls slow down, unless the gateway requests a longer one.
const POLL_SLOWED: Duration = Duration::from_secs(60);

/// Pause before a request that the gateway had no capacity for is repeated, unless the gateway
/// names one.
const OVERLOAD_PAUSE: Duration = Duration::from_secs(60);

/// A completed enrollment.
#[derive(Debug)]
pub struct Enrolled {
    /// The content of the state folder.
    pub enrollment: Enrollment,
    pub state: StateDir,
    /// Expiry of the first certificate (RFC 3339). A running agent renews it long before.
    pub not_after: String,
}

#[derive(Debug, thiserror::Error)]
pub enum EnrollError {
    /// All mistakes in the options. Nothing was sent.
    #[error("enroll:{}", .0.iter().map(|mistake| format!("\n  {mistake}")).collect::<String>())]
    Usage(Vec<String>),
    #[error(
        "the gateway refused the enrollment token ({0}); a token is valid for a limited time and \
         number of agents, and `gw-gateway enrollment-token create ACCOUNT --service SERVICE` \
         makes one"
    )]
    Token(ErrorReply),
    /// The URL of a service was given.
    #[error(
        "--gateway: {given} is the URL of a service, to which callers send requests, not that of \
         the gateway: use {gateway}"
    )]
    ServiceUrl { given: String, gateway: String },
    /// The gateway's certificate is of another authority than those given.
    #[error(
        "the gateway's certificate at {at} is not trusted: no authority in --ca-file issued it \
         ({reason}); give the file of the one that did: {}, or that of your own authority",
        tls::DEVELOPMENT_CA
    )]
    OtherAuthority { at: String, reason: String },
    #[error("the gateway refused to continue the enrollment ({0}): enroll again with a new token")]
    Refused(ErrorReply),
    #[error("an administrator has rejected this enrollment")]
    Rejected,
    /// URLs of the gateway at which the agent is enrolled, and of the one in the options.
    #[error(
        "{folder} contains an agent that is enrolled at {enrolled}, not at {given}: use another \
         folder (--state-dir) for a second agent, or replace this one with `gw-agent enroll \
         --force`"
    )]
    OtherGateway {
        folder: String,
        enrolled: String,
        given: String,
    },
    #[error(transparent)]
    Gateway(#[from] GatewayError),
    #[error("the certificate issued by the gateway cannot be used: {0}")]
    Unfit(#[from] UnfitIdentity),
    #[error(
        "the gateway assigns services to this agent that cannot be its own: {0}; check --gateway, \
         which names the apex"
    )]
    Services(#[from] InvalidServices),
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("cannot start the reactor: {0}")]
    Reactor(io::Error),
}

/// Enrolls an agent, or resumes an interrupted enrollment. Returns when the enrollment is complete,
/// which usually means after an administrator has approved it; logs while it waits for that.
///
/// `environment` looks up the variables of the proxy. Runs a reactor on the calling thread: see
/// [`Driver::block_on`].
pub fn enroll(
    options: EnrollmentOptions,
    environment: impl Fn(&str) -> Option<String>,
) -> Result<Enrolled, EnrollError> {
    for unknown in unknown_in_environment() {
        tracing::warn!("{unknown}");
    }
    let proxies = ProxySettings::of_environment(&environment).map_err(EnrollError::Usage)?;
    let (state, _lock, start) = options.check(&proxies)?;
    Driver::choose()?
        .block_on(run(&state, &proxies, start))
        .map_err(EnrollError::Reactor)?
}

async fn run(
    state: &StateDir,
    proxies: &ProxySettings,
    start: Start,
) -> Result<Enrolled, EnrollError> {
    let clock = GatewayClock::default();
    let pending = match start {
        Start::New(new) => begin(state, *new, &clock).await?,
        Start::Resume(pending) => *pending,
    };
    let PendingEnrollment {
        gateway_name,
        gateway_host,
        gateway_port,
        gateway_ca_pem,
        ..
    } = &pending;
    let apex = apex_client(
        gateway_name,
        gateway_host,
        *gateway_port,
        proxies,
        gateway_ca_pem,
        &clock,
    )?;
    let obtained = async {
        wait_for_approval(&apex, &pending).await?;
        let key = KeyPair::from_pem(&pending.key_pem).map_err(UnfitIdentity::Key)?;
        let csr = certificate::certificate_request(&key).map_err(UnfitIdentity::Key)?;
        let request = CsrRequest {
            csr,
            agent_id: None,
        };
        let reply = retry(RetryOn::Outage, async || {
            apex.sign(&request, Some(&pending.enrollment_secret)).await
        })
        .await
        .map_err(EnrollError::resumed)?;
        Ok((certificate::identity_pem(&key, &reply)?, reply))
    };
    let (identity_pem, reply) = match obtained.await {
        Ok(obtained) => obtained,
        Err(error) => {
            if matches!(error, EnrollError::Refused(_) | EnrollError::Rejected) {
                // The gateway would refuse a resumed enrollment in the same way.
                state.remove_pending()?;
            }
            return Err(error);
        }
    };
    check_services(&reply.services, gateway_name)?;
    let enrollment = Enrollment {
        agent_id: reply.agent_id,
        gateway_name: pending.gateway_name,
        gateway_host: pending.gateway_host,
        gateway_port: pending.gateway_port,
        services: reply.services,
        later: LaterMembers::default(),
    };
    state.complete(
        &enrollment,
        &identity_pem,
        pending.gateway_ca_pem.as_deref(),
    )?;
    Ok(Enrolled {
        enrollment,
        state: state.clone(),
        not_after: reply.not_after,
    })
}

/// Exchanges the token, which may be valid only once, for an enrollment, and stores it so that it
/// can be resumed.
async fn begin(
    state: &StateDir,
    new: NewEnrollment,
    clock: &GatewayClock,
) -> Result<PendingEnrollment, EnrollError> {
    let key_pem = KeyPair::generate()
        .map_err(UnfitIdentity::Key)?
        .serialize_pem();
    let name = &new.gateway_name;
    let host = &new.gateway_host;
    let port = new.gateway_port;
    let apex = apex_client(name, host, port, &new.proxies, &new.gateway_ca_pem, clock)?;
    let request = EnrollRequest {
        token: new.token.reveal().to_owned(),
        name: new.name,
        version: VERSION.to_owned(),
    };
    let reply = retry(RetryOn::Overload, async || apex.enroll(&request).await).await;
    let reply = reply.map_err(|error| match error {
        GatewayError::Refused(refusal)
            if refusal.status == StatusCode::UNAUTHORIZED && !refusal.text.is_empty() =>
        {
            EnrollError::Token(refusal)
        }
        // Only the hostname of a service answers so.
        GatewayError::Refused(refusal)
            if matches!(
                refusal.code,
                Some(ErrorCode::AuthRequired | ErrorCode::ServiceNotFound)
            ) =>
        {
            let apex = name.split_once('.').map_or("", |(_, apex)| apex);
            EnrollError::ServiceUrl {
                given: format!("https://{name}:{port}"),
                gateway: format!("https://{apex}:{port}"),
            }
        }
        GatewayError::Untrusted { at, reason } if new.gateway_ca_pem.is_some() => {
            EnrollError::OtherAuthority { at, reason }
        }
        error => error.into(),
    })?;
    let pending = PendingEnrollment {
        gateway_name: new.gateway_name,
        gateway_host: new.gateway_host,
        gateway_port: new.gateway_port,
        gateway_ca_pem: new.gateway_ca_pem,
        token_id: new.token_id,
        enrollment_id: reply.enrollment_id,
        agent_id: Some(reply.agent_id),
        enrollment_secret: reply.enrollment_secret,
        key_pem,
        later: LaterMembers::default(),
    };
    state.write_pending(&pending)?;
    Ok(pending)
}

async fn wait_for_approval(
    apex: &ApexClient<'_>,
    pending: &PendingEnrollment,
) -> Result<(), EnrollError> {
    let mut logged = false;
    let mut waited = Duration::ZERO;
    loop {
        let reply = retry(RetryOn::Outage, async || {
            apex.status(&pending.enrollment_id, &pending.enrollment_secret)
                .await
        })
        .await
        .map_err(EnrollError::resumed)?;
        match reply.status {
            EnrollmentStatus::Approved => return Ok(()),
            EnrollmentStatus::Revoked => return Err(EnrollError::Rejected),
            EnrollmentStatus::Pending => {}
        }
        if !logged {
            tracing::info!(
                "{}; run the same command again to resume after an interruption",
                pending.required_approval()
            );
            logged = true;
        }
        let pause = poll_pause(Duration::from_secs(reply.poll_after_seconds.into()), waited);
        waited += pause;
        runtime::sleep(pause).await;
    }
}

/// Pause before the next poll: a tenth of the time waited so far, at most a minute, or what the
/// gateway requests if that is longer.
fn poll_pause(requested: Duration, waited: Duration) -> Duration {
    requested
        .max((waited / 10).min(POLL_SLOWED))
        .clamp(Duration::from_secs(1), POLL_MAX)
}

fn apex_client<'a>(
    name: &str,
    host: &str,
    port: u16,
    proxies: &'a ProxySettings,
    ca_pem: &Option<String>,
    clock: &'a GatewayClock,
) -> Result<ApexClient<'a>, GatewayError> {
    let parse = |pem: &String| pem::certificates(pem.as_bytes());
    let authorities = ca_pem.as_ref().map(parse).transpose();
    let authorities = authorities
        .map_err(|error| GatewayError::Certificates(format!("gateway-ca.crt: {error}")))?;
    ApexClient::new(name, host, port, proxies, authorities, clock)
}

/// Errors after which a request is repeated.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RetryOn {
    /// The gateway has no capacity and has not processed the request.
    Overload,
    /// Any transient error. For requests that are idempotent, because an answer may have been lost.
    Outage,
}

/// Repeats `request` until it succeeds or fails with an error that `retry_on` does not include.
async fn retry<R>(
    retry_on: RetryOn,
    mut request: impl AsyncFnMut() -> Result<R, GatewayError>,
) -> Result<R, GatewayError> {
    let mut backoff = Backoff::default();
    loop {
        let error = match request().await {
            Ok(reply) => return Ok(reply),
            Err(error) => error,
        };
        let Some(pause) = pause(&error, retry_on, &mut backoff, random()) else {
            return Err(error);
        };
        tracing::warn!(%error, retry_in = ?pause, "the request failed and will be repeated");
        runtime::sleep(pause).await;
    }
}

/// Pause before a request that failed with `error` is repeated; `None` if it is not repeated.
fn pause(
    error: &GatewayError,
    retry_on: RetryOn,
    backoff: &mut Backoff,
    random: f64,
) -> Option<Duration> {
    match error.refusal() {
        Some(refusal) if refusal.is_overload() => Some(
            refusal
                .retry_after
                .unwrap_or(OVERLOAD_PAUSE)
                .max(backoff.next_delay(random)),
        ),
        _ if retry_on == RetryOn::Outage && error.is_transient() => {
            Some(backoff.next_delay(random))
        }
        _ => None,
    }
}

impl PendingEnrollment {
    /// The approval that the enrollment waits for, for the log.
    fn required_approval(&self) -> String {
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
    /// Converts the error of a request that was authenticated with the enrollment's secret.
    fn resumed(error: GatewayError) -> Self {
        match error {
            GatewayError::Refused(refusal) if refusal.is_final() => Self::Refused(refusal),
            error => Self::Gateway(error),
        }
    }
}

#[cfg(test)]
mod tests;
