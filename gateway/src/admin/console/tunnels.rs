//! Live tunnels, as the workers report them.

use askama::Template;
use axum::extract::State;
use axum::response::Response;

use super::failure::Failure;
use super::format;
use super::page::{Chrome, Section, Visit, render};
use crate::admin::Admin;
use crate::clock::Timestamp;
use crate::control::Control;
use crate::telemetry::counters::TunnelReport;

/// A tunnel as it is shown: one cell each.
pub(super) struct TunnelRow {
    pub(super) service: String,
    /// Address of the service's page.
    pub(super) service_page: String,
    pub(super) agent_id: String,
    pub(super) agent_page: String,
    pub(super) version: String,
    pub(super) age: String,
    /// To the agent and back.
    pub(super) round_trip: String,
    /// How long ago something was relayed.
    pub(super) last_byte: String,
    pub(super) in_flight: usize,
    /// `None` until the agent has reported them.
    pub(super) slots: Option<Slots>,
    pub(super) window: String,
    pub(super) held: String,
    /// When the agent's certificate expires.
    pub(super) certificate: Option<String>,
    pub(super) draining: bool,
}

pub(super) struct Slots {
    pub(super) in_use: u32,
    pub(super) all: u32,
}

impl From<&TunnelReport> for TunnelRow {
    fn from(report: &TunnelReport) -> Self {
        let (account, service) = report.service.split_once("--").unwrap_or((&report.service, ""));
        let slots = report.slots.map(|all| Slots { in_use: report.slots_in_use.unwrap_or(0), all });
        Self {
            service_page: format!("/accounts/{account}/services/{service}"),
            agent_page: format!("/accounts/{account}/agents/{}", report.agent_id),
            service: report.service.clone(),
            agent_id: report.agent_id.clone(),
            version: report.agent_version.clone(),
            age: format::seconds(report.age_seconds),
            round_trip: report.round_trip_us.map_or_else(|| "–".to_owned(), format::micros),
            last_byte: match report.idle_seconds {
                0 => "now".to_owned(),
                idle => format!("{} ago", format::seconds(idle)),
            },
            in_flight: report.in_flight,
            slots,
            window: format::bytes(report.window.into()),
            held: format::bytes(report.held_bytes as u64),
            certificate: report.certificate_not_after.as_ref().map(|at| format::relative(at, Timestamp::now())),
            draining: report.draining,
        }
    }
}

#[derive(Template)]
#[template(path = "tunnels.html")]
struct TunnelsPage {
    chrome: Chrome,
    tunnels: Vec<TunnelRow>,
}

pub(super) async fn show(State(admin): State<Admin>, visit: Visit) -> Result<Response, Failure> {
    let tunnels = admin.look(|control| Ok(rows(control))).await?;
    render(&TunnelsPage { chrome: visit.chrome(Section::Tunnels, "Live tunnels"), tunnels })
}

/// All of them, by service.
fn rows(control: &Control) -> Vec<TunnelRow> {
    let mut rows: Vec<TunnelRow> = control.tunnels().iter().map(TunnelRow::from).collect();
    rows.sort_by(|one, other| (&one.service, &one.agent_id).cmp(&(&other.service, &other.agent_id)));
    rows
}
