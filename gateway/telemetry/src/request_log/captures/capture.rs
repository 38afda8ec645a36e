//! Stored form of captured messages. Heads and bodies are separate columns, so that one is read
//! without the other.

use std::borrow::Cow;

use gw_shared::http::Fields;
use gw_shared::telemetry::mask::Masker;
use http::header::{self, HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};
use zstd::bulk::Compressor;

use crate::request_log::LogError;
use crate::request_log::record::{BodyCapture, CAPTURE_MAX, MessageCapture, Truncation};
use crate::request_log::view::{BodyView, CapturedView};

/// Size in bytes from which bodies are compressed.
const COMPRESSED_FROM: usize = 128;

/// Captured message as it is stored.
pub(crate) struct StoredMessage {
    pub(crate) head: Vec<u8>,
    pub(crate) body: Vec<u8>,
}

/// Captured messages of one request as they are stored.
#[derive(Default)]
pub(crate) struct StoredCapture {
    pub(crate) request: Option<StoredMessage>,
    pub(crate) response: Option<StoredMessage>,
}

/// Captured message without its body.
#[derive(Debug, Serialize, Deserialize)]
struct Head<'a> {
    /// Names and values in order.
    #[serde(borrow)]
    headers: Vec<(Cow<'a, str>, Cow<'a, [u8]>)>,
    /// Length of the stored part of the body.
    bytes: u64,
    truncated: bool,
    /// The body column is compressed with zstd.
    packed: bool,
    /// Appended to the other fields, for truncated bodies only. Earlier versions neither write nor
    /// read it.
    #[serde(skip)]
    truncated_by: Option<Truncation>,
}

/// Encodes `message` as its head and body columns.
pub(crate) fn pack(
    message: &MessageCapture,
    masker: &Masker,
    compressor: &mut Compressor<'_>,
) -> Result<StoredMessage, LogError> {
    let body = &message.body.bytes[..message.body.bytes.len().min(CAPTURE_MAX)];
    let encoded = message
        .headers
        .get(header::CONTENT_ENCODING)
        .is_some_and(|encoding| encoding != "identity");
    let packed = if encoded || body.len() < COMPRESSED_FROM {
        None
    } else {
        Some(compressor.compress(body)?)
    };
    let packed = packed.filter(|packed| packed.len() < body.len());
    let headers = message.headers.iter().map(|(name, value)| {
        let value = value.as_bytes();
        (
            Cow::Borrowed(name.as_str()),
            masker.mask(value).map_or(Cow::Borrowed(value), Cow::Owned),
        )
    });
    let beyond = body.len() < message.body.bytes.len();
    let truncated_by = if beyond {
        Some(Truncation::Size)
    } else {
        message.body.truncated_by
    };
    let head = Head {
        headers: headers.collect(),
        bytes: body.len() as u64,
        truncated: message.body.truncated || beyond,
        packed: packed.is_some(),
        truncated_by,
    };
    let encode = |_| LogError::Encode("a captured message");
    let mut head = postcard::to_allocvec(&head).map_err(encode)?;
    if let Some(truncated_by) = truncated_by {
        head = postcard::to_extend(&truncated_by, head).map_err(encode)?;
    }
    Ok(StoredMessage {
        head,
        body: packed.unwrap_or_else(|| body.to_vec()),
    })
}

/// Decodes the stored head of a captured message.
pub(crate) fn view(head: &[u8]) -> Result<CapturedView, LogError> {
    Ok(Head::read(head)?.view())
}

impl StoredMessage {
    /// Decodes the body, with the content coding of the message.
    pub(crate) fn body(self) -> Result<BodyView, LogError> {
        let head = Head::read(&self.head)?;
        Ok(BodyView {
            content_type: head.header(&header::CONTENT_TYPE),
            content_encoding: head.header(&header::CONTENT_ENCODING),
            truncated: head.truncated,
            truncated_by: head.truncated_by,
            bytes: head.body(self.body)?,
        })
    }

    /// Decodes the message as it was captured.
    pub(crate) fn unpack(self) -> Result<MessageCapture, LogError> {
        let head = Head::read(&self.head)?;
        Ok(MessageCapture {
            headers: head.header_map()?,
            body: BodyCapture {
                bytes: head.body(self.body)?.into(),
                truncated: head.truncated,
                truncated_by: head.truncated_by,
            },
        })
    }
}

impl<'a> Head<'a> {
    fn read(column: &'a [u8]) -> Result<Self, LogError> {
        let damaged = |_| LogError::Damaged("the head of a captured message");
        let (mut head, rest) = postcard::take_from_bytes::<Self>(column).map_err(damaged)?;
        if !rest.is_empty() {
            head.truncated_by = Some(postcard::from_bytes(rest).map_err(damaged)?);
        }
        Ok(head)
    }

    fn body(&self, column: Vec<u8>) -> Result<Vec<u8>, LogError> {
        let bytes = usize::try_from(self.bytes)
            .ok()
            .filter(|bytes| *bytes <= CAPTURE_MAX);
        let body = match bytes {
            Some(bytes) if self.packed => zstd::bulk::decompress(&column, bytes).ok(),
            _ => Some(column),
        };
        body.filter(|body| body.len() as u64 == self.bytes)
            .ok_or(LogError::Damaged("a captured body"))
    }

    fn view(&self) -> CapturedView {
        let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
        CapturedView {
            headers: self
                .headers
                .iter()
                .map(|(name, value)| (name.to_string(), text(value)))
                .collect(),
            bytes: self.bytes,
            truncated: self.truncated,
            truncated_by: self.truncated_by,
        }
    }

    /// First value of a field, as text.
    fn header(&self, wanted: &HeaderName) -> Option<String> {
        let (_, value) = self
            .headers
            .iter()
            .find(|(name, _)| name == wanted.as_str())?;
        Some(String::from_utf8_lossy(value).into_owned())
    }

    fn header_map(&self) -> Result<Fields, LogError> {
        let mut map = Fields::with_capacity(self.headers.len());
        for (name, value) in &self.headers {
            let name = HeaderName::from_bytes(name.as_bytes()).ok();
            let value = HeaderValue::from_bytes(value).ok();
            let (Some(name), Some(value)) = (name, value) else {
                return Err(LogError::Damaged("a field of a captured message"));
            };
            map.append(name, value);
        }
        Ok(map)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    /// Head of the versions before `truncated_by`.
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct OldHead {
        headers: Vec<(String, Vec<u8>)>,
        bytes: u64,
        truncated: bool,
        packed: bool,
    }

    fn packed(truncated_by: Option<Truncation>) -> Vec<u8> {
        let body = BodyCapture {
            bytes: Bytes::from_static(b"abc"),
            truncated: truncated_by.is_some(),
            truncated_by,
        };
        let headers = [(header::ACCEPT, HeaderValue::from_static("a"))]
            .into_iter()
            .collect();
        let message = MessageCapture { headers, body };
        pack(
            &message,
            &Masker::default(),
            &mut Compressor::new(1).unwrap(),
        )
        .unwrap()
        .head
    }

    #[test]
    fn heads_are_compatible_with_versions_before_truncated_by() {
        for truncated in [false, true] {
            let old = OldHead {
                headers: vec![("accept".to_owned(), b"a".to_vec())],
                bytes: 3,
                truncated,
                packed: false,
            };
            let column = postcard::to_allocvec(&old).unwrap();
            let read = Head::read(&column).unwrap().view();
            assert_eq!(
                (read.bytes, read.truncated, read.truncated_by),
                (3, truncated, None)
            );
            let new = packed(truncated.then_some(Truncation::Memory));
            assert_eq!(postcard::from_bytes::<OldHead>(&new).unwrap(), old);
        }
        for reason in [
            None,
            Some(Truncation::Size),
            Some(Truncation::Memory),
            Some(Truncation::Interrupted),
        ] {
            let column = packed(reason);
            let read = Head::read(&column).unwrap();
            assert_eq!(
                (read.truncated, read.truncated_by),
                (reason.is_some(), reason)
            );
        }
        let mut unknown = packed(None);
        unknown.push(9);
        assert!(Head::read(&unknown).unwrap_err().is_damage());
    }
}
