//! Services of an account.

use askama::Template;
use axum::Extension;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Redirect, Response};
use gw_base::clock::Timestamp;
use gw_base::page::Page;
use gw_base::service::affinity::Affinity;
use gw_base::service::service_settings::{Group, Kind, SETTINGS, ServiceSettings, Setting};
use gw_telemetry::counters::EndedTunnel;
use serde_json::{Map, Value, json};

use super::accounts::{ListQuery, Tab, crumbs};
use super::domains::{self, status_word};
use crate::admin::Admin;
use crate::admin::console::pages::traffic::Range;
use crate::admin::console::web::failure::ErrorPage;
use crate::admin::console::web::format;
use crate::admin::console::web::forms::form::Form;
use crate::admin::console::web::page::{Chrome, Crumb, Section, Visit, render, render_form};
use crate::admin::nodes::LiveQuery;
use crate::control::records::{account, domain, service};
use crate::control::{
    Actor, Control, DomainView, Mode, NewService, ServiceChanges, ServiceView, WarningView,
    warnings,
};

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
    warnings: Vec<WarningView>,
    domains: Vec<DomainView>,
    now: Timestamp,
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
    // The region has a default of its own for numbers.
    let defaults = ServiceChanges {
        enabled: None,
        burst: None,
        refill_per_minute: None,
        ..ServiceChanges::from(&ServiceSettings::default())
    };
    let form = filled(&json!(defaults));
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
    let page = NewServicePage {
        chrome,
        crumbs: crumbs(&account),
        account,
        apex,
        capture_allowed,
        form,
    };
    render_form(page, |page| (&mut page.chrome, &page.form))
}

pub(crate) async fn create(
    State(admin): State<Admin>,
    visit: Visit,
    Path(account): Path<String>,
    Extension(mut form): Extension<Form>,
) -> Result<Response, ErrorPage> {
    let settings = ServiceChanges {
        enabled: None,
        ..settings(&mut form)?
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
    new_page(&admin, visit, account, form).await
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
        let warnings: Vec<WarningView> = warnings
            .into_iter()
            .filter(|warning| warning.is_of(&service.account, &service.id))
            .collect();
        let domains = domain::of_service(control, &service.account, &service.id);
        let of_service = (warnings, domains);
        Ok((service, capture_allowed, label, tunnels, ended, of_service))
    };
    let (service, capture_allowed, label, tunnels, ended, of_service) = admin.look(look).await?;
    let (warnings, domains) = of_service;
    let chrome = visit.chrome(Section::Accounts, service.id.as_str());
    let page = ServicePage {
        chrome,
        crumbs: crumbs(service.account.as_str()),
        tunnels,
        ended,
        warnings,
        domains,
        now: Timestamp::now(),
        missing,
        capture_allowed,
        form: typed.unwrap_or_else(|| filled(&json!(service))),
        service,
        label,
        range: Range::default(),
    };
    render_form(page, |page| (&mut page.chrome, &page.form))
}

pub(crate) async fn change(
    State(admin): State<Admin>,
    visit: Visit,
    Path((account, service)): Path<(String, String)>,
    Extension(mut form): Extension<Form>,
) -> Result<Response, ErrorPage> {
    let changes = settings(&mut form)?;
    for setting in SETTINGS.iter() {
        if let Kind::Count { min, .. } = setting.kind
            && form.filled(setting.name).is_none()
        {
            form.refuse(setting.name, format!("must be at least {min}"));
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
    page(&admin, visit, account, service, Some(form)).await
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
    refused(&admin, visit, (account, service), &form, "confirm").await
}

/// Adds an own domain.
pub(crate) async fn add_domain(
    State(admin): State<Admin>,
    visit: Visit,
    Path((account, service)): Path<(String, String)>,
    Extension(mut form): Extension<Form>,
) -> Result<Response, ErrorPage> {
    match domains::add(&admin, &account, &service, &mut form).await? {
        Some(response) => Ok(response),
        None => refused(&admin, visit, (account, service), &form, "name").await,
    }
}

/// Shows the stored settings, with the field of another form of the page and its errors.
async fn refused(
    admin: &Admin,
    visit: Visit,
    (account, service): (String, String),
    form: &Form,
    field: &str,
) -> Result<Response, ErrorPage> {
    let account_id = account.clone();
    let id = service.clone();
    let view = admin
        .look(move |control| service::show(control, &account_id, &id))
        .await?;
    let form = filled(&json!(view))
        .with(field, form.value(field))
        .with_errors_of(form);
    page(admin, visit, account, service, Some(form)).await
}

/// All settings of the form. The control plane chooses omitted numbers.
fn settings(form: &mut Form) -> Result<ServiceChanges, ErrorPage> {
    let mut given = Map::new();
    for setting in SETTINGS.iter() {
        let name = setting.name;
        let value = match setting.kind {
            Kind::Modes => Some(
                [Mode::Jwt, Mode::ServiceKey]
                    .map(|mode| json!(mode))
                    .into_iter()
                    .filter(|mode| mode.as_str().is_some_and(|word| form.has(name, word)))
                    .collect(),
            ),
            Kind::State | Kind::Switch => Some(form.is_ticked(name).into()),
            Kind::Count { min, max } => form.number(name, min..=max).map(Value::from),
            Kind::Affinity => Some(
                form.filled(name)
                    .unwrap_or_else(|| Affinity::None.into())
                    .into(),
            ),
        };
        given.extend(value.map(|value| (name.to_owned(), value)));
    }
    serde_json::from_value(given.into()).map_err(|_| ErrorPage::broken())
}

/// A form with the settings in `service`, as the API has them.
fn filled(service: &Value) -> Form {
    SETTINGS.iter().fold(Form::default(), |form, setting| {
        let name = setting.name;
        match &service[name] {
            Value::Bool(is_on) => form.with_box(name, *is_on),
            Value::String(text) => form.with(name, text),
            Value::Array(words) => words
                .iter()
                .filter_map(Value::as_str)
                .fold(form, |form, word| form.with(name, word)),
            Value::Number(number) => form.with(name, number.to_string()),
            Value::Null | Value::Object(_) => form,
        }
    })
}

fn address(service: &ServiceView) -> String {
    format!("/accounts/{}/services/{}", service.account, service.id)
}
