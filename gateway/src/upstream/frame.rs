//! Frames of a request or a response between two workers.

use bytes::Bytes;
use gw_shared::http::Fields;

use super::Progress;
use crate::error::Error;
use crate::http_message::ResponseHead;
use crate::pipe;

/// The head of a response, or the error in its place.
#[derive(Debug)]
pub(crate) struct HeadResult {
    pub(crate) progress: Progress,
    pub(crate) head: Result<ResponseHead, Error>,
}

#[derive(Debug)]
pub(crate) enum Frame {
    /// First frame of a response.
    Head(Box<HeadResult>),
    Data(Bytes),
    Trailers(Fields),
    /// The body is complete.
    End,
    /// The response broke off; no frame follows.
    Broken(Box<Error>),
}

impl pipe::PipeFrame for Frame {
    fn bytes(&self) -> usize {
        match self {
            Self::Data(data) => data.len(),
            Self::Head(_) | Self::Trailers(_) | Self::End | Self::Broken(_) => 0,
        }
    }
}
