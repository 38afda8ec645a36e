//! Usage of services by day.

use std::sync::Arc;

use askama::Template;
use axum::extract::{Query, State};
use axum::response::Response;

use crate::admin::Admin;
use crate::admin::console::web::failure::ErrorPage;
use crate::admin::console::web::format;
use crate::admin::console::web::forms::form::Form;
use crate::admin::console::web::page::{Chrome, Section, Visit, render_form};
use crate::control::usage::{self, UsageFilter, UsageView};

/// Fields of the form, named as the parameters of the API.
const FILTERS: [&str; 4] = ["account", "service", "since", "until"];

#[derive(Template)]
#[template(path = "usage.html")]
struct UsagePage {
    chrome: Chrome,
    form: Form,
    rows: Vec<UsageView>,
    is_filtered: bool,
    /// Address of the rows that follow.
    next: Option<String>,
}

pub(crate) async fn list(
    State(admin): State<Admin>,
    visit: Visit,
    Query(query): Query<Vec<(String, String)>>,
) -> Result<Response, ErrorPage> {
    let mut form = query
        .into_iter()
        .fold(Form::default(), |form, (name, value)| {
            form.with(&name, value)
        });
    let filter = UsageFilter {
        account: form.filled("account"),
        service: form.filled("service"),
        since: form.filled("since"),
        until: form.filled("until"),
        limit: None,
        cursor: form.filled("cursor"),
    };
    let series = Arc::clone(&admin.series);
    let found = admin
        .attempt(move |control| usage::list(control, series.usage(), &filter))
        .await?;
    let (rows, cursor) = match found {
        Ok(page) => (page.items, page.next_cursor),
        Err(error) => {
            form.refused_by(error)?;
            (Vec::new(), None)
        }
    };
    let page = UsagePage {
        chrome: visit.chrome(Section::Usage, "Usage"),
        is_filtered: FILTERS.iter().any(|name| form.filled(name).is_some()),
        next: cursor.map(|cursor| form.address("/usage", &FILTERS, &cursor)),
        rows,
        form,
    };
    render_form(page, |page| (&mut page.chrome, &page.form))
}
