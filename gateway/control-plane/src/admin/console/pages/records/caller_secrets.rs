//! Pages of credentials and service keys, the two kinds of caller secret.

use std::collections::BTreeSet;

use askama::Template;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use gw_base::page::{Page, PageQuery};
use gw_shared::id::{ClientId, KeyId, ManagerName};

use super::accounts::{ListQuery, Tab, crumbs};
use crate::admin::Admin;
use crate::admin::console::web::failure::ErrorPage;
use crate::admin::console::web::format;
use crate::admin::console::web::forms::form::Form;
use crate::admin::console::web::page::{Chrome, Crumb, Section, Visit, crumb, render, render_form};
use crate::control::records::{caller_secret, service};
use crate::control::{
    Actor, CallerSecretChanges, Control, ControlError, NewCallerSecret, SecretKind,
};

/// Error of an empty list of services.
const AT_LEAST_ONE: &str = "select at least one service";

/// Texts and paths of a kind.
pub(crate) struct Words {
    tab: Tab,
    /// Path segment below the account.
    path: &'static str,
    one: &'static str,
    many: &'static str,
    id: &'static str,
    secret: &'static str,
    about: &'static str,
    /// Whether the secret is sent to the token endpoint instead of to the service.
    mints_tokens: bool,
}

/// A kind of caller secret with its pages.
trait SecretPages: SecretKind<View: Send, NewView: Send> + 'static {
    const WORDS: Words;
    fn row(view: Self::View) -> SecretRow;
    /// The secret is present only if it is new.
    fn secret(new: Self::NewView) -> (SecretRow, Option<String>);
}

/// A credential or service key in the list.
struct SecretRow {
    id: String,
    name: Option<String>,
    services: Vec<String>,
    enabled: bool,
    managed_by: Option<ManagerName>,
    created_at: String,
}

impl SecretPages for ClientId {
    const WORDS: Words = Words {
        tab: Tab::Credentials,
        path: "credentials",
        one: "credential",
        many: "Credentials",
        id: "Client ID",
        secret: "Client secret",
        about: "An OAuth client. Its id and secret get access tokens, each for one service.",
        mints_tokens: true,
    };

    fn row(view: Self::View) -> SecretRow {
        SecretRow {
            id: view.client_id.to_string(),
            name: view.name,
            services: view
                .allowed_services
                .iter()
                .map(ToString::to_string)
                .collect(),
            enabled: view.enabled,
            managed_by: view.managed_by,
            created_at: view.created_at,
        }
    }

    fn secret(new: Self::NewView) -> (SecretRow, Option<String>) {
        (Self::row(new.credential), new.client_secret)
    }
}

impl SecretPages for KeyId {
    const WORDS: Words = Words {
        tab: Tab::ServiceKeys,
        path: "service-keys",
        one: "service key",
        many: "Service keys",
        id: "Key ID",
        secret: "Service key",
        about: "A key that callers send with each request, in X-Gw-Service-Key.",
        mints_tokens: false,
    };

    fn row(view: Self::View) -> SecretRow {
        SecretRow {
            id: view.key_id.to_string(),
            name: view.name,
            services: view
                .allowed_services
                .iter()
                .map(ToString::to_string)
                .collect(),
            enabled: view.enabled,
            managed_by: view.managed_by,
            created_at: view.created_at,
        }
    }

    fn secret(new: Self::NewView) -> (SecretRow, Option<String>) {
        (Self::row(new.key), new.service_key)
    }
}

#[derive(Template)]
#[template(path = "caller_secrets.html")]
struct ListPage {
    chrome: Chrome,
    crumbs: Vec<Crumb>,
    account: String,
    tab: Tab,
    words: Words,
    rows: Vec<SecretRow>,
    next_cursor: Option<String>,
}

#[derive(Template)]
#[template(path = "caller_secret_new.html")]
struct NewPage {
    chrome: Chrome,
    crumbs: Vec<Crumb>,
    account: String,
    words: Words,
    services: Offered,
    form: Form,
}

#[derive(Template)]
#[template(path = "caller_secret.html")]
struct ItemPage {
    chrome: Chrome,
    crumbs: Vec<Crumb>,
    account: String,
    words: Words,
    row: SecretRow,
    services: Offered,
    form: Form,
}

#[derive(Template)]
#[template(path = "caller_secret_shown.html")]
struct SecretPage {
    chrome: Chrome,
    crumbs: Vec<Crumb>,
    words: Words,
    row: SecretRow,
    secret: String,
    /// Example commands that use the secret; `None` without a service.
    commands: Option<String>,
}

pub(crate) fn routes() -> Router<Admin> {
    routes_of::<ClientId>().merge(routes_of::<KeyId>())
}

fn routes_of<K: SecretPages>() -> Router<Admin> {
    let path = K::WORDS.path;
    let collection = format!("/accounts/{{account}}/{path}");
    Router::new()
        .route(&collection, get(list::<K>).post(create::<K>))
        .route(&format!("/accounts/{{account}}/new-{path}"), get(new::<K>))
        .route(
            &format!("{collection}/{{id}}"),
            get(show::<K>).post(change::<K>),
        )
        .route(&format!("{collection}/{{id}}/rotate"), post(rotate::<K>))
        .route(&format!("{collection}/{{id}}/enable"), post(enable::<K>))
        .route(&format!("{collection}/{{id}}/disable"), post(disable::<K>))
        .route(&format!("{collection}/{{id}}/delete"), post(delete::<K>))
}

async fn list<K: SecretPages>(
    State(admin): State<Admin>,
    visit: Visit,
    Path(account): Path<String>,
    Query(query): Query<ListQuery>,
) -> Result<Response, ErrorPage> {
    let id = account.clone();
    let Page { items, next_cursor } = admin
        .look(move |control| caller_secret::list::<K>(control, &id, &query.into()))
        .await?;
    let words = K::WORDS;
    render(&ListPage {
        chrome: visit.chrome(Section::Accounts, format!("{} of {account}", words.many)),
        crumbs: crumbs(&account),
        account,
        tab: words.tab,
        words,
        rows: items.into_iter().map(K::row).collect(),
        next_cursor,
    })
}

/// The services that a form offers.
pub(crate) struct Offered {
    pub(crate) ids: BTreeSet<String>,
    /// Whether the account has more services than are offered.
    pub(crate) are_cut_off: bool,
}

impl Offered {
    /// Offers as many services as a list may have, and always all of `chosen`: submitting a form
    /// removes every service without a ticked box.
    pub(crate) fn new(
        control: &Control,
        account: &str,
        chosen: impl IntoIterator<Item = String>,
    ) -> Result<Self, ControlError> {
        let page = service::list(
            control,
            account,
            &PageQuery {
                limit: Some(500),
                cursor: None,
            },
        )?;
        let listed = page.items.into_iter().map(|service| service.id.to_string());
        let ids: BTreeSet<String> = listed.chain(chosen).collect();
        let all = control.look_at(|records| {
            records
                .services
                .keys()
                .filter(|path| path.0.as_str() == account)
                .count()
        });
        Ok(Self {
            are_cut_off: ids.len() < all,
            ids,
        })
    }
}

async fn new<K: SecretPages>(
    State(admin): State<Admin>,
    visit: Visit,
    Path(account): Path<String>,
) -> Result<Response, ErrorPage> {
    new_page::<K>(&admin, visit, account, Form::default()).await
}

async fn new_page<K: SecretPages>(
    admin: &Admin,
    visit: Visit,
    account: String,
    form: Form,
) -> Result<Response, ErrorPage> {
    let id = account.clone();
    let services = admin
        .look(move |control| Offered::new(control, &id, []))
        .await?;
    let words = K::WORDS;
    let chrome = visit.chrome(Section::Accounts, format!("New {}", words.one));
    let page = NewPage {
        chrome,
        crumbs: list_crumbs::<K>(&account),
        account,
        words,
        services,
        form,
    };
    render_form(page, |page| (&mut page.chrome, &page.form))
}

async fn create<K: SecretPages>(
    State(admin): State<Admin>,
    visit: Visit,
    Path(account): Path<String>,
    Extension(mut form): Extension<Form>,
) -> Result<Response, ErrorPage> {
    let allowed_services = form.values("allowed_services");
    if allowed_services.is_empty() {
        form.refuse("allowed_services", AT_LEAST_ONE);
    }
    if !form.is_refused() {
        let new = NewCallerSecret {
            name: form.filled("name"),
            allowed_services,
            enabled: None,
            managed_by: None,
        };
        let id = account.clone();
        match admin
            .attempt(move |control| caller_secret::create::<K>(control, &Actor::Admin, &id, &new))
            .await?
        {
            Ok((made, _)) => match K::secret(made) {
                (row, Some(secret)) => {
                    return secret_page::<K>(&admin, visit, &account, row, secret).await;
                }
                (row, None) => {
                    let address = format!("{}?note=there", address::<K>(&account, &row.id));
                    return Ok(Redirect::to(&address).into_response());
                }
            },
            Err(error) => form.refused_by(error)?,
        }
    }
    new_page::<K>(&admin, visit, account, form).await
}

/// Shows a new secret. It is shown only on this page.
async fn secret_page<K: SecretPages>(
    admin: &Admin,
    visit: Visit,
    account: &str,
    row: SecretRow,
    secret: String,
) -> Result<Response, ErrorPage> {
    let words = K::WORDS;
    let gateway = admin.gateway_address().await?;
    let commands = row.services.first().map(|service| {
        let hostname = format!("{account}--{service}.{}", admin.control.region().apex());
        if words.mints_tokens {
            gateway.call_with_token(&hostname, account, service, &row.id, &secret)
        } else {
            gateway.call_with_key(&hostname, &secret)
        }
    });
    let mut chrome = visit.chrome(Section::Accounts, format!("{} of {}", words.secret, row.id));
    // The link back must lead to the record, because the address of this page accepts only POST.
    chrome.address = address::<K>(account, &row.id);
    render(&SecretPage {
        chrome,
        crumbs: list_crumbs::<K>(account),
        words,
        row,
        secret,
        commands,
    })
}

async fn show<K: SecretPages>(
    State(admin): State<Admin>,
    visit: Visit,
    Path((account, id)): Path<(String, String)>,
) -> Result<Response, ErrorPage> {
    page::<K>(&admin, visit, account, id, as_it_is).await
}

async fn page<K: SecretPages>(
    admin: &Admin,
    visit: Visit,
    account: String,
    id: String,
    form: impl FnOnce(&SecretRow) -> Form,
) -> Result<Response, ErrorPage> {
    let account_id = account.clone();
    let look = move |control: &Control| {
        let row = K::row(caller_secret::show::<K>(control, &account_id, &id)?);
        let services = Offered::new(control, &account_id, row.services.clone())?;
        Ok((row, services))
    };
    let (row, services) = admin.look(look).await?;
    let words = K::WORDS;
    let chrome = visit.chrome(
        Section::Accounts,
        row.name.clone().unwrap_or_else(|| row.id.clone()),
    );
    let form = form(&row);
    let page = ItemPage {
        chrome,
        crumbs: list_crumbs::<K>(&account),
        account,
        words,
        row,
        services,
        form,
    };
    render_form(page, |page| (&mut page.chrome, &page.form))
}

fn as_it_is(row: &SecretRow) -> Form {
    let form = Form::default().with("name", row.name.as_deref().unwrap_or_default());
    row.services
        .iter()
        .fold(form, |form, service| form.with("allowed_services", service))
}

async fn change<K: SecretPages>(
    State(admin): State<Admin>,
    visit: Visit,
    Path((account, id)): Path<(String, String)>,
    Extension(mut form): Extension<Form>,
) -> Result<Response, ErrorPage> {
    let account_id = account.clone();
    let secret_id = id.clone();
    let row = admin
        .look(move |control| caller_secret::show::<K>(control, &account_id, &secret_id).map(K::row))
        .await?;
    let name = form.filled("name");
    let allowed_services = form.values("allowed_services");
    if name.is_none() && row.name.is_some() {
        form.refuse("name", "can be changed, but not removed");
    }
    if allowed_services.is_empty() && !row.services.is_empty() {
        form.refuse("allowed_services", AT_LEAST_ONE);
    }
    if !form.is_refused() {
        let changes = CallerSecretChanges {
            name,
            allowed_services: Some(allowed_services),
            enabled: None,
            managed_by: None,
        };
        match changed::<K>(&admin, &account, &id, changes).await? {
            Ok(address) => return Ok(Redirect::to(&address).into_response()),
            Err(error) => form.refused_by(error)?,
        }
    }
    page::<K>(&admin, visit, account, id, |_| form).await
}

async fn enable<K: SecretPages>(
    State(admin): State<Admin>,
    Path((account, id)): Path<(String, String)>,
) -> Result<Response, ErrorPage> {
    let changes = CallerSecretChanges {
        enabled: Some(true),
        ..CallerSecretChanges::default()
    };
    Ok(Redirect::to(&changed::<K>(&admin, &account, &id, changes).await??).into_response())
}

async fn disable<K: SecretPages>(
    State(admin): State<Admin>,
    Path((account, id)): Path<(String, String)>,
) -> Result<Response, ErrorPage> {
    let changes = CallerSecretChanges {
        enabled: Some(false),
        ..CallerSecretChanges::default()
    };
    Ok(Redirect::to(&changed::<K>(&admin, &account, &id, changes).await??).into_response())
}

/// Applies changes; returns the address of the page that shows them.
async fn changed<K: SecretPages>(
    admin: &Admin,
    account: &str,
    id: &str,
    changes: CallerSecretChanges,
) -> Result<Result<String, ControlError>, ErrorPage> {
    let address = format!("{}?note=saved", address::<K>(account, id));
    let account = account.to_owned();
    let id = id.to_owned();
    let change = move |control: &Control| {
        caller_secret::change::<K>(control, &Actor::Admin, &account, &id, &changes).map(drop)
    };
    Ok(admin.attempt(change).await?.map(|()| address))
}

async fn rotate<K: SecretPages>(
    State(admin): State<Admin>,
    visit: Visit,
    Path((account, id)): Path<(String, String)>,
) -> Result<Response, ErrorPage> {
    let account_id = account.clone();
    let rotate = move |control: &Control| {
        caller_secret::rotate::<K>(control, &Actor::Admin, &account_id, &id)
    };
    match K::secret(admin.look(rotate).await?) {
        (row, Some(secret)) => secret_page::<K>(&admin, visit, &account, row, secret).await,
        (_, None) => Err(ErrorPage::broken()),
    }
}

async fn delete<K: SecretPages>(
    State(admin): State<Admin>,
    visit: Visit,
    Path((account, id)): Path<(String, String)>,
    Extension(mut form): Extension<Form>,
) -> Result<Response, ErrorPage> {
    if form.confirms(&id) {
        let account_id = account.clone();
        let id = id.clone();
        let delete = move |control: &Control| {
            caller_secret::delete::<K>(control, &Actor::Admin, &account_id, &id)
        };
        match admin.attempt(delete).await? {
            Ok(()) => {
                let list = format!("/accounts/{account}/{}?note=deleted", K::WORDS.path);
                return Ok(Redirect::to(&list).into_response());
            }
            Err(error) => form.refused_by(error)?,
        }
    }
    let typed = |row: &SecretRow| {
        as_it_is(row)
            .with("confirm", form.value("confirm"))
            .with_errors_of(&form)
    };
    page::<K>(&admin, visit, account, id, typed).await
}

fn list_crumbs<K: SecretPages>(account: &str) -> Vec<Crumb> {
    let mut crumbs = crumbs(account);
    crumbs.push(crumb(
        K::WORDS.many,
        format!("/accounts/{account}/{}", K::WORDS.path),
    ));
    crumbs
}

fn address<K: SecretPages>(account: &str, id: &str) -> String {
    format!("/accounts/{account}/{}/{id}", K::WORDS.path)
}
