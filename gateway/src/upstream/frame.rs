//! Frames of a response between two workers. The frames of a request body are its parts.

use gw_shared::http::Part;

use crate::error::Error;
use crate::http_message::{Progress, ResponseHead};
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
    Part(Part),
    /// The response broke off; no frame follows.
    Broken(Box<Error>),
    /// Bytes of the request body that the backend took, if known. The last frame of a request with a body.
    Uploaded(Option<u64>),
}

impl pipe::PipeFrame for Frame {
    fn bytes(&self) -> usize {
        match self {
            Self::Part(part) => part.bytes(),
            Self::Head(_) | Self::Broken(_) | Self::Uploaded(_) => 0,
        }
    }
}

impl pipe::PipeFrame for Part {
    fn bytes(&self) -> usize {
        match self {
            Self::Data(data) => data.len(),
            Self::Trailers(_) | Self::End => 0,
        }
    }
}
