//! Endpoints of the regional apex host: access tokens, the key set, enrollment of agents. Tunnels
//! are told apart by ALPN and do not come here.

mod agents;
mod body;
mod limits;
mod other_nodes;
pub mod scope;
pub mod token;

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gw_base::error::{Error, request_id_value};
use gw_base::mailbox::Post;
use gw_base::process::freeze::Freeze;
use gw_base::service::hostname::Region;
use gw_interface::control_plane::Executor;
use gw_region::owners::ownership::WorkerId;
use gw_shared::http::fields::X_GW_REQUEST_ID;
use gw_shared::http::{Fields, RequestHead};
use gw_shared::identity::enrollment;
use gw_store::Directory;
use gw_telemetry::counters::Counters;
use http::header::{self, HeaderValue};
use http::{Method, Response, StatusCode};

pub(crate) use limits::ApexLimits;
pub use limits::{ApexBucket, ApexCharge};
pub(crate) use other_nodes::ApexNodes;
pub use other_nodes::{ChargeVerdict, NodeQuestion, NodeQuestions, node_questions};

use self::body::Unanswered;
use crate::current::Current;
use crate::http_message::{Outcome, RelayedHead, RequestBody, ResponseSink};
use crate::request_scope::{RequestScope, Stage, refuse, respond};

const JWKS_PATH: &str = "/.well-known/jwks.json";
/// Cache time of the key set: shorter than the time between publication and first use of a key.
const JWKS_CACHE: &str = "public, max-age=300";

/// The apex endpoints of one worker.
pub(crate) struct Apex {
    pub(crate) worker: WorkerId,
    pub(crate) workers: usize,
    pub(crate) region: Region,
    /// Issuer of access tokens: the base URL of the region.
    pub(crate) issuer: String,
    pub(crate) token_lifetime: Duration,
    pub(crate) directory: Rc<Current<Directory>>,
    pub(crate) freeze: Rc<Freeze>,
    pub(crate) executor: Executor,
    pub(crate) limits: ApexLimits,
    /// Mailboxes of the workers that own buckets.
    pub(crate) mailboxes: Arc<dyn Post<Box<ApexCharge>>>,
    /// `None` if this gateway is the only node of its region.
    pub(crate) other_nodes: Option<ApexNodes>,
    pub(crate) counters: Rc<Counters>,
}

impl Apex {
    /// Serves a request to the apex.
    pub(crate) async fn serve(
        &self,
        scope: &RequestScope,
        request: &RequestHead,
        body: &mut impl RequestBody,
        response: &mut impl ResponseSink,
    ) -> Outcome {
        // Bodies for the apex are small: they are asked for before any check.
        let go_on = RelayedHead {
            status: StatusCode::CONTINUE,
            headers: Fields::new(),
            has_body: false,
            upgrade: None,
        };
        if request.expects_continue && response.interim(go_on).await.is_err() {
            return Outcome::CallerGone;
        }
        match self.answer(scope, request, body).await {
            Ok(answer) => respond(scope, answer, response).await,
            Err(Unanswered::Refused(error)) => refuse(scope, &error, response).await,
            Err(Unanswered::CallerGone) => Outcome::CallerGone,
        }
    }

    async fn answer(
        &self,
        scope: &RequestScope,
        request: &RequestHead,
        body: &mut impl RequestBody,
    ) -> Result<Response<Vec<u8>>, Unanswered> {
        let path = request.target.path();
        let mut answer = match path {
            "/oauth/token" => self.serve_token(scope, request, body).await?,
            JWKS_PATH => {
                only(&Method::GET, "GET, HEAD", request)?;
                self.key_set()
            }
            enrollment::ENROLL_PATH => self.enroll(request, scope.client, body).await?,
            enrollment::STATUS_PATH => self.enrollment_status(request, scope.client).await?,
            enrollment::CSR_PATH => self.sign(request, scope.client, body).await?,
            _ => return Err(Error::PathNotFound.into()),
        };
        // Every endpoint except the key set answers authenticated requests only.
        if path != JWKS_PATH && answer.status().is_success() {
            scope.note(Stage::ApexAuthenticated);
        }
        answer
            .headers_mut()
            .insert(X_GW_REQUEST_ID, request_id_value(scope.id));
        Ok(answer)
    }

    fn key_set(&self) -> Response<Vec<u8>> {
        json(
            StatusCode::OK,
            self.directory.get().jwks().to_vec(),
            JWKS_CACHE,
        )
    }
}

/// Refuses other methods than `method`; accepts HEAD where that is GET.
fn only(method: &Method, allowed: &'static str, request: &RequestHead) -> Result<(), Error> {
    let as_good = *method == Method::GET && request.method == Method::HEAD;
    if request.method == *method || as_good {
        Ok(())
    } else {
        Err(Error::MethodNotAllowed(allowed))
    }
}

/// A JSON response.
fn json(status: StatusCode, body: Vec<u8>, cache: &'static str) -> Response<Vec<u8>> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let length = HeaderValue::from(response.body().len());
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    headers.insert(header::CONTENT_LENGTH, length);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static(cache));
    response
}
