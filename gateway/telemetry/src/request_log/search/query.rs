//! Checked search criteria.

use std::ops::RangeInclusive;

use gw_base::page;
use gw_base::service::hostname::tenant_label;
use gw_shared::id::{AccountId, ClientId, KeyId, RequestId, ServiceId};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::request_log::block::{DecodedBlock, Row};
use crate::request_log::record::path_and_query;
use crate::request_log::view::SearchQuery;
use crate::request_log::zone_map::ZoneMap;
use crate::request_log::{APEX_LABEL, LogError};

/// Criteria of a search.
pub(crate) struct Criteria {
    pub(crate) services: ServiceFilter,
    status: Option<Status>,
    code: Option<String>,
    path_prefix: Option<String>,
    caller_id: Option<String>,
    retried: Option<bool>,
    min_us: u64,
    /// Unix time in milliseconds, inclusive.
    since_ms: u64,
    /// Unix time in milliseconds, exclusive.
    until_ms: u64,
    /// Exclusive upper limit of ids, from the cursor.
    before: Option<RequestId>,
    pub(crate) limit: usize,
}

/// Services whose records are searched.
pub(crate) enum ServiceFilter {
    All,
    /// Prefix of the labels: `{account}--`.
    Account(String),
    Label(String),
    /// All services, without requests to the apex.
    NotApex,
}

enum Status {
    Missing,
    /// First digit of the status.
    Class(u16),
    Exactly(u16),
}

impl Criteria {
    pub(crate) fn check(query: &SearchQuery) -> Result<Self, LogError> {
        let account = query
            .account
            .as_deref()
            .map(|text| AccountId::new(text).map_err(invalid("account")))
            .transpose()?;
        let service = query
            .service
            .as_deref()
            .map(|text| ServiceId::new(text).map_err(invalid("service")))
            .transpose()?;
        let services = match (account, service) {
            (None, None) => match query.apex {
                None => ServiceFilter::All,
                Some(true) => ServiceFilter::Label(APEX_LABEL.to_owned()),
                Some(false) => ServiceFilter::NotApex,
            },
            (None, Some(_)) => return Err(invalid("account")("required with `service`")),
            (Some(account), None) => ServiceFilter::Account(format!("{account}--")),
            (Some(account), Some(service)) => ServiceFilter::Label(
                tenant_label(&account, &service)
                    .ok_or_else(|| invalid("service")("too long together with the account"))?,
            ),
        };
        if query.apex == Some(true)
            && !matches!(&services, ServiceFilter::Label(label) if label == APEX_LABEL)
        {
            return Err(invalid("apex")(
                "`true` cannot be combined with `account`: the apex belongs to no account",
            ));
        }
        let caller_id = query.caller_id.as_deref().map(|text| {
            let known = ClientId::new(text).is_ok() || KeyId::new(text).is_ok();
            let expected =
                "must be a client id (`gw_ci_` and 20 characters of A-Z, a-z and 0-9) or a service \
                 key's id (16 of these characters)";
            if known { Ok(text.to_owned()) } else { Err(invalid("caller_id")(expected)) }
        });
        let before = query.cursor.as_deref().map(|text| {
            text.parse::<RequestId>()
                .map_err(|_| invalid("cursor")("must be the `next_cursor` of the previous page"))
        });
        Ok(Self {
            services,
            status: query.status.as_deref().map(Status::parse).transpose()?,
            code: query.code.as_deref().map(code).transpose()?,
            path_prefix: query.path_prefix.as_deref().map(path_prefix).transpose()?,
            caller_id: caller_id.transpose()?,
            retried: query.retried,
            min_us: u64::from(query.min_ms.unwrap_or(0)) * 1000,
            since_ms: time_ms("since", query.since.as_deref())?.unwrap_or(0),
            until_ms: time_ms("until", query.until.as_deref())?.unwrap_or(u64::MAX),
            before: before.transpose()?,
            limit: page::checked_limit(query.limit).map_err(invalid("limit"))?,
        })
    }

    /// Range of times that can match, Unix time in milliseconds.
    pub(crate) fn range_ms(&self) -> RangeInclusive<u64> {
        // The cursor of a search that ended early is the first id of a second, which was searched
        // already.
        let before_ms = self.before.map_or(u64::MAX, |before| {
            let ms = before.unix_ms();
            if before > RequestId::first_of_ms(ms) {
                ms + 1
            } else {
                ms
            }
        });
        match before_ms.min(self.until_ms) {
            0 => RangeInclusive::new(1, 0),
            end => self.since_ms..=end - 1,
        }
    }

    /// Bits that a matching zone map has, and the least value of its longest duration, as
    /// [`ZoneMap::columns`] has them.
    pub(crate) fn zone(&self) -> [i64; 2] {
        let status = match self.status {
            None => 0,
            Some(Status::Missing) => ZoneMap::NO_STATUS,
            Some(Status::Class(class)) => ZoneMap::class(class),
            Some(Status::Exactly(status)) => ZoneMap::class(status / 100) | ZoneMap::status(status),
        };
        let code = if self.code.is_some() {
            ZoneMap::CODE
        } else {
            0
        };
        let attempts = if self.retried == Some(true) {
            ZoneMap::ATTEMPTS
        } else {
            0
        };
        let zone_map = ZoneMap {
            bits: status | code | attempts,
            longest_us: self.min_us,
        };
        zone_map.columns()
    }

    /// Whether a record matches.
    pub(crate) fn matches(&self, block: &DecodedBlock<'_>, row: &Row<'_>) -> bool {
        let time = block.unix_ms(row);
        time >= self.since_ms
            && time < self.until_ms
            && row.timing.total >= self.min_us
            && self
                .status
                .as_ref()
                .is_none_or(|status| status.is(row.status))
            && self
                .code
                .as_deref()
                .is_none_or(|code| block.code(row) == Some(code))
            && self
                .caller_id
                .as_deref()
                .is_none_or(|caller| block.caller_id(row) == Some(caller))
            && self
                .retried
                .is_none_or(|retried| retried != row.later.attempts.is_empty())
            && self
                .path_prefix
                .as_deref()
                .is_none_or(|prefix| path_and_query(&row.target).0.starts_with(prefix))
            && self
                .before
                .is_none_or(|before| block.id(row) < *before.as_bytes())
    }
}

impl ServiceFilter {
    /// Whether the service with this label is searched.
    pub(crate) fn includes(&self, label: &str) -> bool {
        match self {
            Self::All => true,
            Self::Account(prefix) => label.starts_with(prefix.as_str()),
            Self::Label(wanted) => label == wanted,
            Self::NotApex => label != APEX_LABEL,
        }
    }
}

impl Status {
    fn parse(text: &str) -> Result<Self, LogError> {
        let expected = "must be a status like `502`, a class like `5xx`, or `none` for no response";
        match text.as_bytes() {
            b"none" => Ok(Self::Missing),
            [class @ b'1'..=b'5', b'x', b'x'] => Ok(Self::Class(u16::from(class - b'0'))),
            [b'1'..=b'5', b'0'..=b'9', b'0'..=b'9'] => text
                .parse()
                .map(Self::Exactly)
                .map_err(|_| invalid("status")(expected)),
            _ => Err(invalid("status")(expected)),
        }
    }

    fn is(&self, status: Option<u16>) -> bool {
        match self {
            Self::Missing => status.is_none(),
            Self::Class(class) => status.is_some_and(|status| status / 100 == *class),
            Self::Exactly(wanted) => status == Some(*wanted),
        }
    }
}

/// Checks a path prefix. `*` is a target of OPTIONS requests.
fn path_prefix(text: &str) -> Result<String, LogError> {
    let valid = text.starts_with('/') || text == "*";
    if valid {
        Ok(text.to_owned())
    } else {
        Err(invalid("path_prefix")("must begin with `/`"))
    }
}

fn code(text: &str) -> Result<String, LogError> {
    let valid = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    if !text.is_empty() && text.bytes().all(valid) {
        Ok(text.to_owned())
    } else {
        Err(invalid("code")(
            "must be an error code like `GW_RATE_LIMITED`",
        ))
    }
}

fn time_ms(field: &'static str, text: Option<&str>) -> Result<Option<u64>, LogError> {
    let Some(text) = text else { return Ok(None) };
    let time = OffsetDateTime::parse(text, &Rfc3339).ok();
    let time = time.and_then(|time| u64::try_from(time.unix_timestamp_nanos() / 1_000_000).ok());
    time.map(Some)
        .ok_or_else(|| invalid(field)("must be a time like `2026-11-21T04:15:32Z` (RFC 3339)"))
}

impl SearchQuery {
    /// All mistakes of the query: names of parameters, and what is wrong with them. A search fails
    /// with the first.
    pub fn mistakes(&self) -> Vec<(&'static str, String)> {
        let mut left = self.clone();
        let mut mistakes: Vec<(&'static str, String)> = Vec::new();
        while let Err(LogError::Invalid { field, message }) = Criteria::check(&left) {
            let is_known = mistakes.iter().any(|(other, _)| *other == field);
            match field {
                // A service without its account: the account is missing, or was a mistake.
                "account" if left.account.is_none() => left.service = None,
                "account" => left.account = None,
                "service" => left.service = None,
                "apex" => left.apex = None,
                "status" => left.status = None,
                "code" => left.code = None,
                "path_prefix" => left.path_prefix = None,
                "caller_id" => left.caller_id = None,
                "since" => left.since = None,
                "until" => left.until = None,
                "cursor" => left.cursor = None,
                "limit" => left.limit = None,
                _ => {
                    mistakes.push((field, message));
                    return mistakes;
                }
            }
            if !is_known {
                mistakes.push((field, message));
            }
        }
        mistakes
    }
}

fn invalid<T: ToString>(field: &'static str) -> impl Fn(T) -> LogError {
    move |message| LogError::Invalid {
        field,
        message: message.to_string(),
    }
}
