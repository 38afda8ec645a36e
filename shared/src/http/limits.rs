//! Bounds on message heads, and the error for a refused head.

use http::header::{self, HeaderName, HeaderValue};

/// Bounds on a message head.
#[derive(Debug, Clone, Copy)]
pub struct HeadLimits {
    /// Size of start line and fields, in bytes.
    pub head: usize,
    pub fields: usize,
    /// Length of the request target, in bytes.
    pub target: usize,
}

impl HeadLimits {
    /// Checks a request head. `other_parts` is the size of all but target and fields, in bytes.
    pub fn check<'a>(
        &self,
        target: &str,
        other_parts: usize,
        fields: impl Iterator<Item = (&'a HeaderName, &'a HeaderValue)>,
    ) -> Result<(), InvalidHead> {
        /// Bytes of `: ` and CRLF in a field line.
        const FIELD_LINE_EXTRA: usize = 4;
        if target.len() > self.target {
            return Err(InvalidHead::TargetTooLong(self.target));
        }
        let mut size = target.len() + other_parts;
        let mut cookies = 0;
        let mut others = 0;
        for (name, value) in fields {
            size += name.as_str().len() + value.len() + FIELD_LINE_EXTRA;
            *(if *name == header::COOKIE {
                &mut cookies
            } else {
                &mut others
            }) += 1;
        }
        if size > self.head {
            return Err(InvalidHead::HeadTooLarge(self.head));
        }
        // HTTP/2 may split one cookie field into many (RFC 9113 §8.2.3).
        if others + cookies.min(1) > self.fields {
            return Err(InvalidHead::TooManyFields(self.fields));
        }
        Ok(())
    }
}

/// Message head that RFC 9112 or RFC 9113 does not allow, or that is too large.
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
    /// Malformed HTTP/2 message, which is a stream error (RFC 9113 §8.1.1).
    #[error("malformed HTTP/2 message: {0}")]
    Malformed(&'static str),
}

impl InvalidHead {
    pub fn is_too_large(&self) -> bool {
        !matches!(self, Self::Syntax(_) | Self::Malformed(_))
    }
}
