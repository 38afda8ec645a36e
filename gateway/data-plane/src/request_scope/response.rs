//! Responses of the gateway itself.

use gw_base::error::Error;
use http::{Response, header};

use super::{RequestScope, Stage};
use crate::http_message::{Outcome, ResponseSink, dated};

/// Sends a response of the gateway.
pub(crate) async fn respond(
    scope: &RequestScope,
    answer: Response<Vec<u8>>,
    response: &mut impl ResponseSink,
) -> Outcome {
    scope.note(Stage::GatewayResponse {
        status: answer.status(),
        bytes: answer.body().len(),
    });
    response.begin_own_response(true);
    let sent = response.whole(dated(answer)).await;
    if sent.is_ok() {
        Outcome::Complete
    } else {
        Outcome::CallerGone
    }
}

/// Sends an error of the gateway.
pub(crate) async fn refuse(
    scope: &RequestScope,
    error: &Error,
    response: &mut impl ResponseSink,
) -> Outcome {
    scope.note(Stage::Refused(error));
    let agents_tried = scope.progress.borrow().agents_failed();
    let rate = scope.service.get().map(|service| service.settings.rate);
    let mut refusal = error.response_about(scope.id, agents_tried, rate);
    if let Some(policy) = scope.transport_security() {
        refusal
            .headers_mut()
            .insert(header::STRICT_TRANSPORT_SECURITY, policy);
    }
    let outcome = respond(scope, refusal, response).await;
    if outcome == Outcome::Complete && error.is_before_authentication() {
        Outcome::Refused
    } else {
        outcome
    }
}
