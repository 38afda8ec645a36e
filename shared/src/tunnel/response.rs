//! Bounds on responses. The agent applies them to its backends, and the gateway to its agents,
//! which may be modified.

use http::{StatusCode, header};

use crate::http::Fields;
use crate::http::HeadLimits;

/// Bounds on a final or interim head, and on a trailer section. With the lines that the tunnel
/// adds, a head fits into [`RESPONSE_HEAD`](super::frame::RESPONSE_HEAD).
pub const HEAD: HeadLimits = HeadLimits {
    head: 60 * 1024,
    fields: 1000,
    target: 0,
};

/// Most interim responses (1xx) to one request.
pub const INTERIM_MAX: u32 = 1000;

/// Most bytes of all interim responses to one request. They use no credit, so each hop may have to
/// buffer all of them for a peer that does not read.
pub const INTERIM_BYTES: usize = 64 * 1024;

/// Bytes that a head and each of its fields count in addition to their text: the memory of an entry
/// in a list of fields.
pub const OVERHEAD: usize = 64;

/// Response that a backend must not send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidResponse {
    #[error("its status is {}", .0.as_u16())]
    Status(StatusCode),
    #[error("it has more than {} header fields; let the backend send fewer", HEAD.fields)]
    TooManyFields,
    #[error("its head is larger than {} bytes; let the backend send fewer or shorter \
             fields", HEAD.head)]
    HeadTooLarge,
    #[error("more than {INTERIM_MAX} interim responses, or {INTERIM_BYTES} bytes of them")]
    TooManyInterim,
    #[error("it switches protocols without a request to do so")]
    Unasked,
    #[error("it does not switch to the requested protocol")]
    OtherProtocol,
    #[error("it is malformed")]
    Malformed,
}

/// Checks the fields of a head or of a trailer section.
pub fn check_fields(fields: &Fields) -> Result<(), InvalidResponse> {
    const SEPARATORS: usize = ": \r\n".len();
    if fields.len() > HEAD.fields {
        return Err(InvalidResponse::TooManyFields);
    }
    let bytes: usize = fields
        .iter()
        .map(|(name, value)| name.as_str().len() + value.len() + SEPARATORS)
        .sum();
    if bytes > HEAD.head {
        Err(InvalidResponse::HeadTooLarge)
    } else {
        Ok(())
    }
}

/// Checks the status of a final response.
pub fn check_status(status: StatusCode) -> Result<(), InvalidResponse> {
    if (200..600).contains(&status.as_u16()) {
        Ok(())
    } else {
        Err(InvalidResponse::Status(status))
    }
}

/// Interim responses that a request may still receive.
#[derive(Debug)]
pub struct InterimBudget {
    responses: u32,
    bytes: usize,
}

impl Default for InterimBudget {
    fn default() -> Self {
        Self {
            responses: INTERIM_MAX,
            bytes: INTERIM_BYTES,
        }
    }
}

impl InterimBudget {
    /// Checks and counts an interim response, and removes its `Content-Length` (RFC 9110 §8.6).
    pub fn take(&mut self, status: StatusCode, fields: &mut Fields) -> Result<(), InvalidResponse> {
        if !status.is_informational() || status == StatusCode::SWITCHING_PROTOCOLS {
            return Err(InvalidResponse::Status(status));
        }
        fields.remove(header::CONTENT_LENGTH);
        check_fields(fields)?;
        let bytes: usize = fields
            .iter()
            .map(|(name, value)| name.as_str().len() + value.len() + OVERHEAD)
            .sum();
        let left = self
            .responses
            .checked_sub(1)
            .zip(self.bytes.checked_sub(OVERHEAD + bytes));
        (self.responses, self.bytes) = left.ok_or(InvalidResponse::TooManyInterim)?;
        Ok(())
    }
}

// The byte limit allows the full number of interim responses without fields.
const _: () = assert!(INTERIM_MAX as usize * OVERHEAD <= INTERIM_BYTES);

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use http::header::HeaderName;

    use super::*;

    fn fields(count: usize, value: &str) -> Fields {
        let name = |number| HeaderName::try_from(format!("x-{number}")).unwrap();
        (0..count)
            .map(|number| (name(number), HeaderValue::from_str(value).unwrap()))
            .collect()
    }

    #[test]
    fn fields_are_bounded_in_number_and_bytes() {
        let rest = HEAD.head - "x-0: \r\n".len();
        for (count, length, expected) in [
            (HEAD.fields, 0, Ok(())),
            (HEAD.fields + 1, 0, Err(InvalidResponse::TooManyFields)),
            (1, rest, Ok(())),
            (1, rest + 1, Err(InvalidResponse::HeadTooLarge)),
        ] {
            let found = check_fields(&fields(count, &"v".repeat(length)));
            assert_eq!(found, expected, "{count} {length}");
        }
    }

    #[test]
    fn final_statuses_are_200_to_599() {
        let is_final = |status: u16| check_status(StatusCode::from_u16(status).unwrap()).is_ok();
        assert!([200, 204, 404, 599].into_iter().all(is_final));
        assert!(![100, 101, 103, 199, 600, 999].into_iter().any(is_final));
    }

    #[test]
    fn interim_responses_are_bounded_in_number_and_bytes() {
        let mut budget = InterimBudget::default();
        let mut take = || budget.take(StatusCode::PROCESSING, &mut Fields::new());
        for _ in 0..INTERIM_MAX {
            take().unwrap();
        }
        let refused = take();
        assert_eq!(refused, Err(InvalidResponse::TooManyInterim));

        let mut budget = InterimBudget::default();
        let value = "v".repeat(20_000);
        let mut take = || budget.take(StatusCode::EARLY_HINTS, &mut fields(1, &value));
        for _ in 0..3 {
            take().unwrap();
        }
        let refused = take();
        assert_eq!(refused, Err(InvalidResponse::TooManyInterim));
    }

    #[test]
    fn interim_responses_with_101_are_refused_and_lose_their_length() {
        let mut budget = InterimBudget::default();
        for status in [StatusCode::SWITCHING_PROTOCOLS, StatusCode::OK] {
            let refused = budget.take(status, &mut Fields::new());
            assert_eq!(refused, Err(InvalidResponse::Status(status)));
        }
        let length = HeaderValue::from_static("5");
        let mut framed = Fields::from_iter([(header::CONTENT_LENGTH, length)]);
        budget.take(StatusCode::EARLY_HINTS, &mut framed).unwrap();
        assert!(framed.is_empty());
    }
}
