//! Usage of services by day. A single gateway has all of it in its own file; the nodes of a region
//! write theirs into PostgreSQL, within a minute.

use std::sync::Arc;
use std::time::Duration;

use gw_base::clock::Timestamp;
use gw_base::page::{Page, checked_limit};
use gw_base::process::background::Tasks;
use gw_shared::id::{AccountId, ServiceId, split_tenant_label, tenant_label};
use gw_store::{UsageQuery, UsageRow, label_of};
use gw_telemetry::timeseries::{FileError, Series, SeriesError, Usage};
use serde::{Deserialize, Serialize};
use time::{Date, Month};
use utoipa::{IntoParams, ToSchema};

use super::executor::repeat;
use super::{Control, ControlError};

/// Interval of writing to the store that nodes share. With the interval of points it is less than a
/// minute, which a lost node loses.
const INTERVAL: Duration = Duration::from_secs(30);
/// Rows that are written at once. Changes wait meanwhile.
const ROWS: usize = 500;

/// What one service was used for on one day, on all nodes.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = Usage)]
pub struct UsageView {
    /// Day in UTC.
    #[schema(format = Date)]
    pub date: String,
    /// Account of the service; null for services without counters of their own, which are counted
    /// together.
    pub account: Option<String>,
    /// Service of the account; null likewise.
    pub service: Option<String>,
    /// Ended requests.
    pub requests: u64,
    /// Requests among them that the gateway answered with an error of its own.
    pub refusals: u64,
    /// Bytes of request bodies.
    pub bytes_in: u64,
    /// Bytes of response bodies.
    pub bytes_out: u64,
}

/// Which usage.
#[derive(Debug, Clone, Default, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct UsageFilter {
    /// Only services of this account.
    #[param(pattern = "^[a-z0-9]{3,15}$")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub account: Option<String>,
    /// Only this service of the account.
    #[param(pattern = "^[a-z0-9]([a-z0-9-]{0,56}[a-z0-9])?$")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
    /// First day in UTC, `2026-11-01`.
    #[param(format = Date)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    /// Last day in UTC.
    #[param(format = Date)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until: Option<String>,
    /// Most items on the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// `next_cursor` of the page before.
    #[param(pattern = "^[0-9]{4}-[0-9]{2}-[0-9]{2}/.*$")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
}

impl From<UsageRow> for UsageView {
    fn from(row: UsageRow) -> Self {
        let UsageRow {
            date,
            label,
            amounts,
        } = row;
        let (account, service) = split_tenant_label(label_of(&label)).unzip();
        Self {
            date,
            account: account.map(String::from),
            service: service.map(String::from),
            requests: amounts.requests,
            refusals: amounts.refusals,
            bytes_in: amounts.bytes_in,
            bytes_out: amounts.bytes_out,
        }
    }
}

impl UsageFilter {
    fn check(&self) -> Result<UsageQuery, ControlError> {
        let account = self.account.as_deref().map(AccountId::new).transpose();
        let account = account.map_err(ControlError::bad_id("account"))?;
        let service = self.service.as_deref().map(ServiceId::new).transpose();
        let service = service.map_err(ControlError::bad_id("service"))?;
        let label = match (&account, &service) {
            (None, Some(_)) => {
                return Err(ControlError::invalid(
                    "service",
                    "needs the account of the service",
                ));
            }
            (Some(account), Some(service)) => {
                Some(tenant_label(account, service).ok_or_else(|| {
                    ControlError::invalid("service", "is no service of this account")
                })?)
            }
            _ => None,
        };
        let of_account = account.map_or_else(String::new, |account| format!("{account}--"));
        let since = date("since", self.since.as_deref(), "0001-01-01")?;
        let until = date("until", self.until.as_deref(), "9999-12-31")?;
        if until < since {
            return Err(ControlError::invalid("until", "is before since"));
        }
        let after = self.cursor.as_deref().map(|cursor| {
            let (day, label) = cursor.split_once('/').ok_or_else(|| {
                ControlError::invalid("cursor", "must be the next_cursor of a page")
            })?;
            Ok::<_, ControlError>((date("cursor", Some(day), "")?, label.to_owned()))
        });
        Ok(UsageQuery {
            since,
            until,
            label_prefix: label.map_or(of_account, |label| format!("{label}@")),
            after: after.transpose()?,
            limit: checked_limit(self.limit)?,
        })
    }
}

/// A valid day, as it was written; `default` without one.
fn date(field: &'static str, text: Option<&str>, default: &str) -> Result<String, ControlError> {
    let Some(text) = text else {
        return Ok(default.to_owned());
    };
    let is_valid = || {
        let (year, rest) = text.split_once('-')?;
        let (month, day) = rest.split_once('-')?;
        let has_digits = |part: &str, count| {
            part.len() == count && part.bytes().all(|byte| byte.is_ascii_digit())
        };
        if !(has_digits(year, 4) && has_digits(month, 2) && has_digits(day, 2)) {
            return None;
        }
        let month = Month::try_from(month.parse::<u8>().ok()?).ok()?;
        let year = year.parse().ok().filter(|year| *year > 0)?;
        Date::from_calendar_date(year, month, day.parse().ok()?).ok()
    };
    match is_valid() {
        Some(_) => Ok(text.to_owned()),
        None => Err(ControlError::invalid(
            field,
            "must be a day such as 2026-11-21",
        )),
    }
}

/// A page of usage, the newest day first, without that of earlier accounts and services of the same
/// names. In a region it includes what the nodes have written so far.
pub fn list(
    control: &Control,
    usage: &Usage,
    filter: &UsageFilter,
) -> Result<Page<UsageView>, ControlError> {
    let query = filter.check()?;
    // One more row than the page has tells whether another page follows.
    let one_more = UsageQuery {
        limit: query.limit.saturating_add(1),
        ..query.clone()
    };
    // The newest counts of this node.
    send(control, usage)?;
    let shared = control
        .store()
        .as_mut()
        .ok_or(ControlError::HandedOver)?
        .usage(&one_more)?;
    let mut rows = match shared {
        Some(rows) => rows,
        None => usage.rows(&one_more).map_err(SeriesError::from)?,
    };
    let has_more = rows.len() > query.limit;
    rows.truncate(query.limit);
    let next_cursor = rows
        .last()
        .filter(|_| has_more)
        .map(|last| format!("{}/{}", last.date, last.label));
    let directory = control.directory();
    rows.retain(|row| directory.shows_counts(&row.label));
    Ok(Page {
        items: rows.into_iter().map(UsageView::from).collect(),
        next_cursor,
    })
}

/// Starts the periodic task that writes usage into the shared store, if any, and deletes usage
/// older than 400 days.
pub fn keep(control: &Arc<Control>, series: &Arc<Series>, tasks: &Tasks) {
    let of_control = Arc::clone(control);
    let series = Arc::clone(series);
    repeat(tasks, "the usage of services", INTERVAL, move || {
        if of_control.has_store()
            && let Err(error) = send(&of_control, series.usage())
        {
            tracing::debug!(%error,
                "usage is not in the shared store yet; tried again in half a minute");
        }
    });
}

fn send(control: &Control, usage: &Usage) -> Result<(), ControlError> {
    let file = |error: FileError| ControlError::from(SeriesError::from(error));
    let oldest = usage.forget_old(Timestamp::now()).map_err(file)?;
    loop {
        let Some(unsent) = usage.unsent(ROWS).map_err(file)? else {
            return Ok(());
        };
        let mut store = control.store();
        let store = store.as_mut().ok_or(ControlError::HandedOver)?;
        if !store.put_usage(&unsent.source, &unsent.rows, &oldest)? {
            return Ok(());
        }
        usage.sent(&unsent).map_err(file)?;
        if unsent.rows.len() < ROWS {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(filter: &UsageFilter) -> String {
        filter.check().unwrap_err().to_string()
    }

    #[test]
    fn filters_are_checked() {
        let text = |text: &str| Some(text.to_owned());
        let filter = UsageFilter {
            account: text("acme"),
            service: text("api"),
            since: text("2024-02-29"),
            until: text("2024-02-29"),
            limit: Some(7),
            cursor: text("2026-11-21/acme--api"),
        };
        let query = filter.check().unwrap();
        assert_eq!(
            (query.label_prefix.as_str(), query.limit),
            ("acme--api@", 7)
        );
        assert_eq!(
            query.after,
            Some(("2026-11-21".to_owned(), "acme--api".to_owned()))
        );
        let default = UsageFilter::default();
        assert!(default.check().unwrap().label_prefix.is_empty());
        for day in [
            "",
            "2026-13-01",
            "2026-02-30",
            "2026-2-3",
            "+026-02-03",
            "0000-01-01",
            "x",
        ] {
            let since = UsageFilter {
                since: text(day),
                ..UsageFilter::default()
            };
            assert_eq!(refused(&since), "since: must be a day such as 2026-11-21");
        }
        let turned = UsageFilter {
            since: text("2026-02-01"),
            until: text("2026-01-01"),
            ..UsageFilter::default()
        };
        assert_eq!(refused(&turned), "until: is before since");
        let alone = UsageFilter {
            service: text("api"),
            ..UsageFilter::default()
        };
        assert_eq!(refused(&alone), "service: needs the account of the service");
    }
}
