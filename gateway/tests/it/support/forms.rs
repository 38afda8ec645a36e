//! Forms of pages, filled in and sent as a browser does. A field that the page lacks fails the
//! test by its name.

use scraper::{ElementRef, Html, Selector};

/// A form of a page, with the fields that a browser would send.
pub(crate) struct PageForm {
    /// Address that it is sent to.
    pub(crate) action: String,
    pub(crate) is_post: bool,
    controls: Vec<Control>,
    /// Button with a value that is pressed.
    pressed: Option<(String, String)>,
    buttons: Vec<(String, String)>,
}

/// A field. Boxes of one name are a control each.
struct Control {
    name: String,
    value: String,
    kind: Kind,
    is_required: bool,
    /// Most characters of the value.
    length_max: Option<usize>,
}

#[derive(PartialEq)]
enum Kind {
    Hidden,
    Text,
    CheckBox { is_ticked: bool },
    Radio { is_chosen: bool },
    Select { options: Vec<String> },
}

impl Control {
    fn is_sent(&self) -> bool {
        !matches!(
            self.kind,
            Kind::CheckBox { is_ticked: false } | Kind::Radio { is_chosen: false }
        )
    }
}

/// The forms of a page, in their order.
pub(crate) fn forms(page: &str) -> Vec<PageForm> {
    let page = Html::parse_document(page);
    page.select(&selector("form")).map(form).collect()
}

/// The texts of all elements with this CSS selector.
pub(crate) fn texts(page: &str, css: &str) -> Vec<String> {
    let page = Html::parse_document(page);
    page.select(&selector(css)).map(text).collect()
}

/// The value of an attribute of all elements with this CSS selector that have it.
pub(crate) fn attributes(page: &str, css: &str, name: &str) -> Vec<String> {
    let page = Html::parse_document(page);
    let selector = selector(css);
    let values = page.select(&selector).filter_map(|it| it.attr(name));
    values.map(str::to_owned).collect()
}

fn selector(css: &str) -> Selector {
    Selector::parse(css).unwrap_or_else(|error| panic!("{css}: {error}"))
}

fn text(element: ElementRef<'_>) -> String {
    element.text().collect()
}

fn form(form: ElementRef<'_>) -> PageForm {
    let attribute = |name| form.attr(name).unwrap_or_default();
    let selector = selector("input, select, textarea, button");
    let is_button = |field: &ElementRef<'_>| field.value().name() == "button";
    let (buttons, fields): (Vec<_>, Vec<_>) = form.select(&selector).partition(is_button);
    let named = buttons.iter().filter_map(|button| {
        Some((
            button.attr("name")?.to_owned(),
            button.attr("value")?.to_owned(),
        ))
    });
    PageForm {
        action: attribute("action").to_owned(),
        is_post: attribute("method") == "post",
        controls: fields.into_iter().map(control).collect(),
        pressed: None,
        buttons: named.collect(),
    }
}

fn control(field: ElementRef<'_>) -> Control {
    let attribute = |name| field.attr(name).unwrap_or_default();
    let has = |name| field.attr(name).is_some();
    let mut value = attribute("value").to_owned();
    let kind = match (field.value().name(), attribute("type")) {
        // The parser has removed the line end that follows the tag.
        ("textarea", _) => {
            value = text(field);
            Kind::Text
        }
        ("select", _) => {
            let options: Vec<_> = field.select(&selector("option")).collect();
            let chosen = options
                .iter()
                .find(|option| option.attr("selected").is_some());
            let of = |option: &ElementRef<'_>| option.attr("value").unwrap_or_default().to_owned();
            value = chosen.or(options.first()).map(of).unwrap_or_default();
            Kind::Select {
                options: options.iter().map(of).collect(),
            }
        }
        (_, "hidden") => Kind::Hidden,
        (_, "checkbox") => Kind::CheckBox {
            is_ticked: has("checked"),
        },
        (_, "radio") => Kind::Radio {
            is_chosen: has("checked"),
        },
        _ => Kind::Text,
    };
    Control {
        name: attribute("name").to_owned(),
        value,
        kind,
        is_required: has("required"),
        length_max: field.attr("maxlength").map(|max| max.parse().unwrap()),
    }
}

impl PageForm {
    /// Types a text, or chooses a value of a list or of radio buttons.
    pub(crate) fn set(mut self, name: &str, value: &str) -> Self {
        self.must_have(name);
        let mut is_set = false;
        for control in self.controls.iter_mut().filter(|it| it.name == name) {
            match &mut control.kind {
                Kind::Text => {
                    value.clone_into(&mut control.value);
                    is_set = true;
                }
                Kind::Select { options } if options.iter().any(|option| option == value) => {
                    value.clone_into(&mut control.value);
                    is_set = true;
                }
                Kind::Radio { is_chosen } => {
                    *is_chosen = control.value == value;
                    is_set |= *is_chosen;
                }
                Kind::Hidden | Kind::Select { .. } | Kind::CheckBox { .. } => (),
            }
        }
        assert!(is_set, "{name} of {} cannot be {value}", self.action);
        self
    }

    /// Ticks a box. The value of a box that stands alone is `on`.
    pub(crate) fn tick(self, name: &str, value: &str) -> Self {
        self.with_box(name, value, true)
    }

    pub(crate) fn untick(self, name: &str, value: &str) -> Self {
        self.with_box(name, value, false)
    }

    fn with_box(mut self, name: &str, value: &str, ticked: bool) -> Self {
        self.must_have(name);
        let mut controls = self.controls.iter_mut();
        let found = controls.find(|it| it.name == name && it.value == value);
        let found = found.map(|control| &mut control.kind);
        let Some(Kind::CheckBox { is_ticked }) = found else {
            panic!("{name} of {} has no box {value}", self.action);
        };
        *is_ticked = ticked;
        self
    }

    /// Presses the button with this name and value, in place of the first of the form.
    pub(crate) fn press(mut self, name: &str, value: &str) -> Self {
        let button = (name.to_owned(), value.to_owned());
        let form = &self.action;
        assert!(self.buttons.contains(&button), "{form} has no {button:?}");
        self.pressed = Some(button);
        self
    }

    fn must_have(&self, name: &str) {
        let names = self.names();
        let form = &self.action;
        assert!(
            names.iter().any(|it| it == name),
            "the form {form} has no field {name}; it has {names:?}"
        );
    }

    /// Names of the fields that a user sees, each once.
    pub(crate) fn names(&self) -> Vec<String> {
        let seen = self.controls.iter().filter(|it| it.kind != Kind::Hidden);
        let mut names: Vec<String> = seen.map(|control| control.name.clone()).collect();
        names.dedup();
        names
    }

    /// The values of a field, as they would be sent.
    pub(crate) fn values(&self, name: &str) -> Vec<&str> {
        let sent = self.controls.iter().filter(|it| it.is_sent());
        sent.filter(|it| it.name == name)
            .map(|it| it.value.as_str())
            .collect()
    }

    /// Names and values that a browser sends. Line ends of texts are CRLF.
    pub(crate) fn sent(&self) -> Vec<(String, String)> {
        for control in &self.controls {
            let (name, form) = (&control.name, &self.action);
            let length = control.value.chars().count();
            let is_missing = control.is_required && length == 0;
            assert!(!is_missing, "a browser asks for {name} of {form}");
            let is_long = control.length_max.is_some_and(|max| length > max);
            assert!(!is_long, "{name} of {form} takes no text that long");
        }
        let sent = self.controls.iter().filter(|it| it.is_sent());
        let lines = |text: &str| text.replace("\r\n", "\n").replace('\n', "\r\n");
        sent.map(|it| (it.name.clone(), lines(&it.value)))
            .chain(self.pressed.clone())
            .collect()
    }
}

#[test]
fn a_form_is_read_as_a_browser_reads_it() {
    let page = "<form action='/a' method=post><input type=hidden name=t value=x>\
                <input name=id value='1&amp;2' maxlength=5 required>\
                <input type=checkbox name=m value=a checked><input type=checkbox name=m value=b>\
                <input type=radio name=r value=c><input type=radio name=r value=d checked>\
                <select name=s><option value=e>E<option value=f selected>F</select>\
                <textarea name=x>\n g\nh</textarea>\
                <button name=go value=now></button></form><form><input name=q></form>";
    let [form, other] = forms(page).try_into().ok().unwrap();
    assert!(form.is_post && !other.is_post);
    assert_eq!(form.names(), ["id", "m", "r", "s", "x"]);
    let sent = |form: &PageForm| {
        let fields = form.sent();
        let fields = fields.iter().map(|(name, value)| format!("{name}={value}"));
        fields.collect::<Vec<_>>().join(" ")
    };
    assert_eq!(sent(&form), "t=x id=1&2 m=a r=d s=f x= g\r\nh");
    let form = form.tick("m", "b").untick("m", "a").set("r", "c");
    let form = form.set("s", "e").set("x", "").press("go", "now");
    assert_eq!(sent(&form), "t=x id=1&2 m=b r=c s=e x= go=now");
    let refused = |what: Box<dyn FnOnce(PageForm) + std::panic::UnwindSafe>| {
        let page = page.to_owned();
        let attempt = move || what(forms(&page).remove(0));
        let panic = std::panic::catch_unwind(attempt).unwrap_err();
        panic.downcast_ref::<String>().cloned().unwrap()
    };
    for (error, form) in [
        (
            "the form /a has no field none; it has [\"id\", \"m\", \"r\", \"s\", \"x\"]",
            refused(Box::new(|form| drop(form.set("none", "1")))),
        ),
        (
            "m of /a has no box c",
            refused(Box::new(|form| drop(form.tick("m", "c")))),
        ),
        (
            "s of /a cannot be g",
            refused(Box::new(|form| drop(form.set("s", "g")))),
        ),
        (
            "a browser asks for id of /a",
            refused(Box::new(|form| drop(form.set("id", "").sent()))),
        ),
        (
            "id of /a takes no text that long",
            refused(Box::new(|form| drop(form.set("id", "123456").sent()))),
        ),
    ] {
        assert_eq!(form, error);
    }
}
