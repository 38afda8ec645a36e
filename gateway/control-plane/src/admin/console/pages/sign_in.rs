//! Sign-in with the admin token, and sign-out.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use askama::Template;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{ConnectInfo, State};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{AppendHeaders, IntoResponse, Redirect, Response};
use gw_shared::identity::secret::{Secret, SecretHash};

use crate::admin::Admin;
use crate::admin::console::web::failure::ErrorPage;
use crate::admin::console::web::forms::form::Form;
use crate::admin::console::web::forms::kept::KeptForm;
use crate::admin::console::web::own_name::{self, Arrival, OwnName};
use crate::admin::console::web::page::render;
use crate::admin::console::web::session::{self, LIFETIME, SESSION, SIGN_IN, THEME};
use crate::admin::console::web::theme::Theme;
use crate::admin::console::web::{address, assets, guard};

#[derive(Template)]
#[template(path = "sign_in.html")]
struct SignInPage<'a> {
    assets: &'static str,
    theme: Theme,
    region: &'a str,
    form_token: String,
    next: &'a str,
    /// Address with a name of its own, if this one is shared with other servers of the machine.
    instead: Option<String>,
    /// The visitor is here because the session ended.
    has_ended: bool,
    /// Hidden fields with the form that was sent then.
    carriers: Vec<(&'static str, String)>,
    error: Option<&'a str>,
}

#[derive(Template)]
#[template(path = "resume.html")]
struct ResumePage<'a> {
    assets: &'static str,
    theme: Theme,
    region: &'a str,
    form_token: String,
    next: &'a str,
    kept: &'a KeptForm,
}

pub(crate) async fn form(
    State(admin): State<Admin>,
    headers: HeaderMap,
    uri: Uri,
) -> Result<Response, ErrorPage> {
    let query = Form::parse(uri.query().unwrap_or_default().as_bytes());
    let next = address::checked(query.value("next"));
    if is_signed_in(&admin, &headers).await {
        return Ok(Redirect::to(next).into_response());
    }
    page(
        &admin,
        &headers,
        next,
        query.has("ended", "yes"),
        None,
        None,
    )
}

/// Shows the sign-in form after the end of a session. It carries the form that the browser has
/// sent.
pub(crate) fn keeping(
    admin: &Admin,
    headers: &HeaderMap,
    next: &str,
    kept: &KeptForm,
) -> Result<Response, ErrorPage> {
    let page = page(admin, headers, next, true, Some(kept), None)?;
    Ok((StatusCode::UNAUTHORIZED, page).into_response())
}

async fn is_signed_in(admin: &Admin, headers: &HeaderMap) -> bool {
    match SESSION.of(headers) {
        Some(id) => admin.is_session_open(id).await,
        None => false,
    }
}

/// Shows the form again with an error.
fn refused(
    admin: &Admin,
    headers: &HeaderMap,
    next: &str,
    kept: Option<&KeptForm>,
    error: &str,
) -> Result<Response, ErrorPage> {
    page(admin, headers, next, false, kept, Some(error))
}

/// Shows the form, with a cookie that ties it to this browser.
fn page(
    admin: &Admin,
    headers: &HeaderMap,
    next: &str,
    has_ended: bool,
    kept: Option<&KeptForm>,
    error: Option<&str>,
) -> Result<Response, ErrorPage> {
    // Reuses the existing id, which forms in other tabs depend on.
    let id = SIGN_IN
        .of(headers)
        .filter(|id| session::is_id(id))
        .map(|id| Secret::new(id.to_owned()));
    let id = id.unwrap_or_else(session::new_id);
    let page = render(&SignInPage {
        assets: assets::version(),
        theme: THEME.of(headers).map_or(Theme::System, Theme::from),
        region: admin.control.region().apex(),
        form_token: session::form_token(id.reveal()),
        next,
        instead: own_name::address_instead(headers),
        has_ended,
        carriers: kept.map_or_else(Vec::new, |kept| kept.carriers().into()),
        error,
    })?;
    Ok((
        [(
            header::SET_COOKIE,
            SIGN_IN.set(headers, id.reveal(), LIFETIME),
        )],
        page,
    )
        .into_response())
}

pub(crate) async fn sign_in(
    State(admin): State<Admin>,
    ConnectInfo(client): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ErrorPage> {
    let Ok(body) = body else {
        return Err(ErrorPage::too_large());
    };
    let form = Form::parse(&body);
    let next = address::checked(form.value("next"));
    let kept = KeptForm::carried_by(&form);
    if let Some(id) = SESSION.of(&headers)
        && admin.is_session_open(id).await
    {
        // Signed in through another tab in the meantime.
        return match kept {
            Some(kept) => resume(&admin, &headers, id, next, &kept),
            None => Ok(Redirect::to(next).into_response()),
        };
    }
    let is_our_form = SIGN_IN.of(&headers).is_some_and(|id| {
        session::is_form_token(&session::form_token(id), form.value(Form::TOKEN))
    });
    if !is_our_form {
        let again = refused(
            &admin,
            &headers,
            next,
            kept.as_ref(),
            "The form has expired, or cookies are disabled. Try again.",
        )?;
        return Ok((StatusCode::FORBIDDEN, again).into_response());
    }
    let now = Instant::now();
    // Checked before any rate limit: the correct token is always accepted, even if another client
    // behind the same proxy exhausted the limit. Both sides are hashed, so that the time of the
    // comparison reveals nothing about the token, including its length.
    if !SecretHash::of(admin.control.admin_token().reveal()).matches(form.value("token").trim()) {
        return wrong_token(&admin, &headers, next, kept.as_ref(), client.ip(), now);
    }
    let id = admin.console.sessions().open(now);
    admin.share_session(id.reveal()).await;
    tracing::info!(client = %client.ip(), "console: signed in");
    let form_is_used = (
        header::SET_COOKIE,
        SIGN_IN.set(&headers, "", Duration::ZERO),
    );
    if let Some(own) = OwnName::of(&headers) {
        let theme = THEME.of(&headers).map_or(Theme::System, Theme::from);
        let (host, code) = admin.console.moves.begin(&own, id, theme, kept, now);
        let address = format!("http://{host}{}", address::of_finish(code.reveal(), next));
        return Ok((AppendHeaders([form_is_used]), Redirect::to(&address)).into_response());
    }
    let session = (
        header::SET_COOKIE,
        SESSION.set(&headers, id.reveal(), LIFETIME),
    );
    let cookies = AppendHeaders([session, form_is_used]);
    Ok(match kept {
        Some(kept) => {
            (cookies, resume(&admin, &headers, id.reveal(), next, &kept)?).into_response()
        }
        None => (cookies, Redirect::to(next)).into_response(),
    })
}

/// Offers to send a form again that was sent after its session had ended.
fn resume(
    admin: &Admin,
    headers: &HeaderMap,
    id: &str,
    next: &str,
    kept: &KeptForm,
) -> Result<Response, ErrorPage> {
    render(&ResumePage {
        assets: assets::version(),
        theme: THEME.of(headers).map_or(Theme::System, Theme::from),
        region: admin.control.region().apex(),
        form_token: session::form_token(id),
        next,
        kept,
    })
}

/// Refuses a wrong token, and counts the attempt.
fn wrong_token(
    admin: &Admin,
    headers: &HeaderMap,
    next: &str,
    kept: Option<&KeptForm>,
    client: IpAddr,
    now: Instant,
) -> Result<Response, ErrorPage> {
    if let Err(exhausted) = admin.console.failures().take(client, now) {
        let seconds = exhausted.until_one.as_secs() + 1;
        let message =
            format!("Too many failed attempts from your address. Try again in {seconds} seconds.");
        let again = refused(admin, headers, next, kept, &message)?;
        let retry = [(header::RETRY_AFTER, seconds)];
        return Ok((StatusCode::TOO_MANY_REQUESTS, retry, again).into_response());
    }
    tracing::warn!(%client, "console: wrong admin token");
    let message = "This is not the admin token of this gateway.";
    let again = refused(admin, headers, next, kept, message)?;
    Ok((StatusCode::UNAUTHORIZED, again).into_response())
}

/// Gives the browser its session under the name of the session.
pub(crate) async fn finish(
    State(admin): State<Admin>,
    headers: HeaderMap,
    uri: Uri,
) -> Result<Response, ErrorPage> {
    let query = Form::parse(uri.query().unwrap_or_default().as_bytes());
    let next = address::checked(query.value("next"));
    let host = guard::text(&headers, &header::HOST);
    let Some(Arrival {
        session: id,
        theme,
        kept,
    }) = admin
        .console
        .moves
        .end(query.value("code"), host, Instant::now())
    else {
        return Ok(Redirect::to(&address::of_sign_in(next, false)).into_response());
    };
    let cookies = AppendHeaders([
        (
            header::SET_COOKIE,
            SESSION.set(&headers, id.reveal(), LIFETIME),
        ),
        (header::SET_COOKIE, theme.cookie(&headers)),
    ]);
    Ok(match kept {
        Some(kept) => {
            (cookies, resume(&admin, &headers, id.reveal(), next, &kept)?).into_response()
        }
        None => (cookies, Redirect::to(next)).into_response(),
    })
}

pub(crate) async fn sign_out(State(admin): State<Admin>, headers: HeaderMap) -> Response {
    if let Some(id) = SESSION.of(&headers) {
        admin.end_session(id).await;
    }
    let cookie = SESSION.set(&headers, "", Duration::ZERO);
    ([(header::SET_COOKIE, cookie)], Redirect::to("/sign-in")).into_response()
}
