//! What was captured of a request, as it is kept: heads and bodies apart, so that one is read without the other.

use std::borrow::Cow;

use gw_shared::mask::Masker;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};
use zstd::bulk::Compressor;

use super::LogError;
use super::record::{CAPTURE_MAX, CapturedMessage};
use super::view::CapturedView;

/// Bodies below this, in bytes, are not worth compressing.
const COMPRESSED_FROM: usize = 128;

/// A captured message without its body.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Head<'a> {
    /// Names and values in order.
    #[serde(borrow)]
    headers: Vec<(Cow<'a, str>, Cow<'a, [u8]>)>,
    /// Length of what is kept of the body.
    bytes: u64,
    pub(super) truncated: bool,
    /// The body is compressed, by us.
    packed: bool,
}

/// Head and body of `message` as columns.
pub(super) fn pack<'a>(
    message: &'a CapturedMessage,
    masker: &Masker,
    compressor: &mut Compressor<'_>,
) -> Result<(Vec<u8>, Cow<'a, [u8]>), LogError> {
    let body = &message.body.bytes[..message.body.bytes.len().min(CAPTURE_MAX)];
    let encoded = message.headers.get(header::CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity");
    let packed = if encoded || body.len() < COMPRESSED_FROM { None } else { Some(compressor.compress(body)?) };
    let packed = packed.filter(|packed| packed.len() < body.len());
    let headers = message.headers.iter().map(|(name, value)| {
        let value = value.as_bytes();
        (Cow::Borrowed(name.as_str()), masker.mask(value).map_or(Cow::Borrowed(value), Cow::Owned))
    });
    let head = Head {
        headers: headers.collect(),
        bytes: body.len() as u64,
        truncated: message.body.truncated || body.len() < message.body.bytes.len(),
        packed: packed.is_some(),
    };
    let head = postcard::to_allocvec(&head).map_err(|_| LogError::Encode("what was captured"))?;
    Ok((head, packed.map_or(Cow::Borrowed(body), Cow::Owned)))
}

impl<'a> Head<'a> {
    pub(super) fn read(column: &'a [u8]) -> Result<Self, LogError> {
        postcard::from_bytes(column).map_err(|_| LogError::Damaged("the head of what was captured"))
    }

    pub(super) fn body(&self, column: Vec<u8>) -> Result<Vec<u8>, LogError> {
        let bytes = usize::try_from(self.bytes).ok().filter(|bytes| *bytes <= CAPTURE_MAX);
        let body = match bytes {
            Some(bytes) if self.packed => zstd::bulk::decompress(&column, bytes).ok(),
            _ => Some(column),
        };
        body.filter(|body| body.len() as u64 == self.bytes).ok_or(LogError::Damaged("a captured body"))
    }

    pub(super) fn view(&self) -> CapturedView {
        let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
        CapturedView {
            headers: self.headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect(),
            bytes: self.bytes,
            truncated: self.truncated,
        }
    }

    /// First value of a header, as text.
    pub(super) fn header(&self, wanted: &HeaderName) -> Option<String> {
        let (_, value) = self.headers.iter().find(|(name, _)| name == wanted.as_str())?;
        Some(String::from_utf8_lossy(value).into_owned())
    }

    pub(super) fn header_map(&self) -> Result<HeaderMap, LogError> {
        let mut map = HeaderMap::with_capacity(self.headers.len());
        for (name, value) in &self.headers {
            let name = HeaderName::from_bytes(name.as_bytes()).ok();
            let value = HeaderValue::from_bytes(value).ok();
            let (Some(name), Some(value)) = (name, value) else {
                return Err(LogError::Damaged("a captured header"));
            };
            map.append(name, value);
        }
        Ok(map)
    }
}
