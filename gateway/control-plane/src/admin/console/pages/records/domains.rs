//! Own domains of services.

use askama::Template;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use gw_base::clock::Timestamp;
use gw_shared::identity::secret::Secret;
use gw_store::{DomainCertificateSource, DomainState};

use super::accounts::crumbs;
use super::services;
use crate::admin::Admin;
use crate::admin::console::web::failure::ErrorPage;
use crate::admin::console::web::format;
use crate::admin::console::web::forms::form::Form;
use crate::admin::console::web::page::{Chrome, Crumb, Section, Visit, crumb, render_form};
use crate::control::records::domain;
use crate::control::{Actor, Control, ControlError, DomainView, NewDomain, NewDomainCertificate};

#[derive(Template)]
#[template(path = "domain.html")]
struct DomainPage {
    chrome: Chrome,
    crumbs: Vec<Crumb>,
    domain: DomainView,
    now: Timestamp,
    form: Form,
}

pub(crate) fn routes() -> Router<Admin> {
    Router::new()
        .route(
            "/accounts/{account}/services/{service}/domains",
            post(services::add_domain),
        )
        .route("/accounts/{account}/domains/{domain}", get(show))
        .route("/accounts/{account}/domains/{domain}/check", post(check))
        .route(
            "/accounts/{account}/domains/{domain}/certificate",
            post(upload),
        )
        .route(
            "/accounts/{account}/domains/{domain}/certificate/renew",
            post(renew),
        )
        .route("/accounts/{account}/domains/{domain}/delete", post(delete))
}

/// Text and style of a domain's status.
pub(crate) fn status_word(status: &DomainState) -> (&'static str, &'static str) {
    match status {
        DomainState::Pending => ("waiting for DNS", "warn"),
        DomainState::Active => ("active", "good"),
        DomainState::Lost => ("proof lost", "bad"),
        DomainState::Disabled => ("disabled", "bad"),
    }
}

/// Origin of a certificate, in words.
pub(crate) fn source_word(source: &DomainCertificateSource) -> &'static str {
    match source {
        DomainCertificateSource::Acme => "by the ACME authority",
        DomainCertificateSource::Uploaded => "uploaded",
    }
}

/// Adds the domain of the form to a service. `None` if the form has errors then.
pub(crate) async fn add(
    admin: &Admin,
    account: &str,
    service: &str,
    form: &mut Form,
) -> Result<Option<Response>, ErrorPage> {
    let new = NewDomain {
        name: form.value("name").trim().to_owned(),
        managed_by: None,
    };
    let (account, service) = (account.to_owned(), service.to_owned());
    let add =
        move |control: &Control| domain::add(control, &Actor::Admin, &account, &service, &new);
    match admin.attempt(add).await? {
        Ok((domain, added)) => {
            let note = if added { "created" } else { "there" };
            let address = format!("{}?note={note}", address(&domain));
            Ok(Some(Redirect::to(&address).into_response()))
        }
        // The page has several forms: the error belongs to the name.
        Err(error @ ControlError::Conflict(_)) => {
            form.refuse("name", error.to_string());
            Ok(None)
        }
        Err(error) => {
            form.refused_by(error)?;
            Ok(None)
        }
    }
}

async fn show(
    State(admin): State<Admin>,
    visit: Visit,
    Path((account, name)): Path<(String, String)>,
) -> Result<Response, ErrorPage> {
    page(&admin, visit, account, name, Form::default()).await
}

async fn page(
    admin: &Admin,
    visit: Visit,
    account: String,
    name: String,
    form: Form,
) -> Result<Response, ErrorPage> {
    let domain = admin
        .look(move |control| domain::show(control, &account, &name))
        .await?;
    let (account, service) = (domain.account.as_str(), domain.service.as_str());
    let mut crumbs = crumbs(account);
    crumbs.push(crumb(
        service,
        format!("/accounts/{account}/services/{service}"),
    ));
    let page = DomainPage {
        chrome: visit.chrome(Section::Accounts, domain.name.as_str()),
        crumbs,
        domain,
        now: Timestamp::now(),
        form,
    };
    render_form(page, |page| (&mut page.chrome, &page.form))
}

async fn check(
    State(admin): State<Admin>,
    Path((account, name)): Path<(String, String)>,
) -> Result<Response, ErrorPage> {
    let check = move |control: &Control| domain::check(control, &Actor::Admin, &account, &name);
    let domain = admin.look(check).await?;
    Ok(Redirect::to(&format!("{}?note=checked", address(&domain))).into_response())
}

async fn renew(
    State(admin): State<Admin>,
    visit: Visit,
    Path((account, name)): Path<(String, String)>,
    Extension(mut form): Extension<Form>,
) -> Result<Response, ErrorPage> {
    let renew = {
        let (account, name) = (account.clone(), name.clone());
        move |control: &Control| domain::renew(control, &Actor::Admin, &account, &name)
    };
    match admin.attempt(renew).await? {
        Ok(domain) => {
            let address = format!("{}?note=renewed", address(&domain));
            return Ok(Redirect::to(&address).into_response());
        }
        Err(error) => form.refused_by(error)?,
    }
    page(&admin, visit, account, name, form).await
}

async fn upload(
    State(admin): State<Admin>,
    visit: Visit,
    Path((account, name)): Path<(String, String)>,
    Extension(mut form): Extension<Form>,
) -> Result<Response, ErrorPage> {
    let new = NewDomainCertificate {
        chain: form.value("chain").to_owned(),
        key: Secret::new(form.value(Form::PRIVATE_KEY).to_owned()),
    };
    let upload = {
        let (account, name) = (account.clone(), name.clone());
        move |control: &Control| domain::upload(control, &Actor::Admin, &account, &name, &new)
    };
    match admin.attempt(upload).await? {
        Ok(domain) => {
            let address = format!("{}?note=uploaded", address(&domain));
            return Ok(Redirect::to(&address).into_response());
        }
        Err(error) => form.refused_by(error)?,
    }
    // The key is a secret, which no page shows.
    form.set(Form::PRIVATE_KEY, "");
    page(&admin, visit, account, name, form).await
}

async fn delete(
    State(admin): State<Admin>,
    visit: Visit,
    Path((account, name)): Path<(String, String)>,
    Extension(mut form): Extension<Form>,
) -> Result<Response, ErrorPage> {
    if form.confirms(&name) {
        let (account, name) = (account.clone(), name.clone());
        let delete = move |control: &Control| {
            let service = domain::show(control, &account, &name)?.service;
            domain::remove(control, &Actor::Admin, &account, &name)?;
            Ok(format!("/accounts/{account}/services/{service}"))
        };
        match admin.attempt(delete).await? {
            Ok(service) => {
                return Ok(Redirect::to(&format!("{service}?note=deleted")).into_response());
            }
            Err(error) => form.refused_by(error)?,
        }
    }
    page(&admin, visit, account, name, form).await
}

fn address(domain: &DomainView) -> String {
    format!("/accounts/{}/domains/{}", domain.account, domain.name)
}
