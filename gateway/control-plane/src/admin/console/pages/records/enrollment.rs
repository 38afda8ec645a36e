//! Enrollment tokens, with which agents join the gateway.

use askama::Template;
use axum::Extension;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Redirect, Response};
use gw_store::Approval;

use super::accounts::crumbs;
use super::caller_secrets::Offered;
use crate::admin::Admin;
use crate::admin::console::web::failure::ErrorPage;
use crate::admin::console::web::format;
use crate::admin::console::web::forms::form::Form;
use crate::admin::console::web::page::{Chrome, Crumb, Section, Visit, crumb, render, render_form};
use crate::control::records::enrollment_token;
use crate::control::{
    Actor, BACKEND_PORT, EnrollmentTokenView, NewEnrollmentToken, NewEnrollmentTokenView,
};

#[derive(Template)]
#[template(path = "enrollment_new.html")]
struct NewTokenPage {
    chrome: Chrome,
    crumbs: Vec<Crumb>,
    account: String,
    services: Offered,
    form: Form,
}

#[derive(Template)]
#[template(path = "enrollment_secret.html")]
struct TokenPage {
    chrome: Chrome,
    crumbs: Vec<Crumb>,
    account: String,
    view: EnrollmentTokenView,
    token: String,
    command: String,
}

fn list_crumbs(account: &str) -> Vec<Crumb> {
    let mut crumbs = crumbs(account);
    crumbs.push(crumb("Agents", format!("/accounts/{account}/agents")));
    crumbs
}

pub(crate) async fn new(
    State(admin): State<Admin>,
    visit: Visit,
    Path(account): Path<String>,
) -> Result<Response, ErrorPage> {
    let form = Form::default()
        .with("approval", "auto")
        .with("expires_in", "10m")
        .with("uses", "1");
    let form = form.with("backend_port", BACKEND_PORT.to_string());
    page(&admin, visit, account, form).await
}

async fn page(
    admin: &Admin,
    visit: Visit,
    account: String,
    form: Form,
) -> Result<Response, ErrorPage> {
    let id = account.clone();
    let services = admin
        .look(move |control| Offered::new(control, &id, []))
        .await?;
    let chrome = visit.chrome(Section::Accounts, "Enroll an agent");
    let page = NewTokenPage {
        chrome,
        crumbs: list_crumbs(&account),
        account,
        services,
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
    let lifetime = form
        .filled("expires_in")
        .map(|text| NewEnrollmentToken::parse_lifetime(&text))
        .transpose();
    let expires_in_seconds = lifetime.unwrap_or_else(|message| {
        form.refuse("expires_in", message);
        None
    });
    let new = NewEnrollmentToken {
        services: form.values("services"),
        approval: if form.has("approval", "manual") {
            Approval::Manual
        } else {
            Approval::Auto
        },
        expires_in_seconds,
        uses: form.number("uses", 1..=NewEnrollmentToken::USES_MAX),
        ephemeral: form.is_ticked("ephemeral"),
    };
    let backend_port = form
        .number("backend_port", 1..=u16::MAX)
        .unwrap_or(BACKEND_PORT);
    if !form.is_refused() {
        let id = account.clone();
        match admin
            .attempt(move |control| enrollment_token::create(control, &Actor::Admin, &id, &new))
            .await?
        {
            Ok(made) => return token_page(&admin, visit, account, made, backend_port),
            Err(error) => form.refused_by(error)?,
        }
    }
    page(&admin, visit, account, form).await
}

/// Shows a new token. It is shown only on this page.
fn token_page(
    admin: &Admin,
    visit: Visit,
    account: String,
    made: NewEnrollmentTokenView,
    backend_port: u16,
) -> Result<Response, ErrorPage> {
    let mut chrome = visit.chrome(Section::Accounts, "Enrollment token");
    // The link back must lead to the list, because the address of this page accepts only POST.
    chrome.address = format!("/accounts/{account}/agents");
    let made = made.on_port(admin.console.port());
    let command = made.command(backend_port);
    let view = made.enrollment_token;
    let token = made.token;
    let crumbs = list_crumbs(&account);
    render(&TokenPage {
        chrome,
        crumbs,
        account,
        view,
        token,
        command,
    })
}

pub(crate) async fn delete(
    State(admin): State<Admin>,
    Path((account, id)): Path<(String, String)>,
) -> Result<Response, ErrorPage> {
    let list = format!("/accounts/{account}/agents?note=deleted");
    admin
        .look(move |control| enrollment_token::delete(control, &Actor::Admin, &account, &id))
        .await?;
    Ok(Redirect::to(&list).into_response())
}
