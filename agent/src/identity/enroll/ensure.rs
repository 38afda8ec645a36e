//! Enrollment of an agent that may be enrolled already.

use super::options::parse_gateway;
use super::{EnrollError, EnrollmentOptions, enroll};
use crate::identity::state::{Enrollment, StateDir};

/// Enrolls an agent, or resumes an interrupted enrollment, unless the state folder contains an
/// enrolled agent. That agent must be enrolled at `options.gateway`, if given; the token is not
/// used then. With `options.force`, that agent is replaced by another one at the same gateway.
/// `environment` is that of [`enroll`].
pub fn ensure_enrolled(
    options: EnrollmentOptions,
    environment: impl Fn(&str) -> Option<String>,
) -> Result<(), EnrollError> {
    let state = StateDir::new(&options.state_dir);
    if !state.is_enrolled() {
        return enroll(options, environment).map(drop);
    }
    if options.force {
        return enroll(at_same_gateway(options, &state)?, environment).map(drop);
    }
    let Enrollment {
        agent_id,
        gateway_name,
        gateway_host,
        gateway_port,
        services,
        ..
    } = state.enrollment()?;
    if let Some(url) = &options.gateway {
        let (name, port) = parse_gateway(url)
            .map_err(|mistake| EnrollError::Usage(vec![format!("--gateway: {mistake}")]))?;
        let (host, port) = options.connect_to.unwrap_or_else(|| (name.clone(), port));
        if (&name, &host, port) != (&gateway_name, &gateway_host, gateway_port) {
            return Err(EnrollError::OtherGateway {
                folder: state.path().display().to_string(),
                enrolled: format!("https://{gateway_name}:{gateway_port}"),
                given: format!("https://{name}:{port}"),
            });
        }
    }
    if options.token.is_some() {
        let folder = state.path().display();
        let services = services.join(", ");
        tracing::warn!(
            %agent_id,
            "the enrollment token is not used: {folder} has an agent that is enrolled already, for \
             {services}; for another agent on this machine, use another folder (--state-dir)"
        );
    }
    Ok(())
}

/// Options of another enrollment at the gateway of the enrolled agent, unless they name one.
fn at_same_gateway(
    options: EnrollmentOptions,
    state: &StateDir,
) -> Result<EnrollmentOptions, EnrollError> {
    if options.gateway.is_some() {
        return Ok(options);
    }
    let Enrollment {
        gateway_name,
        gateway_host,
        gateway_port,
        ..
    } = state.enrollment()?;
    Ok(EnrollmentOptions {
        gateway: Some(format!("https://{gateway_name}:{gateway_port}")),
        connect_to: Some((gateway_host, gateway_port)),
        ca_file: options.ca_file.or_else(|| state.gateway_authorities_file()),
        ..options
    })
}
