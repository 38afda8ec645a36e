//! Agents and enrollment tokens of an account.

use askama::Template;
use axum::Extension;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Redirect, Response};
use gw_base::clock::Timestamp;
use gw_base::page::{Page, PageQuery};
use gw_shared::identity::enrollment::EnrollmentStatus;
use gw_store::Approval;
use serde::Deserialize;

use super::accounts::{Tab, crumbs};
use super::caller_secrets::Offered;
use crate::admin::Admin;
use crate::admin::console::pages::tunnels::TunnelRow;
use crate::admin::console::web::failure::ErrorPage;
use crate::admin::console::web::format;
use crate::admin::console::web::forms::form::Form;
use crate::admin::console::web::page::{Chrome, Crumb, Section, Visit, crumb, render, render_form};
use crate::control::records::{agent, enrollment_token};
use crate::control::{Actor, AgentChanges, AgentView, Control, EnrollmentTokenView};

#[derive(Template)]
#[template(path = "agents.html")]
struct AgentsPage {
    chrome: Chrome,
    crumbs: Vec<Crumb>,
    account: String,
    tab: Tab,
    /// The enrollment token of the listed agents; `None` lists all agents.
    enrolled_with: Option<String>,
    agents: Vec<AgentView>,
    /// Which tunnels are missing.
    missing: Option<String>,
    next_cursor: Option<String>,
    tokens: Vec<EnrollmentTokenView>,
    next_token: Option<String>,
    now: Timestamp,
}

#[derive(Template)]
#[template(path = "agent.html")]
struct AgentPage {
    chrome: Chrome,
    crumbs: Vec<Crumb>,
    agent: AgentView,
    tunnels: Vec<TunnelRow>,
    /// Which tunnels are missing.
    missing: Option<String>,
    services: Offered,
    form: Form,
    now: Timestamp,
}

/// Text and style of an agent's status.
pub(crate) fn status_word(status: &EnrollmentStatus) -> (&'static str, &'static str) {
    match status {
        EnrollmentStatus::Pending => ("waiting for approval", "warn"),
        EnrollmentStatus::Approved => ("approved", "good"),
        EnrollmentStatus::Revoked => ("revoked", "bad"),
    }
}

/// Text and style of an enrollment token's state.
fn token_state(token: &EnrollmentTokenView, now: Timestamp) -> (&'static str, &'static str) {
    if token.is_used_up() {
        ("used up", "neutral")
    } else if token.expires_at <= now.to_string() {
        ("expired", "neutral")
    } else {
        ("open", "good")
    }
}

/// Selects a page of each of the two lists.
#[derive(Deserialize)]
pub(crate) struct ListsQuery {
    cursor: Option<String>,
    /// Id of a token: only agents that enrolled with it.
    enrolled_with: Option<String>,
    /// Cursor of the enrollment tokens.
    tokens: Option<String>,
}

pub(crate) async fn list(
    State(admin): State<Admin>,
    visit: Visit,
    Path(account): Path<String>,
    Query(ListsQuery {
        cursor,
        enrolled_with,
        tokens,
    }): Query<ListsQuery>,
) -> Result<Response, ErrorPage> {
    let id = account.clone();
    let token = enrolled_with.clone();
    let look = move |control: &Control| {
        let page = |cursor| PageQuery {
            limit: Some(50),
            cursor,
        };
        Ok((
            agent::list(control, &id, token.as_deref(), &page(cursor))?,
            enrollment_token::list(control, &id, &page(tokens))?,
        ))
    };
    let (agents, tokens) = admin.look(look).await?;
    let Page {
        items: mut agents,
        next_cursor,
    } = agents;
    admin.add_tunnels_elsewhere(&mut agents).await;
    let Page {
        items: tokens,
        next_cursor: next_token,
    } = tokens;
    let chrome = visit.chrome(Section::Accounts, format!("Agents of {account}"));
    let crumbs = crumbs(&account);
    let now = Timestamp::now();
    let missing = agents
        .first()
        .and_then(|agent| format::missing("Tunnels", &agent.missing_nodes));
    render(&AgentsPage {
        chrome,
        crumbs,
        missing,
        account,
        tab: Tab::Agents,
        enrolled_with,
        agents,
        next_cursor,
        tokens,
        next_token,
        now,
    })
}

pub(crate) async fn show(
    State(admin): State<Admin>,
    visit: Visit,
    Path((account, agent)): Path<(String, String)>,
) -> Result<Response, ErrorPage> {
    page(&admin, visit, account, agent, as_it_is).await
}

async fn page(
    admin: &Admin,
    visit: Visit,
    account: String,
    id: String,
    form: impl FnOnce(&AgentView) -> Form,
) -> Result<Response, ErrorPage> {
    let look = move |control: &Control| {
        let agent = agent::show(control, &account, &id)?;
        let services = Offered::new(
            control,
            &account,
            agent.services.iter().map(ToString::to_string),
        )?;
        Ok((agent, services))
    };
    let (mut agent, services) = admin.look(look).await?;
    admin
        .add_tunnels_elsewhere(std::slice::from_mut(&mut agent))
        .await;
    let mut crumbs = crumbs(agent.account.as_str());
    crumbs.push(crumb(
        "Agents",
        format!("/accounts/{}/agents", agent.account),
    ));
    let page = AgentPage {
        chrome: visit.chrome(Section::Accounts, agent.name.as_str()),
        crumbs,
        tunnels: agent.tunnels.iter().map(TunnelRow::from).collect(),
        missing: format::missing("Tunnels", &agent.missing_nodes),
        form: form(&agent),
        agent,
        services,
        now: Timestamp::now(),
    };
    render_form(page, |page| (&mut page.chrome, &page.form))
}

fn as_it_is(agent: &AgentView) -> Form {
    let form = Form::default()
        .with("name", &agent.name)
        .with_box("standby", agent.standby);
    agent.services.iter().fold(form, |form, service| {
        form.with("services", service.as_str())
    })
}

pub(crate) async fn change(
    State(admin): State<Admin>,
    visit: Visit,
    Path((account, agent)): Path<(String, String)>,
    Extension(mut form): Extension<Form>,
) -> Result<Response, ErrorPage> {
    let services = form.values("services");
    if services.is_empty() {
        let account_id = account.clone();
        let id = agent.clone();
        if !admin
            .look(move |control| agent::show(control, &account_id, &id))
            .await?
            .services
            .is_empty()
        {
            form.refuse(
                "services",
                "select at least one service; to stop the agent, revoke it",
            );
        }
    }
    if !form.is_refused() {
        let changes = AgentChanges {
            name: Some(form.value("name").to_owned()),
            services: Some(services),
            standby: Some(form.is_ticked("standby")),
        };
        let account_id = account.clone();
        let id = agent.clone();
        let change = move |control: &Control| {
            agent::change(control, &Actor::Admin, &account_id, &id, &changes)
        };
        match admin.attempt(change).await? {
            Ok(agent) => return Ok(back(&agent, "saved")),
            Err(error) => form.refused_by(error)?,
        }
    }
    page(&admin, visit, account, agent, |_| form).await
}

pub(crate) async fn approve(
    State(admin): State<Admin>,
    Path((account, agent)): Path<(String, String)>,
) -> Result<Response, ErrorPage> {
    let agent = admin
        .look(move |control| agent::approve(control, &Actor::Admin, &account, &agent))
        .await?;
    Ok(back(&agent, "approved"))
}

pub(crate) async fn revoke(
    State(admin): State<Admin>,
    visit: Visit,
    Path((account, agent)): Path<(String, String)>,
    Extension(mut form): Extension<Form>,
) -> Result<Response, ErrorPage> {
    if form.confirms(&agent) {
        let agent = admin
            .look(move |control| agent::revoke(control, &Actor::Admin, &account, &agent))
            .await?;
        return Ok(back(&agent, "revoked"));
    }
    refused(&admin, visit, account, agent, &form).await
}

pub(crate) async fn delete(
    State(admin): State<Admin>,
    visit: Visit,
    Path((account, agent)): Path<(String, String)>,
    Extension(mut form): Extension<Form>,
) -> Result<Response, ErrorPage> {
    if form.confirms(&agent) {
        let list = format!("/accounts/{account}/agents?note=deleted");
        admin
            .look(move |control| agent::delete(control, &Actor::Admin, &account, &agent))
            .await?;
        return Ok(Redirect::to(&list).into_response());
    }
    refused(&admin, visit, account, agent, &form).await
}

/// Shows the stored agent and the typed confirmation.
async fn refused(
    admin: &Admin,
    visit: Visit,
    account: String,
    agent: String,
    form: &Form,
) -> Result<Response, ErrorPage> {
    let typed = |agent: &AgentView| {
        as_it_is(agent)
            .with("confirm", form.value("confirm"))
            .with_errors_of(form)
    };
    page(admin, visit, account, agent, typed).await
}

fn back(agent: &AgentView, note: &str) -> Response {
    Redirect::to(&format!(
        "/accounts/{}/agents/{}?note={note}",
        agent.account, agent.agent_id
    ))
    .into_response()
}
