//! Content of an archived object: blocks as they are in the file of the day, labels of their
//! services, and heads of captured messages. Bodies are in an object beside it.

use gw_shared::text::hexadecimal;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use aws_lc_rs::digest::{self, SHA256};
use serde::{Deserialize, Serialize};

use super::super::LogError;
use super::super::view::{CapturedView, Side};
use super::name::DIGEST_DIGITS;
use super::seal;
use crate::request_log::captures::capture;
use crate::request_log::captures::capture::{StoredCapture, StoredMessage};
use crate::request_log::search::lookup::References;

/// First byte of the content. Another format has another number.
const VERSION: u8 = 1;

/// Decoded content of an object. Kept by position: another order or another field is another
/// version of the format.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Segment<'a> {
    /// Number and label of each service in the blocks.
    #[serde(borrow)]
    pub(super) services: BTreeMap<i64, &'a str>,
    #[serde(borrow)]
    pub(super) blocks: Vec<Block<'a>>,
    /// Heads of captured messages by the key in the rows of blocks.
    #[serde(borrow)]
    pub(super) captures: BTreeMap<i64, Captured<'a>>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Block<'a> {
    /// Second of the day in which its records began.
    pub(super) second: u32,
    pub(super) zone: i64,
    pub(super) longest_us: i64,
    #[serde(borrow)]
    pub(super) data: Cow<'a, [u8]>,
}

#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Captured<'a> {
    #[serde(borrow)]
    pub(super) request: Option<Message<'a>>,
    #[serde(borrow)]
    pub(super) response: Option<Message<'a>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Message<'a> {
    pub(super) head: &'a [u8],
    /// Position of the sealed body in the object of bodies.
    pub(super) offset: u64,
    /// Length of the sealed body; 0 for an empty body, which is not stored.
    pub(super) length: u32,
}

/// Everything that goes into one object with records and the object of its bodies.
#[derive(Default)]
pub(super) struct Draft {
    pub(super) services: BTreeMap<i64, String>,
    pub(super) blocks: Vec<Block<'static>>,
    pub(super) captures: BTreeMap<i64, StoredCapture>,
}

/// Encoded [`Draft`], not sealed yet.
pub(super) struct Encoded {
    pub(super) first: u32,
    pub(super) last: u32,
    pub(super) digest: String,
    pub(super) content: Vec<u8>,
    /// Bodies in the order of their offsets.
    pub(super) bodies: Vec<(u64, Vec<u8>)>,
}

/// Bodies collected for one object, with the offsets that they have once sealed.
#[derive(Default)]
struct Bodies {
    all: Vec<(u64, Vec<u8>)>,
    end: u64,
}

impl Draft {
    /// Encodes the draft. `None` if it has no blocks.
    pub(super) fn encode(mut self) -> Result<Option<Encoded>, LogError> {
        let seconds: BTreeSet<u32> = self.blocks.iter().map(|block| block.second).collect();
        let (Some(&first), Some(&last)) = (seconds.first(), seconds.last()) else {
            return Ok(None);
        };
        let mut bodies = Bodies::default();
        let mut captures = BTreeMap::new();
        for (key, capture) in &mut self.captures {
            let [request, response] =
                [&mut capture.request, &mut capture.response].map(|message| {
                    message
                        .as_mut()
                        .map(|message| bodies.add(message))
                        .transpose()
                });
            captures.insert(
                *key,
                Captured {
                    request: request?,
                    response: response?,
                },
            );
        }
        let segment = Segment {
            services: self
                .services
                .iter()
                .map(|(number, label)| (*number, label.as_str()))
                .collect(),
            blocks: self.blocks,
            captures,
        };
        let content = postcard::to_extend(&segment, vec![VERSION])
            .map_err(|_| LogError::Encode("an archived object"))?;
        drop(segment);
        let digest = bodies.digest(&content);
        Ok(Some(Encoded {
            first,
            last,
            digest,
            content,
            bodies: bodies.all,
        }))
    }
}

impl Bodies {
    /// Takes the body of `message`.
    fn add<'a>(&mut self, message: &'a mut StoredMessage) -> Result<Message<'a>, LogError> {
        let body = std::mem::take(&mut message.body);
        let offset = self.end;
        let mut length = 0;
        if !body.is_empty() {
            length = u32::try_from(body.len() + seal::OVERHEAD)
                .map_err(|_| LogError::Encode("a captured body"))?;
            self.end += u64::from(length);
            self.all.push((offset, body));
        }
        Ok(Message {
            head: &message.head,
            offset,
            length,
        })
    }

    /// Digest of records and bodies, in hexadecimal digits.
    fn digest(&self, content: &[u8]) -> String {
        let mut context = digest::Context::new(&SHA256);
        context.update(content);
        for (_, body) in &self.all {
            context.update(body);
        }
        hexadecimal(context.finish().as_ref())[..DIGEST_DIGITS].to_owned()
    }
}

impl<'a> Segment<'a> {
    /// Decodes the opened content of an object.
    pub(super) fn read(content: &'a [u8]) -> Result<Self, LogError> {
        let Some((&VERSION, rest)) = content.split_first() else {
            return Err(LogError::Damaged(
                "an archived object of an unknown version",
            ));
        };
        postcard::from_bytes(rest)
            .map_err(|_| LogError::Damaged("the contents of an archived object"))
    }

    pub(super) fn message(&self, key: i64, side: Side) -> Option<Message<'a>> {
        let captured = self.captures.get(&key)?;
        match side {
            Side::Request => captured.request,
            Side::Response => captured.response,
        }
    }
}

impl References for Segment<'_> {
    fn label(&self, service: i64) -> Result<Cow<'_, str>, LogError> {
        let label = self.services.get(&service);
        label
            .map(|label| Cow::Borrowed(*label))
            .ok_or(LogError::Damaged("a service is missing"))
    }

    fn captured(&self, key: i64) -> Result<(Option<CapturedView>, Option<CapturedView>), LogError> {
        let view = |side| {
            let message = self.message(key, side);
            message
                .map(|message| capture::view(message.head))
                .transpose()
        };
        Ok((view(Side::Request)?, view(Side::Response)?))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn draft() -> Draft {
        let message = |body: &[u8]| {
            Some(StoredMessage {
                head: b"head".to_vec(),
                body: body.to_vec(),
            })
        };
        let block = |second| Block {
            second,
            zone: 3,
            longest_us: 9,
            data: vec![second as u8; 5].into(),
        };
        Draft {
            services: [(1, "acme--api".to_owned())].into(),
            blocks: vec![block(20), block(10)],
            captures: [(
                4,
                StoredCapture {
                    request: message(b"abc"),
                    response: message(b""),
                },
            )]
            .into(),
        }
    }

    #[test]
    fn an_encoded_draft_is_read_back_and_its_name_follows_its_content() {
        let encoded = draft().encode().unwrap().unwrap();
        assert_eq!((encoded.first, encoded.last), (10, 20));
        assert_eq!(encoded.bodies, [(0, b"abc".to_vec())]);
        let segment = Segment::read(&encoded.content).unwrap();
        assert_eq!(
            (&*segment.label(1).unwrap(), segment.blocks.len()),
            ("acme--api", 2)
        );
        let message = segment.message(4, Side::Request).unwrap();
        assert_eq!(
            (message.head, message.offset, message.length as usize),
            (&b"head"[..], 0, 3 + seal::OVERHEAD)
        );
        assert_eq!(segment.message(4, Side::Response).unwrap().length, 0);
        assert!(segment.message(5, Side::Request).is_none() && segment.label(2).is_err());
        assert_eq!(draft().encode().unwrap().unwrap().digest, encoded.digest);
        let mut other = draft();
        other
            .captures
            .get_mut(&4)
            .unwrap()
            .request
            .as_mut()
            .unwrap()
            .body = b"abd".to_vec();
        assert_ne!(other.encode().unwrap().unwrap().digest, encoded.digest);
        assert!(Draft::default().encode().unwrap().is_none());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_read_without_a_panic(
            mut content in prop::collection::vec(any::<u8>(), 1..300),
        ) {
            content[0] = VERSION;
            drop(Segment::read(&content));
        }
    }
}
