//! Blocks: records of requests that began in the same second, written together as one value and
//! grouped by service.
//!
//! A block is a version byte, followed by [`Header`] and [`Row`]s in postcard's format or by the
//! same data compressed with zstd. The version says which columns follow each row
//! ([`LaterColumns`]). Repeated strings (method, error code, agent, caller) are in the header once.

use std::borrow::Cow;
use std::net::IpAddr;

use gw_shared::id::RequestId;
use gw_shared::telemetry::mask::Masker;
use postcard::ser_flavors::Flavor;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use time::macros::format_description;
use zstd::bulk::{Compressor, Decompressor};

use super::LogError;
use super::record::{
    ATTEMPTS_MAX, CallerId, Columns, Ended, Protocol, RequestRecord, account_and_service,
    path_and_query, trace_text,
};
use super::timing::Timing;
use super::view::AttemptView;
use super::zone_map::ZoneMap;

/// Interval of one block in milliseconds.
pub(super) const SLOT_MS: u64 = 1000;
/// Size at which a block is full. It is limited because reading one record decodes the whole block.
const FULL_BYTES: usize = 128 * 1024;
pub(super) const FULL_ROWS: usize = 2048;
/// Upper bound of a decompressed block: a full block, its last row and all strings, with a margin.
const RAW_MAX: usize = 8 * FULL_BYTES;
/// Size in bytes from which blocks are compressed.
const COMPRESSED_FROM: usize = 512;
/// Number of latest strings among which a repeated one is searched.
const INTERNED: usize = 16;

/// First byte of a plain block: its rows are followed by all [`LaterColumns`].
const PLAIN: u8 = 2 * LaterColumns::COUNT + 1;
const COMPRESSED: u8 = PLAIN + 1;
/// Level of zstd. Takes a third less CPU per record than level 1, for a seventh more bytes.
const COMPRESSION_LEVEL: i32 = -3;

#[derive(Serialize, Deserialize)]
struct Header<'a> {
    /// Start of the second, Unix time in milliseconds.
    second_ms: u64,
    groups: Vec<Group>,
    #[serde(borrow)]
    strings: Vec<&'a str>,
}

/// Consecutive rows of one service.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Group {
    /// Number of the service in the file.
    service: i64,
    rows: u32,
    /// Encoded size of the rows.
    bytes: u32,
}

/// Encoded record. Indexes refer to [`Header::strings`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Row<'a> {
    /// Milliseconds since the start of the second.
    ms: u16,
    /// Bytes of the id after its timestamp.
    random: [u8; 10],
    method: u16,
    #[serde(borrow)]
    pub(super) target: Cow<'a, str>,
    caller: IpAddr,
    protocol: Protocol,
    by: By,
    pub(super) status: Option<u16>,
    code: Option<u16>,
    ended: Ended,
    bytes_in: u64,
    bytes_out: u64,
    pub(super) timing: Timing,
    agent: Option<u16>,
    replayed_from: Option<[u8; 16]>,
    trace_id: Option<[u8; 16]>,
    /// Key of the captured messages.
    pub(super) capture: Option<i64>,
    /// Encoded behind the row.
    #[serde(skip)]
    pub(super) later: LaterColumns,
}

/// Declares the columns that were added to the format later, in this order. A block of the version
/// 2n + 1, or compressed 2n + 2, has the first n of them behind each row.
macro_rules! later_columns {
    ($($name:ident: $type:ty,)*) => {
        #[derive(Debug, Default)]
        pub(super) struct LaterColumns {
            $(pub(super) $name: $type,)*
        }

        impl LaterColumns {
            const COUNT: u8 = [$(stringify!($name)),*].len() as u8;

            fn append(&self, buffer: &mut Vec<u8>) -> Result<(), LogError> {
                $(append(&self.$name, buffer)?;)*
                Ok(())
            }

            /// Decodes the first `count` columns.
            fn take(count: u8, bytes: &mut &[u8]) -> postcard::Result<Self> {
                let mut columns = Self::default();
                let mut names = 0..count;
                $(if names.next().is_some() {
                    (columns.$name, *bytes) = postcard::take_from_bytes(bytes)?;
                })*
                Ok(columns)
            }
        }
    };
}

// Append only.
later_columns! {
    bytes_taken: Option<u64>,
    attempts: Vec<AttemptRow>,
}

/// Encoded failed attempt. Indexes refer to [`Header::strings`].
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct AttemptRow {
    agent: u16,
    reason: u16,
    duration_us: u32,
}

/// Authenticated caller. Kept by position: append only.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum By {
    Unauthenticated,
    Client(u16),
    ServiceKey(u16),
    Admin,
}

/// Encodes blocks one after the other and reuses its buffers.
pub(crate) struct Encoder {
    rows: Vec<u8>,
    raw: Vec<u8>,
    block: Vec<u8>,
    compressor: Compressor<'static>,
}

/// Block to which records are added.
pub(super) struct Builder<'e, 'r> {
    encoder: &'e mut Encoder,
    second_ms: u64,
    strings: Vec<&'r str>,
    strings_bytes: usize,
    groups: Vec<Group>,
    count: usize,
    zone_map: ZoneMap,
}

impl Encoder {
    pub(super) fn new() -> Result<Self, LogError> {
        let compressor = Compressor::new(COMPRESSION_LEVEL)?;
        Ok(Self {
            rows: Vec::new(),
            raw: Vec::new(),
            block: Vec::new(),
            compressor,
        })
    }

    /// Begins a block of the second that starts at `second_ms` (Unix time).
    pub(super) fn begin<'r>(&mut self, second_ms: u64) -> Builder<'_, 'r> {
        self.rows.clear();
        Builder {
            encoder: self,
            second_ms,
            strings: Vec::new(),
            strings_bytes: 0,
            groups: Vec::new(),
            count: 0,
            zone_map: ZoneMap::default(),
        }
    }
}

impl<'e, 'r> Builder<'e, 'r> {
    /// Adds a record of the block's second and of the service with the number `service`. `capture`
    /// is the key of the captured messages.
    pub(super) fn add(
        &mut self,
        service: i64,
        record: &'r RequestRecord,
        capture: Option<i64>,
        masker: &Masker,
    ) -> Result<(), LogError> {
        let id = record.id.as_bytes();
        let mut random = [0; 10];
        random.copy_from_slice(&id[6..]);
        let row = Row {
            ms: u16::try_from(record.id.unix_ms() - self.second_ms)
                .map_err(|_| LogError::Encode("the record is of another second than its block"))?,
            random,
            method: self.intern(record.shown_method()),
            target: record.masked_target(masker),
            caller: record.caller,
            protocol: record.protocol,
            by: match &record.by {
                None => By::Unauthenticated,
                Some(CallerId::Client(id)) => By::Client(self.intern(id.as_str())),
                Some(CallerId::ServiceKey(id)) => By::ServiceKey(self.intern(id.as_str())),
                Some(CallerId::Admin) => By::Admin,
            },
            status: record.status,
            code: record.code.map(|code| self.intern(code)),
            ended: record.ended,
            bytes_in: record.bytes_in,
            bytes_out: record.bytes_out,
            timing: record.timing,
            agent: record
                .agent
                .as_ref()
                .map(|agent| self.intern(agent.as_str())),
            replayed_from: record.replayed_from.map(|id| *id.as_bytes()),
            trace_id: record.trace_id,
            capture,
            later: LaterColumns {
                bytes_taken: record.bytes_taken,
                attempts: self.attempts(record),
            },
        };
        let begin = self.encoder.rows.len();
        append(&row, &mut self.encoder.rows)?;
        row.later.append(&mut self.encoder.rows)?;
        let bytes = (self.encoder.rows.len() - begin) as u32;
        match self
            .groups
            .last_mut()
            .filter(|group| group.service == service)
        {
            Some(group) => {
                group.rows += 1;
                group.bytes += bytes;
            }
            None => self.groups.push(Group {
                service,
                rows: 1,
                bytes,
            }),
        }
        self.count += 1;
        self.zone_map
            .add(row.status, row.code.is_some(), row.timing.total);
        if !row.later.attempts.is_empty() {
            self.zone_map.bits |= ZoneMap::ATTEMPTS;
        }
        Ok(())
    }

    fn attempts(&mut self, record: &'r RequestRecord) -> Vec<AttemptRow> {
        let encoded = record
            .attempts
            .iter()
            .take(ATTEMPTS_MAX)
            .map(|attempt| AttemptRow {
                agent: self.intern(attempt.shown_agent()),
                reason: self.intern(attempt.reason),
                duration_us: attempt.duration_us,
            });
        encoded.collect()
    }

    /// Returns the index of `text` among the strings. Appends it if it is not among the latest
    /// [`INTERNED`].
    fn intern(&mut self, text: &'r str) -> u16 {
        let from = self.strings.len().saturating_sub(INTERNED);
        let found = self.strings[from..].iter().position(|known| *known == text);
        let index = found.map_or_else(
            || {
                self.strings.push(text);
                self.strings_bytes += text.len();
                self.strings.len() - 1
            },
            |found| from + found,
        );
        const { assert!((4 + 2 * ATTEMPTS_MAX) * FULL_ROWS <= u16::MAX as usize) };
        // At most four strings for each of `FULL_ROWS` rows, and two for each of their attempts.
        index as u16
    }

    pub(super) fn is_full(&self) -> bool {
        self.encoder.rows.len() + self.strings_bytes >= FULL_BYTES || self.count >= FULL_ROWS
    }

    /// Returns the encoded block and its zone map.
    pub(super) fn finish(self) -> Result<(&'e [u8], ZoneMap), LogError> {
        let Encoder {
            rows,
            raw,
            block,
            compressor,
        } = self.encoder;
        let header = Header {
            second_ms: self.second_ms,
            groups: self.groups,
            strings: self.strings,
        };
        raw.clear();
        append(&header, raw)?;
        raw.extend_from_slice(rows);
        block.clear();
        if raw.len() >= COMPRESSED_FROM {
            block.push(COMPRESSED);
            block.resize(1 + zstd::zstd_safe::compress_bound(raw.len()), 0);
            let length = compressor.compress_to_buffer(raw.as_slice(), &mut block[1..])?;
            block.truncate(1 + length);
        } else {
            block.push(PLAIN);
            block.extend_from_slice(raw);
        }
        Ok((block, self.zone_map))
    }
}

/// Appends the encoded `value` to `buffer`. [`postcard::to_extend`] does the same at twice the
/// cost.
fn append(value: &impl Serialize, buffer: &mut Vec<u8>) -> Result<(), LogError> {
    postcard::serialize_with_flavor(value, Append(buffer)).map_err(|_| LogError::Encode("a block"))
}

struct Append<'a>(&'a mut Vec<u8>);

impl Flavor for Append<'_> {
    type Output = ();

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.0.push(byte);
        Ok(())
    }

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<()> {
        Ok(())
    }
}

/// Decompresses blocks and reuses its context.
pub(crate) struct Unpacker(Decompressor<'static>);

/// Decompressed block.
pub(crate) struct UnpackedBlock {
    bytes: Vec<u8>,
    /// Number of [`LaterColumns`] behind each row.
    later_columns: u8,
}

/// Decoded and checked block.
pub(super) struct DecodedBlock<'a> {
    second_ms: u64,
    strings: Vec<&'a str>,
    /// Each row with the number of its service.
    pub(super) rows: Vec<(i64, Row<'a>)>,
}

impl Unpacker {
    pub(super) fn new() -> Result<Self, LogError> {
        Ok(Self(Decompressor::new()?))
    }

    /// Returns the decompressed block.
    pub(super) fn unpack(&mut self, block: &[u8]) -> Result<UnpackedBlock, LogError> {
        let (version, rest) = block
            .split_first()
            .ok_or(LogError::Damaged("an empty block"))?;
        if !(1..=COMPRESSED).contains(version) {
            return Err(LogError::Damaged("a block of an unknown version"));
        }
        let bytes = if version.is_multiple_of(2) {
            self.decompress(rest)?
        } else {
            rest.to_vec()
        };
        Ok(UnpackedBlock {
            bytes,
            later_columns: (version - 1) / 2,
        })
    }

    fn decompress(&mut self, frame: &[u8]) -> Result<Vec<u8>, LogError> {
        let length = zstd::zstd_safe::get_frame_content_size(frame)
            .ok()
            .flatten();
        let length = length
            .and_then(|length| usize::try_from(length).ok())
            .filter(|length| *length <= RAW_MAX);
        let length = length.ok_or(LogError::Damaged("a block's length"))?;
        self.0
            .decompress(frame, length)
            .map_err(|_| LogError::Damaged("a block's compression"))
    }
}

impl<'a> DecodedBlock<'a> {
    /// Decodes the rows of the services for which `wanted` returns true.
    pub(super) fn read(
        block: &'a UnpackedBlock,
        wanted: impl Fn(i64) -> bool,
    ) -> Result<Self, LogError> {
        let damaged = |_| LogError::Damaged("a block's contents");
        let (header, mut rest) =
            postcard::take_from_bytes::<Header<'a>>(&block.bytes).map_err(damaged)?;
        let mut rows = Vec::new();
        for group in header.groups {
            let Some((mut bytes, behind)) = rest.split_at_checked(group.bytes as usize) else {
                return Err(LogError::Damaged("a block's length"));
            };
            rest = behind;
            if !wanted(group.service) {
                continue;
            }
            // A row takes more than 32 bytes. Checked before memory is reserved for the rows.
            if group.rows as usize > bytes.len() / 32 {
                return Err(LogError::Damaged("a block's number of rows"));
            }
            rows.reserve(group.rows as usize);
            for _ in 0..group.rows {
                let mut row: Row<'a>;
                (row, bytes) = postcard::take_from_bytes(bytes).map_err(damaged)?;
                row.later = LaterColumns::take(block.later_columns, &mut bytes).map_err(damaged)?;
                row.check(header.strings.len())?;
                rows.push((group.service, row));
            }
            if !bytes.is_empty() {
                return Err(LogError::Damaged("a block's group"));
            }
        }
        let in_range = header.second_ms < 1 << 47;
        if !rest.is_empty() || !in_range {
            return Err(LogError::Damaged("a block's end"));
        }
        Ok(Self {
            second_ms: header.second_ms,
            strings: header.strings,
            rows,
        })
    }

    pub(super) fn id(&self, row: &Row<'_>) -> [u8; 16] {
        let mut id = [0; 16];
        id[..6].copy_from_slice(&(self.second_ms + u64::from(row.ms)).to_be_bytes()[2..]);
        id[6..].copy_from_slice(&row.random);
        id
    }

    pub(super) fn unix_ms(&self, row: &Row<'_>) -> u64 {
        self.second_ms + u64::from(row.ms)
    }

    pub(super) fn code(&self, row: &Row<'_>) -> Option<&'a str> {
        row.code.map(|code| self.string(code))
    }

    pub(super) fn caller_id(&self, row: &Row<'_>) -> Option<&'a str> {
        match row.by {
            By::Client(id) | By::ServiceKey(id) => Some(self.string(id)),
            By::Unauthenticated | By::Admin => None,
        }
    }

    /// [`DecodedBlock::read`] has checked the index.
    fn string(&self, index: u16) -> &'a str {
        self.strings
            .get(usize::from(index))
            .copied()
            .unwrap_or_default()
    }

    /// Columns of `row`, for the service with this label.
    pub(super) fn columns<'r>(&'r self, row: &'r Row<'_>, label: &'r str) -> Columns<'r> {
        let (account, service) = account_and_service(label);
        let (path, query) = path_and_query(&row.target);
        let attempts = row.later.attempts.iter();
        // `read` has checked the ids.
        let id = |bytes| RequestId::from_bytes(bytes).unwrap_or_else(|| RequestId::first_of_ms(0));
        Columns {
            id: id(self.id(row)),
            time: time_text(self.unix_ms(row)),
            account,
            service,
            method: self.string(row.method),
            path,
            query,
            caller_address: row.caller,
            protocol: row.protocol.as_str(),
            auth_mode: match row.by {
                By::Unauthenticated => None,
                By::Client(_) => Some("jwt"),
                By::ServiceKey(_) => Some("service_key"),
                By::Admin => Some("admin"),
            },
            caller_id: self.caller_id(row),
            status: row.status,
            code: self.code(row),
            ended: row.ended.as_str(),
            bytes_in: row.bytes_in,
            bytes_taken: row.later.bytes_taken,
            bytes_out: row.bytes_out,
            durations_us: row.timing,
            agent_id: row.agent.map(|agent| self.string(agent)),
            attempts: attempts.map(|attempt| self.attempt(*attempt)).collect(),
            replayed_from: row.replayed_from.map(id),
            trace_id: row.trace_id.map(trace_text),
        }
    }

    fn attempt(&self, attempt: AttemptRow) -> AttemptView {
        AttemptView {
            agent_id: self.string(attempt.agent).to_owned(),
            reason: self.string(attempt.reason).to_owned(),
            duration_us: attempt.duration_us,
        }
    }
}

impl Row<'_> {
    /// Checks that [`Builder::add`] can have encoded the row.
    fn check(&self, strings: usize) -> Result<(), LogError> {
        let by = match self.by {
            By::Client(id) | By::ServiceKey(id) => Some(id),
            By::Unauthenticated | By::Admin => None,
        };
        let indexes = [Some(self.method), self.code, self.agent, by]
            .into_iter()
            .flatten();
        let attempts = &self.later.attempts;
        let of_attempts = attempts
            .iter()
            .flat_map(|attempt| [attempt.agent, attempt.reason]);
        let mut indexes = indexes.chain(of_attempts);
        let is_v7 = |id: [u8; 16]| RequestId::from_bytes(id).is_some();
        let mut id = [0; 16];
        id[6..].copy_from_slice(&self.random);
        if u64::from(self.ms) < SLOT_MS
            && is_v7(id)
            && self.replayed_from.is_none_or(is_v7)
            && attempts.len() <= ATTEMPTS_MAX
            && indexes.all(|index| usize::from(index) < strings)
        {
            Ok(())
        } else {
            Err(LogError::Damaged("a row of a block"))
        }
    }
}

/// Formats a time as RFC 3339 in UTC with milliseconds.
pub(super) fn time_text(unix_ms: u64) -> String {
    let format =
        format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:3]Z");
    let time = OffsetDateTime::from_unix_timestamp_nanos(i128::from(unix_ms) * 1_000_000);
    time.ok()
        .and_then(|time| time.format(format).ok())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests;
