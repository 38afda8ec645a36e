//! Accounts: the list, and the settings of an account.

use askama::Template;
use axum::Extension;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Redirect, Response};
use gw_base::page::{Page, PageQuery};
use gw_store::DomainsMax;
use gw_store::limits::ACCOUNT_DOMAINS_MAX;

use crate::admin::Admin;
use crate::admin::console::web::failure::ErrorPage;
use crate::admin::console::web::format;
use crate::admin::console::web::forms::form::Form;
use crate::admin::console::web::page::{Chrome, Crumb, Section, Visit, crumb, render_form};
use crate::control::records::account;
use crate::control::{AccountChanges, AccountContents, AccountView, Actor, Control, NewAccount};

/// Names of each kind that the page shows before a deletion.
const NAMES: usize = 10;

#[derive(Template)]
#[template(path = "accounts.html")]
struct AccountsPage {
    chrome: Chrome,
    accounts: Page<AccountView>,
    form: Form,
}

#[derive(Template)]
#[template(path = "account_settings.html")]
struct SettingsPage {
    chrome: Chrome,
    crumbs: Vec<Crumb>,
    account: AccountView,
    tab: Tab,
    /// Records that are deleted with the account.
    contents: AccountContents,
    form: Form,
}

/// The tabs of an account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tab {
    Services,
    Credentials,
    ServiceKeys,
    Agents,
    Settings,
}

impl SettingsPage {
    /// Whether records are deleted with the account.
    fn has_records(&self) -> bool {
        let kinds = self.contents.kinds();
        kinds.iter().any(|(_, records)| records.count > 0)
    }

    /// Names of the first records of a kind, and how many there are beyond them.
    fn named(names: &[String], count: usize) -> String {
        let shown = names.len().min(NAMES);
        let more = match count - shown {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        format!("{}{more}", names[..shown].join(", "))
    }
}

impl Tab {
    pub(crate) const ALL: [(Self, &'static str, &'static str); 5] = [
        (Self::Services, "Services", ""),
        (Self::Credentials, "Credentials", "/credentials"),
        (Self::ServiceKeys, "Service keys", "/service-keys"),
        (Self::Agents, "Agents", "/agents"),
        (Self::Settings, "Settings", "/settings"),
    ];
}

/// Breadcrumbs of the pages of an account.
pub(crate) fn crumbs(account: &str) -> Vec<Crumb> {
    vec![
        crumb("Accounts", "/accounts"),
        crumb(account, format!("/accounts/{account}")),
    ]
}

/// Selects a page of a list.
#[derive(serde::Deserialize)]
pub(crate) struct ListQuery {
    cursor: Option<String>,
}

impl From<ListQuery> for PageQuery {
    fn from(query: ListQuery) -> Self {
        Self {
            limit: Some(50),
            cursor: query.cursor,
        }
    }
}

pub(crate) async fn list(
    State(admin): State<Admin>,
    visit: Visit,
    Query(query): Query<ListQuery>,
) -> Result<Response, ErrorPage> {
    page(&admin, visit, query, Form::default()).await
}

async fn page(
    admin: &Admin,
    visit: Visit,
    query: ListQuery,
    form: Form,
) -> Result<Response, ErrorPage> {
    let accounts = admin
        .look(move |control| account::list(control, &query.into()))
        .await?;
    let page = AccountsPage {
        chrome: visit.chrome(Section::Accounts, "Accounts"),
        accounts,
        form,
    };
    render_form(page, |page| (&mut page.chrome, &page.form))
}

pub(crate) async fn create(
    State(admin): State<Admin>,
    visit: Visit,
    Extension(mut form): Extension<Form>,
) -> Result<Response, ErrorPage> {
    let capture_allowed = Some(form.is_ticked("capture_allowed"));
    let new = NewAccount {
        id: form.value("id").trim().to_owned(),
        capture_allowed,
        domains_max: domains_max(&mut form),
        managed_by: None,
    };
    if !form.is_refused() {
        match admin
            .attempt(move |control| account::create(control, &Actor::Admin, &new))
            .await?
        {
            Ok((account, created)) => {
                let note = if created { "created" } else { "there" };
                let address = format!("/accounts/{}?note={note}", account.id);
                return Ok(Redirect::to(&address).into_response());
            }
            Err(error) => form.refused_by(error)?,
        }
    }
    page(&admin, visit, ListQuery { cursor: None }, form).await
}

/// The quota of own domains, if it is filled. Adds an error if it is invalid.
fn domains_max(form: &mut Form) -> Option<DomainsMax> {
    let number = form.number("domains_max", 0..=ACCOUNT_DOMAINS_MAX)?;
    DomainsMax::try_from(number).ok()
}

pub(crate) async fn settings(
    State(admin): State<Admin>,
    visit: Visit,
    Path(account): Path<String>,
) -> Result<Response, ErrorPage> {
    settings_page(&admin, visit, account, None).await
}

/// Shows the stored settings, or those that were typed and refused, and the typed confirmation.
async fn settings_page(
    admin: &Admin,
    visit: Visit,
    account: String,
    typed: Option<&Form>,
) -> Result<Response, ErrorPage> {
    let look = move |control: &Control| {
        let contents = account::contents(control, &account)?;
        Ok((account::show(control, &account)?, contents))
    };
    let (account, contents) = admin.look(look).await?;
    let typed_settings = typed.filter(|typed| typed.is_sent("domains_max"));
    let mut form = match typed_settings {
        Some(typed) => Form::default()
            .with_box("capture_allowed", typed.is_ticked("capture_allowed"))
            .with("domains_max", typed.value("domains_max")),
        None => Form::default()
            .with_box("capture_allowed", account.capture_allowed)
            .with("domains_max", account.domains_max.to_string()),
    };
    if let Some(typed) = typed {
        form = form
            .with("confirm", typed.value("confirm"))
            .with_errors_of(typed);
    }
    let chrome = visit.chrome(Section::Accounts, format!("Settings of {}", account.id));
    let page = SettingsPage {
        chrome,
        crumbs: crumbs(account.id.as_str()),
        account,
        tab: Tab::Settings,
        contents,
        form,
    };
    render_form(page, |page| (&mut page.chrome, &page.form))
}

pub(crate) async fn change(
    State(admin): State<Admin>,
    visit: Visit,
    Path(account): Path<String>,
    Extension(mut form): Extension<Form>,
) -> Result<Response, ErrorPage> {
    let changes = AccountChanges {
        capture_allowed: Some(form.is_ticked("capture_allowed")),
        domains_max: domains_max(&mut form),
        managed_by: None,
    };
    if form.is_refused() {
        return settings_page(&admin, visit, account, Some(&form)).await;
    }
    let account = admin
        .look(move |control| account::change(control, &Actor::Admin, &account, &changes))
        .await?;
    Ok(Redirect::to(&format!("/accounts/{}/settings?note=saved", account.id)).into_response())
}

pub(crate) async fn delete(
    State(admin): State<Admin>,
    visit: Visit,
    Path(account): Path<String>,
    Extension(mut form): Extension<Form>,
) -> Result<Response, ErrorPage> {
    if form.confirms(&account) {
        let id = account.clone();
        match admin
            .attempt(move |control| account::delete(control, &Actor::Admin, &id, true))
            .await?
        {
            Ok(()) => return Ok(Redirect::to("/accounts?note=deleted").into_response()),
            Err(error) => form.refused_by(error)?,
        }
    }
    settings_page(&admin, visit, account, Some(&form)).await
}
