//! Client of the region's apex: enrollment and certificate requests. Each request has its own
//! connection and presents no client certificate.

pub(crate) mod connection;
pub(crate) mod error;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::BytesMut;
use gw_shared::http::{ConnectionField, Fields, Framing, head};
use gw_shared::id::EnrollmentId;
use gw_shared::identity::enrollment::{
    CSR_PATH, CertificateReply, CsrRequest, ENROLL_PATH, EnrollReply, EnrollRequest, STATUS_PATH,
    StatusReply,
};
use gw_shared::runtime;
use http::Method;
use http::header::{self, HeaderValue};
use http::uri::PathAndQuery;
use rustls::ClientConfig;
use rustls_pki_types::CertificateDer;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::clock::{self, GatewayClock};
use crate::proxy::ProxySettings;
use connection::Reply;
use error::GatewayError;

/// Time limit from name resolution to the end of the answer.
const TIME_LIMIT: Duration = Duration::from_secs(20);

/// Time limits of name resolution and of a TCP connection. Together shorter than those of whole
/// exchanges, so that the error says which step has failed.
const RESOLVE_LIMIT: Duration = Duration::from_secs(10);
const CONNECT_LIMIT: Duration = Duration::from_secs(9);

/// The apex of a region.
pub(crate) struct ApexClient<'a> {
    /// Host name of the apex, which its certificate must have.
    name: String,
    /// Host and port to connect to.
    host: String,
    port: u16,
    proxies: &'a ProxySettings,
    tls: Arc<ClientConfig>,
    /// Set from the `Date` of each answer.
    clock: &'a GatewayClock,
}

impl<'a> ApexClient<'a> {
    /// `authorities` are the trusted roots, or `None` for those of the system.
    pub(crate) fn new(
        name: &str,
        host: &str,
        port: u16,
        proxies: &'a ProxySettings,
        authorities: Option<Vec<CertificateDer<'static>>>,
        clock: &'a GatewayClock,
    ) -> Result<Self, GatewayError> {
        let tls = connection::client_config(authorities, None, b"http/1.1")?;
        Ok(Self {
            name: name.to_owned(),
            host: host.to_owned(),
            port,
            proxies,
            tls,
            clock,
        })
    }

    pub(crate) async fn enroll(
        &self,
        request: &EnrollRequest,
    ) -> Result<EnrollReply, GatewayError> {
        self.call(
            &Method::POST,
            PathAndQuery::from_static(ENROLL_PATH),
            None,
            Some(request),
        )
        .await
    }

    pub(crate) async fn status(
        &self,
        id: &EnrollmentId,
        secret: &str,
    ) -> Result<StatusReply, GatewayError> {
        // Ids consist of letters, digits and `_`, so the path is always valid.
        let target = PathAndQuery::try_from(format!("{STATUS_PATH}?enrollment_id={id}"))
            .unwrap_or_else(|_| PathAndQuery::from_static(STATUS_PATH));
        self.call(&Method::GET, target, Some(secret), None::<&()>)
            .await
    }

    /// Requests a certificate. `secret` is the enrollment's, or `None` if the request's signature
    /// is the proof.
    pub(crate) async fn sign(
        &self,
        request: &CsrRequest,
        secret: Option<&str>,
    ) -> Result<CertificateReply, GatewayError> {
        self.call(
            &Method::POST,
            PathAndQuery::from_static(CSR_PATH),
            secret,
            Some(request),
        )
        .await
    }

    /// The time in the `Date` field of any answer of the apex; `None` if the answer has none.
    pub(crate) async fn date(&self) -> Result<Option<SystemTime>, GatewayError> {
        let target = PathAndQuery::from_static("/.well-known/jwks.json");
        let reply = self
            .send(&Method::GET, &target, &Fields::new(), Framing::None, &[])
            .await?;
        Ok(clock::date(&reply.headers))
    }

    /// Sends a request with a JSON body and parses the JSON body of the answer.
    async fn call<R: DeserializeOwned>(
        &self,
        method: &Method,
        target: PathAndQuery,
        bearer: Option<&str>,
        body: Option<&impl Serialize>,
    ) -> Result<R, GatewayError> {
        let mut headers = Fields::new();
        if let Some(bearer) = bearer
            // A secret that is no valid field value is not sent; the gateway then answers 401.
            && let Ok(mut value) = HeaderValue::try_from(format!("Bearer {bearer}"))
        {
            value.set_sensitive(true);
            headers.insert(header::AUTHORIZATION, value);
        }
        let (body, framing) = match body {
            Some(body) => {
                headers.insert(
                    header::CONTENT_TYPE,
                    HeaderValue::from_static("application/json"),
                );
                let body = serde_json::to_vec(body)?;
                let framing = Framing::Length(body.len() as u64);
                (body, framing)
            }
            None => (Vec::new(), Framing::None),
        };
        let reply = self.send(method, &target, &headers, framing, &body).await?;
        Ok(serde_json::from_slice(&reply.into_body()?)?)
    }

    async fn send(
        &self,
        method: &Method,
        target: &PathAndQuery,
        headers: &Fields,
        framing: Framing,
        body: &[u8],
    ) -> Result<Reply, GatewayError> {
        let mut request = Vec::with_capacity(512 + body.len());
        head::write_request(
            &mut request,
            method,
            target,
            self.name.as_bytes(),
            headers,
            framing,
            ConnectionField::Close,
        );
        request.extend_from_slice(body);
        let exchange = async {
            let stream = connection::open(
                self.proxies,
                &self.host,
                self.port,
                &self.name,
                Arc::clone(&self.tls),
            )
            .await?;
            let reply = connection::exchange(&stream, &request, &mut BytesMut::new()).await;
            // The reactor may end before it closes a socket that is only dropped.
            drop(stream.close().await);
            reply
        };
        let reply = runtime::timeout(TIME_LIMIT, exchange)
            .await
            .map_err(|_| GatewayError::TimedOut(TIME_LIMIT))??;
        self.clock.set_from_headers(&reply.headers);
        Ok(reply)
    }
}
