//! Frames of a response between two workers. The frames of a request body are its parts.

use gw_base::error::Error;
use gw_shared::http::Part;

use crate::http_message::{Progress, RelayedHead, size_of_fields};
use crate::pipe;

/// The head of a response, or the error in its place.
#[derive(Debug)]
pub struct HeadResult {
    pub(crate) progress: Progress,
    /// Head of the response, or the error to refuse the request with.
    pub head: Result<RelayedHead, Error>,
}

/// An item of the pipe that carries a response to the worker of the caller.
#[derive(Debug)]
pub enum Frame {
    /// First frame of a response.
    Head(Box<HeadResult>),
    /// Data or trailers of the response body, or its end.
    Part(Part),
    /// The response broke off; no frame follows.
    Broken(Box<Error>),
    /// Bytes of the request body that the backend took, if known. The last frame of a request with
    /// a body.
    Uploaded(Option<u64>),
}

impl pipe::PipeFrame for Frame {
    fn bytes(&self) -> usize {
        match self {
            Self::Part(part) => part.bytes(),
            Self::Head(received) => received
                .head
                .as_ref()
                .map_or(0, |head| size_of_fields(&head.headers)),
            Self::Broken(_) | Self::Uploaded(_) => 0,
        }
    }
}

impl pipe::PipeFrame for Part {
    fn bytes(&self) -> usize {
        match self {
            Self::Data(data) => data.len(),
            Self::Trailers(trailers) => size_of_fields(trailers),
            Self::End => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use gw_shared::http::Fields;
    use http::{HeaderName, HeaderValue};

    use super::*;
    use crate::pipe::PipeFrame;

    #[test]
    fn heads_and_trailers_count_with_their_fields() {
        let fields = |length: usize| {
            let value = HeaderValue::try_from("v".repeat(length)).unwrap();
            Fields::from_iter([(HeaderName::from_static("x-a"), value)])
        };
        for length in [0, 50_000] {
            let bytes = length + "x-a".len();
            assert!((bytes..bytes + 100).contains(&Part::Trailers(fields(length)).bytes()));
            let head = RelayedHead {
                status: http::StatusCode::OK,
                headers: fields(length),
                has_body: true,
                upgrade: None,
            };
            let head = HeadResult {
                progress: Progress::default(),
                head: Ok(head),
            };
            assert!((bytes..bytes + 100).contains(&Frame::Head(Box::new(head)).bytes()));
        }
        assert_eq!(Part::End.bytes(), 0);
    }
}
