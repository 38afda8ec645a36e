//! Services of an account.

use askama::Template;
use axum::Extension;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Redirect, Response};

use super::accounts::{ListQuery, Tab, crumbs};
use super::traffic::Range;
use crate::admin::Admin;
use crate::admin::console::web::failure::ErrorPage;
use crate::admin::console::web::form::Form;
use crate::admin::console::web::format;
use crate::admin::console::web::page::{Chrome, Crumb, Section, Visit, render};
use crate::admin::nodes::LiveQuery;
use crate::affinity::Affinity;
use crate::control::{
    Actor, Control, Mode, NewService, ServiceChanges, ServiceView, WarningView, account, service,
    warnings,
};
use crate::page::Page;
use crate::telemetry::counters::EndedTunnel;

#[derive(Template)]
#[template(path = "services.html")]
struct ServicesPage {
    chrome: Chrome,
    crumbs: Vec<Crumb>,
    account: String,
    tab: Tab,
    services: Page<ServiceView>,
}

#[derive(Template)]
#[template(path = "service_new.html")]
struct NewServicePage {
    chrome: Chrome,
    crumbs: Vec<Crumb>,
    account: String,
    apex: String,
    capture_allowed: bool,
    form: Form,
}

#[derive(Template)]
#[template(path = "service.html")]
struct ServicePage {
    chrome: Chrome,
    crumbs: Vec<Crumb>,
    service: ServiceView,
    label: String,
    tunnels: usize,
    /// Last ends of tunnels to the service, for agents without one now.
    ended: Vec<EndedTunnel>,
    warning: Option<WarningView>,
    /// Which tunnels are missing.
    missing: Option<String>,
    capture_allowed: bool,
    form: Form,
    range: Range,
}

pub(crate) async fn list(
    State(admin): State<Admin>,
    visit: Visit,
    Path(account): Path<String>,
    Query(query): Query<ListQuery>,
) -> Result<Response, ErrorPage> {
    let id = account.clone();
    let services = admin
        .look(move |control| service::list(control, &id, &query.into()))
        .await?;
    let chrome = visit.chrome(Section::Accounts, format!("Services of {account}"));
    render(&ServicesPage {
        chrome,
        crumbs: crumbs(&account),
        account,
        tab: Tab::Services,
        services,
    })
}

pub(crate) async fn new(
    State(admin): State<Admin>,
    visit: Visit,
    Path(account): Path<String>,
) -> Result<Response, ErrorPage> {
    // The defaults of the control plane.
    let form = Form::default()
        .with("modes", "jwt")
        .with("modes", "service_key")
        .with_box("request_logging", true)
        .with_box("retries", true)
        .with("affinity", Affinity::None);
    new_page(&admin, visit, account, form).await
}

async fn new_page(
    admin: &Admin,
    visit: Visit,
    account: String,
    form: Form,
) -> Result<Response, ErrorPage> {
    let id = account.clone();
    let capture_allowed = admin
        .look(move |control| account::show(control, &id))
        .await?
        .capture_allowed;
    let chrome = visit.chrome(Section::Accounts, "New service");
    let apex = admin.control.region().apex().to_owned();
    render(&NewServicePage {
        chrome,
        crumbs: crumbs(&account),
        account,
        apex,
        capture_allowed,
        form,
    })
}

pub(crate) async fn create(
    State(admin): State<Admin>,
    visit: Visit,
    Path(account): Path<String>,
    Extension(mut form): Extension<Form>,
) -> Result<Response, ErrorPage> {
    let settings = ServiceChanges {
        enabled: None,
        ..settings(&mut form)
    };
    if !form.is_refused() {
        let new = NewService::new(form.value("id").trim().to_owned(), settings);
        let account = account.clone();
        match admin
            .attempt(move |control| service::create(control, &Actor::Admin, &account, &new))
            .await?
        {
            Ok((service, created)) => {
                let note = if created { "created" } else { "there" };
                return Ok(
                    Redirect::to(&format!("{}?note={note}", address(&service))).into_response()
                );
            }
            Err(error) => form.refused_by(error)?,
        }
    }
    Ok((
        StatusCode::UNPROCESSABLE_ENTITY,
        new_page(&admin, visit, account, form).await?,
    )
        .into_response())
}

pub(crate) async fn show(
    State(admin): State<Admin>,
    visit: Visit,
    Path((account, service)): Path<(String, String)>,
) -> Result<Response, ErrorPage> {
    page(&admin, visit, account, service, None).await
}

/// Shows the stored settings, or the invalid settings that were submitted.
async fn page(
    admin: &Admin,
    visit: Visit,
    account: String,
    service: String,
    typed: Option<Form>,
) -> Result<Response, ErrorPage> {
    let live = admin
        .live(LiveQuery {
            account: Some(account.clone()),
            ..LiveQuery::default()
        })
        .await?;
    let missing = format::missing("Tunnels", &live.missing);
    let look = move |control: &Control| {
        let capture_allowed = account::show(control, &account)?.capture_allowed;
        let service = service::show(control, &account, &service)?;
        let label = format!("{}--{}", service.account, service.id);
        let tunnels = live
            .tunnels()
            .filter(|tunnel| tunnel.service == label)
            .count();
        let ended = live.ended_tunnels(&label);
        let warnings = warnings::list(control, live.tunnels());
        let warning = warnings
            .into_iter()
            .find(|warning| warning.is_of(&service.account, &service.id));
        Ok((service, capture_allowed, label, tunnels, ended, warning))
    };
    let (service, capture_allowed, label, tunnels, ended, warning) = admin.look(look).await?;
    let chrome = visit.chrome(Section::Accounts, service.id.as_str());
    render(&ServicePage {
        chrome,
        crumbs: crumbs(service.account.as_str()),
        tunnels,
        ended,
        warning,
        missing,
        capture_allowed,
        form: typed.unwrap_or_else(|| as_it_is(&service)),
        service,
        label,
        range: Range::default(),
    })
}

pub(crate) async fn change(
    State(admin): State<Admin>,
    visit: Visit,
    Path((account, service)): Path<(String, String)>,
    Extension(mut form): Extension<Form>,
) -> Result<Response, ErrorPage> {
    let changes = settings(&mut form);
    for field in ["burst", "refill_per_minute"] {
        if form.filled(field).is_none() {
            form.refuse(field, "must be at least 1");
        }
    }
    if !form.is_refused() {
        let account = account.clone();
        let service = service.clone();
        let change = move |control: &Control| {
            service::change(control, &Actor::Admin, &account, &service, &changes)
        };
        match admin.attempt(change).await? {
            Ok(service) => {
                return Ok(
                    Redirect::to(&format!("{}?note=saved", address(&service))).into_response()
                );
            }
            Err(error) => form.refused_by(error)?,
        }
    }
    let page = page(&admin, visit, account, service, Some(form)).await?;
    Ok((StatusCode::UNPROCESSABLE_ENTITY, page).into_response())
}

pub(crate) async fn delete(
    State(admin): State<Admin>,
    visit: Visit,
    Path((account, service)): Path<(String, String)>,
    Extension(mut form): Extension<Form>,
) -> Result<Response, ErrorPage> {
    if form.confirms(&service) {
        let account_id = account.clone();
        let id = service.clone();
        let delete =
            move |control: &Control| service::delete(control, &Actor::Admin, &account_id, &id);
        match admin.attempt(delete).await? {
            Ok(()) => {
                return Ok(
                    Redirect::to(&format!("/accounts/{account}?note=deleted")).into_response()
                );
            }
            Err(error) => form.refused_by(error)?,
        }
    }
    let account_id = account.clone();
    let id = service.clone();
    let view = admin
        .look(move |control| service::show(control, &account_id, &id))
        .await?;
    let form = as_it_is(&view)
        .with("confirm", form.value("confirm"))
        .with_errors_of(&form);
    let page = page(&admin, visit, account, service, Some(form)).await?;
    Ok((StatusCode::UNPROCESSABLE_ENTITY, page).into_response())
}

/// All settings of the form. The control plane chooses omitted numbers.
fn settings(form: &mut Form) -> ServiceChanges {
    let modes = [(Mode::Jwt, "jwt"), (Mode::ServiceKey, "service_key")];
    ServiceChanges {
        modes: Some(
            modes
                .into_iter()
                .filter(|(_, word)| form.has("modes", word))
                .map(|(mode, _)| mode)
                .collect(),
        ),
        enabled: Some(form.is_ticked("enabled")),
        burst: form.number("burst", 1..=u32::MAX),
        refill_per_minute: form.number("refill_per_minute", 1..=u32::MAX),
        request_logging: Some(form.is_ticked("request_logging")),
        capture_request_body: Some(form.is_ticked("capture_request_body")),
        capture_response_body: Some(form.is_ticked("capture_response_body")),
        retries: Some(form.is_ticked("retries")),
        affinity: Some(
            form.filled("affinity")
                .unwrap_or_else(|| Affinity::None.into()),
        ),
    }
}

fn as_it_is(service: &ServiceView) -> Form {
    let modes = service.modes.iter().map(|mode| match mode {
        Mode::Jwt => "jwt",
        Mode::ServiceKey => "service_key",
    });
    modes
        .fold(Form::default(), |form, mode| form.with("modes", mode))
        .with_box("enabled", service.enabled)
        .with("burst", service.burst.to_string())
        .with("refill_per_minute", service.refill_per_minute.to_string())
        .with_box("request_logging", service.request_logging)
        .with_box("capture_request_body", service.capture_request_body)
        .with_box("capture_response_body", service.capture_response_body)
        .with_box("retries", service.retries)
        .with("affinity", service.affinity.clone())
}

fn address(service: &ServiceView) -> String {
    format!("/accounts/{}/services/{}", service.account, service.id)
}
