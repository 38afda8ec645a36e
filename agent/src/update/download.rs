//! Download of a program, on a connection that the gateway authenticates like that of a tunnel.

use bytes::BytesMut;
use gw_shared::identity::program::{DOWNLOAD_WITHIN, SignedProgram};
use gw_shared::runtime;
use gw_shared::tunnel::{self, handshake};

use crate::apex_client::connection;
use crate::apex_client::error::GatewayError;
use crate::tunnel::AgentContext;
use crate::tunnel::dial::{self, DialError};

/// Downloads a program. Its content remains to be checked.
pub(super) async fn download(
    agent: &AgentContext,
    program: &SignedProgram,
) -> Result<Vec<u8>, DialError> {
    let state = &agent.config.state;
    let to = &agent.config.enrollment;
    let identity = state.identity()?;
    // Any service that this agent serves: the gateway authenticates the connection as that of a
    // tunnel.
    let services = agent.registry.services();
    let hostname = services
        .keys()
        .next()
        .or(to.services.first())
        .cloned()
        .unwrap_or_default();
    let tls = connection::client_config(
        state.gateway_authorities()?,
        Some(identity.client_auth()),
        tunnel::ALPN,
    )?;
    let downloaded = async {
        let stream = connection::open(
            &agent.config.proxies,
            &to.gateway_host,
            to.gateway_port,
            &hostname,
            tls,
        )
        .await?;
        let request = |proof: Option<&handshake::Proof>| {
            handshake::program_request(&hostname, &program.sha256, proof)
        };
        let size = usize::try_from(program.size).unwrap_or(usize::MAX);
        let mut buffer = BytesMut::new();
        let answer =
            dial::authenticated(&stream, &hostname, &identity, request, size, &mut buffer).await?;
        Ok(answer.into_body()?)
    };
    runtime::timeout(DOWNLOAD_WITHIN, downloaded)
        .await
        .map_err(|_| GatewayError::TimedOut(DOWNLOAD_WITHIN))?
}
