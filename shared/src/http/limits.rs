//! Bounds on message heads, and the error of a head that is refused.

use http::Method;
use http::header::{self, HeaderMap};

/// Bounds on a message head.
#[derive(Debug, Clone, Copy)]
pub struct HeadLimits {
    /// Start line and fields together, in bytes.
    pub head: usize,
    pub fields: usize,
    /// Request target, in bytes.
    pub target: usize,
}

impl HeadLimits {
    /// Whether a request that did not come as bytes of HTTP/1.1 would be within the limits as such.
    pub fn check(&self, method: &Method, target: &str, headers: &HeaderMap) -> Result<(), InvalidHead> {
        /// `: ` and CRLF around a field's name and value.
        const FIELD_LINE_EXTRA: usize = 4;
        if target.len() > self.target {
            return Err(InvalidHead::TargetTooLong(self.target));
        }
        let size: usize =
            headers.iter().map(|(name, value)| name.as_str().len() + value.len() + FIELD_LINE_EXTRA).sum();
        if method.as_str().len() + target.len() + size > self.head {
            return Err(InvalidHead::HeadTooLarge(self.head));
        }
        // One cookie may come as many fields (RFC 9113 §8.2.3).
        let cookies = headers.get_all(header::COOKIE).iter().count();
        if headers.len() - cookies.saturating_sub(1) > self.fields {
            return Err(InvalidHead::TooManyFields(self.fields));
        }
        Ok(())
    }
}

/// A message head is not what RFC 9112 allows, or larger than we take.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidHead {
    #[error("head is larger than {0} bytes")]
    HeadTooLarge(usize),
    #[error("more than {0} header fields")]
    TooManyFields(usize),
    #[error("request target is longer than {0} bytes")]
    TargetTooLong(usize),
    #[error("malformed: {0}")]
    Syntax(&'static str),
    /// A message of HTTP/2 that is a stream error (RFC 9113 §8.1.1).
    #[error("malformed message of HTTP/2: {0}")]
    Malformed(&'static str),
}

impl InvalidHead {
    pub fn is_too_large(&self) -> bool {
        !matches!(self, Self::Syntax(_) | Self::Malformed(_))
    }
}
