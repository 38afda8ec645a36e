//! `gw-gateway usage`

use std::io::{self, Write};

use clap::Args;
use gw_control_plane::control::usage::UsageView;
use gw_shared::id::{AccountId, ServiceId};
use gw_shared::text::escaped;

use super::client::api::ApiError;
use super::client::output::{CommandError, Listed, Output, Shown, or_dash};

#[derive(Args)]
pub(crate) struct UsageArguments {
    /// Only services of this account.
    #[arg(long)]
    account: Option<AccountId>,
    /// Only this service of the account.
    #[arg(long, requires = "account")]
    service: Option<ServiceId>,
    /// First day in UTC, for example 2026-11-01.
    #[arg(long, value_name = "DAY")]
    since: Option<String>,
    /// Last day in UTC.
    #[arg(long, value_name = "DAY")]
    until: Option<String>,
    /// Print lines of comma-separated values, with their names in the first line.
    #[arg(long, conflicts_with = "json")]
    csv: bool,
}

impl UsageArguments {
    pub(crate) fn run(self, output: &mut Output) -> Result<(), CommandError> {
        let filter = [
            ("account", self.account.as_ref().map(AccountId::as_str)),
            ("service", self.service.as_ref().map(ServiceId::as_str)),
            ("since", self.since.as_deref()),
            ("until", self.until.as_deref()),
        ];
        let filter: Vec<(&str, &str)> = filter
            .into_iter()
            .filter_map(|(name, value)| Some((name, value?)))
            .collect();
        if !self.csv {
            return output.list::<UsageView>("/usage", &filter, None);
        }
        let page = output.api.list("/usage", &filter, None)?;
        let rows = page.items.into_iter().map(serde_json::from_value);
        let rows: Vec<UsageView> = rows.collect::<Result<_, _>>().map_err(ApiError::from)?;
        output.write(|out| write_csv(out, &rows))
    }
}

/// No value has a comma or a quotation mark.
fn write_csv(out: &mut impl Write, rows: &[UsageView]) -> io::Result<()> {
    writeln!(
        out,
        "date,account,service,requests,refusals,bytes_in,bytes_out"
    )?;
    for row in rows {
        let UsageView {
            date,
            account,
            service,
            requests,
            refusals,
            bytes_in,
            bytes_out,
        } = row;
        let [date, account, service] = [Some(date), account.as_ref(), service.as_ref()]
            .map(|text| text.map_or_else(String::new, |text| escaped(text).into_owned()));
        writeln!(
            out,
            "{date},{account},{service},{requests},{refusals},{bytes_in},{bytes_out}"
        )?;
    }
    Ok(())
}

impl Shown for UsageView {
    fn facts(&self) -> Vec<(&'static str, String)> {
        vec![
            ("date", self.date.clone()),
            ("account", or_dash(self.account.as_ref())),
            ("service", or_dash(self.service.as_ref())),
            ("requests", self.requests.to_string()),
            ("refusals", self.refusals.to_string()),
            ("bytes in", self.bytes_in.to_string()),
            ("bytes out", self.bytes_out.to_string()),
        ]
    }
}

impl Listed for UsageView {
    const PLURAL: &'static str = "usage";
    const COLUMNS: usize = 7;
}
