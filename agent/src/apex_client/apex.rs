//! The region's apex as an agent uses it: enrollment and certificates, each request on a connection of its own and
//! without a client certificate.

use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use gw_shared::http::{Connection, Framing, head};
use gw_shared::id::EnrollmentId;
use gw_shared::identity::enrollment::{
    CSR_PATH, CertificateReply, CsrRequest, ENROLL_PATH, EnrollReply, EnrollRequest, STATUS_PATH, StatusReply,
};
use gw_shared::runtime;
use http::Method;
use http::header::{self, HeaderMap, HeaderValue};
use http::uri::PathAndQuery;
use rustls::ClientConfig;
use rustls_pki_types::CertificateDer;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::apex_client::connection::{self, GatewayError};
use crate::clock::GatewayClock;

/// From name resolution to the end of the answer.
const TIME_LIMIT: Duration = Duration::from_secs(20);

/// The apex of a region.
pub(crate) struct Platform<'a> {
    /// Host name of the apex: who must answer.
    name: String,
    /// Where to connect to.
    host: String,
    port: u16,
    tls: Arc<ClientConfig>,
    /// Told the time that its answers give.
    clock: &'a GatewayClock,
}

impl<'a> Platform<'a> {
    pub(crate) fn new(
        name: &str,
        host: &str,
        port: u16,
        authorities: Option<Vec<CertificateDer<'static>>>,
        clock: &'a GatewayClock,
    ) -> Result<Self, GatewayError> {
        let tls = connection::client_config(authorities, None, b"http/1.1")?;
        Ok(Self { name: name.to_owned(), host: host.to_owned(), port, tls, clock })
    }

    pub(crate) async fn enroll(&self, request: &EnrollRequest) -> Result<EnrollReply, GatewayError> {
        self.call(&Method::POST, PathAndQuery::from_static(ENROLL_PATH), None, Some(request)).await
    }

    pub(crate) async fn status(&self, id: &EnrollmentId, secret: &str) -> Result<StatusReply, GatewayError> {
        // An id is of letters, digits and `_`: the fallback is never taken.
        let target = PathAndQuery::try_from(format!("{STATUS_PATH}?enrollment_id={id}"))
            .unwrap_or_else(|_| PathAndQuery::from_static(STATUS_PATH));
        self.call(&Method::GET, target, Some(secret), None::<&()>).await
    }

    /// Has a certificate issued; `secret` is the enrollment's, or none where the request's signature is the proof.
    pub(crate) async fn sign(
        &self,
        request: &CsrRequest,
        secret: Option<&str>,
    ) -> Result<CertificateReply, GatewayError> {
        self.call(&Method::POST, PathAndQuery::from_static(CSR_PATH), secret, Some(request)).await
    }

    async fn call<R: DeserializeOwned>(
        &self,
        method: &Method,
        target: PathAndQuery,
        bearer: Option<&str>,
        body: Option<&impl Serialize>,
    ) -> Result<R, GatewayError> {
        let mut headers = HeaderMap::new();
        if let Some(bearer) = bearer
            // The gateway made it up; if no header can hold it, the gateway's 401 says so.
            && let Ok(mut value) = HeaderValue::try_from(format!("Bearer {bearer}"))
        {
            value.set_sensitive(true);
            headers.insert(header::AUTHORIZATION, value);
        }
        let (body, framing) = match body {
            Some(body) => {
                headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
                let body = serde_json::to_vec(body)?;
                let framing = Framing::Length(body.len() as u64);
                (body, framing)
            }
            None => (Vec::new(), Framing::None),
        };
        let mut request = Vec::with_capacity(512 + body.len());
        let name = self.name.as_bytes();
        head::write_request(&mut request, method, &target, name, &headers, framing, Connection::Close);
        request.extend_from_slice(&body);
        let answered = async {
            let stream = connection::open(&self.host, self.port, &self.name, Arc::clone(&self.tls)).await?;
            let reply = connection::exchange(&stream, &request, &mut BytesMut::new()).await;
            // Here and now: the reactor may end before it gets to closing a dropped socket.
            drop(stream.close().await);
            reply
        };
        let reply = runtime::timeout(TIME_LIMIT, answered).await.map_err(|_| GatewayError::TimedOut(TIME_LIMIT))??;
        self.clock.hear(&reply.headers);
        Ok(serde_json::from_slice(&reply.into_body()?)?)
    }
}
