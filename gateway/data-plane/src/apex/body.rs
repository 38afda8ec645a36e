//! Reads a small request body whole.

use crate::limits;
use gw_base::error::Error;
use gw_shared::http::Part;
use gw_shared::runtime;

use crate::http_message::{BodyError, CallerGone, RequestBody};

/// Why an endpoint has no answer.
pub(super) enum Unanswered {
    Refused(Error),
    CallerGone,
}

impl From<Error> for Unanswered {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

impl From<CallerGone> for Unanswered {
    fn from(CallerGone: CallerGone) -> Self {
        Self::CallerGone
    }
}

/// Reads a body of at most [`limits::APEX_BODY`] bytes within [`limits::APEX_BODY_WITHIN`].
pub(super) async fn read(body: &mut impl RequestBody) -> Result<Vec<u8>, Unanswered> {
    runtime::timeout(limits::APEX_BODY_WITHIN, read_whole(body))
        .await
        .unwrap_or_else(|_| {
            let late = "the request body took too long".to_owned();
            Err(Error::InvalidRequest(late).into())
        })
}

async fn read_whole(body: &mut impl RequestBody) -> Result<Vec<u8>, Unanswered> {
    let mut whole = Vec::new();
    loop {
        match body.part().await {
            Ok(Part::Data(data)) if whole.len() + data.len() > limits::APEX_BODY => {
                return Err(Error::BodyTooLarge(limits::APEX_BODY).into());
            }
            Ok(Part::Data(data)) => whole.extend_from_slice(&data),
            Ok(Part::Trailers(_)) => {}
            Ok(Part::End) => return Ok(whole),
            Err(BodyError::Gone) => return Err(CallerGone.into()),
            Err(BodyError::Malformed(error)) => {
                return Err(Error::BadRequest(error.to_string()).into());
            }
        }
    }
}
