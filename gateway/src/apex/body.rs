//! Reads a small request body whole.

use gw_shared::http::Part;
use gw_shared::runtime;

use crate::error::Error;
use crate::http_message::{BodyError, CallerGone, RequestBody};
use crate::limits;

/// Reads a body of at most [`limits::APEX_BODY`] bytes within [`limits::APEX_BODY_WITHIN`].
pub(super) async fn read(
    body: &mut impl RequestBody,
) -> Result<Result<Vec<u8>, Error>, CallerGone> {
    match runtime::timeout(limits::APEX_BODY_WITHIN, read_whole(body)).await {
        Ok(read) => read,
        Err(_) => Ok(Err(Error::InvalidRequest(
            "the request body took too long".to_owned(),
        ))),
    }
}

async fn read_whole(body: &mut impl RequestBody) -> Result<Result<Vec<u8>, Error>, CallerGone> {
    let mut whole = Vec::new();
    loop {
        match body.part().await {
            Ok(Part::Data(data)) if whole.len() + data.len() > limits::APEX_BODY => {
                return Ok(Err(Error::BodyTooLarge(limits::APEX_BODY)));
            }
            Ok(Part::Data(data)) => whole.extend_from_slice(&data),
            Ok(Part::Trailers(_)) => {}
            Ok(Part::End) => return Ok(Ok(whole)),
            Err(BodyError::Gone) => return Err(CallerGone),
            Err(BodyError::Malformed(error)) => {
                return Ok(Err(Error::BadRequest(error.to_string())));
            }
        }
    }
}
