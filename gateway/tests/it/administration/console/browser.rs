//! A browser without scripts: cookies, forms and the fields that browsers send.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use gw_shared::net::https;
use gw_shared::net::tls::Trusted;

use crate::support::forms::{self, PageForm};
use crate::support::scene::Scene;

/// A response.
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: http::HeaderMap,
    pub(crate) text: String,
}

impl Reply {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap())
    }

    /// Value and attributes of the cookie that the response sets.
    pub(crate) fn cookie(&self, name: &str) -> Option<(String, String)> {
        let set = self
            .headers
            .get_all("set-cookie")
            .iter()
            .map(|value| value.to_str().unwrap());
        let (value, rest) = set
            .filter_map(|set| set.strip_prefix(name)?.strip_prefix('=')?.split_once("; "))
            .next()?;
        Some((value.to_owned(), rest.to_owned()))
    }

    /// Where a reply with status 303 leads to.
    #[track_caller]
    pub(crate) fn leads_to(&self) -> &str {
        assert_eq!(self.status, 303, "{}", self.text);
        self.header("location")
    }

    /// Form token of the first form of the page.
    pub(crate) fn form_token(&self) -> String {
        self.between("name=\"form_token\" value=\"", "\"")
    }

    /// The form of the page that is sent to `action`.
    pub(crate) fn form(&self, action: &str) -> PageForm {
        let mut forms = forms::forms(&self.text);
        let actions: Vec<String> = forms.iter().map(|form| form.action.clone()).collect();
        let found = actions.iter().position(|it| it == action);
        let found = found.unwrap_or_else(|| panic!("no form {action}, but {actions:?}"));
        forms.swap_remove(found)
    }

    /// The text of the only element with this CSS selector.
    pub(crate) fn text_of(&self, css: &str) -> String {
        let mut texts = forms::texts(&self.text, css);
        let found = texts.len();
        assert_eq!(found, 1, "{found} elements {css}: {}", self.text);
        texts.remove(0)
    }

    /// The error that the page shows at a field of a form that was refused.
    pub(crate) fn error(&self, field: &str) -> String {
        assert_eq!(self.status, 422, "{}", self.text);
        self.text_of(&format!("#{field}-error"))
    }

    pub(crate) fn between(&self, before: &str, after: &str) -> String {
        let (_, rest) = self
            .text
            .split_once(before)
            .unwrap_or_else(|| panic!("no {before}: {}", self.text));
        rest.split_once(after).unwrap().0.to_owned()
    }
}

/// A browser with its cookies.
pub(crate) struct Browser {
    base: String,
    /// File of the authority that it trusts.
    pub(crate) authority: Option<PathBuf>,
    pub(crate) cookies: BTreeMap<String, String>,
    /// Fields sent with each request.
    pub(crate) extra: Vec<(&'static str, String)>,
}

impl Browser {
    pub(crate) fn new(scene: &Scene) -> Self {
        Self::at(scene.about.admin_url.clone())
    }

    /// A browser for the admin listener at this URL.
    pub(crate) fn at(base: String) -> Self {
        Self {
            base,
            authority: None,
            cookies: BTreeMap::new(),
            extra: Vec::new(),
        }
    }

    /// A browser that has signed in.
    pub(crate) fn signed_in(scene: &Scene) -> Self {
        let mut browser = Self::new(scene);
        let reply = browser.sign_in(&scene.about.admin_token, "/");
        assert_eq!((reply.status, reply.header("location")), (303, "/"));
        browser
    }

    pub(crate) fn sign_in(&mut self, token: &str, next: &str) -> Reply {
        let query = form_urlencoded::Serializer::new(String::new())
            .append_pair("next", next)
            .finish();
        self.fill(&format!("/sign-in?{query}"), "/sign-in", |form| {
            form.set("token", token)
        })
    }

    pub(crate) fn get(&mut self, path: &str) -> Reply {
        self.send("GET", path, None)
    }

    pub(crate) fn post(&mut self, path: &str, fields: &[(&str, &str)]) -> Reply {
        let body = form_urlencoded::Serializer::new(String::new())
            .extend_pairs(fields)
            .finish();
        self.send("POST", path, Some(body))
    }

    /// The form of `page` that is sent to `action`.
    pub(crate) fn form(&mut self, page: &str, action: &str) -> PageForm {
        let page = self.get(page);
        assert_eq!(page.status, 200, "{}", page.text);
        page.form(action)
    }

    /// Fills in the form of `page` that is sent to `action`, and sends it.
    pub(crate) fn fill(
        &mut self,
        page: &str,
        action: &str,
        fill: impl FnOnce(PageForm) -> PageForm,
    ) -> Reply {
        let form = fill(self.form(page, action));
        self.send_form(&form)
    }

    /// Sends the form of `page` that is sent to `action` as it is.
    pub(crate) fn press(&mut self, page: &str, action: &str) -> Reply {
        self.fill(page, action, |form| form)
    }

    pub(crate) fn send_form(&mut self, form: &PageForm) -> Reply {
        let fields = form_urlencoded::Serializer::new(String::new())
            .extend_pairs(form.sent())
            .finish();
        if form.is_post {
            self.send("POST", &form.action, Some(fields))
        } else {
            self.get(&format!("{}?{fields}", form.action))
        }
    }

    pub(crate) fn send(&mut self, method: &str, path: &str, body: Option<String>) -> Reply {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .timeout_global(Some(crate::support::SOON))
            .proxy(None)
            .build();
        let trusted = match &self.authority {
            Some(file) => Trusted::read(file),
            None => Trusted::only(Vec::new()),
        };
        let agent = https::agent(config, Arc::new(trusted.unwrap()));
        let mut request = http::Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base));
        if !self.cookies.is_empty() {
            let pairs: Vec<String> = self
                .cookies
                .iter()
                .map(|(name, value)| format!("{name}={value}"))
                .collect();
            request = request.header("Cookie", pairs.join("; "));
        }
        if body.is_some() {
            request = request.header("Content-Type", "application/x-www-form-urlencoded");
        }
        for (name, value) in &self.extra {
            request = request.header(*name, value);
        }
        let mut response = match body {
            Some(body) => agent.run(request.body(body).unwrap()).unwrap(),
            None => agent.run(request.body(()).unwrap()).unwrap(),
        };
        let text = response.body_mut().read_to_string().unwrap();
        let reply = Reply {
            status: response.status().as_u16(),
            headers: response.headers().clone(),
            text,
        };
        for name in [
            "gw_session",
            "gw_sign_in",
            "gw_theme",
            "__Host-gw_session",
            "__Host-gw_sign_in",
        ] {
            if let Some((value, _)) = reply.cookie(name) {
                self.cookies.insert(name.to_owned(), value);
            }
        }
        reply
    }
}
