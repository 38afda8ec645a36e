//! Agent enrollment and certificate signing (`POST /enroll`, `GET /enroll/status`, `POST /csr`).

use std::net::IpAddr;

use gw_shared::http::{Fields, RequestHead};
use gw_shared::identity::enrollment::{CsrRequest, EnrollRequest};
use gw_shared::identity::secret::Secret;
use http::header;
use http::{Method, Response, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::address_limits::Endpoint;
use super::{Apex, body, json, only};
use crate::auth::bearer;
use crate::control::{AgentProof, Control, ControlError};
use crate::error::Error;
use crate::http_message::{CallerGone, RequestBody};
use crate::strict_json;

impl Apex {
    pub(super) async fn enroll(
        &self,
        request: &RequestHead,
        client: IpAddr,
        body: &mut impl RequestBody,
    ) -> Result<Result<Response<Vec<u8>>, Error>, CallerGone> {
        let enrollment: EnrollRequest = match self.charge_and_read(request, client, body).await? {
            Ok(enrollment) => enrollment,
            Err(error) => return Ok(Err(error)),
        };
        let reply = self.change(move |control| control.enroll(&enrollment)).await;
        Ok(reply.map(|reply| answer(StatusCode::CREATED, &reply)))
    }

    pub(super) async fn enrollment_status(
        &self,
        request: &RequestHead,
        client: IpAddr,
    ) -> Result<Response<Vec<u8>>, Error> {
        only(&Method::GET, "GET, HEAD", request)?;
        self.charge(Endpoint::Enrollment, client).await?;
        let id =
            enrollment_id(request).ok_or_else(|| Error::InvalidRequest("?enrollment_id= is missing".to_owned()))?;
        let secret = enrollment_secret(&request.headers).ok_or(Error::EnrollmentInvalid)?;
        let reply = self.executor.run(move |control| control.enrollment_status(&id, &secret)).await?;
        Ok(answer(StatusCode::OK, &reply))
    }

    pub(super) async fn sign(
        &self,
        request: &RequestHead,
        client: IpAddr,
        body: &mut impl RequestBody,
    ) -> Result<Result<Response<Vec<u8>>, Error>, CallerGone> {
        let CsrRequest { csr, agent_id } = match self.charge_and_read(request, client, body).await? {
            Ok(csr) => csr,
            Err(error) => return Ok(Err(error)),
        };
        let proof = match (enrollment_secret(&request.headers), agent_id) {
            (Some(_), Some(_)) => {
                let message = "send the bearer of an enrollment or an agent_id, not both".to_owned();
                return Ok(Err(Error::InvalidRequest(message)));
            }
            (Some(secret), None) => AgentProof::Enrollment { id: enrollment_id(request), secret },
            (None, Some(agent_id)) => AgentProof::OldKey(agent_id),
            (None, None) => return Ok(Err(Error::EnrollmentInvalid)),
        };
        let reply = self.change(move |control| control.sign(&proof, &csr)).await;
        Ok(reply.map(|reply| answer(StatusCode::OK, &reply)))
    }

    /// Makes a change of the records, and waits until the other nodes use it: the agent's next request may arrive at any of
    /// them.
    async fn change<T: Send + 'static>(
        &self,
        change: impl FnOnce(&Control) -> Result<T, ControlError> + Send + 'static,
    ) -> Result<T, Error> {
        let (reply, revision) = self.executor.run(move |control| Ok((change(control)?, control.revision()))).await?;
        if let Some(nodes) = &self.other_nodes {
            nodes.use_revision(revision).await;
        }
        Ok(reply)
    }

    /// Checks the method and the limit of the address, then reads the body as JSON.
    async fn charge_and_read<T: DeserializeOwned>(
        &self,
        request: &RequestHead,
        client: IpAddr,
        body: &mut impl RequestBody,
    ) -> Result<Result<T, Error>, CallerGone> {
        if let Err(error) = only(&Method::POST, "POST", request) {
            return Ok(Err(error));
        }
        if let Err(error) = self.charge(Endpoint::Enrollment, client).await {
            return Ok(Err(error));
        }
        let read = body::read(body).await?;
        Ok(read.and_then(|body| {
            strict_json::parse(&body).map_err(|error| Error::InvalidRequest(format!("request body: {error}")))
        }))
    }
}

/// `?enrollment_id=…`
fn enrollment_id(request: &RequestHead) -> Option<String> {
    let query = request.target.query().unwrap_or_default();
    let (_, id) = form_urlencoded::parse(query.as_bytes()).find(|(name, _)| name == "enrollment_id")?;
    Some(id.into_owned())
}

/// `Authorization: Bearer {enrollment_secret}`
fn enrollment_secret(headers: &Fields) -> Option<Secret> {
    headers.get(header::AUTHORIZATION).and_then(bearer).map(|secret| Secret::new(secret.to_owned()))
}

fn answer(status: StatusCode, reply: &impl Serialize) -> Response<Vec<u8>> {
    // Structs of strings always serialize.
    json(status, serde_json::to_vec(reply).unwrap_or_default(), "no-store")
}
