//! The overview page.

use std::collections::BTreeMap;

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use gw_base::clock::Timestamp;
use gw_base::page::PageQuery;
use gw_store::ServiceRecord;
use gw_telemetry::request_log::SearchQuery;

use super::requests::RequestRow;
use super::traffic::Range;
use crate::admin::console::web::failure::ErrorPage;
use crate::admin::console::web::format;
use crate::admin::console::web::page::{Chrome, Section, Visit, render};
use crate::admin::nodes::{Live, LiveQuery};
use crate::admin::{Admin, NoResult};
use crate::control::records::certificate as certificates;
use crate::control::{Control, WarningView, warnings};

/// Most services on the page; the pages of the accounts list all.
const SERVICES: usize = 50;
const ERRORS: usize = 8;
/// Greatest age of the errors shown. The page is refreshed every few seconds, so that a longer
/// search would be expensive.
const ERRORS_SECONDS: i64 = 3600;

#[derive(Template)]
#[template(path = "overview.html")]
struct OverviewPage {
    chrome: Chrome,
    glance: Glance,
    /// Which live data is missing.
    missing: Option<String>,
    /// `None` if the log cannot be read.
    errors: Option<Errors>,
    range: Range,
}

struct Glance {
    accounts: usize,
    services: Vec<ServiceRow>,
    more_services: usize,
    tunnels: usize,
    in_flight: usize,
    connections: String,
    warnings: Vec<WarningView>,
    several_primaries: Option<String>,
    certificate: Certificate,
}

/// The server certificate in use.
struct Certificate {
    /// Its end, and the time until then.
    end: Option<(String, String)>,
    /// Why those of an ACME authority need attention.
    attention: Vec<String>,
}

struct Errors {
    rows: Vec<RequestRow>,
    /// Whether these are all errors; a search ends early after a limit of work.
    are_all: bool,
    /// Which requests are missing.
    missing: Option<String>,
}

struct ServiceRow {
    account: String,
    id: String,
    hostname: String,
    enabled: bool,
    tunnels: usize,
    in_flight: usize,
    /// Its redundancy is lost.
    has_warning: bool,
}

impl ServiceRow {
    /// Text and style of the service's state.
    fn state(&self) -> (&'static str, &'static str) {
        match (self.enabled, self.tunnels, self.has_warning) {
            (false, ..) => ("disabled", "neutral"),
            (true, 0, _) => ("no tunnel", "bad"),
            (true, _, true) => ("not redundant", "warn"),
            (true, _, false) => ("serving", "good"),
        }
    }
}

pub(crate) async fn show(State(admin): State<Admin>, visit: Visit) -> Result<Response, ErrorPage> {
    let live = admin.live(LiveQuery::default()).await?;
    let missing = format::missing("Tunnels and connections", &live.missing);
    let glance = admin
        .look(move |control| Ok(glance(control, &live)))
        .await?;
    // The rest of the page is shown even without the errors.
    let errors = match errors(&admin, Timestamp::now()).await {
        Ok(errors) => Some(errors),
        Err(NoResult::Refused(error)) => {
            tracing::error!(%error, "cannot read recent errors from the log");
            None
        }
        Err(NoResult::Panicked(_)) => None,
    };
    let chrome = visit.chrome(Section::Overview, "Overview");
    render(&OverviewPage {
        chrome,
        glance,
        missing,
        errors,
        range: Range::default(),
    })
}

fn glance(control: &Control, live: &Live) -> Glance {
    let mut by_service: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for tunnel in live.tunnels() {
        let (count, in_flight) = by_service.entry(&tunnel.service).or_default();
        *count += 1;
        *in_flight += tunnel.in_flight;
    }
    let warnings = warnings::list(control, live.tunnels());
    let row = |service: &ServiceRecord| {
        let label = format!("{}--{}", service.account, service.id);
        let (tunnels, in_flight) = by_service.get(label.as_str()).copied().unwrap_or_default();
        ServiceRow {
            account: service.account.to_string(),
            id: service.id.to_string(),
            hostname: control
                .region()
                .tenant_hostname(&service.account, &service.id)
                .unwrap_or_default(),
            enabled: service.settings.enabled,
            tunnels,
            in_flight,
            has_warning: warnings
                .iter()
                .any(|warning| warning.is_of(&service.account, &service.id)),
        }
    };
    let (accounts, services, all_services) = control.look_at(|records| {
        let rows: Vec<ServiceRow> = records.services.values().take(SERVICES).map(row).collect();
        (records.accounts.len(), rows, records.services.len())
    });
    Glance {
        accounts,
        services,
        more_services: all_services.saturating_sub(SERVICES),
        tunnels: live.nodes().map(|node| node.tunnels).sum(),
        in_flight: live.nodes().map(|node| node.in_flight).sum(),
        connections: format::count(live.nodes().map(|node| node.connections as u64).sum()),
        warnings,
        several_primaries: control.several_primaries(),
        certificate: certificate(control, Timestamp::now()),
    }
}

fn certificate(control: &Control, now: Timestamp) -> Certificate {
    let end = control.server_certificate_end().map(|end| {
        let end = end.to_string();
        (format::time(&end), format::relative(&end, now))
    });
    let attention = match certificates::list(control, &PageQuery::default()) {
        Ok(page) => page
            .items
            .into_iter()
            .filter_map(|view| view.attention)
            .collect(),
        Err(error) => vec![error.to_string()],
    };
    Certificate { end, attention }
}

async fn errors(admin: &Admin, now: Timestamp) -> Result<Errors, NoResult> {
    let failed = SearchQuery {
        status: Some("5xx".to_owned()),
        since: Some(Timestamp(now.0 - ERRORS_SECONDS).to_string()),
        limit: Some(ERRORS),
        partial: Some(true),
        ..SearchQuery::default()
    };
    let page = admin.search(failed).await?;
    Ok(Errors {
        rows: page.items.iter().map(RequestRow::from).collect(),
        are_all: page.next_cursor.is_none(),
        missing: format::missing("Errors", &page.missing_nodes),
    })
}
