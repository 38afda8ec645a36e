//! Live tunnels, as the workers report them.

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use gw_base::clock::Timestamp;
use gw_telemetry::counters::TunnelReport;

use crate::admin::Admin;
use crate::admin::console::web::failure::ErrorPage;
use crate::admin::console::web::format;
use crate::admin::console::web::page::{Chrome, Section, Visit, render};
use crate::admin::nodes::{Live, LiveQuery};

/// A tunnel as a table row.
pub(crate) struct TunnelRow {
    pub(crate) service: String,
    /// Address of the service's page.
    pub(crate) service_page: String,
    pub(crate) agent_id: String,
    pub(crate) agent_page: String,
    pub(crate) version: String,
    pub(crate) age: String,
    /// Round-trip time to the agent.
    pub(crate) round_trip: String,
    /// Time since the last relayed bytes.
    pub(crate) last_byte: String,
    pub(crate) in_flight: usize,
    /// `None` until the agent has reported them.
    pub(crate) slots: Option<SlotUse>,
    pub(crate) window: String,
    pub(crate) held: String,
    /// Expiry of the agent's certificate.
    pub(crate) certificate: Option<String>,
    pub(crate) state: String,
    /// Style of the state.
    pub(crate) look: &'static str,
    /// How long it has been in the state, and why.
    pub(crate) since: String,
    pub(crate) standby: bool,
    /// Share of the requests of the service.
    pub(crate) share: Option<u8>,
    /// Slot of the node that has the tunnel.
    pub(crate) node: Option<u16>,
}

pub(crate) struct SlotUse {
    pub(crate) in_use: u32,
    pub(crate) all: u32,
}

impl From<&TunnelReport> for TunnelRow {
    fn from(report: &TunnelReport) -> Self {
        let (account, service) = report
            .service
            .split_once("--")
            .unwrap_or((&report.service, ""));
        let slots = report.slots.map(|all| SlotUse {
            in_use: report.slots_in_use.unwrap_or(0),
            all,
        });
        Self {
            service_page: format!("/accounts/{account}/services/{service}"),
            agent_page: format!("/accounts/{account}/agents/{}", report.agent_id),
            service: report.service.clone(),
            agent_id: report.agent_id.clone(),
            version: report.agent_version.clone(),
            age: format::seconds(report.age_seconds),
            round_trip: report
                .round_trip_us
                .map_or_else(|| "–".to_owned(), format::micros),
            last_byte: match report.idle_seconds {
                0 => "now".to_owned(),
                idle => format!("{} ago", format::seconds(idle)),
            },
            in_flight: report.in_flight,
            slots,
            window: format::bytes(report.window.into()),
            held: format::bytes(report.held_bytes as u64),
            certificate: report
                .certificate_not_after
                .as_ref()
                .map(|at| format::relative(at, Timestamp::now())),
            state: report.shown_state().replace('_', " "),
            look: match report.shown_state() {
                "ready" => "good",
                "unknown" => "neutral",
                "unhealthy" | "breaker_open" | "suspect" => "bad",
                _ => "warn",
            },
            since: since(report),
            standby: report.standby,
            share: report.share_percent,
            node: report.node,
        }
    }
}

fn since(report: &TunnelReport) -> String {
    if report.draining {
        return String::new();
    }
    let reason = report
        .state_reason
        .as_ref()
        .map_or_else(String::new, |reason| format!(": {reason}"));
    format!("for {}{reason}", format::seconds(report.state_seconds))
}

#[derive(Template)]
#[template(path = "tunnels.html")]
struct TunnelsPage {
    chrome: Chrome,
    tunnels: Vec<TunnelRow>,
    /// Which tunnels are missing.
    missing: Option<String>,
}

pub(crate) async fn show(State(admin): State<Admin>, visit: Visit) -> Result<Response, ErrorPage> {
    let live = admin.live(LiveQuery::default()).await?;
    let chrome = visit.chrome(Section::Tunnels, "Live tunnels");
    render(&TunnelsPage {
        chrome,
        tunnels: rows(&live),
        missing: format::missing("Tunnels", &live.missing),
    })
}

/// All tunnels, sorted by service.
fn rows(live: &Live) -> Vec<TunnelRow> {
    let mut rows: Vec<TunnelRow> = live.tunnels().map(TunnelRow::from).collect();
    rows.sort_by(|one, other| {
        (&one.service, &one.agent_id).cmp(&(&other.service, &other.agent_id))
    });
    rows
}
